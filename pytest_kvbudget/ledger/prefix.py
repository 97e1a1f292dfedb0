"""One piece of a log to the texts that the engine wrote: prefixes, colour and wrappers taken off, the process kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
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
    service: str | None = None
    """Whose line it is where a log shipper mixes several: a service of compose, a pod with its container, a unit."""


_COLOUR = re.compile(
    r"""
      \x1b(?:\[[0-9;?]*[ -/]*[@-~] | \][^\x07\x1b]*(?:\x07|\x1b\\) | [()][0-9A-B])
    | (?:\^\[|[\#\\]0\d\d)\[[0-9;]*m                                    # the escape written out: "#033[1;36m"
    | </?(?:b|font)\b[^<>]{0,60}>                                          # a terminal, saved as HTML
    | [\x00\x07]
    """,
    re.VERBOSE,
)
_OUTER = re.compile(
    r"""
      \s*(?P<compose>[A-Za-z0-9][\w.@-]*)\s*\|\x20{1,2}                # compose: "svc-1  | "; swarm: "svc.1.id@node | "
    | \ufeff | (?:[>\u258e]\x20?)+ | \#\x20(?=[A-Z]{4,8}\s\d\d-\d\d\s)        # byte order mark; quoted; a comment
    | \[?pod/(?P<pod>[^\s\]]+)\]?\s                                         # kubectl logs --prefix
    | \s*\|\x20(?=\[\d{4}-\d\d-\d\dT)                                       # Buildkite
    | (?:[A-Z]+\s)?\[?\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?(?:\s\[resource\.[^\]]*\])?\s+
      (?:std(?:out|err)\s[FP]\s)?(?:(?P<iso>\S+\s[\w@.:-]+)\[\d+\]:\s)?   # RFC 3339: kubernetes, journald, Google Cloud
    | [A-Z][a-z]{2}\s[\x20\d]\d\s\d\d:\d\d:\d\d(?:\.\d+)?\s                     # syslog, journald short
      (?P<unit>\S+\s[^\s:\[\]]+)(?:\[\d+\])?:\s
    | \d{4}-\d\d-\d\d\s\d\d:\d\d:\d\d(?:[.,]\d+)?\s                          # a time alone; FastChat; Lemonade
      (?:\|\s[A-Z]+\s\|\sstd(?:out|err)\s\|\s|\[\w+\]\s\(Process\)\s|(?!\s*[-|\[]))
    | \[[A-Z]+\s*\]\s(?:PyProcess\s-\s)?W-\d+-\S+-std(?:out|err)(?:\sMODEL_LOG\s-|:)\x20   # TorchServe, SageMaker
    | vLLM\sSTD(?:OUT|ERR):\s                                              # Unsloth
    | [0-9a-z]{12,16}\[(?:info|warning|error)\]                            # RunPod
    """,
    re.VERBOSE,
)
_PROCESS = re.compile(
    r"\s?\((?P<name>[A-Za-z][\w.:-]*(?:\srank=\d+|\s[A-Z]+\d+(?:_[A-Z]+\d+)*)?)\s+pid=(?P<pid>\d+)(?:,\s*ip=(?P<ip>[\w.:]+))?\)[\x20\t]?"
)
_ANY_OUTER = re.compile(
    r"(?![({])[^(]{1,120}(?=\((?:Worker|VllmWorker|RayWorker|EngineCore|APIServer|DPSupervisor|PleOffload)[^()]{0,60}\spid=\d)"
)
"""Whatever else a log shipper puts in front of a process of vLLM."""
_RANK = re.compile(r"\s{0,8}\[rank(?P<rank>\d+)\]:\s?")
_RECORD = re.compile(
    r"""
    \s{0,8}(?:                                                                                     # pasted, indented
      (?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+(?:\d\d-\d\d\s\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?\s+)?    # vLLM
      (?:\[?[\w./-]+\.(?:py|cpp|cc|cu)(?::\d+)?\]\x20?)?
    | (?:DEBUG|INFO|WARNING|ERROR|CRITICAL):(?:[\w.]+:)?\s*                                        # uvicorn, logging
    | \d{4}-\d\d-\d\d\s\d\d:\d\d:\d\d[.,]\d+\s+-\s+[A-Z]+\s+-\s+[\w./]+:\d+\s+-\x20?               # vLLM Neuron
    | \d{4}-\d\d-\d\d\s\d\d:\d\d:\d\d[.,]\d+\s+-\s+[\w.]+\s+-\s+[A-Z]+\s+-\x20?                      # logging, by name
    | \d{4}-[A-Z][a-z]{2}-\d\d\s\d\d:\d\d:\d\d\.\d+\s+(?P<pid>\d+):\d+\s+[A-Z]+\s+                 # Neuron runtime
    | \[\d{4}-\d\d-\d\d\s\d\d:\d\d:\d\d(?P<sgl>(?:\s(?:DP|TP|PP|EP)\d+)*)\]\s                      # SGLang
    | \[?[IWEF]\d{4}\s\d\d:\d\d:\d\d\.\d+\s(?:\d+\s)?[\w./-]+:\d+\]\s                              # glog: torch
    | \d+\.\d\d\.\d{3}\.\d{3}\s[DIWE]\s                                                            # llama.cpp
    )
    """,
    re.VERBOSE,
)
_HARMLESS: Final = re.compile(
    r"""
      [\[\x20]*(?:DEBUG|INFO|WARNING)                                    # vLLM, uvicorn
    | \s*\S+\s\S+\s-\s(?:[\w.]+\s-\s)?(?:DEBUG|INFO|WARNING)\s-         # vLLM Neuron, logging by name
    | \{.*"(?:level(?:name)?|severity|lvl)":\s*"(?:debug|DEBUG|info|INFO|warn|WARN|warning|WARNING)"
    """,
    re.VERBOSE,
)
"""Headers of records at levels that report no failure of the boot."""
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
_MESSAGE_KEYS: Final = ("message", "msg", "log", "MESSAGE", "event", "text")
_LEVEL_KEYS: Final = frozenset({"level", "levelname", "severity", "lvl"})


_ZEROED: Final = bytes.maketrans(b"123456789", b"000000000")
LONGEST_KNOWN: Final = 1024
"""Bytes of a piece whose layout is remembered."""
MOST_KNOWN: Final = 4096
"""Layouts that are remembered."""

Span = tuple[int, int]


class _Layout(NamedTuple):
    """Where the parts of a line stand; the same for all lines that differ in digits only."""

    inner: int
    """Where the engine's own line begins, behind what log shippers put in front."""
    start: int
    """Where the message begins."""
    service: Span | None
    process: Span | None
    ip: Span | None
    pid: Span | None
    rank: Span | None
    header: Span | None
    record_pid: Span | None
    group: Span | None
    """SGLang's name of a rank."""


def strip_ansi(text: str) -> str:
    """The text without terminal escape sequences."""
    return _COLOUR.sub("", text)


def clean(piece: bytes) -> Iterable[Text]:
    """What a piece says: one text, or several where a JSON record carries several lines."""
    text = piece.decode("utf-8", "replace")
    if len(piece) <= LONGEST_KNOWN:
        layout, coloured = _known_layout(piece.translate(_ZEROED))
        text = strip_ansi(text) if coloured else text
    else:
        text = strip_ansi(text)
        layout = _layout(text)
    if not text.startswith("{", layout.inner):
        return (_peel(text, layout, None, None, ""),)
    return _texts(text, layout, None, None)


def _texts(
    text: str, layout: _Layout, process: str | None, pid: int | None, *, depth: int = 0, header: str = ""
) -> Iterator[Text]:
    depth += 1
    if text.startswith("{", layout.inner) and depth < 4 and len(text) - layout.inner <= LONGEST_JSON:
        record = text[layout.inner :]
        decoded = _from_json(record)
        if decoded is not None:
            message, name, number, header = decoded
            service = text[slice(*layout.service)] if layout.service is not None else None
            for line in message.splitlines() or [""]:
                shown = strip_ansi(line)
                inner = _layout(shown)
                for said in _texts(shown, inner, name or process, number or pid, depth=depth, header=header):
                    yield said if said.service is not None else said._replace(service=service)
            return
        cut = record[:MOST_HEADER]
        header = header or (cut if any(f'"{key}"' in cut for key in _LEVEL_KEYS) else "")
    yield _peel(text, layout, process, pid, header)


@lru_cache(maxsize=MOST_KNOWN)
def _known_layout(zeroed: bytes) -> tuple[_Layout, bool]:
    """The layout of a line without its colour, and whether it has any."""
    text = zeroed.decode("utf-8", "replace")
    plain = strip_ansi(text)
    return _layout(plain), plain != text


def _layout(text: str) -> _Layout:
    """Find processes, ranks and the logger's own columns, in whatever order they come."""
    inner, service = _inner(text)
    start = inner
    process = ip = pid = rank = header = record_pid = group = None
    while True:
        match = _PROCESS.match(text, start)
        if match is not None:
            process, pid = match.span("name"), match.span("pid")
            ip = match.span("ip") if match["ip"] else None
        else:
            match = _RANK.match(text, start)
            if match is None:
                break
            rank = rank or match.span("rank")
        start = match.end()
    match = _RECORD.match(text, start)
    if match is not None:
        header, start = match.span(), match.end()
        record_pid = match.span("pid") if match["pid"] else None
        group = match.span("sgl") if match["sgl"] else None
    return _Layout(inner, start, service, process, ip, pid, rank, header, record_pid, group)


def _inner(text: str) -> tuple[int, Span | None]:
    """Where the engine's own line begins, and where the name of its service stands."""
    if text.startswith("("):
        return 0, None  # a process of the engine: nothing stands outside
    start, service = 0, None
    for _ in range(3):
        match = _OUTER.match(text, start)
        if match is None:
            break
        service = match.span(match.lastgroup) if match.lastgroup is not None else service
        start = match.end()
    match = _ANY_OUTER.match(text, start) if text.find(" pid=", start, start + 200) >= 0 else None
    return start if match is None else match.end(), service


def _peel(text: str, layout: _Layout, process: str | None, pid: int | None, header: str) -> Text:
    if layout.process is not None and layout.pid is not None:
        process, pid = text[slice(*layout.process)], int(text[slice(*layout.pid)])
        if layout.ip is not None:
            process = f"{process} ip={text[slice(*layout.ip)]}"
    elif layout.rank is not None:
        process = process or f"rank{text[slice(*layout.rank)]}"
    if layout.header is not None:
        header = header or text[slice(*layout.header)]
    if layout.record_pid is not None:
        pid = pid or int(text[slice(*layout.record_pid)])
    if layout.group is not None:
        process = text[slice(*layout.group)].strip().replace(" ", "_")
    message = text[layout.start :]
    if "across cluster]" in message:
        message = _REPEATED.sub("", message)
    service = text[slice(*layout.service)] if layout.service is not None else None
    return Text(message.rstrip(), process, pid, bool(header), header, service)


def _from_json(text: str) -> tuple[str, str | None, int | None, str] | None:
    """Message, process, process id, and header of a logger's record; what only carries lines has no header."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    key = next((key for key in _MESSAGE_KEYS if isinstance(row.get(key), str)), None)
    if key is None:
        return None
    message: str = row.pop(key)
    header = json.dumps(row)[:MOST_HEADER] if _LEVEL_KEYS & row.keys() else ""
    name, number = row.get("processName"), row.get("process")
    named = name if isinstance(name, str) and name != "MainProcess" else None
    return message, named, number if isinstance(number, int) and not isinstance(number, bool) else None, header


def talks(text: Text) -> bool:
    """A record of a level at which nothing has failed: what it names is a hint, a setting or somebody's prompt."""
    return text.record and _HARMLESS.match(text.header) is not None
