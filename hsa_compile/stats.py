"""Counters of what the rewritten attention has read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from hsa_compile import registry
from hsa_compile.runtime.monitor import Observed
from hsa_compile.runtime.program import Program


@dataclass(frozen=True)
class LayerStats:
    """One attention layer: sums over all steps of tokens a KV head and batch row (averaged over both).

    ``tokens_read / steps`` is what one step reads of the KV cache; ``tokens_attendable / steps`` what dense attention
    would have read. The rest is of caches with ``placement="host"``, summed over batch rows and KV heads too: pages
    selected that were in the pool, pages loaded while the step waited for them, pages that lost their slot, bytes moved
    from the host, pages loaded ahead of their selection, and how many of these were selected before they were evicted.

    Where the policy has a ``monitor``: how many query heads were observed, the mean and the 5th percentile of the share
    of the dense softmax that their selections captured, and the mean error of their outputs relative to the dense ones.
    """

    index: int
    path: str
    steps: int
    tokens_read: float
    tokens_attendable: float
    pages_hit: int = 0
    pages_loaded: int = 0
    pages_evicted: int = 0
    bytes_loaded: int = 0
    pages_prefetched: int = 0
    prefetched_used: int = 0
    observed: int = 0
    recall: float | None = None
    recall_p5: float | None = None
    output_error: float | None = None

    @property
    def hidden_share(self) -> float | None:
        """Share of the pages that were loaded and used which no step waited for; None where none was."""
        used = self.pages_loaded + self.prefetched_used
        return self.prefetched_used / used if used else None

    @property
    def hit_rate(self) -> float | None:
        """Share of the selected pages that the pool held; None where there is no pool."""
        selected = self.pages_hit + self.pages_loaded
        return self.pages_hit / selected if selected else None


@dataclass(frozen=True)
class Stats:
    """Counters of a model since it was compiled. ``str()`` gives a table."""

    steps: int
    layers: tuple[LayerStats, ...]

    def __str__(self) -> str:
        table = Table(title=f"{self.steps} steps; tokens and MB are of one", title_justify="left")
        pooled = any(layer.hit_rate is not None for layer in self.layers)
        names = ["layer", "module", "steps", "tokens read", "attendable"]
        pooled_names = ("pool hits", "MB loaded", "hidden")
        watched = any(layer.recall is not None for layer in self.layers)
        watched_names = ("captured", "5th pct", "error")
        names += ["share", *(pooled_names if pooled else ()), *(watched_names if watched else ())]
        for name in names:
            table.add_column(name, justify="left" if name == "module" else "right")
        for layer in self.layers:
            read, whole = layer.tokens_read / layer.steps, layer.tokens_attendable / layer.steps
            share = f"{read / whole:.1%}" if whole else "-"
            row = [str(layer.index), layer.path, str(layer.steps), f"{read:.1f}", f"{whole:.1f}"]
            moved = ["-", "-", "-"]
            if layer.hit_rate is not None:
                loaded, hidden = layer.bytes_loaded / layer.steps / 1e6, layer.hidden_share
                moved = [f"{layer.hit_rate:.1%}", f"{loaded:.2f}"]
                moved += ["-" if hidden is None else f"{hidden:.1%}"]
            seen = ["-", "-", "-"]
            if layer.recall is not None:
                seen = [
                    f"{layer.recall:.1%}",
                    f"{layer.recall_p5:.1%}",
                    f"{layer.output_error:.1%}",
                ]
            table.add_row(*row, share, *(moved if pooled else ()), *(seen if watched else ()))
        console = Console(width=120, no_color=True, force_terminal=False)
        with console.capture() as captured:
            console.print(table)
        return captured.get()


def stats(model: Any) -> Stats:
    """What the rewritten attention of ``model`` has read since it was compiled.

    Reading the counters of a GPU waits for it.

    Args:
        model: a module, a compiled module or a bound ``forward``.

    Raises:
        HsaError: ``model`` is none of these.
    """
    totals: dict[tuple[int, str, int], list[float]] = {}
    programs = registry.programs(model)
    for program in programs:
        times: Counter[tuple[int, str]] = Counter()
        for block in program.blocks:
            for site, rows, counted in zip(
                block.sites, block.rows, block.values.tolist(), strict=True
            ):
                read, seen, hit, loaded, evicted, ahead, first = (*counted, *[0] * 5)[:7]
                if program.steps == 0:
                    continue
                name = (site.index, site.path)
                times[name] += 1  # a module may hold several attentions
                total = totals.setdefault((*name, times[name]), [0.0] * 9)
                total[0] += program.steps
                total[1] += read * program.steps / rows
                total[2] += seen * program.steps / rows
                moved = (hit, loaded, evicted, (loaded + ahead) * site.page_bytes, ahead, first)
                total[3:] = [a + b for a, b in zip(total[3:], moved, strict=True)]
    quality = _quality(programs)
    layers = tuple(
        LayerStats(*name[:2], int(steps), read, seen, *map(int, moved), *quality.get(name, ()))  # type: ignore[arg-type]
        for name, (steps, read, seen, *moved) in sorted(totals.items())
    )
    return Stats(max((layer.steps for layer in layers), default=0), layers)


def _quality(
    programs: list[Program],
) -> dict[tuple[int, str, int], tuple[int, float, float, float]]:
    """What monitors saw, layer by layer; of several programs of a layer, means weighted by what each saw."""
    found: dict[tuple[int, str, int], list[Observed]] = {}
    for program in programs:
        times: Counter[tuple[int, str]] = Counter()
        for monitor in program.monitors:
            for site, seen in zip(monitor.sites, monitor.observed(), strict=True):
                times[site.index, site.path] += 1
                if seen is not None:
                    name = (site.index, site.path, times[site.index, site.path])
                    found.setdefault(name, []).append(seen)
    merged = {}
    for name, several in found.items():
        heads = sum(one.heads for one in several)

        def mean(field: str, several: list[Observed] = several, heads: int = heads) -> float:
            return sum(getattr(one, field) * one.heads for one in several) / heads

        merged[name] = (heads, mean("recall"), mean("recall_p5"), mean("output_error"))
    return merged
