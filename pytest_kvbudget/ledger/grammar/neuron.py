"""vLLM Neuron (plugin 0.2 to 0.24, SDK 2.33), the Neuron runtime and the Neuron compiler.

The runtime and the compiler print ``MB`` and ``GB`` and mean 2^20 and 2^30: the parts of a table close on its total
only so. The log wording of SDK 2.33's budget is in no public source: its four quantities are read by label.
"""

from __future__ import annotations

from typing import Final

from pytest_kvbudget.ledger.grammar.model import Failure, Row, Table, Tier
from pytest_kvbudget.verdict import Phase

ORDER: Final = (
    Phase.UNKNOWN,
    Phase.ARGUMENT,
    Phase.WORKER_INIT,
    Phase.WEIGHTS_LOAD,
    Phase.PROFILE,
    Phase.KV_CHECK,
    Phase.KV_ALLOC,
    Phase.COMPILE,
    Phase.MODEL_LOAD,
    Phase.GRAPH_CAPTURE,
    Phase.WARMUP,
    Phase.READY,
    Phase.REQUEST,
    Phase.SHUTDOWN,
)
"""Graphs are compiled after the KV cache exists: its shape is part of every program."""


def _fails(failure_class: str, phase: Phase | None = None, tier: Tier = Tier.ROOT, *, soft: bool = False) -> Failure:
    return Failure(failure_class=failure_class, phase=phase, tier=tier, soft=soft)


COMPILED: Final = "compiled"
"""How a boot that only compiles ends: by an exception, which is its success."""

