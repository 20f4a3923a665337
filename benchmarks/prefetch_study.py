"""Would loading pages before they are selected keep a layer from waiting? Replayed on the selections of a model.

A pool on the device holds a multiple of the pages that a step selects; a selected page that it does not hold is a
*miss*, and the layer waits for it. Pages may be loaded ahead at two times:

- Between two steps of a layer. ``next_rank`` takes those that ranked next in this step: ranks K + 1 to ``reach`` x K
  of a selection of K.
- While the layer before is at work. ``cross_layer`` *guesses* this layer's query: its norm, query projection and
  rotary embedding are applied to the residual ``stream`` of the layer before, as it enters that layer or ``after`` its
  attention. It takes the first ``ahead`` x K pages as they rank for this query, with the summaries as the step before
  left them. The page of the position is not among them.

    python -m benchmarks.prefetch_study MODEL TEXT [TEXT ...] [--tokens 16384] [--steps 256] [--budget 2048]

The model reads the first ``--tokens`` tokens of a text in one pass. Its last positions count as decode steps: for each
layer, KV head and step all pages are ranked by the rule of ``hsa::select`` over the keys up to that position, and
``hsa::select`` itself must agree. The rankings are then replayed on pools that follow the rule of ``hsa::diff``,
without its slot for the tail, so a page that this step has opened is a miss too: one in ``page size`` steps.

What is in a pool leaves it in the order of its age, oldest first, but never a page that this step selected or ranked
next. Ranks beyond the slots of the pool are not looked at. Variants:

- ``none``: nothing is prefetched;
- ``recent``: pages ranked next, loaded or resident, are as young as the selected ones;
- ``older``: pages are loaded as older than any page selected in this step and younger than all others; a page that
  was resident keeps its age;
- ``retain``: ``recent`` for resident pages, and nothing is loaded;
- with a number, no more pages than that are loaded a step and KV head, best rank first;
- ``cross_layer``, with ``ahead``, alone or after one of these: guessed pages are loaded before the selection, in place
  of any but guessed ones. As a call of ``hsa::diff`` of its own would have it, guessed pages, loaded or resident, are
  then younger than all others, those never selected older than the rest, and all are older than what is selected next.

Shares are of the selection (``misses``, ``prefetched``), of the misses of ``none`` with the same pool (``removed``),
and of the prefetched pages whose fate is known (``used``: selected before they were evicted). ``recall`` is the share
of the selection that is guessed, ``recall_new`` that of the pages in it that the step before had not selected; neither
counts the page of the position.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import hsa_compile
from benchmarks import common
from hsa_compile import algorithms
from hsa_compile.ops.page_mask import page_mask

POOLS = (1.5, 2.0, 3.0)
REACHES = (1.125, 1.25, 1.5, 2.0)
LOADS = (2, 4, 8)
AHEADS = (0.5, 0.75, 1.0, 1.25)
STREAMS = ("before", "after")
# Further ranks are kept with the recorded rankings than any variant asks for.
DEPTH = 3.0
CHUNK = 2048
RECORDING = "sdpa_recorded"


@dataclass(frozen=True)
class Record:
    """What selection needs of a pass: queries ``[L, Hq, steps, D]`` and keys ``[L, Hkv, S, D]``, both rotated.

    ``guesses`` are the queries of each layer as computed from a stream of the layer before, by which.
    """

    queries: Tensor
    guesses: dict[str, Tensor]
    keys: Tensor
    scale: float


@torch.inference_mode()
def record(model: Any, tokens: Tensor, steps: int, skip: int) -> Record:
    """Run ``tokens [1, S]`` through the model; keep the queries of the last ``steps``, not of the first layers."""
    from transformers import DynamicCache
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    queries: list[Tensor] = []
    guesses: dict[str, list[Tensor]] = {stream: [] for stream in STREAMS}
    keys: list[Tensor] = []
    scales: set[float] = set()
    guessing = ""
    rotary: Any = None

    def recorded(module: Any, query: Tensor, key: Tensor, *args: Any, **options: Any) -> Any:
        if guessing:
            guesses[guessing].append(query[0].clone())
            return query.transpose(1, 2), None
        if key.shape[2] == tokens.shape[1] and module.layer_idx >= skip:
            queries.append(query[0].clone())
            keys.append(key[0].clone())
            scales.add(float(options.get("scaling") or query.shape[-1] ** -0.5))
        return attend(module, query, key, *args, **options)

    def guess(stream: str, states: Tensor, following: int) -> None:
        """The norm and attention of a layer, as far as its query, on a stream of the layer before."""
        nonlocal guessing
        if skip <= following < len(model.layers):
            layer = model.layers[following]
            guessing = stream
            layer.self_attn(layer.input_layernorm(states), rotary, attention_mask=None)
            guessing = ""

    def enters(layer: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        nonlocal rotary
        rotary = options["position_embeddings"]
        states = args[0] if args else options["hidden_states"]
        guess("before", states, layer.self_attn.layer_idx + 1)

    def attended(number: int) -> Any:
        return lambda norm, args: guess("after", args[0], number + 1)

    ALL_ATTENTION_FUNCTIONS.register(RECORDING, recorded)
    ALL_MASK_ATTENTION_FUNCTIONS.register(RECORDING, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(RECORDING)
    cache = DynamicCache(config=model.config)
    before = tokens.shape[1] - steps
    for chunk in tokens[:, :before].split(CHUNK, 1):
        model(chunk, past_key_values=cache, use_cache=True)
    hooks = [layer.register_forward_pre_hook(enters, with_kwargs=True) for layer in model.layers]
    hooks += [
        layer.post_attention_layernorm.register_forward_pre_hook(attended(number))
        for number, layer in enumerate(model.layers)
    ]
    model(tokens[:, before:], past_key_values=cache, use_cache=True)
    for hook in hooks:
        hook.remove()
    (scale,) = scales
    made = {stream: torch.stack(listed) for stream, listed in guesses.items()}
    return Record(torch.stack(queries), made, torch.stack(keys), scale)


def ranking(
    q: Tensor, summary: Tensor, bits: Tensor, scale: float, position: int, policy: Any
) -> Tensor:
    """All pages of each KV head, best first, ``[B, Hkv, P]``: what ``hsa::select`` takes the first of."""
    kv_heads = summary.shape[1]
    query = algorithms.get(policy.algorithm).expand_query(q[:, :, 0].float())
    query = query.unflatten(1, (kv_heads, -1))
    logits = scale * torch.einsum("bhgr,bhpr->bhgp", query, summary.float())
    logits = logits.masked_fill(bits.unsqueeze(-2) == 0, -math.inf)
    score = (logits - logits.logsumexp(-1, keepdim=True)).logsumexp(-2)
    always = torch.zeros(summary.shape[2], dtype=torch.bool)
    if policy.sink:
        always[: (policy.sink - 1) // policy.page_size + 1] = True
    first_recent = (position + 1 - max(policy.recent, 1)) // policy.page_size
    always[first_recent : position // policy.page_size + 1] = True
    return score.masked_fill(always, math.inf).sort(dim=-1, descending=True, stable=True).indices


def selected_by_op(
    q: Tensor, summary: Tensor, bits: Tensor, scale: float, pages: int, policy: Any
) -> Tensor:
    """The first ``pages`` of a ranking, ascending, from the op."""
    return torch.ops.hsa.select(
        q,
        summary,
        bits,
        scale,
        policy.algorithm,
        policy.page_size,
        pages,
        pages,
        0,
        policy.sink,
        policy.recent,
        policy.group_reduce,
    )[0]


def rankings(
    kept: Record, policy: Any, depth: int, every: int = 16
) -> tuple[Tensor, dict[str, Tensor], float]:
    """Best ``depth`` pages of every layer, KV head and step, ``[L, Hkv, steps, depth]`` int16: true and guessed ones.

    A guess is made with the summaries of the step before; the page of the position, which needs no load, is -1 in it.
    Layers are the batch of the ops. Every so many steps selections of the op are compared with the ranking; the last
    result is the share of pages in which they agree. It is not quite 1, for sums in another order may swap two pages.
    """
    layers, kv_heads, length, size = kept.keys.shape
    steps, pages = kept.queries.shape[2], -(-length // policy.page_size)
    width = algorithms.summary_width(policy.algorithm, size)
    summary = kept.keys.new_zeros(layers, kv_heads, pages, width)
    covered = torch.full((layers, kv_heads, pages, 2), -1)
    found = torch.empty(layers, kv_heads, steps, depth, dtype=torch.int16)
    guessed = {stream: torch.empty_like(found) for stream in STREAMS}
    alike = compared = 0

    def summarize(position: int) -> Tensor:
        bits = page_mask((torch.arange(length) <= position).view(1, 1, 1, -1), policy.page_size)
        at = torch.tensor([position])
        torch.ops.hsa.summarize(
            kept.keys, bits, at, summary, covered, policy.algorithm, policy.page_size
        )
        return bits

    bits = summarize(length - steps - 1)
    for step in range(steps):
        position = length - steps + step
        for stream, guesses in kept.guesses.items():
            q = guesses[:, :, step : step + 1]
            order = ranking(q, summary, bits, kept.scale, position, policy)[..., :depth]
            tail = order == position // policy.page_size
            guessed[stream][:, :, step] = order.masked_fill(tail, -1)
        bits = summarize(position)
        q = kept.queries[:, :, step : step + 1]
        order = ranking(q, summary, bits, kept.scale, position, policy)
        found[:, :, step] = order[..., :depth]
        for count in (policy.pages(length), depth) if step % every == 0 else ():
            ours = order[..., :count].sort(-1).values
            theirs = selected_by_op(q, summary, bits, kept.scale, count, policy)
            alike += int((ours.unsqueeze(-1) == theirs.unsqueeze(-2)).sum())
            compared += ours.numel()
    return found, guessed, alike / compared


@dataclass(frozen=True)
class Variant:
    """A prefetch policy; see the module's docstring.

    Attributes:
        name: of the rule for ages.
        reach: ranks looked at, as a multiple of the selection.
        loads: pages loaded a step and KV head at most; None is no limit. Guessed ones do not count.
        ahead: guessed pages, as a multiple of the selection.
        stream: what their query is made of.
    """

    name: str
    reach: float = 1.0
    loads: int | None = None
    ahead: float = 0.0
    stream: str = "after"

    def __str__(self) -> str:
        limit = "" if self.loads is None or self.name == "retain" else f", {self.loads} loads"
        parts = [] if self.name == "none" and self.ahead else [self.name + limit]
        return " + ".join(parts + [f"cross_layer {self.ahead:g} {self.stream}"] * bool(self.ahead))


def variants() -> Iterator[Variant]:
    yield Variant("none")
    for reach in REACHES:
        yield Variant("retain", reach, 0)
        for name in ("recent", "older"):
            for loads in (None, *LOADS):
                yield Variant(name, reach, loads)
    for ahead in AHEADS:
        for stream in STREAMS:
            yield Variant("none", ahead=ahead, stream=stream)
        yield Variant("retain", 1.5, 0, ahead)
        yield Variant("recent", 1.25, None, ahead)


class Pool:
    """Pools of ``size`` pages, one for each of ``rows``, and a selection of ``count`` pages a step.

    A clock tick is two units of age, so that there is one between those of two steps. One more column than there are
    slots, and than there are pages, takes what is written nowhere.
    """

    def __init__(self, rows: int, pages: int, size: int, count: int, variant: Variant) -> None:
        self.size, self.count, self.variant = size, count, variant
        self.reach = min(round(variant.reach * count), size)
        self.ahead = round(variant.ahead * count)
        self.table = torch.full((rows, pages + 1), -1)
        self.owner = torch.full((rows, size + 1), -1)
        self.used = torch.full((rows, size + 1), -1)
        self.unused = torch.zeros(rows, size + 1, dtype=torch.bool)
        self.now = 1

    def _slots(self, pages: Tensor) -> Tensor:
        """The slot of each page; of a page that is not resident, the column that is none."""
        held = self.table.gather(-1, pages)
        return torch.where(held >= 0, held, self.size)

    def _load(self, pages: Tensor, slots: Tensor, age: int, prefetched: bool) -> Tensor:
        """Put ``pages`` into ``slots``, where neither is a column that is none; pages evicted without use a row."""
        former = self.owner.gather(-1, slots)
        wasted = (self.unused.gather(-1, slots) & (slots < self.size)).sum(-1)
        self.table.scatter_(-1, torch.where(former >= 0, former, self.table.shape[1] - 1), -1)
        self.table.scatter_(-1, pages, slots)
        self.owner.scatter_(-1, slots, pages)
        self.used.scatter_(-1, slots, age)
        self.unused.scatter_(-1, slots, prefetched)
        self._clear()
        return wasted

    def _clear(self) -> None:
        self.table[:, -1] = -1
        self.owner[:, -1] = -1
        self.unused[:, -1] = False

    def _leaving(self, *kept: Tensor) -> Tensor:
        """Slots in the order in which they are given up, those ``kept`` last."""
        priority = torch.where(self.owner >= 0, self.used, -1)
        priority.scatter_(-1, torch.cat(kept, -1), 2 * self.now + 2)
        priority[:, -1] = 2 * self.now + 3
        return priority.sort(dim=-1, stable=True).indices

    def _load_guess(self, guess: Tensor) -> tuple[Tensor, Tensor]:
        """Make pages ``guess [rows, n]`` resident, but -1; pages loaded and pages evicted without use, a row each."""
        age, nowhere = 2 * self.now, self.table.shape[1] - 1
        guess = torch.where(guess >= 0, guess, nowhere)
        held = self._slots(guess)
        self.used.scatter_(-1, held, age + self.used.gather(-1, held) % 2)
        absent = (held == self.size) & (guess != nowhere)
        nth = (absent.cumsum(-1) - 1).clamp(min=0)
        place = torch.where(absent, self._leaving(held).gather(-1, nth), self.size)
        wasted = self._load(torch.where(absent, guess, nowhere), place, age, True)
        self.now += 1
        return absent.sum(-1), wasted

    def step(self, order: Tensor, guess: Tensor) -> Tensor:
        """One step with pages ``order [rows, depth]``, best first, and as guessed before.

        Returns ``[4, rows]``: misses, pages prefetched, pages that came to use, pages evicted without use.
        """
        guessed, wasted = self._load_guess(guess[:, : self.ahead]) if self.ahead else (0, 0)
        age, nowhere = 2 * self.now + 1, self.table.shape[1] - 1
        chosen = order[:, : self.count].sort(-1).values
        following = order[:, self.count : self.reach]
        held, held_next = self._slots(chosen), self._slots(following)
        came_to_use = self.unused.gather(-1, held).sum(-1)
        self.unused.scatter_(-1, held, False)
        self.used.scatter_(-1, held, age)
        if self.variant.name in ("recent", "retain"):
            self.used.scatter_(-1, held_next, age)

        leaves = self._leaving(held, held_next)
        missing, absent = held == self.size, held_next == self.size
        if self.variant.loads is not None:
            absent &= absent.cumsum(-1) <= self.variant.loads
        misses, fetched = missing.sum(-1), absent.sum(-1)

        # Pages in ascending order take slots in ascending order.
        column = torch.arange(leaves.shape[1])
        victims = torch.where(column < misses.unsqueeze(-1), leaves, self.size).sort(-1).values
        place = torch.where(
            missing, victims.gather(-1, (missing.cumsum(-1) - 1).clamp(min=0)), self.size
        )
        wasted = wasted + self._load(torch.where(missing, chosen, nowhere), place, age, False)
        nth = (misses.unsqueeze(-1) + absent.cumsum(-1) - 1).clamp(min=0)
        place = torch.where(absent, leaves.gather(-1, nth), self.size)
        pages = torch.where(absent, following, nowhere)
        younger = self.variant.name != "older"
        wasted += self._load(pages, place, age if younger else age - 1, True)
        self.now += 1
        return torch.stack((misses, fetched + guessed, came_to_use, wasted))


@dataclass(frozen=True)
class Outcome:
    """Shares of the selection, and of the prefetched pages. A row is a layer and KV head."""

    misses: float
    misses_row_p95: float
    misses_row_max: float
    misses_step_p95: float
    misses_worst_row_of_a_step: float
    prefetched: float
    prefetched_row_p95: float
    used: float | None

    @property
    def loaded(self) -> float:
        return self.misses + self.prefetched


def replay(
    orders: Tensor, guesses: Tensor, size: int, count: int, warmup: int, variant: Variant
) -> Outcome:
    """What becomes of the steps of ``orders [rows, steps, depth]`` after the first ``warmup``."""
    rows, steps, _ = orders.shape
    pool = Pool(rows, int(orders.max()) + 1, size, count, variant)
    counted = torch.stack([pool.step(orders[:, at], guesses[:, at]) for at in range(steps)])
    misses, fetched, came_to_use, wasted = counted[warmup:].double().unbind(1)
    misses, fetched = misses / count, fetched / count
    fate = float(came_to_use.sum() + wasted.sum())
    return Outcome(
        misses=float(misses.mean()),
        misses_row_p95=float(misses.mean(0).quantile(0.95)),
        misses_row_max=float(misses.mean(0).max()),
        misses_step_p95=float(misses.mean(1).quantile(0.95)),
        misses_worst_row_of_a_step=float(misses.amax(1).mean()),
        prefetched=float(fetched.mean()),
        prefetched_row_p95=float(fetched.mean(0).quantile(0.95)),
        used=float(came_to_use.sum()) / fate if fate else None,
    )


def recall(orders: Tensor, guesses: Tensor, count: int, warmup: int) -> dict[str, float]:
    """How much of the selections the ``guesses [rows, steps, n]`` hold; see the module's docstring."""
    before, chosen = orders[:, warmup - 1 : -1, :count], orders[:, warmup:, :count]
    counts = (chosen != orders[..., :count].amax(-1)[:, warmup:, None]).double()
    new = counts * ~(chosen.unsqueeze(-1) == before.unsqueeze(-2)).any(-1)
    hit = (chosen.unsqueeze(-1) == guesses[:, warmup:].unsqueeze(-2)).any(-1)
    rows, rows_new = ((hit * x).sum((1, 2)) / x.sum((1, 2)) for x in (counts, new))
    return {
        "recall": float((hit * counts).sum() / counts.sum()),
        "recall_row_p05": float(rows.quantile(0.05)),
        "recall_new": float((hit * new).sum() / new.sum()),
        "recall_new_row_p05": float(rows_new.nanquantile(0.05)),
    }


