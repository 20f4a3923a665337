"""Calibration: the cheapest policy, layer by layer, whose measured loss stays within a bound.

    candidates, each for all layers: the error of every layer under every candidate      measure.py
    one candidate in groups of layers alone: how much errors matter there                search.py
    the path of mixed policies, dense to cheapest, by what a token costs in loss          path.py
    bisected for the cheapest within the bound; what is tried is run                      search.py

Model, decode and loss are in ``measure``, token ids as a decode in ``texts``, what comes out in ``result``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hsa_compile import compat
from hsa_compile.errors import CalibrationError, did_you_mean, listed
from hsa_compile.options import parse_options
from hsa_compile.policy import LayerPolicy, Policy, PolicySource
from hsa_compile.policy_file import SUFFIXES

from .measure import Decode, Measure
from .result import Calibration, Point, plot_formats
from .search import search
from .texts import Texts

__all__ = ["Calibration", "Point", "calibrate"]

ALGORITHMS = ("cuboid", "mean")
BUDGETS = (256, 512, 1024, 2048, 4096)


def calibrate(
    model: torch.nn.Module,
    inputs: Tensor | Sequence[Tensor] | Decode,
    max_loss: float,
    *,
    steps: int = 64,
    algorithms: Sequence[str] = ALGORITHMS,
    budgets: Sequence[int | float | tuple[int, ...]] = BUDGETS,
    base: PolicySource = None,
    trials: int = 8,
    options: Mapping[str, Any] | None = None,
    save: str | os.PathLike[str] | None = None,
    plot: str | os.PathLike[str] | None = None,
    report: Callable[[Calibration], object] | None = print,
) -> Policy:
    """Find the cheapest policy whose loss on ``inputs`` is at most ``max_loss``; each layer gets its own.

    The loss is the mean of KL(dense || sparse) over the next-token distributions of the decode steps, in nats a token:
    it needs no labels, is zero only where both are equal, and is by how much the log-likelihood of text that the dense
    model would write falls. The cost is the KV tokens that a step reads, with what it reads of page summaries.

    First every candidate (an algorithm and a budget, for all layers) is run and every layer's output error
    measured, and up to eight groups of layers are made sparse alone, to see how much their errors matter. Then
    mixed policies are run, between dense and cheapest, in which each layer gives up what saves most for its share
    of the loss. Every policy that may be returned was compiled and run, and dense is returned where none is within
    the bound. The same arguments give the same policy.

    Args:
        model: in evaluation mode, not compiled. Neither it nor what Dynamo has compiled of it is changed.
        inputs: token ids of real text ``[B, L]`` for a model of transformers, or several of one B: all but the last
            ``steps`` tokens are prefilled, uncompiled and dense, and the others decoded, whatever the model predicts.
            For any other model a function: called with a callable in place of the model, uncompiled or compiled, it
            decodes with it, always the same tokens, and returns the logits ``[steps, ..., V]``.
        max_loss: nats a token, at least 0.
        steps: decode steps of each text. Every KV head of every row is looked at once in B * Hkv steps.
        algorithms, budgets: the candidates are all combinations; budgets that hold a whole text are left out.
        base: a policy without layers, whose other fields (page size, sink, ...) candidates take.
        trials: mixed policies that are run in search of the bound; with 0, all layers have the same budget.
        options: of ``torch.compile`` beside the policy, such as ``{"run": "eager"}``.
        save: file for the policy (.yaml, .yml, .json), which the option ``policy`` reads.
        plot: file for the trade-off curve (such as .png or .svg); needs matplotlib.
        report: called with the :class:`Calibration` at the end; without it there is no progress bar either.

    Returns:
        The policy; its layers are named by index.

    Raises:
        CalibrationError, PolicyError, OptionError: an argument is not valid, and nothing was run; or the model turns
            out to have nothing to calibrate.
    """
    _check_model(model)
    bound = _number("max_loss", max_loss)
    trials = _count("trials", trials, least=0)
    steps = _count("steps", steps)
    options = dict(options or {})
    if "policy" in options:
        raise CalibrationError("options hold a 'policy'; valid: give its fields as 'base'")
    parse_options(options, None)
    candidates = _candidates(algorithms, budgets, base)
    targets = (_path("save", save, SUFFIXES), _path("plot", plot, plot_formats))
    decode: Decode
    if callable(inputs):
        decode = inputs
    else:
        decode = texts = Texts.of(model, inputs, steps)
        candidates = _fitting(candidates, min(text.shape[1] for text in texts.texts))
    measure = Measure(model, decode, options)
    result = search(measure, candidates, bound, trials, show=report is not None)
    if targets[0] is not None:
        result.policy.save(targets[0], note=result.summary())
    if targets[1] is not None:
        result.plot(targets[1])
    if report is not None:
        report(result)
    return result.policy


def _check_model(model: object) -> None:
    if not isinstance(model, torch.nn.Module) or compat.is_compiled(model):
        raise CalibrationError(
            f"model of type {type(model).__name__!r} is not valid; valid: an nn.Module that is not compiled"
        )
    training = [name for name, module in model.named_modules() if module.training]
    if training:
        raise CalibrationError(
            f"model is in training mode ({training[0] or type(model).__name__}), where dropout is random; "
            "valid: a model after .eval()"
        )


def _number(name: str, value: object) -> float:
    if type(value) not in (int, float) or not value >= 0:  # type: ignore[operator]
        raise CalibrationError(
            f"{name} {value!r} is not valid; valid: a number >= 0 (nats a token)"
        )
    return float(value)  # type: ignore[arg-type]


def _count(name: str, value: object, least: int = 1) -> int:
    if type(value) is not int or value < least:
        raise CalibrationError(f"{name} {value!r} is not valid; valid: an int >= {least}")
    return value


def _candidates(
    algorithms: Sequence[str], budgets: Sequence[int | float | tuple[int, ...]], base: PolicySource
) -> list[LayerPolicy]:
    """All combinations, each once.

    Raises:
        CalibrationError, PolicyError: one is not valid, or there is none.
    """
    for name, values in (("algorithms", algorithms), ("budgets", budgets)):
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise CalibrationError(f"{name} {values!r} is not valid; valid: a list of one or more")
    policy = Policy.load(base)
    if policy.layers:
        raise CalibrationError(
            f"base names layers ({listed(key for key, _ in policy.layers)}); "
            "valid: a policy without them, whose fields all candidates take"
        )
    if "dense" in algorithms:
        raise CalibrationError(
            "algorithms 'dense' is not valid; valid: page scores; dense layers are always considered"
        )
    found = [
        dataclasses.replace(policy.default, algorithm=algorithm, budget=budget)
        for algorithm in algorithms
        for budget in budgets
    ]
    return list(dict.fromkeys(found))


def _fitting(candidates: list[LayerPolicy], length: int) -> list[LayerPolicy]:
    """Those that do not hold a text of ``length`` tokens whole."""
    sized = [one.at_length(length) for one in candidates]
    least = [min(one.head_pages or (one.pages(length),)) * one.page_size for one in sized]
    found = [one for one, tokens in zip(candidates, least) if tokens < length]
    if not found:
        budgets = listed(dict.fromkeys(one.budget for one in candidates))
        raise CalibrationError(
            f"budgets {budgets} hold the shortest text of {length} tokens whole; valid: smaller ones, or longer texts"
        )
    return found


def _path(
    name: str,
    value: str | os.PathLike[str] | None,
    suffixes: Sequence[str] | Callable[[], Sequence[str]],
) -> Path | None:
    """A file to write, whose suffix and folder are looked at before anything runs."""
    if value is None:
        return None
    path = Path(os.fsdecode(value))
    valid = suffixes() if callable(suffixes) else suffixes
    if path.suffix.lower() not in valid:
        hint = did_you_mean(path.suffix, valid)
        raise CalibrationError(
            f"{name} {str(path)!r} is not valid; valid: a file that ends in {listed(valid)}{hint}"
        )
    if not path.parent.is_dir():
        raise CalibrationError(f"{name} {str(path)!r}: there is no folder {str(path.parent)!r}")
    return path
