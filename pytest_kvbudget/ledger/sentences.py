"""Causes in one sentence, with the figures that the log states and none that it does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from pytest_kvbudget.ledger.boot import BootState
from pytest_kvbudget.ledger.facts import binding
from pytest_kvbudget.ledger.model import Value
from pytest_kvbudget.ledger.notation import Reading
from pytest_kvbudget.ledger.seen import Seen
from pytest_kvbudget.units import GIB, format_gib, format_size

TABLED: Final = "hbm_"
"""Figures that only a table below a failure states begin so."""
LONGEST_QUOTE: Final = 200
"""Characters quoted from the engine's own message."""


class Figures:
    """The figures of a boot as text, the root cause's own first."""

    def __init__(self, state: BootState, root: Seen | None) -> None:
        self._state = state
        self._root = root

    @property
    def family(self) -> str:
        """The engine family, as `BootState.family` names it."""
        return self._state.family

    def number(self, name: str) -> float | None:
        """The binding value of a fact as a number, ``None`` where no line states one."""
        found = self._find(name)
        if found is None or isinstance(found.value, (str, bool)):
            return None
        return found.value

    def _of_root(self, name: str) -> Reading | None:
        if self._root is None:
            return None
        line = self._root.evidence.line
        same = (seen.readings for seen in self._state.failures if seen.evidence.line == line)
        return next((readings[name] for readings in (self._root.readings, *same) if name in readings), None)

    def _find(self, name: str) -> Reading | Value | None:
        own = self._of_root(name)
        if own is not None:
            return own
        values = list(self._state.facts.values.get(name, {}).values())
        if values:
            return binding(name, values)
        return next((seen.readings[name] for seen in self._state.failures if name in seen.readings), None)

    def own_size(self, name: str) -> str:
        """A size that the failure itself states, in its line or in the table below it; empty where it states none."""
        if self._root is None:
            return ""
        found: Reading | Value | None = self._of_root(name)
        if found is None and name.startswith(TABLED):
            found = self._state.facts.values.get(name, {}).get(self._root.process)
        return "" if found is None or isinstance(found.value, (str, bool)) else size_text(found.value, found.precision)

    def size(self, name: str, otherwise: str = "") -> str:
        """A size for people, in the unit that the engine printed; ``otherwise`` where no line states it."""
        found = self._find(name)
        if found is None or isinstance(found.value, (str, bool)):
            return otherwise
        return size_text(found.value, found.precision)

    def count(self, name: str, otherwise: str = "") -> str:
        """A count with thousands separators; ``otherwise`` where no line states it."""
        number = self.number(name)
        return otherwise if number is None else f"{int(number):,}"

    def share(self, name: str, otherwise: str = "") -> str:
        """A fraction as the engine writes it."""
        number = self.number(name)
        return otherwise if number is None else f"{number:g}"


def size_text(size_bytes: float, precision_bytes: float) -> str:
    """A size in GiB where it is known to hundredths of a GiB, as the engines print it; else in the unit that fits."""
    return format_gib(size_bytes) if precision_bytes >= 0.004 * GIB else format_size(size_bytes)


def sentence_for(failure_class: str, figures: Figures, text: str) -> str:
    """The cause in one sentence; ``text`` is the line that names it, quoted where no figure says it better."""
    write = _SENTENCES.get(failure_class)
    if write is not None:
        return write(figures, text)
    return f"{_PLAIN.get(failure_class, failure_class.replace('_', ' '))}: {quote(text)}"


def quote(text: str) -> str:
    """The engine's own message, without what only repeats itself."""
    text = re.sub(r"\s*\[type=\w+, input_value=.*$", "", text.strip())
    raised = re.match(r"raise \w+\(f?[\"']", text)
    if raised is not None:  # the line of code that says it
        text = text[raised.end() :].rstrip("\"') ")
    text = re.sub(r"^(?:Value error, |\S+: error: |error: )", "", text)
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"


def _kv_check(figures: Figures, text: str) -> str:
    window = figures.count("max_model_len")
    request = f"one request of {window} tokens" if window else "one request of the full window"
    need, available = figures.size("kv_needed_bytes"), figures.size("available_kv_bytes")
    estimate, tokens = figures.count("estimated_max_model_len"), figures.count("kv_tokens")
    if need and available:
        said = f"{request} needs {need} of KV cache, {available} is available"
    elif tokens:
        said = f"{request} does not fit a KV cache of {tokens} tokens"
    else:
        return f"{request} does not fit the KV cache: {quote(text)}"
    return f"{said}; the engine estimates that {estimate} tokens fit" if estimate else said


