"""``is_causal=True`` is aligned at the top left, so that the one query of a decode step sees key 0 alone.

pytorch#108108, #144858. Right: whatever the graph says, reproduced and not repaired; masks aligned at the bottom right
mean what they say too.
"""

import pytest
import torch
from torch import Tensor, nn

from .helpers import (
    SPARSE,
    SPARSELY,
    Growing,
    Shape,
    Static,
    check_rewritten,
    close,
    compile_hsa,
    decisions,
    run_growing,
    run_static,
    sdpa,
)


def causal(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    return sdpa(q, keys, values, None, is_causal=True)


def first_value(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    return values[:, :, :1].repeat_interleave(2, 1)


@pytest.mark.parametrize(("kind", "run"), [(Static, run_static), (Growing, run_growing)])
def test_one_query_sees_the_first_value(kind: type, run) -> None:
    """Eager mode returns the first value, and so do we: within the budget and above it."""
    compiled = compile_hsa(kind(causal), SPARSE)
    for shape in (Shape(length=8, steps=2), Shape(length=90, steps=2)):
        got = run(compiled, shape)
        close(got, run(kind(causal), shape))
        close(got, run(kind(first_value), shape))
    assert decisions(compiled) == SPARSELY


def bottom_right(q: Tensor, keys: Tensor) -> Tensor:
    queries, tokens = q.shape[2], keys.shape[2]
    return torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)


def test_bottom_right_mask_of_a_growing_cache() -> None:
    """The last row of a lower-right triangle hides nothing."""
    check_rewritten(lambda q, k, v, m: sdpa(q, k, v, bottom_right(q, k)), growing=True)


def test_bottom_right_bias_object() -> None:
    """``causal_lower_right``, torch's own name for it: equal to eager, whatever is decided."""
    from torch.nn.attention.bias import causal_lower_right

    def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        bias = causal_lower_right(q.shape[2], keys.shape[2])
        return nn.functional.scaled_dot_product_attention(q, keys, values, bias)

    shape = Shape(length=8, heads=2)
    with torch.no_grad():
        want = run_growing(Growing(attend), shape)
        got = run_growing(compile_hsa(Growing(attend)), shape)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_top_left_triangle_written_out() -> None:
    check_rewritten(
        lambda q, k, v, m: sdpa(q, k, v, torch.ones(1, k.shape[2], dtype=torch.bool).tril())
    )


@pytest.mark.parametrize("aligned", ["top left", "bottom right"])
def test_several_queries(aligned: str) -> None:
    """Four queries over twelve keys and more: each sees what eager mode shows it."""

    def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        q = torch.cat((q, -q, 2 * q, q.flip(1)), 2)
        if aligned == "top left":
            out = causal(q, keys, values, None)
        else:
            out = sdpa(q, keys, values, bottom_right(q, keys))
        return out.flatten(1, 2).unsqueeze(2)

    check_rewritten(attend, Shape(length=10, steps=3), growing=True)
