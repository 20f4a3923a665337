"""One attention layer of DeepSeek-V3.2, which chooses its own tokens: this backend against Inductor in the same run.

    python -m benchmarks.gpu_indexed_attention

The layer is transformers' own module in the shape of the published model (128 heads, latents of 512 + 64, an indexer of
64 heads that chooses 2,048 tokens), with random weights in bf16 and a static cache as transformers keeps it, filled to
its last token: expanded keys and values in releases that cache them so (5.17), latents in those that cache latents. A
step is one token. On a GPU every figure is the median over replays of a CUDA graph of the step, without what launching
kernels costs; on a CPU, of calls in turns. Results are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import common
from benchmarks.gpu_attention_layer import measure_graph

INDUCTOR, OURS = "Inductor", "HSA Compile"
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    """A batch over so many cached tokens; ``small`` is a tiny layer, to try the script on."""

    batch: int
    tokens: int
    small: bool = False

    def config(self) -> Any:
        from transformers import DeepseekV32Config

        sizes: dict[str, int] = {}
        if self.small:
            sizes = {
                **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
                **dict.fromkeys(("hidden_size", "q_lora_rank", "kv_lora_rank"), 64),
                **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "index_head_dim"), 32),
                "qk_rope_head_dim": 16,
                "index_n_heads": 4,
                "index_topk": 128,
            }
        config = DeepseekV32Config(num_hidden_layers=1, max_position_embeddings=1 << 20, **sizes)
        config._attn_implementation = "sdpa"
        return config

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.tokens // 1024}K tokens"


class Layer:
    """The attention of one layer, its cache, and what a step gives it."""

    def __init__(self, case: Case, device: torch.device) -> None:
        from transformers import StaticCache
        from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention

        config = case.config()
        with torch.device(device):
            self.attention: nn.Module = DeepseekV32Attention(config, 0).eval().to(torch.bfloat16)
            # As transformers keeps it.
            self.attention.indexer.weights_proj.float()  # type: ignore[union-attr]
            self.hidden = torch.randn(case.batch, 1, config.hidden_size, dtype=torch.bfloat16)
            angles = torch.rand(case.batch, 1, config.qk_rope_head_dim) * 6.3
            self.rotary = angles.cos().bfloat16(), angles.sin().bfloat16()
            self.mask = torch.ones(case.batch, 1, 1, case.tokens, dtype=torch.bool)
        self.cache = StaticCache(config=config, max_cache_len=case.tokens)
        parameters = inspect.signature(self.attention.forward).parameters
        self.name = "cache" if "cache" in parameters else "past_key_values"
        with torch.no_grad():
            self(self.hidden)
        self.held = self.cache.layers[0]
        for filled in (self.held.keys, self.held.values, self.held.indexer_keys):
            filled.normal_()
        self.last = case.tokens - 1

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.attention(hidden, self.rotary, self.mask, **{self.name: self.cache})[0]

    def rewind(self) -> None:
        """The next step writes the last token."""
        self.held.cumulative_length.fill_(self.last)
        self.held.indexer_cumulative_length.fill_(self.last)

    @property
    def cached_bytes(self) -> int:
        return sum(x.nbytes for x in (self.held.keys, self.held.values, self.held.indexer_keys))


def steps(layer: Layer) -> dict[str, Step]:
    """The layer compiled with each backend."""
    torch._dynamo.reset()
    compiled = {
        INDUCTOR: torch.compile(layer.__call__, backend="inductor", fullgraph=True),
        OURS: torch.compile(layer.__call__, backend="hsa", fullgraph=True),
    }

    def step(run: Callable[[Tensor], Tensor]) -> Step:
        def once() -> Tensor:
            layer.rewind()
            return run(layer.hidden)

        return once

    return {name: step(run) for name, run in compiled.items()}


def check(layer: Layer, candidates: dict[str, Step]) -> dict[str, object]:
    """Relative differences of the results from the eager layer's, after both have compiled; and what was rewritten.

    Queries and keys of the indexer are rounded to bf16 behind other kernels, which moves a few tokens of nearly equal
    score in or out of the choice: with random weights each is worth as much as any other.
    """
    import hsa_compile

    got = {name: run().float().clone() for name, run in candidates.items()}
    layer.rewind()
    want = layer(layer.hidden).float()
    off = {name: ((one - want).norm() / want.norm()).item() for name, one in got.items()}
    assert off[OURS] < max(0.1, 2 * off[INDUCTOR]), f"the results differ by {off}"
    (site,) = hsa_compile.explain(layer.attention).sites
    assert site.decision == "sparse", site.reason
    return {"difference_from_eager": off, "policy": site.policy, "cache": site.cache}


def measure(case: Case, device: torch.device, replays: int) -> dict[str, object]:
    layer = Layer(case, device)
    with torch.no_grad():
        candidates = steps(layer)
        checked = check(layer, candidates)
        kernels: dict[str, dict[str, float]] = {}
        if device.type == "cuda":
            measured = {name: measure_graph(run, 1, replays) for name, run in candidates.items()}
            timings = {name: held.timing for name, held in measured.items()}
            kernels = {name: held.kernels for name, held in measured.items()}
        else:
            timings = common.compare(candidates, replays)
    common.show(common.ratio_table(str(case), timings, ours=OURS))
    return {
        "case": asdict(case),
        **checked,
        "cached_gigabytes": round(layer.cached_bytes / 1e9, 2),
        "timings": {name: timing.as_dict() for name, timing in timings.items()},
        "kernels_us": kernels,
        "times_faster": round(timings[INDUCTOR].median / timings[OURS].median, 2),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536])
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="a tiny layer over 1,024 tokens")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, whatever else there is")
    parser.add_argument(
        "--json", type=Path, help="default: benchmarks/results/gpu_indexed_attention.json"
    )
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() and not arguments.cpu else "cpu")
    if device.type == "cpu" and not arguments.quick:
        raise SystemExit("this benchmark needs a CUDA GPU; --quick tries it on a CPU")
    if arguments.quick:
        arguments.tokens = [1024]
    torch.manual_seed(0)
    results = []
    for tokens in arguments.tokens:
        for batch in arguments.batch:
            case = Case(batch, tokens, arguments.quick)
            results.append(measure(case, device, arguments.replays))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    path = common.write_json(
        "gpu_indexed_attention",
        results,
        arguments.json,
        transformers=common.versions("transformers")["transformers"],
    )
    common.show(f"written to {path}")


if __name__ == "__main__":
    main()
