"""The run: batches of samples, each prefilled once and decoded by every policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import hsa_compile
from benchmarks.accuracy import tasks
from benchmarks.accuracy.decode import Row, StaticPrefix, decode
from benchmarks.accuracy.mass import Recorder
from benchmarks.accuracy.policies import DENSE, has_mass
from benchmarks.accuracy.store import Key, Store
from benchmarks.accuracy.tasks import Sample, Setting
from hsa_compile import Policy

# One code object is compiled for every policy and cache; Dynamo's limits are for mistakes.
LIMITS = {"recompile_limit": 10_000, "accumulated_recompile_limit": 100_000}
# Steps behind the longest question at which mass is recorded too.
ANSWERED = 8


@dataclass(frozen=True)
class Plan:
    """What a run is made of.

    Attributes:
        model: of transformers, in evaluation mode, where it is to run.
        name: of it, in the results.
        tasks: names.
        contexts: lengths in tokens.
        policies: by label.
        batch: samples that are decoded together.
        chunk: tokens prefilled at a time.
        positions: decode steps of a batch at which captured mass is recorded; 0 for none.
        options: of ``torch.compile``, beside the policy.
        one_cache: one cache of the largest length serves all, so a policy is compiled once; else each length has one.
    """

    model: Any
    name: str
    setting: Setting
    tasks: Sequence[str]
    contexts: Sequence[int]
    policies: Mapping[str, Policy]
    batch: int
    chunk: int
    positions: int
    options: Mapping[str, Any]
    one_cache: bool

    @property
    def groups(self) -> list[tuple[int, tuple[str, ...]]]:
        """Lengths and tasks that may share a batch: those with a question, and continuations."""
        asked = tuple(task for task in self.tasks if task in tasks.NEEDLES)
        rest = tuple(task for task in self.tasks if task not in tasks.NEEDLES)
        return [(length, kind) for length in self.contexts for kind in (asked, rest) if kind]

    @property
    def total(self) -> int:
        """Results of a whole run."""
        each = self.setting.samples * len(self.tasks) * len(self.contexts)
        return each * (1 + len(self.policies))

    def key(self, task: str, context: int, index: int, label: str) -> Key:
        return self.name, task, context, index, label

    def missing(self, store: Store, task: str, context: int, index: int) -> list[str]:
        """Labels of the policies, "dense" among them, that have no result for a sample yet."""
        labels = [DENSE, *self.policies]
        keys = store.missing([self.key(task, context, index, label) for label in labels])
        return [key[-1] for key in keys]


class Runner:
    """Runs a plan; what is compiled and the caches live as long as it does.

    Args:
        store: results are added to it, and those that it has are not computed again.
        say: called with a line about what is going on.
        advance: called with the number of results that became known.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        say: Callable[[str], object],
        advance: Callable[[int], object],
    ) -> None:
        self.plan, self.store, self.say, self.advance = plan, store, say, advance
        self.tokenizer = plan.setting.tokenizer
        self._prefixes: dict[int, StaticPrefix] = {}
        self._read: dict[str, tuple[float, float]] = {}
        self._compiled = {
            label: torch.compile(
                plan.model, backend="hsa", options={"policy": policy, **plan.options}
            )
            for label, policy in plan.policies.items()
        }
        eos = plan.model.generation_config.eos_token_id
        listed = eos if isinstance(eos, list) else [eos]
        self._ends = {one for one in [*listed, self.tokenizer.eos_token_id] if one is not None}

    def run(self) -> None:
        """Compute what is missing; the store is written after every batch."""
        todo = list(self._batches())
        self.advance(self.plan.total - sum(len(labels) for _, batch in todo for _, labels in batch))
        if not todo:
            return
        room = {
            length: max(s.steps for at, batch in todo for s, _ in batch if at == length)
            for length in {at for at, _ in todo}
        }
        largest = max(length + steps for length, steps in room.items())
        with torch._dynamo.config.patch(LIMITS):
            for number, (length, batch) in enumerate(todo, 1):
                capacity = largest if self.plan.one_cache else length + room[length]
                self.say(
                    f"batch {number} of {len(todo)}: {length} tokens, {len(batch)} samples "
                    f"({', '.join(sorted({sample.task for sample, _ in batch}))})"
                )
                self._run_batch(self._prefix(capacity), batch)
                self.store.write()

    def _batches(self) -> Iterator[tuple[int, list[tuple[Sample, list[str]]]]]:
        """Lengths, and samples with the labels that they lack. Tasks take turns, so none comes last."""
        plan = self.plan
        for length, kind in plan.groups:
            lacking = []
            for index in range(plan.setting.samples):
                for task in kind:
                    labels = plan.missing(self.store, task, length, index)
                    if labels:
                        lacking.append((tasks.make(task, index, length, plan.setting), labels))
            for first in range(0, len(lacking), plan.batch):
                yield length, lacking[first : first + plan.batch]

    def _prefix(self, capacity: int) -> StaticPrefix:
        # Odd lengths are compiled like any other; round ones are what people use.
        capacity += -capacity % 64
        if capacity not in self._prefixes:
            if not self.plan.one_cache:
                self._prefixes.clear()
            self._prefixes[capacity] = StaticPrefix(self.plan.model, capacity)
        return self._prefixes[capacity]

    def _run_batch(self, prefix: StaticPrefix, batch: list[tuple[Sample, list[str]]]) -> None:
        plan = self.plan
        # Compiled steps are for one batch size: a last, smaller batch is filled up with a sample that does not count.
        samples = [sample for sample, _ in batch]
        samples += samples[-1:] * (plan.batch - len(samples))
        contexts = torch.tensor([sample.context for sample in samples], device=plan.model.device)
        began = time.perf_counter()
        prefix.prefill(contexts, plan.chunk)
        dense_steps = [0] * len(samples)
        lacking = {label for _, labels in batch for label in labels}
        asked = {label: policy for label, policy in plan.policies.items() if label in lacking}
        recorder = Recorder({label: one for label, one in asked.items() if has_mass(one)})
        took = {"prefill": time.perf_counter() - began}
        if DENSE in lacking or (recorder.policies and plan.positions):
            began = time.perf_counter()
            rows = self._decode_dense(prefix, samples, recorder)
            self._add(batch, DENSE, rows)
            dense_steps = [row.steps for row in rows]
            took[DENSE] = time.perf_counter() - began
        for label in asked:
            began = time.perf_counter()
            rows = self._decode(self._compiled[label], prefix, samples)
            read = self._share_read(label)
            masses = [recorder.row(label, i, dense_steps[i]) for i in range(len(batch))]
            self._add(batch, label, rows, read, masses)
            took[label] = time.perf_counter() - began
        self.say(", ".join(f"{what} {seconds:.0f} s" for what, seconds in took.items()))

    def _decode_dense(
        self, prefix: StaticPrefix, samples: Sequence[Sample], recorder: Recorder
    ) -> list[Row]:
        """The model as it is, which also shows the queries and keys that mass is computed with."""
        model, positions = self.plan.model, self.plan.positions
        if not recorder.policies or not positions:
            return self._decode(model, prefix, samples)
        last = max(
            min(sample.steps, len(sample.forced) - 1 + min(sample.answer_tokens, ANSWERED))
            for sample in samples
        )
        wanted = {round((i + 0.5) * last / positions) for i in range(positions)}
        with recorder.watching(model):
            return self._decode(
                model, prefix, samples, lambda step: recorder.start(step, step in wanted)
            )

    def _decode(
        self,
        step: Callable[..., Any],
        prefix: StaticPrefix,
        samples: Sequence[Sample],
        before_step: Callable[[int], object] = lambda step: None,
    ) -> list[Row]:
        return decode(step, prefix, samples, self.tokenizer, self._ends, before_step)

    def _share_read(self, label: str) -> float:
        """The share of the attendable KV cache that a policy has read since it was asked last, mean over layers."""
        compiled = self._compiled[label]
        sites = hsa_compile.explain(compiled).sites
        if label not in self._read:
            left = [site for site in sites if site.decision == "left"]
            for reason in {site.reason for site in left}:
                self.say(f"{label}: attention left as it was: {reason}")
        layers = hsa_compile.stats(compiled).layers
        read, seen = (sum(getattr(layer, name) for layer in layers) for name in _READ)
        before = self._read.get(label, (0.0, 0.0))
        self._read[label] = read, seen
        share = (read - before[0]) / (seen - before[1]) if seen > before[1] else 1.0
        paths = {site.path for site in sites}
        dense = len(paths) - len(layers)
        return (share * len(layers) + dense) / max(len(paths), 1)

    def _add(
        self,
        batch: list[tuple[Sample, list[str]]],
        label: str,
        rows: Sequence[Row],
        read: float = 1.0,
        masses: Sequence[dict[str, Any] | None] = (),
    ) -> None:
        """Store what the samples lack of a policy's results."""
        for i, (sample, labels) in enumerate(batch):
            if label not in labels:
                continue
            row, context = rows[i], len(sample.context)
            names = ("model", "task", "context", "sample", "policy")
            key = self.plan.key(sample.task, context, sample.index, label)
            record: dict[str, Any] = dict(zip(names, key))
            if sample.answer_tokens:
                record |= {
                    "text": sample.text,
                    "depths": sample.depths,
                    "expected": list(sample.expected),
                    "output": row.text,
                    "score": tasks.score(row.text, sample.expected),
                }
            else:
                nll = sum(row.nll) / len(row.nll)
                record |= {"text": sample.text, "tokens": len(row.nll), "nll": round(nll, 6)}
            record |= {"steps": row.steps, "read": round(read, 4)}
            if masses and masses[i] is not None:
                record["mass"] = masses[i]
            self.store.add(record)
            self.advance(1)


_READ = ("tokens_read", "tokens_attendable")
