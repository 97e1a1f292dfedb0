"""What the API server prints and refuses before there is an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pytest_kvbudget.mock.arguments import Arguments, looks_like_path
from pytest_kvbudget.mock.failures import Failure
from pytest_kvbudget.mock.frames import SERVE
from pytest_kvbudget.mock.neuron.announce import plugin
from pytest_kvbudget.mock.physics import Physics
from pytest_kvbudget.mock.process import Log, gib
from pytest_kvbudget.mock.spec import MockDevice
from pytest_kvbudget.units import GIB

CLAV_VERSION: Final = "0.4.1"
_PYDANTIC: Final = "    For further information visit https://errors.pydantic.dev/2.14/v"


def banner(log: Log, spec: MockDevice, arguments: Arguments, cards: list[int], sysfs: str) -> None:
    """The first records. The very first says that nothing here is real."""
    log.say(
        "mock.py:1",
        f"pytest-kvbudget simulated device: cards {','.join(map(str, cards))} of {gib(spec.device_total)} GiB, dialect"
        f" {spec.dialect}, shown in {sysfs}",
    )
    if spec.dialect == "neuron":
        plugin(log)
    clav = f"  Clav Version {CLAV_VERSION}" if spec.dialect == "rdna4" else ""
    log.say(
        "api_utils.py:347",
        "\n       █     █     █▄   ▄█\n"
        f" ▄▄ ▄█ █     █     █ ▀▄▀ █  version {spec.engine_version}{clav}\n"
        f"  █▄█▀ █     █     █     █  model   {arguments.model}\n"
        "   ▀▀  ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀  simulated device\n",
    )
    shown = {"model_tag": arguments.model, **arguments.given, "model": arguments.model}
    log.say("api_utils.py:286", f"non-default args: {shown}")


def check_model(arguments: Arguments) -> None:
    """A folder that is not there is taken for the name of a repository, and is none.

    Raises:
        Failure: as ``huggingface_hub`` words it.
    """
    model = arguments.model
    if looks_like_path(model) and not Path(model).expanduser().exists():
        raise Failure(
            "huggingface_hub.errors.HFValidationError",
            f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{model}'. Use `repo_type` argument if"
            " needed.",
            (*SERVE, "from_args", "model_path", "repo_id"),
        )


def check_arguments(spec: MockDevice, arguments: Arguments) -> None:
    """Limits of arguments, in pydantic's words.

    Raises:
        Failure: an argument is outside them.
    """
    length = arguments.max_model_len
    if length is not None and length > spec.native_max_model_len:
        raise _invalid(
            "ModelConfig",
            f"  Value error, User-specified max_model_len ({length}) is greater than the derived max_model_len"
            f" (max_position_embeddings={spec.native_max_model_len}.0 or model_max_length=None in model's config.json)."
            " To allow overriding this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1."
            " [type=value_error, input_value=ArgsKwargs((), {'model': ...}), input_type=ArgsKwargs]\n"
            f"{_PYDANTIC}/value_error",
            "model_config",
        )
    used = arguments.gpu_memory_utilization
    if not 0 < used <= 1:
        limit, kind = (
            ("greater than 0", "greater_than") if used <= 0 else ("less than or equal to 1", "less_than_equal")
        )
        raise _invalid(
            "CacheConfig",
            f"gpu_memory_utilization\n  Input should be {limit} [type={kind}, input_value={used}, input_type=float]\n"
            f"{_PYDANTIC}/{kind}",
            "cache_config",
        )


def _invalid(model: str, text: str, frame: str) -> Failure:
    frames = (*SERVE, "engine_config", frame, "pydantic")
    return Failure("pydantic_core._pydantic_core.ValidationError", f"1 validation error for {model}\n{text}", frames)


def configured(log: Log, physics: Physics) -> None:
    """Records of a configuration that was accepted, up to the fork's plan.

    Raises:
        Failure: the fork's planner refuses.
    """
    arguments = physics.arguments
    log.say("model.py:733", "Resolved architecture: SimulatedForCausalLM")
    log.say("model.py:2152", f"Using max model len {physics.max_model_len}")
    if physics.chunked:
        log.say(
            "scheduler.py:308",
            f"Chunked prefill is enabled with max_num_batched_tokens={arguments.max_num_batched_tokens}.",
        )
    if arguments.enforce_eager:
        log.caution(
            "vllm.py:1703",
            "Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup. This is equivalent to"
            " setting -cc.mode=none -cc.cudagraph_mode=none and --kernel_config.enable_jit_warmup=False",
        )
    if 0 < physics.state_bytes <= physics.block_bytes:
        padding = 100 * (physics.block_bytes - physics.state_bytes) / physics.state_bytes
        log.say(
            "interface.py:1097",
            f"Setting attention block size to {physics.block_tokens} tokens to ensure that attention page size is >="
            " mamba page size.",
        )
        log.say(
            "interface.py:1120",
            f"Padding mamba page size by {padding:.2f}% to ensure that mamba page size and attention page size are"
            " exactly equal.",
        )
    if physics.arena_plan is not None:
        _plan_table(log, physics)


def _plan_table(log: Log, physics: Physics) -> None:
    arena, plan = physics.spec.arena, physics.arena_plan
    assert arena is not None
    assert plan is not None
    rows = (
        ("budget (total x util)", plan.budget_bytes, ""),
        ("non-expert weights", plan.non_expert_bytes,
         f"PLE {arena.ple_bytes / GIB:.2f} excluded" if arena.ple_bytes else ""),
        ("KV reserve (one max-model-len request +8%)", plan.kv_reserve_bytes,
         f"registry {arena.registry_bytes_per_token} B/token"),
        ("CUDA graphs", plan.graph_bytes, ""),
        ("runtime overhead", plan.overhead_bytes, ""),
        ("expert cache space", plan.room_bytes, f"{plan.slots:,} slots"),
    )  # fmt: skip
    for label, size_bytes, tail in rows:
        log.say("expert_plan.py:388", f"{label:<44} {size_bytes / GIB:7.2f} GiB     {tail}".rstrip())
    if arena.host_bytes is not None and plan.host_usable_bytes is not None:
        tail = f"host usable {plan.host_usable_bytes / GIB:.1f} of MemAvailable {arena.host_bytes / GIB:.1f}"
        log.say(
            "expert_plan.py:391",
            f"{'host-backed experts (per rank)':<44} {plan.host_experts_bytes / GIB:7.2f} GiB     {tail}",
        )
        if plan.host_experts_bytes * physics.ranks > plan.host_usable_bytes:
            raise Failure(
                "ExpertPlanError",
                f"host-backed experts of all ranks take {plan.host_experts_bytes * physics.ranks / GIB:.2f}"
                f" GiB of host memory; usable are {plan.host_usable_bytes / GIB:.2f} GiB",
                (*SERVE, "engine_config", "expert_plan"),
            )
    if plan.slots < arena.slots_min:
        raise Failure(
            "ExpertPlanError",
            f"expert cache space holds {plan.slots:,} slots; the resident layers need at least {arena.slots_min:,}",
            (*SERVE, "engine_config", "expert_plan"),
        )


def engine(log: Log, physics: Physics) -> None:
    """The engine core's first record."""
    text = f"Initializing a V1 LLM engine (v{physics.spec.engine_version}) with config: {_config(physics)}"
    log.say("core.py:133", text)


