"""LoHan's figures (2403.06504): its server is calibrated in `lohan_server.py`, everything else here is predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hmt_deepspeed.config.components import PAPER_POLICY, Choice, Component
from hmt_deepspeed.planner.hardware import Machine
from hmt_deepspeed.planner.model.shapes import num_parameters
from hmt_deepspeed.planner.run.loads import BACKWARD_PASSES, FORWARD_PASSES
from hmt_deepspeed.planner.run.problem import Problem, RunSetup
from hmt_deepspeed.planner.solve.cost import Estimate, estimate
from hmt_deepspeed.planner.solve.plan import uniform_plan
from hmt_deepspeed.planner.solve.solve import Allowed, allowed_choices, fits
from papers.lohan import Load, Rates, SwapLayer, Sweep, sweep
from papers.lohan_server import (
    EVERYTHING_ON_SSD,
    FORWARD_SECONDS,
    SHAPES,
    ZERO_INFINITY_SSD_SECONDS,
    all_activations,
    best_estimate,
    best_plan,
    largest_batch,
    problem_of,
    server,
    shape_of,
    workload_of,
    zero_infinity_server,
)
from papers.zero_fpdt import GB, GIB, Row

__all__ = ["lohan_rows"]

_INTER_BLOCK: dict[Component, Choice] = {
    **dict.fromkeys(PAPER_POLICY, "recompute"),
    "layer_input": "swap_host",
    "residual": "swap_host",
    "layernorm": "keep",
    "lm_head": "keep",
}


def lohan_rows() -> Iterator[Row]:
    """All of them."""
    yield from _bytes_and_times()
    yield from _figure_9b()
    yield from _figure_7()
    yield from _figures_5()
    yield from _figures_6_and_8()
    yield from _figure_9a()
    yield from _figure_10()
    yield from _figure_11()


def _bytes_and_times() -> Iterator[Row]:
    source = "LoHan, section III"
    workload, machine = workload_of("13B", 32), server()
    inter_block = sum(layer.count * layer.sites[0].nbytes for layer in workload.layers)
    yield Row(source, "13B, batch 32, inter-block activations", 12.5, inter_block / GIB, "GiB")
    yield Row(source, "13B, batch 32, all activations", 212.5, all_activations(32) / GIB, "GiB")
    infinity = _infinity(32)
    full = infinity.phases[1].by_resource["gpu"]
    yield Row(source, "backward with ZeRO-Infinity's recompute", 17.6, full, "s")
    ours = problem_of("13B", 32, machine)
    plan = uniform_plan(ours.workload, machine, _INTER_BLOCK)
    early = estimate(ours, plan).phases[1].by_resource["gpu"]
    note = "our recompute stops before the down projection, whose output nothing in the layer reads"
    yield Row(source, "the same, recomputed our way", 17.6, early, "s", note)
    again = (
        sum(layer.count * layer.forward_flops for layer in workload.layers) / machine.matmul.bf16
    )
    note = "ours without recompute still reruns what is cheap"
    ratio = (full - again) / ZERO_INFINITY_SSD_SECONDS
    yield Row(source, "backward without recompute over SSD I/O", 1.91, ratio, "x", note)
    busy = sum(p.weight * p.by_resource["gpu"] for p in infinity.phases)
    note = "SSD rate from the same backward's 6.25 s for 4P bytes"
    yield Row(source, "ZeRO-Infinity, GPU busy", 0.36, busy / infinity.seconds, note=note)
    update = next(p for p in infinity.phases if p.name == "update")
    share = update.seconds / infinity.seconds
    note = "the paper: 30 to 60 % over its models; this one's is not given"
    yield Row(source, "ZeRO-Infinity, optimizer's share of a step", 0.6, share, note=note)


def _infinity(batch: int, name: str = "13B", gpus: int = 1) -> Estimate:
    """ZeRO-Infinity: inter-block activations to the host, states on SSD, one phase after another."""
    setup = replace(EVERYTHING_ON_SSD, overlap="none")
    return _deepspeed(problem_of(name, batch, zero_infinity_server(gpus), setup))


def _deepspeed(problem: Problem) -> Estimate:
    """Inter-block activations on the host and the rest computed again, the down projection too."""
    workload = problem.workload
    down = sum(
        layer.count * (layer.forward_flops - sum(site.flops for site in layer.sites))
        for layer in workload.layers
    )
    head = replace(workload.head, backward_flops=workload.head.backward_flops + down)
    problem = replace(problem, workload=replace(workload, head=head))
    return estimate(problem, uniform_plan(workload, problem.machine, _INTER_BLOCK))


def _figure_9b() -> Iterator[Row]:
    for batch, case in ((24, 1), (36, 3), (48, 3), (60, 3)):
        found = _swept(batch)
        note = (
            f"swaps {found.amounts[found.best] / GIB:.0f} GiB of {all_activations(batch) / GIB:.0f}"
        )
        yield Row("LoHan, figure 9b", f"13B, batch {batch}: case", case, found.case, note=note)


def _swept(batch: int) -> Sweep:
    """LoHan's own sweep over its layers: 34 s b h bytes in each block, and FLOPs of what makes them."""
    workload, machine = workload_of("13B", batch), server()
    layer = workload.layers[-1]
    stream = workload.tokens * workload.shape.hidden  # s b h
    flops = {site.name: site.flops for site in layer.sites}
    down = layer.forward_flops - sum(flops.values())
    block = (  # bytes of the saved tensors that an op's output is, and what makes them
        SwapLayer(2 * stream, down),  # the next block's input
        SwapLayer(6 * stream, flops["attention_qkv"]),
        SwapLayer(2 * stream, flops["attention_output"]),
        SwapLayer(3 * stream, flops["residual"]),  # with its dropout mask
        SwapLayer(8 * stream, flops["mlp_intermediate"]),
        SwapLayer(13 * stream, 0.0),  # norms, GELU, the last mask: nearly free to make
    )
    rates = Rates(
        # as LoHan has it, everything in one rate
        gpu=workload_of("13B", 32).forward_flops / FORWARD_SECONDS,
        link=machine.device_to_host,
        ssd_read=machine.total_ssd_read,
        ssd_write=machine.total_ssd_write,
        adam=machine.cpu_adam_ns * 1e-9,
    )
    room = machine.host_memory - 3 * 14 * layer.parameters
    load = Load(workload.parameters, workload.forward_flops, room)
    inter_block = 2 * stream * workload.shape.layers
    return sweep(block * workload.shape.layers, inter_block, load, rates)


