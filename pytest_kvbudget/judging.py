"""From what happened to a verdict: the end of a boot, its capacity, its gates on memory, its survival. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from pytest_kvbudget.as_asked import not_as_asked
from pytest_kvbudget.device.gates import GateResult, worst
from pytest_kvbudget.device.model import DeviceMemory
from pytest_kvbudget.engine.kernel import KernelKill
from pytest_kvbudget.engine.soak import PARTS, STEP_BYTES, GrowthTrend, SoakResult
from pytest_kvbudget.engine.survival import RequestResult, SurvivalResult
from pytest_kvbudget.engine.watch import Outcome
from pytest_kvbudget.judgement import Judgement, reason
from pytest_kvbudget.ledger.classes import verdict_on
from pytest_kvbudget.ledger.levers import levers_for
from pytest_kvbudget.ledger.model import BootLedger, Cause, Evidence, Lever
from pytest_kvbudget.search.hints import capacity_tokens
from pytest_kvbudget.search.pool import kv_windows_short, pool_short
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import format_gib, format_size
from pytest_kvbudget.verdict import Phase, Verdict

KILLED: Final = frozenset(("host_oom_killed", "engine_killed", "engine_vanished", "unexplained"))
"""Failure classes of an engine that is gone without having said why."""

FOREIGN: Final = "foreign_process_memory"
STARTUP: Final = "startup_free_below_request"

_SEVERITY: Final = (Verdict.PASS, Verdict.MARGINAL, Verdict.UNKNOWN, Verdict.ERROR, Verdict.FAIL)
"""Of the checks of one engine, the mildest first."""

_SERVE: Final = Lever(
    "VLLM_NEURON_CPU_COMPILE", "none", "helps", "take it out of the environment: with it nothing serves"
)


def launch_failed(message: str) -> Judgement:
    """Nothing was started: the command, its folder or its rights are wrong."""
    lever = Lever("command", "none", "helps", "install it, or give the target's command its full path")
    return reason(Verdict.ERROR, Phase.ARGUMENT, "launch_failed", message, levers=(lever,))


def by_gate(message: str) -> Judgement:
    """The test's own body refused a rung. That says nothing about memory, and the finding must not either."""
    verdict, cause, said = reason(Verdict.FAIL, Phase.READY, "gate", f"the test's own gate refused it: {message}")
    return verdict, msgspec.structs.replace(cause, by_gate=True), said


def judge_end(outcome: Outcome, ledger: BootLedger, *, compiles: bool = False) -> Judgement:
    """The verdict on an engine that did not get ready, or died: from its log, never from its exit status.

    Args:
        outcome: how the wait for it ended.
        ledger: what its log says.
        compiles: it was only to compile, and to end then.
    """
    cause = ledger.cause
    if outcome.kind == "not_started":
        return launch_failed(outcome.message)
    if outcome.kind == "late":
        return reason(Verdict.UNKNOWN, outcome.phase or ledger.phase, "deadline_passed", outcome.message)
    if outcome.kind == "foreign":
        return reason(Verdict.ERROR, Phase.ARGUMENT, "port_in_use", outcome.message)
    if cause is not None:
        return verdict_on(cause), cause, f"{cause.failure_class}: {cause.sentence}"
    return _compiled(ledger, compiles=compiles) if ledger.get("compile_only") else _vanished(outcome, ledger)


def _compiled(ledger: BootLedger, *, compiles: bool) -> Judgement:
    """An engine that was only to compile, and did: a pass where that was asked for."""
    said = "the engine was only to compile, and did; it loaded and served nothing"
    if compiles:
        return Verdict.PASS, None, f"compiled: {said}"
    return reason(Verdict.ERROR, ledger.phase, "compiled_only", said, levers=(_SERVE,))


def _vanished(outcome: Outcome, ledger: BootLedger) -> Judgement:
    """An engine that is gone without a word."""
    how = outcome.message or ("was killed" if (outcome.status or 0) < 0 else "left")
    last = f" after {ledger.milestones[-1].evidence.text!r}" if ledger.milestones else ""
    status = "" if outcome.status is None else f" (exit status {outcome.status})"
    said = f"the engine {how} in {ledger.phase}{last}{status}, and no line of its log says why"
    return reason(Verdict.UNKNOWN, ledger.phase, "engine_vanished", said)


