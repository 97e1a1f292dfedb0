"""What sampling device memory costs: processor time of the sampler's thread over wall time.

Prints one table; run it with ``python -m tests.benchmarks.trace_cost [SECONDS]``. Goal: at most 1 % of one core at
10 samples per second for 8 devices with the sysfs probe.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

from pytest_kvbudget.device.model import DeviceMemory, MemoryProbe
from pytest_kvbudget.device.neuron_sysfs import NeuronSysfsProbe
from pytest_kvbudget.device.sampler import MemorySampler
from pytest_kvbudget.device.sysfs import AmdSysfsProbe
from pytest_kvbudget.device.trace import encode, end_s, phases

DEVICES: Final = 8
SECONDS: Final = 10.0
GOAL: Final = 0.01


class Metered:
    """A probe that tells how much processor time the thread that asks it has had."""

    def __init__(self, probe: MemoryProbe) -> None:
        self._probe = probe
        self.thread_s = 0.0

    def read(self) -> tuple[DeviceMemory, ...]:
        """One reading; the thread's time so far, what it spent waiting for its tick and storing included."""
        readings = self._probe.read()
        self.thread_s = time.thread_time()
        return readings


def amd_tree(root: Path) -> AmdSysfsProbe:
    """Eight cards."""
    for card in range(DEVICES):
        device = root / "class" / "drm" / f"card{card}" / "device"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x1002\n")
        (device / "mem_info_vram_total").write_text("34208743424\n")
        (device / "mem_info_vram_used").write_text("27856896\n")
    return AmdSysfsProbe(root, [str(card) for card in range(DEVICES)])


def neuron_tree(root: Path) -> NeuronSysfsProbe:
    """Two Trainium2 chips: eight logical cores of two physical ones."""
    for chip in range(DEVICES // 4):
        device = root / "devices" / "virtual" / "neuron_device" / f"neuron{chip}"
        (device / "info" / "architecture").mkdir(parents=True)
        (device / "info" / "architecture" / "device_name").write_text("Trainium2\n")
        for core in range(8):
            counter = device / f"neuron_core{core}" / "stats" / "memory_usage" / "device_mem"
            counter.mkdir(parents=True)
            (counter / "total").write_text("10737418240\n")
    return NeuronSysfsProbe([str(core) for core in range(DEVICES)], root=root)


def measure(probe: MemoryProbe, rate_hz: float, seconds: float, change: Path) -> tuple[float, int]:
    """Share of one core, and bytes of the trace, over some seconds of changing memory."""
    metered = Metered(probe)
    sampler = MemorySampler(metered, rate_hz=rate_hz)
    sampler.start()
    sampler.mark("launch")
    pause = threading.Event()
    text = change.read_text()
    for step in range(int(seconds * 2)):
        pause.wait(0.5)
        whole = change.with_name("new")
        whole.write_text(f"{int(text) + step * 2**20}\n")
        whole.replace(change)
    trace = sampler.stop()
    change.write_text(text)
    if not phases(trace) or trace.gaps:
        raise RuntimeError(f"the trace is not whole: {trace.gaps}")
    return metered.thread_s / end_s(trace), len(encode(trace))


def main(seconds: float) -> int:
    """Print the table; 1 where the goal is missed."""
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        amd, neuron = Path(folder, "amd"), Path(folder, "neuron")
        cases = (
            ("AMD sysfs", amd_tree(amd), next(amd.rglob("card0/device/mem_info_vram_used"))),
            ("Neuron sysfs", neuron_tree(neuron), next(neuron.rglob("neuron0/neuron_core0/**/device_mem/total"))),
        )
        for name, probe, change in cases:
            for rate_hz in (10.0, 100.0):
                share, size = measure(probe, rate_hz, seconds, change)
                per_hour = size * 3600 / seconds / 2**20
                print(
                    f"{name:13} {DEVICES} devices {rate_hz:5.0f} Hz: {share:7.3%} of one core, "
                    f"{size} bytes of trace in {seconds:g} s ({per_hour:.2f} MiB per hour at 2 changes a second)"
                )
                if rate_hz == 10.0:
                    worst = max(worst, share)
    print(f"goal: {GOAL:.0%} at 10 Hz; worst: {worst:.3%}")
    return int(worst > GOAL)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS))
