"""What is counted: a bare optimizer or an engine in one of its modes, on a Llama or a mixture."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from recorder import DEEPSPEED, Counts, Recorder
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hmt_deepspeed.activations import record
from hmt_deepspeed.fpdt import masks
from hmt_deepspeed.memory import layout, streams
from hmt_deepspeed.optim.backward import projected_linear
from hmt_deepspeed.zero.offload import worker
from hmt_deepspeed.zero.offload.cpu_adam import CpuAdam

VOCABULARY, TOKENS = 32000, 64
LINEARS = 7  # of a layer
RANK = {"method": "lowrank_adamw", "rank": 128}

# Fields of hmt.optimizer by name of the mode.
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "right": RANK,
    "left": {**RANK, "projection": "left"},
    "auto": {**RANK, "projection": "auto"},
    "two_sided": {**RANK, "projection": "two_sided"},
    "full_residual": {**RANK, "residual": "full"},
    "no_residual": {**RANK, "residual": "none"},
    "random": {**RANK, "range_finder": "random"},
    "factored": {**RANK, "second_moment": "factored"},
    "muon": {**RANK, "method": "muon"},
    "apollo": {"method": "apollo"},
    "apollo_mini": {"method": "apollo_mini"},
    "adamw": {"method": "adamw"},
    "int8_states": {**RANK, "state_dtype": "int8"},
    "int8_factored": {**RANK, "state_dtype": "int8", "second_moment": "factored"},
    "bf16_states": {**RANK, "state_dtype": "bf16"},
    "int8_weights": {**RANK, "weight_dtype": "int8"},
    "no_masters": {**RANK, "master_weights": "none"},
    "share_basis": {**RANK, "share_basis": True},
    "own_bases": {**RANK, "expert_basis": "own"},
    "module_rules": {
        **RANK,
        "module_rules": {
            "lm_head": {"method": "apollo"},
            "o_proj": {"method": "adamw"},
            "down_proj": {"projection": "left"},
            "q_proj": {"rank": 256},
        },
    },
    "basis_cache": RANK,
    "activations": RANK,
    "fpdt": RANK,
    "offload": RANK,
    "offload_adamw": {"method": "adamw"},
}
# What an engine's JSON has besides; these modes are of engines alone.
_ON_HOST = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}}
ENGINE_JSON: dict[str, dict[str, Any]] = {
    "basis_cache": {"hmt": {"basis_cache": {}}},
    "activations": {"hmt": {"activations": {}}},
    "fpdt": {"hmt": {"fpdt": {"chunk_size": 32}}},
    "offload": _ON_HOST,
    "offload_adamw": _ON_HOST,
}


class FakeTensors(FakeTensorMode):
    """Takes numbers to the device by an operation that is seen."""

    avoid_device_init = True


@dataclass
class Step:
    """Counts of one step by phase: forward, backward, step. ``fresh``: matrices that took a new basis in it.

    renewed: numbers that the host gave the device in the phase "step" otherwise than in the ordinary one before, see
        :class:`Counts`.
    """

    fresh: int
    phases: dict[str, Counts]
    renewed: Counter[tuple[str, str, tuple[float, ...]]] = field(default_factory=Counter)

    @property
    def kind(self) -> str:
        return "refresh" if self.fresh else "ordinary"

    def compare(self, before: Step | None) -> None:
        """Find what is :attr:`renewed`. The step's number and rates are written where kernels read them, which a program
        that replays a graph does itself; DeepSpeed's numbers are its own."""
        if before is None:
            return
        renewed = self.phases["step"].numbers - before.phases["step"].numbers
        for (what, line, numbers), times in renewed.items():
            if "optim/rules/numbers.py" not in line and not line.startswith(DEEPSPEED):
                self.renewed[what, line, numbers] = times


@dataclass(frozen=True)
class Case:
    """What is counted. ``hidden``: 4096 is the 7B's, whose other widths follow. ``ranks``: of the engine."""

    subject: str
    mode: str
    layers: int
    hidden: int = 4096
    ranks: int = 1

    @property
    def experts(self) -> int:
        """Of each layer; 0 of a Llama."""
        _, _, count = self.subject.partition("mixture-")
        return int(count or 0)

    @property
    def exists(self) -> bool:
        """Some modes are of an engine alone, one of experts; INT8 weights are for stages 0 to 2."""
        if self.subject == "bare" or self.experts:
            return self.mode not in (ENGINE_JSON if self.experts else {*ENGINE_JSON, "own_bases"})
        return self.mode not in ("own_bases", *["int8_weights"] * (self.subject == "zero3"))


