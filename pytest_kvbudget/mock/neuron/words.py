"""How vLLM Neuron, the Neuron runtime and the Neuron compiler write (facts, sections 1 and 2)."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Final

from pytest_kvbudget.mock.driver import NEURON_DEVICES
from pytest_kvbudget.mock.process import Log

_COLUMNS: Final = (
    ("Model", "Code", "model_code"),
    ("Model", "Constants", "constants"),
    ("", "Tensors", "tensors"),
    ("Shared", "Scratchpad", "model_shared_scratchpad"),
    ("", "Runtime", "runtime_memory"),
    ("DMA Rings", "IO", "dma_rings"),
    ("", "Collectives", "collectives"),
)


class NeuronLog:
    """A process' log in the plugin's format, and the runtime's lines in theirs."""

    def __init__(self, log: Log, *, debug: bool) -> None:
        self._log = log
        self._debug = debug

    def say(self, where: str, text: str, level: str = "INFO") -> None:
        """A record of the plugin; every line of it carries the process' prefix."""
        if level == "DEBUG" and not self._debug:
            return
        now = time.time()
        stamp = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))},{int(now * 1000) % 1000:03d}"
        first, *rest = text.split("\n")
        lines = [f"{stamp} - {level} - {where} - {first}", *rest]
        self._log.raw("".join(f"{self._log.prefix} {line}\n" for line in lines))

    def debug(self, where: str, text: str) -> None:
        """A record that only ``VLLM_NEURON_LOG_LEVEL=DEBUG`` shows."""
        self.say(where, text, "DEBUG")

    def runtime(self, component: str, text: str) -> None:
        """An error of the runtime, which is C++ and knows no prefix; ``text`` may have further lines, bare."""
        now = time.time()
        stamp = f"{time.strftime('%Y-%b-%d %H:%M:%S', time.localtime(now))}.{int(now * 1e6) % 10**6:06d}"
        where = f"{self._log.pid}:{threading.get_native_id()}"
        self._log.raw(f"{stamp} {where} ERROR  {component:<43} {text}\n")

    def compiler(self, text: str) -> None:
        """A line of neuronx-cc."""
        self._log.raw(f"[ERROR] {text}\n")


def runtime_size(size_bytes: int) -> str:
    """A size as the runtime writes it: binary units, three decimals."""
    for unit, factor in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.3f}{unit}"
    return f"{size_bytes:.3f}B"


def compiler_size(size_bytes: int) -> str:
    """A size as the compiler writes it: the same units, two decimals."""
    for unit, factor in (("GB", 2**30), ("MB", 2**20)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.2f}{unit}"
    return f"{size_bytes:.2f}B"


def locate(core: int, platform: str) -> tuple[int, int]:
    """The Neuron device of a physical core, and its number there."""
    return divmod(core, NEURON_DEVICES[platform][1])


def memory_table(kinds: Mapping[tuple[int, str], int], cores: range, platform: str) -> str:
    """The runtime's table of one HBM stack: a row for all, one for each physical core."""
    above = ("", *(column[0] for column in _COLUMNS)), ("TOTAL", *(column[1] for column in _COLUMNS))
    heads = [" " * 14 + "|" + "|".join(f"{cell:^10}" for cell in cells) + "|" for cells in above]
    device, first = locate(cores.start, platform)
    stack = first // len(cores)
    rows = [_row(f"ND {device} HBM {stack}", kinds, cores)]
    rows += [_row(f"\\_NC {locate(core, platform)[1]}", kinds, range(core, core + 1)) for core in cores]
    return "\n".join([*heads, *rows])


def _row(name: str, kinds: Mapping[tuple[int, str], int], cores: range) -> str:
    held: dict[str, int] = {}
    for (core, kind), size_bytes in kinds.items():
        if core in cores:
            held[kind] = held.get(kind, 0) + size_bytes
    cells = [sum(held.values()), *(held.get(kind, 0) for *_, kind in _COLUMNS)]
    return f"{name:<14}|" + "|".join(f"{runtime_size(cell):^10}" for cell in cells) + "|"


def peak_text(
    *, older: bool, arch: str, peak_bytes: int, limit_bytes: int, tensors_bytes: int, scratch_bytes: int
) -> str:
    """The compiler's refusal of a program, in the words of ``NCC_EOOM001`` or ``NCC_EOOM002``."""
    peak, limit, tensors, scratch = map(compiler_size, (peak_bytes, limit_bytes, tensors_bytes, scratch_bytes))
    head = f"Maximum peak HBM usage of {peak} exceeds HBM limit of {limit} for {arch}. This consists of"
    if older:
        return (
            f"[NCC_EOOM001] {head} {tensors} I/O tensors, 0.00B intermediate tensors, and {scratch} internal"
            " (scratchpad) allocations"
        )
    return (
        f"[NCC_EOOM002] {head} 0.00B model constants, {tensors} I/O tensors, {scratch} internal (scratchpad) tensors,"
        " 0.00B DMA ring I/O, and 0.00B DMA ring spills"
    )
