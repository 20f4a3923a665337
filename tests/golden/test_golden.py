"""Golden graphs: what becomes of attention, model by model. ``EXPECTTEST_ACCEPT=1`` writes them anew; read them then."""

from __future__ import annotations

import pytest
import torch
from expecttest import TestCase
from torch import Tensor, nn

from ..models.chosen import AsKeys, Latent, given
from ..models.helpers import cache_argument, new_cache, tiny
from .format import format_graph, lowered

POLICY = {"budget": 64, "page_size": 16, "recent": 16}


def decode_graph(family: str, kind: str, attention: str = "sdpa", **policy: object) -> str:
    """The first decode step after a prompt of 20 tokens, batch 2; the second where the length is symbolic then.

    A growing cache is decoded with padding: releases of transformers differ in whether they pass a mask without it.
    """
    model = tiny(family, attention)
    cache, name = new_cache(model, kind, capacity=128), cache_argument(model)
    ids = torch.randint(3, 100, (2, 22))
    seen = torch.arange(22) >= torch.tensor([[0], [5]])

    def call(begin: int, end: int) -> dict[str, object]:
        mask = {"attention_mask": seen[:, :end].long()} if kind == "dynamic" else {}
        return {"input_ids": ids[:, begin:end].clone(), name: cache, **mask}

    with torch.no_grad():
        model(**call(0, 20))
    steps = [call(20, 21), call(21, 22)]
    steps = steps[: 2 if kind == "dynamic" else 1]
    return format_graph(lowered(model, *steps, policy={**POLICY, **policy}))


def chosen_graph(model: type[Latent], queries: int) -> str:
    """A step of 8 chosen tokens of 50, batch 2."""
    names = ("q", "latent", "latents", "queries", "keys", "weights", "at", "keep")
    call = dict(zip(names, given(queries=queries), strict=True))
    return format_graph(lowered(model().eval(), call, policy=POLICY))


class GptFast(nn.Module):
    """Attention in the manner of gpt-fast: buffers, an index of positions, a causal mask that is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(64, 128, bias=False)
        self.register_buffer("k_cache", torch.zeros(2, 2, 128, 16))
        self.register_buffer("v_cache", torch.zeros(2, 2, 128, 16))
        self.register_buffer("causal", torch.tril(torch.ones(128, 128, dtype=torch.bool)))

    def forward(self, x: Tensor, input_pos: Tensor) -> Tensor:
        q, k, v = self.wqkv(x).split([64, 32, 32], -1)
        q, k, v = (t.view(2, -1, t.shape[-1] // 16, 16).transpose(1, 2) for t in (q, k, v))
        self.k_cache[:, :, input_pos] = k
        self.v_cache[:, :, input_pos] = v
        keys = self.k_cache.repeat_interleave(2, dim=1)
        values = self.v_cache.repeat_interleave(2, dim=1)
        mask = self.causal[None, None, input_pos]
        y = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return y.transpose(1, 2).flatten(2)


class OwnCache(nn.Module):
    """A module that keeps keys ``[B, S, H, D]`` and writes them by slice at an integer position; scores by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = torch.zeros(2, 128, 4, 16)
        self.values = torch.zeros(2, 128, 4, 16)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, position: int, hidden: Tensor) -> Tensor:
        self.keys[:, position : position + 1].copy_(k)
        self.values[:, position : position + 1].copy_(v)
        scores = torch.matmul(q, self.keys.permute(0, 2, 3, 1)) / 4.0
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")).float(), -1).to(q.dtype)
        return weights @ self.values.transpose(1, 2)


class Alibi(nn.Module):
    """Keys and values that the module concatenates; a bias by head, an additive mask, scores by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = torch.zeros(2, 2, 99, 16)
        self.values = torch.zeros(2, 2, 99, 16)
        self.register_buffer("slopes", 2.0 ** -torch.arange(4.0).view(1, 4, 1, 1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        self.keys = torch.cat([self.keys, k], dim=-2)
        self.values = torch.cat([self.values, v], dim=-2)
        keys, values = (x.repeat_interleave(2, 1) for x in (self.keys, self.values))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, keys) / 4.0
        scores = scores + self.slopes * torch.arange(keys.shape[2])
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("bhqk,bhkd->bqhd", weights, values).flatten(2)


class TestGolden(TestCase):
    def test_llama_heavy_hitters(self) -> None:
        graph = decode_graph("llama", "static", algorithm="heavy_hitters", decay=0.9)
        self.assertExpectedInline(
            graph,
            """\
keys_0 = input [2, 2, 128, 16] f32
values_0 = input [2, 2, 128, 16] f32
keys_1 = input [2, 2, 128, 16] f32
values_1 = input [2, 2, 128, 16] f32
hsa_summary_0 = input [2, 2, 8, 16] f32
hsa_covered_0 = input [2, 2, 8, 3] i64
hsa_summary_1 = input [2, 2, 8, 16] f32
hsa_covered_1 = input [2, 2, 8, 3] i64
hsa_counters_0 = input [2, 2] i64
position_0 = hsa.checked_position([1] i64, 128, False)
index_copy_(keys_0, 2, position_0, [2, 2, 1, 16] f32)
index_copy_(values_0, 2, position_0, [2, 2, 1, 16] f32)
bits_0 = hsa.page_mask([2, 1, 1, 128] b8, 16)
hsa.summarize(keys_0, bits_0, [1] i64, hsa_summary_0, hsa_covered_0, heavy_hitters, 16)
hsa.select_accumulated([2, 4, 1, 16] f32, hsa_summary_0, bits_0, hsa_covered_0, 0.9, 0.25, heavy_hitters, 16, 5, 4, 0, 4, 16, softmax_mean)
out_0, lse_0 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_0, values_0, [2, 2, 5] i32, None, bits_0, None, 0.25, 16)
position_1 = hsa.checked_position([1] i64, 128, False)
index_copy_(keys_1, 2, position_1, [2, 2, 1, 16] f32)
index_copy_(values_1, 2, position_1, [2, 2, 1, 16] f32)
hsa.summarize(keys_1, bits_0, [1] i64, hsa_summary_1, hsa_covered_1, heavy_hitters, 16)
hsa.select_accumulated([2, 4, 1, 16] f32, hsa_summary_1, bits_0, hsa_covered_1, 0.9, 0.25, heavy_hitters, 16, 5, 4, 0, 4, 16, softmax_mean)
out_1, lse_1 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_1, values_1, [2, 2, 5] i32, None, bits_0, None, 0.25, 16)
return [2, 1, 128] f32
""",
        )

    def test_llama_static(self) -> None:
        self.assertExpectedInline(
            decode_graph("llama", "static"),
            """\
