"""Budgets of what a step asks of a device, by mode. Counted on one that is not there, see `device.py`.

A number may only fall. `count.py MODE --subject SUBJECT --ranks RANKS --hidden 1024` shows where one comes from, and
`--table` prints its row anew. What they are to become: waits and unpinned 0, and from 16 to 32 layers of the 7B at most a
tenth more.
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
subject           ranks mode              launches    a_layer    refresh      first      waits at_refresh   at_first  deepspeed   unpinned
bare              1     default                137          0        913       1701          0         12         16          0          0
bare              1     right                  137          0        265       1652          0          2         15          0          0
bare              1     left                   136          0        264       1652          0          2         15          0          0
bare              1     auto                   126          0        254       1640          0          2         15          0          0
bare              1     two_sided              254          0        402       1884          0          2         15          0          0
bare              1     full_residual          255          1        367       1599          0          2         15          0          0
bare              1     no_residual            140          0        268       1660          0          2         15          0          0
bare              1     random                 160          0        203        213          0          0          0          0          0
bare              1     factored               188          0        315       1751          0          2         15          0          0
bare              1     muon                   323          0        420       1804          0          2         15          0          0
bare              1     apollo                 148          0        147        202          0          0          0          0          0
bare              1     apollo_mini            165          0        165        213          0          0          0          0          0
bare              1     adamw                   17          3         17        104          0          0          0          0          0
bare              1     int8_states            162          0        296       1714          0          2         15          0          0
bare              1     int8_factored          210          0        341       1813          0          2         15          0          0
bare              1     bf16_states            156          0        286       1670          0          2         15          0          0
bare              1     int8_weights           140          0        268       1643          0          2         15          0          0
bare              1     no_masters             148          0        276       1645          0          2         15          0          0
bare              1     share_basis            136          0        338        419          0          2          0          0          0
bare              1     module_rules           212          0        340       1534          0          2         13          0          0
mixture-8         1     right                  142          0        270       1657          0          2         16          0          0
mixture-8         1     own_bases              184          0        312       1538          0          2         13          0          0
mixture-8         1     full_residual          271          2        383       1633          0          2         16          0          0
mixture-8         1     muon                   328          0        426       1805          0          2         16          0          0
mixture-8         1     apollo                 155          0        155        234          0          0          0          0          0
mixture-8         1     int8_factored          231         10        361       1815          0          2         16          0          0
mixture-8         1     int8_weights           145          0        273       1645          0          2         16          0          0
mixture-8         1     no_masters             156          0        284       1647          0          2         16          0          0
mixture-32        1     right                  142          0        270       1677          0          2         16          0          0
mixture-32        1     own_bases              183          0        311       1684          0          2         15          0          0
mixture-32        1     full_residual          271          2        383       1653          0          2         16          0          0
mixture-32        1     apollo                 155          0        155        234          0          0          0          0          0
mixture-32        1     int8_factored          231         10        361       1835          0          2         16          0          0
mixture-32        1     int8_weights           145          0        273       1665          0          2         16          0          0
mixture-32        1     no_masters             156          0        284       1667          0          2         16          0          0
zero2             1     right                  186          0        311       1668          0          2         15          2          0
zero2             1     two_sided              306          0        451       1903          0          2         15          2          0
zero2             1     muon                   372          0        467       1820          0          2         15          2          0
zero2             1     int8_weights           189          0        314       1671          0          2         15          2          0
zero2             1     basis_cache            198          0        323       1720          0          3         16          2          0
zero2             1     activations            186          0        311       1668          0          2         15          2          0
zero2             1     fpdt                   186          0        311       1668          0          2         21          2          0
zero2             1     offload                200         14        326       1681          2          3         16          2          0
zero2             1     offload_adamw           20          0         20         21          2          2          2          2          0
zero2             1     default                186          0        959       1716          0         13         17          2          0
zero2             1     left                   185          0        310       1668          0          2         15          2          0
zero2             1     auto                   175          0        300       1657          0          2         15          2          0
zero2             1     full_residual          298          1        411       1627          0          2         15          2          0
zero2             1     no_residual            189          0        314       1674          0          2         15          2          0
zero2             1     random                 209          0        252        220          0          0          0          2          0
zero2             1     factored               237          0        361       1767          0          2         15          2          0
zero2             1     apollo                 184          0        184        196          0          0          0          2          0
zero2             1     apollo_mini            202          0        202        214          0          0          0          2          0
zero2             1     adamw                   51          5         51         54          0          0          0          2          0
zero2             1     int8_states            216          0        342       1726          0          2         15          2          0
zero2             1     int8_factored          264          0        386       1819          0          2         15          2          0
zero2             1     bf16_states            210          0        332       1686          0          2         15          2          0
zero2             1     no_masters             202          0        321       1679          0          2         15          2          0
zero2             1     share_basis            185          0        385        426          0          2          0          2          0
zero2             1     module_rules           267          0        388       1547          0          2         13          2          0
zero3             4     default                187          0        276        938          0          4          9          2          0
zero3             4     right                  187          0        248        890          0          2          7          2          0
zero3             4     left                   182          0        241        854          0          2          7          2          0
zero3             4     auto                   186          0        247        884          0          2          7          2          0
zero3             4     two_sided              307          0        382       1059          0          2          7          2          0
zero3             4     full_residual          290          1        339        808          0          2          7          2          0
zero3             4     no_residual            188          0        249        894          0          2          7          2          0
zero3             4     random                 201          0        244        212          0          0          1          2          0
zero3             4     factored               238          0        298        989          0          2          7          2          0
zero3             4     muon                   375          0        406       1044          0          2          7          2          0
zero3             4     apollo                 196          4        196        208          0          0          1          2          0
zero3             4     apollo_mini            214          4        214        223          0          0          1          2          0
zero3             4     adamw                   43          5         43         47          0          0          1          2          0
zero3             4     int8_states            227          0        289        958          0          2          7          2          0
zero3             4     int8_factored          275          0        333       1051          0          2          7          2          0
zero3             4     bf16_states            221          0        279        918          0          2          7          2          0
zero3             4     no_masters             213          0        268        911          0          2          7          2          0
zero3             4     share_basis            187          0        394        438          0          3          1          2          0
zero3             4     module_rules           292          0        421        868          0          3          6          2          0
zero3             4     basis_cache            200          0        260        943          0          2          8          2          0
zero3             4     activations            187          0        248        890          0          2          7          2          0
zero3             4     fpdt                   187          0        248        890          0          2         13          2          0
zero3             4     offload                217         14        282        916          2          3          8          2          0
zero3             4     offload_adamw           28          0         28         29          2          2          3          2          0
zero3-mixture-8   4     right                  217          3        344        802          0          3          6          2          0
zero3-mixture-8   4     own_bases              256          8        383        851          0          3          6          2          0
zero3-mixture-32  4     right                  217          3        345        812          0          3          6          2          0
zero3-mixture-32  4     own_bases              256          8        384        924          0          3          7          2          0
"""
# Numbers that the host gives otherwise from one ordinary step to the next: none, so that a CUDA graph can hold the step.
# Of bases that are drawn, and not found, a refresh between the two has given one another.
RENEWED = dict.fromkeys(("random", "apollo", "apollo_mini"), 1)
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


