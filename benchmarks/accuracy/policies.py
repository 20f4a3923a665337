"""The policies that are compared: a grid of page scores, budgets and page sizes, and any given by name or file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.accuracy.errors import AccuracyError
from hsa_compile import LayerPolicy, Policy, algorithms
from hsa_compile.errors import did_you_mean, listed
from hsa_compile.policy import PRESETS, algorithm_names

DENSE = "dense"
Budget = int | float


def grid(
    names: Sequence[str], budgets: Sequence[Budget], page_sizes: Sequence[int]
) -> dict[str, Policy]:
    """Every combination by its label, such as "cuboid 1024/32": score, budget / page size.

    Raises:
        PolicyError: a budget or a page size is not valid.
    """
    return {
        f"{name} {budget}/{page_size}": Policy(
            LayerPolicy(algorithm=name, budget=budget, page_size=page_size)
        )
        for name in names
        for page_size in page_sizes
        for budget in budgets
    }


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


def purposes() -> tuple[str, ...]:
    """The presets that are named for what they are for."""
    named = ("default", *(name for name in algorithm_names() if name != "streaming"))
    return tuple(name for name in PRESETS if name not in named)


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


def scores() -> tuple[str, ...]:
    """Valid values of ``--algorithms``."""
    return tuple(name for name in algorithm_names() if name != DENSE)


def usual_scores() -> tuple[str, ...]:
    """Those that are compared where none are named: page scores of one step."""
    return tuple(name for name in algorithms.names() if not algorithms.get(name).accumulates)


def has_mass(policy: Policy) -> bool:
    """Whether whole pages are selected, by a single step alone, so that their mass can be measured there."""
    known = algorithms.names()
    return all(
        one.granularity == "page"
        and not (one.algorithm in known and algorithms.get(one.algorithm).accumulates)
        for one in policy.all()
    )


def check_each(option: str, values: Sequence[str], valid: Sequence[str]) -> None:
    """Raise an AccuracyError that names the first of ``values`` that is not ``valid``."""
    for value in values:
        if value not in valid:
            raise AccuracyError(
                f"{option} {value!r} is not valid; valid: {listed(valid)}{did_you_mean(value, valid)}"
            )