keys_0 = input [2, 2, 128, 16] f32
values_0 = input [2, 2, 128, 16] f32
keys_1 = input [2, 2, 128, 16] f32
values_1 = input [2, 2, 128, 16] f32
hsa_summary_0 = input [2, 2, 8, 32] f32
hsa_covered_0 = input [2, 2, 8, 2] i64
hsa_summary_1 = input [2, 2, 8, 32] f32
hsa_covered_1 = input [2, 2, 8, 2] i64
hsa_counters_0 = input [2, 2] i64
position_0 = hsa.checked_position([1] i64, 128, False)
index_copy_(keys_0, 2, position_0, [2, 2, 1, 16] f32)
index_copy_(values_0, 2, position_0, [2, 2, 1, 16] f32)
bits_0 = hsa.page_mask([2, 1, 1, 128] b8, 16)
hsa.summarize(keys_0, bits_0, [1] i64, hsa_summary_0, hsa_covered_0, cuboid, 16)
ids_0, counts_0 = hsa.select([2, 4, 1, 16] f32, hsa_summary_0, bits_0, 0.25, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean)
out_0, lse_0 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_0, values_0, ids_0, None, bits_0, None, 0.25, 16)
position_1 = hsa.checked_position([1] i64, 128, False)
index_copy_(keys_1, 2, position_1, [2, 2, 1, 16] f32)
index_copy_(values_1, 2, position_1, [2, 2, 1, 16] f32)
hsa.summarize(keys_1, bits_0, [1] i64, hsa_summary_1, hsa_covered_1, cuboid, 16)
ids_1, counts_1 = hsa.select([2, 4, 1, 16] f32, hsa_summary_1, bits_0, 0.25, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean)
out_1, lse_1 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_1, values_1, ids_1, None, bits_0, None, 0.25, 16)
return [2, 1, 128] f32
""",
        )

    def test_llama_host_next_rank(self) -> None:
        self.assertExpectedInline(
            decode_graph("llama", "static", placement="host", prefetch="next_rank"),
            """\
keys_0 = input [2, 2, 128, 16] f32
values_0 = input [2, 2, 128, 16] f32
keys_1 = input [2, 2, 128, 16] f32
values_1 = input [2, 2, 128, 16] f32
hsa_summary_0 = input [2, 2, 8, 32] f32
hsa_covered_0 = input [2, 2, 8, 2] i64
hsa_pool_table_0 = input [2, 2, 8] i32
hsa_pool_owner_0 = input [2, 2, 9] i32
hsa_pool_used_0 = input [2, 2, 9] i32
hsa_pool_clock_0 = input [2, 2] i32
hsa_pool_keys_0 = input [2, 2, 9, 16, 16] f32
hsa_pool_values_0 = input [2, 2, 9, 16, 16] f32
hsa_summary_1 = input [2, 2, 8, 32] f32
hsa_covered_1 = input [2, 2, 8, 2] i64
hsa_pool_table_1 = input [2, 2, 8] i32
hsa_pool_owner_1 = input [2, 2, 9] i32
hsa_pool_used_1 = input [2, 2, 9] i32
hsa_pool_clock_1 = input [2, 2] i32
hsa_pool_keys_1 = input [2, 2, 9, 16, 16] f32
hsa_pool_values_1 = input [2, 2, 9, 16, 16] f32
hsa_counters_0 = input [2, 7] i64
position_0 = hsa.checked_position([1] i64, 128, False)
index_copy_(keys_0, 2, position_0, [2, 2, 1, 16] f32)
index_copy_(values_0, 2, position_0, [2, 2, 1, 16] f32)
bits_0 = hsa.page_mask([2, 1, 1, 128] b8, 16)
hsa.append(keys_0, values_0, [2, 2, 1, 16] f32, [2, 2, 1, 16] f32, bits_0, [1] i64, hsa_covered_0, hsa_pool_table_0, hsa_pool_owner_0, hsa_pool_keys_0, hsa_pool_values_0, 16)
hsa.summarize(keys_0, bits_0, [1] i64, hsa_summary_0, hsa_covered_0, cuboid, 16, select(hsa_pool_keys_0, 2, 8))
ids_0, counts_0 = hsa.select([2, 4, 1, 16] f32, hsa_summary_0, bits_0, 0.25, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean, 2)
slots_0, loads_0, moved_0 = hsa.diff(ids_0, [1] i64, 16, hsa_pool_table_0, hsa_pool_owner_0, hsa_pool_used_0, hsa_pool_clock_0, 2)
out_0, lse_0 = hsa.fetch_attention([2, 4, 1, 16] f32, keys_0, values_0, [2, 2, 5] i32, [2, 2, 5] i32, loads_0, moved_0, bits_0, None, hsa_pool_keys_0, hsa_pool_values_0, 0.25, 16)
held_0 = hsa.prefetch(keys_0, values_0, loads_0, moved_0, hsa_pool_keys_0, hsa_pool_values_0, 16)
position_1 = hsa.checked_position([1] i64, 128, False)
index_copy_(keys_1, 2, position_1, [2, 2, 1, 16] f32)
index_copy_(values_1, 2, position_1, [2, 2, 1, 16] f32)
hsa.append(keys_1, values_1, [2, 2, 1, 16] f32, [2, 2, 1, 16] f32, bits_0, [1] i64, hsa_covered_1, hsa_pool_table_1, hsa_pool_owner_1, hsa_pool_keys_1, hsa_pool_values_1, 16)
hsa.summarize(keys_1, bits_0, [1] i64, hsa_summary_1, hsa_covered_1, cuboid, 16, select(hsa_pool_keys_1, 2, 8))
ids_1, counts_1 = hsa.select([2, 4, 1, 16] f32, hsa_summary_1, bits_0, 0.25, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean, 2)
slots_1, loads_1, moved_1 = hsa.diff(ids_1, [1] i64, 16, hsa_pool_table_1, hsa_pool_owner_1, hsa_pool_used_1, hsa_pool_clock_1, 2)
out_1, lse_1 = hsa.fetch_attention([2, 4, 1, 16] f32, keys_1, values_1, [2, 2, 5] i32, [2, 2, 5] i32, loads_1, moved_1, bits_0, None, hsa_pool_keys_1, hsa_pool_values_1, 0.25, 16)
held_1 = hsa.prefetch(keys_1, values_1, loads_1, moved_1, hsa_pool_keys_1, hsa_pool_values_1, 16)
hsa.join_prefetch((held_0, loads_0, moved_0, held_1, loads_1, moved_1), hsa_counters_0)
return [2, 1, 128] f32
""",
        )

    def test_qwen3_host_cross_layer(self) -> None:
        self.assertExpectedInline(
            decode_graph("qwen3", "static", placement="host", prefetch="cross_layer"),
            """\
