"""A Hugging Face static cache that is made in host memory: see :class:`HostCache`.

A prefill that is not compiled never reads the copy in host memory while it can be avoided: attention gets the new keys
and values as they are, and what earlier calls wrote is read back once a layer. The copy is written beside the
computation (:mod:`hsa_compile.runtime.offload`). When a layer writes, the layers before it are joined, so that one
layer's keys and values are held on the device at a time; the last layer joins itself too. From then on the current
stream is ordered after every write, and what reads next, compiled by whom it may be, needs to know of nothing. A call
that broke off between two layers leaves a write that is not joined; whatever uses the cache next does it: ``keys`` and
``values`` of a layer, every method here, and every step of this package.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

try:
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer
except ImportError as missing:
    raise ImportError(
        "hsa_compile.HostCache is a cache of transformers 5, which cannot be imported: "
        f"{missing}. Install it with: pip install 'hsa-compile[transformers]'"
    ) from missing

from hsa_compile import compat
from hsa_compile.errors import CacheError
from hsa_compile.runtime.host_tier import new_host_tensor
from hsa_compile.runtime.offload import join_all, writer
from hsa_compile.runtime.state import version_of

_WHOLE = 0


class HostLayer(StaticLayer):
    """A layer with full attention: keys ``[B, H, max_cache_len, D]`` and values, tensors of the device in host memory.

    Single tokens, and everything that is compiled or captured into a CUDA graph, are the parent's affair.
    """

    is_croppable = True
    max_cache_len: int

    def __init__(self, max_cache_len: int) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._read: tuple[int | None, int] | None = None
        """Version and value of ``cumulative_length`` as :meth:`HostCache.update` read it for this call."""
        super().__init__(max_cache_len)

    @property
    def keys(self) -> Tensor | None:
        _join()
        return self._keys

    @keys.setter
    def keys(self, held: Tensor | None) -> None:
        self._keys = held

    @property
    def values(self) -> Tensor | None:
        _join()
        return self._values

    @values.setter
    def values(self, held: Tensor | None) -> None:
        self._values = held

    @torch.compiler.disable(
        reason="HostCache allocates host memory: call cache.early_initialization before a compiled prefill"
    )
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for keys ``[B, H, N, D]`` and values ``[B, H, N, Dv]``, whose tokens are going to be written first.

        Raises:
            HostMemoryError: there is too little host memory; the layer is as it was.
        """
        self._allocate(key_states, value_states)
        _join()

    def _allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        """What is not written at once is set to zero: whoever reads masked tokens must not meet a NaN."""
        written = 0 if int(self.cumulative_length) else key_states.shape[-2]
        keys, values = (
            new_host_tensor(
                (*held.shape[:2], self.max_cache_len, held.shape[-1]), held.dtype, held.device
            )
            for held in (key_states, value_states)
        )
        capacity, self.max_cache_len = self.max_cache_len, 0
        try:
            super().lazy_initialization(key_states, value_states)  # all but the memory
        finally:
            self.max_cache_len = capacity
        for part in (keys, values):
            compat.mark_static_address(part)
        self._keys, self._values = keys, values

        def clear() -> None:
            with torch.no_grad():
                keys[:, :, written:].zero_()
                values[:, :, written:].zero_()

        writer(keys.device).run(clear)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys ``[B, H, N, D]`` and values, and return what to attend.

        Returns:
            Keys and values of the tokens so far, those of this call included: what was given where the layer was
            empty, else tensors of exactly that length. Of one token, and in compiled code, the whole cache.

        Raises:
            CacheError: another batch size, or more tokens than there is room for; nothing was written.
            HostMemoryError: there is too little host memory; nothing was written.
        """
        if _is_traced():
            return super().update(key_states, value_states, *args, **kwargs)
        self._check(key_states)
        _join()
        start = self._take_length()
        if start + key_states.shape[-2] > self.max_cache_len:
            raise CacheError(
                f"{key_states.shape[-2]} tokens do not fit behind the {start} that a HostCache of {self.max_cache_len} "
                "tokens holds; nothing was written: make it longer with max_cache_len"
            )
        if key_states.shape[-2] <= 1:
            return super().update(key_states, value_states, *args, **kwargs)
        return self._prefill(start, key_states, value_states)

    def _check(self, new_keys: Tensor) -> None:
        if not self.is_initialized:
            return
        if new_keys.shape[0] != self.batch_size:
            raise CacheError(
                f"this HostCache holds a batch of {self.batch_size} and was given one of {new_keys.shape[0]}: "
                "it keeps the batch size of its first call; make a new cache for another"
            )
        if new_keys.dtype != self._keys.dtype:  # type: ignore[union-attr]
            raise CacheError(
                f"this HostCache holds {self._keys.dtype} and was given {new_keys.dtype}: make a new cache"  # type: ignore[union-attr]
            )

    def _prefill(self, start: int, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        length = new_keys.shape[-2]
        end = start + length
        if not self.is_initialized:
            self._allocate(new_keys, new_values)
            if start:
                _join()
        keys, values = self._keys, self._values
        assert keys is not None and values is not None
        attended = _behind(keys, values, start, new_keys, new_values)

        def write() -> None:
            with torch.no_grad():
                keys[:, :, start:end].copy_(new_keys)
                values[:, :, start:end].copy_(new_values)

        writer(keys.device).run(write, new_keys, new_values)
        self.cumulative_length.add_(length)
        return attended

    def _take_length(self) -> int:
        """How many tokens are held, from what was read for the whole cache where that is still so."""
        read, self._read = self._read, None
        if read is not None and read[0] == version_of(self.cumulative_length):
            return read[1]
        return int(self.cumulative_length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what :meth:`update` will return for ``query_length`` tokens."""
        if query_length <= 1 or _is_traced():
            return super().get_mask_sizes(query_length)
        return int(self.cumulative_length) + query_length, 0

    def reset(self) -> None:
        self._read = None
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens, a negative number; the memory is not touched."""
        if tokens_to_remove > 0:
            raise CacheError(
                f"crop takes a negative number, how many tokens to remove, not {tokens_to_remove}"
            )
        _join()
        held = int(self.cumulative_length)
        if -tokens_to_remove > held:
            raise CacheError(
                f"crop({tokens_to_remove}) removes more than the {held} tokens that are held"
            )
        self.cumulative_length.add_(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` of the batch becomes what row ``beam_idx[i]`` was, in place and one head at a time.

        Raises:
            CacheError: not as many rows as the cache has; nothing was changed.
        """
        if not self.is_initialized:
            return
        if beam_idx.shape != (self.batch_size,):
            raise CacheError(
                f"a HostCache with a batch of {self.batch_size} keeps it: it cannot be reordered to "
                f"{list(beam_idx.shape)} rows"
            )
        length, rows = int(self.cumulative_length), beam_idx.to(self.device)
        for held in (self.keys, self.values):
            for head in range(held.shape[1]):  # type: ignore[union-attr]
                part = held[:, head, :length]  # type: ignore[index]
                part.copy_(part.index_select(0, rows))

    def __deepcopy__(self, memo: dict[int, Any]) -> HostLayer:
        """The copy is in host memory too."""
        _join()
        twin = type(self)(self.max_cache_len)
        memo[id(self)] = twin
        for name, held in vars(self).items():
            if name in ("_keys", "_values") and held is not None:
                copied = new_host_tensor(held.shape, held.dtype, held.device)
                with torch.no_grad():
                    copied.copy_(held)
                compat.mark_static_address(copied)
            else:
                copied = copy.deepcopy(held, memo)
            setattr(twin, name, copied)
        return twin


