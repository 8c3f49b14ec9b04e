"""Every heavy operation of a decoder layer belongs to a component, and to the right one."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from families import tiny, tokens
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hmt_deepspeed.attribution import Attribution, attribute

HEAVY = {"mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm"}

# What runs in one layer: family -> outputs of q, k, v / of the MLP before its activation.
FAMILIES = {
    "llama": (3, 2),
    "mistral": (3, 2),
    "qwen2": (3, 2),
    "qwen3": (3, 2),
    "gemma": (3, 2),
    "gemma2": (3, 2),
    "gemma3": (3, 2),
    "phi": (3, 1),
    "phi3": (1, 1),
    "gpt2": (1, 1),
    "gpt_neox": (1, 1),
    "opt": (3, 1),
}
POST_NORM = {"gemma2", "gemma3"}
EAGER = {"gemma2"}  # by its soft-cap: Q K^T and P V
HEADS = {family: "lm_head" for family in FAMILIES}
FINAL_NORMS = {
    "phi": "model.final_layernorm",
    "gpt2": "transformer.ln_f",
    "gpt_neox": "gpt_neox.final_layer_norm",
    "opt": "model.decoder.final_layer_norm",
}


class HeavyOps(TorchDispatchMode):
    """Counts heavy operations by the component of the module they run in.

    ``seen`` is (pass, layer, component); an exit is "exit", what has neither is None.
    """

    def __init__(self, attribution: Attribution) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, str, str | None]] = Counter()
        self.phase = "forward"
        self._stack: list[tuple[str, str | None]] = []
        self._hooks: list[Any] = []
        for layer in attribution.layers:
            for name, module in layer.module.named_modules():
                known: str | None = "exit" if name in layer.exits else layer.components.get(name)
                place = (layer.name, known)
                self._hooks += [
                    module.register_forward_pre_hook(lambda *_, place=place: self._push(place)),
                    # early stop leaves modules by an exception
                    module.register_forward_hook(lambda *_: self._pop(), always_call=True),
                ]

    def _push(self, place: tuple[str, str | None]) -> None:
        self._stack.append(place)

    def _pop(self) -> None:
        self._stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if self._stack and (name in HEAVY or "attention" in name):
            self.seen[(self.phase, *self._stack[-1])] += 1
        return func(*args, **(kwargs or {}))


def run(model: nn.Module) -> tuple[Attribution, HeavyOps]:
    """One step under plain checkpointing: forward, then what early stop leaves to be run again."""
    attribution = attribute(model)
    model.activation_checkpointing_enable()
    ops = HeavyOps(attribution)
    ids = tokens()
    with ops:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        ops.phase = "again"
        loss.backward()
    assert not ops._stack
    return attribution, ops


@cache
def step(family: str) -> tuple[Attribution, HeavyOps]:
    return run(tiny(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_heavy_operation_of_a_layer_has_its_component(family: str) -> None:
    attribution, ops = step(family)
    qkv, mlp = FAMILIES[family]
    expected = {"attention_qkv": qkv, "mlp_intermediate": mlp}
    expected["attention_output"] = 2 if family in EAGER else 1
    expected |= {"residual": 2} if family in POST_NORM else {"residual": 1, "exit": 1}
    assert len(attribution.layers) == 2
    for layer in attribution.layers:
        found = {
            c: n
            for (phase, name, c), n in ops.seen.items()
            if (phase, name) == ("forward", layer.name)
        }
        assert found == expected
    assert attribution.unattributed == ()
    assert attribution.head == HEADS[family]
    assert attribution.final_norm == FINAL_NORMS.get(family, "model.norm")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exit_is_what_backward_does_not_need(family: str) -> None:
    """Early stop runs everything of a layer again but its exits."""
    attribution, ops = step(family)
    for layer in attribution.layers:
        for component in {*layer.components.values(), "exit"} - {"layernorm"}:
            first = ops.seen["forward", layer.name, component]
            assert ops.seen["again", layer.name, component] == (0 if component == "exit" else first)


def test_an_mlp_whose_output_enters_a_norm_is_no_exit() -> None:
    """OPT-350m: its norms follow the sums, and read what fc2 computes."""
    attribution = attribute(tiny("opt", do_layer_norm_before=False))
    for layer in attribution.layers:
        assert layer.components["fc2"] == "residual"
        assert layer.exits == frozenset()
    assert attribute(tiny("opt")).layers[0].exits == {"fc2"}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_eager_attention_is_the_attention_modules(family: str) -> None:
    attribution, ops = run(tiny(family, attn_implementation="eager"))
    for layer in attribution.layers:
        assert ops.seen["forward", layer.name, "attention_output"] == 2  # Q K^T and P V


def test_norms_are_layernorm_and_nothing_else() -> None:
    for family in FAMILIES:
        layer = step(family)[0].layers[1]
        norms = {n for n, m in layer.module.named_modules() if "Norm" in type(m).__name__}
        assert {n for n, c in layer.components.items() if c == "layernorm"} == norms


# -- what is not known --------------------------------------------------------------------------------


def test_layers_of_an_unknown_family_are_refused_with_what_to_write() -> None:
    with pytest.raises(ValueError, match=r"MambaForCausalLM .* no known family.*mixer.*components"):
        attribute(tiny("mamba"))


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(width, width) for _ in range(3))
        self.wo = nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x))) + self.wo(self.wq(x) * self.wk(x) * self.wv(x))


class Tower(nn.Module):
    """A language model with a vision tower whose layers look just like its own."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleDict(
            {"blocks": nn.ModuleList([Block()]), "patch": nn.Linear(16, 16)}
        )
        self.embed = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 11)


