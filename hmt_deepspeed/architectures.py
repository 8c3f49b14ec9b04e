"""The model that a Hugging Face config describes, on the meta device: shapes, no weights, no network.

The class is the one that the config names; where it names none, the one that transformers' auto mappings have for
its type. A leaf: whoever asks what a model would be without building it starts here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

__all__ = [
    "Experts",
    "experts_of",
    "field_of",
    "idle_elements",
    "meta_model",
    "meta_twin",
    "model_class",
    "read_config",
]

# transformers' auto mappings, in the order in which a config without `architectures` is looked up: what the type
# is trained as first, its bare body last. An encoder-decoder's first two come before them: of some of these there is
# a class of the decoder alone too, which has half of the parameters.
_ENCODER_DECODER = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
_MAPPINGS = (
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "MASKED_LM",
    "CAUSAL_LM",
    "CTC",
    "PRETRAINING",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "OBJECT_DETECTION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "TEXT_TO_SPECTROGRAM",
    "TEXT_TO_WAVEFORM",
)

# What configs call the experts of a layer, and those that a token is sent to.
_EXPERTS = (
    "num_local_experts",
    "n_routed_experts",
    "num_experts",
    "moe_num_experts",
    "num_experts_per_layer",
)
_CHOSEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
    "num_selected_experts",
    "top_k",
)


def read_config(name: str) -> Any:
    """The config of a local folder or hub id.

    Raises:
        ValueError: one whose code is beside it, or of a type that transformers does not have.
        OSError: one that is not there.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise _remote_code(name) from None
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"the config of {name!r} cannot be read: {reason}") from error


def _remote_code(name: str) -> ValueError:
    return ValueError(
        f"the model {name!r} keeps its code beside its config (auto_map), which is not run here; legal: a model whose "
        "class is in transformers. Use such a one, or ask about a model of the same shape that is."
    )


def model_class(config: Any) -> type:
    """The class of a config's model.

    Raises:
        ValueError: a class that the installed transformers does not have.
    """
    import transformers

    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type):
            return found
    if config.architectures and getattr(config, "auto_map", None):
        raise _remote_code(config.architectures[0])
    if config.architectures:
        raise ValueError(
            f"architectures is {config.architectures!r}, which transformers {transformers.__version__} does not have; "
            f"legal: the name of a class for model_type {config.model_type!r}. Correct the config, remove the key, or "
            "install the transformers that has it."
        )
    classes = _mapped(config)
    found = next(classes, None)
    if found is None:
        raise ValueError(
            f"transformers {transformers.__version__} has no model for a config of {type(config).__name__} (model_type "
            f"{getattr(config, 'model_type', None)!r}); legal: a type of its auto mappings, or a config with "
            "`architectures`. Name the class there."
        )
    return found


def _mapped(config: Any) -> Iterator[type]:
    """Classes of the auto mappings for a config's type, in order."""
    import transformers
    from transformers.models.auto import modeling_auto

    names = _ENCODER_DECODER if getattr(config, "is_encoder_decoder", False) else ()
    mappings = [f"MODEL_FOR_{name}_MAPPING" for name in (*names, *_MAPPINGS)]
    if getattr(config, "is_decoder", False):  # BERT as a language model
        mappings.insert(len(names), "MODEL_FOR_CAUSAL_LM_MAPPING")
    for name in (*mappings, "MODEL_MAPPING"):
        mapping = getattr(modeling_auto, name, None)
        found = None if mapping is None else mapping.get(type(config), None)
        for each in found if isinstance(found, tuple) else (found,):
            if each is not None and hasattr(transformers, each.__name__):
                yield each


def meta_model(config: Any, dtype: Any = None) -> Any:
    """The model on the meta device, in training mode.

    Args:
        config: not changed. dtype: of its weights, None for the config's own.

    Raises:
        ValueError: transformers cannot build it from this config.
    """
    import copy

    import torch

    built: Any = model_class(config)
    if dtype is None:
        dtype = getattr(config, "dtype", None) or torch.float32
    try:
        with torch.device("meta"):
            return built._from_config(copy.deepcopy(config), dtype=dtype).train()
    except Exception as error:  # whatever a model's constructor stops at
        raise ValueError(
            f"transformers cannot build {built.__name__} from this config ({_reason(error)}). Correct "
            "the config."
        ) from error


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


def meta_twin(model: Any) -> Any:
    """A model of the same class and config on the meta device, in training mode: none of the original's patches, its
    parameters whole.

    Raises:
        ValueError: a class that its config alone does not build.
    """
    import copy

    import torch

    built: Any = type(model)
    try:
        with torch.device("meta"):  # not `_from_config`, which partitions where ZeRO-3 is announced
            return built(copy.deepcopy(model.config)).train()
    except Exception as error:  # whatever a model's constructor stops at
        raise ValueError(
            f"{built.__name__} cannot be built from its config alone ({_reason(error)}); legal: a model "
            "of transformers as its class makes it."
        ) from error


@dataclass(frozen=True)
class Experts:
    """Experts of a layer, and how many of them each token meets."""

    chosen: int
    total: int


def experts_of(config: Any) -> Experts | None:
    """Experts of a mixture by its config (of a model of several parts, that of the text); None of any other model."""
    total, chosen = (
        next((found for name in names if (found := _largest(config, name))), 0)
        for names in (_EXPERTS, _CHOSEN)
    )
    return Experts(min(chosen, total), total) if total and chosen else None


def idle_elements(model: Any) -> float:
    """Elements of the experts that a token is not sent to, in the mean: of their weights together, or of each by itself
    in a list; partitioned or not."""
    config = model.config
    experts = experts_of(config.get_text_config() if hasattr(config, "get_text_config") else config)
    if experts is None:
        return 0.0
    idle = 0
    for name, module in model.named_modules():
        shapes = [tuple(getattr(p, "ds_shape", p.shape)) for p in module.parameters(recurse=False)]
        of_each = [shape for shape in shapes if len(shape) > 1 and shape[0] == experts.total]
        if any(len(shape) == 3 for shape in of_each):
            idle += sum(map(prod, of_each))  # biases too
        elif "expert" in name.rpartition(".")[2] and len(module._modules) == experts.total:
            idle += sum(int(getattr(p, "ds_numel", p.numel())) for p in module.parameters())
    return idle * (1 - experts.chosen / experts.total)


def field_of(holder: Any, name: str) -> Any:
    """A field, None without it; where layers differ in it, that of the last."""
    try:
        return getattr(holder, name, None)
    except Exception:  # transformers' refusal of a field that differs is no AttributeError
        layers = getattr(holder, "per_layer_config", None)
        return getattr(layers[len(layers) - 1], name, None) if layers else None


def _largest(config: Any, name: str) -> int:
    value = field_of(config, name)
    values = value if isinstance(value, list | tuple) else [value]
    return max((v for v in values if isinstance(v, int) and not isinstance(v, bool)), default=0)