class HostCache(StaticCache):
    """A ``transformers.StaticCache`` whose keys and values are made in host memory, for ``placement="host"``.

    They are never on the device as a whole, not in prefill either. Layers with a sliding window, and other layers that
    transformers has kinds of their own for, are as in a ``StaticCache``. On a CPU there is one memory, and all else is
    the same.

    Args:
        config: the model's configuration.
        max_cache_len: how many tokens a sequence may have.

    Raises:
        CacheError: this release of transformers keeps static caches in another way, or no layer has full attention.
    """

    layers: list[Any]

    def __init__(self, config: Any, max_cache_len: int) -> None:
        if type(max_cache_len) is not int or max_cache_len < 1:
            raise CacheError(
                f"max_cache_len {max_cache_len!r} is not valid; valid: an int >= 1, in tokens"
            )
        if not hasattr(config, "get_text_config"):
            raise CacheError(
                f"config {type(config).__name__!r} is not valid; valid: the configuration of a transformers model, "
                "such as model.config"
            )
        super().__init__(config=config, max_cache_len=max_cache_len)
        self.layers = [
            HostLayer(layer.max_cache_len) if type(layer) is StaticLayer else layer
            for layer in self.layers
        ]
        hosted = [layer for layer in self.layers if isinstance(layer, HostLayer)]
        if not hosted:
            raise CacheError(
                "no layer of this model has a static cache with full attention, so there is nothing to keep in host "
                "memory: use a StaticCache"
            )
        if not isinstance(getattr(hosted[0], "cumulative_length", None), Tensor):
            raise CacheError(
                "this release of transformers does not count tokens in its static caches, as HostCache needs: "
                "install a newer one"
            )
        self._first, self._last = self.layers.index(hosted[0]), self.layers.index(hosted[-1])
        self._masked: int | None = None
        """How many tokens the mask of the next call shows, ``_WHOLE`` for the whole cache; None where nobody asked."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """What the layer returns, see :meth:`HostLayer.update`.

        A compiled call of several tokens gets what its mask shows: the whole cache where the mask is made in the
        compiled code as well, else (``generate`` makes it beforehand) the tokens so far.
        """
        hosted = isinstance(self.layers[layer_idx], HostLayer)
        if hosted and layer_idx == self._first and not _is_traced():
            self._read_lengths()
        several = hosted and key_states.shape[-2] > 1
        if not several:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        traced, masked = _is_traced(), self._masked
        if (
            not traced and masked == _WHOLE
        ):  # the mask is of compiled code, which ended before this layer
            _join()
            held = StaticLayer.update(self.layers[layer_idx], key_states, value_states)
        else:
            held = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            if traced and masked is not None and masked != _WHOLE:
                start = masked - key_states.shape[-2]
                held = _behind(held[0], held[1], start, key_states, value_states)
        if layer_idx == self._last:
            self._masked = None
            if not traced:
                join_all()
        return held

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of what :meth:`update` will return for ``query_length`` tokens."""
        sizes = super().get_mask_sizes(query_length, layer_idx)
        if query_length > 1 and isinstance(self.layers[layer_idx], HostLayer):
            self._masked = _WHOLE if _is_traced() else sizes[0]
        return sizes

    def _read_lengths(self) -> None:
        """Read how many tokens the layers hold, for all at once: each reading waits for the device."""
        devices: dict[torch.device, list[HostLayer]] = {}
        for layer in self.layers:
            if isinstance(layer, HostLayer):
                devices.setdefault(layer.cumulative_length.device, []).append(layer)
        for layers in devices.values():
            lengths = torch.stack([layer.cumulative_length for layer in layers]).tolist()
            for layer, length in zip(layers, lengths, strict=True):
                layer._read = (version_of(layer.cumulative_length), length)

    def reset(self) -> None:
        self._masked = None
        super().reset()

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse("batch_repeat_interleave")

    def batch_select_indices(self, indices: Tensor) -> None:
        self._refuse("batch_select_indices")

    def _refuse(self, method: str) -> None:
        raise CacheError(
            f"{method} would change the batch size of a HostCache, whose tensors stay the same: make a new cache"
        )


def _behind(
    keys: Tensor, values: Tensor, start: int, new_keys: Tensor, new_values: Tensor
) -> tuple[Tensor, Tensor]:
    """The first ``start`` tokens of the cache with the new ones behind them."""
    if start == 0:
        return new_keys, new_values
    return (
        torch.cat((keys[:, :, :start], new_keys), 2),
        torch.cat((values[:, :, :start], new_values), 2),
    )


def _is_traced() -> bool:
    """Whether the call becomes part of a graph, where nothing can be read from the device."""
    return torch.compiler.is_compiling() or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )


def _join() -> None:
    if not torch.compiler.is_compiling():
        join_all()
