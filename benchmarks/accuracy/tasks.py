"""Samples: a long context, what is asked about it, and what a right answer holds.

The tasks are those of RULER (Hsieh et al., 2024, "RULER: What's the Real Context Size of Your Long-Context Language
Models?"), generated anew and in fewer words:

- ``single``: one number is hidden and asked for;
- ``multi-key``: one of four numbers that are hidden under different names is asked for;
- ``multi-value``: four numbers hidden under one name, all of them asked for;
- ``tracking``: a variable gets a value and other variables its value in turn, as does another chain with another
  value; asked for are all variables of the first chain;
- ``perplexity``: nothing is asked; a real text goes on.

A context has exactly the length that is asked for, in tokens: prompt, text and facts are tokenised on their own and
put together as tokens. Facts are lines of their own, between two sentences or lines of the text. What the model has to
be fed afterwards, token by token, is ``forced``: the question with the beginning of the answer, or the continuation.
"""

from __future__ import annotations

import bisect
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.accuracy.errors import AccuracyError
from benchmarks.accuracy.haystack import Haystack

NEEDLES = ("single", "multi-key", "multi-value", "tracking")
TASKS = (*NEEDLES, "perplexity")
QUESTIONS = ("sparse", "dense")
FACTS = 4
DIGITS = 7
HOPS = 2
ANSWER_TOKENS = {"single": 24, "multi-key": 24, "multi-value": 64, "tracking": 40}

_FIRST = (
    "amber brave calm dusty eager faint gentle hollow icy jolly keen lively mellow narrow olive plain quiet rapid "
    "silent tidy urban vivid wary young zesty"
).split()
_SECOND = (
    "anchor basket candle desert engine forest garden harbour island jacket kettle lantern mirror needle orchard "
    "pencil quarry ribbon saddle tunnel umbrella valley window yard zebra"
).split()
_MARK = "[[the text]]"


@dataclass(frozen=True)
class Sample:
    """One context and what is fed after it.

    Attributes:
        task: one of ``TASKS``.
        index: its number within the task.
        text: name of the haystack.
        context: token ids, exactly as many as asked for.
        forced: token ids fed one by one after it.
        expected: what a right answer holds, each of them.
        answer_tokens: how many tokens are generated at most; 0 for a continuation, whose ``forced`` tokens are
            themselves what is predicted.
        facts: where the facts that are asked for begin, as indices into ``context``.
    """

    task: str
    index: int
    text: str
    context: Sequence[int]
    forced: Sequence[int]
    expected: tuple[str, ...] = ()
    answer_tokens: int = 0
    facts: tuple[int, ...] = ()

    @property
    def steps(self) -> int:
        """Decode steps at most. The last token that is generated is not fed again."""
        return len(self.forced) + max(self.answer_tokens - 1, 0)

    @property
    def depths(self) -> list[float]:
        """``facts`` as shares of the context, 0 to 1."""
        return [round(at / len(self.context), 4) for at in self.facts]


@dataclass(frozen=True)
class Setting:
    """What all samples of a run share.

    Attributes:
        tokenizer: a fast one of transformers.
        haystacks: samples take them in turn.
        samples: of each task and length; depths are spread evenly over so many.
        seed: of names, numbers and places in the text.
        continuation: tokens of a continuation that are predicted.
        question: "sparse": decoded after the context, token by token; "dense": part of the context, but for its last
            token, and prefilled with it.
    """

    tokenizer: Any
    haystacks: Sequence[Haystack]
    samples: int
    seed: int = 0
    continuation: int = 128
    question: str = "sparse"


@dataclass(frozen=True)
class _Plan:
    """A needle task before it meets a text: facts with depths (0 to 1, ascending), and which are asked for."""

    before: str
    after: str
    answer: str
    facts: Sequence[tuple[float, str]]
    asked: Sequence[int]
    expected: Sequence[str]


