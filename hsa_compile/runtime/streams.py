"""The streams beside the current one, one a device: on which pages are copied ahead, and on which quality is measured.

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
    with _forked(side_stream(device), device):
        yield


@functools.cache
def watching_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def watching(device: torch.device) -> Iterator[None]:
    """What is launched inside runs after what was queued before, on a stream that nothing ever waits for.

    It is not the one of :func:`beside`, whose copies steps do wait for.
    """
    with _forked(watching_stream(device), device):
        yield


@contextlib.contextmanager
def _forked(stream: torch.cuda.Stream, device: torch.device) -> Iterator[None]:
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def join(device: torch.device) -> None:
    torch.cuda.current_stream(device).wait_stream(side_stream(device))
