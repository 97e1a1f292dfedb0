"""Mainline vLLM, 0.5 to 0.33: how a boot refuses, dies, or dies later."""

from __future__ import annotations

from typing import Final

from pytest_kvbudget.ledger.grammar.model import Failure, Row, Table, Tier
from pytest_kvbudget.verdict import Phase, Provenance

_C = Provenance.CONFIGURED


def _fails(failure_class: str, phase: Phase | None = None, tier: Tier = Tier.ROOT, *, soft: bool = False) -> Failure:
    return Failure(failure_class=failure_class, phase=phase, tier=tier, soft=soft)


_DIES: Final = Failure(failure_class="unexplained", phase=Phase.REQUEST, tier=Tier.WRAPPER)
"""Said only by an engine whose start was over."""

_OWN = (
    "(?:Vllm|Model|Parallel|Cache|Scheduler|Compilation|Speculative|LoRA|Load|MultiModal|Attention|Kernel|Offload|"
    "KVTransfer|StructuredOutputs|Observability)Config"
)
"""What vLLM's own groups of arguments are called."""
_SAYS = r"should be [^\[]*\[type=\w+, input_value="

ARGUMENT: Final = (
    Row(
        pattern=r"(?:vllm|api_server\.py|python\S*|serve): error: ",
        needle=": error: ",
        scope="api",
        failure=_fails("argument_rejected", Phase.ARGUMENT),
    ),
    Row(pattern=r"error: unrecognized arguments: ", scope="api", failure=_fails("argument_rejected", Phase.ARGUMENT)),
    Row(
        pattern=r"error: argument \S+: ", scope="api", failure=_fails("argument_rejected", Phase.ARGUMENT), known=False
    ),
    Row(
        pattern=r"error: the following arguments are required: ",
        scope="api",
        known=False,
        failure=_fails("argument_rejected", Phase.ARGUMENT),
    ),
    Row(
        pattern=r"User-specified max_model_len \({max_model_len:count}\) is greater than the derived max_model_len",
        needle="User-specified max_model_len",
        wraps=True,
        scope="api",
        failure=_fails("argument_rejected", Phase.ARGUMENT),
        provenance=_C,
        parts=(r"max_position_embeddings={native_max_model_len:count}",),
    ),
    Row(
        pattern=rf"validation errors? for {_OWN}\b",
        needle="validation error",
        wraps=True,
        parts=(
            rf"\bgpu_memory_utilization\s+Input {_SAYS}{{gpu_memory_utilization:fraction}}(?=, input_type)",
            rf"\bmax_num_seqs\s+Input {_SAYS}{{max_num_seqs:count}}(?=, input_type)",
            rf"\bmax_model_len\s+Input {_SAYS}{{max_model_len:count}}(?=, input_type)",
        ),
        scope="api",
        failure=_fails("argument_rejected", Phase.ARGUMENT, Tier.DEATH),
    ),
    Row(
        pattern=rf"validation errors? for (?!{_OWN}\b)\S+(?:Config|Args)\b",
        needle="validation error",
        scope="api",
        failure=_fails("argument_rejected", Phase.ARGUMENT, Tier.DEATH),
        known=False,
    ),
    Row(
        pattern=r"Input should be (?:(?:less|greater) than |a valid |'\S)",
        needle="Input should be ",
        scope="api",
        failure=_fails("argument_rejected", Phase.ARGUMENT),
        known=False,
    ),
    Row(
        pattern=r"Value error, ",
        scope="api",
        failure=_fails("argument_rejected", Phase.ARGUMENT, Tier.KILLED),
        known=False,
    ),
    Row(
        pattern=r"tensor parallel size \d+ must be greater than total num kv heads \d+ when enable decode",
        needle="must be greater than total num kv heads",
        scope="api",
        releases="0.12 - 0.26",
        failure=_fails("parallelism_refused", Phase.ARGUMENT),
    ),
    Row(
        pattern=r"greater than the model's total number of KV heads \(",
        scope="api",
        releases="0.27+",
        failure=_fails("parallelism_refused", Phase.ARGUMENT),
    ),
    Row(
        pattern=r"(?:must be|is not|should be) (?:evenly )?divisible by (?:the )?(?:tensor[ _-]parallel[ _-]size|"
        r"tp_?size|ep_size|.*tensor_parallel_size|(?:the )?number of|\d+$)",
        needle="divisible by ",
        scope="api",
        failure=_fails("parallelism_refused"),
    ),
    *(
        Row(pattern=pattern, needle=needle, scope="api", failure=_fails("parallelism_refused"))
        for pattern, needle in (
            (r"can be caused by too large tensor parallel size", ""),
            (r"[Pp]ipeline parallelism is not supported for this model", "ipeline parallelism is not supported"),
            (r"Number of experts in the model must be greater than 0 when expert parallel", ""),
            (r"_per_partition = \d+ is not divisible by\s+min_thread", " is not divisible by"),
            (r"The number of required \w+ exceeds the total number of available", " exceeds the total number of "),
            (r"(?:[Cc]annot|Can't) provide a placement group of", " provide a placement group of"),
            (r"World size \(\d+\) is larger than the number of available", "is larger than the number of"),
            (r"is larger than the number of available (?:GPUs|devices)", "is larger than the number of"),
        )
    ),
    *(
        Row(pattern=pattern, needle=needle, scope="rank", failure=_fails("argument_rejected"), provenance=_C)
        for pattern, needle in (
            (r"is only supported on GPUs with compute capability", ""),
            (r"GPUs with compute capability below [\d.]+ are not supported", "GPUs with compute capability below"),
            (r"Quantization scheme is not supported for", ""),
            (r"quantization method \S+ is not supported for", "uantization method"),
            (r"is not supported for quantization method", ""),
            (r"does not match the quantization method specified in", ""),
            (r"Unknown quantization method", ""),
            (r"max_num_batched_tokens \({max_num_batched_tokens:count}\) is smaller than max_model_len", ""),
            (r"max_num_batched_tokens \({max_num_batched_tokens:count}\) must be greater than or equal to", ""),
            (r"cannot currently support max_model_len={max_model_len:count} with block_size=", ""),
            (r"requires you to execute the (?:configuration|modeling|code|tokenizer)", "requires you to execute the"),
            (r"contains custom code which must be executed to correctly load", ""),
            (r"Failed to load the model config\. If the model is a custom model", "Failed to load the model config"),
            (r"Too large swap space\. .*out of the {host_total_bytes:gib} total CPU memory is", "Too large swap"),
            (r"[Ss]elected backend \S+ is not valid for this configuration", "is not valid for this configuration"),
            (r"No valid attention backend found for", ""),
            (r" does not support LoRA(?: yet)?\b", " does not support LoRA"),
            (r"GPU memory utilization must be less than 1\.0\. Got {gpu_memory_utilization:fraction}", ""),
            (r"[Tt]ransformers does not recognize this architecture", "does not recognize this architecture"),
        )
    ),
    Row(
        pattern=r"LoRA rank \d+ is greater than max_lora_rank",
        needle=" is greater than max_lora_rank",
        scope="rank",
        failure=_fails("argument_rejected", soft=True),
    ),
    Row(
        pattern=r"Can't load the (?:configuration|config|tokenizer|model) (?:of|for) ",
        needle="Can't load ",
        scope="api",
        failure=_fails("model_not_found", Phase.ARGUMENT),
        known=False,
    ),
    Row(
        pattern=r"is not a local folder and is not a valid model identifier",
        scope="api",
        known=False,
        failure=_fails("model_not_found", Phase.ARGUMENT),
    ),
    Row(
        pattern=r"Repo id must (?:be|use)",
        needle="Repo id must ",
        scope="api",
        known=False,
        failure=_fails("model_not_found", Phase.ARGUMENT),
    ),
    Row(
        pattern=r"offline mode is enabled", scope="api", known=False, failure=_fails("model_not_found", Phase.ARGUMENT)
    ),
    Row(
        pattern=r"Cannot find the requested files in the disk cache",
        scope="api",
        known=False,
        failure=_fails("model_not_found", Phase.ARGUMENT),
    ),
    Row(
        pattern=r"outgoing traffic has been disabled",
        scope="api",
        known=False,
        failure=_fails("model_not_found", Phase.ARGUMENT),
    ),
    Row(
        pattern=r"does not appear to have a file named ",
        scope="api",
        known=False,
        failure=_fails("model_not_found", Phase.ARGUMENT),
    ),
    Row(pattern=r"Unrecognized model in ", scope="api", known=False, failure=_fails("model_not_found", Phase.ARGUMENT)),
    Row(
        pattern=r"No such file or directory: '\S*config\.json'",
        needle="No such file or directory",
        scope="api",
        known=False,
        failure=_fails("model_not_found", Phase.ARGUMENT),
    ),
    Row(
        pattern=r"Repository Not Found for url",
        scope="api",
        known=False,
        failure=_fails("model_not_found", Phase.ARGUMENT),
    ),
    Row(
        pattern=r"Cannot access gated repo", scope="api", known=False, failure=_fails("model_not_found", Phase.ARGUMENT)
    ),
    *(
        Row(pattern=pattern, needle=needle, scope="api", known=False, failure=_fails("model_not_found", Phase.ARGUMENT))
        for pattern, needle in (
            (r"trying to access a gated repo", ""),
            (r"GatedRepoError: ", ""),
            (r"40[13] Client Error: .*for url: https://huggingface", " Client Error: "),
        )
    ),
    Row(
        pattern=r"Invalid repository ID or local directory specified",
        scope="api",
        failure=_fails("model_not_found", Phase.ARGUMENT),
    ),
    Row(
        pattern=r"couldn't connect to 'https://huggingface\.co' to load",
        scope="api",
        known=False,
        failure=_fails("model_not_found", Phase.ARGUMENT),
    ),
    Row(pattern=r"Cannot find any model weights with ", failure=_fails("model_not_found", Phase.WEIGHTS_LOAD)),
    Row(
        pattern=r"(?:Model architectures? \[[^\]]*\] (?:are|is) not supported|not supported for now\. Supported arch)",
        needle="not supported",
        scope="api",
        failure=_fails("argument_rejected", Phase.ARGUMENT),
    ),
    Row(
        pattern=r"[Aa]ddress already in use",
        needle="ddress already in use",
        scope="api",
        failure=_fails("port_in_use"),
        known=False,
    ),
    Row(
        pattern=r"(?:vllm|vllm serve): (?:command )?not found",
        needle="not found",
        scope="api",
        failure=_fails("command_not_found", Phase.ARGUMENT),
    ),
    Row(
        pattern=r"No module named '?vllm",
        needle="No module named",
        scope="api",
        failure=_fails("install_broken", Phase.ARGUMENT),
    ),
    Row(
        pattern=r"operator \S+ does not exist",
        needle="does not exist",
        known=False,
        failure=_fails("install_broken", Phase.ARGUMENT),
    ),
    Row(
        pattern=r"(?:ModuleNotFoundError: No module named|PackageNotFoundError: |ImportError: cannot import name)",
        needle="Error: ",
        known=False,
        failure=_fails("install_broken", Phase.ARGUMENT, Tier.KILLED),
    ),
    *(
        Row(pattern=pattern, needle=needle, known=False, failure=_fails("install_broken"))
        for pattern, needle in (
            (r"_OpNamespace' '_\w+' object has no attribute", "_OpNamespace'"),
            (r"Torch not compiled with CUDA enabled", ""),
            (r"Failed to find C compiler", ""),
            (r"[Cc]ould not find nvcc", "ould not find nvcc"),
            (r"fatal error: Python\.h: No such file", "fatal error: Python.h"),
        )
    ),
    Row(
        pattern=r"executable file not found in \$PATH",
        scope="api",
        known=False,
        failure=_fails("command_not_found", Phase.ARGUMENT),
    ),
    Row(
        pattern=r"ImportError: \S+\.so\S*: (?:undefined symbol|cannot open shared object)",
        needle="ImportError: ",
        known=False,
        failure=_fails("install_broken", Phase.ARGUMENT),
    ),
)

