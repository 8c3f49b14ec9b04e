"""Attention of one tile with its log-sum-exp, and its gradients: aten's fused kernels.

Layouts: queries [B, Hq, Tq, D], keys and values [B, Hkv, Tk, D] with Hkv dividing Hq, log-sum-exp
[B, Hq, Tq] in fp32. In backward, output and log-sum-exp are those of all keys, and the gradients are this
tile's share: ``P = exp(S - L)``, ``dS = P (dO V^T - rowsum(dO O))``.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from hmt_deepspeed.fpdt.visibility import Tile, bands

__all__ = ["BAND_QUERIES", "AttentionOps", "CpuAttention", "CudaAttention", "attention_ops"]

BAND_QUERIES = 512  # queries whose mask is materialised at once, on the CPU

Gradients = tuple[Tensor, Tensor, Tensor]


class AttentionOps(Protocol):
    """Attention on one kind of device."""

    def split(self, tile: Tile) -> list[Tile]:
        """The tile in pieces that one call can take."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, tile: Tile, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output, and its log-sum-exp."""

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        log_sum_exp: Tensor,
        tile: Tile,
        scale: float,
    ) -> Gradients:
        """dQ, dK, dV of this tile."""


_aten = torch.ops.aten


class CpuAttention:
    """The flash attention of the CPU: any float dtype and head size, GQA, masks as bias.

    Its causal mask is aligned to the top left, which is what a tile that begins at the same token on both
    sides needs, also when it has more queries than keys.
    """

    def split(self, tile: Tile) -> list[Tile]:
        return list(bands(tile, BAND_QUERIES)) if tile.shape == "band" else [tile]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, tile: Tile, scale: float
    ) -> tuple[Tensor, Tensor]:
        bias, causal = _band_bias(tile, query), tile.shape == "causal"
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=bias, scale=scale
        )

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        log_sum_exp: Tensor,
        tile: Tile,
        scale: float,
    ) -> Gradients:
        bias, causal = _band_bias(tile, query), tile.shape == "causal"
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad,
            query,
            key,
            value,
            out,
            log_sum_exp,
            0.0,
            causal,
            attn_mask=bias,
            scale=scale,
        )


def _band_bias(tile: Tile, like: Tensor) -> Tensor | None:
    """0 where a query of the band sees a key, -inf elsewhere: [Tq, Tk] in the queries' dtype."""
    if tile.shape != "band":
        return None
    queries = torch.arange(*tile.queries, device=like.device).unsqueeze(1)
    distance = queries - torch.arange(*tile.keys, device=like.device)
    hidden = distance < 0
    if tile.window is not None:
        hidden |= distance >= tile.window
    bias = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    return bias.masked_fill_(hidden, float("-inf"))


class CudaAttention:
    """FlashAttention-2 as torch ships it: fp16 and bf16, head sizes that are multiples of 8 up to 256.

    Its masks are aligned to the bottom right: query ``a`` of Tq sees keys from ``a + Tk - Tq - left`` to
    ``a + Tk - Tq + right``. Bands need no bias. A limit of Tk or more is taken for none, which is wrong
    where there are more queries than keys: such a tile goes in up to three pieces.
    """

    def split(self, tile: Tile) -> list[Tile]:
        (q0, q1), (k0, k1) = tile.queries, tile.keys
        if tile.shape == "full" or q1 - k1 < k1 - k0:
            return [tile]
        # Queries among the keys; behind them, those that see all; those that the window cuts.
        inside = max(q0, k1)
        all_seen = q1 if tile.window is None else max(inside, min(q1, k0 + tile.window))
        pieces = []
        for begin, end in ((q0, k1), (inside, all_seen), (all_seen, q1)):
            if begin < end:
                first = k0 if tile.window is None else max(k0, begin - tile.window + 1)
                is_cut = tile.window is not None and end - 1 - first >= tile.window
                window = tile.window if is_cut else None
                pieces.append(Tile(tile.batch, (begin, end), (first, k1), window))
        return pieces

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, tile: Tile, scale: float
    ) -> tuple[Tensor, Tensor]:
        left, right = _flash_window(tile)
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        out, log_sum_exp, *_ = _aten._flash_attention_forward(
            q,
            k,
            v,
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            False,
            False,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        return out.transpose(1, 2), log_sum_exp

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        log_sum_exp: Tensor,
        tile: Tile,
        scale: float,
    ) -> Gradients:
        left, right = _flash_window(tile)
        g, q, k, v, o = (t.transpose(1, 2) for t in (grad, query, key, value, out))
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the dropout's random state
        grads = _aten._flash_attention_backward(
            g,
            q,
            k,
            v,
            o,
            log_sum_exp.contiguous(),
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            False,
            unused,
            unused,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        dq, dk, dv = (t.transpose(1, 2) for t in grads)
        return dq, dk, dv


def _flash_window(tile: Tile) -> tuple[int, int]:
    """``left`` and ``right`` of FlashAttention for a tile; -1 is no limit."""
    if tile.shape == "full":
        return -1, -1
    right = tile.queries[1] - tile.keys[1]
    return -1 if tile.window is None else tile.window - 1 - right, right


def attention_ops(query: Tensor) -> AttentionOps:
    """Attention for the device of ``query``.

    Raises:
        ValueError: nothing can, or not with this dtype or head size.
    """
    if query.device.type == "cpu":
        return CpuAttention()
    if query.device.type != "cuda":
        raise ValueError(f"FPDT attends on cpu and cuda, got tensors on {query.device}")
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"FlashAttention takes fp16 or bf16, got {query.dtype}: enable bf16 in the config"
        )
    if query.shape[-1] % 8 or query.shape[-1] > 256:
        raise ValueError(
            f"FlashAttention takes head sizes that are multiples of 8 up to 256, got {query.shape[-1]}"
        )
    return CudaAttention()
