"""One attention, written in the ways that models write it.

A ``Spelling`` is a function and what it computes: ``softmax(cap(scale * q k^T) + mask) v``, with a sink of that score
in the denominator of the softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .plain import CAPACITY, HEADS, KV_HEADS, SIZE, Attend, dense, gpt_fast

USUAL = SIZE**-0.5
GROUP = HEADS // KV_HEADS
LOWEST = torch.finfo(torch.float32).min

SLOPES = (2.0 ** -torch.arange(1.0, HEADS + 1)).view(1, HEADS, 1, 1)
ALIBI = 0.1 * SLOPES * torch.arange(CAPACITY)
PADDED = torch.arange(CAPACITY) >= torch.tensor([5, 21]).view(2, 1, 1, 1)
SINKS = torch.tensor([-1.0, 0.0, 1.5, 6.0]).view(1, HEADS, 1, 1)
WINDOWS = torch.arange(CAPACITY) >= torch.tensor([0, 8, 30, 40]).view(1, HEADS, 1, 1)


@dataclass(frozen=True)
class Spelling:
    function: Attend
    scale: float = USUAL
    mask: Callable[[Tensor], Tensor] = lambda keep: keep
    softcap: float = 0.0
    sink: Tensor | None = None

    @property
    def name(self) -> str:
        return self.function.__name__


def additive(keep: Tensor, fill: float = -math.inf) -> Tensor:
    return torch.zeros(keep.shape).masked_fill(~keep, fill)


def repeat(x: Tensor) -> Tensor:
    batch, heads, tokens, size = x.shape
    x = x[:, :, None].expand(batch, heads, GROUP, tokens, size)
    return x.reshape(batch, heads * GROUP, tokens, size)


# scaled_dot_product_attention


def positional(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat(keys), repeat(values), keep, 0.0, False)


def with_scale(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(
        q, keys, values, attn_mask=keep, scale=0.4, enable_gqa=True
    )


def scaled_query(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    return dense(q * 1.5, keys, values, keep)


def scaled_keys(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    return dense(q, keys * 1.5, values, keep)


def scaled_repeated_keys(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    return dense(q, repeat(keys) / 2, repeat(values), keep)


def learned_temperature(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    return dense(q * SLOPES, keys, values, keep)


def causal_query(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """``is_causal`` is aligned at the first token: a single query attends nothing but that."""
    return F.scaled_dot_product_attention(q, repeat(keys), repeat(values), is_causal=True)


def mask_of_two_dimensions(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    return dense(q, keys, values, keep[0, 0])


def mask_of_three_dimensions(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    return dense(q, keys, values, keep[0])


def mask_of_minus_infinity(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    return dense(q, keys, values, additive(keep))


def mask_of_the_lowest(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    return dense(q, keys, values, torch.where(keep, 0.0, LOWEST))


def mask_of_minus_ten_thousand(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    return dense(q, keys, values, (1.0 - keep.float()) * -10000.0)


def mask_by_row(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    return dense(q, keys, values, keep & PADDED)


def mask_by_head(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    return dense(q, keys, values, keep & WINDOWS)


def mask_by_row_and_head(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    return dense(q, keys, values, keep & WINDOWS & PADDED)


def bias_by_head(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    return dense(q, keys, values, ALIBI.masked_fill(~keep, -math.inf))


# matmul, softmax, matmul


def scale_divides(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    scores = torch.matmul(q, repeat(keys).transpose(-2, -1)) / math.sqrt(SIZE)
    return scores.masked_fill(~keep, -math.inf).softmax(-1) @ repeat(values)


def scale_multiplies(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    scores = 0.4 * (q @ repeat(keys).mT)
    return torch.softmax(scores + additive(keep), dim=-1) @ repeat(values)


def scale_on_query(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    scores = (q * USUAL) @ repeat(keys).transpose(2, 3)
    return F.softmax(torch.where(keep, scores, -math.inf), dim=-1).matmul(repeat(values))


def scale_on_keys(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    scores = q @ (repeat(keys).permute(0, 1, 3, 2) * 0.4)
    return F.softmax(scores.masked_fill(keep.logical_not(), LOWEST), -1) @ repeat(values)


def scale_split(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    root = USUAL**0.5
    scores = (q * root) @ (repeat(keys) * root).transpose(-1, -2)
    return F.softmax(torch.where(~keep, LOWEST, scores), -1) @ repeat(values)


def scale_after_mask(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """The bias is scaled with the scores."""
    scores = (q @ repeat(keys).mT + ALIBI + additive(keep, -1e9)) * 0.4
    return scores.softmax(-1) @ repeat(values)


def scale_twice(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    scores = (q / 2.0 @ repeat(keys).mT) / 4.0 * 3.0
    return (scores + additive(keep, -1e4)).softmax(-1) @ repeat(values)


def constants_of_the_graph(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """As GPT-2 wrote it: scale and fill value are tensors that the graph makes."""
    scores = q @ repeat(keys).transpose(-1, -2)
    scores = scores / torch.full([], SIZE**0.5, dtype=scores.dtype)
    scores = torch.where(keep, scores, torch.full([], LOWEST, dtype=scores.dtype))
    return F.softmax(scores, dim=-1) @ repeat(values)


def softmax_in_fp32(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    scores = q @ repeat(keys).mT * USUAL
    scores = scores.masked_fill(~keep, -math.inf)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, p=0.1, training=False)
    return weights @ repeat(values)


def in_place(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    scores = q @ repeat(keys).mT
    scores *= USUAL
    scores.masked_fill_(~keep, -math.inf)
    return scores.softmax(-1) @ repeat(values)


def in_place_under_another_name(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    scores = q @ repeat(keys).mT
    scaled = scores.mul_(USUAL)
    scores.masked_fill_(~keep, -math.inf)
    return scaled.softmax(-1) @ repeat(values)


def by_keyword(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    scores = torch.matmul(input=q, other=repeat(keys).transpose(dim0=2, dim1=3))
    scores = torch.div(input=scores, other=SIZE**0.5).masked_fill(mask=~keep, value=-math.inf)
    return torch.matmul(input=torch.softmax(input=scores, dim=-1), other=repeat(values))


def einsum(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, repeat(keys)) * USUAL
    weights = scores.masked_fill(~keep, -math.inf).softmax(-1)
    return torch.einsum("bhqk, bhkd -> bhqd", weights, repeat(values))


def einsum_with_tokens_first(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """All of it on ``[B, S, H, D]``, keys named before the query."""
    q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))
    keys, values = (x.repeat_interleave(GROUP, dim=2) for x in (keys, values))
    scores = torch.einsum("bkhd,bqhd->bhqk", keys, q) / math.sqrt(SIZE)
    weights = scores.masked_fill(~keep, -math.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, values).transpose(1, 2)


def repeated_with_tokens_first(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """As Llama was first published: heads are repeated on ``[B, S, H, D]``, then moved."""

    def spread(x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        batch, tokens, heads, size = x.shape
        x = x[:, :, :, None, :].expand(batch, tokens, heads, GROUP, size)
        return x.reshape(batch, tokens, heads * GROUP, size).transpose(1, 2)

    scores = torch.matmul(q, spread(keys).transpose(2, 3)) / math.sqrt(SIZE) + additive(keep)
    return F.softmax(scores.float(), dim=-1).type_as(q) @ spread(values)


def copied(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    keys, values = repeat(keys.contiguous()).contiguous(), repeat(values).clone()
    return F.scaled_dot_product_attention(q.contiguous(), keys, values, attn_mask=keep)


def largest_subtracted(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """What makes a softmax stable by hand does not change it."""
    scores = (q @ repeat(keys).mT * USUAL).masked_fill(~keep, -math.inf)
    scores = scores - scores.amax(-1, keepdim=True)
    return scores.softmax(-1) @ repeat(values)


def one_minus_mask(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    scores = q @ repeat(keys).mT * USUAL - (1.0 - keep.float()) * 1e9
    return scores.softmax(-1) @ repeat(values)


def mask_and_bias(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    scores = q @ repeat(keys).mT * USUAL + ALIBI
    scores = scores.masked_fill(~keep, -math.inf).masked_fill(~PADDED, -math.inf)
    return scores.softmax(-1) @ repeat(values)


def soft_cap(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """As Gemma 2 has it."""
    scores = torch.tanh(q @ repeat(keys).mT * USUAL / 0.5) * 0.5
    return (scores + additive(keep)).softmax(-1) @ repeat(values)


def soft_cap_then_bias(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """Scaled again after the cap, which is then 0.6."""
    scores = 0.3 * torch.tanh((q * 2.0) @ repeat(keys).mT)
    return F.softmax((scores * 2 + ALIBI).masked_fill(~keep, -math.inf), -1) @ repeat(values)


def sinks(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """As gpt-oss has them: one more column, which has no value."""
    scores = q @ repeat(keys).mT * USUAL + additive(keep)
    joined = torch.cat([scores, SINKS.expand(q.shape[0], -1, q.shape[2], -1)], dim=-1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    weights = F.softmax(joined, dim=-1, dtype=joined.dtype)[..., :-1]
    return F.dropout(weights, 0.1, training=False).to(values.dtype) @ repeat(values)


def sinks_first(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """Before the keys, and scaled with them."""
    scores = (q @ repeat(keys).mT).masked_fill(~keep, -math.inf)
    joined = torch.cat((SINKS.expand(q.shape[0], -1, q.shape[2], -1), scores), 3) * 0.4
    return joined.softmax(-1)[..., 1:] @ repeat(values)


def off_by_one(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """A sink whose score is zero."""
    scores = (q @ repeat(keys).mT * USUAL).masked_fill(~keep, -math.inf)
    return F.pad(scores, (0, 1)).softmax(-1)[..., :-1] @ repeat(values)


def cap_and_sinks(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    scores = torch.tanh(q @ repeat(keys).mT * USUAL / 0.5) * 0.5
    scores = scores.masked_fill(~keep, -math.inf)
    joined = torch.cat([scores, SINKS.expand(q.shape[0], -1, q.shape[2], -1)], dim=-1)
    return joined.softmax(-1)[..., :-1] @ repeat(values)


def merge(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[2:])


def heads_merged(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """As BART was first published: batch and heads in one dimension, apart for the mask only."""
    q, keys, values = (
        x.reshape(-1, x.shape[2], SIZE) for x in (q * USUAL, repeat(keys), repeat(values))
    )
    scores = torch.bmm(q, keys.transpose(1, 2))
    scores = scores.view(-1, HEADS, 1, CAPACITY) + additive(keep, LOWEST)
    weights = F.softmax(scores.view(-1, 1, CAPACITY), dim=-1)
    weights = weights.view(-1, HEADS, 1, CAPACITY).view(-1, 1, CAPACITY)
    return torch.bmm(F.dropout(weights, 0.1, training=False), values).view(-1, HEADS, 1, SIZE)


def heads_merged_throughout(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """Masks of every shape that fits, keys transposed before heads are merged."""
    scores = merge(q) @ merge(repeat(keys).transpose(2, 3)) * USUAL
    scores = scores.masked_fill(~keep[0, 0], -math.inf).masked_fill(~keep[0], -math.inf)
    scores = scores + merge(ALIBI.expand(q.shape[0], -1, -1, -1))
    scores = scores.masked_fill(~merge(PADDED.expand(-1, HEADS, -1, -1)), -math.inf)
    return (scores.softmax(2) @ merge(repeat(values))).unflatten(0, (-1, HEADS))


def baddbmm(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """As Bloom has it: the bias of ALiBi is what the product is added to."""
    alibi = merge(ALIBI.expand(q.shape[0], -1, -1, -1))
    q, keys, values = (merge(x) for x in (q, repeat(keys), repeat(values)))
    scores = alibi.baddbmm(batch1=q, batch2=keys.transpose(-1, -2), beta=0.5, alpha=0.4)
    scores = scores.view(-1, HEADS, 1, CAPACITY).masked_fill(~keep, -math.inf)
    return (merge(scores.softmax(-1)) @ values).view(-1, HEADS, 1, SIZE)


def baddbmm_of_zeros(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    q, keys = merge(q), merge(repeat(keys))
    nothing = torch.zeros(q.shape[0], 1, CAPACITY, dtype=q.dtype)
    scores = torch.baddbmm(nothing, q, keys.mT, beta=1.0, alpha=USUAL)
    scores = scores.view(-1, HEADS, 1, CAPACITY) + additive(keep)
    return scores.softmax(-1) @ repeat(values)


def _alibi(keep: Tensor) -> Tensor:
    return ALIBI.masked_fill(~keep, -math.inf)


SPELLINGS = (
    Spelling(gpt_fast),
    Spelling(dense),
    Spelling(positional),
    Spelling(with_scale, 0.4),
    Spelling(scaled_query, 1.5 * USUAL),
    Spelling(scaled_keys, 1.5 * USUAL),
    Spelling(scaled_repeated_keys, USUAL / 2),
    Spelling(causal_query, mask=lambda keep: (torch.arange(CAPACITY) == 0).view(1, 1, 1, -1)),
    Spelling(mask_of_two_dimensions),
    Spelling(mask_of_three_dimensions),
    Spelling(mask_of_minus_infinity),
    Spelling(mask_of_the_lowest),
    Spelling(mask_of_minus_ten_thousand),
    Spelling(mask_by_row, mask=lambda keep: keep & PADDED),
    Spelling(mask_by_head, mask=lambda keep: keep & WINDOWS),
    Spelling(mask_by_row_and_head, mask=lambda keep: keep & WINDOWS & PADDED),
    Spelling(bias_by_head, mask=_alibi),
    Spelling(scale_divides),
    Spelling(scale_multiplies, 0.4),
    Spelling(scale_on_query),
    Spelling(scale_on_keys, 0.4),
    Spelling(scale_split),
    Spelling(scale_after_mask, 0.4, lambda keep: 0.4 * _alibi(keep)),
    Spelling(scale_twice, 3 / 8),
    Spelling(constants_of_the_graph),
    Spelling(softmax_in_fp32),
    Spelling(in_place),
    Spelling(in_place_under_another_name),
    Spelling(by_keyword),
    Spelling(einsum),
    Spelling(einsum_with_tokens_first),
    Spelling(repeated_with_tokens_first),
    Spelling(copied),
    Spelling(largest_subtracted),
    Spelling(one_minus_mask),
    Spelling(mask_and_bias, mask=lambda keep: _alibi(keep & PADDED)),
    Spelling(heads_merged),
    Spelling(heads_merged_throughout, mask=lambda keep: _alibi(keep & PADDED)),
    Spelling(baddbmm, 0.4, lambda keep: (0.5 * ALIBI).masked_fill(~keep, -math.inf)),
    Spelling(baddbmm_of_zeros),
    Spelling(soft_cap, softcap=0.5),
    Spelling(soft_cap_then_bias, 1.2, _alibi, softcap=0.6),
    Spelling(sinks, sink=SINKS),
    Spelling(sinks_first, 0.4, sink=0.4 * SINKS),
    Spelling(off_by_one, sink=torch.zeros(1, 1, 1, 1)),
    Spelling(cap_and_sinks, softcap=0.5, sink=SINKS),
)
