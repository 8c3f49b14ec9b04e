"""The model of a run: a Llama preset with random weights, a local folder, or a hub id.

Under ZeRO-3 no rank ever holds the whole model: presets are built and checkpoints are loaded
partitioned, parameter by parameter.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hmt_deepspeed.architectures import idle_elements, read_config
from hmt_deepspeed.memory.weights import taking_host_memory
from hmt_deepspeed.report.metrics import model_flops_per_token
from hmt_deepspeed.train.hub import existing_path, hub_error


class Preset(NamedTuple):
    """A Llama shape. The vocabulary is the tokeniser's, so totals differ from the name."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    max_positions: int


# 125m and 350m: the shapes of GPT-3 small and medium with SwiGLU (8/3 of hidden); 1b: TinyLlama;
# 3b: OpenLLaMA-3B; 7b, 13b and 70b: Llama 2.
PRESETS = {
    "tiny": Preset(256, 704, 4, 8, 4, 2048),
    "125m": Preset(768, 2048, 12, 12, 12, 2048),
    "350m": Preset(1024, 2736, 24, 16, 16, 2048),
    "1b": Preset(2048, 5632, 22, 32, 4, 2048),
    "3b": Preset(3200, 8640, 26, 32, 32, 2048),
    "7b": Preset(4096, 11008, 32, 32, 32, 4096),
    "13b": Preset(5120, 13824, 40, 40, 40, 4096),
    "70b": Preset(8192, 28672, 80, 64, 8, 4096),
}
LEGAL_MODELS = f"{', '.join(PRESETS)}, a local model folder, or a hub id"
_VOCAB_MULTIPLE = 64
_PROBE_TOKENS = 16


def resolve_bf16(ds_config: dict[str, Any], bf16_is_fast: bool) -> dict[str, Any]:
    """`ds_config` with `"bf16": {"enabled": "auto"}` replaced by whether the machine has it.

    A processor without bf16 instructions emulates them some twenty times slower than fp32.
    """
    section = ds_config.get("bf16")
    if not isinstance(section, dict) or section.get("enabled") != "auto":
        return ds_config
    return {**ds_config, "bf16": {**section, "enabled": bf16_is_fast}}


def bf16_is_fast(device: str) -> bool:
    """Whether bf16 matrix products run on hardware: any accelerator's answer, or oneDNN's."""
    if device.startswith("cuda"):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.startswith("cpu"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return True


def config_dtype(ds_config: dict[str, Any]) -> torch.dtype:
    """The weights' dtype that a DeepSpeed config asks for."""
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if (ds_config.get(name) or {}).get("enabled") is True:
            return dtype
    return torch.float32


def zero_stage(ds_config: dict[str, Any]) -> int:
    return int((ds_config.get("zero_optimization") or {}).get("stage", 0))


def model_path(name: str) -> Path | None:
    """The folder that `--model NAME` means, None for a preset or a hub id; ValueError otherwise."""
    if name in PRESETS:
        return None
    path = existing_path("--model", name)
    if path is not None and not (path / "config.json").is_file():
        raise ValueError(
            f"--model {name!r} has no config.json, so it is no Hugging Face model folder; "
            f"legal: {LEGAL_MODELS}"
        )
    return path


def model_config(name: str) -> Any:
    """The Hugging Face config of a local folder or hub id, None for a preset.

    Raises ValueError for a model that is not there or whose code is not in transformers; asking costs one small file.
    """
    if name in PRESETS:
        return None
    try:
        return read_config(str(model_path(name) or name))
    except OSError as error:
        raise hub_error("--model", name, LEGAL_MODELS, error) from error


def build_model(
    name: str, tokenizer: Any, seq_length: int, seed: int, ds_config: dict[str, Any]
) -> Any:
    """The causal LM of the run, in the config's dtype, partitioned under ZeRO-3.

    Under ZeRO-3 `deepspeed.init_distributed()` must have been called. A preset's weights depend
    on `seed` alone, not on stage or world size. Raises ValueError for a model that is not there
    or takes fewer than `seq_length` positions or tokens than the tokeniser has, and for tensor
    parallelism, which transformers stops at while it loads.
    """
    ranks_per_model = (ds_config.get("tensor_parallel") or {}).get("autotp_size") or 1
    if ranks_per_model > 1:
        raise ValueError(
            f"tensor_parallel.autotp_size is {ranks_per_model!r}; legal: 0 or 1. This run gives every rank "
            "data of its own: use ZeRO-3 to split weights over ranks."
        )
    dtype = config_dtype(ds_config)
    with _in_host_memory(name, len(tokenizer), seq_length, ds_config), _partitioned(ds_config):
        if name in PRESETS:
            return _random_model(PRESETS[name], tokenizer, seq_length, seed, dtype)
        return _pretrained_model(name, tokenizer, seq_length, dtype)


def _in_host_memory(
    name: str, vocab_size: int, seq_length: int, ds_config: dict[str, Any]
) -> contextlib.AbstractContextManager[None]:
    """The error of weights that are built in host memory and find none says how much they take."""
    from transformers import AutoModelForCausalLM

    zero = ds_config.get("zero_optimization") or {}
    if zero_stage(ds_config) < 3 or (zero.get("offload_param") or {}).get("device") != "cpu":
        return contextlib.nullcontext()

    def weights() -> int:
        config = model_config(name)
        if config is None:
            config = preset_config(PRESETS[name], vocab_size, seq_length)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config.get_text_config())
        return num_parameters(model) * config_dtype(ds_config).itemsize

    return taking_host_memory(weights)


