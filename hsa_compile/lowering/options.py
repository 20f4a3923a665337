"""What each kernel is rendered with: constants from shapes, and the few launch configurations worth timing.

Everything here is plain arithmetic on integers, so that Inductor's lowerings and the standalone
renderer give a kernel the same constants. Names are those of the templates' legends.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from .. import algorithms
from ..ops.diff import MISSING
from ..ops.signs import WORD
from ..ops.summarize import LATELY, MARK_FACTOR, MARKED_CHANNELS, NEVER

# Values end up as source text: a string carries its own quotes.
Constants = dict[str, int | float | bool | str]

# Pages times padded heads that one program's registers hold, and pages a block where blocks are looped over.
SINGLE_BLOCK_SCORES = 32768
SINGLE_BLOCK_PAGES = 8192
LOOP_BLOCK_PAGES = 4096
# Of single tokens there are many: fewer blocks have fewer reductions between them.
LOOP_BLOCK_TOKENS = 8192
# Below this many pages to score, smaller programs spread the work better.
FEW_PAGES = 32768
# Rows whose loads are numbered at once, and bytes of keys (and of values) that are copied at once.
LOOP_BLOCK_ROWS = 1024
COPIED_BYTES = 4096
# The same for a warp of attention, which shares its registers with what attends.
COPIED_BYTES_A_WARP = 2048


@dataclass(frozen=True)
class Config:
    """One way to launch a kernel: its block sizes, warps a program, and pipeline depth."""

    blocks: Constants
    num_warps: int
    num_stages: int = 1


@dataclass(frozen=True)
class Rows:
    """How a packed mask or a bias is laid out: one row for all, or one a batch entry or query head."""

    batch: bool
    heads: bool


def page_kernel(constants: Constants) -> algorithms.PageKernel | None:
    """The lines that a page score adds to a kernel with these constants; None where it has no page score."""
    name = constants.get("ALGORITHM")
    return None if name is None else algorithms.get(ast.literal_eval(str(name))).kernel


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def dim_pad(dim: int) -> int:
    """The tile's size for ``dim`` numbers: a power of two that matrix units take."""
    return max(16, next_power_of_2(dim))


