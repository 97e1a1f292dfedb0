"""The session header: what engines run on, where records go, and whether anything is simulated."""

from __future__ import annotations

from pytest_kvbudget.engine.backends.registry import backend_of
from pytest_kvbudget.plugin.settings import Settings


def header_lines(settings: Settings, run: str) -> list[str]:
    """Target, devices, engine, archive and configuration of a run, and when it stops to boot."""
    loaded = settings.loaded
    target = loaded.target
    slots = backend_of(loaded).slots(loaded, target.shape)
    devices = "; ".join(", ".join(slot) for slot in slots) or "none"
    simulated = ", SIMULATED: no number of this run is a measurement" if settings.simulated else ""
    config = settings.config_path or "none found, the built-in simulated target is used"
    lines = [
        f"kvbudget: target {loaded.name} (backend {target.backend}, launcher {target.launcher}, devices {devices})"
        f"{simulated}",
        f"kvbudget: configuration {config}",
        f"kvbudget: archive {settings.archive / run}",
    ]
    if settings.until is not None:
        lines.append(
            f"kvbudget: until {settings.until:%Y-%m-%d %H:%M} (local time): no boot of a search begins that would not "
            "be over by then"
        )
    return lines


def simulated_warning(settings: Settings) -> str:
    """The line that closes a run on a simulated target: a wrong folder in CI must not look like an approval."""
    found = "" if settings.config_path else "; no configuration was found, so the built-in target was used"
    return f"kvbudget: SIMULATED target {settings.loaded.name}: no number of this run is a measurement{found}"