def _underpriced(figures: Figures, text: str) -> str:
    priced = figures.count("plan_kv_b_per_token") or figures.count("plan_registry_b_per_token")
    measured = figures.count("measured_kv_b_per_token")
    return (
        f"{_kv_check(figures, text)}, but the pool is capped at the plan's reserve and grows with the window: the plan "
        f"prices {priced} B/token (+8 %), the model takes {measured}"
    )


def _startup(figures: Figures, text: str) -> str:
    free, total, asked = (figures.size(name) for name in ("free_bytes", "total_bytes", "requested_bytes"))
    if not free or not total:
        return f"less memory is free at start-up than asked for: {quote(text)}"
    share = figures.share("gpu_memory_utilization")
    wanted = f"{asked} (utilization {share})" if asked and share else asked or "the requested share"
    total_bytes, free_bytes = figures.number("total_bytes"), figures.number("free_bytes")
    most = ""
    if total_bytes and free_bytes is not None:
        most = f"; at most {most_utilization(free_bytes, total_bytes):g} can boot here now"
    return f"{free} of {total} is free at start-up, less than the {wanted} asked for{most}"


def _foreign(figures: Figures, text: str) -> str:
    free, total = figures.number("free_bytes"), figures.number("total_bytes")
    if free is None or total is None:
        return f"another process holds memory on the device: {quote(text)}"
    held = format_size(total - free)
    return f"{held} of {format_size(total)} is held by something else before this engine allocates anything"


def _oom(where: str, doubt: str = "") -> Callable[[Figures, str], str]:
    where = f" {where}" if where else ""

    def write(figures: Figures, text: str) -> str:
        tried = figures.size("tried_alloc_bytes") or figures.size("tried_alloc_rounded_bytes")
        if not tried:
            return f"the device ran out of memory{where}{doubt}: {quote(text)}"
        # what other lines say of free memory was said before: it is not the state at the failure
        free, total, used = (figures.own_size(name) for name in ("free_bytes", "total_bytes", "hbm_total_used_bytes"))
        room = f", {free} of {total} was free" if free and total else f", {free} was free" if free else ""
        if not room and used:
            room = f", {used} was in use"
        usage = _held(figures)
        return f"an allocation of {tried}{usage} failed{where}{room}{doubt}"

    return write


def _profile(figures: Figures, text: str) -> str:
    where = "while compute buffers were reserved" if figures.family == "llama.cpp" else "in the profile run"
    return _oom(where)(figures, text)


def _held(figures: Figures) -> str:
    held = figures.own_size("torch_allocated_bytes")
    return f" on top of {held} allocated" if held else ""


def _min_kv(figures: Figures, text: str) -> str:
    effective, minimum = figures.size("effective_kv_bytes"), figures.size("min_kv_bytes")
    if not effective or not minimum:
        return f"the KV budget is below its minimum: {quote(text)}"
    return f"{effective} is left for the KV cache, below the minimum of {minimum}"


def _state_blocks(figures: Figures, text: str) -> str:
    seqs, blocks = figures.count("max_num_seqs"), figures.count("state_blocks")
    if not seqs or not blocks:
        return f"more sequences than state blocks: {quote(text)}"
    return f"max_num_seqs is {seqs}, but there is state memory for {blocks} sequences"


def _workspace(figures: Figures, text: str) -> str:
    needs, has = figures.size("workspace_required_bytes"), figures.size("workspace_current_bytes")
    if not needs or not has:
        return f"a request needs more workspace than warm-up reserved: {quote(text)}"
    return (
        f"a request needs a workspace of {needs}, {has} was reserved when warm-up locked it; this is no lack of memory"
    )


def _compile_hbm(figures: Figures, text: str) -> str:
    peak = figures.size("peak_hbm_bytes") or figures.size("io_tensors_bytes")
    limit = figures.size("hbm_limit_bytes")
    if not peak or not limit:
        return f"a compiled program needs more device memory than there is: {quote(text)}"
    return f"a compiled program needs {peak} of device memory, the limit is {limit}"


def _disturbed(figures: Figures, text: str) -> str:
    before, after = figures.size("free_bytes"), figures.size("current_free_bytes")
    if not before or not after:
        return f"free memory grew while the engine measured: {quote(text)}"
    if before == after:
        return f"free memory is {after}, as it was before the engine measured: no figure can be taken from that"
    return f"free memory grew from {before} to {after} while the engine measured: somebody else gave memory back"


def _starved(figures: Figures, text: str) -> str:
    tokens, window = figures.count("kv_tokens"), figures.count("max_model_len")
    pool = f"; the pool holds {tokens} tokens, the window is {window}" if tokens and window else ""
    return f"requests wait and none runs: what they need does not fit the KV cache{pool}"


def _memlock(figures: Figures, text: str) -> str:
    missing = figures.size("ple_unlocked_bytes")
    return (
        f"{missing} of weights could not be locked in host memory"
        if missing
        else f"a host limit was hit: {quote(text)}"
    )


