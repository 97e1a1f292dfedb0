"""``kvbudget audit`` as a user runs it: on a log, on a process, through a container's and a unit's tools."""

from __future__ import annotations

import argparse
import io
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from pytest_kvbudget import audit, audit_live
from pytest_kvbudget.audit_live import Engine, ask_peer, from_container, from_process, from_unit
from pytest_kvbudget.budget.graphs import PER_GRAPH_VARIABLE
from pytest_kvbudget.cli import main
from pytest_kvbudget.device import probes
from pytest_kvbudget.device.model import DeviceMemory
from pytest_kvbudget.ledger.reader import LedgerReader
from pytest_kvbudget.observed import free_at_init, observed_from, resident_layers
from pytest_kvbudget.units import GIB, MIB

PLAN = """\
budget (total x util)                          28.67 GiB
non-expert weights                              4.47     PLE 38.74 excluded
KV reserve (one max-model-len request +8%)      0.64     registry 9190 B/token
CUDA graphs                                     0.40
runtime overhead                                8.48     measured 6.38
expert cache space (the rest)                  14.68     of it resident layers [0,1,2] 1.87
host-backed experts (per rank)                 25.1      host usable 112.6 of MemAvailable 179.3
GPU KV cache size: 79,953 tokens, Maximum concurrency for 65,536 tokens per request: 1.22x
"""
"""A public plan table: 65,536 tokens, utilization 0.90, 8192 batched tokens."""
CENT = 0.01 * GIB
TOTAL = "34208743424"


def audited(*arguments: str, log: str = PLAN) -> tuple[int, str]:
    parser = argparse.ArgumentParser(prog="kvbudget audit")
    audit.add_arguments(parser)
    out = io.StringIO()
    return audit.run(parser.parse_args(arguments), out=out, stdin=io.BytesIO(log.encode())), out.getvalue()


def document(*arguments: str, log: str = PLAN) -> tuple[int, dict[str, Any]]:
    status, text = audited(*arguments, "--json", log=log)
    return status, json.loads(text)


