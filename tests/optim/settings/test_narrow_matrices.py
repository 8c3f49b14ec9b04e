"""Matrices that the options do not fit: too narrow for the rank, too small for 8 bits, heads and embeddings."""

import pytest
import torch
from hmt_runs import settings_of
from low_rank_adamw import low_rank_adamw
from torch import nn
from torch.nn import functional as F

from hmt_deepspeed.optim.decisions.policy import build_policy
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.settings.assign import head_weights
from hmt_deepspeed.optim.settings.options import complete_options

N, RANK = 32, 8
RANKS = {"trunk.weight": 8, "router.weight": 4, "classifier.weight": 3}


class Narrow(nn.Module):
    """A trunk, a router of four experts that are scales, a classifier of three labels and a reward."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.trunk, self.router = nn.Linear(N, N), nn.Linear(N, 4, bias=False)
        self.scales = nn.Parameter(torch.rand(4, N) + 0.5)
        self.classifier, self.reward = nn.Linear(N, 3), nn.Linear(N, 1)

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        x = torch.tanh(self.trunk(x)) * (weights @ self.scales)
        return self.classifier(x), self.reward(x)


def train(model, optimizer, steps):
    generator, losses = torch.Generator().manual_seed(3), []
    teacher = torch.randn(N, 3, generator=generator)
    for _ in range(steps):
        x = torch.randn(64, N, generator=generator)
        optimizer.zero_grad()
        scores, reward = model(x)
        labels = (x @ teacher).argmax(-1)
        loss = F.cross_entropy(scores, labels) + F.mse_loss(reward, x[:, :1].sin())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"projection": "left"},
        {"projection": "auto"},
        {"projection": "two_sided"},
        {"second_moment": "factored"},
        {"residual": "full"},
        {"range_finder": "random"},
        {"rank": "auto", "rank_candidates": [RANK, 16]},
        {"method": "apollo"},
        {"weight_dtype": "int8"},
    ],
    ids=str,
)
def test_a_rank_above_the_smaller_side_is_lowered_and_said(rule):
    model = Narrow()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    lr = 1e-2 if "method" in rule else 4e-2
    optimizer = low_rank_adamw(model, lr=lr, **{"rank": RANK, "update_interval": 5, **rule})
    assert {name: m.candidates[0] for name, m in optimizer.matrices.items()} == RANKS
    wanted = 16 if rule.get("rank") == "auto" else RANK
    rows = {row.name: row for row in optimizer.describe()}
    assert rows["router.weight"].reason == f"rank lowered from {wanted}"
    assert rows["trunk.weight"].reason == ""
    assert rows["reward.weight"][1:4] == ("adamw", "a vector in disguise", None)
    losses = train(model, optimizer, 40)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    optimizer.close()  # puts the weights back that were INT8
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name]), name


def test_where_the_smaller_side_is_projected_a_lowered_rank_is_adamw():
    """Exact, though with ``scale``: 1 here. Bases come in the first step."""
    lowered, dense = Narrow(), Narrow()
    rules = {"classifier|router": {"projection": "left"}, "trunk": {"method": "adamw"}}
    first = low_rank_adamw(
        lowered, lr=1e-2, rank=RANK, scale=1.0, module_rules=rules, max_full_gradient_bytes=2**20
    )
    second = low_rank_adamw(dense, lr=1e-2, method="adamw")
    losses = train(lowered, first, 20), train(dense, second, 20)
    assert all(first.matrices[name].full_rank for name in ("classifier.weight", "router.weight"))
    # the two round their sums in another order
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    ("rules", "lowered"),
    [
        ({"classifier": {"rank": 16}}, "rank lowered from 16"),
        ({"classifier": {"rank": 3}}, ""),
        (
            {"classifier": {"rank": "auto", "rank_candidates": [2, 4]}},
            "largest rank lowered from 4",
        ),
        ({"classifier": {"method": "apollo", "rank": 4}}, "rank lowered from 4"),
        ({"classifier": {"method": "apollo"}}, ""),  # a quarter of the smaller side, at least 1
        ({"classifier": {"method": "apollo_mini"}}, ""),
        ({"reward": {"rank": 2}}, "rank lowered from 8"),  # and the reward's own rule is no error
    ],
)
def test_ranks_of_module_rules_are_lowered_too(rules, lowered):
    rows = {
        row.name: row for row in low_rank_adamw(Narrow(), rank=RANK, module_rules=rules).describe()
    }
    assert rows["classifier.weight"].reason == lowered
    assert rows["reward.weight"].reason == "a vector in disguise"


def test_a_target_that_is_a_vector_is_no_error():
    rows = {
        row.name: row
        for row in low_rank_adamw(Narrow(), target_modules=["trunk", "reward"]).describe()
    }
    assert rows["reward.weight"].rule == "adamw"
    assert rows["trunk.weight"].rule == "lowrank_adamw"


def test_a_narrow_first_reader_does_not_lower_the_rank_of_those_it_shares_with():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.up = nn.Linear(N, 4), nn.Linear(N, 24)
            self.first = nn.Linear(N, 4)

        def forward(self, x):
            return (self.router(x) + self.first(x)).sum(-1, keepdim=True) + self.up(x)

    model = Reader()
    optimizer = low_rank_adamw(model, rank=RANK, share_basis=True, update_interval=3)
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(16, N, generator=torch.Generator().manual_seed(step))
        (model(x) - x[:, :24]).square().mean().backward()
        optimizer.step()
    router, up, first = (optimizer.matrices[f"{n}.weight"] for n in ("router", "up", "first"))
    assert router.columns is up.columns is first.columns
    assert (router.rank, up.rank, router.moments.exp_avg.shape) == (RANK, RANK, (4, RANK))


# -- 8 bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options", "dtype"),
    [
        ((255, 48), {"rank": 16}, "fp32"),
        ((256, 48), {"rank": 16}, "int8"),
        ((48, 300), {"rank": 16}, "fp32"),  # the rows of a right projection are the weight's
        ((48, 300), {"rank": 16, "projection": "left"}, "int8"),
        ((300, 200), {"rank": 63, "projection": "two_sided"}, "fp32"),
        ((300, 200), {"rank": 64, "projection": "two_sided"}, "int8"),
        ((48, 60), {"rank_candidates": (128, 256), "projection": "two_sided"}, "fp32"),  # 48 x 48
        # of its largest rank, whichever is in force: a refresh changes no storage
        ((256, 48), {"rank_candidates": (2, 16)}, "int8"),
        ((255, 48), {"rank_candidates": (2, 16)}, "fp32"),
        ((255, 48), {"rank": 16, "second_moment": "factored"}, "fp32"),
        ((255, 48), {"method": "apollo", "rank": 16}, "fp32"),
        ((256, 48), {"method": "apollo", "rank": 16}, "int8"),
    ],
)
def test_moments_too_small_for_int8_stay_in_fp32_and_said(shape, options, dtype):
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = low_rank_adamw([weight], state_dtype="int8", **options)
    (row,) = optimizer.describe()
    small = "moments in fp32, under 4096 elements"
    assert row.reason.endswith(small) == (dtype == "fp32")
    (matrix,) = optimizer.matrices.values()
    assert matrix.moments.exp_avg.dtype == matrix.state_dtype == dtype
    if matrix.settings.rule.chooses_rank:  # what a budget of ranks counts
        bytes_at = matrix.moment_bytes_at(matrix.rank)
        assert bytes_at == sum(state.nbytes for state in matrix.states().values())


def test_a_budget_counts_what_small_matrices_hold():
    options = complete_options(
        {"state_dtype": "int8", "rank_candidates": (8, 16), "rank_budget": 1}
    )
    settings = settings_of(state_dtype="int8", rank_candidates=(8, 16))
    small = LowRank("small", (64, 48), settings)
    assert build_policy([[small]], options).bytes_at(0, 8) == (2 * 64 * 8 + 48 * 8) * 4


def LowRank(name, shape, settings) -> MatrixRule:
    from hmt_deepspeed.optim.rules.build import build_matrix

    return build_matrix(name, shape, (0, shape[0]), settings, torch.float32, torch.device("cpu"))


# -- heads and embeddings -------------------------------------------------------------------------

_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 40}
_SIZES |= {"num_attention_heads": 2, "num_labels": 3, "pad_token_id": 0}
HEADS = {  # model: weights of its heads
    "LlamaForCausalLM": {"lm_head"},
    "LlamaForSequenceClassification": {"score"},
    "LlamaForQuestionAnswering": {"qa_outputs"},
    "GPTNeoXForTokenClassification": {"classifier"},
    "RobertaForSequenceClassification": {"classifier.dense", "classifier.out_proj"},
    # its output layer is the embedding
    "BertForMaskedLM": {"cls.predictions.transform.dense", "bert.embeddings.word_embeddings"},
}


def build(name):
    import transformers

    family = next(f for f in ("Llama", "GPTNeoX", "Roberta", "Bert") if name.startswith(f))
    config = getattr(transformers, f"{family}Config")(**_SIZES)
    return getattr(transformers, name)(config)


@pytest.mark.parametrize("name", HEADS)
def test_heads_of_transformers_are_left_to_adamw(name):
    model = build(name)
    rows = {row.name: row for row in low_rank_adamw(model, rank=4).describe()}
    heads = {row.name for row in rows.values() if row.reason == "output head"}
    assert heads == {f"{head}.weight" for head in HEADS[name]}
    linears = [r for r in rows.values() if r.rule == "lowrank_adamw"]
    assert len(linears) == {"Llama": 7, "GPTNeoX": 4}.get(name.split("For")[0], len(linears))
    assert linears


def test_a_decoder_beside_the_base_model_is_no_head_and_a_wrapped_model_has_its_own():
    class Task(nn.Module):
        base_model_prefix = "encoder"

        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(8, 8))
            self.decoder = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(8, 8)])})
            self.score = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

    heads = {"score.0.weight", "score.2.weight"}
    assert head_weights(Task()) == heads
    assert head_weights(nn.Sequential(Task())) == {f"0.{name}" for name in heads}


def test_a_rule_of_adamw_adds_to_what_is_left_to_it():
    named = [
        (n, nn.Parameter(torch.ones(8, 8))) for n in ("embed", "lm_head", "x.lora_A", "q", "k")
    ]
    for rules, rule in (({}, "lowrank_adamw"), ({"q": {"method": "adamw"}}, "adamw")):
        rows = {
            row.name: row for row in low_rank_adamw(named, rank=2, module_rules=rules).describe()
        }
        for name, pattern in (("embed", "embed"), ("lm_head", "lm_head"), ("x.lora_A", "lora_")):
            assert rows[name][1:3] == ("adamw", f"{pattern!r} is left to AdamW")
        assert (rows["q"].rule, rows["k"].rule) == (rule, "lowrank_adamw")


def test_only_a_module_rule_gives_a_head_another_rule():
    model = build("LlamaForCausalLM")
    with pytest.raises(
        ValueError, match=r"'lm_head' decides nothing: .*\(output head\).*module rule"
    ):
        low_rank_adamw(model, rank=4, target_modules=["q_proj", "lm_head"])
    rules = {"lm_head|embed_tokens": {"method": "lowrank_adamw"}}
    optimizer = low_rank_adamw(model, rank=4, module_rules=rules)
    assert {"lm_head.weight", "model.embed_tokens.weight"} < optimizer.matrices.keys()
