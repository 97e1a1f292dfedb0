"""Random targets that mix physics which no family has together, with ladders over any axis: nobody tuned for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from pytest_kvbudget.config import LoadedTarget, Target
from pytest_kvbudget.mock.spec import Arena, Compile, MockDevice
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.specs import check_spec
from pytest_kvbudget.units import GIB, MIB
from tests.benchmarks.devices.targets import MAKERS, Subject

CHANCE: Final = 0.25
"""Of each change to a device."""
ESTIMATES: Final = ("exact", "exact", "absent", "proportional", "huge", "negative", "alternating", "factor 0.5")
Draw = Callable[[random.Random, MockDevice], object]

_ANYWHERE: Final[dict[str, Draw]] = {
    "cold_extra": lambda dice, _: int(dice.uniform(0, 1) * GIB),
    "fragmentation": lambda dice, _: int(dice.uniform(0, 1) * GIB),
    "noise_shape": lambda dice, _: int(dice.uniform(0, 200) * MIB),
}
_GPU: Final[dict[str, Draw]] = {
    **_ANYWHERE,
    "kv_window_tokens": lambda dice, _: dice.choice((4096, 32_768, 100_000)),
    "chunked_prefill": lambda dice, _: dice.choice((False, "off above 50000", "on above 100000", 90_000)),
    "free_at_start": lambda dice, spec: int((spec.free_at_start or spec.device_total) * dice.uniform(0.9, 1)),
    "graph_estimate": lambda dice, _: dice.choice((0.0, 0.3, 1.5, 3.0)),
    "block_size": lambda dice, _: dice.choice((1, 24, 48, 112, 256)),
    "activation_per_window_token": lambda dice, spec: int(dice.uniform(0, 1) * spec.kv_bytes_per_token),
    "weights": lambda dice, spec: int(spec.weights * dice.uniform(0.8, 1.02)),
    "state_bytes_per_seq": lambda dice, _: int(dice.uniform(1, 100) * MIB),
    "kv_page_tokens": lambda dice, _: dice.choice((16, 256, 1056)),
}
_EXPERTS: Final[dict[str, Draw]] = {
    "cold_extra": _ANYWHERE["cold_extra"],
    "activation_per_window_token": lambda dice, spec: int(dice.uniform(0, 0.5) * spec.kv_bytes_per_token),
    "state_bytes_per_seq": lambda dice, _: int(dice.uniform(1, 20) * MIB),
}
_ARENA: Final[dict[str, Draw]] = {
    "slot_bytes": lambda dice, _: int(dice.uniform(1, 200) * MIB),
    "slots_min": lambda dice, _: dice.choice((1, 10, 100)),
    "pool_capped": lambda _, __: False,
    "host_bytes": lambda dice, _: int(dice.uniform(30, 90) * GIB),
    "charged_by_rule": lambda _, __: True,
    "overhead_planned": lambda dice, _: int(dice.uniform(0.5, 8) * GIB),
}
_NEURON: Final[dict[str, Draw]] = {**_ANYWHERE, "release": lambda dice, _: dice.choice(("0.21", "0.24", "2.33"))}
_COMPILER: Final[dict[str, Draw]] = {
    "prints_numbers": lambda _, __: False,
    "scratch_per_token": lambda _, __: 0,
    "per_bucket": lambda dice, _: int(dice.uniform(0, 500) * MIB),
    "load_extra": lambda dice, _: int(dice.uniform(0, 4) * GIB),
    "limit": lambda dice, spec: int(spec.device_total * dice.uniform(0.7, 1.1)),
    "allocatable": lambda dice, spec: int(spec.device_total * dice.uniform(0.8, 1)),
    "min_kv": lambda dice, _: dice.choice((0, 4 * GIB)),
}
_LADDERS: Final[dict[str, Callable[[random.Random], dict[str, Any]]]] = {
    "max_model_len": lambda dice: {
        "start": dice.choice((262_144, 200_000, 131_072)),
        "floor": dice.choice((4096, 16_384, 1024)),
        "quantum": dice.choice((4096, 4096, 1000, 512, 8192)),
    },
    "gpu_memory_utilization": lambda dice: {"start": dice.choice((0.95, 0.99, 1)), "floor": dice.choice((0.5, 0.9))},
    "kv_cache_memory_bytes": lambda dice: {
        "start": f"{dice.randrange(4, 30)} GiB",
        "floor": "1 GiB",
        "quantum": dice.choice(("64 MiB", "256 MiB", "1 GiB")),
    },
    "max_num_seqs": lambda dice: {"start": dice.choice((32, 64, 256)), "floor": 1, "quantum": dice.choice((1, 4))},
    "max_num_batched_tokens": lambda dice: {
        "start": dice.choice((32_768, 65_536)),
        "floor": 2048,
        "quantum": dice.choice((256, 1024)),
    },
}
_AXES: Final = ("max_model_len",) * 6 + tuple(_LADDERS)[1:]


def odd(seed: int) -> Subject:
    """The same target and ladder for the same seed, on every machine."""
    name = f"odd {seed}"
    dice = random.Random(name)
    end = dice.uniform(4096, 300_000)
    family = dice.choice(tuple(MAKERS))
    spec, shape, ladder = MAKERS[family](dice, end)
    spec, shape = _changed(dice, spec, shape)
    spec = replace(spec, estimate=dice.choice(ESTIMATES), seed=seed)
    axis = "max_model_len" if ladder.pool == "scaled" else dice.choice(_AXES)
    asked: dict[str, Any] = {"axis": axis, **_LADDERS[axis](dice)}
    if ladder.pool == "scaled":
        asked |= {"pool": "scaled", "windows": ladder.windows}
    elif dice.random() < CHANCE:
        asked["windows"] = 2
    if axis != "max_model_len":
        shape = shape.merged(max_model_len=int(dice.uniform(4096, min(end * 1.1, 250_000))))
    target = Target(backend="mock", devices=tuple(range(spec.ranks)), shape=shape, mock=spec)
    loaded = LoadedTarget(name=f"odd-{seed}", target=target, origin=name, folder="/", environment={})
    return Subject(name, loaded, check_spec(asked), end)


def _changed(dice: random.Random, spec: MockDevice, shape: Shape) -> tuple[MockDevice, Shape]:
    """Some of everything that the simulated device can be."""
    if spec.dialect == "neuron":
        compiler = replace(spec.compile or Compile(), **_drawn(dice, spec, _COMPILER))
        spec = replace(spec, compile=compiler, **_drawn(dice, spec, _NEURON))
        if dice.random() < CHANCE:
            shape = msgspec.structs.replace(shape, reserved_headroom=None)
        return spec, shape.merged(lnc=1) if dice.random() < CHANCE else shape
    if spec.dialect == "rdna4":
        arena = replace(spec.arena or Arena(), **_drawn(dice, spec, _ARENA))
        return replace(spec, arena=arena, **_drawn(dice, spec, _EXPERTS)), shape
    if dice.random() < CHANCE:
        shape = shape.merged(enforce_eager=True)
    if dice.random() < CHANCE:
        shape = shape.merged(max_num_seqs=dice.choice((1, 16, 64, 256)))
    return replace(spec, **_drawn(dice, spec, _GPU)), shape


def _drawn(dice: random.Random, spec: MockDevice, draws: dict[str, Draw]) -> dict[str, Any]:
    return {name: draw(dice, spec) for name, draw in draws.items() if dice.random() < CHANCE}
