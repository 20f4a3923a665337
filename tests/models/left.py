"""Decode steps whose attention is left exactly as it was, with the reason that ``explain`` gives.

Each case is a function of one decode step: q ``[B, Hq, 1, D]``, the new k and v ``[B, Hkv, 1, D]``, their caches
``[B, Hkv, S, D]``, a position and the mask ``[1, 1, 1, S]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from .plain import CAPACITY, HEADS, KV_HEADS, SIZE, dense
from .spellings import ALIBI, repeat

CASES: list[Any] = []
Step = Callable[..., Any]


def left(reason: str) -> Callable[[Step], Step]:
    """Registers a step whose attention is left for ``reason``."""

    def register(step: Step) -> Step:
        CASES.append(pytest.param(step, reason, id=step.__name__))
        return step

    return register


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q = torch.randn(2, HEADS, 1, SIZE)
    k, v = torch.randn(2, 2, KV_HEADS, 1, SIZE).unbind()
    keys, values = torch.randn(2, 2, KV_HEADS, CAPACITY, SIZE).unbind()
    keep = (torch.arange(CAPACITY) <= 60).view(1, 1, 1, -1)
    return q, k, v, keys.clone(), values.clone(), torch.tensor([60]), keep


def write(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, at: Tensor) -> None:
    keys[:, :, at] = k
    values[:, :, at] = v


def scores_of(q: Tensor, keys: Tensor) -> Tensor:
    return q @ repeat(keys).mT / math.sqrt(SIZE)


@torch.library.custom_op("hsa_tests::write_all", mutates_args=("keys", "values"))
def write_all(k: Tensor, keys: Tensor, v: Tensor, values: Tensor, at: Tensor) -> None:
    """A write that only the schema of an operator tells, as serving engines have it."""
    write(keys, values, k, v, at)


# The attention


@left("dropout is active")
def dropout(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    return F.scaled_dot_product_attention(q, keys, values, keep, dropout_p=0.2, enable_gqa=True)


@left("dropout is active, not into the product with the values")
def dropout_on_weights(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    weights = scores_of(q, keys).masked_fill(~keep, -math.inf).softmax(-1)
    return F.dropout(weights, 0.2, training=True) @ repeat(values)


@left("attention weights are used by more than the product with the values")
def weights_returned(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    weights = scores_of(q, keys).masked_fill(~keep, -math.inf).softmax(-1)
    return weights @ repeat(values), weights


@left("attention weights go into `mul`, not into the product with the values")
def weights_gated(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    weights = scores_of(q, keys).masked_fill(~keep, -math.inf).softmax(-1)
    return (weights * 0.5) @ repeat(values)


@left("the scale is zero")
def scale_of_zero(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    return F.scaled_dot_product_attention(q, keys, values, keep, scale=0.0, enable_gqa=True)


@left("the scale is -0.25")
def negative_scale(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    return dense(q, keys * -1.0, values, keep)


@left("the scale is a tensor or zero, not a nonzero number known at compile time")
def scale_by_tensor(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    scores = (q @ repeat(keys).mT) * k.abs().mean()
    return scores.masked_fill(~keep, -math.inf).softmax(-1) @ repeat(values)


@left("scores are masked before `tanh` caps them")
def mask_within_the_cap(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    scores = scores_of(q, keys).masked_fill(~keep, -math.inf)
    return (30.0 * torch.tanh(scores / 30.0)).softmax(-1) @ repeat(values)


@left("a number is added to scores that are capped")
def number_within_the_cap(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    scores = 30.0 * torch.tanh((scores_of(q, keys) + 7.0) / 30.0)
    return scores.masked_fill(~keep, -math.inf).softmax(-1) @ repeat(values)


@left("attention scores pass through `tanh`, but not as a soft cap")
def capped_twice(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    scores = torch.tanh(2.0 * torch.tanh(scores_of(q, keys)))
    return scores.masked_fill(~keep, -math.inf).softmax(-1) @ repeat(values)


@left("attention scores pass through `sigmoid`, which is not recognised")
def squashed(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    scores = torch.sigmoid(scores_of(q, keys))
    return scores.masked_fill(~keep, -math.inf).softmax(-1) @ repeat(values)


def column(q, score=0.5):
    return torch.full((q.shape[0], HEADS, 1, 1), score)


@left("a number is added to scores that are capped or joined to a sink")
def number_beside_a_sink(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    scores = (scores_of(q, keys) + 3.0).masked_fill(~keep, -math.inf)
    return torch.cat([scores, column(q)], -1).softmax(-1)[..., :-1] @ repeat(values)


@left("the weight of an attention sink is multiplied with a value")
def sink_with_a_value(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    scores = scores_of(q, keys).masked_fill(~keep, -math.inf)
    weights = torch.cat([scores, column(q)], -1).softmax(-1)
    return weights @ F.pad(repeat(values), (0, 0, 0, 1), value=1.0)


@left("attention weights go into `getitem`, not into the product with the values")
def other_weight_cut_off(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    scores = scores_of(q, keys).masked_fill(~keep, -math.inf)
    return torch.cat([scores, column(q)], -1).softmax(-1)[..., 1:] @ repeat(values)


@left("attention scores are joined to something else than one column")
def two_sinks(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    scores = scores_of(q, keys).masked_fill(~keep, -math.inf)
    joined = torch.cat([scores, column(q), column(q)], -1)
    return joined.softmax(-1)[..., :-2] @ repeat(values)


@left("attention scores are joined to something else than one column")
def sinks_of_merged_heads(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    q, keys, values = (x.flatten(0, 1) for x in (q, repeat(keys), repeat(values)))
    scores = torch.bmm(q, keys.mT).masked_fill(~keep[0], -math.inf)
    sinks = torch.linspace(-1, 1, 2 * HEADS).view(-1, 1, 1)
    return torch.bmm(torch.cat([scores, sinks], -1).softmax(-1)[..., :-1], values)


@left("scores are masked or capped together with an attention sink")
def sink_under_the_mask(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    joined = torch.cat([scores_of(q, keys), column(q)], -1)
    hidden = F.pad(~keep, (0, 1))
    return joined.masked_fill(hidden, -math.inf).softmax(-1)[..., :-1] @ repeat(values)


@left("masked scores are set to -5, which does not mask them")
def mask_that_does_not_mask(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    return scores_of(q, keys).masked_fill(~keep, -5.0).softmax(-1) @ repeat(values)


@left("scores are filled with something else than a number under a boolean mask")
def mask_by_tensor(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    return torch.where(keep, scores_of(q, keys), ALIBI - 1e9).softmax(-1) @ repeat(values)


@left("what is added to the scores is not a mask")
def relative_positions(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    scores = scores_of(q, keys) + q @ repeat(keys).flip(2).mT
    return scores.masked_fill(~keep, -math.inf).softmax(-1) @ repeat(values)


@left("a part of the attention scores is written in place")
def scores_written_in_part(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    scores = scores_of(q, keys)
    scores[..., 61:].fill_(-math.inf)
    return scores.softmax(-1) @ repeat(values)


@left("softmax runs over dimension 1, not over the keys")
def softmax_over_heads(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    return scores_of(q, keys).softmax(1) @ repeat(values)


@left("operand of shape (2, 1, 64): [batch, heads, tokens, size] is expected")
def one_head_without_a_dimension(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    q, keys, values = q.flatten(1)[:, None], repeat(keys), repeat(values)
    keys, values = (x.transpose(1, 2).flatten(2) for x in (keys, values))
    scores = torch.bmm(q, keys.mT).masked_fill(~keep[0], -math.inf)
    return torch.bmm(scores.softmax(-1), values)


@left("the factors of `baddbmm` are not numbers known at compile time")
def product_that_counts_for_nothing(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    q, keys, values = (x.flatten(0, 1) for x in (q, repeat(keys), repeat(values)))
    bias = torch.zeros(2 * HEADS, 1, CAPACITY).masked_fill(~keep[0], -math.inf)
    return torch.bmm(bias.baddbmm(q, keys.mT, alpha=0).softmax(-1), values)


@left(
    "attention scores are neither [batch, heads, queries, keys] nor [batch * heads, queries, keys]"
)
def grouped_by_a_fifth_dimension(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    scores = q.unflatten(1, (KV_HEADS, -1)) @ keys.unsqueeze(2).mT
    weights = scores.masked_fill(~keep, -math.inf).softmax(-1)
    return (weights @ values.unsqueeze(2)).flatten(1, 2)


@left("einsum 'bhqk,bhkd->bhd' is not a product of two 4-dimensional tensors")
def einsum_of_three_letters(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    weights = scores_of(q, keys).masked_fill(~keep, -math.inf).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhd", weights, repeat(values))


@left("17 query tokens: only steps of up to 16 are rewritten")
def many_queries(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    return dense(q.repeat(1, 1, 17, 1), keys, values, keep)


# The cache


@left("the keys are in a fixed cache and the values in a static one")
def values_written_alone(q, k, v, keys, values, at, keep):
    values[:, :, at] = v
    return dense(q, keys, values, keep)


@left("the keys are given to `hsa_tests::write_all`, which may write them")
def written_by_an_operator(q, k, v, keys, values, at, keep):
    torch.ops.hsa_tests.write_all(k, keys, v, values, at)
    return dense(q, keys, values, keep)


@left("the keys are computed in this graph by `mul`: there is no KV cache behind them")
def no_cache(q, k, v, keys, values, at, keep):
    return dense(q, k * k, v * 2, None)


@left("the keys are computed in this graph by `repeat`: there is no KV cache behind them")
def heads_repeated_in_another_order(q, k, v, keys, values, at, keep):
    """Query head h reads KV head h % Hkv."""
    write(keys, values, k, v, at)
    return dense(q, keys.repeat(1, 2, 1, 1), values.repeat(1, 2, 1, 1), keep)


@left("the keys are computed in this graph by `mul`: there is no KV cache behind them")
def keys_scaled_in_place(q, k, v, keys, values, at, keep):
    """The cache itself is scaled, again in each step: no constant of this attention."""
    write(keys, values, k, v, at)
    keys *= 0.5
    return dense(q, keys, values, keep)


@left("the cache of the values is changed in place by `mul_` too")
def values_decayed_in_place(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    values.transpose(1, 2).mul_(0.99)
    return dense(q, keys, values, keep)


@left("only a part of the keys is written at the new position")
def one_head_written(q, k, v, keys, values, at, keep):
    keys[:, 0, 60] = k[:, 0, 0]
    values[:, 0, 60] = v[:, 0, 0]
    return dense(q, keys, values, keep)


@left("the whole cache of the keys is overwritten with another")
def copied_from_elsewhere(q, k, v, keys, values, at, keep):
    keys.copy_(torch.slice_scatter(values, k, 2, 60, 61))
    values.copy_(torch.slice_scatter(values, v, 2, 60, 61))
    return dense(q, keys, values, keep)


@left("the keys are written in place and concatenated")
def changed_and_concatenated(q, k, v, keys, values, at, keep):
    keys.mul_(0.99)
    keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
    return dense(q, keys, values, None), keys, values


@left("the keys are written after attention has read them")
def written_too_late(q, k, v, keys, values, at, keep):
    out = dense(q, keys, values, keep)
    write(keys, values, k, v, at)
    return out


@left("the keys are written 2 times in one step")
def written_twice(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    write(keys, values, k, v, at - 1)
    return dense(q, keys, values, keep)


@left("keys and values are written at positions that are not computed once for both")
def written_apart(q, k, v, keys, values, at, keep):
    keys[:, :, at] = k
    values[:, :, at - 1] = v
    return dense(q, keys, values, keep)


@left("the position changes between the writes of keys and of values")
def counted_between_the_writes(q, k, v, keys, values, at, keep):
    at = at.clone()
    keys[:, :, at] = k
    at.sub_(1)
    values[:, :, at] = v
    return dense(q, keys, values, keep)


@left("the whole cache of the keys is overwritten")
def rolled(q, k, v, keys, values, at, keep):
    keys.copy_(torch.cat([keys[:, :, 1:], k], 2))
    values.copy_(torch.cat([values[:, :, 1:], v], 2))
    return dense(q, keys, values, keep)


@left("the cache of the keys is written by `scatter_`, which is not recognised")
def scattered(q, k, v, keys, values, at, keep):
    index = at.view(1, 1, 1, 1).expand_as(k)
    keys.scatter_(2, index, k)
    values.scatter_(2, index, v)
    return dense(q, keys, values, keep)


@left("the keys are computed in this graph by `where`: there is no KV cache behind them")
def written_by_one_hot(q, k, v, keys, values, at, keep):
    here = (torch.arange(CAPACITY) == at).view(1, 1, -1, 1)
    keys, values = torch.where(here, k, keys), torch.where(here, v, values)
    return dense(q, keys, values, keep), keys, values


@left("the keys are indexed in 0 dimensions that could be the tokens")
def written_everywhere(q, k, v, keys, values, at, keep):
    keys[:] = k
    values[:] = v
    return dense(q, keys, values, keep)


@left(
    "17 positions of the keys are written at once, by a torch.int64 index: only a fixed number up to 16"
)
def many_positions(q, k, v, keys, values, at, keep):
    at = at - torch.arange(17).flip(0)
    keys[:, :, at] = k.repeat(1, 1, 17, 1)
    values[:, :, at] = v.repeat(1, 1, 17, 1)
    return dense(q, keys, values, keep)


@left("more than 16 tokens of the keys are written, or their number is not known")
def many_tokens(q, k, v, keys, values, at, keep):
    keys[:, :, 60:77] = k.repeat(1, 1, 17, 1)
    values[:, :, 60:77] = v.repeat(1, 1, 17, 1)
    return dense(q, keys, values, keep)


@left("1 tokens of keys and 2 of values are written")
def more_values_than_keys(q, k, v, keys, values, at, keep):
    keys[:, :, 60:61] = k
    values[:, :, 60:62] = v.repeat(1, 1, 2, 1)
    return dense(q, keys, values, keep)


@left("the keys are converted between the cache and attention")
def kept_in_half_precision(q, k, v, keys, values, at, keep):
    keys, values = keys.bfloat16(), values.bfloat16()
    write(keys, values, k.bfloat16(), v.bfloat16(), at)
    return dense(q, keys.float(), values.float(), keep), keys, values


@left("the updated keys are neither copied back nor returned")
def update_forgotten(q, k, v, keys, values, at, keep):
    keys, values = keys.index_copy(2, at, k), values.index_copy(2, at, v)
    return dense(q, keys, values, keep)


@left("the concatenated keys are not returned: no cache lives on after this step")
def concatenation_forgotten(q, k, v, keys, values, at, keep):
    keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
    return dense(q, keys, values, None)


@left("the keys are concatenated from other than two tensors")
def concatenated_from_three(q, k, v, keys, values, at, keep):
    keys, values = (
        torch.cat([keys[:, :, :1], keys, k], 2),
        torch.cat([values[:, :, :1], values, v], 2),
    )
    return dense(q, keys, values, None), keys, values


@left("more than 16 tokens are appended to the keys, or their number varies")
def many_appended(q, k, v, keys, values, at, keep):
    keys, values = (
        torch.cat([old, new.repeat(1, 1, 17, 1)], 2) for old, new in ((keys, k), (values, v))
    )
    return dense(q, keys, values, None), keys, values


@left("the keys are concatenated to something that is no graph input")
def concatenated_to_a_part(q, k, v, keys, values, at, keep):
    keys, values = torch.cat([keys[:, :, 1:], k], 2), torch.cat([values[:, :, 1:], v], 2)
    return dense(q, keys, values, None), keys, values


@left("the keys are in a static cache and the values in a functional one")
def caches_of_two_kinds(q, k, v, keys, values, at, keep):
    keys[:, :, at] = k
    values = values.index_copy(2, at, v)
    return dense(q, keys, values, keep), values


# Operands that do not stay what they were


@left("`mul_` changes the query in place while attention is computed from it")
def query_changed(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    q = q * 1.0
    weights = scores_of(q, keys).masked_fill(~keep, -math.inf).softmax(-1)
    q.mul_(3)
    return weights @ repeat(values)


@left("`setitem` changes the mask in place while attention is computed from it")
def mask_changed(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    drop = ~keep
    scores = scores_of(q, keys).masked_fill(drop, -math.inf)
    drop[..., :30] = True
    return scores.softmax(-1) @ repeat(values)


@left("`zero_` changes the mask in place while attention is computed from it")
def bias_changed(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    bias = torch.where(keep, 0.0, -math.inf)
    scores = scores_of(q, keys) + bias
    bias.zero_()
    return scores.softmax(-1) @ repeat(values)


@left("`mul_` changes the attention sink in place while attention is computed from it")
def sink_changed(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    sink = torch.ones(len(q), HEADS, 1, 1)
    scores = scores_of(q, keys).masked_fill(~keep, -math.inf)
    joined = torch.cat([scores, sink], -1)
    sink.mul_(4)
    return joined.softmax(-1)[..., :-1] @ repeat(values)


@left("`index_copy_` changes the keys in place while attention is computed from it")
def keys_copied_before_the_write(q, k, v, keys, values, at, keep):
    old = keys.clone()
    keys.index_copy_(2, at, k)
    values.index_copy_(2, at, v)
    return dense(q, old, values, keep)


@left("`index_copy_` changes the values in place while attention is computed from it")
def values_repeated_before_the_write(q, k, v, keys, values, at, keep):
    old = repeat(values)
    keys.index_copy_(2, at, k)
    values.index_copy_(2, at, v)
    return F.scaled_dot_product_attention(q, repeat(keys), old, keep)


# Numbers that are not what they seem


@left("attention scores are rounded to whole numbers")
def scores_rounded(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    scores = scores_of(q, keys).to(torch.int32).float()
    return scores.masked_fill(~keep, -math.inf).softmax(-1) @ repeat(values)


@left("the scale is a tensor or zero")
def scale_rounded_to_zero(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    scores = scores_of(q, keys) * torch.full((), 0.75).to(torch.int32)
    return scores.masked_fill(~keep, -math.inf).softmax(-1) @ repeat(values)


@left("there are more rows of attention than queries")
def mask_of_more_rows(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    rows = keep & (torch.arange(CAPACITY) >= torch.tensor([[0], [5], [9]]))
    return scores_of(q, keys).masked_fill(~rows, -math.inf).softmax(-1) @ repeat(values)


@left("keys and values are written at positions that are not computed once for both")
def position_computed_twice(q, k, v, keys, values, at, keep):
    keys[:, :, at % CAPACITY] = k
    values[:, :, at % CAPACITY] = v
    return dense(q, keys, values, keep)


# Caches that grow


@left("the keys are concatenated twice to one cache")
def two_continuations(q, k, v, keys, values, at, keep):
    grown = [torch.cat((old, new), 2) for old, new in ((keys, k), (values, v))]
    other = torch.cat((keys, 2 * k), 2)
    return dense(q, *grown, None), *grown, other


@left("the concatenated keys are viewed as a tensor of another shape")
def grown_keys_viewed(q, k, v, keys, values, at, keep):
    grown = [torch.cat((old, new), 2) for old, new in ((keys, k), (values, v))]
    return dense(q, *grown, None), *grown, grown[0].view(len(q), KV_HEADS, -1).norm(dim=2)