def study(
    orders: Tensor, guesses: dict[str, Tensor], count: int, warmup: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All variants on all pools, for rankings ``[L, Hkv, steps, depth]``; and what the guesses recall."""
    flat = orders.flatten(0, 1).long()
    flat_guesses = {stream: guess.flatten(0, 1).long() for stream, guess in guesses.items()}
    recalls = []
    for stream, guess in flat_guesses.items():
        for ahead in AHEADS:
            shares = recall(flat, guess[..., : round(ahead * count)], count, warmup)
            rounded = {k: round(v, 4) for k, v in shares.items()}
            recalls.append({"stream": stream, "ahead": ahead} | rounded)
    found = []
    for pool in POOLS:
        size = int(pool * count)
        base = replay(flat, flat_guesses["after"], size, count, warmup, Variant("none"))
        for variant in variants():
            if round(max(variant.reach, variant.ahead) * count) > size:
                continue
            outcome = replay(flat, flat_guesses[variant.stream], size, count, warmup, variant)
            removed = base.misses - outcome.misses
            figures = {k: v if v is None else round(v, 5) for k, v in asdict(outcome).items()}
            extra = outcome.loaded - base.loaded
            found.append(
                {"pool": pool, **asdict(variant), "label": str(variant), **figures}
                | {"removed": round(removed / base.misses, 4)}
                | {"loaded_times": round(outcome.loaded / base.loaded, 3)}
                | {"extra_pages_a_miss_removed": round(extra / removed, 2) if removed > 0 else None}
            )
    return found, recalls


def table_of(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("pool", "reach", "variant"):
        table.add_column(column)
    for column in ("misses %", "p95 of heads", "prefetched %", "removed %", "used %", "loads x"):
        table.add_column(column, justify="right")
    for row in rows:
        shares = [row[k] for k in ("misses", "misses_row_p95", "prefetched", "removed", "used")]
        table.add_row(
            str(row["pool"]),
            str(row["reach"]),
            row["label"],
            *("" if share is None else f"{100 * share:.2f}" for share in shares),
            f"{row['loaded_times']:.2f}",
        )
    return table


def rankings_of(texts: Sequence[Path], arguments: argparse.Namespace) -> dict[str, Any]:
    """Rankings by text, with the share in which ``hsa::select`` agrees."""
    from transformers import AutoModel, AutoTokenizer

    policy = hsa_compile.LayerPolicy(budget=arguments.budget, page_size=arguments.page_size)
    depth = round(DEPTH * policy.pages(arguments.tokens))
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModel.from_pretrained(arguments.model, dtype=torch.float32).eval()
    found = {}
    for path in texts:
        # Many tokenizers take time in proportion to all of a text; no token is longer than this.
        text = path.read_text()[: 16 * arguments.tokens]
        tokens = tokenizer(text, return_tensors="pt").input_ids[:, : arguments.tokens]
        if tokens.shape[1] < arguments.tokens:
            raise SystemExit(f"{path} has {tokens.shape[1]} tokens, fewer than {arguments.tokens}")
        steps = arguments.warmup + arguments.steps
        kept = record(model, tokens, steps, arguments.skip_layers)
        orders, guesses, agreement = rankings(kept, policy, depth)
        if agreement < 0.999:
            raise SystemExit(f"{path}: hsa::select agrees in {agreement:.4f} of the pages only")
        found[path.stem] = {"ranks": orders, "guesses": guesses, "agreement": round(agreement, 6)}
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="folder or hub id of a causal language model")
    parser.add_argument("text", type=Path, nargs="+", help="files of text")
    parser.add_argument("--tokens", type=int, default=16384, help="of each text")
    parser.add_argument("--steps", type=int, default=256, help="counted")
    parser.add_argument("--warmup", type=int, default=64, help="steps before, that fill the pool")
    parser.add_argument("--budget", type=int, default=2048, help="tokens")
    parser.add_argument("--page-size", type=int, default=32, help="tokens")
    parser.add_argument("--skip-layers", type=int, default=2, help="first layers that stay dense")
    parser.add_argument("--ranks", type=Path, help="file of rankings: read, or else written")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/prefetch_study.json")
    arguments = parser.parse_args(argv)
    policy = hsa_compile.LayerPolicy(budget=arguments.budget, page_size=arguments.page_size)
    count = policy.pages(arguments.tokens)
    if arguments.skip_layers < 1:
        parser.error("no layer comes before the first one, to guess its query: --skip-layers 1")
    first = arguments.tokens - arguments.warmup - arguments.steps
    if first < DEPTH * count * policy.page_size:
        parser.error(f"the first step, at token {first}, has too few pages to rank: more --tokens")
    if arguments.ranks and arguments.ranks.exists():
        recorded = torch.load(arguments.ranks)
    else:
        recorded = rankings_of(arguments.text, arguments)
        if arguments.ranks:
            torch.save(recorded, arguments.ranks)
    results: list[dict[str, Any]] = []
    recalls: dict[str, list[dict[str, Any]]] = {}
    for name, found in recorded.items():
        rows, recalls[name] = study(found["ranks"], found["guesses"], count, arguments.warmup)
        common.show(table_of(f"{name}: {count} pages of {policy.page_size} selected", rows))
        for row in recalls[name]:
            common.show(str(row))
        results += [{"text": name, **row} for row in rows]
    path = common.write_json(
        "prefetch_study",
        results,
        arguments.json,
        model=Path(arguments.model).name,
        tokens=arguments.tokens,
        steps=arguments.steps,
        warmup=arguments.warmup,
        layers=len(next(iter(recorded.values()))["ranks"]),
        policy=asdict(policy),
        agreement={name: found["agreement"] for name, found in recorded.items()},
        recall=recalls,
    )
    common.show(f"written to {path}")


if __name__ == "__main__":
    main()
