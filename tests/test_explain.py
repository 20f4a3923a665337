"""What ``explain``, ``stats`` and the logs tell."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sympy
import torch
from torch import nn

import hsa_compile

from .runtime.helpers import POLICY, SIZE, Decoder, new_cache, prefill


class TwoLayers(nn.Module):
    """Two cached layers, and one attention that has no cache."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Decoder(0), Decoder(1)])

    def forward(self, x, caches, position):
        for layer, (keys, values) in zip(self.layers, caches):
            x = x + layer(x, keys, values, position).transpose(1, 2).flatten(2)[..., :SIZE]
        q, k, v = self.layers[0].qkv(x)
        return x, nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def setup():
    torch._dynamo.reset()
    model = TwoLayers()
    caches = [new_cache(2), new_cache(2)]
    for layer, cache in zip(model.layers, caches):
        prefill(layer, *cache, torch.randn(2, 100, SIZE))
    return model, (torch.randn(2, 1, SIZE), caches, torch.tensor([100]))


@torch.no_grad()
def test_explain_lists_every_site_and_runs_nothing() -> None:
    model, inputs = setup()
    before = [t.clone() for cache in inputs[1] for t in cache]
    options = {"policy": {"default": POLICY, "layers": {"layers.1": "dense"}}}
    explanation = hsa_compile.explain(model, *inputs, options=options)
    first, second, third = explanation.sites
    assert (first.path, first.index, first.decision) == ("layers.0", 0, "sparse")
    assert first.cache == "static (setitem)"
    assert first.policy == "quest budget=48 page=16 sink=4 recent=16"
    assert "k [2, 2, 128, 16] float32" in first.shapes
    assert (second.path, second.decision, second.reason) == ("layers.1", "dense", "dense by policy")
    assert third.decision == "left" and "no KV cache" in third.reason
    file, line = third.source.rsplit(":", 1)
    assert file.endswith("test_explain.py")
    assert "scaled_dot_product_attention" in Path(file).read_text().splitlines()[int(line) - 1]
    for held, was in zip((t for cache in inputs[1] for t in cache), before):
        torch.testing.assert_close(held, was, rtol=0, atol=0)
    assert hsa_compile.explain(model).sites == (), "nothing has been compiled"
    text = str(explanation)
    assert all(
        word in text for word in ("layers.0", "dense by policy", "test_explain.py", "sparse")
    )


@torch.no_grad()
@pytest.mark.parametrize(
    ("granularity", "more"),
    # The keys of 6 pages; a word for each of the 16 tokens of 64 pages.
    [("two_stage", 4 * 16 * 4 * 96), ("token", 4 * 64 * 16 * 8)],
)
def test_bytes_of_single_tokens_by_hand(granularity: str, more: int) -> None:
    model, inputs = setup()
    rule = {
        "granularity": granularity,
        "budget": 48,
        "page_size": 16,
        "recent": 8,
    }
    if granularity == "two_stage":
        rule["first_stage"] = 2.0
    site = hsa_compile.explain(model, *inputs, options={"policy": rule}).sites[0]
    length = sympy.Symbol("S", integer=True, positive=True)
    sparse = sympy.sympify(site.bytes_sparse, {"S": length})
    assert sparse.subs(length, 1024) == 64 * 4 * (128 + 24) + 4 * 32 * 4 * 48 + more
    assert granularity in site.policy
    # The keys of two stages' 96 tokens are half of as many keys and values.
    assert site.candidates == (48 if granularity == "two_stage" else 0)


@torch.no_grad()
def test_bytes_and_break_even_by_hand() -> None:
    model, inputs = setup()
    site = hsa_compile.explain(model, *inputs, options={"policy": POLICY}).sites[0]
    length = sympy.Symbol("S", integer=True, positive=True)
    dense, sparse = (
        sympy.sympify(text, {"S": length}) for text in (site.bytes_dense, site.bytes_sparse)
    )
    # 2 rows x 2 KV heads; a token is 16 + 16 fp32; a page's summary 2 x 16 fp32 and 24 bytes of words
    assert dense.subs(length, 1000) == 1000 * 4 * 32 * 4
    # 48 tokens of budget are 3 pages; sinks, recent tokens and the newest may touch 1 + 2
    assert sparse.subs(length, 1024) == 64 * 4 * (128 + 24) + 4 * 32 * 4 * 64
    means = {**POLICY, "unselected": "centroids"}
    site_of_means = hsa_compile.explain(model, *inputs, options={"policy": means}).sites[0]
    more = sympy.sympify(site_of_means.bytes_sparse, {"S": length}) - sparse
    # Quest: the mean of keys and that of values, 16 fp32 each, with their words.
    assert more.subs(length, 1024) == 64 * 4 * 2 * (64 + 24)
    crossing = site.break_even
    assert sparse.subs(length, crossing + 16) < dense.subs(length, crossing + 16)
    assert sparse.subs(length, crossing - 16) > dense.subs(length, crossing - 16)


