"""flex_attention: every function that is understood, what is left with its reason, block lists, transformers' own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import hsa_compile
from hsa_compile import LayerPolicy

from ..golden.format import lowered
from . import flex, helpers, plain, reference
from .flex import CASES, SPELLINGS, Step, by_score, call, lists
from .helpers import compile_hsa, graphs_compiled, tiny, transformers
from .left import inputs, write
from .plain import CAPACITY, HEADS, KV_HEADS, SIZE, Write
from .spellings import USUAL, Spelling
from .test_several_queries import Spelled, ruled, spelled_steps
from .test_spellings import by_the_rule

PART = LayerPolicy(algorithm="cuboid", budget=48, page_size=16, sink=4, recent=16)
WHOLE = LayerPolicy(budget=144, page_size=16)
STEPS = 4
WITH_INDUCTOR = ("everything", "floats_by_row", "mask_of_rows_and_heads", "sinks_by_the_sum")
ALIKE = (
    "mask_mod",
    "mask_of_rows",
    "mask_of_heads",
    "mask_of_rows_and_heads",
    "alibi",
    "sinks_by_the_sum",
)
"""What others of them do too."""
OPTIONS: dict[str, Any] = {"run": "eager", "policy": {"budget": 48, "page_size": 16, "recent": 16}}


@contextmanager
def eagerly() -> Iterator[None]:
    """Without the compilation that flex_attention, and transformers around it, do of themselves."""
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        yield


# Every function that is understood


@pytest.mark.parametrize(
    "spelling",
    [
        pytest.param(spelling, marks=pytest.mark.slow) if spelling.name in ALIKE else spelling
        for spelling in SPELLINGS
    ],
    ids=lambda spelling: spelling.name,
)
def test_spelling(spelling: Spelling) -> None:
    check(spelling, "eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    "spelling",
    [spelling for spelling in SPELLINGS if spelling.name in WITH_INDUCTOR],
    ids=lambda spelling: spelling.name,
)
def test_with_inductor(spelling: Spelling) -> None:
    check(spelling, "inductor")


def check(spelling: Spelling, run: str, part: LayerPolicy = PART) -> None:
    """Lossless it is what flex_attention is, and sparse it is the rule."""
    torch.manual_seed(0)
    model, twin = plain.twins(plain.decoder(Write(plain.index_copy_)), by_the_rule(spelling, part))
    model.attend = spelling.function
    before = {name: held.clone() for name, held in model.state_dict().items()}

    def decoded(step: Callable[..., Tensor], module: plain.Decoder) -> Tensor:
        module.load_state_dict(before)
        return plain.decode(module, step, STEPS, plain.LENGTH, seed=2)

    with eagerly():
        eager = decoded(model, model)
    for policy, expected in ((WHOLE, eager), (part, decoded(twin, twin))):
        compiled = compile_hsa(model, policy, run, strict=True)
        torch.testing.assert_close(decoded(compiled, model), expected, rtol=0, atol=1e-5)
        assert [site.decision for site in hsa_compile.explain(compiled).sites] == ["sparse"] * 2
        assert graphs_compiled() == 1
    assert not torch.allclose(eager, expected, rtol=0, atol=1e-4), "nothing was left out"


@pytest.mark.parametrize(
    "spelling",
    [
        spelling
        if spelling.name in WITH_INDUCTOR
        else pytest.param(spelling, marks=pytest.mark.slow)
        for spelling in SPELLINGS
    ],
    ids=lambda spelling: spelling.name,
)
def test_several_queries(spelling: Spelling) -> None:
    model = Spelled(spelling.function)
    with eagerly():
        eager = spelled_steps(model)
    for policy, expected in ((WHOLE, eager), (PART, spelled_steps(Spelled(ruled(spelling, PART))))):
        compiled = compile_hsa(model, policy, strict=True)
        torch.testing.assert_close(spelled_steps(compiled), expected, rtol=0, atol=1e-5)
        assert hsa_compile.stats(compiled).steps == 4


@pytest.mark.slow
def test_host_placement() -> None:
    """A cache in host memory gives what one on the device gives."""
    attend = flex.everything
    model, twin = plain.twins(plain.decoder(Write(plain.index_copy_)), attend)
    model.attend = attend
    outs = []
    for module, placement in ((model, "device"), (twin, "host")):
        compiled = compile_hsa(module, {**OPTIONS["policy"], "placement": placement}, strict=True)
        outs.append(plain.decode(module, compiled, STEPS, plain.LENGTH, seed=2))
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(
            dataclasses.replace(PART, algorithm="streaming"), id="window", marks=pytest.mark.slow
        ),
        pytest.param(dataclasses.replace(PART, top_p=0.7, min_budget=16), id="top_p"),
    ],
)
def test_other_selections(rule: LayerPolicy) -> None:
    """Under a score_mod and a mask_mod: without scores, and as many pages as a share of the softmax takes."""
    check(next(one for one in SPELLINGS if one.name == "everything"), "eager", rule)


def test_a_monitor_changes_nothing() -> None:
    """It measures what flex_attention computes: a recall of 1 where everything is read, and less where it is not."""
    outs = {}
    for policy in (PART, WHOLE):
        for monitor in (0, 1):
            torch.manual_seed(0)
            model = plain.decoder(Write(plain.index_copy_))
            model.attend = flex.everything
            watching = dataclasses.replace(policy, monitor=monitor)
            compiled = compile_hsa(model, watching, strict=True)
            outs[monitor] = plain.decode(model, compiled, STEPS, plain.LENGTH, seed=2)
        assert torch.equal(outs[0], outs[1])
        for layer in hsa_compile.stats(compiled).layers:
            assert layer.observed > 0
            if policy is WHOLE:
                assert layer.recall == pytest.approx(1, abs=1e-5) and layer.output_error < 1e-5
            else:
                assert 0 < layer.recall < 1 - 1e-3 and layer.output_error > 1e-3


# What is left


@pytest.mark.parametrize(("case", "reason"), CASES)
def test_left_as_it_was(case: Callable[..., Any], reason: str) -> None:
    step: Step = case if hasattr(case, "own") else by_score(case)
    eager, compiled = inputs(), inputs()
    torch.manual_seed(1)
    with eagerly():
        expected = step(*eager)
    torch.manual_seed(1)
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        got = torch.compile(step, backend="hsa", options=OPTIONS)(*compiled)
        sites = hsa_compile.explain(step, *inputs(), options=OPTIONS).sites
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    for want, have in zip(eager, compiled, strict=True):
        assert torch.equal(want, have), "an input was written differently"
    assert [(site.decision, site.reason) for site in sites] == [("left", reason)]
    assert "/tests/models/" in sites[0].source


def prefill_or_decode(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor
) -> Tensor:
    """q ``[B, Hq, L, D]`` from position ``at [L]`` on; the causal mask is a buffer of block lists."""
    keys.index_copy_(2, at, k)
    values.index_copy_(2, at, v)
    mask = create_block_mask(
        *(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + at[0], None, None, len(at), CAPACITY),
        device="cpu",
    )
    return call(q, keys, values, block_mask=mask)


@pytest.mark.parametrize("run", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_prefill_and_decode(run: str) -> None:
    """The prefill is a graph of its own, and keeps its flex_attention."""

    def decoded(step: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        keys, values = torch.zeros(2, 2, KV_HEADS, CAPACITY, SIZE).unbind()
        outs = []
        for at in (torch.arange(100), *torch.arange(100, 106).split(1)):
            q = torch.randn(2, HEADS, len(at), SIZE)
            k, v = torch.randn(2, 2, KV_HEADS, len(at), SIZE).unbind()
            outs.append(step(q, k, v, keys, values, at))
        return outs

    with eagerly():
        expected = decoded(prefill_or_decode)
    torch._dynamo.reset()
    options = {"policy": WHOLE, "run": run}
    compiled = torch.compile(prefill_or_decode, backend="hsa", options=options, dynamic=False)
    with torch.no_grad():
        got = decoded(compiled)
    for want, have in zip(expected, got, strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=1e-5)
    assert {(site.decision, site.reason) for site in hsa_compile.explain(compiled).sites} == {
        ("left", "100 query tokens: only steps of up to 16 are rewritten"),
        ("sparse", ""),
    }
    assert hsa_compile.stats(compiled).steps == 6


# Block lists


def listed(
    count: Tensor, indices: Tensor, size: int, full: bool = False, **options: Any
) -> Callable[..., Tensor]:
    """A step whose block mask hides nothing of itself: its lists alone decide."""

    def step(q, k, v, keys, values, at):
        write(keys, values, k, v, at)
        given = (torch.zeros_like(count), indices) * full + (count, indices)
        mask = lists(*given, BLOCK_SIZE=(1, size), seq_lengths=(1, CAPACITY), **options)
        return call(q, keys, values, block_mask=mask)

    return step


LISTS = {
    "one for all": (torch.tensor([[[4]]]), torch.tensor([[[[0, 2, 5, 9]]]]), 16),
    "by row and head": (
        torch.tensor([2, 3, 4, 1, 4, 2, 3, 4]).view(2, HEADS, 1),
        torch.stack([torch.randperm(10, generator=torch.Generator().manual_seed(i)) for i in range(8)]).view(
            2, HEADS, 1, 10
        ),
        16,
    ),
    # What stands behind the first ones is not listed, whatever it is.
    "repeated behind": (torch.tensor([[[2]]]), torch.tensor([[[[3, 1, 1, 3, 0, 99]]]]), 32),
    "none of a row": (torch.tensor([3, 0]).view(2, 1, 1), torch.tensor([[[[0, 1, 2, 3]]]]).expand(2, -1, -1, -1), 32),
}  # fmt: skip


def tokens_of(count: Tensor, indices: Tensor, size: int) -> Tensor:
    """The lists as a mask ``[B or 1, H or 1, 1, S]``, block by block."""
    mask = torch.zeros(*count.shape, CAPACITY, dtype=torch.bool)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in count.shape)).tolist():
        for block in indices[tuple(at)][: count[tuple(at)]].tolist():
            mask[(*at, slice(block * size, (block + 1) * size))] = True
    return mask


@pytest.mark.parametrize("full", [False, True], ids=["partial", "full"])
@pytest.mark.parametrize("name", LISTS)
def test_block_lists_decide(name: str, full: bool) -> None:
    count, indices, size = LISTS[name]
    given = inputs()[:-1]
    compiled = torch.compile(
        listed(count, indices, size, full), backend="hsa", options={**OPTIONS, "strict": True}
    )
    torch._dynamo.reset()
    with torch.no_grad():
        got = compiled(*given)
    q, _, _, keys, values, _ = given  # written by now
    mask = tokens_of(count, indices, size)
    policy = LayerPolicy(**OPTIONS["policy"])
    expected = reference.sparse_attention(q, keys, values, mask, USUAL, policy)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_full_blocks_are_not_asked_for() -> None:
    """What is listed as full is attended whatever mask_mod says, what is listed as partial where it says so."""
    partial, full = torch.tensor([[[[1, 3]]]]), torch.tensor([[[[0, 4]]]])

    def step(q, k, v, keys, values, at):
        write(keys, values, k, v, at)
        two = torch.tensor([[[2]]])
        mask = lists(
            *(two, partial, two, full),
            BLOCK_SIZE=(1, 16),
            seq_lengths=(1, CAPACITY),
            mask_mod=lambda b, h, q_idx, kv_idx: kv_idx % 3 == 0,
        )
        return call(q, keys, values, block_mask=mask)

    given = inputs()[:-1]
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(
            step, backend="hsa", options={"run": "eager", "policy": WHOLE, "strict": True}
        )(*given)
    q, _, _, keys, values, _ = given
    two, third = torch.tensor([[[2]]]), torch.arange(CAPACITY) % 3 == 0
    mask = tokens_of(two, full, 16) | tokens_of(two, partial, 16) & third
    expected = plain.dense(q, keys, values, mask)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_lists_of_another_batch_are_left() -> None:
    count, indices, size = LISTS["one for all"]
    step = listed(count.expand(4, 1, 1), indices.expand(4, 1, 1, 4), size)
    torch._dynamo.reset()
    with torch.no_grad():
        sites = hsa_compile.explain(step, *inputs()[:-1], options=OPTIONS).sites
    assert [site.reason for site in sites] == [
        "the block lists of flex_attention do not fit query and keys"
    ]


# Shapes, dtypes, other results


def test_rows_without_keys() -> None:
    """Zeros, and a log-sum-exp of -inf, as flex_attention gives."""

    def step(q, k, v, keys, values, at):
        write(keys, values, k, v, at)
        mask = create_block_mask(
            *(lambda b, h, q_idx, kv_idx: (kv_idx <= at[0]) & (b == 1), 2, None, 1, CAPACITY),
            device="cpu",
        )
        return call(q, keys, values, block_mask=mask, return_lse=True)

    with eagerly():
        expected = step(*inputs()[:-1])
    torch._dynamo.reset()
    options = {"run": "eager", "policy": WHOLE, "strict": True}
    with torch.no_grad():
        got = torch.compile(step, backend="hsa", options=options)(*inputs()[:-1])
    assert not got[0][0].any() and torch.equal(got[1][0], torch.full((HEADS, 1), -math.inf))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("run", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_half_precision_and_other_values(run: str) -> None:
    """Values of another size, in bfloat16; the result is compared with that in fp32."""

    def step(q, k, v, keys, values, at, keep):
        write(keys, values, k, v, at)

        def mod(score, b, h, q_idx, kv_idx):
            return torch.where(
                keep[0, 0, 0, kv_idx], score + flex.SLOPE[h].to(score.dtype) * kv_idx, -math.inf
            )

        return flex_attention(q, keys, values, mod, enable_gqa=True)

    q, k, _, keys, _, at, keep = inputs()
    wide = torch.randn(2, KV_HEADS, 1, 40), torch.randn(2, KV_HEADS, CAPACITY, 40)
    exact = q, k, wide[0], keys, wide[1], at, keep
    half = tuple(x.bfloat16() if x.is_floating_point() else x for x in exact)
    with eagerly():
        expected = step(*(x.float() if x.is_floating_point() else x.clone() for x in half))
        eager = step(*(x.clone() for x in half))
    torch._dynamo.reset()
    options = {"run": run, "policy": WHOLE, "strict": True}
    with torch.no_grad():
        got = torch.compile(step, backend="hsa", options=options)(*half)
    assert got.dtype == torch.bfloat16
    off = (eager.float() - expected).abs().max().item()
    torch.testing.assert_close(got.float(), expected, rtol=0, atol=2 * off + 1e-5)


def test_keys_that_are_only_read() -> None:
    """Cross-attention: no key is written, and flex_attention is known to write none."""
    valid = torch.arange(CAPACITY) < torch.tensor([[120], [140]])

    def step(q, keys, values):
        mask = create_block_mask(
            *(lambda b, h, q_idx, kv_idx: valid[b, kv_idx], 2, None, 1, CAPACITY), device="cpu"
        )
        return call(q, keys, values, block_mask=mask)

    q, _, _, keys, values, _, _ = inputs()
    with eagerly():
        expected = step(q, keys, values)
    torch._dynamo.reset()
    compiled = torch.compile(
        step, backend="hsa", options={"run": "eager", "policy": WHOLE, "strict": True}
    )
    with torch.no_grad():
        torch.testing.assert_close(compiled(q, keys, values), expected, rtol=0, atol=1e-5)
    assert hsa_compile.explain(compiled).sites[0].cache == "fixed (only read)"


# What layers share


class Layers(nn.Module):
    """Two layers over caches of their own; ``between`` runs between them."""

    def __init__(self, between: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.between = between
        self.one = nn.Parameter(torch.ones(()))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, caches: list[Tensor], at: Tensor, seen: Tensor
    ) -> Tensor:
        mask = create_block_mask(
            *(lambda b, h, q_idx, kv_idx: kv_idx <= seen[0] + q_idx, None, None, 1, CAPACITY),
            **{"device": "cpu", "BLOCK_SIZE": (1, 256)},
        )
        outs = []
        for keys, values in (caches[:2], caches[2:]):
            write(keys, values, k, v, at)

            def mod(score, b, h, q_idx, kv_idx):
                return score + flex.SLOPE[h] * 0.1 * kv_idx

            outs.append(call(q, keys, values, mod, block_mask=mask))
            self.between(seen)
        return torch.cat(outs) * self.one


def layers_given() -> dict[str, Any]:
    q, k, v, keys, values, at, _ = inputs()
    caches = [keys, values, keys.flip(2).contiguous(), values.flip(2).contiguous()]
    return {"q": q, "k": k, "v": v, "caches": caches, "at": at, "seen": torch.tensor([60])}


def packed(between: Callable[[Tensor], object]) -> int:
    """How many masks the rewritten graph packs."""
    result = lowered(Layers(between), layers_given(), policy=OPTIONS["policy"])
    assert len(result.rewritten.sites) == 2
    named = [node for node in result.gm.graph.nodes if "page_mask" in str(node.target)]
    return len(named)


def test_layers_share_what_they_compute_alike() -> None:
    assert packed(lambda seen: None) == 1


def test_layers_share_nothing_that_was_written_between_them() -> None:
    """The tensor that mask_mod reads is changed in place after the first layer."""
    assert packed(lambda seen: seen.sub_(30)) == 2
    model = Layers(lambda seen: seen.sub_(30))
    with eagerly():
        expected = model(**layers_given())
    compiled = compile_hsa(model, WHOLE, strict=True)
    with torch.no_grad():
        got = compiled(**layers_given())
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_functions_that_differ_in_a_constant() -> None:
    """A compile cache that holds the one does not answer for the other."""

    def step_of(cap: float, slope: float) -> Step:
        def step(q, k, v, keys, values, at, keep):
            write(keys, values, k, v, at)

            def mod(score, b, h, q_idx, kv_idx):
                score = cap * torch.tanh(score / cap) + slope * kv_idx
                return torch.where(keep[0, 0, 0, kv_idx], score, -math.inf)

            return call(q, keys, values, mod)

        return step

    found = []
    for cap, slope in ((0.5, 0.02), (0.5, 0.02), (0.6, 0.02), (0.5, 0.05)):
        step = step_of(cap, slope)
        with eagerly():
            expected = step(*inputs())
        compiled = compile_hsa(step, WHOLE, "inductor", strict=True)
        with torch.no_grad():
            got = compiled(*inputs())
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
        hits = counters["inductor"]["fxgraph_cache_hit"]
        found.append(bool(hits + counters["aot_autograd"]["autograd_cache_hit"]))
    assert found[1:] == [True, False, False], "the second is the first, and should have been found"


# transformers


class Eager:
    """A model that runs without compiling anything of itself."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with eagerly():
            return self.model(*args, **kwargs)


