"""A causal buffer, sliced to the lengths of the step, keeps attention from being recognised.

pytorch#119760. Right: recognised; and attention that is spelled in a way that is not recognised is listed by
``explain`` with the reason. Right numbers in either case.
"""

import pytest
import torch
from torch import Tensor, nn

import hsa_compile

from ..models.helpers import decode, request, tiny
from .helpers import (
    SPARSE,
    SPARSELY,
    Growing,
    Shape,
    check_rewritten,
    check_sparse,
    close,
    compile_hsa,
    decisions,
    rule,
    run_growing,
    sites,
)

SHAPE = Shape(length=16, steps=6, kv_heads=4)


class Sliced(Growing):
    """GPT-2's attention as it was written for years."""

    def __init__(self, fill: str) -> None:
        super().__init__(self.spelled)
        triangle = torch.ones(128, 128, dtype=torch.bool).tril().view(1, 1, 128, 128)
        self.register_buffer("bias", triangle, persistent=False)
        self.fill = fill

    def spelled(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        scores = torch.matmul(q, keys.transpose(-1, -2))
        scores = scores / torch.full(
            [], values.size(-1) ** 0.5, dtype=scores.dtype, device=scores.device
        )
        query_length, key_length = q.size(-2), keys.size(-2)
        seen = self.bias[:, :, key_length - query_length : key_length, :key_length]
        lowest = torch.finfo(scores.dtype).min
        if self.fill == "where":
            lowest = torch.full([], lowest, dtype=scores.dtype, device=scores.device)
            scores = torch.where(seen, scores.to(scores.dtype), lowest)
        elif self.fill == "masked_fill":
            scores = scores.masked_fill(seen == 0, float("-inf"))
        else:
            scores = scores * seen.float() - 1e9 * (1 - seen.float())
        return torch.matmul(nn.functional.softmax(scores, dim=-1).type(values.dtype), values)


@pytest.mark.parametrize("fill", ["where", "masked_fill"])
def test_recognised(fill: str) -> None:
    compiled = compile_hsa(Sliced(fill), {"budget": 64, "page_size": 16})
    close(run_growing(compiled, SHAPE), run_growing(Sliced(fill), SHAPE))
    assert decisions(compiled) == SPARSELY
    compiled = compile_hsa(Sliced(fill), {**SPARSE, "budget": 16, "sink": 0, "recent": 1})
    wanted = rule({**SPARSE, "budget": 16, "sink": 0, "recent": 1})
    close(run_growing(compiled, SHAPE), run_growing(Growing(wanted), SHAPE))


def test_the_oldest_spelling_is_listed() -> None:
    """The first GPT-2 multiplied by the mask: scores times something that is no number."""
    compiled = compile_hsa(Sliced("multiply"), {"budget": 64, "page_size": 16})
    close(run_growing(compiled, SHAPE), run_growing(Sliced("multiply"), SHAPE))
    found = sites(compiled)
    assert found and all(site.decision == "left" and site.reason for site in found)


def einsum(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, keys) * 0.25
    return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores, -1), values)


def flattened(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Heads folded into the batch, as ``baddbmm`` asks (Bloom, and GPT-2's reordered product)."""
    flat_q, flat_keys, flat_values = (t.reshape(-1, *t.shape[2:]) for t in (q, keys, values))
    nothing = torch.zeros(1, 1, keys.shape[2])
    scores = torch.baddbmm(nothing, flat_q, flat_keys.transpose(1, 2), beta=0.0, alpha=0.25)
    scores = scores.view(*q.shape[:3], keys.shape[2])
    chosen = torch.softmax(scores, -1).view(-1, *scores.shape[2:])
    return torch.bmm(chosen, flat_values).view(*q.shape)


def three_dimensional(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """The same with ``bmm``, and softmax over three dimensions (OPT, Bart)."""
    flat_q, flat_keys, flat_values = (t.reshape(-1, *t.shape[2:]) for t in (q, keys, values))
    scores = torch.bmm(flat_q * 0.25, flat_keys.transpose(1, 2))
    return torch.bmm(torch.softmax(scores, -1), flat_values).view(*q.shape)


def exponentials(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """No softmax at all: not recognised, and not to be: right numbers are all that is asked."""
    scores = torch.exp(torch.matmul(q, keys.transpose(2, 3)) * 0.25)
    return torch.matmul(scores, values) / scores.sum(-1, keepdim=True)


@pytest.mark.parametrize("attend", [einsum, flattened, three_dimensional])
def test_other_spellings_are_rewritten_or_listed(attend) -> None:
    compiled = compile_hsa(Growing(attend), {"budget": 64, "page_size": 16})
    close(run_growing(compiled, SHAPE), run_growing(Growing(attend), SHAPE))
    found = sites(compiled)
    assert found, "attention that explain does not know of"
    assert all(site.decision == "sparse" or site.reason for site in found)


def test_no_softmax() -> None:
    compiled = compile_hsa(Growing(exponentials), {"budget": 64, "page_size": 16})
    close(run_growing(compiled, SHAPE), run_growing(Growing(exponentials), SHAPE))
    assert hsa_compile.stats(compiled).steps == 0


TRIANGLE = torch.ones(128, 128, dtype=torch.bool).tril()


def masked_by(row, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    scores = torch.matmul(q, keys.transpose(2, 3)) * 0.25
    scores = torch.where(row, scores, torch.finfo(scores.dtype).min)
    return torch.matmul(torch.softmax(scores, -1), values)


def test_a_row_of_the_triangle() -> None:
    """A static cache picks its row by a tensor."""

    def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return masked_by(TRIANGLE[(mask.sum() - 1).reshape(1)][None, None], q, keys, values)

    check_rewritten(attend, Shape(kv_heads=4))


def test_attention_behind_a_graph_break() -> None:
    """The row is picked by a number that only the data tells, which breaks the graph inside of attention.

    The cache is then written in one graph and only read in another, which does not miss the writes.
    """

    def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return masked_by(TRIANGLE[int(mask.sum() - 1)][None, None, None], q, keys, values)

    check_rewritten(attend, Shape(kv_heads=4))
    check_sparse(attend, Shape(kv_heads=4))


def test_gpt2() -> None:
    """GPT-2 of transformers, its eager attention, 16 tokens."""
    model = tiny("gpt2", "eager")
    asked = request(2, length=16, steps=4, capacity=32)
    want = decode(model, model, "dynamic", asked)
    compiled = compile_hsa(model, {"budget": 48, "page_size": 16})
    got = decode(model, compiled, "dynamic", asked)
    close(got.logits, want.logits)
    assert decisions(compiled) == SPARSELY
