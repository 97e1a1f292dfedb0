"""vLLM failures as people report them: cut to a few lines, from every release; the kind each one is of."""

from __future__ import annotations

import io
import json

import pytest

from pytest_kvbudget import explain
from pytest_kvbudget.ledger.classes import verdict_of
from pytest_kvbudget.verdict import Phase, Verdict
from tests.ledger.support import MIB, lever_effects, read
from tests.ledger.variant import READY, WE, E, Variant, W, check, gib

V0 = "(VllmWorkerProcess pid=91) ERROR 08-05 10:00:00 multiproc_worker_utils.py:226] "
C = "ERROR 05-21 10:00:00 [core.py:396] "
NCCL = "vllm-0:3663:4044 [0] misc/shmutils.cc:129 NCCL WARN "
UTIL_DOWN = ("gpu_memory_utilization", "lower")


def oom(tried: str = "2.00 GiB") -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of "
        "23.57 GiB of which 605.88 MiB is free."
    )


REFUSED: list[tuple[str, str, str, tuple[str, str] | None]] = [
    # what it is, the line, the class, what to turn
    (
        "vllm#1157, no bfloat16 on this device",
        "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your GPU has "
        "compute capability 7.5.",
        "argument_rejected",
        ("dtype", "none"),
    ),
    (
        "vllm#1284, a device of another age",
        "RuntimeError: GPUs with compute capability below 7.0 are not supported.",
        "argument_rejected",
        None,
    ),
    (
        "vllm#4202, the quantization needs a newer device",
        "ValueError: The quantization method awq is not supported for the current GPU. Minimum capability: 75. Current "
        "capability: 70.",
        "argument_rejected",
        ("quantization", "none"),
    ),
    (
        "vllm#14040, the same from compressed tensors",
        "RuntimeError: ('Quantization scheme is not supported for ', 'the current GPU. Min capability: 80. ', "
        "'Current capability: 75.')",
        "argument_rejected",
        ("quantization", "none"),
    ),
    (
        "a step smaller than the window",
        "ValueError: max_num_batched_tokens (2048) is smaller than max_model_len (32768).",
        "argument_rejected",
        ("max_num_batched_tokens", "raise"),
    ),
    (
        "vllm#1267, a window that the kernel cannot hold",
        "RuntimeError: vLLM cannot currently support max_model_len=65536 with block_size=16 on GPU with compute "
        "capability (8, 9) (required shared memory 264252.0 > available shared memory 101376).",
        "argument_rejected",
        ("max_model_len", "lower"),
    ),
    (
        "code of the model's own",
        "ValueError: Loading /m requires you to execute the configuration file in that repo on your local machine.",
        "argument_rejected",
        ("trust_remote_code", "none"),
    ),
    (
        "an architecture that the library does not know",
        "  Value error, The checkpoint you are trying to load has model type `x` but Transformers does not recognize "
        "this architecture.",
        "argument_rejected",
        None,
    ),
    (
        "more swap than the host has",
        "ValueError: Too large swap space. 16.00 GiB out of the 15.60 GiB total CPU memory is allocated for the swap "
        "space.",
        "argument_rejected",
        ("swap_space", "lower"),
    ),
    (
        "a utilization above one, V0",
        "ValueError: GPU memory utilization must be less than 1.0. Got 1.2.",
        "argument_rejected",
        ("gpu_memory_utilization", "lower"),
    ),
    (
        "vllm#2652, heads and ranks",
        "ValueError: Total number of attention heads (52) must be divisible by tensor parallel size (8).",
        "parallelism_refused",
        ("tensor_parallel_size", "none"),
    ),
    (
        "vllm#52435, experts and ranks",
        "AssertionError: n_physical_experts=256 must be divisible by ep_size=3.",
        "parallelism_refused",
        ("tensor_parallel_size", "none"),
    ),
    (
        "a width that does not split",
        "AssertionError: 51865 is not divisible by 2",
        "parallelism_refused",
        ("tensor_parallel_size", "none"),
    ),
    (
        "vllm#9913, quantized weights that do not split",
        "ValueError: Weight input_size_per_partition = 10944 is not divisible by min_thread_k = 128.",
        "parallelism_refused",
        ("tensor_parallel_size", "lower"),
    ),
    (
        "the same, with the spaces of another release",
        "ValueError: Weight output_size_per_partition = 4304 is not divisible by  min_thread_n = 64.",
        "parallelism_refused",
        ("tensor_parallel_size", "lower"),
    ),
    (
        "more ranks than devices",
        "ValueError: World size (8) is larger than the number of available GPUs (4) in this node.",
        "parallelism_refused",
        ("tensor_parallel_size", "lower"),
    ),
    (
        "more ranks than the placement group has, Ray",
        "ValueError: The number of required GPUs exceeds the total number of available GPUs in the placement group.",
        "parallelism_refused",
        ("tensor_parallel_size", "lower"),
    ),
    (
        "a build for another torch",
        "AttributeError: '_OpNamespace' '_C' object has no attribute 'rms_norm'",
        "install_broken",
        None,
    ),
    (
        "a container without devices",
        'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
        "device_missing",
        None,
    ),
    ("a gated model", "OSError: You are trying to access a gated repo.", "model_not_found", None),
    (
        "a gated model, the hub's answer",
        "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/o/m/resolve/"
        "main/config.json",
        "model_not_found",
        None,
    ),
]


