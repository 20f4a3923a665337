"""In bf16 a compiled model drifts from an eager one.

transformers PR#46521, pytorch#168126. Right: neither is the truth; against fp32 our error is at most twice that of
eager mode.
"""

import pytest
import torch

from ..models.helpers import decode, request, tiny
from .helpers import (
    LOSSLESS,
    SPARSELY,
    Growing,
    Shape,
    Static,
    compile_hsa,
    decisions,
    one_layer,
    run_growing,
    run_static,
)

LOW = [torch.bfloat16, torch.float16]


def errors(kind: type, dtype: torch.dtype, run: str) -> tuple[float, float]:
    """Ours and eager's, for the same operands."""
    growing = kind is Growing
    shape = Shape(dtype=dtype, steps=12, batch=3)
    decode_with = run_growing if growing else run_static
    exact = decode_with(Widened(kind()), shape)
    compiled = compile_hsa(kind(), LOSSLESS, run)
    ours, eager = decode_with(compiled, shape), decode_with(kind(), shape)
    assert ours.dtype == eager.dtype == dtype
    assert decisions(compiled) == SPARSELY
    return float((ours.float() - exact).norm()), float((eager.float() - exact).norm())


class Widened(torch.nn.Module):
    """The layer in fp32, over caches in low precision."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, q, k, v, keys, values, *position):
        wide = (q.float(), k.float(), v.float(), keys.float(), values.float())
        out = self.layer(*wide, *position)
        if position:
            keys.index_copy_(2, *position, k)
            values.index_copy_(2, *position, v)
            return out
        return out[0], torch.cat((keys, k), 2), torch.cat((values, v), 2)


@pytest.mark.parametrize(("kind", "dtype"), [(Static, LOW[0]), (Static, LOW[1]), (Growing, LOW[0])])
def test_one_layer(kind: type, dtype: torch.dtype) -> None:
    ours, eager = errors(kind, dtype, "eager")
    assert ours <= 2 * eager


@pytest.mark.slow
def test_one_layer_through_inductor() -> None:
    ours, eager = errors(Static, torch.bfloat16, "inductor")
    assert ours <= 2 * eager


def test_tiny() -> None:
    exact, model = one_layer(tiny("llama")), one_layer(tiny("llama")).bfloat16()
    asked = request(2, length=41, steps=16)
    want = decode(exact, exact, "static", asked)
    compiled = compile_hsa(model, {"budget": 112, "page_size": 16})
    ours, eager = (
        decode(model, step, "static", asked, want.tokens).logits.float()
        for step in (compiled, model)
    )
    assert (ours - want.logits).norm() <= 2 * (eager - want.logits).norm()
    assert decisions(compiled) == SPARSELY


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", LOW)
@torch.no_grad()
def test_on_a_gpu(dtype: torch.dtype) -> None:
    from .helpers import new_cache, token

    shape = Shape(dtype=dtype, batch=3, heads=8, size=64, value_size=64)
    cache = [t.cuda() for t in new_cache(shape)]
    wide = [t.clone() for t in cache]
    plain = [t.clone() for t in cache]
    compiled, layer = compile_hsa(Static().cuda(), LOSSLESS, "inductor"), Static().cuda()
    ours = eager = 0.0
    for at in range(90, 100):
        inputs, position = [t.cuda() for t in token(shape, at)], torch.tensor([at], device="cuda")
        exact = Widened(layer)(*inputs, *wide, position)
        ours += float((compiled(*inputs, *cache, position).float() - exact).norm())
        eager += float((layer(*inputs, *plain, position).float() - exact).norm())
    assert ours <= 2 * eager
    assert decisions(compiled) == SPARSELY
