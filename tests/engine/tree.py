"""Small engines made of processes that only wait. Run as a script; the first argument says which one."""

from __future__ import annotations

import os
import signal
import sys
import time


def say(text: str) -> None:
    os.write(1, f"{text} {os.getpid()}\n".encode())


def wait_for_ever(name: str, *, ignore_term: bool = False) -> None:
    if ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say(f"up {name}")
    while True:
        signal.pause()


def spawn(name: str, *, ignore_term: bool = False, session: bool = False) -> None:
    if os.fork() == 0:
        if session:
            os.setsid()
        wait_for_ever(name, ignore_term=ignore_term)


def spawn_orphan(name: str) -> None:
    """A process of its own session whose parent is gone."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            wait_for_ever(name, ignore_term=True)
        os._exit(0)
    os.waitpid(child, 0)


def family() -> None:
    """Root, child, own-session child, orphan: everything that can hide from a naive teardown."""
    spawn("child", ignore_term=True)
    spawn("session", session=True)
    spawn_orphan("orphan")
    wait_for_ever("root")


def headless() -> None:
    """The root leaves with status 0; an own-session child and an orphan stay."""
    spawn("session", session=True)
    spawn_orphan("orphan")
    say("leaving")


def deaf() -> None:
    """Loses the first SIGTERM, as an engine does that is just spawning its core."""
    got: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    say("up root")
    while len(got) < 2:
        signal.pause()
    say("ended by a second SIGTERM")


def stubborn() -> None:
    wait_for_ever("root", ignore_term=True)


def storm() -> None:
    """Every process replaces itself by a child, for ever, in a session of its own."""
    say("up root")
    if os.fork() == 0:
        os.setsid()
        while True:
            if os.fork() != 0:
                os._exit(0)
            time.sleep(0.0005)
    while True:
        signal.pause()


def titled() -> None:
    """Children with titles, as many as the second argument says; a line on stdin is not needed."""
    for _ in range(int(sys.argv[2])):
        if os.fork() == 0:
            os.execv("/bin/sleep", ["VLLM::EngineCore", "1000"])
    wait_for_ever("root")


def server() -> None:
    """A child of the root listens on a port of its own choice, on the address of the second argument."""
    import socket  # noqa: PLC0415

    if os.fork() == 0:
        family = socket.AF_INET6 if ":" in sys.argv[2] else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            # As vLLM does, so that others can bind the same port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind((sys.argv[2], 0))
            listener.listen()
            say(f"port {listener.getsockname()[1]}")
            wait_for_ever("server")
    wait_for_ever("root")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
