"""Mainline vLLM, 0.5 to 0.33 on CUDA, ROCm and CPU: the lines of a boot that goes well.

Read from the source text of thirty releases; ``releases`` names the first and last inspected release with a wording.
"""

from __future__ import annotations

from typing import Final

from pytest_kvbudget.ledger.grammar.model import Row, Table
from pytest_kvbudget.verdict import Phase, Provenance

ORDER: Final = (
    Phase.UNKNOWN,
    Phase.ARGUMENT,
    Phase.WORKER_INIT,
    Phase.WEIGHTS_LOAD,
    Phase.COMPILE,
    Phase.PROFILE,
    Phase.KV_CHECK,
    Phase.KV_ALLOC,
    Phase.MODEL_LOAD,
    Phase.GRAPH_CAPTURE,
    Phase.WARMUP,
    Phase.READY,
    Phase.REQUEST,
    Phase.SHUTDOWN,
)
"""torch.compile runs inside the profile run, before the KV cache exists."""

_C = Provenance.CONFIGURED

ARGUMENTS: Final = (
    Row(
        pattern=r"vLLM API server version {engine_version:word}(?:\s|$)",
        phase=Phase.ARGUMENT,
        scope="api",
        event="start",
        provenance=_C,
        releases="<= 0.25",
    ),
    Row(
        pattern=r"█\s+version {engine_version:word}(?:\s|$)",
        needle=" version ",
        phase=Phase.ARGUMENT,
        scope="api",
        event="start",
        provenance=_C,
        releases="0.19+",
    ),
    Row(pattern=r"Clav Version", phase=Phase.ARGUMENT, scope="api", event="start", releases="fork"),
    Row(
        pattern=r"non-default args: ",
        phase=Phase.ARGUMENT,
        scope="api",
        event="start",
        provenance=_C,
        releases="0.9.2+",
        parts=(
            r"['‘’]max_model_len['’]: {max_model_len:count}\b",
            r"['‘’]max_num_seqs['’]: {max_num_seqs:count}\b",
            r"['‘’]max_num_batched_tokens['’]: {max_num_batched_tokens:count}\b",
            r"['‘’]gpu_memory_utilization['’]: {gpu_memory_utilization:fraction}\b",
            r"['‘’]kv_cache_memory_bytes['’]: {kv_cache_memory_bytes:bytes}\b",
            r"['‘’]tensor_parallel_size['’]: {tensor_parallel_size:count}\b",
            r"['‘’]num_gpu_blocks_override['’]: {num_gpu_blocks_override:count}\b",
        ),
        wraps=True,
    ),
    Row(
        pattern=r"\bargs: Namespace\(",
        needle="args: Namespace(",
        phase=Phase.ARGUMENT,
        scope="api",
        provenance=_C,
        releases="<= 0.9.1",
        parts=(
            r"\bmax_model_len={max_model_len:count}\b",
            r"\bmax_num_seqs={max_num_seqs:count}\b",
            r"\bmax_num_batched_tokens={max_num_batched_tokens:count}\b",
            r"\bgpu_memory_utilization={gpu_memory_utilization:fraction}\b",
            r"\btensor_parallel_size={tensor_parallel_size:count}\b",
        ),
        wraps=True,
    ),
    Row(pattern=r"Resolved architecture: ", phase=Phase.ARGUMENT, scope="api", releases="0.11+"),
    Row(
        pattern=r"Using max model len {max_model_len:count}\b",
        phase=Phase.ARGUMENT,
        scope="api",
        provenance=_C,
        releases="0.9+",
    ),
    Row(
        pattern=r"Chunked prefill is enabled with max_num_batched_tokens={max_num_batched_tokens:count}\b",
        phase=Phase.ARGUMENT,
        scope="api",
        provenance=_C,
        releases="0.7+",
    ),
    Row(pattern=r"Setting attention block size to {block_size:count} tokens", provenance=_C, releases="0.10+"),
    Row(
        pattern=r"Initializing (?:a V[01] LLM|an LLM) engine(?: \(v{engine_version:word}\))?(?: with config|$)",
        needle=" LLM engine",
        event="engine",
        phase=Phase.WORKER_INIT,
        provenance=_C,
        parts=(r"\bmax_seq_len={max_model_len:count}\b", r"\btensor_parallel_size={tensor_parallel_size:count}\b"),
        wraps=True,
    ),
)

