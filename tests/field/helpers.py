"""One attention layer with its operands laid open, so that a field case can make one thing unusual at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import hsa_compile
from hsa_compile import algorithms
from hsa_compile.ops.page_mask import page_mask, unpack
from hsa_compile.ops.select import forced_pages, select_reference
from hsa_compile.ops.sparse_attention import sparse_attention_reference
from hsa_compile.ops.summarize import per_kv_head
from hsa_compile.policy import LayerPolicy
from hsa_compile.site import SiteReport
from tests.models.reference import mean_bias

CAPACITY = 128
PAGE = 16
LOSSLESS = {"budget": 112, "page_size": PAGE}
"""Every page of up to 112 tokens is selected, at run time: a static cache of 128 tokens is rewritten."""
SPARSE = {"algorithm": "quest", "budget": 48, "page_size": PAGE, "sink": 4, "recent": 16}
POISON = 1e4

Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]
"""Attention of q over all keys and values, under a boolean mask."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer; ``length`` tokens are in the cache before the first step."""

    length: int = 90
    steps: int = 3
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    value_size: int = 16
    capacity: int = CAPACITY
    dtype: torch.dtype = torch.float32
    magnitude: float = 1.0
    poison: float | None = POISON
    """What a cache holds where nothing was written; None: random numbers too."""
    seed: int = 0


def sdpa(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, **more: Any) -> Tensor:
    gqa = q.shape[1] != keys.shape[1]
    return nn.functional.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=gqa, **more)


