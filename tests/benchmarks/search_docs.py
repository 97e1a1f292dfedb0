"""Both tables of the search, and their place in the docs.

Run as ``python -m tests.benchmarks.search_docs [DEVICES]`` (1,000 of each family by default): measures both and writes
what they print to ``docs/ladders.md``. Exits 1 when either of them does.
"""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Final

from tests.benchmarks import search_processes, search_table

PAGE: Final = Path(__file__).parents[2] / "docs" / "ladders.md"
BEGIN: Final = "<!-- written by python -m tests.benchmarks.search_docs -->\n"
END: Final = "<!-- end of what is written -->\n"


def main(devices: int = 1000) -> int:
    """Measure and write; the exit status."""
    status, texts = 0, []
    for table in (search_table, search_processes):
        said = io.StringIO()
        with redirect_stdout(said):
            status |= table.main(devices)
        print(said.getvalue(), end="", flush=True)
        texts.append(said.getvalue())
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), texts), encoding="utf-8")
    return status


def written(page: str, texts: list[str]) -> str:
    """The page with these tables between its two marks.

    Raises:
        ValueError: it does not have each mark once.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"{PAGE.name} has not exactly one {BEGIN.strip()!r} and one {END.strip()!r}")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    blocks = "\n".join(f"```text\n{text.rstrip()}\n```\n" for text in texts)
    return f"{before}{BEGIN}\n{blocks}\n{END}{after}"


if __name__ == "__main__":
    sys.exit(main(*(int(argument) for argument in sys.argv[1:])))
