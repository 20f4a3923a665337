"""A model with graph breaks: Dynamo compiles it in parts, and layers of one part cannot be told from another's."""

import re

import pytest
import torch
from torch import Tensor, nn

import hsa_compile

from .models.helpers import decode, request, tiny

LENGTH = {"length": 60, "steps": 2, "capacity": 128}
DEFAULT = {"budget": 32, "page_size": 16, "recent": 16}


def broken(where: str) -> nn.Module:
    model = tiny("llama", "sdpa")
    for layer in model.model.layers:
        if where == "behind layers":
            layer.register_forward_hook(lambda *_: torch._dynamo.graph_break())
        else:
            layer.self_attn.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    return model


def compiled(model: nn.Module, policy: object) -> nn.Module:
    return torch.compile(model, backend="hsa", options={"run": "eager", "policy": policy})


@pytest.mark.parametrize("where", ["behind layers", "before attention"])
def test_a_default_policy_holds_in_every_part(where: str) -> None:
    model, asked = broken(where), request(1, **LENGTH)
    whole = tiny("llama", "sdpa")
    want = decode(whole, compiled(whole, {"default": DEFAULT}), "static", asked)
    torch._dynamo.reset()
    step = compiled(model, {"default": DEFAULT})
    got = decode(model, step, "static", asked)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-5, atol=1e-5)
    assert "sparse" in {site.decision for site in hsa_compile.explain(step).sites}


@pytest.mark.parametrize("where", ["behind layers", "before attention"])
@pytest.mark.parametrize(
    "key",
    [
        0,
        *(pytest.param(key, marks=pytest.mark.slow) for key in ("-1", "*")),
        "model.layers.0.self_attn",
    ],
)
def test_layer_keys_are_refused(where: str, key: object) -> None:
    model, asked = broken(where), request(1, **LENGTH)
    step = compiled(model, {"default": DEFAULT, "layers": {key: "dense"}})
    with pytest.raises(Exception, match=r"graph break.*valid: a policy with 'default' alone"):
        decode(model, step, "static", asked)


def test_a_part_without_attention_needs_no_layers() -> None:
    class Loud(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny("llama", "sdpa")

        def forward(self, hidden: Tensor) -> Tensor:
            hidden = self.model.lm_head(hidden)
            torch._dynamo.graph_break()
            return hidden + 1

    model = Loud()
    step = compiled(model, {"default": DEFAULT, "layers": {0: "dense"}})
    with torch.no_grad():
        x = torch.randn(1, 1, model.model.config.hidden_size)
        torch.testing.assert_close(step(x), model(x))
    assert re.fullmatch(
        r"no attention was found in the compiled graphs; the model has graph breaks: .*",
        str(hsa_compile.explain(step)),
    )


def test_a_function_is_found_by_itself() -> None:
    """``explain`` and ``stats`` of a compiled function, which has no parameters."""
    model, asked = tiny("llama", "sdpa"), request(1, **LENGTH)

    def step(*args: object, **kwargs: object) -> object:
        return model(*args, **kwargs)

    def other(*args: object, **kwargs: object) -> object:
        return model(*args, **kwargs)

    run = torch.compile(
        step, backend="hsa", options={"run": "eager", "policy": {"default": DEFAULT}}
    )
    decode(model, run, "static", asked)
    assert [site.decision for site in hsa_compile.explain(run).sites] == ["sparse", "sparse"]
    assert len(hsa_compile.stats(run).layers) == 2
    assert len(hsa_compile.stats(model).layers) == 2
    assert not hsa_compile.stats(other).layers
    with pytest.raises(hsa_compile.HsaError, match=r"3 is not valid; valid: an nn\.Module"):
        hsa_compile.stats(3)