WORKERS: Final = (
    *(
        Row(
            pattern=pattern,
            scope="rank",
            failure=_fails("device_missing", phase),
            known=False,
        )
        for pattern, phase in (
            (r"Failed to infer device type", Phase.ARGUMENT),
            (r"Device string must not be empty", Phase.ARGUMENT),
            (r"could not select device driver", Phase.ARGUMENT),
            (r"nvidia-container-cli: initialization error", Phase.ARGUMENT),
            (r"No CUDA GPUs are available", Phase.WORKER_INIT),
            (r"No HIP GPUs are available", Phase.WORKER_INIT),
            (r"Found no NVIDIA driver on your system", Phase.WORKER_INIT),
            (r"Current node has no GPU available", Phase.WORKER_INIT),
            (r"NVIDIA driver on your system is too old", Phase.WORKER_INIT),
            (r"Unexpected error from cudaGetDeviceCount", Phase.WORKER_INIT),
            (r"CUDA driver initialization failed", Phase.WORKER_INIT),
            (r"error: invalid device ordinal", Phase.WORKER_INIT),
        )
    ),
    Row(
        pattern=r"Free memory on device (?:(?:cuda|hip|xpu|musa):{device:count} )?"
        r"\({free_bytes:gib_bare}/{total_bytes:gib_bare} GiB\) on startup is less",
        needle="Free memory on",
        scope="rank",
        failure=_fails("startup_free", Phase.WORKER_INIT),
        wraps=True,
        releases="0.9+; device named from 0.14",
        parts=(
            r"utilization \({gpu_memory_utilization:fraction}, {requested_bytes:gib}\)",
            r"excluding external process's weights \({requested_bytes:gib}\)",
        ),
    ),
    Row(
        pattern=r"Failed to load model - not enough GPU memory",
        scope="rank",
        releases="0.13+",
        failure=_fails("weights_oom", Phase.WEIGHTS_LOAD),
    ),
    Row(
        pattern=r"Worker proc \S+ died unexpectedly \(exit code: -9\)",
        needle="exit code: -9",
        releases="0.26+",
        failure=_fails("host_oom_killed", None, Tier.KILLED),
    ),
    Row(
        pattern=r"Worker \S+ pid \d+ died, exit code: -9",
        needle="exit code: -9",
        releases="V0",
        failure=_fails("host_oom_killed", None, Tier.KILLED),
    ),
    Row(
        pattern=r"Worker proc \S+ died unexpectedly",
        needle="died unexpectedly",
        releases="0.8.5+",
        failure=_fails("engine_killed", None, Tier.DEATH),
    ),
    Row(
        pattern=r"Worker \S+ pid \d+ died, exit code",
        needle="died, exit code",
        releases="V0",
        failure=_fails("engine_killed", None, Tier.DEATH),
    ),
    Row(
        pattern=r"Engine core proc(?:ess)? \S+ died unexpectedly",
        needle="died unexpectedly",
        releases="0.10.2+",
        failure=_fails("engine_killed", None, Tier.DEATH),
    ),
    Row(pattern=r"Engine process \(pid \d+\) died", failure=_fails("engine_killed", None, Tier.DEATH), releases="V0"),
    Row(pattern=r"ChildProcessError: worker died", failure=_fails("engine_killed", None, Tier.DEATH), releases="V0"),
    Row(pattern=r"engine core exited unexpectedly", failure=_fails("engine_killed", None, Tier.DEATH), releases="0.32"),
    Row(
        pattern=r"Error in memory profiling\.",
        needle="Error in memory",
        scope="rank",
        failure=_fails("profile_disturbed", Phase.PROFILE),
        releases="0.6.6+",
        wraps=True,
        parts=(
            r"Initial free memory {free_bytes:size}",
            r"current free memory {current_free_bytes:size}",
            r"Initial free memory {free_bytes:bytes}(?:,|\.(?!\d))",
            r"current free memory {current_free_bytes:bytes}(?:,|\.(?!\d))",
        ),
    ),
)

