"""Whether a boot found what it compiles in a cache, and whether that cache is still there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from pytest_kvbudget.ledger.model import BootLedger
from pytest_kvbudget.records import AttemptRecord

COMPILED: Final = "graphs_compiled"
"""Something was compiled, whatever else was loaded."""
LOADED: Final = "graphs_from_cache"
UNREADABLE: Final = "compile_cache_unreadable"
"""What an earlier boot compiled is there and cannot be loaded: vLLM 0.32 on CPU says so on every boot but the first."""
COMPILE_DONE: Final = "compile_done"
"""The compile phase is over. The Neuron plugin names every program that it compiles before it says so."""
CACHE_FOLDER: Final = "compile_cache_folder"
SIMULATED_TREE: Final = "KVBUDGET_MOCK_SYSFS"


def warm_of(ledger: BootLedger) -> bool | None:
    """Everything that the boot compiles came from its cache (``True``), or some of it was compiled (``False``).

    Returns:
        ``None`` where nothing was compiled (eager mode, a boot that ended before), the log does not say, or compiled
        graphs are not kept or not loaded again: then every boot is the same.
    """
    on_neuron = ledger.family == "neuron"
    if ledger.get(UNREADABLE):
        return None
    if ledger.get(COMPILED):
        kept = on_neuron or ledger.get(CACHE_FOLDER) is not None or ledger.get(LOADED)
        return False if kept else None
    if ledger.get(LOADED) or (on_neuron and ledger.get(COMPILE_DONE)):
        return True
    return None


def cache_stands(record: AttemptRecord, environ: Mapping[str, str]) -> bool:
    """The compile cache that a boot was warm from is there and not empty: a boot would be as warm again.

    Args:
        record: of the boot. Where its log names the cache's folder, that one counts.
        environ: the environment that the boot would be started with; says where engines keep their caches.

    Returns:
        ``False`` too for a cache that cannot be looked at from here, as one in an object store.
    """
    named = None if record.ledger is None else record.ledger.get(CACHE_FOLDER)
    folders = [Path(named)] if isinstance(named, str) else _cache_folders(environ)
    return any(_holds_files(folder) for folder in folders)


def _cache_folders(environ: Mapping[str, str]) -> Iterator[Path]:
    """Where engines keep compiled programs: vLLM and its Neuron plugin, torch, the older Neuron compiler."""
    if SIMULATED_TREE in environ:
        yield Path(environ[SIMULATED_TREE], "mock", "compile_cache")
        return
    home = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/"), ".cache")
    root = Path(environ.get("VLLM_CACHE_ROOT") or Path(home, "vllm"))
    yield from (root / "torch_compile_cache", root / "torch_aot_compile", root / "neuron" / "compile_cache")
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "NEURON_COMPILE_CACHE_URL"):
        place = environ.get(variable, "").removeprefix("file://")
        if place and "://" not in place:
            yield Path(place)


def _holds_files(folder: Path) -> bool:
    try:
        return any(path.is_file() for path in folder.rglob("*"))
    except OSError:
        return False
