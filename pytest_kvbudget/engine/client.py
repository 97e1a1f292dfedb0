"""The engine's HTTP interface: completions, models, version and metrics, as OpenAI's API and vLLM define them."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pytest_kvbudget.engine.sse import OversizeError, sse_data

if TYPE_CHECKING:
    import requests

CACHE_CONFIG: Final = "vllm:cache_config_info"
_CONNECT_S: Final = 5.0
_EXCERPT_CHARS: Final = 500
_MOST_BYTES: Final = 64 * 2**20
"""Of an answer that is taken whole; the largest real one, a window of text with its usage, has a few."""
_PIECE_BYTES: Final = 1 << 16
_MODELS_S: Final = 30.0
"""To list the models: an engine that serves knows them."""
_DONE: Final = "[DONE]"

_ADVICE: Final = {
    400: "the engine is healthy and refuses this request: check its parameters and the length of the prompt",
    401: "the engine wants an API key: pass api_key",
    404: "check the address and the model's name",
    500: "the engine failed on it: look for the cause in its log",
    503: "the engine is loading, or its core is dead: look for the cause in its log",
}


class ClientError(Exception):
    """A request that got no good answer.

    Attributes:
        status: HTTP status; ``None`` where there was no answer at all. 200 for a stream that was cut off.
        body: the beginning of what the engine answered.
    """

    def __init__(self, request: str, problem: str, *, status: int | None = None, body: str = "") -> None:
        self.status = status
        self.body = body[:_EXCERPT_CHARS]
        advice = _ADVICE.get(status or 0, "check that the engine runs: look at its log")
        said = f"; it said {self.body!r}" if body else ""
        super().__init__(f"{request}: {problem}{said}; {advice}")


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed answer."""

    at: float
    """`time.monotonic` when it came."""
    since_request_s: float
    text: str
    """What was generated; empty for events that only carry a role, an end or a usage."""
    data: Mapping[str, Any]
    """The whole event."""