def _single(figures: Figures, text: str) -> str:
    tried, free = figures.size("tried_alloc_bytes"), figures.size("free_bytes")
    if not tried:
        return f"one allocation is larger than the driver allows: {quote(text)}"
    room = f" although {free} was free" if free else ""
    return f"one allocation of {tried} failed{room}: the driver limits the size of a single allocation"


def limits_of(failure_class: str, figures: Figures) -> dict[tuple[str, str], str]:
    """How far to turn a lever, by its name and direction, where the figures say so."""
    limits: dict[tuple[str, str], str] = {}
    free, total = figures.number("free_bytes"), figures.number("total_bytes")
    if failure_class == "kv_check_short":
        window = figures.count("estimated_max_model_len") or figures.count("kv_tokens")
        need = figures.size("kv_needed_bytes")
        limits["max_model_len", "lower"] = f"to at most {window}" if window else ""
        more = "more than" if need == figures.size("available_kv_bytes") else "at least"
        limits["kv_cache_memory_bytes", "raise"] = f"to {more} {need}" if need else ""
    elif failure_class == "startup_free_below_request" and free and total:
        limits["gpu_memory_utilization", "lower"] = f"to at most {most_utilization(free, total):g}"
    elif failure_class == "max_num_seqs_exceeds_state" and figures.count("state_blocks"):
        limits["max_num_seqs", "lower"] = f"to at most {figures.count('state_blocks')}"
    elif failure_class == "compile_hbm_exceeded":
        peak, limit = figures.number("peak_hbm_bytes"), figures.number("hbm_limit_bytes")
        if peak is not None and limit is not None:
            short = f"by at least {format_size(peak - limit)}"
            limits["VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise"] = short
    return {lever: limit for lever, limit in limits.items() if limit}


def most_utilization(free_bytes: float, total_bytes: float) -> float:
    """The largest utilization with three decimals that start-up accepts: free over total, rounded down."""
    return int(1000 * free_bytes / total_bytes) / 1000


_SENTENCES: Final[dict[str, Callable[[Figures, str], str]]] = {
    "kv_check_short": _kv_check,
    "kv_reserve_underpriced": _underpriced,
    "startup_free_below_request": _startup,
    "foreign_process_memory": _foreign,
    "device_oom": _oom("", "; no line says what the engine was doing"),
    "weights_oom": _oom("while the weights were loaded"),
    "profile_oom": _profile,
    "kv_alloc_oom": _oom("while the KV cache was allocated"),
    "graph_capture_oom": _oom("while graphs were captured"),
    "warmup_oom": _oom("in warm-up"),
    "request_oom": _oom("while serving a request"),
    "runtime_hbm_oom": _oom("on the Neuron device"),
    "single_alloc_limit": _single,
    "min_kv_budget": _min_kv,
    "max_num_seqs_exceeds_state": _state_blocks,
    "workspace_locked": _workspace,
    "compile_hbm_exceeded": _compile_hbm,
    "profile_disturbed": _disturbed,
    "request_starved": _starved,
    "host_memory_limit": _memlock,
}

_PLAIN: Final[dict[str, str]] = {
    "argument_rejected": "the engine rejected its arguments",
    "command_not_found": "the command was not found",
    "install_broken": "the installation is broken",
    "model_not_found": "the model was not found",
    "plan_refused": "the expert plan was refused",
    "parallelism_refused": "the parallel layout was refused",
    "port_in_use": "the port is in use",
    "devices_busy": "the devices are held by another process",
    "device_stats_unusable": "the device reported memory figures that cannot be used",
    "device_missing": "no device was found",
    "device_fault": "the device failed",
    "device_resource_exhausted": "a device resource other than memory ran out",
    "host_oom_killed": "the host killed a process of the engine for want of host memory",
    "host_memory_short": "host memory ran out",
    "disk_full": "a disk is full",
    "kv_budget_nonpositive": "nothing is left for the KV cache",
    "compile_failed": "the compiler failed",
    "compile_desync": "ranks lost each other while compiling",
    "compile_cache_miss": "a program is missing from the compile cache",
    "program_load_failed": "a compiled program could not be loaded",
    "token_pool_full": "the KV cache has no room for the tokens of a batch",
    "lnc_mismatch": "the program was compiled for another logical core configuration",
    "profiler_reserve": "device profiling reserves memory",
    "engine_killed": "a process of the engine was ended from outside or died without a word",
    "engine_hung": "a worker of the engine did not answer in time",
    "ready_timeout": "the engine did not become ready in time",
    "kernel_fault": "a kernel failed; this is no lack of memory",
    "engine_exception": "the engine raised an exception",
    "unexplained": "the engine reports a failure and the log does not say of what",
}
