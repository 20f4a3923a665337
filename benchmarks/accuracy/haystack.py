"""The long texts that facts are hidden in: real ones, which every machine with Python has, or the user's own."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.errors import AccuracyError
from hsa_compile.errors import did_you_mean, listed

# Long modules of the standard library, of different authors and subjects.
MODULES = (
    *("argparse", "tarfile", "_pydecimal", "inspect", "turtle", "typing", "pickletools", "doctest"),
    *("difflib", "subprocess", "statistics", "mailbox", "zipfile", "pickle", "ipaddress"),
)
NAMED = ("documentation", "code")
# Many tokenizers take time in proportion to all of a text; no run needs more than this many characters of one.
MOST_CHARACTERS = 4_000_000
_END_OF_SENTENCE = re.compile(r"[.!?](?=\s)|\n")


@dataclass(frozen=True)
class Haystack:
    """A text in tokens.

    Attributes:
        name: "documentation", "code" or the name of a file.
        sha256: of the text; the same name may be another text with another Python.
        ids: all of its token ids.
        gaps: where sentences and lines end, as numbers of the tokens that follow; ascending.
    """

    name: str
    sha256: str
    ids: Sequence[int]
    gaps: Sequence[int]

    def need(self, tokens: int) -> None:
        """Raise an AccuracyError unless there are so many tokens."""
        if len(self.ids) < tokens:
            raise AccuracyError(
                f"text {self.name!r} has {len(self.ids)} tokens, and a sample needs {tokens}; "
                "valid: a longer --text, or shorter --contexts"
            )


def documentation() -> str:
    """The prose of Python's own reference: some 460,000 characters."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def code() -> str:
    """Sources of the standard library: some 900,000 characters."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = [path for name in MODULES if (path := folder / f"{name}.py").is_file()]
    return "\n\n".join(path.read_text(encoding="utf-8") for path in found)


def text_of(name: str) -> str:
    """The text that ``name`` stands for: "documentation", "code", or a file.

    Raises:
        AccuracyError: it is neither.
    """
    if name in NAMED:
        return {"documentation": documentation, "code": code}[name]()
    path = Path(name).expanduser()
    if not path.is_file():
        raise AccuracyError(
            f"--text {name!r} is not valid; valid: {listed(NAMED)} or the path of a text file"
            f"{did_you_mean(name, NAMED)}"
        )
    try:
        return path.read_text(encoding="utf-8")[:MOST_CHARACTERS]
    except UnicodeDecodeError as error:
        raise AccuracyError(f"--text {name!r} is not UTF-8: {error}") from error


def tokenize(name: str, text: str, tokenizer: Any) -> Haystack:
    """``text`` in the tokens of a fast tokenizer, without special ones."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = {match.end() for match in _END_OF_SENTENCE.finditer(text)}
    spans = encoded["offset_mapping"]
    gaps = [i + 1 for i, (begin, end) in enumerate(spans) if end > begin and end in ends]
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return Haystack(
        Path(name).name if name not in NAMED else name, digest, encoded["input_ids"], gaps
    )
