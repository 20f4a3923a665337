"""``hsa::checked_position``: a readable error before a static cache is written past its end.

    position [N] or [] int64, capacity (tokens), from_end  ->  the same position

Every one of N positions is looked at. With ``from_end`` a negative position is one that indexing counts from the end of
the cache.

Compiled indexing reports an overrun late and without a name, or not at all. On a CPU the rewrite
passes the position of a static cache through this op before the model's own write. On a GPU looking
at the position would wait for the device; there the runtime looks before the steps that need it
(``hsa_compile.runtime.overrun``).
"""

from torch import Tensor
from torch.types import IntLikeType

from hsa_compile.errors import CacheError

from ._library import define

define("checked_position(Tensor position, SymInt capacity, bool from_end) -> Tensor")


def checked_position(position: Tensor, capacity: int, from_end: bool) -> Tensor:
    """Raises ``CacheError`` where a position is outside ``[0, capacity)`` (or ``[-capacity, capacity)``)."""
    for at in position.reshape(-1).tolist():
        refuse_overrun(at, capacity, from_end)
    return position.clone()


def refuse_overrun(at: int, capacity: int, from_end: bool) -> None:
    """Raises ``CacheError`` as above."""
    if not (-capacity if from_end else 0) <= at < capacity:
        raise CacheError(
            f"token {at} does not fit into a static KV cache of {capacity} tokens; nothing was written: "
            f"make the cache longer (max_cache_len >= {at + 1}) or start a new one"
        )


def fake(position: Tensor, capacity: IntLikeType, from_end: bool) -> Tensor:
    return position.new_empty(position.shape)
