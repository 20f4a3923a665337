"""What selection loses, measured while a model decodes: sampled heads are attended densely beside the steps.

Every ``every`` steps one KV head of one batch row of each watched layer has its turn (each once in a round; where it
begins is drawn), and its query heads attend to all that the mask lets them, after the step and, on a GPU, on a stream
of its own: no later step waits for it. Layers take turns, so that what a step launches for it stays within the time
that the host has to spare. From the two log-sum-exps follows the share of the dense softmax that the selection
captured (its recall), from the two results the error of the output. Both are added up on the device.
"""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hsa_compile.ops.page_mask import unpack

from . import streams

BINS = 200
"""Of the histogram of recalls: a percentile is known to half a percent."""
_RECENT, _FEW = 8, 4
"""Observations whose mean is held against the bound, once there are a few."""
_MOST_PENDING = 64


@dataclass(frozen=True)
class Step:
    """One call of a program.

    ``arguments`` are Dynamo's, ``inputs`` the same with the views of growing caches that the step wrote into;
    ``returned`` is what the graph returns for monitors, valid until the next step only.
    """

    number: int
    arguments: Sequence[object]
    inputs: Sequence[object]
    returned: Sequence[object]


Read = Callable[[Step], Tensor]
"""A tensor of a step."""


@dataclass(frozen=True)
class WatchedSite:
    """One attention layer, and where its operands are found after a step.

    q ``[B, Hq, 1, D]``, out ``[B, Hq, 1, Dv]``, lse ``[B, Hq, 1]``, keys ``[B, Hkv, S, D]``,
    values ``[B, Hkv, S, Dv]``, bits ``[Bm, Hm, P]`` and bias ``[Bm, Hm, 1, S]``: as of ``hsa::sparse_attention``.
    """

    index: int
    path: str
    every: int
    bound: float
    scale: float
    softcap: float
    page_size: int
    q: Read
    out: Read
    lse: Read
    keys: Read
    values: Read
    bits: Read
    bias: Read | None


@dataclass(frozen=True)
class Observed:
    """Of one layer: observations (query heads), mean and 5th percentile of the recall, mean relative output error."""

    heads: int
    recall: float
    recall_p5: float
    output_error: float


@dataclass(frozen=True)
class _Sample:
    """One KV head of one row: q ``[G, D]``, out ``[G, Dv]``, lse ``[G]``, words and bias ``[1 or G, P or S]``."""

    q: Tensor
    out: Tensor
    lse: Tensor
    keys: Tensor
    values: Tensor
    words: Tensor
    bias: Tensor | None