def lever(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(dict(one) for one in found["levers"] if one["name"].startswith(name))


def check(found: dict[str, Any], name: str) -> str:
    return next(str(one["state"]) for one in found["checks"] if one["name"].startswith(name))


def ledger_of(text: str) -> Any:
    reader = LedgerReader()
    reader.feed(text.encode())
    reader.close()
    return reader.ledger()


# -- a log


def test_the_plan_is_printed_and_its_sum_closes() -> None:
    status, text = audited()
    assert status == 0
    for row in ("28.67 GiB", "4.47 GiB", "0.64 GiB", "0.40 GiB", "8.48 GiB", "14.68 GiB"):
        assert row in text
    assert "the sum closes" in text
    assert "2.10 GiB of slack, not deployable" in text
    assert "harmful here: it would plan 6.13 GiB of overhead against 6.38 GiB measured" in text
    assert "unknown until the card's total and the utilization are given" in text
    assert "overhead line 5" in text


def test_the_slot_price_is_this_plans_own() -> None:
    _, found = document()
    # 1.87 GiB over three layers of 512 routed experts and one shared
    assert found["slot"]["slot_bytes"] == pytest.approx(1.87 * GIB / (3 * 513), rel=0.003)
    assert found["slot"]["slots_per_gib"] == pytest.approx(823, abs=3)
    assert "3 layers" in found["slot"]["source"]


def test_slack_and_precise_memory_are_classified() -> None:
    _, found = document()
    slack, precise = lever(found, "runtime overhead slack"), lever(found, "--expert-precise-memory")
    assert (slack["claim"], precise["claim"]) == ("image edit", "harmful")
    assert slack["worth_bytes"] == pytest.approx(2.10 * GIB, abs=CENT)
    assert all(one["claim"] != "reachable" for one in found["levers"])


def test_worth_of_utilization_with_total_and_utilization() -> None:
    _, unknown = document()
    assert lever(unknown, "--gpu-memory-utilization")["worth_bytes"] is None
    _, found = document("--total", TOTAL, "--utilization", "0.90")
    worth = lever(found, "--gpu-memory-utilization")
    assert "0.3186 GiB per 0.01" in worth["sentence"]
    assert worth["worth_bytes"] == pytest.approx(0.3186 * GIB, abs=0.0001 * GIB)
    assert worth["worth_slots"] == pytest.approx(262, abs=2)


def test_a_wrong_total_is_seen() -> None:
    _, found = document("--total", "24 GiB", "--utilization", "0.90")
    assert "not the budget printed" in lever(found, "--gpu-memory-utilization")["sentence"]


def test_the_ceiling_needs_what_a_worker_saw() -> None:
    _, found = document("--total", TOTAL, "--utilization", "0.90", "--free-at-init", "31.29 GiB")
    assert "ceiling of 0.982" in lever(found, "--gpu-memory-utilization")["sentence"]


def test_a_plan_that_does_not_close_is_wrong() -> None:
    status, found = document(log=PLAN.replace("14.68", "15.68"))
    assert status == 1
    assert found["closure"]["closes"] is False
    assert check(found, "plan lines") == "wrong"


def test_what_no_line_states_is_not_measured() -> None:
    status, text = audited(log=PLAN.replace("CUDA graphs ", "something else"))
    assert status == 0
    assert "CUDA graphs: not measured" in text
    assert "residual" not in text


def test_a_log_without_a_plan_is_no_answer() -> None:
    status, text = audited(log="INFO 10-05 12:00:00 [x.py:1] nothing of interest\n")
    assert status == 2
    assert "no line states an expert plan" in text


def test_the_pool_is_checked_against_the_windows_that_were_promised() -> None:
    assert check(document("--windows", "1")[1], "size against ask") == "ok"
    status, found = document("--windows", "2")
    assert (status, check(found, "size against ask")) == (1, "wrong")


def test_graph_captures_come_by_rank() -> None:
    lines = (
        "(Worker_TP0 pid=10) INFO 10-05 12:00:00 [x.py:1] Graph capturing finished in 9 secs, took 0.31 GiB\n"
        "(Worker_TP1 pid=11) INFO 10-05 12:00:00 [x.py:1] Graph capturing finished in 9 secs, took 0.17 GiB\n"
    )
    _, found = document("--graphs", "6", log=PLAN + lines)
    worth = lever(found, "VLLM_CUDAGRAPH")
    assert worth["worth_bytes"] == pytest.approx(0.09 * GIB, abs=CENT)
    assert "Worker_TP0" in worth["sentence"]
    assert check(found, "estimate against capture") == "ok"


def test_the_last_boot_is_audited_unless_another_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    start = "INFO 10-05 12:00:00 [x.py:1] non-default args: {'model': 'm'}\n"
    log = start + PLAN + start + PLAN.replace("1.87", "1.50")
    assert document(log=log)[1]["slot"]["slots_per_gib"] == pytest.approx(1026, abs=5)
    assert document("--boot", "1", log=log)[1]["slot"]["slots_per_gib"] == pytest.approx(823, abs=3)
    status, text = audited("--boot", "3", log=log)
    assert (status, text) == (2, "")
    assert "the log holds 2" in capsys.readouterr().err


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path / "engine.log")]) == 2
    assert "engine.log: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "layers"), [("[0,1,2] 1.87", 3), ("[0-2] 1.87", 3), ("[0, 47] 1.87", 2), ("[] 1.87", None), ("1.87", None)]
)
def test_resident_layers(text: str, layers: int | None) -> None:
    assert resident_layers(ledger_of(PLAN.replace("[0,1,2] 1.87", text))) == layers


