from __future__ import annotations

from pathlib import Path

import pytest

from pytest_kvbudget.ledger.model import BootLedger, Cause, Evidence, Lever
from pytest_kvbudget.records import AttemptRecord, Timings
from pytest_kvbudget.report.html import write_attempt_page
from pytest_kvbudget.search.model import Hint
from pytest_kvbudget.verdict import Phase, Verdict
from tests.report.building import LOG, attempt, value, write_attempt, write_ladder
from tests.report.reading import Node, read_page, table_rows


def page_of(root: Path, record: AttemptRecord, log: list[str] | None = None) -> Node:
    path = write_attempt_page(write_attempt(root, record, log))
    assert path.name == "rung.html"
    return read_page(path)


@pytest.mark.parametrize(
    ("verdict", "by_gate", "word", "meaning"),
    [
        (Verdict.PASS, False, "PASS", "Booted and passed"),
        (Verdict.MARGINAL, False, "MARGINAL", "Passed, with less margin than asked for"),
        (Verdict.FAIL, False, "FAIL", "Failed for memory"),
        (Verdict.FAIL, True, "FAIL (gate)", "Refused by the test, not by memory"),
        (Verdict.UNKNOWN, False, "UNKNOWN", "No verdict"),
        (Verdict.ERROR, False, "ERROR", "Failed, but not for memory"),
    ],
)
def test_headline_says_the_verdict_in_words(
    tmp_path: Path, verdict: Verdict, by_gate: bool, word: str, meaning: str
) -> None:
    gate = Cause(phase=Phase.READY, failure_class="gate", sentence="assert 3 > 4", by_gate=True)
    record = attempt(245_760, verdict)
    record.cause = gate if by_gate else record.cause
    page = page_of(tmp_path, record)
    assert page.one("h1").one("span", "word").text == word
    assert page.one("h1").one("span", "meaning").text == meaning
    if by_gate:
        assert "says nothing about memory" in page.text


@pytest.mark.parametrize(
    ("message", "lead"),
    [
        ("interrupted: interrupted: this boot was called off before a test body judged it",
         "this boot was called off before a test body judged it"),
        ("interrupted: this boot was called off: other boots had answered", "called off: other boots had answered"),
        ("interrupted: the run ended before this boot had a verdict",
         "interrupted: the run ended before this boot had a verdict"),
    ],
)  # fmt: skip
def test_a_boot_that_was_called_off_says_it_once(tmp_path: Path, message: str, lead: str) -> None:
    cause = Cause(phase=Phase.READY, failure_class="interrupted", sentence=message.partition(": ")[2])
    path = write_attempt(tmp_path, attempt(4_096, Verdict.UNKNOWN, cause=cause, message=message))
    assert read_page(write_attempt_page(path)).one("p", "lead").text == lead


def test_cause_levers_and_evidence(tmp_path: Path) -> None:
    page = page_of(tmp_path, attempt(245_760, Verdict.FAIL))
    assert page.one("p", "lead").text == "Graph capture asked for 76.00 MiB with 0 B free on Worker_TP0."
    assert [
        (node.one("h3").text, [entry.one("b").text for entry in node.all("li")]) for node in page.all("div", "levers")
    ] == [
        ("turn this", ["lower max_model_len", "lower gpu_memory_utilization"]),
        ("no use", ["lower max_num_seqs"]),
        ("makes it worse", ["raise gpu_memory_utilization"]),
    ]
    assert page.one("blockquote").one("a").attributes["href"] == "#L10"
    assert [(entry.one("dt").text, entry.one("dd").text) for entry in page.one("dl", "figures").all("div")] == [
        ("tried to allocate", "76.00 MiB"),
        ("free", "0 B"),
        ("short by", "76.00 MiB"),
    ]


