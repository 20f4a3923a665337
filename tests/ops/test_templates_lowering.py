"""The lowerings without a GPU: the code that Inductor writes around the templates, and that a CPU is left alone.

Inductor is told to use Triton for the CPU and stopped before it compiles what it wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

from hsa_compile import algorithms, compat, lowering, ops
from hsa_compile.lowering.limits import kernel_limits
from hsa_compile.ops.page_mask import page_mask

from .interpreted import Check, child_process

pytest.importorskip("triton")

SCALE, PAGE, SLOTS = 0.125, 32, 8
PAGE_MASK = torch.ops.hsa.page_mask.default
PAGE_BIAS = torch.ops.hsa.page_bias.default
KERNELS = {"summarize": 1, "select": 2, "sparse_attention": 2}
Step = Callable[..., object]


class StopError(BaseException):
    """Raised where Inductor would compile the code."""


def step(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    position: Tensor,
    summary: Tensor,
    covered: Tensor,
    new: Tensor | None = None,
    slots: int = SLOTS,
    stops: tuple[object, ...] = (),
) -> tuple[Tensor, ...]:
    """What a rewritten layer does; ``new`` is this step's token, where the cache is a static one.

    With ``stops`` rows have budgets by KV head, or are read whole: ``slots`` is then all pages.
    """
    if new is not None:
        keys.index_copy_(2, position, new)
        values.index_copy_(2, position, new)
    bits = torch.ops.hsa.page_mask(mask, PAGE)
    torch.ops.hsa.summarize(keys, bits, position, summary, covered, "cuboid", PAGE)
    bias = torch.where(mask, 0.0, -torch.inf).to(q.dtype)
    added = torch.ops.hsa.page_bias(bias, PAGE)
    bought = SLOTS if stops else slots
    rule = (SCALE, "cuboid", PAGE, slots, bought, 0, 1, 32, "softmax_mean")
    ids, counts = torch.ops.hsa.select(q * 2, summary, bits, *rule, 0, added, *stops)
    ragged = (0.0, True) if stops else ()
    out, lse = torch.ops.hsa.sparse_attention(
        q * 2, keys, values, ids, None, bits, bias, SCALE, PAGE, *ragged
    )
    return out.transpose(1, 2).flatten(2) + 1, lse, counts + 1


def inputs(tokens: int, dtype: torch.dtype, token_major: bool) -> list[Tensor]:
    batch, kv_heads, group, dim = 2, 2, 4, 64
    pages = -(-tokens // PAGE)

    def cache() -> Tensor:
        if token_major:
            return (
                torch.randn(tokens + 7, batch, kv_heads, dim).to(dtype)[:tokens].permute(1, 2, 0, 3)
            )
        return torch.randn(batch, kv_heads, tokens, dim).to(dtype)

    return [
        torch.randn(batch, kv_heads * group, 1, dim).to(dtype),
        cache(),
        cache(),
        torch.rand(batch, 1, 1, tokens) < 0.9,
        torch.tensor([tokens - 1]),
        torch.zeros(batch, kv_heads, pages, algorithms.summary_width("cuboid", dim), dtype=dtype),
        torch.full((batch, kv_heads, pages, 2), -1),
    ]


def written_code(function: Step, args: list[Tensor]) -> str:
    """The module that Inductor writes for ``function`` where the templates are lowered to."""
    import triton
    from torch._inductor.graph import GraphLowering
    from triton.backends.compiler import GPUTarget

    from hsa_compile.lowering import kernels

    written: list[str] = []

    def stop(graph: GraphLowering) -> None:
        code = graph.codegen()[0]
        written.append(getattr(code, "value", code))
        raise StopError

    def backend(gm: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., object]:
        lowering.register()
        patches = {"cpu_backend": "triton", "force_disable_caches": True}
        whole = {op: ops.DECOMPOSITIONS[op] for op in (PAGE_MASK, PAGE_BIAS)}
        return compat.compile_with_inductor(gm, example, patches, whole, "test")

    triton.runtime.driver.set_active(
        SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    )
    with (
        # What the ops become on a CPU before Inductor sees them is not wanted here.
        mock.patch.dict(torch.ops.hsa.summarize.default.py_kernels, clear=True),
        mock.patch.dict(torch.ops.hsa.fetch_attention.default.py_kernels, clear=True),
        mock.patch.dict(torch.ops.hsa.select_accumulated.default.py_kernels, clear=True),
        mock.patch.object(GraphLowering, "compile_to_module", stop),
        mock.patch.object(kernels, "run_on", lambda device: True),
        pytest.raises(StopError),
    ):
        torch.compile(function, backend=backend, fullgraph=True)(*args)
    return written[0]


def launches(code: str) -> list[str]:
    """The kernels in the order of their calls."""
    return re.findall(r"^ +(triton_\w+)\.run\(", code, re.MULTILINE)


def calls_of_ops(code: str) -> set[str]:
    """Ops that are called as they are."""
    lines = (line for line in code.splitlines() if not line.lstrip().startswith("#"))
    return {op for line in lines for op in re.findall(r"torch\.ops\.hsa\.(\w+)\.default\(", line)}


def allocations(code: str) -> list[str]:
    return re.findall(r"= empty_strided_\w+\((\(.*?\)), \(", code)


def check_static_cache(dtype: torch.dtype) -> None:
    args = inputs(1024, dtype, token_major=False)
    code = written_code(step, [*args, torch.randn(2, 2, 1, 64).to(dtype)])
    kinds = [name.split("_fused_")[-1] for name in launches(code) if name.startswith("triton_tem")]
    assert len(kinds) == sum(KERNELS.values())
    # No cache, summary or record of what it covers is copied: nothing of their sizes is allocated.
    assert not {"(2, 2, 1024, 64)", "(2, 2, 32, 128)", "(2, 2, 32, 2)"} & set(allocations(code))
    assert not calls_of_ops(code)


def check_several_tokens() -> None:
    """Five tokens as heads of their groups, with a row of the mask each."""

    def several(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *rest: Tensor) -> object:
        position, summary, covered, new = rest
        keys.index_copy_(2, position, new)
        values.index_copy_(2, position, new)
        first = torch.where((position == position[:1] + torch.arange(5)).all(), position[:1], -64)
        rows = torch.ops.hsa.page_mask(mask.flatten(1, 2).unsqueeze(2), PAGE)
        bits = rows.unflatten(1, (1, 5)).expand(-1, q.shape[1], 5, -1).flatten(1, 2)
        torch.ops.hsa.summarize(keys, bits, first, summary, covered, "cuboid", PAGE, None, 5)
        query = q.flatten(1, 2).unsqueeze(2)
        rule = (SCALE, "cuboid", PAGE, SLOTS, SLOTS, 0, 1, 32, "softmax_mean")
        ids, counts = torch.ops.hsa.select(query, summary, bits, *rule)
        out, _ = torch.ops.hsa.sparse_attention(
            query, keys, values, ids, None, bits, None, SCALE, PAGE
        )
        return out.unflatten(1, (q.shape[1], 5)).squeeze(3).transpose(1, 2).flatten(2), counts

    _, keys, values, _, _, *state = inputs(1024, torch.bfloat16, token_major=False)
    q, new = torch.randn(2, 8, 5, 64).bfloat16(), torch.randn(2, 2, 5, 64).bfloat16()
    position = torch.arange(1000, 1005)
    mask = (torch.arange(1024) <= position[:, None]).expand(2, 1, 5, 1024)
    code = written_code(several, [q, keys, values, mask, position, *state, new])
    assert sum(name.startswith("triton_tem") for name in launches(code)) == sum(KERNELS.values())
    assert not {"(2, 2, 1024, 64)", "(2, 2, 32, 128)", "(2, 2, 32, 2)"} & set(allocations(code))
    assert not calls_of_ops(code)


STOPS = (0.9, 2, [SLOTS, 4], 0.5)


def check_rows_read_whole() -> None:
    def whole(*args: Tensor) -> object:
        return step(*args, slots=32, stops=STOPS)

    args = inputs(1024, torch.bfloat16, token_major=False)
    code = written_code(whole, [*args, torch.randn(2, 2, 1, 64).bfloat16()])
    assert sum(name.startswith("triton_tem") for name in launches(code)) == sum(KERNELS.values())
    assert re.search(r"HEAD_BUDGETS *: tl.constexpr = '8 4'", code)
    assert "DENSE_BELOW : tl.constexpr = 0.5" in code and "RAGGED : tl.constexpr = True" in code
    assert not calls_of_ops(code)


def check_growing_cache(stops: tuple[object, ...]) -> None:
    def growing(*args: Tensor) -> object:
        keys, summary = args[1], args[5]
        torch._check((keys.shape[2] + PAGE - 1) // PAGE == summary.shape[2])
        pages = (keys.shape[2] + PAGE - 1) // PAGE
        return step(*args, slots=pages if stops else torch.sym_min(SLOTS, pages), stops=stops)

    args = inputs(1024, torch.bfloat16, token_major=True)
    for index, dim in ((1, 2), (2, 2), (3, 3), (5, 2), (6, 2)):
        torch._dynamo.mark_dynamic(args[index], dim)
    code = written_code(growing, args)
    assert sum(name.startswith("triton_tem") for name in launches(code)) == sum(KERNELS.values())
    assert not any(
        size.startswith("(2, 2,") and size.endswith((", 64)", ", 128)"))
        for size in allocations(code)
    )


def check_what_accumulates(token_major: bool) -> None:
    """What is accumulated is written where it is, by the kernel that selects; with symbolic lengths, too."""

    def accumulated(q: Tensor, keys: Tensor, mask: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        position, summary, covered = rest
        slots = torch.sym_min(SLOTS, summary.shape[2])
        bits = torch.ops.hsa.page_mask(mask, PAGE)
        torch._check((keys.shape[2] + PAGE - 1) // PAGE == summary.shape[2])
        torch.ops.hsa.summarize(keys, bits, position, summary, covered, "heavy_hitters", PAGE)
        rule = (SCALE, "heavy_hitters", PAGE, slots, SLOTS, 0, 1, 32, "softmax_mean")
        ids, counts = torch.ops.hsa.select_accumulated(q * 2, summary, bits, covered, 0.9, *rule, 3)
        return ids + 1, counts + 1

    q, keys, _, mask, position, summary, _ = inputs(1024, torch.bfloat16, token_major)
    args = [q, keys, mask, position, summary[..., :64].clone(), torch.full((2, 2, 32, 3), -1)]
    for index, dim in ((1, 2), (2, 3), (4, 2), (5, 2)) if token_major else ():
        torch._dynamo.mark_dynamic(args[index], dim)
    code = written_code(accumulated, args)
    assert sum(name.startswith("triton_tem") for name in launches(code)) == 3
    made = [size for size in allocations(code) if size.startswith("(2, 2,")]
    assert not any(size.endswith((", 64)", ", 3)")) for size in made)
    assert not calls_of_ops(code)


def check_single_tokens(growing: bool) -> None:
    """Keys of the selected pages are read where they are multiplied, and never stored."""

    def chosen(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *state: Tensor) -> object:
        summary = state[1]
        torch._check((keys.shape[2] + PAGE - 1) // PAGE == summary.shape[2])
        bits = torch.ops.hsa.page_mask(mask, PAGE)
        rule = (SCALE, "cuboid", PAGE, SLOTS, SLOTS, 0, 1, 32, "softmax_mean")
        ids, counts = torch.ops.hsa.select(q, summary, bits, *rule)
        rest = (bits, None, SCALE, PAGE, 96, 96, 0, 1, 32, "softmax_mean")
        tokens, counts = torch.ops.hsa.refine(q, keys, ids, counts, *rest)
        words = torch.ops.hsa.page_mask(mask, 1)
        out, _ = torch.ops.hsa.sparse_attention(
            q, keys, values, tokens, None, words, None, SCALE, 1
        )
        return out.transpose(1, 2).flatten(2), counts

    args = inputs(1024, torch.bfloat16, token_major=growing)
    for index, dim in ((1, 2), (2, 2), (3, 3), (5, 2), (6, 2)) if growing else ():
        torch._dynamo.mark_dynamic(args[index], dim)
    code = written_code(chosen, args)
    assert sum(name.startswith("triton_tem") for name in launches(code)) == 6
    assert not calls_of_ops(code)
    rows = {size for size in allocations(code) if size.endswith(", 64)")}
    assert rows <= {"(2, 2, 4, 64)", "(2, 8, 1, 64)"}  # the query, and the result


def check_tokens_by_signs(growing: bool) -> None:
    """The index is written in place by the kernel of the summaries; the keys that it stands for are never stored."""

    def chosen(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *state: Tensor) -> object:
        position, summary, covered, signs = state
        torch._check((keys.shape[2] + PAGE - 1) // PAGE == summary.shape[2])
        torch._check(signs.shape[2] == summary.shape[2])
        bits = torch.ops.hsa.page_mask(mask, PAGE)
        rest = (position, summary, covered, "cuboid", PAGE, None, 1, signs)
        torch.ops.hsa.summarize(keys, bits, *rest)
        told = (bits, None, SCALE, PAGE, 96, 96, 0, 1, 32, "softmax_mean")
        tokens, counts = torch.ops.hsa.select_tokens(q, summary, signs, *told)
        words = torch.ops.hsa.page_mask(mask, 1)
        out, _ = torch.ops.hsa.sparse_attention(
            q, keys, values, tokens, None, words, None, SCALE, 1
        )
        return out.transpose(1, 2).flatten(2), counts

    args = inputs(1024, torch.bfloat16, token_major=growing)
    args.append(torch.zeros(2, 2, 32, PAGE, dtype=torch.int64))
    grows = ((1, 2), (2, 2), (3, 3), (5, 2), (6, 2), (7, 2))
    for index, dim in grows if growing else ():
        torch._dynamo.mark_dynamic(args[index], dim)
    code = written_code(chosen, args)
    assert sum(name.startswith("triton_tem") for name in launches(code)) == 5
    assert not calls_of_ops(code)
    sizes = allocations(code)
    assert {size for size in sizes if size.endswith(", 64)")} <= {"(2, 2, 4, 64)", "(2, 8, 1, 64)"}
    assert not {"(2, 2, 32, 128)", "(2, 2, 32, 2)", "(2, 2, 32, 32)"} & set(sizes)


def check_eager_fallback() -> None:
    code = written_code(step, inputs(1024, torch.float64, token_major=False))
    assert not any(name.startswith("triton_tem") for name in launches(code))
    assert calls_of_ops(code) == set(KERNELS)


def check_cpu() -> None:
    def summarized(keys: Tensor, bits: Tensor, position: Tensor, *state: Tensor) -> None:
        # A position a batch entry, so that the op reaches the lowering whole.
        torch.ops.hsa.summarize(keys, bits, position, *state, "cuboid", PAGE)

    def backend(gm: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., object]:
        lowering.register()
        lowering.register()
        return compat.compile_with_inductor(gm, example, {}, ops.DECOMPOSITIONS, "test")

    _, keys, _, mask, position, summary, covered = inputs(300, torch.float32, token_major=True)
    bits, position = page_mask(mask, PAGE), position.repeat(2)
    expected = summary.clone(), covered.clone()
    summarized(keys, bits, position, *expected)
    torch.compile(summarized, backend=backend, fullgraph=True)(
        keys, bits, position, summary, covered
    )
    torch.testing.assert_close((summary, covered), expected)


@pytest.fixture(scope="module")
def child() -> Iterator[Check]:
    with child_process(interpret=False) as run:
        yield run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_static_cache_is_written_in_place(child: Check, dtype: torch.dtype) -> None:
    child(check_static_cache, dtype)


def test_several_tokens(child: Check) -> None:
    child(check_several_tokens)


@pytest.mark.parametrize("stops", [(), STOPS], ids=str)
def test_growing_cache_has_symbolic_lengths(child: Check, stops: tuple[object, ...]) -> None:
    child(check_growing_cache, stops)


def test_rows_that_may_be_read_whole(child: Check) -> None:
    child(check_rows_read_whole)


@pytest.mark.parametrize("token_major", [False, True], ids=["static", "growing"])
def test_what_is_accumulated_is_written_in_place(child: Check, token_major: bool) -> None:
    child(check_what_accumulates, token_major)


@pytest.mark.parametrize("growing", [False, True], ids=["static", "growing"])
def test_single_tokens(child: Check, growing: bool) -> None:
    child(check_single_tokens, growing)


@pytest.mark.parametrize("growing", [False, True], ids=["static", "growing"])
def test_tokens_by_signs(child: Check, growing: bool) -> None:
    child(check_tokens_by_signs, growing)


def test_what_no_kernel_takes_runs_eagerly(child: Check) -> None:
    child(check_eager_fallback)


def test_cpu_is_left_alone(child: Check) -> None:
    child(check_cpu)


@pytest.mark.parametrize(
    ("dtype", "dim", "value_dim", "group", "page", "reason"),
    [
        (torch.bfloat16, 128, 128, 4, 32, None),
        (torch.float32, 256, 64, 1, 64, None),
        (torch.float64, 128, 128, 4, 32, "dtype torch.float64"),
        (torch.float16, 320, 128, 4, 32, "head size 320"),
        (torch.float16, 128, 512, 4, 32, "value size 512"),
        (torch.float16, 128, 128, 128, 32, "128 query heads"),
        (torch.float16, 128, 128, 4, 48, "page size 48"),
        (torch.float16, 128, 128, 4, 128, "page size 128"),
    ],
    ids=str,
)
def test_limits_say_why(
    dtype: torch.dtype, dim: int, value_dim: int, group: int, page: int, reason: str | None
) -> None:
    got = kernel_limits(dtype, dim, value_dim, group, page)
    assert got is None if reason is None else got is not None and got.startswith(reason)
