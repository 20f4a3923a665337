"""ALiBi is built over the length of the query, and is silently zero at decode.

keras-hub#2861. Right: a bias follows the original position of its key, also after selected pages were gathered; a
spelling that is not recognised is left, with a reason.
"""

import pytest
import torch
from torch import Tensor

from ..models.helpers import decode, request, transformers
from .helpers import (
    SPARSE,
    SPARSELY,
    Growing,
    Shape,
    check,
    check_rewritten,
    close,
    compile_hsa,
    decisions,
    repeat_kv,
    rule,
    run_growing,
    sdpa,
)

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]


def slopes(keys: Tensor) -> Tensor:
    """``[1, H, 1, S]``: less the further back, as long as it is not masked."""
    return (SLOPES * torch.arange(1 - keys.shape[2], 1))[None]


def in_sdpa(attend):
    def layer(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        bias = slopes(keys)
        return attend(
            q, keys, values, bias if mask is None else bias.masked_fill(~mask, -torch.inf)
        )

    return layer


def spelled(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    keys, values = (repeat_kv(t, 2) for t in (keys, values))
    scores = torch.matmul(q, keys.transpose(2, 3)) * 0.25 + slopes(keys)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return torch.matmul(torch.softmax(scores, -1), values)


@pytest.mark.parametrize(("attend", "growing"), [(in_sdpa(sdpa), True), (spelled, False)])
def test_lossless(attend, growing: bool) -> None:
    check_rewritten(attend, growing=growing)


@pytest.mark.parametrize(("attend", "growing"), [(in_sdpa(sdpa), False), (spelled, True)])
def test_gathered_pages_keep_their_bias(attend, growing: bool) -> None:
    shape = Shape(steps=6)
    compiled = check(attend, shape, SPARSE, in_sdpa(rule(SPARSE)), growing)
    assert decisions(compiled) == SPARSELY
    if growing:
        without = run_growing(Growing(rule(SPARSE)), shape)
        difference = (run_growing(compiled, shape) - without).abs().max()
        assert difference > 1e-3, "the bias made no difference"


def tiny_model(family: str):
    if family == "bloom":
        config = transformers.BloomConfig(
            vocab_size=128, hidden_size=64, n_layer=1, n_head=4, initializer_range=0.1
        )
    else:
        config = transformers.MptConfig(
            vocab_size=128, d_model=64, n_layers=1, n_heads=4, expansion_ratio=1, max_seq_len=64,
            initializer_range=0.1,
        )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_models(family: str) -> None:
    """Bloom adds its bias inside of ``baddbmm`` over folded heads; MPT adds it to scores."""
    model, asked = tiny_model(family), request(2, length=20, steps=3, capacity=32)
    want = decode(model, model, "dynamic", asked)
    compiled = compile_hsa(model, {"budget": 48, "page_size": 16})
    got = decode(model, compiled, "dynamic", asked)
    close(got.logits, want.logits)
    assert decisions(compiled) == SPARSELY
