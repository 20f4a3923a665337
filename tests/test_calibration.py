"""A calibrated policy: measured within its bound, cheaper with a larger one, and nothing else is touched."""

from __future__ import annotations

import importlib
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import hsa_compile
from hsa_compile import CalibrationError, LayerPolicy, OptionError, Policy, PolicyError
from hsa_compile.calibration import calibrate
from hsa_compile.calibration.measure import Measure, Run, compare
from hsa_compile.calibration.path import Option, hull, path
from hsa_compile.calibration.search import search
from hsa_compile.calibration.texts import Texts
from hsa_compile.policy import LayerName

from .models.helpers import cache_argument, new_cache, tiny

LENGTH, STEPS = 200, 8
EAGER = {"run": "eager"}
BASE = {"page_size": 16, "recent": 16}
BUDGETS = (32, 96)
CANDIDATES = [LayerPolicy(budget=budget, **BASE) for budget in BUDGETS]
DENSE = LayerPolicy(algorithm="dense")


def uneven() -> Any:
    """Two layers: queries of the first find their own key, so that 32 tokens hold all; the second is nearly flat."""
    model = tiny("llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    with torch.no_grad():
        keys = first.k_proj.weight.view(2, 1, 16, 64)
        first.q_proj.weight.copy_(30 * keys.expand(2, 2, 16, 64).reshape(64, 64))
        second.q_proj.weight.mul_(0.1)
    return model


def text(rows: int = 1, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits_of(model: Any, ids: Tensor, step: Any) -> Tensor:
    """Decoded apart from what is tested: ``[STEPS, B, V]``."""
    cache, found = new_cache(model, "static", ids.shape[1]), []
    given = {cache_argument(model): cache}
    with torch.no_grad():
        model(ids[:, :-STEPS], **given)
        for at in range(ids.shape[1] - STEPS, ids.shape[1]):
            found.append(step(ids[:, at : at + 1].clone(), **given).logits[:, -1])
    return torch.stack(found)


def loss_of(model: Any, ids: Tensor, policy: Policy) -> float:
    compiled = torch.compile(model, backend="hsa", options={"policy": policy, **EAGER})
    p, q = (
        logits_of(model, ids, step).double().softmax(-1).flatten(0, 1) for step in (model, compiled)
    )
    torch._dynamo.reset()
    return float((p * (p / q).log()).sum(-1).mean())


class Remembering(Measure):
    """Runs each policy once, whatever searches ask for."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.known: dict[tuple[str, bool], Run] = {}

    def __call__(self, policy: Policy, watch: bool = False) -> Run:
        key = (policy.canonical(), watch)
        if key not in self.known:
            self.known[key] = super().__call__(policy, watch)
        return self.known[key]


@pytest.fixture(scope="module")
def measure() -> Remembering:
    model = uneven()
    return Remembering(model, Texts.of(model, text(), STEPS), EAGER)


# What is computed.


def test_a_loss_by_hand() -> None:
    dense = torch.tensor([[[0.0, 0.0, -math.inf]], [[0.0, 0.0, 0.0]]])
    sparse = torch.tensor([[[0.0, math.log(3), -math.inf]], [[0.0, 0.0, 0.0]]])
    loss, factor = compare(dense, sparse, torch.tensor([[0], [-1]]))
    # 1/2, 1/2 against 1/4, 3/4; the token that came had 1/2 and has 1/4.
    assert loss == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2)
    assert factor == pytest.approx(2)
    assert compare(dense, dense, None) == (0, None)


def test_the_best_of_a_layer_is_a_convex_hull() -> None:
    a, b, c, d, e = (
        Option("dense", 100, 0.0),
        Option("b", 60, 1.0),
        Option("c", 50, 5.0),  # above the line from b to d
        Option("d", 20, 6.0),
        Option("e", 70, 1.5),  # dearer than b, and worse
    )
    assert hull([a, b, c, d, e]) == [a, b, d]
    assert hull([a, Option("none", 100, 0.0)]) == [a]
    # Dense that reads more than a candidate without an error is not worth it.
    free = Option("free", 90, 0.0)
    assert hull([a, free]) == [free]


def test_the_path_gives_up_what_saves_most_for_its_error() -> None:
    layers = {
        0: [Option("dense", 100, 0.0), Option("half", 50, 1.0), Option("least", 10, 9.0)],
        1: [Option("dense", 100, 0.0), Option("half", 50, 5.0), Option("least", 10, 10.0)],
    }
    # Slopes: layer 0 1/50 and 8/40; layer 1 5/50 and 5/40.
    names = [(given[0], given[1]) for given in path(layers)]
    assert names == [
        ("dense", "dense"),
        ("half", "dense"),
        ("half", "half"),
        ("half", "least"),
        ("least", "least"),
    ]


def test_bounds(measure: Remembering) -> None:
    """Within each, never dearer with a larger one, from dense to the cheapest; and layers get what they need."""
    measure.run_dense()
    everything = search(measure, CANDIDATES, math.inf, 8, show=False)
    nothing = search(measure, CANDIDATES, 0.0, 8, show=False)
    assert nothing.policy == Policy(DENSE)
    assert nothing.chosen.share == 1 and "no sparse policy is within" in str(nothing)
    cheapest = min(everything.curve, key=lambda point: point.tokens)
    assert everything.chosen.tokens == cheapest.tokens < 0.5 * LENGTH
    losses = sorted({run.loss for run in measure.known.values()})
    before = math.inf
    for bound in [low for one in losses for low in (one * 0.999, one, one * 1.001)]:
        found = search(measure, CANDIDATES, bound, 8, show=False)
        assert found.chosen.tokens <= before
        before = found.chosen.tokens
        if found.chosen.kind != "dense":
            assert measure.known[found.policy.canonical(), False].loss <= bound
    uniform = {point.label: point for point in everything.curve if point.kind == "uniform"}
    recalls = [uniform["cuboid 32"].layers[i].recall for i in (0, 1)]
    assert recalls[0] > 0.99 and recalls[1] < 0.5
    # The first layer is sparse at a loss for which the second one has to be dense.
    middle = search(measure, CANDIDATES, 0.1 * uniform["cuboid 96"].loss, 8, show=False)
    layers = [LayerName(i, "") for i in (0, 1)]
    first, second = middle.policy.resolve(layers)
    assert first == CANDIDATES[0] and second == DENSE
    # With a budget for each layer, what one budget for all loses is had for less.
    mixed = search(measure, CANDIDATES, uniform["cuboid 96"].loss, 8, show=False)
    assert mixed.policy.resolve(layers) == CANDIDATES
    assert mixed.chosen.tokens < 0.8 * uniform["cuboid 96"].tokens


def test_what_is_read(measure: Remembering) -> None:
    """Every KV token within the pages read, and for every page a box of two vectors, a word and its record."""
    measure.run_dense()
    layer = measure(Policy(CANDIDATES[0]), watch=True).layers[0]
    lengths = range(LENGTH - STEPS + 1, LENGTH + 1)
    assert layer.attendable == pytest.approx(sum(lengths) / STEPS)
    # Sink, newest and last 16 tokens: two pages at the end, or three where they begin in a page of their own.
    forced = [1 + (length - 1) // 16 - (length - 16) // 16 + 1 for length in lengths]
    tokens = sum(16 * (pages - 1) + (length - 1) % 16 + 1 for pages, length in zip(forced, lengths))
    summary = (2 * 16 * 4 + 24) / (2 * 16 * 4) / 16
    assert layer.read == pytest.approx(tokens / STEPS + summary * layer.attendable)


@pytest.mark.slow
def test_texts_of_two_lengths_are_one_sample(measure: Remembering) -> None:
    measure.run_dense()
    model, policy = measure.model, Policy(CANDIDATES[0])
    both = [text(), text(length=160, seed=1)]
    together = Measure(model, Texts.of(model, both, STEPS), EAGER)
    together.run_dense()
    apart = [loss_of(model, one, policy) for one in both]
    assert together(policy).loss == pytest.approx(sum(apart) / 2, rel=1e-4)


@pytest.mark.slow
def test_files_and_what_is_left_as_it_was(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    model, ids = uneven(), text(2)
    users = torch.compile(model, backend="hsa", options={"policy": {"budget": 48, **BASE}, **EAGER})
    expected = logits_of(model, ids, users)
    sites = hsa_compile.explain(users).sites
    weights = {name: held.clone() for name, held in model.state_dict().items()}
    config, random = torch._dynamo.config.get_config_copy(), torch.get_rng_state()
    saved, drawn = tmp_path / "policy.yaml", tmp_path / "curve.svg"
    reports: list[hsa_compile.Calibration] = []
    # More policies than Dynamo would compile of one function.
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2):
        policy = calibrate(
            model,
            ids,
            0.02,
            steps=STEPS,
            algorithms=["cuboid"],
            budgets=BUDGETS,
            base=BASE,
            trials=2,
            options=EAGER,
            save=saved,
            plot=drawn,
            report=reports.append,
        )
    assert Policy.load(saved) == policy
    assert saved.read_text().startswith("# loss ")
    assert "nats a token" in drawn.read_text()
    assert hsa_compile.explain(users).sites == hsa_compile.explain(model).sites == sites
    assert torch._dynamo.config.get_config_copy() == config
    assert torch.equal(torch.get_rng_state(), random) and torch.is_grad_enabled()
    assert all(torch.equal(held, weights[name]) for name, held in model.state_dict().items())
    counters.clear()
    assert torch.equal(logits_of(model, ids, users), expected)
    assert counters["stats"]["unique_graphs"] == 0, "what the user had compiled is there no more"
    (report,) = reports
    assert report.chosen.kind != "dense" and report.policy is policy
    assert loss_of(model, ids, policy) == pytest.approx(report.chosen.loss, rel=1e-3)
    assert report.chosen.loss <= 0.02
    # The factor of the perplexity, of the tokens that came.
    compiled = torch.compile(model, backend="hsa", options={"policy": policy, **EAGER})
    target = ids[:, 1 - STEPS :].T.unsqueeze(-1)
    nll = [
        -logits_of(model, ids, step)[:-1].double().log_softmax(-1).gather(-1, target).mean()
        for step in (compiled, model)
    ]
    assert report.chosen.perplexity == pytest.approx(math.exp(nll[0] - nll[1]), rel=1e-6)


@pytest.mark.slow
def test_layers_that_cannot_be_sparse_stay_dense_by_name() -> None:
    """The cache of a sliding window is left as it is, and would not be in another release or at another length."""
    model, reports = tiny("gemma3"), []
    calibrate(
        model,
        text(),
        math.inf,
        steps=STEPS,
        algorithms=["cuboid"],
        budgets=[32],
        base=BASE,
        trials=1,
        options=EAGER,
        report=reports.append,
    )
    chosen = reports[0].chosen
    assert set(chosen.layers) == {1} and chosen.share < 0.5
    assert chosen.policy == Policy(CANDIDATES[0], ((0, DENSE),))
    assert loss_of(model, text(), chosen.policy) == pytest.approx(chosen.loss, rel=1e-3)


class Doubled(nn.Module):
    """A model that is called in a way of its own, with a graph break if it is asked for."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.inner, self.broken = uneven(), broken
        self.eval()

    def forward(self, given: dict[str, Any]) -> tuple[Tensor]:
        if self.broken:
            torch._dynamo.graph_break()
        return (self.inner(**given).logits * 2,)


def decode(model: Doubled, ids: Tensor, capacity: int) -> Any:
    def run(step: Any) -> Tensor:
        cache = new_cache(model.inner, "static", capacity)
        given = {cache_argument(model.inner): cache}
        model.inner(ids[:, :-STEPS], **given)
        tokens = (ids[:, at : at + 1].clone() for at in range(ids.shape[1] - STEPS, ids.shape[1]))
        return torch.stack([step({"input_ids": one, **given})[0][:, -1] for one in tokens])

    return run


def test_a_function_decodes_any_model() -> None:
    model, reports = Doubled(False), []
    calibrate(
        model,
        decode(model, text(), LENGTH),
        1e9,
        algorithms=["cuboid"],
        budgets=[32],
        base=BASE,
        trials=0,
        options=EAGER,
        report=reports.append,
    )
    chosen = reports[0].chosen
    assert chosen.policy == Policy(CANDIDATES[0]) and chosen.perplexity is None
    compiled = torch.compile(model, backend="hsa", options={"policy": chosen.policy, **EAGER})
    run = decode(model, text(), LENGTH)
    with torch.no_grad():
        p, q = (run(step).double().softmax(-1) for step in (model, compiled))
    assert chosen.loss == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)


@pytest.mark.parametrize(
    ("broken", "length", "message"),
    [
        (True, LENGTH, "the model has graph breaks: "),
        (False, 40, "no candidate made a layer sparse, so there is nothing to calibrate"),
    ],
)
def test_what_cannot_be_calibrated_is_told(broken: bool, length: int, message: str) -> None:
    model = Doubled(broken)
    with pytest.raises(CalibrationError, match=message):
        calibrate(
            model,
            decode(model, text(length=length), length),
            0.1,
            budgets=[48],
            base=BASE,
            options=EAGER,
            report=None,
        )


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"max_loss": -1}, CalibrationError, "max_loss -1 is not valid; valid: a number >= 0"),
        ({"max_loss": math.nan}, CalibrationError, "max_loss nan"),
        ({"max_loss": "0.1"}, CalibrationError, "max_loss '0.1'"),
        ({"steps": 0}, CalibrationError, "steps 0 is not valid; valid: an int >= 1"),
        ({"steps": LENGTH}, CalibrationError, f"inputs[0] has {LENGTH} tokens, of which steps="),
        ({"steps": 1}, CalibrationError, "steps 1 is not valid; valid: at least 2 here"),
        ({"trials": -1}, CalibrationError, "trials -1"),
        ({"inputs": text().float()}, CalibrationError, "inputs[0] is torch.float32 [1, 200]"),
        ({"inputs": text()[0]}, CalibrationError, "inputs[0] is torch.int64 [200]"),
        ({"inputs": "a text"}, CalibrationError, "inputs[0] is <class 'str'>"),
        ({"inputs": []}, CalibrationError, "inputs of type 'list'"),
        ({"inputs": text(length=600)}, CalibrationError, "600 tokens; valid: at most 512"),
        ({"inputs": text() + 100}, CalibrationError, "valid: 0 to 127"),
        ({"inputs": [text(), text(2)]}, CalibrationError, "inputs have [1, 2] rows"),
        ({"algorithms": ["cubiod"]}, PolicyError, "did you mean 'cuboid'?"),
        (
            {"algorithms": "cuboid"},
            CalibrationError,
            "algorithms 'cuboid' is not valid; valid: a list",
        ),
        ({"algorithms": ["dense"]}, CalibrationError, "dense layers are always considered"),
        ({"budgets": []}, CalibrationError, "budgets [] is not valid"),
        ({"budgets": [0]}, PolicyError, "budget 0 is not valid"),
        ({"budgets": [LENGTH, 4096]}, CalibrationError, "budgets 200, 4096 hold the shortest text"),
        ({"base": {"layers": {0: "dense"}}}, CalibrationError, "base names layers (0)"),
        ({"base": {"page_size": 15}}, PolicyError, "page_size 15"),
        ({"options": {"policy": {}}}, CalibrationError, "options hold a 'policy'"),
        ({"options": {"run": "eagr"}}, OptionError, "did you mean 'eager'?"),
        ({"save": "policy.yml_"}, CalibrationError, "did you mean '.yml'?"),
        ({"save": "/no/such/policy.yaml"}, CalibrationError, "there is no folder '/no/such'"),
        ({"model": nn.Linear(2, 2).eval()}, CalibrationError, "'Linear' is no decoder of trans"),
        ({"model": print}, CalibrationError, "model of type 'builtin_function_or_method'"),
    ],
    ids=str,
)
def test_wrong_input_is_told_before_anything_runs(changed, error, message, monkeypatch) -> None:
    monkeypatch.setattr(Measure, "run_dense", lambda self: pytest.fail("it ran"))
    given = {"model": tiny("llama"), "inputs": text(), "max_loss": 0.1, "steps": 16, "report": None}
    given |= {"budgets": [64]} | changed
    with pytest.raises(error, match=re.escape(message)):
        calibrate(given.pop("model"), given.pop("inputs"), given.pop("max_loss"), **given)


