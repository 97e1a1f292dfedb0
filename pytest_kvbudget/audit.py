"""``kvbudget audit``: where the GiB of an expert plan are, which of them a deploy can move, what each knob is worth.

From a log, a live process, a unit or a container; everything is read only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, TextIO
from urllib.parse import urlsplit

import msgspec

from pytest_kvbudget.audit_live import (
    CONTAINER_TOOLS,
    Engine,
    ask_peer,
    from_container,
    from_process,
    from_unit,
    log_of,
    read_cards,
    stream,
)
from pytest_kvbudget.budget.audit import Audit, Observed, audit
from pytest_kvbudget.budget.gate import flag_value, has_flag
from pytest_kvbudget.budget.levers import EXPERTS_PER_LAYER
from pytest_kvbudget.budget.model import BudgetInputError
from pytest_kvbudget.budget.rdna4 import PRECISE_FLAG, UTILIZATION_FLAG
from pytest_kvbudget.budget.render import audit_lines
from pytest_kvbudget.budget.utilization import FreeAtInit, from_driver_reserve
from pytest_kvbudget.explain import Source, read_log
from pytest_kvbudget.ledger.model import BootLedger
from pytest_kvbudget.ledger.reader import LedgerReader
from pytest_kvbudget.observed import observed_from, row_evidence, with_given
from pytest_kvbudget.units import SizeError, parse_memory
from pytest_kvbudget.verdict import Provenance

EXIT_WRONG: Final = 1
EXIT_TROUBLE: Final = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``kvbudget audit``."""
    parser.epilog = (
        "exit status: 0 nothing that was checked is wrong, 1 the plan does not close or a check is wrong, "
        "2 no line states an expert plan, or something cannot be read"
    )
    parser.add_argument("log", nargs="*", help="log files of one boot; - reads standard input")
    parser.add_argument("--json", action="store_true", help="one JSON object for programs")
    parser.add_argument("--boot", type=int, metavar="N", help="the Nth boot in the log instead of the last")
    given = parser.add_argument_group("figures that the log does not state")
    given.add_argument("--total", type=_size, metavar="SIZE", help="memory of one card: '31.86 GiB', or bytes")
    given.add_argument("--utilization", type=float, metavar="F", help="--gpu-memory-utilization of the boot")
    given.add_argument("--windows", type=int, metavar="N", help="full windows that the deploy promises")
    given.add_argument("--asked-tokens", type=int, metavar="TOKENS", help="tokens that the pinned pool was asked for")
    given.add_argument("--graphs", type=int, metavar="N", help="captured graphs")
    given.add_argument("--max-num-batched-tokens", type=int, metavar="TOKENS")
    given.add_argument(
        "--experts-per-layer", type=int, metavar="N", help=f"default: {EXPERTS_PER_LAYER}, an assumption"
    )
    given.add_argument("--free-at-init", type=_size, metavar="SIZE", help="what the worker said is free, with --total")
    given.add_argument("--driver-reserve", type=_size, metavar="SIZE", help="what the driver keeps, with --total")
    live = parser.add_argument_group("a running engine; read only")
    live.add_argument("--pid", type=int, metavar="PID", help="a process of the engine: environment, flags, image")
    live.add_argument("--unit", metavar="NAME", help="systemd unit: the same, restart count, journal")
    live.add_argument("--container", metavar="NAME", help="container: environment, flags, image, restart count, log")
    live.add_argument("--tool", choices=CONTAINER_TOOLS, help="which of them runs the container")
    live.add_argument("--source", metavar="DIR", help="folder of the engine's package, where it is not found")
    live.add_argument("--devices", metavar="LIST", help="cards to read, as the engine names them: 0,1")
    live.add_argument(
        "--peer",
        type=_address,
        metavar="URL",
        help="address by which clients reach it: one chat completion is asked for",
    )


