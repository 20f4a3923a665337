"""Offsets into a large cache overflow 32 bits.

sglang#20389, triton#6748. Right: page id times stride past 2**31 reads what it should, on every path.

The caches here are views of few tokens over more than 2**31 numbers, of which only the pages that are touched exist.
"""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

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
)

SHAPE = Shape(length=90, steps=2, batch=1, dtype=torch.float16)
STRIDE = 2**31 // 64
"""Of a token, in numbers: token 64 is the first beyond 2**31."""


def spread(cache: Tensor, store: Tensor, stride: int = STRIDE) -> Tensor:
    """The same numbers, tokens (or pages) far apart."""
    batch, heads, tokens, size = cache.shape
    view = store.as_strided(cache.shape, (heads * size, size, stride, 1))
    assert batch == 1 and (tokens - 1) * stride + heads * size <= store.numel()
    view.copy_(cache)
    return view


def sparse_memory() -> Tensor:
    """4 GiB and more that are handed out only as they are touched."""
    numpy = pytest.importorskip("numpy")
    try:
        return torch.from_numpy(numpy.zeros(128 * STRIDE, dtype=numpy.float16))
    except MemoryError:
        pytest.skip("this machine grants no memory that it does not have")


def test_on_a_cpu() -> None:
    keys, values = new_cache(SHAPE)
    cache = spread(keys, sparse_memory()), spread(values, sparse_memory())
    compiled = compile_hsa(Static(), SPARSE)
    got = run_static(compiled, SHAPE, cache)
    close(got, run_static(compile_hsa(Static(), SPARSE), SHAPE), atol=1e-3)
    close(got.float(), run_static(Static(rule(SPARSE)), SHAPE).float(), atol=2e-3)
    del cache


def kernels() -> None:
    """In a child under Triton's interpreter: the kernels read the spread cache as they read a dense one."""
    from hsa_compile.lowering import standalone
    from hsa_compile.ops.page_mask import page_mask

    keys, values = new_cache(SHAPE)
    wide = spread(keys, sparse_memory()), spread(values, sparse_memory())
    q = torch.randn(1, 4, 1, 16).half()
    bits = page_mask((torch.arange(128) <= 90)[None, None, None], 16)
    results = []
    for k, v in ((keys, values), wide):
        summary, covered = torch.zeros(1, 2, 8, 32).half(), torch.zeros(1, 2, 8, 2).long() - 1
        if k is wide[0]:
            summary = spread(summary, sparse_memory(), 16 * STRIDE)
        standalone.summarize(k, bits, torch.tensor([90]), summary, covered, "quest", 16)
        ids, counts = standalone.select(
            q, summary, bits, 0.25, "quest", 16, 4, 4, 0, 4, 16, "softmax_mean"
        )
        out, lse = standalone.sparse_attention(q, k, v, ids, None, bits, None, 0.25, 16)
        assert int(ids.max()) * 16 * STRIDE > 2**31, "no offset is large"
        results.append((summary, ids, counts, out, lse))
    for dense, far in zip(*results):
        torch.testing.assert_close(far, dense, rtol=0, atol=0)
    print("equal")


CHILD = """
import torch
from tests.ops.interpreted import start_interpreter
empty = torch.empty
start_interpreter()
torch.empty = empty
from tests.field import test_f53_large_offsets
test_f53_large_offsets.kernels()
"""


def test_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD], env=env, capture_output=True, text=True
    )
    if "Skipped" in done.stderr:
        pytest.skip("this machine grants no memory that it does not have")
    assert done.returncode == 0 and "equal" in done.stdout, done.stderr[-3000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@torch.no_grad()
def test_on_a_gpu() -> None:
    """Through Inductor, over 8 GiB that exist."""
    from .helpers import token

    stores = [torch.empty(128 * STRIDE, dtype=torch.float16, device="cuda") for _ in range(2)]
    made = [t.cuda() for t in new_cache(SHAPE)]
    cache = [spread(t, store) for t, store in zip(made, stores)]
    results = []
    for used in (made, cache):
        compiled = compile_hsa(Static().cuda(), SPARSE, "inductor")
        for at in (90, 91):
            inputs = [t.cuda() for t in token(SHAPE, at)]
            results.append(compiled(*inputs, *used, torch.tensor([at], device="cuda")))
        assert decisions(compiled) == SPARSELY
    close(results[2], results[0], atol=1e-3)
    close(results[3], results[1], atol=1e-3)