def score(output: str, expected: Sequence[str]) -> float:
    """The share of ``expected`` that stands in ``output`` as whole words, whatever their case."""
    return sum(_at(output, one) is not None for one in expected) / len(expected)


def complete(output: str, expected: Sequence[str]) -> bool:
    """Whether all of ``expected`` is there and more tokens cannot change that: something follows the last of it."""
    ends = [_at(output, one) for one in expected]
    return all(end is not None and end < len(output) for end in ends)


def _at(output: str, word: str) -> int | None:
    """Where ``word`` ends in ``output``."""
    found = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", output, re.IGNORECASE)
    return None if found is None else found.end()


def make(task: str, index: int, context: int, setting: Setting) -> Sample:
    """Sample number ``index`` of a task, with ``context`` tokens; the same for the same arguments, everywhere.

    Raises:
        AccuracyError: the text is too short, or the context for the facts.
    """
    draw = random.Random(f"{setting.seed}/{task}/{context}/{index}")
    haystack = setting.haystacks[index % len(setting.haystacks)]
    share = (index + 0.5) / setting.samples
    if task == "perplexity":
        return _continuation(index, share, context, haystack, setting)
    return _hide(_PLANS[task](draw, share), task, index, context, haystack, draw, setting)


def _continuation(
    index: int, share: float, context: int, haystack: Haystack, setting: Setting
) -> Sample:
    start = _start(setting.tokenizer)
    length = context - len(start)
    # One more than is fed: every token that is fed predicts the next one.
    haystack.need(length + setting.continuation + 1)
    begin = round(share * (len(haystack.ids) - length - setting.continuation - 1))
    text = list(haystack.ids[begin : begin + length + setting.continuation + 1])
    return Sample(
        "perplexity", index, haystack.name, [*start, *text[:length]], tuple(text[length:])
    )


def _hide(
    plan: _Plan,
    task: str,
    index: int,
    context: int,
    haystack: Haystack,
    draw: random.Random,
    setting: Setting,
) -> Sample:
    """Put the facts of ``plan`` into a part of the text."""
    head, tail = _around(plan, setting.tokenizer)
    facts = [_ids(setting.tokenizer, f"\n{text}\n") for _, text in plan.facts]
    asked_early = tail[:-1] if setting.question == "dense" else []
    length = context - len(head) - len(asked_early) - sum(map(len, facts))
    if length < 1:
        raise AccuracyError(
            f"a context of {context} tokens has no room for task {task!r}, whose prompt and facts take "
            f"{context - length}; valid: longer --contexts"
        )
    haystack.need(length)
    begin = draw.randrange(len(haystack.ids) - length + 1)
    body = haystack.ids[begin : begin + length]
    ids, places, done = list(head), [], 0
    for (depth, _), fact in zip(plan.facts, facts):
        at = max(done, _gap(haystack.gaps, begin, length, round(depth * length)))
        ids += body[done:at]
        places.append(len(ids))
        ids += fact
        done = at
    ids += [*body[done:], *asked_early]
    assert len(ids) == context
    return Sample(
        task,
        index,
        haystack.name,
        ids,
        tuple(tail[len(asked_early) :]),
        tuple(plan.expected),
        ANSWER_TOKENS[task],
        tuple(places[i] for i in plan.asked),
    )


def _gap(gaps: Sequence[int], begin: int, length: int, wanted: int) -> int:
    """The gap nearest to ``wanted``, from 0 to ``length`` within a text that begins at token ``begin``."""
    at = bisect.bisect_left(gaps, begin + wanted)
    near = [gap - begin for gap in gaps[max(at - 1, 0) : at + 1] if 0 <= gap - begin <= length]
    return min([*near, 0, length], key=lambda gap: abs(gap - wanted))