def test_facts_have_value_provenance_rank_and_line(tmp_path: Path) -> None:
    page = page_of(tmp_path, attempt(245_760, Verdict.FAIL))
    rows = table_rows(page, "facts")
    assert ["kv_tokens", "245,760 tokens", "", "measured", "", "8"] in rows
    at = rows.index(["model_load_bytes", "24.57 GiB", "26,381,836,616 B ± 5.12 MiB", "measured", "Worker_TP0", "4"])
    assert rows[at + 1] == ["", "24.55 GiB", "26,360,361,779 B ± 5.12 MiB", "measured", "Worker_TP1", "5"]
    assert ["peak_activation_bytes", "not stated", "absent"] in rows
    targets = {node.attributes["id"] for node in page.all() if "id" in node.attributes}
    links = {node.attributes["href"] for node in page.one("table", "facts").all("a")}
    assert links == {"#L4", "#L5", "#L6", "#L7", "#L8", "#L10"}
    assert {link.removeprefix("#") for link in links} <= targets


def test_a_missing_value_is_never_zero(tmp_path: Path) -> None:
    record = attempt(4_096, Verdict.UNKNOWN, ledger=None, memory=(), timings=Timings(), hint=Hint(), cause=None)
    page = page_of(tmp_path, record, [])
    assert "No line of this log states a number." in page.text
    assert "No line of this log states a memory term" in page.text
    assert not page.all("figure")
    pairs = {
        entry.one("dt").text: entry.one("dd").text for node in page.all("dl", "pairs") for entry in node.all("div")
    }
    for name in ("launch to ready", "signal to verdict", "teardown", "memory back after", "exit status", "engine"):
        assert pairs[name] == "not stated"


def test_terms_that_no_line_states_are_listed_as_such(tmp_path: Path) -> None:
    page = page_of(tmp_path, attempt(241_664))
    account = page.all("figure", "bar")[0]
    entries = {entry.one("span", "term").text: entry.one("span", "num").text for entry in account.all("li")}
    assert entries == {
        "weights": "24.57 GiB",
        "KV cache": "4.87 GiB",
        "CUDA graphs (estimate)": "0.31 GiB",
        "left by this account": "2.11 GiB",
        "non-torch": "not stated",
        "peak activation": "not stated",
    }


@pytest.mark.parametrize("simulated", [True, False])
def test_simulated_cannot_be_overlooked(tmp_path: Path, simulated: bool) -> None:
    page = page_of(tmp_path, attempt(245_760, Verdict.FAIL, simulated=simulated))
    assert page.one("head").one("title").text.startswith("[simulated] ") is simulated
    assert bool(page.all("div", "simulated")) is simulated
    assert bool(page.one("h1").all("span", "badge-simulated")) is simulated
    kinds = {node.text for figure in page.all("figure", "bar") for node in figure.all("span", "kind")}
    assert kinds == ({"simulated"} if simulated else {"measured"})


HOSTILE = "</code></main><script>alert(\"x\")</script><b onmouseover='y'>&lt;\x1b[31m\x00\u202egnp.exe"


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    ledger = BootLedger(family=HOSTILE, facts={HOSTILE: value(HOSTILE, "text", 1, HOSTILE)})
    cause = Cause(
        phase=Phase.KV_CHECK,
        failure_class=HOSTILE,
        sentence=HOSTILE,
        evidence=(Evidence(1, HOSTILE),),
        levers=(Lever(HOSTILE, "raise", "helps", HOSTILE),),
        rank=HOSTILE,
    )
    record = attempt(
        4_096, Verdict.FAIL, ledger=ledger, cause=cause, message=HOSTILE, rung=HOSTILE, notes=(HOSTILE,),
        command=("vllm", HOSTILE), environment={"NAME": HOSTILE}, endpoint=HOSTILE, left_serving=True,
    )  # fmt: skip
    page = page_of(tmp_path, record, [HOSTILE])
    assert not page.all("script")
    assert not [node for node in page.all() if any(name.startswith("on") for name in node.attributes)]
    line = next(node for node in page.all("div", "l") if node.attributes["id"] == "L1")
    assert line.one("code").text == "</code></main><script>alert(\"x\")</script><b onmouseover='y'>&lt;␀\ufffdgnp.exe"


