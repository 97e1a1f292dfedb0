"""One piece of a log to the texts that the engine wrote: prefixes, colour and wrappers taken off, the process kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

LONGEST_JSON: Final = 128 * 1024
"""Characters; a longer line is not decoded as JSON (its middle is cut out anyway)."""
MOST_HEADER: Final = 300
"""Characters of a JSON line that stand for its header."""


class Text(NamedTuple):
    """What one process said in one line."""

    text: str
    process: str | None = None
    """The process as the engine names it: ``Worker_TP1``, ``EngineCore_DP0``, ``VllmWorker rank=0``."""
    pid: int | None = None
    record: bool = False
    """The line begins a logger's record: it has a level of its own."""
    header: str = ""
    """The record's own columns (level, time, place); every line of one record repeats them."""


_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][0-9A-B])|[\x00\x07]")
_OUTER = re.compile(
    r"""
      \s*[A-Za-z0-9][\w.-]*\s*\|\x20{1,2}                                    # compose: "svc-1  | "
    | \[?pod/[^\s\]]+\]?\s                                                   # kubectl logs --prefix
    | \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\s+     # RFC 3339: kubernetes, journald short-iso
      (?:std(?:out|err)\s[FP]\s)?(?:\S+\s[\w@.:-]+\[\d+\]:\s)?
    | [A-Z][a-z]{2}\s[\x20\d]\d\s\d\d:\d\d:\d\d(?:\.\d+)?\s\S+\s[^\s:\[\]]+(?:\[\d+\])?:\s   # syslog, journald short
    """,
    re.VERBOSE,
)
_PROCESS = re.compile(
    r"\s?\((?P<name>[A-Za-z][\w.:-]*(?:\srank=\d+)?)\s+pid=(?P<pid>\d+)(?:,\s*ip=(?P<ip>[\w.:]+))?\)[\x20\t]?"
)
_RANK = re.compile(r"\[rank(?P<rank>\d+)\]:\s?")
_RECORD = re.compile(
    r"""
      (?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+(?:\d\d-\d\d\s\d\d:\d\d:\d\d(?:[.,]\d+)?\s+)?       # vLLM
      (?:\[?[\w./-]+\.(?:py|cpp|cc|cu)(?::\d+)?\]\x20?)?
    | (?:DEBUG|INFO|WARNING|ERROR|CRITICAL):(?:[\w.]+:)?\s*                                        # uvicorn, logging
    | \d{4}-\d\d-\d\d\s\d\d:\d\d:\d\d[.,]\d+\s+-\s+[A-Z]+\s+-\s+[\w./]+:\d+\s+-\x20?               # vLLM Neuron
    | \d{4}-[A-Z][a-z]{2}-\d\d\s\d\d:\d\d:\d\d\.\d+\s+(?P<pid>\d+):\d+\s+[A-Z]+\s+                 # Neuron runtime
    | \[\d{4}-\d\d-\d\d\s\d\d:\d\d:\d\d(?P<sgl>(?:\s(?:DP|TP|PP|EP)\d+)*)\]\s                      # SGLang
    | \[?[IWEF]\d{4}\s\d\d:\d\d:\d\d\.\d+\s(?:\d+\s)?[\w./-]+:\d+\]\s                              # glog: torch
    | \d+\.\d\d\.\d{3}\.\d{3}\s[DIWE]\s                                                            # llama.cpp
    """,
    re.VERBOSE,
)
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
_MESSAGE_KEYS: Final = ("message", "msg", "log", "MESSAGE", "event", "text")


def strip_ansi(text: str) -> str:
    """The text without terminal escape sequences."""
    return _ANSI.sub("", text) if "\x1b" in text or "\x00" in text or "\x07" in text else text


def clean(piece: bytes) -> Iterator[Text]:
    """Yield what a piece says: one text, or several where a JSON record carries several lines."""
    yield from _texts(strip_ansi(piece.decode("utf-8", "replace")), None, None, 0)


def _texts(text: str, process: str | None, pid: int | None, depth: int, header: str = "") -> Iterator[Text]:
    text, depth = _without_outer(text), depth + 1
    if text.startswith("{") and depth < 4 and len(text) <= LONGEST_JSON:
        inner = _from_json(text)
        if inner is not None:
            message, name, number = inner
            for line in message.splitlines() or [""]:
                yield from _texts(strip_ansi(line), name or process, number or pid, depth, text[:MOST_HEADER])
            return
    yield _peel(text, process, pid, header)


def _without_outer(text: str) -> str:
    if text.startswith("("):
        return text  # a process of the engine: nothing stands outside
    for _ in range(3):
        match = _OUTER.match(text)
        if match is None:
            break
        text = text[match.end() :]
    return text


def _peel(text: str, process: str | None, pid: int | None, header: str) -> Text:
    """Take processes, ranks and the logger's own columns off, in whatever order they come."""
    while True:
        match = _PROCESS.match(text)
        if match is not None:
            process, pid = match["name"], int(match["pid"])
            if match["ip"]:
                process = f"{process} ip={match['ip']}"
            text = text[match.end() :]
            continue
        match = _RANK.match(text)
        if match is None:
            break
        process = process or f"rank{match['rank']}"
        text = text[match.end() :]
    match = _RECORD.match(text)
    if match is not None:
        header, text = header or match.group(), text[match.end() :]
        if match["pid"]:
            pid = pid or int(match["pid"])
        if match["sgl"]:
            process = match["sgl"].strip().replace(" ", "_")
    if "across cluster]" in text:
        text = _REPEATED.sub("", text)
    return Text(text.rstrip(), process, pid, bool(header), header)


def _from_json(text: str) -> tuple[str, str | None, int | None] | None:
    try:
        row = json.loads(text)
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    message = next((row[key] for key in _MESSAGE_KEYS if isinstance(row.get(key), str)), None)
    if message is None:
        return None
    name, number = row.get("processName"), row.get("process")
    named = name if isinstance(name, str) and name != "MainProcess" else None
    return message, named, number if isinstance(number, int) and not isinstance(number, bool) else None
