"""Every kernel compiles for a GPU, also where there is none: Triton's interpreter accepts what its
compiler does not."""

import pytest

pytest.importorskip("triton")

import triton.language as tl
from compiling import compiled

from hmt_deepspeed.kernels import (
    dequant_matmul,
    factored_moment_update,
    fp8_activation,
    int8_activation,
    int8_low_rank_update,
    int8_moment_update,
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
SIZES, ADAM = "i32 i32 i32", "fp32 fp32 fp32 fp32 fp32"


def moment_cases():
    """Both rules and storages, with a residual and without."""
    both = (
        (moment_update._moment_update_kernel, ("FIRST_BF16", "SECOND_BF16"), 5),
        (factored_moment_update._factored_moment_update_kernel, ("FIRST_BF16",), 6),
    )
    for kernel, stored, others in both:
        for bf16, residual in ((False, True), (False, False), (True, True)):
            states = " ".join(["*i16" if bf16 else "*fp32"] * len(stored))
            keys = " ".join(["*i32" if bf16 else "none"] * len(stored))
            types = f"*fp32 {states} {keys} {'*fp32 ' * others} {SIZES} {ADAM}"
            constants = dict.fromkeys(stored, bf16) | {"RESIDUAL": residual}
            yield kernel, types, constants | {"BLOCK_ROWS": 8, "BLOCK_COLUMNS": 128}


def int8_moment_cases():
    rows = {"BLOCK_ROWS": 8, "BLOCK_COLUMNS": 128}
    block = {"BLOCKS": int8_moment_update._BLOCKS_PER_PROGRAM, "BLOCK": int8_state.BLOCK}
    for signed, name in ((True, "FIRST"), (False, "SECOND")):
        block[f"{name}_TOP"], block[f"{name}_PER_OCTAVE"] = int8_state.CODE_RANGE[signed]
    codes = "*u8 *fp32 *fp32 *i32"
    for row_means in ("none", "*fp32"):
        types = f"*fp32 *fp32 {row_means} *fp32 *fp32 {SIZES} fp32 fp32"
        yield int8_moment_update._row_squares_kernel, types, rows
        types = f"*fp32 {codes} {codes} {row_means} *fp32 *fp32 *fp32 {SIZES} {ADAM}"
        yield int8_moment_update._int8_moments_kernel, types, block
    types = f"{'*fp32 ' * 6} {SIZES}"
    yield int8_moment_update._row_residual_kernel, types, rows


STACK = "i32 i32 i32 i32 i32 i64 i64 i64 i32"  # members, sizes, strides, offset
STATE = {"BLOCKS": int8_state._BLOCKS_PER_PROGRAM, "BLOCK": int8_state.BLOCK}
WEIGHT = {"BLOCK_ROWS": int8_weight._BLOCK_ROWS, "BLOCK": int8_weight.BLOCK}
TILE = {"TILE_TOKENS": token_blocks.TILE_TOKENS, "TILE_CHANNELS": token_blocks.TILE_CHANNELS}
CASES = [
    (noise._normals_kernel, "*i32 *fp32 *fp32 i32", {"BLOCK_PAIRS": noise._BLOCK_PAIRS}),
    *(
        (
            stochastic_rounding._stochastic_round_kernel,
            f"*i32 *i16 {stack} i64 {KEYED}",
            {"BLOCK": stochastic_rounding._BLOCK},
        )
        for stack in ("none none", "*i32 *fp32")
    ),
    *(
        (
            low_rank_update._low_rank_update_kernel,
            f"*i64 *fp32 *fp32 {'*i32' if weight == tl.int16 else 'none'} *fp32 fp32 {STACK}",
            {
                "LOAD_LR": True,
                "LOAD_DECAY": False,
                "WEIGHT": weight,
                "COPY": copy,
                "PROJECTION": factor,
                "ALIGNED": True,
                "TRANSPOSED": transposed,
                "PRODUCT": factor,
                "WIDEN": factor == tl.float32,
                **low_rank_update._TILES[factor == tl.float32][75],
            },
        )
        for weight, factor, copy, transposed in (
            (tl.int16, tl.bfloat16, None, False),
            (tl.float32, tl.bfloat16, tl.int16, True),
            (tl.float32, tl.float16, tl.float16, False),
            (tl.float32, tl.float32, None, False),
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
    *moment_cases(),
    *int8_moment_cases(),
    *(
        (
            int8_state._encode_kernel,
            f"*i32 *u8 *fp32 *fp32 {stack} i64 {KEYED} fp32",
            {
                "TOP": int8_state.CODE_RANGE[signed][0],
                "SIGNED": signed,
                "STOCHASTIC": stochastic,
                **STATE,
            },
        )
        for stack, signed, stochastic in (
            ("*i32 *fp32", True, True),
            ("*i32 *fp32", False, True),
            ("none none", True, False),
        )
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
        f"*i64 *fp32 *fp32 *i32 *fp32 fp32 {STACK}",
        {
            "LOAD_LR": True,
            "LOAD_DECAY": False,
            "PROJECTION": tl.bfloat16,
            "ALIGNED": True,
            "TRANSPOSED": False,
            "PRODUCT": tl.bfloat16,
            "WIDEN": False,
            "BLOCK": int8_weight.BLOCK,
            **int8_low_rank_update._TILES[False][75],
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


@pytest.mark.parametrize(("kernel", "types", "constants"), CASES)
def test_compiles_for_hopper(kernel, types, constants):
    """As ordinary tensors launch it; a kernel's first variant also for strides and pointers of any kind."""
    first = next(case for case in CASES if case[0] is kernel)
    for specialised in (True, False) if first == (kernel, types, constants) else (True,):
        made = compiled(kernel, types, constants, specialised=specialised)
        assert made.asm["cubin"]
        assert made.metadata.shared <= 99 * 1024  # what a block may use on consumer cards


def test_a_row_is_read_by_all_warps_before_one_writes_it():
    """Where no exchange between warps makes them wait: a row's mean before it is replaced, its probe columns
    before they are scaled."""
    cases = [case for case in moment_cases() if case[2]["RESIDUAL"]]
    for (kernel, types, constants), barriers in zip(cases, (1, 1, 2, 2), strict=True):
        for columns in (32, 128, 1024):
            constants |= {"BLOCK_ROWS": 1024 // columns, "BLOCK_COLUMNS": columns}
            ptx = compiled(kernel, types, constants, specialised=False).asm["ptx"]
            lines = [line for line in ptx.splitlines() if ".global" in line or "bar.sync" in line]
            kinds = "".join("b" if "bar.sync" in x else "l" if "ld." in x else "s" for x in lines)
            assert kinds.replace("l", "").replace("ss", "s").count("bs") >= barriers, kinds
