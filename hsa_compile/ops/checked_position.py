"""``hsa::checked_position``: a readable error before a static cache is written past its end.

    position [1] or [] int64, capacity (tokens)  ->  the same position

Compiled indexing reports an overrun late and without a name, or not at all. On a CPU the rewrite
passes the position of a static cache through this op before the model's own write. On a GPU looking
at the position would wait for the device, so there the write's own device-side assertion stands.
"""

from torch import Tensor
from torch.types import IntLikeType

from hsa_compile.errors import CacheError

from ._library import define

define("checked_position(Tensor position, SymInt capacity) -> Tensor")


def checked_position(position: Tensor, capacity: int) -> Tensor:
    """Raises ``CacheError`` where a position is outside ``[0, capacity)``."""
    at = int(position)
    if not 0 <= at < capacity:
        raise CacheError(
            f"token {at} does not fit into a static KV cache of {capacity} tokens; nothing was written: "
            f"make the cache longer (max_cache_len >= {at + 1}) or start a new one"
        )
    return position.clone()


def fake(position: Tensor, capacity: IntLikeType) -> Tensor:
    return position.new_empty(position.shape)