# Of the 7B: 224 matrices in three shapes. half, whole: launches of an ordinary step with 16 and with 32 layers, at most
# 600 but for offload. What the second half adds are parts of stacks, each of MOST_ALIVE elements. refresh, first: with 32
# layers, one new basis and all of them. Two and, first, twenty more than were counted, as a mode alone uploads more.
SEVEN_B = """
subject  ranks mode                 half     whole   refresh     first
bare     1     default               211       269      1075     26702
bare     1     right                 171       190       324     25772
bare     1     left                  170       194       328     25760
bare     1     auto                  160       179       313     25754
bare     1     two_sided             288       335       488     27697
bare     1     full_residual         289       348       460     23209
bare     1     no_residual           174       193       328     25777
bare     1     random                194       233       276       758
bare     1     factored              222       245       378     26493
bare     1     muon                  357       436       578     25622
bare     1     apollo                217       257       256       786
bare     1     apollo_mini           199       202       202       718
bare     1     int8_states           220       243       384     26285
bare     1     int8_factored         268       295       432     26999
bare     1     bf16_states           214       233       369     25805
bare     1     int8_weights          175       196       330     25549
bare     1     no_masters            193       215       349     25502
bare     1     share_basis           170       179       399      4267
bare     1     module_rules          267       322       450     22693
zero2    1     muon                  433       594       696     25726
zero2    1     int8_states           295       324       462     26365
zero2    1     left                  246       274       405     25863
zero2    1     no_masters            269       297       429     25888
zero2    1     right                 247       272       404     25866
zero2    1     bf16_states           289       314       448     25899
zero2    1     apollo_mini           264       269       268       299
zero2    1     apollo                281       322       322       363
zero2    1     int8_weights          250       277       409     25867
zero2    1     share_basis           246       261       482      3858
zero2    1     two_sided             367       422       574     27802
zero2    1     auto                  236       261       395     25853
zero2    1     factored              298       327       458     26590
zero2    1     module_rules          362       446       608     22717
zero2    1     basis_cache           278       316       448     26569
zero2    1     offload               803      1460      1587     27040
zero3    4     right                 210       225       292     10965
zero3    4     left                  199       222       287     10470
zero3    4     muon                  398       413       450     10696
zero3    4     two_sided             330       345       426     11700
zero3    4     factored              261       276       342     11691
zero3    4     int8_states           240       255       323     11441
zero3    4     apollo                286       381       380       417
zero3    4     basis_cache           223       239       305     11643
zero3    4     apollo_mini           288       357       356       388
zero3    4     bf16_states           234       249       313     10982
zero3    4     share_basis           207       218       445      3975
zero3    4     module_rules          317       343       481      9395
zero3    4     auto                  206       218       285     10871
zero3    4     no_masters            226       243       304     10978
zero3    4     offload               472       758       823     11489
"""


