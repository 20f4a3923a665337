"""Host memory in use: blocks, the tensors on them, and how many bytes that is."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from .host_region import Span


@dataclass(frozen=True)
class HostBytes:
    """Bytes of host memory that pools hold, each byte in one of ``in_use``, ``waiting`` and ``idle``."""

    in_use: int = 0
    """Of live blocks and tensors; of a growing block, what is committed. ``pinned + pageable``."""
    pinned: int = 0
    """In use and pinned."""
    pageable: int = 0
    """In use and not pinned: on a machine without a GPU, or where pinning failed."""
    waiting: int = 0
    """Freed, but work that was queued before may still read it."""
    idle: int = 0
    """Free, kept for later requests."""
    pinned_idle: int = 0
    """Idle and pinned."""

    def __add__(self, other: HostBytes) -> HostBytes:
        return HostBytes(
            *(getattr(self, f.name) + getattr(other, f.name) for f in fields(HostBytes))
        )


class Grows(Protocol):
    """The pool of a block."""

    device: torch.device

    def commit(self, span: Span, ranges: Iterable[tuple[int, int]]) -> int: ...


class HostBlock:
    """Host memory from a pool. It, and every tensor on it, keep the memory in use.

    Contents are undefined until written: memory is reused.
    """

    def __init__(self, pool: Grows, span: Span, storage: torch.UntypedStorage) -> None:
        self._pool, self._span, self._storage = pool, span, storage
        self.device = pool.device
        self.nbytes = span.nbytes
        """Whole OS pages."""

    @property
    def address(self) -> int:
        """The same for host and device."""
        return self._span.address

    @property
    def pinned(self) -> bool:
        return self._span.region.pinned

    @property
    def committed(self) -> int:
        """Bytes that are backed by memory; all of them unless the block grows."""
        return self._span.held

    def tensor(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        strides: Sequence[int] | None = None,
        offset: int = 0,
    ) -> Tensor:
        """A tensor on the pool's device, whose memory is this block. All tensors of a block share one storage.

        Args:
            shape: any shape.
            dtype: any dtype.
            strides: in elements; contiguous where None.
            offset: of the first element, in bytes; a multiple of the element size.

        Raises:
            ValueError: the tensor would reach outside of the block, or the offset is not aligned.
        """
        shape = tuple(shape)
        strides = _contiguous(shape) if strides is None else tuple(strides)
        if len(strides) != len(shape):
            raise ValueError(f"{len(shape)} sizes but {len(strides)} strides: {shape}, {strides}")
        if offset < 0 or offset % dtype.itemsize:
            raise ValueError(
                f"offset {offset} is not a multiple of {dtype.itemsize}, the size of {dtype}"
            )
        end = offset
        if 0 not in shape:
            last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            end += (last + 1) * dtype.itemsize
        if end > self.nbytes or any(stride < 0 for stride in strides):
            raise ValueError(
                f"shape {shape} with strides {strides} of {dtype} from byte {offset} "
                f"ends at byte {end}, outside of a block of {self.nbytes} bytes"
            )
        with torch.inference_mode(False), torch.no_grad():
            empty = torch.empty(0, dtype=dtype, device=self.device)
            return empty.set_(self._storage, offset // dtype.itemsize, shape, strides)  # type: ignore[call-overload]

    def commit(self, ranges: Iterable[tuple[int, int]]) -> int:
        """Back byte ranges of a growing block with memory; what already is stays as it is.

        Args:
            ranges: ``(first, end)`` bytes of the block; rounded outwards to the block's chunks.

        Returns:
            The bytes added, rounding included.

        Raises:
            ValueError: a range reaches outside of the block, or the block does not grow.
            HostMemoryError: the memory cannot be had; nothing was changed.
        """
        return self._pool.commit(self._span, ranges)


class _CudaBytes:
    """Owner of a span, seen by torch as bytes on a CUDA device; storages keep it alive."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "strides": None,
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def expose(span: Span, device: torch.device) -> tuple[object, torch.UntypedStorage]:
    """A storage on the span, and the object that lives exactly as long."""
    with torch.inference_mode(False):
        if device.type == "cuda":
            owner: Any = _CudaBytes(span.address, span.nbytes)
            return owner, torch.as_tensor(owner, device=device).untyped_storage()
        owner = (ctypes.c_char * span.nbytes).from_address(span.address)
        return owner, torch.frombuffer(owner, dtype=torch.uint8).untyped_storage()


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
