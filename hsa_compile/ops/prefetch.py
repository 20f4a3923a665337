"""``hsa::prefetch``: pages for later, copied while the step goes on.

    keys, values, loads, counts, pool_keys, pool_values    as of ``hsa::fetch``; copied are the ``counts[..., AHEAD]``
                                                           entries behind the first ``counts[..., LOADS]``
    ->
    held [N] int32    garbage; memory of the copy

On a GPU the copy runs beside what comes next, and nothing waits for it until ``hsa::join_prefetch``: its slots must be
those of no page that is read before.
"""

from torch import Tensor

from hsa_compile.runtime import streams

from ._library import define
from .fetch import fetch

define(
    "prefetch(Tensor keys, Tensor values, Tensor loads, Tensor counts, Tensor(a!) pool_keys, Tensor(b!) pool_values, "
    "int page_size) -> Tensor"
)

MOST_PROGRAMS = 1024


def prefetch(
    keys: Tensor,
    values: Tensor,
    loads: Tensor,
    counts: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    page_size: int,
) -> Tensor:
    """What ``hsa::fetch`` does, of other entries; on a GPU by its kernel."""
    arguments = (keys, values, loads, counts, pool_keys, pool_values, page_size)
    held = fake(*arguments)
    if pool_keys.device.type == "cuda":
        from hsa_compile.lowering import standalone

        with streams.beside(pool_keys.device):
            standalone.fetch(*arguments, ahead=True, make=lambda size, **_: held[: size[0]])
    else:
        fetch(*arguments, ahead=True)
    return held


def fake(
    keys: Tensor,
    values: Tensor,
    loads: Tensor,
    counts: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    page_size: int,
) -> Tensor:
    return loads.new_empty((MOST_PROGRAMS,))
