"""A readable error before a static cache on a GPU is written past its end.

Where the next token goes is a number on the device, and reading it waits for all that is queued. A step moves it by
as many tokens as it writes, so it is read only when that is not known to be enough: at the first step of a cache, after
the cache was written by others, and once counting on arrives at the end. A position that jumps ahead while the cache is
left alone is not foreseen; there the device-side assertion of the write itself stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hsa_compile.ops.checked_position import refuse_overrun

from .state import PageState


@dataclass(frozen=True)
class OverrunCheck:
    """How to find the position of a cache's write, and what it must not pass.

    ``position`` computes it from the ``arguments`` (indices) of a call, and ``capacity`` takes tokens from all of them;
    with ``from_end`` a negative position counts from the end. A step writes ``tokens``.
    """

    position: Callable[..., Tensor]
    arguments: tuple[int, ...]
    capacity: Callable[[Sequence[object]], int]
    from_end: bool
    tokens: int = 1

    def __call__(self, state: PageState, arguments: Sequence[object]) -> None:
        """Raises ``CacheError`` where the step would write past the end; the cache is as it was."""
        expected = None if state.position is None else state.position + self.tokens
        capacity = self.capacity(arguments)
        if expected is None or expected >= capacity:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return  # a graph of the user's own: nothing can be read while it is captured
            state.position = None
            with torch.no_grad():
                held = self.position(*(arguments[i] for i in self.arguments))
                lowest, highest = (int(bound) for bound in torch.aminmax(held.reshape(-1)))
            for at in (lowest, highest):
                refuse_overrun(at, capacity, self.from_end)
            expected = highest if lowest >= 0 else highest + capacity
        state.position = expected
