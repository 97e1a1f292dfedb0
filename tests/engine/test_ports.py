"""Whose port it is, and whether something healthy answers there."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from pytest_kvbudget.engine.health import Health, free_port, probe
from pytest_kvbudget.engine.launchers.process import KeptEngine, owns_port
from pytest_kvbudget.engine.ports import Ports
from tests.engine.support import Engines, log_of, tree, wait_for


def serving(engines: Engines, address: str) -> tuple[KeptEngine, int]:
    engine = engines.launch(tree("server", address))
    found = wait_for("the port", lambda: re.search(r"^port (\d+)", log_of(engine), re.MULTILINE))
    return engine, int(found[1])


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_port_of_a_child_is_the_engines(engines: Engines, address: str) -> None:
    engine, port = serving(engines, address)
    assert owns_port(engine, address, port)
    assert not owns_port(engine, address, port + 1)


def test_port_of_a_stranger_is_not(engines: Engines) -> None:
    engine, _ = serving(engines, "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        assert not owns_port(engine, "127.0.0.1", stranger.getsockname()[1])


def test_stranger_on_the_very_address_answers_before_our_wildcard(engines: Engines) -> None:
    engine, port = serving(engines, "::")
    assert owns_port(engine, "127.0.0.1", port)
    other = "127.0.0.2"
    assert owns_port(engine, other, port)
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        stranger.bind((other, port))
        stranger.listen()
        assert not owns_port(engine, other, port)


def test_stranger_on_another_family_does_not_hide_ours(engines: Engines) -> None:
    engine, port = serving(engines, "127.0.0.1")
    with socket.socket(socket.AF_INET6) as stranger:
        stranger.bind(("::1", port))
        stranger.listen()
        assert owns_port(engine, "127.0.0.1", port)
        assert not owns_port(engine, "::1", port)


def test_port_of_an_engine_that_is_gone_is_nobodys(engines: Engines) -> None:
    engine, port = serving(engines, "127.0.0.1")
    engine.stop(0.0)
    assert not owns_port(engine, "127.0.0.1", port)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost", "::1"])
def test_free_port_can_be_bound(host: str) -> None:
    port = free_port(host)
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as bound:
        bound.bind(address)
        assert bound.getsockname()[1] == port


def test_no_port_is_given_to_two_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel may well answer the same port twice as long as nobody has bound it.
    answers = iter([1024, 1024, 1024, 1025, 1024])
    monkeypatch.setattr("pytest_kvbudget.engine.ports.free_port", lambda host: next(answers))
    ports = Ports()
    assert [ports.take("127.0.0.1") for _ in range(2)] == [1024, 1025]
    ports.give_back(1024)
    assert ports.take("127.0.0.1") == 1024


def test_address_of_another_machine_has_no_free_port() -> None:
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.1")


class Answer:
    """A server on loopback that says the same bytes to everyone; ``None`` says nothing and keeps the connection."""

    def __init__(self, said: bytes | None) -> None:
        self.asked: list[bytes] = []
        self._said = said
        self._kept = ExitStack()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with self._listener:
            while True:
                connection, _ = self._listener.accept()
                request = connection.recv(4096)
                if request == b"stop":
                    connection.close()
                    return
                self.asked.append(request)
                if self._said is None:
                    self._kept.enter_context(connection)
                    continue
                connection.sendall(self._said)
                connection.close()

    def close(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(b"stop")
        self._thread.join(20)
        self._kept.close()


@pytest.fixture
def answers() -> Iterator[list[Answer]]:
    made: list[Answer] = []
    yield made
    for answer in made:
        answer.close()


@pytest.mark.parametrize(
    ("said", "was_ready", "health"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", False, Health.READY),
        (b"HTTP/1.0 200 OK\n\n", False, Health.READY),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", False, Health.LOADING),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", True, Health.DEAD),
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\n", True, Health.DEAD),
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\n", False, Health.ERROR),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", True, Health.ERROR),
        (b"HTTP/1.1 2000 OK\r\n\r\n", False, Health.ERROR),
        (b"SSH-2.0-OpenSSH_9.9\r\n", False, Health.ERROR),
        (b"\x00" * 10_000, False, Health.ERROR),
        (b"", False, Health.ERROR),
    ],
)
def test_health_by_answer(answers: list[Answer], said: bytes, health: Health, *, was_ready: bool) -> None:
    answers.append(Answer(said))
    assert probe("127.0.0.1", answers[0].port, was_ready=was_ready, timeout_s=20) is health
    assert answers[0].asked[0].startswith(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1:")


def test_nobody_listens_is_refused() -> None:
    assert probe("127.0.0.1", free_port("127.0.0.1")) is Health.REFUSED


def test_silent_server_is_an_error(answers: list[Answer]) -> None:
    answers.append(Answer(None))
    assert probe("127.0.0.1", answers[0].port, timeout_s=0.05) is Health.ERROR


def test_healthy_stranger_is_foreign(engines: Engines, answers: list[Answer]) -> None:
    answers.append(Answer(b"HTTP/1.1 200 OK\r\n\r\n"))
    engine = engines.launch(tree("stubborn"))
    port = answers[0].port
    assert probe("127.0.0.1", port, owns_port=lambda: owns_port(engine, "127.0.0.1", port)) is Health.FOREIGN
    assert probe("127.0.0.1", port, owns_port=lambda: True) is Health.READY


def test_wildcard_host_is_asked_at_loopback(answers: list[Answer]) -> None:
    answers.append(Answer(b"HTTP/1.1 200 OK\r\n\r\n"))
    assert probe("0.0.0.0", answers[0].port) is Health.READY
