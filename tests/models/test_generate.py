"""``model.generate`` with a compiled model: every strategy gives the tokens that it gives uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hsa_compile
from hsa_compile import LayerPolicy

from .helpers import compile_hsa, request, tiny, transformers
from .reference import by_the_rule

LENGTH, NEW = 40, 20
WHOLE = {"budget": 96, "page_size": 16}


def model(family: str = "llama") -> Any:
    """It never ends a text by itself."""
    made = tiny(family)
    made.generation_config.eos_token_id = None
    return made


def prompts(batch: int) -> dict[str, Tensor]:
    """Of different lengths, padded on the left."""
    asked = request(batch, LENGTH)
    return {"input_ids": asked.ids, "attention_mask": asked.mask[:, :LENGTH]}


def generate(model: Any, batch: int = 2, **how: Any) -> Any:
    torch.manual_seed(5)
    return model.generate(**prompts(batch), **{"max_new_tokens": NEW, "do_sample": False, **how})


STRATEGIES: dict[str, Callable[[], dict[str, Any]]] = {
    "greedy": dict,
    "sampling": lambda: {"do_sample": True, "top_k": 20, "temperature": 0.9},
    "several texts a prompt": lambda: {"do_sample": True, "num_return_sequences": 3},
    "beams": lambda: {"num_beams": 3},
    "logits processors": lambda: {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "prefill in chunks": lambda: {"prefill_chunk_size": 16},
    "drafts looked up in the prompt": lambda: {"batch": 1, "prompt_lookup_num_tokens": 3},
    "drafts of another model": lambda: {"batch": 1, "assistant_model": model("qwen2")},
}
QUICK = ("sampling", "beams")


@pytest.mark.parametrize(
    "strategy",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES],
)
def test_strategies(strategy: str) -> None:
    """With a growing cache; the prefill and the steps of several tokens are left as they were."""
    how = STRATEGIES[strategy]()
    expected = generate(model(), **how)
    compiled = model()
    compiled.forward = compile_hsa(compiled.forward, WHOLE)
    assert torch.equal(generate(compiled, **how), expected)
    sites = hsa_compile.explain(compiled.forward).sites
    assert any(site.decision == "sparse" for site in sites)
    # The first chunk of a prefill makes the cache.
    known = ("query tokens", "concatenated to something that is no graph input")
    left = [site.reason for site in sites if site.decision == "left"]
    assert all(any(reason in why for reason in known) for why in left)
    # A chunk is a step, too; drafts are accepted several at a time, and their number varies.
    steps = NEW if strategy == "prefill in chunks" else NEW - 1
    assert hsa_compile.stats(compiled.forward).steps == steps or "drafts" in strategy


def compile_config(policy: object) -> Any:
    """As users give it; transformers compiles on a GPU only, unless it is told to."""
    config = transformers.CompileConfig(
        backend="hsa", mode=None, fullgraph=False, options={"policy": policy, "run": "eager"}
    )
    config._compile_all_devices = True
    return config


def test_static_cache_that_generate_makes() -> None:
    """``generate`` itself compiles the decode steps; only the last of them attends more than the budget."""
    how = {"cache_implementation": "static", "max_new_tokens": WHOLE["budget"] - LENGTH + 2}
    torch._dynamo.reset()
    expected = generate(model(), **how)
    compiled = model()
    got = generate(compiled, **how, compile_config=compile_config(WHOLE))
    assert torch.equal(got[:, :-1], expected[:, :-1])
    sites = hsa_compile.explain(compiled).sites
    assert [(site.index, site.decision) for site in sites] == [(0, "sparse"), (1, "sparse")]
    assert hsa_compile.stats(compiled).steps == how["max_new_tokens"] - 1


def test_static_cache_beyond_the_budget() -> None:
    policy = LayerPolicy(algorithm="cuboid", budget=48, page_size=16, sink=4, recent=16)
    how = {"cache_implementation": "static", "max_new_tokens": 40}
    torch._dynamo.reset()
    with by_the_rule(model(), policy) as reference:
        expected = generate(reference, **how)
    compiled = model()
    got = generate(compiled, **how, compile_config=compile_config(policy))
    assert torch.equal(got, expected)
    assert not torch.equal(got, generate(model(), **how)), "nothing was left out"


def test_attention_weights_are_those_of_the_model() -> None:
    """Whoever asks for the weights gets them: such steps are left as they were."""
    how = {"output_attentions": True, "return_dict_in_generate": True, "max_new_tokens": 4}
    expected = generate(tiny("llama", "eager"), **how)
    compiled = tiny("llama", "eager")
    compiled.forward = compile_hsa(compiled.forward, WHOLE)
    got = generate(compiled, **how)
    assert torch.equal(got.sequences, expected.sequences)
    for mine, theirs in zip(got.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert {site.decision for site in hsa_compile.explain(compiled.forward).sites} == {"left"}
