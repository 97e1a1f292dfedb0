"""What makes two boots the same boot, on the simulated target and on commands of real backends."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvbudget.config import Limits, LoadedTarget, Target
from pytest_kvbudget.device.model import DeviceMemory
from pytest_kvbudget.engine.backends.mock import MockBackend
from pytest_kvbudget.engine.backends.rdna4 import Rdna4Backend
from pytest_kvbudget.engine.backends.vllm import VllmBackend
from pytest_kvbudget.engine.model import Backend
from pytest_kvbudget.identity import device_readings, identity_of
from pytest_kvbudget.ledger.grammar.model import Row
from pytest_kvbudget.mock.spec import MockDevice
from pytest_kvbudget.records import BootIdentity
from pytest_kvbudget.shape import Shape

SHAPE = Shape(model="simulated", max_model_len=4096)
SECRET = "hf_abcdefghijklmnop"
PARTS = frozenset(BootIdentity.__struct_fields__)


class Subject:
    """A target, and the identity of its boots."""

    def __init__(self, folder: Path, target: Target, backend: Backend) -> None:
        self.backend = backend
        self.loaded = LoadedTarget(name="t", target=target, origin="o", folder=str(folder), environment={})

    def change(self, *, environment: dict[str, str] | None = None, **fields: object) -> Subject:
        other = Subject(Path(self.loaded.folder), msgspec.structs.replace(self.loaded.target, **fields), self.backend)
        other.loaded = msgspec.structs.replace(other.loaded, environment=environment or {})
        return other

    def identity(
        self,
        shape: Shape = SHAPE,
        *,
        devices: tuple[str, ...] = ("0",),
        asked: str | None = "a",
        port: int = 8000,
        readings: tuple[DeviceMemory, ...] = (),
        root: Path = Path("/"),
        host: str = "h",
    ) -> BootIdentity:
        command = self.backend.render(self.loaded, shape, devices, port)
        return identity_of(
            self.loaded,
            self.backend,
            shape,
            command,
            devices,
            host=host,
            asked=asked,
            readings=readings,
            root=root,
        )


def different(one: BootIdentity, other: BootIdentity) -> set[str]:
    return {name for name in PARTS if getattr(one, name) != getattr(other, name)}


@pytest.fixture
def simulated(tmp_path: Path) -> Subject:
    target = Target(backend="mock", devices=(0, 1), mock=MockDevice(sysfs="sysfs"))
    return Subject(tmp_path, target, MockBackend())


@pytest.fixture
def card(tmp_path: Path) -> Subject:
    """An R9700 whose engine does not exist."""
    target = Target(backend="rdna4", devices=(0, 1), command=("no-such-engine",))
    return Subject(tmp_path, target, Rdna4Backend())


def test_everything_of_a_simulated_boot_is_known(simulated: Subject) -> None:
    identity = simulated.identity()
    assert identity == simulated.identity()
    assert {name for name in PARTS if getattr(identity, name) is None} == {"image"}
    assert identity.driver == "simulated"


def test_where_it_is_reached_is_no_part(simulated: Subject) -> None:
    moved = simulated.change(host="0.0.0.0", port=8123)
    limits = Limits(boot_seconds=1, lease_seconds=1, release_seconds=1, release_tolerance=1, host_tolerance=1)
    named = msgspec.structs.replace(simulated.loaded, name="other name")
    assert moved.identity(port=9000) == simulated.identity()
    assert simulated.change(limits=limits).identity() == simulated.identity()
    simulated.loaded, before = named, simulated.identity()
    assert simulated.identity() == before


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"mock": MockDevice(sysfs="sysfs", cold_extra=1)}, {"target", "engine"}),
        ({"limits": Limits(min_free=1)}, {"target"}),
        ({"limits": Limits(max_used=1)}, {"target"}),
        ({"limits": Limits(max_growth=1)}, {"target"}),
        ({"launcher": "systemd"}, {"target"}),
        ({"environment": {"VLLM_X": "1"}}, {"target"}),
        # a tree of devices of its own
        ({"mock": MockDevice(sysfs="elsewhere")}, {"target", "engine", "devices"}),
    ],
)
def test_what_a_boot_depends_on_is_a_part(simulated: Subject, fields: dict[str, object], parts: set[str]) -> None:
    assert different(simulated.identity(), simulated.change(**fields).identity()) == parts  # type: ignore[arg-type]


def test_patterns_of_the_configuration_are_a_part(simulated: Subject) -> None:
    before = simulated.identity()
    simulated.loaded = msgspec.structs.replace(simulated.loaded, patterns=(Row(pattern="out of slots", literal=True),))
    assert different(simulated.identity(), before) == {"target"}


def test_shape_devices_host_and_question_are_parts_of_their_own(simulated: Subject) -> None:
    before = simulated.identity()
    assert different(simulated.identity(SHAPE.merged(max_model_len=8192)), before) == {"shape"}
    assert different(simulated.identity(devices=("1",)), before) == {"devices"}
    assert different(simulated.identity(host="other"), before) == {"host"}
    assert different(simulated.identity(asked="b"), before) == {"asked"}


def test_a_target_is_the_same_on_each_of_its_device_sets_and_rungs(simulated: Subject) -> None:
    """Or an earlier run's other rungs would say nothing about this one."""
    other = simulated.identity(SHAPE.merged(max_model_len=8192, env={"VLLM_X": "1"}), devices=("1",))
    assert other.target == simulated.identity().target


