"""``kvbudget plan``: what a shape will be given, before any boot, from flags or from a configured target."""

from __future__ import annotations

import argparse
import copy
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TextIO

import msgspec

from pytest_kvbudget.budget.answers import Answer, Ask, answer
from pytest_kvbudget.budget.blocks import KvGeometry
from pytest_kvbudget.budget.graphs import GraphCharge
from pytest_kvbudget.budget.model import BudgetInputError
from pytest_kvbudget.budget.neuron import CAP_VARIABLE
from pytest_kvbudget.budget.pool import REGISTRY_BYTES_PER_TOKEN, KvPrice, PagesReading
from pytest_kvbudget.budget.rdna4 import R9700_TOTAL_BYTES, SLOT_BYTES, OverheadMode
from pytest_kvbudget.budget.render import plan_lines, refusal_lines
from pytest_kvbudget.budget.utilization import FreeAtInit, from_driver_reserve
from pytest_kvbudget.config import ConfigError, LoadedTarget, built_in, find, load
from pytest_kvbudget.planning import ask_for, policy_of
from pytest_kvbudget.shape import Shape, ShapeError
from pytest_kvbudget.units import GIB, SizeError, format_size, parse_memory

EXIT_REFUSED: Final = 1
EXIT_TROUBLE: Final = 2
_LARGEST_BARE_GIB: Final = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``kvbudget plan``."""
    parser.epilog = (
        "exit status: 0 the shape fits as far as the laws know, 1 it is known not to boot or does not fit, "
        "2 something that the law needs is missing"
    )
    parser.add_argument("--policy", choices=("neuron", "rdna4", "vllm"), help="whose law; default: the target's")
    parser.add_argument("--target", metavar="NAME", help="take shape and environment from this configured target")
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file; default: the nearest upward")
    parser.add_argument("--json", action="store_true", help="one JSON object for programs")
    parser.add_argument(
        "--row",
        action="append",
        metavar="FLAGS",
        help="a further plan that differs from the one before by these flags: --row '--utilization 0.982'",
    )
    _add_shape_arguments(parser.add_argument_group("shape"))
    _add_device_arguments(parser.add_argument_group("device and weights, per rank"))
    _add_neuron_arguments(parser.add_argument_group("neuron"))
    _add_rdna4_arguments(parser.add_argument_group("rdna4"))
    _add_vllm_arguments(parser.add_argument_group("vllm"))


def run(options: argparse.Namespace, *, out: TextIO) -> int:
    """Plan, print, and return the exit status."""
    try:
        answers = [answer(_ask(row)) for row in _rows(options)]
    except (ConfigError, OSError, ValueError) as error:
        sys.stderr.write(f"kvbudget plan: {error}\n")
        return EXIT_TROUBLE
    if options.json:
        document = answers[0].document()
        if len(answers) > 1:
            document["rows"] = [
                _compared(one, answers[index - 1] if index else None) for index, one in enumerate(answers)
            ]
        json.dump(document, out, indent=2)
        out.write("\n")
    else:
        out.write("\n".join(_text(answers)) + "\n")
    fits = all(not one.refused and one.plan is not None and one.plan.fits for one in answers)
    return 0 if fits else EXIT_REFUSED


def _size(text: str) -> int:
    try:
        return parse_memory(text)
    except SizeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _gib(text: str) -> int:
    """A size; a bare number is GiB, the unit of the engine's own variable."""
    bare = text.strip()
    try:
        number = float(bare)
    except ValueError:
        return _size(text)
    if not 0 <= number <= _LARGEST_BARE_GIB:
        raise argparse.ArgumentTypeError(f"{text!r} without a unit is GiB, as the engine's variable; write '{text} B'")
    return int(number * GIB)


def _graph_charge(text: str) -> GraphCharge:
    base, plus, per_graph = text.partition("+")
    try:
        if plus:
            return GraphCharge(base_mib=float(base), per_graph_mib=float(per_graph))
        return GraphCharge(estimate_mib=float(base))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; expected BASE+PER_GRAPH in MiB ('256+52'), or a total") from None