def run(options: argparse.Namespace, *, out: TextIO, stdin: BinaryIO | None = None) -> int:
    """Audit, print, and return the exit status."""
    try:
        _check(options, sys.stdin if stdin is None else None)
        ledger, source, troubles = _ledger(options, stdin or sys.stdin.buffer)
        engine = _engine(options)
        observed, missed = _observed(options, ledger, engine)
        result = audit(observed)
    except (OSError, ValueError) as error:
        text = f"cannot read {error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        if options.json:
            out.write(json.dumps({"error": text}) + "\n")
        else:
            sys.stderr.write(f"kvbudget audit: {text}\n")
        return EXIT_TROUBLE
    troubles = (*troubles, *engine.troubles, *missed)
    if options.json:
        out.write(json.dumps(_document(result, observed, ledger, engine, troubles)) + "\n")
    else:
        asked = bool(engine.said) or options.peer is not None
        out.write("\n".join(_text(result, ledger, source, engine, troubles, asked=asked)) + "\n")
    return _status(result, troubles)


def _size(text: str) -> int:
    try:
        return parse_memory(text)
    except SizeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _address(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is no address; expected as in http://host:8000")
    return text


def _status(result: Audit, troubles: tuple[str, ...]) -> int:
    if not result.rows:
        return EXIT_TROUBLE
    if any(check.state == "wrong" for check in result.checks):
        return EXIT_WRONG
    return EXIT_TROUBLE if troubles else 0


def _check(options: argparse.Namespace, terminal: TextIO | None) -> None:
    """What was asked for must be possible: an option that nobody reads would look like a check that was made.

    Raises:
        BudgetInputError: naming the option and what was expected.
    """
    live = (options.pid, options.unit, options.container, options.peer, options.devices)
    if terminal is not None and terminal.isatty() and not options.log and all(each is None for each in live):
        raise BudgetInputError("nothing to audit; expected a log, - for standard input, --pid, --unit or --container")
    if options.source is not None and options.container is None:
        if options.pid is None and options.unit is None:
            raise BudgetInputError("--source needs --pid, --unit or --container: the engine whose package it is")
        if not Path(options.source).is_dir():
            raise BudgetInputError(f"--source {options.source} is no folder; expected that of the engine's package")


def _ledger(options: argparse.Namespace, stdin: BinaryIO) -> tuple[BootLedger, Source, tuple[str, ...]]:
    """The boot to audit, where its lines stand, and what was in the way of reading it."""
    reader, source, troubles = LedgerReader(), Source(), list[str]()
    paths, commands = list[str](options.log), list[list[str]]()
    if not paths:
        if options.container is not None:
            commands = [[options.tool or CONTAINER_TOOLS[0], "logs", options.container]]
        elif options.unit is not None:
            commands = [["journalctl", "--unit", options.unit, "--boot", "--output=cat", "--no-pager"]]
        elif options.pid is not None:
            found = log_of(options.pid)
            paths = [] if found is None else [str(found)]
            troubles += [] if paths else [f"process {options.pid} writes to no file: name its log"]
        elif options.peer is None:
            paths = ["-"]
    for command in commands:
        trouble = stream(command, reader.feed)
        troubles += [] if trouble is None else [trouble]
    read_log(reader, source, paths, stdin)
    boots = reader.boots()
    number = len(boots) if options.boot is None else options.boot
    if not 1 <= number <= len(boots):
        raise BudgetInputError(f"boot {number}: the log holds {len(boots)}; expected 1 to {len(boots)}")
    return boots[number - 1], source, tuple(troubles)


def _engine(options: argparse.Namespace) -> Engine:
    """Everything that was asked for of a running engine; a container's own words come first."""
    engine = Engine()
    folder = None if options.source is None else Path(options.source)
    if options.container is not None:
        engine = engine.beside(from_container(options.container, options.tool, options.source))
        # a unit's main process is then the container's monitor, whose environment says nothing
        if options.unit is not None:
            engine = engine.beside(msgspec.structs.replace(from_unit(options.unit), environ=None, argv=None, reads={}))
        return engine
    if options.pid is not None:
        engine = engine.beside(from_process(options.pid, folder))
    if options.unit is not None:
        engine = engine.beside(from_unit(options.unit, folder))
    return engine


def _observed(options: argparse.Namespace, ledger: BootLedger, engine: Engine) -> tuple[Observed, list[str]]:
    """Figures of the log, then of the running engine, then as given; and what could not be read."""
    troubles, argv = list[str](), engine.argv or ()
    total_bytes, high_water = options.total, dict[str, int]()
    if options.devices is not None:
        cards, trouble = read_cards(tuple(filter(None, options.devices.split(","))))
        high_water = {f"card {card.device}": card.used_bytes for card in cards}
        troubles += [trouble] if trouble else []
        if total_bytes is None and cards:
            total_bytes = min(card.total_bytes for card in cards)
    observed = observed_from(ledger, total_bytes)
    peer: tuple[bool | None, str] = (None, "") if options.peer is None else ask_peer(options.peer)
    utilization = options.utilization
    if utilization is None and observed.utilization is None:
        utilization = _fraction(flag_value(argv, UTILIZATION_FLAG))
    return (
        with_given(
            observed,
            utilization=utilization,
            windows=options.windows,
            asked_tokens=options.asked_tokens,
            graphs=options.graphs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            experts_per_layer=options.experts_per_layer,
            precise=True if has_flag(argv, PRECISE_FLAG) else None,
            free=_free(options),
            high_water_bytes=high_water or None,
            restarts=engine.restarts,
            peer_answered=peer[0],
            peer_said=peer[1] or None,
            carried=engine.carried(),
        ),
        troubles,
    )


def _fraction(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _free(options: argparse.Namespace) -> FreeAtInit | None:
    if options.free_at_init is None and options.driver_reserve is None:
        return None
    if options.total is None:
        raise BudgetInputError("--free-at-init and --driver-reserve need --total: both are parts of one card")
    if options.free_at_init is not None:
        return FreeAtInit(free_bytes=options.free_at_init, total_bytes=options.total, source="refusal line")
    return from_driver_reserve(options.total, options.driver_reserve)


def _simulated(ledger: BootLedger) -> bool:
    return any(value.provenance is Provenance.SIMULATED for value in ledger.facts.values())


def _text(
    result: Audit, ledger: BootLedger, source: Source, engine: Engine, troubles: tuple[str, ...], *, asked: bool
) -> Iterator[str]:
    """The page; where nothing was read and no peer was ``asked``, only why."""
    version = f" {ledger.engine_version}" if ledger.engine_version else ""
    mark = ", SIMULATED" if _simulated(ledger) else ""
    yield f"audit of a boot: {ledger.family}{version}, {ledger.lines:,} lines read{mark}"
    if not result.rows:
        read = "" if engine.said else f" in {source.files(ledger.lines)}" if source.names else ""
        yield f"no line states an expert plan{read}; `kvbudget explain` says what the log does state"
        if not asked and all(check.state in {"not measured", "unknown"} for check in result.checks):
            yield from (f"not read: {trouble}" for trouble in troubles)
            return
    yield from audit_lines(result)
    rows = row_evidence(ledger)
    if rows:
        places = ", ".join(f"{name} {source.place(evidence.line)}" for name, evidence in rows.items())
        yield f"read from: {places}"
    yield from (f"checked: {said}" for said in engine.said)
    for lever, where in engine.reads.items():
        yield f"checked: {lever} {'is in no source file of the image' if where is None else f'is read in {where}'}"
    yield from (f"not read: {trouble}" for trouble in troubles)


def _document(
    result: Audit, observed: Observed, ledger: BootLedger, engine: Engine, troubles: tuple[str, ...]
) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(result)
    if result.closure is not None:
        document["closure"]["closes"] = result.closure.closes
    if result.slot is not None:
        document["slot"]["slots_per_gib"] = result.slot.slots_per_gib
    lines = row_evidence(ledger)
    for row in document["rows"]:
        row["precision_bytes"] = observed.rows[row["name"]].precision_bytes
        row["line"], row["text"] = lines[row["name"]].line, lines[row["name"]].text
    return {
        "engine": ledger.family,
        "engine_version": ledger.engine_version,
        "simulated": _simulated(ledger),
        **document,
        "inputs": {
            name: getattr(observed, name)
            for name in ("total_bytes", "utilization", "kv_tokens", "max_model_len", "slots", "resident_layers")
        },
        "carried": msgspec.to_builtins(observed.carried),
        "read": list(engine.said),
        "troubles": list(troubles),
    }
