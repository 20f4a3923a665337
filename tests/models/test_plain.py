"""Modules with a KV cache of their own: every way of writing it is found, and nothing is assumed about its layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hsa_compile
from hsa_compile import LayerPolicy

from . import plain, reference
from .helpers import compile_hsa, graphs_compiled
from .plain import KV_HEADS, SIZE, Decoder, Write

WHOLE = LayerPolicy(budget=112, page_size=16)
PART = LayerPolicy(algorithm="quest", budget=48, page_size=16, sink=4, recent=16)
STEPS = 24


def by_the_rule(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    return reference.sparse_attention(q, keys, values, keep, SIZE**-0.5, PART)


def check(make: Callable[[], Decoder], graphs: int, policy: LayerPolicy) -> list[str]:
    """Equal to eager within the budget, to the rule beyond it; returns how the caches were seen."""
    torch.manual_seed(0)
    attend = plain.gpt_fast if policy is WHOLE else by_the_rule
    model, twin = plain.twins(make(), attend)
    expected = plain.decode(twin, twin, STEPS, plain.LENGTH, seed=2)
    compiled = compile_hsa(model, policy)
    got = plain.decode(model, compiled, STEPS, plain.LENGTH, seed=2)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    sites = hsa_compile.explain(compiled).sites
    assert [site.decision for site in sites] == ["sparse", "sparse"], sites
    assert graphs_compiled() <= graphs
    assert hsa_compile.stats(compiled).steps == STEPS
    return [site.cache for site in sites]


policies = pytest.mark.parametrize("policy", [WHOLE, PART], ids=["lossless", "sparse"])


def every_write() -> list[object]:
    """All writes beyond the budget; those within it that repeat the path of another are slow."""
    quick = (
        plain.setitem,
        plain.copy_into_narrow,
        plain.slice_scatter_read,
        plain.functional_slice,
    )
    cases = []
    for write in plain.WRITES:
        cases.append(pytest.param(write, PART, id=f"{write.name}-sparse"))
        marks = () if write.function in quick else pytest.mark.slow
        cases.append(pytest.param(write, WHOLE, id=f"{write.name}-lossless", marks=marks))
    return cases


@pytest.mark.parametrize(("write", "policy"), every_write())
def test_every_write(write: Write, policy: LayerPolicy) -> None:
    graphs = 1 if write.position in ("tensor", "buffer") else 3
    # Without it, torch compiles once for each value of an integer that a module counts.
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        seen = check(lambda: plain.decoder(write), graphs, policy)
    kind = "functional" if write.replaces else "static"
    assert all(cache.startswith(kind) for cache in seen)


@policies
def test_one_tensor_for_all_layers(policy: LayerPolicy) -> None:
    def make() -> Decoder:
        shared = torch.full((2, 2, 2, KV_HEADS, plain.CAPACITY, SIZE), 100.0)
        return Decoder([plain.BigBlock(layer, shared) for layer in range(2)]).eval()

    assert check(make, 1, policy) == ["static (setitem)"] * 2


def test_keys_and_values_in_one_tensor() -> None:
    def make() -> Decoder:
        return Decoder([plain.HalvesBlock(2) for _ in range(2)]).eval()

    assert check(make, 1, PART) == ["static (setitem)"] * 2


def test_two_attentions_over_one_cache() -> None:
    assert (
        check(lambda: Decoder([plain.LenderBlock(2)]).eval(), 1, PART) == ["static (setitem)"] * 2
    )


@pytest.mark.parametrize("spread", ["expand", "broadcast"])
def test_one_head_for_all_queries(spread: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Tensor, keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
        if spread == "expand":
            keys, values = (x.expand(-1, plain.HEADS, -1, -1) for x in (keys, values))
        scores = (q @ keys.mT * SIZE**-0.5).masked_fill(~keep, -torch.inf)
        return scores.softmax(-1) @ values

    monkeypatch.setattr(plain, "KV_HEADS", 1)
    monkeypatch.setattr(plain, "gpt_fast", attend)
    check(lambda: plain.decoder(Write(plain.setitem)), 1, PART)


@pytest.mark.parametrize("rows", [2, 4], ids=["all rows", "some rows"])
def test_a_buffer_of_which_the_filled_part_is_read(rows: int) -> None:
    """The buffer may hold more rows than the batch has."""

    def make() -> Decoder:
        return Decoder([plain.PrefixBlock(rows) for _ in range(2)], "int").eval()

    assert check(make, 3, PART) == ["static (setitem)"] * 2


@pytest.mark.parametrize("early", [True, False], ids=["before the write", "after the write"])
def test_a_position_that_is_counted_in_place(early: bool) -> None:
    def make() -> Decoder:
        return Decoder([plain.CountingBlock(2, early) for _ in range(2)]).eval()

    assert check(make, 1, PART) == ["static (setitem)"] * 2


@policies
@pytest.mark.parametrize("block", [plain.GrowingBlock, plain.CastBlock])
def test_a_cache_that_grows_by_concatenation(
    policy: LayerPolicy, block: type[plain.GrowingBlock]
) -> None:
    seen = check(lambda: Decoder([block(2) for _ in range(2)]).eval(), 3, policy)
    assert seen == ["dynamic (cat)"] * 2


def test_an_integer_index_compiles_for_each_position() -> None:
    """What Dynamo does with ``cache[:, :, 7] = k``; each of the graphs finds the summaries of the one before."""
    write = Write(plain.setitem_int, "int")
    torch.manual_seed(0)
    model, twin = plain.twins(plain.decoder(write), by_the_rule)
    expected = plain.decode(twin, twin, 4, plain.LENGTH, seed=2)
    compiled = compile_hsa(model, PART)
    got = plain.decode(model, compiled, 4, plain.LENGTH, seed=2)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert graphs_compiled() == 4
