"""Every template compiles ahead of time for the GPUs that the Triton wheel knows, with none of them there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hsa_compile import algorithms, templates
from hsa_compile.lowering import options, standalone
from hsa_compile.lowering.options import Config, Constants, Rows
from hsa_compile.ops.signs import signs_width

from .interpreted import Check, child_process

pytest.importorskip("triton")

HOPPER_SHARED_BYTES = 232448


@dataclass(frozen=True)
class Kernel:
    """What a kernel is compiled for."""

    constants: Constants
    configs: list[Config]
    inputs: dict[str, Tensor]
    output: Tensor


@dataclass(frozen=True)
class Case:
    """A decode step over 64K tokens."""

    dtype: torch.dtype = torch.bfloat16
    dim: int = 128
    value_dim: int = 128
    group: int = 4
    page: int = 32
    batch: int = 4
    kv_heads: int = 8
    tokens: int = 65536
    algorithm: str = "cuboid"
    per_head: bool = False
    bias: bool = False
    known_pages: bool = True
    pool: bool = False
    fetches: bool = False
    softcap: float = 0.0
    top_p: float = 1.0
    head_pages: tuple[int, ...] = ()
    dense_below: float = 0.0
    ragged: bool = False
    decay: float = 0.0
    written: int = 1
    signs: bool = False
    chosen: str = ""

    def kernel(self, name: str) -> Kernel:
        heads, pages = self.kv_heads * self.group, self.tokens // self.page
        rows = Rows(batch=self.per_head, heads=self.per_head)
        bits = meta(*((self.batch, heads) if self.per_head else (1, 1)), pages, dtype=torch.int64)
        slots, splits, floating = 2048 // self.page, 16, torch.float32
        q = meta(self.batch, heads, 1, self.dim, dtype=self.dtype)
        keys = meta(self.batch, self.kv_heads, self.tokens, self.dim, dtype=self.dtype)
        values = meta(self.batch, self.kv_heads, self.tokens, self.value_dim, dtype=self.dtype)
        width = algorithms.summary_width(self.algorithm, self.dim)
        summary = meta(self.batch, self.kv_heads, pages, width, dtype=self.dtype)
        scores = meta(self.batch, heads, pages, dtype=floating)
        ids = meta(self.batch, self.kv_heads, slots, dtype=torch.int32)
        acc = meta(self.batch, heads, splits, self.value_dim, dtype=floating)
        lse = meta(self.batch, heads, splits, dtype=floating)
        if name == "summarize":
            group = self.group if self.per_head else 1
            inputs = {
                "keys": keys,
                "bits": bits,
                "position": meta(1, dtype=torch.int64),
                "summary": summary,
                "covered": meta(self.batch, self.kv_heads, pages, 2, dtype=torch.int64),
            }
            if self.decay:
                inputs["covered"] = meta(self.batch, self.kv_heads, pages, 3, dtype=torch.int64)
            if self.signs:
                words = signs_width(self.page, self.dim)
                shape = (self.batch, self.kv_heads, pages, words)
                inputs["signs"] = meta(*shape, dtype=torch.int64)
            if self.pool:
                inputs["tail"] = meta(
                    self.batch, self.kv_heads, self.page, self.dim, dtype=self.dtype
                )
            return Kernel(
                options.summarize(
                    self.algorithm,
                    self.kv_heads,
                    group,
                    self.dim,
                    self.page,
                    rows,
                    False,
                    self.pool,
                    self.written,
                    self.decay > 0,
                    self.signs,
                ),
                options.summarize_configs(self.page, self.dim),
                inputs,
                meta(self.batch, self.kv_heads, dtype=torch.int32),
            )
        if name == "page_scores":
            return Kernel(
                options.page_scores(self.algorithm, self.kv_heads, self.group, self.dim, rows),
                options.page_scores_configs(
                    self.dtype.itemsize, width, self.batch * self.kv_heads, pages
                ),
                {"q": q, "summary": summary, "bits": bits},
                scores,
            )
        if name == "token_scores":
            bias = meta(1, 1, 1, self.tokens, dtype=self.dtype)
            index = {"keys": keys, "pages": ids}
            if self.signs:
                words = signs_width(self.page, self.dim)
                held = meta(self.batch, self.kv_heads, pages, words, dtype=torch.int64)
                index = {"summary": summary, "signs": held}
            return Kernel(
                options.token_scores(
                    0.1, self.kv_heads, self.group, self.dim, self.page, rows,
                    Rows(False, False) if self.bias else None, self.softcap, self.signs,
                ),
                options.token_scores_configs(
                    self.dtype.itemsize, self.dim, self.page, self.signs
                ),
                {"q": q, **index, "bits": bits, **({"bias": bias} if self.bias else {})},
                meta(self.batch, heads, self.tokens if self.signs else 2048, dtype=floating),
            )  # fmt: skip
        if name == "top_pages" and self.chosen:
            candidates = 8192 if self.chosen == "named" else self.tokens
            known = candidates if self.known_pages else None
            constants = options.top_pages(
                1.0, "softmax_mean", self.kv_heads, self.group, 1, Rows(False, False), 2048, 0, 1, 32,
                known, tokens=True, named=self.page if self.chosen == "named" else 0,
            )  # fmt: skip
            row = (self.batch, self.kv_heads)
            inputs = {"scores": meta(self.batch, heads, candidates, dtype=floating)}
            if self.chosen == "named":
                inputs["pages"] = meta(*row, candidates // self.page, dtype=torch.int32)
                inputs["seen"] = meta(*row, 2, dtype=torch.int64)
            inputs["ids"] = meta(*row, 2048, dtype=torch.int32)
            if not constants["SINGLE"]:
                inputs["order"] = meta(*row, candidates, dtype=torch.int32)
            return Kernel(
                constants,
                options.top_pages_configs(int(constants["BLOCK"]), int(constants["GROUP_PAD"])),
                inputs,
                meta(*row, 2, dtype=torch.int64),
            )
        if name == "top_pages":
            constants = options.top_pages(
                0.1, "softmax_mean", self.kv_heads, self.group, self.page, rows, slots, 0, 1, 32,
                pages if self.known_pages else None, 0, self.algorithm == "streaming", self.top_p, 8,
                self.head_pages, self.dense_below, self.decay,
            )  # fmt: skip
            inputs = {} if self.algorithm == "streaming" else {"scores": scores}
            inputs |= {"bits": bits, "ids": ids}
            if self.decay:
                inputs["covered"] = meta(self.batch, self.kv_heads, pages, 3, dtype=torch.int64)
            if not constants["SINGLE"]:
                inputs["order"] = meta(self.batch, self.kv_heads, pages, dtype=torch.int32)
            return Kernel(
                constants,
                options.top_pages_configs(int(constants["BLOCK"]), int(constants["GROUP_PAD"])),
                inputs,
                meta(self.batch, self.kv_heads, 2, dtype=torch.int64),
            )
        if name == "append":
            group, held = self.group if self.per_head else 1, (2 * slots, self.page)
            row = (self.batch, self.kv_heads)
            return Kernel(
                options.append(
                    self.kv_heads, group, self.dim, self.value_dim, self.page, rows, self.per_head
                ),
                options.append_configs(),
                {
                    "keys": keys,
                    "k": meta(*row, 1, self.dim, dtype=self.dtype),
                    "v": meta(*row, 1, self.value_dim, dtype=self.dtype),
                    "bits": bits,
                    "position": meta(self.batch if self.per_head else 1, dtype=torch.int64),
                    "covered": meta(*row, pages, 2, dtype=torch.int64),
                    "table": meta(*row, pages, dtype=torch.int32),
                    "owner": meta(*row, 2 * slots, dtype=torch.int32),
                    "pool_keys": meta(*row, *held, self.dim, dtype=self.dtype),
                    "pool_values": meta(*row, *held, self.value_dim, dtype=self.dtype),
                },
                meta(*row, dtype=torch.int32),
            )
        if name == "diff":
            state = {
                "table": meta(self.batch, self.kv_heads, pages, dtype=torch.int32),
                "owner": meta(self.batch, self.kv_heads, 2 * slots, dtype=torch.int32),
                "used": meta(self.batch, self.kv_heads, 2 * slots, dtype=torch.int32),
                "clock": meta(self.batch, self.kv_heads, dtype=torch.int32),
            }
            known = slots if self.known_pages else None
            constants = options.diff(self.kv_heads, self.page, known, 2 * slots, self.per_head)
            return Kernel(
                constants,
                options.diff_configs(int(constants["SLOTS_PAD"])),
                {
                    "ids": ids,
                    "position": meta(self.batch if self.per_head else 1, dtype=torch.int64),
                    **state,
                    "loads": meta(self.batch, self.kv_heads, slots, 2, dtype=torch.int32),
                    "counts": meta(self.batch, self.kv_heads, 3, dtype=torch.int32),
                },
                ids,
            )
        if name == "fetch":
            known_rows = self.batch * self.kv_heads if self.known_pages else None
            row_bytes = self.dtype.itemsize * options.dim_pad(max(self.dim, self.value_dim))
            pool = (self.batch, self.kv_heads, 2 * slots, self.page)
            return Kernel(
                options.fetch(self.kv_heads, self.dim, self.value_dim, self.page, known_rows, 132),
                options.fetch_configs(row_bytes, self.page),
                {
                    "keys": keys,
                    "values": values,
                    "loads": meta(self.batch, self.kv_heads, slots, 2, dtype=torch.int32),
                    "counts": meta(self.batch, self.kv_heads, 3, dtype=torch.int32),
                    "pool_keys": meta(*pool, self.dim, dtype=self.dtype),
                    "pool_values": meta(*pool, self.value_dim, dtype=self.dtype),
                },
                meta(264, dtype=torch.int32),
            )
        if name == "index_scores":
            row = (self.batch, self.written)
            return Kernel(
                options.index_scores(0.1, self.written, heads, self.dim),
                options.index_scores_configs(self.dtype.itemsize, heads, self.dim),
                {
                    "q": meta(*row, heads, self.dim, dtype=self.dtype),
                    "k": meta(self.batch, self.tokens, self.dim, dtype=self.dtype),
                    "weights": meta(*row, heads, dtype=floating),
                },
                meta(*row, self.tokens, dtype=floating),
            )
        if name == "sparse_attention":
            inputs = {"q": q, "keys": keys, "values": values, "ids": ids, "bits": bits}
            if self.pool:
                held = (self.batch, self.kv_heads, 2 * slots, self.page)
                inputs["keys"] = meta(*held, self.dim, dtype=self.dtype)
                inputs["values"] = meta(*held, self.value_dim, dtype=self.dtype)
                inputs["slots"] = ids
                if self.fetches:
                    inputs |= {"full_keys": keys, "full_values": values}
            if self.bias:
                inputs["bias"] = meta(1, 1, 1, self.tokens, dtype=self.dtype)
            row_bytes = self.dtype.itemsize * options.dim_pad(max(self.dim, self.value_dim))
            return Kernel(
                options.sparse_attention(
                    0.1, self.kv_heads, self.group, self.dim, self.value_dim, self.page, rows,
                    Rows(False, False) if self.bias else None, splits, self.pool, self.softcap,
                    self.fetches, self.ragged,
                ),
                options.sparse_attention_configs(row_bytes, self.page, 2048 // splits),
                {**inputs, "lse": lse},
                acc,
            )  # fmt: skip
        return Kernel(
            options.merge_splits(heads, self.value_dim, splits),
            options.merge_splits_configs(self.value_dim, splits),
            {"acc": acc, "part_lse": lse, "lse": meta(self.batch, heads, 1, dtype=floating)},
            meta(self.batch, heads, 1, self.value_dim, dtype=self.dtype),
        )


def meta(*size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def check_compiles(
    case: Case, name: str, all_configs: bool = False, early: bool = False, literal: bool = True
) -> None:
    kernel = case.kernel(name)
    for config in kernel.configs if all_configs else kernel.configs[:1]:
        constants = {**kernel.constants, "PDL": early}
        compiled = standalone.compile_ahead(
            name, constants, config, kernel.inputs, kernel.output, literal=literal
        )
        assert compiled.metadata.shared <= HOPPER_SHARED_BYTES
        assert ("griddepcontrol.wait" in compiled.asm["ptx"]) == early


def check_compiles_for_amd(case: Case, name: str) -> None:
    kernel = case.kernel(name)
    config = Config(kernel.configs[0].blocks, 4, 1)
    compiled = standalone.compile_ahead(
        name, kernel.constants, config, kernel.inputs, kernel.output, backend="hip", arch="gfx942"
    )
    assert compiled.asm["hsaco"]


@pytest.fixture(scope="module")
def child() -> Iterator[Check]:
    with child_process(interpret=False) as run:
        yield run


@pytest.mark.parametrize("name", templates.NAMES)
def test_compiles_for_hopper(child: Check, name: str) -> None:
    child(check_compiles, Case(), name, early=True)
    child(check_compiles, Case(dtype=torch.float32, dim=80, value_dim=64, group=1), name)


@pytest.mark.parametrize("name", ["top_pages", "append", "sparse_attention"])
def test_compiles_with_a_row_of_the_mask_a_head(child: Check, name: str) -> None:
    child(check_compiles, Case(per_head=True, bias=True, page=64, known_pages=False), name)


@pytest.mark.parametrize("literal", [True, False])
def test_summaries_with_a_tail_compile(child: Check, literal: bool) -> None:
    child(check_compiles, Case(pool=True), "summarize", early=True, literal=literal)


@pytest.mark.parametrize("written", [0, 5, 16])
def test_summaries_of_several_tokens_compile(child: Check, written: int) -> None:
    child(check_compiles, Case(written=written), "summarize", early=True)
    case = Case(written=written, per_head=True, known_pages=False)
    child(check_compiles, case, "summarize", literal=False)


def test_signs_compile(child: Check) -> None:
    child(check_compiles, Case(signs=True), "summarize", early=True)
    case = Case(signs=True, dim=80, dtype=torch.float32, per_head=True)
    child(check_compiles, case, "summarize", literal=False)


@pytest.mark.parametrize("name", ["page_scores", "top_pages", "sparse_attention"])
@pytest.mark.parametrize("group", [20, pytest.param(64, marks=pytest.mark.slow)])
def test_several_query_tokens_compile(child: Check, name: str, group: int) -> None:
    """Four and more heads a KV head, five and more tokens each, under a mask and a bias with a row each."""
    child(check_compiles, Case(group=group, per_head=True, bias=True), name, early=True)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    "more",
    [
        {"top_p": 0.9},
        {"algorithm": "streaming"},
        {"top_p": 0.9, "head_pages": (64, 32) * 4},
        {"dense_below": 0.5},
        {"decay": 0.99},
    ],
    ids=str,
)
def test_other_selections_compile(child: Check, more: dict[str, Any], known: bool) -> None:
    case = Case(known_pages=known, **more)
    child(check_compiles, case, "top_pages", early=True)
    child(check_compiles, case, "top_pages", literal=False)
    child(check_compiles, case, "summarize", early=True)


@pytest.mark.parametrize(
    ("chosen", "known"),
    [
        ("named", True),
        *(
            pytest.param(chosen, known, marks=pytest.mark.slow)
            for chosen, known in (("named", False), ("all", True), ("all", False))
        ),
    ],
)
def test_choices_of_tokens_compile(child: Check, chosen: str, known: bool) -> None:
    case = Case(chosen=chosen, signs=chosen == "all", known_pages=known)
    child(check_compiles, case, "top_pages", early=True)
    child(check_compiles, case, "token_scores", True, early=True)
    case = replace(case, per_head=True, bias=True, softcap=50.0, group=5, page=8, dim=72)
    child(check_compiles, case, "token_scores", literal=False)
    child(check_compiles, replace(case, dtype=torch.float32), "token_scores")


def test_capped_attention_compiles(child: Check) -> None:
    child(check_compiles, Case(softcap=50.0), "sparse_attention", early=True)
    case = Case(softcap=50.0, bias=True, group=1, dtype=torch.float32)
    child(check_compiles, case, "sparse_attention")


@pytest.mark.parametrize("literal", [True, False])
def test_attention_to_ragged_rows_compiles(child: Check, literal: bool) -> None:
    child(check_compiles, Case(ragged=True), "sparse_attention", early=True, literal=literal)


@pytest.mark.parametrize("literal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_attention_to_a_pool_compiles(child: Check, literal: bool) -> None:
    case = Case(pool=True, bias=True, group=1)
    child(check_compiles, Case(pool=True), "sparse_attention", early=True, literal=literal)
    child(check_compiles, case, "sparse_attention", literal=literal)
    fetching = Case(pool=True, fetches=True, page=64)
    child(check_compiles, fetching, "sparse_attention", True, early=True, literal=literal)
    child(check_compiles, replace(case, fetches=True), "sparse_attention", literal=literal)


@pytest.mark.parametrize("name", templates.NAMES)
def test_compiles_with_sizes_as_arguments(child: Check, name: str) -> None:
    child(check_compiles, Case(dim=64, value_dim=64, known_pages=False), name, literal=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["summarize", "page_scores", "token_scores", "fetch", "sparse_attention"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 72, 80, 96, 128, 256])
def test_compiles_for_all_sizes(child: Check, name: str, dtype: torch.dtype, dim: int) -> None:
    case = Case(dtype=dtype, dim=dim, value_dim=dim, algorithm="quest")
    child(check_compiles, case, name, all_configs=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", templates.NAMES)
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("group", [1, 3, 16])
def test_compiles_for_all_groups(child: Check, name: str, page: int, group: int) -> None:
    for per_head in (False, True):
        case = Case(group=group, page=page, per_head=per_head, bias=per_head)
        child(check_compiles, case, name, all_configs=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", templates.NAMES)
def test_compiles_for_amd(child: Check, name: str) -> None:
    backends = pytest.importorskip("triton.backends").backends
    if "amd" not in backends:
        pytest.skip("this Triton has no AMD backend")
    child(check_compiles_for_amd, Case(), name)
