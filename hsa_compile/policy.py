"""Policies: how each attention layer reads its KV cache.

A :class:`LayerPolicy` holds for one layer. A :class:`Policy` is a default and an ordered list of
layer keys with a policy each; of the keys that match a layer the last one wins, so general keys go
first and exceptions after them.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

from hsa_compile.errors import (
    PolicyError,
    check_choice,
    did_you_mean,
    listed,
    located,
    refuse,
)
from hsa_compile.layer_keys import LayerName, is_optional, matcher, normal_key, refuse_unmatched
from hsa_compile.policy_checks import (
    AUTO,
    DENSE,
    NO_EFFECT,
    PAGE_SIZES,
    THREE_LEVEL,
    accumulates,
    algorithm_names,
    checked,
)
from hsa_compile.policy_file import SUFFIXES, read_policy_file, write_policy_file

__all__ = ["FIELDS", "PRESETS", "LayerName", "LayerPolicy", "Policy", "algorithm_names", "describe"]

AUTO_SIZES = ((16384, 8), (32768, 16), (98304, 32))
"""Tokens up to which a cache has pages of so many under "auto"; longer ones have the largest."""
LEAST_ON_HOST = 16
"""Smaller pages than that are not chosen for a cache of the host: each is a transfer of its own."""


@dataclass(frozen=True)
class LayerPolicy:
    """How one attention layer reads its KV cache.

    Attributes:
        algorithm: a page score out of ``hsa_compile.algorithms.names()``, or "dense", which reads
            everything, or "three_level", which has no score: what the budget buys beyond ``sink`` and ``recent`` are
            evenly spaced pages (single tokens with ``granularity="token"``), and all the others join the softmax as
            ``prototypes``.
        budget: what one query reads. An int is tokens (>= 1), a float a fraction of the attendable
            length in (0, 1]; so 1 is one token and 1.0 is everything. A list of ints is tokens (>= 1) of each KV head.
        page_size: tokens a page: 8, 16, 32 or 64; or "auto": 8 in a cache of up to 16,384 tokens, 16 up to 32,768, 32
            up to 98,304 and 64 beyond; 32 where the length is not known when it is compiled, on the host 16 at least.
        sink: first tokens whose pages are always read (>= 0).
        recent: last tokens whose pages are always read (>= 0); the newest token's page always is.
        group_reduce: how the scores of the query heads that share a KV head become one:
            "softmax_mean" or "max".
        placement: where the KV cache lives: "device", or "host": in pinned host memory, with a pool of pages on the
            device.
        pool: pages that the pool of placement "host" holds, as a multiple of those that a query selects (>= 1).
        prefetch: what is loaded into it before it is known to be needed: "none"; "next_rank": for the next step, the
            pages that just missed the selection; "cross_layer": for the next layer, the pages that its query would
            select if it were made of this layer's input. It never changes results.
        ahead: how many pages "next_rank" is, as a multiple of those that a query selects.
        top_p: share of the softmax, as the page scores estimate it, at which a row stops selecting, in (0, 1]; the
            budget is then the most that it selects. 1 selects the whole budget. Rows within the budget are read whole.
        min_budget: tokens that ``top_p`` does not go below (>= 0).
        dense_below: share of the softmax, as the page scores estimate it, in [0, 1]: a row whose selected pages hold
            less is read whole. 0 is never.
        decay: what is left of the accumulated shares of the softmax after a step, in (0, 1], where the algorithm ranks
            pages by them ("heavy_hitters"); 1 forgets nothing.
        unselected: what becomes of pages that are left out: "drop", or "centroids": each joins the softmax as the mean
            of its keys and the mean of its values, with the weight of its tokens.
        prototypes: clusters that "three_level" makes of the pages that it leaves out (>= 1), each a mean key and a
            mean value.
        monitor: every how many steps one KV head is attended densely beside the step, to measure what the selection
            captured (>= 0); 0 is never. See ``hsa_compile.stats``.
        monitor_bound: share of the dense softmax, in [0, 1]; a warning is given when what is captured falls below it.
        granularity: what the budget buys: "page": pages; "two_stage": of ``first_stage`` times as many tokens in pages,
            the single tokens whose own keys score best; "token": of all tokens those that score best by an index of
            one bit a channel (with algorithm "cuboid"), or evenly spaced ones (with "three_level").
        first_stage: tokens that "two_stage" selects as pages, as a multiple of the budget (>= 1).

    Raises:
        PolicyError: a field is out of range or of the wrong type.
    """

    algorithm: str = "cuboid"
    budget: int | float | tuple[int, ...] = 2048
    page_size: Any = AUTO  # an int from planning on
    sink: int = 4
    recent: int = 64
    group_reduce: str = "softmax_mean"
    placement: str = "device"
    pool: float = 2.0
    prefetch: str = "none"
    ahead: float = 0.25
    top_p: float = 1.0
    min_budget: int = 256
    dense_below: float = 0.0
    monitor: int = 0
    monitor_bound: float = 0.0
    decay: float = 0.99
    unselected: str = "drop"
    prototypes: int = 64
    granularity: str = "page"
    first_stage: float = 4.0

    def __post_init__(self) -> None:
        for name, value in checked(self).items():
            object.__setattr__(self, name, value)

    @property
    def stops(self) -> tuple[Any, ...]:
        """What ``hsa::select`` is told last, as far as it is not the default: where a row stops.

        ``top_p`` and the pages that it does not go below, the pages of each KV head, and ``dense_below``.
        """
        page = self.at_length(None).page_size
        share = () if self.top_p == 1 else (self.top_p, -(-self.min_budget // page))
        if self.dense_below:
            return (*(share or (1.0, 0)), list(self.head_pages), self.dense_below)
        return (*(share or (1.0, 0)), list(self.head_pages)) if self.head_pages else share

    @property
    def head_pages(self) -> tuple[int, ...]:
        """Pages that the budget pays for, KV head by KV head; nothing where it is the same for all."""
        page = self.at_length(None).page_size
        each = self.budget if isinstance(self.budget, tuple) else ()
        return tuple(-(-tokens // page) for tokens in each)

    def at_length(self, length: int | None) -> "LayerPolicy":
        """The policy with the page size that "auto" is in a cache of ``length`` tokens (None: not known)."""
        if self.page_size != AUTO:
            return self
        if length is None:
            return dataclasses.replace(self, page_size=32)
        fitting = (size for most, size in AUTO_SIZES if length <= most)
        least = LEAST_ON_HOST if self.placement == "host" else 1
        return dataclasses.replace(self, page_size=max(least, next(fitting, PAGE_SIZES[-1])))

    @property
    def estimates(self) -> bool:
        """Whether pages that are left out take part as an estimate."""
        return self.unselected != "drop" or self.algorithm == THREE_LEVEL

    @property
    def indexes_tokens(self) -> bool:
        """Whether an index of every token is kept, by which single ones are chosen."""
        return self.granularity == "token" and self.algorithm not in (DENSE, THREE_LEVEL)

    @property
    def score(self) -> str:
        """The page score whose summaries are kept; where pages are not chosen by one, their means."""
        return "mean" if self.algorithm == THREE_LEVEL else self.algorithm

    # 1 == 1.0 in Python, but a budget of one token must never stand in for one of everything.
    def _identity(self) -> tuple[object, ...]:
        return (type(self.budget), *dataclasses.astuple(self))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayerPolicy):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def pages(self, length: int) -> int:
        """Pages that the budget pays for at a static attendable ``length`` (tokens), in the KV head that has most.

        A fraction is the decimal that was written: 0.07 of 100 tokens is 7. Pages that sink and
        recent force in beyond the budget are not added. "dense" pays for every page.
        """
        return math.ceil(self._tokens(length) / self._page(length))

    def holds(self, length: int) -> bool:
        """Whether the budget pays for everything at a static attendable ``length`` (tokens)."""
        if self.granularity != "page":
            return self._tokens(length) >= length
        least = min(self.at_length(length).head_pages or [self.pages(length)])
        return least * self._page(length) >= length

    def _page(self, length: int) -> int:
        page = self.at_length(length).page_size
        assert isinstance(page, int)
        return page

    def _tokens(self, length: int) -> Fraction:
        budget = 1.0 if self.algorithm == DENSE else self.budget
        budget = max(budget) if isinstance(budget, tuple) else budget
        return Fraction(budget) if isinstance(budget, int) else Fraction(repr(budget)) * length

    @property
    def of_pages(self) -> "LayerPolicy":
        """The policy that pages are selected by: with "two_stage" a larger budget, else this one."""
        if self.granularity != "two_stage":
            return self
        budget = self.first_stage * self.budget  # type: ignore[operator]
        first = math.ceil(budget) if isinstance(self.budget, int) else min(1.0, budget)
        return dataclasses.replace(self, granularity="page", budget=first)


FIELDS = tuple(item.name for item in dataclasses.fields(LayerPolicy))
_NO_USE_WHEN_DENSE = frozenset(FIELDS) - {"algorithm", "placement"}


def describe(policy: LayerPolicy) -> str:
    """One short line, such as "cuboid budget=2048 page=32 sink=4 recent=64", or "dense".

    ``group_reduce`` and ``placement`` are in it where they are not the default.
    """
    usual = LayerPolicy()
    parts = [policy.algorithm]
    if policy.algorithm != DENSE:
        each = policy.budget if isinstance(policy.budget, tuple) else (policy.budget,)
        parts += [f"budget={','.join(map(str, each))}", f"page={policy.page_size}"]
        parts += [f"sink={policy.sink}", f"recent={policy.recent}"]
        if policy.top_p != usual.top_p:
            parts += [f"top_p={policy.top_p:g}", f"min={policy.min_budget}"]
        if policy.dense_below:
            parts.append(f"dense_below={policy.dense_below:g}")
        if policy.decay != usual.decay and accumulates(policy.algorithm):
            parts.append(f"decay={policy.decay:g}")
        if policy.algorithm == THREE_LEVEL:
            parts.append(f"prototypes={policy.prototypes}")
        if policy.unselected != usual.unselected:
            parts.append(f"unselected={policy.unselected}")
        if policy.group_reduce != usual.group_reduce:
            parts.append(f"group_reduce={policy.group_reduce}")
        if policy.granularity != usual.granularity:
            parts.append(f"granularity={policy.granularity}")
        if policy.granularity == "two_stage":
            parts.append(f"first_stage={policy.first_stage:g}")
    if policy.placement != usual.placement:
        parts.append(f"placement={policy.placement}")
        if policy.algorithm != DENSE:
            parts.append(f"pool={policy.pool:g}")
            if policy.prefetch != "none":
                parts.append(f"prefetch={policy.prefetch}")
            if policy.prefetch == "next_rank":
                parts.append(f"ahead={policy.ahead:g}")
    return " ".join(parts)


@dataclass(frozen=True)
class Policy:
    """A default, and what differs from it by layer.

    Attributes:
        default: the policy of every layer that no key matches.
        layers: layer keys and their policies, later ones winning. A key is an index, a range "A-B"
            or a module-path glob; negative indices count from the end. "0?" and "0-1?" may match no layer.

    Raises:
        PolicyError: a key is malformed, runs backwards or is there twice.
    """

    default: LayerPolicy = field(default_factory=LayerPolicy)
    layers: tuple[tuple[str | int, LayerPolicy], ...] = ()

    def __post_init__(self) -> None:
        entries: dict[str | int, LayerPolicy] = {}
        for given, policy in self.layers:
            key = normal_key(given)
            if key in entries:
                raise PolicyError(f"layer key {given!r} is there twice; valid: each key once")
            entries[key] = policy
        for policy in (self.default, *entries.values()):
            if not isinstance(policy, LayerPolicy):
                refuse("value", policy, "a LayerPolicy; Policy.of also takes presets and mappings")
        object.__setattr__(self, "layers", tuple(entries.items()))

    @classmethod
    def of(
        cls,
        default: "LayerSource" = "default",
        layers: Mapping[Any, "LayerSource"] | None = None,
    ) -> "Policy":
        """Build a policy out of preset names, mappings of fields and LayerPolicies.

        A mapping in ``layers`` takes the fields that it leaves out from ``default``, or from the
        preset that its key "preset" names. A preset's name alone is that preset, whatever the
        default. Layers that the preset of ``default`` names come first; those of a preset that an
        entry of ``layers`` names are for whole models, and not taken.

        Raises:
            PolicyError: a key, a preset, a field or a value is not valid.
        """
        with located("default"):
            base = _layer_policy(default, LayerPolicy())
        entries = []
        for key, value in (layers or {}).items():
            with located(f"layers[{key!r}]"):
                entries.append((key, _layer_policy(value, base)))
        given = {normal_key(key) for key, _ in entries}
        first = (entry for entry in _layers_of_preset(default) if entry[0] not in given)
        return cls(base, (*first, *entries))

    @classmethod
    def load(cls, source: "PolicySource" = None) -> "Policy":
        """Read a policy in any form that the option ``policy`` takes.

        Args:
            source: None (the defaults), a Policy or LayerPolicy, a preset's name, the path of a
                .json, .yaml or .yml file, or a mapping with the keys "default" and "layers". A
                mapping of a layer's fields is short for one with those under "default".

        Raises:
            PolicyError: a file is missing or cannot be parsed, or what it says is not valid.
        """
        if source is None:
            return cls()
        if isinstance(source, Policy):
            return source
        if isinstance(source, LayerPolicy):
            return cls(source)
        if isinstance(source, Mapping):
            with located("policy"):
                return _from_mapping(source)
        if isinstance(source, str) and source in PRESETS:
            return PRESETS[source]
        hint = ""
        if isinstance(source, str | os.PathLike):
            path = Path(os.fsdecode(source))
            if path.suffix.lower() in SUFFIXES:
                with located(f"policy file {str(path)!r}"):
                    return _from_mapping(read_policy_file(path))
            hint = did_you_mean(str(path), PRESETS)
        refuse(
            "policy",
            source,
            f"a Policy, a mapping, a preset ({listed(PRESETS)}) "
            f"or the path of a file that ends in {listed(SUFFIXES)}{hint}",
        )

    def all(self) -> Iterator[LayerPolicy]:
        """The default, then those of the layer keys."""
        yield self.default
        yield from (policy for _, policy in self.layers)

    def resolve(self, layers: Sequence[LayerName]) -> list[LayerPolicy]:
        """The policy of each attention layer, in the order given.

        Negative indices count from the largest index present plus one. Without layers there is
        nothing to match, and the result is empty.

        Raises:
            PolicyError: a key is for none of the layers, or is a range that runs backwards once
                its negative end is counted.
        """
        if not layers:
            return []
        count = 1 + max(layer.index for layer in layers)
        chosen = [self.default] * len(layers)
        with located("policy"):
            for key, policy in self.layers:
                matches = matcher(key, count)
                hits = [i for i, layer in enumerate(layers) if matches(layer)]
                if is_optional(key) and len(hits) == len(layers):
                    continue  # what is said of some layers is not meant for all there are
                if not hits and not is_optional(key):
                    refuse_unmatched(key, layers)
                for i in hits:
                    chosen[i] = policy
        return chosen

    def needs_whole(self, part: str) -> None:
        """Refuse layer keys for a graph that is only a part of the model, for its layers cannot be told from others.

        Dynamo then numbers layers from where the part begins, and may use one compiled part for several layers.

        Args:
            part: why the graph is a part; empty where it is the whole.

        Raises:
            PolicyError: the policy names layers and the graph is a part.
        """
        if part and self.layers:
            raise PolicyError(
                f"the policy names layers ({listed(key for key, _ in self.layers)}), but the model has a graph break, "
                f"behind which layers cannot be told apart: {part}; valid: a policy with 'default' alone "
                "(of a preset that names layers, its fields), or a model without graph breaks "
                "(torch.compile(..., fullgraph=True) shows where they are)"
            )

    def to_dict(self) -> dict[str, Any]:
        """A mapping that ``load`` reads back as an equal policy, also by way of JSON or YAML.

        The order of "layers" is part of it: a writer must not sort the keys.
        """
        layers = {key: dataclasses.asdict(policy) for key, policy in self.layers}
        return {"default": dataclasses.asdict(self.default), "layers": layers}

    def short(self) -> dict[str, Any]:
        """``to_dict`` for people: algorithm and budget of each entry, and what else is not as it would be anyway."""
        content: dict[str, Any] = {"default": _differing(self.default, LayerPolicy())}
        if self.layers:
            content["layers"] = {key: _differing(one, self.default) for key, one in self.layers}
        return content

    def save(self, path: str | os.PathLike[str], note: str = "") -> None:
        """Write the policy to a file, as :meth:`short` gives it; :meth:`load` reads an equal policy back.

        Args:
            path: a file that ends in .json, .yaml or .yml.
            note: lines that a YAML file begins with, as comments.

        Raises:
            PolicyError: the file cannot be written, or ends in something else.
        """
        target = Path(os.fsdecode(path))
        with located(f"policy file {str(target)!r}"):
            write_policy_file(target, self.short(), note)

    def canonical(self) -> str:
        """One line of JSON for hashing; two policies have the same line only if they are equal."""
        content = self.to_dict()
        content["layers"] = list(content["layers"].items())
        return json.dumps(content, sort_keys=True, separators=(",", ":"))


_DENSE = LayerPolicy(algorithm=DENSE)

PRESETS: dict[str, Policy] = {
    "default": Policy(),
    "dense": Policy(_DENSE),
    **{
        name: Policy(LayerPolicy(algorithm=name))
        for name in ("cuboid", "heavy_hitters", "mean", "quest", "streaming", "three_level")
    },
    "balanced": Policy(),
    "accurate": Policy(LayerPolicy(budget=4096, page_size=16), (("0?", _DENSE),)),
    "fast": Policy(LayerPolicy(budget=1024, page_size=32)),
    "chat": Policy(LayerPolicy(page_size=32, recent=256, top_p=0.95, min_budget=512)),
    "long_document": Policy(LayerPolicy(budget=4096, page_size=32, top_p=0.95, min_budget=1024)),
    "code": Policy(LayerPolicy(page_size=16)),
}

LayerSource: TypeAlias = LayerPolicy | Mapping[str, Any] | str
PolicySource: TypeAlias = Policy | LayerPolicy | Mapping[str, Any] | str | os.PathLike[str] | None


def _differing(policy: LayerPolicy, base: LayerPolicy) -> dict[str, Any] | str:
    """What an entry of a policy file has to say of ``policy`` where it starts from ``base``."""
    usual = LayerPolicy()
    if policy == LayerPolicy(algorithm=DENSE):
        return DENSE
    idle = (name for name, (_, has_use) in NO_EFFECT.items() if not has_use(policy))
    if any(getattr(policy, name) != getattr(usual, name) for name in idle):
        return dataclasses.asdict(policy)
    always = ("algorithm",) if policy.algorithm == DENSE else ("algorithm", "budget")
    fields = dataclasses.asdict(policy).items()
    return {
        name: value
        for name, value in fields
        if name in always
        or (type(value), value) != (type(getattr(base, name)), getattr(base, name))
    }


def _from_mapping(content: object) -> Policy:
    if not isinstance(content, Mapping):
        refuse("content", content, "a mapping with the keys 'default' and 'layers'")
    fields = ("preset", *FIELDS)
    valid: tuple[str, ...] = ("default", "layers")
    if not any(key in content for key in valid):
        if all(key in fields for key in content):
            return Policy.of(content)
        valid += fields
    for key in content:
        if key in valid:
            continue
        hint = f"; put {key!r} into 'default'" if key in fields else did_you_mean(key, valid)
        raise PolicyError(
            f"unknown key {key!r}; valid: {listed(valid)}, with layer keys such as '0-1' under 'layers'{hint}"
        )
    layers = content.get("layers", {})
    if not isinstance(layers, Mapping):
        refuse("layers", layers, "a mapping of layer keys to presets or fields")
    return Policy.of(content.get("default", {}), layers)


def _preset(name: object) -> LayerPolicy:
    check_choice("preset", name, tuple(PRESETS))
    return PRESETS[str(name)].default


def _layers_of_preset(default: LayerSource) -> tuple[tuple[str | int, LayerPolicy], ...]:
    """What the preset that a checked default is, or starts from, says of single layers."""
    name = default.get("preset") if isinstance(default, Mapping) else default
    return PRESETS[name].layers if isinstance(name, str) else ()


def _layer_policy(value: object, base: LayerPolicy) -> LayerPolicy:
    if isinstance(value, LayerPolicy):
        return value
    if isinstance(value, str):
        return _preset(value)
    if not isinstance(value, Mapping):
        refuse("value", value, f"a preset ({listed(PRESETS)}) or a mapping of fields")
    given = dict(value)
    if "preset" in given:
        base = _preset(given.pop("preset"))
    for name in given:
        if name not in FIELDS:
            valid = ("preset", *FIELDS)
            raise PolicyError(
                f"unknown field {name!r}; valid: {listed(valid)}{did_you_mean(name, valid)}"
            )
    if base.algorithm == DENSE and "algorithm" not in given:
        for name in given:
            if name in _NO_USE_WHEN_DENSE:
                raise PolicyError(
                    f"{name} {given[name]!r} has no effect on 'dense', which this layer starts "
                    f"from; name an algorithm too; valid: {listed(algorithm_names())}"
                )
    made = dataclasses.replace(base, **given)
    if given.keys() < set(FIELDS):  # one that names them all is a record, of what has no effect too
        for name, (needs, has_use) in NO_EFFECT.items():
            usual = (getattr(base, name), getattr(LayerPolicy(), name))
            if name in given and given[name] not in usual and not has_use(made):
                raise PolicyError(f"{name} {given[name]!r} has no effect without {needs}")
    return made
