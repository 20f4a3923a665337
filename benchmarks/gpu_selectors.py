"""What it costs to select the pages of one layer on a GPU: every algorithm, with and without a share to stop at, and
the choice of single tokens, of pages that were selected or of all.

    python -m benchmarks.gpu_selectors

Times are of the selection alone, a layer of a CUDA graph that runs through several layers (``gpu_attention_layer``),
beside dense attention to the whole cache in the same run. Bytes say what is possible: summaries are read once, which
at batch 8, 64K tokens and pages of 32 are 67 MB for two parts in bf16, 14 us at 4.8 TB/s, and half of it for one. Of
four times the budget 134 MB of keys are read, 28 us, behind a selection of as many pages; signs are another 67 MB, and
scores of all tokens as much again.
"""

import argparse
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.table import Table

from benchmarks import common
from benchmarks.gpu_attention_layer import (
    ALGORITHM,
    DENSE,
    RECENT,
    SINK,
    Case,
    Layer,
    Measured,
    Step,
    compiled,
    dense_step,
    make_layer,
    measure_graph,
)
from hsa_compile import algorithms
from hsa_compile.ops.signs import signs_width

SHARES = (1.0, 0.9)
FLOOR = 8
FIRST_STAGE = 4
DECAY = 0.99


def select_step(case: Case, algorithm: str, top_p: float) -> Step:
    rule = (
        *(case.dim**-0.5, algorithm, case.page_size, case.slots, case.slots, 0, SINK, RECENT),
        *("softmax_mean", 0, None),
    )
    accumulates = algorithms.get(algorithm).accumulates

    def step(layer: Layer, bits: torch.Tensor) -> torch.Tensor:
        scored = (layer.q, layer.summary, bits)
        if accumulates:
            return torch.ops.hsa.select_accumulated(*scored, layer.covered, DECAY, *rule)[0]
        return torch.ops.hsa.select(*scored, *rule, top_p, FLOOR)[0]

    return step


def two_stage_step(case: Case) -> Step:
    scale, first = case.dim**-0.5, FIRST_STAGE * case.slots
    pages = (scale, ALGORITHM, case.page_size, first, first, 0, SINK, RECENT, "softmax_mean")
    tokens = (case.budget, case.budget, 0, SINK, RECENT, "softmax_mean")

    def step(layer: Layer, bits: torch.Tensor) -> torch.Tensor:
        ids, seen = torch.ops.hsa.select(layer.q, layer.summary, bits, *pages)
        held = (layer.q, layer.keys, ids, seen, bits, None, scale, case.page_size)
        return torch.ops.hsa.refine(*held, *tokens)[0]

    return step


def token_step(case: Case) -> Step:
    tokens = (case.budget, case.budget, 0, SINK, RECENT, "softmax_mean")

    def step(layer: Layer, bits: torch.Tensor) -> torch.Tensor:
        # Kept in the place of what was covered, of which a selection reads nothing.
        held = (layer.q, layer.summary, layer.covered, bits, None, case.dim**-0.5, case.page_size)
        return torch.ops.hsa.select_tokens(*held, *tokens)[0]

    return step


def measure(case: Case, replays: int) -> dict[str, Measured]:
    word = (1 << case.page_size) - 1 if case.page_size < 64 else -1
    bits = torch.full((1, 1, case.pages), word, device="cuda")
    count = max(4, min(16, int(20e9 // (4 * case.batch * case.kv_heads * case.tokens * case.dim))))
    layers = [make_layer(case) for _ in range(count)]
    found = {}

    def run_dense() -> None:
        for layer in layers:
            dense_step(layer)

    found[DENSE] = measure_graph(run_dense, count, max(10, replays // 5))
    for algorithm in algorithms.names():
        width = algorithms.summary_width(algorithm, case.dim)
        scored = [
            Layer(
                held.q,
                held.keys,
                held.values,
                torch.randn(*held.summary.shape[:3], width, dtype=held.q.dtype, device="cuda"),
                held.covered.new_zeros(
                    *held.covered.shape[:3], algorithms.covered_width(algorithm)
                ),
            )
            for held in layers
        ]
        estimates = width and not algorithms.get(algorithm).accumulates
        for top_p in SHARES if estimates else SHARES[:1]:
            step = compiled(select_step(case, algorithm, top_p), max_autotune=False)
            step(scored[0], bits)

            def run(step: Step = step, scored: list[Layer] = scored) -> None:
                for held in scored:
                    step(held, bits)

            name = algorithm if top_p == 1 else f"{algorithm}, top_p {top_p:g}"
            found[name] = measure_graph(run, count, replays)
    words = signs_width(case.page_size, case.dim)
    signed = [
        replace(
            held,
            summary=torch.randn_like(held.summary),
            covered=torch.randint(-(2**62), 2**62, (*held.summary.shape[:3], words), device="cuda"),
        )
        for held in layers
    ]
    for name, make in (("two_stage", two_stage_step), ("token", token_step)):
        step = compiled(make(case), max_autotune=False)
        step(signed[0], bits)

        def run_tokens(step: Step = step) -> None:
            for held in signed:
                step(held, bits)

        found[f"{ALGORITHM}, {name}"] = measure_graph(run_tokens, count, replays)
    return found


def table_of(case: Case, found: dict[str, Measured]) -> Table:
    table = Table(title=str(case), title_justify="left")
    for name in ("selector", "us a layer", "of dense attention"):
        table.add_column(name, justify="left" if name == "selector" else "right")
    dense = found[DENSE].timing.median
    for name, held in found.items():
        took = held.timing.median
        table.add_row(name, f"{took * 1e6:.1f}", f"{took / dense:.1%}")
    return table


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--budget", type=int, default=2048, help="tokens")
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/gpu_selectors.json")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    torch.manual_seed(0)
    results = []
    for batch in arguments.batch:
        case = Case(batch, arguments.tokens, arguments.page_size, arguments.budget)
        found = measure(case, arguments.replays)
        common.show(table_of(case, found))
        results.append(
            {
                "case": asdict(case),
                "timings": {name: held.timing.as_dict() for name, held in found.items()},
                "kernels_us": {name: held.kernels for name, held in found.items()},
            }
        )
        torch.cuda.empty_cache()
    path = common.write_json("gpu_selectors", results, arguments.json)
    common.show(f"written to {path}")


if __name__ == "__main__":
    main()
