"""A Python integer counts the tokens, and Dynamo guards it, so that every step compiles anew; or it stands still.

torchtune PR#1663, tt-xla PR#3688, transformers PR#29114. Right: the counter moves, the numbers are eager's, and the
number of compilations is bounded; where Dynamo cannot help compiling (an integer attribute of a module), it warns once
and names the guard.
"""

import logging

import pytest
import torch
from torch import Tensor, nn

from .helpers import (
    LOSSLESS,
    SPARSE,
    SPARSELY,
    Shape,
    close,
    compile_hsa,
    decisions,
    graphs,
    new_cache,
    rule,
    sdpa,
    token,
)

SHAPE = Shape(length=20, steps=20)


class Counter:
    """A cache object of the model's own, with its length in an integer."""

    def __init__(self, pos: int) -> None:
        self.keys, self.values = new_cache(SHAPE)
        self.pos = pos


class Layer(nn.Module):
    """``style`` says where the integer lives, and whether attention reads the filled part or all under a mask."""

    def __init__(self, holder: str, read: str, attend=sdpa) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))
        self.holder, self.read, self.attend = holder, read, attend
        self.pos = SHAPE.length

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cache: Counter, pos: int) -> Tensor:
        at = {"module": self.pos, "cache": cache.pos, "argument": pos}[self.holder]
        cache.keys[:, :, at : at + 1] = k
        cache.values[:, :, at : at + 1] = v
        if self.read == "filled":
            out = self.attend(q, cache.keys[:, :, : at + 1], cache.values[:, :, : at + 1], None)
        else:
            mask = (torch.arange(cache.keys.shape[2]) <= at)[None, None, None]
            out = self.attend(q, cache.keys, cache.values, mask)
        self.pos += 1
        cache.pos += 1
        return out * self.one


def run(layer: Layer, step) -> tuple[Tensor, Counter]:
    cache, outs = Counter(SHAPE.length), []
    with torch.no_grad():
        for at in range(SHAPE.length, SHAPE.length + SHAPE.steps):
            outs.append(step(*token(SHAPE, at), cache, at))
    assert layer.pos == cache.pos == SHAPE.length + SHAPE.steps, "the counter did not move"
    return torch.stack(outs), cache


@pytest.mark.parametrize("read", ["filled", "masked"])
@pytest.mark.parametrize("holder", ["cache", "argument"])
def test_compiles_are_bounded(holder: str, read: str) -> None:
    eager, layer = Layer("argument", read), Layer(holder, read)
    compiled = compile_hsa(layer, LOSSLESS)
    # The module counts as well: without this its integer would be guarded, though nothing depends on it.
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        got, cache = run(layer, compiled)
    want, twin = run(eager, eager)
    close(got, want)
    close(cache.keys, twin.keys)
    assert graphs() <= 3
    # The first trace of a filled part takes its length for a constant, which is within the budget.
    first = (
        {("dense", "the cache holds 21 tokens, within the budget")} if read == "filled" else set()
    )
    assert decisions(compiled) == SPARSELY | first


@pytest.mark.parametrize("read", ["filled", "masked"])
def test_sparse_follows_the_rule(read: str) -> None:
    """A counter that moves past the budget: pages are summarised as they fill, under symbolic positions."""
    policy = {**SPARSE, "budget": 16, "recent": 4}
    expected, layer = Layer("argument", read, rule(policy)), Layer("argument", read)
    compiled = compile_hsa(layer, policy)
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        got, _ = run(layer, compiled)
    close(got, run(expected, expected)[0])
    dense = Layer("argument", read)
    assert (got - run(dense, dense)[0]).abs().max() > 1e-4, "nothing was left out"


def test_guarded_attribute_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo specialises on integers of modules: right numbers, and its one warning names ``self.pos``."""
    eager, layer = Layer("module", "masked"), Layer("module", "masked")
    compiled = compile_hsa(layer, LOSSLESS)
    with caplog.at_level(logging.WARNING, logger="torch._dynamo"):
        got, _ = run(layer, compiled)
    close(got, run(eager, eager)[0])
    warned = [r for r in caplog.records if "recompile_limit" in r.getMessage()]
    assert graphs() <= 3 or (len(warned) == 1 and "pos" in warned[0].getMessage())
