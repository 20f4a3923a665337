"""The lowerings of a pool of pages, without a GPU: the code that Inductor writes around their templates."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hsa_compile.lowering.limits import MAX_POOL_SLOTS, pool_limits

from .interpreted import Check, child_process
from .pools import CacheShape, PoolShape, make_caches, make_pools, new_state
from .test_templates_lowering import allocations, calls_of_ops, launches, written_code

pytest.importorskip("triton")

PAGE, SELECTED, SLOTS, TOKENS = 32, 6, 12, 1024
POOL = PoolShape(selected=SELECTED, slots=SLOTS, pages=TOKENS // PAGE, page=PAGE)


def step(
    ids: Tensor,
    position: Tensor,
    keys: Tensor,
    values: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    *state: Tensor,
) -> tuple[Tensor, ...]:
    slots, loads, counts = torch.ops.hsa.diff(ids, position, PAGE, *state)
    bits = torch.full((1, 1, keys.shape[2] // PAGE), -1)
    q = torch.ones(ids.shape[0], 8, 1, 64, dtype=keys.dtype)
    missing, pools = (slots, loads, counts), (pool_keys, pool_values)
    out, lse = torch.ops.hsa.fetch_attention(
        q, keys, values, ids, *missing, bits, None, *pools, 0.125, PAGE
    )
    return counts.sum((0, 1)), out + 1, lse


def inputs(layout: str, dtype: torch.dtype, page_major: bool = False) -> list[Tensor]:
    cache = CacheShape(
        tokens=TOKENS, page=PAGE, selected=SELECTED, slots=SLOTS, layout=layout, dtype=dtype
    )
    shape = PoolShape(**{**POOL.__dict__, "page_major": page_major})
    ids = torch.arange(SELECTED, dtype=torch.int32).expand(2, 2, SELECTED).contiguous()
    return [
        *(ids, torch.tensor([TOKENS - 1])),
        *make_caches(cache),
        *make_pools(cache),
        *new_state(shape).tensors(),
    ]


def check_nothing_is_copied(code: str) -> None:
    """Neither caches nor pools nor their records: nothing of their sizes is allocated."""
    rows = "(2, 2, "
    small = {f"{rows}{SELECTED})", f"{rows}{SELECTED}, 2)", f"{rows}5)"}
    assert {size for size in allocations(code) if size.startswith(rows)} == small


def layer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bits: Tensor,
    position: Tensor,
    keys: Tensor,
    values: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    summary: Tensor,
    covered: Tensor,
    table: Tensor,
    *record: Tensor,
) -> tuple[Tensor, ...]:
    """A whole step, whose tail is in the pool."""
    hsa, caches, pools = torch.ops.hsa, (keys, values), (pool_keys, pool_values)
    hsa.append(*caches, k, v, bits, position, covered, table, record[0], *pools, PAGE)
    tail = pool_keys[:, :, SLOTS - 1]
    hsa.summarize(keys, bits, position, summary, covered, "cuboid", PAGE, tail)
    ids, counts = hsa.select(
        q, summary, bits, 0.125, "cuboid", PAGE, SELECTED, SELECTED, 0, 1, 1, "softmax_mean"
    )
    found = hsa.diff(ids, position, PAGE, table, *record)
    out, lse = hsa.fetch_attention(q, *caches, ids, *found, bits, None, *pools, 0.125, PAGE)
    return out + 1, lse, counts + 1, found[2].sum((0, 1))


def ahead(*args: Tensor) -> tuple[Tensor, ...]:
    """A step before which pages are loaded by a guess, and beside which others are loaded for the next one."""
    q, k, v, bits, position, keys, values, pool_keys, pool_values, summary, covered, *state = args
    hsa, caches, pools = torch.ops.hsa, (keys, values), (pool_keys, pool_values)
    rule = (0.125, "cuboid", PAGE, SELECTED, SELECTED, 0, 1, 1, "softmax_mean")
    guess = q * 2
    held, early = hsa.prefetch_select(
        guess, summary, bits, position, *caches, *state, *pools, *rule
    )
    hsa.join_prefetch([held, guess], state[0], early)
    hsa.append(*caches, k, v, bits, position, covered, *state[:2], *pools, PAGE)
    tail = pool_keys[:, :, SLOTS - 1]
    hsa.summarize(keys, bits, position, summary, covered, "cuboid", PAGE, tail)
    ids, counts = hsa.select(q, summary, bits, *rule, 3)
    slots, loads, moved = hsa.diff(ids, position, PAGE, *state, 3)
    ids, slots = ids[..., :-3], slots[..., :-3]
    rest = (bits, None, *pools, 0.125, PAGE)
    out, lse = hsa.fetch_attention(q, *caches, ids, slots, loads, moved, *rest)
    held = hsa.prefetch(*caches, loads, moved, *pools, PAGE)
    result = out + 1, lse, counts + 1, (moved + early).sum((0, 1))
    hsa.join_prefetch([held, loads, moved], state[3])
    return result


def layer_inputs(layout: str, dtype: torch.dtype) -> list[Tensor]:
    pages = TOKENS // PAGE
    _, position, *rest = inputs(layout, dtype, page_major=True)
    return [
        torch.randn(2, 8, 1, 64).to(dtype),
        *(torch.randn(2, 2, 1, 64).to(dtype) for _ in range(2)),
        torch.full((1, 1, pages), -1),
        position,
        *rest[:4],
        torch.zeros(pages, 2, 2, 128, dtype=dtype).permute(1, 2, 0, 3),
        torch.full((pages, 2, 2, 2), -1).permute(1, 2, 0, 3),
        *rest[4:],
    ]


def check_layer(dtype: torch.dtype, growing: bool) -> None:
    args = layer_inputs("token-major" if growing else "interleaved", dtype)
    if growing:
        for index in (3, 5, 6, 9, 10, 11):
            torch._dynamo.mark_dynamic(args[index], 2)
    code = written_code(layer, args)
    if dtype == torch.float64:
        ops = {"append", "summarize", "select", "fetch_attention"}
        assert calls_of_ops(code) == ops
        return
    assert sum(name.startswith("triton_tem") for name in launches(code)) == 7
    sources = re.findall(r"Source Nodes: \[(\w+).*\n.*\n +triton_tem", code)
    attention = ["fetch_attention"] * 2
    assert sources == ["append", "summarize", "select", "select", "diff", *attention]
    assert not calls_of_ops(code)
    # No pool, no slot of it, no cache, summary or record is copied.
    copied = {f"(2, 2, {SLOTS}, {PAGE}, 64)", f"(2, 2, {PAGE}, 64)", f"(2, 2, {SLOTS})"}
    assert not copied & set(allocations(code))
    assert not any("128)" in size or ", 2, 64)" in size for size in allocations(code))


def check_ahead() -> None:
    """What runs beside stays an op, in its place among the kernels, and makes nothing be copied."""
    # As the backend sets it: else the last join moves up.
    with torch._inductor.config.patch(reorder_for_peak_memory=False):
        code = written_code(ahead, layer_inputs("interleaved", torch.bfloat16))
    assert calls_of_ops(code) == {"prefetch_select", "prefetch", "join_prefetch"}
    called = (
        r"Source Nodes: \[(\w+).*\n.*\n +triton_tem|^ +(?:\w+ = )?torch\.ops\.hsa\.(\w+)\.default\("
    )
    order = [a or b for a, b in re.findall(called, code[code.index("def call") :], re.MULTILINE)]
    step = ["append", "summarize", "select", "select", "diff"]
    attention = ["ids_1"] * 2  # the name under which it was traced
    behind = [*attention, "prefetch", "join_prefetch"]
    assert order == ["prefetch_select", "join_prefetch", *step, *behind], order
    copied = {f"(2, 2, {SLOTS}, {PAGE}, 64)", f"(2, 2, {PAGE}, 64)", f"(2, 2, {SLOTS})"}
    assert not copied & set(allocations(code))
    assert not any("128)" in size or ", 2, 64)" in size for size in allocations(code))


def check_static(layout: str, dtype: torch.dtype) -> None:
    code = written_code(step, inputs(layout, dtype))
    kernels = [name for name in launches(code) if name.startswith("triton_tem")]
    order = ("diff", "fetch_attention", "fetch_attention")
    assert len(kernels) == 3 and all(op in name for op, name in zip(order, kernels, strict=True))
    check_nothing_is_copied(code)
    assert not calls_of_ops(code)


def check_growing() -> None:
    args = inputs("token-major", torch.bfloat16, page_major=True)
    for index in (2, 3, 6):
        torch._dynamo.mark_dynamic(args[index], 2)
    code = written_code(step, args)
    assert sum(name.startswith("triton_tem") for name in launches(code)) == 3
    assert not calls_of_ops(code)
    check_nothing_is_copied(code)


def check_any_batch_and_selection() -> None:
    args = inputs("head-major", torch.bfloat16)
    for arg in args[:1] + args[2:]:
        torch._dynamo.mark_dynamic(arg, 0)
    torch._dynamo.mark_dynamic(args[0], 2)
    code = written_code(step, args)
    assert sum(name.startswith("triton_tem") for name in launches(code)) == 3
    assert not calls_of_ops(code)


def check_eager_fallback() -> None:
    code = written_code(step, inputs("head-major", torch.float64))
    assert calls_of_ops(code) == {"fetch_attention"}


@pytest.fixture(scope="module")
def child() -> Iterator[Check]:
    with child_process(interpret=False) as run:
        yield run


@pytest.mark.parametrize("growing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_layer_with_its_tail_in_the_pool(child: Check, growing: bool) -> None:
    child(check_layer, torch.bfloat16, growing)
    if not growing:
        child(check_layer, torch.float64, growing)


def test_pages_loaded_ahead(child: Check) -> None:
    child(check_ahead)


@pytest.mark.parametrize("layout", ["head-major", "interleaved"])
def test_static_cache(child: Check, layout: str) -> None:
    child(check_static, layout, torch.bfloat16)


def test_growing_cache_has_symbolic_lengths(child: Check) -> None:
    child(check_growing)


def test_batch_and_selection_may_be_symbolic(child: Check) -> None:
    child(check_any_batch_and_selection)


def test_what_no_kernel_takes_runs_eagerly(child: Check) -> None:
    child(check_eager_fallback)


def test_limits_say_why() -> None:
    assert pool_limits(1) is None and pool_limits(MAX_POOL_SLOTS) is None
    assert pool_limits(0) == "a pool of 0 slots is not between 1 and 4096"
    assert pool_limits(5000) == "a pool of 5000 slots is not between 1 and 4096"
