"""What `kvbudget explain` prints, and its exit status."""

from __future__ import annotations

import gzip
import io
import json
import re
from pathlib import Path

import pytest

from pytest_kvbudget import explain
from pytest_kvbudget.explain_text import LABELS, NAMES
from pytest_kvbudget.ledger.model import MissingValueError
from pytest_kvbudget.ledger.reader import LedgerReader
from pytest_kvbudget.ledger.vocabulary import fact_units
from tests.ledger.support import DATA

B1 = DATA / "boots" / "b1_kv_too_small.log"


def text_of(*paths: Path, boot: int | None = None, stdin: bytes = b"") -> tuple[str, int]:
    out = io.StringIO()
    status = explain.run([str(path) for path in paths], as_json=False, boot=boot, out=out, stdin=io.BytesIO(stdin))
    return out.getvalue(), status


def line_of(path: Path, words: str) -> int:
    return next(number for number, line in enumerate(path.read_text().split("\n"), 1) if words in line)


def test_the_first_line_names_phase_need_available_estimate_and_line() -> None:
    text, status = text_of(B1)
    assert status == 1
    number = line_of(B1, "To serve at least one request")
    assert text.split("\n")[0] == (
        "FAILED in kv_check: one request of 131,072 tokens needs 0.12 GiB of KV cache, 0.05 GiB is available; the "
        "engine "
        f"estimates that 51,072 tokens fit (line {number})"
    )
    assert "lower max_model_len" in text
    assert "raise kv_cache_memory_bytes" in text
    assert text.index("raise gpu_memory_utilization") > text.index("What not to turn")
    assert f"line {number}: ValueError: To serve at least one request" in text


@pytest.mark.parametrize(
    ("name", "begin", "status"),
    [
        ("boots/h1_maxlen_auto.log", "BOOTED: ", 0),
        ("boots/b3_maxlen_over_config.log", "REFUSED in argument: ", 1),
        ("boots/g2_kill9_engine.log", "BOOTED, THEN DIED in ready: ", 1),
        ("boots/llama_huge_ctx.log", "UNKNOWN: the log ends in weights_load", 2),
        ("cases/vllm-28228.log", "NO FAILURE in these lines; they end in kv_alloc", 2),
    ],
)
def test_the_first_line_is_the_verdict(name: str, begin: str, status: int) -> None:
    text, got = text_of(DATA / name)
    assert text.startswith(begin)
    assert got == status


def test_every_fact_that_can_be_read_has_a_name_for_people() -> None:
    units = fact_units()
    numbers = {name for name, unit in units.items() if unit not in {"text", "flag"}}
    assert numbers - LABELS.keys() == NAMES
    assert LABELS.keys() <= numbers
    assert not [label for label in LABELS.values() if "hbm" in label or "kv " in label or " b " in label]


def test_numbers_that_name_a_place_or_a_code_are_in_no_table() -> None:
    log = DATA / "cases" / "neuron-qwen38-27b-mns4.log"
    assert "ret=-12" in log.read_text()
    text, _ = text_of(log)
    assert not re.search(rf"^  (?:{'|'.join(NAMES)})  ", text, re.MULTILINE)


def test_a_file_among_others_that_is_no_log_of_an_engine_is_named(tmp_path: Path) -> None:
    other = tmp_path / "other.log"
    other.write_text("GET / 200\nGET / 200\n")
    packed = tmp_path / "older.log.gz"
    packed.write_bytes(gzip.compress(B1.read_bytes()))
    alone, _ = text_of(B1)
    text, status = text_of(other, B1, packed)
    assert status == 1
    assert text.split("\n")[0].startswith(alone.split("\n")[0].partition(" (line")[0])
    assert f"\n{other}: no line of an engine I know\n" in text
    assert f"\n{packed}: no line of an engine I know; it is compressed: zcat {packed} | kvbudget explain\n" in text
    assert "no line of an engine" not in alone
    twice, _ = text_of(B1, B1)
    assert "no line of an engine" not in twice
    out = io.StringIO()
    explain.run([str(other), str(B1)], as_json=True, out=out, stdin=io.BytesIO())
    assert json.loads(out.getvalue())["foreign_files"] == [str(other)]


def test_a_compressed_log_alone_is_met_with_what_unpacks_it(tmp_path: Path) -> None:
    packed = tmp_path / "b.log.gz"
    packed.write_bytes(gzip.compress(B1.read_bytes()))
    text, status = text_of(packed)
    assert status == 2
    assert f"zcat {packed} | kvbudget explain" in text


