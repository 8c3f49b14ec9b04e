"""Rules of their own for modules: who gets which, in which order, and what is refused."""

import pytest
import torch
from hmt_runs import batches as data_batches
from hmt_runs import network, train
from low_rank_adamw import low_rank_adamw
from torch import nn
from torch.nn import functional as F

from hmt_deepspeed.rules import rule_of

RULES = {
    r"embed": {"method": "apollo_mini"},
    r"\.up\.": {"projection": "left", "rank": 4, "scale": 1.0},
    r"\.down\.": {"method": "adamw"},
    r"\.up|\.gate": {"projection": "two_sided", "residual": "none"},  # up is taken already
    r"head": {"range_finder": "random", "rank": 6},
}


class Tiny(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(30, 16)
        self.mlp = nn.ModuleDict(
            {
                "up": nn.Linear(16, 24),
                "gate": nn.Linear(16, 24),
                "down": nn.Linear(24, 16),
                "mix": nn.Linear(16, 16),
            }
        )
        self.lm_head = nn.Linear(16, 30, bias=False)

    def forward(self, tokens):
        x = self.mlp["mix"](self.embed(tokens))
        x = x + self.mlp["down"](F.silu(self.mlp["gate"](x)) * self.mlp["up"](x))
        return self.lm_head(x)


def train_tokens(model, optimizer, steps):
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        tokens = torch.randint(30, (16, 8), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), (tokens.flatten() * 7 + 3) % 30)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("finder", ["randomized", "random"])
def test_a_module_rule_leaves_out_the_basis(finder):
    """Also where nothing of what the others say of bases means anything to it."""
    model = Tiny()
    rules = {
        "embed": {"method": "muon", "rank": "full"},
        r"\.up\.": {"method": "muon", "rank": "full"},
    }
    others = {"rank": 4, "range_finder": finder, "update_interval": 2, "residual": "none"}
    optimizer = low_rank_adamw(model, lr=1e-2, module_rules=rules, **others)
    losses = train_tokens(model, optimizer, 12)
    assert losses[-1] < losses[0]
    for name, matrix in optimizer.matrices.items():
        whole = name in ("embed.weight", "mlp.up.weight")
        assert (matrix.basis is None) == whole
        assert matrix.rank == (16 if whole else 4)
        assert matrix.shape[0] >= matrix.shape[1] or not whole
    slots = optimizer.state_dict()["state"].values()
    times = [s["num_refreshes"] for s in slots if s.get("rule") == "muon, full rank"]
    assert times == [0, 0]


def test_the_first_match_decides_before_every_other_pattern():
    model = Tiny()
    optimizer = low_rank_adamw(model, rank=8, update_interval=10, module_rules=RULES)
    rows = {row.name: row for row in optimizer.describe()}
    rules = {name: row.rule for name, row in rows.items()}
    assert rules["embed.weight"] == "apollo_mini"  # else embeddings are left to AdamW
    assert rules["mlp.down.weight"] == "adamw"
    assert rows["mlp.down.weight"].reason == r"module_rules '\\.down\\.'"
    assert rules["mlp.mix.weight"] == rules["lm_head.weight"] == "lowrank_adamw"
    assert rules["mlp.up.bias"] == "adamw"  # a rule is for matrices
    matrices = optimizer.matrices
    up, gate = matrices["mlp.up.weight"], matrices["mlp.gate.weight"]
    assert (up.transposed, up.rank, up.scale, up.settings.residual) == (True, 4, 1.0, "probe")
    assert (gate.settings.projection, gate.rank) == ("two_sided", 8)
    assert gate.scale == 2.0  # of half of the columns: twice that of all of them
    assert gate.settings.residual == "none"
    assert (matrices["lm_head.weight"].redraws, matrices["lm_head.weight"].rank) == (True, 6)
    embed = matrices["embed.weight"]
    assert (embed.rank, embed.scale) == (1, 128.0)  # its own method's, not rank 8
    assert {m.settings.update_interval for m in matrices.values()} == {10}


def test_all_kinds_train_together_and_resume():
    straight, resumed = Tiny(), Tiny(seed=1)
    options = {"lr": 2e-2, "rank": 8, "update_interval": 7, "module_rules": RULES}
    optimizer = low_rank_adamw(straight, **options)
    losses = train_tokens(straight, optimizer, 60)
    assert losses[-1] < 0.6 * losses[0]
    resumed.load_state_dict(straight.state_dict())
    fresh = low_rank_adamw(resumed, **options)
    fresh.load_state_dict(optimizer.state_dict())
    assert train_tokens(straight, optimizer, 10) == train_tokens(resumed, fresh, 10)


def test_a_rule_under_plain_adamw():
    model = network()
    rules = {r"^2\.": {"method": "lowrank_adamw"}}
    optimizer = low_rank_adamw(model, lr=1e-2, method="adamw", module_rules=rules)
    rules = {row.name: (row.rule, row.reason) for row in optimizer.describe()}
    assert rules["2.weight"] == ("lowrank_adamw", "")
    assert rules["0.weight"] == ("adamw", "method is adamw")
    losses = train(model, optimizer, data_batches(30))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_a_low_rank_rule_beside_apollo_takes_its_own_defaults():
    rules = {r"^2\.": {"method": "lowrank_adamw"}}
    options = {"method": "apollo", "rank": 4, "scale": 2.0, "module_rules": rules}
    matrices = low_rank_adamw(network(), **options).matrices
    assert (matrices["0.weight"].rank, matrices["0.weight"].scale) == (4, 2.0)
    assert matrices["2.weight"].rank == 8
    assert matrices["2.weight"].scale == rule_of("lowrank_adamw").scale


