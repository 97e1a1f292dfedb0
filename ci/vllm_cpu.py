#!/usr/bin/env python3
"""A real vLLM for tests on an ordinary CPU host: makes it once, then says where it is.

    python3 ci/vllm_cpu.py ensure   # makes or finds the environment; minutes the first time, then at once
    python3 ci/vllm_cpu.py path     # prints JSON: executable, python, model folder and environment

Everything lies outside the checkout, under $KVBUDGET_CACHE or else ${XDG_CACHE_HOME:-~/.cache}/pytest-kvbudget, in a
folder named after vLLM's version, Python's version and a digest of the recipe below: a changed recipe makes a new
folder, so an old environment is never taken for a new one.

Exit status: 0 ready; 75 (EX_TEMPFAIL) it cannot be had on this host, with the reason on stderr; 2 wrong arguments. So a
caller can tell "no real engine here" from "a test failed".
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

VLLM_VERSION = "0.32.0"
REQUIREMENTS: tuple[str, ...] = (f"vllm-cpu=={VLLM_VERSION}",)

# torchvision beside this CPU build of torch stops vLLM at import ("operator torchvision::nms does not exist");
# torchaudio and torchcodec are its companions, and triton is 1 GB that a CPU engine never loads.
UNWANTED: tuple[str, ...] = ("torchvision", "torchaudio", "torchcodec", "triton")

# The distribution is called vllm-cpu, but vLLM asks importlib.metadata for "vllm" and otherwise ends in
# PackageNotFoundError.
ALIAS_NAME = "vllm"
ALIAS_VERSION = f"{VLLM_VERSION}+cpu"

# Two layers: a boot is quick and the KV arithmetic stays small enough to do by hand. One token takes
# 2 (K and V) * 2 layers * 2 KV heads * 64 * 2 bytes = 1024 bytes.
MODEL_CONFIG: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "torch_dtype": "bfloat16",
}
GENERATION_CONFIG: Mapping[str, object] = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
TOKENIZER_CONFIG: Mapping[str, object] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "model_max_length": 131072,
    "clean_up_tokenization_spaces": False,
}

# Runs in the new environment, which has `tokenizers`; argument: the file to write. Token id = byte value, nothing is
# merged and nothing is prepended, so a prompt of N bytes is a prompt of N tokens. The ids above the special ones only
# fill the vocabulary: dummy weights may well sample them, and they have to decode to something.
TOKENIZER_SCRIPT = """\
import sys
from itertools import product
from string import ascii_lowercase
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE, SPECIAL = 512, ["<s>", "</s>", "<pad>"]
printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
hidden = [byte for byte in range(256) if byte not in printable]
letter = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
words = [letter[byte] for byte in range(256)] + SPECIAL
fill = ["".join(pair) for pair in product(ascii_lowercase, repeat=2)]
words += fill[: VOCAB_SIZE - len(words)]
tokenizer = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
text = "Window? \\u00e4\\n"
ids = tokenizer.encode(text).ids
assert ids == list(text.encode()), ids
assert tokenizer.decode(ids) == text and tokenizer.get_vocab_size() == VOCAB_SIZE
tokenizer.save(sys.argv[1])
"""

# Runs in the new environment. The first boot of an architecture imports everything once more in a process of its own,
# only to ask the model class what it can do, and caches the answer: 9 s of a boot of 33 s. It is asked here, so that no
# boot of ours is that first one and all take the same time.
MODEL_INFO_SCRIPT = """\
from vllm.model_executor.models.registry import ModelRegistry
assert ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls().is_text_generation_model
"""

# What an engine has to be started with: no hub, no usage report. Layout.engine_env() adds the cache folder.
ENGINE_ENV: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

CANNOT_INSTALL = os.EX_TEMPFAIL
TAIL_LINES = 40
NEEDED_DISK_BYTES = 6 * 1024**3  # 2.5 GB in the end, but triton and the wheels lie there for a while too
DEFAULT_TIMEOUT_S = 1800.0
HEARTBEAT_S = 20.0


class EnsureError(Exception):
    """The environment cannot be made on this host."""

    def __init__(self, step: str, reason: str, tail: Sequence[str] = ()) -> None:
        super().__init__(f"{step}: {reason}")
        self.step = step
        self.reason = reason
        self.tail = tuple(tail)


@dataclass(frozen=True)
class Layout:
    """Where the parts of one environment lie."""

    root: Path

    @property
    def venv(self) -> Path:
        """The virtual environment."""
        return self.root / "venv"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.venv / "bin" / "python"

    @property
    def vllm(self) -> Path:
        """The command that serves."""
        return self.venv / "bin" / "vllm"

    @property
    def model(self) -> Path:
        """The model folder."""
        return self.root / "tiny-llama"

    @property
    def vllm_cache(self) -> Path:
        """The cache of vLLM itself, else the user's own: what it knows of the model class spares each boot seconds."""
        return self.root / "vllm-cache"

    def engine_env(self) -> dict[str, str]:
        """The environment variables that an engine of this environment is started with."""
        return {**ENGINE_ENV, "VLLM_CACHE_ROOT": str(self.vllm_cache)}

    @property
    def log(self) -> Path:
        """What the steps of the install printed."""
        return self.root / "install.log"

    @property
    def marker(self) -> Path:
        """Written last: without it the folder is what an interrupted install left."""
        return self.root / "complete.json"

    @property
    def lock(self) -> Path:
        """Beside the folder, not in it: the folder is removed while the lock is held."""
        return self.root.with_name(self.root.name + ".lock")


