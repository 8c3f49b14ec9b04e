"""Budgets of what a step asks of a device, by mode. Counted on one that is not there, see `device.py`.

A number may only fall. `count.py MODE --subject SUBJECT --ranks RANKS --hidden 1024` shows where one comes from, and
`--table` prints its row anew. What they are to become: waits and unpinned 0, and for the 7B at most 600 launches, and
from 16 to 32 layers at most a tenth more.
"""

import json

import pytest
from forked_device import output_of

pytest.importorskip("triton")

HIDDEN = 1024

# launches, a_layer, refresh, first: of the optimizer's step with two layers, ordinary, what the second adds, with one
# new basis, with all of them. waits, at_refresh, at_first: of the host, in forward, backward and step together.
# deepspeed: what DeepSpeed itself waits for, in an ordinary step. unpinned: copies to the device from such memory.
# Of mixtures, whose subject says how many experts a layer has, an ordinary step's launches are those of any number.
# Launches are those of all modes counted in one process, and two, first twenty: a mode alone uploads tables that others
# had before.
TABLE = """
subject ranks mode              launches    a_layer    refresh      first      waits at_refresh   at_first  deepspeed   unpinned
bare    1     default                193          0        973       1842          0         12         16          0          0
bare    1     right                  181          0        308       1698          0          2         15          0          0
bare    1     left                   192          0        324       1793          0          2         15          0          0
bare    1     auto                   177          0        309       1776          0          2         15          0          0
bare    1     two_sided              253          0        401       1888          0          2         15          0          0
bare    1     full_residual          304          1        416       1666          0          2         15          0          0
bare    1     no_residual            160          0        292       1765          0          2         15          0          0
bare    1     random                 239          0        292        301          0          0          0          0          0
bare    1     factored               250          0        380       1898          0          2         15          0          0
bare    1     muon                   325          0        423       1811          0          2         15          0          0
bare    1     apollo                 149          0        148        221          0          0          0          0          0
bare    1     apollo_mini            229          0        229        295          0          0          0          0          0
bare    1     adamw                   19          3         19        106          0          0          0          0          0
bare    1     int8_states            208          0        342       1776          0          2         15          0          0
bare    1     int8_factored          211          0        342       1832          0          2         15          0          0
bare    1     bf16_states            252          0        387       1851          0          2         15          0          0
bare    1     int8_weights           214          0        346       1802          0          2         15          0          0
bare    1     no_masters             194          0        321       1706          0          2         15          0          0
bare    1     share_basis            192          0        398        493          0          2          0          0          0
bare    1     module_rules           305          0        437       1701          0          2         13          0          0
mixture-8   1     right                  191          0        323       1755          0          2         16          0          0
mixture-8   1     own_bases              223          0        355       1613          0          2         13          0          0
mixture-8   1     full_residual          318          2        430       1666          0          2         16          0          0
mixture-8   1     muon                   367          0        465       1836          0          2         16          0          0
mixture-8   1     apollo                 221          0        220        293          0          0          0          0          0
mixture-8   1     int8_factored          328         16        463       1963          0          2         16          0          0
mixture-8   1     int8_weights           219          0        351       1764          0          2         16          0          0
mixture-8   1     no_masters             241          0        373       1786          0          2         16          0          0
mixture-32  1     right                  191          0        323       1775          0          2         16          0          0
mixture-32  1     own_bases              183          0        311       1686          0          2         15          0          0
mixture-32  1     full_residual          318          2        430       1686          0          2         16          0          0
mixture-32  1     apollo                 221          0        220        294          0          0          0          0          0
mixture-32  1     int8_factored          328         16        463       1983          0          2         16          0          0
mixture-32  1     int8_weights           219          0        351       1784          0          2         16          0          0
mixture-32  1     no_masters             241          0        373       1806          0          2         16          0          0
zero2   1     right                  186          0        311       1672          0          2         15          2          0
zero2   1     two_sided              306          0        451       1903          0          2         15          2          0
zero2   1     muon                   411          0        506       1859          0          2         15          2          0
zero2   1     int8_weights           189          0        314       1671          0          2         15          2          0
zero2   1     basis_cache            198          0        323       1720          0          3         16          2          0
zero2   1     activations            186          0        311       1668          0          2         15          2          0
zero2   1     fpdt                   186          0        311       1668          0          2         21          2          0
zero2   1     offload                200         14        326       1681          2          3         16          2          0
zero2   1     offload_adamw           20          0         20         21          2          2          2          2          0
zero3   4     default                234          0        323        999          0          4          9          2          0
zero3   4     right                  232          0        293        939          0          2          7          2          0
zero3   4     left                   256          9        320       1016          1          3          8          3          1
zero3   4     auto                   248          3        314       1034          1          3          8          3          1
zero3   4     two_sided              307          0        382       1059          0          2          7          2          0
zero3   4     full_residual          341          3        390        874          1          3          8          3          1
zero3   4     no_residual            212          2        278       1006          1          3          8          3          1
zero3   4     random                 282          2        335        311          1          1          2          3          1
zero3   4     factored               304          2        369       1143          1          3          8          3          1
zero3   4     muon                   417          0        448       1090          0          2          7          2          0
zero3   4     apollo                 264          6        264        290          1          1          2          3          1
zero3   4     apollo_mini            279          6        279        306          1          1          2          3          1
zero3   4     adamw                   45          5         45         50          0          0          1          2          0
zero3   4     int8_states            274          0        336       1023          0          2          7          2          0
zero3   4     int8_factored          379          2        434       1235          1          3          8          3          1
zero3   4     bf16_states            321          2        384       1106          1          3          8          3          1
zero3   4     no_masters             260          0        315        976          0          2          7          2          0
zero3   4     share_basis            189          0        396        458          0          3          1          2          0
zero3   4     module_rules           397          3        531       1050          1          4          7          3          1
zero3   4     basis_cache            200          0        260        947          0          2          8          2          0
zero3   4     activations            189          0        250        910          0          2          7          2          0
zero3   4     fpdt                   247          2        313       1038          1          3         14          3          1
zero3   4     offload                217         14        282        916          2          3          8          2          0
zero3   4     offload_adamw           28          0         28         30          2          2          3          2          0
zero3-mixture-8   4     right                285          7        417        906          1          4          7          3          1
zero3-mixture-8   4     own_bases            302          7        434        924          1          4          7          3          1
zero3-mixture-32  4     right                285          7        418        916          1          4          7          3          1
zero3-mixture-32  4     own_bases            302          7        435        997          1          4          8          3          1
"""
# Numbers that the host gives otherwise from one ordinary step to the next: none, so that a CUDA graph can hold the step.
# Of bases that are drawn, and not found, a refresh between the two has given one another.
RENEWED = {"random": 1}
# Of each kind one; the others are slow. The mixture's bases are right ones, with states in fp32.
ALWAYS = {
    ("bare", "int8_factored"),
    ("bare", "apollo"),
    ("mixture-32", "own_bases"),
    ("zero2", "offload"),
    ("zero3", "two_sided"),
    ("zero3", "share_basis"),
    ("zero3", "activations"),
}


