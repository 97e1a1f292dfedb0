"""Just enough HTTP/1.1 for one event loop: requests in, whole or chunked responses out, nothing ever blocks."""

from __future__ import annotations

import socket
from http import HTTPStatus
from typing import Final

import msgspec

JSON: Final = "application/json"
MAX_HEAD_BYTES: Final = 1 << 16
_REASONS: Final = {status.value: status.phrase for status in HTTPStatus}


class HttpRequest(msgspec.Struct):
    """One request."""

    method: str
    path: str
    body: bytes
    keep_alive: bool


class Connection:
    """A client's connection. Bytes to send wait in ``backlog`` until the client takes them."""

    def __init__(self, client: socket.socket, address: str) -> None:
        client.setblocking(False)
        self._socket = client
        self.address = address
        self.backlog = b""
        self.closing = False
        """Close as soon as everything is sent."""
        self.job: int | None = None
        """The engine's request that this connection waits for."""
        self._received = b""
        self._keep_alive = True

    def fileno(self) -> int:
        """The descriptor, for selectors."""
        return self._socket.fileno()

    def receive(self) -> bool:
        """Read what arrived; false when the client is gone."""
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._received += data
        return bool(data)

    def next_request(self) -> HttpRequest | None:
        """The next complete request, while no response is under way."""
        if self.job is not None or self.closing:
            return None
        head, separator, rest = self._received.partition(b"\r\n\r\n")
        if not separator:
            self.closing = len(head) > MAX_HEAD_BYTES
            return None
        request_line, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length") or 0)
        if len(rest) < length:
            return None
        self._received = rest[length:]
        method, path, version = [*request_line.split(" "), "", "", ""][:3]
        self._keep_alive = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        return HttpRequest(method, path.partition("?")[0], rest[:length], self._keep_alive)

    def respond(self, status: int, body: bytes, content_type: str = JSON) -> None:
        """A whole response."""
        self._send(self._head(status, content_type, f"content-length: {len(body)}") + body)
        self.closing = not self._keep_alive

    def begin_stream(self) -> None:
        """Headers of a stream of server-sent events."""
        self._send(self._head(200, "text/event-stream; charset=utf-8", "transfer-encoding: chunked"))

    def send_events(self, data: bytes) -> None:
        """Some events of the stream."""
        self._send(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self) -> None:
        """The stream's proper end."""
        self._send(b"0\r\n\r\n")
        self.closing = not self._keep_alive

    def _head(self, status: int, content_type: str, framing: str) -> bytes:
        lines = [f"HTTP/1.1 {status} {_REASONS[status]}", "server: uvicorn", f"content-type: {content_type}", framing]
        if not self._keep_alive:
            lines.append("connection: close")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def _send(self, data: bytes) -> None:
        self.backlog += data
        self.flush()

    def flush(self) -> bool:
        """Send what the client takes now; false when it is gone."""
        try:
            while self.backlog:
                self.backlog = self.backlog[self._socket.send(self.backlog) :]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close, whatever was under way."""
        self._socket.close()


def reason(status: int) -> str:
    """The reason phrase of a status."""
    return _REASONS[status]
