"""What was asked of an engine after its boot: its largest requests, traffic, and gates on memory."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_kvbudget.device.gates import GateResult
from pytest_kvbudget.engine.soak import GrowthTrend, SoakResult
from pytest_kvbudget.engine.survival import RequestResult, SurvivalResult
from pytest_kvbudget.records import AttemptRecord, UseRecord
from pytest_kvbudget.report import marks, parts
from pytest_kvbudget.report.elements import Child, Element, element, table
from pytest_kvbudget.report.numbers import NOT_STATED, duration, size, stated_duration, words
from pytest_kvbudget.report.plain import message_text


def after_boot(record: AttemptRecord) -> Element | None:
    """The section; ``None`` where nothing was asked. A rung's verdict is the page's; tests have theirs here."""
    if record.rung is None and record.uses:
        asked: list[Child] = [table(("test", "verdict", "in words"), map(_use, record.uses), class_="uses")]
        for use in record.uses:
            checks = [*_checks(use)]
            if checks and len(record.uses) > 1:
                asked.append(element("h3", use.test, class_="use"))
            asked += checks
        return parts.section("After the boot: what tests asked", asked)
    children = [child for use in record.uses for child in _checks(use)]
    return parts.section("After the boot", children) if children else None


def _use(use: UseRecord) -> Element:
    return element(
        "tr",
        element("th", use.test, scope="row"),
        element("td", marks.label(marks.mark_of(use.verdict, use.cause))),
        element("td", message_text(use.message)),
    )


def _checks(use: UseRecord) -> Iterator[Child]:
    yield from _survival(use.survival)
    yield from _soak(use.soak)
    yield from _gates(use.gates)


def _num(text: str, tag: str = "td") -> Element:
    return element(tag, text, class_="num", scope="col" if tag == "th" else None)


def _survival(result: SurvivalResult | None) -> Iterator[Child]:
    if result is None:
        return
    yield element("h3", "Its largest requests")
    pool = "" if result.pool_tokens is None else f", a pool of {result.pool_tokens:,} tokens by its own count"
    host = (
        "" if result.least_host_free_bytes is None else f"; least host memory free {size(result.least_host_free_bytes)}"
    )
    yield element("p", f"A window of {result.window:,} tokens{pool}{host}.", class_="note")
    names = ("prompt", "answer asked", "answered", "first token", "took", "tokens/s")
    head: tuple[Child, ...] = ("request", "ended", *(_num(name, "th") for name in names), "said")
    yield table(head, map(_request, result.requests), class_="numbers requests")


def _request(request: RequestResult) -> Element:
    rate = request.tokens_per_s
    numbers = (
        f"{request.prompt_tokens:,}",
        f"{request.max_tokens:,}",
        f"{request.generated_tokens:,}",
        stated_duration(request.first_token_s),
        duration(request.seconds),
        NOT_STATED if rate is None else f"{rate:,.1f}",
    )
    mark = marks.PASS if request.survived else marks.FAIL if request.ended in {"died", "starved"} else marks.UNKNOWN
    return element(
        "tr",
        element("th", request.kind, scope="row"),
        element("td", element("span", marks.symbol(mark), element("b", request.ended), class_=f"verdict v-{mark.key}")),
        [_num(number) for number in numbers],
        element("td", request.message),
    )


def _soak(result: SoakResult | None) -> Iterator[Child]:
    if result is None:
        return
    yield element("h3", "Mixed traffic")
    pairs: list[tuple[str, Child]] = [
        ("requests", f"{result.sent:,} in {duration(result.seconds)}, {result.failed:,} failed"),
        *((f"rank {rank} grows by", _trend(trend, result)) for rank, trend in enumerate(result.trends)),
    ]
    if result.message:
        pairs.append(("the first that failed", result.message))
    yield parts.definitions(pairs)


def _trend(trend: GrowthTrend | None, result: SoakResult) -> str:
    """As the verdict counts it: with what could hide in one step of an allocator."""
    if trend is None:
        return "not seen throughout"
    return f"{size(trend.bytes_per_hour)} ± {size(trend.plus_minus + result.resolution)} per hour"


def _gates(gates: tuple[GateResult, ...]) -> Iterator[Child]:
    if not gates:
        return
    yield element("h3", "Gates on device memory")
    head = ("gate", "verdict", "rank", _num("had", "th"), _num("limit", "th"), "in words")
    yield table(head, map(_gate, gates), class_="numbers gates")


def _gate(gate: GateResult) -> Element:
    had = NOT_STATED if gate.measured_bytes is None else size(gate.measured_bytes)
    rank = NOT_STATED if gate.rank is None else f"{gate.rank} ({gate.device})"
    return element(
        "tr",
        element("th", words(gate.gate), scope="row"),
        element("td", marks.label(marks.mark_of(gate.verdict, None))),
        element("td", rank, class_="rank"),
        _num(had),
        _num(size(gate.limit_bytes)),
        element("td", gate.sentence),
    )
