"""Lines that say where a boot is, or why it ended, without a figure that matters: one per wording."""

from __future__ import annotations

import pytest

from pytest_kvbudget.ledger.model import Outcome
from pytest_kvbudget.verdict import Phase
from tests.ledger.support import read

MILESTONES: list[tuple[str, Phase]] = [
    ("INFO 11-25 10:02:11 api_server.py:585] vLLM API server version 0.6.4", Phase.ARGUMENT),
    ("Clav Version 3.2", Phase.ARGUMENT),
    ("args: Namespace(host=None, max_model_len=29000, max_num_seqs=256, gpu_memory_utilization=0.9)", Phase.ARGUMENT),
    ("Resolved architecture: LlamaForCausalLM", Phase.ARGUMENT),
    ("Initializing an LLM engine (v0.5.4) with config: model='m', max_seq_len=131072", Phase.WORKER_INIT),
    ("Initializing a V0 LLM engine (v0.8.5) with config: model='m', max_seq_len=131072", Phase.WORKER_INIT),
    ("rank 1 in world size 2 is assigned as DP rank 0, PP rank 0, TP rank 1, EP rank 1", Phase.WORKER_INIT),
    ("worker init memory snapshot: torch_peak=0.0GiB, free_memory=31.29GiB, total_memory=31.86GiB", Phase.WORKER_INIT),
    ("worker requested memory: 31.22GiB", Phase.WORKER_INIT),
    ("Starting to load model /m...", Phase.WEIGHTS_LOAD),
    ("Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.10s/it]", Phase.WEIGHTS_LOAD),
    ("Loading weights took 8.80 seconds", Phase.WEIGHTS_LOAD),
    ("Using cache directory: /c/torch_compile_cache/ab for vLLM's torch.compile", Phase.COMPILE),
    ("Dynamo bytecode transform time: 4.10 s", Phase.COMPILE),
    ("Compiling a graph for compile range (1, 2048) takes 24.01 s", Phase.COMPILE),
    ("Compiling a graph for general shape takes 24.01 s", Phase.COMPILE),
    ("Directly load the compiled graph(s) for compile range (1, 2048) from the cache, took 2.1 s", Phase.COMPILE),
    ("torch.compile takes 28.11 s in total", Phase.COMPILE),
    ("torch.compile took 28.11 s in total", Phase.COMPILE),
    ("Initial profiling/warmup run took 1.20 s", Phase.PROFILE),
    ("Free memory after profiling: 6.11 GiB (total), 5.47 GiB (within requested)", Phase.PROFILE),
    ("Profiling CUDA graph memory: PIECEWISE=18 (largest=136), FULL=3 (largest=4)", Phase.PROFILE),
    ("Overriding num_gpu_blocks=1478 with num_gpu_blocks_override=512", Phase.KV_CHECK),
    ("Multiplying the GPU KV cache size by the dcp_world_size 4.", Phase.KV_ALLOC),
    ("Multiplying the GPU KV cache size by the cp_world_size 4 (pcp_world_size 1 * dcp_world_size 4).", Phase.KV_ALLOC),
    ("Capturing the model for CUDA graphs. This may lead to unexpected consequences", Phase.GRAPH_CAPTURE),
    ("Capturing CUDA graph shapes:  10%|#         | 3/35 [00:01<00:10,  2.9it/s]", Phase.GRAPH_CAPTURE),
    ("Starting vLLM API server 0 on http://0.0.0.0:8000", Phase.READY),
    ("Starting vLLM server on http://0.0.0.0:8000", Phase.READY),
    ("INFO:     Uvicorn running on http://0.0.0.0:8000 (Press CTRL+C to quit)", Phase.READY),
    ("Platform plugin neuron is activated", Phase.ARGUMENT),
    ("- neuron -> vllm_neuron:register", Phase.ARGUMENT),
    ("Initialized NeuronWorker with rank 0, local_rank 0", Phase.WORKER_INIT),
    ("CCOM bootstrap rendezvous: NEURON_RT_ROOT_COMM_ID=127.0.0.1:1 (rank 0/4)", Phase.WORKER_INIT),
    ("Loading model on NeuronWorker", Phase.WEIGHTS_LOAD),
    ("Host memory: 60.00 GiB available, 4 local worker(s), 15.00 GiB fair-share per worker", Phase.PROFILE),
    (
        "CPU mode KV cache memory: 16.00 GiB free-share × 90.0% gpu_memory_utilization = 14.40 GiB total budget, 4.32 "
        "GiB "
        "available (cap_fraction=0.30)",
        Phase.KV_CHECK,
    ),
    (
        "KV cache budget in neuron mode: need=3.125 GiB, allocated=3.250 GiB (x), heuristic=6.48 GiB, available=3.250 "
        "GiB",
        Phase.KV_CHECK,
    ),
    ("Initializing KV cache from config (NeuronWorker)", Phase.KV_ALLOC),
    ("Extracting graphs for 4 prefill buckets: [512, 1024, 2048, 4096]", Phase.COMPILE),
    ("Extracting 2 decode compile targets: [(1, 4096)]", Phase.COMPILE),
    ("Barrier: waiting for all ranks to finish graph extraction", Phase.COMPILE),
    ("Compiled HLO 0123456789abcdef0123456789abcdef in 12.3s", Phase.COMPILE),
    ("Compilation complete in 301.22 seconds", Phase.COMPILE),
    ("Warming up model for 4 num_batched_tokens_buckets: [512, 1024]", Phase.WARMUP),
    ("[1/2] Warming up decode (batch=4, seq=4096)", Phase.WARMUP),
    ("  Successfully warmed up for prefill bucket 512", Phase.WARMUP),
    ("Model warmup completed: 4 num_batched_tokens_buckets, 2 num_seqs_buckets", Phase.WARMUP),
    (
        "[2026-01-02 03:04:05] server_args=ServerArgs(model_path='/m', mem_fraction_static=0.9, tp_size=1)",
        Phase.ARGUMENT,
    ),
    ("[2026-01-02 03:04:05 TP0] Init torch distributed begin.", Phase.WORKER_INIT),
    ("[2026-01-02 03:04:05 TP0] Load weight begin. avail mem=94.87 GB", Phase.WEIGHTS_LOAD),
    (
        "[2026-01-02 03:04:05 TP0] KV Cache is allocated. #tokens: 450000, K size: 27.47 GB, V size: 27.47 GB",
        Phase.KV_ALLOC,
    ),
    ("[2026-01-02 03:04:05 TP0] Memory pool end. avail mem=23.98 GB", Phase.KV_ALLOC),
    ("Capturing batches (bs=4 avail_mem=1.85 GB):  25%|##", Phase.GRAPH_CAPTURE),
    (
        "[2026-01-02 03:04:05 TP0] Capture cuda graph end. Time elapsed: 11.00 s. mem usage=0.85 GB. avail mem=5.61 "
        "GB.",
        Phase.GRAPH_CAPTURE,
    ),
    ("[2026-01-02 03:04:05] The server is fired up and ready to roll!", Phase.READY),
    ("srv  llama_server: model loaded", Phase.WARMUP),
    ("main: server is listening on http://127.0.0.1:8080 - starting the main loop", Phase.READY),
]


