"""Arithmetic on the bits of int64 words, against Python's integers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa_compile.ops.aten import highest_bit, lowest_bit, popcount

words = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.builds(
        lambda high, low: (2**high - 1) ^ (2**low - 1), st.integers(0, 63), st.integers(0, 63)
    ),
)


def unsigned(word: int) -> int:
    return word % 2**64


@given(st.lists(words, min_size=1, max_size=50))
def test_bits(held: list[int]) -> None:
    each = torch.tensor(held)
    assert popcount(each).tolist() == [unsigned(word).bit_count() for word in held]
    some = [word for word in held if word]
    each = torch.tensor(some, dtype=torch.int64)
    assert highest_bit(each).tolist() == [unsigned(word).bit_length() - 1 for word in some]
    lowest = [(unsigned(word) & -unsigned(word)).bit_length() - 1 for word in some]
    assert lowest_bit(each).tolist() == lowest


@pytest.mark.parametrize("count", [1, 5, 64, 333])
def test_compiled(count: int) -> None:
    """As Inductor's C++ computes it, alone and in vectors."""
    generator = torch.Generator().manual_seed(count)
    each = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    each = torch.where(torch.rand(count, generator=generator) < 0.5, each, each >> 40)
    each[0] = -(2**63)

    def bits(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return popcount(x), lowest_bit(x), highest_bit(x)

    torch.testing.assert_close(torch.compile(bits)(each), bits(each), rtol=0, atol=0)