def _figure_7() -> Iterator[Row]:
    source = "LoHan, figure 7"
    best = best_estimate(problem_of("13B", 64, server()))
    serial = best_estimate(
        problem_of("13B", 64, server(), replace(EVERYTHING_ON_SSD, overlap="none"))
    )
    quantity = "13B, batch 64: optimised over ZeRO-style offload"
    yield Row(source, quantity, 1.33, serial.seconds / best.seconds, "x")
    naive = best_estimate(
        problem_of("13B", 64, server(), replace(EVERYTHING_ON_SSD, schedule="naive"))
    )
    backward = best.phases[-1].seconds
    implied = backward + 0.22 * best.seconds
    adam = (implied - best.phases[-1].by_resource["ssd_reading"]) / num_parameters(shape_of("13B"))
    note = (
        f"read, update and write in turn fit into the GPU's {backward:.0f} s at 0.26 ns per parameter of CPU "
        f"Adam; 1.22 needs {implied:.0f} s, which is an Adam of {adam * 1e9:.1f} ns (see figure 5a)"
    )
    quantity = "13B, batch 64: optimised over naive offload"
    yield Row(source, quantity, 1.22, naive.seconds / best.seconds, "x", note)


def _figures_5() -> Iterator[Row]:
    ours, theirs = best_estimate(problem_of("13B", 32, server())), _infinity(32)
    note = "at batch 32 both; the paper compares the best of each"
    ratio = theirs.seconds / ours.seconds
    yield Row("LoHan, figure 5a", "13B: LoHan over ZeRO-Infinity", 3.46, ratio, "x", note)
    in_ram = RunSetup(zero_stage=3, offload_param="cpu", offload_optimizer="cpu", overlap="none")
    theirs = _deepspeed(problem_of("13B", 32, server(), in_ram))
    update = next(p for p in theirs.phases if p.name == "update").seconds
    adam = (2.32 * ours.seconds - theirs.seconds + update) / num_parameters(shape_of("13B"))
    note = f"at batch 32 both; 2.32 needs a CPU Adam of {adam * 1e9:.1f} ns per parameter, ours is 0.26"
    ratio = theirs.seconds / ours.seconds
    yield Row("LoHan, figure 5a", "13B: LoHan over ZeRO-Offload", 2.32, ratio, "x", note)
    for name, paper in (("6B", 0.925), ("13B", 0.925), ("30B", 0.925), ("175B", 0.53)):
        batch = largest_batch(name, server())
        found = best_estimate(problem_of(name, batch, server()))
        # of both the pairs of tokens that attention's mask leaves
        done = 3 * workload_of(name, batch).forward_flops
        reached = done / found.seconds / _block_rate(name, batch)
        note = f"batch {batch}, bound by {found.bottleneck}" + (
            "" if name == "175B" else "; the paper: 90 to 95 %"
        )
        yield Row(
            "LoHan, figure 5c", f"{name}: part of the peak measured", paper, reached, note=note
        )


