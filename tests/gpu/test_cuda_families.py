"""Variants of attention through the templates: soft caps, sinks, windows, biases, merged heads. On a GPU only."""

import pytest
import torch
from torch import Tensor

import hsa_compile

from ..models import families

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

PROMPT, STEPS, CAPACITY = 141, 8, 208
VARIANTS = {
    "cohere": "sdpa",
    "falcon": "sdpa",
    "gemma2": "eager",
    "gemma3_text": "sdpa",
    "gpt2": "eager",
    "gpt_oss": "eager",
    "mpt": "eager",
    "phi": "sdpa",
    "qwen3": "eager",
}


def logits_of(model, step, kind: str) -> Tensor:
    """A prompt of 3 rows, the last two padded on the left, and what ``step`` answers to 8 tokens."""
    from ..models.helpers import cache_argument

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, families.VOCABULARY, (3, PROMPT + STEPS), generator=generator).cuda()
    mask = (torch.arange(PROMPT + STEPS) >= torch.tensor([[0], [7], [19]])).long().cuda()
    cache = families.new_cache(model, kind, CAPACITY)
    given = {cache_argument(model): cache, "use_cache": True}
    found = []
    with torch.no_grad():
        model(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT], **given)
        for at in range(PROMPT, PROMPT + STEPS):
            seen = mask[:, : at + 1]
            if kind == "static":
                seen = torch.nn.functional.pad(seen, (0, CAPACITY - at - 1))
            found.append(step(ids[:, at : at + 1].clone(), attention_mask=seen, **given).logits)
    return torch.stack([one.clone() for one in found])


@pytest.mark.parametrize(
    ("family", "kind"),
    [(f, k) for f in VARIANTS for k in ("static", "dynamic") if (f, k) != ("mpt", "static")],
)
def test_a_family_decodes_what_it_decodes_eagerly(family: str, kind: str) -> None:
    torch._dynamo.reset()
    model = families.build(family, VARIANTS[family]).cuda()
    compiled = torch.compile(
        model, backend="hsa", options={"policy": {"budget": 192, "page_size": 16}}
    )
    got, expected = logits_of(model, compiled, kind), logits_of(model, model, kind)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert "sparse" in {site.decision for site in hsa_compile.explain(compiled).sites}


@pytest.mark.parametrize(
    ("family", "kind"),
    [("gemma2", "static"), ("gpt_oss", "static"), ("gpt2", "static"), ("mpt", "dynamic")],
)
def test_a_family_is_as_sparse_as_the_eager_ops(family: str, kind: str) -> None:
    """Fewer tokens than there are: the templates choose, cap and attend what the plain ops do."""
    model = families.build(family, VARIANTS[family]).cuda()
    results = []
    for run in ("eager", "inductor"):
        torch._dynamo.reset()
        policy = {"budget": 64, "page_size": 16, "sink": 4, "recent": 8}
        compiled = torch.compile(model, backend="hsa", options={"policy": policy, "run": run})
        results.append(logits_of(model, compiled, kind))
    exact = logits_of(model, model, kind)
    assert (results[0] - exact).abs().max() > 1e-3
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