@pytest.mark.parametrize("run", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("kind", ["static", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_llama(kind: str, batch: int, run: str) -> None:
    model = tiny("llama", "flex_attention")
    eager = Eager(model)
    asked = helpers.request(batch, steps=20)
    expected = helpers.decode(eager, eager, kind, asked)
    compiled = compile_hsa(model, WHOLE, run)
    graphs = []

    def step(*args: Any, **kwargs: Any) -> Any:
        result = compiled(*args, **kwargs)
        graphs.append(graphs_compiled())
        return result

    got = helpers.decode(eager, step, kind, asked, expected.tokens)
    torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=2e-5)
    assert graphs[-1] == graphs[3], "steps were compiled again"
    sites = hsa_compile.explain(compiled).sites
    assert {(site.decision, site.reason) for site in sites} == {("sparse", "")}
    assert hsa_compile.stats(compiled).steps == asked.steps


@pytest.mark.slow
def test_sparse_llama() -> None:
    """As the model with scaled_dot_product_attention is by the same policy.

    Not with a static cache: transformers counts its tokens in place, in the tensor that the mask_mod of the step reads
    afterwards, so that flex_attention sees one key more.
    """
    kind = "dynamic"
    asked = helpers.request(2, steps=30)
    model = tiny("llama", "flex_attention")
    tokens = helpers.decode(Eager(model), Eager(model), kind, asked).tokens
    with reference.by_the_rule(tiny("llama"), PART) as ruled_model:
        expected = helpers.decode(ruled_model, ruled_model, kind, asked, tokens)
    compiled = compile_hsa(model, PART)
    got = helpers.decode(Eager(model), compiled, kind, asked, tokens)
    torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_gemma2(kind: str) -> None:
    """Soft caps; the layers that slide are left or dense for reasons of their caches."""
    sizes = {**helpers._GROUPED, "head_dim": 16, "sliding_window": 48}
    config = transformers.Gemma2Config(**sizes)
    config._attn_implementation = "flex_attention"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    eager, asked = Eager(model), helpers.request(2, steps=12)
    expected = helpers.decode(eager, eager, kind, asked)
    compiled = compile_hsa(model, WHOLE)
    got = helpers.decode(eager, compiled, kind, asked, expected.tokens)
    torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=2e-5)
    assert "sparse" in {site.decision for site in hsa_compile.explain(compiled).sites}
