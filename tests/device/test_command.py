"""Running the vendors' tools: deadlines, floods, failures, and JSON among warnings."""

from __future__ import annotations

import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.device.command import find_tool, json_in, run_tool
from pytest_kvbudget.device.fields import index, measured, whole
from pytest_kvbudget.device.model import ProbeError
from tests.device.tools import Tools


def test_output_is_returned_whole(tools: Tools) -> None:
    tools.script("smi", 'head -c 300000 /dev/zero | tr "\\0" x; echo noise >&2')
    assert run_tool(["smi"]) == "x" * 300_000


def test_missing_tool_is_named(tools: Tools) -> None:
    assert find_tool("no-such-smi") is None
    with pytest.raises(ProbeError, match="no-such-smi -x: cannot be run: No such file"):
        run_tool(["no-such-smi", "-x"])


def test_tool_outside_path_is_found_in_its_package_folder(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tools.script("vendor-ls", "echo")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert find_tool("vendor-ls", (str(tools.folder),)) == str(path)


def test_hanging_tool_is_ended_with_its_children(tools: Tools) -> None:
    pid = tools.hang("smi")
    with pytest.raises(ProbeError, match=r"smi: did not end within 0\.3 s"):
        run_tool(["smi"], timeout_s=0.3)
    child = int(pid.read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{child} lives on"


def test_failing_tool_says_its_status_and_last_line(tools: Tools) -> None:
    tools.script("smi", "echo first >&2; echo 'driver not loaded' >&2; exit 3")
    with pytest.raises(ProbeError, match="status 3 and said 'driver not loaded'"):
        run_tool(["smi"])


def test_flood_is_refused(tools: Tools) -> None:
    tools.script("smi", "exec cat /dev/zero")
    with pytest.raises(ProbeError, match="printed more than 16777216 bytes"):
        run_tool(["smi"], timeout_s=60)


def test_killed_tool_is_an_error(tools: Tools) -> None:
    tools.script("smi", "echo '{}'; kill -9 $$")
    with pytest.raises(ProbeError, match="status -9"):
        run_tool(["smi"])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1}', {"a": 1}),
        ('WARNING: low-power state\n\n  {"a": 1}\ntrailing', {"a": 1}),
        ("[warning] no cards here\n[1, 2]", [1, 2]),
        ("{broken\n[]", []),
    ],
)
def test_json_is_found_among_warnings(text: str, found: object) -> None:
    assert json_in(text, "smi") == found


@pytest.mark.parametrize("text", ["", "No JSON data to report", '{"a": 1', "[" * 100_000, "WARNING: {"])
def test_no_json_is_an_error_with_what_was_printed(text: str) -> None:
    with pytest.raises(ProbeError, match=r"smi: printed .*; expected JSON"):
        json_in(text, "smi")


@given(st.text(max_size=80))
def test_any_text_is_json_or_an_error(text: str) -> None:
    try:
        json_in(text, "smi")
    except ProbeError:
        return
    assert any(character in text for character in "{[")


@pytest.mark.parametrize(
    "value",
    ["N/A", "[N/A]", "", " ", "-1", "1.5", "1e9", "0x10", "٣", None, True, -1, float("nan"), float("inf"), [], {},
     18446744073709547520, "18446744073709547520", "9" * 5000],
)  # fmt: skip
def test_what_is_no_number_of_bytes_is_an_error_never_0(value: object) -> None:
    with pytest.raises(ProbeError, match=r"card shows .*; expected a number of bytes"):
        whole(value, "card")


def test_units_are_binary() -> None:
    assert measured({"value": 32624, "unit": "MB"}, "vram") == 34_208_743_424
    assert measured({"value": "31", "unit": "GB"}, "vram") == 31 * 2**30
    assert measured({"value": 5, "unit": "B"}, "vram") == 5
    assert whole("81559", "vram", "MiB") == 81_559 * 2**20
    with pytest.raises(ProbeError, match="5 'parsecs'"):
        measured({"value": 5, "unit": "parsecs"}, "vram")
    with pytest.raises(ProbeError, match=r"1\.5; expected a whole number"):
        index(1.5, "gpu")


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)))
def test_a_number_is_read_exactly_or_refused(value: object) -> None:
    try:
        read = whole(value, "card")
    except ProbeError:
        return
    assert isinstance(value, (int, float, str))
    assert not isinstance(value, bool)
    assert read == int(float(value)) if isinstance(value, float) else read == int(value)
