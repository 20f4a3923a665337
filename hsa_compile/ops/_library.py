"""The ``hsa`` operator namespace: schemas, implementations and fakes are registered here and nowhere else."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps

import torch

_LIBRARY = torch.library.Library("hsa", "DEF")


def define(schema: str) -> None:
    """Declare ``hsa::<schema>``; calls must keep the strides that they were traced with flexible."""
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))


def implement(name: str, function: Callable[..., object], fake: Callable[..., object]) -> None:
    """Give ``hsa::<name>`` its PyTorch implementation for every device, and its fake.

    It computes in the dtypes that it chooses, whatever ``torch.autocast`` is on around it.
    """

    @wraps(function)
    def without_autocast(*args: object, **kwargs: object) -> object:
        on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        with ExitStack() as stack:
            for device in on:
                stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    _LIBRARY.impl(name, without_autocast, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hsa::{name}", fake, lib=_LIBRARY)
