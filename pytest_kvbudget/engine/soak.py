"""Mixed traffic for a while, and whether device memory grows under it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from pytest_kvbudget.engine.client import ClientError, EngineClient
from pytest_kvbudget.verdict import Verdict

PARTS: Final = 10
"""The soak is cut into so many parts of equal length; the high-water of each is one point of the trend."""
STUDENT_95: Final = 2.306
"""Two-sided 95 % of Student's t for the 8 degrees of freedom of a line through 10 points."""
_HOUR_S: Final = 3600.0
STEP_BYTES: Final = 2 * 2**20
"""Smallest step by which an engine takes device memory: torch's caching allocator takes segments of 2 MiB at least
(``kSmallBuffer`` in ``c10/core/AllocatorConfig.h``). A leak that has not filled one yet cannot be seen."""
_LOOK_S: Final = 0.1
_TOKEN_IDS: Final = (10, 250)


class SoakSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How much traffic. It ends at the first of ``requests`` and ``seconds`` that is given."""

    requests: int | None = None
    seconds: float | None = None
    concurrency: int = 4
    request_s: float = 600.0
    """For one request. What is under way when the time is up is waited for so long."""


class GrowthTrend(msgspec.Struct, frozen=True, kw_only=True):
    """A line through the high-water of the parts of a soak, for one rank, in bytes per hour."""

    rank: int
    bytes_per_hour: float
    plus_minus: float
    """Half of the 95 % confidence interval."""

    @property
    def least(self) -> float:
        """Lower end of the interval."""
        return self.bytes_per_hour - self.plus_minus

    @property
    def most(self) -> float:
        """Upper end of the interval."""
        return self.bytes_per_hour + self.plus_minus


class SoakResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a soak showed."""

    sent: int
    failed: int
    seconds: float
    message: str = ""
    """What the first failed request was told."""
    trends: tuple[GrowthTrend | None, ...] = ()
    """One per rank; ``None`` where the memory of a part was not seen."""
    least_host_free_bytes: int | None = None
    """Least room in the engine's memory control group meanwhile; ``None`` where it has no limit or cannot be read."""
    verdict: Verdict | None = None
    """Of the soak alone, gates on memory included; ``None`` until it is judged."""
    sentence: str = ""
    """The verdict in words."""

    @property
    def resolution(self) -> float:
        """Bytes per hour below which no growth can be told from none in so short a time."""
        return STEP_BYTES * _HOUR_S / self.seconds if self.seconds > 0 else float("inf")


def trend(rank: int, peaks_bytes: Sequence[int | None], part_s: float) -> GrowthTrend | None:
    """The line of least squares through the parts' high-water, and how sure it is; ``None`` where a part was not seen.

    Raises:
        ValueError: for another number of parts than `PARTS`, or a length that is not positive.
    """
    if len(peaks_bytes) != PARTS or part_s <= 0:
        raise ValueError(f"{len(peaks_bytes)} parts of {part_s} s; expected {PARTS} of a positive length")
    peaks = [peak for peak in peaks_bytes if peak is not None]
    if len(peaks) != PARTS:
        return None
    hours = [(index + 0.5) * part_s / _HOUR_S for index in range(PARTS)]
    middle_x, middle_y = sum(hours) / PARTS, sum(peaks) / PARTS
    spread = sum((x - middle_x) ** 2 for x in hours)
    slope = sum((x - middle_x) * (y - middle_y) for x, y in zip(hours, peaks, strict=True)) / spread
    left = sum((y - middle_y - slope * (x - middle_x)) ** 2 for x, y in zip(hours, peaks, strict=True))
    error = (left / (PARTS - 2) / spread) ** 0.5
    return GrowthTrend(rank=rank, bytes_per_hour=slope, plus_minus=STUDENT_95 * error)


class Soak:
    """Sends mixed requests from several threads until enough is done, or the engine dies."""

    def __init__(
        self,
        client: EngineClient,
        spec: SoakSpec,
        *,
        window: int,
        alive: Callable[[], bool],
        host_free: Callable[[], int | None] = lambda: None,
        seed: int = 0,
    ) -> None:
        if spec.requests is None and spec.seconds is None:
            raise ValueError("a soak needs requests or seconds to end")
        self._client, self._spec, self._window, self._alive = client, spec, window, alive
        self._host_free = host_free
        self._least_host_free: int | None = None
        self._seed = seed
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._asked = self._sent = self._failed = 0
        self._message = ""

    def run(self) -> SoakResult:
        """Send them; returns without trends, which are for whoever has the memory trace.

        Ends with the first request that fails: what comes after it could not make a verdict any more.
        """
        begun = time.monotonic()
        threads = [
            threading.Thread(target=self._worker, args=(number,), name="kvbudget-soak", daemon=True)
            for number in range(self._spec.concurrency)
        ]
        for thread in threads:
            thread.start()
        limit = self._spec.seconds
        while running := [thread for thread in threads if thread.is_alive()]:
            if limit is not None and time.monotonic() - begun >= limit:
                self._over.set()  # what is under way is still waited for: an engine that went silent answers nothing
            if not self._alive():
                self._over.set()
                break
            self._look_at_host()
            running[0].join(_LOOK_S)
        with self._lock:
            return SoakResult(
                sent=self._sent,
                failed=self._failed,
                seconds=round(time.monotonic() - begun, 3),
                message=self._message,
                least_host_free_bytes=self._least_host_free,
            )

    def _look_at_host(self) -> None:
        free = self._host_free()
        if free is not None:
            self._least_host_free = min(free, free if self._least_host_free is None else self._least_host_free)

    def _worker(self, number: int) -> None:
        chance = random.Random(self._seed * 1000 + number)  # noqa: S311 - traffic, not secrets
        while not self._over.is_set() and self._take():
            prompt_tokens = self._prompt_tokens(chance)
            answer = min(chance.choice((8, 32, 128)), self._window - prompt_tokens)
            prompt = [chance.randrange(*_TOKEN_IDS) for _ in range(prompt_tokens)]
            try:
                self._client.complete(prompt, max(1, answer), timeout_s=self._spec.request_s, ignore_eos=True)
            except ClientError as error:
                self._note(str(error))
            else:
                self._note("")

    def _prompt_tokens(self, chance: random.Random) -> int:
        """Mostly short, some of a tenth of the window, few of most of it."""
        largest = max(1, self._window - 129)
        share = chance.choices((0.001, 0.1, 0.9), weights=(8, 3, 1))[0]
        return max(1, min(largest, int(share * self._window)))

    def _take(self) -> bool:
        with self._lock:
            if self._spec.requests is not None and self._asked >= self._spec.requests:
                return False
            self._asked += 1
            return True

    def _note(self, problem: str) -> None:
        with self._lock:
            self._sent += 1
            if problem:
                self._failed += 1
                self._message = self._message or problem
                self._over.set()
