"""The stream on which pages are copied ahead, one a device.

A fork waits for what was queued before it, a join makes what is queued after it wait; in between, both streams run.
Both are recorded into a CUDA graph that is being captured.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """What is launched inside runs beside what the current stream is given from here on, until :func:`join`.

    Memory that it uses must be allocated before, and kept until then.
    """
    side = side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


def join(device: torch.device) -> None:
    torch.cuda.current_stream(device).wait_stream(side_stream(device))
