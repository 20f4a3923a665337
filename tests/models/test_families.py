"""Every decoder family of transformers decodes what it decodes eagerly; what became of its attention is recorded.

The budget covers what is attended, so every page is selected; the capacity of static caches is above it, so pages are
selected at run time. ``pytest tests/models/test_families.py --run-slow --write-models`` makes docs/models.md of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hsa_compile

from . import families
from .families import BROKEN, EAGER_ONLY, NOT_SURVEYED
from .helpers import Request, compile_hsa, decode

PROMPT = 41
STEPS = 12
BUDGET = 64
CAPACITY = 96
POLICY = {"budget": BUDGET, "page_size": 16}
PADDING = (0, 7, 19)
"""Masked tokens of the rows of a batch, before or after the prompt's own."""
assert PROMPT + STEPS <= BUDGET < CAPACITY
assert PROMPT < families.WINDOW < PROMPT + STEPS

# One of each kind of attention, and of each kind of reason to leave it.
QUICK = {
    ("falcon", "static", "sdpa", 3),
    ("gptj", "dynamic", "sdpa", 3),
    ("opt", "static", "sdpa", 1),
    ("bloom", "dynamic", "eager", 3),
    ("gpt_oss", "static", "eager", 3),
    ("cohere", "static", "eager", 3),
    ("phi", "dynamic", "sdpa", 3),
    ("olmoe", "static", "sdpa", 3),
    ("deepseek_v3", "static", "sdpa", 3),
    ("olmo_hybrid", "static", "sdpa", 3),
    ("gpt_neo", "static", "eager", 1),
}
REWRITTEN = {"falcon", "gptj", "opt", "cohere", "phi", "olmoe"}
"""Of the quick ones, those of which every layer is rewritten."""


def matrix() -> list[object]:
    cases = []
    for family in families.surveyed():
        for attention in ("eager",) if family in EAGER_ONLY else ("sdpa", "eager"):
            for kind in ("static", "dynamic"):
                for batch in (3, 1):
                    case = (family, kind, attention, batch)
                    marks = () if case in QUICK else pytest.mark.slow
                    cases.append(pytest.param(*case, marks=marks, id="-".join(map(str, case))))
    return cases


def padded(batch: int, side: str) -> Request:
    """Prompts that end (``right``) or begin (``left``) with masked tokens; a batch of one has the most."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, families.VOCABULARY, (batch, PROMPT), generator=generator)
    count = torch.tensor(PADDING[-batch:])[:, None]
    places = torch.arange(CAPACITY)
    if side == "left":
        masked = places < count
    else:
        masked = (places >= PROMPT - count) & (places < PROMPT)
    mask = (~masked).long()
    return Request(ids * mask[:, :PROMPT], mask, STEPS)


def fed(batch: int) -> Tensor:
    """What is decoded, ``[B, STEPS]``: the logits of a prompt with padding on the right choose nothing."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, families.VOCABULARY, (batch, STEPS), generator=generator)


def run(model: Any, step: Callable[..., Any], kind: str, asked: Request) -> Tensor:
    """The logits of the steps, ``[B, STEPS, V]``."""
    cache = families.new_cache(model, kind, CAPACITY)
    return decode(model, step, kind, asked, fed(asked.ids.shape[0]), cache).logits


def run_at_once(model: Any, asked: Request) -> Tensor:
    """The same logits without a cache."""
    ids = torch.cat([asked.ids, fed(asked.ids.shape[0])], 1)
    with torch.no_grad():
        logits = model(ids, attention_mask=asked.mask[:, : ids.shape[1]], use_cache=False).logits
    return logits[:, PROMPT:]


def difference(got: Tensor, expected: Tensor) -> float:
    """The largest, relative to the largest logit or to 1."""
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1))


def fails(model: Any, kind: str, asked: Request) -> bool:
    try:
        got = run(model, model, kind, asked)
    except (RuntimeError, ValueError, KeyError, AssertionError):
        return True
    return difference(got, run_at_once(model, asked)) > 1e-2


@pytest.mark.parametrize(("family", "kind", "attention", "batch"), matrix())
def test_a_family_decodes_what_it_decodes_eagerly(
    family: str,
    kind: str,
    attention: str,
    batch: int,
    record_property: Callable[[str, object], None],
) -> None:
    record_property("family", {"family": family, "kind": kind, "attention": attention})
    try:
        model = families.build(family, attention)
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        pytest.skip(f"this release of transformers: {error}")
    # One compiled model decodes both: padding is data.
    asked = {side: padded(batch, side) for side in ("left", "right")}
    if reason := BROKEN.get(family, {}).get(kind):
        assert fails(model, kind, asked["left"]), "works now: take it out of BROKEN"
        record_property("result", {"broken": reason})
        return

    expected = {side: run(model, model, kind, request) for side, request in asked.items()}
    compiled = compile_hsa(model, POLICY)
    errors = [
        difference(run(model, compiled, kind, request), expected[side])
        for side, request in asked.items()
    ]
    found = hsa_compile.explain(compiled)
    sites = [(site.index, site.decision, site.reason) for site in found.sites]
    note = re.sub(r"/\S*/", "", found.note)
    record_property("result", {"error": max(errors), "sites": sites, "note": note})
    assert max(errors) <= 1e-5
    for _, decision, reason in sites:
        assert (decision == "sparse") == (not reason)
        assert decision in ("sparse", "dense", "left")
    if all(decision == "left" for _, decision, _ in sites):
        assert hsa_compile.stats(compiled).steps == 0
    if family in REWRITTEN and (family, kind, attention, batch) in QUICK:
        assert {(index, decision) for index, decision, _ in sites} == {(0, "sparse"), (1, "sparse")}
        assert hsa_compile.stats(compiled).steps == 2 * STEPS


def test_every_family_is_surveyed_or_left_out_with_a_reason() -> None:
    assert not families.EAGER_ONLY & set(NOT_SURVEYED)
    assert BROKEN.keys() <= set(families.surveyed())
    assert all(reason for reason in NOT_SURVEYED.values())
