"""Whether a step is taken, and what clips it: the overflow and the norm of all gradients, on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from deepspeed import comm as dist
from torch import Tensor

from hmt_deepspeed.kernels.launching import device_table, upload
from hmt_deepspeed.kernels.precision import fp32_products
from hmt_deepspeed.zero.optimizer.parts import Part
from hmt_deepspeed.zero.parameters.param_state import ParamState
from hmt_deepspeed.zero.sharding.collectives import Collectives
from hmt_deepspeed.zero.state import ZeroState

__all__ = ["Clipping"]


class Clipping:
    """The norm of one optimizer's gradients, whoever holds them, and what follows from it.

    Args:
        zero: the states of the optimizer. dense: parameters without a matrix, by the ranks that share them.
    """

    def __init__(self, zero: ZeroState, dense: Mapping[Collectives, Sequence[ParamState]]) -> None:
        self._zero, self._dense = zero, dense
        self._device = zero.param_states[0].weight.device
        self._all = [p.name for p in zero.param_states]
        self._counted_here: Tensor | None = None  # of experts each by the first rank that holds it
        if len(zero.holders) > 1:
            first = [p.gradient.holders.rank == 0 for p in zero.param_states]
            self._counted_here = torch.tensor(first, device=self._device)

    def overflow(self) -> Tensor:
        """Whether any rank holds a gradient that is not finite, or whose squared norm is not: 0-dim fp32 on the device,
        0 where none does."""
        gradients = [p.gradient for p in self._zero.param_states]
        there = [part for g in gradients for part in (g.reduced, g.full) if part is not None]
        norms = torch._foreach_norm(there, dtype=torch.float32) if there else ()
        squares = [torch.stack(norms).square()] if norms else []
        squares += self._host_square_norms(self._zero.param_states)
        bad = torch.zeros((), device=self._device)
        if squares:
            bad = (~(torch.cat(squares) < float("inf")).all()).float()
        self._zero.collectives.all_reduce(bad, op=dist.ReduceOp.MAX)
        return bad

    def _host_square_norms(self, param_states: Iterable[ParamState]) -> list[Tensor]:
        """Squared norms of those gradients that are in host memory, in order; no tensor where there are none."""
        hosts = [p.gradient.host for p in param_states if p.gradient.host is not None]
        if not hosts:
            return []
        squares = torch.stack([host.square_norm() for host in hosts]).tolist()
        return [upload(squares, torch.float32, self._device)]

    @fp32_products()
    def decide(
        self, parts: Sequence[Part], scale: float, checked: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Estimated ``||G||`` over all parameters, the factor that unscales and clips, and whether the step is taken.

        Args:
            parts: of :meth:`ZeroStep.parts`. scale: what the losses were multiplied by. checked: whether gradients that are not finite skip
                the step; not with experts that not all ranks hold, of which the host asks :meth:`overflow`.

        Returns:
            The norm without the loss scale and the factor, 0-dim fp32, the latter 0 in a step that is skipped; and
            0-dim bool, None without a check. All are on the device, and the same on every rank.
        """
        sums = {holders: self._sums(holders, parts) for holders in self._zero.holders}
        taken = None
        if checked:
            ((*_, total),) = sums.values()
            taken = torch.isfinite(total).all()
        norms, names = [], list[str]()
        for own, dense, lengths, total in sums.values():
            *found, squares = total.split(lengths)
            for part, over_all in zip(own, found, strict=True):
                stack = part.stack
                by_matrix = over_all.view(len(part.members) * stack.first.count, -1)
                stack.observe(by_matrix, scale, taken)
                part.sums = stack.of_held(by_matrix)
                squares_of_each = stack.square_norms(by_matrix)
                norms.append(squares_of_each.view(len(part.members), -1).sum(dim=1))
                names += [p.name for p in part.members]
            norms.append(squares)
            names += [p.name for p in dense]
        # summed in an order that does not depend on which of them step together
        squares = self._in_order(torch.cat(norms), names, self._all)
        if self._counted_here is not None:
            squares = torch.where(self._counted_here, squares, 0.0).sum()
            self._zero.collectives.all_reduce(squares)
        norm = squares.sum().sqrt() / scale
        factor = torch.full((), 1.0 / scale, device=self._device)
        if self._zero.settings.clip > 0:
            factor = factor / ((norm + 1e-6) / self._zero.settings.clip).clamp(min=1.0)
        if taken is not None:
            factor = torch.where(taken, factor, 0.0)
        return norm, factor, taken

    def _sums(
        self, holders: Collectives, parts: Sequence[Part]
    ) -> tuple[list[Part], Sequence[ParamState], list[int], Tensor]:
        """What is summed over all rows, of the parameters that some ranks share.

        Returns:
            Those of the parts, the other parameters, and the sums of each part and of the others, by their lengths in one
            tensor.
        """
        own = [part for part in parts if part.holders is holders]
        dense = self._dense[holders]
        sums = [part.over_all(part.measure()) for part in own]
        sums.append(self._dense_square_norms(dense))
        total = torch.cat([found.flatten() for found in sums])
        if self._zero.is_sharded_over(holders):
            holders.all_reduce(total)
        return own, dense, [found.numel() for found in sums], total

    def _dense_square_norms(self, dense: Sequence[ParamState]) -> Tensor:
        """Squared norms of the shards of gradients without a matrix, in order; 0 for one that no backward has reached."""
        there, own = [], []
        for param_state in dense:
            if (reduced := param_state.gradient.reduced) is not None:
                there.append(param_state)
                own.append(reduced[param_state.counted])
        norms = torch._foreach_norm(own, dtype=torch.float32) if own else ()
        found = [torch.stack(norms).square_()] if norms else []
        found += self._host_square_norms(dense)
        there += [p for p in dense if p.gradient.host is not None]
        known = torch.cat(found) if found else torch.zeros(0, device=self._device)
        return self._in_order(known, [p.name for p in there], [p.name for p in dense])

    def _in_order(self, values: Tensor, names: Sequence[str], order: Sequence[str]) -> Tensor:
        """Values of some names in the order of all, zeros for the others."""
        if list(names) == list(order):
            return values
        place = {name: number for number, name in enumerate(order)}
        index = device_table(tuple(place[name] for name in names), self._device)
        return values.new_zeros(len(order)).index_copy_(0, index, values)
