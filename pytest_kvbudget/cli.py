"""The ``kvbudget`` command: reads the same records and logs as the plugin, without pytest."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

EXIT_TROUBLE: Final = 2
"""The command could not answer: unreadable input, nothing found, output that cannot be written."""
EXIT_INTERRUPTED: Final = 130
"""As shells call a process that Ctrl-C ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    _speak_any_language()
    try:
        options = _parser(words[0] if words else "").parse_args(words)
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output went away (head, a pager); there is nobody left to tell.
        _give_up(sys.stdout, sys.stderr)
        return EXIT_TROUBLE
    except OSError as error:
        name = "" if error.filename is None else f" {error.filename}:"
        with suppress(OSError):
            sys.stderr.write(f"kvbudget {words[0] if words else ''}:{name} {error.strerror or error}\n")
        _give_up(sys.stdout, sys.stderr)
        return EXIT_TROUBLE
    except KeyboardInterrupt:
        _give_up(sys.stdout)
        return EXIT_INTERRUPTED
    except Exception:  # noqa: BLE001 - Python's own exit status for it would read as "a failure was found"
        import traceback  # noqa: PLC0415 - for bugs only

        with suppress(OSError):
            traceback.print_exc()
        _give_up(sys.stdout, sys.stderr)
        return EXIT_TROUBLE
    return status


def _speak_any_language() -> None:
    """A terminal without the characters of a log or a page gets their numbers; one that is closed gets nothing."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for the rest of the process
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - as above
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _give_up(*streams: TextIO) -> None:
    """What could not be written is not tried again when Python ends, which would complain and change the status."""
    for stream in streams:
        with suppress(OSError, ValueError):
            stream.flush()
            continue
        with suppress(OSError, ValueError), Path(os.devnull).open("w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def _parser(command: str) -> argparse.ArgumentParser:
    """The whole command line; options that take a command's own modules are there for that ``command`` only."""
    parser = argparse.ArgumentParser(prog="kvbudget", description="Explain engine boots and rebuild reports.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the release and leave")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    explain = commands.add_parser(
        "explain",
        help="what happened in a boot log, and what to turn",
        description="Read engine logs: what each rank allocated, where the boot ended, why, and what to turn.",
        epilog="exit status: 0 the log shows a boot that served, 1 a failure was found, 2 the log does not say",
    )
    explain.add_argument("log", nargs="*", default=["-"], help="log files; - or nothing reads standard input")
    explain.add_argument("--json", action="store_true", help="one JSON object for programs")
    explain.add_argument("--boot", type=int, metavar="N", help="the Nth boot in the log instead of the last")
    explain.add_argument("--follow", action="store_true", help="read on while the log is written, until the boot fails")
    explain.add_argument("--config", type=Path, metavar="FILE", help="read the [[pattern]] tables of FILE as well")
    explain.set_defaults(run=_explain)

    planned = commands.add_parser(
        "plan",
        help="the memory terms a policy predicts before a boot",
        description="Price a shape without an engine: terms that sum, what is left, and what is known not to boot.",
        epilog="exit status: 0 it fits, 1 it is refused or does not fit, 2 something that the law needs is missing",
    )
    if command == "plan":
        from pytest_kvbudget import plan  # noqa: PLC0415 - each command loads what it needs

        plan.add_arguments(planned)
    planned.set_defaults(run=_plan)

    audited = commands.add_parser(
        "audit",
        help="where the GiB of an expert plan are, and what each knob is worth",
        description="Audit the expert plan of a boot from a log, a process, a unit or a container. Reads only.",
    )
    if command == "audit":
        from pytest_kvbudget import audit  # noqa: PLC0415 - each command loads what it needs

        audit.add_arguments(audited)
    audited.set_defaults(run=_audit)

    schema = commands.add_parser("schema", help="the JSON schema of attempt and finding records")
    schema.set_defaults(run=_schema)

    report = commands.add_parser(
        "report",
        help="rebuild the HTML pages of an archive",
        description="Rebuild pages from records, without a run.",
        epilog="exit status: 0 every record has its page, 2 one could not be read or written (the others are), or none",
    )
    report.add_argument("archive", type=Path, help="an archive, a run's folder, or any folder below one")
    report.set_defaults(run=_report)

    reap = commands.add_parser(
        "reap",
        help="end engines that dead runs of ours left behind, and nothing else",
        description=(
            "End processes that the records of an archive prove we started (process id and start time), where the "
            "run that started them is gone. Engines that were left serving on purpose are never touched."
        ),
    )
    reap.add_argument("archive", type=Path, help="the archive whose runs to look at")
    reap.add_argument("--dry-run", action="store_true", help="say what would be ended")
    reap.set_defaults(run=_reap)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when it is asked for: that costs more than most commands take to start."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version  # noqa: PLC0415 - see above

        sys.stdout.write(f"kvbudget {version('pytest-kvbudget')}\n")
        parser.exit()


def _explain(options: argparse.Namespace) -> int:
    from pytest_kvbudget.explain import follow, run  # noqa: PLC0415 - each command loads what it needs

    if not options.follow:
        return run(
            options.log,
            as_json=options.json,
            boot=options.boot,
            config=options.config,
            out=sys.stdout,
            stdin=sys.stdin.buffer,
        )
    if options.json or options.boot is not None or len(options.log) != 1:
        sys.stderr.write("kvbudget explain: --follow takes one log, and neither --json nor --boot\n")
        return EXIT_TROUBLE
    return follow(options.log[0], config=options.config, out=sys.stdout, stdin=sys.stdin.buffer)


def _plan(options: argparse.Namespace) -> int:
    from pytest_kvbudget.plan import run  # noqa: PLC0415 - each command loads what it needs

    return run(options, out=sys.stdout)


def _audit(options: argparse.Namespace) -> int:
    from pytest_kvbudget.audit import run  # noqa: PLC0415 - each command loads what it needs

    return run(options, out=sys.stdout)


def _schema(options: argparse.Namespace) -> int:
    from pytest_kvbudget.archive import schema  # noqa: PLC0415 - each command loads what it needs

    json.dump(schema(), sys.stdout, indent=2)
    sys.stdout.write("\n")
    return 0


def _report(options: argparse.Namespace) -> int:
    from pytest_kvbudget.report.rebuild import rebuild  # noqa: PLC0415 - each command loads what it needs

    return EXIT_TROUBLE if rebuild(options.archive, out=sys.stdout, err=sys.stderr) else 0


def _reap(options: argparse.Namespace) -> int:
    from pytest_kvbudget.engine.reap import reap  # noqa: PLC0415 - each command loads what it needs

    return reap(options.archive, dry_run=options.dry_run, out=sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
