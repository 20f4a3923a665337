"""What a page score is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hsa_compile.errors import HsaError, listed

MOST_PARTS = 4


@dataclass(frozen=True)
class PageKernel:
    """The same two functions as lines of Triton, which become part of the kernels.

    Attributes:
        summary: lines that assign ``part_0``, ``part_1``, ... ``[DIM_PAD]`` fp32, from ``tile [PAGE_SIZE, DIM_PAD]``
            fp32 (zero where nothing was read), ``read`` (which numbers of it count, broadcastable to the tile) and
            ``count`` (how many tokens, at least 1). What they give for a page without tokens must be finite; ``word``
            is 0 for such a page.
        query: lines that assign ``met``, what meets part ``part`` (a constant) of a summary, from ``query`` fp32.
    """

    summary: str
    query: str


@dataclass(frozen=True)
class PageScore:
    """A way to score pages that is linear in what is kept of a page.

        score(q, page) = expand_query(q) . summarize(keys of the page)

    Attributes:
        name: what policies call it.
        parts: numbers kept a channel; a summary is ``parts * D`` numbers a page and KV head. With 0 nothing is kept
            or scored, and of two pages the later one ranks first.
        summarize: keys ``[..., T, D]`` fp32, present ``[..., T, 1]`` bool -> ``[..., parts * D]``, part by part. It
            works channel by channel: what it makes of one does not depend on the others.
        expand_query: ``[..., D]`` -> ``[..., parts * D]``.
        kernel: the same for GPUs; without it, layers on a GPU are left as they are.
        source: the paper or system that it comes from.
        accumulates: pages are ranked by what they had of the softmax in all steps so far, not in this one alone.
        mean_first: part 0 of a summary is the mean of the keys.
    """

    name: str
    parts: int
    summarize: Callable[[Tensor, Tensor], Tensor]
    expand_query: Callable[[Tensor], Tensor]
    kernel: PageKernel | None = None
    source: str = ""
    accumulates: bool = False
    mean_first: bool = False

    def check(self, taken: tuple[str, ...]) -> None:
        """Refuse what the ops could not use.

        Raises:
            HsaError: the name is taken or none, or the functions return another shape than they should, something
                else than numbers, or mix channels.
        """
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise HsaError(
                f"name {self.name!r} is not valid; valid: letters, digits and underscores"
            )
        if self.name in taken:
            raise HsaError(f"name {self.name!r} is taken; valid: a name other than {listed(taken)}")
        if type(self.parts) is not int or not 0 < self.parts <= MOST_PARTS:
            raise HsaError(
                f"{self.name}: parts {self.parts!r} is not valid; valid: an int from 1 to {MOST_PARTS}"
            )
        generator = torch.Generator().manual_seed(0)
        keys = torch.randn(2, 3, 8, 6, generator=generator)
        present = torch.rand(2, 3, 8, 1, generator=generator) < 0.7
        present[..., 0, :] = True
        summary = self._made("summarize", self.summarize(keys, present), (2, 3, self.parts * 6))
        self._made("expand_query", self.expand_query(keys[..., 0, :]), (2, 3, self.parts * 6))
        apart = [self.summarize(keys[..., i : i + 1], present) for i in range(6)]
        if not torch.allclose(torch.stack(apart, -1).flatten(-2), summary, rtol=1e-4, atol=1e-5):
            raise HsaError(
                f"{self.name}: summarize mixes channels; valid: a function of each channel of the keys alone, "
                "since pages are summarised channel by channel"
            )

    def _made(self, what: str, made: object, shape: tuple[int, ...]) -> Tensor:
        if not isinstance(made, Tensor) or tuple(made.shape) != shape:
            got = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
            raise HsaError(
                f"{self.name}: {what} returned {got} for keys [2, 3, 8, 6]; "
                f"valid: {list(shape)}, which is parts * D numbers, part by part"
            )
        if not made.isfinite().all():
            raise HsaError(
                f"{self.name}: {what} returned numbers that are not finite; valid: finite ones"
            )
        return made
