"""Prefill and decoding of a batch of samples that stand at the same position, uncompiled or compiled.

All contexts of a batch have the same length, so no row is padded. After them every row is fed its own forced tokens,
one a step, and then what it generates; rows with a shorter question generate earlier.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.accuracy.tasks import Sample, complete


class PrefixError(RuntimeError):
    """Decoding has changed the keys or values of the context: results would not be comparable."""


class StaticPrefix:
    """A ``StaticCache`` that holds the contexts of a batch, and can be put back to them.

    One object serves all batches of a length, so that compiled steps, which guard on its tensors, stay valid.

    Args:
        model: of transformers.
        capacity: tokens.
    """

    def __init__(self, model: Any, capacity: int) -> None:
        from transformers import StaticCache

        self.model, self.capacity = model, capacity
        self.cache = StaticCache(config=model.config, max_cache_len=capacity)
        known = inspect.signature(model.forward).parameters
        self.argument = "cache" if "cache" in known else "past_key_values"
        self._keeps_logits = "logits_to_keep" in known
        self._kept: list[dict[str, Any]] = []
        self.length = 0

    @torch.no_grad()
    def prefill(self, contexts: Tensor, chunk: int) -> None:
        """Fill the cache with ``contexts [B, L]``, uncompiled and dense, ``chunk`` tokens at a time."""
        if self._kept:
            self.cache.reset()
        more: dict[str, Any] = {"logits_to_keep": 1} if self._keeps_logits else {}
        for part in contexts.split(chunk, dim=1):
            self.model(input_ids=part, use_cache=True, **{self.argument: self.cache}, **more)
        self.length = contexts.shape[1]
        self._kept = [
            {
                name: held.clone() if isinstance(held, Tensor) else held
                for name, held in _state(layer)
            }
            for layer in self.cache.layers
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back that was written since the prefill."""
        for layer, kept in zip(self.cache.layers, self._kept):
            for name, value in kept.items():
                if isinstance(value, Tensor):
                    getattr(layer, name).copy_(value)
                else:
                    setattr(layer, name, value)

    def check(self) -> None:
        """Raise a PrefixError unless the contexts are still in the cache as the prefill left them.

        Sliding layers are passed over: they drop tokens as they go on.
        """
        for number, (layer, kept) in enumerate(zip(self.cache.layers, self._kept)):
            if getattr(layer, "is_sliding", False):
                continue
            for name in ("keys", "values"):
                now, then = (
                    held[:, :, : self.length] for held in (getattr(layer, name), kept[name])
                )
                if not torch.equal(now, then):
                    raise PrefixError(
                        f"decoding has changed the {name} of the context, layer {number}"
                    )


def _state(layer: Any) -> list[tuple[str, Any]]:
    """What a layer of a cache changes while it decodes: tensors and counts."""
    return [
        (name, held)
        for name, held in vars(layer).items()
        if isinstance(held, Tensor) or (type(held) is int and name.startswith("cumulative"))
    ]


@dataclass
class Row:
    """What became of one sample.

    Attributes:
        tokens: generated, without the one that ends the text.
        text: of these.
        steps: how many tokens were fed.
        nll: of every predicted token of a continuation, in nats.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    steps: int = 0
    nll: list[float] = field(default_factory=list)


@torch.no_grad()
def decode(
    step: Callable[..., Any],
    prefix: StaticPrefix,
    samples: Sequence[Sample],
    tokenizer: Any,
    ends: set[int],
    before_step: Callable[[int], object] = lambda step: None,
) -> list[Row]:
    """Restore the contexts, then decode all ``samples`` greedily until each has its answer or its continuation.

    Args:
        step: the model, compiled or not.
        prefix: prefilled with the contexts of the samples, in this order.
        ends: tokens that end a text.
        before_step: called with the number of every step.

    Raises:
        PrefixError: the contexts are not what they were.
    """
    prefix.restore()
    device = prefix.model.device
    rows = [Row() for _ in samples]
    running = set(range(len(samples)))
    longest = max(len(sample.forced) for sample in samples)
    # -1 where a row is fed what it has generated.
    forced = torch.full((longest, len(samples), 1), -1)
    for i, sample in enumerate(samples):
        forced[: len(sample.forced), i, 0] = torch.tensor(sample.forced)
    forced = forced.to(device)
    token = forced[0].clamp(min=0)
    at = 0
    while running:
        given = forced[at] if at < longest else torch.full_like(token, -1)
        token = torch.where(given >= 0, given, token)
        before_step(at)
        out = step(input_ids=token, use_cache=True, **{prefix.argument: prefix.cache})
        logits = out.logits[:, -1]
        token = logits.argmax(-1, keepdim=True)
        if any(sample.answer_tokens == 0 for sample in samples):
            following = forced[min(at + 1, longest - 1)].clamp(min=0)
            nll = (-logits.float().log_softmax(-1).gather(-1, following)).flatten().tolist()
        chosen = token.flatten().tolist()
        at += 1
        for i in sorted(running):
            sample, row = samples[i], rows[i]
            row.steps = at
            if sample.answer_tokens == 0:
                row.nll.append(nll[i])
                done = at == len(sample.forced) - 1
            else:
                done = at >= len(sample.forced) and _take(row, chosen[i], sample, tokenizer, ends)
            if done:
                running.discard(i)
    prefix.check()
    return rows


def _take(row: Row, token: int, sample: Sample, tokenizer: Any, ends: set[int]) -> bool:
    """Add a generated token to the row; whether it was the last one that is needed."""
    if token in ends:
        return True
    row.tokens.append(token)
    row.text = tokenizer.decode(row.tokens, skip_special_tokens=True)
    return len(row.tokens) >= sample.answer_tokens or complete(row.text, sample.expected)