def test_following_a_foreign_log_says_that_nothing_is_known_of_it_and_reads_on(tmp_path: Path) -> None:
    log, out, waits = tmp_path / "other.log", io.StringIO(), iter(range(2 * explain.PUZZLED))
    log.write_text("GET / 200\n")
    assert explain.follow(str(log), out=out, wait=lambda: next(waits, None) is not None) == 2
    assert out.getvalue().count("no line of an engine so far: 1 line; known are vLLM") == 1


def test_a_secret_that_a_line_names_is_not_quoted() -> None:
    log = b"usage: vllm [-h]\nvllm: error: unrecognized arguments: --api-key sk-hidden --foo\n"
    text, _ = text_of(stdin=log)
    out = io.StringIO()
    explain.run([], as_json=True, out=out, stdin=io.BytesIO(log))
    for shown in (text, out.getvalue()):
        assert "--api-key <removed> --foo" in shown
        assert "sk-hidden" not in shown


def test_a_name_that_is_no_fact_is_met_with_those_near_it() -> None:
    reader = LedgerReader()
    reader.feed(B1.read_bytes())
    reader.close()
    ledger = reader.ledger()
    with pytest.raises(MissingValueError, match="no fact has this name; did you mean kv_tokens"):
        ledger.number("kv_token")
    with pytest.raises(MissingValueError, match=r"no line of this boot states it \(absent"):
        ledger.number("hbm_tensors_bytes")


def test_standard_input_is_read_for_no_path_and_for_a_dash() -> None:
    assert text_of(stdin=B1.read_bytes()) == text_of(B1)
    assert text_of(Path("-"), stdin=B1.read_bytes()) == text_of(B1)


@pytest.mark.parametrize("data", [b"", b"nginx: started\nGET / 200\n", b"\x00\xff" * 1000])
def test_another_programs_log_is_not_explained(data: bytes) -> None:
    text, status = text_of(stdin=data)
    assert text.startswith("this is not a boot log of an engine I know")
    assert status == 2


def test_files_that_are_no_boot_logs_are_named_with_what_was_read_and_what_is_known(tmp_path: Path) -> None:
    empty, other = tmp_path / "empty.log", tmp_path / "nginx.log"
    empty.write_bytes(b"")
    other.write_bytes(b"nginx: started\nGET / 200\n")
    text, status = text_of(empty, other)
    assert status == 2
    assert text == (
        f"this is not a boot log of an engine I know: {empty} (empty), {other} (2 lines); "
        "known are vLLM, its RDNA4 fork, vLLM Neuron, SGLang and llama.cpp\n"
    )
    assert "standard input (empty)" in text_of()[0]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    text, status = text_of(tmp_path / "gone.log")
    assert "cannot read" in text
    assert "gone.log" in text
    assert status == 2


def test_the_last_boot_is_explained_and_the_others_are_listed(tmp_path: Path) -> None:
    again = B1.read_bytes().replace(b"pid=9605", b"pid=1").replace(b"pid=9665", b"pid=2").replace(b"pid=9749", b"pid=3")
    log = tmp_path / "journal.log"
    log.write_bytes((DATA / "boots" / "h1_maxlen_auto.log").read_bytes() + again + B1.read_bytes())
    text, status = text_of(log)
    assert "boot 3 of 3" in text
    assert "crash loop, 2 times" in text
    assert "no weights loaded <- this one" in text
    assert "1 (lines 1-" in text
    assert "booted in ready" in text
    assert status == 1
    first, status = text_of(log, boot=1)
    assert first.startswith("BOOTED: ")
    assert status == 0
    missing, status = text_of(log, boot=4)
    assert "expected 1 to 3" in missing
    assert status == 2


def test_ranks_in_separate_files_are_one_boot(tmp_path: Path) -> None:
    one, two = tmp_path / "rank0.log", tmp_path / "rank1.log"
    one.write_text("(Worker_TP0 pid=7) INFO 09-30 10:00:00 [m.py:1] Available KV cache memory: 2.97 GiB")
    two.write_text("\n(Worker_TP1 pid=8) INFO 09-30 10:00:00 [m.py:1] Available KV cache memory: 2.31 GiB\n")
    text, _ = text_of(one, two)
    assert "3 lines read of 2 files taken together as the ranks of one engine, boot 1 of 1" in text
    assert "rank1.log:2" in text
    assert "Worker_TP0 2.97 GiB, Worker_TP1 2.31 GiB" in text