@pytest.mark.parametrize(
    ("line", "source"),
    [
        (
            "ValueError: Free memory on device cuda:0 (31.29/31.86 GiB) on startup is less than desired GPU memory"
            " utilization (1.0, 31.86 GiB). Decrease GPU memory utilization or reduce GPU memory used by other"
            " processes.",
            "refusal line",
        ),
        (
            "INFO 10-05 12:00:00 [x.py:1] Free memory on device (31.29/31.86 GiB) on startup. Desired GPU memory"
            " utilization is (0.9, 28.67 GiB). Actual usage is 4.0 GiB for weight, 1.0 GiB for peak activation",
            "startup line",
        ),
    ],
)
def test_the_worker_says_what_it_found_free(line: str, source: str) -> None:
    found = free_at_init(ledger_of(f"{line}\n"))
    assert found is not None
    assert found.source == source
    assert found.free_bytes == pytest.approx(31.29 * GIB, abs=CENT)
    held = line.replace("31.29/", "20.00/")
    assert free_at_init(ledger_of(f"{held}\n")) is None  # somebody held memory: no property of the host


def test_a_pinned_boot_states_what_is_free_and_not_of_how_much() -> None:
    line = (
        "INFO 10-05 12:00:00 [x.py:1] Initial free memory 31.29 GiB, reserved 2.95 GiB memory for KV Cache as specified"
        " by kv_cache_memory_bytes config and skipped memory profiling.\n"
    )
    assert free_at_init(ledger_of(line)) is None
    found = free_at_init(ledger_of(line), int(TOTAL))
    assert found is not None
    assert found.source == "startup line"
    _, audit_of = document("--total", TOTAL, "--utilization", "0.90", log=PLAN + line)
    assert "ceiling of 0.982" in lever(audit_of, "--gpu-memory-utilization")["sentence"]


def test_a_pinned_pool_has_a_measured_rate() -> None:
    log = (
        "INFO 10-05 12:00:00 [x.py:1] non-default args: {'kv_cache_memory_bytes': 3166500000}\n"
        "GPU KV cache size: 401,408 tokens, Maximum concurrency for 200,704 tokens per request: 2.00x\n"
    )
    assert observed_from(ledger_of(log)).measured_bytes_per_token == pytest.approx(7888.5, abs=0.05)


# -- a process


@pytest.fixture
def installation(tmp_path: Path) -> Path:
    """A virtual environment whose package reads one of the levers."""
    package = tmp_path / "venv" / "lib" / "python3.12" / "site-packages" / "vllm"
    package.mkdir(parents=True)
    (package / "offloader.py").write_text(f"getenv('{PER_GRAPH_VARIABLE}')\nconfig.gpu_memory_utilization\n")
    script = tmp_path / "venv" / "bin" / "vllm"
    script.parent.mkdir()
    script.write_text("import sys\nsys.stdin.read()\n")
    return script


@contextmanager
def running(script: Path, *arguments: str, log: Path, **variables: str) -> Iterator[int]:
    environment = {**os.environ, **variables}
    with (
        log.open("ab") as file,
        subprocess.Popen(
            [sys.executable, script, *arguments], stdin=subprocess.PIPE, stdout=file, env=environment
        ) as process,
    ):
        try:
            _await_image(process.pid)
            yield process.pid
        finally:
            process.kill()


def _await_image(pid: int) -> None:
    """Wait until the process shows command line and environment: for a moment after exec it has neither."""
    deadline = time.monotonic() + 10
    files = [Path(f"/proc/{pid}/{name}") for name in ("cmdline", "environ")]
    while not all(file.read_bytes() for file in files):
        assert time.monotonic() < deadline, f"process {pid} shows no command line"
        select.select([], [], [], 0.005)


