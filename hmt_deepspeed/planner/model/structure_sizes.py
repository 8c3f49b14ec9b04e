"""Reads sizes of a model's parts off its config: tokens, experts, learned positions."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from hmt_deepspeed.architectures import Experts, experts_of, field_of
from hmt_deepspeed.planner.model.listed import Length

__all__ = ["Sizes", "size_of", "starred"]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_IMAGE = re.compile(r"vision|visual|image|img|pixel|patch|vit\b|video", re.IGNORECASE)
_AUDIO = re.compile(r"audio|speech|acoustic|mel\b", re.IGNORECASE)


class Sizes:
    """Sizes of one model, by the paths of its modules.

    Attributes:
        coarse: what was assumed on the way, in order, each once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._config: Any = model.config
        self.coarse: dict[str, None] = {}

    def times(self, full: str) -> float:
        """The share of tokens that a module in a list of experts sees."""
        for match in _NUMBER.finditer(full):
            parent = full[: match.start() - 1]
            if "expert" not in parent.rpartition(".")[2]:
                continue
            members, experts = self._model.get_submodule(parent), self.experts(full)
            if experts is not None and len(members._modules) == experts.total:
                return experts.chosen / experts.total
        return 1.0

    def experts(self, full: str) -> Experts | None:
        """Experts of a part."""
        return experts_of(self.text_config(full))

    def text_config(self, path: str) -> Any:
        """The config of a part: of a tower where a path leads into one, else that of the text, else the whole."""
        names = ("vision_config", "image_config") if _IMAGE.search(path) else ()
        names = ("audio_config", "speech_config") if _AUDIO.search(path) else names
        for name in (
            *names,
            "text_config",
            "thinker_config",
            "llm_config",
            "language_config",
            "decoder",
        ):
            found = getattr(self._config, name, None)
            if found is not None and not isinstance(found, dict | str | int | bool):
                return found
        return self._config

    def length(self, path: str) -> Length:
        """Tokens of the part that a path leads into."""
        config = self._config
        has_text = any(
            getattr(c, "vocab_size", None)
            for c in (
                config,
                getattr(config, "text_config", None),
                getattr(config, "decoder", None),
            )
            if c is not None
        )
        audio = size_of(config, "max_source_positions", 0) if hasattr(config, "num_mel_bins") else 0
        if audio and re.search(r"(^|\.)encoder\b", path):
            self.coarse[
                f"the encoder's frames: {audio:,} of each sequence (max_source_positions)"
            ] = None
            return Length(audio)
        patches = _patches(getattr(config, "vision_config", None) or config)
        if patches and (_IMAGE.search(path) or not has_text):
            self.coarse[f"image tokens: one image of {patches:,} patches for each sequence"] = None
            return Length(patches)
        if _IMAGE.search(path) and path:
            self.coarse["image tokens: as many as --seq_length has"] = None
        if _AUDIO.search(path):
            frames = size_of(getattr(config, "audio_config", config), "max_source_positions", 0)
            self.coarse[f"audio: {frames or 'as many as text tokens'} frames for each sequence"] = (
                None
            )
            return Length(frames)
        return Length()

    def source(self) -> Length:
        """Length of the keys of cross-attention."""
        if not getattr(self._config, "is_encoder_decoder", False):
            return self.length("encoder") if hasattr(self._config, "encoder") else Length()
        return self.length("encoder")

    def positions(self, stack: str) -> int:
        """Rows of learned positions of the planned layers' part, 0 where the sequence may be of any length."""
        length = self.length(stack)
        if length.fixed:
            return length.fixed
        limit = size_of(self.text_config(stack), "max_position_embeddings", 0)
        limit = limit or size_of(self._config, "max_target_positions", 0)
        inner = stack.rpartition(".")[0]
        for root in dict.fromkeys((inner, inner.partition(".")[0])):
            for name, module in self._model.named_modules():
                if (
                    isinstance(module, nn.Embedding)
                    and name.startswith(root)
                    and re.search(r"pos(?!t)|wpe", name.rpartition(".")[2])
                    and not self.length(name).fixed
                ):
                    return min(limit, module.num_embeddings) if limit else module.num_embeddings
        return 0


def size_of(holder: Any, name: str, default: int) -> int:
    """A field that is a number of something."""
    value = field_of(holder, name)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _patches(config: Any) -> int:
    """Patches of an image with one for its class, 0 without images."""
    image, patch = (_pair(getattr(config, name, None)) for name in ("image_size", "patch_size"))
    if image is None:
        return 0
    high, wide = patch or (32, 32)
    return (image[0] // high) * (image[1] // wide) + 1


def _pair(size: Any) -> tuple[int, int] | None:
    """Height and width, both given or one for both."""
    given = (
        [size] if isinstance(size, int) else list(size) if isinstance(size, list | tuple) else []
    )
    if not given or not all(isinstance(v, int) and v > 0 for v in given):
        return None
    return given[0], given[-1]


def starred(name: str) -> str:
    return _NUMBER.sub("*", name)
