"""The HTTP client against a server that says what engines say."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pytest_kvbudget.engine.client import Chunk, ClientError, EngineClient
from pytest_kvbudget.engine.health import free_port

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m \\"x\\""} 2.0
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 0.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",engine="0",kv_cache_memory_bytes="None",kv_cache_size_tokens="51200"} 1.0
"""


class Handler(BaseHTTPRequestHandler):
    """Answers as the test's script says; keeps what was asked."""

    server: Server

    def do_GET(self) -> None:
        self.server.asked.append((self.path, None))
        self.answer()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        self.answer()

    def answer(self) -> None:
        self.server.seen_headers.append(dict(self.headers))
        reply = self.server.replies.get(self.path)
        if reply is None:
            self.plain(404, b'{"detail":"Not Found"}')
        else:
            reply(self)

    def plain(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def events(self, *pieces: bytes, chunked: bool, end: bool = True) -> None:
        self.protocol_version = "HTTP/1.1" if chunked else "HTTP/1.0"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
        if chunked and end:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, Any]] = []
        self.seen_headers: list[dict[str, str]] = []
        self.replies: dict[str, Callable[[Handler], None]] = {}
        self.say("/v1/models", {"object": "list", "data": [{"id": "m", "max_model_len": 51072}]})

    def say(self, path: str, answer: object, *, status: int = 200) -> None:
        body = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.replies[path] = lambda handler: handler.plain(status, body)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=lambda: made.serve_forever(poll_interval=0.01))
        thread.start()
        yield made
        made.shutdown()
        thread.join(20)


@pytest.fixture
def client(server: Server) -> EngineClient:
    return EngineClient(server.url + "/", timeout_s=20)


def event(text: str, **more: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text, **more}]}).encode() + b"\n\n"


def test_completion_asks_for_the_served_model(server: Server, client: EngineClient) -> None:
    server.say("/v1/completions", {"choices": [{"text": "abc"}]})
    answer = client.complete([1, 2, 3], 7, temperature=0)
    assert answer["choices"][0]["text"] == "abc"
    assert server.asked == [
        ("/v1/models", None),
        ("/v1/completions", {"model": "m", "prompt": [1, 2, 3], "max_tokens": 7, "temperature": 0}),
    ]
    client.complete("text", 1, model="other")
    assert server.asked[2:] == [("/v1/completions", {"model": "other", "prompt": "text", "max_tokens": 1})]


def test_chat_and_key(server: Server) -> None:
    server.say("/v1/chat/completions", {"choices": [{"message": {"content": "hi"}}]})
    client = EngineClient(server.url, api_key="secret", model="m")
    messages = [{"role": "user", "content": "hello"}]
    assert client.chat(messages, 5)["choices"][0]["message"]["content"] == "hi"
    assert server.asked == [("/v1/chat/completions", {"model": "m", "messages": messages, "max_tokens": 5})]
    assert server.seen_headers[0]["Authorization"] == "Bearer secret"


def test_models_version_and_metrics(server: Server, client: EngineClient) -> None:
    server.say("/version", {"version": "0.32.0"})
    server.say("/metrics", METRICS)
    assert client.models()[0]["max_model_len"] == 51072
    assert client.version() == "0.32.0"
    metrics = client.metrics()
    running = metrics["vllm:num_requests_running"][0]
    assert (running.value, running.labels["model_name"]) == (2.0, 'm "x"')
    assert metrics["vllm:num_preemptions_total"][0].value == 0.0
    assert client.cache_config() == {
        "block_size": "128",
        "engine": "0",
        "kv_cache_memory_bytes": "None",
        "kv_cache_size_tokens": "51200",
    }


def test_engine_without_cache_config(server: Server, client: EngineClient) -> None:
    server.say("/metrics", "# TYPE up gauge\nup 1\n")
    assert client.cache_config() is None


@pytest.mark.parametrize("chunked", [True, False])
def test_stream_gives_chunks_as_they_come(server: Server, client: EngineClient, *, chunked: bool) -> None:
    first = event("a")
    pieces = (b": ping\n\n" + first[:9], first[9:], event("b") + event("", finish_reason="length"), b"data: [DONE]\n\n")
    server.replies["/v1/completions"] = lambda handler: handler.events(*pieces, chunked=chunked)
    chunks = list(client.stream("x", 2, ignore_eos=True))
    assert [chunk.text for chunk in chunks] == ["a", "b", ""]
    assert [chunk.at for chunk in chunks] == sorted(chunk.at for chunk in chunks)
    assert chunks[0].since_request_s > 0
    body = {"model": "m", "prompt": "x", "max_tokens": 2, "ignore_eos": True, "stream": True}
    assert server.asked[-1] == ("/v1/completions", body)