BOOT: Final = (
    Row(pattern=r"Platform plugin neuron is activated", phase=Phase.ARGUMENT, scope="api"),
    Row(pattern=r"neuron -> vllm_neuron", phase=Phase.ARGUMENT, scope="api"),
    Row(
        pattern=r"Initialized NeuronWorker with rank {rank:count}\b",
        phase=Phase.WORKER_INIT,
        scope="rank",
        releases="0.21+",
    ),
    Row(pattern=r"CCOM bootstrap rendezvous: ", phase=Phase.WORKER_INIT, scope="rank", releases="0.21+"),
    Row(pattern=r"Loading model on NeuronWorker", phase=Phase.WEIGHTS_LOAD, scope="rank", releases="0.21+"),
    Row(
        pattern=r"Neuron HBM: {used_after_load_bytes:gib} used, {free_after_load_bytes:gib} free",
        phase=Phase.WEIGHTS_LOAD,
        then=Phase.KV_CHECK,
        scope="rank",
        releases="0.21, 0.24",
    ),
    Row(
        pattern=r"Host memory: {host_mem_available_bytes:gib} available",
        phase=Phase.PROFILE,
        scope="rank",
        releases="0.21, 0.24; CPU mode",
    ),
    Row(
        pattern=r"KV cache heuristic: ",
        phase=Phase.KV_CHECK,
        scope="rank",
        releases="0.21, 0.24 DEBUG; fork",
        parts=(
            r"user_budget={user_budget_bytes:gib}",
            r"\bcap={kv_cap_bytes:gib}",
            r"total_hbm={total_bytes:gib}",
            r"total_budget={requested_bytes:gib}",
            r"bytes_used={weights_bytes:gib}",
            r"effective={effective_kv_bytes:gib}",
        ),
    ),
    Row(
        pattern=r"KV cache memory: {total_bytes:gib} total \S+ ",
        phase=Phase.KV_CHECK,
        scope="rank",
        releases="0.21, 0.24 DEBUG",
        parts=(
            r"{weights_bytes:gib} used = ",
            r"{user_budget_bytes:gib} user budget",
            r"{available_kv_bytes:gib} available",
        ),
    ),
    Row(
        pattern=r"CPU mode KV cache memory: ",
        phase=Phase.KV_CHECK,
        scope="rank",
        releases="0.21, 0.24; CPU mode",
        parts=(r"{requested_bytes:gib} total budget", r"{available_kv_bytes:gib} available"),
    ),
    Row(
        pattern=r"KV cache need: {kv_needed_bytes:gib} for ",
        phase=Phase.KV_CHECK,
        scope="rank",
        parts=(r"for {max_num_seqs:count} sequence\(s\) of {max_model_len:count} tokens",),
        releases="fork",
    ),
    Row(
        pattern=r"KV cache budget in \S+ mode: ",
        phase=Phase.KV_CHECK,
        scope="rank",
        releases="fork",
        parts=(
            r"need={kv_needed_bytes:gib}",
            r"heuristic={effective_kv_bytes:gib}",
            r"available={available_kv_bytes:gib}",
        ),
    ),
    Row(
        pattern=r"(?i)headroom(?:[_ ](?:gib|reserve))?\W*(?:is|of|=|:)?\W*{reserved_headroom_bytes:gib}",
        needle="headroom",
        phase=Phase.KV_CHECK,
        scope="rank",
        releases="2.33, wording unknown",
        parts=(
            r"(?i)(?:logical[-_ ]core[-_ ]?(?:HBM|memory|share)|"
            r"HBM(?:[-_ ](?:per[-_ ](?:logical[-_ ])?core|share|total))?)\W*(?:is|of|=|:)?\W*{total_bytes:gib}",
            r"(?i)weights?(?:[_ ]bytes)?\W*(?:is|of|=|:)?\W*{weights_bytes:gib}",
            r"(?i)(?:KV(?:[_ ]cache)?[_ ](?:budget|memory|available)|available[_ ]KV(?:[_ ]cache)?(?:[_ ]memory)?)"
            r"(?:[_ ]bytes)?\W*(?:is|of|=|:)?\W*{available_kv_bytes:gib}",
        ),
    ),
    Row(
        pattern=r"Initializing KV cache from config \(NeuronWorker\)",
        phase=Phase.KV_ALLOC,
        scope="rank",
        releases="DEBUG",
    ),
    Row(
        pattern=r"Extracting (?:graphs for )?\d+ (?:prefill buckets|decode compile targets)",
        needle="Extracting ",
        phase=Phase.COMPILE,
        scope="rank",
        releases="0.21+",
    ),
    *(
        Row(
            pattern=pattern,
            needle=pattern,
            phase=Phase.COMPILE,
            scope="rank",
            flags=flags,
            releases="0.21+",
            known=False,
        )
        for pattern, flags in (
            ("ompilation cache key: ", ()),
            ("ache hit for key", ("graphs_from_cache",)),
            ("ache miss for key", ("graphs_compiled",)),
            ("recompilation for key", ("graphs_compiled",)),
        )
    ),
    Row(
        pattern=r"waiting for all ranks to finish (?:graph extraction|compilation)",
        needle="waiting for all ranks to finish",
        phase=Phase.COMPILE,
        scope="rank",
        releases="0.21+",
    ),
    Row(
        pattern=r"Compiled HLO [0-9a-f]{8,} in ",
        phase=Phase.COMPILE,
        scope="rank",
        flags=("graphs_compiled",),
        releases="0.21+",
    ),
    Row(pattern=r"^Compiling\.\.\.", needle="Compiling...", phase=Phase.COMPILE, scope="rank", known=False),
    Row(
        pattern=r"Compilation complete in ",
        phase=Phase.COMPILE,
        then=Phase.MODEL_LOAD,
        scope="rank",
        flags=("compile_done",),
        releases="0.21+",
    ),
    Row(
        pattern=r"Warming up model for \d+ num_batched_tokens_buckets",
        phase=Phase.WARMUP,
        scope="rank",
        releases="0.21+",
    ),
    Row(
        pattern=r"\[\d+/\d+\] Warming up ",
        needle="] Warming up ",
        phase=Phase.WARMUP,
        scope="rank",
        releases="0.21+",
    ),
    Row(
        pattern=r"(?:Successfully warmed|Warmed) up (?:for prefill|decode)",
        needle="armed up ",
        phase=Phase.WARMUP,
        scope="rank",
        releases="0.21+",
    ),
    Row(pattern=r"Model warmup completed", phase=Phase.WARMUP, scope="rank", releases="0.21+"),
    *(
        Row(pattern=pattern, needle=needle, phase=Phase.COMPILE, scope="rank", flags=flags, releases="NxD Inference")
        for pattern, needle, flags in (
            (r"[Gg]enerating HLOs? for the following models", "or the following models", ()),
            (r"[Gg]enerating HLO: ", "enerating HLO: ", ()),
            (r"Starting compilation for (?:all HLOs|the priority HLO)", "Starting compilation for", ()),
            (r"Call compiler with cmd: \W*neuronx?-cc", "Call compiler with cmd", ("graphs_compiled",)),
            (r"Using a cached neff at ", "Using a cached neff", ("graphs_from_cache",)),
        )
    ),
    Row(
        pattern=r"Finished Compilation for all HLOs in ",
        phase=Phase.COMPILE,
        then=Phase.MODEL_LOAD,
        scope="rank",
        flags=("compile_done",),
        releases="NxD Inference",
    ),
    *(
        Row(pattern=pattern, needle=needle, phase=Phase.WEIGHTS_LOAD, scope="rank", releases="NxD Inference")
        for pattern, needle in (
            (r"Sharding [Ww]eights on load", "eights on load"),
            (r"Sharding [Ww]eights for ranks", "eights for ranks"),
            (r"Loading presharded checkpoints", ""),
            (r"Presharded file read: ", ""),
        )
    ),
    Row(
        pattern=r"Finished weights loading in ",
        phase=Phase.WEIGHTS_LOAD,
        then=Phase.WARMUP,
        scope="rank",
        releases="NxD Inference",
    ),
    Row(
        pattern=r"^Warming up the model\.",
        needle="Warming up the model",
        phase=Phase.WARMUP,
        scope="rank",
        releases="NxD Inference",
    ),
    Row(
        pattern=r"^Warmup completed in ",
        needle="Warmup completed in ",
        phase=Phase.WARMUP,
        scope="rank",
        releases="NxD Inference",
    ),
    Row(
        pattern=r"CPUCompilationComplete\b",
        phase=Phase.COMPILE,
        scope="rank",
        failure=_fails(COMPILED, Phase.COMPILE),
        flags=("compile_only",),
        releases="0.21+; VLLM_NEURON_CPU_COMPILE",
    ),
)

