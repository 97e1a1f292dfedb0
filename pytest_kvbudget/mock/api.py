"""The OpenAI-style interface: what vLLM answers on its routes, as far as this project's clients ask."""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from pytest_kvbudget.mock.arguments import Arguments
from pytest_kvbudget.mock.process import Channel, Message, raw
from pytest_kvbudget.mock.spec import MockDevice
from pytest_kvbudget.mock.wire import Connection, HttpRequest, reason

DEAD: Final = "EngineCore encountered an issue. See stack trace (above) for the root cause."
COMPLETIONS: Final = {"/v1/completions": False, "/v1/chat/completions": True}
"""Route to whether it is a chat."""
TEMPLATE_TOKENS: Final = 4
"""What a chat template adds for each message."""
CHARACTERS_PER_TOKEN: Final = 4
ANSWER_WORD: Final = " tok"
"""Text of every generated token."""


class BadRequest(Exception):  # noqa: N818 - vLLM's own name for it
    """A request that is refused with status 400."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class Job(msgspec.Struct):
    """A completion under way."""

    id: int
    connection: Connection
    route: str
    stream: bool
    include_usage: bool
    prompt_tokens: int
    max_tokens: int
    created: int
    event: bytes = b""
    """One token's server-sent event."""
    generated: int = 0


