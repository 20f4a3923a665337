"""Triton rejects a pointer: the tensors are on the CPU, or on a GPU that is not the current one.

KIVI#24, FramePack#246. Right: CPU tensors take the CPU's path, whether or not Triton is installed; kernels are launched
on the GPU of their tensors.
"""

import pytest
import torch

import hsa_compile

from .helpers import (
    SPARSE,
    SPARSELY,
    Shape,
    Static,
    close,
    compile_hsa,
    decisions,
    new_cache,
    rule,
    run_static,
    sdpa,
    token,
)


@pytest.mark.slow
def test_cpu() -> None:
    """Triton is installed, and is not asked."""
    pytest.importorskip("triton")
    # The graph is that of F5, so that Inductor finds it in its cache.
    shape = Shape(length=8000, capacity=8192, batch=1, steps=1)
    compiled = compile_hsa(Static(), SPARSE, "inductor")
    close(run_static(compiled, shape), run_static(Static(rule(SPARSE)), shape))
    assert decisions(compiled) == SPARSELY


@torch.no_grad()
def test_tensors_of_two_devices() -> None:
    """A cache on another device than the query is left alone, with a reason, before any kernel sees it."""
    shape = Shape()
    keys, values = (t.to("meta") for t in new_cache(shape))
    q, k, v = (t.to("meta") for t in token(shape, 90))

    class Moved(Static):
        def forward(self, q, k, v, keys, values, position):  # type: ignore[override]
            keys[:, :, 90] = k[:, :, 0]
            values[:, :, 90] = v[:, :, 0]
            return sdpa(q, keys, values, None) * self.one

    model = Moved().to("meta")
    explanation = hsa_compile.explain(
        model, q, k, v, keys, values, torch.tensor([90]), options={"policy": SPARSE}
    )
    ((decision, reason),) = {(site.decision, site.reason) for site in explanation.sites}
    assert decision == "left" and "device meta" in reason


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@torch.no_grad()
def test_a_gpu_that_is_not_current() -> None:
    device, shape = torch.device("cuda:1"), Shape(size=64, value_size=64)
    cache, twin = ([t.to(device) for t in new_cache(shape)] for _ in range(2))
    compiled = compile_hsa(Static().to(device), {**SPARSE, "budget": 112}, "inductor")
    with torch.cuda.device(0):
        for at in range(90, 93):
            inputs, position = (
                [t.to(device) for t in token(shape, at)],
                torch.tensor([at]).to(device),
            )
            got = compiled(*inputs, *cache, position)
            want = Static().to(device)(*inputs, *twin, position)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            assert got.device == device
    assert decisions(compiled) == SPARSELY