def summarize(
    algorithm: str,
    kv_heads: int,
    group: int,
    dim: int,
    page_size: int,
    bits: Rows,
    batch_position: bool,
    tail: bool = False,
    written: int = 1,
    accumulates: bool = False,
    signs: bool = False,
) -> Constants:
    return {
        "ALGORITHM": repr(algorithm),
        "PARTS": algorithms.get(algorithm).parts,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "DIM": dim,
        "DIM_PAD": dim_pad(dim),
        "PAGE_SIZE": page_size,
        "WRITTEN": written,
        "ACCUMULATES": accumulates,
        "LATELY": LATELY,
        "HAS_TAIL": tail,
        "HAS_SIGNS": signs,
        "SIGN_WORDS": -(-dim // WORD),
        "HEAD_BITS": bits.heads,
        "BATCH_BITS": bits.batch,
        "BATCH_POSITION": batch_position,
        "MARKED_CHANNELS": MARKED_CHANNELS,
        "MARK_FACTOR": MARK_FACTOR,
    }


def summarize_configs(page_size: int, dim: int) -> list[Config]:
    # One warp a page of usual size: a decode step only looks, and a rebuild has enough programs to fill the GPU.
    warps = min(8, max(1, page_size * dim_pad(dim) // 4096))
    return [Config({"BLOCK_PAGES": 64}, warps)]


def page_scores(algorithm: str, kv_heads: int, group: int, dim: int, bits: Rows) -> Constants:
    return {
        "ALGORITHM": repr(algorithm),
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "GROUP_PAD": max(16, next_power_of_2(group)),
        "DIM": dim,
        "DIM_PAD": dim_pad(dim),
        "PARTS": algorithms.get(algorithm).parts,
        "HEAD_BITS": bits.heads,
        "BATCH_BITS": bits.batch,
    }


def page_scores_configs(element_size: int, width: int, rows: int, pages: int) -> list[Config]:
    """Ordered by what is expected to be fastest, as all of these lists are."""
    if element_size * width > 512:
        return [Config({"BLOCK_PAGES": 16}, 2), Config({"BLOCK_PAGES": 32}, 4)]
    small, large = Config({"BLOCK_PAGES": 16}, 1), Config({"BLOCK_PAGES": 32}, 2)
    return (
        [small, large]
        if rows * pages < FEW_PAGES
        else [large, small, Config({"BLOCK_PAGES": 64}, 4)]
    )


def index_scores(scale: float, queries: int, heads: int, dim: int) -> Constants:
    block = _index_block(heads)
    return {
        "SCALE": scale,
        "QUERIES": queries,
        "HEADS": heads,
        "HEADS_PAD": -(-heads // block) * block,
        "DIM": dim,
        "DIM_PAD": dim_pad(dim),
    }


def _index_block(heads: int) -> int:
    """Heads at once: 64 x 64 products of a block of tokens are what four warps hold."""
    return min(64, max(16, next_power_of_2(heads)))


def index_scores_configs(element_size: int, heads: int, dim: int) -> list[Config]:
    def config(tokens: int, warps: int) -> Config:
        return Config({"BLOCK_TOKENS": tokens, "BLOCK_HEADS": _index_block(heads)}, warps)

    if element_size * dim_pad(dim) > 256:
        # Products in fp32 are made outside the matrix units, of operands in registers.
        return [config(32, 4), config(16, 4)]
    return [config(64, 4), config(128, 8), config(128, 4)]


def top_pages(
    scale: float,
    group_reduce: str,
    kv_heads: int,
    group: int,
    page_size: int,
    bits: Rows,
    budget_pages: int,
    fraction: int,
    sink: int,
    recent: int,
    pages: int | None,
    more: int = 0,
    newest_first: bool = False,
    top_p: float = 1.0,
    floor: int = 0,
    head_pages: Sequence[int] = (),
    dense_below: float = 0.0,
    decay: float = 0.0,
    tokens: bool = False,
    named: int = 0,
) -> Constants:
    """``pages`` is None where their number is not known; ``decay`` is 0 where nothing is accumulated.

    ``tokens`` are pages of one, of pages of ``named`` tokens or (0) of the whole cache.
    """
    group_pad = next_power_of_2(group)
    most = min(SINGLE_BLOCK_PAGES, SINGLE_BLOCK_SCORES // group_pad)
    block = max(16, next_power_of_2(pages or 1))
    single = pages is not None and block <= most
    return {
        "SCALE": scale,
        "SOFTMAX_MEAN": group_reduce == "softmax_mean",
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "GROUP_PAD": group_pad,
        "PAGE_SIZE": page_size,
        "HEAD_BITS": bits.heads,
        "BATCH_BITS": bits.batch,
        "BUDGET": budget_pages,
        "HEAD_BUDGETS": repr(" ".join(map(str, head_pages))),
        "FRACTION": fraction,
        "SINK": sink,
        "RECENT": recent,
        "MORE": more,
        "NEWEST_FIRST": newest_first,
        "TOKENS": tokens,
        "NAMED": named,
        "TOP_P": top_p,
        "FLOOR": floor,
        "DENSE_BELOW": dense_below,
        "DECAY": decay,
        "SINGLE": single,
        "BLOCK": block if single else min(most, LOOP_BLOCK_TOKENS if tokens else LOOP_BLOCK_PAGES),
    }


def token_scores(
    scale: float,
    kv_heads: int,
    group: int,
    dim: int,
    page_size: int,
    bits: Rows,
    bias: Rows | None,
    softcap: float = 0.0,
    signs: bool = False,
) -> Constants:
    return {
        "SCALE": scale,
        "SOFTCAP": softcap,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "GROUP_PAD": max(16, next_power_of_2(group)),
        "DIM": dim,
        # Signs are spread from halves of their words.
        "DIM_PAD": max(WORD // 2, dim_pad(dim)) if signs else dim_pad(dim),
        "PAGE_SIZE": page_size,
        "SIGNS": signs,
        "SIGN_WORDS": -(-dim // WORD),
        "HEAD_BITS": bits.heads,
        "BATCH_BITS": bits.batch,
        "HAS_BIAS": bias is not None,
        "HEAD_BIAS": bias is not None and bias.heads,
        "BATCH_BIAS": bias is not None and bias.batch,
    }


def token_scores_configs(element_size: int, dim: int, page_size: int, signs: bool) -> list[Config]:
    """Keys of memory are read as many as keep it busy; of signs a tile is made at a time, a page or more."""

    def config(tokens: int, step: int) -> Config:
        warps = max(1, min(8, step * element_size * dim_pad(dim) // (8192 if signs else 4096)))
        return Config({"BLOCK_TOKENS": tokens, "STEP_TOKENS": step}, warps)

    if signs:
        step = max(16, page_size)
        return [config(8 * step, step), config(4 * step, step), config(16 * step, step)]
    return [config(64, 64), config(32, 32), config(128, 128)]


def top_pages_configs(block: int, group_pad: int) -> list[Config]:
    warps = max(1, min(16, max(block // 256, block * group_pad // 2048)))
    return [Config({"WAYS": 2}, warps), Config({"WAYS": 4}, warps)]


def append(
    kv_heads: int,
    group: int,
    dim: int,
    value_dim: int,
    page_size: int,
    bits: Rows,
    batch_position: bool,
) -> Constants:
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "DIM": dim,
        "DIM_PAD": dim_pad(dim),
        "VALUE_DIM": value_dim,
        "VALUE_DIM_PAD": dim_pad(value_dim),
        "PAGE_SIZE": page_size,
        "HEAD_BITS": bits.heads,
        "BATCH_BITS": bits.batch,
        "BATCH_POSITION": batch_position,
        "NEVER": NEVER,
        "MARKED_CHANNELS": MARKED_CHANNELS,
        "MARK_FACTOR": MARK_FACTOR,
    }


def append_configs() -> list[Config]:
    return [Config({"BLOCK_PAGES": 512}, 1)]


def diff(
    kv_heads: int,
    page_size: int,
    named: int | None,
    slots: int,
    batch_position: bool,
    more: int = 0,
) -> Constants:
    """``named`` is None where the number of ids is not known; there are no more than slots."""
    return {
        "KV_HEADS": kv_heads,
        "MORE": more,
        "MISSING": MISSING,
        "SELECTED_PAD": max(16, next_power_of_2(slots if named is None else named)),
        "SLOTS_PAD": max(16, next_power_of_2(slots)),
        "PAGE_SIZE": page_size,
        "BATCH_POSITION": batch_position,
    }


def diff_configs(slots_pad: int) -> list[Config]:
    # Reductions stay within a warp as long as its registers hold the slots.
    return [
        Config({}, max(1, min(8, slots_pad // 128))),
        Config({}, max(1, min(16, slots_pad // 64))),
    ]


def fetch(
    kv_heads: int,
    dim: int,
    value_dim: int,
    page_size: int,
    rows: int | None,
    processors: int,
    ahead: bool = False,
) -> Constants:
    """``rows`` is None where their number is not known."""
    return {
        "AHEAD": ahead,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "DIM_PAD": dim_pad(dim),
        "VALUE_DIM": value_dim,
        "VALUE_DIM_PAD": dim_pad(value_dim),
        "PAGE_SIZE": page_size,
        "BLOCK_ROWS": LOOP_BLOCK_ROWS
        if rows is None
        else min(LOOP_BLOCK_ROWS, max(16, next_power_of_2(rows))),
        # What is copied ahead has time, and others run beside it.
        "PROGRAMS": max(1, processors // 2) if ahead else 2 * processors,
    }


def fetch_configs(row_bytes: int, page_size: int) -> list[Config]:
    """``row_bytes`` is the padded size of a key or value. Four warps copy 4 KiB of each in two reads a thread."""

    def copied(size: int) -> Config:
        tokens = max(1, min(page_size, size // row_bytes))
        return Config({"BLOCK_TOKENS": tokens}, max(1, min(8, tokens * row_bytes // 1024)))

    return [copied(COPIED_BYTES), copied(2 * COPIED_BYTES), copied(COPIED_BYTES // 2)]


def sparse_attention(
    scale: float,
    kv_heads: int,
    group: int,
    dim: int,
    value_dim: int,
    page_size: int,
    bits: Rows,
    bias: Rows | None,
    splits: int,
    pool: bool = False,
    softcap: float = 0.0,
    fetches: bool = False,
    ragged: bool = False,
) -> Constants:
    # Matrix units take 16 rows at least; for one head, sums in fp32 do without the padding.
    use_dot = group > 1
    return {
        "SCALE": scale,
        "SOFTCAP": softcap,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "GROUP_PAD": max(16, next_power_of_2(group)) if use_dot else 1,
        "DIM": dim,
        "DIM_PAD": dim_pad(dim),
        "VALUE_DIM": value_dim,
        "VALUE_DIM_PAD": dim_pad(value_dim),
        "PAGE_SIZE": page_size,
        "HEAD_BITS": bits.heads,
        "BATCH_BITS": bits.batch,
        "HAS_SLOTS": pool,
        "FETCHES": fetches,
        "RAGGED": ragged,
        "PROBES": 128,
        "SLOTS_AT_ONCE": 16,
        "PARTS_AHEAD": 4,
        "MISSING": MISSING,
        "HAS_BIAS": bias is not None,
        "HEAD_BIAS": bias is not None and bias.heads,
        "BATCH_BIAS": bias is not None and bias.batch,
        "SPLITS": splits,
        "USE_DOT": use_dot,
    }


def sparse_attention_configs(row_bytes: int, page_size: int, split_tokens: int) -> list[Config]:
    """``row_bytes`` is the padded size of a key or value, ``split_tokens`` the tokens that one program attends."""

    def config(tokens: int, warps: int, stages: int = 1) -> Config:
        copied = max(1, min(page_size, warps * COPIED_BYTES_A_WARP // row_bytes))
        return Config({"BLOCK_TOKENS": tokens, "BLOCK_COPIED": copied}, warps, stages)

    if row_bytes > 256:
        # Large rows, and fp32 products, which are summed outside the matrix units, need the registers
        # of more warps; 32 KiB of keys and as much of values fit the shared memory of any GPU.
        tile = min(32, 32768 // row_bytes)
        warps = min(8, max(4, tile * row_bytes // 4096))
        return [config(tile, warps), config(tile, warps // 2)]
    # A tile of about 8 KiB a warp: many tokens a program are pipelined, few are loaded at once.
    tile, wide = max(page_size, 32), max(page_size, 64)
    piped, at_once = config(tile, tile // 32, 2), config(wide, 4)
    best = (piped, at_once) if split_tokens > 64 else (at_once, piped)
    return [*best, config(wide, 2, 2), config(tile, tile // 32)]


def attention_splits(rows: int, slots: int, page_size: int, processors: int) -> int:
    """How many programs share the selected pages of one (batch, KV head) row; a power of two.

    About eight programs a processor hide the latency of memory; fewer than 64 tokens a program are
    not worth a partial result.
    """
    most = max(1, slots * page_size // 64)
    wanted = max(1, 8 * processors // max(rows, 1))
    return min(next_power_of_2(most), 1 << (wanted.bit_length() - 1), 128)


def merge_splits(heads: int, value_dim: int, splits: int) -> Constants:
    return {
        "HEADS": heads,
        "SPLITS": splits,
        "SPLITS_PAD": next_power_of_2(splits),
        "VALUE_DIM": value_dim,
    }


def merge_splits_configs(value_dim: int, splits: int) -> list[Config]:
    block = min(64, dim_pad(value_dim))
    return [Config({"BLOCK_DIM": block}, max(1, next_power_of_2(splits) * block // 2048))]
