"""Engines are shared by tests of one shape, and end when their owner does."""

from __future__ import annotations

import pytest

from tests.conftest import Project

DISTRIBUTIONS = pytest.mark.parametrize("how", [(), ("-n2", "--dist=worksteal"), ("-n2", "--dist=loadfile")])


def test_tests_of_one_shape_share_a_boot_and_become_neighbours(project: Project) -> None:
    project.tests("""
import pytest

big = pytest.mark.kv_shape(max_model_len=8192)
small = pytest.mark.kv_shape(max_model_len=4096)

@big
def test_a(kv_engine): assert kv_engine.shape.max_model_len == 8192

def test_plain(): pass

@small
def test_b(kv_engine): pass

@big
class TestC:
    def test_c(self, kv_ledger): pass

@small
def test_d(kv_ledger): pass
""")

    result = project.run("-v")

    result.assert_outcomes(passed=5)
    order = [line.split()[0].rpartition("::")[2] for line in result.outlines if " PASSED" in line]
    assert order == ["test_a", "test_plain", "test_c", "test_b", "test_d"]
    assert [record.shape.max_model_len for record in project.attempts()] == [8192, 4096]


@DISTRIBUTIONS
def test_two_workers_never_share_a_card(project: Project, how: tuple[str, ...]) -> None:
    project.configure(mock="seconds = { weights_load = 0.1 }")
    for name in ("a", "b"):
        project.tests(
            """
import pytest
@pytest.mark.parametrize("length", [4096, 8192])
def test_boots(kv_serve, length):
    with_card = kv_serve(max_model_len=length)
    assert with_card.alive
""",
            f"test_{name}.py",
        )

    project.run(*how).assert_outcomes(passed=4)

    attempts = project.attempts()
    assert len({record.run.run for record in attempts}) == 1
    for record in attempts:
        idle = next(reading for reading in record.memory if reading.moment == "idle")
        assert idle.devices[0].used_bytes < 2**30


def test_an_engine_lives_as_long_as_the_fixture_that_asked_for_it(project: Project) -> None:
    project.tests("""
import pytest

@pytest.fixture(scope="module")
def shared(kv_serve):
    return kv_serve(max_model_len=8192)

def test_first(shared):
    assert shared.alive
    assert shared.complete("hello", 2)["usage"]["completion_tokens"] == 2

def test_second(shared): assert shared.alive

def test_no_card_is_left(kv_engine): pass
""")
    project.configure(shape="max_model_len = 4096")
    project.tests(
        """
import pytest
def test_card_is_free_again(kv_engine): assert kv_engine.alive
""",
        "test_later.py",
    )

    result = project.run()

    # The shared engine holds the only card: to wait for it would be to wait for oneself.
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["no engine for *every device of target card is in use*kv_serve*"])


def test_sizes_of_served_shapes_may_be_text_and_unknown_fields_are_named(project: Project) -> None:
    project.tests("""
def test_text(kv_serve):
    assert kv_serve(max_model_len=4096, kv_cache_memory_bytes="25 MiB").ledger.kv_cache.tokens == 25_600

def test_unknown(kv_serve):
    kv_serve(max_model_length=4096)
""")

    result = project.run()

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*MarkerError: kv_serve: max_model_length: unknown key*max_num_seqs*"])


def test_kv_rung_outside_a_ladder_says_what_is_missing(project: Project) -> None:
    project.tests("def test_it(kv_rung): pass\n")

    result = project.run()

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["kv_rung is there only in a test marked @pytest.mark.ladder*"])


def test_closest_mark_wins_and_environments_add_up(project: Project) -> None:
    project.tests("""
import pytest
pytestmark = pytest.mark.kv_shape(max_model_len=4096, env={"A": "1", "B": "1"})

@pytest.mark.kv_shape(max_model_len=8192, env={"B": "2"})
def test_it(kv_shape):
    assert kv_shape.max_model_len == 8192
    assert kv_shape.env == {"A": "1", "B": "2"}
    assert kv_shape.kv_cache_memory_bytes == 50 * 2**20
""")

    project.run().assert_outcomes(passed=1)
    assert project.attempts() == []