class Monitor:
    """Watches the layers of one program that are on one device."""

    def __init__(self, sites: tuple[WatchedSite, ...], device: torch.device) -> None:
        self.sites, self.device = sites, device
        with torch.inference_mode(False):
            self.histogram = torch.zeros((len(sites), BINS), dtype=torch.int64, device=device)
            self.sums = torch.zeros((len(sites), 3), dtype=torch.float64, device=device)
        self._recent = [deque[float](maxlen=_RECENT) for _ in sites]
        self._warned: set[int] = set()
        self._pending: deque[_Pending] = deque()

    def after(self, step: Step) -> None:
        """Look at the layers whose turn it is."""
        self._collect()
        due = [i for i, site in enumerate(self.sites) if (step.number - i) % site.every == 0]
        if not due or len(self._pending) >= _MOST_PENDING:
            return
        with torch.no_grad():
            samples = [self._sample(i, step) for i in due]
            if self.device.type != "cuda":
                latest = [self._observe(i, held) for i, held in zip(due, samples, strict=True)]
                self._judge(due, latest)
                return
            with streams.watching(self.device):
                latest = [self._observe(i, held) for i, held in zip(due, samples, strict=True)]
                means = torch.stack(latest).to("cpu", non_blocking=True)
                done = torch.cuda.Event()
                done.record()
            self._pending.append(_Pending(done, due, means, samples))

    def observed(self) -> list[Observed | None]:
        """What was seen of each layer so far. On a GPU this waits for it."""
        if self._pending:
            self._pending[-1].done.synchronize()
        self._collect()
        found: list[Observed | None] = []
        for counts, sums in zip(self.histogram.tolist(), self.sums.tolist(), strict=True):
            heads = sum(counts)
            if not heads:
                found.append(None)
                continue
            upto = itertools.accumulate(counts)
            lowest = next(at for at, below in enumerate(upto) if below >= 0.05 * heads)
            found.append(Observed(heads, sums[0] / heads, lowest / BINS, sums[1] / heads))
        return found

    def _sample(self, i: int, step: Step) -> _Sample:
        site = self.sites[i]
        keys, values, bits = site.keys(step), site.values(step), site.bits(step)
        batch, kv_heads = keys.shape[:2]
        done, at = divmod(step.number // site.every, batch * kv_heads)
        first = random.Random(f"{site.index} {done}").randrange(batch * kv_heads)
        b, h = divmod((first + at) % (batch * kv_heads), kv_heads)

        def of_group(tensor: Tensor) -> Tensor:
            """The heads of the group ``[G or 1, ...]``, copied: the memory of a step is that of the next one."""
            row = tensor[b if tensor.shape[0] > 1 else 0]
            if row.shape[0] == 1:
                return row.clone()
            group = row.shape[0] // kv_heads
            return row[h * group : (h + 1) * group].clone()

        bias = None if site.bias is None else of_group(site.bias(step)).squeeze(1)
        q, out, lse = (of_group(read(step)).squeeze(1) for read in (site.q, site.out, site.lse))
        return _Sample(q, out, lse, keys[b, h], values[b, h], of_group(bits), bias)

    def _observe(self, i: int, sample: _Sample) -> Tensor:
        """Add one sample up; returns its mean recall (nan where nothing could be attended)."""
        site = self.sites[i]
        out, lse = dense(sample, site.scale, site.softcap, site.page_size)
        attended = lse > -math.inf
        recall = torch.where(attended, (sample.lse.double() - lse).exp().clamp(max=1), 0)
        norm = torch.linalg.vector_norm(out, dim=-1)
        off = torch.linalg.vector_norm(sample.out.double() - out, dim=-1)
        error = torch.where(norm > 0, off / norm, 0)
        bins = (recall * BINS).long().clamp(max=BINS - 1)
        self.histogram[i].scatter_add_(0, bins, attended.long())
        heads = attended.sum()
        self.sums[i].add_(torch.stack((recall.sum(), error.sum(), heads.double())))
        return recall.sum() / heads

    def _collect(self) -> None:
        """Judge what is measured so far; never waits."""
        while self._pending and self._pending[0].done.query():
            pending = self._pending.popleft()
            self._judge(pending.sites, list(pending.means))

    def _judge(self, sites: list[int], means: Sequence[Tensor]) -> None:
        for i, mean in zip(sites, map(float, means), strict=True):
            site, recent = self.sites[i], self._recent[i]
            if math.isnan(mean):
                continue
            recent.append(mean)
            average = sum(recent) / len(recent)
            if average >= site.bound:
                self._warned.discard(i)
            elif i not in self._warned and len(recent) >= _FEW:
                self._warned.add(i)
                warnings.warn(
                    f"layer {site.index} ({site.path or 'attention'}): the selected pages captured {average:.1%} of "
                    f"the dense softmax in the last {len(recent)} observations, below the bound of {site.bound:.1%}; "
                    "a larger budget, or 'dense' for this layer, captures more",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def __del__(self) -> None:
        # The samples hold memory that the other stream may still read.
        if getattr(self, "_pending", None):
            self._pending[-1].done.synchronize()


@dataclass(frozen=True)
class _Pending:
    """A measurement under way: what tells that it is done, and what must live until then."""

    done: torch.cuda.Event
    sites: list[int]
    means: Tensor
    samples: list[_Sample]


def dense(sample: _Sample, scale: float, softcap: float, page_size: int) -> tuple[Tensor, Tensor]:
    """Attention of a sample to all that its mask lets it, in fp32, as doubles: out ``[G, Dv]`` and lse ``[G]``."""
    tokens = sample.keys.shape[0]
    present = unpack(sample.words, page_size).flatten(-2)[..., :tokens]
    # What no head may look at holds anything, nan included.
    seen = present.any(0).unsqueeze(-1)
    keys = torch.where(seen, sample.keys, 0).float()
    logits = scale * (sample.q.float() @ keys.mT)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if sample.bias is not None:
        logits = logits + sample.bias.float()
    logits = torch.where(present, logits, -math.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.where(present, (logits - lse.unsqueeze(-1)).exp(), 0)
    out = weights @ torch.where(seen, sample.values, 0).float()
    return out.double(), lse.double()
