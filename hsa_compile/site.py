"""What the passes hand to each other: attention as it was found, its cache, and what was decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from . import algorithms, compat
from .policy import LayerPolicy


@dataclass(frozen=True)
class Where:
    """Where in the model an attention site stands."""

    index: int
    path: str
    module_class: str
    source: str
    """``file:line`` of the model's own code, or an empty string where the trace does not tell."""


@dataclass(frozen=True)
class Reject:
    """An attention site that is left exactly as the model wrote it, and why."""

    where: Where
    reason: str
    node: str


@dataclass(frozen=True)
class MaskTerm:
    """One contribution to the mask of the scores.

    kind: ``keep`` (boolean, true is attended), ``drop`` (boolean, true is set to ``value``), ``add`` (additive, times
    ``factor``), ``causal`` (``is_causal=True`` as the graph means it: top-left aligned; no node).
    """

    kind: Literal["keep", "drop", "add", "causal"]
    node: fx.Node | None = None
    factor: float = 1.0
    value: float = float("-inf")


@dataclass(frozen=True)
class Sink:
    """One more score a row, which takes its share of the softmax and has no value (gpt-oss; "off by one": zero).

    The score is ``factor`` times what ``node`` holds, ``[B or 1, Hq or 1, 1, 1]``, or times 1 where there is no node.
    ``first`` tells that it stands before the scores of the keys, not behind them.
    """

    node: fx.Node | None
    factor: float
    first: bool


@dataclass(frozen=True)
class Attention:
    """Softmax attention in a Dynamo graph, in canonical operands.

    ``out = softmax(cap(scale * q k^T) + mask) v``, with q ``[B, Hq, L, D]``, k ``[B, Hkv, S, D]`` and v
    ``[B, Hkv, S, Dv]``; repetition of KV heads has been looked through, query head h reads KV head h // (Hq // Hkv).
    ``anchor`` is the SDPA or softmax node, ``scores`` the node that reads the keys, ``out`` the one that reads the
    values and is replaced; what it holds is the result ``[B, Hq, L, Dv]`` permuted by ``out_dims`` (or,
    where it has three dimensions, with batch and heads merged into one). ``cap(s)`` is
    ``softcap * tanh(s / softcap)``, or s where ``softcap`` is 0. ``lse`` holds the log-sum-exp ``[B, Hq, L]`` to base 2
    of the masked scores, and is replaced too; None where nobody asks for it.
    """

    where: Where
    out: fx.Node
    anchor: fx.Node
    scores: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    scale: float
    masks: tuple[MaskTerm, ...]
    softcap: float = 0.0
    sink: Sink | None = None
    out_dims: tuple[int, ...] = (0, 1, 2, 3)
    lse: fx.Node | None = None

    @property
    def queries(self) -> int:
        """Query tokens, L."""
        return int(self.q.meta["example_value"].shape[2])


@dataclass(frozen=True)
class CacheUpdate:
    """How one cache tensor (keys or values) is written in this graph.

    kind: ``static`` (a graph input written in place), ``functional`` (a new tensor returned in its place), ``dynamic``
    (a graph input to which ``torch.cat`` appends) or ``fixed`` (a graph input that is only read). ``position`` is a
    node (tensor or SymInt), an int, or None for ``dynamic`` (the end) and ``fixed``. It counts along a dimension of the
    tensor that is written, ``along``: attention may read a part of that. ``form`` names the calls that write.
    ``tokens`` are written at once: at as many positions where the position is a tensor, else from it on. Where none
    are, ``write`` and ``new`` are the input itself.
    """

    kind: Literal["static", "functional", "dynamic", "fixed"]
    base: fx.Node
    write: fx.Node
    new: fx.Node
    position: fx.Node | int | None
    along: tuple[fx.Node, int]
    form: str
    tokens: int = 1

    @property
    def counts_from_end(self) -> bool:
        """Whether a negative position counts from the end of the cache, as it does in indexing and slicing."""
        return not self.form.startswith(("index_copy", "scatter", "cat", "only read"))


@dataclass(frozen=True)
class AttentionSite:
    """An attention with the cache that it reads: what can be rewritten."""

    attention: Attention
    keys: CacheUpdate
    values: CacheUpdate

    @property
    def where(self) -> Where:
        return self.attention.where


@dataclass(frozen=True)
class Place:
    """Which dimensions of a tensor are the rows of the batch and the cached tokens."""

    batch: int
    token: int


@dataclass(frozen=True)
class Region:
    """The part of a graph between cached tensors and the keys and values of attention, token by token.

    ``nodes`` compute each token from that token alone, in graph order; ``cached`` are the tensors that they read:
    graph inputs, or what a step made of them by writing its own token.
    """

    nodes: dict[fx.Node, Place]
    cached: dict[fx.Node, Place]
    kind: Literal["static", "dynamic"] = "static"