# Masters of 6.5G elements on the host are updated in pieces of 8M: 772 products on the device, each followed by its copy;
# of four ranks each has a quarter. The host reads the verdict, and what a refresh would ask, before it begins.
MOST, WAITS = {"offload": 1460}, {"offload": 2}


def of_the_7b() -> list:
    """(subject, ranks, mode, budget by column)."""
    header, *rows = (line.split() for line in SEVEN_B.strip().splitlines())
    return [
        pytest.param(
            *row[:3], dict(zip(header[3:], map(int, row[3:]), strict=True)), id="-".join(row[:3])
        )
        for row in rows
    ]


def keeps_to_the_7b(mode: str, budget: dict[str, int], *options: str) -> None:
    lines = output_of("count.py", mode, "16", "32", "--json", *options).splitlines()
    half, whole = (json.loads(line)["steps"] for line in lines if line.startswith("{"))
    kinds = whole.get("refresh", whole["ordinary"]), whole["first"]
    found = [step["step"]["launches"] for step in (half["ordinary"], whole["ordinary"], *kinds)]
    assert not {name: n for n, name in zip(found, budget, strict=True) if n > budget[name]}
    assert budget["whole"] <= MOST.get(mode, 600)
    for phase in whole["ordinary"].values():
        assert phase["waits"] <= WAITS.get(mode, 0)
        assert phase["unpinned"] == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("subject", "ranks", "mode", "budget"), of_the_7b())
def test_the_7b_keeps_to_its_budget(
    subject: str, ranks: str, mode: str, budget: dict[str, int]
) -> None:
    keeps_to_the_7b(mode, budget, "--subject", subject, "--ranks", ranks)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["right", "apollo"])
def test_kernels_of_a_step_of_the_7b_compile(mode: str) -> None:
    """For sm_80."""
    budgets_of = {tuple(param.values[:3]): param.values[3] for param in of_the_7b()}
    keeps_to_the_7b(mode, budgets_of["bare", "1", mode], "--architecture", "80")
