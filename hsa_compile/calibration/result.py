"""What a calibration gives: the policy, and the curve that it was chosen from, as a table and as a plot."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hsa_compile.errors import CalibrationError
from hsa_compile.policy import Policy, describe

from .measure import LayerRun


@dataclass(frozen=True)
class Point:
    """A policy that was run.

    Attributes:
        label: algorithm and budget, "... in 0-3" where these layers alone have it and the others are dense, or
            "mixed 12/40": the 12th of 40 steps from dense to cheapest.
        kind: "dense", "uniform" (the same for all layers) or "mixed".
        loss: mean KL(dense || sparse), nats a token. That of "dense" is what compilation and rounding do.
        perplexity: of the text, as a multiple of dense; None where it cannot be known.
        tokens: KV tokens that a step reads, summaries included; mean over the layers that were calibrated.
        share: of what dense attention reads there.
        layers: by index, those that were sparse.
    """

    label: str
    kind: str
    policy: Policy
    loss: float
    perplexity: float | None
    tokens: float
    share: float
    layers: Mapping[int, LayerRun]


@dataclass(frozen=True)
class Calibration:
    """The policy that was chosen, its point, and all points that were measured. ``str()`` gives a table.

    Attributes:
        max_loss: the bound; ``chosen.loss`` is above it only where that is dense, and none was within.
    """

    policy: Policy
    chosen: Point
    curve: tuple[Point, ...]
    max_loss: float

    def summary(self) -> str:
        """What was chosen, in a line."""
        one = self.chosen
        factor = "" if one.perplexity is None else f", perplexity x {one.perplexity:.4f}"
        return (
            f"loss {one.loss:.3g} nats a token{factor} (bound {self.max_loss:g}); "
            f"{one.tokens:.0f} KV tokens a layer and step, {one.share:.1%} of dense"
        )

    def __str__(self) -> str:
        table = Table(title="tokens are of one layer and step", title_justify="left")
        for name in ("policy", "KV tokens", "share", "loss", "perplexity", "least captured"):
            table.add_column(name, justify="left" if name == "policy" else "right")
        for point in sorted(self.curve, key=lambda point: (-point.tokens, point.label)):
            recalls = [
                (run.recall, index) for index, run in point.layers.items() if run.recall is not None
            ]
            worst = "{:.1%} (layer {})".format(*min(recalls)) if recalls else "-"
            factor = "-" if point.perplexity is None else f"x {point.perplexity:.4f}"
            mark = "* " if point.label == self.chosen.label else "  "
            row = (f"{point.tokens:.0f}", f"{point.share:.1%}", f"{point.loss:.2e}", factor, worst)
            table.add_row(mark + point.label, *row)
        console = Console(width=120, no_color=True, force_terminal=False)
        with console.capture() as captured:
            console.print(table)
            console.print(f"* {self.summary()}", highlight=False)
            if self.chosen.kind == "dense":
                console.print("  no sparse policy is within the bound", highlight=False)
            console.print(f"  default: {describe(self.policy.default)}", highlight=False)
            for key, layer in self.policy.layers:
                console.print(f"  layer {key}: {describe(layer)}", highlight=False)
        return captured.get().rstrip()

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the curve, loss over KV tokens, into a file (.png, .svg and others of matplotlib's).

        Raises:
            CalibrationError: matplotlib is not installed.
        """
        figure = _matplotlib("figure").Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot()
        lines: dict[str, list[Point]] = {}
        for point in sorted(self.curve, key=lambda point: point.tokens):
            uniform = point.kind == "uniform"
            name = point.policy.default.algorithm if uniform else point.kind
            lines.setdefault(name, []).append(point)
        floor = min((point.loss for point in self.curve if point.loss > 0), default=1e-12)
        for name, points in lines.items():
            tokens = [point.tokens for point in points]
            losses = [max(point.loss, floor) for point in points]
            axes.plot(tokens, losses, "o-" if len(points) > 1 else "s", label=name, markersize=4)
        if self.max_loss > 0:
            axes.axhline(self.max_loss, color="grey", linestyle="--", label="bound")
        chosen = self.chosen
        axes.plot([chosen.tokens], [max(chosen.loss, floor)], "*", markersize=16, label="chosen")
        axes.set_yscale("log")
        axes.set_xlabel("KV tokens read a layer and step")
        axes.set_ylabel("KL(dense || sparse), nats a token")
        axes.grid(alpha=0.3)
        axes.legend()
        target = Path(os.fsdecode(path))
        # Neither dates nor random ids: the same calibration draws the same file.
        with _matplotlib("").rc_context({"svg.hashsalt": "hsa"}):
            figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)


def plot_formats() -> tuple[str, ...]:
    """Suffixes that a plot can have.

    Raises:
        CalibrationError: matplotlib is not installed.
    """
    canvas = _matplotlib("backends.backend_agg").FigureCanvasAgg
    return tuple(f".{name}" for name in sorted(canvas.get_supported_filetypes()))


def _matplotlib(part: str) -> Any:
    try:
        return importlib.import_module(f"matplotlib.{part}" if part else "matplotlib")
    except ImportError as error:
        raise CalibrationError(
            "a plot needs matplotlib (pip install matplotlib); valid without it: no 'plot'"
        ) from error
