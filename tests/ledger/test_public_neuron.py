"""Neuron as people report it: the runtime, the compiler, NxD Inference and what stands between them and vLLM."""

from __future__ import annotations

import pytest

from pytest_kvbudget.verdict import Phase
from tests.ledger.support import GIB, MIB, read
from tests.ledger.variant import R, Variant, check, gib

COMPILED = "INFO:Neuron:Finished Compilation for all HLOs in 49.70 seconds"
HEADROOM_UP = ("VLLM_NEURON_RESERVED_HEADROOM_GIB", "raise")
ALLOCATION = 'RuntimeError: nrt_tensor_allocate status=4 message="Allocation Failure"'

VARIANTS: list[Variant] = [
    Variant(
        "vllm#12443: the KV cache, by the frame; the logger prints the message before its traceback",
        (
            R + "TDRV:dmem_alloc_internal   Failed to alloc DEVICE memory: 268435456",
            R + "TDRV:log_dev_mem   Failed to allocate 256.000MB (usage: tensors) on ND 0:NC 0, current utilization:",
            "\t* total: 15.829GB",
            "\t* tensors: 15.829GB",
            "ERROR 01-26 10:27:42 engine.py:381] " + ALLOCATION.removeprefix("RuntimeError: "),
            "ERROR 01-26 10:27:42 engine.py:381] Traceback (most recent call last):",
            'ERROR 01-26 10:27:42 engine.py:381]   File "/v/transformers_neuronx/decoder.py", line 8, in to_neuron',
            'ERROR 01-26 10:27:42 engine.py:381]   File "/v/transformers_neuronx/decoder.py", line 9, in init_caches',
            "ERROR 01-26 10:27:42 engine.py:381] " + ALLOCATION,
        ),
        "failed",
        Phase.KV_ALLOC,
        "runtime_hbm_oom",
        {"tried_alloc_bytes": 268435456, "status": 4, "hbm_tensors_bytes": gib(15.829)},
    ),
    Variant(
        "transformers-neuronx, the weights, by the frame",
        (
            "Traceback (most recent call last):",
            '  File "/v/transformers_neuronx/llama/model.py", line 105, in to_neuron',
            ALLOCATION,
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "runtime_hbm_oom",
        {"status": 4},
        turn=(("tensor_parallel_size", "raise"),),
        leave=(HEADROOM_UP,),
    ),
    Variant(
        "optimum-neuron#668: a program is loaded",
        (
            R + "TDRV:dmem_alloc_internal   Failed to alloc DEVICE memory: 10485760",
            R + "TDRV:log_dev_mem   Failed to allocate 10.000MB (usage: shared scratchpad) on ND 0:NC 0, current "
            "utilization:",
            "\t* total: 15.990GB",
            "\t* model code: 1.162GB",
            "\t* shared scratchpad: 7.250GB",
            R + "NMGR:kmgr_load_nn_post_metrics   Failed to load NN: /tmp/m.neff, err: 4",
            R + "NRT:nrt_infodump   Failure: NRT_RESOURCE in nrt_load()",
        ),
        "failed",
        Phase.MODEL_LOAD,
        "runtime_hbm_oom",
        {"tried_alloc_bytes": 10485760, "err": 4, "hbm_model_code_bytes": gib(1.162)},
        turn=(("tensor_parallel_size", "raise"),),
        leave=(HEADROOM_UP,),
    ),
    Variant(
        "NxD Inference 2.24: no space after ND; scratchpad belongs to programs",
        (
            R + "TDRV:log_dev_mem   Failed to allocate 512.000MB (alignment: 4.000MB, usage: shared scratchpad) "
            "on ND14:NC 6",
        ),
        "failed",
        Phase.MODEL_LOAD,
        "runtime_hbm_oom",
        {"nd": 14, "nc": 6, "alloc_alignment_bytes": 4 * MIB, "alloc_usage": "shared scratchpad"},
    ),
    Variant(
        "2.31: a table with short heads, while shards are read",
        (
            "INFO:Neuron:Loading presharded checkpoints for ranks: 0...3",
            R + "TDRV:dmem_alloc_internal  Failed to allocate DEVICE memory (14155776 bytes): memory allocation failed "
            "(ret=-12)",
            R + "TDRV:log_dev_mem  Failed to allocate 13.500MB (alignment: none, usage: tensors) on ND 0:NC 0",
            "              |  TOTAL   |   Code   |Constants | Tensors  |Scratchpad|",
            "ND 0 HBM 0    | 23.957GB |109.148MB | 2.955MB  | 22.037GB | 1.125GB  |",
            R + "NRT:nrt_tensor_allocate  Failed to allocate nrt tensor UNNAMED",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "runtime_hbm_oom",
        {
            "tried_alloc_bytes": 14155776,
            "ret": -12,
            "hbm_total_used_bytes": gib(23.957),
            "hbm_model_code_bytes": round(109.148 * MIB),
            "hbm_tensors_bytes": gib(22.037),
        },
    ),
    Variant(
        "staging buffers of a program's instructions",
        (
            "ERROR TDRV:dmem_alloc_internal   Failed to allocate DEVICE memory (95079808 bytes): ret=-12",
            "ERROR TDRV:ib_transfer_block_to_tdram  Failed to allocate aligned staging instr buffer",
            "ERROR NRT:nrt_load_collectives   Failed to load collectives for model.",
        ),
        "failed",
        Phase.MODEL_LOAD,
        "runtime_hbm_oom",
        {"tried_alloc_bytes": 95079808, "ret": -12},
    ),
    Variant(
        "inf1, aws-neuron-sdk#178",
        (
            "[E neuron_runtime.cpp:269] NeuronDevice::process_nrtd_response: Context=NRTD_CTX_LOAD NRTD response code "
            "'NERR_RESOURCE' (4) The runtime was unable to allocate a resource. Raw runtime error message "
            "'[TDRV:dma_mp_allocate_dma_buffer_from_tdram] Could not satisfy request for 2097152 bytes from channel",
            "[NMGR:kmgr_load_nn] Failed to load NN: 1.0.20600.0-/tmp/m, err: 4",
        ),
        "failed",
        Phase.MODEL_LOAD,
        "runtime_hbm_oom",
        {"tried_alloc_bytes": 2097152, "err": 4},
    ),
    Variant(
        "the host's memory, for the runtime's rings",
        (R + "TDRV:dmem_alloc_internal Failed to allocate HOST memory (4194304 bytes)",),
        "failed",
        Phase.UNKNOWN,
        "host_memory_short",
        {"tried_alloc_bytes": 4194304},
        leave=(("gpu_memory_utilization", "lower"),),
    ),
    Variant(
        "aws-neuron-sdk#820: a program of a newer compiler",
        (
            R + "NEFF:neff_parse   NEFF version: 2.0, features: 0x100 are not supported.  Currently supporting: 0xff",
            R + "NMGR:kmgr_load_nn_post_metrics   Failed to load NN: /tmp/m.neff, err: 10",
        ),
        "failed",
        Phase.MODEL_LOAD,
        "program_load_failed",
        {"err": 10},
        turn=(("compile cache", "clean"),),
        leave=(HEADROOM_UP,),
    ),
    Variant(
        "aws-neuron-sdk#779: ranks with different programs",
        (
            R + "ENC:validate_neff_cc_ops   [nec_dev 0] mismatching number of cc ops, expected 3 received 6. Check if "
            "ranks 0 and 1 are using the same neff",
            R + "NMGR:stage_kelf_models   Failed to stage graph: kelf-0.json to NeuronCore",
            R + "NMGR:kmgr_load_nn_post_metrics   Failed to load NN: /tmp/m.neff, err: 1",
        ),
        "failed",
        Phase.MODEL_LOAD,
        "program_load_failed",
        {"err": 1},
    ),
    Variant(
        "aws-neuron-sdk#894",
        (
            R + "NMGR:kmgr_load_nn_internal   Unable to open: kelf-b.json - 2",
            R + "NMGR:kmgr_load_nn_post_metrics   Failed to load NN: /tmp/m.neff, err: 2",
        ),
        "failed",
        Phase.MODEL_LOAD,
        "program_load_failed",
        {"err": 2},
    ),
    Variant(
        "another LNC, passed on as status 2",
        (
            "ERROR NRT:nrt_load_util  Mismatch detected between Runtime configuration and NEFF.",
            "  Runtime currently configured with `NEURON_LOGICAL_NC_CONFIG=1` but NEFF /tmp/m.neff",
            "RuntimeError: Could not load the model status=2 message=Invalid",
        ),
        "failed",
        Phase.MODEL_LOAD,
        "lnc_mismatch",
        {"status": 2},
        leave=(HEADROOM_UP,),
    ),
    Variant(
        "optimum-neuron#619: cores that no topology connects",
        (
            R + "NRT:nrt_load_collectives   Unsupported topology. Supported number of Neuron Cores is 1, 2, 8, 16 or a "
            "multiple of 32.",
        ),
        "failed",
        Phase.MODEL_LOAD,
        "parallelism_refused",
        {},
        turn=(("tensor_parallel_size", "none"),),
        leave=(HEADROOM_UP,),
    ),
    Variant(
        "more ranks than cores: no word, exit 134",
        (
            "INFO:Neuron:Loading presharded checkpoints for ranks: 0...7",
            "terminate called after throwing an instance of 'c10::Error'",
            "Aborted (core dumped)",
        ),
        "failed",
        Phase.WEIGHTS_LOAD,
        "engine_killed",
        {},
    ),
    Variant(
        "nki-samples#87: the shell says that somebody killed it, and not why",
        (
            "INFO:Neuron:generating HLO: context_encoding_model, input example shape = torch.Size([2, 32])",
            "Killed",
        ),
        "failed",
        Phase.COMPILE,
        "engine_killed",
        {},
    ),
    Variant(
        "aws-neuron-sdk#706",
        ("RuntimeError: neuronx-cc failed with -9",),
        "failed",
        Phase.COMPILE,
        "host_oom_killed",
        {"status": -9},
        turn=(("host memory", "raise"),),
    ),
    Variant(
        "aws-neuron-sdk#431: the compiler of inf1, at a level that reports no failure",
        ("INFO:Neuron:Compile command returned: -9",),
        "failed",
        Phase.COMPILE,
        "host_oom_killed",
        {"status": -9},
    ),
    Variant(
        "nki-samples#24",
        ("[F134] neuronx-cc terminated abnormally - Please open a support ticket",),
        "failed",
        Phase.COMPILE,
        "compile_failed",
        {},
    ),
    Variant(
        "aws-neuron-sdk#819: the compiler's own words",
        (
            "2024-01-17T23:10:00Z Compiler generated too many instructions (6888787). This maybe due to a failure in "
            "parallelism extraction by the tensorizer.",
        ),
        "failed",
        Phase.COMPILE,
        "compile_failed",
        {},
        leave=(HEADROOM_UP,),
    ),
    Variant(
        "a program that failed before is kept, and fails again",
        (
            "2024-01-04 14:33:59.000295:  4197  ERROR ||NEURON_CC_WRAPPER||: Got a cached failed neff at /c/m.neff. "
            "Will skip compilation, please set --retry_failed_compilation for recompilation",
        ),
        "failed",
        Phase.COMPILE,
        "compile_failed",
        {},
        turn=(("compile cache", "clean"),),
        leave=(HEADROOM_UP,),
    ),
    Variant(
        "inputs and outputs alone over the limit, wrapped",
        (
            "[NCC_EVRF009] Size of total input and output tensors exceeds HBM limit of",
            "Trainium2. Needed 39,644,174,584 bytes (36 GB) vs. available",
            "25,769,803,776 bytes (24 GB).",
        ),
        "failed",
        Phase.COMPILE,
        "compile_hbm_exceeded",
        {
            "code": "NCC_EVRF009",
            "arch": "Trainium2",
            "io_tensors_bytes": 39644174584,
            "hbm_limit_bytes": 24 * GIB,
        },
        turn=(("tensor_parallel_size", "raise"),),
        leave=(HEADROOM_UP,),
    ),
    Variant(
        "the whole program over the limit",
        ("[ERROR] [NCC_EXSP001] Size of HBM memory required for the model exceeds HBM limit of Trn1.",),
        "failed",
        Phase.COMPILE,
        "compile_hbm_exceeded",
        {"code": "NCC_EXSP001", "arch": "Trn1"},
    ),
    Variant(
        "the code without its bracket, the architecture without its full stop",
        ("NCC_EOOM002] Maximum peak HBM usage of 18.12GB exceeds HBM limit of 16.00GB for Trn1",),
        "failed",
        Phase.COMPILE,
        "compile_hbm_exceeded",
        {"code": "NCC_EOOM002", "arch": "Trn1", "peak_hbm_bytes": gib(18.12)},
    ),
    Variant(
        "too many instructions are no lack of memory",
        ("[ERROR] [NCC_EBVF030] Instructions generated by compiler 11234567 exceeds the typical limit of 5000000.",),
        "failed",
        Phase.COMPILE,
        "compile_failed",
        {"code": "NCC_EBVF030"},
        leave=(HEADROOM_UP,),
    ),
    Variant(
        "aws-neuron-sdk#1148: numbers, not memory",
        ("RuntimeError: Failed to execute the model status=1003 message=Numerical Error",),
        "failed",
        Phase.UNKNOWN,
        "kernel_fault",
        {"status": 1003},
    ),
    Variant(
        "warm-up, by the words around the exception",
        (
            "RuntimeError: Model warmup failed for decode (batch=1, seq=1024).",
            "Error: Failed to schedule neff execution. status=1 message=Unknown Failure",
        ),
        "failed",
        Phase.WARMUP,
        "kernel_fault",
        {"status": 1},
    ),
    Variant(
        "aws-neuron-samples#44: no device at all",
        (
            R + "TDRV:tdrv_get_dev_info   No neuron device available",
            "RuntimeError: Neuron runtime cannot be initialized; cannot determine the number of available NeuronCores",
        ),
        "failed",
        Phase.WORKER_INIT,
        "device_missing",
        {},
    ),
    Variant(
        "aws-neuron-sdk#415: no driver",
        (R + "NRT:nrt_init   Unable to read compatible Driver version.",),
        "failed",
        Phase.WORKER_INIT,
        "device_missing",
        {},
    ),
    Variant(
        "aws-neuron-sdk#493: somebody else's cores, inf1",
        (
            "RuntimeError: NeuronDevice::process_nrtd_response: Context=NRTD_CTX_INITIALIZE NRTD response code "
            "'NERR_RESOURCE_NC' (9) There were insufficent NCs for the requested operation",
        ),
        "failed",
        Phase.WORKER_INIT,
        "devices_busy",
        {},
        turn=(("devices", "clean"),),
    ),
    Variant(
        "NxD Inference, all is well",
        (
            "INFO:Neuron:Generating HLOs for the following models: ['context_encoding_model']",
            COMPILED,
            "INFO:Neuron:Sharding weights on load...",
            "INFO:Neuron:Finished weights loading in 12.04 seconds",
            "INFO:Neuron:Warming up the model.",
            "INFO:Neuron:Warmup completed in 0.30 seconds.",
        ),
        "booted",
        Phase.WARMUP,
        None,
        {"compile_done": True},
    ),
    Variant(
        "aws-neuron-sdk#1118: an error of the compiler itself is no lack of device memory",
        (
            "2025-02-24T00:04:00Z ERROR 55 [neuronxcc.driver.CommandDriver]:  An Internal Compiler Error has occurred",
            "2025-02-24T00:04:00Z USER 5521 [neuronxcc.driver.CommandDriver]: [NLA001]  Unhandled exception with "
            "message: Allocated memory out of bound",
        ),
        "failed",
        Phase.COMPILE,
        "compile_failed",
        {},
        leave=(HEADROOM_UP,),
    ),
    Variant(
        "the compiler's own code, without the line above it",
        ("USER 5521 [x]: [NLA001]  Unhandled exception with message: Allocated memory out of bound",),
        "failed",
        Phase.COMPILE,
        "compile_failed",
        {},
        leave=(HEADROOM_UP,),
    ),
    Variant(
        "cores that are taken, and the driver's number for it",
        (
            R + "NRT:nrt_allocate_neuron_cores   Logical Neuron Core(s) not available - Requested:lnc0-lnc0 "
            "Available:0 Logical Core size:2 (cores busy, ret=-16)",
        ),
        "failed",
        Phase.WORKER_INIT,
        "devices_busy",
        {"ret": -16},
    ),
    Variant(
        "a profiler that takes memory of the device",
        (
            "Failed to allocate 1.000GB (alignment: 4.000MB, usage: shared scratchpad) on ND 0:NC 2",
            "device profiling is enabled, which requires 2.348GB of HBM per NC. Disable profiling.",
            "Failure: NRT_RESOURCE in nrt_load_util",
        ),
        "failed",
        Phase.MODEL_LOAD,
        "runtime_hbm_oom",
        {"profiler_bytes": gib(2.348)},
        turn=(("NEURON_RT_INSPECT_DEVICE_PROFILE", "none"), ("tensor_parallel_size", "raise")),
        leave=(HEADROOM_UP,),
    ),
    Variant(
        "the same where vLLM runs: its own variable is one to turn",
        (
            "(Worker_TP0 pid=77) " + R + "TDRV:log_dev_mem  Failed to allocate 1.000GB (alignment: 4.000MB, usage: "
            "shared scratchpad) on ND 0:NC 2",
        ),
        "failed",
        Phase.MODEL_LOAD,
        "runtime_hbm_oom",
        {},
        turn=(HEADROOM_UP,),
    ),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=[variant.name for variant in VARIANTS])
def test_a_public_report_of_neuron_is_read(variant: Variant) -> None:
    check(variant)


@pytest.mark.parametrize("status", [1, 2, 10])
def test_a_program_that_does_not_load_is_no_boot_that_went_well(status: int) -> None:
    # aws-neuron-sdk#742, #779: XLA writes the status another way
    ledger = read(COMPILED, f'Nrt::Load failed on NeuronCores 0-0(2): nrt_load status={status}, error message="x"')
    assert (ledger.outcome, ledger.phase, ledger.failure_class) == ("failed", Phase.MODEL_LOAD, "program_load_failed")


def test_an_allocation_that_is_refused_as_invalid_is_no_lack_of_memory() -> None:
    # aws-neuron-sdk#891
    ledger = read('RuntimeError: nrt_tensor_allocate status=2 message="Invalid"')
    assert (ledger.outcome, ledger.failure_class, ledger.get("status")) == ("failed", "unexplained", 2)


def test_the_sentence_of_a_program_over_the_limit_names_its_tensors() -> None:
    ledger = read(
        "[NCC_EVRF009] Size of total input and output tensors exceeds HBM limit of Trainium2. Needed 33,771,172,352 "
        "bytes (31 GB) vs. available 25,769,803,776 bytes (24 GB)."
    )
    assert ledger.cause is not None
    assert "31.45 GiB" in ledger.cause.sentence
    assert "24.00 GiB" in ledger.cause.sentence