class Api:
    """Answers requests; completions go to the engine core and come back as its messages."""

    def __init__(self, spec: MockDevice, arguments: Arguments, channel: Channel, ready: Message) -> None:
        self._spec = spec
        self._arguments = arguments
        self._channel = channel
        self._ready = ready
        self._jobs: dict[int, Job] = {}
        self._stats: Message = {"running": 0, "waiting": 0, "usage": 0.0}
        self._last_id = 0
        self._totals = {"prompt": 0, "generation": 0}
        self.dead = False

    @property
    def busy(self) -> bool:
        """Whether completions are under way."""
        return bool(self._jobs)

    def handle(self, connection: Connection, request: HttpRequest) -> None:
        """Answer a request, now or when the engine has."""
        route = (request.method, request.path)
        if route == ("GET", "/health"):
            self._answer(connection, request, 503 if self.dead else 200, b"", "text/plain")
        elif route == ("GET", "/version"):
            self._json(connection, request, 200, {"version": self._spec.engine_version})
        elif route == ("GET", "/v1/models"):
            self._json(connection, request, 200, {"object": "list", "data": [self._model()]})
        elif route == ("GET", "/metrics"):
            text = self._metrics().encode("utf-8", "surrogateescape")
            self._answer(connection, request, 200, text, "text/plain; version=0.0.4; charset=utf-8")
        elif request.method == "POST" and request.path in COMPLETIONS:
            try:
                self._complete(connection, request)
            except BadRequest as error:
                self._error(connection, request, 400, str(error), error.parameter)
        else:
            self._json(connection, request, 404, {"detail": "Not Found"})

    def _complete(self, connection: Connection, request: HttpRequest) -> None:
        if self.dead:
            self._error(connection, request, 500, DEAD)
            return
        try:
            body = msgspec.json.decode(request.body, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise BadRequest(f"JSON decode error: {error}") from None
        prompt_tokens = count_tokens(body, chat=COMPLETIONS[request.path])
        max_tokens = self._max_tokens(body, prompt_tokens, chat=COMPLETIONS[request.path])
        self._last_id += 1
        job = Job(
            self._last_id, connection, request.path, bool(body.get("stream")),
            bool((body.get("stream_options") or {}).get("include_usage")), prompt_tokens, max_tokens, int(time.time()),
        )  # fmt: skip
        self._jobs[job.id] = job
        self._totals["prompt"] += prompt_tokens
        connection.job = job.id
        if job.stream:
            job.event = self._event(job, {"index": 0, **self._text(job, ANSWER_WORD), "finish_reason": None})
            self._access(connection, f"POST {job.route}", 200)
            connection.begin_stream()
        self._channel.send({"type": "add", "id": job.id, "prompt_tokens": prompt_tokens, "max_tokens": max_tokens})

    def _max_tokens(self, body: dict[str, Any], prompt_tokens: int, *, chat: bool) -> int:
        """VLLM's limits: a prompt over the window and an answer over the window are refused, their sum is cut."""
        window = int(self._ready["max_model_len"])
        asked = body.get("max_completion_tokens") or body.get("max_tokens")
        if asked is not None and (not isinstance(asked, int) or asked < 1):
            raise BadRequest(f"max_tokens must be at least 1, got {asked}.", "max_tokens")
        if asked is not None and asked > window:
            raise BadRequest(
                f"max_tokens={asked} cannot be greater than max_model_len={window}. Please request fewer output"
                " tokens.",
                "max_tokens",
            )
        if prompt_tokens >= window:
            raise BadRequest(
                f"This model's maximum context length is {window} tokens. However, your prompt contains {prompt_tokens}"
                " input tokens, which exceeds this limit even without any output tokens. Please reduce the length of"
                " the input prompt.",
                "input_tokens",
            )
        return min(window - prompt_tokens, asked or (window if chat else 16))

    def engine_says(self, message: Message) -> None:
        """A message of the engine core."""
        if message["type"] == "stats":
            self._stats = message
            return
        job = self._jobs.get(message.get("id", 0))
        if job is None:
            return
        if message["type"] == "tokens":
            job.generated += message["count"]
            self._totals["generation"] += message["count"]
            if job.stream:
                job.connection.send_events(job.event * message["count"])
        elif message["type"] == "finished":
            self._finish(job)

    def _finish(self, job: Job) -> None:
        del self._jobs[job.id]
        job.connection.job = None
        usage = {
            "prompt_tokens": job.prompt_tokens,
            "total_tokens": job.prompt_tokens + job.generated,
            "completion_tokens": job.generated,
        }
        last = {"index": 0, **self._text(job, ""), "finish_reason": "length"}
        if job.stream:
            tail = self._event(job, last)
            if job.include_usage:
                tail += self._event(job, None, usage)
            job.connection.send_events(tail + b"data: [DONE]\n\n")
            job.connection.end_stream()
            return
        text = ANSWER_WORD * job.generated
        content = {"message": {"role": "assistant", "content": text}} if COMPLETIONS[job.route] else {"text": text}
        answer = {**self._envelope(job, ""), "choices": [{"index": 0, **content, "finish_reason": "length"}],
                  "usage": usage}  # fmt: skip
        self._access(job.connection, f"POST {job.route}", 200)
        job.connection.respond(200, msgspec.json.encode(answer))

    def _event(self, job: Job, choice: dict[str, Any] | None, usage: dict[str, int] | None = None) -> bytes:
        data = {**self._envelope(job, ".chunk"), "choices": [choice] if choice else []}
        if usage:
            data["usage"] = usage
        return b"data: " + msgspec.json.encode(data) + b"\n\n"

    def _envelope(self, job: Job, suffix: str) -> dict[str, Any]:
        chat = COMPLETIONS[job.route]
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{job.id:032x}",
            "object": f"chat.completion{suffix}" if chat else "text_completion",
            "created": job.created,
            "model": self._arguments.served_name,
        }

    def _text(self, job: Job, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if COMPLETIONS[job.route] else {"text": text, "logprobs": None}

    def client_left(self, connection: Connection) -> None:
        """A client went away: its completion is aborted and its KV is free again."""
        if connection.job is not None:
            self._channel.send({"type": "abort", "id": connection.job})
            del self._jobs[connection.job]

    def engine_died(self) -> None:
        """Nothing under way can end well: 500 where no answer began, a cut stream elsewhere."""
        self.dead = True
        self._stats = {"running": 0, "waiting": 0, "usage": 0.0}
        for job in self._jobs.values():
            job.connection.job = None
            if job.stream:
                job.connection.closing = True
            else:
                request = HttpRequest("POST", job.route, b"", keep_alive=False)
                self._error(job.connection, request, 500, DEAD)
        self._jobs = {}

    def _error(
        self, connection: Connection, request: HttpRequest, status: int, text: str, param: str | None = None
    ) -> None:
        kind = "BadRequestError" if status == 400 else "InternalServerError"
        error = {"message": text, "type": kind, "param": param, "code": status}
        self._json(connection, request, status, {"error": error})

    def _json(self, connection: Connection, request: HttpRequest, status: int, body: object) -> None:
        self._answer(connection, request, status, msgspec.json.encode(body), "application/json")

    def _answer(self, connection: Connection, request: HttpRequest, status: int, body: bytes, kind: str) -> None:
        self._access(connection, f"{request.method} {request.path}", status)
        connection.respond(status, body, kind)

    def _access(self, connection: Connection, what: str, status: int) -> None:
        raw(f'INFO:     {connection.address} - "{what} HTTP/1.1" {status} {reason(status)}\n')

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._arguments.served_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": self._arguments.model,
            "parent": None,
            "max_model_len": self._ready["max_model_len"],
            "permission": [],
        }

    def _metrics(self) -> str:
        ready, arguments = self._ready, self._arguments
        labels = f'engine="0",model_name="{arguments.served_name}"'
        concurrency = float(ready["concurrency"])
        config = {
            "block_size": ready["block_tokens"],
            "cache_dtype": arguments.kv_cache_dtype,
            "engine": "0",
            "gpu_memory_utilization": arguments.gpu_memory_utilization,
            "kv_cache_max_concurrency": concurrency,
            "kv_cache_memory_bytes": arguments.kv_cache_memory_bytes,
            "kv_cache_size_tokens": int(concurrency * ready["max_model_len"]),
            "num_cpu_blocks": None,
            "num_gpu_blocks": ready["blocks"],
        }
        shown = ",".join(f'{name}="{value}"' for name, value in config.items())
        samples = (
            ("num_requests_running", "gauge", self._stats["running"]),
            ("num_requests_waiting", "gauge", self._stats["waiting"]),
            ("kv_cache_usage_perc", "gauge", self._stats["usage"]),
            ("num_preemptions_total", "counter", 0),
            ("prompt_tokens_total", "counter", self._totals["prompt"]),
            ("generation_tokens_total", "counter", self._totals["generation"]),
        )
        lines: list[str] = []
        for name, kind, value in samples:
            lines += [f"# HELP vllm:{name} {name}", f"# TYPE vllm:{name} {kind}",
                      f"vllm:{name}{{{labels}}} {float(value)}"]  # fmt: skip
        if self._spec.dialect == "neuron":
            name = "vllm_neuron:model_load_size_bytes"
            lines += [f"# HELP {name} Bytes of weights on all ranks", f"# TYPE {name} gauge",
                      f"{name}{{{labels}}} {float(self._spec.weights * self._spec.ranks)}"]  # fmt: skip
        name = "vllm:cache_config_info"
        lines += [f"# HELP {name} Information of the LLMEngine CacheConfig", f"# TYPE {name} gauge",
                  f"{name}{{{shown}}} 1.0"]  # fmt: skip
        return "\n".join([*lines, ""])


def count_tokens(body: dict[str, Any], *, chat: bool) -> int:
    """Prompt tokens of a completion: a list of ids has as many, of text four characters are one.

    Raises:
        BadRequest: there is no prompt, or it is neither text nor token ids.
    """
    if chat:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages: expected a list with at least one message", "messages")
        text = "".join(str(message.get("content", "")) for message in messages)
        return TEMPLATE_TOKENS * len(messages) + -(-len(text) // CHARACTERS_PER_TOKEN)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return len(prompt)
    if isinstance(prompt, str) and prompt:
        return -(-len(prompt) // CHARACTERS_PER_TOKEN)
    raise BadRequest("prompt: expected text or a list of token ids", "prompt")