WORKERS: Final = (
    Row(
        pattern=r"rank \d+ in world size \d+ is assigned as",
        needle=" in world size ",
        phase=Phase.WORKER_INIT,
        scope="rank",
        provenance=_C,
        releases="0.8+",
    ),
    Row(
        pattern=r"worker init memory snapshot: ",
        phase=Phase.WORKER_INIT,
        scope="rank",
        releases="0.14+ DEBUG",
        parts=(r"free_memory={free_bytes:gib}", r"total_memory={total_bytes:gib}"),
    ),
    Row(
        pattern=r"worker requested memory: {requested_bytes:gib}",
        phase=Phase.WORKER_INIT,
        scope="rank",
        releases="0.14+ DEBUG",
    ),
    Row(pattern=r"Starting to load model ", phase=Phase.WEIGHTS_LOAD, scope="rank"),
    Row(pattern=r"Loading model from scratch", phase=Phase.WEIGHTS_LOAD, scope="rank", releases="0.10+"),
    Row(
        pattern=r"Loading (?:safetensors|pt|bitsandbytes|gguf) checkpoint shards: ",
        needle=" checkpoint shards: ",
        phase=Phase.WEIGHTS_LOAD,
        scope="rank",
    ),
    Row(
        pattern=r"Loading weights took {weights_read_secs:secs} seconds",
        phase=Phase.WEIGHTS_LOAD,
        scope="rank0",
        releases="0.8.5+",
    ),
    Row(
        pattern=r"Loading model weights took {weights_bytes:gib}",
        phase=Phase.WEIGHTS_LOAD,
        then=Phase.PROFILE,
        scope="rank",
        releases="<= 0.7.2",
    ),
    Row(
        pattern=r"Model loading took {model_load_bytes:gib}(?: memory)?(?: and {model_load_secs:secs} seconds)?",
        phase=Phase.WEIGHTS_LOAD,
        then=Phase.PROFILE,
        scope="rank",
        releases="0.7.3+",
        wraps=True,
    ),
)

COMPILE: Final = (
    Row(
        pattern=r"Using cache directory: {compile_cache_folder:text} for vLLM's torch\.compile",
        phase=Phase.COMPILE,
        scope="rank",
        releases="0.7+",
    ),
    Row(pattern=r"Dynamo bytecode transform time: ", phase=Phase.COMPILE, scope="rank", releases="0.7+"),
    Row(
        pattern=r"Compiling a graph for (?:compile range|shape|general shape)",
        needle="Compiling a graph for ",
        phase=Phase.COMPILE,
        scope="rank",
        flags=("graphs_compiled",),
        releases="0.7+",
    ),
    Row(
        pattern=r"Directly load (?:the compiled graph|AOT compilation)",
        needle="Directly load ",
        phase=Phase.COMPILE,
        scope="rank",
        flags=("graphs_from_cache",),
        parts=(r"from path {compile_cache_folder:text}/rank_\d+_\d+/",),
        releases="0.7+",
    ),
    Row(
        pattern=r"saved AOT compiled function to {compile_cache_folder:text}/rank_\d+_\d+/",
        needle="saved AOT compiled function to ",
        phase=Phase.COMPILE,
        scope="rank",
        flags=("graphs_compiled",),
    ),
    Row(
        pattern=r"Compiling model again due to a load failure",
        phase=Phase.COMPILE,
        scope="rank",
        flags=("compile_cache_unreadable",),
    ),
    Row(pattern=r"Warming up model for the compilation", phase=Phase.COMPILE, scope="rank", releases="CPU"),
    Row(
        pattern=r"torch\.compile (?:takes|took) [\d.]+ s in total",
        needle="torch.compile t",
        phase=Phase.COMPILE,
        then=Phase.PROFILE,
        scope="rank",
        releases="0.6.6+",
    ),
)

