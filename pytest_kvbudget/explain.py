"""``kvbudget explain``: what happened in a boot log and what to turn, for people and as JSON."""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Final, TextIO

import msgspec

from pytest_kvbudget.config import ConfigError, load_patterns
from pytest_kvbudget.explain_text import Boots, page
from pytest_kvbudget.ledger.model import BootLedger, Evidence
from pytest_kvbudget.ledger.reader import LedgerReader
from pytest_kvbudget.ledger.reconcile import reconcile
from pytest_kvbudget.verdict import Phase, Provenance

CHUNK_BYTES: Final = 1 << 20
STDIN: Final = "-"

BOOTED, FAILED, UNSAID = 0, 1, 2
"""Exit status: the log shows a boot that served; a failure was found; the log does not say."""

NOT_OURS: Final = "this is not a boot log of an engine I know"
KNOWN: Final = "known are vLLM, its RDNA4 fork, vLLM Neuron, SGLang and llama.cpp"

MILESTONE_CHARACTERS: Final = 120
PAUSE_S: Final = 0.2
PUZZLED: Final = 5
"""Pauses after which a log without any line of an engine is said to have none."""
PATIENCE: Final = 50
"""Pauses in which a line may come that says more than that the boot failed."""


def _pause() -> bool:
    time.sleep(PAUSE_S)
    return True


def _lines(count: int) -> str:
    return "empty" if not count else "1 line" if count == 1 else f"{count:,} lines"


class Source:
    """Which file a line of the joined stream stands in."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._names: list[str] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Every file, in the order in which they were read."""
        return tuple(self._names)

    def begin(self, name: str, line: int) -> None:
        """``name`` begins at ``line`` of the joined stream."""
        self._starts.append(line)
        self._names.append(name)

    def files(self, lines: int) -> str:
        """Each file with what was read of it, of ``lines`` in all: ``a.log (17 lines), b.log (empty)``."""
        ends = [*self._starts[1:], lines + 1]
        counts = [end - start for start, end in zip(self._starts, ends, strict=True)]
        return ", ".join(
            f"{'standard input' if name == STDIN else name} ({_lines(count)})"
            for name, count in zip(self._names, counts, strict=True)
        )

    def without(self, evidence: Iterable[int]) -> tuple[str, ...]:
        """The files in which none of these lines stands; none where there is one file only."""
        told = {bisect_right(self._starts, line) - 1 for line in evidence}
        names = [name for position, name in enumerate(self._names) if position not in told]
        return tuple(names) if len(self._names) > 1 else ()

    def place(self, line: int) -> str:
        """Where people find the line: ``line 57``, and the file where there are several."""
        if len(self._names) < 2:
            return f"line {line}"
        position = bisect_right(self._starts, line) - 1
        return f"{Path(self._names[position]).name}:{line - self._starts[position] + 1}"


def run(
    paths: Sequence[str],
    *,
    as_json: bool,
    boot: int | None = None,
    config: Path | None = None,
    out: TextIO,
    stdin: BinaryIO,
) -> int:
    """Explain the boot in ``paths`` (``-`` or none: standard input; several: the ranks of one boot in separate files).

    Args:
        paths: files to read, in order.
        as_json: one JSON object instead of text.
        boot: 1-based number of the boot to explain where the stream holds several; default: the last.
        config: file with ``[[pattern]]`` tables to read beside the grammar.
        out: receives the explanation.
        stdin: read for ``-``.

    Returns:
        Exit status 0, 1 or 2; 2 also where nothing could be read.
    """
    source = Source()
    try:
        reader = _reader(config)
        read_log(reader, source, paths or [STDIN], stdin)
    except ConfigError as error:
        return _complain(out, str(error), as_json=as_json)
    except OSError as error:
        return _complain(out, f"cannot read {error.filename}: {error.strerror}", as_json=as_json)
    boots = reader.boots()
    number = len(boots) if boot is None else boot
    if not 1 <= number <= len(boots):
        return _complain(out, f"boot {number}: the log holds {len(boots)}; expected 1 to {len(boots)}", as_json=as_json)
    ledger = boots[number - 1]
    foreign = _foreign(source, boots, config)
    if as_json:
        found = {**as_object(ledger, boots, number, source), "foreign_files": list(foreign)}
        out.write(json.dumps(found, ensure_ascii=False) + "\n")
    elif ledger.family == "unknown":
        out.write(_not_ours(reader, source))
    else:
        every = Boots(boots, reader.starts, reader.times, reader.forgotten, reader.services)
        out.write(page(ledger, every, number, source.place, files=len(paths) or 1))
        out.write("".join(f"{name}: no line of an engine I know{_compressed(name)}\n" for name in foreign))
    return exit_status(ledger)