def judge_capacity(ledger: BootLedger, shape: Shape, windows: int | None, *, ready_s: float) -> Judgement:
    """A boot that is ready still has to hold the promised windows, by the engine's own count."""
    ready = f"ready after {ready_s:.1f} s"
    other = not_as_asked(ledger, shape)
    if other is not None:
        return other
    if windows is None:
        return Verdict.PASS, None, ready
    fitted = ledger.get("max_model_len")
    length = shape.max_model_len or (fitted if isinstance(fitted, int) else None)
    if length is None:
        said = "ready, but neither the shape nor the log states the window: its capacity is unproven"
        return reason(Verdict.UNKNOWN, Phase.READY, "capacity_unstated", said)
    capacity = capacity_tokens(ledger, length)
    if capacity is None:
        said = "ready, but no line of the log states the KV cache size: its capacity is unproven"
        return reason(Verdict.UNKNOWN, Phase.READY, "capacity_unstated", said)
    tokens = int(capacity[0])
    if not pool_short(tokens, windows, length):
        return Verdict.PASS, None, f"{ready}; the KV cache holds {tokens:,} tokens"
    cause = kv_windows_short(tokens, windows, length, pool_bytes=shape.kv_cache_memory_bytes)
    return Verdict.FAIL, cause, f"{cause.failure_class}: {cause.sentence}"


def with_client_evidence(judged: Judgement, result: SurvivalResult) -> Judgement:
    """A death under a survival check, with what its client saw: the other side of what the log says."""
    verdict, cause, said = judged
    bad = result.first_bad
    if cause is None or bad is None:
        return judged
    text = f"client: the {bad.kind} of {bad.prompt_tokens:,} prompt and {bad.max_tokens:,} answer tokens: {bad.message}"
    return verdict, msgspec.structs.replace(cause, evidence=(*cause.evidence, Evidence(0, text))), said


def judge_soak(result: SoakResult, max_growth_per_hour: int | None, *, sample_s: float | None) -> Judgement:
    """The verdict of a soak whose engine lives.

    Growth counts only with 95 % certainty, and only beyond the step in which engines take memory. A soak of which
    growth cannot be told is INCONCLUSIVE, with a limit and without: UNKNOWN, never PASS.

    Args:
        result: the soak.
        max_growth_per_hour: bytes that were allowed; ``None`` where growth is only to be told.
        sample_s: time from one sample of the memory to the next; ``None`` where nothing is sampled.
    """
    if result.failed:
        said = f"{result.failed:,} of {result.sent:,} requests failed: {result.message}"
        return reason(Verdict.UNKNOWN, Phase.REQUEST, "request_failed", said)
    if not result.sent:
        said = f"no request was answered in {result.seconds:.1f} s"
        return reason(Verdict.UNKNOWN, Phase.REQUEST, "request_failed", said)
    answered = f"{result.sent:,} {'request was' if result.sent == 1 else 'requests were'} answered"
    seen = [trend for trend in result.trends if trend is not None]
    worst_trend = max(seen, key=lambda trend: trend.most, default=None)
    if worst_trend is None or len(seen) < len(result.trends):
        return _growth_unseen(result, answered, sample_s)
    plus_minus = worst_trend.plus_minus + result.resolution
    growth = f"{format_size(worst_trend.bytes_per_hour)} ± {format_size(plus_minus)} per hour"
    said = f"rank {worst_trend.rank} grew by {growth} in {result.seconds:.1f} s"
    content = Verdict.PASS, None, f"{answered}; {said}"
    return content if max_growth_per_hour is None else _judge_growth(result, max_growth_per_hour, worst_trend, content)


def _judge_growth(result: SoakResult, max_growth_per_hour: int, worst: GrowthTrend, content: Judgement) -> Judgement:
    """Growth against its limit; ``content`` where it keeps it."""
    plus_minus = worst.plus_minus + result.resolution
    said = f"{content[2]}; at most {format_size(max_growth_per_hour)} per hour was asked for"
    if worst.bytes_per_hour - plus_minus > max_growth_per_hour:
        return reason(Verdict.FAIL, Phase.REQUEST, "memory_grows", said)
    if worst.bytes_per_hour + plus_minus > max_growth_per_hour:
        least_s = STEP_BYTES * 3600 / max_growth_per_hour if max_growth_per_hour > 0 else None
        longer = "" if least_s is None else f"; even memory that stays level takes {least_s / 60:.1f} minutes to tell"
        said = f"INCONCLUSIVE: {said}: too short or too noisy to tell{longer}"
        return reason(Verdict.UNKNOWN, Phase.REQUEST, "soak_too_short", said)
    return content


def _growth_unseen(result: SoakResult, answered: str, sample_s: float | None) -> Judgement:
    """Growth that nobody could see: the soak was over too soon, or the device does not show it."""
    least_s = None if sample_s is None else 2 * PARTS * sample_s
    if least_s is not None and result.seconds < least_s:
        said = (
            f"INCONCLUSIVE: {answered}, and {result.seconds:.1f} s are too short to see growth: {PARTS} parts of two "
            f"samples each take {least_s:g} s"
        )
        return reason(Verdict.UNKNOWN, Phase.REQUEST, "soak_too_short", said)
    if sample_s is None:
        said = f"INCONCLUSIVE: {answered}, and nobody can read this target's device memory: growth cannot be told"
    else:
        said = (
            f"INCONCLUSIVE: {answered}, and the memory of a rank was not seen throughout the {result.seconds:.1f} s: "
            "growth cannot be told"
        )
    return reason(Verdict.UNKNOWN, Phase.REQUEST, "memory_unseen", said)


