"""Random lives of caches give, step by step, what the rule gives on their content alone (``tests/soak.py``)."""

import os

import pytest

from . import soak
from .conftest import SEED

COUNT = int(os.environ.get("HSA_SOAK", "16"))
BATCHES = 4


@pytest.mark.parametrize("batch", range(BATCHES))
def test_lives(batch: int) -> None:
    steps = 0
    for seed in range(batch, COUNT, BATCHES):
        run = soak.Run(soak.draw(SEED * 1_000_000 + seed))
        run.live()
        steps += run.steps
    assert steps >= COUNT // BATCHES
