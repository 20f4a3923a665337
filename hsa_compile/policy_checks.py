"""What the fields of a ``LayerPolicy`` may be: each by itself, and in which company."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from hsa_compile.errors import check_choice, did_you_mean, listed, refuse

if TYPE_CHECKING:
    from hsa_compile.policy import LayerPolicy

PAGE_SIZES = (8, 16, 32, 64)
AUTO = "auto"
DENSE = "dense"
THREE_LEVEL = "three_level"
MAX_POOL = 64
MAX_AHEAD = 4
MAX_PROTOTYPES = 1024
MAX_FIRST_STAGE = 64

CHOICES = {
    "group_reduce": ("softmax_mean", "max"),
    "placement": ("device", "host"),
    "prefetch": ("none", "next_rank", "cross_layer"),
    "unselected": ("drop", "centroids"),
    "granularity": ("page", "two_stage", "token"),
}

_INTEGERS: dict[str, tuple[int, float, str]] = {
    "sink": (0, math.inf, "an int >= 0 (tokens)"),
    "recent": (0, math.inf, "an int >= 0 (tokens)"),
    "min_budget": (0, math.inf, "an int >= 0 (tokens)"),
    "prototypes": (1, MAX_PROTOTYPES, f"an int from 1 to {MAX_PROTOTYPES}"),
    "monitor": (0, math.inf, "an int >= 0 (steps; 0 is never)"),
}
"""Least, most, and how they are said."""

_OF_SELECTED = ", times the pages that a query selects"
_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "pool": (lambda x: 1 <= x <= MAX_POOL, f"a number from 1 to {MAX_POOL}{_OF_SELECTED}"),
    "ahead": (
        lambda x: 0 < x <= MAX_AHEAD,
        f"a number above 0 and up to {MAX_AHEAD}{_OF_SELECTED}",
    ),
    "top_p": (lambda x: 0 < x <= 1, "a number above 0 and up to 1 (a share of the softmax)"),
    "dense_below": (
        lambda x: 0 <= x <= 1,
        "a number from 0 to 1 (a share of the softmax; 0 is never)",
    ),
    "monitor_bound": (lambda x: 0 <= x <= 1, "a number from 0 to 1 (a share of the softmax)"),
    "decay": (lambda x: 0 < x <= 1, "a number above 0 and up to 1 (what is left after a step)"),
    "first_stage": (
        lambda x: 1 <= x <= MAX_FIRST_STAGE,
        f"a number from 1 to {MAX_FIRST_STAGE}, times the budget",
    ),
}
"""What holds of them, and how it is said."""


def algorithm_names() -> tuple[str, ...]:
    """Valid values of ``LayerPolicy.algorithm``: "dense", the page scores, and what has no score."""
    from hsa_compile import algorithms

    return (DENSE, *algorithms.names(), THREE_LEVEL)


def accumulates(algorithm: str) -> bool:
    """Whether pages rank by what past steps gave them."""
    from hsa_compile import algorithms

    return algorithm in algorithms.names() and algorithms.get(algorithm).accumulates


def has_scores(algorithm: str) -> bool:
    """Whether pages rank by scores of this step's query, which are an estimate of its softmax."""
    from hsa_compile import algorithms

    known = algorithm in algorithms.names() and algorithms.get(algorithm)
    return bool(known and known.parts and not known.accumulates)


class _Only(NamedTuple):
    """Where it ``applies``, because of the value of field ``cause``, ``field`` has one of ``values``."""

    field: str
    values: tuple[Any, ...]
    cause: str
    applies: Callable[["LayerPolicy"], bool]
    why: str = ""


def _sums(one: "LayerPolicy") -> bool:
    return accumulates(one.algorithm)


def _three_level(one: "LayerPolicy") -> bool:
    return one.algorithm == THREE_LEVEL


def _single_tokens(one: "LayerPolicy") -> bool:
    return one.granularity != "page" and one.algorithm != DENSE


def _unscored(one: "LayerPolicy") -> bool:
    return not has_scores(one.algorithm)


def _by_maximum(one: "LayerPolicy") -> bool:
    return one.group_reduce != "softmax_mean"


_NO_ESTIMATE = ", which ranks by no estimate of a softmax (such as 'cuboid' does)"
_NO_SHARES = ": only 'softmax_mean' estimates shares"
_OF_PAGES = ": a share of the softmax is estimated of pages"
ONE_NUMBER = "one number"
"""Stands in a table for every budget that is no list."""

_TOGETHER = (
    _Only("top_p", (1,), "algorithm", _unscored, _NO_ESTIMATE),
    _Only("top_p", (1,), "group_reduce", _by_maximum, _NO_SHARES),
    _Only("dense_below", (0,), "algorithm", _unscored, _NO_ESTIMATE),
    _Only("dense_below", (0,), "group_reduce", _by_maximum, _NO_SHARES),
    _Only(
        "dense_below",
        (0,),
        "placement",
        lambda one: one.placement == "host",
        ", whose pool does not hold all pages",
    ),
    _Only("group_reduce", ("softmax_mean",), "algorithm", _sums, ", which adds up shares of it"),
    _Only("budget", (ONE_NUMBER,), "algorithm", _sums),
    _Only(
        "prefetch",
        ("none", "next_rank"),
        "algorithm",
        _sums,
        ": a guess at a query would be added up like a query",
    ),
    _Only(
        "unselected",
        ("drop",),
        "algorithm",
        _three_level,
        ", in which prototypes stand for all that is left out",
    ),
    _Only(
        "prefetch",
        ("none",),
        "algorithm",
        _three_level,
        ", whose pages have no ranks and follow no query",
    ),
    _Only(
        "budget",
        (ONE_NUMBER,),
        "algorithm",
        _three_level,
        ", whose pages are the same for all KV heads",
    ),
    _Only(
        "placement",
        ("device",),
        "granularity",
        _single_tokens,
        ": the host tier moves whole pages",
    ),
    _Only(
        "prefetch",
        ("none",),
        "granularity",
        _single_tokens,
        ": pages are loaded ahead, not tokens",
    ),
    _Only("top_p", (1,), "granularity", _single_tokens, _OF_PAGES),
    _Only("dense_below", (0,), "granularity", _single_tokens, _OF_PAGES),
    _Only("budget", (ONE_NUMBER,), "granularity", _single_tokens),
    _Only("unselected", ("drop",), "granularity", _single_tokens, ": pages are left out in part"),
    _Only(
        "algorithm",
        ("cuboid", THREE_LEVEL),
        "granularity",
        lambda one: one.granularity == "token" and one.algorithm != DENSE,
        ": the bits of a token are about the one, and the other chooses by position",
    ),
)

