"""How a keeper starts its engine. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals of terminals and runners, which a keeper ignores and an engine must not inherit as ignored."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)


class StartError(Exception):
    """The engine did not start; says why, and names the command, folder or file at fault."""


class StartOrder:
    """What to start, as the first order says it.

    Bytes travel as text of one character per byte, so that no encoding on the way can change what the engine gets.
    """

    __slots__ = ("argv", "critical", "cwd", "env", "log", "mark", "owner", "run", "state")

    def __init__(self, raw: dict[str, object]) -> None:
        argv, env = raw["argv"], raw["env"]
        if not isinstance(argv, list) or not isinstance(env, dict):
            raise TypeError("argv is a list and env an object")
        self.argv = [_to_bytes(text) for text in argv]
        self.env = {_to_bytes(name): _to_bytes(value) for name, value in env.items()}
        self.cwd = _to_bytes(raw["cwd"])
        self.log = _to_bytes(raw["log"])
        """File that standard output and standard error are appended to."""
        self.state = _to_bytes(raw["state"])
        self.critical = str(raw["critical"])
        self.run = str(raw["run"])
        self.mark = str(raw["mark"])
        """In the environment of every process of this engine."""
        self.owner = (int(str(raw["owner_pid"])), int(str(raw["owner_ticks"])))


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own.

    Raises:
        StartError: the kernel refuses.
    """
    if _prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise StartError("this kernel lets no process adopt orphans (PR_SET_CHILD_SUBREAPER)")


def start_engine(order: StartOrder) -> int:
    """Start the engine's first process; returns its id once the command runs.

    Raises:
        StartError: it cannot run; nothing of it is left.
    """
    try:
        log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise StartError(f"cannot write {os.fsdecode(order.log)!r}: {error.strerror}") from None
    read, write = os.pipe()
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become_engine(order, keeper, log, write)
    os.close(write)
    os.close(log)
    with os.fdopen(read, "rb") as pipe:
        problem = pipe.read()  # ends when the command has taken over
    if problem:
        os.waitpid(pid, 0)
        raise StartError(problem.decode("utf-8", "replace"))
    return pid


def _become_engine(order: StartOrder, keeper: int, log: int, problems: int) -> None:
    """In the forked child: become the command, or say why not. Never returns."""
    doing = f"cannot run {os.fsdecode(order.argv[0])!r}"
    try:
        # Should the keeper itself be killed, the root goes with it.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)
        os.setpgid(0, 0)
        for number in (*IGNORED, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        null = os.open("/dev/null", os.O_RDONLY)
        for target, source in enumerate((null, log, log)):
            os.dup2(source, target)
        try:
            os.chdir(order.cwd)
        except OSError:
            doing = f"cannot enter the folder {os.fsdecode(order.cwd)!r}"
            raise
        os.execvpe(order.argv[0], order.argv, order.env)  # noqa: S606
    except OSError as error:
        problem = f"{doing}: {error.strerror}"
    except Exception as error:  # noqa: BLE001 - a child of ours must never run on into the keeper's code
        problem = f"{doing}: {type(error).__name__}: {error}"
    os.write(problems, problem.encode("utf-8", "replace")[:4000])
    os._exit(127)


def _prctl(option: int, value: int) -> int:
    return int(_LIBC.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)))


def _to_bytes(text: object) -> bytes:
    return str(text).encode("latin-1")