def _overhead(text: str) -> OverheadMode | int:
    return OverheadMode(text) if text in set(OverheadMode) else _size(text)


_Group = argparse._ArgumentGroup  # noqa: SLF001 - argparse exports no name for what add_argument_group returns


def _add_shape_arguments(group: _Group) -> None:
    group.add_argument(
        "--utilization", "--gpu-memory-utilization", type=float, metavar="F", help="fraction of the device, (0, 1]"
    )
    group.add_argument("--max-model-len", type=int, metavar="TOKENS")
    group.add_argument("--max-num-seqs", type=int, metavar="N")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="TOKENS")
    group.add_argument("--tensor-parallel-size", type=int, metavar="N")
    group.add_argument("--kv-cache-dtype", metavar="DTYPE")
    group.add_argument("--kv-cache-memory-bytes", type=_size, metavar="SIZE", help="pinned pool")
    group.add_argument("--env", action="append", metavar="NAME=VALUE", help="a variable of the engine's environment")
    group.add_argument("--release", metavar="VERSION", help="engine release whose law applies")


def _add_device_arguments(group: _Group) -> None:
    group.add_argument("--total", type=_size, metavar="SIZE", help=f"device memory; rdna4: {R9700_TOTAL_BYTES} B")
    group.add_argument("--weights", "--non-expert", type=_size, metavar="SIZE", help="weights (rdna4: non-expert)")
    group.add_argument(
        "--free-at-init", type=_size, metavar="SIZE", help="what the worker's own refusal line or snapshot says is free"
    )
    group.add_argument("--driver-reserve", type=_size, metavar="SIZE", help="what the driver keeps of the total")


def _add_neuron_arguments(group: _Group) -> None:
    group.add_argument("--platform", metavar="NAME", help="trn1, trn1n, trn2, trn3 or inf2")
    group.add_argument("--lnc", type=int, metavar="N", help="logical NeuronCore size")
    group.add_argument("--headroom", type=_gib, metavar="SIZE", help="reserve; a bare number is GiB; 0 counts")
    group.add_argument("--cap-fraction", metavar="F", help="fractional cap of the default policy")
    group.add_argument("--device-stack", type=_size, metavar="SIZE", help="HBM stack that a device reports")
    group.add_argument("--host-available", type=_size, metavar="SIZE", help="plan CPU inference on such a host")
    group.add_argument("--local-workers", type=int, metavar="N")
    group.add_argument("--kv-layers", type=int, metavar="N", help="with heads and size: count KV blocks")
    group.add_argument("--kv-heads", type=int, metavar="N", help="KV heads per rank")
    group.add_argument("--head-size", type=int, metavar="N")
    group.add_argument("--kv-dtype-bytes", type=int, default=2, metavar="N")


def _add_rdna4_arguments(group: _Group) -> None:
    group.add_argument(
        "--non-expert-and-kv", type=_size, metavar="SIZE", help="non-expert weights and KV reserve in one"
    )
    group.add_argument("--kv-reserve", type=_size, metavar="SIZE", help="instead of the registry's price")
    group.add_argument("--registry-price", type=float, metavar="B/TOKEN", help=f"default: {REGISTRY_BYTES_PER_TOKEN}")
    group.add_argument("--state-pages", type=_size, metavar="SIZE", help="state pages of one sequence")
    group.add_argument("--pages-reading", choices=[*PagesReading], help="against the factor 1.08; default: outside")
    group.add_argument("--graphs", type=int, metavar="N", help="captured graphs")
    group.add_argument(
        "--graph-charge", type=_graph_charge, metavar="BASE+PER", help="MiB; default: environment, 256+52"
    )
    group.add_argument(
        "--overhead",
        type=_overhead,
        metavar="MODE|SIZE",
        help="default, precise, glm or a size; default: as the target's flags say",
    )
    group.add_argument("--slot", type=_size, metavar="SIZE", help=f"one expert on one rank; default: {SLOT_BYTES}")
    group.add_argument("--resident-floor", type=int, metavar="SLOTS", help="least slots that the planner accepts")


