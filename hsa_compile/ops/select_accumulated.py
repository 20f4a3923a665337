"""``hsa::select_accumulated``: as ``hsa::select``, but pages are ranked by what they had of the softmax so far.

    covered [B, Hkv, P, 3] int64  as ``hsa::summarize`` left it; the last number is written

The last number of a page is its accumulated share, the bits of a double. In every step, for every page, read or not,

    share(p) = mean over the group's query heads of the softmax over pages of ``scale * s_h`` (with its bias), fp32
    acc(p)   = decay * acc(p) + share(p)

and pages are ranked by ``acc``, rounded to the precision of the query but at least fp32. All else is the rule of
``hsa::select``. Shares are those that the page scores estimate: what attention itself finds is known of the pages read
alone, and a page that is not read could never gain. ``hsa::summarize`` sets the number of every page that it summarises
anew to zero, so that it never outlives the tokens that it is about, and the page that is written into has none.

``hsa::accumulate`` is the second line alone, and returns the ranks.
"""

import torch
from torch import Tensor
from torch.types import IntLikeType

from .. import compat
from . import aten
from ._library import define
from .select import fake as fake_select
from .summarize import kv_head_words

define(
    "select_accumulated(Tensor q, Tensor summary, Tensor bits, Tensor(a!) covered, float decay, float scale, "
    "str algorithm, int page_size, SymInt slots, SymInt budget_pages, int fraction, int sink, int recent, "
    "str group_reduce, int more=0, Tensor? bias=None) -> (Tensor ids, Tensor counts)"
)
define("accumulate(Tensor share, Tensor(a!) covered, float decay) -> Tensor")


def accumulate(share: Tensor, covered: Tensor, decay: float) -> Tensor:
    """``share [B, Hkv, P]`` into ``covered``; returns the ranks, in its dtype."""
    total = covered.select(-1, 2).view(torch.float64)
    total.mul_(decay).add_(share)
    return total.to(share.dtype, memory_format=torch.contiguous_format, copy=True)


def select_accumulated(
    q: Tensor,
    summary: Tensor,
    bits: Tensor,
    covered: Tensor,
    decay: float,
    scale: float,
    algorithm: str,
    page_size: int,
    slots: IntLikeType,
    budget_pages: IntLikeType,
    fraction: int,
    sink: int,
    recent: int,
    group_reduce: str,
    more: int = 0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """PyTorch implementation, and what Inductor compiles on a CPU."""
    batch, kv_heads = summary.shape[:2]
    mass = aten.page_ranks(q, summary, bits, scale, algorithm, group_reduce, bias).exp()
    rank = torch.ops.hsa.accumulate(mass / (q.shape[1] // kv_heads), covered, decay)
    # Ranks that are known are scores of one head a KV head, for a query of one.
    one, words = rank.new_ones((batch, kv_heads, 1, 1)), kv_head_words(bits, kv_heads)
    rule = (page_size, slots, budget_pages, fraction, sink, recent)
    return torch.ops.hsa.select(one, rank.unsqueeze(-1), words, 1.0, "mean", *rule, "max", more)


def decomposed(q: Tensor, *rest: object) -> object:
    """For Inductor on a CPU; on other devices the op stays whole, for a lowering."""
    return select_accumulated(q, *rest) if q.device.type == "cpu" else NotImplemented  # type: ignore[arg-type]


def fake(
    q: Tensor,
    summary: Tensor,
    bits: Tensor,
    covered: Tensor,
    decay: float,
    scale: float,
    algorithm: str,
    page_size: int,
    slots: IntLikeType,
    budget_pages: IntLikeType,
    fraction: int,
    sink: int,
    recent: int,
    group_reduce: str,
    more: int = 0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rule = (budget_pages, fraction, sink, recent, group_reduce)
    return fake_select(q, summary, bits, scale, algorithm, page_size, slots, *rule, more)


def fake_accumulate(share: Tensor, covered: Tensor, decay: float) -> Tensor:
    return share.new_empty(share.shape)


compat.decompose_when_functionalised(torch.ops.hsa.select_accumulated.default, decomposed)
