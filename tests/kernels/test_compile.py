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
    noise,
    stochastic_rounding,
    token_blocks,
)

# Types of the arguments in their order; sizes in int32, counters and strides in int64.
KEYED, STRIDES = "i64 i32 i32", "i64 i64 i64 i64"
MOMENTS = f"{'*fp32 ' * 8} i32 i32 i32 {'fp32 ' * 5}"
STATE = {"BLOCKS": int8_state._BLOCKS_PER_PROGRAM, "BLOCK": int8_state.BLOCK}
WEIGHT = {"BLOCK_ROWS": int8_weight._BLOCK_ROWS, "BLOCK": int8_weight.BLOCK}
TILE = {"TILE_TOKENS": token_blocks.TILE_TOKENS, "TILE_CHANNELS": token_blocks.TILE_CHANNELS}
CASES = [
    (noise._normals_kernel, "*i32 *fp32 *fp32 i32", {"BLOCK_PAIRS": noise._BLOCK_PAIRS}),
    (
        stochastic_rounding._stochastic_round_kernel,
        f"*i32 *i16 i64 {KEYED}",
        {"BLOCK": stochastic_rounding._BLOCK},
    ),
    *(
        (
            low_rank_update._low_rank_update_kernel,
            f"*{weight} *{copy} *{factor} *{factor} i32 i32 i32 {STRIDES} fp32 fp32 {KEYED}",
            {
                "ROUND": weight == "i16",
                "COPY": kind,
                "WIDEN": factor == "fp32",
                **low_rank_update._TILES[factor == "fp32"],
            },
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
            {
                "WIDEN": gradient != projection,
                **low_rank_projection._TILES["fp32" in (gradient, projection)],
            },
        )
        for gradient, projection in (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32"))
    ),
    *(
        (kernel, MOMENTS, {"RESIDUAL": residual, "BLOCK_ROWS": 8, "BLOCK_COLUMNS": 128})
        for kernel in (
            moment_update._moment_update_kernel,
            factored_moment_update._factored_moment_update_kernel,
        )
        for residual in (True, False)
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
        {
            "STOCHASTIC": True,
            "WIDEN": False,
            "BLOCK": int8_weight.BLOCK,
            **int8_low_rank_update._TILES[False],
        },
    ),
    *(
        (
            module._encode_kernel,
            f"*{value} *{code} *i16 i32 i32 i32 i64 i64 i64 i64",
            TILE,
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
                **dequant_matmul._TILES[delta == "fp32"],
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


def compiled(kernel, types, constants, specialised):
    """For Hopper; ``specialised``: of aligned pointers, sizes that 16 divides and inner strides of one, as a
    launch with ordinary tensors compiles it."""
    constants = dict(constants)
    options = {"num_warps": constants.pop("num_warps", 4)}
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(names, types.split(), strict=True))
    kept = {"offset", "key_low", "key_high"}  # never specialised
    attributes = {}
    for name, kind in signature.items() if specialised else ():
        if name.endswith("_column"):
            constants[name] = 1
        elif name not in kept and (kind.startswith("*") or kind in ("i32", "i64")):
            attributes[(kernel.arg_names.index(name),)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        kernel,
        {name: signature[name] for name in kernel.arg_names},
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attributes,
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize(("kernel", "types", "constants"), CASES)
def test_compiles_for_hopper(kernel, types, constants):
    """As ordinary tensors launch it; a kernel's first variant also for strides and pointers of any kind."""
    first = next(case for case in CASES if case[0] is kernel)
    for specialised in (True, False) if first == (kernel, types, constants) else (True,):
        made = compiled(kernel, types, constants, specialised)
        assert made.asm["cubin"]
        assert made.metadata.shared <= 99 * 1024  # what a block may use on consumer cards


def test_a_row_is_read_by_all_warps_before_one_writes_it():
    """Where no exchange between warps makes them wait: a row's mean before it is replaced, its probe columns
    before they are scaled."""
    for kernel, barriers in (
        (moment_update._moment_update_kernel, 1),
        (factored_moment_update._factored_moment_update_kernel, 2),
    ):
        for columns in (32, 128, 1024):
            constants = {
                "RESIDUAL": True,
                "BLOCK_ROWS": 1024 // columns,
                "BLOCK_COLUMNS": columns,
            }
            ptx = compiled(kernel, MOMENTS, constants, False).asm["ptx"]
            lines = [line for line in ptx.splitlines() if ".global" in line or "bar.sync" in line]
            kinds = "".join("b" if "bar.sync" in x else "l" if "ld." in x else "s" for x in lines)
            assert kinds.replace("l", "").replace("ss", "s").count("bs") >= barriers, kinds
