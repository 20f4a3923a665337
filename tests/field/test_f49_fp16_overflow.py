"""In fp16 the scores overflow, or what masked scores are filled with does, and everything is nan.

transformers PR#33317, kvpress#250. Right: finite, and near fp32, even where eager mode overflows.
"""

import pytest
import torch
from torch import Tensor

from hsa_compile.runtime.state import OWNERS, PageState

from .helpers import (
    LOSSLESS,
    SPARSE,
    SPARSELY,
    Growing,
    Shape,
    Static,
    compile_hsa,
    decisions,
    new_cache,
    repeat_kv,
    run_growing,
    run_static,
    sdpa,
)
from .test_f48_low_precision import Widened

LOUD = Shape(dtype=torch.float16, magnitude=200.0, poison=0.0)
FILL = torch.finfo(torch.float16).min


def spelled(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Products in fp16: their sum, 200 x 200 x 16, exceeds it."""
    keys, values = (repeat_kv(t, 2) for t in (keys, values))
    scores = torch.matmul(q, keys.transpose(2, 3)) * 0.25
    if mask is not None:
        scores = scores + torch.where(mask, 0.0, FILL).to(scores.dtype)
    return torch.matmul(torch.softmax(scores.float(), -1).to(values.dtype), values)


@pytest.mark.parametrize("attend", [sdpa, spelled])
@pytest.mark.parametrize(("kind", "run"), [(Static, run_static), (Growing, run_growing)])
def test_loud_queries_and_keys(attend, kind: type, run) -> None:
    exact = run(Widened(kind(attend)), LOUD)
    compiled = compile_hsa(kind(attend), LOSSLESS)
    got = run(compiled, LOUD).float()
    assert got.isfinite().all()
    torch.testing.assert_close(got, exact, rtol=1e-2, atol=0.5)
    assert decisions(compiled) == SPARSELY
    if attend is spelled:
        assert not run(kind(attend), LOUD).isfinite().all(), "eager mode did not overflow"


@pytest.mark.parametrize("algorithm", ["quest", "cuboid", "mean"])
@torch.no_grad()
def test_keys_at_the_end_of_the_range(algorithm: str) -> None:
    """Summaries of keys of +-60,000 are finite, and so is what selection makes of them."""
    shape = Shape(dtype=torch.float16, poison=0.0)
    keys, values = new_cache(shape)
    keys.copy_(60000 * keys.sign())
    compiled = compile_hsa(Static(), {**SPARSE, "algorithm": algorithm})
    assert run_static(compiled, shape, (keys, values)).isfinite().all()
    held = [state.summary for state in OWNERS.states() if isinstance(state, PageState)]
    assert held and all(summary.isfinite().all() for summary in held)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_fillers_added_up(dtype: torch.dtype) -> None:
    """A bias below zero, a padding mask and a causal mask, each with the lowest number of its dtype, in one sum."""
    low = torch.finfo(dtype).min

    def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        tokens = torch.arange(keys.shape[2])
        keys, values = (repeat_kv(t, 2) for t in (keys, values))
        scores = torch.matmul(q, keys.transpose(2, 3)) * 0.25
        scores = scores + (tokens - 127).to(dtype) * 0.05
        begin = torch.tensor([0, 30])[:, None, None, None]
        scores = scores + torch.where(tokens >= begin, 0.0, low).to(dtype)
        scores = scores.masked_fill(~mask, low)
        return torch.matmul(torch.softmax(scores.float(), -1).to(values.dtype), values)

    shape = Shape(dtype=dtype, poison=0.0)
    compiled = compile_hsa(Static(attend), LOSSLESS)
    got = run_static(compiled, shape).float()
    assert got.isfinite().all() and decisions(compiled) == SPARSELY
    exact = run_static(Static(attend), shape).float()
    torch.testing.assert_close(got, exact, rtol=2e-2, atol=2e-2)
