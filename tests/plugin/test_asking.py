"""What a test asks of a boot: the same digest only where everything that judges the boot is the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pytest_kvbudget.plugin.asking import digest

HELPER = """
from other import LIMIT

SLOTS = 7_500
UNUSED = 1

class Gate:
    def __init__(self, least):
        self.least = least

    def holds(self, value):
        return value >= self.least

def enough(value):
    return value >= deeper()

def deeper():
    return 3
"""
TESTS = """
import helper
import pytest
from helper import Gate, SLOTS, enough

LIST = [1, 2]
NAMES = {"a", "b", "c"}
GATE = Gate(5)

def least():
    return 9

@pytest.fixture
def under():
    return SLOTS + 1

@pytest.mark.parametrize("many", LIST, ids=["few", "more"])
def test_it(under, many, so_many=len(LIST)):
    assert enough(under) and least() and GATE.holds(9) and NAMES
    assert all(part < LIST[1] for part in helper.LIMIT)

def test_other():
    assert 1
"""
OTHER = "LIMIT = (1, 0)\n"

CHANGES = {
    "constant": ("test_it.py", "LIST = [1, 2]", "LIST = [1, 3]"),
    "set": ("test_it.py", '{"a", "b", "c"}', '{"a", "b", "d"}'),
    "function": ("test_it.py", "return 9", "return 10"),
    "fixture": ("test_it.py", "SLOTS + 1", "SLOTS + 2"),
    "imported constant": ("helper.py", "7_500", "7_501"),
    "imported function": ("helper.py", "value >= deeper()", "value > deeper()"),
    "what that calls": ("helper.py", "return 3", "return 4"),
    "what an object holds": ("test_it.py", "Gate(5)", "Gate(6)"),
    "method": ("helper.py", "value >= self.least", "value > self.least"),
    "constant of a module's module": ("other.py", "(1, 0)", "(0, 0)"),
}


def asked(pytester: pytest.Pytester, **files: str) -> str:
    """The digest, in a process of its own: other hashes of strings, other addresses."""
    pytester.makepyfile(**{"helper": HELPER, "other": OTHER, "test_it": TESTS, **files})
    script = (
        "import sys, pytest\n"
        "from pytest_kvbudget.plugin.asking import digest\n"
        "class Plugin:\n"
        "    def pytest_collection_finish(self, session):\n"
        "        print('digest', digest(session.items[0], 1))\n"
        "pytest.main(['-q', '--collect-only', '-p', 'no:cacheprovider'], plugins=[Plugin()])\n"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", script], cwd=pytester.path, capture_output=True, text=True, check=True
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("digest ")]
    assert line != "digest None"
    return line


def test_the_same_in_another_process_and_beside_other_tests(pytester: pytest.Pytester) -> None:
    first = asked(pytester)
    assert asked(pytester) == first
    assert asked(pytester, test_it=TESTS.replace("assert 1", "assert 2")) == first
    assert asked(pytester, test_zero="def test_zero(): ...\n") == first


@pytest.mark.parametrize("change", CHANGES)
def test_another_gate_asks_something_else(pytester: pytest.Pytester, change: str) -> None:
    first = asked(pytester)
    name, old, new = CHANGES[change]
    text = {"test_it.py": TESTS, "helper.py": HELPER, "other.py": OTHER}[name]
    assert old in text
    assert asked(pytester, **{name.removesuffix(".py"): text.replace(old, new)}) != first


FORMS = """
import dataclasses
import functools
import pytest
from collections import namedtuple

NEED = 8
Pair = namedtuple("Pair", "low high")

@dataclasses.dataclass(frozen=True)
class Limits:
    least: int = 8

class Consts:
    TOKENS = NEED

class Gate:
    def __init__(self, least):
        self.least = least
    def check(self, value):
        return value >= self.least

def over(least, value):
    return value >= least

partial = functools.partial(over, NEED)
bound = Gate(NEED).check
LIMITS = Limits()
PAIR = Pair(1, NEED)

