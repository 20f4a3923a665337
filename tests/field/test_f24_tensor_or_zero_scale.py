"""A scale that is a tensor, or zero, crashes the pass that looks for attention.

pytorch#191203, #195591. Right: the site is left as it was, with a reason, and gives what eager gives.
"""

import pytest
import torch
from torch import Tensor

from .helpers import (
    Shape,
    Static,
    beside,
    check,
    check_left,
    compile_hsa,
    decisions,
    repeat_kv,
    run_static,
    sdpa,
)

TENSOR = torch.tensor(0.3)
PER_HEAD = torch.tensor([0.1, 0.2, 0.3, 0.4])[:, None, None]


def scaled(change):
    def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        keys, values = (repeat_kv(t, 2) for t in (keys, values))
        scores = change(torch.matmul(q, keys.transpose(2, 3)))
        scores = scores.masked_fill(~mask, float("-inf"))
        return torch.matmul(torch.softmax(scores, -1), values)

    return attend


def test_on_scores() -> None:
    changes = [
        lambda s: s * TENSOR,
        lambda s: TENSOR * s,
        lambda s: s / TENSOR,
        lambda s: s * PER_HEAD,
        lambda s: s * 0.0,
        lambda s: s * 0,
        lambda s: s * torch.rsqrt(torch.tensor(16.0)),
        lambda s: s * torch.sqrt(s.abs().amax()),
    ]
    check_left(beside([scaled(change) for change in changes]), "scale is a tensor or zero")


def test_zero_in_sdpa() -> None:
    check_left(lambda q, k, v, m: sdpa(q, k, v, m, scale=0.0), "the scale is zero")


def test_zero_as_the_product_of_factors() -> None:
    """Two factors so small that their product is zero in floating point."""
    check_left(scaled(lambda s: s * 1e-200 * 1e-200), "zero")


def test_a_constant_in_a_tensor() -> None:
    """A tensor made of a number within the graph is as good as the number."""
    check(scaled(lambda s: s * s.new_tensor(0.3)))
    check(scaled(lambda s: s / torch.full((), 4.0)))


@pytest.mark.parametrize("scale", [lambda: TENSOR.item(), lambda: float(TENSOR)])
def test_tensor_made_a_number(scale) -> None:
    """Breaks the graph or is a number only at run time: eager's result, no exception."""

    def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return sdpa(q, keys, values, mask, scale=scale())

    shape = Shape()
    want = run_static(Static(attend), shape)
    compiled = compile_hsa(Static(attend))
    torch.testing.assert_close(run_static(compiled, shape), want, rtol=1e-5, atol=1e-5)
    assert all(decision in ("sparse", "left") for decision, _ in decisions(compiled))


class Argument(Static):
    """The scale is an argument, as a number or a tensor."""

    def forward(self, q, k, v, keys, values, position, scale):  # type: ignore[override]
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        mask = (torch.arange(keys.shape[2]) <= position)[None, None, None]
        return scaled(lambda s: s * scale)(q, keys, values, mask) * self.one


@pytest.mark.parametrize("make", [float, torch.tensor])
def test_scale_as_an_argument(make) -> None:
    """It may change from call to call: each result is that call's own."""
    layer = Argument()
    compiled = compile_hsa(layer)
    for number in (0.3, 0.5, 0.0, 1.0, 0.3):

        def step(*inputs, function=None, number=number):
            return function(*inputs, make(number))

        want = run_static(lambda *i: step(*i, function=layer), Shape(steps=1))
        got = run_static(lambda *i: step(*i, function=compiled), Shape(steps=1))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
