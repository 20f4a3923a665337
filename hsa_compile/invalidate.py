"""Telling that a cache was written where torch does not tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from hsa_compile.runtime.state import OWNERS, PageState


def invalidate(*caches: Any) -> int:
    """Forget what is known of the content of caches: the next step summarises every page anew and loads its pages anew.

    Only needed after an edit of earlier tokens that torch does not count: through ``tensor.data``, through NumPy or
    another library that shares the memory, or in place under ``torch.inference_mode``. All other writes are noticed.

    Args:
        caches: tensors of keys or values (any view of them), modules (their buffers), Hugging Face caches, and lists,
            tuples and mappings of these; without any, all caches that are known.

    Returns:
        How many summaries (with their pools) were reset; 0 where no compiled step has met the caches yet.

    Raises:
        TypeError: an argument is nothing of these; nothing was reset.
    """
    states = [state for state in OWNERS.states() if isinstance(state, PageState)]
    if caches:
        pointers = {
            held.untyped_storage().data_ptr() for cache in caches for held in _tensors(cache)
        }
        states = [state for state in states if pointers & state.memory]
    for state in states:
        state.reset()
    return len(states)


def _tensors(held: Any) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, nn.Module):
        yield from held.buffers()
    elif isinstance(held, Mapping):
        for value in held.values():
            yield from _tensors(value)
    elif isinstance(held, (list, tuple)):
        for value in held:
            yield from _tensors(value)
    elif isinstance(getattr(held, "layers", None), (list, tuple)):
        for layer in held.layers:
            yield from (value for value in vars(layer).values() if isinstance(value, Tensor))
    elif hasattr(held, "self_attention_cache"):  # an encoder-decoder cache is two
        yield from _tensors([held.self_attention_cache, held.cross_attention_cache])
    else:
        raise TypeError(
            "invalidate takes tensors, modules (their buffers), Hugging Face caches, and lists, tuples and mappings "
            f"of these, not {type(held).__name__}"
        )
