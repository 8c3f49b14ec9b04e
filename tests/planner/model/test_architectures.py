"""Any architecture: the class that a config names, parameters to the last one, FLOPs, and commands that end well."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, model_type, tiny_config
from torch.utils.flop_counter import FlopCounterMode

from hmt_deepspeed.architectures import meta_model, model_class, read_config
from hmt_deepspeed.doctor import examine
from hmt_deepspeed.planner.command import main
from hmt_deepspeed.planner.model.listed import ListedShape
from hmt_deepspeed.planner.model.listed_workload import workload_of
from hmt_deepspeed.planner.model.models import shape_of_architecture
from hmt_deepspeed.planner.model.shapes import num_parameters, parameters
from hmt_deepspeed.planner.model.structure import listed_shape
from hmt_deepspeed.planner.run.memory import model_states
from hmt_deepspeed.planner.run.modes import OptimizerMode

BATCH, LENGTH = 2, 48
RUN = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "HMT", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "hmt": {"optimizer": {"method": "lowrank_adamw", "rank": 2}},
}


def named(name: str) -> Any:
    """The config as a checkpoint has it."""
    config = tiny_config(name)
    config.architectures = [ARCHITECTURES[name][2]]
    return config


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_parameter_and_every_byte_of_its_states(name: str) -> None:
    """Against the model as transformers builds it, and against the states that the engine would make."""
    from hmt_deepspeed.zero.dry_run import dry_run

    with torch.device("meta"):
        real = dict(model_type(name)(tiny_config(name)).named_parameters())
    shape = shape_of_architecture(named(name))
    assert num_parameters(shape) == sum(p.numel() for p in real.values())
    mode = OptimizerMode("lowrank_adamw", rank=2, expert_basis="auto")
    found = model_states(shape, mode)
    dense = sum(p.count for p in parameters(shape) if p.trained and not mode.is_low_rank(p))
    held = dry_run(RUN, partial(meta_model, named(name)), 1).held["device"]
    built = meta_model(named(name), torch.bfloat16).parameters()
    # DeepSeek's router stays in fp32 and needs no master: it is planned as bf16 with one
    held += sum(2 * p.numel() for p in built if p.dtype == torch.float32 and p.requires_grad)
    frozen = sum(2 * p.numel() for p in real.values() if not p.requires_grad)
    assert found.weights + found.optimizer - frozen + 4 * dense == held  # and counts of steps


QUICK = ("reward", "gemma3", "qwen2_vl", "t5", "whisper", "vit", "deepseek_v3", "mamba")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ARCHITECTURES],
)
def test_both_commands_end_well(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what one writes the other reads, of the model by the class that the config names."""
    named(name).save_pretrained(tmp_path)
    written = tmp_path / "ds.json"
    size = ["--model", str(tmp_path), "--machine", "rtx4090", "--num_ssds", "0", "--rank", "2"]
    # No search for the best choices, and a short one for the longest sequence and the largest batch.
    size += ["--policy", "paper", "--gpu_memory", "0.25"]
    main([*size, "--method", "lowrank_adamw", "--zero_stage", "1", "--write", str(written)])
    told = capsys.readouterr().out
    assert "It fits. Recommended " in told
    total = num_parameters(shape_of_architecture(named(name)))
    assert f"{total:,} parameters" in told
    assert ("rough are" in told) == isinstance(shape_of_architecture(named(name)), ListedShape)
    found = examine(written, str(tmp_path), ranks=1)
    assert not found.errors


# -- which class ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if n != "reward"])
def test_without_architectures_it_is_what_the_type_is_trained_as(name: str) -> None:
    assert model_class(tiny_config(name)).__name__ == ARCHITECTURES[name][2]