keys_0 = input [2, 2, 128, 24] f32
values_0 = input [2, 2, 128, 24] f32
keys_1 = input [2, 2, 128, 24] f32
values_1 = input [2, 2, 128, 24] f32
hsa_summary_0 = input [2, 2, 8, 48] f32
hsa_covered_0 = input [2, 2, 8, 2] i64
hsa_pool_table_0 = input [2, 2, 8] i32
hsa_pool_owner_0 = input [2, 2, 9] i32
hsa_pool_used_0 = input [2, 2, 9] i32
hsa_pool_clock_0 = input [2, 2] i32
hsa_pool_keys_0 = input [2, 2, 9, 16, 24] f32
hsa_pool_values_0 = input [2, 2, 9, 16, 24] f32
hsa_summary_1 = input [2, 2, 8, 48] f32
hsa_covered_1 = input [2, 2, 8, 2] i64
hsa_pool_table_1 = input [2, 2, 8] i32
hsa_pool_owner_1 = input [2, 2, 9] i32
hsa_pool_used_1 = input [2, 2, 9] i32
hsa_pool_clock_1 = input [2, 2] i32
hsa_pool_keys_1 = input [2, 2, 9, 16, 24] f32
hsa_pool_values_1 = input [2, 2, 9, 16, 24] f32
hsa_counters_0 = input [2, 7] i64
position_0 = hsa.checked_position([1] i64, 128, False)
index_copy_(keys_0, 2, position_0, [2, 2, 1, 24] f32)
index_copy_(values_0, 2, position_0, [2, 2, 1, 24] f32)
bits_0 = hsa.page_mask([2, 1, 1, 128] b8, 16)
hsa.append(keys_0, values_0, [2, 2, 1, 24] f32, [2, 2, 1, 24] f32, bits_0, [1] i64, hsa_covered_0, hsa_pool_table_0, hsa_pool_owner_0, hsa_pool_keys_0, hsa_pool_values_0, 16)
hsa.summarize(keys_0, bits_0, [1] i64, hsa_summary_0, hsa_covered_0, cuboid, 16, select(hsa_pool_keys_0, 2, 8))
ids_0, counts_0 = hsa.select([2, 4, 1, 24] f32, hsa_summary_0, bits_0, 0.204124, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean)
slots_0, loads_0, moved_0 = hsa.diff(ids_0, [1] i64, 16, hsa_pool_table_0, hsa_pool_owner_0, hsa_pool_used_0, hsa_pool_clock_0)
out_0, lse_0 = hsa.fetch_attention([2, 4, 1, 24] f32, keys_0, values_0, ids_0, slots_0, loads_0, moved_0, bits_0, None, hsa_pool_keys_0, hsa_pool_values_0, 0.204124, 16)
guess_0 = model.embed_tokens, model.rotary_emb, model.layers.0.input_layernorm, model.layers.0.self_attn.q_proj, model.layers.0.self_attn.q_norm, model.layers.0.self_attn.o_proj, model.layers.1.input_layernorm, model.layers.1.self_attn.q_proj, model.layers.1.self_attn.q_norm
early_0, moved_early_0 = hsa.prefetch_select(guess_0, hsa_summary_1, bits_0, [1] i64, keys_1, values_1, hsa_pool_table_1, hsa_pool_owner_1, hsa_pool_used_1, hsa_pool_clock_1, hsa_pool_keys_1, hsa_pool_values_1, 0.204124, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean)
position_1 = hsa.checked_position([1] i64, 128, False)
index_copy_(keys_1, 2, position_1, [2, 2, 1, 24] f32)
index_copy_(values_1, 2, position_1, [2, 2, 1, 24] f32)
hsa.join_prefetch((early_0, guess_0), hsa_pool_table_1, moved_early_0)
hsa.append(keys_1, values_1, [2, 2, 1, 24] f32, [2, 2, 1, 24] f32, bits_0, [1] i64, hsa_covered_1, hsa_pool_table_1, hsa_pool_owner_1, hsa_pool_keys_1, hsa_pool_values_1, 16)
hsa.summarize(keys_1, bits_0, [1] i64, hsa_summary_1, hsa_covered_1, cuboid, 16, select(hsa_pool_keys_1, 2, 8))
ids_1, counts_1 = hsa.select([2, 4, 1, 24] f32, hsa_summary_1, bits_0, 0.204124, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean)
slots_1, loads_1, moved_1 = hsa.diff(ids_1, [1] i64, 16, hsa_pool_table_1, hsa_pool_owner_1, hsa_pool_used_1, hsa_pool_clock_1)
out_1, lse_1 = hsa.fetch_attention([2, 4, 1, 24] f32, keys_1, values_1, ids_1, slots_1, loads_1, moved_1, bits_0, None, hsa_pool_keys_1, hsa_pool_values_1, 0.204124, 16)
return [2, 1, 128] f32
""",
        )

    def test_llama_static_two_stage(self) -> None:
        self.assertExpectedInline(
            decode_graph("llama", "static", budget=24, granularity="two_stage"),
            """\
