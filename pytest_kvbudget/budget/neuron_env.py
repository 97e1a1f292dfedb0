"""The environment variables of the Neuron budget, read and validated as the worker does, nonsense included.

What releases 0.21 and 0.24 do was read in source (facts, section 3). The rules of 2.33 for headroom are not public:
there a value is refused only where no rule could accept it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from pytest_kvbudget.budget.model import BudgetInputError, Refusal
from pytest_kvbudget.budget.neuron import (
    CAP_FRACTION,
    CAP_VARIABLE,
    HEADROOM_VARIABLE,
    LNC_VARIABLE,
    MINIMUM_KV_BYTES,
    MINIMUM_VARIABLE,
    Variant,
)
from pytest_kvbudget.units import GIB

CPU_MODE_VARIABLE: Final = "VLLM_NEURON_CPU_MODE"
CPU_COMPILE_VARIABLE: Final = "VLLM_NEURON_CPU_COMPILE"
PLATFORM_VARIABLE: Final = "NEURON_PLATFORM_TARGET_OVERRIDE"
_SOURCE: Final = "vLLM Neuron 0.21/0.24, environment of the worker"


class Knobs(msgspec.Struct, frozen=True, kw_only=True):
    """The budget's variables as the worker understands them."""

    cap_fraction: float = CAP_FRACTION
    minimum_bytes: int | None = MINIMUM_KV_BYTES
    """``None`` where the value disables the check."""
    headroom_bytes: int | None = None
    """``None`` where unset; an explicit zero is 0."""
    lnc: int | None = None
    platform: str | None = None
    cpu_mode: bool = False
    cpu_compile: bool = False
    refusals: tuple[Refusal, ...] = ()
    """Values that the worker raises on, at its first read."""
    warnings: tuple[str, ...] = ()
    """Values that it accepts and should not be given."""


class _Reader:
    """Collects what the worker would raise and what we would say."""

    def __init__(self, environ: Mapping[str, str], variant: Variant) -> None:
        self.environ = environ
        self.variant = variant
        self.refusals: list[Refusal] = []
        self.warnings: list[str] = []

    def refuse(self, name: str, raises: str, expected: str) -> None:
        self.refusals.append(
            Refusal(
                law="environment",
                sentence=f"{name} is {self.environ[name]!r}: the worker raises {raises}",
                advice=f"set {name} to {expected}, or unset it",
                source=_SOURCE,
            )
        )

    def number(self, name: str, expected: str) -> float | None:
        raw = self.environ.get(name)
        if raw is None:
            return None
        try:
            return float(raw)
        except ValueError as error:
            self.refuse(name, f"ValueError ({error})", expected)
            return None

    def flag(self, name: str) -> bool:
        raw = self.environ.get(name)
        if raw is None:
            return False
        try:
            value = bool(int(raw))
        except ValueError as error:
            self.refuse(name, f"ValueError ({error})", "0 or 1")
            return False
        if value and raw != "1":
            self.warnings.append(
                f"{name} is {raw!r}: the worker reads it as on, the platform's registration only as text '1'; write 1"
            )
        return value

    def cap_fraction(self) -> float:
        value = self.number(CAP_VARIABLE, "a fraction in (0, 1]")
        if value is None:
            return CAP_FRACTION
        if math.isnan(value):
            # NaN passes the engine's range check and fails where the cap is cut to an integer
            self.refuse(CAP_VARIABLE, "ValueError (cannot convert float NaN to integer)", "a fraction in (0, 1]")
        elif value <= 0 or value > 1:
            self.refuse(CAP_VARIABLE, f"RuntimeError (must be in (0, 1], got {value})", "a fraction in (0, 1]")
        else:
            return value
        return CAP_FRACTION

    def minimum_bytes(self) -> int | None:
        value = self.number(MINIMUM_VARIABLE, "GiB, above 0")
        if value is None:
            return MINIMUM_KV_BYTES
        if not value > 0:
            what = "disables the minimum-KV check"
            if value != 0:
                what += "; write 0 if that is meant"
            self.warnings.append(
                f"{MINIMUM_VARIABLE} is {self.environ[MINIMUM_VARIABLE]!r}: the engine accepts it and it {what}"
            )
            return None
        if math.isinf(value):
            self.refuse(MINIMUM_VARIABLE, "OverflowError (cannot convert float infinity to integer)", "GiB, above 0")
            return MINIMUM_KV_BYTES
        return int(value * GIB)

    def headroom_bytes(self) -> int | None:
        if HEADROOM_VARIABLE not in self.environ:
            return None
        raw = self.environ[HEADROOM_VARIABLE]
        if not self.variant.has_headroom:
            self.warnings.append(f"release {self.variant} does not read {HEADROOM_VARIABLE} ({raw!r})")
            return None
        value = self.number(HEADROOM_VARIABLE, "GiB, zero or more")
        if value is None:
            return None
        if not math.isfinite(value):
            self.refuse(HEADROOM_VARIABLE, "an error (not a finite number of GiB)", "GiB, zero or more")
            return None
        if value < 0:
            raise BudgetInputError(
                f"{HEADROOM_VARIABLE} is {raw!r}: what release 2.33 does with a negative headroom is not public, and "
                "as arithmetic it would promise memory that the core does not have; expected GiB, zero or more"
            )
        return int(value * GIB)

    def lnc(self) -> int | None:
        raw = self.environ.get(LNC_VARIABLE)
        if raw is None:
            return None
        if raw.strip() not in {"1", "2"}:
            self.refuse(LNC_VARIABLE, "an error", "1 or 2")
            return None
        return int(raw)


