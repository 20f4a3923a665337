"""One policy, compiled and run: its loss, what its layers read, and how far their outputs are off."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hsa_compile import compat, registry
from hsa_compile.errors import CalibrationError
from hsa_compile.explain import Explanation, explain
from hsa_compile.policy import Policy
from hsa_compile.stats import stats

from .texts import Texts

Decode = Callable[[Callable[..., Any]], Tensor]
"""Decodes with a callable in place of the model: always the same tokens; logits ``[steps, ..., V]``."""

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class LayerRun:
    """The attentions of one layer index in one run, sums over them where there are several.

    Attributes:
        read: KV tokens that a step read, with what it read of summaries, by KV head and row.
        attendable: KV tokens that dense attention would have read.
        error: square of the relative output error; None where nothing was observed.
        recall: share of the softmax that was captured; the lowest of several.
    """

    read: float
    attendable: float
    error: float | None = None
    recall: float | None = None


@dataclass(frozen=True)
class Run:
    """A policy and what came of it.

    Attributes:
        loss: mean KL(dense || sparse), nats a token.
        perplexity: of the text, as a multiple of dense; None where inputs are a function, or texts have one step.
        layers: what was rewritten, by layer index.
        explanation: of all attention sites.
    """

    policy: Policy
    loss: float
    perplexity: float | None
    layers: Mapping[int, LayerRun]
    explanation: Explanation


class Measure:
    """Runs policies against the dense model, whose logits are kept.

    Args:
        decode: see :data:`Decode`.
        options: of ``torch.compile`` beside the policy.
    """

    def __init__(self, model: torch.nn.Module, decode: Decode, options: Mapping[str, Any]) -> None:
        self.model, self.decode, self.options = model, decode, options
        self._following = decode.following() if isinstance(decode, Texts) else None
        self._gpus = {held.device for held in model.parameters() if held.is_cuda}
        self._dense: Tensor | None = None

    def run_dense(self) -> None:
        """The model as it is, uncompiled: what the loss is measured against.

        Raises:
            CalibrationError: it gives no logits, or nan.
        """
        with torch.no_grad():
            self._dense = logits = self.decode(self.model)
        if not isinstance(logits, Tensor) or logits.dim() < 2 or not logits.is_floating_point():
            got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise CalibrationError(f"inputs returned {got}; valid: logits [steps, ..., V]")
        if not (logits < math.inf).all():
            raise CalibrationError("the logits of the dense model are not all numbers")

    def __call__(self, policy: Policy, watch: bool = False) -> Run:
        """Compile the model with ``policy`` and run it; ``watch`` has every step of every layer measured."""
        assert self._dense is not None
        observed = policy
        if watch:
            watched = dataclasses.replace(policy.default, monitor=1, monitor_bound=0.0)
            observed = Policy(watched, policy.layers)
        function = _afresh(self.model)
        compiled = torch.compile(
            function,
            backend="hsa",
            # Texts are of one length or another, and a step is the same for all.
            dynamic=False if isinstance(self.decode, Texts) else None,
            options={**self.options, "policy": observed},
        )
        try:
            with torch.no_grad(), compat.backend_errors():
                logits = self.decode(_settling(compiled, self._gpus))
            explanation = explain(compiled)
            layers = _layers(compiled, explanation)
        finally:
            registry.forget(compiled)
        if not isinstance(logits, Tensor) or logits.shape != self._dense.shape:
            got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise CalibrationError(
                f"inputs returned {got} with the compiled model and {list(self._dense.shape)} with the model; "
                "valid: a function that decodes the same tokens every time"
            )
        loss, perplexity = compare(self._dense, logits, self._following)
        return Run(policy, loss, perplexity, layers, explanation)


def compare(dense: Tensor, sparse: Tensor, following: Tensor | None) -> tuple[float, float | None]:
    """Mean KL(dense || sparse) in nats, and the factor by which the perplexity of ``following`` changes.

    Args:
        dense, sparse: logits ``[N, ..., V]``.
        following: the token that comes next, ``[N, ...]``; -1 where none is known.
    """
    loss = torch.zeros((), dtype=torch.float64, device=dense.device)
    lost, known = torch.zeros_like(loss), 0
    for at, (ours, theirs) in enumerate(zip(sparse, dense, strict=True)):
        p, q = (row.double().log_softmax(-1) for row in (theirs, ours))
        # What the model itself rules out (-inf) adds nothing.
        terms = torch.where(p > -math.inf, p.exp() * (p - q), 0.0)
        loss += terms.sum(-1).clamp(min=0).sum()
        if following is not None:
            told = following[at] >= 0
            picked = (p - q).gather(-1, following[at].clamp(min=0).unsqueeze(-1)).squeeze(-1)
            lost += torch.where(told, picked, 0.0).sum()
            known += int(told.sum())
    mean = float(loss) / (dense.numel() // dense.shape[-1])
    return mean, math.exp(float(lost) / known) if known else None


def _afresh(model: torch.nn.Module) -> Callable[..., Any]:
    """A function that calls ``model`` and has code of its own.

    Dynamo keeps what it compiles, and counts recompilations, by code object: those of the model's forward are not
    touched, and all goes with the function.
    """

    def step(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    step.__code__ = step.__code__.replace(co_name=f"calibrated_step_{next(_NUMBERS)}")
    return step


def _settling(compiled: Callable[..., Any], gpus: Collection[torch.device]) -> Callable[..., Any]:
    """Each step waits for the GPU: monitors that fall behind would skip steps, or meet the next text in the cache."""
    if not gpus:
        return compiled

    def step(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(*args, **kwargs)
        for device in gpus:
            torch.cuda.synchronize(device)
        return out

    return step


def _layers(compiled: Any, explanation: Explanation) -> dict[int, LayerRun]:
    """What ``stats`` and ``explain`` tell, by layer index."""
    sites = {(site.index, site.path): site for site in explanation.sites if site.summaries}
    found: dict[int, LayerRun] = {}
    for layer in stats(compiled).layers:
        whole = layer.tokens_attendable / layer.steps
        read = layer.tokens_read / layer.steps
        site = sites.get((layer.index, layer.path))
        if site is not None:
            read += site.summaries * whole + min(site.candidates, whole)
        error, recall = layer.output_error, layer.recall
        squared = None if error is None else error**2
        one = LayerRun(read, whole, squared, recall)
        found[layer.index] = _sum(found[layer.index], one) if layer.index in found else one
    return found


def _sum(one: LayerRun, other: LayerRun) -> LayerRun:
    error = None
    if one.error is not None and other.error is not None:
        error = one.error + other.error
    recalls = [run.recall for run in (one, other) if run.recall is not None]
    return LayerRun(
        one.read + other.read,
        one.attendable + other.attendable,
        error,
        min(recalls, default=None),
    )
