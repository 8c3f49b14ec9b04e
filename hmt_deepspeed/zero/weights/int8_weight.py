"""INT8 weights under ZeRO 0-2: every rank holds all codes and applies the same update with the same key.

The low-rank update travels (m x r), never weights; since the codes are equal at start and everything
that changes them is equal on all ranks, replicas stay equal bit for bit. There is no fp32 master.

A loaded model becomes INT8 as it is placed: each matrix goes to the device alone and leaves its codes there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hmt_deepspeed.optim.backward.int8_linear import (
    Int8Weight,
    encoded_weights,
    quantize,
    update_together_,
)
from hmt_deepspeed.zero.sharding.shards import RowShards
from hmt_deepspeed.zero.weights.low_rank_change import LowRankChange
from hmt_deepspeed.zero.weights.weight import Weight

__all__ = ["EncodedWeight", "encode_placed", "left_out_of_broadcast"]


class EncodedWeight(Weight):
    """The weights of one linear in INT8, or of one parameter of experts.

    Args:
        param: its weight, m x n or of experts, whose m rows are one below the other; its values are in ``encoded``.
        shards: which of its flat elements each rank holds.
        rank: this process's place in them. encoded: codes and scales, all rows on every rank.
    """

    def __init__(
        self, param: nn.Parameter, shards: RowShards, rank: int, encoded: Int8Weight
    ) -> None:
        self.param, self.shards, self.rank = param, shards, rank
        self.partitioned, self.device = False, param.device
        self.master, self.encoded = None, encoded

    @property
    def by_rows(self) -> bool:
        return False

    @contextmanager
    def shard(self, overwrite: bool = False) -> Iterator[Tensor]:
        """Decoded fp32 values of the shard, flat: to be read, not written."""
        begin, end = self.shards.rows(self.rank)
        yield self.shards.rows_to_shard(self.encoded.decode_rows(begin, end), self.rank)

    def master_bytes(self) -> int:
        return 0

    def move_weights(self, place: Callable[[Tensor], Tensor]) -> None:
        self.encoded.move(place)

    def weight_bytes(self) -> int:
        return self.encoded.nbytes

    @property
    def kind(self) -> str:
        return "int8"

    def whole_values(self) -> Tensor:
        """fp32 values of the whole weight, m x n, decoded."""
        return self.encoded.decode_rows(0, self.shards.m)

    def set_values(self, values: Tensor) -> None:
        """Overwrite the whole weight where this rank's shard is all of it.

        Args:
            values: m n flat fp32 values.

        Raises:
            RuntimeError: on several shards, whose ranks would no longer hold the same codes.
        """
        if self.shards.world > 1:
            raise RuntimeError("an INT8 weight is set whole: every rank holds all codes")
        self.set_whole(values)

    def set_whole(self, flat: Tensor) -> None:
        """Overwrite the codes.

        Args:
            flat: m n fp32 values.
        """
        self.encoded.write_(flat.view(self.param.shape))

    @property
    def together(self) -> Hashable:
        return "int8"

    @staticmethod
    def step_whole(weights: Sequence[Weight], change: LowRankChange) -> None:
        """Updates of all rows, on every rank alike."""
        update_together_(
            [weight.encoded for weight in weights if isinstance(weight, EncodedWeight)],
            change.update,
            change.projections,
            change.lr,
            change.weight_decay,
            rank=change.rank,
            column_scale=change.scale,
            keys=change.keys,
            transposed=change.transposed,
            beside=change.beside,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Codes and scales themselves: what a bit-exact resume needs beside the values."""
        return {"codes": self.encoded.codes, "scales": self.encoded.scales}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.encoded.load_(
            torch.as_tensor(state["codes"]).contiguous(),
            torch.as_tensor(state["scales"]).contiguous(),
        )


# -- placing a loaded model -------------------------------------------------------------------------


def encode_placed(
    weights: Iterable[tuple[nn.Module, str]],
    dtype: torch.dtype | None,
    device: torch.device | None,
    broadcast: Callable[[Tensor], object],
) -> None:
    """Move weights and convert them there, each freed before the next one arrives.

    Args:
        weights: modules with the names of their Parameters in them.
        dtype: what they are cast to before, None for none. device: where they go, None to stay.
        broadcast: gives all ranks one rank's values, in place.
    """
    for module, name in weights:
        weight = module.get_parameter(name)
        weight.data = weight.data.to(dtype=dtype).to(device=device).contiguous()
        broadcast(weight.data)
        quantize(module, name)


@contextmanager
def left_out_of_broadcast(model: nn.Module) -> Iterator[None]:
    """Mark what stands in for INT8 weights as DeepSpeed marks parameters that are each rank's own."""
    params: list[Any] = [
        module.get_parameter(name) for module in model.modules() for name in encoded_weights(module)
    ]
    for param in params:
        param.ds_optim_param = True
    try:
        yield
    finally:
        for param in params:
            del param.ds_optim_param
