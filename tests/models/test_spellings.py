"""Every spelling of attention is understood: its scale, its masks, its repetition of heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hsa_compile
from hsa_compile import LayerPolicy

from . import plain, reference
from .helpers import compile_hsa
from .plain import Write
from .spellings import SPELLINGS, Spelling

PART = LayerPolicy(algorithm="cuboid", budget=48, page_size=16, sink=4, recent=16)
WHOLE = LayerPolicy(budget=plain.CAPACITY, page_size=16)
STEPS = 6


def by_the_rule(spelling: Spelling, policy: LayerPolicy) -> plain.Attend:
    def attend(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
        return reference.sparse_attention(
            *(q, keys, values, spelling.mask(keep), spelling.scale, policy),
            softcap=spelling.softcap,
            sink=spelling.sink,
        )

    return attend


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda spelling: spelling.name)
def test_spelling(spelling: Spelling) -> None:
    torch.manual_seed(0)
    model, twin = plain.twins(plain.decoder(Write(plain.setitem)), by_the_rule(spelling, PART))
    model.attend = spelling.function
    before = {name: held.clone() for name, held in model.state_dict().items()}

    # First that the test itself is right: with everything selected, the rule is what the spelling computes.
    eager = plain.decode(model, model, STEPS, plain.LENGTH, seed=2)
    model.load_state_dict(before)
    model.attend = by_the_rule(spelling, WHOLE)
    torch.testing.assert_close(
        plain.decode(model, model, STEPS, plain.LENGTH, seed=2), eager, rtol=0, atol=1e-5
    )
    model.load_state_dict(before)
    model.attend = spelling.function

    expected = plain.decode(twin, twin, STEPS, plain.LENGTH, seed=2)
    compiled = compile_hsa(model, PART, strict=True)
    got = plain.decode(model, compiled, STEPS, plain.LENGTH, seed=2)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert [site.decision for site in hsa_compile.explain(compiled).sites] == ["sparse"] * 2