def test_a_model_that_trains_or_is_compiled_is_refused() -> None:
    with pytest.raises(CalibrationError, match="in training mode"):
        calibrate(tiny("llama").train(), text(), 0.1)
    with pytest.raises(CalibrationError, match=r"an nn\.Module that is not compiled"):
        calibrate(torch.compile(tiny("llama")), text(), 0.1)


def test_a_plot_without_matplotlib_is_told_first(monkeypatch) -> None:
    load = importlib.import_module

    def without(name: str) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return load(name)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(CalibrationError, match=r"needs matplotlib \(pip install matplotlib\)"):
        calibrate(tiny("llama"), text(), 0.1, budgets=[64], plot="curve.png")


@pytest.mark.slow
def test_inductor_measures_what_it_returns() -> None:
    """Compiled for real, with what the text has of two rows; the same arguments give the same policy."""
    model, ids, reports = uneven(), text(2), []
    given = {"steps": STEPS, "budgets": BUDGETS, "base": BASE, "trials": 3}
    policies = [calibrate(model, ids, 0.01, **given, report=reports.append) for _ in range(2)]
    assert policies[0] == policies[1] and reports[0] == reports[1]
    compiled = torch.compile(model, backend="hsa", options={"policy": policies[0]})
    p, q = (logits_of(model, ids, step).double().log_softmax(-1) for step in (model, compiled))
    loss = float((p.exp() * (p - q)).sum(-1).mean())
    assert loss == pytest.approx(reports[0].chosen.loss, rel=1e-3, abs=1e-9) and loss <= 0.01
