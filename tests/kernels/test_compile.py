"""Every kernel compiles for a GPU, also where there is none: Triton's interpreter accepts what its
compiler does not."""

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hmt_deepspeed.kernels import (
    dequant_matmul,
    factored_moment_update,
    fp8_activation,
    int8_activation,
    int8_low_rank_update,
    int8_state,
    int8_weight,
    low_rank_projection,
    low_rank_update,
    moment_update,
    stochastic_rounding,
    token_blocks,
)

# Types of the arguments in their order; sizes in int32, counters and strides in int64.
KEYED, STRIDES = "i64 i32 i32", "i64 i64 i64 i64"
UPDATE = {
    "BLOCK_ROWS": low_rank_update._BLOCK_ROWS,
    "BLOCK_N": low_rank_update._BLOCK_N,
    "BLOCK_W": low_rank_update._BLOCK_W,
}
PROJECT = {
    "BLOCK_ROWS": low_rank_projection._BLOCK_ROWS,
    "BLOCK_N": low_rank_projection._BLOCK_N,
    "BLOCK_W": low_rank_projection._BLOCK_W,
}
STATE = {"BLOCKS": int8_state._BLOCKS_PER_PROGRAM, "BLOCK": int8_state.BLOCK}
WEIGHT = {"BLOCK_ROWS": int8_weight._BLOCK_ROWS, "BLOCK": int8_weight.BLOCK}
INT8_UPDATE = {
    "BLOCK_ROWS": int8_low_rank_update._BLOCK_ROWS,
    "BLOCK": int8_weight.BLOCK,
    "BLOCK_W": int8_low_rank_update._BLOCK_W,
}
TILE = {"TILE_TOKENS": token_blocks.TILE_TOKENS, "TILE_CHANNELS": token_blocks.TILE_CHANNELS}
DEQUANT = {"BLOCK_T": dequant_matmul._BLOCK_T, "BLOCK_N": dequant_matmul._BLOCK_N}
CASES = [
    (
        stochastic_rounding._stochastic_round_kernel,
        f"*i32 *i16 i64 {KEYED}",
        {"BLOCK": stochastic_rounding._BLOCK},
    ),
    *(
        (
            low_rank_update._low_rank_update_kernel,
            f"*{weight} *{copy} *{factor} *{factor} i32 i32 i32 {STRIDES} fp32 fp32 {KEYED}",
            {"ROUND": weight == "i16", "COPY": kind, "WIDEN": factor == "fp32", **UPDATE},
        )
        for weight, factor, copy, kind in (
            ("i16", "bf16", "i16", "none"),
            ("fp32", "bf16", "i16", "bf16"),
            ("fp32", "fp32", "fp16", "fp16"),
        )
    ),
    *(
        (
            low_rank_projection._project_kernel,
            f"*{gradient} *{projection} *fp32 i32 i32 i32 {STRIDES}",
            {"WIDEN": gradient != projection, **PROJECT},
        )
        for gradient, projection in (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32"))
    ),
    (
        moment_update._moment_update_kernel,
        f"{'*fp32 ' * 5} i32 i32 i64 i64 {'fp32 ' * 6}",
        {"BLOCK_ROWS": 32, "BLOCK_RANK": 128},
    ),
    (
        factored_moment_update._factored_moment_update_kernel,
        f"{'*fp32 ' * 5} i32 i32 i64 i64 {'fp32 ' * 6}",
        {"BLOCK_ROWS": 8, "BLOCK_RANK": 256},
    ),
    *(
        (
            int8_state._encode_kernel,
            f"*i32 *u8 *fp32 *fp32 i64 {KEYED} fp32",
            {"TOP": int8_state._CODE[signed][0], "SIGNED": signed, "STOCHASTIC": signed, **STATE},
        )
        for signed in (True, False)
    ),
    (int8_state._decode_kernel, "*u8 *fp32 *fp32 *fp32 i64", STATE),
    *(
        (
            int8_weight._encode_kernel,
            f"*fp32 *i8 *fp32 i32 i32 {KEYED}",
            {"STOCHASTIC": stochastic, **WEIGHT},
        )
        for stochastic in (True, False)
    ),
    *(
        (
            int8_weight._decode_kernel,
            f"*i8 *fp32 *{out} i32 i32",
            {"TO_BF16": out == "i16", **WEIGHT},
        )
        for out in ("i16", "fp32")
    ),
    (
        int8_low_rank_update._update_kernel,
        f"*i8 *fp32 *bf16 *bf16 i32 i32 i32 {STRIDES} fp32 fp32 {KEYED}",
        {"STOCHASTIC": True, "WIDEN": False, **INT8_UPDATE},
    ),
    *(
        (
            module._encode_kernel,
            f"*{value} *{code} *i16 i32 i32 i32 i64 i64 i64 i64",
            {"STOCHASTIC": value != "fp16", **TILE},
        )
        for module, value, code in (
            (int8_activation, "i16", "i8"),
            (int8_activation, "fp16", "i8"),
            (fp8_activation, "fp32", "u8"),
        )
    ),
    *(
        (
            module._decode_kernel,
            f"*{code} *i16 *{out} i32 i32 i32 i64 i64 fp32",
            {"TO_BF16": out == "i16", **TILE},
        )
        for module, code, out in (
            (int8_activation, "i8", "i16"),
            (fp8_activation, "u8", "fp16"),
            (fp8_activation, "u8", "fp32"),
        )
    ),
    *(
        (
            dequant_matmul._dequant_matmul_kernel,
            f"*{delta} *{code} *i16 *{out} i32 i32 i32 i32 i64 i64",
            {
                "FP8": code == "u8",
                "WIDEN": delta == "fp32",
                "TO_BF16": out == "i16",
                "BLOCK_M": dequant_matmul._BLOCK_M[delta == "fp32"],
                **DEQUANT,
            },
        )
        for delta, code, out in (
            ("bf16", "i8", "i16"),
            ("bf16", "u8", "fp32"),
            ("fp16", "u8", "fp16"),
            ("fp32", "i8", "fp32"),
        )
    ),
]


@pytest.mark.parametrize(("kernel", "types", "constants"), CASES)
def test_compiles_for_hopper(kernel, types, constants):
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(names, types.split(), strict=True))
    source = ASTSource(
        kernel,
        signature | dict.fromkeys(constants, "constexpr"),
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= 99 * 1024  # what a block may use on consumer cards