@dataclass(frozen=True)
class Runner:
    """Runs the steps of one install; their output goes to one log file."""

    log: Path
    deadline: float  # on time.monotonic()'s clock, seconds
    lock_fd: int
    extra_env: Mapping[str, str]

    def run(self, step: str, command: Sequence[str]) -> str:
        """Run *command* to its end and return its output (stdout and stderr together)."""
        say(step)
        started = time.monotonic()
        with self.log.open("ab") as sink:
            sink.write(f"== {step}\n".encode())
            sink.flush()
            offset = sink.tell()
            # The lock's descriptor goes along: if this script is killed, the lock stays taken while pip still writes.
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=install_environment(os.environ) | dict(self.extra_env),
                pass_fds=(self.lock_fd,),
            )
            try:
                self._wait(process, step, started, offset)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        output = read_from(self.log, offset)
        if process.returncode != 0:
            raise EnsureError(step, f"exit status {process.returncode}", last_lines(output))
        say(f"{step}: done in {time.monotonic() - started:.0f} s")
        return output

    def _wait(self, process: subprocess.Popen[bytes], step: str, started: float, offset: int) -> None:
        """Wait for *process* and show now and then how far it is; the deadline is an EnsureError."""
        while True:
            left = self.deadline - time.monotonic()
            if left <= 0:
                reason = f"not done after {time.monotonic() - started:.0f} s"
                raise EnsureError(step, reason, last_lines(read_from(self.log, offset)))
            try:
                process.wait(timeout=min(HEARTBEAT_S, left))
                return
            except subprocess.TimeoutExpired:
                newest = last_lines(read_from(self.log, offset), 1)
                say(f"{step}: {time.monotonic() - started:.0f} s, {newest[0][:100] if newest else 'no output yet'}")


def say(text: str) -> None:
    """One progress line, on stderr: stdout belongs to the JSON of `path`."""
    print(f"vllm-cpu: {text}", file=sys.stderr, flush=True)


def last_lines(text: str, count: int = TAIL_LINES) -> list[str]:
    """The last *count* lines of *text* that are not empty."""
    return [line for line in text.splitlines() if line.strip()][-count:]


def read_from(path: Path, offset: int) -> str:
    """The text of *path* from byte *offset* on."""
    with path.open("rb") as source:
        source.seek(offset)
        return source.read().decode(errors="replace")


