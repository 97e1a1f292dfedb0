"""How a survival check ends on servers that misbehave: each gets its own word, within its deadline."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pytest_kvbudget.engine.client import EngineClient
from pytest_kvbudget.engine.survival import SurvivalResult, SurvivalRun, SurvivalSpec
from pytest_kvbudget.judging import judge_survival, with_client_evidence
from pytest_kvbudget.ledger.model import Cause, Evidence
from pytest_kvbudget.verdict import Phase, Verdict

TOKEN = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'
LAST = b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}\n\n'
DONE = b"data: [DONE]\n\n"
WAITING = "vllm:num_requests_running 0.0\nvllm:num_requests_waiting 1.0\nvllm:kv_cache_usage_perc 0.0\n"
BUSY = "vllm:num_requests_running 1.0\nvllm:num_requests_waiting 0.0\nvllm:kv_cache_usage_perc 0.5\n"

Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    answer: Answer
    metrics: str | None = BUSY
    models = b'{"data": [{"id": "m"}]}'
    greets = True
    released = threading.Event()
    asked: dict[str, Any]
    seen: list[Any] = []  # noqa: RUF012 - one per server, see `server`

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - the base class' name

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.send(200, self.models)
        elif self.metrics is None:
            self.released.wait(30)
        else:
            self.send(200, self.metrics.encode())

    def do_POST(self) -> None:
        self.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            # the first question is how prompts have to be sent
            if self.greets and not self.asked.get("stream"):
                self.send(200, b'{"choices": [{"text": "a"}]}')
            else:
                type(self).answer(self)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def start_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()


def never(handler: Handler) -> None:
    handler.released.wait(30)


def tokens_then_silence(handler: Handler) -> None:
    handler.start_stream()
    handler.wfile.write(TOKEN * 3)
    handler.wfile.flush()
    handler.released.wait(30)


def whole(handler: Handler) -> None:
    handler.start_stream()
    handler.wfile.write(TOKEN * 5 + LAST + DONE)


def stops_early(handler: Handler) -> None:
    """A server that heeds the end of the text, though it was told not to."""
    handler.start_stream()
    handler.wfile.write(TOKEN * 5 + LAST.replace(b"length", b"stop") + DONE)


def empty(handler: Handler) -> None:
    handler.start_stream()
    handler.wfile.write(DONE)


def several_a_chunk(handler: Handler) -> None:
    """An engine that speculates: chunks of several tokens, counted in its usage."""
    handler.start_stream()
    for count in (3, 7, 12):
        usage = json.dumps({"completion_tokens": count}).encode()
        handler.wfile.write(TOKEN.replace(b"}]}", b'}], "usage": ' + usage + b"}"))
    handler.wfile.write(LAST + DONE)


def a_gigabyte(handler: Handler) -> None:
    """One event that never ends."""
    handler.start_stream()
    handler.wfile.write(b"data: ")
    for _ in range(1024):
        handler.wfile.write(b"x" * 2**20)


def a_gigabyte_in_one_chunk(handler: Handler) -> None:
    handler.protocol_version = "HTTP/1.1"
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"%x\r\n" % 2**30)
    for _ in range(1024):
        handler.wfile.write(b"x" * 2**20)


def only_comments(handler: Handler) -> None:
    """Keeps the connection busy for ever and sends no event."""
    handler.start_stream()
    while not handler.released.is_set():
        handler.wfile.write(b": still here\n" * 1000)


def error_instead(handler: Handler) -> None:
    handler.send(200, b'{"error": {"message": "out of luck", "code": 500}}')


def endless(handler: Handler) -> None:
    handler.start_stream()
    for _ in itertools.repeat(None):
        handler.wfile.write(TOKEN * 100)


def garbage(handler: Handler) -> None:
    handler.start_stream()
    handler.wfile.write(b"data: \xff\xfe not json\n\n")


def cut_off(handler: Handler) -> None:
    handler.start_stream()
    handler.wfile.write(TOKEN + b'data: {"choices": [{"te')


def error_inside(handler: Handler) -> None:
    handler.start_stream()
    handler.wfile.write(TOKEN + b'data: {"error": {"message": "EngineCore encountered an issue", "code": 500}}\n\n')


def words_only(handler: Handler) -> None:
    """A server that takes text alone, of two tokens a word."""
    if isinstance(handler.asked["prompt"], list):
        handler.send(422, b'{"detail": "prompt: expected text"}')
    elif handler.asked.get("stream"):
        whole(handler)
    else:
        tokens = 2 * len(handler.asked["prompt"].split())
        handler.send(200, json.dumps({"choices": [{"text": "a"}], "usage": {"prompt_tokens": tokens}}).encode())
    handler.seen.append(handler.asked["prompt"])


def too_long(handler: Handler) -> None:
    handler.send(400, b'{"error": {"message": "maximum context length is 4096 tokens", "code": 400}}')


@contextmanager
def server(
    answer: Answer, metrics: str | None = BUSY, models: bytes = Handler.models, *, greets: bool = True
) -> Iterator[EngineClient]:
    """A server with this answer to completions; without ``greets`` also to those that are not streamed.

    Where its metrics are ``None`` it never answers for them.
    """
    released = threading.Event()
    # a function as class attribute would become a method
    members = {
        "answer": staticmethod(answer),
        "metrics": metrics,
        "models": models,
        "released": released,
        "greets": greets,
    }
    kind = type("H", (Handler,), members)
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield EngineClient(f"http://127.0.0.1:{httpd.server_address[1]}")
    finally:
        released.set()
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def check(
    answer: Answer,
    *,
    metrics: str | None = BUSY,
    alive: Callable[[], bool] = lambda: True,
    pool_tokens: int | None = 4096,
    timeout_s: float = 30.0,
    concurrency: int = 1,
) -> SurvivalResult:
    spec = SurvivalSpec(hold=1000, prefill=False, timeout_s=timeout_s, concurrency=concurrency)
    with server(answer, metrics) as client:
        return SurvivalRun(client, spec, window=4096, pool_tokens=pool_tokens, alive=alive).run()


@pytest.mark.parametrize(
    ("answer", "ended", "verdict"),
    [
        (whole, "done", None),
        (endless, "held", None),
        (garbage, "failed", Verdict.UNKNOWN),
        (cut_off, "failed", Verdict.UNKNOWN),
        (stops_early, "failed", Verdict.UNKNOWN),
        (empty, "failed", Verdict.UNKNOWN),
        (a_gigabyte, "failed", Verdict.UNKNOWN),
        (a_gigabyte_in_one_chunk, "failed", Verdict.UNKNOWN),
        (error_inside, "failed", Verdict.UNKNOWN),
        (error_instead, "failed", Verdict.UNKNOWN),
        (too_long, "refused", Verdict.ERROR),
    ],
)
def test_an_answer_gets_its_own_word(answer: Answer, ended: str, verdict: Verdict | None) -> None:
    result = check(answer)
    assert [request.ended for request in result.requests] == [ended]
    judged = judge_survival(result)
    assert (None if judged is None else judged[0]) == verdict


@pytest.mark.parametrize("metrics", [BUSY, None], ids=["metrics", "no-metrics"])
@pytest.mark.parametrize("answer", [never, tokens_then_silence, only_comments])
def test_silence_ends_with_the_deadline_and_is_unknown(answer: Answer, metrics: str | None) -> None:
    result = check(answer, metrics=metrics, timeout_s=0.3)
    assert [request.ended for request in result.requests] == ["timeout"]
    judged = judge_survival(result)
    assert judged is not None
    assert judged[0] is Verdict.UNKNOWN


@pytest.mark.parametrize("answer", [never, tokens_then_silence, cut_off])
def test_a_dead_engine_is_what_ended_it(answer: Answer) -> None:
    result = check(answer, alive=lambda: False)
    assert [request.ended for request in result.requests] == ["died"]


@pytest.mark.parametrize(
    ("pool_tokens", "verdict"), [(4095, Verdict.FAIL), (4096, Verdict.UNKNOWN), (None, Verdict.UNKNOWN)]
)
def test_starvation_is_the_shapes_fault_only_where_the_pool_is_smaller_than_the_request(
    pool_tokens: int | None, verdict: Verdict
) -> None:
    result = check(never, metrics=WAITING, pool_tokens=pool_tokens)
    assert [request.ended for request in result.requests] == ["starved"]
    judged = judge_survival(result)
    assert judged is not None
    assert judged[0] is verdict


def test_a_server_that_takes_no_token_ids_gets_text_sized_by_its_own_count() -> None:
    Handler.seen.clear()
    spec = SurvivalSpec(prompt_tokens=100, hold=1000, prefill=False)
    with server(words_only, greets=False) as client:
        result = SurvivalRun(client, spec, window=4096, pool_tokens=None, alive=lambda: True).run()
    assert [request.ended for request in result.requests] == ["done"]
    assert len(Handler.seen[-1].split()) == 50, "two tokens a word"


def test_one_alone_then_the_prefill_then_several_at_once() -> None:
    spec = SurvivalSpec(hold=1000, concurrency=3)
    with server(whole) as client:
        result = SurvivalRun(client, spec, window=4096, pool_tokens=4096, alive=lambda: True).run()
    kinds = [request.kind for request in result.requests]
    assert kinds == ["generation", "prefill", "generation", "generation", "generation"]
    assert {(request.ended, request.generated_tokens) for request in result.requests if request.kind != "prefill"} == {
        ("done", 5)
    }


def test_tokens_are_counted_as_the_engine_counts_them() -> None:
    (request,) = check(several_a_chunk).requests
    assert (request.ended, request.generated_tokens) == ("done", 12)


def test_a_flood_of_comments_leaves_no_thread_that_listens_to_it() -> None:
    with server(only_comments) as client:
        spec = SurvivalSpec(prefill=False, timeout_s=0.3)
        SurvivalRun(client, spec, window=4096, pool_tokens=None, alive=lambda: True).run()
        for thread in threading.enumerate():
            if thread.name == "kvbudget-survival":
                thread.join(20)
                assert not thread.is_alive()


def test_models_that_are_no_list_end_it_at_once() -> None:
    with server(whole, models=b'{"data": [{"name": "m"}]}') as client:
        spec = SurvivalSpec(prefill=False)
        (request,) = SurvivalRun(client, spec, window=4096, pool_tokens=None, alive=lambda: True).run().requests
    assert request.ended == "failed"
    assert "no model is served" in request.message


def test_what_the_client_saw_of_a_death_is_evidence_beside_the_log() -> None:
    result = check(error_inside, alive=lambda: False)
    cause = Cause(phase=Phase.REQUEST, failure_class="request_oom", sentence="s", evidence=(Evidence(7, "a line"),))
    verdict, judged, said = with_client_evidence((Verdict.FAIL, cause, "m"), result)
    assert (verdict, said) == (Verdict.FAIL, "m")
    assert judged is not None
    first, client = judged.evidence
    assert first.line == 7
    assert client.text.startswith("client: the generation of 16 prompt and 4,080 answer tokens: ")
    assert "EngineCore encountered an issue" in client.text