KV: Final = (
    Row(pattern=r"\bcumem_allocator\.cpp:\d+", needle="cumem_allocator.cpp"),
    Row(
        pattern=r"Trying to create tensor with negative dimension -\d+: \[-",
        failure=_fails("kv_budget_nonpositive", Phase.KV_CHECK),
        releases="0.1",
    ),
    Row(
        pattern=r"No available memory for the\s+cache blocks",
        needle="No available mem",
        failure=_fails("kv_budget_nonpositive", Phase.KV_CHECK),
        wraps=True,
    ),
    Row(
        pattern=r"The model's max seq len \({max_model_len:count}\) is larger than the maximum number of tokens",
        failure=_fails("kv_check_short", Phase.KV_CHECK),
        releases="V0",
        wraps=True,
        parts=(r"stored in KV cache \({kv_tokens:count}\)",),
    ),
    Row(
        pattern=r"To serve at least one request with the model",
        needle="To serve at",
        failure=_fails("kv_check_short", Phase.KV_CHECK),
        releases="0.7.3+",
        wraps=True,
        parts=(
            r"max seq len \({max_model_len:count}\)",
            r"{kv_needed_bytes:gib} KV cache is ?needed",
            r"available KV [Cc]ache memory \({available_kv_bytes:gib}\)",
            r"estimated maximum model length is {estimated_max_model_len:count}\b",
        ),
    ),
    Row(
        pattern=r"Cannot auto-fit max_model_len",
        failure=_fails("kv_check_short", Phase.KV_CHECK),
        releases="0.14+",
        flags=("auto_fit",),
        wraps=True,
        parts=(r"available (?:KV cache )?memory \({available_kv_bytes:gib}\)", r"\({available_kv_bytes:gib} available"),
    ),
    Row(
        pattern=r"[Ee]rror:? '?max_num_seqs \({max_num_seqs:count}\) exceeds available Mamba cache blocks "
        r"\({state_blocks:count}\)",
        needle="max_num_seqs (",
        failure=_fails("max_num_seqs_exceeds_state", Phase.KV_CHECK),
        releases="0.20+",
        wraps=True,
    ),
    Row(
        pattern=r"max_num_seqs \({max_num_seqs:count}\) exceeds available Mamba cache blocks \({state_blocks:count}\)",
        failure=_fails("max_num_seqs_exceeds_state", Phase.KV_CHECK, soft=True),
        releases="0.18+; only a warning <= 0.19",
        wraps=True,
    ),
    Row(
        pattern=r"total_hbm_used_gb={consumed_bytes:gib} exceeds total_hbm_limit(?:_cap)?_gb=",
        needle="total_hbm_used_gb=",
        parts=(
            r"exceeds total_hbm_limit_cap_gb={requested_bytes:gib}",
            r"--gpu-memory-utilization from {gpu_memory_utilization:fraction} to a larger",
        ),
        releases="TPU",
        scope="rank",
        failure=_fails("kv_budget_nonpositive", Phase.KV_CHECK),
    ),
    Row(
        pattern=r"The worker already uses {consumed_bytes:gib}",
        releases="0.28+, CPU",
        scope="rank",
        failure=_fails("kv_budget_nonpositive", Phase.KV_CHECK),
    ),
    Row(
        pattern=r"Available memory on node \d+ \({free_bytes:gib_bare}/{total_bytes:gib_bare} GiB\) on kv cache alloc",
        releases="0.28+, CPU",
        scope="rank",
        wraps=True,
        failure=_fails("kv_alloc_oom", Phase.KV_ALLOC),
        parts=(r"requested memory for kv \({tried_alloc_bytes:gib}\)",),
    ),
    Row(
        pattern=r"Available memory on node \d+ \({free_bytes:gib_bare}/{total_bytes:gib_bare} GiB\) on startup is less",
        releases="0.28+, CPU",
        scope="rank",
        failure=_fails("startup_free", Phase.WORKER_INIT),
    ),
)

