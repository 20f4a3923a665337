"""``hsa::index_scores``: the op, its kernel under Triton's interpreter, and what Inductor makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hsa_compile import ops  # noqa: F401
from hsa_compile.lowering import options, standalone
from hsa_compile.lowering.limits import index_limits
from hsa_compile.ops import index_scores as op
from hsa_compile.ops.index_scores import index_scores_reference

from .interpreted import Check, child_process
from .test_templates_lowering import written_code

SCALE = 0.3


@dataclass(frozen=True)
class Indexer:
    """Sizes of an indexer and of its cache."""

    batch: int = 2
    queries: int = 1
    heads: int = 3
    dim: int = 20
    tokens: int = 77

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and weights of either sign; keys are the first tokens of a longer buffer."""
        q = torch.randn(self.batch, self.queries, self.heads, self.dim).to(dtype)
        k = torch.randn(self.batch, self.tokens + 5, self.dim).to(dtype)[:, : self.tokens]
        weights = torch.randn(self.batch, self.queries, self.heads)
        return q, k, weights.to(torch.promote_types(dtype, torch.float32))


SIZES = [
    Indexer(),
    Indexer(batch=1, heads=1, dim=1, tokens=1),
    Indexer(queries=5, heads=16, dim=16, tokens=64),
    Indexer(batch=3, queries=2, heads=70, dim=33, tokens=200),
]


def by_hand(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """One score after the other, in fp64."""
    q, k, weights = q.double(), k.double(), weights.double()
    scores = torch.zeros(q.shape[0], q.shape[1], k.shape[1], dtype=torch.float64)
    for b, s, t in torch.cartesian_prod(*(torch.arange(n) for n in scores.shape)).tolist():
        for h in range(q.shape[2]):
            product = float(q[b, s, h] @ k[b, t])
            scores[b, s, t] += float(weights[b, s, h]) * max(0.0, SCALE * product)
    return scores


def close(got: Tensor, q: Tensor, k: Tensor, weights: Tensor) -> None:
    """Products are exact where they can be, so only sums in fp32 round: a few units of the largest sum."""
    exact = index_scores_reference(q.double(), k.double(), weights.double(), SCALE)
    largest = index_scores_reference(
        q.double().abs(), k.double().abs(), weights.double().abs(), SCALE
    )
    eps = torch.finfo(got.dtype).eps
    bound = eps * (q.shape[-1] + q.shape[2]) * largest.amax().item()
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=bound)


@pytest.mark.parametrize("indexer", SIZES, ids=str)
def test_the_specification_by_hand(indexer: Indexer) -> None:
    q, k, weights = indexer.inputs(torch.float64)
    torch.testing.assert_close(index_scores_reference(q, k, weights, SCALE), by_hand(q, k, weights))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize("indexer", SIZES, ids=str)
def test_the_op(indexer: Indexer, dtype: torch.dtype) -> None:
    q, k, weights = indexer.inputs(dtype)
    got = torch.ops.hsa.index_scores(q, k, weights, SCALE)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(got, q, k, weights)
    torch.library.opcheck(
        torch.ops.hsa.index_scores.default,
        (q, k, weights, SCALE),
        test_utils=("test_schema", "test_faketensor"),
    )


class Largest(TorchDispatchMode):
    """The most numbers that a result has had."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


def test_products_of_all_heads_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "CHUNK_NUMBERS", 1 << 12)
    q, k, weights = Indexer(batch=1, queries=2, heads=16, dim=8, tokens=10_000).inputs(
        torch.float32
    )
    with Largest() as seen:
        got = op.index_scores(q, k, weights, SCALE)
    close(got, q, k, weights)
    assert seen.numbers < q.shape[2] * got.numel() // 10


def test_compiled_for_any_length() -> None:
    compiled = torch.compile(torch.ops.hsa.index_scores, fullgraph=True)
    for batch, tokens in ((2, 50), (3, 77), (4, 130)):
        q, k, weights = Indexer(batch=batch, tokens=tokens).inputs(torch.bfloat16)
        close(compiled(q, k, weights, SCALE), q, k, weights)


def check_kernel(indexer: Indexer, dtype: torch.dtype, config: int) -> None:
    q, k, weights = indexer.inputs(dtype)
    chosen = options.index_scores_configs(q.element_size(), indexer.heads, indexer.dim)[config]
    close(standalone.index_scores(q, k, weights, SCALE, chosen), q, k, weights)


@pytest.fixture(scope="module")
def child() -> Iterator[Check]:
    pytest.importorskip("triton")
    with child_process() as run:
        yield run


@pytest.mark.parametrize("config", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("indexer", SIZES, ids=str)
def test_the_kernel(child: Check, indexer: Indexer, dtype: torch.dtype, config: int) -> None:
    child(check_kernel, indexer, dtype, config)


def check_lowered(dynamic: bool) -> None:
    q, k, weights = Indexer(tokens=300).inputs(torch.bfloat16)
    if dynamic:
        torch._dynamo.maybe_mark_dynamic(k, 1)

    def step(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        return torch.ops.hsa.index_scores(q * 2, k, weights, SCALE).topk(4, -1).indices

    code = written_code(step, [q, k, weights])
    assert code.count("def triton_tem_fused") == 1


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ((torch.bfloat16, 64, 128), None),
        ((torch.float64, 64, 128), "dtype torch.float64"),
        ((torch.bfloat16, 300, 128), "300 heads"),
        ((torch.bfloat16, 64, 512), "index head size 512"),
    ],
)
def test_limits(limits: tuple[torch.dtype, int, int], reason: str | None) -> None:
    found = index_limits(*limits)
    assert found is None if reason is None else found is not None and found.startswith(reason)


def check_single_tokens(additive: bool) -> None:
    """Pages of one token, chosen for all heads at once: two kernels, and no copy of the keys."""
    batch, heads, tokens = 2, 6, 300
    q, k, weights = Indexer(batch=batch, tokens=tokens).inputs(torch.bfloat16)
    query = torch.randn(batch, heads, 1, 24).bfloat16()
    keys, values = (torch.randn(batch, heads, tokens, n).bfloat16() for n in (24, 16))
    mask = torch.rand(batch, 1, 1, tokens) < 0.9

    def step(
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
    ) -> Tensor:
        scores = torch.ops.hsa.index_scores(q, k, weights, SCALE)
        chosen = scores.masked_fill(~mask[:, 0], -torch.inf).topk(16, -1, sorted=False).indices
        ids = chosen.to(torch.int32).expand(-1, heads, -1)
        bits = torch.ops.hsa.page_mask(mask, 1)
        bias = torch.where(mask, 0.0, -torch.inf) if additive else None
        attended = torch.ops.hsa.sparse_attention(
            query, keys, values, ids, None, bits, bias, 0.2, 1
        )
        return attended[0]

    code = written_code(step, [q, k, weights, query, keys, values, mask])
    assert code.count("def triton_tem_fused") == 3
    assert f"({batch}, {heads}, {tokens}, 24), ({heads * tokens * 24}" in code


@pytest.fixture(scope="module")
def fresh() -> Iterator[Check]:
    """A process of its own: what was compiled for a CPU before decomposes the ops."""
    pytest.importorskip("triton")
    with child_process(interpret=False) as run:
        yield run


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_lowered_to_the_kernel(fresh: Check, dynamic: bool) -> None:
    fresh(check_lowered, dynamic)


@pytest.mark.parametrize("additive", [False, True])
def test_attention_to_single_tokens_is_lowered(fresh: Check, additive: bool) -> None:
    fresh(check_single_tokens, additive)
