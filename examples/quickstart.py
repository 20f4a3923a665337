"""The smallest use: a tiny Llama with random weights, its prompt prefilled, decoded sparsely.

python examples/quickstart.py
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import hsa_compile

PROMPT, NEW = 1000, 8

config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
)
model = LlamaForCausalLM(config).eval()  # unmodified transformers code

policy = {"budget": 256, "page_size": 32, "recent": 32}
compiled = torch.compile(model, backend="hsa", options={"policy": policy})

with torch.no_grad():
    cache = StaticCache(config=config, max_cache_len=PROMPT + NEW)
    prompt = torch.randint(config.vocab_size, (1, PROMPT))
    # The prefill is dense and exact, and here not compiled.
    token = model(prompt, past_key_values=cache).logits[:, -1:].argmax(-1)
    for _ in range(NEW):
        token = compiled(token, past_key_values=cache).logits[:, -1:].argmax(-1)

print(hsa_compile.explain(compiled))
for layer in hsa_compile.stats(compiled).layers:
    read, attendable = layer.tokens_read / layer.steps, layer.tokens_attendable / layer.steps
    print(f"{layer.path}: {read:.0f} of {attendable:.0f} KV tokens read per step")
