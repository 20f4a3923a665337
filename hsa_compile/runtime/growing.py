"""Growing KV buffers: ``torch.cat`` without the copy.

A cache that the model grows by concatenation is kept in a buffer with spare capacity, and the model gets a view of the
filled part as "the concatenated tensor". The next step's argument is that view, so it names its buffer by its storage.

The storage is token-major, ``[capacity, B, H, D]``, seen as ``[B, H, S, D]``: the strides do not depend on the
capacity, and one compiled graph serves every length.

Only the newest view may be appended to in place. An older view is a prefix that somebody may share: it is copied first,
unless it is the only one that is left, as after tokens were taken back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hsa_compile import compat

from .host_tier import new_host_tensor
from .state import OWNERS

_KEY = "growing"
_SPARE_TOKENS = 256


@dataclass
class _Buffer:
    """What is known of a storage of ours: its shape, and how far it is filled."""

    batch: int
    heads: int
    size: int
    capacity: int
    tip: int
    on_host: bool

    @property
    def strides(self) -> tuple[int, int, int, int]:
        return token_major_strides(self.batch, self.heads, self.size)


def _is_alone(view: Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether no other tensor sees the memory of ``view``, but for the one that it is a view of, which nobody has."""
    return compat.tensors_on(storage) == 1 + (view._base is not None)


def token_major_strides(batch: int, heads: int, size: int) -> tuple[int, int, int, int]:
    """Strides of a ``[B, H, S, D]`` view of token-major storage."""
    return heads * size, size, batch * heads * size, 1


def with_room_for(old: Tensor, new: int = 1, on_host: bool = False) -> Tensor:
    """A view ``[B, H, S + new, D]`` whose first S tokens are ``old``; the others are to be written.

    In place where ``old`` is the newest view of a buffer of ours, or the only one, with room left; otherwise in a new
    buffer with a quarter of spare capacity. With ``on_host`` the buffer is in host memory (:mod:`.host_tier`).

    Raises:
        HostMemoryError: there is too little; ``old`` is as it was.
    """
    batch, heads, tokens, size = old.shape
    storage = old.untyped_storage()
    buffer = OWNERS.peek(storage, _KEY)
    if (
        isinstance(buffer, _Buffer)
        and tokens <= buffer.capacity - new
        and (buffer.tip == tokens or _is_alone(old, storage))
        and (buffer.batch, buffer.heads, buffer.size) == (batch, heads, size)
        and buffer.on_host == on_host
        and old.storage_offset() == 0
        and old.stride() == buffer.strides
    ):
        buffer.tip = tokens + new
        return old.as_strided((batch, heads, tokens + new, size), buffer.strides, 0)
    capacity = tokens + max(_SPARE_TOKENS, tokens // 4)
    with torch.inference_mode(False):
        allocate = new_host_tensor if on_host and old.device.type == "cuda" else torch.empty
        store = allocate((capacity, batch, heads, size), dtype=old.dtype, device=old.device)
    with torch.no_grad():
        store[:tokens].permute(1, 2, 0, 3).copy_(old)
    buffer = _Buffer(batch, heads, size, capacity, tokens + new, on_host)
    OWNERS.of(store.untyped_storage())[_KEY] = buffer
    return store.as_strided(
        (batch, heads, tokens + new, size), token_major_strides(batch, heads, size), 0
    )
