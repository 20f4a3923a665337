"""One layer's decode attention on a CPU: ``backend="hsa"`` against Inductor's own, in the same run.

    python -m benchmarks.cpu_attention_layer
    python -m benchmarks.cpu_attention_layer --tokens 65536 --kv-heads 8 --group 4 --dtype bfloat16

A step appends one token to a static cache of ``--tokens`` and attends it. The module is the same for both backends,
and so is the mask. Dense attention is spelled in every way that is in use, because their speeds differ by a factor of
ten on a CPU; the fastest is the peer that counts. Caches of several layers are stepped through in turn, as in a
model, so that no summary is still in the processor's cache when its turn comes.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import common

OURS = "hsa"


@dataclass(frozen=True)
class Shape:
    """A layer and the cache it reads."""

    tokens: int
    batch: int = 1
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    dtype: torch.dtype = torch.float32
    budget: int = 2048

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one layer: what dense attention reads."""
        return 2 * self.batch * self.kv_heads * self.tokens * self.head_dim * self.dtype.itemsize

    def sparse_bytes(self, page_size: int) -> int:
        """Summary (two numbers a channel and page), selected keys and values."""
        row = self.batch * self.kv_heads * self.head_dim * self.dtype.itemsize
        return row * (2 * -(-self.tokens // page_size) + 2 * min(self.budget, self.tokens))

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens, batch {self.batch}, {self.kv_heads} KV heads x {self.group} x "
            f"{self.head_dim}, {str(self.dtype).removeprefix('torch.')}, budget {self.budget}"
        )


def repeat_kv(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """What Hugging Face models run on a static cache."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (
        x.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (keys, values)
    )
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def grouped(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)


def grouped_without_mask(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def folded(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """The group as query length: legal for one token and one mask, and what keeps keys from being read group times."""
    rows = q.unflatten(1, (keys.shape[1], -1)).squeeze(3)
    return (
        F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
        .flatten(1, 2)
        .unsqueeze(2)
    )


def folded_without_mask(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    rows = q.unflatten(1, (keys.shape[1], -1)).squeeze(3)
    return F.scaled_dot_product_attention(rows, keys, values).flatten(1, 2).unsqueeze(2)


def products(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Matrix products and a softmax, with the group as rows."""
    rows = q.unflatten(1, (keys.shape[1], -1)).squeeze(3)
    scores = (rows @ keys.mT * q.shape[-1] ** -0.5).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ values).flatten(1, 2).unsqueeze(2)


SPELLINGS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "SDPA, repeat_kv, mask": repeat_kv,
    "SDPA, enable_gqa, mask": grouped,
    "SDPA, enable_gqa, no mask": grouped_without_mask,
    "SDPA, group folded, mask": folded,
    "SDPA, group folded, no mask": folded_without_mask,
    "matmul, softmax, matmul": products,
}