def judge_boot_gate(
    tokens: int, length: int, windows: int, min_tokens: int | None, *, pool_bytes: int | None
) -> Judgement:
    """What the engine's own count of its KV cache says to what a ``boot_gate`` asks.

    Args:
        tokens: the engine's count.
        length: tokens of one window.
        windows: full windows that it must hold.
        min_tokens: tokens that it must hold; ``None`` asks for nothing more.
        pool_bytes: the pinned pool per rank; ``None`` where utilization decides it.
    """
    holds = f"the KV cache holds {tokens:,} tokens by the engine's own count"
    wanted = f"{windows} window{'s' if windows > 1 else ''} of {length:,}"
    for need, what in ((windows * length, wanted), (min_tokens or 0, "min_tokens")):
        if tokens < need:
            cause = kv_windows_short(tokens, windows, length, pool_bytes=pool_bytes)
            levers = tuple(lever for lever in cause.levers if what == wanted or lever.name == cause.levers[0].name)
            said = f"boot_gate: {holds}, {need:,} are needed ({what})"
            return Verdict.FAIL, msgspec.structs.replace(cause, sentence=said, levers=levers), said
    return Verdict.PASS, None, f"{holds}, {tokens / length:.2f} windows of {length:,}"


def together(checks: Sequence[Judgement]) -> Judgement:
    """Several checks of one engine as one verdict: the worst one's, and what each of them said.

    A check without verdict is worse than a margin that was missed: the whole is known only as well as its parts.

    Raises:
        ValueError: no checks.
    """
    if not checks:
        raise ValueError("no checks to put together")
    ordered = sorted(checks, key=lambda judged: -_SEVERITY.index(judged[0]))
    verdict, cause, said = ordered[0]
    rest = {text: found for found, _, text in ordered[1:] if text != said}
    others = (text if found is verdict else f"{found}: {text}" for text, found in rest.items())
    return verdict, cause, "; ".join((said, *others))


def judge_gates(gates: Sequence[GateResult], *, trouble: Sequence[str] = ()) -> Judgement | None:
    """The verdict of gates on device memory; ``None`` where every one is kept.

    ``trouble`` is why memory could not be read, for a gate that nobody could judge.
    """
    verdict = worst(gates)
    if verdict is Verdict.PASS:
        return None
    binding = next(gate for gate in gates if gate.verdict is verdict)
    failure_class = "memory_unseen" if verdict is Verdict.UNKNOWN else f"{binding.gate}_missed"
    rank = None if binding.rank is None else str(binding.rank)
    why = f" ({trouble[-1]})" if verdict is Verdict.UNKNOWN and trouble else ""
    sentence = f"{binding.sentence}{why}"
    return verdict, Cause(phase=Phase.REQUEST, failure_class=failure_class, sentence=sentence, rank=rank), sentence


def judge_survival(result: SurvivalResult) -> Judgement | None:
    """The verdict of a survival check whose engine still lives; ``None`` where it survived.

    A request that starved is the shape's fault only where the engine's own count says that the pool is too small.
    """
    bad = result.first_bad
    if bad is None:
        return None
    asked = f"the {bad.kind} of {bad.prompt_tokens:,} prompt and {bad.max_tokens:,} answer tokens"
    got = f"after {bad.generated_tokens:,} tokens and {bad.seconds:.1f} s"
    if bad.ended == "refused":
        said = f"{asked} was refused by a healthy engine: the check asked for too much ({bad.message})"
        return reason(Verdict.ERROR, Phase.REQUEST, "request_rejected", said)
    if bad.ended == "starved":
        return _starved(bad, result, asked)
    if bad.ended == "timeout":
        return reason(Verdict.UNKNOWN, Phase.REQUEST, "survival_timeout", f"{asked} had no end {got}: {bad.message}")
    return reason(Verdict.UNKNOWN, Phase.REQUEST, "request_failed", f"{asked} failed {got}: {bad.message}")


def survival_passed(result: SurvivalResult) -> Judgement:
    """A survival check that was survived, in words."""
    return Verdict.PASS, None, f"survived {result.requests[0].generated_tokens:,} tokens of its largest request"