def _foreign(source: Source, boots: Sequence[BootLedger], config: Path | None) -> tuple[str, ...]:
    """Those of several files that have no line of an engine: whoever named them should know."""
    suspects = source.without(line for ledger in boots for line in _evidence_lines(ledger))
    found = []
    for name in suspects:
        if name == STDIN:
            continue
        # its figures may all have been overtaken by later files: only the file itself can tell
        alone = _reader(config)
        read_log(alone, Source(), [name], BytesIO())
        if alone.ledger().family == "unknown":
            found.append(name)
    return tuple(found)


def _evidence_lines(ledger: BootLedger) -> Iterator[int]:
    yield from (value.evidence.line for value in ledger.facts.values())
    yield from (value.evidence.line for by_rank in ledger.ranks.values() for value in by_rank.values())
    yield from (seen.evidence.line for seen in ledger.milestones)
    yield from (evidence.line for evidence in (ledger.cause.evidence if ledger.cause is not None else ()))


_PACKED: Final = {b"\x1f\x8b": "zcat", b"\xfd7zXZ": "xzcat", b"\x28\xb5\x2f\xfd": "zstdcat", b"BZh": "bzcat"}
"""How compressed files begin, and what unpacks them."""


def _compressed(name: str) -> str:
    """What to do with a file that is compressed; nothing where it is not, or cannot be read again."""
    try:
        with Path(name).open("rb") as file:
            head = file.read(6)
    except OSError:
        return ""
    tool = next((tool for magic, tool in _PACKED.items() if head.startswith(magic)), None)
    return "" if tool is None else f"; it is compressed: {tool} {name} | kvbudget explain"


def follow(
    path: str,
    *,
    config: Path | None = None,
    out: TextIO,
    stdin: BinaryIO | None = None,
    wait: Callable[[], bool] = _pause,
) -> int:
    """Explain a log while it is written: its milestones as they come, and the whole page when the boot has failed.

    Args:
        path: file to read, which may grow, not shrink; ``-``: standard input, to its end.
        config: file with ``[[pattern]]`` tables to read beside the grammar.
        out: receives the milestones and the page.
        stdin: read for ``-``.
        wait: called when nothing new is there; ends the reading by returning ``False`` or by Ctrl-C.

    Returns:
        Exit status 0, 1 or 2, as `run` does.
    """
    source = Source()
    source.begin(path, 1)
    try:
        reader = _reader(config)
        if path == STDIN and stdin is not None:
            _follow(reader, stdin, out, lambda: False)
        else:
            with Path(path).open("rb") as file:
                _follow(reader, file, out, wait)
    except ConfigError as error:
        return _complain(out, str(error), as_json=False)
    except OSError as error:
        return _complain(out, f"cannot read {error.filename}: {error.strerror}", as_json=False)
    ledger = reader.ledger()
    boots = Boots(reader.boots(), reader.starts, reader.times, reader.forgotten, reader.services)
    known = ledger.family != "unknown"
    out.write(page(ledger, boots, len(boots.ledgers), source.place) if known else _not_ours(reader, source))
    return exit_status(ledger)


def _not_ours(reader: LedgerReader, source: Source) -> str:
    packed = "".join(map(_compressed, source.names))
    return f"{NOT_OURS}: {source.files(reader.lines)}; {KNOWN}{packed}\n"


def _reader(config: Path | None) -> LedgerReader:
    return LedgerReader(patterns=() if config is None else load_patterns(config))


def _follow(reader: LedgerReader, file: BinaryIO, out: TextIO, wait: Callable[[], bool]) -> None:
    read = getattr(file, "read1", file.read)  # a pipe's next lines, not a whole chunk of them
    silence, told = 0, False
    with suppress(KeyboardInterrupt):
        while True:
            chunk: bytes = read(CHUNK_BYTES)
            for milestone in reader.feed(chunk):
                text = milestone.evidence.text[:MILESTONE_CHARACTERS]
                out.write(f"{milestone.phase:14} line {milestone.evidence.line}: {text}\n")
            out.flush()
            silence = 0 if chunk else silence + 1
            if silence == PUZZLED and not told and reader.ledger().family == "unknown":
                out.write(f"no line of an engine so far: {_lines(reader.lines)}; {KNOWN}; reading on, Ctrl-C ends\n")
                out.flush()
                told = True
            if not chunk and (_is_over(reader.ledger(), silence) or not wait()):
                return


def _is_over(ledger: BootLedger, silence: int) -> bool:
    """A boot that failed is over when its cause is known; a wrapper alone may have its cause in the next lines."""
    if ledger.get("compile_only"):
        return silence > PATIENCE
    if ledger.cause is None or ledger.outcome == "recovered":
        return False
    return silence > PATIENCE or ledger.failure_class not in {"unexplained", "engine_exception", "engine_killed"}


