"""What the benchmark scripts share: machine, timing, tables of ratios, results as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"

Step = Callable[[], object]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, object]:
    """Processor, cores, instruction set, GPU if there is one, and the load while this was asked."""
    found: dict[str, object] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
        "load": [round(x, 2) for x in os.getloadavg()],
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return found


def versions(*packages: str) -> dict[str, str | None]:
    """Versions of Python, torch, this package and any others named."""
    names = ("torch", "hsa-compile", "triton", *packages)
    return {"python": platform.python_version()} | {name: _version(name) for name in names}


@dataclass(frozen=True)
class Timing:
    """Seconds of one step over many: median, and the quartiles as the spread."""

    median: float
    lower: float
    upper: float
    best: float
    count: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Timing:
        if len(seconds) < 2:
            return Timing(seconds[0], seconds[0], seconds[0], seconds[0], len(seconds))
        lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
        return Timing(median, lower, upper, min(seconds), len(seconds))

    def as_dict(self) -> dict[str, float | int]:
        return {
            "median_us": round(self.median * 1e6, 2),
            "quartiles_us": [round(self.lower * 1e6, 2), round(self.upper * 1e6, 2)],  # type: ignore[dict-item]
            "best_us": round(self.best * 1e6, 2),
            "count": self.count,
        }

    def __str__(self) -> str:
        return f"{si_seconds(self.median)} [{si_seconds(self.lower)}..{si_seconds(self.upper)}]"


def si_seconds(seconds: float) -> str:
    """Three figures with a unit: ``1.94 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def seconds_of(step: Step) -> float:
    """Wall-clock seconds of one call on a CPU."""
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def cuda_seconds_of(step: Step) -> float:
    """Seconds of one call on the current CUDA stream, by events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def compare(
    candidates: Mapping[str, Step],
    rounds: int,
    warmup: int = 3,
    clock: Callable[[Step], float] = seconds_of,
    seconds: float = 0.0,
) -> dict[str, Timing]:
    """Time the candidates in turns, so that whatever else the machine does meets all of them alike.

    Args:
        candidates: a step by name.
        rounds: turns of each candidate.
        warmup: calls of each before any is timed; compilation is in the first.
        clock: seconds of one call.
        seconds: a turn repeats its step for about this long and counts the calls one by one, so that
            fast candidates are sampled more often than slow ones.
    """
    for step in candidates.values():
        for _ in range(warmup):
            step()
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, step in candidates.items():
            # What the candidate before left in the caches is not this one's.
            step()
            spent = 0.0
            while spent == 0.0 or spent < seconds:
                taken[name].append(clock(step))
                spent += taken[name][-1]
    return {name: Timing.of(times) for name, times in taken.items()}


def read_bandwidth(numbers: int = 1 << 26, rounds: int = 9) -> float:
    """Bytes a second that all threads together can read from memory, summing fp32."""
    data = torch.ones(numbers)
    return data.nbytes / min(seconds_of(data.sum) for _ in range(rounds))


def ratio_table(
    title: str, timings: Mapping[str, Timing], ours: str, notes: Mapping[str, str] | None = None
) -> Table:
    """A table of medians with the quartiles, and how many times ``ours`` is faster than each peer."""
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    table.add_column("median", justify="right")
    table.add_column("quartiles", justify="right")
    table.add_column("times slower than ours", justify="right")
    if notes:
        table.add_column("", style="dim")
    for name, timing in sorted(timings.items(), key=lambda item: item[1].median):
        ratio = timing.median / timings[ours].median
        row = [
            name,
            si_seconds(timing.median),
            f"{si_seconds(timing.lower)} .. {si_seconds(timing.upper)}",
            "" if name == ours else f"{ratio:.2f}",
        ]
        table.add_row(
            *row, *([notes.get(name, "")] if notes else []), style="bold" if name == ours else ""
        )
    return table


def show(*parts: object) -> None:
    """Print to a terminal of any width; a log gets wide lines."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    for part in parts:
        console.print(part)


def write_json(
    name: str, results: Iterable[Mapping[str, object]], path: Path | None = None, **more: object
) -> Path:
    """Write ``benchmarks/results/<name>.json``: machine, versions, ``more``, and the results."""
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    payload = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        **more,
        "results": list(results),
    }
    path.write_text(json.dumps(payload, indent=2) + "\n")
    return path