PROFILE: Final = (
    Row(pattern=r"Initial profiling/warmup run took ", phase=Phase.PROFILE, scope="rank", releases="0.18+"),
    Row(
        pattern=r"the current vLLM instance can use total_gpu_memory \({total_bytes:gib}\) "
        r"x gpu_memory_utilization \({gpu_memory_utilization:fraction}\) = {requested_bytes:gib}",
        needle="the current vLLM instance",
        phase=Phase.PROFILE,
        scope="rank",
        releases="V0, 0.6.5 - 0.10",
        wraps=True,
    ),
    Row(
        pattern=r"model weights take {weights_bytes:gib}",
        phase=Phase.PROFILE,
        then=Phase.KV_CHECK,
        scope="rank",
        releases="V0, 0.6.5 - 0.10",
        parts=(
            r"non_torch_memory takes {non_torch_bytes:gib}",
            r"PyTorch activation peak memory takes {peak_activation_bytes:gib}",
            r"memory reserved for KV Cache is {available_kv_bytes:gib}",
        ),
        wraps=True,
    ),
    Row(
        pattern=r"Memory profiling results:(?: |$)",
        needle="Memory profiling results:",
        phase=Phase.PROFILE,
        then=Phase.KV_CHECK,
        scope="rank",
        releases="0.6.4",
        parts=(
            r"total_gpu_memory={total_bytes:gib}",
            r"initial_memory_usage={initial_usage_bytes:gib}",
            r"peak_torch_memory={peak_torch_bytes:gib}",
            r"memory_usage_post_profile={post_profile_bytes:gib}",
            r"non_torch_memory={non_torch_bytes:gib}",
            r"kv_cache_size={available_kv_bytes:gib}",
            r"gpu_memory_utilization={gpu_memory_utilization:fraction}",
        ),
        wraps=True,
    ),
    *(
        Row(
            pattern=rf"^{label}\s+{figure}$",
            needle=label,
            phase=Phase.PROFILE,
            scope="rank",
            releases="0.6.5: a table, one figure a line",
        )
        for label, figure in (
            ("total_gpu_memory", "{total_bytes:gib}"),
            ("gpu_memory_utilization", "{gpu_memory_utilization:fraction}"),
            ("the current vLLM instance can use", "{requested_bytes:gib}"),
            ("model weights take", "{weights_bytes:gib}"),
            ("non_torch_memory", "{non_torch_bytes:gib}"),
            ("PyTorch activation peak memory", "{peak_activation_bytes:gib}"),
            ("available_kv_cache_memory", "{available_kv_bytes:gib}"),
        )
    ),
    Row(
        pattern=r"Initial free memory: {free_bytes:gib}",
        phase=Phase.PROFILE,
        scope="rank",
        releases="V1 DEBUG",
        parts=(r"Requested memory: {gpu_memory_utilization:fraction} \(util\), {requested_bytes:gib}",),
        wraps=True,
    ),
    Row(
        pattern=r"Free memory after profiling: {current_free_bytes:gib}",
        phase=Phase.PROFILE,
        scope="rank",
        releases="V1 DEBUG",
    ),
    Row(
        pattern=r"Memory profiling takes [\d.]+ seconds",
        phase=Phase.PROFILE,
        scope="rank",
        parts=(
            r"Total non KV cache memory: {non_kv_bytes:gib}",
            r"torch peak memory increase: {peak_activation_bytes:gib}",
            r"non-torch forward increase memory: {non_torch_bytes:gib}",
            r"total consumed \(from mem_get_info\):? {consumed_bytes:gib}",
            r"weights memory: {weights_bytes:gib}",
        ),
        wraps=True,
    ),
    Row(pattern=r"Profiling CUDA graph memory: ", phase=Phase.PROFILE, scope="rank", releases="0.18+, runner V1"),
    Row(
        pattern=r"Estimated CUDA graph memory: {graph_estimated_bytes:gib}",
        phase=Phase.PROFILE,
        scope="rank",
        releases="0.18+, runner V1",
    ),
    Row(
        pattern=r"Available KV cache memory: {available_kv_bytes:gib}",
        phase=Phase.PROFILE,
        then=Phase.KV_CHECK,
        scope="rank",
        releases="0.9+; rank 0 only from 0.12",
    ),
    Row(
        pattern=r"Memory statistics \| ",
        phase=Phase.PROFILE,
        then=Phase.KV_CHECK,
        scope="rank",
        releases="TPU",
        parts=(
            r"total_hbm_limit_gb={total_bytes:gib}",
            r"total_hbm_limit_cap_gb={requested_bytes:gib}",
            r"total_hbm_used_gb={consumed_bytes:gib}",
            r"total_hbm_avail_gb={available_kv_bytes:gib}",
        ),
    ),
    Row(
        pattern=r"(?:Initial free memory {free_bytes:gib}, )?reserved {available_kv_bytes:gib} memory for KV Cache as "
        r"specified by kv_cache_memory_bytes",
        needle="memory for KV Cache as specified by kv_cache_memory_bytes",
        phase=Phase.PROFILE,
        then=Phase.KV_CHECK,
        scope="rank",
        releases="0.10.2+",
        flags=("kv_pinned",),
        wraps=True,
    ),
    Row(
        pattern=r"The current --gpu-memory-utilization={gpu_memory_utilization:fraction} is equivalent to "
        r"--gpu-memory-utilization={utilization_without_graph_profile:fraction}\b",
        needle="is equivalent to --gpu-memory-utilization=",
        phase=Phase.PROFILE,
        scope="rank",
        releases="0.18+",
        parts=(
            r"increase --gpu-memory-utilization to {utilization_equivalent:fraction}\b",
            r"increasing --gpu-memory-utilization from [0-9.]+ to {utilization_equivalent:fraction}\b",
        ),
        wraps=True,
    ),
    Row(
        pattern=r"CUDA graph memory profiling will be enabled by default",
        phase=Phase.PROFILE,
        scope="rank",
        releases="0.18",
        parts=(
            r"increase --gpu-memory-utilization from {gpu_memory_utilization:fraction} "
            r"to {utilization_equivalent:fraction}\b",
        ),
    ),
    Row(
        pattern=r"CUDA graph memory profiling is disabled",
        phase=Phase.PROFILE,
        scope="rank",
        releases="0.18+",
        parts=(
            r"increasing --gpu-memory-utilization from {gpu_memory_utilization:fraction} "
            r"to {utilization_equivalent:fraction}\b",
        ),
    ),
    Row(
        pattern=r"Applying persisted startup plan .*?kv_cache_memory_bytes={available_kv_bytes:bytes}\b",
        phase=Phase.PROFILE,
        then=Phase.KV_CHECK,
        scope="rank",
        releases="0.26+",
        flags=("kv_pinned",),
        parts=(r"baseline {free_bytes:gib}", r"current {current_free_bytes:gib}"),
    ),
    Row(
        pattern=r"Free memory grew by [\d.]+ GiB during profiling",
        phase=Phase.PROFILE,
        scope="rank",
        releases="0.29+, ROCm",
        parts=(
            r"\(initial {free_bytes:gib}, current {current_free_bytes:gib}\)",
            r"from the {torch_reserved_bytes:gib} torch reserved",
        ),
    ),
)