def _add_vllm_arguments(group: _Group) -> None:
    group.add_argument("--activation", type=_size, metavar="SIZE", help="peak activation")
    group.add_argument("--graph-estimate", type=_size, metavar="SIZE")
    group.add_argument("--model-config", type=Path, metavar="FILE", help="config.json: price one request's KV")
    group.add_argument("--block-size", type=int, metavar="TOKENS", help="of KV blocks; neuron 32, else 16")


def _rows(options: argparse.Namespace) -> list[argparse.Namespace]:
    """The plan asked for and its further rows, each on top of the one before."""
    rows = [options]
    if options.row:
        parser = argparse.ArgumentParser(prog="kvbudget plan --row", add_help=False)
        add_arguments(parser)
        for text in options.row:
            rows.append(parser.parse_args(shlex.split(text), copy.copy(rows[-1])))
    return rows


def _ask(options: argparse.Namespace) -> Ask:
    loaded = _target(options)
    policy = options.policy or (None if loaded is None else policy_of(loaded))
    if policy is None:
        raise BudgetInputError("neither --policy nor --target is given; expected one of neuron, rdna4, vllm")
    shape = _shape(Shape() if loaded is None else loaded.target.shape, options)
    base = Ask(policy=policy, shape=shape, block_tokens=options.block_size or 16)
    if loaded is not None and policy == policy_of(loaded):
        base = ask_for(loaded, shape)
    environ = dict(base.environ)
    for pair in options.env or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise BudgetInputError(f"--env {pair!r}; expected NAME=VALUE")
        environ[name] = value
    if options.cap_fraction is not None:
        environ[CAP_VARIABLE] = options.cap_fraction
    given = {
        "release": options.release,
        "total_bytes": options.total,
        "weights_bytes": options.weights if options.non_expert_and_kv is None else options.non_expert_and_kv,
        "platform": options.platform,
        "stack_bytes": options.device_stack,
        "host_available_bytes": options.host_available,
        "local_workers": options.local_workers,
        "geometry": _geometry(options),
        "weights_hold_reserve": options.non_expert_and_kv is not None or None,
        "kv_reserve_bytes": options.kv_reserve,
        "price": _price(options, base.price),
        "graphs": options.graphs,
        "charge": options.graph_charge,
        "overhead": options.overhead,
        "slot_bytes": options.slot,
        "free": _free(options, options.total or base.total_bytes or R9700_TOTAL_BYTES),
        "resident_floor_slots": options.resident_floor,
        "activation_bytes": options.activation,
        "graph_bytes": options.graph_estimate,
        "model_config": None if options.model_config is None else _model_config(options.model_config),
        "block_tokens": options.block_size,
    }
    return msgspec.structs.replace(
        base, environ=environ, **{name: value for name, value in given.items() if value is not None}
    )


def _price(options: argparse.Namespace, base: KvPrice) -> KvPrice:
    given = {
        "bytes_per_token": options.registry_price,
        "pages_bytes_per_seq": options.state_pages,
        "reading": None if options.pages_reading is None else PagesReading(options.pages_reading),
    }
    return msgspec.structs.replace(base, **{name: value for name, value in given.items() if value is not None})


def _shape(base: Shape, options: argparse.Namespace) -> Shape:
    given = {
        "gpu_memory_utilization": options.utilization,
        "reserved_headroom": options.headroom,
        "lnc": options.lnc,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "tensor_parallel_size": options.tensor_parallel_size,
        "kv_cache_dtype": options.kv_cache_dtype,
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
    }
    try:
        return base.merged(**{name: value for name, value in given.items() if value is not None})
    except ShapeError as error:
        raise BudgetInputError(str(error)) from None


