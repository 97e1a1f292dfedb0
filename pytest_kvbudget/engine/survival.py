"""Booted is not survived: the largest real request, sent, watched and judged from the client's side."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Literal

import msgspec

from pytest_kvbudget.engine.client import Chunk, ClientError, EngineClient
from pytest_kvbudget.verdict import Verdict

Ended = Literal["done", "held", "died", "starved", "timeout", "refused", "failed"]
"""``done``: answered whole. ``held``: enough tokens came at full allocation. ``died``: the engine is gone. ``starved``:
it waits for memory that is not there. ``refused``: status 400, a healthy engine and a wrong request. ``failed``: no
good answer from an engine that lives."""

DEFAULT_HOLD: Final = 4096
"""Tokens after which a generation counts as survived: the live check of the RDNA4 document's deployed shape."""
_LOOK_S: Final = 0.25
_STARVED_LOOKS: Final = 8
"""Looks in a row at which nothing runs, something waits and no KV block moves, until that is starvation."""
_METRICS_S: Final = 1.0
"""For one look at the engine's metrics: a server that never answers must not keep the check from its deadline."""
_LAST_WORD_S: Final = 1.0
"""For the client's side of an engine's death to be told what happened."""
_LATER_S: Final = 60.0
"""The check's own deadline is what ends a silent request; its connection gives up only after that."""
_WORDS: Final = ("where", "did", "every", "byte", "of", "this", "card", "go", "now", "and", "why")
_SAMPLE_WORDS: Final = 6 * len(_WORDS)
_MEASURE_S: Final = 30.0
"""For one token from a healthy engine."""
_TOKEN_IDS: Final = (10, 250)
"""Range of prompt token ids: ordinary tokens in byte-level vocabularies and in every larger one."""


class SurvivalSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of an engine that has booted."""

    prompt_tokens: int = 16
    """Of the long generation."""
    max_tokens: int | None = None
    """Of its answer; ``None`` fills the window."""
    hold: int = DEFAULT_HOLD
    prefill: bool = True
    """Also send one prompt that fills the window."""
    concurrency: int = 1
    """Further long generations, so many at once, after one alone and the prefill; 1 for none."""
    timeout_s: float = 1800.0


class RequestResult(msgspec.Struct, frozen=True, kw_only=True):
    """One request and how it ended."""

    kind: Literal["generation", "prefill"]
    ended: Ended
    prompt_tokens: int
    max_tokens: int
    generated_tokens: int = 0
    first_token_s: float | None = None
    seconds: float = 0.0
    tokens_per_s: float | None = None
    """Rate after the first token; ``None`` below two."""
    message: str = ""
    """What the client was told where it did not end well."""

    @property
    def survived(self) -> bool:
        """The engine did what was asked."""
        return self.ended in {"done", "held"}


class SurvivalResult(msgspec.Struct, frozen=True, kw_only=True):
    """All requests of a survival check, in the order in which they were sent."""

    window: int
    """Tokens of one request that the engine accepts."""
    pool_tokens: int | None
    """Tokens that its KV cache holds by its own count."""
    requests: tuple[RequestResult, ...]
    least_host_free_bytes: int | None = None
    """Least room in the engine's memory control group meanwhile; ``None`` where it has no limit or cannot be read."""
    verdict: Verdict | None = None
    """Of this check alone, gates on memory included; ``None`` until it is judged."""
    sentence: str = ""
    """The verdict in words."""

    def after_death(self) -> SurvivalResult:
        """The same, knowing that the engine died: what only broke off on the client's side was that."""
        return msgspec.structs.replace(
            self,
            requests=tuple(
                msgspec.structs.replace(request, ended="died") if request.ended == "failed" else request
                for request in self.requests
            ),
        )

    @property
    def first_bad(self) -> RequestResult | None:
        """The request that did not end well; ``None`` where all did."""
        return next((request for request in self.requests if not request.survived), None)