class Attention(nn.Module):
    """A layer's attention after its projections: append to the cache, attend it."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Tensor,
        mask: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        return self.attend(q, keys, values, mask)


class Run:
    """A compiled layer and caches of its own; each call decodes the next token of the next layer."""

    def __init__(self, shape: Shape, layers: int, step: Callable[..., Tensor], ahead: int) -> None:
        heads = shape.kv_heads * shape.group

        def tensor(*size: int) -> Tensor:
            generator = torch.Generator().manual_seed(len(size) + size[1])
            return torch.randn(size, generator=generator).to(shape.dtype)

        cache = (shape.batch, shape.kv_heads, shape.tokens, shape.head_dim)
        self.caches = [(tensor(*cache), tensor(*cache)) for _ in range(layers)]
        self.q = tensor(shape.batch, heads, 1, shape.head_dim)
        self.k, self.v = (tensor(shape.batch, shape.kv_heads, 1, shape.head_dim) for _ in range(2))
        self.position = torch.tensor([max(0, shape.tokens - ahead)])
        self.last = shape.tokens - 1
        self.mask = torch.zeros(1, 1, 1, shape.tokens, dtype=torch.bool)
        self.mask[..., : int(self.position)] = True
        self.step = step
        self.layer = itertools.count()

    def __call__(self) -> Tensor:
        layer = next(self.layer) % len(self.caches)
        if layer == 0 and int(self.position) < self.last:
            self.position += 1
            self.mask[..., self.position] = True
        return self.step(self.q, self.k, self.v, self.position, self.mask, *self.caches[layer])


def measure(shape: Shape, arguments: argparse.Namespace) -> dict[str, object]:
    """All candidates on one shape: prints a table, returns the figures."""
    policy = {"default": {"budget": shape.budget, "page_size": arguments.page_size}}
    steps: dict[str, Callable[..., Tensor]] = {
        OURS: torch.compile(
            Attention(repeat_kv),
            backend="hsa",
            dynamic=False,
            options={"policy": policy, "strict": True},
        )
    }
    for name, attend in SPELLINGS.items():
        if arguments.fast_peers and "repeat" in name:
            continue
        steps[name] = torch.compile(Attention(attend), dynamic=False)
    torch._dynamo.reset()
    runs: dict[str, Run] = {}
    dense: Run | None = None
    for name, step in steps.items():
        run = Run(shape, arguments.layers, step, arguments.ahead)
        if name != OURS:
            # The dense peers share caches; ours are its own, or their writes would look like outside ones.
            dense = dense or run
            run.caches = dense.caches
        runs[name] = run
    with torch.no_grad():
        timings = common.compare(
            runs, arguments.rounds, 2 * arguments.layers, seconds=arguments.seconds
        )
    peer = min((name for name in timings if name != OURS), key=lambda name: timings[name].median)
    common.show(
        common.ratio_table(str(shape), timings, OURS),
        f"dense reads {shape.cache_bytes / 1e6:.0f} MB, sparse {shape.sparse_bytes(arguments.page_size) / 1e6:.1f} MB; "
        f"fastest peer: {peer}\n",
    )
    return {
        "shape": asdict(shape) | {"dtype": str(shape.dtype).removeprefix("torch.")},
        "page_size": arguments.page_size,
        "bytes": {"dense": shape.cache_bytes, "sparse": shape.sparse_bytes(arguments.page_size)},
        "timings": {name: timing.as_dict() for name, timing in timings.items()},
        "fastest_peer": peer,
        "times_faster_than_fastest_peer": round(timings[peer].median / timings[OURS].median, 2),
        "times_faster": {
            name: round(timing.median / timings[OURS].median, 2)
            for name, timing in timings.items()
            if name != OURS
        },
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 4096, 16384, 65536])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--budget", type=int, default=2048, help="tokens")
    parser.add_argument("--page-size", type=int, default=32, choices=[16, 32, 64])
    parser.add_argument(
        "--layers", type=int, default=3, help="caches that are stepped through in turn"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.1, help="of each candidate in a round")
    parser.add_argument(
        "--ahead", type=int, default=512, help="free tokens of the cache at the start"
    )
    parser.add_argument("--fast-peers", action="store_true", help="leave out repeat_kv")
    parser.add_argument(
        "--json", type=Path, help="default: benchmarks/results/cpu_attention_layer.json"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    bandwidth = common.read_bandwidth()
    common.show(f"memory: {bandwidth / 1e9:.1f} GB/s read with {torch.get_num_threads()} threads\n")
    results = [
        measure(
            Shape(
                tokens,
                arguments.batch,
                arguments.kv_heads,
                arguments.group,
                arguments.head_dim,
                getattr(torch, arguments.dtype),
                arguments.budget,
            ),
            arguments,
        )
        for tokens in arguments.tokens
    ]
    path = common.write_json(
        "cpu_attention_layer", results, arguments.json, read_bytes_per_second=round(bandwidth)
    )
    common.show(f"written to {path}")


if __name__ == "__main__":
    main()
