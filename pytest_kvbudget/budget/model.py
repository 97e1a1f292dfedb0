"""What every budget law speaks in: named terms that sum to what is left, and refusals with their law."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

import msgspec

from pytest_kvbudget.units import format_size
from pytest_kvbudget.verdict import Provenance


class BudgetInputError(ValueError):
    """A law was asked with a value that it is not defined for; the message names the value and what is accepted."""


class Reach(StrEnum):
    """Who can move a term."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    PARTLY = "partly"
    """A flag chooses between fixed values, or moves only a part."""
    IMAGE_EDIT = "image edit"
    """A constant inside the image: no deploy reaches it."""
    FIXED = "fixed"
    """The device, the checkpoint or the runtime decides."""


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One term of a plan."""

    name: str
    size_bytes: int
    """As the law states it; the role says which way it counts. Negative only where an engine measured it so."""
    role: Literal["gives", "takes"]
    reach: Reach
    how: str
    """The flag or variable that moves it, or why none does."""
    law: str
    """Document and section, or release, that the law was read from."""
    provenance: Provenance = Provenance.DERIVED

    @property
    def signed_bytes(self) -> int:
        """What the term adds to what is left."""
        return self.size_bytes if self.role == "gives" else -self.size_bytes


def gives(
    name: str, size_bytes: int, reach: Reach, how: str, *, law: str, provenance: Provenance = Provenance.DERIVED
) -> Term:
    """A term that adds to what is left; arguments as the fields of `Term`."""
    return Term(name=name, size_bytes=size_bytes, role="gives", reach=reach, how=how, law=law, provenance=provenance)


def takes(
    name: str, size_bytes: int, reach: Reach, how: str, *, law: str, provenance: Provenance = Provenance.DERIVED
) -> Term:
    """A term that takes from what is left; arguments as the fields of `Term`."""
    return Term(name=name, size_bytes=size_bytes, role="takes", reach=reach, how=how, law=law, provenance=provenance)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of one policy for one rank (or logical core). What is left is their sum and is never clamped."""

    policy: str
    """``neuron``, ``rdna4`` or ``vllm``."""
    variant: str
    """Which reading of the law: a release, or a named variant."""
    result: str
    """What the rest is used for: ``"KV cache"``, ``"expert cache"``."""
    terms: tuple[Term, ...]
    warnings: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    """Terms that take something and of which nobody said how much: what is left is at most the sum of the others."""

    @property
    def left_bytes(self) -> int:
        """Sum of the terms; negative when they do not fit. With unknown terms it is an upper bound."""
        return sum(term.signed_bytes for term in self.terms)

    @property
    def fits(self) -> bool:
        """Whether anything is left, or exactly nothing is missing."""
        return self.left_bytes >= 0

    @property
    def sentence(self) -> str:
        """What is left, in one line for people."""
        left_bytes = self.left_bytes
        if left_bytes < 0:
            return f"does not fit by {'at least ' if self.unknown else ''}{format_size(-left_bytes)}"
        return f"{'at most ' if self.unknown else ''}{format_size(left_bytes)} left for the {self.result}"

    def term(self, name: str) -> Term:
        """The term of that name.

        Raises:
            KeyError: the plan has no such term; the message lists those that it has.
        """
        for term in self.terms:
            if term.name == name:
                return term
        raise KeyError(f"no term {name!r}; the plan has {', '.join(term.name for term in self.terms)}")

    def document(self) -> dict[str, Any]:
        """The plan for JSON, with the derived figures in it."""
        return {**msgspec.to_builtins(self), "left_bytes": self.left_bytes, "fits": self.fits}


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A shape that is known not to boot, and by which law."""

    law: str
    """Name of the law: ``"minimum_kv"``, ``"utilization"``."""
    sentence: str
    """What was asked, what the law allows and by how much it misses, with numbers."""
    advice: str
    """What to turn and, where it is a trap, what not to turn."""
    source: str
    """Where the law was read."""
    numbers: dict[str, int | float] = {}
    """The figures of the sentence by name; sizes in bytes."""