def budgets() -> list:
    """(subject, ranks, budgets by mode and column): a subject's modes are counted by one process, the slow by another."""
    header, *rows = (line.split() for line in TABLE.strip().splitlines())
    found: dict = {}
    for subject, ranks, mode, *numbers in rows:
        budget = dict(zip(header[3:], map(int, numbers), strict=True))
        of_kind = found.setdefault(((subject, mode) not in ALWAYS, subject, ranks), {})
        of_kind[mode] = budget
    return [
        pytest.param(
            subject,
            ranks,
            modes,
            id=f"{subject}-{'others' if is_slow else '-'.join(modes)}",
            marks=[pytest.mark.slow] if is_slow else [],
        )
        for (is_slow, subject, ranks), modes in found.items()
    ]


@pytest.mark.parametrize(("subject", "ranks", "modes"), budgets())
def test_a_step_keeps_to_its_budget(
    subject: str, ranks: str, modes: dict[str, dict[str, int]]
) -> None:
    """A device mismatch is an error of its own."""
    options = ("--subject", subject, "--ranks", ranks, "--hidden", str(HIDDEN))
    lines = map(str.split, output_of("count.py", ",".join(modes), "--table", *options).splitlines())
    rows = [words[2:] for words in lines if words[:2] == [subject, ranks]]
    over = {}
    for (mode, budget), (counted, *numbers, renewed) in zip(modes.items(), rows, strict=True):
        assert counted == mode
        assert int(renewed) <= RENEWED.get(mode, 0)
        found = dict(zip(budget, map(int, numbers), strict=True))
        over |= {(mode, name): (n, budget[name]) for name, n in found.items() if n > budget[name]}
    assert not over


@pytest.mark.slow
def test_kernels_of_a_step_compile_and_the_7b_keeps_to_its_budget() -> None:
    """For sm_80; 224 matrices in three shapes."""
    options = ("16", "32", "--json", "--architecture", "80")
    lines = output_of("count.py", "right,apollo", *options).splitlines()
    found = [json.loads(line)["steps"] for line in lines if line.startswith("{")]
    for half, whole, most, growth in ((*found[:2], 251, 1.1), (*found[2:], 329, 1.15)):
        few, many = (one["ordinary"]["step"]["launches"] for one in (half, whole))
        assert many <= most
        assert many <= growth * few  # parts of stacks, each of MOST_ALIVE elements
        for phase in whole["ordinary"].values():
            assert phase["waits"] == phase["unpinned"] == 0
    assert found[1]["first"]["step"]["launches"] <= 28500
