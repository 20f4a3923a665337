"""Head sizes are assumed from the configuration: wrong for MLA, for an explicit ``head_dim``, and layer by layer.

LMCache#2881, DeepSpeed PR#8389, LMCache#4358. Right: every size is read from the tensors.
"""

import pytest
import torch
from torch import Tensor, nn

import hsa_compile
from hsa_compile.runtime.state import OWNERS, PageState

from .helpers import (
    LOSSLESS,
    SPARSE,
    SPARSELY,
    Shape,
    Static,
    check_rewritten,
    check_sparse,
    close,
    compile_hsa,
    decisions,
    new_cache,
    rule,
    sdpa,
    sites,
    token,
)


@pytest.mark.parametrize(
    ("size", "value_size", "growing"),
    [(24, 16, False), (16, 24, False), (5, 3, False), (24, 16, True)],
)
def test_keys_and_values_of_different_sizes(size: int, value_size: int, growing: bool) -> None:
    check_rewritten(sdpa, Shape(size=size, value_size=value_size), growing)


def test_sparse() -> None:
    check_sparse(sdpa, Shape(size=24, value_size=16))


class TwoLayers(nn.Module):
    """Layers with heads of 16 and 32, and of other numbers of KV heads."""

    def __init__(self, attend=sdpa) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Static(attend), Static(attend)])

    def forward(self, first, second, caches, position):
        (q, k, v), (q2, k2, v2) = first, second
        one = self.layers[0](q, k, v, *caches[0], position)
        return one, self.layers[1](q2 + one.sum(), k2, v2, *caches[1], position)


SHAPES = (Shape(size=16), Shape(size=32, value_size=32, kv_heads=4, heads=8))


@pytest.mark.parametrize("policy", [LOSSLESS, SPARSE])
@torch.no_grad()
def test_sizes_layer_by_layer(policy: dict) -> None:
    compiled, expected = compile_hsa(TwoLayers(), policy), TwoLayers(rule(policy))
    caches, twins = ([new_cache(shape) for shape in SHAPES] for _ in range(2))
    for at in range(90, 94):
        inputs, position = [token(shape, at) for shape in SHAPES], torch.tensor([at])
        got = compiled(*inputs, caches, position)
        for ours, theirs in zip(got, expected(*inputs, twins, position)):
            close(ours, theirs)
    assert decisions(compiled) == SPARSELY
    assert [site.path for site in sites(compiled)] == ["layers.0", "layers.1"]
    widths = {s.layout.head_dim for s in OWNERS.states() if isinstance(s, PageState)}
    assert widths == {16, 32}
    assert [layer.steps for layer in hsa_compile.stats(compiled).layers] == [4, 4]


@torch.no_grad()
def test_latent_cache_is_left() -> None:
    """MLA that keeps the compressed latent and expands it at every step: keys are computed, and the reason says so."""

    class Latent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 4 * (24 + 16), bias=False)

        def forward(self, q: Tensor, new: Tensor, latent: Tensor, position: Tensor) -> Tensor:
            latent.index_copy_(1, position, new)
            both = self.up(latent).unflatten(-1, (4, 40)).transpose(1, 2)
            k, v = both.split((24, 16), -1)
            mask = (torch.arange(latent.shape[1]) <= position)[None, None, None]
            return nn.functional.scaled_dot_product_attention(q, k, v, mask)

    model = Latent()
    q, new, latent = torch.randn(2, 4, 1, 24), torch.randn(2, 1, 8), torch.randn(2, 128, 8)
    at = torch.tensor([90])
    want = model(q, new, latent.clone(), at)
    compiled = compile_hsa(model)
    close(compiled(q, new, latent, at), want)
    ((decision, reason),) = decisions(compiled)
    assert decision == "left" and "no KV cache" in reason
