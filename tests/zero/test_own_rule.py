"""A rule from outside the package, in this one file: it trains, checkpoints, is in the start table and is planned.

It is no variant of Adam: one momentum of the projected gradient, which a matrix of sums over all rows normalises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from harness import Ranks
from modes import mode_engine, trained
from torch import Tensor, nn
from training import PAPERS_RULE, assert_same_run, tiny_llama

from hmt_deepspeed import HMT
from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.kernels.noise import Stream
from hmt_deepspeed.optim.rules.change import Change
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix
from hmt_deepspeed.optim.rules.projected_stack import ProjectedStack
from hmt_deepspeed.optim.rules.stack import Stack
from hmt_deepspeed.optim.rules.state import KeptStates, StateTensor, restored_state
from hmt_deepspeed.planner.command import main
from hmt_deepspeed.planner.model.families import shape_of_config
from hmt_deepspeed.planner.run.memory import OptimizerMode, Sharding, model_states
from hmt_deepspeed.rules import RULES, Rule, State, Sum, methods, register_rule
from hmt_deepspeed.zero.optimizer.start_table import start_rows

# -- the rule -----------------------------------------------------------------------------------------

TOY = Rule(
    name="toy",
    method="toy",
    text="momentum of the projected gradient over the square root of its Gram matrix's trace",
    carried_out_by=f"{__name__}:ToyMatrix",
    gradient="projected",
    bases="found",
    states=(State("momentum", ("rows", "rank")),),
    sums=(Sum("inside"), Sum("outside"), Sum("gram", ("rank", "rank"), of="states")),
    note="one momentum",
    reads=frozenset(
        {
            "projection",
            "rank",
            "rank_candidates",
            "energy_threshold",
            "energy_estimate",
            "rank_budget",
            "update_interval",
            "range_finder",
            "max_full_gradient_bytes",
            "probes",
            "scale",
            "target_modules",
        }
    ),
    usual_lr=0.02,
)


class Momentum(KeptStates):
    """``M <- beta M + (1 - beta) A``, rows x r."""

    STATES: ClassVar[Mapping[str, str]] = {"momentum": "momentum"}

    def __init__(self, momentum: StateTensor) -> None:
        super().__init__(momentum.data.device, [], 0)
        self.momentum = momentum

    @property
    def nbytes(self) -> int:
        return self.momentum.nbytes

    def rotate(self, overlap: Tensor) -> None:
        old = self.momentum
        moved = old.read() @ overlap
        self.momentum = restored_state(moved, old.dtype, True, moved.device)

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.momentum.read(), "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        old = self.momentum
        self.momentum = restored_state(state["momentum"], old.dtype, True, old.data.device)
        self.steps = int(state["steps"])


class ToyStack(ProjectedStack):
    """``W <- (1 - lr wd) W - lr M / sqrt(tr M^T M) Q^T`` of matrices alike."""

    def once(self, step: Tensor) -> dict[str, Tensor]:
        return {"keys": self.keys(step, Stream.FIRST_STATE)}

    def advance_part(self, gradient: Tensor, counted: slice) -> tuple[Tensor, Tensor]:
        each, state = self.factor.view(-1, 1, 1), self.state("momentum")
        inside = torch.where(each != 0, gradient[..., : self.rank] * each, 0.0)
        momentum = state.read()
        momentum.lerp_(inside, (each != 0) * (1 - self.betas[0]))
        if momentum is not state.data:
            state.write_some(momentum, lambda: self.shared("keys"), self.factor)
        update = torch.zeros_like(gradient, dtype=torch.float32)
        update[..., : self.rank] = momentum
        held = momentum[:, counted]
        return update, (held.transpose(1, 2) @ held).flatten(1)

    def finish(
        self, parts: Sequence[Stack], updates: Sequence[Tensor], sums: Tensor
    ) -> list[Change]:
        gram = self.named(sums, "states")["gram"].unflatten(1, (self.rank, self.rank))
        trace = gram.diagonal(dim1=1, dim2=2).sum(dim=1)
        scale = (self.factor != 0) * self.first.scale / trace.sqrt().clamp_min(1e-12)
        both = torch.stack((scale, scale), dim=1).split([part.size for part in parts])
        return [Change(update, own) for update, own in zip(updates, both, strict=True)]


class ToyMatrix(ProjectedMatrix):
    """States of one matrix."""

    STACK = ToyStack
    moments: Momentum

    def _new_states(self) -> Momentum:
        shape = (self.num_rows, self.rank)
        return Momentum(StateTensor(shape, self.state_dtype, True, self.device))

    @property
    def scale(self) -> float:
        return self.settings.rule.scale if self.settings.scale is None else self.settings.scale


# -- what is asked of it ------------------------------------------------------------------------------

OPTIONS = {
    **PAPERS_RULE,
    "method": "toy",
    "rank_candidates": [4, 8],
    "energy_threshold": 0.6,
    "update_interval": 3,
    "max_full_gradient_bytes": 60_000,
}
LAYOUTS = {1: [(0, 1), (3, 2)], 2: [(0, 1), (1, 1), (2, 2), (3, 1)]}
SAVED, AFTER = 4, 4  # steps


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register_rule(TOY)
    yield
    del RULES["toy"]


def runs(world: int, folder: str) -> dict[tuple[int, int], Any]:
    """At every stage: what it was when saved, and at the end; the start table of stage 2."""
    register_rule(TOY)
    found: dict[Any, Any] = {}
    for stage, gas in LAYOUTS[world]:
        engine = mode_engine(OPTIONS, stage, gas, model=tiny_llama(layers=1, seed=7))
        held = trained(engine, SAVED)
        if folder:
            engine.save_checkpoint(f"{folder}/{stage}")
        found[stage, gas] = held, trained(engine, AFTER, first=SAVED)
        found["table", stage] = engine.optimizer.describe(), start_rows(engine.optimizer.zero)
        engine.destroy()
    return found


def resumed(folder: str, saved: int, stage: int, gas: int) -> tuple[Any, Any]:
    register_rule(TOY)
    engine = mode_engine(OPTIONS, stage, gas, model=tiny_llama(layers=1, seed=9))
    engine.load_checkpoint(f"{folder}/{saved}")
    found = trained(engine, 0), trained(engine, AFTER, first=SAVED)
    engine.destroy()
    return found


def said_by_another_rule(folder: str) -> str:
    register_rule(TOY)
    engine = mode_engine({"update_interval": 3}, 2, model=tiny_llama(layers=1))
    try:
        engine.load_checkpoint(f"{folder}/3")
    except ValueError as error:
        return str(error)
    finally:
        engine.destroy()
    return "accepted"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    return str(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def on_two(ranks: Ranks, folder: str) -> Any:
    return ranks.run(runs, 2, 2, folder)[0]


def joined(held: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return after | {key: held[key] + after[key] for key in ("losses", "norms")}


def test_it_trains_alike_under_every_stage(ranks: Ranks, on_two: Any) -> None:
    on_one = ranks.run(runs, 1, 1, "")[0]
    reference = joined(*on_one[0, 1])
    assert reference["losses"][-1] < reference["losses"][0]
    assert min(reference["refreshes"]) >= 2
    for found, world in ((on_one, 1), (on_two, 2)):
        for layout in LAYOUTS[world]:
            assert_same_run(joined(*found[layout]), reference)


@pytest.mark.parametrize("saved", [0, 3])
def test_a_checkpoint_resumes_bit_for_bit(
    ranks: Ranks, on_two: Any, folder: str, saved: int
) -> None:
    gas = dict(LAYOUTS[2])[saved]
    held, after = ranks.run(resumed, 2, folder, saved, saved, gas)[0]
    for found, expected in ((held, on_two[saved, gas][0]), (after, on_two[saved, gas][1])):
        assert found["ranks"] == expected["ranks"]
        for kind in ("weights", "bases"):
            for name, value in expected[kind].items():
                assert torch.equal(found[kind][name], value), (kind, name)
    assert after["losses"] == on_two[saved, gas][1]["losses"]


def test_another_layout_continues_the_same_mathematics(
    ranks: Ranks, on_two: Any, folder: str
) -> None:
    _, after = ranks.run(resumed, 1, folder, 3, 1, 1)[0]
    assert_same_run(after, on_two[3, 1][1])


def test_its_states_are_no_other_rules(ranks: Ranks, on_two: Any, folder: str) -> None:
    said = ranks.run(said_by_another_rule, 2, folder)[0]
    assert "toy right, one momentum, now lowrank_adamw right" in said


def test_the_start_table_names_it(on_two: Any) -> None:
    text, rows = on_two["table", 3]
    assert "toy;" in text
    assert "projection right" in text
    assert "fp32 states, one momentum" in text
    assert sum(row.num_tensors for row in rows if row.treatment[0] == "toy") == 7


def test_the_plan_counts_the_bytes_that_the_optimizer_holds() -> None:
    model = tiny_llama(layers=1).to(torch.bfloat16)
    optimizer = HMT(model, method="toy", rank=8, state_dtype="bf16")
    held = sum(row.state_bytes for row in optimizer.describe())
    mode = OptimizerMode(method="toy", rank=8, state_dtype="bf16")
    assert model_states(shape_of_config(model.config), mode).optimizer == held
    shared = model_states(shape_of_config(model.config), mode, Sharding(2, 2))
    assert shared.moments < model_states(shape_of_config(model.config), mode).moments


def test_the_json_and_hmt_plan_know_it(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert methods()[-1] == "toy"
    written = tmp_path / "ds.json"
    asked = ["--model", "tiny", "--machine", "rtx4090", "--seq_length", "512", "--method", "toy"]
    main([*asked, "--num_ssds", "0", "--write", str(written)])
    assert "toy r=128" in capsys.readouterr().out
    config = json.loads(written.read_text())
    assert config["optimizer"]["params"]["lr"] == TOY.usual_lr
    assert HMTConfig.from_block(config["hmt"]).optimizer.method == "toy"
    with pytest.raises(ValueError, match='"adamw" or "toy"'):
        HMTConfig.from_block({"optimizer": {"method": "galore"}})
    with pytest.raises(SystemExit):
        main([*asked[:-1], "galore"])


@pytest.mark.parametrize(
    ("fields", "key", "said"),
    [
        ({"residual": "full"}, "residual", 'means nothing with "method": "toy"'),
        ({"projection": "two_sided"}, "projection", '"toy" has no rule for it'),
        ({"rank": 4, "energy_threshold": 0.5}, "energy_threshold", 'With "rank": 4 it is ignored'),
    ],
)
@pytest.mark.parametrize("in_a_rule", [False, True])
def test_what_it_cannot_honour_is_refused(
    fields: dict[str, Any], key: str, said: str, in_a_rule: bool
) -> None:
    block: dict[str, Any] = {"method": "toy", **fields}
    if in_a_rule:
        block = {"module_rules": {"q_proj": block}}
        key = f"module_rules['q_proj'].{key}"
    with pytest.raises(ValueError, match=re.escape(f"hmt.optimizer.{key}: ")) as refused:
        HMTConfig.from_block({"optimizer": block})
    assert said in str(refused.value)


def test_a_module_rule_takes_over_what_it_reads_only() -> None:
    own = {"module_rules": {"q_proj": {"method": "toy"}}}
    HMTConfig.from_block({"optimizer": {"residual": "full", **own}})
    with pytest.raises(ValueError, match=r"\['q_proj'\]\.method: .*\"toy\" has no rule for it"):
        HMTConfig.from_block({"optimizer": {"projection": "two_sided", **own}})


def test_without_deepspeed_it_trains_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 24))
    optimizer = HMT(model, lr=0.3, method="toy", rank=4, update_interval=4)
    x = torch.randn(64, 24)
    losses = []
    for _ in range(12):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="is in the table"):
        register_rule(TOY)
