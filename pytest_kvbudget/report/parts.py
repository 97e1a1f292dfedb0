"""Pieces that the pages share: header, simulated band, definition lists, provenance of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from pytest_kvbudget.ledger.model import BootLedger
from pytest_kvbudget.records import RunInfo, TargetInfo
from pytest_kvbudget.report.deciding import Figure
from pytest_kvbudget.report.elements import Child, Element, element

SIMULATED_SENTENCE = "Simulated device. No number on this page was measured on hardware."


def simulated_band(target: TargetInfo) -> Element | None:
    """The band across the top of everything that a simulated device said; ``None`` for real ones."""
    if not target.simulated:
        return None
    return element(
        "div", element("b", "SIMULATED"), element("span", SIMULATED_SENTENCE), class_="simulated", role="note"
    )


def simulated_badge(target: TargetInfo) -> Element | None:
    """The same next to a number or a verdict."""
    return element("span", "simulated", class_="badge-simulated") if target.simulated else None


def section(title: str, *children: Child, id_: str | None = None, class_: str | None = None) -> Element:
    """A section with its heading."""
    return element("section", element("h2", title), *children, id=id_, class_=class_)


def figures_list(figures: Iterable[Figure]) -> Element | None:
    """Deciding numbers in a row, large."""
    entries = [element("div", element("dt", figure.name), element("dd", figure.text)) for figure in figures]
    return element("dl", entries, class_="figures") if entries else None


def definitions(pairs: Iterable[tuple[str, Child]]) -> Element:
    """Names and values in two columns."""
    entries = [element("div", element("dt", name), element("dd", value)) for name, value in pairs]
    return element("dl", entries, class_="pairs")


_ENGINES: Final = {
    "vllm": "vLLM",
    "rdna4": "vLLM, RDNA4 fork",
    "neuron": "vLLM on Neuron",
    "sglang": "SGLang",
    "llamacpp": "llama.cpp",
}


def engine_name(ledger: BootLedger | None) -> str | None:
    """The engine as its log names it; ``None`` where no line does."""
    if ledger is None or ledger.family == "unknown":
        return None
    return " ".join(filter(None, (_ENGINES.get(ledger.family, ledger.family), ledger.engine_version)))


def target_pairs(
    target: TargetInfo, engine: str | None, devices: Iterable[str] | None = None
) -> list[tuple[str, Child]]:
    """What was deployed on what; ``devices`` are those that boots really had, where there were several boots."""
    return [
        ("target", [element("b", target.name), " ", simulated_badge(target)]),
        ("engine", engine or "not stated"),
        ("backend", f"{target.backend}, launcher {target.launcher}"),
        ("devices", ", ".join(target.devices if devices is None else devices) or "not stated"),
        ("configured in", target.origin),
    ]


def run_pairs(run: RunInfo) -> list[tuple[str, Child]]:
    """The run and the software that made the record."""
    worker = f", worker {run.worker}" if run.worker else ""
    software = [f"kvbudget {run.plugin_version}", f"Python {run.python_version}"]
    if run.pytest_version:
        software.append(f"pytest {run.pytest_version}")
    return [("run", run.run), ("host", run.host + worker), ("software", ", ".join(software))]


def code_block(lines: Sequence[str]) -> Element:
    """Lines to be copied."""
    return element("pre", element("code", "\n".join(lines)), class_="code", tabindex=0)
