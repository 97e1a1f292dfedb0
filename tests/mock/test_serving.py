"""Requests: answers, limits, starvation, the knife edge."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from msgspec.structs import replace

from pytest_kvbudget.mock.spec import Faults, PhaseSeconds
from pytest_kvbudget.units import GIB, MIB

from .harness import BASE, DEADLINE_S, UTILIZATION, Engine, Host, until

SMALL = (*UTILIZATION, "--max-model-len", "4096")


def events(response: requests.Response) -> list[str]:
    return [line[len("data: ") :] for line in response.iter_lines(decode_unicode=True) if line.startswith("data: ")]


def test_plain_answers_count_tokens(host: Host) -> None:
    engine = host.start(BASE, *SMALL).wait_ready()
    answer = engine.complete(10, 5).json()
    assert answer["usage"] == {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    assert answer["choices"][0]["text"] == " tok" * 5
    assert answer["choices"][0]["finish_reason"] == "length"
    # eight characters are two tokens
    assert engine.complete("12345678", 1).json()["usage"]["prompt_tokens"] == 2
    body = {"messages": [{"role": "user", "content": "12345678"}], "max_tokens": 3}
    chat = requests.post(engine.url("/v1/chat/completions"), json=body, timeout=DEADLINE_S).json()
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": " tok tok tok"}


def test_streams_one_event_a_token(host: Host) -> None:
    engine = host.start(BASE, *SMALL).wait_ready()
    with engine.complete(10, 1500, stream=True, ignore_eos=True, stream_options={"include_usage": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *tokens, last, usage, done = events(response)
    assert [json.loads(token)["choices"][0]["text"] for token in tokens] == [" tok"] * 1500
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert json.loads(usage)["usage"] == {"prompt_tokens": 10, "completion_tokens": 1500, "total_tokens": 1510}
    assert done == "[DONE]"
    assert until("idle", lambda: engine.metric("num_requests_running") == 0)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "text"),
    [
        (
            4096,
            1,
            "This model's maximum context length is 4096 tokens. However, your prompt contains 4096 input tokens",
        ),
        (10, 4097, "max_tokens=4097 cannot be greater than max_model_len=4096. Please request fewer output tokens."),
    ],
)
def test_too_long_is_refused_and_harmless(host: Host, prompt: int, max_tokens: int, text: str) -> None:
    engine = host.start(BASE, *SMALL).wait_ready()
    response = engine.complete(prompt, max_tokens)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "BadRequestError"
    assert error["code"] == 400
    assert text in error["message"]
    assert engine.health() == 200


def test_answer_is_cut_to_the_window(host: Host) -> None:
    engine = host.start(BASE, *SMALL).wait_ready()
    assert engine.complete(4000, 4096).json()["usage"]["completion_tokens"] == 96


@pytest.mark.parametrize("body", [b"{", b"{}", b'{"prompt": [1, "a"]}'])
def test_nonsense_is_a_bad_request(host: Host, body: bytes) -> None:
    engine = host.start(BASE, *SMALL).wait_ready()
    assert requests.post(engine.url("/v1/completions"), data=body, timeout=DEADLINE_S).status_code == 400
    assert requests.get(engine.url("/nowhere"), timeout=DEADLINE_S).status_code == 404


def test_kv_is_taken_and_given_back_when_the_client_leaves(host: Host) -> None:
    spec = replace(BASE, seconds=PhaseSeconds(per_token=0.05))
    engine = host.start(spec, *SMALL).wait_ready()
    with engine.complete(16, 4000, stream=True) as response:
        # the iterator is kept: letting it go would close the connection
        content = response.iter_content(16)
        assert next(content).startswith(b"data: ")
        # 4016 tokens are 251 of 1983 blocks
        assert engine.metric("kv_cache_usage_perc") == pytest.approx(251 / 1983)
        assert engine.metric("num_requests_running") == 1
    until("the abort", lambda: engine.metric("kv_cache_usage_perc") == 0)


def test_more_requests_than_seats_wait(host: Host) -> None:
    spec = replace(BASE, seconds=PhaseSeconds(per_token=0.01))
    engine = host.start(spec, *SMALL, "--max-num-seqs", "1").wait_ready()
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(engine.complete, 8, 30) for _ in range(2)]
        until("one that waits", lambda: engine.metric("num_requests_waiting") == 1)
        assert engine.metric("num_requests_running") == 1
        assert [answer.result().status_code for answer in answers] == [200, 200]


def test_request_starves_when_the_pool_is_held(host: Host) -> None:
    # blocks of 16 tokens at 16 MiB: five, one of them never handed out, so one window of 64 tokens is all there is
    spec = replace(BASE, kv_bytes_per_token=1 * MIB, faults=Faults(request_hang=True))
    pool = ("--kv-cache-memory-bytes", str(5 * 16 * MIB), *UTILIZATION, "--max-model-len", "64")
    engine = host.start(spec, *pool).wait_ready()
    with engine.complete(8, 56, stream=True), engine.complete(8, 8, stream=True):
        until("one running, one waiting", lambda: engine.metric("num_requests_waiting") == 1)
        assert engine.metric("num_requests_running") == 1
        assert engine.metric("kv_cache_usage_perc") == 1
        assert engine.metric("num_preemptions_total") == 0
        assert engine.health() == 200


# 10240 - 5120 - 1984 - 576 = 2560 MiB are free after the boot
KNIFE = replace(BASE, request_peak_per_token=1 * MIB, request_peak_base=4 * MIB, seconds=PhaseSeconds(linger=0.5))


def serving(host: Host, ranks: int) -> Engine:
    return host.start(replace(KNIFE, ranks=ranks), *SMALL).wait_ready()


@pytest.mark.parametrize("ranks", [1, 2])
def test_knife_edge_boots_and_dies_on_a_large_request(host: Host, ranks: int) -> None:
    engine = serving(host, ranks)
    before = host.used()
    assert before == (5120 + 1984 + 576) * MIB
    assert engine.complete(10, 10).status_code == 200
    assert host.used() == before + 24 * MIB
    assert engine.complete(16, 2540).status_code == 200
    # 4 + 2557 MiB are one more than there were; torch writes a MiB as KiB
    assert host.used() == 10 * GIB
    response = engine.complete(17, 2540)
    assert response.status_code == 500
    assert "EngineCore encountered an issue" in response.json()["error"]["message"]
    assert engine.health() in {503, None}
    assert engine.wait_exit() == 0
    log = engine.log()
    assert "Tried to allocate 1024.00 KiB. GPU 0 has a total capacity of 10.00 GiB of which 0 bytes is free." in log
    assert "in execute_model" in log
    assert "EngineCore encountered a fatal error." in log
    assert "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue." in log
    assert ("WorkerProc hit an exception." in log) == (ranks > 1)
    host.wait_used(0)


def test_dying_engine_cuts_streams(host: Host) -> None:
    engine = serving(host, 1)
    with engine.complete(16, 4000, stream=True) as response:
        assert response.status_code == 200
        with pytest.raises(requests.RequestException):
            events(response)
    assert engine.wait_exit() == 0


def test_health_says_503_before_the_server_leaves(host: Host) -> None:
    spec = replace(KNIFE, seconds=PhaseSeconds(linger=DEADLINE_S))
    engine = host.start(spec, *SMALL).wait_ready()
    assert engine.complete(16, 4000).status_code == 500
    assert engine.health() == 503
    assert engine.complete(1, 1).status_code == 500
    assert requests.get(engine.url("/version"), timeout=5).status_code == 200
