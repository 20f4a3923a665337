"""Prompts in a padded batch generate something else than alone.

transformers#30670, torchtune#1250, unsloth PR#3795. Right: with a mask and positions each row's tokens are those of its
single run; without, whatever eager mode gives.
"""

import pytest
import torch

from ..models.helpers import Request, cache_argument, decode, new_cache, tiny
from .helpers import SPARSELY, close, compile_hsa, decisions, one_layer

LENGTHS, LONGEST, STEPS, CAPACITY = (3, 11), 11, 12, 64
POLICY = {"budget": 48, "page_size": 16}


def padded() -> Request:
    ids = torch.randint(3, 128, (2, LONGEST), generator=torch.Generator().manual_seed(3))
    begin = LONGEST - torch.tensor(LENGTHS)
    mask = (torch.arange(CAPACITY) >= begin[:, None]).long()
    return Request(ids * mask[:, :LONGEST], mask, STEPS)


def alone(request: Request, row: int) -> Request:
    """A row without its padding."""
    begin = LONGEST - LENGTHS[row]
    return Request(request.ids[row : row + 1, begin:], request.mask[row : row + 1, begin:], STEPS)


@pytest.mark.parametrize("kind", ["static", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_tokens_equal_single_runs(kind: str) -> None:
    model, asked = tiny("llama"), padded()
    compiled = compile_hsa(model, POLICY)
    together = decode(model, compiled, kind, asked)
    close(together.logits, decode(model, model, kind, asked).logits)
    for row in (0, 1):
        single = decode(model, model, "dynamic", alone(asked, row))
        assert torch.equal(together.tokens[row : row + 1], single.tokens)
        close(together.logits[row : row + 1], single.logits)
    assert decisions(compiled) == SPARSELY


@torch.no_grad()
def test_without_a_mask() -> None:
    """Padding is then text like any other, in eager mode and here."""
    model, asked = one_layer(tiny("llama")), padded()
    compiled, name = compile_hsa(model, POLICY), cache_argument(model)
    logits = []
    for step in (model, compiled):
        cache = new_cache(model, "dynamic")
        out = model(asked.ids, **{name: cache}).logits[:, -1:]
        logits.append([])
        for at in range(6):
            token = (out.argmax(-1) if at == 0 else torch.full((2, 1), 7 + at)).clone()
            out = step(token, **{name: cache}).logits
            logits[-1].append(out)
    close(torch.cat(logits[1]), torch.cat(logits[0]))


def test_generate() -> None:
    """The loop of transformers, with its own handling of mask and positions; prompts are compiled as well."""
    model, asked = one_layer(tiny("llama")), padded()
    asking = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
    singles = [
        model.generate(r.ids, attention_mask=torch.ones_like(r.ids), **asking)[0, -STEPS:]
        for r in (alone(asked, 0), alone(asked, 1))
    ]
    model.forward = compile_hsa(model.forward, POLICY)
    tokens = model.generate(asked.ids, attention_mask=asked.mask[:, :LONGEST], **asking)
    assert torch.equal(tokens[:, -STEPS:], torch.stack(singles))
    found = decisions(model)
    assert ("sparse", "") in found
    # The prompt, with a cache that is made in the same graph.
    prompt = "the keys are concatenated to something that is no graph input"
    assert all(why == prompt for decision, why in found if decision == "left")
