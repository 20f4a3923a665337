"""Random attention states for the tests of the ops, and what is compared with tolerance."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from hsa_compile import algorithms
from hsa_compile.ops.page_mask import page_mask, unpack
from hsa_compile.ops.select import FRACTION_UNIT, forced_pages
from hsa_compile.ops.summarize import NEVER, per_kv_head

MASKS = ("full", "causal", "padding", "window", "per-head", "random", "empty-rows", "nothing")
ADDITIVE = ("-inf", "min", "-10000", "bias")


@dataclass(frozen=True)
class Case:
    """One decode step of one layer; ``length`` is the capacity of the cache in tokens."""

    length: int
    page_size: int = 16
    batch: int = 2
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    value_dim: int = 24
    mask: str = "padding"
    additive: str | None = None
    algorithm: str = "quest"
    group_reduce: str = "softmax_mean"
    slots: int = 4
    fraction: float = 0.0
    sink: int = 4
    recent: int = 8
    softcap: float = 0.0
    top_p: float = 1.0
    floor: int = 0
    uneven: bool = False
    dense_below: float = 0.0
    token_major: bool = False
    seed: int = 0

    @property
    def pages(self) -> int:
        return -(-self.length // self.page_size)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def stops(self) -> tuple[object, ...]:
        """Where a row stops; shares are estimated by the mean of softmax alone."""
        estimated = self.group_reduce == "softmax_mean" and algorithms.get(self.algorithm).parts
        heads = [max(1, self.slots - 3 * head) for head in range(self.kv_heads)]
        share = (self.top_p, self.floor) if estimated else (1.0, 0)
        below = (self.dense_below,) if estimated else ()
        return (*share, heads if self.uneven and not self.fraction else [], *below)

    def selection(self, tokens: int | None = None) -> tuple[object, ...]:
        """Arguments of ``select`` after q, summary and bits, with the slots that the rule needs."""
        unit = int(self.fraction * FRACTION_UNIT)
        forced = forced_pages(self.sink, self.recent, self.page_size)
        slots = max(self.slots + 1, forced)
        if unit:
            tokens = self.length if tokens is None else tokens
            slots = (unit * tokens - 1) // (self.page_size * FRACTION_UNIT) + 1 + forced
        if self.dense_below:
            slots = self.pages
        return (
            self.scale,
            self.algorithm,
            self.page_size,
            slots,
            self.slots,
            unit,
            self.sink,
            self.recent,
            self.group_reduce,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Cases of every kind, small enough for the references."""
    page_size = draw(st.sampled_from((8, 16, 32, 64)))
    lengths = (1, page_size - 1, page_size, page_size + 1, 5 * page_size, 301)
    return Case(
        length=draw(st.sampled_from(lengths)),
        page_size=page_size,
        batch=draw(st.integers(1, 3)),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from((1, 2, 3, 4, 8, 16))),
        head_dim=draw(st.sampled_from((16, 64, 72, 80, 96, 128, 256))),
        value_dim=draw(st.sampled_from((16, 64, 72, 128))),
        mask=draw(st.sampled_from(MASKS)),
        additive=draw(st.sampled_from((None, *ADDITIVE))),
        algorithm=draw(st.sampled_from(algorithms.names())),
        group_reduce=draw(st.sampled_from(("softmax_mean", "max"))),
        slots=draw(st.integers(1, 12)),
        fraction=draw(st.sampled_from((0.0, 0.0, 0.1, 0.5, 1.0))),
        sink=draw(st.sampled_from((0, 1, 4, 40))),
        recent=draw(st.sampled_from((0, 1, 8, 70))),
        softcap=draw(st.sampled_from((0.0, 0.0, 0.7, 20.0))),
        # No share that a number of equal pages reaches exactly.
        top_p=draw(st.sampled_from((1.0, 1.0, 0.37, 0.83, 0.953))),
        floor=draw(st.integers(0, 3)),
        uneven=draw(st.booleans()),
        dense_below=draw(st.sampled_from((0.0, 0.0, 0.31, 0.77, 0.971))),
        token_major=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


@dataclass(frozen=True)
class State:
    """What the ops are given: shapes as in ``hsa_compile.ops``."""

    case: Case
    q: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor
    bias: Tensor | None
    bits: Tensor
    position: Tensor
    summary: Tensor
    covered: Tensor

    @property
    def seen(self) -> Tensor:
        """Which tokens each query head can attend, ``[B, Hq, S]``."""
        case = self.case
        bits = self.bits.expand(case.batch, case.kv_heads * case.group, case.pages)
        return unpack(bits, case.page_size).flatten(-2)[..., : case.length]

    @property
    def page_bias(self) -> Tensor | None:
        """What the bias adds to each page, in the precision of the query: page by page, in fp64."""
        if self.bias is None:
            return None
        size, added = self.case.page_size, torch.zeros(self.bits.shape, dtype=torch.float64)
        seen = unpack(self.bits, size).flatten(-2)[..., : self.case.length]
        for b, h, p in itertools.product(*map(range, added.shape)):
            span = slice(p * size, (p + 1) * size)
            terms = self.bias[b, h, 0, span][seen[b, h, span]].double()
            if len(terms):
                added[b, h, p] = torch.logsumexp(terms, 0) - math.log(len(terms))
        return added.to(torch.promote_types(self.q.dtype, torch.float32))

    def selection(self, more: int = 0) -> tuple[object, ...]:
        """Arguments of ``select``."""
        rule = self.case.selection()
        return (self.q, self.summary, self.bits, *rule, more, self.page_bias, *self.case.stops)

    def fresh(self) -> tuple[Tensor, Tensor]:
        """Summaries built from scratch by the op."""
        summary = torch.zeros_like(self.summary)
        covered = torch.zeros_like(self.covered)
        covered[..., 1] = NEVER
        torch.ops.hsa.summarize(
            self.keys,
            self.bits,
            self.position,
            summary,
            covered,
            self.case.algorithm,
            self.case.page_size,
        )
        return summary, covered