class SurvivalRun:
    """Sends the requests of a survival check to one engine."""

    def __init__(
        self,
        client: EngineClient,
        spec: SurvivalSpec,
        *,
        window: int,
        pool_tokens: int | None,
        alive: Callable[[], bool],
        host_free: Callable[[], int | None] = lambda: None,
        seed: int = 0,
    ) -> None:
        self._client, self._spec = client, spec
        self._window, self._pool_tokens = window, pool_tokens
        self._alive = alive
        self._host_free = host_free
        self._least_host_free: int | None = None
        self._tokens_per_word: float | None = None
        """Set where the server takes no token ids."""
        self._random = random.Random(seed)  # noqa: S311 - prompts, not secrets
        self._deadline = time.monotonic() + spec.timeout_s

    def run(self) -> SurvivalResult:
        """Send them; stops at the first that does not end well."""
        spec = self._spec
        self._measure()
        answer = spec.max_tokens if spec.max_tokens is not None else self._window - spec.prompt_tokens
        long = partial(self._request, "generation", spec.prompt_tokens, max(1, answer))
        asked = [[long()]]
        if spec.prefill:
            asked.append([self._request("prefill", self._window - 1, 1)])
        if spec.concurrency > 1:
            asked.append([long() for _ in range(spec.concurrency)])
        results: list[RequestResult] = []
        for batch in asked:
            results += self._together(batch)
            if not all(result.survived for result in results):
                break
        return SurvivalResult(
            window=self._window,
            pool_tokens=self._pool_tokens,
            requests=tuple(results),
            least_host_free_bytes=self._least_host_free,
        )

    def _request(self, kind: Literal["generation", "prefill"], prompt_tokens: int, max_tokens: int) -> _Request:
        # Random: a prefix cache must not have the prompt, or it would not be computed at all.
        low, high = _TOKEN_IDS
        prompt: list[int] | str = [self._random.randrange(low, high) for _ in range(prompt_tokens)]
        if self._tokens_per_word is not None:
            prompt = self._words(int(prompt_tokens / self._tokens_per_word))
        return _Request(
            self._client,
            kind,
            prompt,
            prompt_tokens,
            max_tokens,
            hold=self._spec.hold,
            silence_s=self._spec.timeout_s + _LATER_S,
        )

    def _words(self, count: int) -> str:
        """Every word as often as any other, in an order of its own: prompts differ, their tokens per word do not."""
        order = self._random.sample(_WORDS, len(_WORDS))
        return " ".join(itertools.islice(itertools.cycle(order), max(1, count)))

    def _measure(self) -> None:
        """Learn how prompts have to be sent: as token ids, or as text, whose tokens the server itself counts."""
        patience_s = max(0.1, min(_MEASURE_S, self._deadline - time.monotonic()))
        try:
            self._client.complete([_TOKEN_IDS[0]], 1, timeout_s=patience_s)
        except ClientError as error:
            if error.status not in {400, 422}:
                return  # whatever this is, the real request will tell it
            try:
                answer = self._client.complete(self._words(_SAMPLE_WORDS), 1, timeout_s=patience_s)
            except ClientError:
                return
            counted = answer.get("usage", {}).get("prompt_tokens")
            if isinstance(counted, int) and counted > 0:
                self._tokens_per_word = counted / _SAMPLE_WORDS

    def _together(self, requests: Sequence[_Request]) -> list[RequestResult]:
        for request in requests:
            request.start()
        starvation = _Starvation(self._client)
        while any(request.running for request in requests):
            requests[0].wait(_LOOK_S)
            self._look_at_host()
            if not self._alive():
                self._end(requests, "died", "the engine died")
            elif time.monotonic() > self._deadline:
                self._end(requests, "timeout", f"no end within {self._spec.timeout_s:g} s")
            elif starvation.look():
                self._end(requests, "starved", "nothing runs, a request waits, and no KV block moves")
        for request in requests:
            request.hear_last_word()
        return [request.result(alive=self._alive) for request in requests]

    def _look_at_host(self) -> None:
        free = self._host_free()
        if free is not None:
            self._least_host_free = min(free, free if self._least_host_free is None else self._least_host_free)

    @staticmethod
    def _end(requests: Sequence[_Request], ended: Ended, message: str) -> None:
        for request in requests:
            request.end(ended, message)