def test_a_lever_is_reachable_where_image_and_environment_carry_it(installation: Path, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text(PLAN)
    with running(
        installation, "serve", "m", "--gpu-memory-utilization", "0.9", log=log, **{PER_GRAPH_VARIABLE: "52"}
    ) as pid:
        status, found = document("--pid", str(pid), "--total", TOTAL)
    assert status == 0
    assert found["rows"][0]["text"].startswith("budget")  # the log is where the process writes
    assert found["inputs"]["utilization"] == 0.9  # of the command line: no line states it
    assert lever(found, PER_GRAPH_VARIABLE)["claim"] == "reachable"
    assert lever(found, "--gpu-memory-utilization")["claim"] == "reachable"
    assert lever(found, "--expert-precise-memory")["claim"] == "harmful"
    assert found["carried"]["--expert-precise-memory"]["image_reads"] is False


def test_a_variable_that_the_environment_lacks_is_unverified(installation: Path, tmp_path: Path) -> None:
    with running(installation, "serve", "m", log=tmp_path / "log") as pid:
        engine = from_process(pid)
    assert engine.carried()[PER_GRAPH_VARIABLE].claim == "unverified"
    assert engine.carried()["--gpu-memory-utilization"].claim == "unverified"
    assert engine.reads["--expert-precise-memory"] is None


def test_a_flag_that_the_image_does_not_know_is_an_image_edit(installation: Path, tmp_path: Path) -> None:
    with running(installation, "serve", "m", "--expert-precise-memory", log=tmp_path / "log") as pid:
        engine = from_process(pid)
    assert engine.carried()["--expert-precise-memory"].claim == "image edit"


def test_a_process_that_is_gone_is_a_trouble() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    engine = from_process(process.pid)
    assert engine.environ is None
    assert str(process.pid) in engine.troubles[0]
    assert all(carry.claim == "unverified" for carry in engine.carried().values())


# -- tools of containers and units


def tool(folder: Path, name: str, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_container_is_inspected_and_its_image_searched(
    installation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = installation.parent.parent / "lib" / "python3.12" / "site-packages" / "vllm"
    entry = {
        "Config": {"Env": [f"{PER_GRAPH_VARIABLE}=12", "PATH=/usr/bin"]},
        "Path": "vllm",
        "Args": ["serve", "m", "--gpu-memory-utilization=0.9"],
        "RestartCount": 0,
    }
    (tmp_path / "inspected.json").write_text(json.dumps([entry]))
    (tmp_path / "log").write_text(PLAN)
    tool(
        tmp_path,
        "podman",
        f'case "$1" in\n'
        f"inspect) cat {tmp_path}/inspected.json;;\n"
        f"logs) cat {tmp_path}/log >&2;;\n"
        f'exec) shift 2; if [ "$1" = python3 ]; then echo {package}; else exec "$@"; fi;;\n'
        f"esac",
        monkeypatch,
    )
    status, found = document("--container", "qwen", "--total", TOTAL)
    assert status == 0
    assert len(found["rows"]) == 6
    assert lever(found, PER_GRAPH_VARIABLE)["claim"] == "reachable"
    assert check(found, "restart count") == "ok"
    assert found["inputs"]["utilization"] == 0.9
    gone = from_container("qwen", source=str(tmp_path / "nowhere"))
    assert gone.reads == {}  # a folder that is not there proves nothing about the image
    assert "status 3" in gone.troubles[0]


def test_a_container_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, "podman", "echo 'no such object' >&2; exit 125", monkeypatch)
    status, found = document("--container", "nobody")
    assert status == 2
    assert any("no such object" in trouble for trouble in found["troubles"])
    assert check(found, "restart count") == "not measured"


def test_a_unit_tells_its_restarts(installation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(installation, "serve", "m", log=tmp_path / "log", **{PER_GRAPH_VARIABLE: "12"}) as pid:
        tool(
            tmp_path,
            "systemctl",
            f"printf 'LoadState=loaded\\nNRestarts=3\\nMainPID={pid}\\n'",
            monkeypatch,
        )
        tool(tmp_path, "journalctl", f"cat <<'END'\n{PLAN}END", monkeypatch)
        status, found = document("--unit", "qwen")
    assert status == 1
    assert check(found, "restart count") == "wrong"
    assert len(found["rows"]) == 6
    assert lever(found, PER_GRAPH_VARIABLE)["claim"] == "reachable"


def test_a_unit_that_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, "systemctl", "printf 'LoadState=not-found\\nNRestarts=0\\nMainPID=0\\n'", monkeypatch)
    engine = from_unit("qwen")
    assert engine.restarts is None
    assert "no such unit" in engine.troubles[0]


def test_a_containers_words_come_before_its_units() -> None:
    inside = Engine(environ={"A": "1"}, said=("inspect",))
    outside = Engine(environ={"A": "2"}, restarts=0, troubles=("t",))
    both = inside.beside(outside)
    assert (both.environ, both.restarts, both.troubles) == ({"A": "1"}, 0, ("t",))


def test_a_shell_is_no_engine(tmp_path: Path) -> None:
    with subprocess.Popen(["sh", "-c", "read line"], stdin=subprocess.PIPE) as shell:
        engine = from_process(shell.pid)
        status, text = audited("--pid", str(shell.pid), "-")
        named = from_process(shell.pid, tmp_path)
        shell.kill()
    assert (engine.argv, engine.environ) == (None, None)
    assert "neither it nor a child of it has 'vllm' in its command line" in engine.troubles[0]
    assert (status, "a child of it has 'vllm'" in text) == (2, True)
    assert named.argv is not None


@pytest.mark.parametrize(
    ("arguments", "log", "said"),
    [
        (("--source", "/nonexist", "--pid", "1", "-"), PLAN, "--source /nonexist is no folder"),
        (("--source", "/", "-"), PLAN, "--source needs --pid, --unit or --container"),
    ],
)
def test_what_is_asked_for_in_vain_is_refused(
    arguments: tuple[str, ...], log: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audited(*arguments, log=log) == (2, "")
    assert said in capsys.readouterr().err


def test_what_cannot_be_read_is_no_clean_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "detect", lambda: "host")
    status, text = audited("--devices", "0,1", "-")
    assert status == 2
    assert text.endswith("not read: no accelerator is known on this host\n")


@pytest.mark.parametrize("address", ["not-a-url", "127.0.0.1:8000", "ftp://a", "http://"])
def test_a_peer_is_an_address(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        audited("--peer", address, "-")
    assert left.value.code == 2
    assert f"{address!r} is no address; expected as in http://host:8000" in capsys.readouterr().err


def test_where_nothing_was_measured_there_is_no_page_of_it(tmp_path: Path) -> None:
    empty = tmp_path / "empty.log"
    empty.touch()
    status, text = audited(str(empty))
    assert status == 2
    assert text.splitlines()[1:] == [
        f"no line states an expert plan in {empty} (empty); `kvbudget explain` says what the log does state"
    ]
    _, gone = audited("--pid", str(_gone()))
    assert [line.split(":")[0] for line in gone.splitlines()[2:]] == ["not read", "not read"]


def _gone() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


# -- cards and peers


def test_cards_are_read_for_what_was_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    total = int(TOTAL)
    cards = tuple(
        DeviceMemory(device=str(number), total_bytes=total, used_bytes=total - left, source="sysfs")
        for number, left in enumerate((GIB, 911 * MIB))
    )
    monkeypatch.setattr(audit, "read_cards", lambda devices: (cards[: len(devices)], ""))
    _, found = document("--devices", "0,1", "--utilization", "0.9")
    assert found["free_memory"].startswith("0.89 GiB were never used on card 1")
    assert check(found, "high-water") == "ok"
    assert found["inputs"]["total_bytes"] == total


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"choices": [{"message": {"content": "one"}}]})

    def answer(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class' name
        pass


@pytest.fixture
def peer() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_completion_through_a_peers_address(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_live, "is_loopback", lambda host: False)
    status, found = document("--peer", peer, "-")
    assert status == 0
    assert check(found, "chat completion") == "ok"


def test_localhost_proves_nothing_either_way(peer: str) -> None:
    answered, said = ask_peer(peer)
    assert answered is None
    assert "which is this host" in said
    silent, why = ask_peer("http://127.0.0.1:9")
    assert silent is None
    assert "no completion" in why
    _, text = audited("--peer", "http://127.0.0.1:9", "-")
    assert "[unknown]" in text
    assert "silence from localhost is not an outage" in text


def test_a_peer_that_does_not_answer_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_live, "is_loopback", lambda host: False)
    status, found = document("--peer", "http://127.0.0.1:9", "-")
    assert (status, check(found, "chat completion")) == (1, "wrong")