def _geometry(options: argparse.Namespace) -> KvGeometry | None:
    parts = (options.kv_layers, options.kv_heads, options.head_size)
    if all(part is None for part in parts):
        return None
    if any(part is None for part in parts):
        raise BudgetInputError("KV blocks need --kv-layers, --kv-heads and --head-size together")
    return KvGeometry(
        layers=options.kv_layers,
        kv_heads=options.kv_heads,
        head_size=options.head_size,
        dtype_bytes=options.kv_dtype_bytes,
        block_tokens=options.block_size or 32,
    )


def _free(options: argparse.Namespace, total_bytes: int) -> FreeAtInit | None:
    if options.free_at_init is not None:
        return FreeAtInit(free_bytes=options.free_at_init, total_bytes=total_bytes, source="refusal line")
    return None if options.driver_reserve is None else from_driver_reserve(total_bytes, options.driver_reserve)


def _model_config(path: Path) -> dict[str, Any]:
    config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise BudgetInputError(f"{path} is no model configuration; expected a JSON object")
    return config


def _target(options: argparse.Namespace) -> LoadedTarget | None:
    if options.target is None:
        return None
    path = options.config or find(Path.cwd())
    return (built_in(Path.cwd()) if path is None else load(path)).pick(options.target)


def _compared(one: Answer, before: Answer | None) -> dict[str, Any]:
    document = one.document()
    if before is not None and before.plan is not None and one.plan is not None:
        document["gained_bytes"] = one.plan.left_bytes - before.plan.left_bytes
        if "slots" in one.figures and "slots" in before.figures:
            document["gained_slots"] = one.figures["slots"] - before.figures["slots"]
    return document


def _text(answers: list[Answer]) -> list[str]:
    lines: list[str] = []
    for index, one in enumerate(answers):
        lines += [""] if index else []
        lines += _answer_lines(one)
        compared = _compared(one, answers[index - 1] if index else None)
        if "gained_bytes" in compared:
            slots = f", {compared['gained_slots']:+,} slots" if "gained_slots" in compared else ""
            lines.append(f"against the row before: {_signed(compared['gained_bytes'])}{slots}")
    return lines


def _signed(size_bytes: int) -> str:
    return ("+" if size_bytes >= 0 else "") + format_size(size_bytes)


def _answer_lines(one: Answer) -> list[str]:
    lines = []
    if one.plan is not None:
        mode = f", {one.figures['mode']} policy" if "mode" in one.figures else ""
        lines.append(f"{one.plan.policy} ({one.plan.variant}){mode}: {one.plan.sentence}")
        lines += plan_lines(one.plan)
    most = "at most " if one.figures.get("upper_bound") else ""
    lines += [
        f"{label}: {most if name in _BOUNDED else ''}{write(one.figures[name])}"
        for name, label, write in _SHOWN
        if one.figures.get(name) is not None
    ]
    if (other := one.figures.get("other_policy")) is not None:
        most = "at most " if other["upper_bound"] else ""
        lines.append(f"{other['mode']} policy beside it: {most}{_exact(other['available_bytes'])}")
    lines += refusal_lines(one.refusals)
    lines += [f"warning: {warning}" for warning in one.warnings]
    lines += [f"note: {note}" for note in one.notes]
    return lines


def _exact(size_bytes: int) -> str:
    return f"{size_bytes:,} bytes ({format_size(size_bytes)})"


_SHOWN: Final[tuple[tuple[str, str, Callable[[Any], str]], ...]] = (
    ("available_bytes", "it would be given", _exact),
    ("maximum_headroom_bytes", "largest headroom that leaves the minimum", _exact),
    ("slots", "expert slots", "{:,}".format),
    ("largest_utilization", "largest utilization that the worker accepts", str),
    ("blocks", "KV blocks", "{:,}".format),
    ("kv_tokens", "KV tokens", "{:,}".format),
)
_BOUNDED: Final = frozenset({"available_bytes", "blocks", "kv_tokens"})
"""Figures that are upper bounds where the plan is one."""