def by_hand(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention spelled out: repeated heads, products, softmax."""
    keys, values = (repeat_kv(t, q.shape[1] // t.shape[1]) for t in (keys, values))
    scores = torch.matmul(q, keys.transpose(2, 3)) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.matmul(torch.softmax(scores, -1), values)


def repeat_kv(x: Tensor, times: int) -> Tensor:
    batch, heads, tokens, size = x.shape
    if times == 1:
        return x
    x = x[:, :, None].expand(batch, heads, times, tokens, size)
    return x.reshape(batch, heads * times, tokens, size)


def rule(policy: Mapping[str, object], scale: float | None = None) -> Attend:
    """The selection rule in plain PyTorch, from the content of the cache alone: no state, no history."""
    asked = LayerPolicy(**policy)  # type: ignore[arg-type]

    def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        batch, kv_heads, tokens, size = keys.shape
        if mask is None:
            mask = torch.ones(1, 1, 1, tokens, dtype=torch.bool)
        bits = page_mask(mask, asked.page_size)
        pages = bits.shape[-1]
        present = unpack(per_kv_head(bits, batch, kv_heads), asked.page_size).unsqueeze(-1)
        padded = nn.functional.pad(keys, (0, 0, 0, pages * asked.page_size - tokens))
        paged = padded.unflatten(2, (pages, asked.page_size)).masked_fill(~present, 0)
        summary = algorithms.get(asked.algorithm).summarize(paged, present)
        summary = summary.masked_fill(~present.any(-2), 0)
        fraction = round(asked.budget * 65536) if isinstance(asked.budget, float) else 0
        budget = asked.pages(tokens)
        forced = forced_pages(asked.sink, asked.recent, asked.page_size)
        factor = size**-0.5 if scale is None else scale
        slots = min(budget + forced, pages)
        rest = (asked.sink, asked.recent, asked.group_reduce)
        ids, _ = select_reference(
            q,
            summary,
            bits,
            factor,
            asked.algorithm,
            asked.page_size,
            slots,
            budget,
            fraction,
            *rest,
            bias=None if mask.dtype == torch.bool else mean_bias(mask, asked.page_size),
        )
        bias = None if mask.dtype == torch.bool else mask
        args = (q, keys, values, ids, None, bits, bias, factor, asked.page_size)
        return sparse_attention_reference(*args)[0]

    return attend


class Static(nn.Module):
    """Writes one token into caches that are passed in, and attends up to it."""

    def __init__(self, attend: Attend = sdpa) -> None:
        super().__init__()
        self.attend = attend
        self.one = nn.Parameter(torch.ones(()))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor
    ) -> Tensor:
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        mask = torch.arange(keys.shape[2], device=q.device) <= position
        return self.attend(q, keys, values, mask[None, None, None]) * self.one.to(q.dtype)


class Growing(nn.Module):
    """Concatenates one token to caches that are passed in and returned."""

    def __init__(self, attend: Attend = sdpa) -> None:
        super().__init__()
        self.attend = attend
        self.one = nn.Parameter(torch.ones(()))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        return self.attend(q, keys, values, None) * self.one.to(q.dtype), keys, values


def new_cache(shape: Shape) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B, Hkv, capacity, D]``: random up to ``length``, poisoned after it."""
    random = torch.Generator().manual_seed(shape.seed)
    rows = (shape.batch, shape.kv_heads)
    made = []
    for size in (shape.size, shape.value_size):
        held = torch.randn((*rows, shape.capacity, size), generator=random) * shape.magnitude
        if shape.poison is not None:
            held[:, :, shape.length :] = shape.poison
        made.append(held.to(shape.dtype))
    return made[0], made[1]


def token(shape: Shape, at: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the token at position ``at``."""
    random = torch.Generator().manual_seed(1000 * shape.seed + at + 1)
    sizes = ((shape.heads, shape.size), (shape.kv_heads, shape.size))
    sizes += ((shape.kv_heads, shape.value_size),)
    q, k, v = (
        (torch.randn((shape.batch, h, 1, d), generator=random) * shape.magnitude).to(shape.dtype)
        for h, d in sizes
    )
    return q, k, v


def run_static(step: Callable[..., Tensor], shape: Shape, cache: Any = None) -> Tensor:
    """``[steps, B, Hq, Dv]`` of a static layer (or its compiled self)."""
    keys, values = new_cache(shape) if cache is None else cache
    outs = []
    with torch.no_grad():
        for at in range(shape.length, shape.length + shape.steps):
            outs.append(step(*token(shape, at), keys, values, torch.tensor([at]))[:, :, 0])
    return torch.stack(outs)


def run_growing(step: Callable[..., Any], shape: Shape, cache: Any = None) -> Tensor:
    """The same of a growing layer."""
    if cache is None:
        cache = tuple(t[:, :, : shape.length].contiguous() for t in new_cache(shape))
    outs = []
    with torch.no_grad():
        for at in range(shape.length, shape.length + shape.steps):
            out, *cache = step(*token(shape, at), *cache)
            outs.append(out[:, :, 0])
    return torch.stack(outs)


def compile_hsa(
    model: Any, policy: object = LOSSLESS, run: str = "eager", **options: object
) -> Any:
    """The model compiled afresh; ``graphs`` counts from here."""
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(model, backend="hsa", options={"policy": policy, "run": run, **options})


def graphs() -> int:
    """Graphs compiled since ``compile_hsa``."""
    return int(counters["stats"]["unique_graphs"])


def decisions(compiled: Any) -> set[tuple[str, str]]:
    """(decision, reason) of every site of every graph compiled for a model."""
    return {(site.decision, site.reason) for site in sites(compiled)}


def sites(compiled: Any) -> tuple[SiteReport, ...]:
    return hsa_compile.explain(compiled).sites


SPARSELY = {("sparse", "")}
"""The decisions of a model all of whose attention was rewritten."""


def close(got: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=atol)


def check(
    attend: Attend,
    shape: Shape | None = None,
    policy: Mapping[str, object] = LOSSLESS,
    expected: Attend | None = None,
    growing: bool = False,
) -> Any:
    """A rewritten layer gives what ``expected`` (by default the layer itself, uncompiled) gives.

    Returns the compiled layer, whose decisions are for the caller to judge.
    """
    shape = Shape() if shape is None else shape
    kind, run = (Growing, run_growing) if growing else (Static, run_static)
    want = run(kind(attend if expected is None else expected), shape)
    compiled = compile_hsa(kind(attend), policy)
    close(run(compiled, shape), want)
    return compiled


def check_rewritten(attend: Attend, shape: Shape | None = None, growing: bool = False) -> None:
    """Within the budget: rewritten, and equal to eager."""
    compiled = check(attend, shape, growing=growing)
    assert decisions(compiled) == SPARSELY
    shape = Shape() if shape is None else shape
    assert hsa_compile.stats(compiled).steps == shape.steps


def one_layer(model: Any) -> Any:
    """A model of transformers cut down to its first layer: half of the tracing."""
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    return model


def beside(attends: Sequence[Attend]) -> Attend:
    """Several attentions over one cache; their results side by side, so that one that is wrong can be told."""

    def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        return torch.cat([one(q, keys, values, mask) for one in attends], -1)

    return attend


def check_sparse(attend: Attend, shape: Shape | None = None, scale: float | None = None) -> None:
    """Above the budget: rewritten, equal to the rule, and not to eager."""
    shape = Shape() if shape is None else shape
    compiled = check(attend, shape, SPARSE, rule(SPARSE, scale))
    assert decisions(compiled) == SPARSELY
    dense = run_static(Static(attend), shape)
    assert (run_static(compiled, shape) - dense).abs().max() > 1e-4, "nothing was left out"


def check_left(attend: Attend, reason: str, shape: Shape | None = None) -> None:
    """Left exactly as it was, for a reason that ``explain`` shows."""
    compiled = check(attend, shape)
    found = decisions(compiled)
    assert found and all(decision == "left" and reason in why for decision, why in found), found


def weights(step: Callable[..., Tensor], shape: Shape, spread: float = 0.1) -> Tensor:
    """Attention weights ``[steps, B, Hq, capacity]``, seen by values that are one-hot in their position.

    Keys are small, so that every token that takes part gets a weight that is not zero.
    """
    shape = replace(shape, value_size=shape.capacity, magnitude=spread)
    keys, values = new_cache(shape)
    values.copy_(torch.eye(shape.capacity).expand_as(values))
    outs = []
    with torch.no_grad():
        for at in range(shape.length, shape.length + shape.steps):
            q, k, _ = token(shape, at)
            v = torch.eye(shape.capacity)[at].expand(shape.batch, shape.kv_heads, 1, -1)
            outs.append(step(q, k, v, keys, values, torch.tensor([at]))[:, :, 0])
    return torch.stack(outs)
