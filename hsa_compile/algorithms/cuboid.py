"""Cuboids: a page's mean key and its mean absolute deviation (ArkVale, Chen et al., 2024, "cuboid-mean").

The box is ``centre +- deviation``; the score is the largest dot product inside it::

    score(q, page) = q . centre + |q| . deviation
"""

import torch
from torch import Tensor

from ._page_score import PageKernel, PageScore


def summarize(keys: Tensor, present: Tensor) -> Tensor:
    """Centre and deviation: keys ``[..., T, D]`` fp32, present ``[..., T, 1]`` bool -> ``[..., 2 * D]``."""
    count = present.sum(-2)
    centre = keys.masked_fill(~present, 0).sum(-2) / count
    deviation = (keys - centre.unsqueeze(-2)).abs().masked_fill(~present, 0).sum(-2) / count
    return torch.cat((centre, deviation), -1)


def expand_query(q: Tensor) -> Tensor:
    """The query as it meets the summary: ``[..., D]`` -> ``[..., 2 * D]``."""
    return torch.cat((q, q.abs()), -1)


CUBOID = PageScore(
    "cuboid",
    2,
    summarize,
    expand_query,
    PageKernel(
        summary="""
part_0 = tl.sum(tile, 0) / count
part_1 = tl.sum(tl.where(read, tl.abs(tile - part_0[None, :]), 0.0), 0) / count
""",
        query="met = tl.abs(query) if part == 1 else query",
    ),
    "ArkVale (Chen et al., 2024)",
    mean_first=True,
)
