"""From an entry of the table to a model and an optimizer that can train it.

Embeddings, head and norms are on AdamW, but for presets that say otherwise, and under adapters, where they are
frozen. Weight decay, betas, eps and clipping are the same for all. One learning rate serves all
parameters, as in the papers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comparison import adapters
from comparison.activations import Backend
from comparison.fira import Fira
from comparison.variants import VARIANTS, Variant, resolve
from hmt_deepspeed import HMT
from hmt_deepspeed.config import HMTConfig


class Unavailable(RuntimeError):
    """This machine cannot run the variant; the text says why."""


@dataclass(frozen=True)
class Hyper:
    """What all variants share, and the seed of an optimizer's own draws."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    seed: int = 0

    def adamw(self) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "betas": self.betas,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }


@dataclass(frozen=True)
class Contender:
    """A model, its optimizer, and the names of the linear weights that low-rank methods take over.

    activations: None where autograd saves them as ever.
    """

    model: nn.Module
    optimizer: Optimizer
    matrices: tuple[str, ...]
    activations: Backend | None = None

    def begin_step(self, step: int) -> None:
        """The coming forward is of `step`, from 0."""
        if self.activations is not None:
            self.activations.step = step

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients to a norm of at most `max_norm`; HMT knows those not in `p.grad`."""
        if isinstance(self.optimizer, HMT):
            return self.optimizer.clip_grad_norm_(max_norm)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return nn.utils.clip_grad_norm_(trained, max_norm)

    def set_learning_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def close(self) -> None:
        if self.activations is not None:
            self.activations.close()
        if isinstance(self.optimizer, HMT):
            self.optimizer.close()


def matrix_names(model: nn.Module) -> tuple[str, ...]:
    """Weights of the linears and experts inside the decoder: all but embeddings, head, routers and norms."""
    linears = [
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "lm_head" not in name
    ]
    return (*linears, *expert_names(model))


def expert_names(model: nn.Module) -> list[str]:
    """Weights of experts: all of a layer's are one tensor."""
    return [name for name, param in model.named_parameters() if param.dim() == 3]


def build(name: str, model: nn.Module, hidden: int, hyper: Hyper) -> Contender:
    """The contender of a variant around `model`.

    Raises:
        ValueError: an option that the variant's kind does not have or a value that is refused.
        Unavailable: this machine cannot run it.
    """
    variant: Variant = VARIANTS[name]
    matrices = matrix_names(model)
    options = resolve(variant.options, hidden)
    builder, legal = BUILDERS[variant.kind]
    unknown = sorted(set(options) - set(legal))
    if unknown:
        raise ValueError(
            f"variant {name!r}: unknown option {', '.join(unknown)}; "
            f"legal for {variant.kind}: {', '.join(legal) or 'none'}"
        )
    try:
        made, optimizer = builder(model, matrices, options, hyper)
    except ModuleNotFoundError as error:
        # bitsandbytes is not in the extra: it is of use with CUDA only
        wanted = error.name if error.name == "bitsandbytes" else "'hmt_deepspeed[compare]'"
        raise Unavailable(f"{error.name} is not installed: pip install {wanted}") from error
    except adapters.Missing as error:
        raise Unavailable(str(error)) from error
    block = options if variant.kind == "hmt" else {}
    backend = Backend(made, block) if HMTConfig.from_block(block).gives("activations") else None
    return Contender(made, optimizer, matrices, backend)


Built = tuple[nn.Module, Optimizer]
Builder = Callable[[nn.Module, tuple[str, ...], Mapping[str, Any], Hyper], Built]


def _groups(
    model: nn.Module, matrices: Iterable[str], low_rank: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Two groups: everything dense, and the matrices with what the method wants to know."""
    wanted = set(matrices)
    named = list(model.named_parameters())
    dense = [p for name, p in named if name not in wanted]
    return [{"params": dense}, {"params": [p for n, p in named if n in wanted], **low_rank}]


def _adamw(
    model: nn.Module, matrices: tuple[str, ...], options: Mapping[str, Any], hyper: Hyper
) -> Built:
    return model, torch.optim.AdamW(model.parameters(), fused=True, **hyper.adamw())


def _galore(
    model: nn.Module, matrices: tuple[str, ...], options: Mapping[str, Any], hyper: Hyper
) -> Built:
    from galore_torch.adamw import AdamW as GaLoreAdamW

    groups = _groups(model, matrices, options)
    return model, GaLoreAdamW(groups, no_deprecation_warning=True, **hyper.adamw())


def _apollo(
    model: nn.Module, matrices: tuple[str, ...], options: Mapping[str, Any], hyper: Hyper
) -> Built:
    from apollo_torch.apollo import AdamW as APOLLOAdamW

    return model, APOLLOAdamW(_groups(model, matrices, options), **hyper.adamw())


def _fira(
    model: nn.Module, matrices: tuple[str, ...], options: Mapping[str, Any], hyper: Hyper
) -> Built:
    return model, Fira(_groups(model, matrices, options), **hyper.adamw())


def _hmt(model: nn.Module, _: tuple[str, ...], block: Mapping[str, Any], hyper: Hyper) -> Built:
    fields = HMTConfig.from_block(dict(block)).optimizer.model_dump(exclude_unset=True)
    return model, HMT(model, **{"seed": hyper.seed, **fields, **hyper.adamw()})


def _adapter(quantized: bool) -> Builder:
    def make(
        model: nn.Module, matrices: tuple[str, ...], options: Mapping[str, Any], hyper: Hyper
    ) -> Built:
        adapted = adapters.add_adapters(model, matrices, quantized=quantized, **options)
        trained = [p for p in adapted.parameters() if p.requires_grad]
        return adapted, torch.optim.AdamW(trained, fused=True, **hyper.adamw())

    return make


_PROJECTION = ("rank", "update_proj_gap", "scale", "proj_type")

# kind -> who builds it, and the options it may be given.
BUILDERS: dict[str, tuple[Builder, tuple[str, ...]]] = {
    "adamw": (_adamw, ()),
    "galore": (_galore, _PROJECTION),
    "apollo": (_apollo, (*_PROJECTION, "proj", "scale_type")),
    "fira": (_fira, ("rank", "update_proj_gap", "scale", "norm_growth_limit")),
    "hmt": (_hmt, tuple(HMTConfig.model_fields)),
    "lora": (_adapter(quantized=False), ("rank", "alpha")),
    "qlora": (_adapter(quantized=True), ("rank", "alpha")),
}
