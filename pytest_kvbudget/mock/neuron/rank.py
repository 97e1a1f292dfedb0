"""One rank of vLLM Neuron on one logical core: budget, compiler, NEFF load, warm-up."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import ClassVar, Final

from pytest_kvbudget.mock.base import WEIGHT_SHARDS, BaseRank, Memory
from pytest_kvbudget.mock.conditions import digest
from pytest_kvbudget.mock.driver import NEURON_DEVICES
from pytest_kvbudget.mock.failures import Failure
from pytest_kvbudget.mock.neuron import law
from pytest_kvbudget.mock.neuron.words import NeuronLog, locate, memory_table, peak_text, runtime_size
from pytest_kvbudget.mock.physics import Physics
from pytest_kvbudget.mock.process import Log
from pytest_kvbudget.units import GIB

KV_LAYERS: Final = 16
"""Tensors that the KV cache is allocated in."""
COMPILER_STATUS: Final = 70
"""What neuronx-cc ends with when it refuses a program."""
PROFILER_BYTES: Final = GIB
"""HBM that device profiling wants."""
_WORKER: Final = "neuron_worker.py"
_WARMUP: Final = ("n_warm", "n_warmup")


class NeuronRank(BaseRank):
    """Allocates on the first physical core of its logical one, as the runtime books it."""

    frames: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "worker_init": ("n_init",),
        "weights_load": ("n_load", "n_runner_load"),
        "profile": ("n_budget",),
        "kv_alloc": ("n_kv", "n_runner_kv"),
        "compile": ("n_warm", "n_compile"),
        "model_load": (*_WARMUP, "n_neff"),
        "warmup": _WARMUP,
        "request": ("n_execute",),
    }

    def __init__(self, physics: Physics, rank: int, cards: list[int], log: Log, memory: Memory) -> None:
        super().__init__(physics, rank, cards, log, memory)
        self._said = NeuronLog(log, debug=physics.environ.get("VLLM_NEURON_LOG_LEVEL") == "DEBUG")
        self._compile = law.compile_of(physics)
        self._buckets = law.buckets_of(physics)
        self._budget: law.Budget | None = None
        self._kv_bytes = 0
        self._unit = 0

    def start(self) -> int:
        """Worker init: a logical core for this process alone, and the runtime's own memory."""
        self._enter("worker_init")
        physics, say = self.physics, self._said.say
        say(f"{_WORKER}:188", f"Initialized NeuronWorker with rank {self.rank}, local_rank {self.rank}")
        if "NEURON_RT_VISIBLE_CORES" in physics.environ:
            text = (
                "NEURON_RT_VISIBLE_CORES cannot be used with multi-processing execution on vLLM. Set"
                " NEURON_VISIBLE_DEVICES instead."
            )
            raise Failure("RuntimeError", text, ("n_init",))
        if self.rank >= len(self._cards):
            text = (
                f"Resolved {len(self._cards)} Neuron cores for {physics.ranks} local ranks; the numbers must be equal."
            )
            raise Failure("RuntimeError", text, ("n_init",))
        if physics.ranks > 1:
            say(
                f"{_WORKER}:231",
                f"CCOM bootstrap rendezvous: NEURON_RT_ROOT_COMM_ID=127.0.0.1:62182 (rank {self.rank}/{physics.ranks})",
            )
        self._pause("worker_init")
        lnc = law.lnc_of(physics)
        self._unit = self._cards[self.rank] * lnc
        if physics.compiles_only:
            return 0
        if not all(self._client.claim(unit) for unit in range(self._unit, self._unit + lnc)):
            self._said.runtime(
                "NRT:nrt_allocate_neuron_cores",
                f"Logical Neuron Core(s) not available - Requested:1 Available:0 Logical Core size:{lnc}",
            )
            raise Failure("RuntimeError", "The PyTorch Neuron Runtime could not be initialized", ("n_init",))
        self._tensor(physics.non_torch_bytes(self.rank), ("n_init",), "runtime", kind="runtime_memory")
        return 0

    def load(self) -> int:
        """Load weights."""
        self._enter("weights_load")
        self._said.say(f"{_WORKER}:402", "Loading model on NeuronWorker")
        weights = self.physics.weights_bytes
        for shard in range(WEIGHT_SHARDS):
            size_bytes = weights * (shard + 1) // WEIGHT_SHARDS - weights * shard // WEIGHT_SHARDS
            self._tensor(size_bytes, ("n_load", "n_runner_load"), f"model.layers.{shard}.weight")
            self._pause("weights_load", WEIGHT_SHARDS)
        return 0

    def profile(self) -> int:
        """Say how many bytes the policy gives the KV cache. Nothing is profiled: shapes come before programs."""
        self._enter("profile")
        self._pause("profile")
        physics = self.physics
        if physics.compiles_only:
            stack_bytes = law.table_bytes(physics)
        else:
            stack_bytes, free_bytes = physics.spec.device_total, self._client.free_bytes(self._unit)
            self._said.say(
                f"{_WORKER}:455",
                f"Neuron HBM: {(stack_bytes - free_bytes) / GIB:.2f} GiB used, {free_bytes / GIB:.2f} GiB free",
            )
        self._budget = law.budget(physics, stack_bytes)
        self._say_budget(self._budget)
        if self._budget.below:
            raise law.below_minimum(physics, self._budget)
        return self._budget.available_bytes

    def _say_budget(self, result: law.Budget) -> None:
        """Of 2.33 four quantities of headroom mode are documented; the rest is 0.24's, shown as its fork shows it."""
        documented = self.physics.spec.release == "2.33"
        if result.headroom_bytes is not None:
            self._said.say(
                f"{_WORKER}:512",
                f"Neuron memory: logical-core HBM {result.core_bytes / GIB:.2f} GiB, model weights"
                f" {result.weights_bytes / GIB:.2f} GiB, reserved headroom {result.headroom_bytes / GIB:.2f} GiB,"
                f" KV cache budget {result.available_bytes / GIB:.2f} GiB",
            )
            return
        say = self._said.say if documented else self._said.debug
        say(
            f"{_WORKER}:512",
            f"KV cache heuristic: user_budget={result.user_budget_bytes / GIB:.2f} GiB,"
            f" cap={result.cap_bytes / GIB:.2f} GiB (total_budget={result.total_budget_bytes / GIB:.2f} GiB,"
            f" total_hbm={result.core_bytes / GIB:.2f} GiB, bytes_used={result.weights_bytes / GIB:.2f} GiB,"
            f" cap_fraction={result.cap_fraction:.2f}), effective={result.available_bytes / GIB:.2f} GiB",
        )
        if not result.below:
            self._said.debug(
                f"{_WORKER}:530",
                f"KV cache memory: {result.core_bytes / GIB:.2f} GiB total ×"
                f" {100 * self.physics.arguments.gpu_memory_utilization:.1f}% gpu_memory_utilization -"
                f" {result.weights_bytes / GIB:.2f} GiB used = {result.user_budget_bytes / GIB:.2f} GiB user budget,"
                f" {result.available_bytes / GIB:.2f} GiB available",
            )

    def kv_alloc(self, blocks: int) -> int:
        """Allocate the KV cache, a tensor for each layer."""
        self._enter("kv_alloc")
        self._said.debug(f"{_WORKER}:566", "Initializing KV cache from config (NeuronWorker)")
        self._kv_bytes = size_bytes = blocks * self.physics.block_bytes
        for layer in range(KV_LAYERS):
            part = size_bytes * (layer + 1) // KV_LAYERS - size_bytes * layer // KV_LAYERS
            self._tensor(part, ("n_kv", "n_runner_kv", "n_kv_zeros"), f"kv_cache.{layer}", noted=True)
        self._pause("kv_alloc")
        return 0

    def build(self, cold: int) -> int:
        """Trace and compile every bucket; the KV cache is an input of each program."""
        self._enter("compile")
        physics, buckets, began = self.physics, self._buckets, time.monotonic()
        physics.cold = bool(cold)
        runner = "neuron_model_runner.py"
        say = self._said.say
        say(f"{runner}:1120", f"Extracting graphs for {len(buckets.prefill)} prefill buckets: {list(buckets.prefill)}")
        say(f"{runner}:1161", f"Extracting {len(buckets.decode)} decode compile targets: {list(buckets.decode)}")
        say(f"{runner}:1190", "Barrier: waiting for all ranks to finish graph extraction")
        if cold and physics.environ.get("VLLM_NEURON_DISABLE_WARMUP_COMPILE") == "1":
            text = "No compiled graph in the cache, and VLLM_NEURON_DISABLE_WARMUP_COMPILE forbids to compile it."
            raise Failure("RuntimeError", text, ("n_warm", "n_compile"))
        say(f"{runner}:1204", "Compiling...")
        for number in range(buckets.count):
            self._pause("compile", buckets.count)
            self._check_program()
            if cold:
                taken = time.monotonic() - began
                say(f"{runner}:1222", f"Compiled HLO {digest(physics.compile_key(), number)} in {taken:.1f}s")
        say(f"{runner}:1236", "Barrier: waiting for all ranks to finish compilation")
        say(f"{runner}:1240", f"Compilation complete in {time.monotonic() - began:.2f} seconds")
        return 0

    def _check_program(self) -> None:
        """The compiler's limit for one program: its inputs are weights and KV cache."""
        physics = self.physics
        tensors, scratch = physics.weights_bytes + self._kv_bytes, law.scratch_bytes(physics)
        limit = physics.spec.device_total if self._compile.limit is None else self._compile.limit
        if tensors + scratch <= limit:
            return
        if self._compile.prints_numbers:
            self._said.compiler(
                peak_text(
                    older=physics.spec.release == "0.21", arch=physics.spec.platform.capitalize(), limit_bytes=limit,
                    peak_bytes=tensors + scratch, tensors_bytes=tensors, scratch_bytes=scratch,
                )
            )  # fmt: skip
        else:
            self._said.compiler("[NCC_EVRF009] Memory of the program's tensors exceeds the HBM limit.")
        raise Failure(
            "RuntimeError",
            f"neuronx-cc compilation failed with {COMPILER_STATUS}. Check compiler logs.",
            ("n_warm", "n_compile", "n_neuronx"),
            notes=self._notes(),
        )

    def load_programs(self) -> int:
        """Load every program; they share one scratchpad, and collectives come once all are there."""
        self._enter("model_load")
        physics, compile_, prefill = self.physics, self._compile, self._buckets.prefill
        self._said.say(
            f"{_WORKER}:640", f"Warming up model for {len(prefill)} num_batched_tokens_buckets: {list(prefill)}"
        )
        self._pause("model_load")
        self._said.say(f"{_WORKER}:655", f"\n[1/{len(prefill)}] Warming up for prefill: {self._segment(prefill[0])}")
        runtime, compiled = law.lnc_of(physics), law.compiled_lnc(physics)
        if runtime != compiled:
            self._said.runtime(
                "NRT:nrt_load_util",
                f"Mismatch detected between Runtime configuration and NEFF. Runtime has {law.LNC}={runtime} but NEFF"
                f" was compiled with --lnc={compiled}",
            )
            raise self._failed_warmup("Could not load the model status=2 message=Invalid")
        lost_bytes = min(physics.spec.fragmentation, self._client.free_bytes(self._unit))
        self._client.alloc(self._unit, lost_bytes, "uncategorized")
        if physics.environ.get("NEURON_RT_INSPECT_DEVICE_PROFILE") == "1":
            self._profiler()
        self._program(max(0, law.scratch_bytes(physics) + physics.boot_bytes), "model_shared_scratchpad")
        for _ in range(self._buckets.count):
            self._program(compile_.per_bucket, "model_code")
        self._program(compile_.load_extra, "collectives")
        return 0

    def warm_up(self) -> int:
        """Run every program once."""
        self._enter("warmup")
        physics, buckets, say = self.physics, self._buckets, self._said.say
        self._tensor(physics.activation_bytes, _WARMUP, "activation", wrapped=True)
        for number, size in enumerate(buckets.prefill, 1):
            if number > 1:
                say(
                    f"{_WORKER}:655",
                    f"\n[{number}/{len(buckets.prefill)}] Warming up for prefill: {self._segment(size)}",
                )
            say(f"{_WORKER}:671", f"  Successfully warmed up for prefill bucket {size}")
        say(f"{_WORKER}:690", f"Warming up {len(buckets.decode)} decode compile targets: {list(buckets.decode)}")
        for number, seqs in enumerate(buckets.decode, 1):
            what = f"decode (batch={seqs}, seq={physics.max_model_len})"
            say(f"{_WORKER}:702", f"[{number}/{len(buckets.decode)}] Warming up {what}")
            say(f"{_WORKER}:711", f"  Warmed up {what}")
        self._pause("warmup")
        say(f"{_WORKER}:730", "=" * 80)
        say(
            f"{_WORKER}:731",
            f"Model warmup completed: {len(buckets.prefill)} num_batched_tokens_buckets, {len(buckets.decode)}"
            " num_seqs_buckets",
        )
        return 0

    def prefill(self, tokens: int) -> int:
        """Run a request: what it takes beyond the largest one so far stays taken."""
        self._enter("request")
        peak = self.physics.request_peak_bytes(tokens)
        self._tensor(peak - self._peak_request, ("n_execute",), "output")
        self._peak_request = max(self._peak_request, peak)
        return 0

    def _segment(self, bucket: int) -> str:
        return f"bucket_size={bucket}, kv_segment_size={self._buckets.kv_segment}"

    def _notes(self) -> tuple[str, ...]:
        return law.tuning_note(self._budget) if self.physics.spec.release == "2.33" else ()

    def _take(self, size_bytes: int, kind: str, usage: str) -> bool:
        """Ask the runtime for memory; a refusal is said with the table of the stack."""
        if size_bytes <= 0 or self.physics.compiles_only:
            return True
        there, free_bytes = self._client.alloc(self._unit, size_bytes, kind, self._compile.allocatable)
        if not there and self._compile.prints_numbers:
            self._say_refused(size_bytes, usage, free_bytes)
        return there

    def _say_refused(self, size_bytes: int, usage: str, free_bytes: int) -> None:
        platform, error = self.physics.spec.platform, self._said.runtime
        device, core = locate(self._unit, platform)
        sharing = NEURON_DEVICES[platform][2]
        first = self._unit // sharing * sharing
        cores = range(first, first + sharing)
        table = memory_table(self._client.kinds(self._unit), cores, platform)
        names = " and ".join(f"NC {locate(one, platform)[1]}" for one in cores)
        error(
            "TDRV:print_lnc_hbm_details",
            f"LNC size is {law.lnc_of(self.physics)}. Neuron Cores using this HBM: {names}",
        )
        error(
            "TDRV:log_dev_mem",
            f"Failed to allocate {runtime_size(size_bytes)} (alignment: none, usage: {usage}) on ND {device}:NC {core},"
            f" current utilization:\n{table}",
        )
        if 0 < size_bytes - free_bytes <= self.physics.spec.fragmentation:
            error("TDRV:log_dev_mem", "Aligned allocations may fail even if HBM has space for the size.")

    def _tensor(
        self, size_bytes: int, frames: tuple[str, ...], name: str, *, kind: str = "tensors", wrapped: bool = False,
        noted: bool = False,
    ) -> None:  # fmt: skip
        if size_bytes > 0 and not self.physics.compiles_only:
            there, free_bytes = self._client.alloc(self._unit, size_bytes, kind, self._compile.allocatable)
            if not there:
                self._refuse_tensor(size_bytes, free_bytes, name)
                text = "nrt_tensor_allocate status=4"
                if wrapped:
                    raise self._failed_warmup(text)
                raise Failure("RuntimeError", text, frames, notes=self._notes() if noted else ())

    def _refuse_tensor(self, size_bytes: int, free_bytes: int, name: str) -> None:
        error = self._said.runtime
        if self._compile.prints_numbers:
            error(
                "TDRV:dmem_alloc_internal",
                f"Failed to allocate DEVICE memory ({size_bytes} bytes): memory allocation failed (ret=-12)",
            )
            self._say_refused(size_bytes, "tensors", free_bytes)
        error("NRT:nrt_tensor_allocate", f"Failed to allocate nrt tensor {name}")

    def _profiler(self) -> None:
        if not self._client.alloc(self._unit, PROFILER_BYTES, "uncategorized", self._compile.allocatable)[0]:
            self._said.runtime(
                "TDRV:kbl_model_add",
                f"device profiling is enabled, which requires {PROFILER_BYTES / GIB:.0f}GB of HBM per NC",
            )
            raise self._failed_warmup("Could not load the model status=4 message=Allocation Failure")

    def _program(self, size_bytes: int, kind: str) -> None:
        """Memory of a program that is loaded."""
        usages = {"model_shared_scratchpad": "shared scratchpad", "model_code": "model code"}
        if self._take(size_bytes, kind, usages.get(kind, kind)):
            return
        error = self._said.runtime
        if kind == "collectives":
            error("NRT:nrt_load_collectives", "Failed to load collectives for model.")
        else:
            error("NMGR:stage_kelf_models", "Failed to stage graph to NeuronCore")
            name = digest(self.physics.compile_key())
            error("NMGR:kmgr_load_nn_internal_v2", f"Failed to load NN: graph_{name}.neff, err: 4")
            error("NRT:nrt_infodump", "Failure: NRT_RESOURCE in nrt_load_util")
        raise self._failed_warmup("Could not load the model status=4 message=Allocation Failure")

    def _failed_warmup(self, text: str) -> Failure:
        """The plugin wraps what happens in warm-up; 2.33 lets the exception as it is and adds a note."""
        bucket = self._buckets.prefill[0]
        wrapped = (
            f"Model warmup failed for prefill bucket {bucket} with kv_segment_size {self._buckets.kv_segment}."
            f" Error: {text}"
        )
        self._said.say(f"{_WORKER}:668", wrapped, "ERROR")
        original = Failure("RuntimeError", text, (*_WARMUP, "n_neff"), notes=self._notes())
        if self.physics.spec.release == "2.33":
            return original
        return Failure("RuntimeError", wrapped, _WARMUP, original)
