"""What the installed plugin costs a test run that does not use it, in instructions (valgrind's callgrind).

Prints ratios of one run; run it with ``python -m tests.benchmarks.plugin_cost``. Goals: one test at most 1.5 % more
instructions than with ``-p no:kvbudget``, each further test at most 1 % more.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

FEW: Final = 1
MANY: Final = 101
TEST: Final = "def test_{number}():\n    assert True\n"


ENVIRONMENT: Final = {
    **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
    "PYTHONHASHSEED": "0",
}
OTHERS: Final = tuple(
    option
    for entry in entry_points(group="pytest11")
    if entry.name != "kvbudget"
    for option in ("-p", f"no:{entry.name}")
)
"""Other installed plugins would only make our share look smaller."""


def instructions(folder: Path, *options: str) -> int:
    """Instructions of one pytest run in ``folder``."""
    done = subprocess.run(
        [
            "valgrind",
            "--tool=callgrind",
            "--callgrind-out-file=/dev/null",
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *OTHERS,
            *options,
        ],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"Collected : (\d+)", done.stderr)
    if found is None:
        raise SystemExit(f"valgrind printed no count: {done.stderr[-500:]}")
    return int(found[1])


def measure(number: int) -> tuple[int, int]:
    """Instructions without and with the plugin, for a file of so many tests."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_it.py").write_text("".join(TEST.format(number=index) for index in range(number)))
        instructions(folder)  # makes the byte code warm
        return instructions(folder, "-p", "no:kvbudget"), instructions(folder)


def main() -> int:
    """Print the table; returns an exit status."""
    if shutil.which("valgrind") is None:
        print("valgrind is not installed: nothing measured")
        return 2
    few_without, few_with = measure(FEW)
    many_without, many_with = measure(MANY)
    further_without = (many_without - few_without) / (MANY - FEW)
    further_with = (many_with - few_with) / (MANY - FEW)
    print(f"{'':14}{'without':>14}{'with':>14}{'more':>9}")
    for label, without, with_plugin in (
        ("one test", few_without, few_with),
        ("each further", further_without, further_with),
    ):
        print(f"{label:14}{without / 1e6:>12.2f} M{with_plugin / 1e6:>12.2f} M{with_plugin / without - 1:>8.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
