"""What the long-context example prints."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from decoding import Agreement
from needle import Prompt
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_setting(
    console: Console, name: str, args: argparse.Namespace, prompt: Prompt, policy: Any
) -> None:
    """What is about to run."""
    rows = {
        "model": f"{name}, {args.dtype} on {args.device}, {args.cache} cache",
        "prompt": f"{len(prompt.ids)} tokens of {args.text or 'the Python documentation'}",
        "policy": str(policy),
    }
    if prompt.fact_at is not None:
        rows["fact"] = f"hidden at {prompt.fact_at:.0%} of the text; expected: {prompt.expected}"
    table = Table.grid(padding=(0, 2))
    for key, value in rows.items():
        table.add_row(f"[dim]{key}", escape(value))
    console.print(table)


def print_matches(console: Console, sites: Sequence[Any]) -> None:
    """The attention sites, those that fared alike on one line."""
    groups: dict[tuple[str, ...], list[Any]] = {}
    for site in sites:
        key = (site.module_class, site.cache, site.decision, site.policy, site.reason)
        groups.setdefault(key, []).append(site)
    table = Table(title="attention that was found", title_justify="left")
    for column in ("layers", "module", "cache", "became", "policy or reason"):
        table.add_column(column)
    for (module, cache, decision, policy, reason), found in groups.items():
        detail = policy if decision == "sparse" else reason or policy
        table.add_row(_ranges([s.index for s in found]), module, cache, decision, escape(detail))
    console.print(table)


def print_answers(
    console: Console, answers: Mapping[str, Any], layers: Sequence[Any], expected: str | None
) -> None:
    """Both answers side by side, with what they cost."""
    table = Table(title="answers", title_justify="left")
    table.add_column("")
    for name in answers:
        table.add_column(name)
    both = answers.values()

    def row(title: str, cells: list[str]) -> None:
        table.add_row(title, *cells)

    row("answer", [escape(a.text) or "(empty)" for a in both])
    if expected is not None:
        row("the fact is in it", ["[green]yes" if a.correct else "[red]no" for a in both])
    row("time per token", [f"{a.ms_per_token:.1f} ms" for a in both])
    row("first token, with compiling", [f"{a.first_step_s:.1f} s" for a in both])
    numbers = [layer_numbers(layer) for layer in layers]
    if numbers:
        attendable = sum(n["attendable"] for n in numbers) / len(numbers)
        read = sum(n["read"] for n in numbers) / len(numbers)
        least, most = min(n["read"] for n in numbers), max(n["read"] for n in numbers)
        spread = f"; {least:.0f} to {most:.0f} by layer" if round(least) < round(most) else ""
        cells = [f"{attendable:.0f}", f"{read:.0f} ({read / attendable:.0%}{spread})"]
        row("KV tokens read, a step and layer", cells)
    console.print(table)


def print_agreement(console: Console, agreed: Agreement) -> None:
    """How the logits compare."""
    console.print(
        f"logits over {agreed.steps} tokens of the dense answer: same most likely token "
        f"{agreed.top1:.0%}, KL mean {agreed.kl_mean:.2g} (largest {agreed.kl_max:.2g}), "
        f"largest difference {agreed.max_abs_diff:.3g}"
    )


def layer_numbers(layer: Any) -> dict[str, Any]:
    """Tokens read and attendable in one layer, a step."""
    steps = max(1, layer.steps)
    return {
        "path": layer.path,
        "steps": layer.steps,
        "read": layer.tokens_read / steps,
        "attendable": layer.tokens_attendable / steps,
    }


def _ranges(numbers: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as "0-2, 5"."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
