"""Memory control groups, v1 and v2, NUMA nodes and process trees."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.device.cgroup import CgroupProbe, MemoryCgroup
from pytest_kvbudget.device.host import read_numa, read_tree
from pytest_kvbudget.device.model import ProbeError

MIB = 2**20
NO_LIMIT_V1 = "9223372036854771712"


def process(proc: Path, *, groups: str, mounts: str, pid: int = 7, available_mib: int = 8192) -> int:
    """A process as /proc shows it, on a host with memory to spare."""
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "cgroup").write_text(groups)
    (folder / "mountinfo").write_text(mounts)
    kib = available_mib * 1024
    (proc / "meminfo").write_text(f"MemTotal: {2 * kib} kB\nMemAvailable: {kib} kB\nMlocked: 0 kB\n")
    return pid


def group_v2(folder: Path, *, limit: str, current: int, inactive_file: int = 0, kills: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 1\nfile 2\ninactive_file {inactive_file}\nactive_file 3\n")
    (folder / "memory.events").write_text(f"low 0\nhigh 0\nmax 12\noom 3\noom_kill {kills}\noom_group_kill 0\n")


def group_v1(folder: Path, *, limit: str, usage: int, inactive_file: int = 0, kills: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"cache 1\ninactive_file 9\ntotal_inactive_file {inactive_file}\n")
    (folder / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")


def on_v2(tmp_path: Path, group: str = "/kube/engine") -> tuple[int, Path, Path]:
    mount = tmp_path / "cg"
    pid = process(
        tmp_path / "proc", groups=f"0::{group}\n", mounts=f"30 25 0:26 / {mount} rw,nosuid - cgroup2 cgroup2 rw\n"
    )
    return pid, tmp_path / "proc", mount


def test_v2_limit_of_a_parent_binds_where_it_leaves_less(tmp_path: Path) -> None:
    pid, proc, mount = on_v2(tmp_path)
    mount.mkdir()
    group_v2(mount / "kube", limit=str(1000 * MIB), current=950 * MIB, inactive_file=10 * MIB)
    group_v2(mount / "kube" / "engine", limit=str(900 * MIB), current=500 * MIB, kills=2)
    memory = MemoryCgroup(pid, proc).read()
    assert (memory.version, memory.path) == (2, str(mount / "kube"))
    assert (memory.limit_bytes, memory.needed_bytes) == (1000 * MIB, 940 * MIB)
    assert memory.oom_kills == 2  # of the process' own group
    (reading,) = CgroupProbe(pid, proc=proc).read()
    assert (reading.total_bytes, reading.used_bytes, reading.free_bytes) == (1000 * MIB, 940 * MIB, 60 * MIB)
    assert (reading.device, reading.source) == ("host", "cgroup-v2")


def test_without_a_limit_the_host_binds(tmp_path: Path) -> None:
    pid, proc, mount = on_v2(tmp_path, "/engine")
    group_v2(mount / "engine", limit="max", current=100 * MIB)
    assert MemoryCgroup(pid, proc).read().limit_bytes is None
    (reading,) = CgroupProbe(pid, proc=proc).read()
    assert (reading.used_bytes, reading.free_bytes) == (100 * MIB, 8192 * MIB)


def test_a_host_with_less_than_the_limit_leaves_binds(tmp_path: Path) -> None:
    pid, proc, mount = on_v2(tmp_path, "/engine")
    group_v2(mount / "engine", limit=str(2**40), current=100 * MIB)
    (reading,) = CgroupProbe(pid, proc=proc).read()
    assert reading.free_bytes == 8192 * MIB


def test_limit_lowered_under_the_use_leaves_nothing(tmp_path: Path) -> None:
    pid, proc, mount = on_v2(tmp_path, "/engine")
    group_v2(mount / "engine", limit=str(80 * MIB), current=100 * MIB)
    (reading,) = CgroupProbe(pid, proc=proc).read()
    assert (reading.used_bytes, reading.free_bytes) == (100 * MIB, 0)


def test_v1_on_a_hybrid_host(tmp_path: Path) -> None:
    mount = tmp_path / "cg" / "memory"
    mounts = (
        f"31 25 0:27 / {tmp_path}/cg/unified rw - cgroup2 cgroup2 rw\n"
        f"32 25 0:28 / {tmp_path}/cg/cpu rw - cgroup cgroup rw,cpu\n"
        f"33 25 0:29 / {mount} rw,relatime shared:5 - cgroup cgroup rw,memory\n"
    )
    pid = process(tmp_path / "proc", groups="4:memory:/ci/engine\n1:cpu:/\n0::/\n", mounts=mounts)
    group_v1(mount, limit=NO_LIMIT_V1, usage=5000 * MIB)
    group_v1(mount / "ci", limit=NO_LIMIT_V1, usage=1600 * MIB)
    group_v1(mount / "ci" / "engine", limit=str(1520 * MIB), usage=1500 * MIB, inactive_file=50 * MIB, kills=1)
    cgroup = MemoryCgroup(pid, tmp_path / "proc")
    memory = cgroup.read()
    assert (memory.version, memory.path) == (1, str(mount / "ci" / "engine"))
    assert (memory.limit_bytes, memory.needed_bytes, memory.oom_kills) == (1520 * MIB, 1450 * MIB, 1)
    # The process is gone; its group still says why.
    (tmp_path / "proc" / "7" / "cgroup").unlink()
    assert cgroup.oom_kills() == 1


def test_container_sees_its_group_as_the_root_of_the_mount(tmp_path: Path) -> None:
    mount = tmp_path / "a b"
    escaped = str(mount).replace(" ", "\\040")
    pid = process(
        tmp_path / "proc", groups="0::/docker/f00\n", mounts=f"30 25 0:26 /docker/f00 {escaped} ro - cgroup2 none ro\n"
    )
    group_v2(mount, limit=str(64 * MIB), current=MIB)
    assert MemoryCgroup(pid, tmp_path / "proc").read().limit_bytes == 64 * MIB


@pytest.mark.parametrize(
    ("groups", "mounts", "match"),
    [
        ("1:cpu:/\n", "", "names no memory controller"),
        ("0::/\n", "30 25 0:26 / /x rw - tmpfs tmpfs rw\n", "no cgroup2 with the memory controller"),
        ("4:memory:/a\n", "30 25 0:26 / /x rw - cgroup cgroup rw,cpu\n", "no cgroup with the memory controller"),
        ("", "garbage\n- \n", "names no memory controller"),
    ],
)
def test_no_memory_controller_is_an_error(tmp_path: Path, groups: str, mounts: str, match: str) -> None:
    pid = process(tmp_path, groups=groups, mounts=mounts)
    with pytest.raises(ProbeError, match=match):
        MemoryCgroup(pid, tmp_path)


def test_dead_process_root_group_and_garbled_values_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="expected a living process"):
        MemoryCgroup(7, tmp_path)
    pid, proc, mount = on_v2(tmp_path, "/")
    mount.mkdir()
    with pytest.raises(ProbeError, match=r"has no memory.current; expected a control group"):
        MemoryCgroup(pid, proc).read()
    group_v2(mount, limit="N/A", current=1)
    with pytest.raises(ProbeError, match=r"memory.max: shows 'N/A'"):
        MemoryCgroup(pid, proc).read()


@given(st.text(max_size=40), st.text(max_size=60))
def test_any_text_gives_a_group_or_an_error(tmp_path_factory: pytest.TempPathFactory, groups: str, mounts: str) -> None:
    proc = tmp_path_factory.mktemp("proc")
    (proc / "7").mkdir()
    (proc / "7" / "cgroup").write_text(groups, encoding="utf-8")
    (proc / "7" / "mountinfo").write_text(mounts, encoding="utf-8")
    with pytest.raises(ProbeError):
        MemoryCgroup(7, proc)


def test_this_process_has_a_group() -> None:
    try:
        memory = MemoryCgroup(os.getpid()).read()
    except ProbeError as error:
        pytest.skip(f"no memory control group here: {error}")
    assert memory.usage_bytes >= memory.reclaimable_bytes
    assert Path(memory.path).is_dir()


def test_numa_nodes_add_up_to_no_more_than_the_host(tmp_path: Path) -> None:
    for node, total in ((0, 100), (10, 300), (2, 200)):
        folder = tmp_path / "devices" / "system" / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "meminfo").write_text(f"Node {node} MemTotal:  {total} kB\nNode {node} MemFree:   7 kB\n")
    assert [(node.node, node.total_bytes, node.free_bytes) for node in read_numa(tmp_path)] == [
        (0, 102_400, 7168),
        (2, 204_800, 7168),
        (10, 307_200, 7168),
    ]
    with pytest.raises(ProbeError, match="has no node"):
        read_numa(tmp_path / "devices")


def test_a_tree_s_memory_counts_shared_pages_once() -> None:
    code = "import os,sys\nblock=bytearray(b'x')*(64<<20)\npid=os.fork()\n"
    code += "if pid: print(pid,flush=True)\nsys.stdin.read()\n"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as top:
        assert top.stdout is not None
        child = int(top.stdout.readline())
        tree = read_tree(top.pid)
        assert (tree.processes, tree.unreadable) == (2, 0)
        both = sum(psutil.Process(pid).memory_info().rss for pid in (top.pid, child))
        assert 64 * MIB < tree.pss_bytes < both - 48 * MIB
        top.communicate()
    with pytest.raises(ProbeError, match="expected a living process"):
        read_tree(top.pid)


def test_a_process_that_cannot_be_read_is_counted_not_taken_for_0(tmp_path: Path) -> None:
    for pid, text in ((7, "Rss: 9 kB\nPss: 5 kB\n"), (8, None), (9, "Pss: what\n")):
        (tmp_path / str(pid)).mkdir()
        if text is not None:
            (tmp_path / str(pid) / "smaps_rollup").write_text(text)
    tree = read_tree(7, tmp_path, below=[8, 9, 10])
    assert (tree.pss_bytes, tree.processes, tree.unreadable) == (5 * 1024, 1, 2)


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A real memory control group of our own, where this host lets us make one; v1 or v2."""
    try:
        own = MemoryCgroup(os.getpid())
        folder = own.folders[-1] / f"kvbudget-test-{os.getpid()}"
        folder.mkdir()
    except (ProbeError, OSError) as error:
        pytest.skip(f"no memory control group can be made here: {error}")
    try:
        if not (folder / "memory.stat").exists() or not os.access(folder / "cgroup.procs", os.W_OK):
            pytest.skip("a new control group has no memory controller here")
        yield folder
    finally:
        # Empty once its processes are reaped; the kernel may take a moment.
        deadline = time.monotonic() + 10
        while folder.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                folder.rmdir()


def test_the_kernel_s_kill_in_a_real_group_is_seen(limited_group: Path) -> None:
    code = "import sys\nsys.stdin.readline()\nblock = bytearray(b'x') * (96 << 20)\nprint(len(block), flush=True)\n"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        (limited_group / "cgroup.procs").write_text(str(engine.pid))
        version = MemoryCgroup(engine.pid).version
        name = "memory.limit_in_bytes" if version == 1 else "memory.max"
        (limited_group / name).write_text(str(48 * MIB))
        cgroup = MemoryCgroup(engine.pid)
        before = cgroup.read()
        assert (before.path, before.limit_bytes, before.oom_kills) == (str(limited_group), 48 * MIB, 0)
        assert CgroupProbe(engine.pid).read()[0].free_bytes <= 48 * MIB
        output, _ = engine.communicate("go\n", timeout=60)
    if output:
        pytest.skip("this host swapped instead of killing")
    assert engine.returncode == -9
    assert cgroup.oom_kills() == 1