NO_EFFECT: dict[str, tuple[str, Callable[["LayerPolicy"], bool]]] = {
    "decay": ("algorithm 'heavy_hitters'", _sums),
    "prototypes": ("algorithm 'three_level'", _three_level),
    "first_stage": ("granularity 'two_stage'", lambda one: one.granularity == "two_stage"),
    "group_reduce": (
        "an algorithm with page scores",
        lambda one: has_scores(one.algorithm) or _sums(one),
    ),
    "min_budget": ("a top_p below 1", lambda one: one.top_p < 1),
}
"""Fields that do nothing by themselves, what they need, and whether it is there.

Not those of ``placement``, which may be tried both ways without a change to anything else.
"""


def checked(policy: "LayerPolicy") -> dict[str, Any]:
    """The fields of a policy that are kept otherwise than they were given: lists as tuples, numbers as floats.

    Raises:
        PolicyError: a field is out of range, of the wrong type, or excluded by another.
    """
    check_choice("algorithm", policy.algorithm, algorithm_names())
    _check_budget(policy.budget)
    _check_page_size(policy.page_size)
    for name, valid in CHOICES.items():
        check_choice(name, getattr(policy, name), valid)
    for name, (least, most, said) in _INTEGERS.items():
        value = getattr(policy, name)
        if type(value) is not int or not least <= value <= most:
            refuse(name, value, said)
    for name, (holds, said) in _NUMBERS.items():
        value = getattr(policy, name)
        if type(value) not in (int, float) or not holds(value):
            refuse(name, value, said)
    for only in _TOGETHER:
        _check_together(policy, only)
    _check_order(policy)
    budget = policy.budget
    kept: dict[str, Any] = {"budget": tuple(budget) if isinstance(budget, list) else budget}
    return kept | {name: float(getattr(policy, name)) for name in _NUMBERS}


def _check_budget(budget: Any) -> None:
    each = budget if isinstance(budget, list | tuple) else (budget,)
    tokens = bool(each) and all(type(one) is int and one >= 1 for one in each)
    if not tokens and not (type(budget) is float and 0 < budget <= 1):
        refuse(
            "budget",
            budget,
            "an int >= 1 (tokens), a float in (0, 1] (a fraction of the attendable length) "
            "or a list of ints >= 1 (tokens of each KV head)",
        )


def _check_page_size(size: Any) -> None:
    if size != AUTO and not (type(size) is int and size in PAGE_SIZES):
        hint = did_you_mean(size, (AUTO,))
        refuse("page_size", size, f"{listed(PAGE_SIZES)} (tokens) or {AUTO!r}{hint}")


def _check_together(policy: "LayerPolicy", only: _Only) -> None:
    value = getattr(policy, only.field)
    several = isinstance(value, list | tuple)
    fits = not several if only.values == (ONE_NUMBER,) else value in only.values
    if fits or not only.applies(policy):
        return
    said = ONE_NUMBER if only.values == (ONE_NUMBER,) else listed(only.values)
    cause = f"with {only.cause} {getattr(policy, only.cause)!r}"
    refuse(only.field, list(value) if several else value, f"{said} {cause}{only.why}")


def _check_order(policy: "LayerPolicy") -> None:
    """Numbers that must not be above or below others, and algorithms that single tokens cannot follow."""
    room = 1 + policy.ahead
    if policy.prefetch == "next_rank" and policy.pool < room:
        refuse(
            "pool",
            policy.pool,
            f"at least {room:g} with prefetch 'next_rank' and ahead {policy.ahead:g}: "
            "the pool holds the selection and what is loaded ahead",
        )
    several = isinstance(policy.budget, list | tuple)
    least = min(policy.budget) if several else policy.budget  # type: ignore[arg-type]
    if policy.top_p < 1 and isinstance(least, int) and policy.min_budget > least:
        refuse(
            "min_budget",
            policy.min_budget,
            f"at most the {'smallest ' if several else ''}budget ({least} tokens) with top_p {policy.top_p:g}; "
            "give 'min_budget' beside a smaller budget",
        )
    if policy.dense_below > policy.top_p:
        valid = f"at most top_p ({policy.top_p:g}), at which rows stop"
        refuse("dense_below", policy.dense_below, valid)
    if policy.monitor_bound and not policy.monitor:
        valid = "0 without a monitor: give 'monitor' in steps, such as 64"
        refuse("monitor_bound", policy.monitor_bound, valid)
    two_stage = policy.granularity == "two_stage" and policy.algorithm != DENSE
    if two_stage and not has_scores(policy.algorithm):
        valid = "one with page scores, such as 'cuboid', with granularity 'two_stage'"
        refuse("algorithm", policy.algorithm, valid)
