"""A compiled Whisper cannot see the list in which a growing cache keeps its layers.

transformers#34626. Right: it compiles, or breaks the graph, and decodes the same logits. Self-attention is rewritten;
cross-attention reads keys that no step writes, here no more than the budget, and stays dense.
"""

import inspect

import torch

from ..models.helpers import transformers
from .helpers import close, compile_hsa, graphs, sites


def tiny_whisper():
    config = transformers.WhisperConfig(
        vocab_size=128,
        num_mel_bins=8,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        d_model=64,
        max_source_positions=20,
        max_target_positions=64,
        init_std=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    torch.manual_seed(0)
    return transformers.WhisperForConditionalGeneration(config).eval()


@torch.no_grad()
def decode(model, step, steps: int) -> torch.Tensor:
    """From the cache that the model itself makes for a prompt of four tokens."""
    random = torch.Generator().manual_seed(0)
    features = torch.randn(2, 8, 40, generator=random)
    ids = torch.randint(3, 128, (2, 4 + steps), generator=random)
    encoded = model.get_encoder()(features)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    out = model(encoder_outputs=encoded, decoder_input_ids=ids[:, :4], use_cache=True)
    logits = [out.logits[:, -1]]
    for at in range(4, 4 + steps):
        out = step(
            encoder_outputs=encoded,
            decoder_input_ids=ids[:, at : at + 1].clone(),
            use_cache=True,
            **{name: getattr(out, name)},
        )
        logits.append(out.logits[:, -1])
    return torch.stack(logits)


def test_same_logits() -> None:
    model = tiny_whisper()
    compiled = compile_hsa(model, {"budget": 48, "page_size": 16})
    close(decode(model, compiled, 8), decode(model, model, 8))
    own = [site for site in sites(compiled) if "encoder_attn" not in site.path]
    cross = [site for site in sites(compiled) if "encoder_attn" in site.path]
    assert {site.decision for site in own} == {"sparse"}
    assert cross and {(site.decision, site.reason) for site in cross} == {
        ("dense", "the cache holds 20 tokens, within the budget")
    }
    assert graphs() <= 4
