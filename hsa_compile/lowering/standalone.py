"""The kernels without Inductor: the same templates as plain ``triton.jit`` functions.

Tests run them under Triton's interpreter on a CPU, CI compiles them ahead of time for a GPU that is
not there, and they can be launched on one that is. The functions at the end have the signatures of
the ops, and produce what ``hsa_compile.ops`` specifies.
"""

import importlib.util
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import algorithms, templates
from . import grids, options
from .options import Config, Constants, Rows

Make = Callable[..., Tensor]
"""Makes a tensor as ``torch.empty`` does."""

_HEADER = "import triton\nimport triton.language as tl\n\n\n"


@dataclass(frozen=True)
class Rendered:
    """A kernel's source, the arguments that it takes in order, and the name of its function.

    ``sizes`` are the run-time integers: ("keys", "stride", 2) is the stride of dimension 2 of ``keys``.
    """

    source: str
    function: str
    tensors: tuple[str, ...]
    sizes: tuple[tuple[str, str, int], ...]


def render(
    name: str, constants: Constants, literal: Mapping[str, Tensor] | None = None
) -> Rendered:
    """Render template ``name``.

    Args:
        name: one of ``hsa_compile.templates.NAMES``.
        constants: a value for every constant of the template's legend.
        literal: tensors whose sizes and strides are written into the source, as Inductor does where
            they are static; without it they are arguments.
    """
    import jinja2

    constants = {"PDL": False, **constants}
    tensors: list[str] = []
    sizes: dict[tuple[str, str, int], None] = {}
    function = f"hsa_{name}"

    def number(tensor: str, kind: str, dim: int) -> str:
        if literal is not None:
            return str(getattr(literal[tensor], kind)(dim))
        sizes[tensor, kind, dim] = None
        return f"{tensor}_{kind}_{dim}"

    def def_kernel(*names: str) -> str:
        tensors.extend([*names, "output"])
        defines = "".join(
            f"    {key}: tl.constexpr = {value}\n" for key, value in constants.items()
        )
        return f"{_HEADER}@triton.jit\ndef {function}(<ARGUMENTS>):\n{defines}"

    def store_output(
        indices: tuple[str, ...],
        value: str,
        mask: str,
        indent_width: int = 4,
        val_shape: tuple[str, ...] | None = None,
    ) -> str:
        offset = " + ".join(
            f"({at}) * {number('output', 'stride', dim)}" for dim, at in enumerate(indices)
        )
        return f"tl.store(output + ({offset}), {value}, mask={mask})"

    text = (
        jinja2.Environment(undefined=jinja2.StrictUndefined)
        .from_string(templates.source(name, options.page_kernel(constants)))
        .render(
            def_kernel=def_kernel,
            size=lambda tensor, dim: number(tensor, "size", dim),
            stride=lambda tensor, dim: number(tensor, "stride", dim),
            store_output=store_output,
            **constants,
        )
    )
    arguments = [*tensors, *(f"{tensor}_{kind}_{dim}" for tensor, kind, dim in sizes)]
    return Rendered(
        text.replace("<ARGUMENTS>", ", ".join(arguments)), function, tuple(tensors), tuple(sizes)
    )


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hsa_kernels_")


@cache
def _load(rendered: Rendered) -> Callable[..., Any]:
    """The ``triton.jit`` function; Triton reads its source from a file."""
    path = Path(_folder().name) / f"k{sha256(rendered.source.encode()).hexdigest()[:24]}.py"
    path.write_text(rendered.source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, rendered.function)