def _block_rate(name: str, batch: int) -> float:
    """FLOP/s of the model where nothing is offloaded or recomputed: the peak that the paper measures."""
    workload, machine = workload_of(name, batch), server()
    layer = workload.layers[-1]
    passes = FORWARD_PASSES + BACKWARD_PASSES - 2  # nothing is run again
    seconds = (layer.forward_flops + layer.backward_flops) / machine.matmul.bf16
    seconds += passes * layer.saved_bytes / machine.gpu_bandwidth
    return 3 * layer.forward_flops / seconds


def _figures_6_and_8() -> Iterator[Row]:
    source = "LoHan, figure 6"
    for name, gpu, host, paper in (
        ("276B", "rtx4090", 768, True),
        ("412B", "rtx4090", 768, False),
        ("175B", "rtx4090", 256, True),
        ("175B", "rtx4080", 256, True),
        ("276B", "rtx4080", 256, False),
    ):
        trains = largest_batch(name, server(host_gib=host, gpu=gpu), most=1) == 1
        quantity = f"{name} {'trains' if paper else 'does not train'} on {gpu} with {host} GB"
        yield Row(source, quantity, True, trains == paper)
    # 6 bytes per parameter in host memory: fp16 weights and fp32 gradients, as 1.1 TB for 175B says
    largest = [n for n in SHAPES if 6 * num_parameters(shape_of(n)) <= 768 * GIB]
    note = "from 6 bytes per parameter in host memory, which the paper's 1.1 TB for 175B implies"
    sizes = {name: num_parameters(shape_of(name)) / GB for name in SHAPES}
    yield Row(
        source,
        "ZeRO-Infinity's largest with 768 GB",
        135.0,
        max(sizes[n] for n in largest),
        "B",
        note,
    )

    host_only = {c: tuple(x for x in given if x != "swap_ssd") for c, given in _allowed().items()}
    source = "LoHan, figure 8"
    for host, batch in ((128, 32), (256, 60)):
        both = [_largest_model(host, batch, allowed) for allowed in (_allowed(), host_only)]
        ratio = sizes[both[0]] / sizes[both[1]] if all(both) else float("inf")
        note = f"{both[0]} against {both[1] or 'none'}"
        if host == 128:
            quantity = "128 GB, batch 32: with SSD 2 to 5 times the model without"
            note += (
                "; computed again, all but the layers' inputs (43 GB for 70B) leaves room in 128 GB"
            )
            yield Row(source, quantity, True, 2 <= ratio <= 5, note=note)
        else:
            quantity = "256 GB, batch 60: the same largest model with and without SSD"
            yield Row(source, quantity, True, both[0] == both[1], note=note)


def _allowed() -> Allowed:
    """What LoHan may do with an activation: compute it again or swap it."""
    given = allowed_choices(server())
    return {c: tuple(x for x in choices if x != "keep") or choices for c, choices in given.items()}


def _largest_model(host_gib: int, batch: int, allowed: Allowed) -> str:
    machine = server(host_gib=host_gib)
    fitting = [n for n in SHAPES if fits(problem_of(n, batch, machine), allowed)]
    return fitting[-1] if fitting else ""


# How other systems would treat activations, on LoHan's handling of states (figure 9a).
def _policies() -> Mapping[str, Allowed]:
    exact = allowed_choices(server())

    def only(*choices: Choice) -> Allowed:
        return {
            c: tuple(x for x in given if x in choices) or given[:1] for c, given in exact.items()
        }

    return {
        "LoHan": only("recompute", "swap_host", "swap_ssd"),
        "ZeRO": {c: (choice,) for c, choice in _INTER_BLOCK.items()},
        "Capuchin": only("keep", "recompute", "swap_host"),
        "G10": only("keep", "swap_ssd"),
        "Checkmate": only("recompute", "swap_host"),
    }


