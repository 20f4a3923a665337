"""How Inductor compiles the ``hsa`` ops: on CUDA through the Triton templates of ``hsa_compile.templates``.

``limits`` says what the kernels can take, ``options`` what they are rendered with, ``grids`` how many
programs run; ``kernels`` hands a template to Inductor, and the file named after each op lowers it.
``standalone`` renders the same templates without Inductor.

Importing this package costs nothing; Inductor is loaded by :func:`register`.
"""

from functools import cache


@cache
def register() -> None:
    """Teach Inductor the ops. Calling it again does nothing."""
    import torch

    from .. import compat
    from . import (
        append,
        diff,
        fetch_attention,
        index_scores,
        refine,
        select,
        select_tokens,
        sparse_attention,
        summarize,
    )

    compat.register_lowering(torch.ops.hsa.summarize.default, summarize.lower)
    compat.register_lowering(torch.ops.hsa.select.default, select.lower)
    compat.register_lowering(torch.ops.hsa.select_accumulated.default, select.lower_accumulated)
    compat.register_lowering(torch.ops.hsa.refine.default, refine.lower)
    compat.register_lowering(torch.ops.hsa.select_tokens.default, select_tokens.lower)
    compat.register_lowering(torch.ops.hsa.append.default, append.lower)
    compat.register_lowering(torch.ops.hsa.diff.default, diff.lower)
    compat.register_lowering(torch.ops.hsa.fetch_attention.default, fetch_attention.lower)
    compat.register_lowering(torch.ops.hsa.index_scores.default, index_scores.lower)
    compat.register_lowering(torch.ops.hsa.sparse_attention.default, sparse_attention.lower)