def install_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for the install steps: nothing that would lead pip or Python out of the new environment."""
    leading_out = {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "VIRTUAL_ENV"}
    return {name: value for name, value in environ.items() if name not in leading_out}


def recipe_digest() -> str:
    """Twelve hex digits that change when anything that is installed or written changes."""
    recipe = [
        REQUIREMENTS,
        UNWANTED,
        ALIAS_NAME,
        ALIAS_VERSION,
        MODEL_CONFIG,
        GENERATION_CONFIG,
        TOKENIZER_CONFIG,
        TOKENIZER_SCRIPT,
        MODEL_INFO_SCRIPT,
    ]
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]


def cache_root(environ: Mapping[str, str]) -> Path:
    """The folder that holds all environments of this kind."""
    own = environ.get("KVBUDGET_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base).absolute() if base else Path.home() / ".cache") / "pytest-kvbudget"


def layout(environ: Mapping[str, str]) -> Layout:
    """The place of the environment for this recipe and this Python."""
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    return Layout(cache_root(environ) / f"vllm-cpu-{VLLM_VERSION}-{python}-{recipe_digest()}")


def is_ready(place: Layout) -> bool:
    """Whether the install was finished and its interpreter, a link to the host's, still works."""
    return place.marker.is_file() and os.access(place.python, os.X_OK) and os.access(place.vllm, os.X_OK)


def check_host(place: Layout) -> None:
    """Refuse early what cannot work: a build for another platform, or a disk that is too full."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise EnsureError("host", f"vllm-cpu is for Linux on x86_64, this is {sys.platform} on {platform.machine()}")
    try:
        place.root.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(place.root.parent).free
    except OSError as error:
        raise EnsureError("host", f"the cache folder cannot be made: {error}") from error
    if free < NEEDED_DISK_BYTES:
        raise EnsureError("host", f"{free / 1024**3:.1f} GiB free, {NEEDED_DISK_BYTES / 1024**3:.0f} GiB needed")


@contextlib.contextmanager
def exclusive(path: Path, deadline: float) -> Iterator[int]:
    """Hold the lock on *path*; yields its descriptor. Another install may hold it for minutes."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        waiting = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    say("another install is running, waiting for it")
                    waiting = True
            if time.monotonic() > deadline:
                raise EnsureError("lock", "another install did not end in time")
            time.sleep(0.5)
        yield descriptor
    finally:
        os.close(descriptor)


def site_packages(place: Layout) -> Path:
    """The environment's folder for packages."""
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(place.venv)}))