def model_of(case: Case) -> nn.Module:
    """bf16, on the device, in the 7B's proportions; experts have an eighth of its inner width."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    kinds = (MixtralConfig, MixtralForCausalLM) if case.experts else (LlamaConfig, LlamaForCausalLM)
    more = {"num_local_experts": case.experts, "experts_implementation": "grouped_mm"}
    config = kinds[0](
        vocab_size=VOCABULARY,
        hidden_size=case.hidden,
        intermediate_size=case.hidden * 43 // (128 if case.experts else 16),
        num_hidden_layers=case.layers,
        num_attention_heads=case.hidden // 128,
        num_key_value_heads=case.hidden // 128,
        use_cache=False,
        attn_implementation="sdpa",
        **(more if case.experts else {}),
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return kinds[1](config)
    finally:
        torch.set_default_dtype(before)


def fields_of(case: Case) -> dict[str, Any]:
    """Of hmt.optimizer: all bases in step 0, then one matrix in every second step."""
    fields = MODES[case.mode]
    if fields.get("method") == "adamw":
        return fields
    fields = {"update_interval": 2 * LINEARS * case.layers, **fields}
    from_gradients = (
        fields.get("method") in (None, "muon", "lowrank_adamw")
        and fields.get("range_finder") != "random"
    )
    return {"max_full_gradient_bytes": 2**50, **fields} if from_gradients else fields


def steps_of_optimizer(case: Case, recorder: Recorder) -> Iterator[Step]:
    """Training steps of ``HMT(model)``, one after the other, without end."""
    from hmt_deepspeed import HMT

    model = model_of(case)
    optimizer = HMT(model, lr=1e-3, weight_decay=0.01, **fields_of(case))
    rows = torch.zeros(1, TOKENS, dtype=torch.long, device="cuda")
    while True:
        before = sum(optimizer._bases.schedule.num_refreshes)
        with recorder.counting() as forward:
            loss = model(input_ids=rows, labels=rows).loss
        with recorder.counting() as backward:
            loss.backward()
        with recorder.counting() as step:
            optimizer.step()
        optimizer.zero_grad()
        fresh = sum(optimizer._bases.schedule.num_refreshes) - before
        yield Step(fresh, {"forward": forward, "backward": backward, "step": step})


def steps_of_engine(stage: int, case: Case, recorder: Recorder) -> Iterator[Step]:
    """Training steps of the engine, one after the other, without end."""
    import hmt_deepspeed

    join_ranks(case.ranks)
    model = model_of(case)
    model._apply = lambda *args, **kwargs: model  # it is where and what the engine wants
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "HMT", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage},
        "hmt": {"optimizer": fields_of(case)},
        "steps_per_print": 10**9,
    }
    for key, more in ENGINE_JSON.get(case.mode, {}).items():
        config[key] |= more
    engine, *_ = hmt_deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    rows = torch.zeros(1, TOKENS, dtype=torch.long, device="cuda")
    groups = engine.optimizer.zero.basis_groups  # whose schedule is another once bases are shared
    while True:
        before = sum(groups.schedule.num_refreshes)
        with recorder.counting() as forward:
            loss = engine(input_ids=rows, labels=rows).loss
        with recorder.counting() as backward:
            engine.backward(loss)
        with recorder.counting() as step:
            engine.step()
        fresh = sum(groups.schedule.num_refreshes) - before
        yield Step(fresh, {"forward": forward, "backward": backward, "step": step})


@cache
def join_ranks(ranks: int) -> None:
    """Rank 0 of a process group that moves nothing."""
    import deepspeed
    from deepspeed.runtime.zero import partitioned_param_coordinator
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
    os.environ.update({**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    deepspeed.init_distributed()

    def gather(objects: list[Any], own: Any, *args: Any, **kwargs: Any) -> None:
        objects[:] = [own] * ranks  # the others are alike

    distributed.all_gather_object = gather
    distributed.broadcast_object_list = lambda *args, **kwargs: None
    # compares numbers of the host with rank 0's by way of the device, in the first steps
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda ints: None


SUBJECTS: dict[str, Callable[[Case, Recorder], Iterator[Step]]] = {
    "bare": steps_of_optimizer,
    "mixture-8": steps_of_optimizer,
    "mixture-32": steps_of_optimizer,
    "zero2": partial(steps_of_engine, 2),
    "zero3": partial(steps_of_engine, 3),
    "zero3-mixture-8": partial(steps_of_engine, 3),
    "zero3-mixture-32": partial(steps_of_engine, 3),
}


class _Inline:
    """Another thread, whose work is not the training thread's: it is done at once and not counted."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def submit(self, call: Callable[..., Any], *args: Any) -> int:
        with self._recorder.counting():
            call(*args)
        return 0

    def wait(self, number: int) -> None:
        """It is done."""

    def shutdown(self) -> None:
        """All is."""


def _pass_by(mode: Any) -> None:
    """Let a dispatch mode of the package not see that a tensor that is not there is asked for its device."""
    seen = mode.__torch_dispatch__

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        return seen(self, func, types, args, kwargs)

    mode.__torch_dispatch__ = dispatch


@contextmanager
def fake_device(compiles: bool = False) -> Iterator[Recorder]:
    """In it everything is on the device that is not there, and counted."""
    # columns that backward draws anew are drawn there too
    projected_linear._disable_current_modes = nullcontext
    # tensors that are not there may be moved, and a host's kernel has nothing to compute with
    layout.type = lambda value: Tensor if isinstance(value, FakeTensor) else type(value)
    CpuAdam.__init__ = lambda self: setattr(self, "seconds", 0.0)
    CpuAdam.step_ = lambda *args, **kwargs: None
    _pass_by(record.RecordMode)
    masks._check_plain = lambda plain: None  # compares values, on the host
    with FakeTensors(allow_non_fake_inputs=True), Recorder(compiles) as recorder:
        streams.CudaStreams.pin = lambda self, memory: recorder.pin(memory)
        worker.OrderedThread = lambda name: _Inline(recorder)
        yield recorder


def measure(case: Case, recorder: Recorder, further: int = 4) -> dict[str, Step]:
    """The first step, and the last ordinary and refreshing ones of some ``further`` steps, where the mode has such. Tables
    are uploaded in the first of each kind; what is launched later has settled in the third step."""
    steps = SUBJECTS[case.subject](case, recorder)
    found = {"first": next(steps)}
    for _ in range(further):
        step = next(steps)
        step.compare(found.get("ordinary"))
        found[step.kind] = step
    steps.close()
    return found
