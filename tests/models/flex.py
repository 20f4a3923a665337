"""flex_attention as models call it: spellings that are understood, and steps that are left with a reason.

``SPELLINGS`` are what ``spellings`` says; ``CASES`` what ``left`` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
)

from .left import write
from .plain import CAPACITY, HEADS
from .spellings import ALIBI, LOWEST, PADDED, SINKS, SLOPES, USUAL, WINDOWS, Spelling

SLOPE = SLOPES.flatten()
PADDING, WINDOW = PADDED[:, 0, 0], WINDOWS[0, :, 0]
TABLE = torch.linspace(-2, 2, HEADS * 7).view(HEADS, 7)
TEMPERATURE = torch.tensor(0.25)
FLOATS = torch.linspace(-1, 1, CAPACITY).expand(2, 1, 4, CAPACITY) * torch.tensor([1, -1]).view(
    2, 1, 1, 1
)
HALVES = torch.linspace(-1, 1, CAPACITY, dtype=torch.bfloat16)


def call(q: Tensor, keys: Tensor, values: Tensor, *args: Any, **options: Any) -> Any:
    return flex_attention(q, keys, values, *args, enable_gqa=True, **options)


def blocks(
    q: Tensor,
    mod: Callable[..., Tensor],
    batch: int | None = None,
    heads: int | None = None,
    **sizes: Any,
):
    return create_block_mask(mod, batch, heads, q.shape[2], CAPACITY, device="cpu", **sizes)


# score_mod alone


def where(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    def mod(score, b, h, q_idx, kv_idx):
        return torch.where(keep[0, 0, q_idx, kv_idx], score, -math.inf)

    return call(q, keys, values, mod)


def masked_fill(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    def mod(score, b, h, q_idx, kv_idx):
        return score.masked_fill(~keep[0, 0, q_idx, kv_idx], float("-inf"))

    return call(q, keys, values, mod, scale=0.4)


def where_the_lowest(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    def mod(score, b, h, q_idx, kv_idx):
        hidden = torch.logical_not(keep[0][0][q_idx][kv_idx])
        return torch.where(hidden, torch.tensor(LOWEST), score)

    return call(q, keys, values, mod)


def scaled(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    def mod(score, b, h, q_idx, kv_idx):
        return torch.where(keep[0, 0, q_idx, kv_idx], 3.0 * score / 2, -math.inf)

    return call(q * 2, keys / 2, values, mod)


def capped(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    def mod(score, b, h, q_idx, kv_idx):
        score = 0.5 * torch.tanh(score / 0.5)
        return torch.where(keep[0, 0, q_idx, kv_idx], score, -math.inf)

    return call(q, keys, values, mod)


def scaled_after_the_cap(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    def mod(score, b, h, q_idx, kv_idx):
        score = (score * 2).tanh() * 0.3 * 2 + 0.1 * SLOPE[h] * kv_idx
        return torch.where(keep[0, 0, q_idx, kv_idx], score, -math.inf)

    return call(q, keys, values, mod, scale=1.0)


def alibi(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """Relative to a position that the query token adds to: the same for all keys, which softmax does not see."""
    first = keep.sum(-1)[0, 0, 0] - 1

    def mod(score, b, h, q_idx, kv_idx):
        score = score + (kv_idx - q_idx - first) * SLOPE[h] * 0.1
        return torch.where(keep[0, 0, q_idx, kv_idx], score, -math.inf)

    return call(q, keys, values, mod)


def read_of_a_table(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    def mod(score, b, h, q_idx, kv_idx):
        score = score - TABLE[h, kv_idx % 7] + 3.0 + TEMPERATURE
        return torch.where(keep[0, 0, q_idx, kv_idx], score, -math.inf)

    return call(q, keys, values, mod)


def floats_by_row(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """As transformers reads an additive mask: one index at a time."""

    def mod(score, b, h, q_idx, kv_idx):
        score = score + FLOATS[b][0][q_idx][kv_idx]
        return torch.where(keep[0, 0, q_idx, kv_idx], score, -math.inf)

    return call(q, keys, values, mod)


def scaled_after_the_bias(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """In half precision, which the scores are not."""

    def mod(score, b, h, q_idx, kv_idx):
        score = (HALVES[kv_idx] + score) * 0.7
        return torch.where(keep[0, 0, q_idx, kv_idx], score, -math.inf)

    return call(q, keys, values, mod)


def scalars_promote(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """A tensor without dimensions counts as much as an index does: int + float is float."""

    def mod(score, b, h, q_idx, kv_idx):
        half = torch.tensor(0.5) * kv_idx.new_ones(())
        score = score + torch.minimum(kv_idx * TEMPERATURE, half * 30) * half
        return torch.where(keep[0, 0, q_idx, kv_idx], score, -math.inf)

    return call(q, keys, values, mod)


# mask_mod


def mask_mod(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    mask = blocks(q, lambda b, h, q_idx, kv_idx: keep[0, 0, q_idx, kv_idx])
    return call(q, keys, values, block_mask=mask)


def mask_of_rows(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    def mod(b, h, q_idx, kv_idx):
        return keep[0, 0, q_idx, kv_idx] & PADDING[b, kv_idx]

    return call(q, keys, values, block_mask=blocks(q, mod, batch=2, BLOCK_SIZE=(2, 16)))


def mask_of_heads(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    mod = and_masks(
        lambda b, h, q_idx, kv_idx: keep[0, 0, q_idx, kv_idx],
        lambda b, h, q_idx, kv_idx: WINDOW[h, kv_idx],
    )
    mask = blocks(q, mod, heads=HEADS, BLOCK_SIZE=(1, 32))
    return call(q, keys, values, block_mask=mask)


def mask_of_rows_and_heads(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """Blocks of one query are full where they are not at a border."""

    def mod(b, h, q_idx, kv_idx):
        return keep[0, 0, q_idx, kv_idx] & PADDING[b, kv_idx] & WINDOW[h, kv_idx]

    mask = blocks(q, mod, batch=2, heads=HEADS, BLOCK_SIZE=(1, 8))
    return call(q, keys, values, block_mask=mask)


def everything(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    mask = blocks(
        q, lambda b, h, q_idx, kv_idx: keep[0, 0, q_idx, kv_idx] & PADDING[b, kv_idx], batch=2
    )

    def mod(score, b, h, q_idx, kv_idx):
        return 0.5 * torch.tanh(score / 0.5) + 0.1 * SLOPE[h] * kv_idx

    return call(q, keys, values, mod, block_mask=mask, scale=0.4)


# The log-sum-exp


def sinks_by_the_sum(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """As transformers has gpt-oss."""
    mask = blocks(q, lambda b, h, q_idx, kv_idx: keep[0, 0, q_idx, kv_idx])
    out, aux = call(q, keys, values, block_mask=mask, return_aux=AuxRequest(lse=True))
    lse = aux.lse.to(values.dtype).unsqueeze(-1)
    both = torch.cat([lse, SINKS.expand(q.shape[0], -1, q.shape[2], -1)], dim=-1)
    total = torch.logsumexp(both, dim=-1, keepdim=True)
    return (out * torch.exp(lse - total)).to(q.dtype)


def sum_of_shifted_scores(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """What is added to all scores of a row counts here."""

    def mod(score, b, h, q_idx, kv_idx):
        return torch.where(keep[0, 0, q_idx, kv_idx], score - 4 * SLOPE[h], -math.inf)

    out, lse = call(q, keys, values, mod, return_lse=True)
    return out * torch.sigmoid(lse - SINKS[..., 0]).unsqueeze(-1)


def _alibi(keep: Tensor) -> Tensor:
    return ALIBI.masked_fill(~keep, -math.inf)


def _plus(bias: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda keep: bias.masked_fill(~keep, -math.inf)


_TABLE = -TABLE[:, torch.arange(CAPACITY) % 7].view(1, HEADS, 1, CAPACITY)
_HALVES = 0.7 * HALVES.float().view(1, 1, 1, CAPACITY)
_RAMP = (0.5 * (0.25 * torch.arange(CAPACITY)).clamp(max=15.0)).view(1, 1, 1, CAPACITY)

SPELLINGS = (
    Spelling(where),
    Spelling(masked_fill, 0.4),
    Spelling(where_the_lowest),
    Spelling(scaled, 1.5 * USUAL),
    Spelling(capped, softcap=0.5),
    Spelling(scaled_after_the_cap, 1.2, _alibi, softcap=0.6),
    Spelling(alibi, mask=_alibi),
    Spelling(read_of_a_table, mask=_plus(_TABLE)),
    Spelling(floats_by_row, mask=_plus(FLOATS[:, :, :1])),
    Spelling(scaled_after_the_bias, 0.7 * USUAL, mask=_plus(_HALVES)),
    Spelling(scalars_promote, mask=_plus(_RAMP)),
    Spelling(mask_mod),
    Spelling(mask_of_rows, mask=lambda keep: keep & PADDED),
    Spelling(mask_of_heads, mask=lambda keep: keep & WINDOWS),
    Spelling(mask_of_rows_and_heads, mask=lambda keep: keep & PADDED & WINDOWS),
    Spelling(everything, 0.4, lambda keep: _alibi(keep & PADDED), softcap=0.5),
    Spelling(sinks_by_the_sum, sink=SINKS),
    Spelling(sum_of_shifted_scores, sink=SINKS + 4 * SLOPES),
)


# What is left

CASES: list[Any] = []
Step = Callable[..., Any]


def left(reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a ``score_mod`` with one more argument, the mask, or a step of its own."""

    def register(step: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append(pytest.param(step, reason, id=step.__name__))
        return step

    return register


def by_score(mod: Callable[..., Tensor]) -> Step:
    """A step whose ``score_mod`` is ``mod``, with the hidden keys masked behind it."""

    def step(q, k, v, keys, values, at, keep):
        write(keys, values, k, v, at)

        def masked(score, b, h, q_idx, kv_idx):
            score = mod(score, b, h, q_idx, kv_idx)
            return torch.where(keep[0, 0, q_idx, kv_idx], score, -math.inf)

        return call(q, keys, values, masked)

    return step


@torch.library.custom_op("hsa_tests::tanh", mutates_args=())
def approximate_tanh(x: Tensor) -> Tensor:
    return torch.tanh(x)


@approximate_tanh.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@approximate_tanh.register_vmap
def _(info: Any, dims: Any, x: Tensor) -> Any:
    return approximate_tanh(x), dims[0]


@left("attention scores pass through `exp`, which is not recognised")
def exponential(score, b, h, q_idx, kv_idx):
    return torch.exp(score)


@left("`hsa_tests::tanh` in the score_mod of flex_attention is not recognised")
def another_tanh(score, b, h, q_idx, kv_idx):
    """Of the same name, which proves nothing."""
    return 2.0 * torch.ops.hsa_tests.tanh(score / 2.0)


@left("attention scores pass through `neg`, which is not recognised")
def negative(score, b, h, q_idx, kv_idx):
    return -score


@left("the scale is -0.5")
def negative_factor(score, b, h, q_idx, kv_idx):
    return score * -2.0


@left("the scale is a tensor or zero, not a nonzero number known at compile time")
def temperature_of_heads(score, b, h, q_idx, kv_idx):
    return score * SLOPE[h]


@left("attention scores are rounded by `div`")
def divided_and_rounded(score, b, h, q_idx, kv_idx):
    return torch.div(score, 0.5, rounding_mode="floor")


@left("what is added to the scores is not a mask")
def added_to_itself(score, b, h, q_idx, kv_idx):
    return score + torch.sin(score)


@left("what masks the scores, or is added to them, depends on them")
def only_the_positive(score, b, h, q_idx, kv_idx):
    return torch.where(score > 0, score, -math.inf)


@left("scores are masked before `tanh` caps them")
def bias_within_the_cap(score, b, h, q_idx, kv_idx):
    return 2.0 * torch.tanh((score + TABLE[h, kv_idx % 7]) / 2.0)


@left("masked scores are set to -5, which does not mask them")
def low_but_not_masked(score, b, h, q_idx, kv_idx):
    return torch.where(kv_idx % 2 == 0, score, -5.0)


@left("`int` in the score_mod of flex_attention makes the score torch.int32")
def rounded(score, b, h, q_idx, kv_idx):
    return score.int() * 0.5


@left("`iadd` in the score_mod of flex_attention writes in place")
def in_place(score, b, h, q_idx, kv_idx):
    bias = kv_idx * 0.5
    bias += 1.0
    return score + bias


@left("`sum` in the score_mod of flex_attention is not recognised")
def sum_of_a_row(score, b, h, q_idx, kv_idx):
    return score + TABLE[h].sum() * kv_idx


@left("`getitem` in the score_mod of flex_attention is not recognised")
def part_of_a_row(score, b, h, q_idx, kv_idx):
    return score + TABLE[h][2:][kv_idx % 5]


@left("`mul` in the score_mod of flex_attention takes a captured tensor that is no scalar")
def whole_row(score, b, h, q_idx, kv_idx):
    return score + (TABLE[h] * 2.0)[kv_idx % 7]


@left("the score_mod of flex_attention does not use the score")
def no_score(score, b, h, q_idx, kv_idx):
    return torch.zeros_like(score)


def own_step(step: Step) -> Step:
    step.own = True  # type: ignore[attr-defined]
    return step


@left("17 query tokens: only steps of up to 16 are rewritten")
@own_step
def many_queries(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    q = q.repeat(1, 1, 17, 1)
    mask = blocks(q, lambda b, h, q_idx, kv_idx: keep[0, 0, 0, kv_idx] & (kv_idx >= q_idx))
    return call(q, keys, values, block_mask=mask)


@left("the keys are computed in this graph by `mul`: there is no KV cache behind them")
@own_step
def no_cache(q, k, v, keys, values, at, keep):
    return call(q, k * k, v * 2)


@left("the scale is a tensor, not a number known at compile time")
@own_step
def scale_of_the_input(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    return call(q, keys, values, scale=at.item() / 100)


@left("the largest scores are used, which sparse attention does not give")
@own_step
def largest_scores(q, k, v, keys, values, at, keep):
    """By the operator itself: on a CPU, flex_attention refuses to ask for them."""
    write(keys, values, k, v, at)
    whole = (1, CAPACITY, torch.ones(1, 1, 1).int(), torch.zeros(1, 1, 1, 1).int())
    unread = (None,) * (len(BlockMask.as_tuple(lists(*whole[2:]))) - 7)
    mask = (*whole, *unread, 1 << 30, 1 << 30, lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 60)
    operator = torch.ops.higher_order.flex_attention
    return operator(q, keys, values, lambda score, *at: score, mask, 0.25, {"OUTPUT_MAX": True})


@left("the log-sum-exp of attention in float64 is used")
@own_step
def sum_in_double_precision(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    out, lse = call(q.double(), keys.double(), values.double(), return_lse=True)
    return out, lse


@left("a number is added to scores whose log-sum-exp is used")
@own_step
def sum_of_scores_and_a_number(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    return call(q, keys, values, lambda score, b, h, q_idx, kv_idx: score + 1.0, return_lse=True)


@left("`any` in the mask_mod of flex_attention is not recognised")
@own_step
def mask_of_a_reduction(q, k, v, keys, values, at, keep):
    write(keys, values, k, v, at)
    mask = blocks(q, lambda b, h, q_idx, kv_idx: keep[0, 0, 0, kv_idx] & WINDOW.any())
    return call(q, keys, values, block_mask=mask)


def lists(*given: Tensor, **options: Any) -> BlockMask:
    """Counts ``[B or 1, H or 1, rows]`` and indices ``[..., blocks]``, then perhaps those of full blocks."""
    blocks = (x.int() for x in given)
    return BlockMask.from_kv_blocks(*blocks, compute_q_blocks=False, **options)
