"""Optimizers of others beside GaLore's family, as their packages publish them.

Muon (torch) and SOAP (pytorch_optimizer) train the matrices, AdamW all else, as both papers do; Lion
(pytorch_optimizer), 8-bit AdamW (bitsandbytes) and Adam-mini (adam_mini, its authors') train everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comparison.adapters import Missing

Groups = list[dict[str, Any]]  # the dense one, with its own rate, and that of the matrices


class Together:
    """Two optimizers that step as one, as far as a contender's is used."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> Groups:
        return [group for own in self.optimizers for group in own.param_groups]

    @property
    def state(self) -> Mapping[Tensor, Any]:
        return {param: state for own in self.optimizers for param, state in own.state.items()}

    def step(self) -> None:
        for own in self.optimizers:
            own.step()

    def zero_grad(self) -> None:
        for own in self.optimizers:
            own.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {str(number): own.state_dict() for number, own in enumerate(self.optimizers)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        for number, own in enumerate(self.optimizers):
            own.load_state_dict(saved[str(number)])


def muon(groups: Groups, shared: Mapping[str, Any], options: Mapping[str, Any]) -> Together:
    """Raises: Missing: torch is older than 2.9."""
    if not hasattr(torch.optim, "Muon"):
        raise Missing(f"torch {torch.__version__} has no torch.optim.Muon: 2.9 has it")
    own = {key: shared[key] for key in ("lr", "weight_decay")}
    return _beside_adamw(groups, shared, lambda ours: torch.optim.Muon(ours, **own, **options))


def soap(groups: Groups, shared: Mapping[str, Any], options: Mapping[str, Any]) -> Together:
    from pytorch_optimizer import SOAP

    return _beside_adamw(groups, shared, lambda ours: SOAP(ours, **{**shared, **options}))


def _beside_adamw(
    groups: Groups, shared: Mapping[str, Any], make: Callable[[Sequence[Any]], Optimizer]
) -> Together:
    dense, matrices = groups
    return Together(make(matrices["params"]), torch.optim.AdamW([dense], fused=True, **shared))


def lion(groups: Groups, shared: Mapping[str, Any], options: Mapping[str, Any]) -> Optimizer:
    from pytorch_optimizer import Lion

    own = {key: shared[key] for key in ("lr", "weight_decay")}
    return Lion(groups, **own, **options)


def adamw_8bit(groups: Groups, shared: Mapping[str, Any], options: Mapping[str, Any]) -> Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(groups, **shared, **options)


def adam_mini(model: nn.Module, groups: Groups, shared: Mapping[str, Any]) -> Optimizer:
    """A group for each parameter, of which it knows the partition by name; the dense ones get their rate afterwards. It
    decays no norms.
    """
    from adam_mini import Adam_mini

    config: Any = model.config
    heads = {"n_heads": config.num_attention_heads, "n_kv_heads": config.num_key_value_heads}
    named = list(model.named_parameters())
    optimizer = Adam_mini(named, dim=config.hidden_size, verbose=False, **heads, **shared)
    rate = {key: value for key, value in groups[0].items() if key != "params"}
    dense = set(groups[0]["params"])
    for group in optimizer.param_groups:
        if dense.issuperset(group["params"]):
            decays = group["weight_decay"] > 0
            group.update(rate if decays else {**rate, "weight_decay": 0.0})
    return optimizer