def boolean_mask(case: Case, random: torch.Generator) -> Tensor:
    """A mask of the case's kind, ``[Bm, Hm, 1, S]``."""
    batch, heads, length = case.batch, case.kv_heads * case.group, case.length
    token = torch.arange(length)
    newest = max(length - 3, 0)
    if case.mask == "full":
        return torch.ones(1, 1, 1, length, dtype=torch.bool)
    if case.mask == "causal":
        return (token <= newest).view(1, 1, 1, -1)
    if case.mask == "window":
        return ((token <= newest) & (token > newest - 40)).view(1, 1, 1, -1)
    if case.mask == "per-head":
        begin = torch.randint(0, newest + 1, (batch, heads, 1, 1), generator=random)
        return (token >= begin) & (token <= newest)
    if case.mask == "random":
        return torch.rand(batch, heads, 1, length, generator=random) < 0.3
    begin = torch.randint(0, newest + 1, (batch, 1, 1, 1), generator=random)
    mask = (token >= begin) & (token <= newest)
    if case.mask == "empty-rows":
        mask[0] = False
    return mask if case.mask != "nothing" else torch.zeros_like(mask)


def build(case: Case, dtype: torch.dtype = torch.float32) -> State:
    """Fill a state; keys and values that no query head of a KV head can attend are nan."""
    random = torch.Generator().manual_seed(case.seed)
    batch, kv_heads, length = case.batch, case.kv_heads, case.length
    heads = kv_heads * case.group

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    def cache(width: int) -> Tensor:
        if case.token_major:
            return normal(length, batch, kv_heads, width).permute(1, 2, 0, 3)
        return normal(batch, kv_heads, length, width)

    mask, bias = boolean_mask(case, random), None
    if case.additive is not None:
        low = {"-inf": -math.inf, "min": torch.finfo(dtype).min}.get(case.additive, -1e4)
        base = (
            normal(*mask.shape) if case.additive == "bias" else torch.zeros(mask.shape, dtype=dtype)
        )
        mask = bias = torch.where(mask, base, torch.tensor(low, dtype=dtype))
    bits = page_mask(mask, case.page_size)
    union = unpack(per_kv_head(bits, batch, kv_heads), case.page_size).flatten(-2)[..., :length]
    keys, values = cache(case.head_dim), cache(case.value_dim)
    for poisoned in (keys, values):
        poisoned.masked_fill_(~union.unsqueeze(-1), math.nan)
    width = algorithms.summary_width(case.algorithm, case.head_dim)
    state = State(
        case=case,
        q=normal(batch, heads, 1, case.head_dim),
        keys=keys,
        values=values,
        mask=mask,
        bias=bias if case.additive == "bias" else None,
        bits=bits,
        position=torch.tensor([max(length - 3, 0)]),
        summary=torch.zeros(batch, kv_heads, case.pages, width, dtype=dtype),
        covered=torch.zeros(
            *(batch, kv_heads, case.pages, algorithms.covered_width(case.algorithm)),
            dtype=torch.int64,
        ),
    )
    summary, covered = state.fresh()
    state.summary.copy_(summary)
    state.covered.copy_(covered)
    return state


def page_ranks(state: State) -> Tensor:
    """Scores by which pages compete, in fp64 and without a logarithm: ``[B, Hkv, P]``."""
    case = state.case
    if algorithms.get(case.algorithm).parts == 0:
        later = torch.arange(case.pages, dtype=torch.float64)
        return later.expand(case.batch, case.kv_heads, case.pages)
    query = algorithms.get(case.algorithm).expand_query(state.q[:, :, 0].double())
    summary = state.summary.double().repeat_interleave(case.group, 1)
    scores = (summary @ query.unsqueeze(-1)).squeeze(-1)
    sees = (state.bits != 0).expand_as(scores)
    if state.bias is not None:
        scores = case.scale * scores + state.page_bias.double()  # type: ignore[union-attr]
    if case.group_reduce == "max":
        ranks = scores.masked_fill(~sees, -math.inf)
        return ranks.unflatten(1, (case.kv_heads, case.group)).amax(2)
    scale = 1.0 if state.bias is not None else case.scale
    logits = (scale * scores).masked_fill(~sees, -math.inf)
    shares = torch.softmax(logits, -1).nan_to_num(0.0)
    return shares.unflatten(1, (case.kv_heads, case.group)).sum(2).log()


def assert_same_pages(ids: Tensor, expected: Tensor, ranks: Tensor) -> None:
    """Equal but for pages whose ranks are equal within rounding."""
    assert ids.shape == expected.shape
    for at in (ids != expected).any(-1).nonzero().tolist():
        got, want = ({p for p in row[tuple(at)].tolist() if p >= 0} for row in (ids, expected))
        assert len(got) == len(want), (at, ids[tuple(at)], expected[tuple(at)])
        swapped = ranks[tuple(at)][sorted(got ^ want)]
        assert swapped.max() - swapped.min() < 1e-4, (at, got, want, swapped)
