"""What the kernels can take. Plain arithmetic: a pass can ask before anything is compiled."""

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
MAX_GROUP = 64
MAX_STEP = 16
"""Tokens of one step, queries or new keys, up to which it counts as decoding."""
MAX_PAGE_SIZE = 64
MAX_POOL_SLOTS = 4096
MAX_INDEX_HEADS = 256


def kernel_limits(
    dtype: torch.dtype, head_dim: int, value_dim: int, group: int, page_size: int, queries: int = 1
) -> str | None:
    """Why the kernels cannot take such an attention, or None where they can.

    Args:
        dtype: of queries, keys and values alike.
        head_dim: numbers in a key.
        value_dim: numbers in a value.
        group: query heads a KV head.
        page_size: tokens a page.
        queries: query tokens; each is as a head more to the kernels.
    """
    if dtype not in DTYPES:
        return f"dtype {dtype} is not one of {', '.join(str(known) for known in DTYPES)}"
    for what, size in (("head size", head_dim), ("value size", value_dim)):
        if not 1 <= size <= MAX_HEAD_DIM:
            return f"{what} {size} is not between 1 and {MAX_HEAD_DIM}"
    if not 1 <= group <= MAX_GROUP:
        return f"{group} query heads a KV head are not between 1 and {MAX_GROUP}"
    if queries > 1 and group * queries > MAX_GROUP:
        rows = f"{group} query heads a KV head, {queries} query tokens each,"
        return f"{rows} are more than {MAX_GROUP} rows"
    if not 1 <= page_size <= MAX_PAGE_SIZE or page_size & (page_size - 1):
        return f"page size {page_size} is not a power of two up to {MAX_PAGE_SIZE}"
    return None


def pool_limits(slots: int) -> str | None:
    """Why the kernels cannot take a pool of ``slots`` pages a KV head, or None where they can."""
    if not 1 <= slots <= MAX_POOL_SLOTS:
        return f"a pool of {slots} slots is not between 1 and {MAX_POOL_SLOTS}"
    return None


def index_limits(dtype: torch.dtype, heads: int, dim: int) -> str | None:
    """Why the kernel cannot take an indexer of ``heads`` heads of ``dim`` numbers, or None where it can."""
    if dtype not in DTYPES:
        return f"dtype {dtype} is not one of {', '.join(str(known) for known in DTYPES)}"
    if not 1 <= heads <= MAX_INDEX_HEADS:
        return f"{heads} heads of an indexer are not between 1 and {MAX_INDEX_HEADS}"
    if not 1 <= dim <= MAX_HEAD_DIM:
        return f"index head size {dim} is not between 1 and {MAX_HEAD_DIM}"
    return None
