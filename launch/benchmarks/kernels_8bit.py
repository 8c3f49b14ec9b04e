"""Kernels of 8-bit activations and weights beside eager PyTorch: codecs, product with codes, low-rank update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_problem import KEY, WEIGHT_DECAY, Problem, Tensors, contenders, difference
from benchmarks.setting import LEARNING_RATE, Setting
from hmt_deepspeed.kernels import fp8_activation, int8_activation
from hmt_deepspeed.kernels.dequant_matmul import dequant_matmul, dequant_matmul_reference
from hmt_deepspeed.kernels.int8_low_rank_update import (
    int8_low_rank_updates_,
    int8_low_rank_updates_reference_,
)
from hmt_deepspeed.kernels.int8_weight import BLOCK, decode_weight, encode_weight
from hmt_deepspeed.kernels.low_rank_factors import Factors, as_factors
from hmt_deepspeed.kernels.low_rank_update import add_product_, new_keys

TOKENS = 128  # that share a scale
_Codec = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[..., Any]]
CODECS: dict[str, _Codec] = {  # encoding, its twin, decoding, its twin
    "INT8": (
        int8_activation.encode_int8,
        int8_activation.encode_int8_reference,
        int8_activation.decode_int8,
        int8_activation.decode_int8_reference,
    ),
    "FP8": (
        fp8_activation.encode_fp8,
        fp8_activation.encode_fp8_reference,
        fp8_activation.decode_fp8,
        fp8_activation.decode_fp8_reference,
    ),
}


def _exact(codes: Tensor, scales: Tensor) -> Tensor:
    """The activation that codes stand for, in float64."""
    return codes.double() * scales.double().repeat_interleave(TOKENS, dim=0)[: len(codes)]


def activation_codecs(tokens: int, n: int, _: int, setting: Setting) -> Iterator[Problem]:
    """Encoding and decoding of tokens x n; what 8 bits lose is part of the error of encoding."""
    value = torch.randn(tokens, n, device=setting.device).to(setting.torch_dtype)
    for name, (encode, encode_twin, decode, decode_twin) in CODECS.items():
        codes, scales = encode(value, TOKENS, KEY)
        moved = value.nbytes + codes.nbytes + scales.nbytes
        yield Problem(
            f"encode {tokens}x{n} of {setting.dtype}, {name}",
            (value,),
            contenders(encode, encode_twin, block_size=TOKENS, key=KEY),
            lambda encoded, _, before: difference(_exact(*encoded), before[0].double()),
            moved,
        )
        yield Problem(
            f"decode {tokens}x{n} to {setting.dtype}, {name}",
            (codes, scales),
            contenders(*(partial(_decoded, d, value) for d in (decode, decode_twin))),
            lambda result, _, before: difference(result, _exact(*before)),
            moved,
        )


def _decoded(decode: Callable[..., None], like: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    out = torch.empty_like(like)
    decode(codes, scales, TOKENS, out)
    return out


def products(tokens: int, n: int, _: int, setting: Setting) -> Iterator[Problem]:
    """``D^T X``, D of at most 4096 channels: X by its codes, or decoded as a whole and multiplied."""
    m, dtype = min(tokens, 4096), setting.torch_dtype
    delta = torch.randn(tokens, m, device=setting.device).to(dtype)
    value = torch.randn(tokens, n, device=setting.device).to(dtype)
    for name, (encode, _, decode, _) in CODECS.items():
        yield Problem(
            f"{m}x{tokens} times {tokens}x{n}, {setting.dtype}, {name}",
            (delta, *encode(value, TOKENS, KEY)),
            contenders(
                partial(dequant_matmul, block_size=TOKENS, dtype=dtype),
                partial(dequant_matmul_reference, block_size=TOKENS, dtype=dtype),
                partial(_whole_product, decode, value),
            ),
            lambda result, _, before: difference(
                result, before[0].double().t() @ _exact(*before[1:])
            ),
        )


def _whole_product(
    decode: Callable[..., None], like: Tensor, delta: Tensor, codes: Tensor, scales: Tensor
) -> Tensor:
    return delta.t() @ _decoded(decode, like, codes, scales)


def weight_updates(rows: int, n: int, rank: int, setting: Setting) -> Iterator[Problem]:
    """Of an INT8 weight; rounding to 8 bits is part of the error."""
    codes, scales = encode_weight(0.02 * torch.randn(rows, n, device=setting.device))
    update = torch.randn(rows, rank, device=setting.device)
    projection = torch.randn(n, rank, device=setting.device).to(setting.torch_dtype) / n**0.5
    given = {
        "scale": torch.ones(1, 2, device=setting.device),
        "keys": new_keys(KEY, setting.device),
    }
    moved = 2 * (codes.nbytes + scales.nbytes) + update.nbytes + projection.nbytes
    yield Problem(
        f"{rows}x{n}, r = {rank}, INT8 weight, decay {WEIGHT_DECAY}",
        (codes, scales, update, projection),
        contenders(_fused_, _twin_, _whole_, **given),
        _update_error,
        moved,
    )


def _fused_(
    codes: Tensor, scales: Tensor, update: Tensor, projection: Tensor, scale: Tensor, keys: Tensor
) -> None:
    int8_low_rank_updates_(
        [codes],
        [scales],
        update[None],
        [projection],
        LEARNING_RATE,
        WEIGHT_DECAY,
        rank=update.shape[1],
        column_scale=scale,
        keys=keys,
    )


def _twin_(
    codes: Tensor, scales: Tensor, update: Tensor, projection: Tensor, scale: Tensor, keys: Tensor
) -> None:
    factors = Factors(update[None], [projection], update.shape[1], scale)
    int8_low_rank_updates_reference_([codes], [scales], factors, LEARNING_RATE, WEIGHT_DECAY, keys)


def _whole_(codes: Tensor, scales: Tensor, update: Tensor, projection: Tensor, **_: Tensor) -> None:
    """Decoded, updated and encoded to nearest as a whole; on a GPU the codec's own kernels do that."""
    left, right = as_factors(update, projection)
    value = decode_weight(codes, scales, torch.float32)
    add_product_(value, left, right.t(), LEARNING_RATE, 1 - LEARNING_RATE * WEIGHT_DECAY)
    new_codes, new_scales = encode_weight(value)
    codes.copy_(new_codes)
    scales.copy_(new_scales)


def _weight(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.double() * scales.double().repeat_interleave(BLOCK, dim=1)[:, : codes.shape[1]]


def _update_error(_: None, after: Tensors, before: Tensors) -> float:
    update, projection = (tensor.double() for tensor in before[2:])
    decay = 1 - LEARNING_RATE * WEIGHT_DECAY
    exact = decay * _weight(*before[:2]) - LEARNING_RATE * (update @ projection.t())
    return difference(_weight(*after[:2]), exact)