def test_a_config_that_nothing_here_builds_is_one_error(tmp_path: Path) -> None:
    config = named("llama")
    config.architectures = ["LlamaForDreaming"]
    with pytest.raises(ValueError, match=r"architectures is \['LlamaForDreaming'\].*legal"):
        model_class(config)
    with pytest.raises(ValueError, match="has no model for a config of AlignTextConfig"):
        model_class(transformers.AlignTextConfig())
    broken = tiny_config("llama")
    broken.hidden_act = "no such function"
    with pytest.raises(ValueError, match="cannot build LlamaForCausalLM"):
        meta_model(broken)
    code = {"model_type": "dreamer", "auto_map": {"AutoConfig": "dreamer.DreamerConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(code))
    with pytest.raises(ValueError, match="keeps its code beside its config"):
        read_config(str(tmp_path))
    with pytest.raises(SystemExit, match=r"error: .*keeps its code beside its config"):
        main(["--model", str(tmp_path), "--machine", "rtx4090"])
    (tmp_path / "ds.json").write_text(json.dumps(RUN))
    (error,) = examine(tmp_path / "ds.json", str(tmp_path)).errors
    assert "keeps its code beside its config" in error


# -- what is estimated ----------------------------------------------------------------------------------


def inputs(name: str) -> dict[str, Any]:
    ids = torch.arange(BATCH * LENGTH).remainder(100).view(BATCH, LENGTH) + 2
    if name == "whisper":
        return {"input_features": torch.rand(BATCH, 16, 64), "labels": ids}
    if name == "wav2vec2":
        return {"input_values": torch.rand(BATCH, LENGTH * 20 + 20), "labels": ids[:, :4]}
    if name == "vit":
        return {"pixel_values": torch.rand(BATCH, 3, 32, 32)}
    return {"input_ids": ids, "labels": torch.ones(BATCH) if name == "reward" else ids}


# DeepSeek-V3's keys are wider than its values, of whose width attention is counted; Whisper's first
# convolution, ALBERT's and ViT's heads for each token are where one of few would do.
MEASURED = {
    **dict.fromkeys(("llama", "reward", "bart", "bert", "mixtral", "qwen3_moe", "olmoe"), 0.001),
    **dict.fromkeys(("falcon", "bloom", "mamba", "t5", "wav2vec2"), 0.01),
    **dict.fromkeys(("gpt_oss", "whisper", "vit"), 0.05),
    **dict.fromkeys(("deepseek_v3", "albert"), 0.1),
}


@pytest.mark.parametrize("name", MEASURED)
def test_flops_are_those_of_the_modules(name: str) -> None:
    config = tiny_config(name)
    config._attn_implementation = config._experts_implementation = "eager"
    config.decoder_start_token_id = 0
    model = model_type(name)(config).train()
    shape = replace(listed_shape(model), eager=True)
    work = workload_of(shape, micro_batch=BATCH, seq_length=shape.length.fixed or LENGTH)
    with FlopCounterMode(display=False) as counter:
        model(**inputs(name))
    # model_flops counts all pairs, as eager attention does
    counted = sum(layer.count * layer.model_flops for layer in work.layers) / 3
    counted += work.head.forward_flops
    assert counted == pytest.approx(counter.get_total_flops(), rel=MEASURED[name])


def test_a_token_meets_its_experts_only() -> None:
    """Mixtral: two of four experts, of 3 x 32 x 64 elements in both layers."""
    config = named("mixtral")
    shape = listed_shape(meta_model(config))
    assert shape.active == num_parameters(shape) - 2 * 2 * 3 * 32 * 64
    assert any("2 of 4 for each token" in text for text in shape.coarse)


def test_an_encoder_is_neither_left_out_nor_taken_for_the_decoder() -> None:
    """Its work, its parameters and its frames, which are not the tokens of the decoder."""
    both = listed_shape(meta_model(named("whisper")))
    decoder = listed_shape(meta_model(tiny_config("whisper", encoder_layers=0)))
    assert num_parameters(both) - num_parameters(decoder) > 2 * 8000
    at = {"micro_batch": 1, "seq_length": 16}
    work, without = (workload_of(shape, **at) for shape in (both, decoder))
    more = work.head.forward_flops - without.head.forward_flops
    weights = 2 * (4 * 32 * 32 + 2 * 32 * 64)
    assert more == 2 * 32 * weights + 2 * 4 * 32 * 32 * 32  # 32 frames; two layers' attention
    assert work.shared_bytes > without.shared_bytes


def test_a_family_row_is_for_the_model_it_describes() -> None:
    """A reward model is no language model: read from the model, as is an activation that no row has."""
    assert not isinstance(shape_of_architecture(named("llama")), ListedShape)
    assert isinstance(shape_of_architecture(named("reward")), ListedShape)
    other = tiny_config("llama", hidden_act="tanh")
    assert isinstance(shape_of_architecture(other), ListedShape)


@pytest.mark.slow
def test_every_type_of_transformers() -> None:
    """All that can be built from its own defaults, at its full size: to the last parameter."""
    built = 0
    for kind in sorted(transformers.CONFIG_MAPPING.keys()):
        try:
            config = transformers.CONFIG_MAPPING[kind]()
        except Exception:  # one that has no defaults
            continue
        try:
            model = meta_model(config)
        except ValueError:  # a part of a model, defaults that do not go together, a missing package
            continue
        shape = listed_shape(model)
        assert num_parameters(shape) == sum(p.numel() for p in model.parameters()), kind
        length = min(64, shape.max_length) if shape.positions else 64
        work = workload_of(shape, micro_batch=1, seq_length=length)
        assert work.forward_flops > 0, kind
        assert work.saved_bytes > 0, kind
        built += 1
    assert built > 200
