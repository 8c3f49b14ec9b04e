"""From `--data` and `--tokenizer` to packed rows: tokeniser and tokens are made once and cached."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hmt_deepspeed.train import tokenizer as tokenizers
from hmt_deepspeed.train.packing import PackedRows, TokenCache, read_tokens, write_tokens
from hmt_deepspeed.train.ranks import on_every_node
from hmt_deepspeed.train.sources import Source, open_source, split_documents

DEFAULT_CACHE = "~/.cache/hmt_deepspeed"
MIN_SEQ_LENGTH = 4
_CACHE_VERSION = "1"


@dataclass(frozen=True)
class TrainingData:
    """Rows to train on, rows held out, the tokeniser, and a digest of every token and boundary."""

    tokenizer: Any
    train: PackedRows
    held_out: PackedRows
    digest: str
    num_documents: int


def prepare_data(
    data: str,
    tokenizer: str,
    seq_length: int,
    vocab_size: int = 4096,
    text_field: str = "text",
    cache_dir: str = DEFAULT_CACHE,
) -> TrainingData:
    """Read, tokenise and pack `data`; every rank calls it, rank 0 (of each node) does the work.

    `tokenizer` is "bpe" (trained on this text with `vocab_size` tokens), "bytes", a folder or a
    hub id. Raises ValueError for text that does not exist, is empty or does not fill one row.
    """
    if seq_length < MIN_SEQ_LENGTH:
        raise ValueError(f"--seq_length is {seq_length}; legal: at least {MIN_SEQ_LENGTH} tokens")
    cache = Path(cache_dir).expanduser()
    source = open_source(data, text_field)
    pretrained = (
        tokenizers.load_pretrained_tokenizer(tokenizer) if _is_pretrained(tokenizer) else None
    )
    if tokenizer == "bpe":
        tokenizers.check_vocab_size(vocab_size)

    def build(key: str | None) -> str:
        key = key or _cache_key(source, tokenizer, vocab_size, pretrained)
        _build(cache, key, source, tokenizer, vocab_size, pretrained)
        return key

    key = on_every_node(build)
    loaded = pretrained or _own_tokenizer(cache, key, tokenizer)
    tokens = read_tokens(_token_folder(cache, key))
    if tokens is None:
        raise ValueError(f"the token cache {_token_folder(cache, key)} cannot be read; remove it")
    return _checked(data, loaded, tokens, seq_length)


def _is_pretrained(tokenizer: str) -> bool:
    return tokenizer not in ("bpe", "bytes")


def _cache_key(source: Source, tokenizer: str, vocab_size: int, pretrained: Any) -> str:
    """Digests of the text with the vocabulary size, and of the text with the tokeniser."""
    if pretrained is None:
        identity = f"{tokenizer}:{vocab_size if tokenizer == 'bpe' else ''}"
    elif getattr(pretrained, "backend_tokenizer", None) is not None:
        identity = pretrained.backend_tokenizer.to_str()
    else:
        identity = f"{type(pretrained).__name__}:{sorted(pretrained.get_vocab().items())}"
    special = "" if pretrained is None else f"{pretrained.bos_token_id},{pretrained.eos_token_id}"
    text = "\0".join((_CACHE_VERSION, source.fingerprint(), identity, special))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _token_folder(cache: Path, key: str) -> Path:
    return cache / "tokens" / key


def _tokenizer_file(cache: Path, key: str) -> Path:
    return cache / "tokenizers" / f"{key}.json"


def _own_tokenizer(cache: Path, key: str, tokenizer: str) -> Any:
    if tokenizer == "bytes":
        return tokenizers.byte_tokenizer()
    return tokenizers.load_tokenizer_file(_tokenizer_file(cache, key))


def _build(
    cache: Path, key: str, source: Source, tokenizer: str, vocab_size: int, pretrained: Any
) -> None:
    file = _tokenizer_file(cache, key)
    if tokenizer == "bpe" and not file.exists():
        texts = (text for held_out, text in split_documents(source.documents()) if not held_out)
        tokenizers.save_tokenizer_file(tokenizers.train_bpe(texts, vocab_size), file)
    folder = _token_folder(cache, key)
    if read_tokens(folder) is not None:
        return
    made = pretrained or _own_tokenizer(cache, key, tokenizer)
    write_tokens(
        folder,
        split_documents(source.documents()),
        partial(tokenizers.encode, made),
        vocab_size=len(made),
        bos=made.bos_token_id,
        eos=made.eos_token_id,
    )


def _checked(data: str, tokenizer: Any, tokens: TokenCache, seq_length: int) -> TrainingData:
    train_tokens = len(tokens.tokens["train"])
    held_out_tokens = len(tokens.tokens["held_out"])
    if train_tokens == 0:
        raise ValueError(f"--data {data!r} holds no text; give a file or folder with UTF-8 text")
    if train_tokens < seq_length or held_out_tokens < MIN_SEQ_LENGTH:
        raise ValueError(
            f"--data {data!r} gives {train_tokens} tokens to train on and {held_out_tokens} held "
            f"out; needed: at least one row of --seq_length {seq_length} and {MIN_SEQ_LENGTH}. "
            "Give more text or a smaller --seq_length."
        )
    return TrainingData(
        tokenizer=tokenizer,
        train=tokens.rows("train", seq_length),
        held_out=tokens.rows("held_out", min(seq_length, held_out_tokens)),
        digest=tokens.digest,
        num_documents=tokens.num_documents,
    )
