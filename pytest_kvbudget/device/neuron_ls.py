"""Neuron devices as ``neuron-ls -j`` lists them: size, cores and who has them open. It shows no use of memory."""

from __future__ import annotations

from typing import Final

import msgspec

from pytest_kvbudget.device.command import DEADLINE_S, json_in, run_tool
from pytest_kvbudget.device.fields import decimal, index, rows, whole
from pytest_kvbudget.device.model import DeviceHolder, ProbeError

SOURCE: Final = "neuron-ls"


class NeuronDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One Neuron device."""

    number: int
    memory_bytes: int
    lnc: int
    """Logical NeuronCore size; 1 where the tool does not say, as on trn1."""
    cores: tuple[int, ...]
    """Logical cores, numbered over the whole host."""
    holders: tuple[DeviceHolder, ...] = ()
    """Processes that have the device open, without their memory."""
    numa_node: int | None = None


def parse_devices(text: str) -> tuple[NeuronDevice, ...]:
    """Read ``neuron-ls -j``.

    Raises:
        ProbeError: it is not that.
    """
    found = []
    for entry in rows(json_in(text, SOURCE), SOURCE):
        number = index(entry.get("neuron_device"), f"{SOURCE}: neuron_device")
        where = f"{SOURCE}: device {number}"
        count = index(entry.get("nc_count"), f"{where} nc_count")
        listed = entry.get("neuroncore_ids")
        # Older tools do not number the cores: they run through the devices in order.
        cores = listed if isinstance(listed, list) and listed else range(number * count, (number + 1) * count)
        found.append(
            NeuronDevice(
                number=number,
                memory_bytes=whole(entry.get("memory_size"), f"{where} memory_size"),
                lnc=index(entry.get("logical_neuroncore_config", 1), f"{where} logical_neuroncore_config"),
                cores=tuple(index(core, f"{where} neuroncore_ids") for core in cores),
                holders=tuple(
                    DeviceHolder(pid=index(row.get("pid"), f"{where} pid"), name=str(row.get("command") or ""))
                    for row in rows(entry.get("neuron_processes") or [], f"{where} neuron_processes")
                ),
                # A host without NUMA shows "-1".
                numa_node=decimal(str(entry.get("numa_node", "")).strip()),
            )
        )
    if not found:
        raise ProbeError(f"{SOURCE}: names no device; expected at least one")
    return tuple(found)


def read_devices(tool: str = SOURCE, *, timeout_s: float = DEADLINE_S) -> tuple[NeuronDevice, ...]:
    """Ask ``neuron-ls -j``.

    Raises:
        ProbeError: the tool is missing or late, there is no device, or it prints something else.
    """
    return parse_devices(run_tool([tool, "-j"], timeout_s=timeout_s))
