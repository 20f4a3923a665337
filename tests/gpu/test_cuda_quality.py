"""Shares of the softmax, own page scores and monitors on a GPU."""

import pytest
import torch

import hsa_compile
from hsa_compile import algorithms, register_algorithm

from ..test_algorithms import FARTHEST
from .test_cuda_decode import Decode, tiny_llama

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

PART = {"budget": 256, "page_size": 16, "recent": 32}


def steps(model, run: str, mode: str | None, number: int = 12, **policy: object):
    torch._dynamo.reset()
    options: dict[str, object] = {"policy": {**PART, **policy}, "run": run, "strict": True}
    compiled = torch.compile(
        model, backend="hsa", options=options | ({} if mode is None else {"mode": mode})
    )
    with torch.no_grad():
        decode = Decode(model, "static", 2, 1000, 1100)
        logits = torch.stack([decode.step(compiled).clone() for _ in range(number)])
    return logits, hsa_compile.stats(compiled)


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize(
    "policy",
    [
        {"top_p": 0.5, "min_budget": 64},
        {"algorithm": "streaming"},
        {"algorithm": "heavy_hitters", "decay": 0.9},
        {"unselected": "centroids"},
        {"unselected": "centroids", "algorithm": "quest"},
        {"algorithm": "three_level", "prototypes": 8},
    ],
    ids=str,
)
def test_as_the_eager_ops(policy: dict[str, object], placement: str) -> None:
    model = tiny_llama(torch.float32)
    got, read = steps(model, "inductor", "reduce-overhead", placement=placement, **policy)
    want, expected = steps(model, "eager", None, **policy)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(read.layers, expected.layers, strict=True):
        assert mine.tokens_read == pytest.approx(theirs.tokens_read, rel=0.01)


def test_a_score_of_ones_own() -> None:
    register_algorithm(FARTHEST)
    try:
        model = tiny_llama(torch.float32)
        got, _ = steps(model, "inductor", None, algorithm="farthest")
        want, _ = steps(model, "eager", None, algorithm="farthest")
        other, _ = steps(model, "eager", None, algorithm="mean")
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert (want - other).abs().max() > 1e-3
    finally:
        del algorithms._ALGORITHMS["farthest"], algorithms._OWN["farthest"]


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_monitor_changes_nothing_and_sees_what_there_is(mode: str | None, placement: str) -> None:
    model = tiny_llama(torch.float32)
    plain, _ = steps(model, "inductor", mode, placement=placement)
    got, seen = steps(model, "inductor", mode, placement=placement, monitor=3)
    assert torch.equal(got, plain)
    _, expected = steps(model, "eager", None, monitor=3)
    for mine, theirs in zip(seen.layers, expected.layers, strict=True):
        assert mine.observed and theirs.observed == 4 * 2
        if (
            mine.observed == theirs.observed
        ):  # one that is not done when the next is due makes it wait its turn
            assert mine.recall == pytest.approx(theirs.recall, rel=1e-3)
            assert mine.output_error == pytest.approx(theirs.output_error, rel=1e-2)
        assert 0 < mine.recall < 1


def test_a_monitor_leaves_cuda_graphs_alone() -> None:
    torch._dynamo.utils.counters.clear()
    steps(tiny_llama(torch.bfloat16), "inductor", "reduce-overhead", 40, monitor=4)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("placement", ["device", "host"])
def test_a_calibration_measures_what_the_eager_ops_lose(placement: str) -> None:
    model = tiny_llama(torch.float32)
    ids = torch.randint(3, 100, (2, 600), generator=torch.Generator().manual_seed(0))
    reports: list[hsa_compile.Calibration] = []
    for options in ({"mode": "reduce-overhead"}, {"run": "eager"}):
        hsa_compile.calibrate(
            model,
            ids,
            1e9,
            steps=16,
            algorithms=["cuboid"],
            budgets=[64, 256],
            base={"page_size": 16, "recent": 32, "placement": placement},
            trials=2,
            options=options,
            report=reports.append,
        )
    compiled, eager = reports
    assert compiled.policy == eager.policy and compiled.chosen.share < 0.5
    for one, other in zip(compiled.curve, eager.curve, strict=True):
        assert (one.label, one.tokens) == (other.label, pytest.approx(other.tokens, rel=0.01))
        assert one.loss == pytest.approx(other.loss, rel=0.01, abs=1e-7)
        for index, layer in one.layers.items():
            assert layer.recall == pytest.approx(other.layers[index].recall, abs=0.01)
