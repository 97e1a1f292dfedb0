"""How failures read: exception texts, tracebacks with vLLM 0.32's frames, and torch's out-of-memory message."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pytest_kvbudget.mock.frames import FRAMES
from pytest_kvbudget.mock.process import Log, raw


class Failure(Exception):  # noqa: N818 - stands for an engine's exception of any name
    """An exception of the simulated engine.

    Args:
        kind: qualified class name as a traceback shows it.
        text: its message.
        frames: names in ``FRAMES``, innermost last, beginning inside the worker where it was raised in one.
        cause: what it was raised from.
        notes: what was added to it later (PEP 678).
    """

    def __init__(
        self,
        kind: str,
        text: str,
        frames: tuple[str, ...],
        cause: Failure | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.frames = frames
        self.cause = cause
        self.notes = notes

    def traceback(self, outer: tuple[str, ...] = ()) -> str:
        """The whole traceback, with the frames that led to the raising function before its own."""
        before = ""
        if self.cause is not None:
            chained = "The above exception was the direct cause of the following exception:"
            before = f"{self.cause.traceback(outer)}\n\n{chained}\n\n"
        lines = ["Traceback (most recent call last):"]
        for name in (*outer, *self.frames):
            path, number, function, source = FRAMES[name]
            lines += [f'  File "{path}", line {number}, in {function}', f"    {source}"]
            if not source.startswith("raise"):
                lines.append(f"    {'^' * len(source)}")
        return before + "\n".join([*lines, f"{self.kind}: {self.text}", *self.notes])

    def message(self) -> dict[str, object]:
        """For a channel: what an executor learns of a worker's exception."""
        return {"kind": self.kind, "text": self.text}


def log_exception(log: Log, where: str, title: str, failure: Failure, outer: tuple[str, ...]) -> None:
    """``logger.exception``: a record with the traceback below it."""
    log.fail(where, f"{title}\n{failure.traceback(outer)}")


def uncaught(
    failure: Failure, outer: tuple[str, ...], process: str | None = None, sink: Callable[[str], None] = raw
) -> None:
    """What Python prints for an exception that nobody caught, bare."""
    title = f"Process {process}:\n" if process else ""
    sink(f"{title}{failure.traceback(outer)}\n")


class Usage(msgspec.Struct):
    """Bytes that one process has on its card."""

    torch: int = 0
    private_pools: int = 0
    """Of ``torch``, in graphs."""
    non_torch: int = 0


def size(size_bytes: int) -> str:
    """A size as torch writes it."""
    if size_bytes <= 1024:
        return f"{size_bytes} bytes"
    for unit, factor in (("KiB", 2**10), ("MiB", 2**20)):
        if size_bytes <= factor * 1024:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes / 2**30:.2f} GiB"


def out_of_memory(
    *, hip: bool, index: int, asked_bytes: int, free_bytes: int, total_bytes: int, usage: Usage, frames: tuple[str, ...]
) -> Failure:
    """Torch's exception for an allocation that the card refused (``CUDACachingAllocator.cpp``)."""
    name = "HIP" if hip else "CUDA"
    in_use = size(usage.torch + usage.non_torch)
    process = "" if hip else f"Including non-PyTorch memory, this process has {in_use} memory in use. "
    pools = f"with {size(usage.private_pools)} allocated in private pools (e.g., {name} Graphs), "
    text = (
        f"{name} out of memory. Tried to allocate {size(asked_bytes)}. GPU {index} has a total capacity of"
        f" {size(total_bytes)} of which {size(free_bytes)} is free. {process}Of the allocated memory"
        f" {size(usage.torch)} is allocated by PyTorch, {pools if usage.private_pools else ''}and 0 bytes is reserved"
        " by PyTorch but unallocated. If reserved but unallocated memory is large try setting"
        f" PYTORCH_{name}_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory"
        " Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )
    return Failure("torch.OutOfMemoryError", text, frames)
