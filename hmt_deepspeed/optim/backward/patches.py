"""The optimizer without DeepSpeed patches a module's linears and experts, and undoes it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from torch import Tensor, nn

from hmt_deepspeed.optim.backward.experts import ExpertSite, patch_experts, unpatch_experts
from hmt_deepspeed.optim.backward.int8_linear import Int8Weight, check_encodable, quantize
from hmt_deepspeed.optim.backward.linear import can_project, patch_linear, unpatch_linear
from hmt_deepspeed.optim.backward.projected_linear import ProjectedLinear, SharedInputs
from hmt_deepspeed.optim.backward.zero_grad import Accumulated, patch_zero_grad, unpatch_zero_grad
from hmt_deepspeed.optim.rules.matrix import MatrixRule

__all__ = ["Patches"]


class Patches:
    """Projected backward for a module's low-rank linears and experts, and their INT8 weights, from :meth:`install` to
    :meth:`close`.

    They are undone with this object too.

    Attributes:
        projected: links of what is patched by the weight. encoded: converted weights by the weight they replace.
        shared: which patched linears read the same input.
        accumulated: projected gradients that backwards have left in them.
    """

    def __init__(self) -> None:
        self.projected: dict[Tensor, ProjectedLinear] = {}
        self.encoded: dict[Tensor, Int8Weight] = {}
        self.shared = SharedInputs(())
        self.accumulated = Accumulated()
        self._undo: weakref.finalize | None = None

    def install(
        self,
        model: nn.Module,
        linears: Mapping[str, nn.Module],
        experts: Mapping[str, ExpertSite],
        matrices: Iterable[tuple[Tensor, MatrixRule]],
        *,
        required: bool,
        encode: bool,
    ) -> None:
        """Patch the linears and experts of those matrices that a backward can be projected for.

        Args:
            linears, experts: of the model, by the name of the weight.
            matrices: of weights.
            required: refuse a matrix that needs its whole gradient.
            encode: convert the patched weights to INT8.

        Raises:
            ValueError: a matrix that is refused, weights that INT8 cannot store.
        """
        patched, grouped = [], []
        for weight, matrix in matrices:
            module = linears.get(matrix.name)
            able = matrix.settings.is_linked(encode and not required)
            site = experts.get(matrix.name)
            link = ProjectedLinear(matrix.name, matrix.transposed)
            if module is not None and able and can_project(module):
                patched.append((cast(nn.Linear, module), link))
            elif site is not None and able and not site.reason:
                grouped.append((site, link))
            elif required:
                raise ValueError(_refusal(matrix, module, site))
            else:
                continue
            self.projected[weight] = link
        if encode:
            check_encodable(model, {link.name: weight for weight, link in self.projected.items()})
        self.shared = SharedInputs(link for _, link in patched)
        for module, link in patched:
            patch_linear(module, link, self.shared)
        patch_experts(grouped)
        self.accumulated.linears = list(self.projected.values())
        links = [*patched, *((site.module, link) for site, link in grouped)]
        holders = patch_zero_grad(model, self.accumulated, links)
        self._undo = weakref.finalize(self, _unpatch, patched, grouped, holders, self.accumulated)
        self._undo.atexit = False  # a process that ends needs no decoded weights
        if encode:
            self.encoded = {module.weight: quantize(module) for module, _ in patched}
            for site, link in grouped:
                name = link.name.rpartition(".")[2]
                self.encoded[site.module.get_parameter(name)] = quantize(site.module, name)

    def close(self) -> None:
        """Give the modules their own backward and weights again."""
        if self._undo is not None:
            self._undo()
        self.projected.clear()
        self.encoded.clear()
        self.accumulated.linears = ()
        self.shared.retire()


def _refusal(matrix: MatrixRule, module: nn.Module | None, site: ExpertSite | None) -> str:
    if not matrix.settings.takes_projection:
        why = f"needs whole gradients: {matrix.settings.wants_whole}"
    elif site is not None:
        why = site.reason
    elif module is None:
        why = "is not the weight of a linear layer"
    else:
        why = f"belongs to a {type(module).__name__} whose weight others read than nn.Linear's forward"
    return (
        f"hmt.optimizer.projected_backward is True, but {matrix.name} {why}. Legal for it: "
        "'auto' or False, or a module rule that leaves it to adamw."
    )


def _unpatch(
    patched: Iterable[tuple[nn.Linear, ProjectedLinear]],
    grouped: Iterable[tuple[ExpertSite, ProjectedLinear]],
    holders: Sequence[nn.Module],
    accumulated: Accumulated,
) -> None:
    for module, link in patched:
        unpatch_linear(module, link)
    for site, link in grouped:
        unpatch_experts(site.module, link)
    unpatch_zero_grad(holders, accumulated)
