"""Stores bases between their uses: sharded over ranks by rows (stage 3), in host memory, or both.

Replicated in fp32 the bases of a 7B model at r = 1024 would weigh 4.7 GB on every rank. A linear's
forward takes the columns of its group and drops them after the product; backward needs only ``X B``.
Columns are gathered ahead: of linears in the order of the last accumulation window, forward and what backward
computes again, and of matrices in the order that :meth:`BasisStorage.will_use` is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from hmt_deepspeed.memory.basis_cache import BasisCache
from hmt_deepspeed.optim.backward.projected_linear import InputGroup
from hmt_deepspeed.optim.bases.basis import HeldRows
from hmt_deepspeed.optim.rules.columns import Columns
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix, stored_projection
from hmt_deepspeed.zero.bases.gathers import GatherAhead
from hmt_deepspeed.zero.bases.moment_history import MomentHistory
from hmt_deepspeed.zero.bases.old_bases import OldBases
from hmt_deepspeed.zero.parameters.param_state import ParamState
from hmt_deepspeed.zero.sharding.collectives import Collectives

__all__ = ["MOST_WHOLE", "BasisStorage"]

# Bytes of bases that the device has at once of what is stored elsewhere, unless those of one matrix are more: while
# their probes are drawn, and, whole, while their weights are updated together.
MOST_WHOLE = 2**27


class BasisStorage:
    """Stores the projections of matrices between their uses; a no-op below stage 3 without a cache.

    Every method that gathers is a collective: all ranks call it for the same parameters in the same order.
    Projections of matrices with a projected backward are sharded over ranks, with exceptions. Those of
    matrices projected from the left stay whole, because backward itself needs them and must not communicate.
    Those in ZeRO-3's leaf modules stay whole, because ranks may call different linears there, and those of experts, of
    which backward may need them. Host memory takes what the cache has room for; it may have room on one rank and not on
    another.

    Args:
        collectives: of the data-parallel group. stage: of ZeRO. cache: in host memory, or None.
        num_previous: bases of each matrix whose moments are remembered; 0 for none.

    Attributes:
        is_sharded: whether rows are sharded over ranks.
        cache: in host memory, or None.
        history: moments of previous bases, see :class:`MomentHistory`. old: bases that narrower ones have replaced.
        peak_gathered_bytes: of whole projections in use that ranks hold parts of, at most.
    """

    def __init__(
        self,
        collectives: Collectives,
        stage: int,
        cache: BasisCache | None = None,
        num_previous: int = 0,
    ) -> None:
        self.collectives, self.cache = collectives, cache
        self.history = MomentHistory(collectives, cache, num_previous)
        self.old = OldBases(cache, num_previous)
        self.is_sharded = stage == 3 and collectives.world > 1
        self._kept: dict[int, tuple[object, Tensor]] | None = None
        # by owner: whole, its version when it came, and the rows that it came from
        self._fetched: dict[str, tuple[Tensor, int, Tensor]] = {}
        self._last: tuple[Columns, Tensor] | None = None  # whole, stored unchanged just now
        self.peak_gathered_bytes = 0
        self._of_linears = GatherAhead(collectives, _rows_of_group)
        self._of_matrices = GatherAhead(collectives, self._rows)

    @property
    def stores(self) -> bool:
        """Whether any basis is elsewhere between its uses."""
        return self.is_sharded or self.cache is not None

    @contextmanager
    def gathered_once(self) -> Iterator[None]:
        """Keep what is gathered or fetched inside until the block ends: a linear that is called chunk by chunk
        gathers once, whatever the number of chunks on this rank and on the others."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def gather(self, group: InputGroup) -> Tensor:
        """Whole columns of the linears of a group that are sharded over ranks.

        Returns:
            (world * rows) x width in order of ranks; the last rows are padding.
        """
        return self._once(group, lambda: self._of_linears.take(group))

    def _once(self, key: object, make: Callable[[], Tensor]) -> Tensor:
        if self._kept is None:
            return make()
        if id(key) not in self._kept:
            self._kept[id(key)] = key, make()
        return self._kept[id(key)][1]

    def projection(self, param_state: ParamState) -> Tensor | Callable[[], Tensor] | None:
        """What the matrix's linear projects on in the coming accumulation window: n x width columns (m x width when
        transposed), or this rank's rows of them, or a function that brings either, or None; see
        :class:`ProjectedLinear`."""
        matrix = param_state.matrix
        assert matrix is not None
        if (
            self.cache is None
            or not isinstance(matrix, ProjectedMatrix)
            or matrix.columns.local is None
        ):
            return stored_projection(matrix)
        columns = matrix.columns
        if self.holds_rows(param_state):
            return partial(self._present_rows, columns)
        return lambda: self._once(columns, partial(self._present_rows, columns))

    def _present_rows(self, columns: Columns) -> Tensor:
        """The rows that this rank holds, on the device."""
        local = columns.local
        assert local is not None
        if not local.is_meta:
            return local
        assert self.cache is not None
        return self.cache.get(columns.owner)

    def _rows(self, columns: Columns) -> Tensor | None:
        return None if columns.local is None else self._present_rows(columns)

    def _make_whole(self, columns: Columns, n: int, sharded: bool) -> Tensor:
        """The whole projection on the device; that of the last call where nothing changed it since."""
        if not sharded:
            return self._present_rows(columns)
        last, self._last = self._last, None
        if last is not None and last[0] is columns:
            return last[1]
        return self._of_matrices.take(columns)[:n]

    def holds_rows(self, param_state: ParamState) -> bool:
        """Whether each rank stores some rows of the matrix's projection."""
        matrix, gradient = param_state.matrix, param_state.gradient
        if not isinstance(matrix, ProjectedMatrix) or matrix.transposed or matrix.redraws:
            return False
        if matrix.count > 1:
            return False
        return self.is_sharded and gradient.linear is not None and gradient.leaf is None

    def store(self, param_states: Iterable[ParamState]) -> None:
        """Store the projections of matrices and drop the whole ones; one that has not changed is stored already."""
        changed: dict[str, tuple[Columns, bool, Tensor]] = {}
        for param_state in param_states:
            matrix = param_state.matrix
            if not isinstance(matrix, ProjectedMatrix) or matrix.columns.local is not None:
                continue
            columns, whole = matrix.columns, matrix.columns.whole
            if columns.owner in changed:
                continue
            if whole is None or matrix.takes_whole:  # redrawn, or full rank, perhaps of late
                self._drop(columns)
                continue
            sharded = self.holds_rows(param_state)
            rows = self._unchanged_rows(columns)
            # Decided alike on all ranks: not by whether the cache has room on this one.
            if rows is None:
                self._of_matrices.changed(columns)
            self._last = (columns, whole) if sharded and rows is not None else None
            if rows is not None and (self.cache is None or rows.is_meta):
                self._leave(columns, rows, sharded)
            else:
                own = self._own_rows(whole) if sharded else whole
                changed[columns.owner] = columns, sharded, own
        placed = self._put({owner: own for owner, (_, _, own) in changed.items()})
        for owner, (columns, sharded, own) in changed.items():
            if owner in placed or sharded:
                self._leave(columns, placed.get(owner, own), sharded)

    def _put(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Bring rows by owner to host memory; what stands for those that have found room there."""
        placed = set() if self.cache is None else self.cache.put_all(rows)
        return {owner: torch.empty_like(rows[owner], device="meta") for owner in placed}

    def _leave(self, columns: Columns, rows: Tensor, sharded: bool) -> None:
        """Drop the whole of columns whose rows are stored."""
        columns.local, whole = rows, columns.whole
        assert whole is not None
        if not sharded and self.cache is not None:
            columns.fetch = partial(self.cache.get, columns.owner)
        columns.whole = whole.new_empty(*whole.shape[:-2], 0, whole.shape[-1])

    def _unchanged_rows(self, columns: Columns) -> Tensor | None:
        """The rows that the columns came from, if they are as they came: the same tensor, never written to.

        A kernel that writes to them counts it (``torch.autograd.graph.increment_version``), as torch's operations do.
        """
        whole, version, rows = self._fetched.pop(columns.owner, (None, 0, None))
        is_same = whole is not None and whole is columns.whole and whole._version == version
        return rows if is_same else None

    def _own_rows(self, whole: Tensor) -> Tensor:
        n, width = whole.shape
        held = self.held_rows(n)
        own = whole.new_zeros(held.most, width)
        part = whole[held.begin : held.begin + held.most]
        own[: part.shape[0]].copy_(part)
        return own

    def held_rows(self, n: int) -> HeldRows:
        """The rows of bases of n that this rank holds."""
        most = -(-n // self.collectives.world)
        begin = min(self.collectives.rank * most, n)
        return HeldRows(begin, most, n, self.collectives.all_reduce)

    def restore(self, param_state: ParamState) -> None:
        """Make the matrix's projection whole again, on the device."""
        matrix = param_state.matrix
        if not isinstance(matrix, ProjectedMatrix) or matrix.columns.local is None:
            return
        columns, rows = matrix.columns, matrix.columns.local
        columns.whole = self._make_whole(columns, matrix.shape[1], self.holds_rows(param_state))
        columns.local = columns.fetch = None
        self._fetched[columns.owner] = columns.whole, columns.whole._version, rows

    def forget(self, param_state: ParamState) -> None:
        """Drop what is stored: the whole projection is about to be loaded."""
        if isinstance(param_state.matrix, ProjectedMatrix):
            param_state.matrix.columns.local = param_state.matrix.columns.fetch = None
            self._drop(param_state.matrix.columns)

    def keep_only(self, param_states: Iterable[ParamState]) -> None:
        """Drop from host memory the columns that no matrix has any more, since matrices share others."""
        if self.cache is not None:
            self.history.forget()
            matrices = [p.matrix for p in param_states if isinstance(p.matrix, ProjectedMatrix)]
            self.cache.keep_only({matrix.columns.owner for matrix in matrices})

    def arrange(self, runs: Iterable[Sequence[ParamState]]) -> None:
        """Say which columns are to lie side by side in host memory: those of a run, as they are drawn together."""
        if self.cache is not None:
            self.cache.arrange(dict(self._brought(p, whole=False) for p in run) for run in runs)

    def _drop(self, columns: Columns) -> None:
        self._fetched.pop(columns.owner, None)
        self._last = None
        self._of_matrices.changed(columns)
        if self.cache is not None:
            self.cache.drop(columns.owner)

    def runs(
        self, param_states: Sequence[ParamState], whole: bool = True
    ) -> Iterator[tuple[int, int]]:
        """Half-open ranges of matrices whose projections may be on the device at once; equal on all ranks.

        Args:
            whole: all of each, also of those that ranks hold rows of.
        """
        if not self.stores:
            yield 0, len(param_states)
            return
        begin = size = 0
        owners = set[str]()
        for place, param_state in enumerate(param_states):
            owner, nbytes = self._brought(param_state, whole)
            if owner in owners:
                continue
            if owners and size + nbytes > MOST_WHOLE:
                yield begin, place
                begin, size = place, 0
                owners.clear()
            owners.add(owner)
            size += nbytes
        if param_states:
            yield begin, len(param_states)

    def _brought(self, param_state: ParamState, whole: bool) -> tuple[str, int]:
        """Owner and bytes of what the device has of a matrix's projection for the time of its use alone."""
        matrix = param_state.matrix
        if not isinstance(matrix, ProjectedMatrix) or matrix.takes_whole:
            return param_state.name, 0
        by_rows = self.holds_rows(param_state)
        if self.cache is None and not (whole and (by_rows or matrix.redraws)):
            return matrix.columns.owner, 0
        n = matrix.shape[1]
        rows = self.held_rows(n).most if by_rows and not whole else n
        rows *= matrix.count if matrix.own_bases else 1
        return matrix.columns.owner, rows * matrix.width * matrix.dtype.itemsize

    @contextmanager
    def whole(self, param_state: ParamState) -> Iterator[None]:
        """Have the matrix's projection whole on the device during the block, which may replace it."""
        with self.all_whole([param_state]):
            yield

    @contextmanager
    def all_present(self, param_states: Sequence[ParamState]) -> Iterator[None]:
        """Have on the device during the block, which writes to them, the projections of matrices that are whole on every
        rank, and the rows held here of others; moves nothing between ranks.

        Args:
            param_states: those of a range of :meth:`runs`, not ``whole``.
        """
        cache = self.cache
        if cache is None:
            for param_state in param_states:
                self.store([param_state])  # what is whole as yet
            yield
            return
        matrices = ((p, p.matrix) for p in param_states)
        found = [(p, m.columns) for p, m in matrices if isinstance(m, ProjectedMatrix)]
        with cache.together({columns.owner for _, columns in found}):
            for param_state, columns in found:
                whole = columns.whole
                if not self.holds_rows(param_state):
                    self.restore(param_state)
                elif columns.local is not None:
                    columns.local = self._present_rows(columns)
                elif whole is not None:  # as yet
                    columns.local, columns.whole = self._own_rows(whole), whole[:0].clone()
                    self._drop(columns)
            try:
                yield
            finally:
                rows = {c.owner: c.local for _, c in found if c.local is not None}
                placed = self._put({owner: own for owner, own in rows.items() if not own.is_meta})
                for _, columns in found:
                    columns.local = placed.get(columns.owner, columns.local)
                self.store(param_states)

    @contextmanager
    def all_whole(self, param_states: Sequence[ParamState]) -> Iterator[None]:
        """The same of several matrices, in their order; a collective, like :meth:`restore`.

        Args:
            param_states: those of a range of :meth:`runs`.
        """
        if not self.stores:
            yield
            return
        sharded, others = dict[str, Columns](), set[str]()
        for param_state in param_states:
            if isinstance(param_state.matrix, ProjectedMatrix):
                columns = param_state.matrix.columns
                if self.holds_rows(param_state):
                    sharded[columns.owner] = columns
                else:
                    others.add(columns.owner)
        with nullcontext() if self.cache is None else self.cache.together(others):
            for param_state in param_states:
                self.restore(param_state)
            wholes = (columns.whole for columns in sharded.values())
            gathered = sum(whole.nbytes for whole in wholes if whole is not None)
            self.peak_gathered_bytes = max(self.peak_gathered_bytes, gathered)
            try:
                yield
            finally:
                self.store(param_states)

    def will_use(self, runs: Iterable[Sequence[ParamState]] | None) -> None:
        """Say which bases are needed next, so that they are fetched and gathered ahead.

        Args:
            runs: in the order of use, those of a run together, see :meth:`runs`; None: those of the coming forward and
                backward.
        """
        if not self.stores:
            return
        self._last = None
        if runs is None:
            self._of_matrices.expect(())
            self._of_linears.repeat(_exists)
            if self.cache is not None:
                self.cache.begin_round()
            return
        used = [
            [(p, p.matrix.columns) for p in run if isinstance(p.matrix, ProjectedMatrix)]
            for run in runs
        ]
        if self.cache is not None:
            self.cache.begin_round([[columns.owner for _, columns in run] for run in used])
        self._of_linears.forget()
        # neighbours of one basis gather it once, unless the first of them changes it
        sharded = (columns for run in used for p, columns in run if self.holds_rows(p))
        self._of_matrices.expect(columns for columns, _ in groupby(sharded))

    def close(self) -> None:
        """Free the host memory and everything in it, and what was gathered ahead."""
        self._of_linears.close()
        self._of_matrices.close()
        if self.cache is not None:
            self.cache.close()


def _rows_of_group(group: InputGroup) -> Tensor | None:
    """The rows that this rank holds of the columns of a group; None where none of it is projected at present."""
    if not _exists(group) or not group.active:
        return None
    return group.join() if group.columns is None else group.columns


def _exists(group: InputGroup) -> bool:
    """Whether linears are of it, and not of one that it was merged into."""
    return group.linears[0].group is group