keys_0 = input [2, 2, 128, 16] f32
values_0 = input [2, 2, 128, 16] f32
keys_1 = input [2, 2, 128, 16] f32
values_1 = input [2, 2, 128, 16] f32
hsa_summary_0 = input [2, 2, 8, 32] f32
hsa_covered_0 = input [2, 2, 8, 2] i64
hsa_summary_1 = input [2, 2, 8, 32] f32
hsa_covered_1 = input [2, 2, 8, 2] i64
hsa_counters_0 = input [2, 2] i64
position_0 = hsa.checked_position([1] i64, 128, False)
index_copy_(keys_0, 2, position_0, [2, 2, 1, 16] f32)
index_copy_(values_0, 2, position_0, [2, 2, 1, 16] f32)
bits_0 = hsa.page_mask([2, 1, 1, 128] b8, 16)
hsa.summarize(keys_0, bits_0, [1] i64, hsa_summary_0, hsa_covered_0, cuboid, 16)
ids_0, counts_0 = hsa.select([2, 4, 1, 16] f32, hsa_summary_0, bits_0, 0.25, cuboid, 16, 7, 6, 0, 4, 16, softmax_mean)
tokens_0, read_0 = hsa.refine([2, 4, 1, 16] f32, keys_0, ids_0, counts_0, bits_0, None, 0.25, 16, 24, 24, 0, 4, 16, softmax_mean)
bits_1 = hsa.page_mask([2, 1, 1, 128] b8, 1)
out_0, lse_0 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_0, values_0, tokens_0, None, bits_1, None, 0.25, 1)
position_1 = hsa.checked_position([1] i64, 128, False)
index_copy_(keys_1, 2, position_1, [2, 2, 1, 16] f32)
index_copy_(values_1, 2, position_1, [2, 2, 1, 16] f32)
hsa.summarize(keys_1, bits_0, [1] i64, hsa_summary_1, hsa_covered_1, cuboid, 16)
ids_1, counts_1 = hsa.select([2, 4, 1, 16] f32, hsa_summary_1, bits_0, 0.25, cuboid, 16, 7, 6, 0, 4, 16, softmax_mean)
tokens_1, read_1 = hsa.refine([2, 4, 1, 16] f32, keys_1, ids_1, counts_1, bits_0, None, 0.25, 16, 24, 24, 0, 4, 16, softmax_mean)
out_1, lse_1 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_1, values_1, tokens_1, None, bits_1, None, 0.25, 1)
return [2, 1, 128] f32
""",
        )

    def test_llama_static_token(self) -> None:
        self.assertExpectedInline(
            decode_graph("llama", "static", budget=24, granularity="token"),
            """\
keys_0 = input [2, 2, 128, 16] f32
values_0 = input [2, 2, 128, 16] f32
keys_1 = input [2, 2, 128, 16] f32
values_1 = input [2, 2, 128, 16] f32
hsa_summary_0 = input [2, 2, 8, 32] f32
hsa_covered_0 = input [2, 2, 8, 2] i64
hsa_signs_0 = input [2, 2, 8, 16] i64
hsa_summary_1 = input [2, 2, 8, 32] f32
hsa_covered_1 = input [2, 2, 8, 2] i64
hsa_signs_1 = input [2, 2, 8, 16] i64
hsa_counters_0 = input [2, 2] i64
position_0 = hsa.checked_position([1] i64, 128, False)
index_copy_(keys_0, 2, position_0, [2, 2, 1, 16] f32)
index_copy_(values_0, 2, position_0, [2, 2, 1, 16] f32)
bits_0 = hsa.page_mask([2, 1, 1, 128] b8, 16)
hsa.summarize(keys_0, bits_0, [1] i64, hsa_summary_0, hsa_covered_0, cuboid, 16, None, 1, hsa_signs_0)
tokens_0, read_0 = hsa.select_tokens([2, 4, 1, 16] f32, hsa_summary_0, hsa_signs_0, bits_0, None, 0.25, 16, 24, 24, 0, 4, 16, softmax_mean)
bits_1 = hsa.page_mask([2, 1, 1, 128] b8, 1)
out_0, lse_0 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_0, values_0, tokens_0, None, bits_1, None, 0.25, 1)
position_1 = hsa.checked_position([1] i64, 128, False)
index_copy_(keys_1, 2, position_1, [2, 2, 1, 16] f32)
index_copy_(values_1, 2, position_1, [2, 2, 1, 16] f32)
hsa.summarize(keys_1, bits_0, [1] i64, hsa_summary_1, hsa_covered_1, cuboid, 16, None, 1, hsa_signs_1)
tokens_1, read_1 = hsa.select_tokens([2, 4, 1, 16] f32, hsa_summary_1, hsa_signs_1, bits_0, None, 0.25, 16, 24, 24, 0, 4, 16, softmax_mean)
out_1, lse_1 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_1, values_1, tokens_1, None, bits_1, None, 0.25, 1)
return [2, 1, 128] f32
""",
        )

    def test_llama_dynamic_two_stage_of_a_fraction(self) -> None:
        self.assertExpectedInline(
            decode_graph("llama", "dynamic", budget=0.1, granularity="two_stage"),
            """\