@pytest.mark.parametrize(("name", "line", "failure_class", "turn"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_one_line_is_enough_for_a_refusal(
    name: str, line: str, failure_class: str, turn: tuple[str, str] | None
) -> None:
    ledger = read(line)
    assert (ledger.outcome, ledger.phase, ledger.failure_class) == ("refused", Phase.ARGUMENT, failure_class), name
    effects = lever_effects(ledger)
    assert turn is None or effects[turn] == "helps"
    assert effects.get(UTIL_DOWN) != "helps" or turn == UTIL_DOWN


WITHOUT_A_PHASE: list[tuple[str, str, str]] = [
    ("RuntimeError: Triton Error [CUDA]: out of memory", "unknown", "request_oom"),
    ("RuntimeError: CUDA driver error: out of memory", "unknown", "request_oom"),
    ("CUDA_ERROR_OUT_OF_MEMORY: out of memory", "unknown", "request_oom"),
    ("RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)", "unknown", ""),
    ("Failed: Cuda error /v/csrc/custom_all_reduce.cuh:368 'out of memory'", "unknown", "request_oom"),
    ("RuntimeError: level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)", "failed", "device_fault"),
    (
        "RuntimeError: The device (Graphics [0x7d51]) doesn't support querying the available free memory.",
        "failed",
        "device_stats_unusable",
    ),
    ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", "failed", "devices_busy"),
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "failed", "device_fault"),
    ("RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain.", "failed", ""),
    ("terminate called after throwing an instance of 'std::bad_alloc'", "failed", "host_memory_short"),
    (
        "(raylet) node_manager.cc:3069: 1 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers "
        "crashed due to other reasons at node",
        "failed",
        "host_oom_killed",
    ),
    ("ERROR 03-31 15:45:01 [multiproc_worker_utils.py:1] ChildProcessError: worker died", "failed", "engine_killed"),
    ("worker exited with exit code 136", "failed", "engine_killed"),
    ("OSError: [Errno 28] No space left on device", "failed", "disk_full"),
    ("OSError: [Errno 28] No space left on device: '/psm_026ab1a7'", "failed", "host_memory_limit"),
    ("ValueError: type fp8e4nv not supported in this architecture.", "failed", "kernel_fault"),
    ("triton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error", "failed", "compile_failed"),
    ("[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)", "failed", "engine_hung"),
]
_FALLBACKS = {"CUDA error: the provided": "kernel_fault", "UR_RESULT_ERROR_OUT": "request_oom"}


@pytest.mark.parametrize(
    ("line", "outcome", "failure_class"), WITHOUT_A_PHASE, ids=[row[0][:50] for row in WITHOUT_A_PHASE]
)
def test_one_line_that_does_not_say_when(line: str, outcome: str, failure_class: str) -> None:
    failure_class = failure_class or next(name for part, name in _FALLBACKS.items() if part in line)
    ledger = read(line)
    assert (ledger.outcome, ledger.phase, ledger.failure_class) == (outcome, Phase.UNKNOWN, failure_class)


def test_an_allocation_of_no_known_phase_is_not_said_to_be_a_requests() -> None:
    cause = read(oom()).cause
    assert cause is not None
    assert "request" not in cause.sentence


VARIANTS: list[Variant] = [
    Variant(
        "vllm#18577, a worker that did not start had no more to do than to load",
        (WE + "WorkerProc failed to start.", WE + oom()),
        "failed",
        Phase.WEIGHTS_LOAD,
        "weights_oom",
        {"tried_alloc_bytes": gib(2), "free_bytes": round(605.88 * MIB)},
        leave=(("max_model_len", "lower"),),
    ),
    Variant(
        "an engine that did not start may have been anywhere",
        (C + "EngineCore failed to start.", C + oom()),
        "failed",
        Phase.UNKNOWN,
        "device_oom",
        {"tried_alloc_bytes": gib(2)},
    ),
    Variant(
        "vllm#20170, only what the server says of a dead engine",
        (
            "ERROR 06-26 10:00:00 [async_llm.py:420] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered "
            "an issue. See stack trace (above) for the root cause.",
            "INFO 06-26 10:00:00 [async_llm.py:346] Request chatcmpl-1 failed (engine dead).",
        ),
        "died_after_boot",
        Phase.REQUEST,
        "unexplained",
        {},
    ),
    Variant(
        "an engine that says that it had started dates the allocation",
        (
            W + "Available KV cache memory: 2.97 GiB",
            E + "EngineCore encountered a fatal error.",
            E + oom("50.00 MiB"),
        ),
        "died_after_boot",
        Phase.REQUEST,
        "request_oom",
        {"tried_alloc_bytes": 50 * MIB},
        turn=(UTIL_DOWN,),
    ),
    Variant(
        "vllm#11251, V0 shows the exception of a step",
        (
            "ERROR 12-19 10:00:00 engine.py:135] OutOfMemoryError('Error in model execution (input dumped to "
            "/tmp/a.pkl): CUDA out of memory. Tried to allocate 524.00 MiB. GPU 0 has a total capacity of 15.77 GiB "
            "of which 137.12 MiB is free.')",
        ),
        "died_after_boot",
        Phase.REQUEST,
        "request_oom",
        {"tried_alloc_bytes": 524 * MIB, "total_bytes": gib(15.77)},
    ),
    Variant(
        "vllm#13939, V0 says that its engine is dead and not why",
        (
            'INFO:     10.0.0.1:5 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
            "ERROR 01-22 10:00:00 client.py:282] RuntimeError('Engine process (pid 77) died.')",
            "CRITICAL 01-22 10:00:04 launcher.py:99] MQLLMEngine is already dead, terminating server process",
        ),
        "died_after_boot",
        Phase.REQUEST,
        "engine_killed",
        {},
    ),
    Variant(
        "vllm#19668, a step that takes for ever: the cause comes after the wrapper",
        (
            "ERROR 06-15 10:00:00 [dump_input.py:79] Dumping scheduler output for model execution:",
            C + "EngineCore encountered a fatal error.",
            C + "Traceback (most recent call last):",
            C + '  File "/v/vllm/v1/executor/multiproc_executor.py", line 9, in collective_rpc',
            C + "TimeoutError: RPC call to execute_model timed out.",
        ),
        "died_after_boot",
        Phase.REQUEST,
        "engine_hung",
        {},
    ),
    Variant(
        "vllm#22173, a worker names the method instead of a traceback",
        (
            V0 + "Exception in worker VllmWorkerProcess while processing method determine_num_available_blocks.",
            V0 + oom(),
        ),
        "failed",
        Phase.PROFILE,
        "profile_oom",
        {},
    ),
    Variant(
        "vllm#14726, Ray names it too",
        (
            "(RayWorkerWrapper pid=8776, ip=10.0.0.3) ERROR 03-12 10:00:00 worker_base.py:581] Error executing method "
            "'load_model'. This might cause deadlock in distributed execution.",
            "(RayWorkerWrapper pid=8776, ip=10.0.0.3) ERROR 03-12 10:00:00 worker_base.py:581] " + oom("28.00 MiB"),
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "weights_oom",
        {},
    ),
    Variant(
        "vllm#7593, one method for pool and graphs: the last milestone decides",
        (
            "INFO 08-19 10:00:00 distributed_gpu_executor.py:56] # GPU blocks: 22982, # CPU blocks: 6241",
            "(VllmWorkerProcess pid=91) INFO 08-19 10:00:00 model_runner.py:1024] Capturing the model for CUDA graphs.",
            V0 + "Exception in worker VllmWorkerProcess while processing method initialize_cache: CUDA out of memory. "
            "Tried to allocate 20.00 MiB., Traceback (most recent call last):",
        ),
        "failed",
        Phase.GRAPH_CAPTURE,
        "graph_capture_oom",
        {"gpu_blocks": 22982, "cpu_blocks": 6241, "tried_alloc_bytes": 20 * MIB},
    ),
    Variant(
        "a card that is full before the engine has anything on it",
        (
            WE + '  File "/v/vllm/v1/worker/gpu_worker.py", line 180, in init_device',
            WE + "RuntimeError: CUDA error: out of memory",
        ),
        "failed",
        Phase.WORKER_INIT,
        "foreign_process_memory",
        {},
        turn=(("device memory", "clean"),),
        leave=(UTIL_DOWN,),
    ),
    Variant(
        "vllm#13941, memory that was given away while the engine slept",
        (
            '  File "/v/vllm/worker/worker.py", line 140, in wake_up',
            "RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62",
        ),
        "died_after_boot",
        Phase.REQUEST,
        "request_oom",
        {},
    ),
    Variant(
        "vllm#40291, a stack that was cut above the function that builds the weights",
        (
            WE + '  File "/v/vllm/model_executor/layers/linear.py", line 201, in create_weights',
            WE + "    data=torch.empty(",
            WE + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 84.00 MiB.",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "weights_oom",
        {"tried_alloc_bytes": 84 * MIB},
    ),
    Variant(
        "vllm#16343, the same one layer further out",
        (
            WE + '  File "/v/vllm/model_executor/models/utils.py", line 610, in make_layers',
            WE + '  File "/v/vllm/model_executor/models/llama.py", line 323, in <lambda>',
            WE + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 84.00 MiB.",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "weights_oom",
        {"tried_alloc_bytes": 84 * MIB},
    ),
    Variant(
        "a stack that was cut inside the engine's loop",
        (
            WE + '  File "/v/vllm/v1/engine/core.py", line 920, in _process_engine_step',
            WE + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 84.00 MiB.",
        ),
        "died_after_boot",
        Phase.REQUEST,
        "request_oom",
        {"tried_alloc_bytes": 84 * MIB},
    ),
    Variant(
        "ragflow#11166, the weights begun without the model's name",
        (
            "(Worker_TP0 pid=128606) INFO 11-11 12:20:02 [gpu_model_runner.py:2634] Loading model from scratch...",
            "(Worker_TP0 pid=128606) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 84.00 MiB.",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "weights_oom",
        {"tried_alloc_bytes": 84 * MIB},
    ),
    Variant(
        "vllm#184, a first release that had less than nothing for its blocks",
        (
            "INFO 06-21 10:00:18 llm_engine.py:128] # GPU blocks: -1, # CPU blocks: 512",
            "Traceback (most recent call last):",
            '  File "/v/vllm/worker/cache_engine.py", line 79, in allocate_gpu_cache',
            "RuntimeError: Trying to create tensor with negative dimension -1: [-1, 32, 16, 16, 8]",
        ),
        "failed",
        Phase.KV_CHECK,
        "kv_budget_nonpositive",
        {"gpu_blocks": -1, "cpu_blocks": 512},
    ),
    Variant(
        "vllm#184, a stack as a notebook writes it",
        (
            "OutOfMemoryError                          Traceback (most recent call last)",
            "Cell In[3], line 2",
            '----> 2 llm = LLM(model="m/m")',
            "File /v/vllm/worker/model_runner.py:95, in ModelRunner.load_model(self)",
            "---> 95     self.model = get_model(",
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 500.00 MiB.",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "weights_oom",
        {"tried_alloc_bytes": 500 * MIB},
    ),
    Variant(
        "vllm#9824, an allocation whose figures torch could not ask for",
        (
            V0 + "Traceback (most recent call last):",
            V0 + '  File "/v/vllm/worker/model_runner.py", line 1014, in load_model',
            V0 + "RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "
            '"../c10/cuda/CUDACachingAllocator.cpp":838, please report a bug to PyTorch.',
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "weights_oom",
        {},
    ),
    Variant(
        "vllm#17770, an actor of Ray that died of one of three things",
        (
            E + "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
            E + "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
            "Worker exit detail: connection error code 2. Some common causes include: (1) the process was "
            "killed by the OOM killer due to high memory usage, (2) ray stop --force was called",
        ),
        "failed",
        Phase.UNKNOWN,
        "engine_killed",
        {},
    ),
    Variant(
        "llm-d#352, a full /dev/shm",
        (
            NCCL + "Error while creating shared memory segment /dev/shm/nccl-Ew (size 33030528), error: No space left "
            "on device (28)",
            "ERROR 10-13 10:00:00 [v1/executor/multiproc_executor.py:598] RuntimeError: NCCL error: unhandled system "
            "error (run with NCCL_DEBUG=INFO for details)",
        ),
        "failed",
        Phase.UNKNOWN,
        "host_memory_limit",
        {},
        turn=(("shm_size", "raise"),),
        leave=(UTIL_DOWN, ("LimitMEMLOCK", "raise")),
    ),
    Variant(
        "vllm#52496, the same found by the offloading connector",
        (E + "RuntimeError: Insufficient space in /dev/shm: 4095/4096 MiB required, 1405 MiB free",),
        "failed",
        Phase.UNKNOWN,
        "host_memory_limit",
        {},
        turn=(("shm_size", "raise"),),
    ),
    Variant(
        "pytorch/xla, a program that is larger than a TPU",
        (
            E + "RuntimeError: Bad StatusOr access: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of "
            "memory in memory space hbm. Used 30.21G of 15.48G hbm. Exceeded hbm capacity by 14.73G.",
        ),
        "failed",
        Phase.COMPILE,
        "compile_hbm_exceeded",
        {"peak_hbm_bytes": gib(30.21), "hbm_limit_bytes": gib(15.48)},
        turn=(("max_num_batched_tokens", "lower"),),
        leave=(("VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise"),),
    ),
    Variant(
        "vllm#8204, releases that say they are up and bind then",
        (
            READY,
            "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use",
        ),
        "failed",
        Phase.READY,
        "port_in_use",
        {},
    ),
    Variant(
        "vllm#25837, a desktop on a small card is no stranger",
        (
            E + "ValueError: Free memory on device (3.22/4.0 GiB) on startup is less than desired GPU memory "
            "utilization (0.9, 3.6 GiB).",
        ),
        "failed",
        Phase.WORKER_INIT,
        "startup_free_below_request",
        {"free_bytes": gib(3.22), "total_bytes": gib(4), "requested_bytes": gib(3.6)},
        turn=(UTIL_DOWN,),
    ),
    Variant(
        "LoRA of a higher rank than was asked for, while the adapter is loaded at start",
        (E + "RuntimeError: Worker failed with error 'LoRA rank 32 is greater than max_lora_rank 16.', please check",),
        "refused",
        Phase.WORKER_INIT,
        "argument_rejected",
        {},
        turn=(("max_lora_rank", "raise"),),
    ),
    Variant(
        "the same from a client's adapter: it got its answer and the engine serves on",
        (
            READY,
            "ERROR 06-01 10:00:00 [serving_models.py:150] ValueError: LoRA rank 64 is greater than max_lora_rank 16.",
            'INFO:     10.0.0.1:5 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
        ),
        "booted",
        Phase.READY,
        None,
        {},
    ),
    Variant(
        "a prompt that is too long, and nothing else",
        (
            "ERROR 06-01 10:00:00 [serving_chat.py:200] Traceback (most recent call last):",
            "ERROR 06-01 10:00:00 [serving_chat.py:200] ValueError: This model's maximum context length is 4096.",
        ),
        "unknown",
        Phase.UNKNOWN,
        None,
        {},
    ),
    Variant(
        "the last line of a traceback is all there is",
        (V0 + "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, unhandled system error",),
        "failed",
        Phase.UNKNOWN,
        "engine_exception",
        {},
    ),
    Variant(
        "a traceback of the engine's in a release whose lines name no process is no argument's",
        (
            C + "Traceback (most recent call last):",
            C + '  File "/v/vllm/v1/engine/core.py", line 9, in __init__',
            C + "AssertionError",
        ),
        "failed",
        Phase.WORKER_INIT,
        "engine_exception",
        {},
    ),
    Variant(
        "less than nothing for the KV cache, where the log is cut",
        (W + "Available KV cache memory: -1.25 GiB",),
        "failed",
        Phase.KV_CHECK,
        "kv_budget_nonpositive",
        {"available_kv_bytes": -gib(1.25)},
        turn=(("gpu_memory_utilization", "raise"),),
    ),
    Variant(
        "a TPU that its program and weights fill",
        (
            E + "ValueError: total_hbm_used_gb=15.1GiB exceeds total_hbm_limit_cap_gb=14.49GiB by 0.61GiB. Please "
            "consider increasing --gpu-memory-utilization from 0.92 to a larger value.",
        ),
        "failed",
        Phase.KV_CHECK,
        "kv_budget_nonpositive",
        {"consumed_bytes": gib(15.1), "requested_bytes": gib(14.49)},
        turn=(("gpu_memory_utilization", "raise"),),
    ),
    Variant(
        "the same in V0, by its blocks",
        ("INFO 04-27 10:00:00 llm_engine.py:275] # GPU blocks: 0, # CPU blocks: 256",),
        "failed",
        Phase.KV_CHECK,
        "kv_budget_nonpositive",
        {"gpu_blocks": 0, "cpu_blocks": 256},
    ),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=[variant.name for variant in VARIANTS])
def test_a_report_is_read(variant: Variant) -> None:
    check(variant)


def test_a_step_that_hangs_is_no_verdict_on_the_shape() -> None:
    assert verdict_of("engine_hung") is Verdict.UNKNOWN
    assert verdict_of("device_oom") is Verdict.FAIL


def test_equal_figures_are_not_said_to_have_grown() -> None:
    """vllm#33358: releases before the fix also refuse a device whose free memory stays as it was."""
    cause = read(
        E + "AssertionError: Error in memory profiling. Initial free memory 30.3 GiB, current free memory 30.3 GiB."
    ).cause
    assert cause is not None
    assert "grew" not in cause.sentence


def test_code_that_raises_is_quoted_as_its_message() -> None:
    """Tracebacks of Python 3.13 show the whole call; of a cut one it is all there is."""
    cause = read(C + '    raise ValueError("No available memory for the cache blocks. "').cause
    assert cause is not None
    assert cause.sentence.endswith("No available memory for the cache blocks.")


@pytest.mark.parametrize(
    ("line", "engine", "failure_class"),
    [
        ("RuntimeError: CUDA driver error: out of memory", "torch", "request_oom"),
        ("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62", "vllm", "request_oom"),
        ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", "torch", "devices_busy"),
        ("OSError: You are trying to access a gated repo.", "torch", "model_not_found"),
        (
            "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x (size 7)",
            "torch",
            "host_memory_limit",
        ),
        ("ERROR 06-26 10:00:00 [core.py:420] ImportError: a.so: undefined symbol: b", "vllm", "install_broken"),
        ("ERROR 06-26 10:00:00 engine.py:366] RuntimeError: No CUDA GPUs are available", "vllm", "device_missing"),
        ("pydantic_core.ValidationError: 1 validation error for ParallelConfig", "vllm", "argument_rejected"),
        ("CUDA error: out of memory", "unknown", None),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "unknown", None),
        ("ERROR:    [Errno 98] error while attempting to bind: address already in use", "unknown", None),
        ("OSError: [Errno 28] No space left on device", "unknown", None),
    ],
)
def test_a_line_of_a_fragment_is_told_where_no_other_program_says_it(
    line: str, engine: str, failure_class: str | None
) -> None:
    out = io.StringIO()
    explain.run([], as_json=True, out=out, stdin=io.BytesIO(f"{line}\n".encode()))
    said = json.loads(out.getvalue())
    assert (said["engine"], said["failure_class"]) == (engine, failure_class)


def test_a_traceback_on_one_line_has_its_frames() -> None:
    """As vllm#34643 shows it."""
    ledger = read(
        'Traceback (most recent call last): File "/v/executor/multiproc_executor.py", line 847, in worker_busy_loop '
        'output = func(*args) File "/v/vllm/v1/worker/gpu_worker.py", line 579, in sample_tokens return 1 ^^^ '
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB.",
        "KeyError: 'x'",
    )
    assert (ledger.outcome, ledger.phase, ledger.failure_class) == ("died_after_boot", Phase.REQUEST, "request_oom")


def test_a_value_that_is_none_of_those_allowed_is_named() -> None:
    """vllm-ascend#8506."""
    ledger = read(
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ParallelConfig",
        "dcp_comm_backend",
        "  Input should be 'ag_rs' or 'a2a' [type=literal_error, input_value='invalid', input_type=str]",
    )
    assert ledger.cause is not None
    assert "Input should be 'ag_rs' or 'a2a'" in ledger.cause.sentence
