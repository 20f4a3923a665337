"""Static caches in host memory: the storage of a tensor is swapped, and it stays the tensor that it is.

The tensor keeps its shape, strides, device and guards; what it reads and writes is pinned memory of the host. Eager
code that touches it stays right, over the bus. What was rewritten reads it page by page (``hsa_compile.ops.fetch``).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from hsa_compile import compat

from .state import OWNERS

_KEY = "host tier"


def move_to_host(tensor: Tensor) -> bool:
    """Move the memory of a CUDA tensor to the host, once; tensors of other devices are left as they are.

    Memory that other tensors share stays where it is, with a warning: they would be cut off from later writes. Results
    are the same.

    Returns:
        Whether the tensor is in host memory.

    Raises:
        HostMemoryError: there is too little; nothing was changed.
    """
    if tensor.device.type != "cuda":
        return tensor.device.type == "cpu"
    storage = tensor.untyped_storage()
    known = OWNERS.peek(storage, _KEY)
    if known is not None:
        return known is True
    if tensor._base is not None or compat.storage_is_shared(storage):
        OWNERS.of(storage)[_KEY] = False
        warnings.warn(
            f"a KV cache {list(tensor.shape)} shares its memory with other tensors and stays on {tensor.device}: "
            "placement 'host' takes caches whose keys and values are tensors of their own",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    from .host_memory import allocate

    block = allocate(storage.nbytes(), tensor.device)
    whole = (storage.nbytes(),)
    with torch.inference_mode(False), torch.no_grad():
        old = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        old.set_(storage, 0, whole, (1,))  # type: ignore[call-overload]
        block.tensor(whole, torch.uint8).copy_(old)
        offset = tensor.storage_offset() * tensor.element_size()
        alias = block.tensor(tuple(tensor.shape), tensor.dtype, tensor.stride(), offset)
    del old, storage
    compat.swap_memory(tensor, alias)
    OWNERS.of(tensor.untyped_storage())[_KEY] = True
    return True


def new_host_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor of ``device`` whose memory is on the host from the start; its content is undefined.

    Raises:
        HostMemoryError: there is too little.
    """
    from .host_memory import allocate

    block = allocate(math.prod(shape) * dtype.itemsize, device)
    tensor = block.tensor(shape, dtype)
    OWNERS.of(tensor.untyped_storage())[_KEY] = True
    return tensor
