"""Models inside wrappers that train (DDP, FSDP) and checkpointed ones: decoding is rewritten, gradients are eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn

import hsa_compile

from .helpers import cache_argument, compile_hsa, decode, new_cache, request, tiny

POLICY = {"budget": 96, "page_size": 16}
"""Wide enough for every token of the requests: what is rewritten must give what eager gives."""


@pytest.fixture
def one_process(tmp_path: Any) -> Iterator[None]:
    if not distributed.is_available():
        pytest.skip("torch is built without distributed")
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def in_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = distributed.init_device_mesh("cpu", (1,))
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("wrap", [in_ddp, sharded])
@pytest.mark.parametrize("kind", ["static", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_decoding_in_a_wrapper(
    wrap: Callable[[nn.Module], nn.Module], kind: str, one_process: None
) -> None:
    """Rewritten, and as eager decodes without it; FSDP has a graph a layer."""
    model, asked = tiny("llama"), request(2, steps=6)
    want = decode(model, model, kind, asked)
    wrapped = wrap(copy.deepcopy(model))
    step = compile_hsa(wrapped, POLICY)
    got = decode(getattr(wrapped, "module", wrapped), step, kind, asked)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.tokens, want.tokens)
    sites = hsa_compile.explain(step).sites
    assert sites and all(site.decision == "sparse" for site in sites)


def loss_and_gradients(model: Any, run: Callable[..., Any], ids: torch.Tensor) -> list[Any]:
    model.zero_grad()
    loss = run(ids, use_cache=False).logits.float().square().mean()
    loss.backward()
    return [loss.detach(), *(held.grad.clone() for held in model.parameters())]


@pytest.mark.parametrize("run", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_model(checkpointing: bool, run: str) -> None:
    """Training is left alone, with and without the activations kept."""
    model = tiny("llama").train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = torch.randint(3, 128, (2, 24))
    want = loss_and_gradients(model, model, ids)
    got = loss_and_gradients(model, compile_hsa(model, POLICY, run=run), ids)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_step_that_needs_gradients_is_left() -> None:
    """One token over a cache, and a gradient is asked for: dense, with a reason, and the gradient is eager's."""
    model, asked = tiny("llama"), request(1, steps=1)
    name = cache_argument(model)
    gradients = []
    compiled = compile_hsa(model, POLICY)
    for step in (model, compiled):
        cache = new_cache(model, "dynamic")
        with torch.no_grad():
            model(asked.ids, **{name: cache})
        model.zero_grad()
        step(asked.ids[:, -1:], **{name: cache}).logits.square().mean().backward()
        gradients.append([held.grad.clone() for held in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    sites = hsa_compile.explain(compiled).sites
    assert sites and all(site.decision == "left" and "no_grad" in site.reason for site in sites)
