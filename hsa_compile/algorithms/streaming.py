"""Sinks and a window: the first tokens and the last ones (StreamingLLM, Xiao et al., 2023, arXiv:2309.17453).

Nothing is kept of a page and nothing is scored: of two pages the later one ranks first, so that the budget buys the
pages of the sinks and, with what is left of it, those of the most recent tokens. Everything between is never read.
"""

from torch import Tensor

from ._page_score import PageKernel, PageScore


def summarize(keys: Tensor, present: Tensor) -> Tensor:
    """Nothing: keys ``[..., T, D]``, present ``[..., T, 1]`` -> ``[..., 0]``."""
    return keys[..., 0, :0]


def expand_query(q: Tensor) -> Tensor:
    """Nothing: ``[..., D]`` -> ``[..., 0]``."""
    return q[..., :0]


STREAMING = PageScore(
    "streaming",
    0,
    summarize,
    expand_query,
    PageKernel(summary="", query=""),
    "StreamingLLM (Xiao et al., 2023, arXiv:2309.17453)",
)
