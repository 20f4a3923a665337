"""Several query tokens at once: every spelling of attention, and models of transformers that verify drafts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hsa_compile
from hsa_compile import LayerPolicy

from . import reference
from .helpers import (
    CAPACITY,
    Request,
    cache_argument,
    compile_hsa,
    new_cache,
    request,
    tiny,
)
from .plain import CAPACITY as SPELLED
from .plain import HEADS, KV_HEADS, SIZE, Attend
from .reference import by_the_rule
from .spellings import SPELLINGS, Spelling

PART = LayerPolicy(algorithm="cuboid", budget=48, page_size=16, sink=4, recent=16)
UNEVEN = LayerPolicy(budget=[32, 64], page_size=16, sink=4, recent=8, dense_below=0.4)
WHOLE = LayerPolicy(budget=144, page_size=16)
QUERIES = 3
# These spell the number of queries out as 1.
ONE_QUERY = ("heads_merged", "baddbmm", "baddbmm_of_zeros", "causal_query")


class Spelled(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.one = nn.Parameter(torch.ones(()))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor
    ) -> Tensor:
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v)
        keep = (torch.arange(SPELLED) <= at[:, None])[None, None]
        return self.attend(q, keys, values, keep).transpose(1, 2).flatten(2) * self.one


def spelled_steps(step: Callable[..., Tensor], steps: int = 4) -> Tensor:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, KV_HEADS, SPELLED, SIZE).unbind()
    outs = []
    with torch.no_grad():
        for i in range(steps):
            q = torch.randn(2, HEADS, QUERIES, SIZE)
            k, v = torch.randn(2, 2, KV_HEADS, QUERIES, SIZE).unbind()
            at = torch.arange(QUERIES) + 91 + QUERIES * i  # one step crosses the border of a page
            outs.append(step(q, k, v, keys, values, at))
    return torch.stack(outs)


def ruled(spelling: Spelling, policy: LayerPolicy) -> Attend:
    def attend(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
        return reference.sparse_attention(
            *(q, keys, values, spelling.mask(keep), spelling.scale, policy),
            softcap=spelling.softcap,
            sink=spelling.sink,
        )

    return attend


@pytest.mark.parametrize(
    "spelling",
    [spelling for spelling in SPELLINGS if spelling.name not in ONE_QUERY],
    ids=lambda spelling: spelling.name,
)
def test_spelling(spelling: Spelling) -> None:
    # First that the test itself is right: with everything selected, the rule is what the spelling computes.
    eager = spelled_steps(Spelled(spelling.function))
    whole = LayerPolicy(budget=SPELLED, page_size=16)
    torch.testing.assert_close(
        spelled_steps(Spelled(ruled(spelling, whole))), eager, rtol=0, atol=1e-5
    )
    expected = spelled_steps(Spelled(ruled(spelling, PART)))
    compiled = compile_hsa(Spelled(spelling.function), PART, strict=True)
    torch.testing.assert_close(spelled_steps(compiled), expected, rtol=0, atol=1e-5)
    assert [site.decision for site in hsa_compile.explain(compiled).sites] == ["sparse"]
    assert (eager - expected).abs().max() > 1e-3, "nothing was left out"


def verified(
    model: Any, step: Callable[..., Any], kind: str, asked: Request, rounds: list[tuple[int, int]]
) -> Tensor:
    """Prefill eagerly with ``model``, then steps of several given tokens each, of which some are taken back.

    rounds: tokens of a step, and how many of them stay.
    """
    cache, name = new_cache(model, kind, asked.mask.shape[1]), cache_argument(model)
    random = torch.Generator().manual_seed(3)
    placed = "position_ids" in inspect.signature(model.forward).parameters
    logits, addresses, length = [], [], asked.length

    def call(of: Callable[..., Any], ids: Tensor, start: int, whole: bool) -> Tensor:
        stop = start + ids.shape[1]
        mask = asked.mask if whole else asked.mask[:, :stop].clone()
        at = asked.positions[:, start:stop].clone()
        for held in (ids, at):
            torch._dynamo.mark_static(held, 1)
        positions = {"position_ids": at} if placed else {}
        return of(ids, attention_mask=mask, **positions, **{name: cache}).logits

    with torch.no_grad():
        call(model, asked.ids, 0, False)
        for number, keep in rounds:
            ids = torch.randint(3, 128, (asked.ids.shape[0], number), generator=random)
            logits.append(call(step, ids, length, kind == "static"))
            addresses.append(cache.layers[0].keys.data_ptr())
            length += keep
            if number > keep:
                cache.crop(-(number - keep)) if kind == "static" else cache.crop(keep - number)
    # Tokens are taken back in place, once all graphs are compiled.
    assert len(set(addresses[-4:])) == 1 or step is model
    return torch.cat(logits, 1)


ROUNDS = [(1, 1), (5, 3), (5, 5), (5, 1), (1, 1), (2, 1), (5, 4), (5, 2), (1, 1), (5, 5)]


def check(
    family: str,
    kind: str,
    batch: int,
    policy: LayerPolicy,
    attention: str = "sdpa",
    run: str = "eager",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Lossless equal to eager, above the budget to the rule."""
    model = tiny(family, attention).to(dtype)
    asked = request(batch, 100, capacity=CAPACITY)
    dense = verified(model, model, kind, asked, ROUNDS)
    expected = dense
    if policy is not WHOLE:
        with by_the_rule(model, policy):
            expected = verified(model, model, kind, asked, ROUNDS)
        assert (dense - expected).abs().max() > 1e-3, "nothing was left out"
    compiled = compile_hsa(model, policy, run)
    got = verified(model, compiled, kind, asked, ROUNDS)
    atol = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)
    sites = hsa_compile.explain(compiled).sites
    assert {(site.decision, site.reason) for site in sites} == {("sparse", "")}
    assert hsa_compile.stats(compiled).steps == len(ROUNDS)


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize(
    "policy",
    [PART, *(pytest.param(layer, marks=pytest.mark.slow) for layer in (WHOLE, UNEVEN))],
    ids=["sparse", "lossless", "uneven"],
)
def test_drafts_are_verified(kind: str, batch: int, policy: LayerPolicy) -> None:
    check("llama", kind, batch, policy)


