"""A budget for each layer: the cheapest policy that stays within a loss, found by measuring on a text.

python examples/calibrate.py                       # a tiny Llama with random weights, over at once
python examples/calibrate.py path/to/model text.txt 0.01 policy.yaml
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import hsa_compile


def tiny() -> tuple[Any, torch.Tensor]:
    """Two layers: the queries of the first find their own key, the second attends to everything evenly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=256,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).eval()
    first, second = (layer.self_attn for layer in model.model.layers)
    with torch.no_grad():
        first.q_proj.weight.copy_(30 * first.k_proj.weight)
        second.q_proj.weight.mul_(0.1)
    return model, torch.randint(config.vocab_size, (1, 400))


def pretrained(folder: str, text: str) -> tuple[Any, torch.Tensor]:
    """A model of transformers, and as much of a text as 4,096 tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
    with open(text, encoding="utf-8") as file:
        ids = tokenizer(file.read(), return_tensors="pt").input_ids
    return model, ids[:, :4096]


if len(sys.argv) > 1:
    model, ids = pretrained(*sys.argv[1:3])
    max_loss, save = float(sys.argv[3]), sys.argv[4]
    settings: dict[str, Any] = {"steps": 64}
else:
    model, ids = tiny()
    max_loss, save = 0.005, None
    # "eager" runs the rewritten graphs without Inductor: on a CPU that is sooner done.
    settings = {"steps": 8, "budgets": (64, 128), "algorithms": ["cuboid"], "trials": 3}
    settings |= {"base": {"page_size": 16, "recent": 16}, "options": {"run": "eager"}}

# Prints what was measured, and what was chosen.
policy = hsa_compile.calibrate(model, ids, max_loss, save=save, **settings)

# What it is for: torch.compile(model, backend="hsa", options={"policy": policy}), or the file in place of the policy.
for key, layer in policy.layers:
    print(f"layer {key} differs: {layer.algorithm} {layer.budget}")
