"""Attention of others that chooses its own tokens: how it may be spelled, and what is not to be rewritten."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Latent(nn.Module):
    """Attention with an indexer, in the manner of DeepSeek's own code; caches are arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Parameter(torch.randn(4, 12, 20) / 4)

    def forward(
        self,
        q: Tensor,
        latent: Tensor,
        latents: Tensor,
        queries: Tensor,
        keys: Tensor,
        weights: Tensor,
        at: Tensor,
        keep: Tensor,
    ) -> Any:
        latents.index_copy_(1, at, latent)
        return self.attend(q, *self.made(latents), self.mask(queries, keys, weights, keep))

    def made(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        k, v = torch.matmul(latents.unsqueeze(1), self.expand).split([16, 4], -1)
        return k, v

    def scores(self, queries: Tensor, keys: Tensor, weights: Tensor, keep: Tensor) -> Tensor:
        products = F.relu(torch.matmul(queries, keys.unsqueeze(1).mT) * 0.5)
        made = torch.matmul(weights.unsqueeze(-2), products).squeeze(-2)
        return made.masked_fill(~keep, -torch.inf)

    def index(self, queries: Tensor, keys: Tensor, weights: Tensor, keep: Tensor) -> Tensor:
        return self.scores(queries, keys, weights, keep).topk(8, -1)[1]

    def mask(self, queries: Tensor, keys: Tensor, weights: Tensor, keep: Tensor) -> Tensor:
        index = self.index(queries, keys, weights, keep)
        chosen = torch.zeros_like(keep).scatter(-1, index, True)
        return (keep & chosen).unsqueeze(1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def given(
    tokens: int = 50, filled: int = 30, queries: int = 1, batch: int = 2
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    at = torch.arange(filled, filled + queries)
    keep = (torch.arange(tokens) <= at[:, None]).expand(batch, queries, tokens).clone()
    keep[-1, :, :3] = False
    return (
        normal(batch, 4, queries, 16),
        normal(batch, queries, 12),
        normal(batch, tokens, 12),
        normal(batch, queries, 3, 6),
        normal(batch, tokens, 6),
        normal(batch, queries, 3),
        at,
        keep,
    )


class Apart(Latent):
    """The choice is part of the mask before heads are added; it is told from what is not chosen."""

    def mask(self, *args: Tensor) -> Tensor:
        index = self.index(*args).to(torch.int32)
        unseen = index.new_ones(args[3].shape, dtype=torch.bool).scatter_(-1, index.long(), False)
        return ~(unseen[:, None] | ~args[3][:, None])


class Added(Latent):
    """Additive masks: the choice fills the one that there is; written out by hand."""

    def mask(self, *args: Tensor) -> Tensor:
        unseen = torch.ones_like(args[3]).scatter(-1, self.index(*args), False).unsqueeze(1)
        hidden = torch.zeros(args[3].shape).masked_fill(~args[3], -torch.inf).unsqueeze(1)
        return hidden.masked_fill(unseen, torch.finfo(torch.float32).min)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return ((q @ k.mT) * 0.25 + mask).softmax(-1) @ v


class Sum(Added):
    """The choice is an additive mask of its own."""

    def mask(self, *args: Tensor) -> Tensor:
        index = self.index(*args).unsqueeze(1)
        shape = (args[3].shape[0], 1, *args[3].shape[1:])
        chosen = torch.full(shape, -torch.inf).scatter(-1, index, 0.0)
        return chosen + torch.zeros(args[3].shape).masked_fill(~args[3], -torch.inf).unsqueeze(1)


class Alone(Latent):
    """No mask but the choice, whose scores hide what may not be chosen."""

    def mask(self, *args: Tensor) -> Tensor:
        index = self.index(*args)
        return torch.zeros_like(args[3]).scatter(-1, index, True).unsqueeze(1)


class OtherScores(Latent):
    """Scores that are no lightning indexer's."""

    def scores(self, queries: Tensor, keys: Tensor, weights: Tensor, keep: Tensor) -> Tensor:
        products = torch.matmul(queries.mean(2), keys.mT)
        return products.masked_fill(~keep, -torch.inf)


class SeenElsewhere(Latent):
    """The index is a result, too: in its order."""

    def forward(self, *args: Tensor) -> Any:
        return super().forward(*args), self.index(*args[3:6], args[7])


class Normed(Latent):
    """Latents are normed and rotated number by number, and keys put together part by part."""

    def made(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        scaled = latents.float() * torch.rsqrt(latents.pow(2).mean(-1, keepdim=True) + 1e-6)
        made = F.linear(scaled, self.expand.mT.flatten(0, 1)).view(*latents.shape[:2], 4, 20)
        made = made.permute(0, 2, 1, 3)
        k, v = made[..., :12], made[..., 12:]
        shared = latents[..., None, :4].transpose(1, 2).expand(-1, 4, -1, -1)
        return torch.cat([k, shared], -1), v


class AsCached(Latent):
    """Keys and values are cached as they are."""

    def made(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        return latents[:, None, :, :10].expand(-1, 4, -1, -1), latents[:, None].expand(
            -1, 4, -1, -1
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return super().attend(q[..., :10], k, v, mask)


class AsKeys(Latent):
    """Keys and values are views of what is cached."""

    def made(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        held = latents.unflatten(-1, (2, 6)).transpose(1, 2)
        return held, held

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q[..., :6], k, v, attn_mask=mask, enable_gqa=True)


class AcrossTokens(Latent):
    def made(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        return super().made(latents.cumsum(1))


class ByPosition(Latent):
    def made(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        return super().made(latents * torch.arange(latents.shape[1]).view(1, -1, 1))


class AnotherLength(Latent):
    def index(self, *args: Tensor) -> Tensor:
        return self.scores(*args)[..., 2:].topk(8, -1)[1]


class WrittenLater(Latent):
    """The latents are written after keys were made of them."""

    def forward(self, q: Tensor, latent: Tensor, latents: Tensor, *rest: Tensor) -> Any:
        k, v = self.made(latents)
        latents.index_copy_(1, rest[3], latent)
        return self.attend(q, k, v, self.mask(*rest[:3], rest[4]))


class FromOutside(Latent):
    """An index that is no top-k may name a token twice, which a mask does not see."""

    def index(self, *args: Tensor) -> Tensor:
        return (args[3].cumsum(-1) - 1)[..., :8].clamp(min=0)


class Smallest(Latent):
    def index(self, *args: Tensor) -> Tensor:
        return self.scores(*args).kthvalue(3, -1, keepdim=True)[1]
