"""Sources of the Triton kernels: one Jinja template a kernel, rendered by ``hsa_compile.lowering``."""

from importlib.resources import files

NAMES = (
    "summarize",
    "page_scores",
    "top_pages",
    "append",
    "diff",
    "fetch",
    "sparse_attention",
    "merge_splits",
)
# A function that several kernels call, and which.
_SHARED = {"key_mark": ("summarize", "append")}


def source(name: str) -> str:
    """The template called ``name`` (one of ``NAMES``) as text, with the functions that it shares with others."""
    shared = [part for part, users in _SHARED.items() if name in users]
    texts = [
        (files(__package__) / f"{part}.py.jinja").read_text(encoding="utf-8")
        for part in (name, *shared)
    ]
    return "\n\n".join(texts)
