"""Which compiled graphs belong to which model: by the parameters and buffers that they were compiled with."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hsa_compile import compat
from hsa_compile.errors import HsaError
from hsa_compile.explain import Explanation
from hsa_compile.runtime.program import Program


@dataclass
class _Entry:
    alive: list[weakref.ref[torch.Tensor]]
    explanation: Explanation
    program: weakref.ref[Program] | None = None


_ENTRIES: list[_Entry] = []


def add(inputs: Sequence[object], explanation: Explanation, program: Program | None = None) -> None:
    """Remember a compiled graph; it is forgotten with its parameters."""
    if not explanation.sites:
        return
    tensors = [
        held for held in inputs if isinstance(held, torch.Tensor) and not compat.is_fake(held)
    ]
    _ENTRIES[:] = [
        entry for entry in _ENTRIES if any(reference() is not None for reference in entry.alive)
    ]
    _ENTRIES.append(
        _Entry(
            [weakref.ref(held) for held in tensors],
            explanation,
            None if program is None else weakref.ref(program),
        )
    )


def _of(model: Any) -> list[_Entry]:
    module = compat.module_of(model)
    if module is None:
        raise HsaError(
            f"{model!r} is not valid; valid: an nn.Module, a compiled module, or a bound method of one"
        )
    mine = {id(held): held for held in (*module.parameters(), *module.buffers())}
    return [
        entry
        for entry in _ENTRIES
        if any(
            id(held) in mine and mine[id(held)] is held
            for held in (r() for r in entry.alive)
            if held is not None
        )
    ]


def explanations(model: Any) -> list[Explanation]:
    """Explanations of the graphs compiled for ``model``, oldest first."""
    return [entry.explanation for entry in _of(model)]


def programs(model: Any) -> list[Program]:
    """Live programs of ``model`` that hold rewritten attention, oldest first."""
    found = [entry.program() for entry in _of(model) if entry.program is not None]
    return [program for program in found if program is not None]