KV: Final = (
    Row(
        pattern=r"(?:(?<!, )# \w+|^(?:GPU|CUDA|XPU)) blocks: {gpu_blocks:signed_count}"
        r"(?:, # CPU blocks: {cpu_blocks:count})?",
        needle=" blocks: ",
        phase=Phase.KV_ALLOC,
        releases="<= 0.7.3, V0",
    ),
    Row(
        pattern=r"\b(?:GPU|CPU|XPU|TPU|HPU|Neuron|\w+)(?: \+ host)? KV cache size: {kv_tokens:tokens} tokens",
        needle=" KV cache size: ",
        phase=Phase.KV_ALLOC,
        releases="0.8+; one line with the next from 0.28",
        parts=(
            r"Maximum concurrency for {max_model_len:tokens} tokens",
            r"Maximum concurrency for [\d,]+ tokens(?: per |/)request: {max_concurrency:ratio}x",
        ),
        wraps=True,
    ),
    Row(
        pattern=r"Maximum concurrency for {max_model_len:tokens} tokens",
        phase=Phase.KV_ALLOC,
        releases="<= 0.27",
        parts=(r"tokens(?: per |/)request: {max_concurrency:ratio}x",),
        wraps=True,
    ),
    Row(
        pattern=r"Multiplying the GPU KV cache size by the d?cp_world_size {cp_world_size:count}\b",
        phase=Phase.KV_ALLOC,
        releases="0.10.2 - 0.19",
    ),
    Row(
        pattern=r"Overriding num_gpu_blocks=\d+ with num_gpu_blocks_override={num_gpu_blocks_override:count}\b",
        needle="Overriding num_gpu_blocks=",
        phase=Phase.KV_CHECK,
        provenance=_C,
        releases="0.9+",
    ),
    Row(
        pattern=r"Add {padding_layers:count} padding layers, may waste at most {padding_waste_pct:percent}% KV cache",
        needle=" padding layers, may waste",
        phase=Phase.KV_ALLOC,
        releases="0.9+",
    ),
    Row(
        pattern=r"Auto-fit max_model_len: full model context length {max_model_len:count} fits",
        phase=Phase.KV_CHECK,
        provenance=Provenance.DERIVED,
        releases="0.14+",
        flags=("auto_fit",),
    ),
    Row(
        pattern=r"Auto-fit max_model_len: reduced from {configured_max_model_len:count} to {max_model_len:count}\b",
        phase=Phase.KV_CHECK,
        provenance=Provenance.DERIVED,
        releases="0.14+",
        flags=("auto_fit",),
        wraps=True,
        parts=(r"\({available_kv_bytes:gib}(?: GPU| CPU| XPU)?(?: \+ [\d.]+ GiB host)?(?: available for KV cache)?\)",),
    ),
    Row(pattern=r"num_gpu_blocks is: {gpu_blocks:count}\b", phase=Phase.KV_ALLOC, scope="api", releases="0.10"),
    Row(
        pattern=r"Auto set \({available_kv_bytes:gib_bare}/{total_bytes:gib_bare}\) GiB for KV cache on node",
        phase=Phase.KV_CHECK,
        scope="rank",
        releases="0.28+, CPU",
        parts=(
            r"with {requested_bytes:gib} requested memory for the worker",
            r"{consumed_bytes:gib} memory was consumed",
        ),
    ),
    Row(
        pattern=r"Explicitly set \({available_kv_bytes:gib_bare}/{total_bytes:gib_bare}\) GiB for KV cache on node",
        phase=Phase.KV_CHECK,
        scope="rank",
        releases="0.28+, CPU",
    ),
)

