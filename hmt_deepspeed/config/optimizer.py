"""`hmt.optimizer`: every field bounded and documented."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from hmt_deepspeed.config.conflicts import conflict_problems
from hmt_deepspeed.config.fields import (
    BLOCK_NAME,
    Auto,
    Full,
    Method,
    NonEmptyRegexList,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    RankList,
    Regex,
    StrictModel,
)
from hmt_deepspeed.config.optimizer_conflicts import conflicts_of
from hmt_deepspeed.config.problems import field_problems, unknown_key_text
from hmt_deepspeed.rules import DEFAULT, RULES, methods, rule_of

__all__ = ["ModuleRule", "OptimizerConfig"]

_MAX_SEED = 2**63 - 1  # the largest seed a torch.Generator takes as a signed 64-bit integer

_FIRST_ROWS = [rule_of(method) for method in methods()]
_OF_METHODS = "; ".join(f"{rule.method}: {rule.text}" for rule in _FIRST_ROWS)
_OF_RANKS = "".join(
    f' "auto" of "{rule.method}" is {rule.fixed_rank or f"{rule.auto_share} of the smaller side"}.'
    for rule in _FIRST_ROWS
    if not rule.chooses_rank and not rule.is_dense
)
_OF_WHOLE_MATRICES = " and ".join(
    f'"{rule.method}"' for rule in RULES.values() if ("rank", "full") in rule.where
)
_OF_SCALES = "".join(
    f' Of "{rule.method}" auto is the published {rule.scale:g}, at its published rate.'
    for rule in _FIRST_ROWS
    if not rule.is_dense and rule.beside_ratio == 1
)
_OF_FACTORS = "; ".join(
    f'of "{rule.method}" the update is multiplied by {rule.scale:g}, in r of n columns by no more than '
    f"{rule.full_scale:g} x n / r, and beside it embeddings have "
    f"{rule.embedding_ratio:g} times the rate, heads and vectors {rule.beside_ratio:g} times"
    for rule in _FIRST_ROWS
    if rule.beside_ratio != 1
)
_OF_FACTORS = f"{_OF_FACTORS[0].upper()}{_OF_FACTORS[1:]}."
_OF_STATES = " and ".join(
    f'{rule.usual_states} of "{rule.method}"' for rule in _FIRST_ROWS if rule.usual_states != "fp32"
)
Projection = Literal["right", "left", "auto", "two_sided"]
RangeFinder = Literal["randomized", "subspace", "svd", "random"]
Residual = Literal["none", "probe", "full"]
StateDtype = Literal["auto", "fp32", "bf16", "int8"]
SecondMoment = Literal["full", "factored"]
EnergyEstimate = Literal["in_sample", "out_of_sample"]
ExpertBasis = Literal["auto", "shared", "own"]
Scale = Auto | PositiveFloat


class ModuleRule(StrictModel):
    """A value of `hmt.optimizer.module_rules`: at least one field; others are taken from `hmt.optimizer`.

    lr_scale: factor on the learning rate of all that matches, vectors too; weight decay, `lr` x `weight_decay`, stays.
    Alone it leaves the rule as it is.
    """

    method: Method | None = None
    projection: Projection | None = None
    rank: Auto | Full | PositiveInt | PositiveFraction | None = None
    rank_candidates: RankList | Auto | None = Field(
        default=None,
        json_schema_extra={
            "legal": 'null, "auto" or a non-empty, strictly increasing list of integers >= 1'
        },
    )
    energy_threshold: float | None = Field(default=None, gt=0, le=1)
    range_finder: RangeFinder | None = None
    residual: Residual | None = None
    scale: Scale | None = None
    lr_scale: PositiveFloat | None = None


class OptimizerConfig(StrictModel):
    """`hmt.optimizer`: what the optimizer does with each linear's gradient.

    lr, betas, eps and weight_decay stay in DeepSpeed's own `optimizer.params`.
    """

    method: Method = Field(
        default=DEFAULT,
        description=f"Update rule of the matrices. {_OF_METHODS}.",
        json_schema_extra={
            "who": " ".join(f"{rule.method}: {rule.who}." for rule in RULES.values() if rule.who)
        },
    )
    projection: Projection = Field(
        default="right",
        description="Side of the gradient that is projected; auto is GaLore's rule, the smaller side; "
        "two_sided is the HMT paper's r x r core.",
        json_schema_extra={
            "who": "auto: the smallest bases, 2.503 against right's 2.515 (1M tokens, a quarter of the width). "
            "two_sided: smaller moments, 2.666."
        },
    )
    rank: Auto | Full | PositiveInt | PositiveFraction = Field(
        default="auto",
        description="Rank of each basis: a fixed number, lowered to the smaller side of a narrower matrix, a "
        "share of that side, or "
        f'chosen per matrix from the candidates.{_OF_RANKS} "full" of {_OF_WHOLE_MATRICES}: whole matrices, '
        "without bases.",
        json_schema_extra={
            "who": "Everyone, first: Muon in half the width ended 3 to 6 % below AdamW, in a quarter 0 to 1 % above; wide "
            "models in small steps, which its products of r x r matrices slow down."
        },
    )
    rank_candidates: RankList | Auto = Field(
        default="auto",
        description='Ranks that "rank": "auto" chooses from; those above a matrix\'s smaller side '
        'are lowered to it. "auto": an eighth to a half of the smaller side of each.',
        json_schema_extra={
            "legal": '"auto" or a non-empty, strictly increasing list of integers >= 1',
            "who": 'A few fixed ranks in place of shares of each width; only with "rank": "auto".',
        },
    )
    energy_threshold: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description='"rank": "auto" takes the smallest candidate that captures this share of the '
        "gradient's squared Frobenius norm, as far as rank_budget has the bytes.",
        json_schema_extra={
            "who": "More: a loss that lags AdamW's, with memory to spare. Out of sample 0.7 ended 1 to 11 % "
            "below AdamW, in sample 0.95 12 % above."
        },
    )
    energy_estimate: EnergyEstimate = Field(
        default="out_of_sample",
        description="Whose captured energy chooses ranks: what is expected of the gradients that follow, from what "
        "the last bases held of them along each direction; or that of the gradient a basis is made from, noise "
        "included (the HMT paper's, with thresholds of 0.9 and more).",
        json_schema_extra={
            "who": "in_sample: whoever repeats the HMT paper. With 2,048 tokens a step seed 1 ended at 1.918, "
            "out of sample at 1.757."
        },
    )
    rank_budget: Auto | Annotated[float, Field(gt=0, le=1)] | None = Field(
        default="auto",
        description="Bytes that moments and bases may take together, as a share of what AdamW's moments of the "
        "same matrices take; they are spent where they capture most energy. auto: 0.5, or what the smallest "
        "candidates take; null: each matrix by its threshold alone.",
        json_schema_extra={
            "who": "A fixed amount of memory: spent by energy, the bytes of a fixed 64 ended 0.3 to 0.9 % below "
            "it. With the default's 8-bit momentum 0.117 leaves a thirty-second of AdamW's moments beside the bases."
        },
    )
    full_rank_budget: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Bytes, as a share of AdamW's moments of all matrices, that matrices may take for "
        "full-rank AdamW, at the same learning rate and scale, when no candidate reaches the threshold; needs "
        '"rank_budget": null.',
        json_schema_extra={
            "who": "Models with a few matrices that no candidate serves; not measured in training."
        },
    )
    update_interval: int = Field(
        default=200,
        ge=1,
        description="Optimizer steps between two bases of one matrix. The first bases come as fast as "
        "max_full_gradient_bytes allows; then each matrix has a step of its own, spread over the interval.",
        json_schema_extra={
            "who": "Runs of a few hundred steps. Over 5M tokens 50 ended at 1.652, 200 at 1.601, 400 at 1.603 (seed 0)."
        },
    )
    range_finder: RangeFinder = Field(
        default="randomized",
        description="How a basis is found: randomised subspace iteration, one warm-started power step, "
        "a full SVD, or random from a seed, which needs no gradient and stores nothing.",
        json_schema_extra={
            "who": "svd: whoever checks the others (11 times slower, case range_finder). random: bases without "
            "storage, 2.617 against 2.515 (1M tokens)."
        },
    )
    residual: Residual = Field(
        default="probe",
        description="What becomes of the gradient outside the basis: dropped, applied along random "
        "probe columns without states, or applied in full (Fira), which needs the whole gradient. "
        "Nothing before a matrix has its first basis from a gradient.",
        json_schema_extra={
            "who": "full: room for whole gradients; Fira ended at 1.724, probe at 1.722. none: no clipping, and "
            "k columns fewer (2.522, probe 2.511, 1M tokens)."
        },
    )
    share_basis: bool = Field(
        default=False,
        description="One basis for the linears that read the same input, taken from their stacked "
        "gradients.",
        json_schema_extra={"who": "Bases that weigh too much: 2.532 against 2.515 (1M tokens)."},
    )
    expert_basis: ExpertBasis = Field(
        default="auto",
        description="Bases of a mixture's experts, whose weights are 3-D: one for all experts of a weight, on the side of "
        "the stream that they read and write, or one of each expert on its inputs. auto: one, but of down projections "
        "what captures more of a later gradient at equal bytes of moments and bases. `projection` decides nothing for "
        "them.",
        json_schema_extra={
            "who": "own: experts that read little in common, with memory to spare. shared: the smallest bases."
        },
    )
    probes: Auto | Annotated[int, Field(ge=0)] = Field(
        default="auto",
        description='Probe columns k per matrix; "auto" is a quarter of its rank r and at least 8, and 8 with "residual": '
        '"none", on a GPU so many more that r + k is a multiple of 16; never more than lie outside its basis. 0 only '
        'with "residual": "none" and without gradient clipping, whose norm is estimated from them.',
        json_schema_extra={
            "who": "More, at the cost of time: half as many as the rank took 3 % of the tokens/s, as many 9 %; they "
            "ended at 2.446 and 2.445, a quarter at 2.449 (1M tokens)."
        },
    )
    projected_backward: Auto | bool = Field(
        default="auto",
        description="Backward forms the projected gradient without the full one: wherever it can, "
        "everywhere or it is an error (true), or nowhere (false). `torch.autograd.grad(loss, weight)` needs "
        "false, or a module rule that leaves the module to adamw.",
        json_schema_extra={
            "who": "false: code that asks autograd for a weight's gradient, or reads whole gradients."
        },
    )
    scale: Scale = Field(
        default="auto",
        description=f'Factor on the update. "auto": AdamW\'s lr and weight_decay hold. {_OF_FACTORS}{_OF_SCALES} A '
        "number is GaLore's alpha, 1 in the HMT paper, and all parameters have the rate that is given.",
        json_schema_extra={
            "who": "A number: whoever goes on with GaLore's settings and learning rate."
        },
    )
    max_full_gradient_bytes: Auto | PositiveInt = Field(
        default="auto",
        description="Bytes of full gradients alive at once while bases are refreshed; auto: an eighth of all low-rank "
        "matrices', above 1 GiB of it 1 GiB or a thirty-second; at least the largest matrix.",
        json_schema_extra={
            "who": "More: runs of a few hundred steps, whose first bases then come sooner. Less: devices that a "
            "refresh overfills."
        },
    )
    state_dtype: StateDtype = Field(
        default="auto",
        description="Storage of the moments: fp32, bf16 with stochastic rounding, or 8 bits in blocks "
        f"of 256. auto: {_OF_STATES}, fp32 of the others, and of AdamW's. "
        "Moments of fewer than 4096 elements stay in fp32 where they would be int8; those of AdamW's "
        "tensors also where they would be bf16, and those of its vectors whatever their size.",
        json_schema_extra={
            "who": "int8: the least memory; low-rank AdamW at a quarter of the width 2.520 against fp32's 2.515 (1M "
            "tokens), Muon by seed 1.720 and 1.692 against 1.718 and 1.714 (5M)."
        },
    )
    second_moment: SecondMoment = Field(
        default="full",
        description="Adam's second moment of the low-rank matrices: of every element, or as its row and column "
        "means (Adafactor), in fp32: rows + rank numbers instead of rows x rank.",
        json_schema_extra={
            "who": "factored: the least memory. With INT8 and 3/8 of the width a twentieth of AdamW's bytes "
            "ended 0.1 to 9 % below it."
        },
    )
    master_weights: Literal["fp32", "none"] = Field(
        default="fp32",
        description="fp32 master copy of 16-bit weights, or none: updates are then written to the "
        "16-bit weights with stochastic rounding. INT8 weights have none either way.",
        json_schema_extra={
            "who": "none: a 7B on 24 GB (recipe_7b_24gb.json); 4 bytes an element less."
        },
    )
    weight_dtype: Literal["auto", "int8"] = Field(
        default="auto",
        description="Storage of the low-rank linears' and experts' weights at ZeRO 0-2: the model's dtype, or INT8 in "
        "blocks of 256 without masters, decoded for each product and updated with stochastic rounding.",
        json_schema_extra={
            "who": "int8: the largest model on one card; 2.511 against 2.515 (1M tokens)."
        },
    )
    target_modules: NonEmptyRegexList | Literal["all"] | None = Field(
        default=None,
        description="Regular expressions searched in a parameter's name; the matches get the "
        "low-rank rule. null: every linear. Embeddings, output heads (of transformers' models classifiers and scores "
        "too) and LoRA's adapters are left to plain AdamW either way; module_rules alone give these a rule. "
        "all: every matrix but adapters', embeddings and heads too.",
        json_schema_extra={
            "legal": 'null, "all" or a non-empty list of non-empty regular expressions',
            "who": "Whoever trains only some linears at low rank, or with the least memory every matrix.",
        },
    )
    module_rules: dict[Regex, ModuleRule] = Field(
        default={},
        description="Rules of their own for modules, by regular expression, embeddings and head too; "
        '{"method": "adamw"} leaves them to plain AdamW. The first match decides, before every other pattern. '
        "A rule sets at least one field; the others are taken from hmt.optimizer, under another method all but rank "
        "and scale. lr_scale is a factor on the learning rate, and alone leaves everything else as it is.",
        json_schema_extra={
            "legal": "an object of regular expressions and objects",
            "who": "Ranks by layer: queries and keys at half the width, the rest at a quarter, ended at 1.733, "
            "all at a quarter at 1.804.",
        },
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=_MAX_SEED,
        description="Seed of the random bases and of the probe columns.",
        json_schema_extra={"who": "Whoever repeats a run with other draws."},
    )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> OptimizerConfig:
        """Validate fields that are given in Python.

        Raises:
            TypeError: an unknown field, and what to do.
            ValueError: a line for every problem: the full key, the value given, what is legal and what to do.
        """
        path = f"{BLOCK_NAME}.optimizer"
        for name in fields:
            if name not in cls.model_fields:
                text = unknown_key_text(name, path, cls, cls, path)
                raise TypeError(f"HMT() got an unexpected field {name!r}. {text}")
        try:
            return cls.model_validate(dict(fields))
        except ValidationError as error:
            problems = field_problems(error, cls, path)
        problems |= conflict_problems(dict(fields), path, problems, conflicts_of)
        raise ValueError("\n".join(f"{key}: {text}" for key, text in problems.items()))

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> OptimizerConfig:
        conflicts = conflicts_of(self.model_dump(exclude_unset=True))
        if conflicts:
            raise ValueError(" ".join(f"{c.key}: {c.advice}" for c in conflicts))
        return self
