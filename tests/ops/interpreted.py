"""Kernel templates under Triton's interpreter: the process that they run in, and what their tests share.

Triton reads ``TRITON_INTERPRET`` when it is first imported, and other tests of a session may have
imported it without. So the checks run in a child process, in which every new tensor is filled with
garbage: what a kernel leaves unwritten, or reads unasked, shows.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hsa_compile import algorithms

Check = Callable[..., None]


@dataclass(frozen=True)
class Shape:
    """Heads, sizes and length of a case."""

    batch: int = 2
    kv_heads: int = 2
    group: int = 2
    dim: int = 16
    value_dim: int = 16
    tokens: int = 100
    page: int = 16

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def scale(self) -> float:
        return self.dim**-0.5


def start_interpreter() -> None:
    import triton.runtime.interpreter as interpreter

    torch.set_num_threads(1)
    patch = interpreter._patch_lang_tensor

    def patch_index(tensor: Any, *rest: Any) -> None:
        # Triton 3.6 makes integers of arrays in a way that NumPy 2.5 no longer takes.
        patch(tensor, *rest)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch_index
    dot = interpreter.InterpreterBuilder.create_dot

    def wide_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        # The interpreter multiplies the bits of bfloat16 as integers; tensor cores multiply exactly, into float32.
        return dot(self, *(widened(interpreter, operand) for operand in (a, b)), *rest)

    interpreter.InterpreterBuilder.create_dot = wide_dot
    empty = torch.empty

    def garbage(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -7)

    torch.empty = garbage  # type: ignore[assignment]


def widened(interpreter: Any, handle: Any) -> Any:
    import triton.language as tl

    if handle.dtype.scalar != tl.bfloat16:
        return handle
    data = (handle.data.view("uint16").astype("uint32") << 16).view("float32")
    return interpreter.TensorHandle(data, tl.float32)


def run_check(check: Check, seed: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    torch.manual_seed(seed)
    check(*args, **kwargs)


def make_mask(kind: str, shape: Shape) -> Tensor:
    size = {"row": (1, 1), "batch": (shape.batch, 1), "heads": (shape.batch, shape.heads)}[
        kind.split()[0]
    ]
    mask = torch.rand((*size, 1, shape.tokens)) < 0.7
    if "full" in kind:
        mask.fill_(True)
    if "empty" in kind:
        mask[0, 0] = False
    if "left" in kind:
        mask.fill_(True)
        mask[..., : shape.tokens // 2] = False
    return mask


def poison(cache: Tensor, mask: Tensor, shape: Shape) -> Tensor:
    """NaN wherever no head of a KV head may look."""
    seen = mask[:, :, 0].expand(shape.batch, shape.heads, shape.tokens)
    seen = seen.unflatten(1, (shape.kv_heads, shape.group)).any(2)
    return cache.masked_fill(~seen.unsqueeze(-1), float("nan"))


def make_cache(shape: Shape, dim: int, dtype: torch.dtype, token_major: bool) -> Tensor:
    """[B, Hkv, S, D], also as the permuted view of token-major storage with spare capacity."""
    if not token_major:
        return torch.randn(shape.batch, shape.kv_heads, shape.tokens, dim).to(dtype)
    storage = torch.randn(shape.tokens + 3, shape.batch, shape.kv_heads, dim).to(dtype)
    return storage.permute(1, 2, 0, 3)[:, :, : shape.tokens]


def state(shape: Shape, pages: int, algorithm: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    width = algorithms.summary_width(algorithm, shape.dim)
    # Page-major storage, as states that grow keep it.
    summary = torch.empty(pages, shape.batch, shape.kv_heads, width, dtype=dtype).permute(
        1, 2, 0, 3
    )
    held = algorithms.covered_width(algorithm)
    covered = torch.full((pages, shape.batch, shape.kv_heads, held), -1).permute(1, 2, 0, 3)
    return summary, covered


@contextmanager
def child_process(interpret: bool = True) -> Iterator[Check]:
    """A function that runs a check in one child process; what it raises is raised here."""
    before = os.environ.pop("TRITON_INTERPRET", None)
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            1, mp_context=context, initializer=start_interpreter if interpret else None
        ) as pool:

            def run(check: Check, *args: Any, **kwargs: Any) -> None:
                seed = torch.initial_seed() % 2**31
                pool.submit(run_check, check, seed, args, kwargs).result()

            yield run
    finally:
        os.environ.pop("TRITON_INTERPRET", None)
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before
