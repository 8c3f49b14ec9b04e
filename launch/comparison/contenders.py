"""From an entry of the table to a model and an optimizer that can train it.

Embeddings, head and norms are on AdamW, but for presets and peers that say otherwise, and under adapters, where they
are frozen. Weight decay and clipping are the same for all, betas and eps but for peers that publish others. One
learning rate serves all parameters, as in the papers, unless `Hyper.embedding_lr_scale` sets that of all but the
matrices apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comparison import adapters, peers
from comparison.activations import Backend
from comparison.fira import Fira
from comparison.variants import VARIANTS, Variant, resolve
from hmt_deepspeed import HMT
from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.optim.settings.options import matrix_settings


class Unavailable(RuntimeError):
    """This machine cannot run the variant; the text says why."""


@dataclass(frozen=True)
class Hyper:
    """What all variants share, and the seed of an optimizer's own draws.

    embedding_lr_scale: factor on the learning rate of all but the matrices, of which a step takes what it takes of these
    by decay; None where the variant has its own.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    seed: int = 0
    embedding_lr_scale: float | None = None

    def adamw(self) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "betas": self.betas,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }

    def of_embeddings(self) -> dict[str, Any]:
        """Of the parameter group of all but the matrices, beside :meth:`adamw`."""
        scale = self.embedding_lr_scale
        if scale is None:
            return {}
        return {
            "lr": self.lr * scale,
            "weight_decay": self.weight_decay / scale,
            "lr_scale": scale,
        }


@dataclass(frozen=True)
class Contender:
    """A model, its optimizer, and the names of the linear weights that low-rank methods take over.

    activations: None where autograd saves them as ever.
    """

    model: nn.Module
    optimizer: Optimizer | peers.Together
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
            group["lr"] = lr * group.get("lr_scale", 1.0)

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
        # not in the extra: one variant each
        alone = {"bitsandbytes": "bitsandbytes", "adam_mini": "adam-mini"}
        wanted = alone.get(error.name or "", "'hmt_deepspeed[compare]'")
        raise Unavailable(f"{error.name} is not installed: pip install {wanted}") from error
    except adapters.Missing as error:
        raise Unavailable(str(error)) from error
    block = options if variant.kind == "hmt" else {}
    backend = Backend(made, block) if HMTConfig.from_block(block).gives("activations") else None
    return Contender(made, optimizer, matrices, backend)


def own_embedding_lr_scale(name: str, hidden: int) -> float | None:
    """Factor of a variant by itself on the learning rate of embeddings, head and vectors; None where they differ."""
    variant = VARIANTS[name]
    if variant.kind != "hmt":
        return 1.0
    fields = HMTConfig.from_block(resolve(variant.options, hidden)).optimizer
    if fields.target_modules == "all" or fields.module_rules:
        return None
    settings = matrix_settings(fields.model_dump())
    if settings is None:
        return 1.0
    return settings.beside_ratio if settings.beside_ratio == settings.embedding_ratio else None


Built = tuple[nn.Module, Optimizer | peers.Together]
Builder = Callable[[nn.Module, tuple[str, ...], Mapping[str, Any], Hyper], Built]


def _groups(
    model: nn.Module, matrices: Iterable[str], low_rank: Mapping[str, Any], hyper: Hyper
) -> peers.Groups:
    """Two groups: everything dense, with its rate, and the matrices with what the method wants to know."""
    wanted = set(matrices)
    named = list(model.named_parameters())
    dense = {"params": [p for name, p in named if name not in wanted], **hyper.of_embeddings()}
    return [dense, {"params": [p for n, p in named if n in wanted], **low_rank}]


def _adamw(
    model: nn.Module, matrices: tuple[str, ...], options: Mapping[str, Any], hyper: Hyper
) -> Built:
    alone = hyper.embedding_lr_scale is None
    groups = model.parameters() if alone else _groups(model, matrices, {}, hyper)
    return model, torch.optim.AdamW(groups, fused=True, **hyper.adamw())


def _galore(
    model: nn.Module, matrices: tuple[str, ...], options: Mapping[str, Any], hyper: Hyper
) -> Built:
    from galore_torch.adamw import AdamW as GaLoreAdamW

    groups = _groups(model, matrices, options, hyper)
    return model, GaLoreAdamW(groups, no_deprecation_warning=True, **hyper.adamw())


def _apollo(
    model: nn.Module, matrices: tuple[str, ...], options: Mapping[str, Any], hyper: Hyper
) -> Built:
    from apollo_torch.apollo import AdamW as APOLLOAdamW

    return model, APOLLOAdamW(_groups(model, matrices, options, hyper), **hyper.adamw())


def _fira(
    model: nn.Module, matrices: tuple[str, ...], options: Mapping[str, Any], hyper: Hyper
) -> Built:
    return model, Fira(_groups(model, matrices, options, hyper), **hyper.adamw())


def _peer(make: Callable[..., Optimizer | peers.Together]) -> Builder:
    def built(
        model: nn.Module, matrices: tuple[str, ...], options: Mapping[str, Any], hyper: Hyper
    ) -> Built:
        return model, make(_groups(model, matrices, {}, hyper), hyper.adamw(), options)

    return built


def _adam_mini(
    model: nn.Module, matrices: tuple[str, ...], options: Mapping[str, Any], hyper: Hyper
) -> Built:
    return model, peers.adam_mini(model, _groups(model, matrices, {}, hyper), hyper.adamw())


def _hmt(
    model: nn.Module, matrices: tuple[str, ...], block: Mapping[str, Any], hyper: Hyper
) -> Built:
    fields = HMTConfig.from_block(dict(block)).optimizer.model_dump(exclude_unset=True)
    if hyper.embedding_lr_scale is not None:
        if "module_rules" in fields:
            raise ValueError(
                f"embedding_lr_scale is {hyper.embedding_lr_scale:g}, and the block has module_rules; legal: one of "
                "them. Give its rules an lr_scale instead."
            )
        names = (re.escape(n) for n, _ in model.named_parameters() if n not in matrices)
        rate = {"lr_scale": hyper.embedding_lr_scale}
        fields["module_rules"] = {f"^({'|'.join(names)})$": rate}
    return model, HMT(model, **{"seed": hyper.seed, **fields, **hyper.adamw()})


def _adapter(quantized: bool) -> Builder:
    def make(
        model: nn.Module, matrices: tuple[str, ...], options: Mapping[str, Any], hyper: Hyper
    ) -> Built:
        if hyper.embedding_lr_scale is not None:
            raise ValueError(
                f"embedding_lr_scale is {hyper.embedding_lr_scale:g}, and adapters leave embeddings frozen; legal: none."
            )
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
    "muon": (_peer(peers.muon), ("momentum", "nesterov", "adjust_lr_fn", "ns_steps")),
    "soap": (_peer(peers.soap), ("betas", "precondition_frequency", "max_precondition_dim")),
    "lion": (_peer(peers.lion), ("betas",)),
    "adamw_8bit": (_peer(peers.adamw_8bit), ()),
    "adam_mini": (_adam_mini, ()),
    "hmt": (_hmt, tuple(HMTConfig.model_fields)),
    "lora": (_adapter(quantized=False), ("rank", "alpha")),
    "qlora": (_adapter(quantized=True), ("rank", "alpha")),
}