keys_0 = input [2, 2, n0 + 1, 16] f32
values_0 = input [2, 2, n1 + 1, 16] f32
keys_1 = input [2, 2, n0 + 1, 16] f32
values_1 = input [2, 2, n2 + 1, 16] f32
hsa_summary_0 = input [2, 2, ((n0//16)) + 1, 32] f32
hsa_covered_0 = input [2, 2, ((n0//16)) + 1, 2] i64
hsa_summary_1 = input [2, 2, ((n0//16)) + 1, 32] f32
hsa_covered_1 = input [2, 2, ((n0//16)) + 1, 2] i64
hsa_counters_0 = input [2, 2] i64
copy_(keys_0[:, :, -1:], [2, 2, 1, 16] f32)
copy_(values_0[:, :, -1:], [2, 2, 1, 16] f32)
bits_0 = hsa.page_mask([2, 1, 1, n0 + 1] b8, 16)
hsa.summarize(keys_0, bits_0, full((1), n0), hsa_summary_0, hsa_covered_0, cuboid, 16)
ids_0, counts_0 = hsa.select([2, 4, 1, 16] f32, hsa_summary_0, bits_0, 0.25, cuboid, 16, (((26214*n0 + 1074789)//1048576)) + 4, 0, 26214, 4, 16, softmax_mean)
tokens_0, read_0 = hsa.refine([2, 4, 1, 16] f32, keys_0, ids_0, counts_0, bits_0, None, 0.25, 16, (((6554*n0 + 72089)//65536)) + 20, 0, 6554, 4, 16, softmax_mean)
bits_1 = hsa.page_mask([2, 1, 1, n0 + 1] b8, 1)
out_0, lse_0 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_0, values_0, tokens_0, None, bits_1, None, 0.25, 1)
copy_(keys_1[:, :, -1:], [2, 2, 1, 16] f32)
copy_(values_1[:, :, -1:], [2, 2, 1, 16] f32)
hsa.summarize(keys_1, bits_0, full((1), n0), hsa_summary_1, hsa_covered_1, cuboid, 16)
ids_1, counts_1 = hsa.select([2, 4, 1, 16] f32, hsa_summary_1, bits_0, 0.25, cuboid, 16, (((26214*n0 + 1074789)//1048576)) + 4, 0, 26214, 4, 16, softmax_mean)
tokens_1, read_1 = hsa.refine([2, 4, 1, 16] f32, keys_1, ids_1, counts_1, bits_0, None, 0.25, 16, (((6554*n0 + 72089)//65536)) + 20, 0, 6554, 4, 16, softmax_mean)
out_1, lse_1 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_1, values_1, tokens_1, None, bits_1, None, 0.25, 1)
return [2, 1, 128] f32
""",
        )

    def test_llama_dynamic(self) -> None:
        self.assertExpectedInline(
            decode_graph("llama", "dynamic"),
            """\
keys_0 = input [2, 2, n0 + 1, 16] f32
values_0 = input [2, 2, n1 + 1, 16] f32
keys_1 = input [2, 2, n0 + 1, 16] f32
values_1 = input [2, 2, n2 + 1, 16] f32
hsa_summary_0 = input [2, 2, ((n0//16)) + 1, 32] f32
hsa_covered_0 = input [2, 2, ((n0//16)) + 1, 2] i64
hsa_summary_1 = input [2, 2, ((n0//16)) + 1, 32] f32
hsa_covered_1 = input [2, 2, ((n0//16)) + 1, 2] i64
hsa_counters_0 = input [2, 2] i64
copy_(keys_0[:, :, -1:], [2, 2, 1, 16] f32)
copy_(values_0[:, :, -1:], [2, 2, 1, 16] f32)
bits_0 = hsa.page_mask([2, 1, 1, n0 + 1] b8, 16)
hsa.summarize(keys_0, bits_0, full((1), n0), hsa_summary_0, hsa_covered_0, cuboid, 16)
ids_0, counts_0 = hsa.select([2, 4, 1, 16] f32, hsa_summary_0, bits_0, 0.25, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean)
out_0, lse_0 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_0, values_0, ids_0, None, bits_0, None, 0.25, 16)
copy_(keys_1[:, :, -1:], [2, 2, 1, 16] f32)
copy_(values_1[:, :, -1:], [2, 2, 1, 16] f32)
hsa.summarize(keys_1, bits_0, full((1), n0), hsa_summary_1, hsa_covered_1, cuboid, 16)
ids_1, counts_1 = hsa.select([2, 4, 1, 16] f32, hsa_summary_1, bits_0, 0.25, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean)
out_1, lse_1 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_1, values_1, ids_1, None, bits_0, None, 0.25, 16)
return [2, 1, 128] f32
""",
        )

    def test_qwen2_static(self) -> None:
        self.assertExpectedInline(
            decode_graph("qwen2", "static"),
            """\
keys_0 = input [2, 2, 128, 16] f32
values_0 = input [2, 2, 128, 16] f32
keys_1 = input [2, 2, 128, 16] f32
values_1 = input [2, 2, 128, 16] f32
hsa_summary_0 = input [2, 2, 8, 32] f32
hsa_covered_0 = input [2, 2, 8, 2] i64
hsa_summary_1 = input [2, 2, 8, 32] f32
hsa_covered_1 = input [2, 2, 8, 2] i64
hsa_counters_0 = input [2, 2] i64
position_0 = hsa.checked_position([1] i64, 128, False)
index_copy_(keys_0, 2, position_0, [2, 2, 1, 16] f32)
index_copy_(values_0, 2, position_0, [2, 2, 1, 16] f32)
bits_0 = hsa.page_mask([2, 1, 1, 128] b8, 16)
hsa.summarize(keys_0, bits_0, [1] i64, hsa_summary_0, hsa_covered_0, cuboid, 16)
ids_0, counts_0 = hsa.select([2, 4, 1, 16] f32, hsa_summary_0, bits_0, 0.25, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean)
out_0, lse_0 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_0, values_0, ids_0, None, bits_0, None, 0.25, 16)
position_1 = hsa.checked_position([1] i64, 128, False)
index_copy_(keys_1, 2, position_1, [2, 2, 1, 16] f32)
index_copy_(values_1, 2, position_1, [2, 2, 1, 16] f32)
hsa.summarize(keys_1, bits_0, [1] i64, hsa_summary_1, hsa_covered_1, cuboid, 16)
ids_1, counts_1 = hsa.select([2, 4, 1, 16] f32, hsa_summary_1, bits_0, 0.25, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean)
out_1, lse_1 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_1, values_1, ids_1, None, bits_0, None, 0.25, 16)
return [2, 1, 128] f32
""",
        )

    def test_qwen3_dynamic(self) -> None:
        self.assertExpectedInline(
            decode_graph("qwen3", "dynamic"),
            """\
keys_0 = input [2, 2, n0 + 1, 24] f32
values_0 = input [2, 2, n1 + 1, 24] f32
keys_1 = input [2, 2, n0 + 1, 24] f32
values_1 = input [2, 2, n2 + 1, 24] f32
hsa_summary_0 = input [2, 2, ((n0//16)) + 1, 48] f32
hsa_covered_0 = input [2, 2, ((n0//16)) + 1, 2] i64
hsa_summary_1 = input [2, 2, ((n0//16)) + 1, 48] f32
hsa_covered_1 = input [2, 2, ((n0//16)) + 1, 2] i64
hsa_counters_0 = input [2, 2] i64
copy_(keys_0[:, :, -1:], [2, 2, 1, 24] f32)
copy_(values_0[:, :, -1:], [2, 2, 1, 24] f32)
bits_0 = hsa.page_mask([2, 1, 1, n0 + 1] b8, 16)
hsa.summarize(keys_0, bits_0, full((1), n0), hsa_summary_0, hsa_covered_0, cuboid, 16)
ids_0, counts_0 = hsa.select([2, 4, 1, 24] f32, hsa_summary_0, bits_0, 0.204124, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean)
out_0, lse_0 = hsa.sparse_attention([2, 4, 1, 24] f32, keys_0, values_0, ids_0, None, bits_0, None, 0.204124, 16)
copy_(keys_1[:, :, -1:], [2, 2, 1, 24] f32)
copy_(values_1[:, :, -1:], [2, 2, 1, 24] f32)
hsa.summarize(keys_1, bits_0, full((1), n0), hsa_summary_1, hsa_covered_1, cuboid, 16)
ids_1, counts_1 = hsa.select([2, 4, 1, 24] f32, hsa_summary_1, bits_0, 0.204124, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean)
out_1, lse_1 = hsa.sparse_attention([2, 4, 1, 24] f32, keys_1, values_1, ids_1, None, bits_0, None, 0.204124, 16)
return [2, 1, 128] f32
""",
        )

    def test_mistral_dynamic(self) -> None:
        self.assertExpectedInline(
            decode_graph("mistral", "dynamic"),
            """\
keys_0 = input [2, 2, n0 + 1, 16] f32
values_0 = input [2, 2, n1 + 1, 16] f32
keys_1 = input [2, 2, n0 + 1, 16] f32
values_1 = input [2, 2, n2 + 1, 16] f32
hsa_summary_0 = input [2, 2, ((n0//16)) + 1, 32] f32
hsa_covered_0 = input [2, 2, ((n0//16)) + 1, 2] i64
hsa_summary_1 = input [2, 2, ((n0//16)) + 1, 32] f32
hsa_covered_1 = input [2, 2, ((n0//16)) + 1, 2] i64
hsa_counters_0 = input [2, 2] i64
copy_(keys_0[:, :, -1:], [2, 2, 1, 16] f32)
copy_(values_0[:, :, -1:], [2, 2, 1, 16] f32)
bits_0 = hsa.page_mask([2, 1, 1, n0 + 1] b8, 16)
hsa.summarize(keys_0, bits_0, full((1), n0), hsa_summary_0, hsa_covered_0, cuboid, 16)
ids_0, counts_0 = hsa.select([2, 4, 1, 16] f32, hsa_summary_0, bits_0, 0.25, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean)
out_0, lse_0 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_0, values_0, ids_0, None, bits_0, None, 0.25, 16)
copy_(keys_1[:, :, -1:], [2, 2, 1, 16] f32)
copy_(values_1[:, :, -1:], [2, 2, 1, 16] f32)
hsa.summarize(keys_1, bits_0, full((1), n0), hsa_summary_1, hsa_covered_1, cuboid, 16)
ids_1, counts_1 = hsa.select([2, 4, 1, 16] f32, hsa_summary_1, bits_0, 0.25, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean)
out_1, lse_1 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_1, values_1, ids_1, None, bits_0, None, 0.25, 16)
return [2, 1, 128] f32
""",
        )

    def test_gemma3_static(self) -> None:
        self.assertExpectedInline(
            decode_graph("gemma3", "static"),
            """\
keys_0 = input [2, 2, 128, 16] f32
values_0 = input [2, 2, 128, 16] f32
hsa_summary_0 = input [2, 2, 8, 32] f32
hsa_covered_0 = input [2, 2, 8, 2] i64
hsa_counters_0 = input [1, 2] i64
position_0 = hsa.checked_position([1] i64, 128, False)
index_copy_(keys_0, 2, position_0, [2, 2, 1, 16] f32)
index_copy_(values_0, 2, position_0, [2, 2, 1, 16] f32)
bits_0 = hsa.page_mask([2, 1, 1, 128] b8, 16)
hsa.summarize(keys_0, bits_0, [1] i64, hsa_summary_0, hsa_covered_0, cuboid, 16)
ids_0, counts_0 = hsa.select([2, 4, 1, 16] f32, hsa_summary_0, bits_0, 0.223607, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean)
out_0, lse_0 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_0, values_0, ids_0, None, bits_0, None, 0.223607, 16)
return [2, 1, 128] f32
""",
        )

    def test_gpt2_eager_static(self) -> None:
        self.assertExpectedInline(
            decode_graph("gpt2", "static", "eager"),
            """\
keys_0 = input [2, 4, 128, 16] f32
values_0 = input [2, 4, 128, 16] f32
keys_1 = input [2, 4, 128, 16] f32
values_1 = input [2, 4, 128, 16] f32
hsa_summary_0 = input [2, 4, 8, 32] f32
hsa_covered_0 = input [2, 4, 8, 2] i64
hsa_summary_1 = input [2, 4, 8, 32] f32
hsa_covered_1 = input [2, 4, 8, 2] i64
hsa_counters_0 = input [2, 2] i64
position_0 = hsa.checked_position([1] i64, 128, False)
index_copy_(keys_0, 2, position_0, [2, 4, 1, 16] f32)
index_copy_(values_0, 2, position_0, [2, 4, 1, 16] f32)
bits_0 = hsa.page_mask([2, 1, 1, 128] f32, 16)
hsa.summarize(keys_0, bits_0, [1] i64, hsa_summary_0, hsa_covered_0, cuboid, 16)
added_0 = hsa.page_bias([2, 1, 1, 128] f32, 16)
ids_0, counts_0 = hsa.select([2, 4, 1, 16] f32, hsa_summary_0, bits_0, 0.25, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean, 0, added_0)
out_0, lse_0 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_0, values_0, ids_0, None, bits_0, [2, 1, 1, 128] f32, 0.25, 16)
position_1 = hsa.checked_position([1] i64, 128, False)
index_copy_(keys_1, 2, position_1, [2, 4, 1, 16] f32)
index_copy_(values_1, 2, position_1, [2, 4, 1, 16] f32)
hsa.summarize(keys_1, bits_0, [1] i64, hsa_summary_1, hsa_covered_1, cuboid, 16)
ids_1, counts_1 = hsa.select([2, 4, 1, 16] f32, hsa_summary_1, bits_0, 0.25, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean, 0, added_0)
out_1, lse_1 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_1, values_1, ids_1, None, bits_0, [2, 1, 1, 128] f32, 0.25, 16)
return [2, 1, 128] f32
""",
        )

    def test_gpt_fast(self) -> None:
        call = {"x": torch.randn(2, 1, 64), "input_pos": torch.tensor([100])}
        result = lowered(GptFast(), call, policy=POLICY)
        self.assertExpectedInline(
            format_graph(result),
            """\
keys_0 = input [2, 2, 128, 16] f32
values_0 = input [2, 2, 128, 16] f32
hsa_summary_0 = input [2, 2, 8, 32] f32
hsa_covered_0 = input [2, 2, 8, 2] i64
hsa_counters_0 = input [1, 2] i64
position_0 = hsa.checked_position([1] i64, 128, True)
setitem(keys_0, (:, :, position_0), [2, 2, 1, 16] f32)
setitem(values_0, (:, :, position_0), [2, 2, 1, 16] f32)
bits_0 = hsa.page_mask([1, 1, 1, 128] b8, 16)
hsa.summarize(keys_0, bits_0, [1] i64, hsa_summary_0, hsa_covered_0, cuboid, 16)
ids_0, counts_0 = hsa.select([2, 4, 1, 16] f32, hsa_summary_0, bits_0, 0.25, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean)
out_0, lse_0 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_0, values_0, ids_0, None, bits_0, None, 0.25, 16)
return [2, 1, 64] f32
""",
        )

    def test_the_rest_as_means(self) -> None:
        """Quest keeps no mean of keys, so it is kept beside; cuboids begin with it."""
        call = {"x": torch.randn(2, 1, 64), "input_pos": torch.tensor([100])}
        policy = {**POLICY, "algorithm": "quest", "unselected": "centroids"}
        self.assertExpectedInline(
            format_graph(lowered(GptFast(), call, policy=policy)),
            """\
keys_0 = input [2, 2, 128, 16] f32
values_0 = input [2, 2, 128, 16] f32
hsa_summary_0 = input [2, 2, 8, 32] f32
hsa_covered_0 = input [2, 2, 8, 2] i64
hsa_means_keys_0 = input [2, 2, 8, 16] f32
hsa_covered_keys_0 = input [2, 2, 8, 2] i64
hsa_means_values_0 = input [2, 2, 8, 16] f32
hsa_covered_values_0 = input [2, 2, 8, 2] i64
hsa_counters_0 = input [1, 2] i64
position_0 = hsa.checked_position([1] i64, 128, True)
setitem(keys_0, (:, :, position_0), [2, 2, 1, 16] f32)
setitem(values_0, (:, :, position_0), [2, 2, 1, 16] f32)
bits_0 = hsa.page_mask([1, 1, 1, 128] b8, 16)
hsa.summarize(keys_0, bits_0, [1] i64, hsa_summary_0, hsa_covered_0, quest, 16)
hsa.summarize(keys_0, bits_0, [1] i64, hsa_means_keys_0, hsa_covered_keys_0, mean, 16)
hsa.summarize(values_0, bits_0, [1] i64, hsa_means_values_0, hsa_covered_values_0, mean, 16)
ids_0, counts_0 = hsa.select([2, 4, 1, 16] f32, hsa_summary_0, bits_0, 0.25, quest, 16, 5, 4, 0, 4, 16, softmax_mean)
out_0, lse_0 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_0, values_0, ids_0, None, bits_0, None, 0.25, 16)
all_0, total_0 = hsa.estimate_rest([2, 4, 1, 16] f32, hsa_means_keys_0, hsa_means_values_0, ids_0, bits_0, None, out_0, lse_0, 0.25)
return [2, 1, 64] f32
""",
        )

    def test_three_levels(self) -> None:
        """Layers share the pages; what is kept of them are means alone."""
        graph = decode_graph("llama", "static", algorithm="three_level", prototypes=8)
        self.assertExpectedInline(
            graph,
            """\
keys_0 = input [2, 2, 128, 16] f32
values_0 = input [2, 2, 128, 16] f32
keys_1 = input [2, 2, 128, 16] f32
values_1 = input [2, 2, 128, 16] f32
hsa_summary_0 = input [2, 2, 8, 16] f32
hsa_covered_0 = input [2, 2, 8, 2] i64
hsa_means_values_0 = input [2, 2, 8, 16] f32
hsa_covered_values_0 = input [2, 2, 8, 2] i64
hsa_summary_1 = input [2, 2, 8, 16] f32
hsa_covered_1 = input [2, 2, 8, 2] i64
hsa_means_values_1 = input [2, 2, 8, 16] f32
hsa_covered_values_1 = input [2, 2, 8, 2] i64
hsa_counters_0 = input [2, 2] i64
position_0 = hsa.checked_position([1] i64, 128, False)
index_copy_(keys_0, 2, position_0, [2, 2, 1, 16] f32)
index_copy_(values_0, 2, position_0, [2, 2, 1, 16] f32)
bits_0 = hsa.page_mask([2, 1, 1, 128] b8, 16)
hsa.summarize(keys_0, bits_0, [1] i64, hsa_summary_0, hsa_covered_0, mean, 16)
hsa.summarize(values_0, bits_0, [1] i64, hsa_means_values_0, hsa_covered_values_0, mean, 16)
ids_0, counts_0 = hsa.strided_pages(bits_0, 2, 2, 16, 5, 4, 0, 4, 16)
out_0, lse_0 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_0, values_0, ids_0, None, bits_0, None, 0.25, 16)
all_0, total_0 = hsa.estimate_rest([2, 4, 1, 16] f32, hsa_summary_0, hsa_means_values_0, ids_0, bits_0, None, out_0, lse_0, 0.25, 0, 8)
position_1 = hsa.checked_position([1] i64, 128, False)
index_copy_(keys_1, 2, position_1, [2, 2, 1, 16] f32)
index_copy_(values_1, 2, position_1, [2, 2, 1, 16] f32)
hsa.summarize(keys_1, bits_0, [1] i64, hsa_summary_1, hsa_covered_1, mean, 16)
hsa.summarize(values_1, bits_0, [1] i64, hsa_means_values_1, hsa_covered_values_1, mean, 16)
out_1, lse_1 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_1, values_1, ids_0, None, bits_0, None, 0.25, 16)
all_1, total_1 = hsa.estimate_rest([2, 4, 1, 16] f32, hsa_summary_1, hsa_means_values_1, ids_0, bits_0, None, out_1, lse_1, 0.25, 0, 8)
return [2, 1, 128] f32
""",
        )

    def test_several_tokens(self) -> None:
        call = {"x": torch.randn(2, 5, 64), "input_pos": torch.arange(100, 105)}
        result = lowered(GptFast(), call, policy=POLICY)
        self.assertExpectedInline(
            format_graph(result),
            """\
keys_0 = input [2, 2, 128, 16] f32
values_0 = input [2, 2, 128, 16] f32
hsa_summary_0 = input [2, 2, 8, 32] f32
hsa_covered_0 = input [2, 2, 8, 2] i64
hsa_counters_0 = input [1, 2] i64
position_0 = hsa.checked_position([5] i64, 128, True)
setitem(keys_0, (:, :, position_0), [2, 2, 5, 16] f32)
setitem(values_0, (:, :, position_0), [2, 2, 5, 16] f32)
bits_0 = hsa.page_mask([1, 5, 1, 128] b8, 16)
hsa.summarize(keys_0, [1, 20, 8] i64, [1] i64, hsa_summary_0, hsa_covered_0, cuboid, 16, None, 5)
ids_0, counts_0 = hsa.select([2, 20, 1, 16] f32, hsa_summary_0, [1, 20, 8] i64, 0.25, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean)
out_0, lse_0 = hsa.sparse_attention([2, 20, 1, 16] f32, keys_0, values_0, ids_0, None, [1, 20, 8] i64, None, 0.25, 16)
return [2, 5, 64] f32
""",
        )

    def test_only_read(self) -> None:
        def cross(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
            scores = q @ keys.mT / 4.0 + hidden
            return scores.softmax(-1) @ values

        keys, values = torch.randn(2, 2, 4, 120, 16).unbind()
        call = {"q": torch.randn(2, 4, 1, 16), "keys": keys, "values": values}
        result = lowered(cross, {**call, "hidden": torch.zeros(2, 1, 1, 120)}, policy=POLICY)
        self.assertExpectedInline(
            format_graph(result),
            """\
keys_0 = input [2, 4, 120, 16] f32
values_0 = input [2, 4, 120, 16] f32
hsa_summary_0 = input [2, 4, 8, 32] f32
hsa_covered_0 = input [2, 4, 8, 2] i64
hsa_counters_0 = input [1, 2] i64
bits_0 = hsa.page_mask([2, 1, 1, 120] f32, 16)
hsa.summarize(keys_0, bits_0, full((1), 120), hsa_summary_0, hsa_covered_0, cuboid, 16, None, 0)
added_0 = hsa.page_bias([2, 1, 1, 120] f32, 16)
ids_0, counts_0 = hsa.select([2, 4, 1, 16] f32, hsa_summary_0, bits_0, 0.25, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean, 0, added_0)
out_0, lse_0 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_0, values_0, ids_0, None, bits_0, [2, 1, 1, 120] f32, 0.25, 16)
return out_0
""",
        )

    def test_own_cache(self) -> None:
        q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 1, 4, 16), torch.randn(2, 1, 4, 16)
        hidden = torch.arange(128)[None, None, None] > 100
        call = {"q": q, "k": k, "v": v, "position": 100, "hidden": hidden}
        result = lowered(OwnCache(), call, policy=POLICY)
        self.assertExpectedInline(
            format_graph(result),
            """\
keys_0 = input [2, 128, 4, 16] f32
values_0 = input [2, 128, 4, 16] f32
hsa_summary_0 = input [2, 4, 8, 32] f32
hsa_covered_0 = input [2, 4, 8, 2] i64
hsa_counters_0 = input [1, 2] i64
copy_(keys_0[:, 100:101], [2, 1, 4, 16] f32)
copy_(values_0[:, 100:101], [2, 1, 4, 16] f32)
bits_0 = hsa.page_mask([1, 1, 1, 128] b8, 16)
hsa.summarize(permute(keys_0, 0, 2, 1, 3), bits_0, full((1), 100), hsa_summary_0, hsa_covered_0, cuboid, 16)
ids_0, counts_0 = hsa.select([2, 4, 1, 16] f32, hsa_summary_0, bits_0, 0.25, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean)
out_0, lse_0 = hsa.sparse_attention([2, 4, 1, 16] f32, permute(keys_0, 0, 2, 1, 3), transpose(values_0, 1, 2), ids_0, None, bits_0, None, 0.25, 16)
return out_0
""",
        )

    def test_concatenated_with_bias(self) -> None:
        q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16)
        calls = [
            {"q": q, "k": k, "v": v, "hidden": torch.arange(length).view(1, 1, 1, -1) < 3}
            for length in (100, 101)
        ]
        self.assertExpectedInline(
            format_graph(lowered(Alibi(), *calls, policy=POLICY)),
            """\
keys_0 = input [2, 2, n0 + 1, 16] f32
values_0 = input [2, 2, n0 + 1, 16] f32
hsa_summary_0 = input [2, 2, ((n0//16)) + 1, 32] f32
hsa_covered_0 = input [2, 2, ((n0//16)) + 1, 2] i64
hsa_counters_0 = input [1, 2] i64
copy_(keys_0[:, :, -1:], [2, 2, 1, 16] f32)
copy_(values_0[:, :, -1:], [2, 2, 1, 16] f32)
bits_0 = hsa.page_mask([1, 4, 1, n0 + 1] f32, 16)
hsa.summarize(keys_0, bits_0, full((1), n0), hsa_summary_0, hsa_covered_0, cuboid, 16)
added_0 = hsa.page_bias([1, 4, 1, n0 + 1] f32, 16)
ids_0, counts_0 = hsa.select([2, 4, 1, 16] f32, hsa_summary_0, bits_0, 0.25, cuboid, 16, 5, 4, 0, 4, 16, softmax_mean, 0, added_0)
out_0, lse_0 = hsa.sparse_attention([2, 4, 1, 16] f32, keys_0, values_0, ids_0, None, bits_0, [1, 4, 1, n0 + 1] f32, 0.25, 16)
return [2, 1, 64] f32
""",
        )

    def test_a_choice_of_the_model_over_latents(self) -> None:
        self.assertExpectedInline(
            chosen_graph(Latent, queries=1),
            """\
scores_0 = hsa.index_scores([2, 1, 3, 6] f32, [2, 50, 6] f32, [2, 1, 3] f32, 0.5)
ids = topk([2, 1, 50] f32, 8, -1, sorted=False)
chosen_0 = [2, 50, 12] f32[rows, ids]
bits_0 = hsa.page_mask([2, 1, 1, 8] b8, 1)
out_0, lse_0 = hsa.sparse_attention([2, 4, 1, 16] f32, [2, 4, 8, 16] f32, [2, 4, 8, 4] f32, [2, 4, 8] i32, None, bits_0, None, 0.25, 1)
return out_0
""",
        )

    def test_a_choice_of_the_model_for_several_query_tokens(self) -> None:
        self.assertExpectedInline(
            chosen_graph(Latent, queries=3),
            """\
scores_0 = hsa.index_scores([2, 3, 3, 6] f32, [2, 50, 6] f32, [2, 3, 3] f32, 0.5)
ids = topk([2, 3, 50] f32, 8, -1, sorted=False)
chosen_0 = [2, 50, 12] f32[rows, ids]
bits_0 = hsa.page_mask([6, 1, 1, 8] b8, 1)
out_0, lse_0 = hsa.sparse_attention([6, 4, 1, 16] f32, [6, 4, 8, 16] f32, [6, 4, 8, 4] f32, [6, 4, 8] i32, None, bits_0, None, 0.25, 1)
return [2, 4, 3, 4] f32
""",
        )

    def test_a_choice_of_the_model_over_cached_keys(self) -> None:
        self.assertExpectedInline(
            chosen_graph(AsKeys, queries=1),
            """\
scores_0 = hsa.index_scores([2, 1, 3, 6] f32, [2, 50, 6] f32, [2, 1, 3] f32, 0.5)
ids = topk([2, 1, 50] f32, 8, -1, sorted=False)
bits_0 = hsa.page_mask([2, 1, 1, 50] b8, 1)
out_0, lse_0 = hsa.sparse_attention([2, 4, 1, 6] f32, [2, 2, 50, 6] f32, [2, 2, 50, 6] f32, [2, 2, 8] i32, None, bits_0, None, 0.408248, 1)
return out_0
""",
        )


if __name__ == "__main__":
    pytest.main([__file__])
