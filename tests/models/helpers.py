"""Tiny random Hugging Face models, and the decode loop that the tests of this folder share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

transformers = pytest.importorskip("transformers")

PROMPT = 41
STEPS = 64
CAPACITY = 160
"""Of static caches: more than prompt and steps, and no multiple of the larger pages."""
VOCABULARY = 128
WINDOW = 48
"""Sliding window in tokens: decoding begins inside it and ends beyond."""
PADDING = (0, 7, 19)
"""Left padding of the rows of a batch."""

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    # Large enough for attention to prefer some tokens to others.
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_GROUPED),
    "qwen2": lambda: transformers.Qwen2Config(**_GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**_GROUPED, head_dim=24),
    "mistral": lambda: transformers.MistralConfig(**_GROUPED, sliding_window=WINDOW),
    "phi3": lambda: transformers.Phi3Config(**_GROUPED),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=512,
        n_embd=64,
        n_layer=2,
        n_head=4,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "neox": lambda: transformers.GPTNeoXConfig(**_SIZES),
    "olmo": lambda: transformers.OlmoConfig(**_GROUPED),
    "gemma": lambda: transformers.GemmaConfig(**_GROUPED, head_dim=16),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_GROUPED,
        head_dim=16,
        query_pre_attn_scalar=20,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


def tiny(family: str, attention: str = "sdpa") -> Any:
    """A random model of ``family`` for causal language modelling, in evaluation mode."""
    config = FAMILIES[family]()
    config._attn_implementation = attention
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def cache_argument(model: Any) -> str:
    """What this release of transformers calls the cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def new_cache(model: Any, kind: str, capacity: int = CAPACITY) -> Any:
    """A ``static``, ``dynamic``, or ``sliding`` cache: dynamic, and aware of the layers that slide."""
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=capacity)
    if kind == "sliding":
        return transformers.DynamicCache(config=model.config)
    return transformers.DynamicCache()


@dataclass(frozen=True)
class Request:
    """A left-padded prompt and what it is decoded with; ``mask`` covers the whole capacity."""

    ids: Tensor
    mask: Tensor
    steps: int = STEPS

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    @property
    def positions(self) -> Tensor:
        return (self.mask.cumsum(-1) - 1).clamp(min=0)

    def row(self, index: int) -> Request:
        """One row alone, still padded."""
        return Request(self.ids[index : index + 1], self.mask[index : index + 1], self.steps)


def request(
    batch: int, length: int = PROMPT, steps: int = STEPS, capacity: int = CAPACITY, seed: int = 0
) -> Request:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    padding = torch.tensor(PADDING[:batch])
    mask = (torch.arange(capacity) >= padding[:, None]).long()
    return Request(ids * mask[:, :length], mask, steps)


@dataclass(frozen=True)
class Decoded:
    """Logits ``[B, steps, V]`` and the tokens that were fed in, ``[B, steps]``."""

    logits: Tensor
    tokens: Tensor


def decode(
    model: Any,
    step: Callable[..., Any],
    kind: str,
    request: Request,
    tokens: Tensor | None = None,
    cache: Any = None,
) -> Decoded:
    """Prefill eagerly with ``model``, then decode token by token with ``step``.

    Args:
        tokens: what is fed in, ``[B, steps]``; greedily chosen where it is None.
        cache: a cache of ``kind``; a new one where it is None.
    """
    cache = new_cache(model, kind, request.mask.shape[1]) if cache is None else cache
    name, length = cache_argument(model), request.length
    positions = request.positions
    placed = "position_ids" in inspect.signature(model.forward).parameters
    logits, fed = [], []

    def at(start: int, stop: int) -> dict[str, Tensor]:
        return {"position_ids": positions[:, start:stop].clone()} if placed else {}

    with torch.no_grad():
        prefilled = model(
            request.ids,
            attention_mask=request.mask[:, :length].clone(),
            **at(0, length),
            **{name: cache},
        ).logits
        last = prefilled[:, -1:]
        for i in range(request.steps):
            token = last.argmax(-1) if tokens is None else tokens[:, i : i + 1].clone()
            seen = request.mask if kind == "static" else request.mask[:, : length + i + 1].clone()
            here = at(length + i, length + i + 1)
            last = step(token, attention_mask=seen, **here, **{name: cache}).logits
            logits.append(last)
            fed.append(token)
    return Decoded(torch.cat(logits, 1), torch.cat(fed, 1))


def compile_hsa(model: Any, policy: object, run: str = "eager", **options: object) -> Any:
    """The model compiled afresh; ``graphs_compiled`` counts from here."""
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(model, backend="hsa", options={"policy": policy, "run": run, **options})


def graphs_compiled() -> int:
    """Graphs that Dynamo handed to a backend since ``compile_hsa``."""
    return int(counters["stats"]["unique_graphs"])