def test_the_page_needs_nothing_outside_itself(tmp_path: Path) -> None:
    record = attempt(241_664, left_serving=True, endpoint="http://127.0.0.1:8000")
    page = page_of(tmp_path, record, [*LOG, "INFO: docs at https://docs.example.org/x.css"])
    for node in page.all():
        assert node.tag not in {"script", "link", "img", "iframe", "object"}
        for name, text in node.attributes.items():
            assert name == "content" or "//" not in text, f"<{node.tag} {name}={text!r}>"
    style = page.one("style").text
    assert "http" not in style
    assert "@import" not in style
    assert style.count("url(") == style.count("url(#")


def test_a_large_log_is_cut_and_says_so(tmp_path: Path) -> None:
    log = [f"line {number} of a long boot" for number in range(1, 5_001)]
    ledger = BootLedger(family="vllm", facts={"kv_tokens": value(401_408, "tokens", 2_500)})
    page = page_of(tmp_path, attempt(200_704, ledger=ledger), log)
    shown = [int(node.attributes["id"].removeprefix("L")) for node in page.all("div", "l")]
    assert shown == [*range(1, 201), *range(2_497, 2_504), *range(4_601, 5_001)]
    assert [node.text for node in page.all("div", "gap")] == [
        "⋯ 2,296 lines left out, see engine.log",
        "⋯ 2,097 lines left out, see engine.log",
    ]
    evidence = page.one("div", "ev")
    assert evidence.attributes["id"] == "L2500"
    assert evidence.one("span", "gives").text == "kv_tokens"


def test_a_redrawn_line_counts_once_and_shows_its_last_state(tmp_path: Path) -> None:
    page = page_of(tmp_path, attempt(241_664))
    line = page.all("div", "l")[8]
    assert line.attributes["id"] == "L9"
    assert "66%" in line.text
    assert "33%" not in line.text


def test_a_lost_log_is_said_and_nothing_links_into_it(tmp_path: Path) -> None:
    path = write_attempt(tmp_path, attempt(245_760, Verdict.FAIL))
    path.with_name("engine.log").unlink()
    page = read_page(write_attempt_page(path))
    assert "The log engine.log is not beside this record." in page.text
    assert not [node for node in page.all("a") if node.attributes["href"].startswith("#")]


def test_a_record_cannot_make_the_page_read_another_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("do not show this", encoding="utf-8")
    path = write_attempt(tmp_path / "archive", attempt(241_664, log=str(tmp_path / "secret")))
    assert "do not show this" not in read_page(write_attempt_page(path)).text


def test_phases_have_a_start_and_an_end_only_where_one_was_seen(tmp_path: Path) -> None:
    failed = page_of(tmp_path / "failed", attempt(245_760, Verdict.FAIL)).all("div", "phase-row")
    passed = page_of(tmp_path / "passed", attempt(241_664)).all("div", "phase-row")
    # the log names its first phase after 0.4 s
    assert failed[0].text == passed[0].text == "starting+0 s400 ms"
    assert failed[3].text == passed[3].text == "weights load+27 s91 s"
    assert failed[-1].text == "graph capture+2 min 39 send not stated"
    assert passed[-1].text == "graph capture+2 min 39 s4 min 14 s"


def test_the_command_can_be_pasted(tmp_path: Path) -> None:
    record = attempt(241_664, command=("vllm", "serve", "a model", "--max-model-len", "241664", "--enforce-eager"))
    blocks = [node.one("code") for node in page_of(tmp_path, record).all("pre", "code")]
    assert "".join(blocks[1].pieces) == "vllm serve 'a model' \\\n    --max-model-len 241664 \\\n    --enforce-eager"
    assert "".join(blocks[0].pieces) == "HF_TOKEN='<removed>'\nHIP_VISIBLE_DEVICES=0,1"


def test_a_rung_links_to_its_ladder_where_there_is_one(tmp_path: Path) -> None:
    alone = page_of(tmp_path / "alone", attempt(241_664))
    assert "ladder.html" not in str([node.attributes.get("href") for node in alone.all("a")])
    finding = write_ladder(tmp_path / "ladder", [attempt(241_664)])
    page = read_page(write_attempt_page(next(finding.parent.rglob("attempt.json"))))
    assert [node.text for node in page.all("a") if node.attributes["href"] == "../ladder.html"] == [
        "all rungs of this ladder"
    ]