@pytest.mark.parametrize(
    "name", ["VLLM_CACHE_ROOT", "PYTORCH_CUDA_ALLOC_CONF", "LD_LIBRARY_PATH", "HF_HOME", "HIP_X", "PYTHONPATH"]
)
def test_what_an_engine_inherits_is_a_part(simulated: Subject, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(name, raising=False)
    before = simulated.identity()
    monkeypatch.setenv(name, "1")
    one = simulated.identity()
    monkeypatch.setenv(name, "2")
    assert different(one, before) == different(one, simulated.identity()) == {"target"}


def test_what_a_rung_overrides_leaves_the_target_as_it_is(simulated: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_X", "1")
    one, other = (simulated.identity(SHAPE.merged(env={"VLLM_X": value})) for value in ("1", "2"))
    assert different(one, other) == {"shape"}
    assert different(one, simulated.identity()) == {"shape"}


def test_devices_that_a_lease_overrides_are_no_part(
    card: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")
    before = card.identity(root=tmp_path)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4")
    assert card.identity(root=tmp_path) == before


def test_what_no_engine_reads_is_none(simulated: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    before = simulated.identity()
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "test_it.py::test_it (call)")
    monkeypatch.setenv("EDITOR", "ed")
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "PYTHONIOENCODING", "PYTHONPYCACHEPREFIX"):
        monkeypatch.setenv(name, "1")
    assert simulated.identity() == before


@settings(max_examples=25)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=4))
def test_secrets_make_identities_and_are_in_none(value: str) -> None:
    target = Target(backend="mock", devices=(0,), command=("engine", "--api-key", f"{SECRET}{value}"))
    plain = Subject(Path("/nowhere"), msgspec.structs.replace(target, command=("engine",)), MockBackend())
    subject = Subject(Path("/nowhere"), target, MockBackend())
    secret = subject.change(environment={"HF_TOKEN": f"{SECRET}{value}"})
    shape = SHAPE.merged(env={"API_KEY": f"{SECRET}{value}"})
    identities = [one.identity(shaped) for one in (plain, subject, secret) for shaped in (SHAPE, shape)]
    assert len({(identity.target, identity.shape) for identity in identities}) == len(identities)
    assert SECRET not in msgspec.json.encode(identities).decode()
    again = subject.change(environment={"HF_TOKEN": f"{SECRET}{value}2"})
    assert again.identity().target != secret.identity().target


def test_variables_do_not_run_into_each_other(simulated: Subject) -> None:
    one = simulated.change(environment={"A": "1", "B": "2"}).identity()
    other = simulated.change(environment={"A": "1B=2", "B": ""}).identity()
    assert one.target != other.target


# -- real backends