def record_line(name: str, content: bytes) -> str:
    """A line of a RECORD file: path, digest in the form that wheels use, size in bytes."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}"


def write_alias(packages: Path) -> Path:
    """Write the metadata that lets `importlib.metadata.version("vllm")` answer."""
    folder = packages / f"{ALIAS_NAME}-{ALIAS_VERSION}.dist-info"
    folder.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {ALIAS_NAME}\nVersion: {ALIAS_VERSION}\n".encode(),
        "INSTALLER": b"pytest-kvbudget\n",
    }
    records = []
    for name, content in files.items():
        (folder / name).write_bytes(content)
        records.append(record_line(f"{folder.name}/{name}", content))
    records.append(f"{folder.name}/RECORD,,")
    (folder / "RECORD").write_text("\n".join(records) + "\n", encoding="utf-8")
    return folder


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write *value*, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def write_model(place: Layout, runner: Runner) -> None:
    """Make the model folder: configuration and tokenizer, no weights (`--load-format dummy` invents them)."""
    place.model.mkdir(exist_ok=True)
    write_json(place.model / "config.json", MODEL_CONFIG)
    write_json(place.model / "generation_config.json", GENERATION_CONFIG)
    write_json(place.model / "tokenizer_config.json", TOKENIZER_CONFIG)
    target = str(place.model / "tokenizer.json")
    runner.run("make the tokenizer", [str(place.python), "-c", TOKENIZER_SCRIPT, target])


def install(place: Layout, runner: Runner) -> None:
    """All steps, the marker last."""
    pip = [str(place.python), "-m", "pip", "--no-input"]
    runner.run("make the virtual environment", [sys.executable, "-m", "venv", str(place.venv)])
    runner.run(f"install {' '.join(REQUIREMENTS)}", [*pip, "install", "--progress-bar", "off", *REQUIREMENTS])
    runner.run(f"remove {' '.join(UNWANTED)}", [*pip, "uninstall", "-y", *UNWANTED])
    write_alias(site_packages(place))
    write_model(place, runner)
    runner.run("cache what vllm asks the model class", [str(place.python), "-c", MODEL_INFO_SCRIPT])
    answer = runner.run("ask vllm for its version", [str(place.vllm), "--version"])
    if VLLM_VERSION not in answer:
        raise EnsureError("ask vllm for its version", f"expected {VLLM_VERSION}", last_lines(answer))
    write_json(place.marker, {"vllm": VLLM_VERSION, "python": platform.python_version(), "recipe": recipe_digest()})


def ensure(place: Layout, timeout_s: float, install_with: Callable[[Layout, Runner], None] = install) -> bool:
    """Make the environment unless it is there; whether it was made now. *timeout_s*: seconds for all of it."""
    if is_ready(place):
        return False
    deadline = time.monotonic() + timeout_s
    check_host(place)
    try:
        with exclusive(place.lock, deadline) as lock_fd:
            if is_ready(place):  # whoever held the lock has made it
                return False
            if place.root.exists():
                say("removing what an interrupted install left")
                shutil.rmtree(place.root)
            place.root.mkdir()
            install_with(place, Runner(place.log, deadline, lock_fd, place.engine_env()))
    except OSError as error:
        raise EnsureError("files", str(error)) from error
    return True


def describe(place: Layout) -> dict[str, object]:
    """What a caller needs to start the engine."""
    return {
        "vllm": str(place.vllm),
        "python": str(place.python),
        "model": str(place.model),
        "env": place.engine_env(),
    }


def report_failure(error: EnsureError) -> None:
    """Say loudly what failed: this is easily taken for a skipped test otherwise."""
    bar = "=" * 78
    lines = [bar, f"A REAL vLLM CANNOT BE INSTALLED HERE: {error.step}", f"reason: {error.reason}"]
    if error.tail:
        lines += [f"last {len(error.tail)} lines of its output:", *(f"  | {line}" for line in error.tail)]
    print("\n".join([*lines, bar]), file=sys.stderr, flush=True)


def command_ensure(place: Layout, timeout_s: float) -> int:
    """The subcommand `ensure`."""
    started = time.monotonic()
    try:
        made = ensure(place, timeout_s)
    except EnsureError as error:
        report_failure(error)
        return CANNOT_INSTALL
    say(f"made in {time.monotonic() - started:.0f} s" if made else "ready")
    return 0


def command_path(place: Layout) -> int:
    """The subcommand `path`."""
    if not is_ready(place):
        say("not installed for this recipe; run the subcommand `ensure` first")
        return CANNOT_INSTALL
    print(json.dumps(describe(place), indent=2))
    return 0


def end_on_signal(number: int, frame: FrameType | None) -> None:
    """SIGTERM as an exception: the running step is ended with us."""
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="vllm_cpu.py", description="A real vLLM on a CPU host, for tests.")
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("ensure", help="make the environment, or find it made")
    make.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S, metavar="SECONDS", help="for all of it")
    commands.add_parser("path", help="print where everything is, as JSON")
    arguments = parser.parse_args(argv)
    place = layout(os.environ)
    if arguments.command == "path":
        return command_path(place)
    signal.signal(signal.SIGTERM, end_on_signal)
    return command_ensure(place, arguments.timeout)


if __name__ == "__main__":
    sys.exit(main())
