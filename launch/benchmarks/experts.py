"""Experts of a mixture: projected backward against the ordinary one of the same module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import DTYPES, Setting
from benchmarks.timing import column, interleave, median_of, paired_spread, timed
from hmt_deepspeed.optim.backward.experts import expert_sites, patch_experts
from hmt_deepspeed.optim.backward.projected_linear import ProjectedLinear

SUITE = "experts"
USES_ENGINE: set[str] = set()
SAVED_TARGET = 1 / 8


@dataclass(frozen=True)
class Mixture:
    """``columns``: r + k."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    columns: int
    tokens: int
    rounds: int
    speed: float | None = None

    @property
    def label(self) -> str:
        sizes = f"E={self.experts} top-{self.top_k} H={self.hidden} I={self.intermediate}"
        return f"{sizes}, {self.columns} columns, {self.tokens} tokens"


TIMED = Mixture(16, 2, 512, 1024, 80, 4096, 7, 1.25)  # r = 64 and a quarter of it
NARROW = Mixture(16, 2, 512, 1024, 512 // 12, 4096, 1)
TOY = Mixture(4, 2, 64, 32, 10, 128, 3, 1.25)
EXACT = Mixture(4, 2, 32, 24, 6, 96, 1)


class Contender:
    """Mixtral's experts with routes of their own, whose input and routing weights want gradients."""

    def __init__(self, mixture: Mixture, dtype: torch.dtype, device: str) -> None:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        config = MixtralConfig(
            hidden_size=mixture.hidden,
            intermediate_size=mixture.intermediate,
            num_local_experts=mixture.experts,
        )
        config._experts_implementation = "batched_mm" if dtype == torch.float64 else "grouped_mm"
        torch.manual_seed(0)
        self.module: Any = MixtralExperts(config).to(device, dtype)
        for weight in self.module.parameters():
            torch.nn.init.normal_(weight, std=weight.shape[2] ** -0.5)
        x = torch.randn(mixture.tokens, mixture.hidden, device=device, dtype=dtype)
        scores = torch.rand(mixture.tokens, mixture.experts, device=device, dtype=dtype)
        weights, self.index = scores.topk(mixture.top_k)
        self.x, self.weights = x.requires_grad_(), weights.requires_grad_()

    def forward(self) -> Tensor:
        y: Tensor = self.module(self.x, self.index, self.weights)
        return y

    def run(self) -> None:
        self.x.grad = self.weights.grad = None
        self.forward().square().mean().backward()
        self.module.zero_grad()


class Projected(Contender):
    """The same with both weights projected on the side of the stream (shared), or on their inputs (own)."""

    def __init__(self, mixture: Mixture, dtype: torch.dtype, device: str, own: bool) -> None:
        super().__init__(mixture, dtype, device)
        self.links: dict[str, ProjectedLinear] = {}
        sites = expert_sites(self.module)
        for name, site in sites.items():
            is_down = site.role == "down"
            link = self.links[name] = ProjectedLinear(name, transposed=is_down and not own)
            link.own = own and is_down
            weight = getattr(self.module, name)
            shape = (weight.shape[1 if link.transposed else 2], mixture.columns)
            shape = (mixture.experts, *shape) if link.own else shape
            link.projection = torch.randn(shape, device=device, dtype=dtype)
        patch_experts([(sites[name], link) for name, link in self.links.items()])

    def run(self) -> None:
        super().run()
        for link in self.links.values():
            link.take()


def projected_experts(setting: Setting) -> CaseResult:
    mixture = TOY if setting.toy else TIMED
    result = CaseResult({"mixture": asdict(mixture)})
    dtype, device = DTYPES[setting.dtype], setting.device
    contenders = {
        "ordinary": Contender(mixture, dtype, device),
        "shared": Projected(mixture, dtype, device, own=False),
        "own": Projected(mixture, dtype, device, own=True),
    }
    runs: dict[str, Callable[[], Any]] = {
        name: (lambda contender=contender: timed(contender.run))
        for name, contender in contenders.items()
    }
    label = f"{setting.dtype}, {mixture.label}"
    samples = interleave(runs, setting.rounds_or(mixture.rounds), warmup=2)
    result.samples[label] = samples
    slow = samples["ordinary"]
    for name in ("shared", "own"):
        fast, bases = samples[name], f"down projections' bases {name}"
        result.measurements.append(
            Measurement(
                f"{label}, {bases}: ordinary / projected time, forward and backward",
                median_of(slow) / median_of(fast),
                "x",
                ">=",
                mixture.speed,
                paired_spread(column(slow), column(fast)),
            )
        )
    mixture = TOY if setting.toy else NARROW
    ordinary = saved_bytes(Contender(mixture, dtype, device))
    found = saved_bytes(Projected(mixture, dtype, device, own=False))
    result.samples[label]["saved_bytes"] = [
        {"ordinary": float(ordinary), "projected": float(found)}
    ]
    result.measurements += [
        Measurement(
            f"{setting.dtype}, {mixture.label}: bytes saved beside the gate's, projected / ordinary",
            found / ordinary,
            "share",
            "<=",
            SAVED_TARGET,
        ),
        Measurement(
            "fp64: largest error of the projected gradient, relative to its largest entry",
            max(exactness_error(own) for own in (False, True)),
            "error",
            "<=",
            1e-12,
        ),
    ]
    return result


def saved_bytes(contender: Contender) -> int:
    """Bytes of the storages that autograd saves in a forward, but weights and what the gate saves by itself."""
    weights = {p.untyped_storage().data_ptr() for p in contender.module.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in weights:
            saved[address] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = contender.forward()
    total = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    del y
    rows = contender.index.numel()
    sizes = contender.module.gate_up_proj.shape[1] + contender.module.down_proj.shape[2]
    return total - rows * sizes * contender.x.element_size()


def exactness_error(own: bool) -> float:
    """Largest |projected - G_e B| over both weights in fp64, relative to the largest |G_e B|."""
    usual = Contender(EXACT, torch.float64, "cpu")
    projected = Projected(EXACT, torch.float64, "cpu", own)
    projected.module.load_state_dict(copy.deepcopy(usual.module.state_dict()))
    projected.x, projected.index, projected.weights = usual.x, usual.index, usual.weights
    usual.forward().square().mean().backward()
    projected.forward().square().mean().backward()
    worst = 0.0
    for name, link in projected.links.items():
        gradient = getattr(usual.module, name).grad
        gradient = gradient.transpose(1, 2) if link.transposed else gradient
        product, columns = link.take(), link.columns()
        assert product is not None
        expected = gradient @ columns
        worst = max(worst, float((product - expected).abs().max() / expected.abs().max()))
    return worst


CASES: dict[str, Callable[[Setting], CaseResult]] = {"projected_experts": projected_experts}