def launch(
    name: str,
    constants: Constants,
    config: Config,
    inputs: Mapping[str, Tensor],
    output: Tensor,
    grid: tuple[int, int, int],
    literal: bool = False,
) -> Tensor:
    """Run one kernel over ``inputs`` (its tensors by name), into ``output``, which is returned."""
    tensors = {**inputs, "output": output}
    rendered = render(name, {**constants, **config.blocks}, tensors if literal else None)
    numbers = [getattr(tensors[tensor], kind)(dim) for tensor, kind, dim in rendered.sizes]
    kernel: Any = _load(rendered)
    kernel[grid](
        *(tensors[tensor] for tensor in rendered.tensors),
        *numbers,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return output


def compile_ahead(
    name: str,
    constants: Constants,
    config: Config,
    inputs: Mapping[str, Tensor],
    output: Tensor,
    backend: str = "cuda",
    arch: int | str = 90,
    literal: bool = True,
) -> Any:
    """Compile one kernel for a GPU that need not be there; returns Triton's compiled kernel.

    ``inputs`` and ``output`` may be meta tensors: dtypes, sizes and strides are all that is used.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tensors = {**inputs, "output": output}
    rendered = render(name, {**constants, **config.blocks}, tensors if literal else None)
    signature = {tensor: f"*{_TRITON_TYPES[tensors[tensor].dtype]}" for tensor in rendered.tensors}
    signature |= {f"{tensor}_{kind}_{dim}": "i32" for tensor, kind, dim in rendered.sizes}
    aligned: Any = {(at,): [["tt.divisibility", 16]] for at in range(len(rendered.tensors))}
    source = ASTSource(fn=_load(rendered), signature=signature, constexprs={}, attrs=aligned)
    return triton.compile(
        source,
        target=GPUTarget(backend, arch, 32 if backend == "cuda" else 64),
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )


_TRITON_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}


def rows_of(mask: Tensor) -> Rows:
    """How a packed mask or bias ``[Bm, Hm, ...]`` is laid out."""
    return Rows(batch=mask.shape[0] > 1, heads=mask.shape[1] > 1)


def summarize(
    keys: Tensor,
    bits: Tensor,
    position: Tensor,
    summary: Tensor,
    covered: Tensor,
    algorithm: str,
    page_size: int,
    tail: Tensor | None = None,
    written: int = 1,
    signs: Tensor | None = None,
    config: Config | None = None,
) -> None:
    """``hsa::summarize``."""
    batch, kv_heads, _, dim = keys.shape
    group = max(1, bits.shape[1] // kv_heads)
    constants = options.summarize(
        algorithm,
        kv_heads,
        group,
        dim,
        page_size,
        rows_of(bits),
        position.numel() > 1,
        tail is not None,
        written,
        covered.shape[3] > 2,
        signs is not None,
    )
    config = config or options.summarize_configs(page_size, dim)[0]
    inputs = {"keys": keys, "bits": bits, "position": position, "summary": summary}
    inputs["covered"] = covered
    if signs is not None:
        inputs["signs"] = signs
    if tail is not None:
        inputs["tail"] = tail
    launch(
        "summarize",
        constants,
        config,
        inputs,
        torch.empty((batch, kv_heads), dtype=torch.int32, device=keys.device),
        grids.summarize(batch, kv_heads, summary.shape[2], config.blocks),
    )


def page_scores(
    q: Tensor,
    summary: Tensor,
    bits: Tensor,
    algorithm: str,
    config: Config | None = None,
    make: Make = torch.empty,
) -> Tensor:
    """Scores ``[B, Hq, P]`` of all query heads over all pages that hold an attendable token."""
    batch, query_heads, _, dim = q.shape
    kv_heads, pages = summary.shape[1:3]
    config = (
        config
        or options.page_scores_configs(
            summary.element_size(), summary.shape[3], batch * kv_heads, pages
        )[0]
    )
    return launch(
        "page_scores",
        options.page_scores(algorithm, kv_heads, query_heads // kv_heads, dim, rows_of(bits)),
        config,
        {"q": q, "summary": summary, "bits": bits},
        make((batch, query_heads, pages), dtype=torch.float32, device=q.device),
        grids.page_scores(batch, kv_heads, pages, config.blocks),
    )


def index_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    scale: float,
    config: Config | None = None,
    make: Make = torch.empty,
) -> Tensor:
    """``hsa::index_scores``."""
    batch, queries, heads, dim = q.shape
    config = config or options.index_scores_configs(q.element_size(), heads, dim)[0]
    return launch(
        "index_scores",
        options.index_scores(scale, queries, heads, dim),
        config,
        {"q": q, "k": k, "weights": weights},
        make((batch, queries, k.shape[1]), dtype=torch.float32, device=q.device),
        grids.index_scores(batch, queries, k.shape[1], config.blocks),
    )


def select(
    q: Tensor,
    summary: Tensor,
    bits: Tensor,
    scale: float,
    algorithm: str,
    page_size: int,
    slots: int,
    budget_pages: int,
    fraction: int,
    sink: int,
    recent: int,
    group_reduce: str,
    more: int = 0,
    bias: Tensor | None = None,
    top_p: float = 1.0,
    floor: int = 0,
    head_pages: Sequence[int] = (),
    dense_below: float = 0.0,
    known_pages: bool = True,
    config: Config | None = None,
    scores: Tensor | None = None,
    make: Make = torch.empty,
    covered: Tensor | None = None,
    decay: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """``hsa::select``; without ``known_pages`` as where the number of pages is symbolic.

    With ``covered`` it is ``hsa::select_accumulated``.
    """
    batch, query_heads = q.shape[:2]
    kv_heads, pages = summary.shape[1:3]
    newest_first = algorithms.get(algorithm).parts == 0
    if scores is None and not newest_first:
        scores = page_scores(q, summary, bits, algorithm, make=make)
    if scores is not None and bias is not None:
        scores, scale = scores * scale + bias, 1.0
    constants = options.top_pages(
        scale, group_reduce, kv_heads, query_heads // kv_heads, page_size, rows_of(bits),
        budget_pages, fraction, sink, recent, pages if known_pages else None, more,
        newest_first, top_p, floor, head_pages, dense_below, decay,
    )  # fmt: skip
    inputs = {} if scores is None else {"scores": scores}
    inputs["bits"] = bits
    stored = {} if covered is None else {"covered": covered}
    best = (constants, config, inputs, (batch, kv_heads), pages, slots + more)
    return _search(*best, make, stored)


def _search(
    constants: Constants,
    config: Config | None,
    given: dict[str, Tensor],
    rows: tuple[int, int],
    candidates: int,
    named: int,
    make: Make,
    stored: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The ids ``[*rows, named]`` of the best of the ``candidates`` of each row, and what is counted.

    ``given`` and ``stored`` are tensors of ``top_pages``, those before and behind the ids.
    """
    config = (
        config or options.top_pages_configs(int(constants["BLOCK"]), int(constants["GROUP_PAD"]))[0]
    )
    device = next(iter(given.values())).device
    ids = make((*rows, named), dtype=torch.int32, device=device)
    inputs = {**given, "ids": ids, **(stored or {})}
    if not {**constants, **config.blocks}["SINGLE"]:
        inputs["order"] = make((*rows, candidates), dtype=torch.int32, device=device)
    counts = make((*rows, 2), dtype=torch.int64, device=device)
    launch("top_pages", constants, config, inputs, counts, grids.top_pages(*rows, constants))
    return ids, counts


def token_scores(
    q: Tensor,
    index: tuple[Tensor, Tensor],
    bits: Tensor,
    bias: Tensor | None,
    scale: float,
    page_size: int,
    softcap: float = 0.0,
    signs: bool = False,
    config: Config | None = None,
    make: Make = torch.empty,
) -> Tensor:
    """Scores ``[B, Hq, N]`` of single tokens; ``index`` are keys and pages, or with ``signs`` summary and signs."""
    batch, query_heads, _, dim = q.shape
    kv_heads = index[0].shape[1]
    tokens = page_size * index[0 if signs else 1].shape[2]
    config = config or options.token_scores_configs(q.element_size(), dim, page_size, signs)[0]
    names = ("summary", "signs") if signs else ("keys", "pages")
    inputs = {"q": q, **dict(zip(names, index, strict=True)), "bits": bits}
    if bias is not None:
        inputs["bias"] = bias
    return launch(
        "token_scores",
        options.token_scores(
            scale, kv_heads, query_heads // kv_heads, dim, page_size, rows_of(bits),
            None if bias is None else rows_of(bias), softcap, signs,
        ),
        config,
        inputs,
        make((batch, query_heads, tokens), dtype=torch.float32, device=q.device),
        grids.token_scores(batch, kv_heads, tokens, config.blocks),
    )  # fmt: skip


def top_tokens(
    scores: Tensor,
    kv_heads: int,
    named: tuple[Tensor, Tensor] | None,
    page_size: int,
    slots: int,
    budget: int,
    fraction: int,
    sink: int,
    recent: int,
    group_reduce: str,
    known_tokens: bool = True,
    config: Config | None = None,
    make: Make = torch.empty,
) -> tuple[Tensor, Tensor]:
    """Tokens and counts of :func:`token_scores`; ``named`` are the pages whose tokens these are, and what was seen."""
    batch, query_heads, tokens = scores.shape
    constants = options.top_pages(
        1.0, group_reduce, kv_heads, query_heads // kv_heads, 1, Rows(False, False), budget,
        fraction, sink, recent, tokens if known_tokens else None, tokens=True,
        named=0 if named is None else page_size,
    )  # fmt: skip
    inputs = {"scores": scores}
    if named is not None:
        inputs["pages"], inputs["seen"] = named
    return _search(constants, config, inputs, (batch, kv_heads), tokens, slots, make)


def refine(
    q: Tensor,
    keys: Tensor,
    ids: Tensor,
    seen: Tensor,
    bits: Tensor,
    bias: Tensor | None,
    scale: float,
    page_size: int,
    slots: int,
    budget: int,
    fraction: int,
    sink: int,
    recent: int,
    group_reduce: str,
    softcap: float = 0.0,
    known_tokens: bool = True,
) -> tuple[Tensor, Tensor]:
    """``hsa::refine``; without ``known_tokens`` as where the number of pages is symbolic."""
    scores = token_scores(q, (keys, ids), bits, bias, scale, page_size, softcap)
    rule = (page_size, slots, budget, fraction, sink, recent, group_reduce, known_tokens)
    return top_tokens(scores, keys.shape[1], (ids, seen), *rule)


def select_tokens(
    q: Tensor,
    summary: Tensor,
    signs: Tensor,
    bits: Tensor,
    bias: Tensor | None,
    scale: float,
    page_size: int,
    slots: int,
    budget: int,
    fraction: int,
    sink: int,
    recent: int,
    group_reduce: str,
    softcap: float = 0.0,
    known_tokens: bool = True,
) -> tuple[Tensor, Tensor]:
    """``hsa::select_tokens``; without ``known_tokens`` as where the number of pages is symbolic."""
    scores = token_scores(q, (summary, signs), bits, bias, scale, page_size, softcap, signs=True)
    rule = (page_size, slots, budget, fraction, sink, recent, group_reduce, known_tokens)
    return top_tokens(scores, summary.shape[1], None, *rule)


def append(
    keys: Tensor,
    values: Tensor,
    k: Tensor,
    v: Tensor,
    bits: Tensor,
    position: Tensor,
    covered: Tensor,
    table: Tensor,
    owner: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    page_size: int,
    config: Config | None = None,
) -> None:
    """``hsa::append``."""
    batch, kv_heads, _, dim = keys.shape
    group = max(1, bits.shape[1] // kv_heads)
    constants = options.append(
        kv_heads, group, dim, v.shape[3], page_size, rows_of(bits), position.numel() > 1
    )
    inputs = {"keys": keys, "k": k, "v": v, "bits": bits, "position": position, "covered": covered}
    inputs |= {"table": table, "owner": owner, "pool_keys": pool_keys, "pool_values": pool_values}
    launch(
        "append",
        constants,
        config or options.append_configs()[0],
        inputs,
        torch.empty((batch, kv_heads), dtype=torch.int32, device=pool_keys.device),
        grids.append(batch, kv_heads, constants),
    )


def diff(
    ids: Tensor,
    position: Tensor,
    page_size: int,
    table: Tensor,
    owner: Tensor,
    used: Tensor,
    clock: Tensor,
    more: int = 0,
    known_ids: bool = True,
    config: Config | None = None,
    make: Make = torch.empty,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``hsa::diff``; without ``known_ids`` as where the number of ids is symbolic."""
    batch, kv_heads, named = ids.shape
    constants = options.diff(
        kv_heads,
        page_size,
        named if known_ids else None,
        owner.shape[2],
        position.numel() > 1,
        more,
    )
    config = config or options.diff_configs(int(constants["SLOTS_PAD"]))[0]
    loads = make((batch, kv_heads, named, 2), dtype=torch.int32, device=ids.device)
    if counts is None:
        counts = make((batch, kv_heads, 5), dtype=torch.int32, device=ids.device)
    inputs = {"ids": ids, "position": position, "table": table, "owner": owner, "used": used}
    slots = launch(
        "diff",
        constants,
        config,
        {**inputs, "clock": clock, "loads": loads, "counts": counts},
        make((batch, kv_heads, named), dtype=torch.int32, device=ids.device),
        grids.diff(batch, kv_heads, constants),
    )
    return slots, loads, counts


def fetch(
    keys: Tensor,
    values: Tensor,
    loads: Tensor,
    counts: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    page_size: int,
    known_rows: bool = True,
    config: Config | None = None,
    ahead: bool = False,
    make: Make = torch.empty,
) -> None:
    """``hsa::fetch``, or ``hsa::prefetch`` with ``ahead``; without ``known_rows`` as where the batch is symbolic."""
    batch, kv_heads, _, dim = keys.shape
    value_dim = values.shape[3]
    constants = options.fetch(
        kv_heads,
        dim,
        value_dim,
        page_size,
        batch * kv_heads if known_rows else None,
        processors(pool_keys.device),
        ahead,
    )
    config = (
        config
        or options.fetch_configs(
            keys.element_size() * options.dim_pad(max(dim, value_dim)), page_size
        )[0]
    )
    constants |= config.blocks
    inputs = {"keys": keys, "values": values, "loads": loads, "counts": counts}
    launch(
        "fetch",
        constants,
        config,
        {**inputs, "pool_keys": pool_keys, "pool_values": pool_values},
        make((int(constants["PROGRAMS"]),), dtype=torch.int32, device=pool_keys.device),
        grids.fetch(constants),
    )


def sparse_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    ids: Tensor,
    slots: Tensor | None,
    bits: Tensor,
    bias: Tensor | None,
    scale: float,
    page_size: int,
    softcap: float = 0.0,
    ragged: bool = False,
    splits: int | None = None,
    config: Config | None = None,
    full: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """``hsa::sparse_attention``; with the ``full`` cache beside a pool, ``hsa::fetch_attention``."""
    batch, query_heads, _, dim = q.shape
    kv_heads, value_dim = keys.shape[1], values.shape[-1]
    if splits is None:
        splits = options.attention_splits(
            batch * kv_heads, ids.shape[-1], page_size, processors(q.device)
        )
    constants = options.sparse_attention(
        scale, kv_heads, query_heads // kv_heads, dim, value_dim, page_size, rows_of(bits),
        None if bias is None else rows_of(bias), splits, slots is not None, softcap, full is not None,
        ragged,
    )  # fmt: skip
    config = (
        config
        or options.sparse_attention_configs(
            q.element_size() * options.dim_pad(max(dim, value_dim)),
            page_size,
            page_size * ids.shape[-1] // splits,
        )[0]
    )
    part_lse = torch.empty((batch, query_heads, splits), dtype=torch.float32, device=q.device)
    inputs = {"q": q, "keys": keys, "values": values, "ids": ids, "bits": bits, "lse": part_lse}
    if slots is not None:
        inputs["slots"] = slots
    if bias is not None:
        inputs["bias"] = bias
    if full is not None:
        inputs["full_keys"], inputs["full_values"] = full
    acc = torch.empty((batch, query_heads, splits, value_dim), dtype=torch.float32, device=q.device)
    launch(
        "sparse_attention",
        constants,
        config,
        inputs,
        acc,
        grids.sparse_attention(batch, kv_heads, constants),
    )
    lse = torch.empty((batch, query_heads, 1), dtype=torch.float32, device=q.device)
    config = options.merge_splits_configs(value_dim, splits)[0]
    out = launch(
        "merge_splits",
        options.merge_splits(query_heads, value_dim, splits),
        config,
        {"acc": acc, "part_lse": part_lse, "lse": lse},
        torch.empty((batch, query_heads, 1, value_dim), dtype=q.dtype, device=q.device),
        grids.merge_splits(batch, query_heads, value_dim, config.blocks),
    )
    return out, lse


def fetch_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    ids: Tensor,
    slots: Tensor,
    loads: Tensor,
    counts: Tensor,
    bits: Tensor,
    bias: Tensor | None,
    pool_keys: Tensor,
    pool_values: Tensor,
    scale: float,
    page_size: int,
    softcap: float = 0.0,
    splits: int | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """``hsa::fetch_attention``."""
    full = (keys, values)
    return sparse_attention(
        q, pool_keys, pool_values, ids, slots, bits, bias, scale, page_size, softcap, False, splits, config, full
    )  # fmt: skip


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; what a small GPU has, where there is none."""
    if device.type != "cuda":
        return 16
    return torch.cuda.get_device_properties(device).multi_processor_count
