"""Print the fenced bash block that stands under a heading of README.md, word for word.

Usage: python3 .ci/readme_commands.py "Run the tests"
"""

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def bash_blocks(markdown: str, heading: str) -> list[str]:
    """The bash blocks between `### heading` and the next heading."""
    blocks: list[str] = []
    in_section = in_fence = in_bash = False
    for line in markdown.splitlines():
        if in_fence:
            if line.startswith("```"):
                in_fence = in_bash = False
            elif in_bash:
                blocks[-1] += line + "\n"
        elif line.startswith("```"):
            in_fence, in_bash = True, in_section and line.strip() == "```bash"
            if in_bash:
                blocks.append("")
        elif re.match(r"#{1,6} ", line):
            in_section = line.strip() == f"### {heading}"
    return blocks


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    heading = sys.argv[1]
    blocks = bash_blocks(README.read_text(encoding="utf-8"), heading)
    if len(blocks) != 1:
        sys.exit(f'{README}: "### {heading}" holds {len(blocks)} bash blocks; it must hold one')
    print(blocks[0], end="")


if __name__ == "__main__":
    main()