class _Starvation:
    """Notices a request that waits for memory that will never be there."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._looks = 0
        self._usage: float | None = None

    def look(self) -> bool:
        """Whether it has gone on long enough."""
        try:
            metrics = self._client.metrics(timeout_s=_METRICS_S)
        except ClientError:
            return False
        running, waiting, usage = (
            sum(sample.value for sample in metrics.get(name, ()))
            for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        )
        stuck = running == 0 and waiting > 0 and usage == self._usage
        self._looks = self._looks + 1 if stuck else 0
        self._usage = usage
        return self._looks >= _STARVED_LOOKS


class _Request:
    """One streamed request in a thread of its own."""

    def __init__(
        self,
        client: EngineClient,
        kind: Literal["generation", "prefill"],
        prompt: Sequence[int] | str,
        prompt_tokens: int,
        max_tokens: int,
        *,
        hold: int,
        silence_s: float,
    ) -> None:
        self._client, self._kind = client, kind
        self._prompt, self._prompt_tokens = prompt, prompt_tokens
        self._max_tokens, self._hold, self._silence_s = max_tokens, hold, silence_s
        # A daemon: a server that never answers must not keep pytest from ending.
        self._thread = threading.Thread(target=self._run, name="kvbudget-survival", daemon=True)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._ended: Ended | None = None
        self._message = ""
        self._told = ""
        """What went wrong on the client's side, whoever ended the request first."""
        self._finish_reason: object = None
        self._status: int | None = None
        self._generated = 0
        self._first_s: float | None = None
        self._begun = 0.0
        self._seconds = 0.0

    def start(self) -> None:
        """Send it."""
        self._begun = time.monotonic()
        self._thread.start()

    @property
    def running(self) -> bool:
        """It has not ended yet."""
        return not self._over.is_set()

    def wait(self, timeout_s: float) -> None:
        """Until it has ended, at most so long."""
        self._over.wait(timeout_s)

    def end(self, ended: Ended, message: str) -> None:
        """It is over, whatever the server still does; the first word counts."""
        with self._lock:
            if self._ended is None:
                self._ended, self._message = ended, message
                self._seconds = time.monotonic() - self._begun
        self._over.set()

    def hear_last_word(self) -> None:
        """Give the client's side of a death a moment to notice it: its error is evidence."""
        if self._ended == "died":
            self._thread.join(_LAST_WORD_S)

    def result(self, *, alive: Callable[[], bool]) -> RequestResult:
        """How it ended. A connection that broke tells nothing by itself: it is whether the engine lives."""
        ended = self._ended or "failed"
        if ended == "failed" and self._status == 400:
            ended = "refused"
        elif ended == "failed" and not alive():
            ended = "died"
        told = f"; the client was told: {self._told}" if self._told and self._told != self._message else ""
        first_s, after_first = self._first_s, self._seconds - (self._first_s or 0.0)
        rate = (
            None if first_s is None or self._generated < 2 or after_first <= 0 else (self._generated - 1) / after_first
        )
        return RequestResult(
            kind=self._kind,
            ended=ended,
            prompt_tokens=self._prompt_tokens,
            max_tokens=self._max_tokens,
            generated_tokens=self._generated,
            first_token_s=None if first_s is None else round(first_s, 4),
            seconds=round(self._seconds, 4),
            tokens_per_s=None if rate is None else round(rate, 3),
            message=f"{self._message}{told}",
        )

    def _run(self) -> None:
        try:
            stream = self._client.stream(
                self._prompt,
                self._max_tokens,
                timeout_s=self._silence_s,
                over=self._over.is_set,
                ignore_eos=True,
                temperature=0,
                stream_options={"include_usage": True, "continuous_usage_stats": True},
            )
            for chunk in stream:
                self._take(chunk)
                if self._generated >= min(self._hold, self._max_tokens):
                    stream.close()
                    break
        except ClientError as error:
            self._status, self._told = error.status, str(error)
            self.end("failed", str(error))
        else:
            self.end(*self._how_it_ended())

    def _take(self, chunk: Chunk) -> None:
        """Count what came: a chunk is a token, or as many as the engine says where it says so."""
        choices, usage = chunk.data.get("choices"), chunk.data.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            self._generated = max(self._generated, usage["completion_tokens"])
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return
        self._finish_reason = choices[0].get("finish_reason") or self._finish_reason
        if self._finish_reason is not None and not chunk.text:
            return  # an end that brings no token
        if self._first_s is None:
            self._first_s = chunk.since_request_s
        if not isinstance(usage, dict):
            self._generated += 1

    def _how_it_ended(self) -> tuple[Ended, str]:
        if self._generated >= self._max_tokens or self._finish_reason == "length":
            return "done", ""
        if self._generated >= self._hold:
            return "held", ""
        return "failed", (
            f"the answer ended after {self._generated:,} of {self._max_tokens:,} tokens (finish_reason "
            f"{self._finish_reason!r}), though it was to ignore the end of the text"
        )