def test_open_fields_may_be_given_as_none():
    rules = {r"^2\.": {"rank": 2, "projection": None, "method": None}}
    matrices = low_rank_adamw(network(), rank=8, projection="left", module_rules=rules).matrices
    assert (matrices["2.weight"].rank, matrices["2.weight"].transposed) == (2, True)


def test_thresholds_and_candidates_of_their_own():
    """Ranks by energy, of one matrix from other candidates and for a share that no small rank captures."""
    model = Tiny()
    rules = {"up": {"energy_threshold": 0.999, "rank_candidates": [3, 12]}}
    options = {"rank_candidates": (2, 4, 8), "energy_threshold": 0.01, "update_interval": 3}
    optimizer = low_rank_adamw(model, lr=1e-2, module_rules=rules, **options)
    train_tokens(model, optimizer, 12)
    ranks = {name.split(".")[1]: m.rank for name, m in optimizer.matrices.items()}
    assert ranks == {"up": 12, "gate": 2, "down": 2, "mix": 2}


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (
            {"2": {"energy_threshold": 1.5}},
            r"module_rules\['2'\]\.energy_threshold: got 1\.5\. Legal: ",
        ),
        ({"2": {"rank_candidates": [4, 2]}}, r"module_rules\['2'\]\.rank_candidates: got \[4, 2\]"),
        (
            {"2": {"rank": 2, "energy_threshold": 0.5}},
            r"module_rules\['2'\]\.energy_threshold: got 0\.5\. With \"rank\": 2 it is ignored",
        ),
        ({"nothing": {"rank": 2}}, r"module_rules: 'nothing' matches no trainable"),
        (
            {"2": {"rank": 2}, r"^2\.": {"method": "apollo"}},
            r"'\^2\\\\\.' decides nothing, .*: '2' takes 2\.weight; .*narrower pattern before",
        ),
        (
            {"bias": {"rank": 2}},
            r"'bias' decides nothing, for it matches no matrix: 0\.bias is a v",
        ),
        ({"(": {"rank": 2}}, r"hmt\.optimizer\.module_rules: got '\(' .*not a regular expression"),
        ({"2": {"rank": 0}}, r"hmt\.optimizer\.module_rules\['2'\]\.rank: got 0"),
        ({"2": {"method": "galore"}}, r"module_rules\['2'\]\.method: got 'galore'"),
        ({"2": {"lr_scale": 0}}, r"module_rules\['2'\]\.lr_scale: got 0"),
        ({"2": {"scale": -1.0}}, r"module_rules\['2'\]\.scale: got -1\.0"),
        (
            {"2": {"range_finder": "random"}},
            r"module_rules\['2'\]\.range_finder: got 'random'\. A random basis has no spectrum",
        ),
        (
            {"2": {"projection": "two_sided", "residual": "full"}},
            r"module_rules\['2'\]\.residual: got 'full'\. The core of",
        ),
        (
            {"2": {"rank": None}},
            r"hmt\.optimizer\.module_rules\['2'\]: got {'rank': None}\. It sets",
        ),
        ({"2": {}}, r"hmt\.optimizer\.module_rules\['2'\]: got {}\. It sets nothing"),
        ({"2": {"rnk": 2}}, r"module_rules\['2'\]\.rnk: got 2\. Unknown key: did you mean"),
        (
            {"2": {"update_interval": 2}},
            r"module_rules\['2'\]\.update_interval: got 2\. Unknown key here: it is set for all",
        ),
        ({"2": {"method": "apollo_mini", "rank": 4}}, r"\['2'\]\.rank: got 4\. .* is rank 1"),
        ({"2": {"method": "adamw", "rank": 8}}, r"\['2'\]\.rank: got 8\. It means nothing"),
        ({"2": {"method": "adamw", "scale": 1.0}}, r"\['2'\]\.scale: got 1\.0\. It means nothing"),
        ({"2": {"method": "apollo", "projection": "left"}}, r"\['2'\]\.projection: got 'left'\."),
        ({"2": {"method": "apollo", "residual": "full"}}, r"\['2'\]\.residual: got 'full'\. It"),
        ({"2": {"method": "apollo", "range_finder": "svd"}}, r"\['2'\]\.range_finder: got 'svd'\."),
    ],
)
def test_refusals(rules, words):
    with pytest.raises(ValueError, match=words):
        low_rank_adamw(network(), module_rules=rules)


def test_a_rule_that_names_no_method_is_of_the_others():
    with pytest.raises(ValueError, match=r"\.projection: got 'left'. .* \"method\": \"apollo\""):
        low_rank_adamw(network(), method="apollo", module_rules={"2": {"projection": "left"}})
    low_rank_adamw(network(), method="apollo", module_rules={"2": {"rank": 2, "projection": None}})


@pytest.mark.parametrize("rule", [{"method": "apollo"}, {"residual": "full"}])
def test_projected_backward_insisted_on_refuses_a_rule_of_whole_gradients(rule):
    ((field, value),) = rule.items()
    asks = rf"hmt\.optimizer\.module_rules\['\^2\\\\\.'\]\.{field} is '{value}'"
    with pytest.raises(ValueError, match=rf"2\.weight needs whole gradients: {asks}"):
        low_rank_adamw(network(), rank=8, projected_backward=True, module_rules={r"^2\.": rule})
    optimizer = low_rank_adamw(network(), rank=8, module_rules={r"^2\.": rule})
    assert len(optimizer.owned()) == 2


def test_projected_backward_insisted_on_refuses_an_embedding():
    rules = {"embed": {"rank": 4}}
    with pytest.raises(ValueError, match="is not the weight of a linear layer"):
        low_rank_adamw(Tiny(), rank=8, projected_backward=True, module_rules=rules)