CAPTURE: Final = (
    Row(
        pattern=r"Capping cudagraph capture sizes from max \d+ to \d+ to fit Mamba cache blocks \({state_blocks:count}",
        needle="Capping cudagraph capture sizes",
        phase=Phase.KV_ALLOC,
        releases="0.18 - 0.19",
    ),
    Row(pattern=r"Capturing the model for CUDA graphs", phase=Phase.GRAPH_CAPTURE, scope="rank", releases="<= 0.5"),
    Row(
        pattern=r"Capturing cudagraphs for decoding", phase=Phase.GRAPH_CAPTURE, scope="rank", releases="V0, 0.6 - 0.10"
    ),
    Row(pattern=r"Capturing a cudagraph on ", phase=Phase.GRAPH_CAPTURE, scope="rank", releases="V1 DEBUG"),
    Row(pattern=r"Capturing CUDA graph", phase=Phase.GRAPH_CAPTURE, scope="rank0", releases="V1"),
    Row(
        pattern=r"Graph capturing finished in {graph_capture_secs:secs} secs?",
        phase=Phase.GRAPH_CAPTURE,
        scope="rank",
        releases="all; sizes from 0.6; rank 0 only on runner V1 from 0.12",
        parts=(r"took {graph_capture_bytes:gib}",),
    ),
    Row(
        pattern=r"CUDA graph pool memory: {graph_actual_bytes:gib} \(actual\)",
        phase=Phase.GRAPH_CAPTURE,
        scope="rank",
        releases="0.18+",
        parts=(r"{graph_estimated_bytes:gib} \(estimated\)",),
        wraps=True,
    ),
    Row(
        pattern=r"Free memory on device \({free_bytes:gib_bare}/{total_bytes:gib_bare} GiB\) on startup\. Desired",
        phase=Phase.GRAPH_CAPTURE,
        scope="rank",
        releases="0.10.2 - 0.13, 0.26+; DEBUG between",
        parts=(
            r"utilization is \({gpu_memory_utilization:fraction}, {requested_bytes:gib}\)",
            r"{weights_bytes:gib} for weights?\b",
            r"{consumed_bytes:gib} for consumed memory",
            r"{peak_activation_bytes:gib} for peak activation",
            r"{non_torch_bytes:gib} for non-torch memory",
            r"{graph_actual_bytes:gib} for (?:CUDAGraph|NPU graph) memory",
            r"--kv-cache-memory={kv_suggest_fit_bytes:bytes}`? (?:\([^)]*\) )?to fit",
            r"--kv-cache-memory={kv_suggest_full_bytes:bytes}`? (?:\([^)]*\) )?to fully",
            r"kv cache memory in use is {kv_in_use_bytes:size}",
        ),
        wraps=True,
    ),
)