def serving(log: Log, address: str) -> None:
    """The engine is ready, and the server listens."""
    log.say("entry.py:136", "Supported tasks: ['generate']")
    log.say("entry.py:140", f"Starting vLLM server on http://{address}")
    log.raw(
        f"INFO:     Started server process [{log.pid}]\nINFO:     Waiting for application startup.\n"
        "INFO:     Application startup complete.\n"
    )


def _config(physics: Physics) -> str:
    arguments, device = physics.arguments, "neuron" if physics.neuron else "cuda"
    return (
        f"model='{arguments.model}', speculative_config=None, tokenizer='{arguments.model}', dtype=torch.bfloat16,"
        f" max_seq_len={physics.max_model_len}, download_dir=None, load_format=auto,"
        f" tensor_parallel_size={physics.ranks}, pipeline_parallel_size=1, data_parallel_size=1,"
        f" enforce_eager={arguments.enforce_eager}, kv_cache_dtype={arguments.kv_cache_dtype}, device_config={device},"
        f" seed=0, served_model_name={arguments.served_name}, enable_prefix_caching=True,"
        f" enable_chunked_prefill={physics.chunked},"
        f" compilation_config={{'compile_ranges_endpoints': [{arguments.max_num_batched_tokens}],"
        f" 'cudagraph_capture_sizes': {list(physics.graph_sizes)}}}"
    )
