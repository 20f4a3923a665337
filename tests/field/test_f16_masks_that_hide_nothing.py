"""Tracing makes an all-True mask where eager mode has none, and the two take different paths.

pytorch PR#175274. Right: no mask, an all-True mask and a two-dimensional mask of ones give the same output and the same
decision.
"""

import pytest
import torch
from torch import Tensor

from .helpers import (
    LOSSLESS,
    SPARSE,
    SPARSELY,
    Shape,
    Static,
    by_hand,
    close,
    compile_hsa,
    decisions,
    run_static,
    sdpa,
)

NOTHING = {
    "none": lambda q, keys: None,
    "bool": lambda q, keys: torch.ones(q.shape[0], 1, 1, keys.shape[2], dtype=torch.bool),
    "two-dimensional": lambda q, keys: torch.ones(1, keys.shape[2], dtype=torch.bool),
    "per head": lambda q, keys: torch.ones(1, q.shape[1], 1, keys.shape[2], dtype=torch.bool),
    "zeros": lambda q, keys: torch.zeros(q.shape[0], 1, 1, keys.shape[2]),
    "one number": lambda q, keys: torch.ones(1, 1, 1, 1, dtype=torch.bool),
}


@pytest.mark.parametrize(("attend", "policy"), [(sdpa, SPARSE), (by_hand, LOSSLESS)])
def test_same_output_and_decision(attend, policy: dict) -> None:
    shape = Shape(steps=2, poison=None)
    outs: dict[str, Tensor] = {}
    for name, make in NOTHING.items():
        if attend is by_hand and name == "zeros":
            continue

        def layer(q, keys, values, mask, make=make):
            return attend(q, keys, values, make(q, keys))

        compiled = compile_hsa(Static(layer), policy)
        outs[name] = run_static(compiled, shape)
        assert decisions(compiled) == SPARSELY, name
    for out in outs.values():
        close(out, outs["none"])