IDLE: Final = "prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s"
"""Said of an interval in which no request got a token and no prompt was read."""

SERVING: Final = (
    Row(
        pattern=r"init engine \(profile, create kv cache, warmup model\) took {init_engine_secs:secs} s",
        phase=Phase.WARMUP,
        parts=(r"\(compilation: {compile_secs:secs} s",),
        wraps=True,
    ),
    Row(pattern=r"Starting vLLM (?:API )?server", needle="Starting vLLM ", phase=Phase.READY, scope="api"),
    Row(pattern=r"Application startup complete", phase=Phase.READY, scope="api", event="served"),
    Row(pattern=r"Uvicorn running on ", phase=Phase.READY, scope="api", event="served"),
    Row(
        pattern=r"Running: {running:count} reqs, Swapped: \d+ reqs, Pending: {waiting:count} reqs",
        needle=" reqs, Swapped: ",
        scope="api",
        event="alive",
        parts=(r"GPU KV cache usage: {kv_usage_pct:percent}%",),
        releases="V0",
    ),
    Row(
        pattern=r"\d+ reqs, Waiting: {waiting:count} reqs",
        needle=" reqs, Waiting: ",
        scope="api",
        event="alive",
        parts=(r"Running: {running:count} reqs", r"KV cache usage: {kv_usage_pct:percent}%"),
    ),
    Row(
        pattern=r"\"(?:POST /v1/\S*|GET /health) HTTP/1\.\d\" 200",
        needle='HTTP/1.1" 200',
        scope="api",
        event="alive",
        known=False,
    ),
    Row(pattern=r"\"POST /v1/\S* HTTP/1\.\d\" 5\d\d", needle='HTTP/1.1" 5', scope="api", event="asked", known=False),
    Row(
        pattern=r"Sequence group \S+ is preempted by PreemptionMode\.",
        needle=" is preempted by PreemptionMode.",
        phase=Phase.REQUEST,
        scope="api",
        event="alive",
        releases="V0",
    ),
    Row(pattern=r"shutdown triggered", scope="api", event="stopping"),
    Row(pattern=r"trigger received signal=SIG(?:TERM|INT)", needle="trigger received signal=", event="stopping"),
    Row(pattern=r"^Shutting down$", needle="Shutting down", scope="api", event="stopping", known=False),
)

TABLE: Final = Table(
    family="vllm", rows=(*ARGUMENTS, *WORKERS, *COMPILE, *PROFILE, *KV, *CAPTURE, *SERVING), order=ORDER
)
