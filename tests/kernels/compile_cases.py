"""What kernels are launched with: one list, which `test_compile.py` compiles for every architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton.language as tl

from hmt_deepspeed.kernels import (
    dequant_matmul,
    factored_moment_update,
    fp8_activation,
    grouped_product,
    growth_limit,
    int8_activation,
    int8_low_rank_update,
    int8_moment_update,
    int8_state,
    int8_weight,
    low_rank_projection,
    low_rank_update,
    moment_update,
    noise,
    row_squares,
    stochastic_rounding,
    token_blocks,
)
from hmt_deepspeed.kernels.low_rank_factors import TRITON_DTYPES

Variant = tuple[str, dict[str, Any]]


class Case(NamedTuple):
    """A kernel as it is launched for some dtypes.

    variant: types of its arguments in their order and its constants, of an architecture, and of whether 16 divides
    all addresses and sizes. product: whether it multiplies matrices, so that architectures differ in it.
    """

    name: str
    kernel: Any
    variant: Callable[[int, bool], Variant]
    product: bool = False


# Types of the arguments in their order; sizes in int32, counters and strides in int64.
KEYED, STRIDES = "i64 i32 i32", "i64 i64 i64 i64"
SIZES, ADAM = "i32 i32 i32", "fp32 fp32 fp32 fp32 fp32"
STACK = "i32 i32 i32 i32 i32 i64 i64 i64 i32"  # members, sizes, strides, offset
STATE = {"BLOCKS": int8_state._BLOCKS_PER_PROGRAM, "BLOCK": int8_state.BLOCK}
WEIGHT = {"BLOCK_ROWS": int8_weight._BLOCK_ROWS, "BLOCK": int8_weight.BLOCK}
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PATTERNS = {"bf16": "i16"}


def fixed(name: str, kernel: Any, types: str, constants: dict[str, Any]) -> Case:
    """Launched the same way everywhere."""
    return Case(name, kernel, lambda capability, aligned: (types, constants))


def update_case(
    weight: str,
    update: str,
    projection: str,
    copy: str | None,
    transposed: bool,
    beside: str | None = None,
) -> Case:
    product = "bf16" if "bf16" in (update, projection) else min(update, projection)

    def variant(capability: int, aligned: bool) -> Variant:
        keys = "*i32" if weight == "bf16" else "none"
        rows = "none i32 i32" if beside is None else "*fp32 i64 i64"
        return f"*i64 *{update} *fp32 {keys} *fp32 fp32 {STACK} {rows}", {
            "LOAD_LR": True,
            "LOAD_DECAY": False,
            "WEIGHT": tl.int16 if weight == "bf16" else tl.float32,
            "COPY": {None: None, "bf16": tl.int16, "fp16": tl.float16}[copy],
            "PROJECTION": TRITON_DTYPES[FLOATS[projection]],
            "BESIDE": None if beside is None else TRITON_DTYPES[FLOATS[beside]],
            "ALIGNED": aligned,
            "TRANSPOSED": transposed,
            "PRODUCT": TRITON_DTYPES[FLOATS[product]],
            **low_rank_update.launch_options(
                FLOATS[product], capability, aligned, beside is not None
            ),
        }

    name = f"update {weight} by {update} {projection}{' copy' if copy else ''}{' left' if transposed else ''}"
    name += f", rows of {beside} beside" if beside else ""
    return Case(name, low_rank_update._low_rank_update_kernel, variant, product=True)


def int8_update_case(projection: str, transposed: bool, beside: str | None = None) -> Case:
    def variant(capability: int, aligned: bool) -> Variant:
        rows = "none i32 i32" if beside is None else "*fp32 i64 i64"
        return f"*i64 *fp32 *fp32 *i32 *fp32 fp32 {STACK} {rows}", {
            "LOAD_LR": True,
            "LOAD_DECAY": False,
            "PROJECTION": TRITON_DTYPES[FLOATS[projection]],
            "BESIDE": None if beside is None else TRITON_DTYPES[FLOATS[beside]],
            "ALIGNED": aligned,
            "TRANSPOSED": transposed,
            "PRODUCT": TRITON_DTYPES[FLOATS[projection]],
            "BLOCK": int8_weight.BLOCK,
            **int8_low_rank_update.launch_options(
                FLOATS[projection], capability, aligned, beside is not None
            ),
        }

    name = f"update int8 by fp32 {projection}{' left' if transposed else ''}"
    name += f", rows of {beside} beside" if beside else ""
    return Case(name, int8_low_rank_update._update_kernel, variant, product=True)


def project_case(gradient: str, projection: str, together: bool = False) -> Case:
    def variant(capability: int, aligned: bool) -> Variant:
        dtypes = FLOATS[gradient], FLOATS[projection]
        operands = "*i64 none *fp32 *fp32" if together else f"*{gradient} *{projection} *fp32 none"
        return f"{operands} i32 {SIZES} {STRIDES}", {
            "GRADIENT": TRITON_DTYPES[dtypes[0]],
            "PROJECTION": TRITON_DTYPES[dtypes[1]],
            "ALIGNED": together and aligned,
            **low_rank_projection.launch_options(*dtypes, capability, aligned),
        }

    name = f"project {gradient} by {projection}{' together' if together else ''}"
    return Case(name, low_rank_projection._project_kernel, variant, product=True)


def dequant_case(delta: str, code: str, out: str) -> Case:
    def variant(capability: int, aligned: bool) -> Variant:
        options = dequant_matmul.launch_options(FLOATS[delta], capability, aligned)
        source = PATTERNS.get(delta, delta) if options["WIDEN"] else delta
        return f"*{source} *{code} *i16 *{PATTERNS.get(out, out)} i32 i32 i32 i32 i64 i64", {
            "FP8": code == "u8",
            "TO_BF16": out == "bf16",
            **options,
        }

    name = f"{delta} by {'fp8' if code == 'u8' else 'int8'} to {out}"
    return Case(name, dequant_matmul._dequant_matmul_kernel, variant, product=True)


def grouped_case(dtype: str, add: bool) -> Case:
    def variant(capability: int, aligned: bool) -> Variant:
        options = grouped_product.launch_options(FLOATS[dtype], capability, aligned)
        source = PATTERNS.get(dtype, dtype) if options["WIDEN"] else dtype
        return f"*{source} *{source} *i32 *fp32 i32 i32 i64 i64", {"ADD": add, **options}

    name = f"{dtype} by expert{', added' if add else ''}"
    return Case(name, grouped_product._grouped_product_kernel, variant, product=True)


def moment_cases(columns: int = 128) -> Iterator[Case]:
    """Both rules and storages, with a residual and without."""
    both = (
        ("moments", moment_update._moment_update_kernel, ("FIRST_BF16", "SECOND_BF16"), 5),
        ("factored", factored_moment_update._factored_moment_update_kernel, ("FIRST_BF16",), 6),
    )
    for name, kernel, stored, others in both:
        for bf16, residual in ((False, True), (False, False), (True, True)):
            states = " ".join(["*i16" if bf16 else "*fp32"] * len(stored))
            keys = " ".join(["*i32" if bf16 else "none"] * len(stored))
            types = f"*fp32 {states} {keys} {'*fp32 ' * others} {SIZES} {ADAM}"
            constants = dict.fromkeys(stored, bf16) | {"RESIDUAL": residual}
            constants |= {"BLOCK_ROWS": 1024 // columns, "BLOCK_COLUMNS": columns}
            name_of = f"{name} {'bf16' if bf16 else 'fp32'}{' and residual' if residual else ''}"
            yield fixed(f"{name_of}, {columns} columns", kernel, types, constants)


def int8_moment_cases() -> Iterator[Case]:
    rows = {"BLOCK_ROWS": 8, "BLOCK_COLUMNS": 128}
    block = {"BLOCKS": int8_moment_update._BLOCKS_PER_PROGRAM, "BLOCK": int8_state.BLOCK}
    for signed, name in ((True, "FIRST"), (False, "SECOND")):
        block[f"{name}_TOP"], block[f"{name}_PER_OCTAVE"] = int8_state.CODE_RANGE[signed]
    codes = "*u8 *fp32 *fp32 *i32"
    for row_means in ("none", "*fp32"):
        kind = "int8 moments" if row_means == "none" else "factored int8 moments"
        types = f"*fp32 *fp32 {row_means} *fp32 *fp32 {SIZES} fp32 fp32"
        yield fixed(f"{kind}, squares", int8_moment_update._row_squares_kernel, types, rows)
        types = f"*fp32 {codes} {codes} {row_means} *fp32 *fp32 *fp32 {SIZES} {ADAM}"
        yield fixed(kind, int8_moment_update._int8_moments_kernel, types, block)
    types = f"{'*fp32 ' * 6} {SIZES}"
    yield fixed("int8 moments, residual", int8_moment_update._row_residual_kernel, types, rows)


def squares_case(matrix: str, by_columns: bool, split: bool) -> Case:
    rows, columns = row_squares._TILES[by_columns]

    def variant(capability: int, aligned: bool) -> Variant:
        return "*i64 *fp32 *fp32 i32 i32 i32 i64 i64", {
            "TYPE": TRITON_DTYPES[FLOATS[matrix]],
            "ALIGNED": aligned,
            "SPLIT": split,
            "BLOCK_ROWS": rows,
            "BLOCK_COLUMNS": columns,
        }

    name = f"squares of rows of {matrix}{' by columns' if by_columns else ''}"
    return Case(name, row_squares._row_squares_kernel, variant)


CASES = [
    squares_case("fp32", False, True),
    squares_case("bf16", False, False),
    squares_case("fp16", True, False),
    *(
        fixed(
            f"keys of a step, {of}",
            noise._step_keys_kernel,
            f"*i64 {step} *i64 i32 i32 i32 i32 i32",
            {"BLOCK": noise._BLOCK_KEYS},
        )
        for of, step in (("the host's", "none"), ("the device's", "*i64"))
    ),
    fixed(
        "limit of growth",
        growth_limit._limit_growth_kernel,
        "*fp32 *fp32 *fp32 *fp32 *fp32 i32",
        {
            "GROWTH": 1.01,
            "TINY": 1e-30,
            "FIRST": False,
            "SECOND": True,
            "BLOCK": growth_limit._BLOCK,
        },
    ),
    fixed(
        "normals",
        noise._normals_kernel,
        "*i32 *fp32 *fp32 i32 i32 i32 fp32",
        {"BLOCK_PAIRS": noise._BLOCK_PAIRS},
    ),
    *(
        fixed(
            f"stochastic round{'' if stack == 'none none' else ' of a stack'}",
            stochastic_rounding._stochastic_round_kernel,
            f"*i32 *i16 {stack} i64 {KEYED}",
            {"BLOCK": stochastic_rounding._BLOCK},
        )
        for stack in ("none none", "*i32 *fp32")
    ),
    update_case("fp32", "fp32", "bf16", "bf16", False),
    update_case("fp32", "fp32", "bf16", None, True),
    update_case("fp32", "fp32", "fp16", "fp16", False),
    update_case("fp32", "fp32", "fp16", "fp16", True),
    update_case("fp32", "fp32", "fp32", "bf16", False),
    update_case("fp32", "fp32", "fp32", None, True),
    update_case("bf16", "fp32", "bf16", None, False),
    update_case("bf16", "fp32", "bf16", None, True),
    update_case("bf16", "bf16", "bf16", None, False),
    update_case("bf16", "fp32", "fp32", None, False),
    *(
        update_case("fp32", "fp32", projection, "bf16", left, beside)
        for projection in ("bf16", "fp32")
        for left in (False, True)
        for beside in ("bf16", "fp32")
    ),
    update_case("bf16", "fp32", "bf16", None, False, "bf16"),
    update_case("bf16", "fp32", "fp32", None, True, "bf16"),
    *(int8_update_case(p, left) for p in ("bf16", "fp16", "fp32") for left in (False, True)),
    *(
        int8_update_case(p, left, beside)
        for p in ("bf16", "fp32")
        for left in (False, True)
        for beside in ("bf16", "fp32")
    ),
    project_case("bf16", "bf16"),
    project_case("fp16", "fp16"),
    project_case("bf16", "fp32"),
    project_case("fp32", "bf16"),
    project_case("fp32", "fp32"),
    *(
        project_case(gradient, projection, True)
        for gradient in ("bf16", "fp32")
        for projection in ("bf16", "fp32")
    ),
    grouped_case("bf16", False),
    grouped_case("fp16", True),
    grouped_case("fp32", True),
    dequant_case("bf16", "i8", "bf16"),
    dequant_case("bf16", "u8", "fp32"),
    dequant_case("fp16", "i8", "fp16"),
    dequant_case("fp16", "u8", "fp16"),
    dequant_case("fp32", "i8", "fp32"),
    dequant_case("fp32", "u8", "fp32"),
    *moment_cases(),
    *moment_cases(columns=32),
    *int8_moment_cases(),
    *(
        fixed(
            f"encode state, {'signed' if signed else 'unsigned'}{'' if stochastic else ', nearest'}",
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
    fixed("decode state", int8_state._decode_kernel, "*u8 *fp32 *fp32 *fp32 i64", STATE),
    fixed("encode weight", int8_weight._encode_kernel, "*fp32 *i8 *fp32 i32 i32", WEIGHT),
    *(
        fixed(
            f"decode weight to {out}",
            int8_weight._decode_kernel,
            f"*i8 *fp32 *{PATTERNS.get(out, out)} i32 i32",
            {"TO_BF16": out == "bf16", **WEIGHT},
        )
        for out in ("bf16", "fp32")
    ),
    *(
        fixed(
            f"encode {value} to {code}",
            module._encode_kernel,
            f"*{PATTERNS.get(value, value)} *{code} *i16 i32 i32 i32 i32 i32 i32 i32",
            token_blocks._ENCODED,
        )
        for module, code in ((int8_activation, "i8"), (fp8_activation, "u8"))
        for value in FLOATS
    ),
    *(
        fixed(
            f"decode {code} to {out}",
            module._decode_kernel,
            f"*{code} *i16 *{PATTERNS.get(out, out)} i32 i32 i32 i64 i64 fp32",
            {"TO_BF16": out == "bf16", **token_blocks._DECODED},
        )
        for module, code in ((int8_activation, "i8"), (fp8_activation, "u8"))
        for out in FLOATS
    ),
]