@torch.no_grad()
def test_explain_of_compiled_uses_its_options_and_history() -> None:
    model, inputs = setup()
    compiled = torch.compile(model, backend="hsa", options={"policy": POLICY, "run": "eager"})
    planned = hsa_compile.explain(compiled, *inputs)
    compiled(*inputs)
    done = hsa_compile.explain(compiled)
    assert [s.policy for s in planned.sites] == [s.policy for s in done.sites]
    assert [s.decision for s in done.sites] == ["sparse", "sparse", "left"]


@torch.no_grad()
def test_explain_through_a_graph_break() -> None:
    class Broken(TwoLayers):
        def forward(self, x, caches, position):
            first = super().forward(x, caches, position)
            torch._dynamo.graph_break()
            return first

    torch._dynamo.reset()
    model = Broken()
    _, inputs = setup()
    before = inputs[1][0][0].clone()
    explanation = hsa_compile.explain(model, *inputs, options={"policy": POLICY})
    assert [site.decision for site in explanation.sites] == ["sparse", "sparse", "left"]
    assert "graph break" in explanation.note
    torch.testing.assert_close(inputs[1][0][0], before, rtol=0, atol=0)


@torch.no_grad()
def test_stats_counts_tokens_by_hand() -> None:
    model, inputs = setup()
    compiled = torch.compile(model, backend="hsa", options={"policy": POLICY, "run": "eager"})
    for step in range(4):
        compiled(inputs[0], inputs[1], torch.tensor([100 + step]))
    stats = hsa_compile.stats(compiled)
    assert stats.steps == 4
    assert [layer.path for layer in stats.layers] == ["layers.0", "layers.1"]
    for layer in stats.layers:
        assert layer.tokens_attendable == 101 + 102 + 103 + 104
        # 3 pages of 16, one of them the tail page: token 100 is the fifth token of page 6
        assert layer.tokens_read == (32 + 5) + (32 + 6) + (32 + 7) + (32 + 8)
    assert hsa_compile.stats(nn.Linear(2, 2)).layers == ()
    with pytest.raises(hsa_compile.HsaError, match=r"nn\.Module"):
        hsa_compile.stats(3)


@torch.no_grad()
@pytest.mark.parametrize("whole", [True, False], ids=["module", "function"])
def test_a_model_compiled_twice_is_counted_apart(whole: bool) -> None:
    model, (x, caches, at) = setup()
    steps = [
        torch.compile(
            model if whole else model.forward,
            backend="hsa",
            options={"policy": {**POLICY, "budget": budget}, "run": "eager"},
        )
        for budget in (48, 80, 80)
    ]
    for step, times in zip(steps[:2], (1, 3)):
        for _ in range(times):
            step(x, caches, at)
    # Dynamo takes equal backends and options for one, and so does this.
    for step, steps_done, budget in zip(steps, (1, 3, 3), (48, 80, 80)):
        assert [layer.steps for layer in hsa_compile.stats(step).layers] == [steps_done] * 2
        sites = hsa_compile.explain(step).sites
        assert all(f"budget={budget}" in site.policy for site in sites[:2])
    assert hsa_compile.stats(model).steps == 4


@torch.no_grad()
def test_strict_names_every_site_left() -> None:
    model, inputs = setup()
    compiled = torch.compile(
        model, backend="hsa", options={"policy": POLICY, "run": "eager", "strict": True}
    )
    with pytest.raises(
        Exception, match=r"strict: .*\n.*test_explain.py:\d+\): the keys are computed"
    ):
        compiled(*inputs)


@torch.no_grad()
def test_policy_for_a_layer_that_does_not_exist() -> None:
    model, inputs = setup()
    options = {"policy": {"layers": {"layer.1": "dense"}}, "run": "eager"}
    with pytest.raises(Exception, match=r"'layer\.1'.*did you mean 'layers\.1'"):
        torch.compile(model, backend="hsa", options=options)(*inputs)


@torch.no_grad()
def test_model_without_attention_is_untouched() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.randn(2, 4)
    compiled = torch.compile(model, backend="hsa", options={"strict": True, "run": "eager"})
    torch.testing.assert_close(compiled(x), model(x))
    assert "no attention" in str(hsa_compile.explain(model, x))


def test_recording_autograd_declines() -> None:
    model, inputs = setup()
    explanation = hsa_compile.explain(model, *inputs, options={"policy": POLICY})
    assert {site.decision for site in explanation.sites} == {"left"}
    assert "autograd" in explanation.sites[0].reason


SCRIPT = """
import torch
from tests.test_explain import setup, POLICY
model, inputs = setup()
with torch.no_grad():
    torch.compile(model, backend="hsa", options={"policy": POLICY, "run": "eager"})(*inputs)
"""


def test_logs_and_structured_trace(tmp_path) -> None:
    env = {**os.environ, "TORCH_LOGS": "+hsa_compile", "TORCH_TRACE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, cwd=os.getcwd()
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"layers\.0 sparse: quest budget=48", done.stderr)
    assert "no KV cache" in done.stderr
    trace = "".join(file.read_text() for file in tmp_path.iterdir())
    assert "hsa_compile_explain" in trace and '"path": "layers.1"' in trace
    assert json.dumps("quest budget=48 page=16 sink=4 recent=16") in trace
