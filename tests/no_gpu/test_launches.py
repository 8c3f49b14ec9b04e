"""Budgets of what a step asks of a device, by mode. Counted on one that is not there, see `device.py`.

A number may only fall. `count.py MODE --subject SUBJECT --ranks RANKS --hidden 1024` shows where one comes from, and
`--table` prints its row anew. What they are to become: waits and unpinned 0, and for the 7B at most 600 launches, and
from 16 to 32 layers at most a tenth more.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

COUNT = Path(__file__).with_name("count.py")
HIDDEN = 1024

# launches, a_layer, refresh, first: of the optimizer's step with two layers, ordinary, what the second adds, with one
# new basis, with all of them. waits, at_refresh, at_first: of the host, in forward, backward and step together.
# deepspeed: what DeepSpeed itself waits for, in an ordinary step. unpinned: copies to the device from such memory.
TABLE = """
subject ranks mode              launches    a_layer    refresh      first      waits at_refresh   at_first  deepspeed   unpinned
bare    1     default                201          2        982       1887          0         12         16          0          0
bare    1     right                  201          2        334       1843          0          2         15          0          0
bare    1     left                   200          2        334       1842          0          2         15          0          0
bare    1     auto                   186          2        319       1827          0          2         15          0          0
bare    1     two_sided              342          5        527       3396          0          2         15          0          0
bare    1     full_residual          317          3        457       2915          0          2         15          0          0
bare    1     no_residual            170          2        302       1810          0          2         15          0          0
bare    1     random                 248          2        302        296          0          0          0          0          0
bare    1     factored               254          2        385       1964          0          2         15          0          0
bare    1     apollo                 237          2        237        282          0          0          0          0          0
bare    1     apollo_mini            251          2        251        296          0          0          0          0          0
bare    1     adamw                   32         11         32        118          0          0          0          0          0
bare    1     int8_states            276          2        445       3220          0          2         15          0          0
bare    1     int8_factored          306          2        471       3306          0          2         15          0          0
bare    1     bf16_states            262          2        427       3146          0          2         15          0          0
bare    1     int8_weights           227          4        389       3097          0          2         15          0          0
bare    1     no_masters             239          0        400       3089          0          2         15          0          0
bare    1     share_basis            202          2        508        495          0          2          0          0          0
bare    1     module_rules           328          3        460       1748          0          2         13          0          0
zero2   1     right                  256          2        399       1815          0          2         15          2          0
zero2   1     two_sided              400          5        566       2149          0          2         15          2          0
zero2   1     int8_weights           282          4        462       3104          0          3         16          2          0
zero2   1     basis_cache            306         23        451       1914          0          3         16          2          0
zero2   1     activations            261          4        441       3083          0          3         16          2          0
zero2   1     fpdt                   261          4        441       3083          0          3         22          2          0
zero2   1     offload                327         51        472       1907          2          3         16          2          0
zero2   1     offload_adamw           43          9         43         43          2          2          2          2          2
zero3   4     default                354         70        468       1657          1          5         10          3          1
zero3   4     right                  263          4        344       1079          1          3          8          3          1
zero3   4     left                   309         47        391       1341          1          3          9          3          1
zero3   4     auto                   315         49        400       1565          1          3          9          3          1
zero3   4     two_sided              498         73        595       1819          1          3          9          3          1
zero3   4     full_residual          350          3        431       1303          1          3          9          3          1
zero3   4     no_residual            319         70        404       1577          1          3          9          3          1
zero3   4     random                 296          4        344        322          1          1          2          3          1
zero3   4     factored               405         70        489       1711          1          3          9          3          1
zero3   4     apollo                 310         26        310        335          1          1          2          3          1
zero3   4     apollo_mini            324         26        324        348          1          1          2          3          1
zero3   4     adamw                   43          7         43         46          1          1          2          3          1
zero3   4     int8_states            450         70        528       1728          1          3          9          3          1
zero3   4     int8_factored          480         70        554       1803          1          3          9          3          1
zero3   4     bf16_states            428         70        510       1680          1          3          9          3          1
zero3   4     no_masters             402         66        494       1643          1          3          9          3          1
zero3   4     share_basis            288         20        515        551          1          4          2          3          1
zero3   4     module_rules           466         47        647       1433          1          5          8          3          1
zero3   4     basis_cache            309         25        390       1152          1          3          9          3          1
zero3   4     activations            354         70        439       1612          1          3          9          3          1
zero3   4     fpdt                   354         70        439       1612          1          3         15          3          1
zero3   4     offload                347         53        432       1164          3          4          9          3          1
zero3   4     offload_adamw           54         11         54         55          3          3          4          3          3
"""
# Of each kind one; the others are slow.
ALWAYS = {
    ("bare", "right"),
    ("bare", "int8_factored"),
    ("bare", "apollo"),
    ("zero2", "offload"),
    ("zero3", "two_sided"),
    ("zero3", "share_basis"),
    ("zero3", "activations"),
}


def budgets() -> list:
    """(subject, ranks, mode, numbers by column) of each row."""
    header, *rows = (line.split() for line in TABLE.strip().splitlines())
    found = []
    for subject, ranks, mode, *numbers in rows:
        budget = dict(zip(header[3:], map(int, numbers), strict=True))
        marks = [] if (subject, mode) in ALWAYS else [pytest.mark.slow]
        name = f"{subject}-{mode}"
        found.append(pytest.param(subject, ranks, mode, budget, id=name, marks=marks))
    return found


def count(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(COUNT), *arguments],
        env={k: v for k, v in os.environ.items() if k != "DS_ACCELERATOR"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(("subject", "ranks", "mode", "budget"), budgets())
def test_a_step_keeps_to_its_budget(
    subject: str, ranks: str, mode: str, budget: dict[str, int]
) -> None:
    """A device mismatch is an error of its own."""
    options = ("--subject", subject, "--ranks", ranks, "--hidden", str(HIDDEN))
    line = count(mode, "--table", *options).splitlines()[-1].split()
    found = dict(zip(budget, map(int, line[3:]), strict=True))
    assert not {name: (n, budget[name]) for name, n in found.items() if n > budget[name]}


@pytest.mark.slow
def test_kernels_of_a_step_compile_and_the_7b_keeps_to_its_budget() -> None:
    """For sm_80; 224 matrices in three shapes."""
    lines = count("right", "16", "32", "--json", "--architecture", "80").splitlines()
    half, whole = (json.loads(line)["steps"] for line in lines if line.startswith("{"))
    few, many = (found["ordinary"]["step"]["launches"] for found in (half, whole))
    assert many <= 360
    assert many - few <= 120  # parts of stacks, each of MOST_ALIVE elements
    assert whole["first"]["step"]["launches"] <= 28500
    for phase in whole["ordinary"].values():
        assert phase["waits"] == phase["unpinned"] == 0
