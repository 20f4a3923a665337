"""docs/models.md: what became of the attention of each family, from the results of a test run.

Results come as properties of reports, which is how they reach the process that started the others of pytest-xdist.
A run of some families replaces their rows only, unless the versions have changed. What the page says of the whole suite
stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
COMMAND = "pytest tests/models/test_families.py --run-slow --write-models"
KINDS = ("static", "dynamic")
WRITTEN = "## The whole suite"
"""From here on the page is written by hand, and stays."""

INTRODUCTION = """\
# Models

What the backend makes of every decoder family that transformers registers for causal language modelling. Each is built
tiny and with random weights, one layer of every type that it has, and decodes with a budget that covers what is
attended: with each kind of cache, with `sdpa` and `eager` attention where the family has both, in batches of 1 and 3,
padded on the left and on the right. The logits are compared with those of the model that is not compiled.

| in the table | means |
|---|---|
| rewritten | attention of all layers reads selected pages |
| partly: layer 1, not 0 | that layer does; the reason is the one for which the other does not |
| dense | every cache holds no more than the budget, so there is nothing to select |
| left | runs as the model wrote it, for the reason given |
| none | no attention over a cache is found: recurrent layers, or Dynamo captured no graph with one |
| eager fails | the model fails, or is wrong, with this cache before it is compiled |
| error | the largest difference of a logit, relative to the largest logit or to 1 |
| cases | how many were run of 8: cache, attention, batch; 4 where there is `eager` attention only |

Layers are numbers of the tiny model. Several reasons are those of several graphs: a window, say, is dense until it is
full. Caches are those that `generate` makes: of layers that slide they keep the window only, which is within any useful
budget. Made by
"""


@dataclass
class Table:
    """The plugin that gathers results and writes the page."""

    results: list[dict[str, Any]] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            found = dict(report.user_properties)
            if "family" in found:
                self.results.append({**found["family"], **found.get("result", {"failed": True})})

    def pytest_sessionfinish(self) -> None:
        if self.results:
            from .families import NOT_SURVEYED

            old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
            PAGE.write_text(page(self.results, NOT_SURVEYED, old), encoding="utf-8")


def page(results: Iterable[dict[str, Any]], others: dict[str, str], old: str = "") -> str:
    """The page that these results give, with the rows of ``old`` for families that have none."""
    versions = (
        f"with torch {version('torch').split('+')[0]} and transformers {version('transformers')}"
    )
    rows = {}
    if versions in old:
        rows = {
            line.split("|")[1].strip(): line for line in old.splitlines() if line.count("|") == 7
        }
    by_family = defaultdict(list)
    for result in results:
        by_family[f"`{result['family']}`"].append(result)
    rows |= {family: row(family, mine) for family, mine in by_family.items()}
    rows = {family: line for family, line in rows.items() if family.startswith("`")}
    lines = [
        f"{INTRODUCTION}`{COMMAND}`, {versions}.",
        "",
        f"## {len(rows)} families",
        "",
        "| family | static cache | dynamic cache | why | error | cases |",
        "|---|---|---|---|---|---|",
        *(rows[family] for family in sorted(rows, key=lambda name: name.strip("`"))),
        "",
        "## Not surveyed",
        "",
        "| family | because |",
        "|---|---|",
        *(f"| `{family}` | {reason} |" for family, reason in sorted(others.items())),
    ]
    _, heading, rest = old.partition(f"\n{WRITTEN}")
    return "\n".join(lines) + "\n" + heading + rest


def row(family: str, results: list[dict[str, Any]]) -> str:
    """One line of the table."""
    cells, reasons = [], defaultdict(list)
    for kind in KINDS:
        mine = [result for result in results if result["kind"] == kind]
        cells.append(decision(mine))
        for result in mine:
            for reason, layers in why(result).items():
                if kind not in reasons[reason, layers]:
                    reasons[reason, layers].append(kind)
    places = defaultdict(list)
    for (reason, layers), kinds in reasons.items():
        place = [*(kinds if len(kinds) < len(KINDS) else []), *([layers] if layers else [])]
        places[", ".join(place)].append(reason)
    notes = [
        f"{place}: {' / '.join(found)}" if place else " / ".join(found)
        for place, found in places.items()
    ]
    errors = [result["error"] for result in results if "error" in result]
    error = f"{max(errors):.0e}" if errors else ""
    return f"| {family} | {' | '.join(cells)} | {'; '.join(notes)} | {error} | {len(results)} |"


def decision(results: list[dict[str, Any]]) -> str:
    """What became of one kind of cache; for each attention apart where they differ."""
    by_attention = defaultdict(set)
    for result in results:
        by_attention[result["attention"]].add(verdict(result))
    joined = {name: " or ".join(sorted(found)) for name, found in by_attention.items()}
    if len(set(joined.values())) <= 1:
        return next(iter(joined.values()), "")
    return ", ".join(f"{name}: {what}" for name, what in joined.items())


def verdict(result: dict[str, Any]) -> str:
    if "failed" in result:
        return "**wrong**"
    if "broken" in result:
        return "eager fails"
    by_layer = layers_of(result)
    if not by_layer:
        return "none"
    sparse = [layer for layer, found in by_layer.items() if found == {("sparse", "")}]
    if len(sparse) == len(by_layer):
        return "rewritten"
    if sparse:
        others = [layer for layer in by_layer if layer not in sparse]
        return f"partly: {named(sparse)}, not {', '.join(map(str, others))}"
    decisions = [{decided for decided, _ in found} for found in by_layer.values()]
    return "dense" if all("dense" in found for found in decisions) else "left"


def why(result: dict[str, Any]) -> dict[str, str]:
    """Reasons, and the layers that each holds for; no layers where it holds for all."""
    if "broken" in result:
        return {result["broken"]: ""}
    by_layer = layers_of(result)
    if not by_layer and result.get("note"):
        return {result["note"]: ""}
    reasons = defaultdict(list)
    for layer, found in by_layer.items():
        for _, reason in sorted(found):
            if reason:
                reasons[reason].append(layer)
    return {
        reason: "" if len(layers) == len(by_layer) else named(layers)
        for reason, layers in reasons.items()
    }


def layers_of(result: dict[str, Any]) -> dict[int, set[tuple[str, str]]]:
    by_layer = defaultdict(set)
    for index, decided, reason in sorted(result.get("sites", ())):
        by_layer[index].add((decided, reason))
    return by_layer


def named(layers: list[int]) -> str:
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
