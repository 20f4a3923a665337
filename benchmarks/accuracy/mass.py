"""How much of the true softmax the selected pages hold, beside the best that as many pages could hold.

For one query token and one KV head, the *mass* of a page is the softmax weight of its tokens under dense attention,
averaged over the query heads that share the KV head. The *captured* mass is that of the pages which ``hsa::select``
takes; the *oracle* takes as many pages, the forced ones (sinks, recent tokens) and then the heaviest, so no page score
can capture more. All of it is computed with the queries and keys of the dense run, so every policy is asked the
same questions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hsa_compile import LayerPolicy, Policy, algorithms
from hsa_compile.ops.page_mask import attendable, unpack
from hsa_compile.ops.select import FRACTION_UNIT
from hsa_compile.policy import LayerName
from hsa_compile.policy_checks import THREE_LEVEL

RECORDING = "recorded_for_accuracy"


def token_mass(
    q: Tensor, keys: Tensor, seen: Tensor, scale: float, added: Tensor | None, softcap: float
) -> Tensor:
    """The softmax weights of dense attention, averaged over each group: ``[B, Hkv, S]`` fp32.

    Args:
        q: ``[B, Hq, 1, D]``.
        keys: ``[B, Hkv, S, D]``.
        seen: ``[1 or B, 1 or Hq, 1, S]`` bool: what can be attended.
        scale: of the scores.
        added: an additive mask of the same shape, or None.
        softcap: ``softcap * tanh(score / softcap)`` takes the place of a score; 0 for none.
    """
    kv_heads = keys.shape[1]
    query = q[:, :, 0].float().unflatten(1, (kv_heads, -1))
    scores = scale * torch.matmul(query, keys.float().mT)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    batch, _, group, length = scores.shape

    def grouped(mask: Tensor) -> Tensor:
        whole = mask[:, :, 0].expand(batch, kv_heads * group, length)
        return whole.unflatten(1, (kv_heads, group))

    if added is not None:
        scores = scores + grouped(added).float()
    return scores.masked_fill(~grouped(seen), -math.inf).softmax(-1).mean(2)


def page_mass(mass: Tensor, page_size: int) -> Tensor:
    """``[B, Hkv, S]`` summed over pages: ``[B, Hkv, P]``."""
    return F.pad(mass, (0, -mass.shape[-1] % page_size)).unflatten(-1, (-1, page_size)).sum(-1)


def forced_mask(present: Tensor, sink: int, recent: int, page_size: int) -> Tensor:
    """Pages that are always read, ``[..., P]``, for ``present [..., S]``, the tokens that can be attended."""
    at = torch.arange(present.shape[-1], device=present.device)
    first = torch.where(present, at, present.shape[-1]).amin(-1, keepdim=True)
    last = torch.where(present, at, -1).amax(-1, keepdim=True)
    forced = present & ((at < first + sink) | (at > last - max(recent, 1)))
    return F.pad(forced, (0, -at.numel() % page_size)).unflatten(-1, (-1, page_size)).any(-1)


def oracle_mass(mass: Tensor, forced: Tensor, present: Tensor, count: Tensor) -> Tensor:
    """The mass of the best ``count [B, Hkv]`` pages of ``mass [B, Hkv, P]``, the ``forced`` ones among them.

    ``forced`` and ``present`` (``[B, Hkv, P]`` bool) tell which pages must be read and which can be.
    """
    # No mass is more than 1, so forced pages come first and absent ones last.
    key = mass + 2.0 * forced - 2.0 * ~present
    best = mass.gather(-1, key.sort(dim=-1, descending=True).indices).cumsum(-1)
    total = best.gather(-1, (count - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(count > 0, total, 0.0)


class Step:
    """One query token of one layer: the true mass, and what each policy captures of it.

    Page summaries are built by ``hsa::summarize`` and pages chosen by ``hsa::select``, as a compiled step does.

    Args: as for :func:`token_mass`; ``mask`` is boolean, additive or None, ``[1 or B, 1 or Hq, 1, S]``.
    """

    def __init__(
        self, q: Tensor, keys: Tensor, mask: Tensor | None, scale: float, softcap: float = 0.0
    ) -> None:
        if mask is None:
            mask = torch.ones((1, 1, 1, keys.shape[2]), dtype=torch.bool, device=keys.device)
        self.q, self.keys, self.mask, self.scale = q, keys, mask, scale
        self.seen = attendable(mask)
        added = None if mask.dtype == torch.bool else mask
        self.mass = token_mass(q, keys, self.seen, scale, added, softcap)
        self._summaries: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def _summary(self, algorithm: str, page_size: int) -> tuple[Tensor, Tensor]:
        """Summaries of all pages, and the mask in words."""
        key = algorithm, page_size
        if key not in self._summaries:
            keys = self.keys
            bits = torch.ops.hsa.page_mask(self.seen, page_size)
            width = algorithms.summary_width(algorithm, keys.shape[3])
            summary = keys.new_zeros((*keys.shape[:2], bits.shape[-1], width))
            # Nothing is covered yet, so every page is summarised; where the last token is has no part in it.
            covered = bits.new_full((*summary.shape[:3], 2), -1)
            last = torch.tensor([keys.shape[2] - 1], device=keys.device)
            if width:
                torch.ops.hsa.summarize(keys, bits, last, summary, covered, algorithm, page_size)
            self._summaries[key] = summary, bits
        return self._summaries[key]

    def selected(self, policy: LayerPolicy) -> Tensor:
        """The pages that a step reads, ``[B, Hkv, P]`` int32, ascending and padded with -1."""
        policy = policy.at_length(self.keys.shape[2])
        summary, bits = self._summary(policy.score, policy.page_size)
        whole = not isinstance(policy.budget, float)
        budget = policy.pages(0) if whole else 0
        fraction = 0 if whole else round(policy.budget * FRACTION_UNIT)
        additive = self.mask.dtype != torch.bool
        bias = torch.ops.hsa.page_bias(self.mask, policy.page_size) if additive else None
        if policy.algorithm == THREE_LEVEL:
            return torch.ops.hsa.strided_pages(
                *(bits, *summary.shape[:2], policy.page_size, summary.shape[2], budget, fraction),
                *(policy.sink, policy.recent),
            )[0]
        return torch.ops.hsa.select(
            *(self.q, summary, bits, self.scale, policy.algorithm, policy.page_size),
            *(summary.shape[2], budget, fraction, policy.sink, policy.recent, policy.group_reduce),
            *(0, bias, *policy.stops),
        )[0]

    def captured(self, policy: LayerPolicy) -> tuple[Tensor, Tensor]:
        """The mass of the selected pages, and the oracle's for as many pages: ``[B, Hkv]`` each."""
        if policy.algorithm == "dense":
            return torch.ones_like(self.mass[..., 0]), torch.ones_like(self.mass[..., 0])
        policy = policy.at_length(self.keys.shape[2])
        ids = self.selected(policy).long()
        mass = page_mass(self.mass, policy.page_size)
        got = torch.where(ids >= 0, mass.gather(-1, ids.clamp(min=0)), 0.0).sum(-1)
        _, bits = self._summary(policy.score, policy.page_size)
        batch, kv_heads, _ = mass.shape
        words = bits.expand(batch, -1, -1)
        tokens = unpack(words, policy.page_size)
        if tokens.shape[1] > 1:
            tokens = tokens.unflatten(1, (kv_heads, -1)).any(2)
        tokens = tokens.flatten(-2)
        forced = forced_mask(tokens, policy.sink, policy.recent, policy.page_size)
        present = tokens.unflatten(-1, (-1, policy.page_size)).any(-1).expand_as(mass)
        best = oracle_mass(mass, forced.expand_as(mass), present, (ids >= 0).sum(-1))
        return got, best