COMPILER: Final = (
    Row(
        pattern=r"NCC_EOOM00[12]\b|Maximum peak HBM usage of ",
        needle="Maximum peak HBM usage of ",
        failure=_fails("compile_hbm_exceeded", Phase.COMPILE),
        scope="rank",
        wraps=True,
        parts=(
            r"\b(?=NCC_){code:word}\] Maximum peak",
            r"Maximum peak HBM usage of {peak_hbm_bytes:size}",
            r"exceeds HBM limit of {hbm_limit_bytes:size}",
            r"HBM limit of \S+?[KMG]?B for {arch:word}[.,]?(?:\s|$)",
            r"{constants_bytes:size}(?: of)? model constants",
            r"{io_tensors_bytes:size}(?: of)? I/O tensors",
            r"{scratchpad_bytes:size}(?: of)? internal \(scratchpad\)",
            r"{dma_ring_bytes:size}(?: of)? DMA ring I/O",
        ),
    ),
    *(
        Row(
            pattern=rf"\b{code}\b",
            needle=code,
            scope="rank",
            failure=_fails("compile_hbm_exceeded", Phase.COMPILE),
            wraps=True,
            parts=(
                r"\b(?=NCC_){code:word}(?=[\s:,\]\)]|$)",
                r"exceeds HBM limit of {arch:word}[.,]?(?:\s|$)",
                rf"[Nn]eeded {{{needs}:bytes}} bytes",
                r"available {hbm_limit_bytes:bytes} bytes",
            ),
        )
        for code, needs in (("NCC_EVRF009", "io_tensors_bytes"), ("NCC_EXSP001", "peak_hbm_bytes"))
    ),
    Row(
        pattern=r"\bNCC_(?!EOOM|EVRF009|EXSP001)[A-Z]+[0-9]+\b",
        needle="NCC_",
        scope="rank",
        failure=_fails("compile_failed", Phase.COMPILE),
        parts=(r"\b(?=NCC_){code:word}(?=[\s:,\]\)]|$)",),
    ),
    Row(
        pattern=r"\[{code:word}\]\s+Estimated peak HBM usage \({peak_hbm_bytes:gib_bare}\) exceeds "
        r"{hbm_limit_bytes:size}",
        needle="Estimated peak HBM usage (",
        scope="rank",
        failure=_fails("compile_hbm_exceeded", Phase.COMPILE),
        releases="2.18",
    ),
    Row(
        pattern=r"Failed compilation with \['neuronx-cc'",
        needle="Failed compilation with [",
        scope="rank",
        failure=_fails("compile_failed", Phase.COMPILE, Tier.KILLED),
    ),
    Row(
        pattern=r"neuronx-cc compilation failed with {status:signed_count}\b(?<=-9)",
        needle="compilation failed with -9",
        scope="rank",
        failure=_fails("host_oom_killed", Phase.COMPILE),
    ),
    Row(
        pattern=r"neuronx-cc compilation failed with {status:signed_count}",
        needle="neuronx-cc compilation failed with",
        scope="rank",
        failure=_fails("compile_failed", Phase.COMPILE, Tier.KILLED),
    ),
    *(
        Row(
            pattern=pattern,
            needle=needle,
            scope="rank",
            failure=_fails("host_oom_killed", Phase.COMPILE, tier),
            parts=(r"(?:failed with|returned:) {status:signed_count}",),
        )
        for pattern, needle, tier in (
            (r"\[F137\]", "[F137]", Tier.ROOT),
            (r"Compile command returned: -9\b", "Compile command returned: -9", Tier.KILLED),
            (r"neuronx?-cc failed with -9\b", "-cc failed with -9", Tier.ROOT),
            (r"'neuronx?-cc'.* died with <Signals\.SIGKILL", "died with <Signals.SIGKILL", Tier.ROOT),
        )
    ),
    *(
        Row(pattern=pattern, needle=needle, scope="rank", failure=_fails("compile_failed", Phase.COMPILE, Tier.KILLED))
        for pattern, needle in (
            (r"\bneuronx?-cc terminated abnormally", "-cc terminated abnormally"),
            (r"Compile command returned: (?!-9\b|0\b)-?\d", "Compile command returned: "),
            (r"neuronx?-cc failed with (?!-9\b)-?\d", "-cc failed with "),
            (r"'neuronx?-cc'.* returned non-zero exit status", "returned non-zero exit status"),
            (r"\bAn Internal Compiler Error has occurred", "An Internal Compiler Error has occurred"),
            (r"\[N[A-Z]{2}\d{3}\] +Unhandled exception with message: ", "Unhandled exception with message: "),
            (r"\bCompilation failed for \S+\.(?:hlo|pb)\b", "Compilation failed for "),
            (r"Got a cached failed neff", ""),
            (r"Compiler generated too many instructions \(", "Compiler generated too many instructions"),
            (r"Compiler status (?:ERROR|FAIL)", "Compiler status "),
        )
    ),
    Row(pattern=r"forcibly killed", scope="rank", failure=_fails("host_oom_killed", Phase.COMPILE)),
    Row(
        pattern=r"Error: .*VLLM_NEURON_\w+ cannot both be set",
        needle="VLLM_NEURON_",
        scope="rank",
        failure=_fails("argument_rejected", Phase.COMPILE),
    ),
    Row(
        pattern=r"Error: (?!.* cannot both be set).*VLLM_NEURON_(?:DISABLE_WARMUP_COMPILE|ASSERT_CACHE_HIT)",
        needle="VLLM_NEURON_",
        scope="rank",
        failure=_fails("compile_cache_miss", Phase.COMPILE),
    ),
    Row(
        pattern=r"Error: .*[Cc]ompile cache miss\b",
        needle="ompile cache miss",
        scope="rank",
        failure=_fails("compile_cache_miss", Phase.COMPILE),
    ),
    Row(
        pattern=r"Operation timed out!",
        needle="Operation timed out!",
        scope="rank",
        failure=_fails("compile_desync", None, Tier.DEATH),
        known=False,
    ),
    Row(
        pattern=r"Connection closed by peer",
        scope="rank",
        known=False,
        failure=_fails("compile_desync", None, Tier.DEATH),
    ),
)