@dataclass(frozen=True)
class IndexScores:
    """Scores of a model's own indexer, ``sum_h weights_h * relu(scale * q_h . k_t)``, and what they are made of.

    q ``[B, S, H, D]``, k ``[B, T, D]``, weights ``[B, S, H]``; ``nodes`` compute the fp32 node ``out`` from them, and
    nothing else reads what is between.
    """

    out: fx.Node
    q: fx.Node
    k: fx.Node
    weights: fx.Node
    scale: float
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Choice:
    """The tokens that a model itself chose for each query: the indices of a top-k, different from one another.

    ``index`` ``[B, S, k]`` is made by ``topk``, and seen by the mask of attention alone; ``dims`` are where its
    dimensions are in that mask. ``masks`` is what the mask hides besides. ``nodes`` made the one of the other.
    """

    index: fx.Node
    topk: fx.Node
    dims: tuple[int, ...]
    masks: tuple[MaskTerm, ...]
    nodes: tuple[fx.Node, ...]
    scores: IndexScores | None = None

    @property
    def count(self) -> int | torch.SymInt:
        """Tokens chosen for a query, k."""
        return self.index.meta["example_value"].shape[-1]

    @property
    def most(self) -> int | str:
        """Tokens chosen of a long cache: where the count is the smaller of a number and the length, the number."""
        expression = compat.expression(self.count)
        numbers = [int(part) for part in (expression, *expression.args) if part.is_number]
        return numbers[0] if numbers else str(expression)


@dataclass(frozen=True)
class ChosenSite:
    """An attention to the tokens that the model's own indexer chose, over all that is cached.

    ``as_cached`` tells that keys and values are views of what is cached, and nothing is computed from it.
    """

    attention: Attention
    choice: Choice
    region: Region
    as_cached: bool

    @property
    def where(self) -> Where:
        return self.attention.where


@dataclass(frozen=True)
class ChosenPlan:
    """What becomes of such a site: ``sparse`` (no other token is read) or ``dense`` for a reason that is no fault."""

    site: ChosenSite
    policy: LayerPolicy
    decision: Literal["sparse", "dense"]
    note: str = ""


@dataclass(frozen=True)
class Lookahead:
    """How the query of a layer can be guessed one layer early.

    ``steps`` make it of ``stream``, the residual stream that enters the layer; the guess is made of ``earlier``, the
    stream after the attention of the layer before, or the one that enters that layer, right before ``anchor``.
    ``views`` lead from the caches to what attention reads of them, keys and values. ``behind`` are the modules that
    run between that and the layer's own attention.
    """

    stream: fx.Node
    earlier: fx.Node
    steps: tuple[fx.Node, ...]
    views: tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]
    anchor: fx.Node
    behind: tuple[str, ...]


@dataclass(frozen=True)
class TokenBudget:
    """Tokens that one query reads of a KV head, where the budget buys tokens and not pages.

    ``slots`` are the most there can be, with those that are always read; ``budget`` is bought, or ``fraction`` of what
    a row can attend, in units of 1 / 65536. Slots of 0 follow a length that varies.
    """

    slots: int
    budget: int
    fraction: int


@dataclass(frozen=True)
class LayerPlan:
    """What becomes of one site: ``sparse`` with these numbers, or ``dense`` for a reason that is no fault.

    ``pool_slots`` is 0 where the cache stays on its device; else pages of a KV head's pool, the last one for the tail.
    ``ahead`` is how many pages that just missed the selection are to be there for the next step. ``lookahead`` is how
    pages are fetched one layer early; ``no_lookahead`` why none are fetched ahead, where the policy asks for it.
    ``tokens`` is None where whole pages are read.
    """

    site: AttentionSite
    policy: LayerPolicy
    decision: Literal["sparse", "dense"]
    note: str = ""
    slots: int | torch.SymInt = 0
    budget_pages: int | torch.SymInt = 0
    fraction: int = 0
    pool_slots: int = 0
    ahead: int = 0
    lookahead: Lookahead | None = None
    no_lookahead: str = ""
    tokens: TokenBudget | None = None

    @property
    def means(self) -> tuple[Literal["keys", "values"], ...]:
        """What the mean of each page is kept of, beside the summaries that pages are scored by."""
        if not self.policy.estimates:
            return ()
        kept = algorithms.get(self.policy.score).mean_first
        return ("values",) if kept else ("keys", "values")

    @property
    def recent(self) -> int:
        """Last tokens whose pages are always read."""
        return recent_tokens(self.policy, self.site.attention.queries)

    @property
    def page_major(self) -> bool:
        """Whether strides of what is kept of pages are not to depend on how many there are."""
        read: torch.Tensor = self.site.attention.k.meta["example_value"]
        # A growing cache keeps its state where a graph for one length is followed by one for any.
        return self.site.keys.kind == "dynamic" or not isinstance(read.shape[2], int)


def recent_tokens(policy: LayerPolicy, queries: int) -> int:
    """The policy's; and of several query tokens at least as many, so that each reads the page that it is in itself."""
    return policy.recent if queries == 1 else max(policy.recent, queries)


@dataclass(frozen=True)
class SiteReport:
    """One attention site as ``explain`` shows it.

    decision: ``sparse`` (rewritten), ``dense`` (left by choice: policy, or a cache within the
    budget) or ``left`` (could not be rewritten). ``reason`` says why for the latter two. Bytes are
    those that one step reads, batch included, as sympy expressions in the cache length S;
    ``break_even`` is the length from which sparse reads less. ``prefetch`` tells what pages are fetched behind, or why
    none are fetched ahead where the policy asks for it. ``summaries`` is what a step reads to score pages, as a
    share of what dense attention reads, and ``candidates`` the keys of a first stage, in as many KV tokens.
    """

    index: int
    path: str
    module_class: str
    source: str
    decision: str
    reason: str = ""
    cache: str = ""
    policy: str = ""
    shapes: str = ""
    bytes_dense: str = ""
    bytes_sparse: str = ""
    break_even: int | None = None
    prefetch: str = ""
    summaries: float = 0.0
    candidates: float = 0.0
