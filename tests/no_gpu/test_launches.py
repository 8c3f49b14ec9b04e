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
# Of mixtures, whose subject says how many experts a layer has, an ordinary step's launches are those of any number.
# Launches are those of all modes counted in one process, and two: a mode alone uploads tables that others had before.
TABLE = """
subject ranks mode              launches    a_layer    refresh      first      waits at_refresh   at_first  deepspeed   unpinned
bare    1     default                202          0        981       1886          0         12         16          0          0
bare    1     right                  202          0        334       1842          0          2         15          0          0
bare    1     left                   201          0        333       1841          0          2         15          0          0
bare    1     auto                   186          0        318       1826          0          2         15          0          0
bare    1     two_sided              343          3        499       2165          0          2         15          0          0
bare    1     full_residual          316          1        428       1698          0          2         15          0          0
bare    1     no_residual            169          0        301       1809          0          2         15          0          0
bare    1     random                 250         -1        304        301          0          0          0          0          0
bare    1     factored               253          0        384       1963          0          2         15          0          0
bare    1     apollo                 235          0        235        280          0          0          0          0          0
bare    1     apollo_mini            250          0        250        295          0          0          0          0          0
bare    1     adamw                   19          3         19        106          0          0          0          0          0
bare    1     int8_states            275          0        414       1975          0          2         15          0          0
bare    1     int8_factored          305          0        440       2061          0          2         15          0          0
bare    1     bf16_states            261          0        396       1901          0          2         15          0          0
bare    1     int8_weights           223          0        355       1849          0          2         15          0          0
bare    1     no_masters             243          0        375       1863          0          2         15          0          0
bare    1     share_basis            201          0        413        496          0          2          0          0          0
bare    1     module_rules           325          0        457       1745          0          2         13          0          0
mixture-8   1     right                  198          0        330       1755          0          2         16          0          0
mixture-8   1     own_bases              230          0        362       1613          0          2         13          0          0
mixture-8   1     full_residual          328          2        440       1666          0          2         16          0          0
mixture-8   1     apollo                 242          2        241        293          0          0          0          0          0
mixture-8   1     int8_factored          329         16        464       1963          0          2         16          0          0
mixture-8   1     int8_weights           219          0        351       1764          0          2         16          0          0
mixture-8   1     no_masters             248          0        380       1786          0          2         16          0          0
mixture-32  1     right                  198          0        330       1775          0          2         16          0          0
mixture-32  1     own_bases              230          0        362       1759          0          2         15          0          0
mixture-32  1     full_residual          328          2        440       1686          0          2         16          0          0
mixture-32  1     apollo                 242          2        241        294          0          0          0          0          0
mixture-32  1     int8_factored          329         16        464       1983          0          2         16          0          0
mixture-32  1     int8_weights           219          0        351       1784          0          2         16          0          0
mixture-32  1     no_masters             248          0        380       1806          0          2         16          0          0
zero2   1     right                  252          0        382       1806          0          2         15          2          0
zero2   1     two_sided              398          3        552       2132          0          2         15          2          0
zero2   1     int8_weights           275          0        405       1827          0          2         15          2          0
zero2   1     basis_cache            302         21        433       1888          0          3         16          2          0
zero2   1     activations            254          0        384       1806          0          2         15          2          0
zero2   1     fpdt                   254          0        384       1806          0          2         21          2          0
zero2   1     offload                268         14        399       1872          2          3         16          2          0
zero2   1     offload_adamw           21          0         21         21          2          2          2          2          0
zero3   4     default                265          4        371       1098          1          5         10          3          1
zero3   4     right                  265          4        344       1053          1          3          8          3          1
zero3   4     left                   271         11        348       1030          1          3          8          3          1
zero3   4     auto                   265          5        344       1049          1          3          8          3          1
zero3   4     two_sided              409          7        500       1256          1          3          8          3          1
zero3   4     full_residual          353          3        415        874          1          3          8          3          1
zero3   4     no_residual            230          4        309       1018          1          3          8          3          1
zero3   4     random                 303          4        350        329          1          1          2          3          1
zero3   4     factored               316          4        394       1152          1          3          8          3          1
zero3   4     apollo                 286          6        285        290          1          1          2          3          1
zero3   4     apollo_mini            326         26        326        350          1          1          2          3          1
zero3   4     adamw                   46          7         46         50          1          1          2          3          1
zero3   4     int8_states            361          4        433       1169          1          3          8          3          1
zero3   4     int8_factored          391          4        459       1244          1          3          8          3          1
zero3   4     bf16_states            339          4        415       1121          1          3          8          3          1
zero3   4     no_masters             321          4        394       1104          1          3          8          3          1
zero3   4     share_basis            265          4        492        528          1          4          2          3          1
zero3   4     module_rules           427          7        559       1079          1          4          7          3          1
zero3   4     basis_cache            311         25        390       1126          1          3          9          3          1
zero3   4     activations            265          4        344       1053          1          3          8          3          1
zero3   4     fpdt                   265          4        344       1053          1          3         14          3          1
zero3   4     offload                349         53        432       1137          3          4          9          3          1
zero3   4     offload_adamw           32          2         32         33          3          3          4          3          1
zero3-mixture-8   4     right                285          7        417        906          1          4          7          3          1
zero3-mixture-8   4     own_bases            302          7        434        924          1          4          7          3          1
zero3-mixture-32  4     right                285          7        418        916          1          4          7          3          1
zero3-mixture-32  4     own_bases            302          7        435        997          1          4          8          3          1
"""
# Of each kind one; the others are slow.
ALWAYS = {
    ("bare", "right"),
    ("bare", "int8_factored"),
    ("bare", "apollo"),
    ("mixture-32", "own_bases"),
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
