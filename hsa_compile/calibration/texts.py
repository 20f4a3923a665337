"""Texts as a decode: a dense prefill, then the rest of the text token by token, over one static cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hsa_compile.errors import CalibrationError

_CHUNK = 1024
"""Tokens that are prefilled at a time."""


@dataclass
class Texts:
    """Token ids ``[B, L]`` of one or more texts, and the model of transformers that they are for.

    Called with the model or what was compiled of it, it returns the logits ``[texts * steps, B, V]``. All texts share
    one cache; what each looked like after its prefill is kept.
    """

    model: Any
    texts: list[Tensor]
    steps: int
    _cache: Any = None
    _prefilled: list[list[dict[str, Any]]] | None = None

    @classmethod
    def of(cls, model: Any, inputs: Any, steps: int) -> Texts:
        """Check ``inputs`` and move them to the device of the model.

        Raises:
            CalibrationError: they are no token ids for this model, or too short.
        """
        texts = [inputs] if isinstance(inputs, Tensor) else inputs
        if not isinstance(texts, Sequence) or not texts:
            raise CalibrationError(
                f"inputs of type {type(inputs).__name__!r} are not valid; valid: token ids [B, L], a list of these, "
                "or a function that decodes with the callable it is given"
            )
        config: Any = getattr(model, "config", None)
        if not hasattr(config, "get_text_config") or config.is_encoder_decoder:
            raise CalibrationError(
                f"model {type(model).__name__!r} is no decoder of transformers, which token ids are for; "
                "valid for any other: a function as inputs, which decodes with the callable it is given"
            )
        config = config.get_text_config()
        for at, text in enumerate(texts):
            _check(f"inputs[{at}]", text, steps, config)
        rows = sorted({text.shape[0] for text in texts})
        if len(rows) > 1:
            raise CalibrationError(
                f"inputs have {rows} rows; valid: texts of one number of rows, which share a compiled step"
            )
        heads = rows[0] * (
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        )
        if steps * len(texts) < heads:
            raise CalibrationError(
                f"steps {steps} is not valid; valid: at least {-(-heads // len(texts))} here, so that each of {heads} "
                "rows and KV heads is looked at"
            )
        return cls(model, [text.to(model.device, torch.int64) for text in texts], steps)

    def __call__(self, step: Callable[..., Any]) -> Tensor:
        argument = cache_argument(self.model)
        if self._prefilled is None:
            self._prefill(argument)
        assert self._prefilled is not None
        logits = []
        for text, kept in zip(self.texts, self._prefilled, strict=True):
            _restore(self._cache, kept)
            for at in range(text.shape[1] - self.steps, text.shape[1]):
                # A slice would have Dynamo guard on its stride, which is the length of the text.
                token = text[:, at : at + 1].clone()
                out = step(input_ids=token, use_cache=True, **{argument: self._cache})
                logits.append(out.logits[:, -1].clone())
        return torch.stack(logits)

    def following(self) -> Tensor:
        """The token that each row of the logits predicts, ``[texts * steps, B]``; -1 for the last of a text."""
        told = (text[:, text.shape[1] - self.steps + 1 :] for text in self.texts)
        return torch.cat([torch.nn.functional.pad(text, (0, 1), value=-1).T for text in told])

    def _prefill(self, argument: str) -> None:
        from transformers import StaticCache

        longest = max(text.shape[1] for text in self.texts)
        self._cache = StaticCache(config=self.model.config, max_cache_len=longest)
        known = inspect.signature(self.model.forward).parameters
        more: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._prefilled = []
        for text in self.texts:
            if self._prefilled:
                self._cache.reset()
            for part in text[:, : -self.steps].split(_CHUNK, dim=1):
                self.model(input_ids=part, use_cache=True, **{argument: self._cache}, **more)
            kept = [
                {name: held.clone() if isinstance(held, Tensor) else held for name, held in state}
                for state in map(_state, self._cache.layers)
            ]
            self._prefilled.append(kept)


def cache_argument(model: Any) -> str:
    """What this release of transformers calls the cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _check(name: str, text: object, steps: int, config: Any) -> None:
    whole = (torch.int64, torch.int32)
    if not isinstance(text, Tensor) or text.dim() != 2 or text.dtype not in whole or not len(text):
        got = f"{text.dtype} {list(text.shape)}" if isinstance(text, Tensor) else type(text)
        raise CalibrationError(f"{name} is {got}; valid: a tensor of token ids [B, L]")
    length = text.shape[1]
    if length <= steps:
        raise CalibrationError(
            f"{name} has {length} tokens, of which steps={steps} are decoded; valid: a longer text, or fewer steps"
        )
    room = getattr(config, "max_position_embeddings", None)
    if room is not None and length > room:
        raise CalibrationError(
            f"{name} has {length} tokens; valid: at most {room}, for which the model has positions"
        )
    least, most = int(text.min()), int(text.max())
    if least < 0 or most >= config.vocab_size:
        raise CalibrationError(
            f"{name} has token {least if least < 0 else most}; valid: 0 to {config.vocab_size - 1}"
        )


def _state(layer: Any) -> list[tuple[str, Any]]:
    """What a layer of a cache changes while it decodes: tensors and counts."""
    return [
        (name, held)
        for name, held in vars(layer).items()
        if isinstance(held, Tensor) or (type(held) is int and name.startswith("cumulative"))
    ]


def _restore(cache: Any, kept: list[dict[str, Any]]) -> None:
    for layer, state in zip(cache.layers, kept, strict=True):
        for name, value in state.items():
            if isinstance(value, Tensor):
                getattr(layer, name).copy_(value)
            else:
                setattr(layer, name, value)
