"""Models that choose their own tokens, and flex_attention, through the templates. On a GPU only."""

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import hsa_compile

from ..models import families

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

PROMPT, STEPS, CAPACITY = 60, 8, 112


def logits_of(model, step, kind: str) -> Tensor:
    from ..models.helpers import cache_argument

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, families.VOCABULARY, (2, PROMPT + STEPS), generator=generator).cuda()
    given = {cache_argument(model): families.new_cache(model, kind, CAPACITY), "use_cache": True}
    with torch.no_grad():
        model(ids[:, :PROMPT], **given)
        return torch.stack(
            [
                step(ids[:, at : at + 1].clone(), **given).logits.clone()
                for at in range(PROMPT, PROMPT + STEPS)
            ]
        )


@pytest.mark.parametrize(
    ("kind", "mode"), [("static", None), ("static", "reduce-overhead"), ("dynamic", None)]
)
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_the_models_own_choice(family: str, kind: str, mode: str | None) -> None:
    """16 of 60 tokens, by the model's own indexer: what it computes itself."""
    torch._dynamo.reset()
    config = families.config(family)
    config.index_topk = 16
    # Experts of transformers wait for the device, which a CUDA graph cannot.
    config.mlp_layer_types = ["dense"] * config.num_hidden_layers
    torch.manual_seed(0)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().cuda()
    options = {} if mode is None else {"mode": mode}
    compiled = torch.compile(model, backend="hsa", options=options)
    got, expected = logits_of(model, compiled, kind), logits_of(model, model, kind)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert "sparse" in {site.decision for site in hsa_compile.explain(compiled).sites}


class Flex(nn.Module):
    """A static cache under a soft cap and linear biases."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, q, k, v, keys, values, at):
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v)

        def score(score, b, h, q_idx, kv_idx):
            capped = 20.0 * torch.tanh(score / 20.0)
            return torch.where(kv_idx <= at[0], capped + 0.01 * (h + 1) * kv_idx, -float("inf"))

        return flex_attention(q, keys, values, score_mod=score, enable_gqa=True) * self.one


def test_flex_attention_as_the_eager_ops() -> None:
    model, results = Flex().cuda(), []
    for run in ("inductor", "eager"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        policy = {"budget": 96, "page_size": 16, "recent": 32}
        step = torch.compile(
            model, backend="hsa", options={"policy": policy, "run": run, "strict": True}
        )
        keys, values = torch.randn(2, 2, 2, 512, 64, device="cuda").unbind()
        draw = functools.partial(torch.randn, device="cuda")
        outs = []
        with torch.no_grad():
            for i in range(4):
                k, v = draw(2, 2, 2, 1, 64).unbind()
                at = torch.tensor([400 + i], device="cuda")
                outs.append(step(draw(2, 8, 1, 64), k, v, keys, values, at).clone())
        results.append(torch.stack(outs))
        assert {site.decision for site in hsa_compile.explain(step).sites} == {"sparse"}
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)