def reading(total_bytes: int) -> DeviceMemory:
    return DeviceMemory(device="0", total_bytes=total_bytes, used_bytes=0, source="sysfs")


def test_an_engine_that_is_not_there_is_not_known(card: Subject, tmp_path: Path) -> None:
    identity = card.identity(root=tmp_path)
    assert identity.engine is None
    assert identity.driver is None


def test_totals_of_devices_are_a_part_where_they_can_be_read(card: Subject, tmp_path: Path) -> None:
    one = card.identity(readings=(reading(34_208_743_424),), root=tmp_path)
    assert one.devices == ("gpu-0 34208743424",)
    assert different(one, card.identity(readings=(reading(17_163_091_968),), root=tmp_path)) == {"devices"}
    assert different(one, card.identity(root=tmp_path)) == {"devices"}


def test_readings_of_simulated_devices_do_not_count(simulated: Subject) -> None:
    assert simulated.identity(readings=(reading(1),)) == simulated.identity()
    assert device_readings(simulated.loaded, simulated.backend, ("0",)) == ()


def test_the_driver_is_that_of_the_cards(card: Subject, tmp_path: Path) -> None:
    version = tmp_path / "sys" / "module" / "amdgpu" / "version"
    version.parent.mkdir(parents=True)
    version.write_text("6.12.12\n")
    assert card.identity(root=tmp_path).driver == "amdgpu 6.12.12"


def test_visible_devices_are_no_part_of_the_target(card: Subject, tmp_path: Path) -> None:
    one, other = (card.identity(devices=(device,), root=tmp_path) for device in ("0", "1"))
    assert different(one, other) == {"devices"}


def test_a_cpu_has_no_driver(tmp_path: Path) -> None:
    cpu = Subject(tmp_path, Target(backend="vllm", command=("no-such-engine",)), VllmBackend())
    identity = cpu.identity(devices=("cpu",))
    assert (identity.driver, identity.devices) == ("none", ("cpu",))
    assert device_readings(cpu.loaded, cpu.backend, ("cpu",)) == ()


def test_a_probe_that_cannot_be_read_gives_no_readings(card: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    card.loaded = card.change(devices=(77,)).loaded
    assert device_readings(card.loaded, card.backend, ("77",)) == ()


# -- files that a command line names


def test_a_model_that_changed_under_its_name_is_another_shape(card: Subject, tmp_path: Path) -> None:
    model = tmp_path / "models" / "moe"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    shape = Shape(model="models/moe")
    before = card.identity(shape, root=tmp_path)
    (model / "model.safetensors").write_text("weights")
    assert different(card.identity(shape, root=tmp_path), before) == {"shape"}


def test_a_file_of_flags_that_changed_is_another_shape(card: Subject, tmp_path: Path) -> None:
    (tmp_path / "flags.yaml").write_text("max-num-seqs: 3\n")
    shapes = [
        Shape(model="m", extra_args=("--config", "flags.yaml")),
        Shape(model="m", extra_args=("--config=flags.yaml",)),
    ]
    before = [card.identity(shape, root=tmp_path) for shape in shapes]
    (tmp_path / "flags.yaml").write_text("max-num-seqs: 30\n")
    for shape, earlier in zip(shapes, before, strict=True):
        assert different(card.identity(shape, root=tmp_path), earlier) == {"shape"}


def test_a_folder_that_an_engine_writes_to_is_no_part(card: Subject, tmp_path: Path) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    shape = Shape(model="m", extra_args=("--download-dir", str(folder)))
    before = card.identity(shape, root=tmp_path)
    (folder / "blob").write_text("downloaded")
    assert card.identity(shape, root=tmp_path) == before


def test_a_model_of_the_hub_is_its_commit(card: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    shape = Shape(model="org/moe")
    refs = tmp_path / "hf" / "hub" / "models--org--moe" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("0123abcd")
    before = card.identity(shape, root=tmp_path)
    assert card.identity(shape, root=tmp_path) == before
    (refs / "main").write_text("4567cdef")
    assert different(card.identity(shape, root=tmp_path), before) == {"shape"}
