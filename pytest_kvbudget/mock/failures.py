"""How failures read: exception texts, tracebacks with vLLM 0.32's frames, and torch's out-of-memory message."""

from __future__ import annotations

from typing import Final

import msgspec

from pytest_kvbudget.mock.process import Log, raw

_VLLM: Final = "/usr/local/lib/python3.12/dist-packages/vllm"
_PYTHON: Final = "/usr/lib/python3.12"

# name: (file, line, function, source line)
FRAMES: Final = {
    "bootstrap": (f"{_PYTHON}/multiprocessing/process.py", 314, "_bootstrap", "self.run()"),
    "run": (f"{_PYTHON}/multiprocessing/process.py", 108, "run", "self._target(*self._args, **self._kwargs)"),
    "reraise": (f"{_VLLM}/v1/engine/core.py", 1514, "run_engine_core", "raise e"),
    "core": (f"{_VLLM}/v1/engine/core.py", 1482, "run_engine_core", "engine_core = EngineCoreProc(*args, engine_index=dp_rank, **kwargs)"),
    "core_loop": (f"{_VLLM}/v1/engine/core.py", 1497, "run_engine_core", "engine_core.run_busy_loop()"),
    "busy_loop": (f"{_VLLM}/v1/engine/core.py", 1540, "run_busy_loop", "self._process_engine_step()"),
    "engine_step": (f"{_VLLM}/v1/engine/core.py", 1588, "_process_engine_step", "outputs, model_executed = self.step_fn()"),
    "step": (f"{_VLLM}/v1/engine/core.py", 560, "step_with_batch_queue", "model_output = future.result()"),
    "input": (f"{_VLLM}/v1/engine/core.py", 1701, "_handle_client_request", 'raise RuntimeError("Executor failed.")'),
    "super": (f"{_VLLM}/v1/engine/core.py", 1194, "__init__", "super().__init__("),
    "executor": (f"{_VLLM}/v1/engine/core.py", 141, "__init__", "self.model_executor = executor_class(vllm_config)"),
    "kv_caches": (f"{_VLLM}/v1/engine/core.py", 157, "__init__", "kv_cache_config = self._initialize_kv_caches(vllm_config)"),
    "determine": (f"{_VLLM}/v1/engine/core.py", 315, "_initialize_kv_caches", "available_gpu_memory = self.model_executor.determine_available_memory()"),
    "configs": (f"{_VLLM}/v1/engine/core.py", 326, "_initialize_kv_caches", "kv_cache_configs = get_kv_cache_configs("),
    "from_config": (f"{_VLLM}/v1/engine/core.py", 370, "_initialize_kv_caches", "self.model_executor.initialize_from_config(kv_cache_configs)"),
    "compile_or_warm": (f"{_VLLM}/v1/engine/core.py", 372, "_initialize_kv_caches", "self.model_executor.compile_or_warm_up_model()"),
    "get_configs": (f"{_VLLM}/v1/core/kv_cache_utils.py", 2642, "get_kv_cache_configs", "_check_enough_kv_cache_memory("),
    "check": (f"{_VLLM}/v1/core/kv_cache_utils.py", 1030, "_check_enough_kv_cache_memory", "raise ValueError("),
    "auto_fit": (f"{_VLLM}/v1/core/kv_cache_utils.py", 2452, "_auto_fit_max_model_len", "raise ValueError("),
    "uni_init": (f"{_VLLM}/v1/executor/uniproc_executor.py", 48, "_init_executor", "self.driver_worker.init_device()"),
    "uni_load": (f"{_VLLM}/v1/executor/uniproc_executor.py", 49, "_init_executor", "self.driver_worker.load_model()"),
    "uni_rpc": (f"{_VLLM}/v1/executor/uniproc_executor.py", 80, "collective_rpc", "result = run_method(self.driver_worker, method, args, kwargs)"),
    "multi_init": (f"{_VLLM}/v1/executor/multiproc_executor.py", 240, "_init_executor", "self.workers = WorkerProc.wait_for_ready(unready_workers)"),
    "wait_ready": (f"{_VLLM}/v1/executor/multiproc_executor.py", 776, "wait_for_ready", "raise e from None"),
    "multi_rpc": (f"{_VLLM}/v1/executor/multiproc_executor.py", 455, "collective_rpc", "return future if non_block else future.result()"),
    "get_response": (f"{_VLLM}/v1/executor/multiproc_executor.py", 444, "get_response", "raise RuntimeError("),
    "worker_main": (f"{_VLLM}/v1/executor/multiproc_executor.py", 917, "worker_main", "worker = WorkerProc(*args, **kwargs)"),
    "proc_init": (f"{_VLLM}/v1/executor/multiproc_executor.py", 689, "__init__", "self.worker.init_device()"),
    "proc_load": (f"{_VLLM}/v1/executor/multiproc_executor.py", 700, "__init__", "self.worker.load_model()"),
    "worker_rpc": (f"{_VLLM}/v1/executor/multiproc_executor.py", 1055, "_execute_worker_rpc", "output = func(*args, **kwargs)"),
    "init_device": (f"{_VLLM}/v1/worker/gpu_worker.py", 535, "init_device", "self.requested_memory = request_memory("),
    "bounds": (f"{_VLLM}/v1/worker/gpu_worker.py", 490, "init_device", "assert self.local_rank < torch.accelerator.device_count(), ("),
    "request_memory": (f"{_VLLM}/v1/worker/utils.py", 462, "request_memory", "raise ValueError("),
    "load_model": (f"{_VLLM}/v1/worker/gpu_worker.py", 594, "load_model", "self.model_runner.load_model(load_dummy_weights=load_dummy_weights)"),
    "runner_load": (f"{_VLLM}/v1/worker/gpu_model_runner.py", 5065, "load_model", "self.model = model_loader.load_model("),
    "create_weights": (f"{_VLLM}/model_executor/layers/linear.py", 402, "create_weights", "data=torch.empty("),
    "available": (f"{_VLLM}/v1/worker/gpu_worker.py", 687, "determine_available_memory", "self.model_runner.profile_run(randomize_inputs=self.randomize_dummy_inputs)"),
    "profile_assert": (f"{_VLLM}/v1/worker/gpu_worker.py", 714, "determine_available_memory", "assert init_free_memory >= free_gpu_memory, ("),
    "profile_run": (f"{_VLLM}/v1/worker/gpu_model_runner.py", 6193, "profile_run", "hidden_states, last_hidden_states = self._dummy_run("),
    "dummy_run": (f"{_VLLM}/v1/worker/gpu_model_runner.py", 5860, "_dummy_run", "outputs = self.model("),
    "initialize": (f"{_VLLM}/v1/worker/gpu_worker.py", 890, "initialize_from_config", "self.model_runner.initialize_kv_cache("),
    "kv_cache": (f"{_VLLM}/v1/worker/gpu_model_runner.py", 7102, "initialize_kv_cache", "kv_caches = self.initialize_kv_cache_tensors("),
    "kv_tensors": (f"{_VLLM}/v1/worker/gpu_model_runner.py", 7001, "initialize_kv_cache_tensors", "kv_cache_raw_tensors = self._allocate_kv_cache_tensors(kv_cache_config)"),
    "allocate": (f"{_VLLM}/v1/worker/gpu_model_runner.py", 6870, "_allocate_kv_cache_tensors", "tensor = torch.zeros("),
    "attn_backend": (f"{_VLLM}/v1/worker/gpu_model_runner.py", 7080, "initialize_kv_cache", "self.initialize_attn_backend(kv_cache_config, kernel_block_sizes)"),
    "resolve_mode": (f"{_VLLM}/config/compilation.py", 1518, "resolve_cudagraph_mode_and_sizes", "raise ValueError("),
    "warm_up": (f"{_VLLM}/v1/worker/gpu_worker.py", 959, "compile_or_warm_up_model", "cuda_graph_memory_bytes = self.model_runner.capture_model()"),
    "capture_model": (f"{_VLLM}/v1/worker/gpu_model_runner.py", 6558, "capture_model", "self._capture_cudagraphs("),
    "capture_graphs": (f"{_VLLM}/v1/worker/gpu_model_runner.py", 6680, "_capture_cudagraphs", "self._warmup_and_capture("),
    "capture_one": (f"{_VLLM}/v1/worker/gpu_model_runner.py", 6612, "_warmup_and_capture", "self._dummy_run("),
    "sampler": (f"{_VLLM}/v1/worker/gpu_worker.py", 1068, "compile_or_warm_up_model", "self.model_runner._dummy_sampler_run(hidden_states=last_hidden_states)"),
    "sampler_run": (f"{_VLLM}/v1/worker/gpu_model_runner.py", 5966, "_dummy_sampler_run", "sampler_output = self.sampler("),
    "sampler_raise": (f"{_VLLM}/v1/worker/gpu_model_runner.py", 5990, "_dummy_sampler_run", "raise RuntimeError("),
    "execute": (f"{_VLLM}/v1/worker/gpu_worker.py", 1340, "execute_model", "output = self.model_runner.execute_model("),
    "runner_execute": (f"{_VLLM}/v1/worker/gpu_model_runner.py", 4210, "execute_model", "model_output = self._model_forward("),
    "arange": ("/usr/local/lib/python3.12/dist-packages/triton/language/semantic.py", 620, "arange", "raise ValueError(\"arange's range must be a power of 2\")"),
    "output_handler": (f"{_VLLM}/v1/engine/async_llm.py", 849, "output_handler", "outputs = await engine_core.get_output_async()"),
    "get_output": (f"{_VLLM}/v1/engine/core_client.py", 1235, "get_output_async", "raise self._format_exception(outputs) from None"),
    "vllm": ("/usr/local/bin/vllm", 8, "<module>", "sys.exit(main())"),
    "main": (f"{_VLLM}/entrypoints/cli/main.py", 120, "main", "args.dispatch_function(args)"),
    "cmd": (f"{_VLLM}/entrypoints/cli/serve.py", 156, "cmd", "uvloop.run(run_server(args))"),
    "setup": (f"{_VLLM}/entrypoints/launchers/api_server/entry.py", 176, "run_server", "listen_address, sock = setup_server(args, reuse_port=False)"),
    "setup_server": (f"{_VLLM}/entrypoints/launchers/launcher.py", 398, "setup_server", "sock = create_server_socket(sock_addr, reuse_port=reuse_port)"),
    "bind": (f"{_VLLM}/entrypoints/launchers/launcher.py", 348, "create_server_socket", "sock.bind(addr)"),
    "run_server": (f"{_VLLM}/entrypoints/launchers/api_server/entry.py", 177, "run_server", "await run_server_worker(listen_address, sock, args, **uvicorn_kwargs)"),
    "client": (f"{_VLLM}/entrypoints/launchers/api_server/entry.py", 195, "run_server_worker", "async with build_async_engine_client("),
    "from_args": (f"{_VLLM}/entrypoints/launchers/api_server/entry.py", 53, "build_async_engine_client", "engine_args = AsyncEngineArgs.from_cli_args(args)"),
    "model_path": (f"{_VLLM}/engine/arg_utils.py", 914, "__post_init__", "self.model = get_model_path(self.model, self.revision)"),
    "repo_id": ("/usr/local/lib/python3.12/dist-packages/huggingface_hub/utils/_validators.py", 133, "validate_repo_id", "raise HFValidationError("),
    "engine_config": (f"{_VLLM}/entrypoints/launchers/api_server/entry.py", 83, "build_async_engine_client_from_engine_args", "vllm_config = engine_args.create_engine_config(usage_context=usage_context)"),
    "model_config": (f"{_VLLM}/engine/arg_utils.py", 1955, "create_model_config", "return ModelConfig("),
    "cache_config": (f"{_VLLM}/engine/arg_utils.py", 2410, "create_engine_config", "cache_config = CacheConfig("),
    "expert_plan": (f"{_VLLM}/model_executor/offloader/expert_plan.py", 412, "build_plan", "raise ExpertPlanError("),
    "pydantic": ("/usr/local/lib/python3.12/dist-packages/pydantic/_internal/_dataclasses.py", 121, "__init__", "s.__pydantic_validator__.validate_python(ArgsKwargs(args, kwargs), self_instance=s)"),
    "async_llm": (f"{_VLLM}/entrypoints/launchers/api_server/entry.py", 95, "build_async_engine_client_from_engine_args", "async_llm = AsyncLLM.from_vllm_config("),
    "core_client": (f"{_VLLM}/v1/engine/core_client.py", 682, "__init__", "with launch_core_engines("),
    "wait_startup": (f"{_VLLM}/v1/engine/utils.py", 1431, "wait_for_engine_startup", "raise RuntimeError("),
    "poll": (f"{_VLLM}/v1/engine/core_client.py", 739, "__init__", "if not sync_input_socket.poll("),
    "interrupt": (f"{_VLLM}/entrypoints/launchers/api_server/entry.py", 172, "_interrupt_init", 'raise KeyboardInterrupt("terminated")'),
    "import": (f"{_VLLM}/platforms/rocm.py", 14, "<module>", "import vllm._rocm_C"),
}  # fmt: skip

