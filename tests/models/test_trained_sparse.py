"""Models that were trained to choose their tokens: attention reads those alone, and the result is the model's own."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import hsa_compile
from hsa_compile.passes.graph_tools import VIEWS, modifies, op, tensor

from ..golden.format import lowered
from . import families
from .chosen import (
    AcrossTokens,
    Added,
    Alone,
    AnotherLength,
    Apart,
    AsCached,
    AsKeys,
    ByPosition,
    FromOutside,
    Latent,
    Normed,
    OtherScores,
    SeenElsewhere,
    Smallest,
    Sum,
    WrittenLater,
    given,
)
from .families import CONFIG_MAPPING, new_cache
from .helpers import (
    CAPACITY,
    VOCABULARY,
    Request,
    compile_hsa,
    decode,
    graphs_compiled,
    transformers,
)

TOPK = 16
PROMPT = 12
"""Shorter than what is chosen: decoding begins where everything is."""
STEPS = 20
POLICY = {"budget": 32, "page_size": 16, "recent": 16}
ALIKE = ("deepseek_v32", "glm_moe_dsa")
OTHERS = ("axk2", "dots3_note_text", "hy_v4")


PADDING = torch.tensor([0, 4, 9])
"""Left padding of the rows: the last one attends 3 tokens of the prompt."""


def prompt(batch: int, capacity: int = CAPACITY, steps: int = STEPS) -> Request:
    ids = torch.randint(3, VOCABULARY, (batch, PROMPT), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(capacity) >= PADDING[:batch, None]).long()
    return Request(ids * mask[:, :PROMPT], mask, steps)


def build(family: str, attention: str, **fields: object) -> Any:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    config = families.config(family)
    for name, value in {"index_topk": TOPK, **fields}.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention
    ).eval()


def both(model: Any, kind: str, batch: int, run: str = "eager", **policy: object) -> Any:
    """Logits of the model and of the compiled model over the same tokens, and what was compiled."""
    asked = prompt(batch)
    want = decode(model, model, kind, asked, cache=new_cache(model, kind, CAPACITY))
    compiled = compile_hsa(model, {**POLICY, **policy}, run)
    got = decode(model, compiled, kind, asked, want.tokens, new_cache(model, kind, CAPACITY))
    return want.logits, got.logits, compiled


def check(model: Any, kind: str, batch: int, run: str = "eager") -> tuple[Any, ...]:
    want, got, compiled = both(model, kind, batch, run)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    # A growing cache is first traced with its length, within what is chosen, and then for any length.
    growing = kind == "dynamic" or "sliding_attention" in model.config.layer_types
    assert graphs_compiled() == (2 if growing else 1)
    return hsa_compile.explain(compiled).sites


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("family", ALIKE)
def test_as_the_model(family: str, kind: str, attention: str, batch: int) -> None:
    sites = check(build(family, attention), kind, batch)
    assert [site.decision for site in sites if site.decision != "dense"] == ["sparse"] * 2
    for site in sites:
        assert "as the model makes them" not in site.policy
        if site.decision == "dense":
            assert kind == "dynamic" and "chooses all of 13 tokens" in site.reason
        else:
            assert site.policy.startswith(f"the model's own top-{TOPK} of its indexer")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("family", ALIKE)
def test_through_inductor(family: str, kind: str) -> None:
    sites = check(build(family, "sdpa"), kind, 3, "inductor")
    assert sites[-1].decision == "sparse"


@pytest.mark.slow
def test_through_inductor_with_one_row() -> None:
    assert check(build("deepseek_v32", "sdpa"), "static", 1, "inductor")[-1].decision == "sparse"


@pytest.mark.parametrize("kind", ["static", pytest.param("dynamic", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", OTHERS)
def test_others_of_the_same_spelling(family: str, kind: str) -> None:
    attention = "eager" if family in families.EAGER_ONLY else "sdpa"
    sites = check(build(family, attention), kind, 3)
    assert "sparse" in {site.decision for site in sites}


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_layers_that_share_a_choice(kind: str) -> None:
    model = build("glm_moe_dsa", "sdpa", indexer_types=["full", "shared"])
    sites = check(model, kind, 3)
    assert [site.decision for site in sites][-2:] == ["sparse", "sparse"]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_several_query_tokens(attention: str, batch: int) -> None:
    """Steps of 5 tokens, each with a choice of its own, from within what is chosen to beyond it."""
    model = build("deepseek_v32", attention)
    asked, width = prompt(batch), 5
    name = cache_name(model)
    compiled = compile_hsa(model, POLICY)
    caches = [new_cache(model, "static", CAPACITY) for _ in range(2)]
    ids = torch.randint(3, 100, (batch, 4 * width))
    with torch.no_grad():
        for cache in caches:
            model(asked.ids, attention_mask=asked.mask[:, :PROMPT].clone(), **{name: cache})
        for begin in range(0, 4 * width, width):
            here = slice(PROMPT + begin, PROMPT + begin + width)
            want, got = (
                step(
                    ids[:, begin : begin + width].clone(),
                    attention_mask=asked.mask,
                    position_ids=asked.positions[:, here].clone(),
                    **{name: cache},
                ).logits
                for step, cache in zip((model, compiled), caches, strict=True)
            )
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert graphs_compiled() == 1
    assert [site.decision for site in hsa_compile.explain(compiled).sites] == ["sparse"] * 2


def cache_name(model: Any) -> str:
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@pytest.mark.parametrize("kind", ["static", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_half_precision(kind: str) -> None:
    """No further from fp32 than what the model makes of half precision itself."""
    exact = build("deepseek_v32", "sdpa")
    model = build("deepseek_v32", "sdpa").to(torch.bfloat16)
    asked = prompt(3)
    reference = decode(exact, exact, kind, asked, cache=new_cache(exact, kind, CAPACITY))
    errors = []
    for step in (model, compile_hsa(model, POLICY)):
        cache = new_cache(model, kind, CAPACITY)
        made = decode(model, step, kind, asked, reference.tokens, cache)
        errors.append((made.logits.float() - reference.logits).norm() / reference.logits.norm())
    assert errors[1] < 1.5 * errors[0]


def step_graph(model: Any, capacity: int, **policy: object) -> fx.Graph:
    """The graph of a step over a static cache of ``capacity`` tokens."""
    asked = prompt(2, capacity)
    cache, name = new_cache(model, "static", capacity), cache_name(model)
    with torch.no_grad():
        model(asked.ids, attention_mask=asked.mask[:, :PROMPT].clone(), **{name: cache})
    call = {
        "input_ids": asked.ids[:, :1].clone(),
        "attention_mask": asked.mask,
        "position_ids": asked.positions[:, PROMPT : PROMPT + 1].clone(),
        name: cache,
    }
    return lowered(model, call, policy={**POLICY, **policy}).gm.graph


def made(graph: fx.Graph) -> list[Tensor]:
    """What has memory of its own: neither inputs, nor views, nor what is written in place."""
    calls = [node for node in graph.nodes if node.op in ("call_function", "call_method")]
    found = [tensor(n) for n in calls if op(n) not in VIEWS - {"to", "float"} and not modifies(n)]
    gathers = [tensor(n) for n in calls if op(n) == "getitem" and "(" in str(n.args[1])]
    return [held for held in (*found, *gathers) if held is not None]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_no_tensor_of_tokens_and_heads(attention: str) -> None:
    """Of every token a step makes a score and what its mask is, and nothing that has as much as a number a head."""
    capacity = 157
    graph = step_graph(build("deepseek_v32", attention), capacity)
    large = [tuple(held.shape) for held in made(graph) if capacity in held.shape]
    assert large and all(math.prod(shape) <= 2 * capacity for shape in large), large


def test_work_does_not_grow_with_the_context() -> None:
    model = build("deepseek_v32", "eager")
    growth = {}
    for algorithm in ("dense", "cuboid"):
        numbers = [
            sum(held.numel() for held in made(step_graph(model, capacity, algorithm=algorithm)))
            for capacity in (200, 1200)
        ]
        growth[algorithm] = (numbers[1] - numbers[0]) / 1000
    # Scores and masks of 2 layers and 2 rows; the model's own has more heads, and where it caches latents, keys.
    assert growth["cuboid"] < 32 < growth["dense"] / 4


def test_dense_by_policy() -> None:
    want, got, compiled = both(build("deepseek_v32", "sdpa"), "static", 1, algorithm="dense")
    assert torch.equal(want, got)
    sites = hsa_compile.explain(compiled).sites
    assert {(site.decision, site.reason) for site in sites} == {("dense", "dense by policy")}


def test_not_in_host_memory() -> None:
    want, got, compiled = both(build("deepseek_v32", "sdpa"), "static", 1, placement="host")
    assert torch.equal(want, got)
    reasons = {site.reason for site in hsa_compile.explain(compiled).sites}
    assert reasons == {
        "placement 'host' keeps pages, and the model's own indexer chooses single tokens"
    }


def test_everything_is_chosen() -> None:
    model = build("deepseek_v32", "sdpa", index_topk=CAPACITY)
    want, got, compiled = both(model, "static", 1)
    assert torch.equal(want, got)
    for site in hsa_compile.explain(compiled).sites:
        assert site.decision == "dense" and f"chooses all of {CAPACITY}" in site.reason


def test_attentions_that_are_returned() -> None:
    model = build("deepseek_v32", "eager")
    asked = prompt(1, steps=1)
    name = cache_name(model)
    compiled = compile_hsa(model, POLICY)
    results = []
    for step in (model, compiled):
        cache = new_cache(model, "static", CAPACITY)
        with torch.no_grad():
            model(asked.ids, attention_mask=asked.mask[:, :PROMPT].clone(), **{name: cache})
            given = {"attention_mask": asked.mask, name: cache}
            results.append(step(asked.ids[:, :1].clone(), output_attentions=True, **given))
    assert torch.equal(results[0].logits, results[1].logits)
    for want, got in zip(results[0].attentions, results[1].attentions, strict=True):
        assert torch.equal(want, got)
    assert {site.decision for site in hsa_compile.explain(compiled).sites} == {"left"}


def test_a_prefill_is_left() -> None:
    model = build("deepseek_v32", "sdpa")
    ids = torch.randint(3, VOCABULARY, (1, 30))
    compiled = compile_hsa(model, POLICY)
    with torch.no_grad():
        want = model(ids).logits
        torch.testing.assert_close(compiled(ids).logits, want, rtol=0, atol=0)
    sites = hsa_compile.explain(compiled).sites
    assert all(site.reason.startswith("30 query tokens") for site in sites)


def test_counters_and_text() -> None:
    """No pages, so nothing is counted of them; ``explain`` tells what is read."""
    _, _, compiled = both(build("deepseek_v32", "sdpa"), "static", 1)
    assert hsa_compile.stats(compiled).layers == ()
    explained = hsa_compile.explain(compiled)
    assert "top-16" in str(explained)
    assert explained.sites[0].break_even == TOPK + 1
    # Keys of the indexer of 16 numbers, and latents of 16 + 8, or keys and values of 24 + 16 in 4 heads.
    token = 4 * (24 if explained.sites[0].cache == "static (latents)" else 4 * 40)
    assert explained.sites[0].bytes_dense == f"{64 + token}*S"
    assert explained.sites[0].bytes_sparse == f"64*S + {token}*Min(16, S)"


# -- spellings of others


REWRITTEN = [Latent, Apart, Added, Sum, Alone, OtherScores, SeenElsewhere, Normed, AsCached, AsKeys]


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("model", REWRITTEN)
@pytest.mark.parametrize("filled", [4, 30])
def test_spellings(model: type[Latent], queries: int, filled: int) -> None:
    """Also where fewer tokens than are chosen can be attended."""
    torch.manual_seed(1)
    step = model().eval()
    args = given(filled=filled, queries=queries)
    with torch.no_grad():
        want = step(*[x.clone() for x in args])
        compiled = compile_hsa(step, POLICY)
        got = compiled(*[x.clone() for x in args])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    sites = hsa_compile.explain(compiled).sites
    assert [site.decision for site in sites] == ["sparse"], sites[0].reason
    assert ("as the model makes" in sites[0].policy) == (model is OtherScores)
    assert ("made of those alone" in sites[0].policy) == (model not in (AsCached, AsKeys))


# -- what is left


LEFT = [
    (AcrossTokens, "`cumsum` is not known to treat tokens one by one"),
    (ByPosition, "`mul` is not known to treat tokens one by one"),
    (AnotherLength, "chosen of 48 tokens, where 50 are cached"),
    (WrittenLater, "`l_latents_` is written between its reader and attention"),
]


@pytest.mark.parametrize(("model", "reason"), LEFT)
def test_left_as_it_was(model: type[Latent], reason: str) -> None:
    sites, alike = compare(model())
    assert alike
    assert [(site.decision, site.reason) for site in sites] == [
        ("left", f"the model's own top-8 of its indexer: {reason}")
    ]


@pytest.mark.parametrize("model", [FromOutside, Smallest])
def test_a_mask_that_is_not_of_a_choice(model: type[Latent]) -> None:
    """To the backend it is like any other mask."""
    sites, alike = compare(model())
    assert alike
    assert sites[0].decision == "left" and "computed in every step from cached" in sites[0].reason


def compare(step: nn.Module) -> tuple[tuple[Any, ...], bool]:
    args = given()
    eager, mine = ([x.clone() for x in args] for _ in range(2))
    with torch.no_grad():
        want = step(*eager)
        compiled = compile_hsa(step, POLICY)
        got = compiled(*mine)
    alike = torch.equal(want, got) and all(map(torch.equal, eager, mine))
    return hsa_compile.explain(compiled).sites, alike
