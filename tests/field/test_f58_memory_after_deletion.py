"""A compiled model keeps its memory after it was deleted.

pytorch#122969, #104095. Right: model, caches and everything kept beside them go with the last reference; what is pinned
goes to zero.
"""

import gc
import weakref

import pytest
import torch

import hsa_compile
from hsa_compile import registry
from hsa_compile.runtime.state import OWNERS

from ..models.helpers import cache_argument, new_cache, tiny
from .helpers import SPARSE, Growing, Shape, Static, compile_hsa, one_layer, token
from .helpers import new_cache as plain_cache


def collect() -> None:
    for _ in range(3):
        gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_tiny(kind: str) -> None:
    collect()
    before = hsa_compile.summary_bytes(), len(OWNERS.states())
    model = one_layer(tiny("llama"))
    compiled, name = compile_hsa(model, {**SPARSE, "budget": 16}), cache_argument(model)
    cache = new_cache(model, kind)
    with torch.no_grad():
        model(torch.randint(3, 128, (1, 40)), **{name: cache})
        for _ in range(2):
            compiled(torch.tensor([[5]]), **{name: cache})
    storages = [weakref.ref(layer.keys.untyped_storage()) for layer in cache.layers]
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    programs = [weakref.ref(program) for program in registry.programs(compiled)]
    assert programs and hsa_compile.summary_bytes() > before[0]
    del cache
    collect()
    assert (hsa_compile.summary_bytes(), len(OWNERS.states())) == before, "with the cache"
    assert not any(storage() is not None for storage in storages)
    del model, compiled
    torch._dynamo.reset()
    collect()
    assert not any(reference() is not None for reference in (*parameters, *programs))


@torch.no_grad()
def test_many_requests() -> None:
    """Each request brings caches of its own: after thirty of them there is as much as after one."""
    shape = Shape(steps=1)
    for kind in (Static, Growing):
        compiled, held = compile_hsa(kind(), SPARSE), []
        for seed in range(30):
            cache = plain_cache(Shape(seed=seed, steps=1))
            if kind is Growing:
                compiled(*token(shape, 90), *(t[:, :, :90] for t in cache))
            else:
                compiled(*token(shape, 90), *cache, torch.tensor([90]))
            del cache
            held.append((hsa_compile.summary_bytes(), len(OWNERS.states())))
        assert held[-1] == held[0]


@pytest.mark.parametrize("kind", [Static, Growing])
@torch.no_grad()
def test_one_layer(kind: type) -> None:
    """Nothing of a call is held between calls; without the layer, nothing is held at all."""
    collect()
    before = hsa_compile.summary_bytes(), len(OWNERS.states())
    shape, layer = Shape(), kind()
    compiled = compile_hsa(layer, SPARSE)
    cache = plain_cache(shape)
    if kind is Growing:
        cache = tuple(t[:, :, :90].contiguous() for t in cache)
    for at in range(90, 93):
        if kind is Growing:
            out, *cache = compiled(*token(shape, at), *cache)
        else:
            out = compiled(*token(shape, at), *cache, torch.tensor([at]))
    storages = [weakref.ref(t.untyped_storage()) for t in (out, *cache)]
    kept = [weakref.ref(layer), *(weakref.ref(program) for program in registry.programs(layer))]
    assert len(kept) > 1 and hsa_compile.summary_bytes() > before[0]
    del out, cache
    collect()
    assert not any(storage() is not None for storage in storages)
    assert (hsa_compile.summary_bytes(), len(OWNERS.states())) == before
    del layer, compiled
    torch._dynamo.reset()
    collect()
    assert not any(reference() is not None for reference in kept)