@pytest.mark.parametrize(("line", "phase"), MILESTONES, ids=[line[:50] for line, _ in MILESTONES])
def test_a_line_shows_its_phase(line: str, phase: Phase) -> None:
    ledger = read(line)
    assert ledger.phase is phase
    assert [milestone.phase for milestone in ledger.milestones] == [phase]
    assert ledger.cause is None
    assert ledger.outcome in {"booted", "unknown"}


A = "(APIServer pid=3) INFO 09-30 10:00:00 [a.py:1] vLLM API server version 0.23.0"
W = "(Worker_TP0 pid=7) INFO 09-30 10:00:00 [gpu_worker.py:1] Starting to load model /m..."

ENDS: list[tuple[str, str, str, Phase, Outcome]] = [
    (
        "api_server.py",
        "api_server.py: error: argument --max-model-len: invalid int value: 'x'",
        "argument_rejected",
        Phase.ARGUMENT,
        "refused",
    ),
    (
        "",
        "vllm serve: error: the following arguments are required: model",
        "argument_rejected",
        Phase.ARGUMENT,
        "refused",
    ),
    (
        A,
        "ValueError: Total number of attention heads (25) must be divisible by tensor parallel size (2).",
        "parallelism_refused",
        Phase.ARGUMENT,
        "refused",
    ),
    (
        A,
        "ValueError: World size (8) is larger than the number of available GPUs (4) in this node.",
        "parallelism_refused",
        Phase.ARGUMENT,
        "refused",
    ),
    (
        A,
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files",
        "model_not_found",
        Phase.ARGUMENT,
        "refused",
    ),
    (A, "OSError: /m does not appear to have a file named config.json.", "model_not_found", Phase.ARGUMENT, "refused"),
    (
        A,
        "Value error, Invalid repository ID or local directory specified: '/no/such'.",
        "model_not_found",
        Phase.ARGUMENT,
        "refused",
    ),
    (A, "Cannot access gated repo for url https://huggingface.co/x", "model_not_found", Phase.ARGUMENT, "refused"),
    (W, "RuntimeError: Cannot find any model weights with `/m`", "model_not_found", Phase.WEIGHTS_LOAD, "failed"),
    (
        A,
        "ValueError: Model architectures ['X'] are not supported for now.",
        "argument_rejected",
        Phase.ARGUMENT,
        "refused",
    ),
    ("", "/usr/bin/python: No module named vllm", "install_broken", Phase.ARGUMENT, "refused"),
    (
        A,
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        "install_broken",
        Phase.ARGUMENT,
        "refused",
    ),
    (
        W,
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "kernel_fault",
        Phase.WEIGHTS_LOAD,
        "failed",
    ),
    (
        W,
        "Memory access fault by GPU node-1 (Agent handle: 0x1) on address 0x2. Reason: Unknown.",
        "kernel_fault",
        Phase.WEIGHTS_LOAD,
        "failed",
    ),
    (
        W,
        "ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve a single token",
        "kv_check_short",
        Phase.KV_CHECK,
        "failed",
    ),
    (
        W,
        "RuntimeError: The worker already uses 0.90 GiB, nothing is left for the KV cache",
        "kv_budget_nonpositive",
        Phase.KV_CHECK,
        "failed",
    ),
    (
        W,
        "TimeoutError: Timed out waiting for engine core processes to start.",
        "ready_timeout",
        Phase.WEIGHTS_LOAD,
        "failed",
    ),
    (
        W,
        "RuntimeError: hipHostRegister failed: out of memory (code 2)",
        "host_memory_limit",
        Phase.WEIGHTS_LOAD,
        "failed",
    ),
    (W, "OSError: [Errno 24] Too many open files", "host_memory_limit", Phase.WEIGHTS_LOAD, "failed"),
    (W, "OSError: [Errno 12] Cannot allocate memory", "host_memory_short", Phase.WEIGHTS_LOAD, "failed"),
    (
        W,
        "kernel: Out of memory: Killed process 7 (VLLM::Worker) total-vm:1kB",
        "host_oom_killed",
        Phase.WEIGHTS_LOAD,
        "failed",
    ),
    (
        W,
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        "host_oom_killed",
        Phase.WEIGHTS_LOAD,
        "failed",
    ),
    (
        W,
        "(raylet) A worker died or was killed while executing a task by an unexpected system error.",
        "engine_killed",
        Phase.WEIGHTS_LOAD,
        "failed",
    ),
    (W, "RuntimeError: HIP error: hipErrorOutOfMemory", "weights_oom", Phase.WEIGHTS_LOAD, "failed"),
    (
        W,
        "NRT:nrt_load_collectives  Failed to load collectives for model.",
        "runtime_hbm_oom",
        Phase.MODEL_LOAD,
        "failed",
    ),
    (
        W,
        "device profiling is enabled, which requires 2.00GB of HBM per NC",
        "profiler_reserve",
        Phase.MODEL_LOAD,
        "failed",
    ),
    (
        W,
        "TDRV:tdrv_one_tmpbuf_reserve  Number of ONE TMPBUF pages requested exceeded the max number of pages allowed",
        "device_resource_exhausted",
        Phase.MODEL_LOAD,
        "failed",
    ),
    (
        W,
        "RuntimeError: The KV cache the served configuration needs does not fit the memory budget in neuron mode.",
        "kv_check_short",
        Phase.KV_CHECK,
        "failed",
    ),
    (
        W,
        "RuntimeError: VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION must be in (0, 1]. Got 1.5.",
        "argument_rejected",
        Phase.KV_CHECK,
        "failed",
    ),
    (
        W,
        "RuntimeError: Neuron runtime reported unusable memory stats: used=-1, free=0",
        "device_stats_unusable",
        Phase.PROFILE,
        "failed",
    ),
    (
        W,
        "RuntimeError: Non-positive host available memory detected: 0 bytes.",
        "host_memory_short",
        Phase.PROFILE,
        "failed",
    ),
    (
        A,
        "RuntimeError: The PyTorch Neuron Runtime could not be initialized.",
        "devices_busy",
        Phase.WORKER_INIT,
        "failed",
    ),
    (A, "No Neuron devices found. Skipping Neuron plugin registration.", "device_missing", Phase.ARGUMENT, "refused"),
    (
        A,
        "RuntimeError: NEURON_RT_VISIBLE_CORES cannot be used with multi-processing execution on vLLM.",
        "argument_rejected",
        Phase.WORKER_INIT,
        "refused",
    ),
    (
        W,
        "RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.3]:33333",
        "compile_desync",
        Phase.WEIGHTS_LOAD,
        "failed",
    ),
    (
        W,
        "TDRV:tdrv_init_wait_ncs_ready Failed to reset nd 0, timeout (result=-110)",
        "device_fault",
        Phase.WEIGHTS_LOAD,
        "failed",
    ),
    (
        "[2026-01-02 03:04:05 TP0] Load weight begin. avail mem=94.87 GB",
        "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
        "foreign_process_memory",
        Phase.WORKER_INIT,
        "failed",
    ),
    (
        "[2026-01-02 03:04:05] The server is fired up and ready to roll!",
        "Decode out of memory. Try to lower your batch size.",
        "request_oom",
        Phase.REQUEST,
        "died_after_boot",
    ),
    (
        "srv    load_model: loading model '/m.gguf'",
        "gguf_init_from_file: failed to open GGUF file '/m.gguf'",
        "model_not_found",
        Phase.WEIGHTS_LOAD,
        "failed",
    ),
]


@pytest.mark.parametrize(
    ("before", "line", "failure_class", "phase", "outcome"), ENDS, ids=[line[:60] for _, line, *_ in ENDS]
)
def test_a_line_ends_a_boot(before: str, line: str, failure_class: str, phase: Phase, outcome: Outcome) -> None:
    ledger = read(before, line)
    assert (ledger.failure_class, ledger.phase, ledger.outcome) == (failure_class, phase, outcome)
    assert ledger.cause is not None
    assert ledger.cause.evidence[0].line == 2