@dataclass
class Recorder:
    """Captured mass of a dense run: which policies, at which steps.

    Attributes:
        policies: by label.
        found: by label, then layer index: of each step that was recorded, captured and oracle mass ``[2, B, Hkv]``.
        steps: the numbers of those steps.
        on: whether the step that runs is recorded.
    """

    policies: Mapping[str, Policy]
    found: dict[str, dict[int, list[Tensor]]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    on: bool = False

    def start(self, step: int, wanted: bool) -> None:
        """Tell that decode step ``step`` comes next."""
        self.on = wanted
        if wanted:
            self.steps.append(step)

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Look at the attention of ``model``, a model of transformers, meanwhile; it computes what it always does."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        usual = model.config._attn_implementation
        names = [
            LayerName(module.layer_idx, name)
            for name, module in model.named_modules()
            if isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "scaling")
        ]
        layers = {
            label: dict(zip((name.index for name in names), policy.resolve(names)))
            for label, policy in self.policies.items()
        }

        def recorded(
            module: Any, q: Tensor, keys: Tensor, values: Tensor, *rest: Any, **options: Any
        ) -> Any:
            if self.on:
                mask = rest[0] if rest else options.get("attention_mask")
                scale = options.get("scaling") or q.shape[-1] ** -0.5
                step = Step(q, keys, mask, float(scale), float(options.get("softcap") or 0))
                for label, chosen in layers.items():
                    got = torch.stack(step.captured(chosen[module.layer_idx]))
                    at = self.found.setdefault(label, {})
                    at.setdefault(module.layer_idx, []).append(got)
            attend = ALL_ATTENTION_FUNCTIONS.get(usual)
            if attend is None:  # "eager" is a function of the model's own file
                attend = sys.modules[type(module).__module__].eager_attention_forward
            return attend(module, q, keys, values, *rest, **options)

        ALL_ATTENTION_FUNCTIONS.register(RECORDING, recorded)
        ALL_MASK_ATTENTION_FUNCTIONS.register(RECORDING, ALL_MASK_ATTENTION_FUNCTIONS[usual])
        model.set_attn_implementation(RECORDING)
        try:
            yield
        finally:
            model.set_attn_implementation(usual)
            self.on = False

    def row(self, label: str, row: int, steps: int) -> dict[str, Any] | None:
        """What a policy captures of one row of the batch, of whose steps the first ``steps`` count; None if of none.

        ``captured`` and ``oracle`` are means over positions, thousandths, by layer and KV head. ``captured_bins`` and
        ``ratio_bins`` count positions x layers x heads by mass and by its share of the oracle's (see :func:`bins`).
        """
        counted = [i for i, step in enumerate(self.steps) if step < steps]
        if not counted or label not in self.found:
            return None
        by_layer = [torch.stack(found) for _, found in sorted(self.found[label].items())]
        # [2, layers, positions, Hkv]
        both = torch.stack([found[counted, :, row] for found in by_layer]).permute(2, 0, 1, 3)
        got, best = both.double().cpu()
        means = (1000 * both.double().mean(2)).round().int().tolist()
        return {
            "positions": len(counted),
            "captured": means[0],
            "oracle": means[1],
            "captured_bins": bins(got),
            "ratio_bins": bins(got / best),
        }


def bins(shares: Tensor) -> list[int]:
    """How many of ``shares`` (0 to 1) are nearest to 0, 0.01, ... 1: 101 counts."""
    at = (shares.flatten() * 100).round().clamp(0, 100).long()
    return torch.bincount(at, minlength=101).tolist()


def quantile(counts: Sequence[int], share: float) -> float:
    """The value that ``share`` of what :func:`bins` has counted is not above, to a hundredth."""
    wanted, passed = share * sum(counts), 0
    for at, count in enumerate(counts):
        passed += count
        if passed > wanted:
            return at / 100
    return 1.0