class MetricSample(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a metric."""

    labels: Mapping[str, str]
    value: float


class EngineClient:
    """Talks to one engine. Opens a connection per call, past any proxy of the environment, and keeps none."""

    def __init__(
        self, base_url: str, *, timeout_s: float = 600.0, api_key: str | None = None, model: str | None = None
    ) -> None:
        """Args: ``timeout_s`` is for an answer that comes whole, and the longest silence within a stream.

        ``model`` is asked for where not given.
        """
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._model = model

    @property
    def model(self) -> str:
        """Name under which the engine serves its model: the first one of `models`.

        Raises:
            ClientError: it cannot be asked, or serves none.
        """
        return self._served_model(self.timeout_s)

    def _served_model(self, timeout_s: float) -> str:
        if self._model is None:
            served = self.models(timeout_s=min(timeout_s, _MODELS_S))
            if not served or not isinstance(served[0].get("id"), str):
                raise ClientError(f"GET {self.base_url}/v1/models", "no model is served", status=200)
            self._model = str(served[0]["id"])
        return self._model

    def complete(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        *,
        timeout_s: float | None = None,
        **options: Any,  # noqa: ANN401 - whatever JSON the engine takes
    ) -> dict[str, Any]:
        """One completion, whole; ``prompt`` is text or token ids, ``options`` are further fields of the request.

        Raises:
            ClientError: for anything but a good answer.
        """
        body = self._completion(prompt, max_tokens, options, timeout_s)
        return self._answer("/v1/completions", body, timeout_s=timeout_s)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int,
        *,
        timeout_s: float | None = None,
        **options: Any,  # noqa: ANN401 - whatever JSON the engine takes
    ) -> dict[str, Any]:
        """One chat completion, whole.

        Raises:
            ClientError: for anything but a good answer.
        """
        body = {
            "model": self._served_model(timeout_s or self.timeout_s),
            "messages": list(messages),
            "max_tokens": max_tokens,
            **options,
        }
        return self._answer("/v1/chat/completions", body, timeout_s=timeout_s)

    def stream(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        *,
        timeout_s: float | None = None,
        over: Callable[[], bool] = lambda: False,
        **options: Any,  # noqa: ANN401 - whatever JSON the engine takes
    ) -> Generator[Chunk, None, None]:
        """One completion, chunk by chunk. Closing the iterator early ends the request.

        So does ``over``, asked whenever something comes: a stream that never makes a chunk gives nobody a chance to
        close it.

        Raises:
            ClientError: also in the middle, where the engine reports an error, or the stream ends without its end
                mark: the engine died on it.
        """
        body = {**self._completion(prompt, max_tokens, options, timeout_s), "stream": True}
        path = "/v1/completions"
        what = f"POST {self.base_url}{path}"
        begun = time.monotonic()
        with self._request("POST", path, body, timeout_s=timeout_s) as response:
            count = 0
            for text in _events(response, what, over):
                if text == _DONE:
                    return
                chunk = _chunk(text, begun, what)
                count += 1
                yield chunk
            if not over():
                raise ClientError(what, f"the stream was cut off after {count} events", status=200)

    def models(self, *, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """What ``/v1/models`` lists; vLLM adds ``max_model_len``.

        Raises:
            ClientError: for anything but a good answer.
        """
        found = self._json("GET", "/v1/models", timeout_s=timeout_s).get("data")
        return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []

    def version(self) -> str:
        """The engine's version. An engine whose core is dead still answers.

        Raises:
            ClientError: for anything but a good answer.
        """
        return str(self._json("GET", "/version").get("version", ""))

    def metrics(self, *, timeout_s: float | None = None) -> Mapping[str, tuple[MetricSample, ...]]:
        """Every sample of ``/metrics`` by its name.

        Raises:
            ClientError: for anything but a good answer, or text that is no Prometheus exposition.
        """
        from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - only where asked for

        text = self._text("GET", "/metrics", timeout_s=timeout_s)
        found: dict[str, tuple[MetricSample, ...]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    value = MetricSample(labels=dict(sample.labels), value=float(sample.value))
                    found[sample.name] = (*found.get(sample.name, ()), value)
        except (ValueError, IndexError, KeyError) as error:
            problem = f"the answer is no Prometheus text: {error}"
            raise ClientError(f"GET {self.base_url}/metrics", problem, status=200, body=text) from None
        return found

    def cache_config(self) -> Mapping[str, str] | None:
        """Labels of vLLM's ``cache_config_info``, of the first engine; ``None`` where the engine reports none.

        Raises:
            ClientError: for anything but a good answer.
        """
        samples = self.metrics().get(CACHE_CONFIG, ())
        return samples[0].labels if samples else None

    def close(self) -> None:
        """Nothing is kept open between calls; for callers that close what they made."""

    def _completion(
        self, prompt: str | Sequence[int], max_tokens: int, options: Mapping[str, Any], timeout_s: float | None
    ) -> Mapping[str, Any]:
        given = prompt if isinstance(prompt, str) else list(prompt)
        return {
            "model": self._served_model(timeout_s or self.timeout_s),
            "prompt": given,
            "max_tokens": max_tokens,
            **options,
        }

    def _answer(self, path: str, body: Mapping[str, Any], *, timeout_s: float | None) -> dict[str, Any]:
        """A completion. Engines have answered 200 with an error inside, and proxies with anything."""
        found = self._json("POST", path, body, timeout_s=timeout_s)
        what = f"POST {self.base_url}{path}"
        _raise_error(found, what)
        if not isinstance(found.get("choices"), list) or not found["choices"]:
            raise ClientError(what, "the answer has no choices", status=200, body=json.dumps(found))
        return found

    def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        text = self._text(method, path, body, timeout_s=timeout_s)
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ClientError(f"{method} {self.base_url}{path}", "the answer is no JSON object", status=200, body=text)
        return found

    def _text(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> str:
        """A whole answer, however slowly it trickles in, within one deadline."""
        what = f"{method} {self.base_url}{path}"
        limit_s = timeout_s or self.timeout_s
        deadline = time.monotonic() + limit_s
        taken = bytearray()
        with self._request(method, path, body, timeout_s=limit_s) as response:
            for piece in _pieces(response):
                taken += piece
                if len(taken) > _MOST_BYTES:
                    problem = f"the answer is longer than {_MOST_BYTES // 2**20} MiB"
                    raise ClientError(what, problem, status=200, body=taken[:_EXCERPT_CHARS].decode("utf-8", "replace"))
                if time.monotonic() > deadline:
                    raise ClientError(what, f"no whole answer within {limit_s:g} s")
        return taken.decode("utf-8", "replace")

    @contextmanager
    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Iterator[requests.Response]:
        """An answer of status 200, its body not read yet.

        Raises:
            ClientError: for any other answer, none, or one that stops on the way.
        """
        import requests  # noqa: PLC0415 - tens of milliseconds, only where an engine is talked to
        import urllib3  # noqa: PLC0415 - comes with it; what `_pieces` raises

        what = f"{method} {self.base_url}{path}"
        timeout = (_CONNECT_S, timeout_s or self.timeout_s)
        try:
            with requests.Session() as session:
                session.trust_env = False
                with session.request(
                    method, self.base_url + path, json=body, headers=self._headers, timeout=timeout, stream=True
                ) as response:
                    if response.status_code != 200:
                        status, said = response.status_code, next(_pieces(response), b"")
                        raise ClientError(what, f"status {status}", status=status, body=said.decode("utf-8", "replace"))
                    yield response
        except (requests.Timeout, urllib3.exceptions.TimeoutError) as error:
            raise ClientError(what, f"no answer within {timeout[1]:g} s ({error})") from None
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            raise ClientError(what, f"no whole answer ({error})") from None


def _pieces(response: requests.Response) -> Iterator[bytes]:
    """The body as it comes in: never waits for more than there is, however large a piece the server announced."""
    read = getattr(response.raw, "read1", None)
    if read is None:  # urllib3 before 2.2
        yield from response.iter_content(1)
        return
    while piece := read(_PIECE_BYTES, decode_content=True):
        yield piece


def _events(response: requests.Response, request: str, over: Callable[[], bool]) -> Iterator[str]:
    try:
        yield from sse_data(itertools.takewhile(lambda _: not over(), _pieces(response)))
    except OversizeError as error:
        raise ClientError(request, str(error), status=200) from None


def _raise_error(data: Mapping[str, Any], request: str) -> None:
    """The error that an engine reports inside of an answer of status 200.

    Raises:
        ClientError: it does.
    """
    error = data.get("error")
    if error is None and data.get("object") == "error":
        error = data  # vLLM before 0.10
    if error is None:
        return
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) else 500
    raise ClientError(request, "the engine failed on it", status=status, body=json.dumps(data))


def _chunk(text: str, begun: float, request: str) -> Chunk:
    """Read one event.

    Raises:
        ClientError: it is an error that the engine reports in the stream, or no JSON object.
    """
    at = time.monotonic()
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise ClientError(request, "an event of the stream is no JSON object", status=200, body=text)
    _raise_error(data, request)
    choices = data.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    delta = first.get("delta")
    generated = delta.get("content") if isinstance(delta, dict) else first.get("text")
    return Chunk(at=at, since_request_s=at - begun, text=str(generated or ""), data=data)
