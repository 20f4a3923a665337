"""Mean pooling: a page is represented by the mean of its keys.

The score is the dot product with that mean, ``score(q, page) = q . mean(keys)``, half the summary bytes of a box.
"""

from torch import Tensor

from ._page_score import PageKernel, PageScore


def summarize(keys: Tensor, present: Tensor) -> Tensor:
    """Mean of the present keys: keys ``[..., T, D]`` fp32, present ``[..., T, 1]`` bool -> ``[..., D]``."""
    return keys.masked_fill(~present, 0).sum(-2) / present.sum(-2)


def expand_query(q: Tensor) -> Tensor:
    """The query as it meets the summary: ``[..., D]`` unchanged."""
    return q


MEAN = PageScore(
    "mean",
    1,
    summarize,
    expand_query,
    PageKernel(summary="part_0 = tl.sum(tile, 0) / count", query="met = query"),
    mean_first=True,
)
