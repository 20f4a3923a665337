"""Layer keys: the part of a policy entry that says which attention layers it is for.

A key is an index, a range "A-B" with both ends in it, or a glob over module paths. Negative
indices and ends count from the end. An index or a range that ends in "?" may be for no layer.
"""

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from hsa_compile.errors import PolicyError, did_you_mean, listed, refuse

_INDEX = re.compile(r"-?[0-9]+")
_RANGE = re.compile(r"(-?[0-9]+)\s*-\s*(-?[0-9]+)")
_OPEN_RANGE = re.compile(r"(-?[0-9]+)\s*-")
_OPTIONAL = re.compile(rf"({_INDEX.pattern}|{_RANGE.pattern})\s*\?")
_NO_GLOB = re.compile(r"[-0-9,:\s]*")


@dataclass(frozen=True)
class LayerName:
    """An attention layer as keys see it: its index in the model and its module path."""

    index: int
    path: str


def normal_key(key: object) -> str | int:
    """One spelling for each key: an int for an index, "A-B" for a range, either with a "?", a glob as it is.

    Raises:
        PolicyError: the key is none of the three, or a range that runs backwards.
    """
    if isinstance(key, int) and not isinstance(key, bool):
        return key
    text = key.strip() if isinstance(key, str) else ""
    if _INDEX.fullmatch(text):
        return int(text)
    if maybe := _OPTIONAL.fullmatch(text):
        return f"{normal_key(maybe[1])}?"
    if span := _RANGE.fullmatch(text):
        first, last = int(span[1]), int(span[2])
        if (first < 0) == (last < 0) and first > last:
            refuse("layer key", key, f"a range from low to high; did you mean '{last}-{first}'?")
        return f"{first}-{last}"
    if _NO_GLOB.fullmatch(text):
        start = _OPEN_RANGE.fullmatch(text)
        valid = (
            "an index (3 or -1), a range with both ends in it ('0-1', '-2--1', '4--1'), "
            "or a module-path glob ('model.layers.*.self_attn')"
        )
        refuse("layer key", key, valid + (f"; did you mean '{start[1]}--1'?" if start else ""))
    return text


def is_optional(key: str | int) -> bool:
    """Whether a normal key may be for no layer."""
    return isinstance(key, str) and _OPTIONAL.fullmatch(key) is not None


def matcher(key: str | int, count: int) -> Callable[[LayerName], bool]:
    """A test of whether a normal key is for a layer, where negative indices count from ``count``.

    Raises:
        PolicyError: a range that runs backwards once its negative end is counted.
    """
    optional = is_optional(key)
    if optional:
        key = normal_key(str(key)[:-1])
    if isinstance(key, int):
        first = last = key
    elif span := _RANGE.fullmatch(key):
        first, last = int(span[1]), int(span[2])
    else:
        pattern = key
        return lambda layer: fnmatch.fnmatchcase(layer.path, pattern)
    low, high = (end + count if end < 0 else end for end in (first, last))
    if low > high and not optional:
        refuse(
            "layer key",
            key,
            f"a range from low to high; counting negative ends from {count}, this one runs from {low} to {high}",
        )
    return lambda layer: low <= layer.index <= high


def refuse_unmatched(key: str | int, layers: Sequence[LayerName]) -> NoReturn:
    """Raise the PolicyError for a key that is for none of ``layers``, naming what there is."""
    indices = sorted({layer.index for layer in layers})
    paths = list(dict.fromkeys(layer.path for layer in layers))
    shown = listed(paths[:3]) + (f", ... ({len(paths)} in all)" if len(paths) > 3 else "")
    globs = dict.fromkeys(re.sub(r"\d+", "*", path) for path in paths)
    raise PolicyError(
        f"layer key {key!r} matches no attention layer; valid: indices {_spans(indices)}, "
        f"module paths {shown}{_nearest_index(key, indices) or did_you_mean(key, [*globs, *paths])}"
    )


def _nearest_index(key: str | int, indices: Sequence[int]) -> str:
    """The layer nearest to an index, or to a range, that is for none; an empty string for a glob."""
    span = _RANGE.fullmatch(key) if isinstance(key, str) else None
    if isinstance(key, str) and span is None:
        return ""
    start = int(span[1]) if span else int(key)
    start += indices[-1] + 1 if start < 0 else 0
    return f"; did you mean {min(indices, key=lambda index: (abs(index - start), index))}?"


def _spans(indices: Sequence[int]) -> str:
    """Sorted indices in few words: ``[0, 1, 2, 3, 7]`` is "0-3, 7"."""
    spans: list[list[int]] = []
    for index in indices:
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
