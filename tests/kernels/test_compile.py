"""Every kernel compiles for every architecture, also where there is no GPU, and fits it: Triton's interpreter
accepts what its compiler does not, and a card refuses a block that asks for more than it has."""

import pytest

pytest.importorskip("triton")

from compile_cases import CASES, moment_cases
from compiling import SHARED_MEMORY, compiled, figures

ALIGNED = {True: "aligned", False: "odd sizes"}
# Of each kernel and dtype of its product the case that takes most, in registers of a thread or memory of a block.
FULLEST = (
    "update fp32 by fp32 bf16 copy",
    "update fp32 by fp32 fp16 copy left",
    "update fp32 by fp32 fp32 left",
    "update fp32 by fp32 bf16 copy left, rows of fp32 beside",
    "update int8 by fp32 bf16 left",
    "update int8 by fp32 fp16 left",
    "update int8 by fp32 fp32 left",
    "update int8 by fp32 bf16 left, rows of fp32 beside",
    "project bf16 by bf16 together",
    "project fp16 by fp16",
    "project fp32 by bf16 together",
    "bf16 by expert",
    "fp16 by expert, added",
    "fp32 by expert, added",
    "bf16 by fp8 to fp32",
    "fp16 by int8 to fp16",
    "fp32 by fp8 to fp32",
)
# By ordinary instructions, the same everywhere, and far from what a block or a thread may take.
PLAIN = (
    "update int8 by fp32 fp32 left",
    "project fp32 by bf16 together",
    "fp32 by expert, added",
    "fp32 by fp8 to fp32",
)
BY_NAME = {case.name: case for case in CASES}


def check(case, capability, aligned):
    """Nothing of a thread lies in memory for want of registers, and a block's share of memory is there."""
    types, constants = case.variant(capability, aligned)
    found = figures(compiled(case.kernel, types, constants, capability, aligned))
    # With registers left, ptxas may leave two words on the stack, so that one block more finds room.
    assert found.local <= (16 if found.registers < 255 else 0), found
    assert found.shared <= SHARED_MEMORY[capability], found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fits_hopper(case):
    """Products with all their tiles full, which takes most shared memory; the others at odd sizes, whose elements are
    read one by one, which takes most registers."""
    check(case, 90, aligned=case.product)


@pytest.mark.parametrize("name", FULLEST)
def test_a_full_product_fits_at_odd_sizes(name):
    check(BY_NAME[name], 90, False)


@pytest.mark.parametrize("capability", [75, 80, 120])
@pytest.mark.parametrize("name", [name for name in FULLEST if name not in PLAIN])
def test_a_full_product_fits(name, capability):
    """The architectures whose matrix instructions differ."""
    check(BY_NAME[name], capability, True)


@pytest.mark.slow
@pytest.mark.parametrize("aligned", ALIGNED, ids=ALIGNED.values())
@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fits_every_architecture(case, capability, aligned):
    check(case, capability, aligned)


def test_a_row_is_read_by_all_warps_before_one_writes_it():
    """Where no exchange between warps makes them wait: a row's mean before it is replaced, its probe columns
    before they are scaled."""
    barriers = iter((1, 1, 2, 2) * 3)
    for columns in (32, 128, 1024):
        for case in moment_cases(columns):
            types, constants = case.variant(90, False)
            if not constants["RESIDUAL"]:
                continue
            ptx = compiled(case.kernel, types, constants, specialised=False).asm["ptx"]
            lines = [line for line in ptx.splitlines() if ".global" in line or "bar.sync" in line]
            kinds = "".join("b" if "bar.sync" in x else "l" if "ld." in x else "s" for x in lines)
            found = kinds.replace("l", "").replace("ss", "s").count("bs")
            assert found >= next(barriers), (case.name, kinds)
