"""Page scores: how the keys of a page are summarised and how a query scores the summary.

Every algorithm is linear in its summary: ``score(q, page) = expand_query(q) . summarize(keys)``, with a summary of
``PARTS * D`` numbers a page and KV head. That makes scoring one small matrix product on any device.
"""

from typing import Protocol

from torch import Tensor

from . import cuboid, mean, quest


class PageScore(Protocol):
    """What a module of this folder provides."""

    NAME: str
    PARTS: int

    def summarize(self, keys: Tensor, present: Tensor) -> Tensor: ...

    def expand_query(self, q: Tensor) -> Tensor: ...


_ALGORITHMS: dict[str, PageScore] = {module.NAME: module for module in (cuboid, mean, quest)}


def names() -> tuple[str, ...]:
    """Names of the page scores, sorted."""
    return tuple(sorted(_ALGORITHMS))


def get(name: str) -> PageScore:
    """The page score called ``name``; raises ``KeyError`` for a name that is not one of :func:`names`."""
    return _ALGORITHMS[name]


def summary_width(name: str, head_dim: int) -> int:
    """Numbers stored a page and KV head: ``PARTS * head_dim``."""
    return get(name).PARTS * head_dim
