"""How sure a finding is: what the same boot may differ by, and the value that leaves room for it."""

from __future__ import annotations

from typing import Final, NamedTuple

from pytest_kvbudget.archive import AnyFinding
from pytest_kvbudget.records import SweepRecord
from pytest_kvbudget.report.numbers import size
from pytest_kvbudget.report.searched import track_of
from pytest_kvbudget.search.noise import origin

_BETWEEN: Final = {"archive": "repeated boots in the archive", "residuals": "this search's own boots"}


class Deploy(NamedTuple):
    """What may be promised day after day."""

    bound: str
    """``"at most"`` or ``"at least"``; empty where no value is safe."""
    value: str
    why: str

    @property
    def text(self) -> str:
        """``"at most 237,568 tokens"``."""
        return f"{self.bound} {self.value}".lstrip()


def noise(record: AnyFinding, what: str = "one sigma") -> str | None:
    """``"one sigma is 12.00 MiB, assumed, not measured"``; ``None`` where boots were taken for exact."""
    found = record.finding
    if found.sigma_bytes is None:
        return None
    source = found.sigma_source
    if not found.sigma_bytes and source in _BETWEEN:
        return f"none seen between {_BETWEEN[source]}"
    return f"{what} is {size(found.sigma_bytes)}{'' if source is None else f', {origin(found.sigma_bytes, source)}'}"


def deploy(record: AnyFinding) -> Deploy | None:
    """The value that is three sigma away from a proven edge, by arithmetic; ``None`` where none is known."""
    found, track = record.finding, track_of(record)
    if found.deploy_value is None or found.value is None or not found.proven:
        return None
    most = track.goal == "most"
    far = record.finding.short_at if isinstance(record, SweepRecord) else None
    if far is not None and (found.deploy_value <= far if most else found.deploy_value >= far):
        return Deploy("", "no value", "what passes is narrower than three sigma, so one edge or the other is too near")
    words = f"three sigma {'below' if most else 'above'} the {track.best} that passed"
    if found.deploy_value == found.value:
        words = f"noise does not move the {track.best} that passed"
    outside = found.deploy_value < track.low if most else found.deploy_value > track.high
    if outside:
        words += "; beyond what was asked for"
    elif found.deploy_value != found.value:
        words += "; arithmetic, not a boot"
    return Deploy("at most" if most else "at least", track.beyond(found.deploy_value), words)
