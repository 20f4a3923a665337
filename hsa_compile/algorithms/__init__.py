"""Page scores: how the keys of a page are summarised and how a query scores the summary.

Every algorithm is linear in its summary: ``score(q, page) = expand_query(q) . summarize(keys)``, with a summary of
``parts * D`` numbers a page and KV head. That makes scoring one small matrix product on any device.
"""

import uuid
from collections.abc import Iterable

from ._page_score import PageKernel, PageScore
from .cuboid import CUBOID
from .heavy_hitters import HEAVY_HITTERS
from .mean import MEAN
from .quest import QUEST
from .streaming import STREAMING

__all__ = [
    "PageKernel",
    "PageScore",
    "covered_width",
    "get",
    "identity",
    "names",
    "register",
    "summary_width",
]

_ALGORITHMS: dict[str, PageScore] = {
    score.name: score for score in (CUBOID, HEAVY_HITTERS, MEAN, QUEST, STREAMING)
}
_OWN: dict[str, str] = {}
"""Those that users registered, and what stands for their code in compile caches."""


def names() -> tuple[str, ...]:
    """Names of the page scores, sorted."""
    return tuple(sorted(_ALGORITHMS))


def get(name: str) -> PageScore:
    """The page score called ``name``; raises ``KeyError`` for a name that is not one of :func:`names`."""
    return _ALGORITHMS[name]


def register(score: PageScore) -> None:
    """Make a page score known by its name, for this process. Registering the same one again changes nothing.

    Raises:
        HsaError: see :meth:`PageScore.check`; a name stays that of what it was registered for.
    """
    if _ALGORITHMS.get(score.name) == score:
        return
    score.check(("dense", *names(), "three_level"))
    _ALGORITHMS[score.name] = score
    # Nobody can tell whether two functions of two processes are the same code, so caches on disk never answer for it.
    _OWN[score.name] = uuid.uuid4().hex


def identity(used: Iterable[str]) -> str:
    """What a compile-cache key must hold of these algorithms, beside the sources of this package."""
    return " ".join(f"{name}={_OWN[name]}" for name in sorted(set(used)) if name in _OWN)


def summary_width(name: str, head_dim: int) -> int:
    """Numbers stored a page and KV head: ``parts * head_dim``."""
    return get(name).parts * head_dim


def covered_width(name: str) -> int:
    """Numbers that ``covered`` holds a page and KV head (``hsa::summarize``): one more where shares are accumulated."""
    return 3 if get(name).accumulates else 2
