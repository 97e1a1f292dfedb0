"""A line of a boot that reports a failure."""

from __future__ import annotations

import msgspec

from pytest_kvbudget.ledger.facts import Process
from pytest_kvbudget.ledger.grammar.model import Failure, Row
from pytest_kvbudget.ledger.model import Evidence
from pytest_kvbudget.ledger.notation import Reading
from pytest_kvbudget.verdict import Phase


class Seen(msgspec.Struct, kw_only=True):
    """A line that reports a failure."""

    failure: Failure
    row: Row | None
    evidence: Evidence
    process: Process
    phase: Phase
    """Phase of the process when the line came: the traceback's, else that of its last milestone."""
    framed: bool
    served: bool
    """The engine had served before the line."""
    readings: dict[str, Reading]
    places: dict[str, Evidence] = {}
    """Where a reading stands that is not in the line of ``evidence``: the sentence was wrapped."""
    survived: bool = False
    """The same process went on to a later phase, or the engine served on."""
