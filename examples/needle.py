"""A long text with one fact hidden in it, and the question that asks for the fact."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FACT = "The secret access code of the harbour office is 7421."
QUESTION = "What is the secret access code of the harbour office?"
INSTRUCTION = "Read the text and answer the question after it in one short sentence."
DEFAULT_TOKENS = 4000


class PromptError(Exception):
    """The text, the fact or the question do not make a prompt; the message says why."""


@dataclass(frozen=True)
class Prompt:
    """What the model is given.

    Attributes:
        ids: token ids of the whole prompt.
        text_tokens: about how many of them are the text's.
        fact_at: the place of the fact in the prompt, 0 to 1, or None where none is hidden.
        expected: what a right answer has in it, or None where nothing is expected.
    """

    ids: list[int]
    text_tokens: int
    fact_at: float | None
    expected: str | None


def python_documentation() -> str:
    """The prose of Python's own reference, which every Python carries: some 460,000 characters."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_text(path: str) -> str:
    """The text file that the user named."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read the text {path}: {error}") from error


def expected_answer(fact: str) -> str:
    """What an answer must hold to have found `fact`: the last number in it.

    Raises:
        PromptError: there is no number in it.
    """
    numbers = re.findall(r"\d[\d.,:]*\d|\d", fact)
    if not numbers:
        raise PromptError(
            "the fact has no number in it to look for in the answers; "
            "say with --expect which words a right answer holds"
        )
    return numbers[-1]


def hide(text: str, fact: str, depth: float) -> tuple[str, int]:
    """Put `fact` between two sentences of `text`, at the gap nearest to `depth` (0 to 1).

    Returns:
        The new text and the character at which the fact starts.
    """
    wanted = int(len(text) * depth)
    gaps = [0, len(text), *(m.end() for m in re.finditer(r"[.!?]\s+|\n\s*\n", text))]
    at = min(gaps, key=lambda gap: abs(gap - wanted))
    before, after = text[:at], text[at:]
    lead = "" if not before or before[-1].isspace() else " "
    return f"{before}{lead}{fact} {after}", at + len(lead)


def build(
    tokenizer: Any,
    text: str,
    question: str,
    *,
    fact: str | None,
    depth: float,
    tokens: int | None,
    most: int,
    expected: str | None = None,
) -> Prompt:
    """Cut `text` to size, hide `fact` in it and ask `question` about it.

    Args:
        tokenizer: of `transformers`, a fast one; its chat template is used where it has one.
        tokens: length of the whole prompt in tokens; None takes as much of the text as fits.
        most: tokens that the model has room for.

    Raises:
        PromptError: the text is too short, or the prompt does not fit the model.
    """

    def prompt_ids(body: str) -> list[int]:
        content = f"{INSTRUCTION}\n\n{body}\n\n{INSTRUCTION}\nQuestion: {question}"
        if tokenizer.chat_template is None:
            return tokenizer(content + "\nAnswer:")["input_ids"]
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        return tokenizer(rendered, add_special_tokens=False)["input_ids"]

    if tokens is not None and tokens > most:
        raise PromptError(
            f"--tokens {tokens} is more than the model has room for: {most} tokens of context "
            "once those to be generated are set aside"
        )
    if tokens is not None and tokens < 1:
        raise PromptError(f"--tokens {tokens} must be at least 1")
    if not 0 <= depth <= 1:
        raise PromptError(f"--depth {depth} must be between 0 (the start) and 1 (the end)")

    around = len(prompt_ids(f" {fact} " if fact else ""))
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in offsets["offset_mapping"]]
    size = min(len(ends) + around, most) if tokens is None else tokens
    if size <= around:
        raise PromptError(
            f"{size} tokens leave no room for a text: question and fact alone take {around}"
        )
    if size - around > len(ends):
        raise PromptError(
            f"the text is too short: {len(ends)} tokens, where --tokens {size} needs "
            f"{size - around}; lower --tokens or give a longer --text"
        )

    # Tokens may merge differently at the seams, so the length is checked and not assumed.
    keep = size - around
    while True:
        body = text[: ends[keep - 1]]
        at = None
        if fact:
            body, at = hide(body, fact, depth)
        ids = prompt_ids(body)
        if len(ids) <= size or keep <= 1:
            break
        keep -= max(1, len(ids) - size)
        keep = max(keep, 1)
    fact_at = None if at is None else at / len(body)
    if fact and expected is None:
        expected = expected_answer(fact)
    return Prompt(ids, keep, fact_at, expected)
