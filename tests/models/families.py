"""A tiny random model of every decoder family that transformers registers for causal language modelling.

A configuration begins as the family's own default. Where it has a field of ``SIZES`` the size is put in, a list of
layer types is cut to one layer of each type, and ``OVERRIDES`` has the last word.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

VOCABULARY = 128
WINDOW = 48
"""Of layers that slide: decoding begins inside it and ends beyond."""


def _fields(value: object, names: str) -> dict[str, object]:
    return dict.fromkeys(names.split(), value)


SIZES: dict[str, Any] = {
    **_fields(VOCABULARY, "vocab_size vocab_size_per_layer_input"),
    **_fields(64, "hidden_size d_model n_embd"),
    **_fields(96, "intermediate_size ffn_dim n_inner d_inner encoder_ffn_dim decoder_ffn_dim"),
    **_fields(2, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers"),
    **_fields(4, "num_attention_heads n_head n_heads"),
    **_fields(4, "decoder_attention_heads encoder_attention_heads"),
    **_fields(2, "num_key_value_heads num_kv_heads"),
    **_fields(512, "max_position_embeddings n_positions max_target_positions n_ctx max_seq_len"),
    # Large enough for attention to prefer some tokens to others.
    **_fields(0.1, "initializer_range init_std"),
    "pad_token_id": 0,
    "bos_token_id": 1,
    **_fields(2, "eos_token_id decoder_start_token_id"),
    "head_dim": 16,
    "rotary_dim": 8,
    "sliding_window": WINDOW,
    **_fields(True, "is_decoder use_cache"),
    "tie_word_embeddings": True,
    # Latent attention, and an indexer that chooses fewer tokens than there are.
    **_fields(16, "q_lora_rank kv_lora_rank qk_nope_head_dim v_head_dim index_head_dim"),
    "qk_rope_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 32,
    # Experts.
    **_fields(4, "num_experts num_local_experts n_routed_experts"),
    **_fields(2, "num_experts_per_tok"),
    **_fields(32, "moe_intermediate_size shared_expert_intermediate_size"),
    **_fields(1, "n_shared_experts n_group topk_group first_k_dense_replace num_dense_layers"),
    # Recurrent layers.
    **_fields(16, "linear_head_dim linear_key_head_dim linear_value_head_dim"),
    **_fields(2, "linear_num_key_heads"),
    **_fields(4, "linear_num_heads linear_num_value_heads"),
    # Embeddings of their own for each layer.
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 0,
}
_OPTIONAL = ("pad_token_id", "bos_token_id", "eos_token_id", "head_dim", "num_key_value_heads")
"""Fields that are given even where the default is None."""
_PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types")

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 16},
    **_fields({"attention_type": "original_full"}, "big_bird bigbird_pegasus"),
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "ffn_hidden_size": 32,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "hidden_size": 64,
        },
        "tie_word_embeddings": False,
    },
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "deepseek_v4": {"o_lora_rank": 16},
    "dory": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        **_fields(1, "n_input_layers n_recurrent_layers n_output_layers"),
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
        "shared_experts_intermediate_size": 32,
        "head_dim": 24,
    },
    **_fields({"global_head_dim": 16}, "gemma4_text gemma4_unified_text"),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    **_fields(
        {"unpadded_vocab_size": VOCABULARY, "swa_head_dim": 16}, "inkling2_loop_text inkling2_text"
    ),
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    **_fields({"layer_types": ["conv", "full_attention"]}, "lfm2 lfm2_moe"),
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16},
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 512,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "roc_bert": {"pronunciation_vocab_size": VOCABULARY, "shape_vocab_size": VOCABULARY},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layer_types": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zaya": {"num_experts_per_tok": 1},
}
DROPPED: dict[str, tuple[str, ...]] = {
    "falcon": ("head_dim",),
    "prophetnet": ("num_hidden_layers",),
}
"""Fields that a family derives from others and refuses to be given."""

EAGER_ONLY = frozenset(
    """
    big_bird bigbird_pegasus bloom deepseek_v4 falcon_mamba flint gemma2 gpt_neo
    gpt_neox_japanese gpt_oss granite_swa granitemoe_swa hy_v4 inkling2_loop_text inkling2_text
    mamba mamba2 megatron-bert mimo_v2_flash mpt mvp prophetnet rembert roformer trocr
    vaultgemma xglm xlm
    """.split()
)
"""Families without an attention through scaled_dot_product_attention."""

BROKEN: dict[str, dict[str, str]] = {
    "bloom": {"static": "its linear biases are as long as the prompt, not as the cache"},
    "deepseek_v4": {"static": "the static cache does not know its compressed layers"},
    "gpt_neo": {
        "static": "its masks count from the end of the cache, so that all of it is attended"
    },
    "minimax": {"static": "it refuses a cache that is not of its own class"},
    "prophetnet": {"static": "its mask is as long as the prompt, not as the cache"},
    "xlm": dict.fromkeys(("static", "dynamic"), "its mask is made for a text without a cache"),
}
"""Families and caches with which the model fails, or is wrong, before anything is compiled."""

_WRAPPERS = {
    "dots3_note": "dots3_note_text",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen4_exp": "qwen4_exp_text",
    "moss_transcribe_diarize": "qwen3",
    "emu3": "llama",
    "got_ocr2": "qwen2",
    "fuyu": "persimmon",
    "phi4_multimodal": "phi3",
}
_ENCODERS = "images or audio are read by an encoder that must be built too"

NOT_SURVEYED: dict[str, str] = {
    **{name: f"multimodal; its text is decoded as in `{text}`" for name, text in _WRAPPERS.items()},
    **_fields(_ENCODERS, "git mllama musicgen musicgen_melody"),
    **_fields("no cache of keys and values: its state is its own", "reformer rwkv xlnet xlstm"),
    "openai-gpt": "no cache: every step reads the whole text",
    "cpmant": "puts a prompt of its own before every call, so that no step agrees with its cache",
    "blt": "bytes are put together to patches by further models",
    **_fields(
        "drafts for another model, whose cache it reads",
        "gemma4_assistant gemma4_unified_assistant",
    ),
}
"""Families that are left out, and why."""


def surveyed() -> list[str]:
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(NOT_SURVEYED))


def _given(base: Any, field: str) -> bool:
    try:
        value = getattr(base, field)
    except AttributeError:
        return False
    return value is not None or field in _OPTIONAL


def config(family: str) -> Any:
    """The tiny configuration of ``family``."""
    cls = CONFIG_MAPPING[family]
    base = cls()
    base.allow_global_per_layer_attribute_access = True
    dropped = DROPPED.get(family, ())
    fields = {k: size for k, size in SIZES.items() if _given(base, k) and k not in dropped}
    if "qk_rope_head_dim" in fields:  # latent attention derives the size of its heads
        fields["num_key_value_heads"] = fields["num_attention_heads"]
        fields.pop("head_dim", None)
    for name in _PER_LAYER:
        kinds = list(dict.fromkeys(getattr(base, name, None) or ()))
        if kinds and name in cls.__dataclass_fields__:
            fields[name] = kinds if len(kinds) > 1 else kinds * 2
            fields["num_hidden_layers"] = max(len(fields[name]), fields["num_hidden_layers"])
    for name in _PER_LAYER:
        if name in fields:
            fields[name] += fields[name][-1:] * (fields["num_hidden_layers"] - len(fields[name]))
    return cls(**{**fields, **OVERRIDES.get(family, {})})


def build(family: str, attention: str = "sdpa") -> Any:
    """A random model of ``family`` in evaluation mode."""
    made = config(family)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(made, attn_implementation=attention).eval()


def new_cache(model: Any, kind: str, capacity: int) -> Any:
    """The ``static`` or ``dynamic`` cache that ``generate`` would make: it knows the layers that slide."""
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=capacity)
    if model.config.model_type == "minimax":
        return transformers.models.minimax.modeling_minimax.MiniMaxCache()
    return transformers.DynamicCache(config=model.config)