def test_json_is_one_object_with_plain_facts() -> None:
    out = io.StringIO()
    explain.run([str(B1)], as_json=True, out=out, stdin=io.BytesIO())
    said = json.loads(out.getvalue())
    assert said["facts"]["estimated_max_model_len"] == 51072
    assert said["evidence"]["facts"]["estimated_max_model_len"]["line"] == line_of(B1, "To serve at least one request")
    assert {lever["effect"] for lever in said["levers"]} <= {"helps", "harms", "useless"}


def test_a_crash_loop_folds_and_says_how_often(tmp_path: Path) -> None:
    line = (
        "Oct 03 10:{0:02}:05 host podman[9]: (Worker_TP0 pid={1}) ERROR 10-03 10:{0:02}:05 [w.py:1] ValueError: Free "
        "memory on "
        "device cuda:0 (31.29/31.86 GiB) on startup is less than desired GPU memory utilization (1.0, 31.86 GiB)."
    )
    start = (
        "Oct 03 10:{0:02}:01 host podman[9]: (APIServer pid={1}) INFO 10-03 10:{0:02}:01 [a.py:1] vLLM API server "
        "version 0.23.0"
    )
    lines = [text.format(2 * turn, 100 + 10 * turn + n) for turn in range(5) for n, text in enumerate((start, line))]
    log = tmp_path / "journal.log"
    log.write_text("\n".join(lines) + "\n")
    text, status = text_of(log)
    assert status == 1
    assert "1-5 (lines 1-10): crash loop, 5 times, every 2 min: failed in worker_init" in text
    assert "no weights loaded" in text
    assert "lower gpu_memory_utilization: to at most 0.982" in text


def test_what_does_not_add_up_is_said() -> None:
    text, _ = text_of(DATA / "cases" / "vllm-backport-34.log")
    assert "graphs: estimate 0.58 GiB, captured 0.10 GiB" in text
    said = io.StringIO()
    explain.run([str(DATA / "cases" / "vllm-28228.log")], as_json=True, out=said, stdin=io.BytesIO())
    (finding,) = json.loads(said.getvalue())["findings"]
    assert finding["agrees"] is False
    assert finding["lines"] == [3, 4]


def test_a_growing_log_is_followed_until_it_fails(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    whole = B1.read_bytes()
    half = whole.index(b"Starting to load model")
    log.write_bytes(whole[:half])
    out, waits = io.StringIO(), 0

    def grow() -> bool:
        nonlocal waits
        waits += 1
        with log.open("ab") as file:
            file.write(whole[half:])
        return True

    assert explain.follow(str(log), out=out, wait=grow) == 1
    assert waits == 1
    text = out.getvalue()
    assert text.index("worker_init") < text.index("weights_load") < text.index("FAILED in kv_check")


def test_following_ends_when_nothing_more_is_wanted(tmp_path: Path) -> None:
    out = io.StringIO()
    assert explain.follow(str(DATA / "boots" / "h1_maxlen_auto.log"), out=out, wait=lambda: False) == 0
    assert "BOOTED: " in out.getvalue()
    assert explain.follow(str(tmp_path / "gone.log"), out=out, wait=lambda: False) == 2


def test_boots_of_two_services_are_told_apart_by_name(tmp_path: Path) -> None:
    """``docker compose logs``: both fail alike, and are no crash loop."""
    lines = []
    for second, service in enumerate(("vllm-a-1", "vllm-b-1")):
        stamp = f"09-30 10:00:0{second}"
        lines += [
            f"{service}  | (APIServer pid=1) INFO {stamp} [api_server.py:1] vLLM API server version 0.23.0",
            f"{service}  | (EngineCore pid=7) ERROR {stamp} [core.py:1] ValueError: Free memory on device cuda:0 "
            "(31.29/31.86 GiB) on startup is less than desired GPU memory utilization (1.0, 31.86 GiB).",
        ]
    log = tmp_path / "compose.log"
    log.write_text("\n".join((lines[0], lines[2], lines[1], lines[3])) + "\n")
    text, status = text_of(log)
    assert status == 1
    assert "boot 2 of 2 [vllm-b-1]" in text
    assert "  1 [vllm-a-1] (lines " in text
    assert "crash loop" not in text
