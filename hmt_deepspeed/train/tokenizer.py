"""Tokenisers: a byte-level BPE trained on the run's own text, pure bytes, or any Hugging Face one.

Both of ours are lossless (every byte has a token) and need no download.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hmt_deepspeed.train.hub import existing_path, hub_error

BOS, EOS = "<|bos|>", "<|eos|>"
NUM_BYTES = 256
MIN_VOCAB = NUM_BYTES + 2
MAX_VOCAB = 1 << 18
# Merges stop changing long before this; more text only costs time at the first start.
BPE_SAMPLE_CHARACTERS = 16_000_000


def check_vocab_size(vocab_size: int) -> None:
    if not MIN_VOCAB <= vocab_size <= MAX_VOCAB:
        raise ValueError(
            f"--vocab_size is {vocab_size}; legal: {MIN_VOCAB} (256 bytes and two special tokens) "
            f"to {MAX_VOCAB}. 4096 suits a small corpus, 32000 a large one."
        )


def train_bpe(texts: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE of at most `vocab_size` tokens from the first 16 million characters.

    Returns a transformers fast tokeniser. Short texts may give fewer tokens than asked for.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    check_vocab_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_characters(texts, BPE_SAMPLE_CHARACTERS), trainer)
    return _as_fast_tokenizer(tokenizer)


def byte_tokenizer() -> Any:
    """256 byte tokens (ids 2 to 257) with begin and end of document (0, 1) before them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {BOS: 0, EOS: 1}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    return _as_fast_tokenizer(tokenizer)


def load_tokenizer_file(path: Path) -> Any:
    """A tokeniser that `save_tokenizer_file` wrote."""
    from tokenizers import Tokenizer

    return _as_fast_tokenizer(Tokenizer.from_file(str(path)))


def save_tokenizer_file(tokenizer: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    tokenizer.backend_tokenizer.save(str(temporary))
    os.replace(temporary, path)


def load_pretrained_tokenizer(name: str) -> Any:
    """A tokeniser from a local folder or the hub; it must have an end-of-document token."""
    from transformers import AutoTokenizer

    path = existing_path("--tokenizer", name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path or name))
    except (OSError, ValueError, KeyError) as error:
        legal = "bpe, bytes, a folder with a saved tokeniser, or a hub id"
        raise hub_error("--tokenizer", name, legal, error) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"--tokenizer {name!r} has no eos token, so documents cannot be told apart; "
            "set eos_token in its tokenizer_config.json or take another tokeniser"
        )
    return tokenizer


def encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of plain text: no special token is added, and none is read out of the text."""
    encoded = tokenizer(
        texts,
        add_special_tokens=False,
        split_special_tokens=True,
        return_attention_mask=False,
        verbose=False,
    )
    return encoded["input_ids"]


def _as_fast_tokenizer(backend: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        clean_up_tokenization_spaces=False,
    )


def _first_characters(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        yield text[:limit]
        limit -= len(text)
        if limit <= 0:
            return
