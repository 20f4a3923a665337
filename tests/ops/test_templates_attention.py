"""The templates of sparse attention under Triton's interpreter, against the specification of the op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hsa_compile import ops  # noqa: F401
from hsa_compile.lowering import standalone
from hsa_compile.lowering.options import Config
from hsa_compile.ops.page_mask import page_mask
from hsa_compile.ops.sparse_attention import sparse_attention_reference

from .interpreted import Check, Shape, child_process, make_cache, make_mask, poison

pytest.importorskip("triton")
pytest.importorskip("numpy")


def eager_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    ids: Tensor,
    bits: Tensor,
    bias: Tensor | None,
    shape: Shape,
    softcap: float,
) -> Tensor:
    """The same in the dtype of the inputs throughout, for the error that this dtype has anyway."""
    pages = bits.shape[-1]
    chosen = torch.zeros(shape.batch, shape.kv_heads, pages + 1, dtype=torch.bool)
    chosen.scatter_(-1, torch.where(ids < 0, pages, ids).long(), True)
    inside = chosen[..., :pages].repeat_interleave(shape.page, -1)[..., : shape.tokens]
    seen = (bits.unsqueeze(-1) >> torch.arange(shape.page)) & 1
    seen = seen.flatten(-2)[..., : shape.tokens].bool().expand(shape.batch, shape.heads, -1)
    part = (inside.repeat_interleave(shape.group, 1) & seen).unsqueeze(2)
    k, v = (x.nan_to_num(0).repeat_interleave(shape.group, 1) for x in (keys, values))
    scores = q @ k.mT * shape.scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    weights = torch.softmax(scores.masked_fill(~part, -torch.inf).float(), -1).nan_to_num(0)
    return weights.to(q.dtype) @ v


def check_attention(
    shape: Shape,
    dtype: torch.dtype,
    kind: str,
    slots: int = 4,
    splits: int = 2,
    with_bias: bool = False,
    token_major: bool = False,
    config: Config | None = None,
    softcap: float = 0.0,
    ragged: bool = False,
) -> None:
    mask = make_mask(kind, shape)
    bits = page_mask(mask, shape.page)
    q = torch.randn(shape.batch, shape.heads, 1, shape.dim).to(dtype)
    keys = poison(make_cache(shape, shape.dim, dtype, token_major), mask, shape)
    values = poison(make_cache(shape, shape.value_dim, dtype, token_major), mask, shape)
    bias = torch.randn(*mask.shape[:2], 1, shape.tokens).to(dtype) if with_bias else None
    pages = bits.shape[-1]
    ids = torch.full((shape.batch, shape.kv_heads, slots), -1, dtype=torch.int32)
    for row in ids.flatten(0, 1):
        count = min(int(torch.randint(0, slots + 1, ())), pages)
        row[:count] = torch.randperm(pages)[:count].sort().values
    ids[-1, -1, : min(slots, pages)] = torch.arange(pages - min(slots, pages), pages)
    exact, exact_lse = sparse_attention_reference(
        q.double(), keys.nan_to_num(0).double(), values.nan_to_num(0).double(), ids, None, bits,
        None if bias is None else bias.double(), shape.scale, shape.page, softcap,
    )  # fmt: skip
    out, lse = standalone.sparse_attention(
        q,
        keys,
        values,
        ids,
        None,
        bits,
        bias,
        shape.scale,
        shape.page,
        softcap,
        ragged,
        splits=splits,
        config=config,
    )
    assert out.dtype == dtype and lse.dtype == torch.float32
    error = (out.double() - exact).norm()
    eager = eager_attention(q, keys, values, ids, bits, bias, shape, softcap)
    allowed = (eager.double() - exact).norm()
    assert error <= 2 * allowed + torch.finfo(torch.float32).eps * exact.norm(), (
        f"{error} > 2 * {allowed}"
    )
    torch.testing.assert_close(lse, exact_lse, rtol=1e-5, atol=1e-5)
    assert (out[exact_lse.squeeze(2) == -torch.inf] == 0).all()


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Check]:
    with child_process() as run:
        yield run


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [(64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (256, 256), (96, 64), (64, 128)],
    ids=str,
)
def test_attention_head_sizes(
    interpreted: Check, dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    interpreted(check_attention, Shape(dim=sizes[0], value_dim=sizes[1]), dtype, "batch")


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("kind", ["row full", "heads", "heads empty", "batch left", "batch empty"])
def test_attention_groups_and_masks(interpreted: Check, group: int, kind: str) -> None:
    shape = Shape(group=group, kv_heads=2 if group < 4 else 1)
    interpreted(check_attention, shape, torch.float32, kind, token_major=True)
    interpreted(check_attention, shape, torch.bfloat16, kind, with_bias=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [0.5, 30.0, 1e-3])
@pytest.mark.parametrize("group", [1, 4])
def test_attention_soft_cap(
    interpreted: Check, dtype: torch.dtype, softcap: float, group: int
) -> None:
    """Where scores are as large as the cap, far below, and so far above that the power overflows."""
    shape = Shape(group=group)
    interpreted(check_attention, shape, dtype, "batch left", with_bias=True, softcap=softcap)


@pytest.mark.parametrize("page", [8, 16, 32, 64])
@pytest.mark.parametrize("extra", [None, -1, 0, 1, 200])
def test_attention_lengths(interpreted: Check, page: int, extra: int | None) -> None:
    shape = Shape(page=page, tokens=1 if extra is None else page + extra, batch=1)
    interpreted(check_attention, shape, torch.float16, "row full", with_bias=True)


@pytest.mark.parametrize("splits", [1, 2, 4, 16])
@pytest.mark.parametrize("tokens", [16, 64])
@pytest.mark.parametrize("page", [16, 64])
def test_attention_splits(interpreted: Check, splits: int, tokens: int, page: int) -> None:
    """Blocks of several pages, and of a part of one."""
    config = Config({"BLOCK_TOKENS": tokens, "BLOCK_COPIED": 1}, 4, 2)
    shape = Shape(tokens=300, page=page)
    interpreted(
        check_attention, shape, torch.float32, "heads", slots=11, splits=splits, config=config
    )


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("tokens", [16, 64])
def test_attention_to_ragged_rows(interpreted: Check, splits: int, tokens: int) -> None:
    """Fewer slots than are looked at together, and more; rows that fill none, some and all of them."""
    config = Config({"BLOCK_TOKENS": tokens, "BLOCK_COPIED": 1}, 4, 2)
    rest = {"splits": splits, "config": config, "ragged": True}
    for pages, slots in ((9, 11), (140, 140)):
        shape = Shape(tokens=16 * pages - 3)
        interpreted(check_attention, shape, torch.float32, "batch", slots=slots, **rest)


def check_shared_evenly(filled: int) -> None:
    """No split has more than one page more than another."""
    shape, found = Shape(batch=1, kv_heads=1, tokens=16 * 300), []
    ids = torch.full((1, 1, 300), -1, dtype=torch.int32)
    ids[..., :filled] = torch.arange(filled)
    q = torch.zeros(1, shape.heads, 1, shape.dim)
    keys = torch.zeros(1, 1, shape.tokens, shape.dim)
    launch = standalone.launch

    def recorded(name: str, constants: Any, config: Any, inputs: Any, *rest: Any) -> Tensor:
        found.append(inputs)
        return launch(name, constants, config, inputs, *rest)

    standalone.launch = recorded
    try:
        bits = torch.full((1, 1, 300), 0xFFFF)
        standalone.sparse_attention(
            q, keys, keys, ids, None, bits, None, 1.0, 16, ragged=True, splits=8
        )
    finally:
        standalone.launch = launch
    # Equal scores of zero: the base-2 log-sum-exp of a split counts its tokens.
    pages = found[0]["lse"].exp2().div(16).round()
    assert pages.sum() == filled * shape.heads and pages.max() - pages.min() <= 1


def test_filled_slots_are_shared_evenly(interpreted: Check) -> None:
    for filled in (0, 3, 65, 300):
        interpreted(check_shared_evenly, filled)
