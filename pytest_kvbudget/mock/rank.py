"""One rank of vLLM on one GPU: what it allocates in each phase, and what it prints about it."""

from __future__ import annotations

import time
from typing import Final

from pytest_kvbudget.mock.base import WEIGHT_SHARDS, BaseRank, Memory
from pytest_kvbudget.mock.conditions import cache_folder
from pytest_kvbudget.mock.failures import Failure, out_of_memory
from pytest_kvbudget.mock.physics import Physics, decode_sizes
from pytest_kvbudget.mock.process import Log, gib
from pytest_kvbudget.mock.spec import Arena

FIT_BUFFER_BYTES: Final = 150 * 2**20
"""vLLM's margin in the pool sizes that it suggests (``gpu_worker.py``)."""

# frames of each phase, outermost in the worker first, for a fault that has nothing to do with memory
PHASE_FRAMES: Final = {
    "worker_init": ("init_device",),
    "weights_load": ("load_model", "runner_load"),
    "compile": ("available", "profile_run", "dummy_run"),
    "profile": ("available", "profile_run", "dummy_run"),
    "kv_alloc": ("initialize", "attn_backend"),
    "graph_capture": ("warm_up", "capture_model", "capture_graphs", "capture_one", "dummy_run"),
    "warmup": ("sampler", "sampler_run"),
    "request": ("execute", "runner_execute"),
}
_CAPTURE: Final = PHASE_FRAMES["graph_capture"]


