"""Which compiled graphs belong to which model: by what was compiled, and by the parameters and buffers used."""

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
    root: weakref.ref[Any] | None
    """The module or function that was compiled; a graph below a graph break may use no parameter of it."""
    tensors: list[weakref.ref[torch.Tensor]]
    explanation: Explanation
    program: weakref.ref[Program] | None = None
    compiler: Any = None

    def lives(self) -> bool:
        return any(
            held() is not None for held in (*self.tensors, *((self.root,) if self.root else ()))
        )


_ENTRIES: list[_Entry] = []


def _root_of(compiled: Any) -> Any:
    """What stands for a compiled callable: its module, or the function."""
    module = compat.module_of(compiled)
    return compat.original_callable(compiled) if module is None else module


def add(
    root: compat.CompiledRoot,
    inputs: Sequence[object],
    explanation: Explanation,
    program: Program | None = None,
) -> None:
    """Remember a compiled graph of ``root``; it is forgotten with its callable and parameters."""
    _ENTRIES[:] = [entry for entry in _ENTRIES if entry.lives()]
    tensors = [
        weakref.ref(held)
        for held in inputs
        if isinstance(held, torch.Tensor) and not compat.is_fake(held)
    ]
    try:
        owner = None if root.callable is None else weakref.ref(_root_of(root.callable))
    except TypeError:  # such as a callable of a class with slots
        owner = None
    held = None if program is None else weakref.ref(program)
    _ENTRIES.append(_Entry(owner, tensors, explanation, held, root.compiler))


def forget(compiled: Any) -> None:
    """Forget the graphs of a compiled function, which its model would otherwise be told to have."""
    root = _root_of(compiled)
    _ENTRIES[:] = [entry for entry in _ENTRIES if entry.root is None or entry.root() is not root]


def _of(model: Any) -> list[_Entry]:
    """Entries of a model; of one that was compiled, those of its backend and options."""
    model = compat.without_partials(model)
    entries, compiler = _of_all(model), compat.compiler_of(model)
    if compiler is None:
        return entries
    return [entry for entry in entries if entry.compiler in (None, compiler)]


def _of_all(model: Any) -> list[_Entry]:
    root = _root_of(model)
    if not isinstance(root, torch.nn.Module):
        if not callable(root):
            raise HsaError(
                f"{model!r} is not valid; "
                "valid: an nn.Module, a compiled module or function, or a bound method of a module"
            )
        return [entry for entry in _ENTRIES if entry.root is not None and entry.root() is root]
    mine = {id(held) for held in (*root.modules(), *root.parameters(), *root.buffers())}
    # Objects compared are alive at once, so equal ids are equal objects.
    return [
        entry
        for entry in _ENTRIES
        if any(
            held is not None and id(held) in mine
            for held in (entry.root and entry.root(), *(reference() for reference in entry.tensors))
        )
    ]


def explanations(model: Any) -> list[Explanation]:
    """Explanations of the graphs compiled for ``model``, oldest first."""
    return [entry.explanation for entry in _of(model)]


def programs(model: Any) -> list[Program]:
    """Live programs of ``model`` that hold rewritten attention, oldest first."""
    found = [entry.program() for entry in _of(model) if entry.program is not None]
    return [program for program in found if program is not None]
