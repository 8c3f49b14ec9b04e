"""Reading a config from a file."""

from pathlib import Path

import pytest

from hmt_deepspeed.config import read_json_config

# --- read_json_config -------------------------------------------------------------------------


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("convert", [str, Path])
def test_read_json_config(tmp_path, convert):
    path = write(tmp_path, '{"hmt": {"optimizer": {"rank": 8}}, "name": "µ", "a": {"name": 1}}')
    config = read_json_config(convert(path))
    assert config == {"hmt": {"optimizer": {"rank": 8}}, "name": "µ", "a": {"name": 1}}


def read_error(path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        read_json_config(path)
    assert type(caught.value) is ValueError
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_missing_file(tmp_path):
    text = read_error(tmp_path / "none.json")
    assert "does not exist" in text
    assert "Give the path" in text


def test_directory(tmp_path):
    assert "is a directory. Give the path" in read_error(tmp_path)


def test_path_through_a_file(tmp_path):
    assert "cannot be read" in read_error(write(tmp_path, "{}") / "ds.json")


def test_not_utf8(tmp_path):
    path = tmp_path / "ds.json"
    path.write_bytes(b'{"a": "\xff"}')
    assert "not UTF-8 text: invalid start byte at byte 7" in read_error(path)


@pytest.mark.parametrize(
    ("text", "line", "column", "shown"),
    [
        ('{\n  "a": 1\n  "b": 2\n}', 3, 3, '    "b": 2\n    ^\n'),
        ('{\n\t"a": 1 // one\n}', 2, 9, '   "a": 1 // one\n          ^\n'),
        ("", 1, 1, "\n  \n  ^\n"),
        ('{"a": 1', 1, 8, '  {"a": 1\n         ^\n'),
        ('{"a": "\u2028", b: 1}', 1, 12, '  {"a": "\u2028", b: 1}\n             ^\n'),
    ],
)
def test_malformed_json_shows_the_place(tmp_path, text, line, column, shown):
    message = read_error(write(tmp_path, text))
    assert f"at line {line}, column {column}:" in message
    assert shown in message
    assert "no comments and no trailing commas" in message


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('{"fp16": {}, "hmt": {}, "fp16": {}}', '"fp16"'),
        ('{"hmt": {"optimizer": {"rank": 8, "rank": 8}}}', '"rank"'),
        ('{"b": [{"a": 1, "a": 2, "c": 1, "c": 1}]}', '"a", "c"'),
    ],
)
def test_duplicate_keys(tmp_path, text, names):
    message = read_error(write(tmp_path, text))
    assert f"gives {names} more than once" in message
    assert "Remove all but one" in message


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[]", "an array"),
        ('"a"', "a string"),
        ("3", "a number"),
        ("1.5", "a number"),
        ("true", "a boolean"),
        ("null", "null"),
    ],
)
def test_top_level_must_be_an_object(tmp_path, text, kind):
    assert f"holds {kind} at its top level. Legal: an object" in read_error(write(tmp_path, text))