RUNTIME: Final = (
    Row(
        pattern=r"\bFailed to alloc(?:ate)? DEVICE memory",
        needle="DEVICE memory",
        scope="rank",
        failure=_fails("hbm_oom"),
        parts=(
            r"DEVICE memory: {tried_alloc_bytes:bytes}\b",
            r"DEVICE memory \({tried_alloc_bytes:bytes} bytes\)",
            r"\bret[= ]+{ret:signed_count}",
        ),
    ),
    Row(
        pattern=r"\bFailed to alloc(?:ate)? HOST memory",
        needle="HOST memory",
        scope="rank",
        failure=_fails("host_memory_short"),
        parts=(
            r"HOST memory: {tried_alloc_bytes:bytes}\b",
            r"HOST memory \({tried_alloc_bytes:bytes} bytes\)",
            r"\bret[= ]+{ret:signed_count}",
        ),
    ),
    Row(
        pattern=r"Failed to allocate {tried_alloc_rounded_bytes:size} \(",
        needle="Failed to allocate ",
        scope="rank",
        failure=_fails("hbm_load_oom"),
        wraps=True,
        parts=(
            r"alignment: (?!none|n/a){alloc_alignment_bytes:size}",
            r"usage: {alloc_usage:text}\)",
            r"on ND ?{nd:count}:",
            r"on ND ?\d+:NC ?{nc:count}\b",
        ),
    ),
    Row(
        pattern=r"nrt_tensor_allocate\b.*(?:Failed to allocate|status=4)",
        needle="nrt_tensor_allocate",
        scope="rank",
        failure=_fails("hbm_oom"),
        parts=(r"status={status:count}",),
    ),
    Row(
        pattern=r"nrt_tensor_allocate\b.*status={status:count}(?<!=4)\s",
        needle="nrt_tensor_allocate",
        scope="rank",
        failure=_fails("unexplained", None, Tier.WRAPPER),
    ),
    Row(
        pattern=r"Could not satisfy request for {tried_alloc_bytes:bytes} bytes from channel",
        scope="rank",
        failure=_fails("hbm_load_oom"),
        releases="inf1",
    ),
    Row(
        pattern=r"tensor_allocate\s+Failed to allocate {tried_alloc_bytes:bytes} bytes on DEVICE",
        needle="bytes on DEVICE",
        scope="rank",
        failure=_fails("hbm_oom"),
    ),
    Row(
        pattern=r"Failed to load collectives for model|nrt_load_collectives.*status=4",
        needle="ollectives",
        scope="rank",
        failure=_fails("runtime_hbm_oom", Phase.MODEL_LOAD),
        parts=(r"status={status:count}",),
    ),
    Row(
        pattern=r"Unsupported topology\. Supported number of Neuron Cores",
        scope="rank",
        failure=_fails("parallelism_refused", Phase.MODEL_LOAD),
    ),
    Row(
        pattern=r"Could not load the model status={status:count}\s+message=\"?Allocation Failure",
        scope="rank",
        failure=_fails("hbm_load_oom", Phase.MODEL_LOAD, Tier.KILLED),
    ),
    Row(
        pattern=r"status={status:count}\s+message=\"?Allocation Failure",
        needle="Allocation Failure",
        scope="rank",
        failure=_fails("hbm_load_oom", None, Tier.KILLED),
    ),
    Row(
        pattern=r"NRT_RESOURCE in nrt_load",
        needle="NRT_RESOURCE in nrt_load",
        scope="rank",
        failure=_fails("nrt_resource", Phase.MODEL_LOAD, Tier.KILLED),
    ),
    Row(
        pattern=r"response code 'NERR_RESOURCE'",
        scope="rank",
        failure=_fails("nrt_resource", Phase.MODEL_LOAD, Tier.KILLED),
        releases="inf1",
    ),
    Row(
        pattern=r"Failed to load NN: .*err: {err:count}(?<=[ ]4)\b",
        needle="Failed to load NN",
        scope="rank",
        failure=_fails("nrt_resource", Phase.MODEL_LOAD, Tier.KILLED),
    ),
    Row(
        pattern=r"Failed to load NN: .*err: {err:count}\b(?<!: 4)",
        needle="Failed to load NN",
        scope="rank",
        failure=_fails("program_load_failed", Phase.MODEL_LOAD, Tier.KILLED),
    ),
    *(
        Row(
            pattern=pattern,
            needle=needle,
            scope="rank",
            failure=_fails("program_load_failed", Phase.MODEL_LOAD, tier),
            parts=(r"status={status:count}",),
        )
        for pattern, needle, tier in (
            (r"NEFF version: \S+ features: \S+ are not supported", "NEFF version: ", Tier.ROOT),
            (r"NEFF is invalid", "", Tier.ROOT),
            (r"Check if ranks \d+ and \d+ are using the same neff", "are using the same neff", Tier.ROOT),
            (r"failed to validate neff across the replica group", "", Tier.KILLED),
            (r"Unable to open: \S+\.json - \d", "Unable to open: ", Tier.KILLED),
            (r"Failure: NRT_(?!RESOURCE|SUCCESS)\w+ in nrt_load", "Failure: NRT_", Tier.KILLED),
            (r"nrt_load\w* status=(?:1|2|10)\b", "nrt_load", Tier.KILLED),
            (r"Could not load the model status=(?:1|2|10)\b", "Could not load the model", Tier.KILLED),
        )
    ),
    Row(
        pattern=r"Failed to stage graph\b",
        scope="rank",
        failure=_fails("unexplained", Phase.MODEL_LOAD, Tier.WRAPPER),
    ),
    Row(
        pattern=r"(?:Failed to (?:execute the model|schedule neff execution)\.?|nrt_execute\S*) "
        r"status={status:count}(?<!=4)(?<!=5)(?<!=9)(?<!=11)(?<!=120\d)\b",
        needle=" status=",
        scope="rank",
        failure=_fails("kernel_fault"),
    ),
    *(
        Row(
            pattern=pattern,
            scope="rank",
            failure=_fails("unexplained", phase, Tier.WRAPPER),
            releases="0.21+",
        )
        for pattern, phase in (
            (r"Model warmup failed for ", Phase.WARMUP),
            (r"Model graph extraction failed for ", Phase.COMPILE),
        )
    ),
    Row(
        pattern=r"device_resource_va failed \(ret={ret:signed_count}\)",
        needle="device_resource_va failed",
        scope="rank",
        failure=_fails("device_resource_exhausted", Phase.MODEL_LOAD),
    ),
    *(
        Row(
            pattern=rf"(?:nrt_|Could not load the model|Failed to execute the model).*"
            rf"\bstatus={{status:count}}(?<=={status}),?\s+(?:error )?message=",
            needle=f"status={status}",
            scope="rank",
            failure=_fails(failure_class),
        )
        for status, failure_class in ((5, "device_fault"), (9, "devices_busy"), (11, "host_memory_short"))
    ),
    Row(pattern=r"\bstatus={status:count},?\s+(?:error )?message=", needle="message=", scope="rank", known=False),
    Row(
        pattern=r"Mismatch detected between Runtime configuration and NEFF",
        scope="rank",
        failure=_fails("lnc_mismatch", Phase.MODEL_LOAD),
    ),
    Row(
        pattern=r"device profiling is enabled, which requires {profiler_bytes:size}",
        scope="rank",
        failure=_fails("profiler_reserve", Phase.MODEL_LOAD),
    ),
    Row(pattern=r"\bND \d+:NC \d+, current utilization:", needle="current utilization:", scope="rank", event="table"),
    *(
        Row(pattern=rf"^\s*\|\D*\b{word}\b\D*$", needle=f"{word} ", scope="rank", event="head", known=False)
        for word in ("Model", "TOTAL")
    ),
    Row(pattern=r"^\s*ND \d+ Overall\s*\|", needle=" Overall", scope="rank", event="cells"),
    Row(pattern=r"^\s*ND \d+ HBM \d+\s*\|", needle=" HBM ", scope="rank", event="cells"),
    Row(
        pattern=r"Number of ONE TMPBUF pages requested exceeded",
        scope="rank",
        failure=_fails("device_resource_exhausted", Phase.MODEL_LOAD),
    ),
    Row(
        pattern=r"^\W*total:\s*{hbm_total_used_bytes:size}", needle="total: ", scope="rank", known=False, follows="hbm"
    ),
    Row(
        pattern=r"^\W*model code:\s*{hbm_model_code_bytes:size}",
        needle="model code: ",
        scope="rank",
        known=False,
        follows="hbm",
    ),
    Row(
        pattern=r"^\W*(?:model )?constants:\s*{hbm_constants_bytes:size}",
        needle="constants: ",
        scope="rank",
        known=False,
        follows="hbm",
    ),
    Row(
        pattern=r"^\W*tensors:\s*{hbm_tensors_bytes:size}", needle="tensors: ", scope="rank", known=False, follows="hbm"
    ),
    Row(
        pattern=r"^\W*shared scratchpad:\s*{hbm_shared_scratchpad_bytes:size}",
        needle="shared scratchpad: ",
        scope="rank",
        known=False,
        follows="hbm",
    ),
    Row(
        pattern=r"^\W*runtime:\s*{hbm_runtime_bytes:size}", needle="runtime: ", scope="rank", known=False, follows="hbm"
    ),
    Row(
        pattern=r"^\W*dma rings:\s*{hbm_dma_rings_bytes:size}",
        needle="dma rings: ",
        scope="rank",
        known=False,
        follows="hbm",
    ),
    Row(
        pattern=r"^\W*collectives:\s*{hbm_collectives_bytes:size}",
        needle="collectives: ",
        scope="rank",
        known=False,
        follows="hbm",
    ),
)

