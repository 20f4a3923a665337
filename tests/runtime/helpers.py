"""A small module with a static cache in the style of gpt-fast, and the rule that its sparse attention must follow."""

import torch
from torch import Tensor, nn

from hsa_compile import algorithms
from hsa_compile.ops.estimate_rest import estimate_rest_reference
from hsa_compile.ops.page_mask import page_mask, unpack
from hsa_compile.ops.select import forced_pages, select_reference
from hsa_compile.ops.sparse_attention import sparse_attention_reference

HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 16, 16
POLICY = {"algorithm": "quest", "budget": 48, "page_size": PAGE, "sink": 4, "recent": 16}


class Decoder(nn.Module):
    """One attention layer over a cache that is passed in: ``[B, Hkv, S, D]`` keys and values."""

    placement = "device"

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.project = nn.Linear(SIZE, (HEADS + 2 * KV_HEADS) * SIZE)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length = x.shape[:2]
        heads = self.project(x).view(batch, length, -1, SIZE).transpose(1, 2)
        return heads.split((HEADS, KV_HEADS, KV_HEADS), 1)  # type: ignore[return-value]

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        keys[:, :, position] = k
        values[:, :, position] = v
        mask = torch.arange(keys.shape[2]) <= position[:, None]
        return nn.functional.scaled_dot_product_attention(
            q, keys, values, mask[None, None], enable_gqa=True
        )


def new_cache(batch: int, capacity: int = 128) -> tuple[Tensor, Tensor]:
    """Keys and values, poisoned where nothing was written."""
    shape = (batch, KV_HEADS, capacity, SIZE)
    return torch.full(shape, 1e4), torch.full(shape, 1e4)


def prefill(model: Decoder, keys: Tensor, values: Tensor, x: Tensor, start: int = 0) -> None:
    """Write the keys and values of ``x [B, L, D]`` eagerly, from ``start``."""
    _, k, v = model.qkv(x)
    keys[:, :, start : start + x.shape[1]] = k
    values[:, :, start : start + x.shape[1]] = v


def reference_step(
    model: Decoder,
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    read: int | None = None,
    estimates: bool = False,
) -> Tensor:
    """What a step must give, from the content of the cache (its first ``read`` tokens): no state, no history.

    With ``estimates`` the means of the pages that are left out take part.
    """
    q, k, v = model.qkv(x)
    keys[:, :, position], values[:, :, position] = k[:, :, 0], v[:, :, 0]
    keys, values = keys[:, :, :read], values[:, :, :read]
    mask = (torch.arange(keys.shape[2]) <= position)[None, None, None]
    bits = page_mask(mask, PAGE)
    pages = bits.shape[-1]
    batch = x.shape[0]
    present = unpack(bits.expand(batch, KV_HEADS, pages), PAGE).unsqueeze(-1)

    def of_pages(algorithm: str, cache: Tensor) -> Tensor:
        paged = cache.unflatten(2, (pages, PAGE)).masked_fill(~present, 0)
        return algorithms.get(algorithm).summarize(paged, present).masked_fill(~present.any(-2), 0)

    summary = of_pages("quest", keys)
    budget = POLICY["budget"] // PAGE
    slots = min(max(budget, forced_pages(4, 16, PAGE)), pages)
    scale = SIZE**-0.5
    ids, _ = select_reference(
        q, summary, bits, scale, "quest", PAGE, slots, budget, 0, 4, 16, "softmax_mean"
    )
    attended = sparse_attention_reference(q, keys, values, ids, None, bits, None, scale, PAGE)
    if estimates:
        means = (of_pages("mean", cache) for cache in (keys, values))
        attended = estimate_rest_reference(q, *means, ids, bits, None, *attended, scale)
    return attended[0]
