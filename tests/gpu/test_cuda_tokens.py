"""Selection of single tokens on a GPU, where Inductor compiles it: as the eager ops, in CUDA graphs."""

import pytest
import torch

from .test_cuda_decode import tiny_llama
from .test_cuda_quality import steps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GRANULARITIES = ["two_stage", "token"]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_as_the_eager_ops(granularity: str, mode: str | None) -> None:
    """A token in the place of one that scores the same within rounding is a small part of what is left out."""
    model = tiny_llama(torch.float32)
    got, read = steps(model, "inductor", mode, granularity=granularity)
    want, _ = steps(model, "eager", None, granularity=granularity)
    dense, _ = steps(model, "eager", None, budget=1100)
    assert (got - want).abs().max() < 0.05 * (want - dense).abs().max()
    for layer in read.layers:
        assert layer.tokens_read == 256 * layer.steps


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_cuda_graphs_are_left_alone(granularity: str) -> None:
    torch._dynamo.utils.counters.clear()
    steps(tiny_llama(torch.bfloat16), "inductor", "reduce-overhead", 20, granularity=granularity)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