def read_knobs(environ: Mapping[str, str], variant: Variant = Variant.SDK_2_33) -> Knobs:
    """Read the budget's variables from an environment.

    Args:
        environ: the engine's environment.
        variant: the release whose rules apply.

    Raises:
        BudgetInputError: for a negative headroom, for which no rule is public.
    """
    reader = _Reader(environ, variant)
    headroom_bytes = reader.headroom_bytes()
    cap_refusals = len(reader.refusals)
    cap_fraction = reader.cap_fraction()
    if headroom_bytes is not None and len(reader.refusals) > cap_refusals:
        # lazily read: headroom bypasses the cap, so a bad cap is not known to stop the boot
        reader.warnings.append(reader.refusals.pop().sentence + ", unless headroom keeps it from being read")
    minimum_bytes = reader.minimum_bytes()
    cpu_mode, cpu_compile = reader.flag(CPU_MODE_VARIABLE), reader.flag(CPU_COMPILE_VARIABLE)
    if cpu_mode and cpu_compile:
        reader.refuse(CPU_MODE_VARIABLE, f"an error: not compatible with {CPU_COMPILE_VARIABLE}", "0")
    platform = environ.get(PLATFORM_VARIABLE)
    if cpu_compile and platform is None:
        reader.refuse(CPU_COMPILE_VARIABLE, f"an error: {PLATFORM_VARIABLE} is needed with it", "0")
    return Knobs(
        cap_fraction=cap_fraction,
        minimum_bytes=minimum_bytes,
        headroom_bytes=headroom_bytes,
        lnc=reader.lnc(),
        platform=platform,
        cpu_mode=cpu_mode,
        cpu_compile=cpu_compile,
        refusals=tuple(reader.refusals),
        warnings=tuple(reader.warnings),
    )


def lnc_warning(lnc: int, variant: Variant) -> str | None:
    """What to say about an LNC that a release is not known to run: 0.24 fixes LNC 2 in its own code."""
    if lnc != 1 or variant.divides_stack:
        return None
    return (
        f"{LNC_VARIABLE} is 1: release {variant} is written for LNC 2 and gives both logical cores of a stack the "
        "whole stack, so that their KV caches do not fit together (nrt_tensor_allocate status=4 at load)"
    )
