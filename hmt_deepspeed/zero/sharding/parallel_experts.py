"""Experts of DeepSpeed's mixtures of which each rank holds some: their names among all, and who holds the same ones.

A layer (:class:`deepspeed.moe.layer.MoE`) with ``ep_size`` above 1 numbers the experts of its own rank. Here each has the
name that it has on one rank with all experts, so that what is drawn or saved by name does not depend on ``ep_size``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import nn

from hmt_deepspeed.zero.sharding.collectives import Collectives

__all__ = ["ParallelExperts", "expert_parallel_layers"]


def expert_parallel_layers(model: nn.Module) -> dict[str, MoE]:
    """Layers of which ranks hold different experts, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MoE) and module.ep_size > 1
    }


class ParallelExperts:
    """Parameters of experts that not all ranks hold.

    Args:
        layers: of :func:`expert_parallel_layers`; DeepSpeed's engine has made their process groups.
    """

    def __init__(self, layers: Mapping[str, MoE] = MappingProxyType({})) -> None:
        self._names: dict[str, str] = {}
        self._everywhere: dict[str, tuple[str, ...]] = {}
        self._groups: dict[nn.Parameter, str] = {}
        for path, layer in layers.items():
            self._add(path, layer)

    def _add(self, path: str, layer: MoE) -> None:
        rank = groups._get_expert_parallel_rank(layer.expert_group_name)
        path = ".".join(filter(None, (path, "deepspeed_moe.experts.deepspeed_experts")))
        for place, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            numbers = [other * layer.num_local_experts + place for other in range(layer.ep_size)]
            for key, param in expert.named_parameters():
                names = tuple(f"{path}.{number}.{key}" for number in numbers)
                self._names[f"{path}.{place}.{key}"] = names[rank]
                self._everywhere[names[rank]] = names
                self._groups[param] = layer.expert_group_name

    def name(self, name: str) -> str:
        """Name of a parameter among all experts.

        Args:
            name: that it has in the model.
        """
        return self._names.get(name, name)

    def everywhere(self, name: str) -> tuple[str, ...]:
        """Names of the parameters in one place of the ranks' models.

        Args:
            name: of one of them among all experts.
        """
        return self._everywhere.get(name, (name,))

    def holders(self, everyone: Collectives) -> dict[nn.Parameter, Collectives]:
        """Collectives of the ranks that hold the same experts, by parameter of an expert.

        Args:
            everyone: collectives of all ranks, whose overlap is taken.
        """
        of_group = {
            group: Collectives(groups._get_expert_data_parallel_group(group), everyone.overlap)
            for group in dict.fromkeys(self._groups.values())
        }
        return {param: of_group[group] for param, group in self._groups.items()}
