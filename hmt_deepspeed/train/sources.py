"""Where text comes from: the standard library, files, folders, JSONL, hub datasets."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from hmt_deepspeed.train.hub import existing_path, hub_error

HELD_OUT_EVERY = 20
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
LEGAL_DATA = (
    "stdlib, a text file, a folder of text files, a .jsonl file (with --text_field), "
    "or a hub dataset id such as owner/name or owner/name:configuration"
)


class Source(Protocol):
    """Documents in a fixed order, and a short string that changes when they do."""

    def documents(self) -> Iterator[str]: ...
    def fingerprint(self) -> str: ...


class FileSource:
    """Text files, one document each; of .jsonl files every line is a document.

    `strict` says that the user named the file himself: then text that cannot be read is an
    error, while in a folder binary files are passed over.
    """

    def __init__(self, files: list[Path], root: Path, text_field: str, strict: bool) -> None:
        self.files = files
        self.root = root
        self.text_field = text_field
        self.strict = strict

    def documents(self) -> Iterator[str]:
        for path in self.files:
            if path.suffix == ".jsonl":
                yield from self._json_lines(path)
                continue
            raw = path.read_bytes()
            try:
                text = raw.decode("utf-8")
                binary = "\0" in text[:8192]
            except UnicodeDecodeError:
                binary = True
            if not binary:
                yield text
            elif self.strict:
                raise ValueError(f"--data {str(path)!r} is not UTF-8 text; convert it first")

    def _json_lines(self, path: Path) -> Iterator[str]:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    where = f"{path}, line {number}, column {error.colno}"
                    raise ValueError(f"--data: {where}: not JSON: {error.msg}") from error
                yield _text_of(record, self.text_field, f"{path}, line {number}")

    def fingerprint(self) -> str:
        """Names, sizes and times of change: reading nothing makes a second start instant."""
        digest = hashlib.sha256(f"files:{self.text_field}".encode())
        for path in self.files:
            stat = path.stat()
            name = path.relative_to(self.root).as_posix()
            digest.update(f"\n{name}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
        return digest.hexdigest()


class HubSource:
    """A dataset that the `datasets` library loads, its "train" split, one record a document."""

    def __init__(self, name: str, text_field: str) -> None:
        self.name = name
        self.text_field = text_field
        self._dataset: Any = None

    def _load(self) -> Any:
        if self._dataset is None:
            try:
                import datasets
            except ImportError as error:
                raise ValueError(
                    f"--data {self.name!r} is read as a hub dataset id, which needs the 'datasets' "
                    f"package: pip install 'hmt_deepspeed[hub]'. Other legal values: {LEGAL_DATA}"
                ) from error
            identifier, _, configuration = self.name.partition(":")
            try:
                self._dataset = datasets.load_dataset(
                    identifier, configuration or None, split="train"
                )
            except Exception as error:  # every backend of `datasets` fails in classes of its own
                raise hub_error("--data", self.name, LEGAL_DATA, error) from error
        return self._dataset

    def documents(self) -> Iterator[str]:
        for number, record in enumerate(self._load()):
            yield _text_of(record, self.text_field, f"{self.name}, record {number}")

    def fingerprint(self) -> str:
        return f"hub:{self.name}:{self.text_field}:{self._load()._fingerprint}"


def _text_of(record: Any, field: str, where: str) -> str:
    value = record.get(field) if isinstance(record, dict) else None
    if isinstance(value, str):
        return value
    fields = sorted(record) if isinstance(record, dict) else f"a {type(record).__name__}"
    raise ValueError(f"--data: {where} has no text under --text_field {field!r}; it holds {fields}")


def open_source(name: str, text_field: str = "text") -> Source:
    """The source that `--data NAME` means. Raises ValueError for a path that does not exist."""
    if name == "stdlib":
        return _stdlib(text_field)
    path = existing_path("--data", name.partition(":")[0] if ":" in name else name)
    if path is None:
        return HubSource(name, text_field)
    path = path.resolve()
    if path.is_file():
        return FileSource([path], path.parent, text_field, strict=True)
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    return FileSource(files, path, text_field, strict=False)


def _stdlib(text_field: str) -> FileSource:
    root = Path(sysconfig.get_paths()["stdlib"]).resolve()
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not _NOT_LIBRARY.intersection(path.relative_to(root).parts[:-1])
    )
    return FileSource(files, root, text_field, strict=False)


def split_documents(documents: Iterable[str]) -> Iterator[tuple[bool, str]]:
    """(held out?, text) for every document: each twentieth is held out.

    Of fewer than twenty documents each gives its last 5 % instead (cut after a line where one
    ends there), so a single file trains and evaluates too. Empty documents are left out.
    """
    stream = (text for text in documents if text.strip())
    first = list(islice(stream, HELD_OUT_EVERY))
    if len(first) < HELD_OUT_EVERY:
        for text in first:
            cut = len(text) * (HELD_OUT_EVERY - 1) // HELD_OUT_EVERY
            newline = text.find("\n", cut)
            cut = newline + 1 if 0 <= newline < len(text) - 1 else cut
            yield False, text[:cut]
            yield True, text[cut:]
        return
    for index, text in enumerate(_chain(first, stream)):
        yield index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1, text


def _chain(first: list[str], rest: Iterator[str]) -> Iterator[str]:
    yield from first
    yield from rest
