"""``hsa::join_prefetch``: what is queued after this waits for all copies that run beside.

    held    memory that the copies use, not to be used for anything else before
    mark    any tensor that is read or written afterwards
    counts  counters that a copy writes, if any, which are read afterwards

``mark`` and ``counts`` are declared to be written, and are not: so the op stays where it is, before what must wait for
it, and is not taken for one without a use.
"""

from torch import Tensor

from hsa_compile.runtime import streams

from ._library import define

define("join_prefetch(Tensor[] held, Tensor(a!) mark, Tensor(b!)? counts=None) -> ()")


def join_prefetch(held: list[Tensor], mark: Tensor, counts: Tensor | None = None) -> None:
    if mark.device.type == "cuda":
        streams.join(mark.device)


def fake(held: list[Tensor], mark: Tensor, counts: Tensor | None = None) -> None:
    return None