class Rank(BaseRank):
    """Allocates on its card through the driver."""

    frames = PHASE_FRAMES

    def __init__(self, physics: Physics, rank: int, cards: list[int], log: Log, memory: Memory) -> None:
        super().__init__(physics, rank, cards, log, memory)
        self._free_at_start = 0
        self._consumed = 0
        self._available = 0

    def start(self) -> int:
        """Worker init: the gate on free memory."""
        self._enter("worker_init")
        spec, physics, arguments = self.physics.spec, self.physics, self.physics.arguments
        if self.rank >= len(self._cards):
            text = f"DP adjusted local rank {self.rank} is out of bounds for {len(self._cards)} devices."
            raise Failure("AssertionError", text, ("bounds",))
        place = (
            f"DP rank 0, PP rank 0, PCP rank 0, TP rank {self.rank}, ETP rank {self.rank}, EP rank N/A, EPLB rank N/A"
        )
        self._log.say(
            "parallel_state.py:2350", f"rank {self.rank} in world size {physics.ranks} is assigned as {place}"
        )
        self._pause("worker_init")
        self._free_at_start = self._free()
        if self._free_at_start < physics.requested_bytes:
            raise Failure(
                "ValueError",
                f"Free memory on device cuda:{self.rank} ({gib(self._free_at_start)}/{gib(spec.device_total)} GiB) on"
                f" startup is less than desired GPU memory utilization ({arguments.gpu_memory_utilization},"
                f" {gib(physics.requested_bytes)} GiB). Decrease GPU memory utilization or reduce GPU memory used by"
                " other processes.",
                ("init_device", "request_memory"),
            )
        return 0

    def load(self) -> int:
        """Load weights, and make the arena where there is one."""
        self._enter("weights_load")
        physics, began = self.physics, time.monotonic()
        if self._first:
            self._log.say("gpu_model_runner.py:5040", f"Starting to load model {physics.arguments.model}...")
        frames = ("load_model", "runner_load", "create_weights")
        weights = physics.weights_bytes
        if physics.arena_plan is not None and physics.spec.arena is not None:
            weights += physics.arena_plan.arena_bytes(physics.spec.arena)
        try:
            self._alloc(physics.non_torch_bytes(self.rank), frames, torch=False)
            for shard in range(WEIGHT_SHARDS):
                self._alloc(weights * (shard + 1) // WEIGHT_SHARDS - weights * shard // WEIGHT_SHARDS, frames)
                self._pause("weights_load", WEIGHT_SHARDS)
        except Failure as failure:
            self._log.fail(
                "gpu_model_runner.py:5147",
                "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory for"
                " weights, increasing --tensor-parallel-size, or using --quantization. See"
                " https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more tips. (original error:"
                f" {failure.text})",
            )
            raise
        if self._first and physics.spec.arena is not None and physics.spec.arena.ple_bytes:
            self._lock_embeddings(physics.spec.arena)
        if self._first:
            taken = time.monotonic() - began
            self._log.say("default_loader.py:430", f"Loading weights took {taken:.2f} seconds")
            self._log.say(
                "gpu_model_runner.py:5150", f"Model loading took {gib(weights)} GiB memory and {taken:.6f} seconds"
            )
        return 0

    def _lock_embeddings(self, arena: Arena) -> None:
        """The fork's process that keeps per-layer embeddings in host memory says whether they are locked there."""
        log = Log("PleOffloadWorker", pid=self._log.pid, sink=self._log.raw)
        size = gib(arena.ple_bytes)
        if arena.memlock_bytes is None or arena.ple_bytes <= arena.memlock_bytes:
            log.say("ple_offload.py:211", f"PLE offload: locked {size} GiB of PLE weights in RAM")
        else:
            log.caution("ple_offload.py:219", f"PLE offload: locked 0.0 GiB, FAILED to lock {size} GiB")

    def profile(self) -> int:
        """Run the largest step, and say how many bytes are left for the KV cache."""
        self._enter("profile")
        physics, spec, pinned = self.physics, self.physics.spec, self.physics.arguments.kv_cache_memory_bytes
        before = self._free_at_start - self._free()
        self._alloc(physics.activation_bytes, ("available", "profile_run", "dummy_run"))
        self._pause("profile")
        self._release(physics.activation_bytes)
        free_now = self._free()
        if spec.dialect == "rdna4":
            non_torch = physics.non_torch_bytes(self.rank)
            self._log.say(
                "gpu_worker.py:655",
                f"memory after profile: torch reserved {gib(self._usage.torch)} GiB, torch allocated"
                f" {gib(self._usage.torch)} GiB, non-torch {gib(non_torch)} GiB (before load: non-torch"
                f" {gib(spec.idle_bytes)} GiB)",
            )
        if pinned is not None:
            self._say_pinned(pinned)
            self._available = pinned
            return pinned
        if self._free_at_start < free_now:
            raise Failure(
                "AssertionError",
                f"Error in memory profiling. Initial free memory {gib(self._free_at_start)} GiB, current free memory"
                f" {gib(free_now)} GiB. This happens when other processes sharing the same container release GPU memory"
                " while vLLM is profiling during initialization. To fix this, ensure consistent GPU memory"
                " allocation or"
                " isolate vLLM in its own container.",
                ("profile_assert",),
            )
        self._estimate_graphs()
        self._consumed = self._free_at_start - free_now
        taken = self._consumed + physics.activation_bytes + physics.graph_estimate_bytes
        self._available = physics.requested_bytes - taken
        self._check_plan(before)
        if self._first:
            self._log.say("gpu_worker.py:760", f"Available KV cache memory: {gib(self._available)} GiB")
            if physics.graph_estimate_bytes:
                self._advise()
        return self._available

    def compile(self) -> int:
        """Compile, unless told to be eager."""
        self._enter("compile")
        if self.physics.arguments.enforce_eager:
            return 0
        began = time.monotonic()
        self._pause("compile")
        if self._first:
            step, taken = self.physics.batched_tokens, time.monotonic() - began
            if self.physics.spec.keeps_cache:
                folder = cache_folder(self.physics.environ.get("KVBUDGET_MOCK_SYSFS", ""), self.physics.compile_key())
                self._log.say("backends.py:1089", f"Using cache directory: {folder} for vLLM's torch.compile")
            if self.physics.spec.keeps_cache and not self.physics.cold:
                self._log.say(
                    "backends.py:344",
                    f"Directly load the compiled graph(s) for compile range (1, {step}) from the cache, took"
                    f" {taken:.3f} s",
                )
                return 0
            self._log.say("backends.py:1089", f"Dynamo bytecode transform time: {taken / 4:.2f} s")
            self._log.say("backends.py:390", f"Compiling a graph for compile range (1, {step}) takes {taken / 2:.2f} s")
            self._log.say("monitor.py:53", f"torch.compile took {taken:.2f} s in total")
        return 0

    def _say_pinned(self, pinned_bytes: int) -> None:
        self._log.say(
            "gpu_worker.py:669",
            f"Initial free memory {gib(self._free_at_start)} GiB, reserved {gib(pinned_bytes)} GiB memory for"
            " KV Cache as"
            " specified by kv_cache_memory_bytes config and skipped memory profiling. This does not respect the"
            " gpu_memory_utilization config. Only use kv_cache_memory_bytes config when you want manual control of KV"
            " cache memory size. If OOM'ed, check the difference of initial free memory between the current run and the"
            " previous run where kv_cache_memory_bytes is suggested and update it correspondingly.",
        )

    def _estimate_graphs(self) -> None:
        sizes = self.physics.graph_sizes
        if not sizes or not self.physics.graph_estimate_bytes:
            return
        decode = decode_sizes(sizes, self.physics.arguments.max_num_seqs)
        groups = f"PIECEWISE={len(sizes)} (largest={sizes[-1]})"
        if decode:
            groups += f", FULL={len(decode)} (largest={decode[-1]})"
        self._log.say("gpu_model_runner.py:6369", f"Profiling CUDA graph memory: {groups}")
        estimate = self.physics.graph_estimate_bytes / 2**30
        self._log.say("gpu_model_runner.py:6474", f"Estimated CUDA graph memory: {estimate:.2f} GiB total")

    def _check_plan(self, before_bytes: int) -> None:
        """The fork's comparison of plan and measurement, and its cap on the pool."""
        physics, arena, plan = self.physics, self.physics.spec.arena, self.physics.arena_plan
        if plan is None or arena is None:
            return
        measured = before_bytes - physics.weights_bytes - plan.arena_bytes(arena) + physics.activation_bytes
        planned_rate, rate = arena.registry_bytes_per_token, physics.kv_bytes_per_token
        self._log.say(
            "expert_plan.py:530",
            f"expert offload plan check: runtime overhead planned {plan.overhead_bytes / 2**30:.2f} GiB, measured"
            f" {measured / 2**30:.2f} GiB ({(measured - plan.overhead_bytes) / 2**30:+.2f}); KV planned {planned_rate}"
            f" B/token, measured {rate} B/token ({rate - planned_rate:+d})",
        )
        if arena.pool_capped:
            self._available = min(self._available, plan.kv_reserve_bytes)

    def _advise(self) -> None:
        used = self.physics.arguments.gpu_memory_utilization
        change = self.physics.graph_estimate_bytes / self.physics.spec.device_total
        self._log.say(
            "gpu_worker.py:774",
            "CUDA graph memory profiling is enabled (default since v0.21.0). The current"
            f" --gpu-memory-utilization={used:.4f} is equivalent to"
            f" --gpu-memory-utilization={used - change:.4f} without"
            " CUDA graph memory profiling. To maintain the same effective KV cache size as before, increase"
            f" --gpu-memory-utilization to {min(used + change, 1.0):.4f}. To disable, set"
            " VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0.",
        )

    def kv_alloc(self, blocks: int) -> int:
        """Allocate the pool, in one piece."""
        self._enter("kv_alloc")
        physics = self.physics
        seqs = physics.arguments.max_num_seqs
        states = blocks // max(1, physics.state_blocks)
        if physics.state_bytes and physics.graph_sizes and seqs > states:
            raise Failure(
                "ValueError",
                f"max_num_seqs ({seqs}) exceeds available Mamba cache blocks ({states}). Each decode sequence requires"
                " one Mamba cache block, so CUDA graph capture cannot proceed. Please lower max_num_seqs to at most"
                f" {states} or increase gpu_memory_utilization.",
                ("initialize", "attn_backend", "resolve_mode"),
            )
        self._alloc(blocks * physics.block_bytes, ("initialize", "kv_cache", "kv_tensors", "allocate"))
        self._pause("kv_alloc")
        return 0

    def capture(self) -> int:
        """Capture graphs, unless told to be eager."""
        self._enter("graph_capture")
        if not self.physics.graph_sizes:
            return 0
        physics, spec, began = self.physics, self.physics.spec, time.monotonic()
        if self._first:
            self._log.say(
                "gpu_model_runner.py:6530", f"Rank {self.rank}: Torch profiler disabled for CUDA graph capture"
            )
        self._alloc(spec.fragmentation, _CAPTURE)
        self._alloc(physics.activation_bytes, _CAPTURE)
        sizes = physics.graph_sizes[::-1]
        name = "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE)"
        self._bar(name, 0, len(sizes))
        try:
            self._alloc(spec.graph_base, _CAPTURE, private=True)
            for done, _ in enumerate(sizes, 1):
                self._alloc(spec.graph_per_size, _CAPTURE, private=True)
                self._pause("graph_capture", len(sizes))
                self._bar(name, done, len(sizes))
        finally:
            if self._first:
                self._log.raw("\n")
        decode = decode_sizes(sizes, physics.arguments.max_num_seqs)
        if decode and self._first:
            self._bar("Capturing CUDA graphs (decode, FULL)", len(decode), len(decode))
            self._log.raw("\n")
        taken = physics.graph_bytes
        if self._first:
            self._log.say(
                "gpu_model_runner.py:6581",
                f"Graph capturing finished in {time.monotonic() - began:.0f} secs, took {taken / 2**30:.2f} GiB",
            )
        if physics.arguments.kv_cache_memory_bytes is None and physics.graph_estimate_bytes:
            difference = abs(taken - physics.graph_estimate_bytes)
            self._log.say(
                "gpu_worker.py:971",
                f"CUDA graph pool memory: {gib(taken)} GiB (actual), {gib(physics.graph_estimate_bytes)} GiB"
                " (estimated),"
                f" difference: {gib(difference)} GiB ({100 * difference / max(taken, 1):.1f}%).",
            )
        return 0

    def warm_up(self) -> int:
        """Sum up, and warm the sampler up."""
        self._enter("warmup")
        physics = self.physics
        if physics.arguments.kv_cache_memory_bytes is None:
            self._summarise(physics.graph_bytes)
        if not physics.graph_sizes:
            self._warm_up_eager()
        self._pause("warmup")
        return 0

    def _bar(self, name: str, done: int, total: int) -> None:
        if self._first:
            percent = 100 * done // total
            self._log.raw(f"\r{name}: {percent:3d}%|{'█' * (percent // 10):<10}| {done}/{total}")

    def _warm_up_eager(self) -> None:
        try:
            self._alloc(self.physics.spec.fragmentation + self.physics.activation_bytes, ("sampler", "sampler_run"))
        except Failure as failure:
            raise Failure(
                "RuntimeError",
                "CUDA out of memory occurred when warming up sampler with"
                f" {self.physics.arguments.max_num_seqs} dummy requests. Please try lowering `max_num_seqs` or"
                " `gpu_memory_utilization` when initializing the engine.",
                ("sampler", "sampler_raise"),
                failure,
            ) from None

    def _summarise(self, captured_bytes: int) -> None:
        physics, total = self.physics, self.physics.spec.device_total
        peak = physics.activation_bytes + physics.graph_estimate_bytes
        other = self._consumed + peak + captured_bytes + FIT_BUFFER_BYTES
        fit, full = physics.requested_bytes - other, self._free_at_start - other
        self._log.say(
            "gpu_worker.py:1034",
            f"Free memory on device ({gib(self._free_at_start)}/{gib(total)} GiB) on startup. Desired GPU memory"
            f" utilization is ({physics.arguments.gpu_memory_utilization}, {gib(physics.requested_bytes)} GiB). Actual"
            f" usage is {gib(self._consumed)} GiB for consumed memory (weights + non-torch), {gib(peak)} GiB for peak"
            f" activation, and {gib(captured_bytes)} GiB for CUDAGraph memory. Replace gpu_memory_utilization"
            " config with"
            f" `--kv-cache-memory={fit}` ({gib(fit)} GiB) to fit into requested memory, or `--kv-cache-memory={full}`"
            f" ({gib(full)} GiB) to fully utilize gpu memory. Current kv cache memory in use is"
            f" {gib(self._available)} GiB.",
        )

    def prefill(self, tokens: int) -> int:
        """Run a request: what it takes beyond the largest one so far stays taken, as torch's allocator keeps it."""
        self._enter("request")
        peak = self.physics.request_peak_bytes(tokens)
        self._alloc(peak - self._peak_request, PHASE_FRAMES["request"])
        self._peak_request = max(self._peak_request, peak)
        return 0

    def _free(self) -> int:
        return self._client.free_bytes(self._cards[self.rank])

    def _alloc(self, size_bytes: int, frames: tuple[str, ...], *, torch: bool = True, private: bool = False) -> None:
        if size_bytes <= 0:
            return
        there, free_bytes = self._client.alloc(self._cards[self.rank], size_bytes)
        if not there:
            spec = self.physics.spec
            raise out_of_memory(
                hip=spec.dialect == "rdna4", index=self.rank, asked_bytes=size_bytes, free_bytes=free_bytes,
                total_bytes=spec.device_total, usage=self._usage, frames=frames,
            )  # fmt: skip
        self._usage.torch += size_bytes if torch else 0
        self._usage.non_torch += 0 if torch else size_bytes
        self._usage.private_pools += size_bytes if private else 0

    def _release(self, size_bytes: int) -> None:
        self._client.free(self._cards[self.rank], size_bytes)
        self._usage.torch -= size_bytes
