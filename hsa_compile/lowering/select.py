"""Inductor's lowering of ``hsa::select`` and ``hsa::select_accumulated``: page scores, then the search."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import algorithms, compat
from . import kernels, options
from .kernels import Example, eager, emit, full_words, rows_of, written_in_place
from .limits import kernel_limits
from .options import Constants


def lower(
    q: Any,
    summary: Any,
    bits: Any,
    scale: float,
    algorithm: str,
    page_size: int,
    slots: Any,
    budget_pages: Any,
    fraction: int,
    sink: int,
    recent: int,
    group_reduce: str,
    more: int = 0,
    bias: Any = None,
    top_p: float = 1.0,
    floor: int = 0,
    head_pages: Sequence[int] = (),
    dense_below: float = 0.0,
    covered: Any = None,
    decay: float = 0.0,
) -> tuple[Any, Any]:
    """With ``covered`` it is that of ``select_accumulated``."""
    op = torch.ops.hsa.select.default
    args: tuple[Any, ...] = (
        q,
        summary,
        bits,
        scale,
        algorithm,
        page_size,
        slots,
        budget_pages,
        fraction,
        sink,
        recent,
        group_reduce,
        more,
        bias,
        top_p,
        floor,
        head_pages,
        dense_below,
    )
    stored: dict[str, Any] = {}
    if covered is not None:
        op = torch.ops.hsa.select_accumulated.default
        args = (*args[:3], covered, decay, *args[3:14])
    device = q.get_device()
    if not kernels.run_on(device):
        return eager(op, None, *args)
    batch, query_heads, _, dim = q.get_size()
    query_heads, dim = compat.static_int(query_heads), compat.static_int(dim)
    _, kv_heads, pages, width = summary.get_size()
    kv_heads, group = compat.static_int(kv_heads), query_heads // compat.static_int(kv_heads)
    reason = kernel_limits(q.get_dtype(), dim, dim, group, page_size)
    if summary.get_dtype() != q.get_dtype():
        reason = reason or f"summaries are {summary.get_dtype()}, queries {q.get_dtype()}"
    if compat.static_int(width) != algorithms.summary_width(algorithm, dim):
        reason = reason or f"a summary of {width} numbers is not what {algorithm} holds of {dim}"
    if covered is not None:
        stored, unwritable = written_in_place({"covered": covered})
        reason = reason or unwritable
    if reason is not None:
        return eager(op, reason, *args)

    rows = rows_of(bits)
    bits = compat.realize(bits)
    inputs: dict[str, Any] = {}
    newest_first = algorithms.get(algorithm).parts == 0
    if not newest_first:
        scores = emit(
            "page_scores",
            options.page_scores(algorithm, kv_heads, group, dim, rows),
            options.page_scores_configs(
                q.get_dtype().itemsize,
                compat.static_int(width),
                compat.expression_hint(batch) * kv_heads,
                compat.expression_hint(pages),
            ),
            {"q": compat.realize(q), "summary": compat.realize(summary), "bits": bits},
            compat.contiguous_layout(device, torch.float32, (batch, query_heads, pages)),
            (batch, kv_heads, pages),
            examples={"bits": full_words},
        )
        if bias is not None:
            scores, scale = compat.scaled_sum(scores, float(scale), bias), 1.0
        inputs["scores"] = compat.realize(scores)
    budget = 0 if fraction else compat.static_int(budget_pages)
    constants = options.top_pages(
        float(scale), group_reduce, kv_heads, group, page_size, rows, budget, fraction, sink, recent,
        compat.static_int(pages) if compat.is_constant(pages) else None, more,
        newest_first, float(top_p), floor, head_pages, float(dense_below), float(decay),
    )  # fmt: skip
    inputs["bits"] = bits
    best = (constants, inputs, (batch, kv_heads), pages, slots + more)
    return search(device, *best, {"bits": full_words}, stored)


def search(
    device: torch.device,
    constants: Constants,
    given: dict[str, Any],
    rows: tuple[Any, int],
    candidates: Any,
    named: Any,
    examples: Mapping[str, Example],
    stored: Mapping[str, Any] | None = None,
) -> tuple[Any, Any]:
    """The best of the ``candidates`` of each row, ``named`` ids of them, and what is counted.

    ``given`` and ``stored`` (written in place) are tensors of ``top_pages``, those before and behind the ids.
    """
    ids = compat.scratch(device, torch.int32, (*rows, named))
    written = {"ids": ids, **(stored or {})}
    if not constants["SINGLE"]:
        written["order"] = compat.scratch(device, torch.int32, (*rows, candidates))
    counts = emit(
        "top_pages",
        {**constants, "ACC_TYPE": "tl.int64"},
        options.top_pages_configs(int(constants["BLOCK"]), int(constants["GROUP_PAD"])),
        {**given, **written},
        compat.contiguous_layout(device, torch.int64, (*rows, 2)),
        rows,
        writes=tuple(written),
        examples=examples,
    )
    return ids, counts


def lower_accumulated(
    q: Any, summary: Any, bits: Any, covered: Any, decay: float, *rule: Any
) -> tuple[Any, Any]:
    """The kernel that makes the ranks adds up the shares, too."""
    kept = {"covered": covered, "decay": decay}
    return lower(q, summary, bits, *rule, **kept)
