"""The policies that are compared: a grid of page scores, budgets and page sizes, and any given by name or file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.accuracy.errors import AccuracyError
from hsa_compile import LayerPolicy, Policy, algorithms
from hsa_compile.errors import did_you_mean, listed
from hsa_compile.policy import PRESETS

DENSE = "dense"
WINDOW = "window"
Budget = int | float


def scores() -> tuple[str, ...]:
    """Valid values of ``--algorithms``: the page scores, and ``window``."""
    return (*algorithms.names(), WINDOW)


def grid(
    names: Sequence[str], budgets: Sequence[Budget], page_sizes: Sequence[int]
) -> dict[str, Policy]:
    """Every combination by its label, such as "cuboid 1024/32": score, budget / page size.

    "window" looks at no score. It reads the sinks and the last tokens, as many as the budget buys, and shows what a
    task is worth: what this finds too was not found by selection.

    Raises:
        PolicyError: a budget or a page size is not valid.
    """
    found = {}
    for name in names:
        for page_size in page_sizes:
            for budget in budgets:
                policy = LayerPolicy(
                    algorithm="mean" if name == WINDOW else name, budget=budget, page_size=page_size
                )
                if name == WINDOW:
                    policy = _window(policy)
                found[f"{name} {budget}/{page_size}"] = Policy(policy)
    return found


def _window(policy: LayerPolicy) -> LayerPolicy:
    if isinstance(policy.budget, float):
        raise AccuracyError(
            f"budget {policy.budget} is not valid for {WINDOW!r}; valid: an int (tokens)"
        )
    # Sinks take a page. A window may touch one page more than it fills, so no page is left to a score.
    recent = (policy.pages(0) - 1) * policy.page_size
    return dataclasses.replace(policy, recent=recent)


def explicit(sources: Iterable[str]) -> dict[str, Policy]:
    """Policies by preset name or file, labelled by that name; the preset "dense" is compiled like the others.

    Raises:
        PolicyError: one is neither, or its file is not valid.
        AccuracyError: two have one name.
    """
    found: dict[str, Policy] = {}
    for source in sources:
        label = source if source in PRESETS else Path(source).stem
        label = "dense, compiled" if label == DENSE else label
        if label in found:
            raise AccuracyError(f"--policy {source!r} is not valid: another is called {label!r}")
        found[label] = Policy.load(source)
    return found


def on_device(policy: Policy) -> Policy:
    """``policy`` with every KV cache on the device, which gives the same results (docs/host.md)."""

    def moved(one: LayerPolicy) -> LayerPolicy:
        return dataclasses.replace(one, placement="device", prefetch="none")

    return Policy(moved(policy.default), tuple((key, moved(one)) for key, one in policy.layers))


def together(*groups: dict[str, Policy]) -> dict[str, Policy]:
    """All policies by label. One that is there already under another label is left out.

    Raises:
        AccuracyError: two different ones have the same label.
    """
    found: dict[str, Policy] = {}
    for label, policy in (item for group in groups for item in group.items()):
        if found.get(label, policy) != policy:
            raise AccuracyError(f"two different policies are called {label!r}; rename the file")
        if policy not in found.values():
            found[label] = policy
    return found


def check_scores(names: Sequence[str]) -> None:
    """Raise an AccuracyError unless all are valid for ``--algorithms``."""
    check_each("--algorithms", names, scores())


def check_each(option: str, values: Sequence[str], valid: Sequence[str]) -> None:
    """Raise an AccuracyError that names the first of ``values`` that is not ``valid``."""
    for value in values:
        if value not in valid:
            raise AccuracyError(
                f"{option} {value!r} is not valid; valid: {listed(valid)}{did_you_mean(value, valid)}"
            )