@contextlib.contextmanager
def _partitioned(ds_config: dict[str, Any]) -> Iterator[None]:
    """Inside, transformers builds and loads models under `deepspeed.zero.Init` if stage is 3.

    transformers keeps only a weak reference to the config object: it must outlive the loading.
    """
    if zero_stage(ds_config) < 3:
        yield
        return
    from transformers.integrations import HfDeepSpeedConfig

    alive = HfDeepSpeedConfig(ds_config)
    try:
        yield
    finally:
        del alive


def preset_config(preset: Preset, vocab_size: int, seq_length: int, **tokens: int | None) -> Any:
    """The Llama config of a preset, for rows of ``seq_length``; the vocabulary is padded to a multiple of 64."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=-(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE,
        hidden_size=preset.hidden,
        intermediate_size=preset.intermediate,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.kv_heads,
        # Rotary positions have no weights: a model that starts here may be as long as its rows.
        max_position_embeddings=max(preset.max_positions, seq_length),
        tie_word_embeddings=False,
        **tokens,
    )


def _random_model(
    preset: Preset, tokenizer: Any, seq_length: int, seed: int, dtype: torch.dtype
) -> Any:
    from transformers import AutoModelForCausalLM

    config = preset_config(
        preset,
        len(tokenizer),
        seq_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    _initialize(model, seed, config.initializer_range)
    return model


def _initialize(model: Any, seed: int, std: float) -> None:
    """Norm weights 1, matrices normal(0, std) drawn in fp32 from a generator per parameter.

    Rank 0 draws and gives away partitioned parameters; replicas draw the same numbers.
    """
    for index, parameter in enumerate(model.parameters()):
        with _gathered(parameter) as writes, torch.no_grad():
            if not writes:
                continue
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            generator = torch.Generator().manual_seed((seed << 20) + index)
            values = torch.empty(parameter.shape, dtype=torch.float32)
            parameter.copy_(values.normal_(0.0, std, generator=generator))


@contextlib.contextmanager
def _gathered(parameter: Any) -> Iterator[bool]:
    """The whole parameter; yields whether this rank's writes count."""
    if not hasattr(parameter, "ds_id"):
        yield True
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield deepspeed.comm.get_rank() == 0


def _pretrained_model(name: str, tokenizer: Any, seq_length: int, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    config = model_config(name).get_text_config()
    _check_positions(name, getattr(config, "max_position_embeddings", None), seq_length)
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"--model {name!r} has {config.vocab_size} token embeddings, the tokeniser "
            f"{len(tokenizer)} tokens; give --tokenizer the model's own"
        )
    try:
        return AutoModelForCausalLM.from_pretrained(str(model_path(name) or name), dtype=dtype)
    except OSError as error:
        raise hub_error("--model", name, LEGAL_MODELS, error) from error


def _check_positions(name: str, max_positions: int | None, seq_length: int) -> None:
    if max_positions is not None and seq_length > max_positions:
        raise ValueError(
            f"--seq_length is {seq_length}, but --model {name!r} takes at most {max_positions} "
            "positions; give a shorter --seq_length or another model"
        )


def num_parameters(model: Any) -> int:
    """Parameters of the whole model, shared ones once, partitioned or not."""
    return sum(int(getattr(p, "ds_numel", p.numel())) for p in model.parameters())


def flops_per_token(model: Any, seq_length: int) -> float:
    """FLOPs of ordinary training per token, see :func:`model_flops_per_token`.

    An embedding counts where it is the head too, else tokens are only looked up in it. Of a mixture's experts those count
    that a token is sent to.
    """
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    is_tied = head is not None and head.weight is table
    looked_up = 0 if is_tied else int(getattr(table, "ds_numel", table.numel()))
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return model_flops_per_token(
        num_parameters(model) - looked_up - round(idle_elements(model)),
        config.num_hidden_layers,
        config.num_attention_heads * width,
        seq_length,
    )


def model_signature(model: Any) -> str:
    """Digest of every parameter's name and full shape: equal for the same architecture."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name}:{tuple(getattr(parameter, 'ds_shape', parameter.shape))}\n".encode())
    return digest.hexdigest()


@torch.no_grad()
def keeps_documents_apart(engine: Any, seq_length: int, vocab_size: int) -> bool:
    """Ask the model: is a row's second document free of its first? False where a forward takes no `position_ids`.

    Compares the loss of the second document for two first ones. Every rank of the engine calls it.

    Args:
        engine: of DeepSpeed; left in training mode.
        seq_length: tokens of a row, of which the probe has at most 16.
        vocab_size: tokens that the probe chooses from.
    """
    size = min(_PROBE_TOKENS, seq_length)
    half = size // 2
    ids = torch.arange(size, device=engine.device)[None] % vocab_size
    other = ids.clone()
    other[:, :half] = ids[:, :half].flip(1)
    positions = torch.cat([torch.arange(half), torch.arange(size - half)])[None]
    positions = positions.to(engine.device)
    labels = ids.masked_fill(torch.arange(size, device=engine.device) <= half, -100)
    engine.eval()
    try:
        first, second = (
            engine(input_ids=x, position_ids=positions, labels=labels, use_cache=False).loss
            for x in (ids, other)
        )
    except TypeError:  # a forward without position_ids
        return False
    finally:
        engine.train()
    return torch.equal(first, second)