REFUSED: Final = (
    Row(
        pattern=r"Computed KV cache budget is below minimum threshold",
        scope="rank",
        wraps=True,
        failure=_fails("min_kv_budget", Phase.KV_CHECK),
        parts=(r"effective={effective_kv_bytes:gib}", r"minimum={min_kv_bytes:gib}"),
    ),
    Row(
        pattern=r"(?i)\bKV (?:cache )?budget\b.{0,160}?\bbelow\b.{0,80}?(?:minimum|VLLM_NEURON_MIN_KV)",
        needle="udget",
        scope="rank",
        wraps=True,
        failure=_fails("min_kv_budget", Phase.KV_CHECK),
        releases="2.33, wording unknown",
        parts=(
            r"(?i)(?:effective|budget)\W{1,3}{effective_kv_bytes:gib}",
            r"(?i)minimum(?: of)?\W{1,3}{min_kv_bytes:gib}",
        ),
    ),
    Row(
        pattern=r"does not fit the memory budget in \S+ mode",
        parts=(r"\bneed(?:s|ed)?\W{1,2}{kv_needed_bytes:gib}", r"\bavailable\W{1,2}{available_kv_bytes:gib}"),
        scope="rank",
        failure=_fails("kv_check_short", Phase.KV_CHECK),
        releases="fork",
    ),
    Row(
        pattern=r"(?:\benvs\.|getenv\(\")(?=VLLM_NEURON_){env_variable:word}(?=[\"\s)]|$)",
        needle="VLLM_NEURON_",
        scope="rank",
        releases="0.21+; the lines of code in a traceback",
    ),
    Row(
        pattern=r"VLLM_NEURON_\w+ must be (?:in|a) ",
        needle="VLLM_NEURON_",
        scope="rank",
        failure=_fails("argument_rejected", Phase.KV_CHECK),
    ),
    Row(pattern=r"unusable memory stats: used=", scope="rank", failure=_fails("device_stats_unusable", Phase.PROFILE)),
    Row(
        pattern=r"Non-positive host available memory detected|Host memory fair-share per worker is non-positive",
        needle="ositive",
        scope="rank",
        failure=_fails("host_memory_short", Phase.PROFILE),
    ),
    Row(
        pattern=r"Neuron ?Core\(?s\)? ?not available - Requested:|Logical Neuron Core\(s\) not available",
        needle="not available",
        scope="rank",
        failure=_fails("devices_busy", Phase.WORKER_INIT),
        parts=(r"\bret={ret:signed_count}\b",),
    ),
    Row(
        pattern=r"response code 'NERR_RESOURCE_NC'",
        scope="rank",
        failure=_fails("devices_busy", Phase.WORKER_INIT),
        releases="inf1",
    ),
    Row(
        pattern=r"cannot determine the number of available NeuronCores",
        scope="rank",
        failure=_fails("devices_busy", Phase.WORKER_INIT, Tier.KILLED),
    ),
    *(
        Row(pattern=pattern, scope="rank", failure=_fails("device_missing", Phase.WORKER_INIT))
        for pattern in (
            r"No neuron device available",
            r"Unable to determine Neuron Driver version",
            r"Unable to read compatible Driver version",
        )
    ),
    Row(
        pattern=r"The PyTorch Neuron Runtime could not be initialized",
        scope="rank",
        failure=_fails("devices_busy", Phase.WORKER_INIT, Tier.KILLED),
    ),
    Row(pattern=r"No Neuron devices found", scope="api", failure=_fails("device_missing", Phase.ARGUMENT)),
    Row(
        pattern=r"NEURON_RT_VISIBLE_CORES cannot be used with",
        scope="rank",
        failure=_fails("argument_rejected", Phase.WORKER_INIT),
    ),
    Row(
        pattern=r"VLLM_NEURON_CPU_MODE and VLLM_NEURON_CPU_COMPILE are not compatible",
        scope="rank",
        failure=_fails("argument_rejected", Phase.ARGUMENT),
    ),
    Row(pattern=r"No EFA device found", scope="rank", failure=_fails("device_missing", Phase.WORKER_INIT, soft=True)),
    Row(
        pattern=r"tdrv_init_wait_ncs_ready\s+Failed to reset nd",
        needle="tdrv_init_wait_ncs_ready",
        scope="rank",
        failure=_fails("device_fault"),
    ),
    Row(
        pattern=r"\bNRT_EXEC_HW_ERR\b|NERR_\w*HW|status=120[0-6]\b",
        needle="status=120",
        scope="rank",
        failure=_fails("device_fault"),
    ),
)

TABLE: Final = Table(family="neuron", rows=(*BOOT, *COMPILER, *RUNTIME, *REFUSED), order=ORDER)
