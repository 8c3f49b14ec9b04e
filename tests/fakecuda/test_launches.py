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
bare    1     default               1093        515       2080       3956          0         12         16          0          0
bare    1     right                 1079        508       1251       3912          0          2         15          0          0
bare    1     left                  1103        520       1272       3740          0          2         15          0          0
bare    1     auto                  1095        516       1266       4080          0          2         15          0          0
bare    1     two_sided             1289        613       1485       4304          0          2         15          0          0
bare    1     full_residual          938        429       1073       3474          0          2         15          0          0
bare    1     no_residual            841        389       1012       3660          0          2         15          0          0
bare    1     random                1246        583       1299       1288          0          0          0          0          0
bare    1     factored              1247        592       1418       4108          0          2         15          0          0
bare    1     apollo                 798        359        798        840          0          0          0          0          0
bare    1     apollo_mini            840        380        840        882          0          0          0          0          0
bare    1     adamw                  224         72        224        308          0          0          0          0          0
bare    1     int8_states           1277        543       1453       4128          0          2         15          0          0
bare    1     int8_factored         1389        599       1564       4296          0          2         15          0          0
bare    1     bf16_states           1213        543       1387       4032          0          2         15          0          0
bare    1     int8_weights          1079        508       1250       3884          0          2         15          0          0
bare    1     no_masters            1114        510       1285       3912          0          2         15          0          0
bare    1     share_basis            987        462       1296       1048          0          2          0          0          0
bare    1     module_rules           982        453       1153       3624          0          2         13          0          0
zero2   1     right                 1177        525       1330       3923          1          3         16          2          0
zero2   1     two_sided             1387        630       1564       4315          1          3         16          2          0
zero2   1     int8_weights          1205        539       1358       3951          1          3         16          2          0
zero2   1     basis_cache           1230        552       1384       4003          1          3         16          2          0
zero2   1     activations           1177        525       1330       3923          1          3         16          2          0
zero2   1     fpdt                  1177        525       1330       3923          1          3         22          2          0
zero2   1     offload               1046        510       1198       3778          2          4         17          2          2
zero2   1     offload_adamw           62         18         62         62          2          2          2          2          2
zero3   4     default               1200        563       1290       2431          2          5         10          3          1
zero3   4     right                 1200        562       1261       2387          2          3          9          3          1
zero3   4     left                  1152        539       1210       2113          2          3          9          3          1
zero3   4     auto                  1196        559       1257       2375          2          3          9          3          1
zero3   4     two_sided             1410        667       1483       2649          2          3          9          3          1
zero3   4     full_residual          982        455       1022       1859          2          3          9          3          1
zero3   4     no_residual            946        436       1007       2133          2          3          9          3          1
zero3   4     random                1262        595       1315       1262          2          2          3          3          1
zero3   4     factored              1368        646       1429       2597          2          3          9          3          1
zero3   4     apollo                 862        395        862        862          2          2          3          3          1
zero3   4     apollo_mini            904        416        904        904          2          2          3          3          1
zero3   4     adamw                  308        119        308        308          2          2          3          3          1
zero3   4     int8_states           1288        590       1354       2503          2          3          9          3          1
zero3   4     int8_factored         1428        660       1492       2685          2          3          9          3          1
zero3   4     bf16_states           1272        590       1336       2459          2          3          9          3          1
zero3   4     no_masters            1239        578       1300       2425          2          3          9          3          1
zero3   4     share_basis           1070        497       1368       1206          2          5          3          3          1
zero3   4     module_rules          1103        496       1264       1990          2          5          8          3          1
zero3   4     basis_cache           1239        581       1303       2467          2          3          9          3          1
zero3   4     activations           1200        562       1261       2387          2          3          9          3          1
zero3   4     fpdt                  1200        562       1261       2387          2          3         15          3          1
zero3   4     offload               1115        540       1176       2302          3          4         10          3          3
zero3   4     offload_adamw           69         20         69         69          3          3          4          3          3
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
    assert half["ordinary"]["step"]["launches"] <= 8495
    assert whole["ordinary"]["step"]["launches"] <= 16735
    assert whole["first"]["step"]["launches"] <= 108991
    for phase in whole["ordinary"].values():
        assert phase["waits"] == phase["unpinned"] == 0
