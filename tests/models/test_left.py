"""What cannot be rewritten is left exactly as it was, and ``explain`` says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hsa_compile
from hsa_compile import CacheError, RewriteError

from .left import CASES, Step, inputs, no_cache, write
from .plain import CAPACITY, dense

OPTIONS: dict[str, Any] = {"run": "eager", "policy": {"budget": 48, "page_size": 16, "recent": 16}}


@pytest.mark.parametrize(("step", "reason"), CASES)
def test_left_as_it_was(step: Step, reason: str) -> None:
    eager, compiled = inputs(), inputs()
    torch.manual_seed(1)
    expected = step(*eager)
    torch.manual_seed(1)
    got = torch.compile(step, backend="hsa", options=OPTIONS)(*compiled)
    for want, have in zip(_flat(expected), _flat(got), strict=True):
        assert torch.equal(want, have)
    for want, have in zip(eager, compiled, strict=True):
        assert torch.equal(want, have), "an input was written differently"
    sites = hsa_compile.explain(step, *inputs(), options=OPTIONS).sites
    assert [site.decision for site in sites] == ["left"]
    assert sites[0].reason.startswith(reason)
    assert "/tests/models/" in sites[0].source


def _flat(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def step(q, k, v, keys, values, at, keep):
    """What nothing is wrong with."""
    write(keys, values, k, v, at)
    return dense(q, keys, values, keep)


def test_strict_names_what_was_left() -> None:
    compiled = torch.compile(no_cache, backend="hsa", options={**OPTIONS, "strict": True})
    with pytest.raises(Exception, match="there is no KV cache behind them") as raised:
        compiled(*inputs())
    assert "RewriteError" in str(raised.value) or isinstance(raised.value, RewriteError)


def test_a_model_without_attention() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4), nn.Softmax(-1))
    x = torch.randn(3, 8)
    compiled = torch.compile(model, backend="hsa", options={**OPTIONS, "strict": True})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
        assert hsa_compile.explain(model, x, options=OPTIONS).sites == ()


@pytest.mark.parametrize("need_weights", [True, False])
def test_fused_multi_head_attention(need_weights: bool) -> None:
    model = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x, memory = torch.randn(2, 1, 32), torch.randn(2, 50, 32)
    with torch.no_grad():
        sites = hsa_compile.explain(
            model, x, memory, memory, need_weights=need_weights, options=OPTIONS
        ).sites
    assert [site.reason for site in sites] == [
        "torch.nn.MultiheadAttention's fused forward keeps no KV cache"
    ]


def test_a_router_is_no_attention() -> None:
    """A softmax of a product that chooses experts is neither a site nor a reason."""

    def router(x: Tensor, gate: Tensor, experts: Tensor) -> Tensor:
        chosen = F.softmax(F.linear(x, gate), dim=-1)
        return torch.einsum("te,ted->td", chosen, F.linear(x, experts).unflatten(-1, (3, 4)))

    given = torch.randn(5, 8), torch.randn(3, 8), torch.randn(12, 8)
    assert hsa_compile.explain(router, *given, options=OPTIONS).sites == ()


def test_attention_while_gradients_are_recorded() -> None:
    q, *rest = inputs()
    sites = hsa_compile.explain(step, q.requires_grad_(), *rest, options=OPTIONS).sites
    assert sites[0].reason.startswith("autograd is recording")
    with torch.no_grad():
        sites = hsa_compile.explain(step, q, *rest, options=OPTIONS).sites
    assert sites[0].decision == "sparse"


def test_a_cache_within_the_budget_stays_dense() -> None:
    options = {**OPTIONS, "policy": {"budget": CAPACITY, "page_size": 16}}
    sites = hsa_compile.explain(step, *inputs(), options=options).sites
    assert (sites[0].decision, sites[0].reason) == (
        "dense",
        f"the cache holds {CAPACITY} tokens, within the budget",
    )


@pytest.mark.parametrize("position", [CAPACITY, CAPACITY + 7, -CAPACITY - 1])
def test_a_position_outside_of_the_cache(position: int) -> None:
    """An error that says what is wrong, before anything is written."""

    q, k, v, keys, values, _, keep = inputs()
    before = keys.clone()
    compiled = torch.compile(step, backend="hsa", options=OPTIONS)
    with pytest.raises(CacheError, match=str(CAPACITY)):
        compiled(q, k, v, keys, values, torch.tensor([position]), keep)
    assert torch.equal(keys, before)