RULES = {r"\.w[qkv]$": "attention_qkv", r"\.wo$": "residual"}


def test_a_bare_module_is_attributed_by_the_users_rules() -> None:
    model = Tower()
    attribution = attribute(model, {r"^blocks\..*" + p: c for p, c in RULES.items()})
    assert [layer.name for layer in attribution.layers] == ["blocks.0", "blocks.1"]
    assert attribution.layers[1].module is model.blocks[1]
    assert attribution.layers[0].components == {
        **dict.fromkeys(("wq", "wk", "wv"), "attention_qkv"),
        "wo": "residual",
        "fc1": "mlp_intermediate",
    }
    assert attribution.layers[0].exits == {"fc2"}
    assert (attribution.head, attribution.final_norm) == ("head", "norm")
    assert attribution.unattributed == ("vision",)


def test_a_rule_that_matches_in_another_list_makes_it_layers() -> None:
    attribution = attribute(Tower(), RULES)
    assert [layer.name for layer in attribution.layers] == [
        "blocks.0",
        "blocks.1",
        "vision.blocks.0",
    ]
    assert attribution.unattributed == ("vision.patch",)


def test_the_language_model_is_what_the_model_says_it_is() -> None:
    model = Tower()
    model.vision.blocks.extend(Block() for _ in range(4))  # larger than the language model
    model.decoder = nn.ModuleDict({"blocks": model.blocks})
    del model.blocks
    model.get_decoder = lambda: model.decoder
    attribution = attribute(model, {r"^decoder\..*" + p: c for p, c in RULES.items()})
    assert [layer.name for layer in attribution.layers] == ["decoder.blocks.0", "decoder.blocks.1"]
    assert attribution.unattributed == ("vision",)


def test_a_list_within_a_layer_is_part_of_it() -> None:
    model = Tower()
    model.blocks[1].experts = nn.ModuleList([nn.Linear(16, 16)])
    attribution = attribute(model, {r"^blocks.*(w.|experts\.\d)$": "mlp_intermediate"})
    assert [layer.name for layer in attribution.layers] == ["blocks.0", "blocks.1"]
    assert attribution.layers[1].components["experts.0"] == "mlp_intermediate"


def test_a_rule_decides_before_the_table_and_the_first_before_the_next() -> None:
    rules = {"q_proj": "residual", r"[qk]_proj": "mlp_intermediate", r"down_proj": "residual"}
    components = attribute(tiny("llama"), rules).layers[0].components
    assert components["self_attn.q_proj"] == "residual"
    assert components["self_attn.k_proj"] == "mlp_intermediate"
    assert components["self_attn.v_proj"] == "attention_qkv"
    assert components["mlp.down_proj"] == "residual"


def test_head_and_final_norm_may_be_named() -> None:
    model = nn.Module()
    model.layers, model.last = nn.ModuleList([Block()]), nn.LayerNorm(16)
    model.to_vocabulary = nn.Linear(16, 11)
    attribution = attribute(model, {"^to_voc": "lm_head", "^last$": "layernorm"})
    assert (attribution.head, attribution.final_norm) == ("to_vocabulary", "last")
    assert attribution.unattributed == ("layers.0.wq", "layers.0.wk", "layers.0.wv", "layers.0.wo")


def test_an_adapters_matrices_belong_to_what_they_adapt() -> None:
    model = tiny("llama")
    for layer in model.model.layers:
        wrapper = nn.Module()
        wrapper.base_layer = layer.self_attn.q_proj
        wrapper.lora_A = nn.ModuleDict({"default": nn.Linear(32, 2)})
        wrapper.lora_B = nn.ModuleDict({"default": nn.Linear(2, 32)})
        layer.self_attn.q_proj = wrapper
    attribution = attribute(model)
    for part in ("base_layer", "lora_A.default", "lora_B.default"):
        assert attribution.layers[0].components[f"self_attn.q_proj.{part}"] == "attention_qkv"
    assert attribution.unattributed == ()


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"qproj": "attention_qkv"}, "'qproj' matches no module"),
        ({"embed_tokens": "layer_input"}, "is 'layer_input', legal: attention_qkv"),
        ({"": "lm_head"}, "'lm_head' is given to .* legal is one module"),
    ],
)
def test_bad_rule_is_refused(rules: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)hmt.activations.components.*{words}"):
        attribute(tiny("llama"), rules)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no decoder layers in Linear, legal is .*ModuleList"):
        attribute(nn.Linear(2, 2))