LATE: Final = (
    Row(
        pattern=r"torch\._(?:inductor|dynamo)\.exc\.\w+",
        needle="torch._",
        scope="rank",
        known=False,
        failure=_fails("compile_failed", Phase.COMPILE, Tier.KILLED),
    ),
    Row(
        pattern=r"out of memory occurred when warming up (?:sampler|pooler)",
        scope="rank",
        needle="out of memory occurred when warming up",
        failure=_fails("warmup_oom", Phase.WARMUP),
        wraps=True,
        parts=(r"with {max_num_seqs:count} dummy requests",),
    ),
    Row(
        pattern=r"Workspace is locked but allocation from",
        needle="Workspace is",
        scope="rank",
        releases="0.13+",
        wraps=True,
        failure=_fails("workspace_locked", Phase.REQUEST),
        parts=(
            r"requires {workspace_required_bytes:mib}",
            r"current size is {workspace_current_bytes:mib}",
        ),
    ),
    Row(pattern=r"arange's range must be a power of 2", scope="rank", failure=_fails("kernel_fault")),
    *(
        Row(pattern=pattern, needle=needle, scope="rank", known=False, failure=_fails(failure_class))
        for pattern, needle, failure_class in (
            (r"type fp8\w+ not supported in this architecture", "not supported in this architecture", "kernel_fault"),
            (r"FlashAttention only supports Ampere GPUs or newer", "", "kernel_fault"),
            (r"hipErrorNoBinaryForGpu", "", "kernel_fault"),
            (r"PTXAS error: ", "", "compile_failed"),
            (r"ptxas fatal", "", "compile_failed"),
        )
    ),
    Row(
        pattern=r"(?:CUDA|HIP) error: (?:an illegal memory access|misaligned address|invalid device function|"
        r"unspecified launch failure|no kernel image|device kernel image is invalid|device-side assert|"
        r"the provided PTX was compiled|"
        r"an illegal instruction|operation not permitted)",
        needle=" error: ",
        scope="rank",
        known=False,
        failure=_fails("kernel_fault"),
    ),
    *(
        Row(pattern=pattern, needle=needle, scope="rank", known=False, failure=_fails(failure_class))
        for pattern, needle, failure_class in (
            (r"device\(s\) is/are busy or unavailable", "busy or unavailable", "devices_busy"),
            (r"error: (?:uncorrectable (?:ECC|NVLink) error|.*GPU is lost)", " error: ", "device_fault"),
            (r"UR_RESULT_ERROR_DEVICE_LOST", "", "device_fault"),
            (r"doesn't support querying the available free memory", "", "device_stats_unusable"),
        )
    ),
    Row(
        pattern=r"OutOfResources: |out of resource: shared memory",
        needle="ut of resource",
        scope="rank",
        known=False,
        failure=_fails("kernel_fault"),
    ),
    Row(pattern=r"Memory access fault by GPU node-", scope="rank", failure=_fails("kernel_fault"), known=False),
    Row(pattern=r"Timed out waiting for engine", failure=_fails("ready_timeout", None, Tier.KILLED)),
    Row(
        pattern=r"did not start within|VLLM_ENGINE_READY_TIMEOUT_S",
        needle="VLLM_ENGINE_READY_TIMEOUT_S",
        failure=_fails("ready_timeout", None, Tier.KILLED),
    ),
    Row(pattern=r"RPC call to \w+ timed out", needle="RPC call to ", failure=_fails("engine_hung", None, Tier.KILLED)),
    Row(
        pattern=r"^KeyboardInterrupt: terminated",
        needle="KeyboardInterrupt",
        known=False,
        failure=_fails("engine_killed", None, Tier.KILLED),
    ),
)

