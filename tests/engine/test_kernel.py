"""What the kernel's log says of a process that is gone: by its place in the log, whatever any clock says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_kvbudget.engine.kernel import KernelLog

# the forms of mm/oom_kill.c: of a control group, and of the host; a record's head is priority, number, microseconds
GROUP = "3,981,{at},-;Memory cgroup out of memory: Killed process {pid} (VLLM::EngineCor) total-vm:1kB, anon-rss:2kB\n"
HOST = "3,982,{at},-;Out of memory: Killed process {pid} (python3) total-vm:1kB, anon-rss:2kB\n SUBSYSTEM=memory\n"


class Kernel:
    """A file in the place of ``/dev/kmsg``: what is read after one more line is one record."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "kmsg"
        self.path.write_text("")

    def say(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


@pytest.mark.parametrize(("line", "name"), [(GROUP, "VLLM::EngineCor"), (HOST, "python3")])
def test_a_kill_since_the_launch_is_found_whatever_its_time(kernel: Kernel, line: str, name: str) -> None:
    log = KernelLog(str(kernel.path))
    kernel.say(line.format(at=1, pid=42))  # one microsecond after the machine's boot, by a clock that jumped
    (kill,) = log.killed_for_memory({42})
    assert (kill.pid, kill.name) == (42, name)
    assert kill.text.endswith("anon-rss:2kB")
    assert log.killed_for_memory({42}) == (kill,), "asked again, it is still known"


def test_a_kill_from_before_the_launch_is_nobody_of_ours(kernel: Kernel) -> None:
    kernel.say(GROUP.format(at=10**15, pid=42))  # an id that is used again, at a time far ahead of any clock
    assert KernelLog(str(kernel.path)).killed_for_memory({42}) == ()


def test_another_process_is_not_ours(kernel: Kernel) -> None:
    log = KernelLog(str(kernel.path))
    kernel.say(GROUP.format(at=1, pid=42))
    assert log.killed_for_memory({41, 43}) == ()


@pytest.mark.parametrize("text", ["", "garbage\n", "3,4;Out of memory: Killed process 42 (x)\n", ";;;\n", "1,2,3,-;\n"])
def test_what_is_no_record_says_nothing(kernel: Kernel, text: str) -> None:
    log = KernelLog(str(kernel.path))
    kernel.say(text)
    assert log.killed_for_memory({42}) == ()


def test_a_log_that_cannot_be_read_is_not_known(tmp_path: Path) -> None:
    assert KernelLog(str(tmp_path / "missing")).killed_for_memory({42}) == ()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert KernelLog(str(pipe)).killed_for_memory({42}) == (), "no place in it: what it holds could be from before"


def test_a_closed_log_is_read_no_more(kernel: Kernel) -> None:
    log = KernelLog(str(kernel.path))
    log.close()
    log.close()
    kernel.say(GROUP.format(at=1, pid=42))
    assert log.killed_for_memory({42}) == ()
