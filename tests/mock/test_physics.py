"""Pure parts of the simulator: the pool's laws, graph sizes, the command line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pytest_kvbudget.mock.arguments import UsageError, parse
from pytest_kvbudget.mock.failures import size
from pytest_kvbudget.mock.physics import Physics, graph_sizes
from pytest_kvbudget.mock.spec import Arena, MockDevice
from pytest_kvbudget.units import GIB, MIB

from .harness import BASE


def physics(spec: MockDevice, *flags: str, **env: str) -> Physics:
    return Physics(spec, parse(["serve", "sim", *flags], fork=spec.dialect == "rdna4"), env)


@given(st.integers(1, 64), st.integers(1, 1 << 16), st.integers(0, 1 << 22), st.integers(0, 1 << 34))
def test_estimate_is_the_longest_window_that_fits(block: int, rate: int, state: int, pool: int) -> None:
    spec = replace(BASE, block_size=block, kv_bytes_per_token=rate, state_bytes_per_seq=state)
    subject = physics(spec)
    longest = subject.estimated_len(pool)
    assert longest == 0 or subject.need_bytes(longest) <= pool
    assert longest == subject.max_model_len or subject.need_bytes(longest + 1) > pool


@given(st.integers(1, 64), st.integers(1, 1 << 16), st.integers(1, 1 << 22))
def test_hybrid_block_is_the_smallest_that_holds_a_state(block: int, rate: int, state: int) -> None:
    subject = physics(replace(BASE, block_size=block, kv_bytes_per_token=rate, state_bytes_per_seq=state))
    assert subject.block_tokens % block == 0
    assert subject.block_bytes >= state
    assert subject.block_tokens == block or (subject.block_tokens - block) * rate < state


def test_graph_sizes_are_vllms() -> None:
    # a real boot with 256 seqs: PIECEWISE=51 (largest=512)
    sizes = graph_sizes(parse(["serve", "sim"], fork=False))
    assert (len(sizes), sizes[:5], sizes[-1]) == (51, (1, 2, 4, 8, 16), 512)
    assert graph_sizes(parse(["serve", "sim", "--max-num-seqs", "3"], fork=False)) == (1, 2, 4)


def test_more_ranks_share_the_same_whole() -> None:
    one, two = physics(BASE), physics(BASE, "--tensor-parallel-size", "2")
    assert two.weights_bytes * 2 == one.weights_bytes
    assert two.kv_bytes_per_token * 2 == one.kv_bytes_per_token
    assert physics(replace(BASE, ranks=2)).weights_bytes == BASE.weights


def test_plan_of_the_source_documents_deployed_shape() -> None:
    # row G: utilization 0.982, graphs 0.07 GiB, overhead 5.25 GiB: 17.77 GiB, 7,762 slots; its printed figures leave
    # 8.196 GiB for non-expert weights and the KV reserve of 200,704 tokens
    reserve = int(1.08 * 9190 * 200_704)
    spec = MockDevice(dialect="rdna4", weights=int(8.196 * GIB) - reserve, graph_base=0, arena=Arena())
    flags = ("--gpu-memory-utilization", "0.982", "--max-model-len", "200704", "--expert-precise-memory")
    env = {"VLLM_CUDAGRAPH_MEM_ESTIMATE_MB": str(0.07 * 1024)}
    plan = physics(spec, *flags, **env).arena_plan
    assert plan is not None
    assert plan.room_bytes / GIB == pytest.approx(17.77, abs=0.005)
    assert abs(plan.slots - 7762) <= 3


def test_forks_graph_charge_comes_from_its_variables() -> None:
    spec = replace(BASE, dialect="rdna4", graph_per_size=MIB)
    flags = ("--max-num-seqs", "4")
    # sizes 1, 2, 4, 8
    assert physics(spec, *flags).graph_estimate_bytes == 68 * MIB
    charged = physics(spec, *flags, VLLM_CUDAGRAPH_MEM_BASE_MB="0", VLLM_CUDAGRAPH_MEM_PER_GRAPH_MB="12")
    assert charged.graph_estimate_bytes == 48 * MIB
    assert charged.graph_bytes == 68 * MIB
    assert physics(spec, *flags, VLLM_CUDAGRAPH_MEM_PER_GRAPH_MB="52").graph_estimate_bytes == (256 + 4 * 52) * MIB
    assert physics(replace(spec, dialect="vllm"), *flags, VLLM_CUDAGRAPH_MEM_BASE_MB="9").graph_estimate_bytes == (
        68 * MIB
    )


def test_batched_tokens_above_the_anchor_cost_overhead() -> None:
    spec = replace(BASE, dialect="rdna4", arena=Arena(overhead_planned=GIB))
    low = physics(spec, "--max-num-batched-tokens", "4096").arena_plan
    high = physics(spec, "--max-num-batched-tokens", "8192").arena_plan
    assert low is not None
    assert high is not None
    # 0.22 GiB for each of four times 1024
    assert high.overhead_bytes - low.overhead_bytes == pytest.approx(0.88 * GIB, abs=8)


@pytest.mark.parametrize(
    ("text", "value"), [("4096", 4096), ("50M", 52_428_800), ("32k", 32_000), ("1G", GIB), ("auto", -1), ("-1", -1)]
)
def test_sizes_on_the_command_line(text: str, value: int) -> None:
    assert parse(["serve", "sim", f"--kv-cache-memory-bytes={text}"], fork=False).kv_cache_memory_bytes == value


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--nope"], "unrecognized arguments: --nope"),
        (["--nope", "3", "--max-model-len", "4"], "unrecognized arguments: --nope 3"),
        (["other"], "unrecognized arguments: other"),
        (["--max-model-len"], "argument --max-model-len: expected one argument"),
        (["--max-model-len", "x"], "argument --max-model-len: invalid integer value: 'x'"),
        (["--kv-cache-dtype", "fp3"], "argument --kv-cache-dtype: invalid choice: 'fp3'"),
    ],
)
def test_wrong_command_lines(argv: list[str], text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(["serve", "sim", *argv], fork=False)
    assert text in str(refused.value)


def test_defaults_are_vllms() -> None:
    arguments = parse(["serve", "sim"], fork=False)
    assert (arguments.max_num_seqs, arguments.max_num_batched_tokens, arguments.port) == (256, 2048, 8000)
    assert arguments.gpu_memory_utilization == 0.92


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 bytes"),
        (1024, "1024 bytes"),
        (1 << 20, "1024.00 KiB"),
        (76 * MIB, "76.00 MiB"),
        (int(10.28 * GIB), "10.28 GiB"),
    ],
)
def test_sizes_as_torch_writes_them(size_bytes: int, text: str) -> None:
    assert size(size_bytes) == text


@pytest.mark.parametrize(
    ("setting", "chunked_at_8192", "chunked_at_8193"),
    [
        ("on", True, True),
        (True, True, True),
        ("off", False, False),
        (False, False, False),
        ("off above 8192", True, False),
        (8192, True, False),
        ("on above 8192", False, True),
    ],
)
def test_chunked_prefill(setting: bool | int | str, chunked_at_8192: bool, chunked_at_8193: bool) -> None:
    for window, chunked in ((8192, chunked_at_8192), (8193, chunked_at_8193)):
        spec = replace(BASE, chunked_prefill=setting, activation_base=0, activation_per_batched_token=1024)
        subject = physics(spec, "--max-model-len", str(window), "--max-num-batched-tokens", "1000")
        assert subject.activation_bytes == 1024 * (1000 if chunked else window)


def test_activation_grows_with_the_window() -> None:
    spec = replace(BASE, activation_base=MIB, activation_per_window_token=100)
    assert physics(spec, "--max-model-len", "5000").activation_bytes == MIB + 500_000


def test_sliding_window_bounds_what_a_request_takes() -> None:
    subject = physics(replace(BASE, kv_window_tokens=1024), "--max-num-batched-tokens", "2048")
    # 1023 + 2048 tokens are 192 blocks of 16, and one for their misalignment
    assert subject.blocks_for(262_144) == subject.blocks_for(3071) == 193
    assert subject.blocks_for(160) == 11


def test_pages_as_given_hold_a_state_in_as_many_as_it_takes() -> None:
    subject = physics(replace(BASE, state_bytes_per_seq=3 * MIB + 1, kv_page_tokens=16))
    assert (subject.block_tokens, subject.block_bytes, subject.state_blocks) == (16, MIB, 4)
    assert subject.blocks_for(16) == 5


@pytest.mark.parametrize(("ratio", "charged"), [(1.0, 64), (0.5, 32), (0.0, 0), (2.0, 128)])
def test_graphs_are_charged_by_ratio(ratio: float, charged: int) -> None:
    assert physics(replace(BASE, graph_estimate=ratio)).graph_estimate_bytes == charged * MIB


def test_forks_own_charge() -> None:
    # section 2 of the source document: 256 MiB and 52 MiB for each graph; four seqs have sizes 1, 2, 4, 8
    spec = replace(BASE, dialect="rdna4", arena=Arena(charged_by_rule=True))
    assert physics(spec, "--max-num-seqs", "4").graph_estimate_bytes == (256 + 4 * 52) * MIB


def test_usable_host_memory_is_the_facts() -> None:
    # a public plan table: host usable 112.6 of MemAvailable 179.3, PLE 38.74, two ranks
    arena = Arena(host_bytes=int(179.3 * GIB), ple_bytes=int(38.74 * GIB))
    plan = physics(replace(BASE, dialect="rdna4", ranks=2, arena=arena)).arena_plan
    assert plan is not None
    assert plan.host_usable_bytes is not None
    assert plan.host_usable_bytes / GIB == pytest.approx(112.6, abs=0.05)
    plan = physics(replace(BASE, dialect="rdna4", arena=arena), "--expert-offload-mem", "64").arena_plan
    assert plan is not None
    assert plan.host_usable_bytes == 64 * GIB


@pytest.mark.parametrize(("real", "non_torch"), [(None, 1024), (2 * GIB, 1536), (GIB // 4, 0)])
def test_real_overhead_is_activation_and_the_rest(real: int | None, non_torch: int) -> None:
    subject = physics(replace(BASE, dialect="rdna4", arena=Arena(overhead_real=real)))
    assert subject.activation_bytes == 512 * MIB
    assert subject.non_torch_bytes(0) == non_torch * MIB


def test_heavier_ranks() -> None:
    subject = physics(replace(BASE, rank_skew=10 * MIB, ranks=3))
    assert [subject.non_torch_bytes(rank) - GIB for rank in range(3)] == [0, 10 * MIB, 20 * MIB]


@pytest.mark.parametrize(
    ("estimate", "said"),
    [
        ("exact", 1000), ("absent", 0), ("factor 0.5", 500), (3.0, 3000), ("huge", 1000 * 10**9), ("negative", -1000),
        ("alternating", 2000),
        # the whole window of 262,144 tokens needs 16,384 blocks, 63 are there
        ("proportional", 262_144 * 63 // 16_384),
    ],
)  # fmt: skip
def test_what_the_engine_says_would_fit(estimate: str | float, said: int) -> None:
    subject = physics(replace(BASE, estimate=estimate))
    available = subject.need_bytes(1000)
    assert available == 63 * MIB
    expected = said if estimate == "proportional" else said * 1008 // 1000
    assert subject.said_len(available) == expected


def test_default_device_is_the_dialects() -> None:
    assert MockDevice().device_total == 34_208_743_424
    assert MockDevice(dialect="neuron").device_total == 25_769_803_776
    assert MockDevice(dialect="neuron", platform="trn3").device_total == 38_654_705_664
    assert MockDevice(dialect="neuron").idle_bytes == 0
