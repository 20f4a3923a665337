"""Sources of the Triton kernels: one Jinja template a kernel, rendered by ``hsa_compile.lowering``."""

import re
import textwrap
from importlib.resources import files

from hsa_compile.algorithms import PageKernel

NAMES = (
    "summarize",
    "page_scores",
    "top_pages",
    "append",
    "diff",
    "fetch",
    "sparse_attention",
    "merge_splits",
    "index_scores",
    "token_scores",
)
# A function that several kernels call, and which.
_SHARED = {"key_mark": ("summarize", "append"), "tangent": ("sparse_attention", "token_scores")}


def source(name: str, kernel: PageKernel | None = None) -> str:
    """The template called ``name`` (one of ``NAMES``) as text, with the functions that it shares with others.

    A line ``<<summary>>`` or ``<<query>>`` stands for the lines of ``kernel``.
    """
    shared = [part for part, users in _SHARED.items() if name in users]
    texts = [
        (files(__package__) / f"{part}.py.jinja").read_text(encoding="utf-8")
        for part in (name, *shared)
    ]
    text = "\n\n".join(texts)
    for part, lines in (("summary", kernel.summary), ("query", kernel.query)) if kernel else ():
        text = re.sub(
            rf"^( *)<<{part}>>$",
            lambda found, lines=lines: textwrap.indent(lines.strip("\n"), found[1]),  # type: ignore[misc]
            text,
            flags=re.MULTILINE,
        )
    return text
