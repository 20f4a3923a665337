"""The ``hsa`` operator namespace: schemas, implementations and fakes are registered here and nowhere else."""

from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("hsa", "DEF")


def define(schema: str) -> None:
    """Declare ``hsa::<schema>``; calls must keep the strides that they were traced with flexible."""
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))


def implement(name: str, function: Callable[..., object], fake: Callable[..., object]) -> None:
    """Give ``hsa::<name>`` its PyTorch implementation for every device, and its fake."""
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hsa::{name}", fake, lib=_LIBRARY)