def _starved(bad: RequestResult, result: SurvivalResult, asked: str) -> Judgement:
    need = bad.prompt_tokens + bad.max_tokens
    if result.pool_tokens is None or result.pool_tokens >= need:
        said = f"{asked} waits for memory that the engine's own count says is there"
        return reason(Verdict.UNKNOWN, Phase.REQUEST, "request_starved", said)
    said = f"{asked} waits for ever: it needs {need:,} tokens of KV cache, and the pool holds {result.pool_tokens:,}"
    levers = (
        Lever("kv_cache_memory_bytes", "raise", "helps", f"to a pool of {need:,} tokens"),
        Lever("max_model_len", "lower", "helps", f"to at most {result.pool_tokens:,}: then the engine refuses at once"),
    )
    return reason(Verdict.FAIL, Phase.REQUEST, "request_starved", said, levers=levers)


def with_kernel_evidence(judged: Judgement, kills: Sequence[KernelKill]) -> Judgement:
    """A death that the engine's log cannot explain, explained by the kernel: it was killed for host memory.

    Without the kernel's word a SIGKILL proves nothing, whoever sent it.
    """
    _, cause, _ = judged
    if not kills or cause is None or cause.failure_class not in KILLED:
        return judged
    first = kills[0]
    said = f"the kernel killed {first.name} (process {first.pid}) for memory of the host or its control group"
    levers = (
        Lever("max_num_batched_tokens", "lower", "helps", "a step's activations scale with it"),
        Lever("kv_cache_memory_bytes", "lower", "helps", "where the KV cache is host memory"),
        Lever(
            "memory limit of the control group or container", "raise", "helps", "it is what was hit, or the host's end"
        ),
        Lever("gpu_memory_utilization", "lower", "useless", "on a GPU: this is host memory"),
    )
    cause = Cause(
        phase=cause.phase,
        failure_class="host_oom_killed",
        sentence=said,
        evidence=(*(Evidence(0, f"kernel: {kill.text}") for kill in kills), *cause.evidence),
        levers=levers,
    )
    return Verdict.FAIL, cause, f"host_oom_killed: {said}"


def with_idle_evidence(judged: Judgement, ledger: BootLedger, idle: Sequence[DeviceMemory]) -> Judgement:
    """What somebody else seems to hold at start-up is what the devices showed when they were idle: a share too big.

    Args:
        judged: by the log alone, which cannot know who holds what is not free.
        ledger: of the boot.
        idle: the devices before the launch, passed as clean; none where nobody can read them.
    """
    _, cause, _ = judged
    free, total = ledger.facts.get("free_bytes"), ledger.facts.get("total_bytes")
    if cause is None or cause.failure_class != FOREIGN or free is None or total is None or not idle:
        return judged
    if isinstance(free.value, str) or isinstance(total.value, str):
        return judged
    held = float(total.value) - float(free.value) - free.precision - total.precision
    if held > max(device.used_bytes for device in idle):
        return judged
    said = (
        f"{format_size(free.value)} of {format_size(total.value)} is free at start-up, as on the idle device, and less "
        "than the share that was asked for"
    )
    cause = msgspec.structs.replace(
        cause, failure_class=STARTUP, sentence=said, levers=levers_for(STARTUP, ledger.family, cause.phase)
    )
    return Verdict.FAIL, cause, f"{STARTUP}: {said}"


def with_contract_floor(judged: Judgement, ledger: BootLedger, shape: Shape) -> Judgement:
    """Say by how much a pinned pool is larger than its contract asks, where memory ran out: the first GiB to give back.

    The contract floor is ``seqs x max_model_len x measured bytes per token`` per rank (RDNA4 budget document,
    section 5); extra pool bytes come out of everybody else's room and buy nothing.
    """
    verdict, cause, said = judged
    pool, seqs, length = shape.kv_cache_memory_bytes, shape.max_num_seqs, shape.max_model_len
    capacity = capacity_tokens(ledger, length)
    if cause is None or not cause.failure_class.endswith("_oom") or None in {pool, seqs, length} or capacity is None:
        return judged
    floor = int(int(pool or 0) * int(seqs or 0) * int(length or 0) / capacity[0])
    over = int(pool or 0) - floor
    if over <= 0:
        return judged
    why = f"it is {format_gib(over)} over its contract floor of {seqs} x {length:,} tokens"
    others = tuple(lever for lever in cause.levers if lever.name != "kv_cache_memory_bytes")
    lever = Lever("kv_cache_memory_bytes", "lower", "helps", f"{why}; {format_gib(floor)} hold them")
    cause = msgspec.structs.replace(
        cause, levers=(lever, *others), sentence=f"{cause.sentence}; the pinned pool: {why}"
    )
    return verdict, cause, f"{said}; the pinned pool: {why}"


def first_line(message: str) -> str:
    """The first line of a message that may have many."""
    return (message.strip().splitlines() or ["(no message)"])[0]