_WRAPPER = Failure(failure_class="unexplained", tier=Tier.WRAPPER)

WRAPPERS: Final = tuple(
    Row(pattern=pattern, needle=needle, failure=failure)
    for pattern, needle, failure in (
        (r"WorkerProc failed to start\.", "", _WRAPPER),
        (r"WorkerProc initialization failed due to an exception", "", _WRAPPER),
        (r"WorkerProc hit an exception\.", "", _WRAPPER),
        (r"EngineCore failed to start\.", "", _WRAPPER),
        (r"Engine core initialization failed\b", "", _WRAPPER),
        (r"Engine process failed to start", "", _WRAPPER),
        (r"Got fatal signal from worker processes", "", _WRAPPER),
        (r"EngineCore hit an exception", "", _WRAPPER),
        (r"EngineCore encountered a fatal error", "", _DIES),
        (r"AsyncLLM output_handler failed", "", _DIES),
        (r"EngineDeadError", "", _DIES),
        (r"Background loop has errored already", "", _DIES),
        (r"Engine background task failed", "", _DIES),
        (r"Dumping input data for ", "", _DIES),
        (r"Dumping scheduler output for ", "", _DIES),
        (r"^\w+Error\(['\"](?:Error in model execution|\w+ out of memory)", "Error(", _DIES),
        (r"Request \S+ failed \(engine dead\)", "failed (engine dead)", _DIES),
        (r"MQLLMEngine is already dead, terminating server process", "", _DIES),
        (r"AsyncLLMEngine (?:has failed|is already dead), terminating server process", "", _DIES),
    )
)

TABLE: Final = Table(family="vllm", rows=(*ARGUMENT, *WORKERS, *KV, *LATE, *WRAPPERS))