@pytest.mark.parametrize("chunked", [True, False])
def test_chunk_is_there_before_the_next_is_sent(server: Server, client: EngineClient, *, chunked: bool) -> None:
    go_on = threading.Event()

    def reply(handler: Handler) -> None:
        def pieces() -> Iterator[bytes]:
            yield event("a")
            assert go_on.wait(20)
            yield b"data: [DONE]\n\n"

        handler.events(*[], chunked=chunked, end=False)
        for piece in pieces():
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)

    server.replies["/v1/completions"] = reply
    stream = client.stream("x", 2)
    assert next(stream).text == "a"
    go_on.set()
    assert list(stream) == []


@pytest.mark.parametrize("chunked", [True, False])
def test_stream_that_is_cut_off_is_an_error_after_its_chunks(
    server: Server, client: EngineClient, *, chunked: bool
) -> None:
    pieces = (event("a"), event("b")[:-5])
    server.replies["/v1/completions"] = lambda handler: handler.events(*pieces, chunked=chunked, end=False)
    got: list[Chunk] = []
    with pytest.raises(ClientError, match=r"POST .*/v1/completions: (no whole answer|the stream was cut off after 1)"):
        got.extend(client.stream("x", 2))
    assert [chunk.text for chunk in got] == ["a"]


def test_error_within_a_stream_is_an_error(server: Server, client: EngineClient) -> None:
    error = {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}
    failed = b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
    server.replies["/v1/completions"] = lambda handler: handler.events(event("a"), failed, chunked=True)
    stream = client.stream("x", 2)
    assert next(stream).text == "a"
    with pytest.raises(ClientError, match="EngineCore encountered an issue") as raised:
        next(stream)
    assert raised.value.status == 500


def test_garbage_within_a_stream_is_an_error(server: Server, client: EngineClient) -> None:
    server.replies["/v1/completions"] = lambda handler: handler.events(b"data: {nope\n\n", chunked=True)
    with pytest.raises(ClientError, match="no JSON object"):
        list(client.stream("x", 2))


@pytest.mark.parametrize(
    ("status", "advice"),
    [(400, "length of the prompt"), (404, "model's name"), (500, "its log"), (503, "core is dead")],
)
def test_refusal_says_what_and_what_to_do(server: Server, client: EngineClient, status: int, advice: str) -> None:
    server.say("/v1/completions", {"error": {"message": "because"}}, status=status)
    with pytest.raises(ClientError, match=advice) as raised:
        client.complete("x", 1)
    assert raised.value.status == status
    assert "because" in raised.value.body
    assert f"POST {server.url}/v1/completions" in str(raised.value)


def test_long_refusal_is_shortened(server: Server, client: EngineClient) -> None:
    server.say("/version", "x" * 10_000, status=500)
    with pytest.raises(ClientError) as raised:
        client.version()
    assert len(raised.value.body) == 500
    assert len(str(raised.value)) < 800


@pytest.mark.parametrize("said", ["[1]", "<html>", ""])
def test_answer_that_is_no_object_is_an_error(server: Server, client: EngineClient, said: str) -> None:
    server.say("/version", said)
    with pytest.raises(ClientError, match="no JSON object"):
        client.version()


def test_metrics_that_are_none_are_an_error(server: Server, client: EngineClient) -> None:
    server.say("/metrics", 'a{b="c} 1 2 3 x\n')
    with pytest.raises(ClientError, match="no Prometheus text"):
        client.metrics()


def test_nobody_listens_has_no_status() -> None:
    with pytest.raises(ClientError, match="no whole answer") as raised:
        EngineClient(f"http://127.0.0.1:{free_port('127.0.0.1')}").version()
    assert raised.value.status is None


def test_silence_ends_with_its_timeout(server: Server, client: EngineClient) -> None:
    answered = threading.Event()

    def reply(_: Handler) -> None:
        answered.wait(20)

    server.replies["/v1/completions"] = reply
    with pytest.raises(ClientError, match=r"no answer within 0.05 s"):
        client.complete("x", 1, timeout_s=0.05)
    answered.set()


def test_engine_without_models_is_named(server: Server, client: EngineClient) -> None:
    server.say("/v1/models", {"data": []})
    with pytest.raises(ClientError, match="no model is served"):
        client.complete("x", 1)


def test_proxy_of_the_environment_is_not_asked(
    server: Server, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port('127.0.0.1')}")
    server.say("/version", {"version": "1"})
    assert client.version() == "1"
