"""What is installed for a Python interpreter, read from its folders: nothing of it is imported or run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

_VERSIONED: Final = re.compile(r"python(3\.\d+)")
_SITES: Final = ("site-packages", "dist-packages")
_NO_PACKAGES: Final = frozenset({"test", "tests", "docs", "examples", "benchmarks"})
_DIGITS: Final = 16


class Installed:
    """Folders from which an interpreter imports beside its own library, in its order.

    Args:
        python: the interpreter as it is called; a virtual environment is told by the ``pyvenv.cfg`` beside it.
        environ: the environment that it is started with.
        cwd: the folder that it is started in.
        first: the folder that comes before all others: the script's own, or ``cwd`` for ``-m``.
    """

    def __init__(self, python: Path, environ: Mapping[str, str], *, cwd: str, first: Path) -> None:
        named = [Path(cwd, part) for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
        sites = list(_sites(python, environ))
        self.roots = tuple(dict.fromkeys([first, *named, *sites, *(path for site in sites for path in _added(site))]))

    def package(self, name: str) -> Path | None:
        """Folder or file of a top-level package or module; ``None`` where none is found."""
        spaces = []
        for root in (*self.roots, *self._editable()):
            folder, module = root / name, root / f"{name}.py"
            if (folder / "__init__.py").is_file():
                return folder
            if module.is_file():
                return module
            if folder.is_dir():
                spaces.append(folder)  # counts only where no root has a package of that name
        return spaces[0] if spaces else None

    def version(self, package: str) -> str | None:
        """Version of the distribution that has a package's name; ``None`` where no such is installed."""
        wanted = _normal(package)
        return next((version for name, version in self._names() if _normal(name) == wanted), None)

    def digest(self) -> str:
        """Digest of every distribution's name and version, and of the files of packages that are worked on."""
        names = sorted(set(self._names()))
        worked_on = (
            package.parent
            for source in self._editable()
            for package in sorted(source.glob("*/__init__.py"))
            if package.parent.name not in _NO_PACKAGES
        )
        return digest(names, [tree_digest(package) for package in worked_on])

    def _names(self) -> Iterator[tuple[str, str]]:
        for folder in self._folders():
            name, _, version = folder.stem.partition("-")
            yield name, version

    def _folders(self) -> Iterator[Path]:
        for root in self.roots:
            for pattern in ("*.dist-info", "*.egg-info"):
                yield from sorted(root.glob(pattern))

    def _editable(self) -> Iterator[Path]:
        """Folders with the packages of distributions that are imported from where they are written (PEP 610)."""
        for folder in self._folders():
            try:
                origin = json.loads((folder / "direct_url.json").read_text(encoding="utf-8"))
                if origin["dir_info"].get("editable"):
                    source = Path(unquote(urlsplit(origin["url"]).path))
                    yield from (source / below for below in ("", "src", "python"))
            except (OSError, ValueError, LookupError, TypeError, AttributeError):
                continue


def tree_digest(path: Path) -> str:
    """Digest of a file, or of every file below a folder, by name, size and time of change.

    Compiled byte code, hidden folders and virtual environments are left out: running an engine writes the first.
    """
    if path.is_file():
        return digest(_stated(path, path.name))
    found: list[object] = []
    for folder, below, files in os.walk(path):
        below[:] = sorted(
            name
            for name in below
            if name != "__pycache__"
            and not name.startswith(".")
            and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))  # noqa: PTH110, PTH118 - thousands of files
        )
        inside = os.path.relpath(folder, path)
        found += [_stated(os.path.join(folder, name), f"{inside}/{name}") for name in sorted(files)]  # noqa: PTH118
    return digest(*found)


def digest(*parts: object) -> str:
    """16 hexadecimal digits, the same for the same parts on every machine."""
    return sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]


def _stated(path: Path | str, name: str) -> tuple[str, int, int]:
    try:
        stat = os.stat(path)  # noqa: PTH116 - as above
    except OSError:
        return name, -1, 0
    return name, stat.st_size, stat.st_mtime_ns


def _sites(python: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    for prefix in (python.parent.parent, python.parent):
        settings = _settings(prefix / "pyvenv.cfg")
        if settings is not None:
            yield from _below((prefix,), None)
            home = settings.get("home")
            if home is None or settings.get("include-system-site-packages", "").lower() != "true":
                return
            python = Path(home, python.name)
            break
    real = python.resolve()
    version = _VERSIONED.match(real.name)
    prefix = real.parent.parent
    user = Path(environ.get("PYTHONUSERBASE") or Path(environ.get("HOME", ""), ".local"))
    prefixes = [prefix, Path("/usr/local")] if prefix == Path("/usr") else [prefix]
    if "PYTHONNOUSERSITE" not in environ:
        prefixes.insert(0, user)
    yield from _below(prefixes, None if version is None else version[1])


def _below(prefixes: Sequence[Path], version: str | None) -> Iterator[Path]:
    for prefix in prefixes:
        for folder in sorted(prefix.glob("lib*/python3*")):
            if version is None or folder.name in {"python3", f"python{version}"}:
                yield from (folder / name for name in _SITES if (folder / name).is_dir())


def _settings(path: Path) -> dict[str, str] | None:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    pairs = (line.partition("=") for line in lines)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _added(site: Path) -> Iterator[Path]:
    """Folders that ``.pth`` files of a site folder add."""
    for path in sorted(site.glob("*.pth")):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            if line.strip() and not line.startswith(("#", "import ", "import\t")):
                folder = site / line.strip()
                if folder.is_dir():
                    yield folder


def _normal(name: str) -> str:
    """A distribution's name as comparisons want it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