def needs(least):
    def decorate(test):
        @functools.wraps(test)
        def wrapper(*arguments, **named):
            assert least
            return test(*arguments, **named)
        return wrapper
    return decorate

class Base:
    def helper(self):
        return NEED
    @staticmethod
    def fixed():
        return 7
    @property
    def derived(self):
        return 6

class TestForms(Base):
    LIMIT = 8
    def setup_method(self):
        self.need = 8
    def test_it(self):
        {body}
"""
BODIES = {
    "class attribute": ("assert self.LIMIT", "LIMIT = 8", "LIMIT = 9"),
    "inherited method": ("assert self.helper()", "return NEED", "return NEED + 1"),
    "setup": ("assert self.need", "self.need = 8", "self.need = 9"),
    "partial": ("assert partial(9)", "NEED = 8", "NEED = 9"),
    "bound method": ("assert bound(9)", "NEED = 8", "NEED = 9"),
    "attribute of a class": ("assert Consts.TOKENS", "NEED = 8", "NEED = 9"),
    "dataclass": ("assert LIMITS.least", "least: int = 8", "least: int = 9"),
    "named tuple": ("assert PAIR.high", "NEED = 8", "NEED = 9"),
    "static method": ("assert self.fixed()", "return 7", "return 70"),
    "property": ("assert self.derived", "return 6", "return 60"),
    "import in the body": ("from other import LIMIT; assert LIMIT", "", ""),
}


@pytest.mark.parametrize("form", BODIES)
def test_a_limit_is_seen_in_whatever_form_it_comes(pytester: pytest.Pytester, form: str) -> None:
    body, old, new = BODIES[form]
    text = FORMS.replace("{body}", body)
    first = asked(pytester, test_it=text)
    assert asked(pytester, test_it=text) == first
    changed = OTHER.replace("(1, 0)", "(2, 0)") if not old else OTHER
    assert asked(pytester, test_it=text.replace(old, new) if old else text, other=changed) != first


def test_a_decorator_with_a_limit_of_its_own(pytester: pytest.Pytester) -> None:
    text = FORMS.replace("    def test_it", "    @needs(NEED)\n    def test_it").replace("{body}", "assert self")
    assert asked(pytester, test_it=text) != asked(pytester, test_it=text.replace("NEED = 8", "NEED = 9"))


@pytest.mark.parametrize(
    "source",
    [
        "def test_it():\n    import nowhere.deeper\n",
        "def test_it():\n    from . import nowhere\n",
        "class Odd:\n    def __repr__(self):\n        raise RuntimeError\nODD = {Odd()}\n"
        "def test_it():\n    assert ODD\n",
    ],
    ids=["import of what is not there", "relative import without a package", "an object that cannot be shown"],
)
def test_what_cannot_be_looked_at_costs_no_run(pytester: pytest.Pytester, source: str) -> None:
    item = pytester.getitem(source, "test_it")
    assert isinstance(item, pytest.Function)
    assert digest(item) is None


def test_an_installed_module_that_a_body_imports_is_not_looked_into(pytester: pytest.Pytester) -> None:
    item = pytester.getitem("def test_it():\n    import wave, xml.sax.expatreader\n    assert wave\n", "test_it")
    assert isinstance(item, pytest.Function)
    assert digest(item) is not None


def test_what_changes_while_tests_run_was_looked_at_before(pytester: pytest.Pytester) -> None:
    item = pytester.getitem("SEEN = []\ndef test_it():\n    SEEN.append(1)\n", "test_it")
    assert isinstance(item, pytest.Function)
    first = digest(item)
    item.obj()
    assert digest(item) == first
    assert first is not None


def test_a_fixture_that_only_the_run_names_cannot_be_compared(pytester: pytest.Pytester) -> None:
    item = pytester.getitem("def test_it(request):\n    assert request.getfixturevalue('limit')\n", "test_it")
    assert isinstance(item, pytest.Function)
    assert digest(item) is None
