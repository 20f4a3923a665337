"""With CUDA graphs the logits of one step are overwritten by the next.

gpt-fast#232, pytorch PR#184102. Right: what is kept stays as it was; where torch cannot keep it, its own error says so,
and no other numbers are ever read.
"""

import pytest
import torch

from .helpers import (
    SPARSE,
    Growing,
    Shape,
    Static,
    compile_hsa,
    new_cache,
    run_growing,
    run_static,
    token,
)


@pytest.mark.parametrize(("kind", "run"), [(Static, run_static), (Growing, run_growing)])
def test_on_a_cpu(kind: type, run) -> None:
    """No step writes into what an earlier one returned: outputs kept for three steps equal copies made at once."""
    compiled, kept, copies = compile_hsa(kind(), SPARSE), [], []

    def step(*inputs):
        result = compiled(*inputs)
        out = result[0] if kind is Growing else result
        kept.append(out)
        copies.append(out.clone())
        return result

    run(step, Shape(steps=4))
    for held, copy in zip(kept, copies):
        assert torch.equal(held, copy)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@torch.no_grad()
def test_on_a_gpu(mode: str) -> None:
    shape = Shape(size=64, value_size=64)
    compiled = compile_hsa(Static().cuda(), SPARSE, "inductor", mode=mode)
    cache = [t.cuda() for t in new_cache(shape)]
    for at in range(85, 90):
        inputs = [t.cuda() for t in token(shape, at)]
        compiled(*inputs, *cache, torch.tensor([at], device="cuda"))
    first = copy = None
    for at in range(90, 93):
        inputs = [t.cuda() for t in token(shape, at)]
        out = compiled(*inputs, *cache, torch.tensor([at], device="cuda"))
        if first is None:
            first, copy = out, out.clone()
    try:
        unchanged = torch.equal(first, copy)
    except RuntimeError as refused:
        assert mode == "reduce-overhead" and "overwritten" in str(refused)
    else:
        assert unchanged