def _figure_9a() -> Iterator[Row]:
    """70B under host memory of 128, 256 and 512 GB; plans of the others do not see the states' traffic."""
    source = "LoHan, figure 9a"
    speed: dict[tuple[str, int], float] = {}
    for name, allowed in _policies().items():
        for host in (128, 256, 512):
            machine = server(host_gib=host)
            batch = largest_batch("70B", machine, allowed, most=32)
            speed[name, host] = (
                _others_speed("70B", batch, machine, allowed, name) if batch else 0.0
            )
    for name in ("ZeRO", "Capuchin", "Checkmate"):
        quantity = f"70B: {name} is slower with 128 than with 512 GB"
        note = f"{speed[name, 128]:.0f} against {speed[name, 512]:.0f} tokens/s"
        yield Row(source, quantity, True, speed[name, 128] < speed[name, 512], note=note)
    steady = speed["LoHan", 128] / speed["LoHan", 512]
    yield Row(source, "70B: LoHan with 128 over 512 GB", 1.0, steady, note="the paper: stable")
    best = max(_policies(), key=lambda name: speed[name, 512])
    table = ", ".join(f"{name} {speed[name, 512]:.0f}" for name in _policies())
    fastest = speed["LoHan", 512] >= speed[best, 512] * (1 - 1e-3)
    yield Row(
        source, "70B, 512 GB: none is faster than LoHan", True, fastest, note=f"{table} tokens/s"
    )


def _others_speed(name: str, batch: int, machine: Machine, allowed: Allowed, policy: str) -> float:
    problem = problem_of(name, batch, machine)
    if policy in ("Capuchin", "Checkmate"):  # planned as if SSDs and CPU cost nothing
        blind = replace(
            machine,
            ssd_array_limit=None,
            ssd_read=1e15,
            ssd_write=1e15,
            ssd_mixed=2e15,
            cpu_adam_ns=1e-9,
        )
        plan = best_plan(replace(problem, machine=blind), allowed)
    else:
        plan = best_plan(problem, allowed)
    assert plan is not None
    return estimate(problem, plan).tokens_per_second


def _figure_10() -> Iterator[Row]:
    source = "LoHan, figure 10"
    batch = largest_batch("135B", server())
    speed = {
        n: best_estimate(problem_of("135B", batch, server(n))).tokens_per_second
        for n in (1, 3, 6, 12)
    }
    note = f"batch {batch}"
    yield Row(source, "135B: 3 SSDs over 1", 3.0, speed[3] / speed[1], "x", note)
    yield Row(
        source,
        "135B: small gain from 6 to 12 SSDs",
        True,
        speed[12] / speed[6] < 1.25,
        note=f"{speed[12] / speed[6]:.2f} x",
    )
    # 135 TFLOPS of the 155.8 that the paper reaches at best
    wanted = 135 / 155.8 * best_estimate(problem_of("13B", 64, server())).tokens_per_second
    for size, paper in ((32, 12), (48, 6), (64, 3)):
        reached = {
            n: best_estimate(problem_of("13B", size, server(n))).tokens_per_second
            for n in (1, 2, 3, 6, 12)
        }
        enough = min((n for n, tokens in reached.items() if tokens >= wanted), default=0)
        note = f"the fewest of 1, 2, 3, 6, 12 that reach 135 / 155.8 of the best; twelve reach {reached[12] / wanted * 0.8665:.2f}"
        yield Row(
            source,
            f"13B, batch {size}: SSDs needed for 135 TFLOPS",
            float(paper),
            float(enough),
            note=note,
        )


def _figure_11() -> Iterator[Row]:
    machine = server(gpus=4)
    for name, paper in (("13B", 2.21), ("70B", 1.69)):
        batch = largest_batch(name, machine, most=32)
        ours = best_estimate(problem_of(name, batch, machine))
        theirs = _infinity(batch, name, gpus=4)
        note = f"batch {batch} per GPU for both; the paper's global batches are not in our text"
        yield Row(
            "LoHan, figure 11",
            f"{name}, four GPUs: over ZeRO-Infinity",
            paper,
            theirs.seconds / ours.seconds,
            "x",
            note,
        )