def _around(plan: _Plan, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids before the text and after it; the latter end with the beginning of the answer."""
    if tokenizer.chat_template is None:
        head = [*_start(tokenizer), *_ids(tokenizer, f"{plan.before}\n\n")]
        return head, _ids(tokenizer, f"\n\n{plan.after}\n{plan.answer}")
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{plan.before}\n\n{_MARK}\n\n{plan.after}"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    head_text, _, tail_text = rendered.partition(_MARK)
    return _ids(tokenizer, head_text), _ids(tokenizer, tail_text + plan.answer)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _start(tokenizer: Any) -> list[int]:
    """The token that the tokenizer begins every text with, if there is one."""
    ids = tokenizer("a")["input_ids"]
    return ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []


def _names(draw: random.Random, count: int) -> list[str]:
    firsts, seconds = draw.sample(_FIRST, count), draw.sample(_SECOND, count)
    return [f"{first}-{second}" for first, second in zip(firsts, seconds)]


def _numbers(draw: random.Random, count: int) -> list[str]:
    return [str(n) for n in draw.sample(range(10 ** (DIGITS - 1), 10**DIGITS), count)]


def _fact(name: str, number: str) -> str:
    return f"One of the special magic numbers for {name} is: {number}."


def _needles(
    name: str, facts: Sequence[tuple[float, str]], asked: Sequence[int], expected: Sequence[str]
) -> _Plan:
    several = len(expected) > 1
    what = f"special magic number{'s' if several else ''} for {name}"
    return _Plan(
        "Some special magic numbers are hidden in the following text. Memorize them: I will ask for them afterwards.",
        f"What {'are all the' if several else 'is the'} {what} mentioned in the provided text?",
        f"The {what} mentioned in the provided text {'are' if several else 'is'}",
        facts,
        asked,
        expected,
    )


def _single(draw: random.Random, share: float) -> _Plan:
    (name,), (number,) = _names(draw, 1), _numbers(draw, 1)
    return _needles(name, [(share, _fact(name, number))], [0], [number])


def _multi_key(draw: random.Random, share: float) -> _Plan:
    names, numbers = _names(draw, FACTS), _numbers(draw, FACTS)
    others = [(i + draw.random()) / (FACTS - 1) for i in range(FACTS - 1)]
    facts = [
        (depth, _fact(name, number))
        for depth, name, number in zip([share, *others], names, numbers)
    ]
    ordered = sorted(facts)
    return _needles(names[0], ordered, [ordered.index(facts[0])], [numbers[0]])


def _multi_value(draw: random.Random, share: float) -> _Plan:
    (name,), numbers = _names(draw, 1), _numbers(draw, FACTS)
    facts = [((i + share) / FACTS, _fact(name, number)) for i, number in enumerate(numbers)]
    return _needles(name, facts, range(FACTS), numbers)


def _tracking(draw: random.Random, share: float) -> _Plan:
    values = _numbers(draw, 2)
    count = HOPS + 1
    letters = [
        "".join(pick)
        for pick in zip(*(draw.sample("ABCDEFGHJKLMNPQRSTUVWXYZ", 2 * count) for _ in range(5)))
    ]
    chains = letters[:count], letters[count:]
    facts: list[tuple[float, str]] = []
    for chain, value, offset in zip(chains, values, (0.0, 0.5)):
        given = [value, *(f"VAR {name}" for name in chain)]
        facts += [
            ((i + (share + offset) % 1) / count, f"VAR {name} = {given[i]}")
            for i, name in enumerate(chain)
        ]
    ordered = sorted(facts)
    return _Plan(
        "Memorize and track the chains of variable assignments hidden in the following text.",
        f"Question: Find all variables that are assigned the value {values[0]} in the text above.",
        "Answer: According to the chains of variable assignments in the text above, "
        f"{count} variables are assigned the value {values[0]}. They are: VAR",
        ordered,
        [ordered.index(fact) for fact in facts[:count]],
        chains[0],
    )


_PLANS: dict[str, Callable[[random.Random, float], _Plan]] = {
    "single": _single,
    "multi-key": _multi_key,
    "multi-value": _multi_value,
    "tracking": _tracking,
}
