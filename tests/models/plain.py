"""Small modules that keep their own KV cache, each in another way, as people write them without a library."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS, KV_HEADS, SIZE, WIDTH = 4, 2, 16, 24
CAPACITY = 150
LENGTH = 60

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``(q [B, Hq, 1, D], keys [B, Hkv, S, D], values, keep [1, 1, 1, S] bool or None) -> [B, Hq, 1, D]``."""
Position = Tensor | int


def gpt_fast(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    keys = keys.repeat_interleave(HEADS // KV_HEADS, dim=1)
    values = values.repeat_interleave(HEADS // KV_HEADS, dim=1)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=keep, dropout_p=0.0)


def dense(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=keep, enable_gqa=True)


# Writes. Each takes a buffer, a new token [B, Hkv, 1, D] and a position, and returns what attention is to read and,
# where the buffer is to be replaced, its successor.


def setitem(cache: Tensor, new: Tensor, at: Position) -> Tensor:
    cache[:, :, at] = new
    return cache


def setitem_int(cache: Tensor, new: Tensor, at: int) -> Tensor:
    cache[:, :, at] = new[:, :, 0]
    return cache


def setitem_slice(cache: Tensor, new: Tensor, at: int) -> Tensor:
    cache[:, :, at : at + 1] = new
    return cache


def setitem_ellipsis(cache: Tensor, new: Tensor, at: int) -> Tensor:
    cache[..., at : at + 1, :] = new
    return cache


def index_copy_(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    return cache.index_copy_(-2, at, new)


def index_put_(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    cache.index_put_((at,), new.permute(2, 0, 1, 3))
    return cache.permute(1, 2, 0, 3)


def aten_index_put_(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    torch.ops.aten.index_put_(cache, [None, None, at], new)
    return cache


def copy_into_slice(cache: Tensor, new: Tensor, at: int) -> Tensor:
    cache[:, :, at : at + 1].copy_(new)
    return cache


def copy_into_narrow(cache: Tensor, new: Tensor, at: int) -> Tensor:
    cache.narrow(2, at, 1).copy_(new)
    return cache


def copy_into_select(cache: Tensor, new: Tensor, at: int) -> Tensor:
    cache.select(2, at).copy_(new.squeeze(2))
    return cache


def slice_scatter_back(cache: Tensor, new: Tensor, at: int) -> Tensor:
    cache.copy_(torch.slice_scatter(cache, new, 2, at, at + 1))
    return cache


def slice_scatter_read(cache: Tensor, new: Tensor, at: int) -> Tensor:
    """Reads the new tensor and copies it back afterwards."""
    updated = cache.slice_scatter(new, dim=2, start=at, end=at + 1)
    cache.copy_(updated)
    return updated


def index_copy_back(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    updated = cache.index_copy(2, at, new)
    cache.copy_(updated)
    return updated


def tokens_first(cache: Tensor, new: Tensor, at: Position) -> Tensor:
    cache[:, at if isinstance(at, Tensor) else slice(at, at + 1)] = new.transpose(1, 2)
    return cache.transpose(1, 2)


def heads_flat(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    cache[:, at] = new.transpose(1, 2).flatten(2)
    return cache.view(*cache.shape[:2], KV_HEADS, SIZE).transpose(1, 2)


def functional_slice(cache: Tensor, new: Tensor, at: int) -> Tensor:
    return torch.slice_scatter(cache, new, 2, at, at + 1)


def functional_index_copy(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    return torch.index_copy(cache, 2, at, new)


def functional_index_put(cache: Tensor, new: Tensor, at: Tensor) -> Tensor:
    return torch.ops.aten.index_put(cache, [None, None, at], new)


@dataclass(frozen=True)
class Write:
    """How a cache is written: the function, its kind of position, the layout of the buffer.

    position: an argument (``tensor`` or ``int``), or counted by the module (``counter``, an int; ``buffer``, a tensor).
    replaces: the function returns a new tensor, which takes the place of the buffer.
    """

    function: Callable[[Tensor, Tensor, Position], Tensor]
    position: str = "tensor"
    layout: str = "bhsd"
    replaces: bool = False

    @property
    def name(self) -> str:
        return f"{self.function.__name__}-{self.position}"


WRITES = (
    Write(setitem),
    Write(setitem_slice, "int"),
    Write(setitem_ellipsis, "int"),
    Write(setitem_slice, "counter"),
    Write(index_copy_),
    Write(index_put_, layout="sbhd"),
    Write(aten_index_put_),
    Write(copy_into_slice, "int"),
    Write(setitem, "buffer"),
    Write(copy_into_narrow, "int"),
    Write(copy_into_narrow, "counter"),
    Write(copy_into_select, "int"),
    Write(slice_scatter_back, "int"),
    Write(slice_scatter_read, "int"),
    Write(index_copy_back),
    Write(tokens_first, layout="bshd"),
    Write(tokens_first, "counter", "bshd"),
    Write(heads_flat, layout="bsf"),
    Write(functional_slice, "int", replaces=True),
    Write(functional_slice, "counter", replaces=True),
    Write(functional_index_copy, replaces=True),
    Write(functional_index_put, replaces=True),
)


def buffer(layout: str, batch: int) -> Tensor:
    """An empty cache, poisoned where nothing is written (so that a mask of -10,000 still covers it)."""
    sizes = {"b": batch, "h": KV_HEADS, "s": CAPACITY, "d": SIZE, "f": KV_HEADS * SIZE}
    return torch.full([sizes[letter] for letter in layout], 100.0)


class Block(nn.Module):
    """One attention layer with buffers of its own."""

    def __init__(self, write: Write, batch: int) -> None:
        super().__init__()
        self.write = write
        self.project = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * SIZE, bias=False)
        self.back = nn.Linear(HEADS * SIZE, WIDTH, bias=False)
        self.register_buffer("k_cache", buffer(write.layout, batch))
        self.register_buffer("v_cache", buffer(write.layout, batch))

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.project(x).view(*x.shape[:2], -1, SIZE).transpose(1, 2)
        return heads.split((HEADS, KV_HEADS, KV_HEADS), 1)  # type: ignore[return-value]

    def update(self, k: Tensor, v: Tensor, at: Position) -> tuple[Tensor, Tensor]:
        keys = self.write.function(self.k_cache, k, at)
        values = self.write.function(self.v_cache, v, at)
        if self.write.replaces:
            self.k_cache, self.v_cache = keys, values
        return keys, values

    def forward(self, x: Tensor, at: Position, keep: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv(x)
        keys, values = self.update(k, v, at)
        return x + self.back(attend(q, keys, values, keep).transpose(1, 2).flatten(2))


class BigBlock(Block):
    """Its cache is a part of one tensor ``[layers, 2, B, Hkv, S, D]`` that all layers share."""

    def __init__(self, layer: int, shared: Tensor) -> None:
        super().__init__(Write(setitem), 0)
        self.layer, self.shared = layer, [shared]

    def update(self, k: Tensor, v: Tensor, at: Position) -> tuple[Tensor, Tensor]:
        (cache,) = self.shared
        cache[self.layer, 0, :, :, at] = k
        cache[self.layer, 1, :, :, at] = v
        return cache[self.layer, 0], cache[self.layer, 1]


class HalvesBlock(Block):
    """Its keys and values are the halves of one tensor."""

    def __init__(self, batch: int) -> None:
        super().__init__(Write(setitem), batch)
        del self.k_cache, self.v_cache
        self.k_cache, self.v_cache = buffer("bhsd", 2 * batch).unflatten(0, (2, batch))


class LenderBlock(Block):
    """A second attention reads the cache of the first."""

    def __init__(self, batch: int) -> None:
        super().__init__(Write(setitem), batch)
        self.ask = nn.Linear(WIDTH, HEADS * SIZE, bias=False)

    def forward(self, x: Tensor, at: Position, keep: Tensor, attend: Attend) -> Tensor:
        x = super().forward(x, at, keep, attend)
        q = self.ask(x).view(*x.shape[:2], HEADS, SIZE).transpose(1, 2)
        out = attend(q, self.k_cache, self.v_cache, keep)
        return x + self.back(out.transpose(1, 2).flatten(2))


class PrefixBlock(Block):
    """As Llama was first published: ``[B, S, H, D]`` buffers of which only the filled part is read, without a mask."""

    def __init__(self, batch: int) -> None:
        super().__init__(Write(setitem, "int", "bshd"), batch)

    def update(self, k: Tensor, v: Tensor, at: Position) -> tuple[Tensor, Tensor]:
        batch = k.shape[0]
        self.k_cache[:batch, at : at + 1] = k.transpose(1, 2)
        self.v_cache[:batch, at : at + 1] = v.transpose(1, 2)
        keys, values = self.k_cache[:batch, : at + 1], self.v_cache[:batch, : at + 1]
        return keys.transpose(1, 2), values.transpose(1, 2)


class CountingBlock(Block):
    """It counts its tokens itself, in place, before the write (``early``) or between the write and attention."""

    def __init__(self, batch: int, early: bool) -> None:
        super().__init__(Write(setitem), batch)
        self.early = early
        self.register_buffer("count", torch.full((1,), -1 if early else 0))

    def update(self, k: Tensor, v: Tensor, at: Position) -> tuple[Tensor, Tensor]:
        if self.early:
            self.count.add_(1)
        keys, values = super().update(k, v, self.count)
        if not self.early:
            self.count.add_(1)
        return keys, values


class GrowingBlock(Block):
    """Its cache grows by concatenation."""

    def __init__(self, batch: int) -> None:
        super().__init__(Write(setitem), 0)
        del self.k_cache, self.v_cache
        self.keys = torch.empty(batch, KV_HEADS, 0, SIZE)
        self.values = torch.empty(batch, KV_HEADS, 0, SIZE)

    def update(self, k: Tensor, v: Tensor, at: Position) -> tuple[Tensor, Tensor]:
        self.keys = torch.cat([self.keys, k], dim=2)
        self.values = torch.cat((self.values, v), dim=-2)
        return self.keys, self.values


class CastBlock(GrowingBlock):
    """It casts what it attends to fp32, which it is, as GPT-J does."""

    def update(self, k: Tensor, v: Tensor, at: Position) -> tuple[Tensor, Tensor]:
        keys, values = super().update(k, v, at)
        return keys.to(torch.float32), values.float()


class Decoder(nn.Module):
    """Two blocks over embeddings ``[B, 1, WIDTH]``; the mask is a row of a causal buffer, as in gpt-fast."""

    causal: Tensor

    def __init__(self, blocks: list[Block], position: str = "tensor") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.position, self.attend = position, gpt_fast
        self.register_buffer("causal", torch.ones(CAPACITY, CAPACITY).tril().bool())
        if position == "buffer":
            self.register_buffer("at", torch.zeros(1, dtype=torch.long))
        else:
            self.at = 0

    def forward(self, x: Tensor, at: Position | None = None) -> Tensor:
        if at is None:
            at = self.at
        if isinstance(self.blocks[0], GrowingBlock):
            keep = torch.ones(1, 1, 1, self.blocks[0].keys.shape[2] + 1, dtype=torch.bool)
        elif isinstance(self.blocks[0], PrefixBlock):
            keep = None
        else:
            # Dynamo compiles once for each integer index, and once for all slices.
            row = self.causal[at] if isinstance(at, Tensor) else self.causal[at : at + 1]
            keep = row[None, None]
        for block in self.blocks:
            x = block(x, at, keep, self.attend)
        if self.position in ("counter", "buffer"):
            self.at += 1
        return x


def decoder(write: Write, batch: int = 2) -> Decoder:
    return Decoder([Block(write, batch) for _ in range(2)], write.position).eval()


def decode(
    model: Decoder, step: Callable[..., Tensor], steps: int, start: int, seed: int
) -> Tensor:
    """``steps`` outputs for random inputs, ``[B, steps, WIDTH]``."""
    generator = torch.Generator().manual_seed(seed)
    batch = 2
    outputs = []
    with torch.no_grad():
        for position in range(start, start + steps):
            x = torch.randn(batch, 1, WIDTH, generator=generator)
            if model.position in ("counter", "buffer"):
                outputs.append(step(x))
            else:
                at = torch.tensor([position]) if model.position == "tensor" else position
                outputs.append(step(x, at))
    return torch.cat(outputs, 1)


def twins(model: Decoder, attend: Attend) -> tuple[Decoder, Decoder]:
    """The model with ``LENGTH`` tokens in its cache, and a copy of it that attends with ``attend``."""
    decode(model, model, LENGTH, 0, seed=1)
    other = copy.deepcopy(model)
    other.attend = attend
    return model, other
