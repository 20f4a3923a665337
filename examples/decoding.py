"""Prefill and greedy decoding with an unmodified `transformers` model, compiled or not."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Model = Callable[..., Any]


@dataclass
class Run:
    """What greedy decoding gave.

    Attributes:
        tokens: token ids, the first of them out of the prefill.
        logits: `[steps, vocabulary]`, fp32, on the CPU; row i is what token i was fed to give.
        seconds: of each step; the first ones compile.
    """

    tokens: list[int]
    logits: Tensor
    seconds: list[float]


def cache_argument(model: torch.nn.Module) -> str:
    """What this version of `transformers` calls the cache: `cache` or `past_key_values`."""
    known = inspect.signature(model.forward).parameters
    return "cache" if "cache" in known else "past_key_values"


def new_cache(model: torch.nn.Module, kind: str, length: int) -> Any:
    """An empty `StaticCache` of `length` tokens ("static") or a `DynamicCache` ("dynamic")."""
    from transformers import DynamicCache, StaticCache

    config = model.config
    if kind == "dynamic":
        return DynamicCache(config=config)
    return StaticCache(config=config, max_cache_len=length)


def copy_of(cache: Any) -> Any:
    """A cache with the same contents that shares no memory with `cache`."""
    copied = copy.deepcopy(cache)
    for layer in copied.layers:
        for name in ("keys", "values", "cumulative_length"):
            tensor = getattr(layer, name, None)
            if isinstance(tensor, Tensor) and type(layer).__name__.startswith("Static"):
                # As the cache does for tensors that it makes itself; CUDA graphs need it.
                torch._dynamo.mark_static_address(tensor)
    return copied


@torch.no_grad()
def prefill(
    model: torch.nn.Module,
    ids: Tensor,
    cache: Any,
    chunk: int,
    advance: Callable[[int], object],
) -> Tensor:
    """Run the prompt `ids` `[1, L]` through the uncompiled model, `chunk` tokens at a time.

    Returns:
        The logits after the last token, `[1, vocabulary]`.
    """
    more: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        more["logits_to_keep"] = 1
    for part in ids.split(chunk, dim=1):
        out = model(input_ids=part, **more)
        advance(part.shape[1])
    return out.logits[:, -1]


@torch.no_grad()
def decode(
    model: Model,
    cache_name: str,
    cache: Any,
    first: Tensor,
    steps: int,
    advance: Callable[[int], object],
    forced: list[int] | None = None,
) -> Run:
    """Feed one token at a time through `model` and take the most likely next one.

    Args:
        first: logits after the prompt, `[1, vocabulary]`.
        steps: how many tokens are fed.
        forced: tokens to feed in place of the model's own (teacher forcing).
    """
    token = first.argmax(-1, keepdim=True)
    tokens = [int(token)]
    logits, seconds = [], []
    for step in range(steps):
        if forced is not None:
            token = torch.full_like(token, forced[step])
        if token.is_cuda:
            torch.compiler.cudagraph_mark_step_begin()
        start = time.perf_counter()
        out = model(input_ids=token, use_cache=True, **{cache_name: cache})
        row = out.logits[:, -1]
        token = row.argmax(-1, keepdim=True)
        tokens.append(int(token))  # waits for the device
        seconds.append(time.perf_counter() - start)
        logits.append(row[0].float().cpu())
        advance(1)
    return Run(tokens, torch.stack(logits), seconds)


@dataclass(frozen=True)
class Agreement:
    """How far the logits of a sparse run are from those of a dense one, fed the same tokens.

    Attributes:
        steps: compared steps.
        max_abs_diff: largest difference of two logits.
        kl_mean, kl_max: of KL(dense || sparse) over the steps, in nats.
        top1: share of the steps with the same most likely token.
    """

    steps: int
    max_abs_diff: float
    kl_mean: float
    kl_max: float
    top1: float


def agreement(dense: Tensor, sparse: Tensor) -> Agreement:
    """Compare logits `[steps, vocabulary]`."""
    p, q = dense.double().log_softmax(-1), sparse.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).clamp(min=0)
    return Agreement(
        steps=dense.shape[0],
        max_abs_diff=float((dense - sparse).abs().max()),
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
        top1=float((dense.argmax(-1) == sparse.argmax(-1)).float().mean()),
    )
