"""How fast logs are read, against ``grep -aoE`` with the audit pattern: prints one ratio per kind of log.

``python -m tests.benchmarks.log_reading [--megabytes 200]``. Nothing here is a test: the numbers are of one run on one
host, processor time of both programs reading the same file from the page cache, the best of three.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from pytest_kvbudget.ledger.reader import LedgerReader

AUDIT: Final = (
    r"(budget \(total x util\) +[0-9.]+|expert cache space +[0-9.]+ GiB +[0-9,]+ slots|"
    r"Estimated CUDA graph memory.{0,80}|Graph capturing finished.{0,40}|GPU KV cache size.{0,90})"
)
"""What the source document greps a journal for (its section 7)."""
MEGABYTE: Final = 1_000_000
CHUNK_BYTES: Final = 1 << 20
WORDS: Final = (
    "memory", "error", "the model", "GiB", "capacity", "tokens", "a pool", "took", "Error handling", "why", "write",
    "a story", "Running", "JSON", "def main():", "please", "summarise", "Waiting", "File", "exit", "kernel", "a table",
    "translate", "into", "quantum", "loop", "Zurich", "list", "graph", "server",
)  # fmt: skip
BOOTS: Final = Path(__file__).parents[1] / "ledger" / "data" / "boots"


def serving(number: int) -> str:
    """Ten seconds of an engine that serves: its statistics and what clients asked."""
    stamp = f"10-03 {number // 360 % 24:02}:{number // 6 % 60:02}:{number % 6}0"
    port = 30_000 + number * 7919 % 30_000
    return (
        f"(APIServer pid=1) INFO {stamp} [loggers.py:257] Engine 000: Avg prompt throughput: "
        f"{number % 977}.{number % 10} tokens/s, Avg generation throughput: {number % 313}.{number % 7} tokens/s, "
        f"Running: {1 + number % 3} reqs, "
        f"Waiting: {number % 2} reqs, GPU KV cache usage: {number % 61}.{number % 10}%, Prefix cache hit rate: "
        f"{number % 89}.{number % 9}%\n"
        + "".join(
            f'(APIServer pid=1) INFO:     192.0.2.{number % 250}:{port + extra} - "POST /v1/chat/completions HTTP/1.1" '
            "200 OK\n"
            for extra in range(3)
        )
        + f'(APIServer pid=1) INFO:     192.0.2.9:{port} - "GET /metrics HTTP/1.1" 200 OK\n'
    )


def requests(number: int) -> str:
    """Request logging on: the prompts of clients are in the log, and say what people say."""
    prompt = " ".join(
        f"{WORDS[(number * step + number // len(WORDS)) * 7919 % 1009 % len(WORDS)]} {number * step % 1009}"
        for step in (1, 2, 3, 5, 7, 11, 13, 17)
    )
    return (
        f"(APIServer pid=1) INFO 10-03 10:{number // 60 % 60:02}:{number % 60:02} [logger.py:43] Received request "
        f"chatcmpl-{number * 2654435761 % 2**64:016x}: prompt: '{prompt}', params: SamplingParams(n=1, "
        f"temperature=0.{number % 9}, max_tokens={number % 4096}), lora_request: None.\n"
    )


def progress(number: int, speaker: str = "") -> str:
    """Progress bars, redrawn with carriage returns."""
    return "".join(
        f"{speaker}Capturing CUDA graphs (mixed prefill-decode, PIECEWISE): {step:3}%|{'#' * (step // 10):10}| {step}"
        f"/100 [00:{number % 60:02}<00:{step % 60:02},  2.{step % 10}it/s]\r"
        for step in range(0, 100, 4)
    ) + ("\n" if number % 8 == 7 else "")


def workers(number: int) -> str:
    """Progress bars of two ranks: digits tell who draws."""
    return progress(number, f"(Worker_TP{number % 2} pid={231 + number % 2}) ")


def journal(number: int) -> str:
    """A crash loop in a journal: whole boots that are refused, one after the other."""
    boot = (BOOTS / "b1_kv_too_small.log").read_text()
    stamp = f"Oct 03 {number // 30 % 24:02}:{number * 2 % 60:02}:05 host podman[9]: "
    for pid in ("9605", "9665", "9749"):
        boot = boot.replace(f"pid={pid}", f"pid={int(pid) + 10_000 + 200 * (number % 400)}")
    return "".join(f"{stamp}{line}\n" for line in boot.splitlines())


KINDS: Final[dict[str, Callable[[int], str]]] = {
    "serving": serving,
    "requests": requests,
    "progress bars": progress,
    "bars of ranks": workers,
    "crash loop": journal,
}


def _texts(make: Callable[[int], str], size: int) -> Iterator[bytes]:
    written = number = 0
    while written < size:
        text = make(number).encode()
        yield text
        written, number = written + len(text), number + 1


def build(path: Path, make: Callable[[int], str], size: int) -> None:
    """A log of at least ``size`` bytes: one boot that serves, then one kind of lines."""
    with path.open("wb") as file:
        file.write((BOOTS / "h1_maxlen_auto.log").read_bytes().partition(b"[shutdown]")[0] + b"\n")
        for text in _texts(make, size):
            file.write(text)


def _grep(grep: str, path: Path) -> float:
    begun = _children()
    subprocess.run([grep, "-aoE", AUDIT, str(path)], stdout=subprocess.DEVNULL, check=False)
    return _children() - begun


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _ours(path: Path) -> tuple[float, int]:
    reader = LedgerReader()
    begun = time.process_time()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            reader.feed(chunk)
    reader.close()
    reader.ledger()
    return time.process_time() - begun, reader.lines


def main() -> int:
    """Build, read, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200, help="size of each log (default: 200)")
    parser.add_argument("--kind", choices=[*KINDS], help="only this kind of log")
    options = parser.parse_args()
    grep = shutil.which("grep")
    if grep is None:
        sys.stderr.write("grep is not installed; there is nothing to compare with\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        for name, make in KINDS.items():
            if options.kind not in {None, name}:
                continue
            path = Path(folder) / "engine.log"
            build(path, make, options.megabytes * MEGABYTE)
            _grep(grep, path)
            theirs = min(_grep(grep, path) for _ in range(3))
            ours, lines = min(_ours(path) for _ in range(3))
            sys.stdout.write(
                f"{name:14} {path.stat().st_size / MEGABYTE:6.0f} MB {lines:10,} lines   grep {theirs:6.2f} s   "
                f"reader {ours:6.2f} s   ratio {ours / theirs:5.2f}\n"
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