SERVE: Final = ("vllm", "main", "cmd", "run_server", "client")
"""Frames of the API server while it makes its engine."""


class Failure(Exception):  # noqa: N818 - stands for an engine's exception of any name
    """An exception of the simulated engine.

    Args:
        kind: qualified class name as a traceback shows it.
        text: its message.
        frames: names in ``FRAMES``, innermost last, beginning inside the worker where it was raised in one.
        cause: what it was raised from.
    """

    def __init__(self, kind: str, text: str, frames: tuple[str, ...], cause: Failure | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.frames = frames
        self.cause = cause

    def traceback(self, outer: tuple[str, ...] = ()) -> str:
        """The whole traceback, with the frames that led to the raising function before its own."""
        before = ""
        if self.cause is not None:
            chained = "The above exception was the direct cause of the following exception:"
            before = f"{self.cause.traceback(outer)}\n\n{chained}\n\n"
        lines = ["Traceback (most recent call last):"]
        for name in (*outer, *self.frames):
            path, number, function, source = FRAMES[name]
            lines += [f'  File "{path}", line {number}, in {function}', f"    {source}"]
            if not source.startswith("raise"):
                lines.append(f"    {'^' * len(source)}")
        return before + "\n".join([*lines, f"{self.kind}: {self.text}"])

    def message(self) -> dict[str, object]:
        """For a channel: what an executor learns of a worker's exception."""
        return {"kind": self.kind, "text": self.text}


def log_exception(log: Log, where: str, title: str, failure: Failure, outer: tuple[str, ...]) -> None:
    """``logger.exception``: a record with the traceback below it."""
    log.error(where, f"{title}\n{failure.traceback(outer)}")


def uncaught(failure: Failure, outer: tuple[str, ...], process: str | None = None) -> None:
    """What Python prints for an exception that nobody caught, bare."""
    title = f"Process {process}:\n" if process else ""
    raw(f"{title}{failure.traceback(outer)}\n")


class Usage(msgspec.Struct):
    """Bytes that one process has on its card."""

    torch: int = 0
    private_pools: int = 0
    """Of ``torch``, in graphs."""
    non_torch: int = 0


def size(size_bytes: int) -> str:
    """A size as torch writes it."""
    if size_bytes <= 1024:
        return f"{size_bytes} bytes"
    for unit, factor in (("KiB", 2**10), ("MiB", 2**20)):
        if size_bytes <= factor * 1024:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes / 2**30:.2f} GiB"


def out_of_memory(
    *, hip: bool, index: int, asked_bytes: int, free_bytes: int, total_bytes: int, usage: Usage, frames: tuple[str, ...]
) -> Failure:
    """torch's exception for an allocation that the card refused (``CUDACachingAllocator.cpp``)."""
    name = "HIP" if hip else "CUDA"
    in_use = size(usage.torch + usage.non_torch)
    process = "" if hip else f"Including non-PyTorch memory, this process has {in_use} memory in use. "
    pools = f"with {size(usage.private_pools)} allocated in private pools (e.g., {name} Graphs), "
    text = (
        f"{name} out of memory. Tried to allocate {size(asked_bytes)}. GPU {index} has a total capacity of"
        f" {size(total_bytes)} of which {size(free_bytes)} is free. {process}Of the allocated memory"
        f" {size(usage.torch)} is allocated by PyTorch, {pools if usage.private_pools else ''}and 0 bytes is reserved"
        " by PyTorch but unallocated. If reserved but unallocated memory is large try setting"
        f" PYTORCH_{name}_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory"
        " Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )
    return Failure("torch.OutOfMemoryError", text, frames)
