"""A template as a node of Inductor's graph."""

import itertools
import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from .. import compat, templates
from ..algorithms import PageKernel
from . import grids
from .options import Config, Constants, Rows, page_kernel

log = logging.getLogger("hsa_compile")

_NUMBERS = itertools.count()

Example = Callable[[Any], torch.Tensor]


@cache
def _template(name: str, kernel: PageKernel | None) -> Any:
    # Inductor knows a template by its name.
    unique = f"hsa_{name}" if kernel is None else f"hsa_{name}_{next(_NUMBERS)}"
    return compat.triton_template(unique, getattr(grids, name), templates.source(name, kernel))


def run_on(device: torch.device) -> bool:
    """Whether the templates are compiled for this kind of device."""
    return device.type == "cuda"


def emit(
    name: str,
    constants: Constants,
    configs: list[Config],
    inputs: Mapping[str, Any],
    output: Any,
    grid_sizes: tuple[Any, ...],
    writes: tuple[str, ...] = (),
    examples: Mapping[str, Example] | None = None,
) -> Any:
    """Add a launch of template ``name`` to the graph; returns the node of its output.

    Args:
        constants: a value for every constant of the template's legend that no configuration sets.
        configs: ways to launch it, best guess first; the others are timed under max-autotune only.
        inputs: the template's tensors, in the order of its ``def_kernel``.
        output: layout of the output.
        grid_sizes: what the grid function takes before the constants.
        writes: which of the inputs are written.
        examples: makers of tensors to time with, for inputs that random numbers do not suit.
    """
    nodes = list(inputs.values())
    early = compat.can_launch_early(nodes[0].get_device())
    choices: list[Any] = []
    problem: Exception | None = None
    for config in configs if compat.max_autotune() else configs[:1]:
        problem = _template(name, page_kernel(constants)).maybe_append_choice(
            choices,
            input_nodes=nodes,
            layout=output,
            mutated_inputs=[inputs[written] for written in writes] or None,
            call_sizes=grid_sizes,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            # A kernel may start, and wait, while the one before it ends; every template waits before it touches memory.
            triton_meta={"launch_pdl": True} if early else None,
            PDL=early,
            **constants,
            **config.blocks,
        )
    if not choices:
        raise RuntimeError(f"no configuration of kernel {name} could be rendered: {problem}")
    position = {tensor: at for at, tensor in enumerate(inputs)}
    return compat.choose_kernel(
        f"hsa_{name}",
        choices,
        nodes,
        output,
        {
            position[tensor]: example
            for tensor, example in (examples or {}).items()
            if tensor in position
        },
    )


def eager(op: torch._ops.OpOverload, reason: str | None, *args: Any) -> Any:
    """Lower to the op's own implementation, and say why where the reason is a limit of the kernels."""
    if reason is not None:
        log.warning("%s runs eagerly: %s", op, reason)
    return compat.lower_to_eager(op, *args)


def written_in_place(nodes: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The buffers of state that a kernel writes, and why it cannot where one is not a plain view of a buffer."""
    written = {name: compat.realize_in_place(node) for name, node in nodes.items()}
    if None in written.values():
        return written, "the state to be written is not a plain view of a buffer"
    return written, None


def unlike_pool(keys: Any, values: Any, pool_keys: Any, pool_values: Any) -> str | None:
    """Why a pool cannot take these keys and values as they are, or None where dtypes agree."""
    for what, held, pool in (("keys", keys, pool_keys), ("values", values, pool_values)):
        if held.get_dtype() != pool.get_dtype():
            return f"{what} are {held.get_dtype()}, those of the pool {pool.get_dtype()}"
    return None


def rows_of(mask: Any) -> Rows:
    """How a packed mask or bias ``[Bm, Hm, ...]`` is laid out."""
    batch, heads = mask.get_size()[:2]
    return Rows(
        batch=not compat.expressions_equal(batch, 1), heads=not compat.expressions_equal(heads, 1)
    )


def full_words(node: Any) -> torch.Tensor:
    """A packed mask in which everything can be attended."""
    size = [compat.expression_hint(n) for n in node.get_size()]
    return torch.full(size, -1, dtype=torch.int64, device=node.get_device())


def spread_pages(pages: int) -> Example:
    """Page ids that are spread over the cache, different for every row, as a selection's are."""

    def example(node: Any) -> torch.Tensor:
        size = [compat.expression_hint(n) for n in node.get_size()]
        ids = torch.randint(0, max(pages - 1, 1), size, dtype=torch.int32, device=node.get_device())
        return ids.sort(-1).values

    return example
