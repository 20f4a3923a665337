"""Quest boxes: the elementwise minimum and maximum of a page's keys (Tang et al., 2024, arXiv:2406.10774).

For query ``q`` and a page with bounds ``lo`` and ``hi`` the score is the largest dot product that any key in the
box could reach::

    score(q, page) = sum_d max(q_d * lo_d, q_d * hi_d) = min(q, 0) . lo + max(q, 0) . hi
"""

import torch
from torch import Tensor

from ._page_score import PageKernel, PageScore


def summarize(keys: Tensor, present: Tensor) -> Tensor:
    """Bounds of the present keys: keys ``[..., T, D]`` fp32, present ``[..., T, 1]`` bool -> ``[..., 2 * D]``."""
    lo = keys.masked_fill(~present, float("inf")).amin(-2)
    hi = keys.masked_fill(~present, float("-inf")).amax(-2)
    return torch.cat((lo, hi), -1)


def expand_query(q: Tensor) -> Tensor:
    """The query as it meets the summary: ``[..., D]`` -> ``[..., 2 * D]``."""
    return torch.cat((q.clamp(max=0), q.clamp(min=0)), -1)


QUEST = PageScore(
    "quest",
    2,
    summarize,
    expand_query,
    PageKernel(
        # A page without attendable tokens is summarised as zeros.
        summary="""
part_0 = tl.where(word != 0, tl.min(tl.where(read, tile, float("inf")), 0), 0.0)
part_1 = tl.where(word != 0, tl.max(tl.where(read, tile, float("-inf")), 0), 0.0)
""",
        query="met = tl.minimum(query, 0.0) if part == 0 else tl.maximum(query, 0.0)",
    ),
    "Quest (Tang et al., 2024, arXiv:2406.10774)",
)