def exit_status(ledger: BootLedger) -> int:
    """0 where the log shows that the engine served, 1 where a failure was found, 2 where it does not say."""
    if ledger.family == "unknown":
        return UNSAID
    if ledger.outcome in {"failed", "refused", "died_after_boot"} or ledger.failure_class == "request_starved":
        return FAILED
    if ledger.outcome == "recovered":
        return BOOTED if any(seen.phase is Phase.READY for seen in ledger.milestones) else FAILED
    if ledger.cause is not None:
        return FAILED
    served = ledger.outcome == "booted" and ledger.phase in {Phase.READY, Phase.REQUEST}
    return BOOTED if served else UNSAID


def as_object(ledger: BootLedger, boots: Sequence[BootLedger], number: int, source: Source) -> dict[str, object]:
    """The JSON object of ``explain --json``: plain values, and for each where it came from."""
    known = ledger.family != "unknown"
    if not known:
        # what a line of another program names is no failure of an engine
        ledger = msgspec.structs.replace(ledger, outcome="unknown", phase=Phase.UNKNOWN, cause=None)
    cause = ledger.cause
    return {
        "engine": ledger.family,
        "engine_version": ledger.engine_version,
        "outcome": ledger.outcome,
        "phase": str(ledger.phase),
        "failure_class": ledger.failure_class,
        "sentence": (None if known else NOT_OURS) if cause is None else cause.sentence,
        "rank": None if cause is None else cause.rank,
        "facts": {name: value.value for name, value in ledger.facts.items()},
        "ranks": {
            name: {rank: value.value for rank, value in by_rank.items()} for name, by_rank in ledger.ranks.items()
        },
        "units": {name: value.unit for name, value in ledger.facts.items()},
        "provenance": {name: str(value.provenance) for name, value in ledger.facts.items()},
        "precision": {name: value.precision for name, value in ledger.facts.items() if value.precision},
        "states": ledger.states,
        "findings": [
            {
                "name": finding.name,
                "agrees": finding.agrees,
                "sentence": finding.sentence,
                "worth_bytes": finding.worth_bytes,
                "worth_tokens": finding.worth_tokens,
                "worth_slots": finding.worth_slots,
                "lines": [evidence.line for evidence in finding.evidence],
            }
            for finding in reconcile(ledger)
        ],
        "evidence": {
            "verdict": [_where(evidence, source) for evidence in _verdict_lines(ledger)],
            "facts": {name: _where(value.evidence, source) for name, value in ledger.facts.items()},
        },
        "levers": [
            {"name": lever.name, "direction": lever.direction, "effect": lever.effect, "why": lever.why}
            for lever in (cause.levers if cause is not None else ())
        ],
        "milestones": [{"phase": str(seen.phase), **_where(seen.evidence, source)} for seen in ledger.milestones],
        "simulated": any(value.provenance is Provenance.SIMULATED for value in ledger.facts.values()),
        "lines": ledger.lines,
        "boot": number,
        "boots": [
            {
                "outcome": each.outcome,
                "phase": str(each.phase),
                "failure_class": each.failure_class,
                "lines": each.lines,
            }
            for each in boots
        ],
    }


def _verdict_lines(ledger: BootLedger) -> Iterator[Evidence]:
    if ledger.cause is not None:
        yield from ledger.cause.evidence
    elif ledger.milestones:
        last = [seen.evidence for seen in ledger.milestones if seen.phase is ledger.phase]
        yield from last[-1:] or [ledger.milestones[-1].evidence]


def _where(evidence: Evidence, source: Source) -> dict[str, object]:
    return {"line": evidence.line, "text": evidence.text, "place": source.place(evidence.line)}


def read_log(reader: LedgerReader, source: Source, paths: Sequence[str], stdin: BinaryIO) -> None:
    """Read files (``-``: standard input) to their ends, as one stream, and close the reader.

    Raises:
        OSError: one cannot be read.
    """
    for path in paths:
        source.begin(path, reader.lines + 1)
        if path == STDIN:
            _feed(reader, stdin)
        else:
            with Path(path).open("rb") as file:
                _feed(reader, file)
    reader.close()


def _feed(reader: LedgerReader, file: BinaryIO) -> None:
    while chunk := file.read(CHUNK_BYTES):
        reader.feed(chunk)
    reader.end_line()


def _complain(out: TextIO, message: str, *, as_json: bool) -> int:
    out.write(json.dumps({"error": message}) + "\n" if as_json else f"{message}\n")
    return UNSAID
