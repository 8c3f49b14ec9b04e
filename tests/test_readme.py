"""The README says what the code does."""

from __future__ import annotations

from pathlib import Path

from hmt_deepspeed.config import describe_fields

README = Path(__file__).resolve().parent.parent / "README.md"


def config_rows() -> list[str]:
    """The lines of the README's table of the "hmt" block."""
    return [
        f"| `{key.removeprefix('hmt.')}` | {legal} | `{default}` | {text} |"
        for key, legal, default, text in describe_fields()
    ]


def test_every_field_of_the_block_is_in_the_readme_as_it_is_in_the_model() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    begin, end = lines.index("<!-- table: config -->"), lines.index("<!-- end -->")
    assert lines[begin + 3 : end] == config_rows()