@pytest.mark.parametrize(
    "policy", [pytest.param(WHOLE, marks=pytest.mark.slow), PART], ids=["lossless", "sparse"]
)
def test_attention_written_out(policy: LayerPolicy) -> None:
    """GPT-2's own: an additive mask with a row a token."""
    check("gpt2", "dynamic", 3, policy, "eager")


@pytest.mark.parametrize("kind", [pytest.param("static", marks=pytest.mark.slow), "dynamic"])
def test_half_precision(kind: str) -> None:
    check("llama", kind, 3, WHOLE, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        pytest.param("static", PART, id="static", marks=pytest.mark.slow),
        pytest.param("dynamic", WHOLE, id="dynamic", marks=pytest.mark.slow),
    ],
)
def test_with_inductor(kind: str, policy: LayerPolicy) -> None:
    check("llama", kind, 3, policy, run="inductor")


DRAFTS = {
    "looked up in the prompt": lambda: {"prompt_lookup_num_tokens": 3},
    "of another model": lambda: {"assistant_model": endless("qwen2")},
}


def endless(family: str) -> Any:
    model = tiny(family)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize(
    "fixed", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fixed", "varying"]
)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_generate_with_drafts(drafts: str, fixed: bool) -> None:
    """Steps of a fixed number of tokens are rewritten; where Dynamo lets the number vary they are left, and right."""

    def generate(model: Any) -> Tensor:
        how = {"max_new_tokens": 20, "do_sample": False, **DRAFTS[drafts]()}
        return model.generate(request(1, 40).ids, **how)

    expected = generate(endless("llama"))
    model = endless("llama")
    forward = compile_hsa(model.forward, LayerPolicy(budget=96, page_size=16))

    def step(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        held = [input_ids, *(x for x in kwargs.values() if isinstance(x, Tensor))]
        for x in held if fixed else ():
            if x.ndim > 1 and x.shape[1] == input_ids.shape[1]:
                torch._dynamo.mark_static(x, 1)
        return forward(input_ids, *args, **kwargs)

    model.forward = functools.wraps(model.forward)(step)
    assert torch.equal(generate(model), expected)
    found = {(site.decision, site.reason) for site in hsa_compile.explain(forward).sites}
    if fixed:
        # The prefill, to which a model that drafts adds its first token.
        prefill = {f"{n} query tokens: only steps of up to 16 are rewritten" for n in (40, 41)}
        assert {why for decision, why in found if decision == "left"} <= prefill
        assert hsa_compile.stats(forward).steps > 0
    else:
        assert all("query tokens" in why for decision, why in found if decision == "left")
