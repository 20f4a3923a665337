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


def source(name: str) -> str:
    """The template called ``name`` (one of ``NAMES``) as text."""
    return (files(__package__) / f"{name}.py.jinja").read_text(encoding="utf-8")
