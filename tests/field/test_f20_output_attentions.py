"""A model is asked for its attention weights, and gets none, or wrong ones.

transformers#31990. Right: attention whose weights are wanted is left as it was, with that reason; rows sum to one.
"""

import torch
from torch import Tensor

from ..models.helpers import cache_argument, new_cache, tiny
from .helpers import Growing, Shape, close, compile_hsa, decisions, token
from .helpers import new_cache as plain_cache

REASON = "weights are used by more than the product with the values"


@torch.no_grad()
def test_tiny() -> None:
    model = tiny("llama", "eager")
    compiled, name = compile_hsa(model, {"budget": 48, "page_size": 16}), cache_argument(model)
    ids = torch.randint(3, 128, (2, 25), generator=torch.Generator().manual_seed(0))
    outs = []
    for step in (model, compiled):
        cache = new_cache(model, "dynamic")
        model(ids[:, :20], **{name: cache})
        outs.append(
            [
                step(ids[:, at : at + 1].clone(), output_attentions=True, **{name: cache})
                for at in range(20, 23)
            ]
        )
    for want, got in zip(*outs):
        close(got.logits, want.logits)
        assert len(got.attentions) == 2
        for ours, theirs in zip(got.attentions, want.attentions):
            close(ours, theirs)
            close(ours.sum(-1), torch.ones(ours.shape[:-1]))
    assert decisions(compiled) == {("left", f"attention {REASON}")}


class Watched(Growing):
    """Returns a number made of the weights."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor):  # type: ignore[override]
        keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        scores = torch.matmul(q, keys.transpose(2, 3)) * 0.25
        weights = torch.softmax(scores, -1)
        entropy = -(weights * weights.log()).sum()
        return torch.matmul(weights, values) * self.one, entropy, keys, values


@torch.no_grad()
def test_any_other_use_of_the_weights() -> None:
    shape = Shape(kv_heads=4)
    cache = [t[:, :, :90].contiguous() for t in plain_cache(shape)]
    compiled = compile_hsa(Watched())
    for ours, theirs in zip(
        compiled(*token(shape, 90), *cache), Watched()(*token(shape, 90), *cache)
    ):
        close(ours, theirs)
    ((decision, reason),) = decisions(compiled)
    assert decision == "left" and REASON in reason
