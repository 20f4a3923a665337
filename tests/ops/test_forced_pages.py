"""Sinks, recent and newest tokens under masks with holes: what is always in goes by token, not by page start."""

import pytest
import torch

from hsa_compile.ops.select import forced_pages, select_reference


@pytest.mark.parametrize("trial", range(24))
def test_selection_under_masks_with_holes(trial: int) -> None:
    torch.manual_seed(trial)
    page = (8, 16, 32, 64)[trial % 4]
    tokens = int(torch.randint(1, 300, ()))
    pages = -(-tokens // page)
    hidden = (0.0, 0.3, 0.9, 0.97)[trial % 4]
    mask = torch.rand(2, (1, 4)[trial % 2], 1, tokens) > hidden
    bits = torch.ops.hsa.page_mask(mask, page)
    sink, recent = int(torch.randint(0, 40, ())), int(torch.randint(0, 80, ()))
    slots = min(pages, int(torch.randint(1, pages + 1, ())) + forced_pages(sink, recent, page))
    asked = (
        torch.randn(2, 4, 1, 8), torch.randn(2, 2, pages, 16), bits, 0.3, "cuboid", page,
        slots, max(1, slots - 2), (0, 20000)[trial % 2], sink, recent, ("softmax_mean", "max")[trial % 2],
    )  # fmt: skip
    for got, want in zip(torch.ops.hsa.select(*asked), select_reference(*asked), strict=True):
        assert torch.equal(got, want)


def test_a_hole_inside_the_sinks_by_hand() -> None:
    """Tokens 0 and 40 to 63 can be attended: the first four sinks are token 0 alone, so page 2 is not forced."""
    mask = torch.zeros(1, 1, 1, 64, dtype=torch.bool)
    mask[..., 0] = True
    mask[..., 40:] = True
    bits = torch.ops.hsa.page_mask(mask, 16)
    q, summary = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 4, 4)
    ids, counts = torch.ops.hsa.select(
        q, summary, bits, 1.0, "quest", 16, 3, 1, 0, 36, 1, "softmax_mean"
    )
    # sinks are tokens below 0 + 36, and token 40 is not one; the newest token is on page 3
    assert ids.tolist() == [[[0, 3, -1]]]
    assert counts.tolist() == [[[17, 25]]]
