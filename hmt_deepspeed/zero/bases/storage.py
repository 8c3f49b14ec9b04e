"""Stores bases between their uses: sharded over ranks by rows (stage 3), in host memory, or both.

Replicated in fp32 the bases of a 7B model at r = 1024 would weigh 4.7 GB on every rank. A linear's
forward takes the columns of its group and drops them after the product; backward needs only ``X B``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from weakref import ref

import torch
from torch import Tensor

from hmt_deepspeed.memory.basis_cache import BasisCache
from hmt_deepspeed.optim.rules.columns import Columns
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix, stored_projection
from hmt_deepspeed.zero.bases.moment_history import MomentHistory
from hmt_deepspeed.zero.parameters.param_state import ParamState
from hmt_deepspeed.zero.sharding.collectives import Collectives

__all__ = ["BasisStorage"]


class BasisStorage:
    """Stores the projections of matrices between their uses; a no-op below stage 3 without a cache.

    Every method that gathers is a collective: all ranks call it for the same parameters in the same order.
    Projections of matrices with a projected backward are sharded over ranks, with two exceptions. Those of
    matrices projected from the left stay whole, because backward itself needs them and must not communicate.
    Those in ZeRO-3's leaf modules stay whole, because ranks may call different linears there. Host memory takes
    what the cache has room for; it may have room on one rank and not on another.

    Args:
        collectives: of the data-parallel group. stage: of ZeRO. cache: in host memory, or None.
        num_previous: bases of each matrix whose moments are remembered; 0 for none.

    Attributes:
        is_sharded: whether rows are sharded over ranks.
        cache: in host memory, or None.
        history: moments of previous bases, see :class:`MomentHistory`. Beside them the cache keeps a basis that
            a narrower one replaces.
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
        self.is_sharded = stage == 3 and collectives.world > 1
        self._kept: dict[int, tuple[object, Tensor]] | None = None
        self._fetched: dict[str, tuple[Tensor, int]] = {}  # whole, and its version when it came
        self._latest: tuple[Columns, ref[Tensor]] | None = None

    @contextmanager
    def gathered_once(self) -> Iterator[None]:
        """Keep what is gathered or fetched inside until the block ends: a linear that is called chunk by chunk
        gathers once, whatever the number of chunks on this rank and on the others."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def gather(self, local: Tensor) -> Tensor:
        """All-gather rows of a projection.

        Args:
            local: rows x width of this rank, as many rows on every rank.

        Returns:
            (world * rows) x width of the same dtype, in order of ranks; the last rows are padding.
        """
        return self._once(local, lambda: self._gather(local))

    def _once(self, key: object, make: Callable[[], Tensor]) -> Tensor:
        if self._kept is None:
            return make()
        if id(key) not in self._kept:
            self._kept[id(key)] = key, make()
        return self._kept[id(key)][1]

    def _gather(self, local: Tensor) -> Tensor:
        packed = torch.empty(
            self.collectives.world * local.shape[0],
            local.shape[1],
            dtype=local.dtype,
            device=local.device,
        )
        self.collectives.all_gather(packed, local.contiguous()).wait()
        return packed

    def projection(self, param_state: ParamState) -> Tensor | Callable[[], Tensor] | None:
        """What the matrix's linear projects on in the coming accumulation window: n x width columns (m x width when
        transposed), this rank's rows of them, a function that brings them, or None; see :class:`ProjectedLinear`."""
        matrix = param_state.matrix
        assert matrix is not None
        if (
            self.cache is None
            or not isinstance(matrix, ProjectedMatrix)
            or matrix.columns.local is None
        ):
            return stored_projection(matrix)
        return partial(self._made_whole, matrix.columns, matrix.shape[1], self._shards(param_state))

    def _made_whole(self, columns: Columns, n: int, sharded: bool) -> Tensor:
        """The same tensor for consecutive users of the same columns, as long as one of them holds it."""
        if not sharded:
            return self._once(columns, lambda: self._bring(columns, n, sharded))
        latest = self._latest[1]() if self._latest and self._latest[0] is columns else None
        if latest is None:
            latest = self._once(columns, lambda: self._bring(columns, n, sharded))
            self._latest = columns, ref(latest)
        return latest

    def _bring(self, columns: Columns, n: int, sharded: bool) -> Tensor:
        local = columns.local
        assert local is not None
        if local.is_meta:
            assert self.cache is not None
            local = self.cache.get(columns.owner)
        return self._gather(local)[:n] if sharded else local

    def _shards(self, param_state: ParamState) -> bool:
        matrix = param_state.matrix
        assert matrix is not None
        gradient = param_state.gradient
        sharded = gradient.linear is not None and gradient.leaf is None and not matrix.transposed
        return self.is_sharded and sharded

    def store(self, param_state: ParamState) -> None:
        """Store the matrix's projection and drop the whole; one that has not changed is stored already."""
        matrix = param_state.matrix
        if not isinstance(matrix, ProjectedMatrix) or matrix.columns.local is not None:
            return
        columns, whole = matrix.columns, matrix.columns.whole
        if whole is None:  # redrawn, or full rank, perhaps of late
            self._drop(columns)
            return
        sharded = self._shards(param_state)
        self._latest = None
        own = self._own_rows(whole) if sharded else whole
        if self.cache is not None and (
            self._is_unchanged(columns) or self.cache.put(columns.owner, own)
        ):
            columns.local = torch.empty_like(own, device="meta")
            columns.fetch = None if sharded else partial(self.cache.get, columns.owner)
        elif sharded:
            columns.local = own
        else:
            return
        columns.whole = columns.basis = whole.new_empty(0, whole.shape[1])

    def _is_unchanged(self, columns: Columns) -> bool:
        """Whether the columns are as they came from the cache: the same tensor, never written to."""
        whole, version = self._fetched.pop(columns.owner, (None, 0))
        return whole is not None and whole is columns.whole and whole._version == version

    def _own_rows(self, whole: Tensor) -> Tensor:
        n, width = whole.shape
        rows = -(-n // self.collectives.world)
        begin = min(self.collectives.rank * rows, n)
        own = whole.new_zeros(rows, width)
        part = whole[begin : begin + rows]
        own[: part.shape[0]].copy_(part)
        return own

    def restore(self, param_state: ParamState) -> None:
        """Make the matrix's projection whole again, on the device."""
        matrix = param_state.matrix
        if not isinstance(matrix, ProjectedMatrix) or matrix.columns.local is None:
            return
        columns = matrix.columns
        was_cached = matrix.columns.local.is_meta
        columns.whole = self._bring(columns, matrix.shape[1], self._shards(param_state))
        columns.basis = columns.whole[:, : matrix.rank]
        columns.local = columns.fetch = None
        if was_cached:
            self._fetched[columns.owner] = columns.whole, columns.whole._version

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

    def _drop(self, columns: Columns) -> None:
        self._fetched.pop(columns.owner, None)
        if self.cache is not None:
            self.cache.drop(columns.owner)

    @contextmanager
    def whole(self, param_state: ParamState) -> Iterator[None]:
        """Have the matrix's projection whole on the device during the block, which may replace it."""
        self.restore(param_state)
        try:
            yield
        finally:
            self.store(param_state)

    def will_use(self, param_states: Iterable[ParamState] | None) -> None:
        """Say which bases are needed next, so that the cache fetches them ahead.

        Args:
            param_states: in the order of use; None: those of the coming forward and backward.
        """
        if self.cache is None:
            return
        if param_states is None:
            self.cache.begin_round()
            return
        matrices = [p.matrix for p in param_states if isinstance(p.matrix, ProjectedMatrix)]
        self.cache.begin_round([matrix.columns.owner for matrix in matrices])

    def close(self) -> None:
        """Free the host memory and everything in it."""
        if self.cache is not None:
            self.cache.close()

    # -- old bases ------------------------------------------------------------------------------

    def _keeps_older(self, matrix: ProjectedMatrix) -> bool:
        """Whether a basis that a narrower one replaces is kept: a full SVD has no use for it."""
        return self.history.most > 0 and matrix.settings.range_finder != "svd"

    def remember(self, param_state: ParamState, rank: int) -> None:
        """Call before a new basis replaces the matrix's: keeps the present one if it is wider, and forgets an older
        one that is no wider than the new.

        Args:
            param_state: of the matrix. rank: of the new basis.
        """
        matrix = param_state.matrix
        assert isinstance(matrix, ProjectedMatrix)
        if self.cache is None or not self._keeps_older(matrix):
            return
        name = matrix.columns.owner
        kept = self.cache.old_width(name)
        if matrix.basis is not None and matrix.measured and max(matrix.rank, kept) > rank:
            if matrix.rank >= kept:
                self.cache.remember(name, matrix.basis)
        else:
            self.cache.forget(name)

    def recall(self, param_state: ParamState) -> Tensor | None:
        """The matrix's old basis, n x r with a larger r than the present one, or None."""
        matrix = param_state.matrix
        assert isinstance(matrix, ProjectedMatrix)
        if self.cache is None or not self._keeps_older(matrix):
            return None
        return self.cache.recall(matrix.columns.owner)

    def old_bases(self) -> dict[str, Tensor]:
        """Old bases for a checkpoint: n x r on the host, by name of the matrix."""
        if self.cache is None:
            return {}
        return {name: self.cache.old(name).cpu() for name in self.cache.old_names()}

    def load_old_bases(
        self, param_states: Iterable[ParamState], saved: Mapping[str, Tensor]
    ) -> None:
        """Restore what :meth:`old_bases` gave, for the matrices whose bases this rank finds.

        Args:
            param_states: those matrices. saved: n x r on the host, by name of the matrix.
        """
        if self.cache is None:
            return
        matrices = [p.matrix for p in param_states if isinstance(p.matrix, ProjectedMatrix)]
        for matrix in filter(self._keeps_older, matrices):
            name = matrix.columns.owner
            self.cache.forget(name)
            if name in saved:
                self.cache.remember(name, saved[name].to(matrix.device))
