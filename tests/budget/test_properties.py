"""What must hold of every plan, whatever the figures."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pytest_kvbudget.budget.audit import closure
from pytest_kvbudget.budget.blocks import KvGeometry, block_count, bytes_for_blocks
from pytest_kvbudget.budget.gate import Known, refusals
from pytest_kvbudget.budget.levers import Figure, slot_price
from pytest_kvbudget.budget.model import Plan
from pytest_kvbudget.budget.neuron import Budget, Variant, compute_kv_budget, cpu_kv_budget, maximum_headroom
from pytest_kvbudget.budget.pool import Alignment, KvPrice, bytes_for_tokens, tokens_for_bytes
from pytest_kvbudget.budget.rdna4 import ArenaPlan, arena_plan, utilization_for_slots
from pytest_kvbudget.budget.utilization import FreeAtInit, largest_utilization, utilization_refusal
from pytest_kvbudget.shape import Shape
from pytest_kvbudget.units import GIB

sizes = st.integers(0, 64 * GIB)
stacks = st.integers(1, 64 * GIB)
fractions = st.floats(0.01, 1.0)
cores = st.sampled_from((1, 2))


@st.composite
def budgets(draw: st.DrawFn) -> Budget:
    headroom = draw(st.none() | sizes)
    return compute_kv_budget(
        stack_bytes=draw(stacks),
        weights_bytes=draw(sizes),
        cores_per_stack=draw(cores),
        utilization=draw(fractions),
        headroom_bytes=headroom,
        cap_fraction=draw(fractions),
        variant=draw(st.sampled_from(Variant)),
    )


def check_sum(plan: Plan) -> None:
    gives = sum(term.size_bytes for term in plan.terms if term.role == "gives")
    takes = sum(term.size_bytes for term in plan.terms if term.role == "takes")
    assert plan.left_bytes == gives - takes
    assert plan.fits == (plan.left_bytes >= 0)
    assert plan.sentence.startswith("does not fit by") == (plan.left_bytes < 0)


@given(budgets())
def test_neuron_terms_sum_and_only_the_engine_clamps(budget: Budget) -> None:
    check_sum(budget.plan)
    cap = budget.user_budget_bytes if budget.cap_bytes is None else budget.cap_bytes
    assert budget.plan.left_bytes == min(budget.user_budget_bytes, cap)
    assert budget.available_bytes == max(0, budget.plan.left_bytes)


@given(stacks, sizes, sizes, cores)
def test_a_gib_of_headroom_is_a_gib_of_kv_until_zero(stack: int, weights: int, headroom: int, shared: int) -> None:
    def at(size: int) -> Budget:
        return compute_kv_budget(stack_bytes=stack, weights_bytes=weights, cores_per_stack=shared, headroom_bytes=size)

    less, more = at(headroom), at(headroom + GIB)
    assert less.plan.left_bytes - more.plan.left_bytes == GIB
    assert more.available_bytes == max(0, less.plan.left_bytes - GIB)


@given(stacks, sizes, sizes, fractions, fractions, fractions, fractions)
def test_available_is_monotone(  # noqa: PLR0917 - pairs of each input
    stack: int, weights: int, more: int, low: float, high: float, cap: float, larger_cap: float
) -> None:
    low, high = sorted((low, high))
    cap, larger_cap = sorted((cap, larger_cap))

    def at(weights_bytes: int, utilization: float, fraction: float) -> int:
        return compute_kv_budget(
            stack_bytes=stack,
            weights_bytes=weights_bytes,
            cores_per_stack=1,
            utilization=utilization,
            cap_fraction=fraction,
        ).available_bytes

    base = at(weights, low, cap)
    assert at(weights, high, cap) >= base
    assert at(weights, low, larger_cap) >= base
    assert at(weights + more, low, cap) <= base


@given(stacks, sizes, sizes)
def test_maximum_headroom_is_the_inverse_of_the_guard(stack: int, weights: int, minimum: int) -> None:
    most = maximum_headroom(stack, weights, minimum)

    def below(headroom: int) -> bool:
        return compute_kv_budget(
            stack_bytes=stack, weights_bytes=weights, cores_per_stack=1, headroom_bytes=headroom, minimum_bytes=minimum
        ).below_minimum

    if most >= 0:
        assert not below(most)
        assert below(most + 1) or minimum == 0
    else:
        assert below(0) or minimum == 0


@given(st.integers(1, 1 << 45), st.integers(1, 64), fractions, st.none() | sizes)
def test_cpu_budgets_sum(host: int, workers: int, utilization: float, headroom: int | None) -> None:
    budget = cpu_kv_budget(
        host_available_bytes=host, local_workers=workers, utilization=utilization, headroom_bytes=headroom
    )
    check_sum(budget.plan)
    assert budget.available_bytes <= budget.share_bytes


@given(st.integers(0, 1 << 40), st.integers(1, 128), st.integers(1, 64), st.integers(1, 512))
def test_blocks_and_bytes_agree(available: int, layers: int, heads: int, head_size: int) -> None:
    geometry = KvGeometry(layers=layers, kv_heads=heads, head_size=head_size)
    blocks = block_count(available, geometry)
    assert bytes_for_blocks(blocks, geometry) <= available
    assert block_count(bytes_for_blocks(blocks, geometry), geometry) == blocks
    assert bytes_for_blocks(blocks + 1, geometry) > available


@st.composite
def arenas(draw: st.DrawFn) -> ArenaPlan:
    return arena_plan(
        total_bytes=draw(stacks),
        utilization=draw(fractions),
        non_expert_bytes=draw(sizes),
        kv_reserve_bytes=draw(st.none() | sizes),
        graph_bytes=draw(sizes),
        overhead=draw(sizes),
        slot_bytes=draw(st.integers(1, 16 << 20)),
    )


@given(arenas())
def test_arena_terms_sum_and_slots_fit(arena: ArenaPlan) -> None:
    check_sum(arena.plan)
    assert arena.arena_bytes <= max(0, arena.plan.left_bytes) < arena.arena_bytes + arena.slot_bytes


@given(arenas(), st.integers(0, 20_000), stacks)
def test_plan_and_inverse_agree(arena: ArenaPlan, slots: int, total: int) -> None:
    least = utilization_for_slots(slots, arena, total)
    taken = sum(term.size_bytes for term in arena.plan.terms if term.role == "takes")
    assert int(total * least) - taken >= slots * arena.slot_bytes
    assert int(total * (least * (1 - 1e-9))) - taken <= slots * arena.slot_bytes + total * 2e-9 + 1


@given(st.lists(st.integers(0, 8 * GIB), min_size=4, max_size=4), st.integers(0, 64 * GIB))
def test_printed_plan_tables_close_within_their_digits(taken: list[int], budget: int) -> None:
    names = ("non-expert weights", "KV reserve", "CUDA graphs", "runtime overhead")
    exact = {"budget": budget, **dict(zip(names, taken, strict=True)), "expert cache": budget - sum(taken)}
    rows = {name: Figure(round(float(f"{size / GIB:.2f}") * GIB), 0.005 * GIB + 0.5) for name, size in exact.items()}
    closed = closure(rows)
    assert closed is not None
    assert closed.closes


@given(st.integers(1, 1 << 24), st.floats(1, 1e6), st.integers(0, 1 << 23), st.sampled_from(Alignment))
def test_tokens_to_bytes_and_back(tokens: int, rate: float, loss: int, direction: Alignment) -> None:
    asked = bytes_for_tokens(tokens, rate, alignment_bytes=loss, direction=direction)
    back = tokens_for_bytes(asked, rate, alignment_bytes=loss, direction=direction)
    assert tokens - 1 <= back <= tokens + 1 / rate + 1


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 20), st.integers(1, 64), st.integers(0, 1 << 24))
def test_reserve_is_monotone_in_the_window(window: int, more: int, seqs: int, pages: int) -> None:
    price = KvPrice(pages_bytes_per_seq=pages)
    assert price.reserve_bytes(window + more, seqs) >= price.reserve_bytes(window, seqs)
    assert price.reserve_bytes(window, seqs + 1) - price.reserve_bytes(window, seqs) == pages


@given(st.integers(GIB, 256 * GIB), st.floats(0.05, 1.0))
def test_the_proposed_utilization_boots_and_the_next_does_not(total: int, share: float) -> None:
    free = FreeAtInit(free_bytes=int(total * share), total_bytes=total, source="debug snapshot")
    most = largest_utilization(free)
    assert utilization_refusal(most, free=free) is None
    if most < 1:
        assert utilization_refusal(most + 0.001, free=free) is not None


@given(st.none() | fractions, st.none() | sizes, st.none() | sizes, st.sampled_from((1, 2)))
def test_the_gate_never_refuses_what_the_law_allows(
    utilization: float | None, headroom: int | None, weights: int | None, lnc: int
) -> None:
    shape = Shape(gpu_memory_utilization=utilization, reserved_headroom=headroom, lnc=lnc)
    found = refusals("neuron", shape, Known(platform="trn3", weights_bytes=weights))
    # whatever is not known takes its most favourable value
    best = compute_kv_budget(
        stack_bytes=36 * GIB,
        weights_bytes=weights or 0,
        cores_per_stack=2 // lnc,
        utilization=utilization or 1.0,
        headroom_bytes=headroom,
    )
    if found:
        assert best.below_minimum
    elif weights is not None:
        assert not best.below_minimum


@given(st.integers(1 << 18, 1 << 23), st.integers(1, 20_000), st.floats(0, 0.999))
def test_a_slot_price_from_a_printed_row_brackets_the_price(price: int, slots: int, rest: float) -> None:
    room = price * slots + int(price * rest)
    printed = Figure(round(float(f"{room / GIB:.2f}") * GIB), 0.005 * GIB + 0.5)
    found = slot_price(slots=slots, expert_cache=printed, resident=None, resident_layers=None)
    assert found is not None
    assert abs(found.slot_bytes - price) <= found.precision_bytes * (1 + 1e-9)
