"""The accuracy runs: samples hold what they claim, scores and mass are right, and a run goes on where it stopped."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.accuracy import cli, haystack, mass, policies, report, tasks
from benchmarks.accuracy.errors import AccuracyError
from benchmarks.accuracy.store import Store
from hsa_compile import LayerPolicy, Policy, PolicyError
from hsa_compile.ops.select import select_reference
from hsa_compile.ops.strided_pages import strided_pages_reference

from .models.reference import page_summaries

CONTEXT = 700


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, and a few longer tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([haystack.documentation()[:4000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


@pytest.fixture(scope="module")
def setting(tokenizer):
    text = haystack.documentation()[:40_000]
    return tasks.Setting(tokenizer, [haystack.tokenize("documentation", text, tokenizer)], 4)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tokenizer) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=1024,
        eos_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


# Samples.


@pytest.mark.parametrize("task", tasks.TASKS)
def test_samples_are_deterministic(setting, task):
    assert tasks.make(task, 1, CONTEXT, setting) == tasks.make(task, 1, CONTEXT, setting)
    others = [tasks.make(task, index, CONTEXT, setting) for index in range(3)]
    assert len({tuple(sample.context) for sample in others}) == 3


@pytest.mark.parametrize("question", tasks.QUESTIONS)
@pytest.mark.parametrize("task", tasks.NEEDLES)
def test_the_facts_are_in_the_context_at_their_depths(tokenizer, setting, task, question):
    given = tasks.Setting(tokenizer, setting.haystacks, setting.samples, question=question)
    for index in range(setting.samples):
        sample = tasks.make(task, index, CONTEXT, given)
        assert len(sample.context) == CONTEXT
        assert len(sample.facts) == len(sample.expected)
        for at, expected in zip(sample.facts, sample.expected):
            line = tokenizer.decode(sample.context[at:]).split("\n")[1]
            assert expected in line
            assert line.startswith(f"VAR {expected} = " if task == "tracking" else "One of the")
        whole = tokenizer.decode([*sample.context, *sample.forced])
        assert sample.forced and not whole.endswith(("\n", " "))
        assert len(sample.forced) == 1 or question == "sparse"


def test_depths_are_spread_evenly(tokenizer, setting):
    given = tasks.Setting(tokenizer, setting.haystacks, 5)
    depths = [tasks.make("single", index, 4000, given).depths[0] for index in range(5)]
    assert depths == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9], abs=0.03)
    values = tasks.make("multi-value", 2, 4000, given).depths
    assert values == pytest.approx([0.125, 0.375, 0.625, 0.875], abs=0.03)


def test_only_the_first_of_several_keys_is_asked_for(tokenizer, setting):
    sample = tasks.make("multi-key", 2, CONTEXT, setting)
    text, asked = tokenizer.decode(sample.context), tokenizer.decode(sample.forced)
    facts = [line for line in text.split("\n") if line.startswith("One of the special")]
    assert len(facts) == tasks.FACTS
    (fact,) = [line for line in facts if sample.expected[0] in line]
    name = fact.split(" for ")[1].split(" is: ")[0]
    assert asked.count(name) == 2
    assert sum(name in line for line in facts) == 1


def test_a_chain_is_assigned_in_order(tokenizer, setting):
    sample = tasks.make("tracking", 0, CONTEXT, setting)
    text, asked = tokenizer.decode(sample.context), tokenizer.decode(sample.forced)
    value = asked.split("the value ")[1].split(" ")[0]
    lines = [f"VAR {sample.expected[0]} = {value}"]
    lines += [f"VAR {b} = VAR {a}" for a, b in itertools.pairwise(sample.expected)]
    places = [text.index(f"\n{line}\n") for line in lines]
    assert places == sorted(places)
    assert text.count("VAR") == 2 * (2 * len(lines) - 1)  # and another chain of the same length


def test_a_continuation_goes_on_where_the_context_ends(setting):
    sample = tasks.make("perplexity", 3, CONTEXT, setting)
    assert len(sample.context) == CONTEXT and len(sample.forced) == setting.continuation + 1
    ids, whole = setting.haystacks[0].ids, [*sample.context, *sample.forced]
    assert any(ids[at : at + len(whole)] == whole for at in range(len(ids) - len(whole) + 1))


def test_a_chat_template_frames_the_text(tokenizer, setting, monkeypatch):
    template = (
        "{% for m in messages %}<user>{{ m.content }}<over>{% endfor %}"
        "{% if add_generation_prompt %}<model>{% endif %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    sample = tasks.make("single", 0, CONTEXT, setting)
    assert len(sample.context) == CONTEXT
    assert tokenizer.decode(sample.context).startswith("<user>Some special")
    assert "<over><model>The special magic number" in tokenizer.decode(sample.forced)


def test_what_does_not_fit_is_told(tokenizer, setting):
    with pytest.raises(AccuracyError, match="a context of 50 tokens has no room for task 'single'"):
        tasks.make("single", 0, 50, setting)
    with pytest.raises(AccuracyError, match=r"'documentation' has .* tokens, and a sample needs"):
        tasks.make("perplexity", 0, 100_000, setting)
    with pytest.raises(AccuracyError, match="did you mean 'documentation'"):
        haystack.text_of("documentatoin")


# Scores.


def test_a_score_is_the_share_of_whole_words_found():
    assert tasks.score("It is 1234567.", ["1234567"]) == 1
    assert tasks.score("It is 12345678.", ["1234567"]) == 0
    assert tasks.score("abc, DEF and ghi", ["ABC", "def", "xyz", "gh"]) == 0.5
    assert tasks.score("", ["1"]) == 0


def test_an_answer_is_complete_when_nothing_can_change_its_score():
    assert not tasks.complete("It is 1234567", ["1234567"])  # a digit may follow
    assert tasks.complete("It is 1234567.", ["1234567"])
    assert not tasks.complete("1, 2", ["1", "2"])


# Captured mass.


def _case(dtype=torch.float32):
    """Two rows, six query heads on two KV heads, 75 tokens, of which the rows see 70 and 61."""
    torch.manual_seed(1)
    q, keys = torch.randn(2, 6, 1, 8, dtype=dtype), torch.randn(2, 2, 75, 8, dtype=dtype)
    seen = torch.zeros(2, 1, 1, 75, dtype=torch.bool)
    seen[0, ..., :70], seen[1, ..., 5:66] = True, True
    return q, keys, seen


def test_mass_is_that_of_attention_written_out():
    q, keys, seen = _case()
    got = mass.Step(q, keys, seen, 0.4).mass
    for row, head in itertools.product(range(2), range(2)):
        weights = torch.zeros(75)
        for query in q[row, 3 * head : 3 * head + 3, 0]:
            scores = [
                math.exp(0.4 * float(query @ key)) if see else 0.0
                for key, see in zip(keys[row, head], seen[row, 0, 0])
            ]
            weights += torch.tensor(scores) / sum(scores) / 3
        torch.testing.assert_close(got[row, head], weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("algorithm", ["cuboid", "mean", "quest", "streaming", "three_level"])
def test_captured_mass_against_brute_force(algorithm, additive):
    q, keys, seen = _case()
    policy = LayerPolicy(algorithm=algorithm, budget=48, page_size=16, sink=2, recent=3)
    mask = torch.where(seen, 0.0, -math.inf) if additive else seen
    step = mass.Step(q, keys, mask, 0.4)
    got, best = step.captured(policy)
    ids = step.selected(policy)
    summary, bits = step._summary(policy.score, 16)
    if algorithm != "streaming":  # which keeps nothing of a page
        torch.testing.assert_close(summary, page_summaries(keys, seen, policy))
    rule = (16, 5, 3, 0, 2, 3)
    if algorithm == "three_level":
        reference, _ = strided_pages_reference(bits, 2, 2, *rule)
    else:
        scored = (q, summary, bits, 0.4, algorithm)
        reference, _ = select_reference(*scored, *rule, "softmax_mean")
    assert torch.equal(ids, reference)
    pages = torch.nn.functional.pad(step.mass, (0, 5)).unflatten(-1, (5, 16)).sum(-1)
    always = [{0, 4}, {0, 3, 4}]  # tokens 0, 1 and 67 to 69; 5, 6 and 63 to 65
    for row, head in itertools.product(range(2), range(2)):
        chosen = [int(page) for page in ids[row, head] if page >= 0]
        assert always[row] <= set(chosen) and len(chosen) == 3
        held = pages[row, head]
        assert float(got[row, head]) == pytest.approx(float(held[chosen].sum()), abs=1e-6)
        most = max(
            float(held[list(some)].sum())
            for some in itertools.combinations(range(5), 3)
            if always[row] <= set(some)
        )
        assert float(best[row, head]) == pytest.approx(most, abs=1e-6)


def test_what_fits_into_the_budget_is_captured_whole():
    step = mass.Step(*_case(), 0.4)
    for policy in (LayerPolicy(budget=80, page_size=64), LayerPolicy(algorithm="dense")):
        for found in step.captured(policy):
            torch.testing.assert_close(found, torch.ones(2, 2))
    got, best = step.captured(LayerPolicy(budget=0.5, page_size=16, recent=1))
    assert (got < 1).all() and (got <= best + 1e-6).all()


def test_a_share_of_the_softmax_bounds_what_is_captured():
    q, keys, seen = _case()
    step = mass.Step(3 * q, keys, seen, 1.0)
    policy = LayerPolicy(budget=64, page_size=16, sink=0, recent=1, min_budget=0)
    counts = []
    for top_p in (1.0, 0.9, 0.2):
        chosen = dataclasses.replace(policy, top_p=top_p)
        counts.append((step.selected(chosen) >= 0).sum(-1)[0])  # the other row is within the budget
        got, best = step.captured(chosen)
        assert (got <= best + 1e-6).all()
    assert (counts[0] == 4).all() and (counts[2] < counts[0]).any()
    assert (counts[2] <= counts[1]).all() and (counts[1] <= counts[0]).all()


def test_a_soft_cap_is_part_of_the_true_mass():
    q, keys, seen = _case()
    scores = 0.4 * torch.einsum("bhgd,bhsd->bhgs", q[:, :, 0].unflatten(1, (2, 3)), keys)
    scores = (2 * torch.tanh(scores / 2)).masked_fill(~seen, -math.inf)
    got = mass.Step(q, keys, seen, 0.4, softcap=2.0).mass
    torch.testing.assert_close(got, scores.softmax(-1).mean(2))


def test_quantiles_of_bins():
    counts = mass.bins(torch.tensor([0.004, 0.5, 0.5, 0.991, 0.998, 1.0]))
    assert len(counts) == 101 and sum(counts) == 6
    assert (counts[0], counts[50], counts[99], counts[100]) == (1, 2, 1, 2)
    assert [mass.quantile(counts, share) for share in (0.05, 0.3, 0.9)] == [0.0, 0.5, 1.0]


# Policies and options.


def test_policies_of_a_run(tmp_path):
    grid = policies.grid(["cuboid", "streaming"], [256], [16, 32])
    assert list(grid) == ["cuboid 256/16", "cuboid 256/32", "streaming 256/16", "streaming 256/32"]
    path = tmp_path / "mine.yaml"
    path.write_text("default: {budget: 64, placement: host}\nlayers: {0: dense}\n")
    named = policies.explicit(["quest", "dense", str(path)])
    assert list(named) == ["quest", "dense, compiled", "mine"]
    assert policies.on_device(named["mine"]).default == LayerPolicy(budget=64)
    same = {"again": Policy(LayerPolicy(budget=256, page_size=16))}
    assert list(policies.together(grid, same)) == list(grid)


@pytest.mark.parametrize(
    ("arguments", "labels"),
    [
        (["--small"], [f"{name} 256/16" for name in ("cuboid", "mean", "quest", "streaming")]),
        (["--small", "--policy", "quest"], ["quest"]),
        (["--policy", "dense", "--algorithms"], ["dense, compiled"]),
        (["--policy", "fast", "code", "--policy", "mean"], ["fast", "code", "mean"]),
        (
            ["--presets", "--policy", "dense"],
            [*policies.purposes(), "dense, compiled"],
        ),
        (
            ["--policy", "dense", "--algorithms", "mean", "--budgets", "64", "0.1", "--small"],
            ["mean 64/16", "mean 0.1/16", "dense, compiled"],
        ),
    ],
)
def test_which_policies_are_compared(arguments, labels):
    given = cli.parse_arguments([*arguments, "--device", "cpu"])
    cli.settle(given)
    assert list(given.policies) == labels


def test_presets_named_for_a_purpose():
    assert set(policies.purposes()) >= {"balanced", "accurate", "fast", "streaming", "chat", "code"}
    assert not {"default", "dense", "quest"} & set(policies.purposes())


@pytest.mark.parametrize(
    ("layer", "measured"),
    [
        ({}, True),
        ({"algorithm": "three_level"}, True),
        ({"algorithm": "heavy_hitters"}, False),
        ({"granularity": "two_stage"}, False),
        ({"granularity": "token"}, False),
    ],
    ids=str,
)
def test_mass_is_measured_where_a_step_selects_whole_pages(layer, measured):
    assert policies.has_mass(Policy.of({}, {"0": layer})) is measured


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "singel"], "--tasks 'singel' is not valid; .* did you mean 'single'"),
        (["--algorithms", "cubiod"], "--algorithms 'cubiod' .* did you mean 'cuboid'"),
        (["--contexts", "4k"], "--contexts '4k' is not valid; valid: an int >= 1"),
        (["--budgets", "much"], "--budgets 'much' is not valid"),
        (["--budgets", "0"], "budget 0 is not valid"),
        (["--page-sizes", "48"], "page_size 48 is not valid; valid: 8, 16, 32, 64"),
        (["--policy", "qest"], "did you mean 'quest'"),
        (["--dtype", "bf16"], "--dtype 'bf16' is not valid; .* did you mean 'bfloat16'"),
        (["--question", "spares"], "did you mean 'sparse'"),
        (["--algorithms"], "no policy to measure"),
        (["--model", "/no/such/folder"], "--model '/no/such/folder' cannot be loaded"),
        (["--text", "cod"], "--text 'cod' is not valid; .* did you mean 'code'"),
        (["--table"], "--table: .* has no results"),
    ],
)
def test_options_that_are_not_valid(arguments, message, tmp_path, capsys):
    import re

    path = str(tmp_path / "none.json")
    assert cli.main([*arguments, "--device", "cpu", "--json", path]) == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


# Runs.


@pytest.fixture
def arguments(model_folder, tmp_path):
    """A run of a few seconds."""
    text = tmp_path / "book.txt"
    text.write_text(haystack.documentation()[:20_000])
    return [
        *("--model", str(model_folder), "--text", str(text), "--json", str(tmp_path / "out.json")),
        *("--contexts", "600", "--samples", "2", "--device", "cpu", "--batch", "3"),
        *("--tasks", "single", "perplexity", "--continuation", "6"),
        *("--budgets", "128", "--page-sizes", "16", "--positions", "4"),
    ]


def _content(tmp_path):
    return json.loads((tmp_path / "out.json").read_text())


def test_a_run_and_what_it_prints(arguments, tmp_path, capsys, monkeypatch):
    # A policy that keeps everything decodes what dense does.
    whole = tmp_path / "whole.json"
    whole.write_text('{"budget": 1.0, "page_size": 16}')
    assert cli.main([*arguments, "--algorithms", "cuboid", "--policy", str(whole)]) == 0
    content = _content(tmp_path)
    assert {"machine", "versions", "settings", "policies", "results"} <= content.keys()
    results = content["results"]
    assert len(results) == 2 * 2 * 3
    by_policy = {
        label: [r for r in results if r["policy"] == label]
        for label in ("dense", "whole", "cuboid 128/16")
    }
    for ours, theirs in zip(by_policy["whole"], by_policy["dense"]):
        assert ours.get("output") == theirs.get("output")
        assert ours.get("nll") == pytest.approx(theirs.get("nll"), abs=1e-4)
        assert ours["mass"]["captured"] == ours["mass"]["oracle"] == [[1000, 1000]] * 2
    for record in by_policy["cuboid 128/16"]:
        # 128 tokens of some 600 to 750, the last page of them partly filled.
        assert 0.15 < record["read"] < 0.22
        captured, oracle = (torch.tensor(record["mass"][k]) for k in ("captured", "oracle"))
        assert captured.shape == (2, 2) and (captured <= oracle).all() and (captured < 1000).all()
        assert sum(record["mass"]["captured_bins"]) == record["mass"]["positions"] * 4
    assert any(
        ours.get("nll") != theirs.get("nll")
        for ours, theirs in zip(by_policy["cuboid 128/16"], by_policy["dense"])
    )
    assert "cuboid 128/16" in capsys.readouterr().out

    # Again: nothing is decoded, and the file stays as it is.
    monkeypatch.setattr("benchmarks.accuracy.run.decode", None)
    before = (tmp_path / "out.json").read_text()
    assert cli.main([*arguments, "--algorithms", "cuboid", "--policy", str(whole)]) == 0
    assert (tmp_path / "out.json").read_text() == before
    capsys.readouterr()
    assert cli.main(["--table", "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    assert "cuboid 128/16" in printed and "worst layer" in printed


def test_an_interrupted_run_goes_on(arguments, tmp_path, monkeypatch):
    class Interrupted(Exception):
        pass

    calls = 0
    decode = __import__("benchmarks.accuracy.run", fromlist=["decode"]).decode

    def until_the_second_batch(*given):
        nonlocal calls
        calls += 1
        if calls == limit:
            raise Interrupted
        return decode(*given)

    limit = 4  # dense in the second batch is the third
    monkeypatch.setattr("benchmarks.accuracy.run.decode", until_the_second_batch)
    arguments += ["--algorithms", "mean"]
    with pytest.raises(Interrupted):
        cli.main(arguments)
    first = _content(tmp_path)["results"]
    assert len(first) == 2 * 2  # a batch of two samples, dense and sparse
    limit, calls = -1, 0
    assert cli.main(arguments) == 0
    assert calls == 2  # the batch of continuations
    results = _content(tmp_path)["results"]
    assert len(results) == 2 * 2 * 2 and all(record in results for record in first)

    # Another policy: dense decoding runs again for its mass only.
    calls = 0
    assert cli.main([*arguments, "quest"]) == 0
    assert calls == 2 * 2
    more = _content(tmp_path)["results"]
    assert len(more) == 2 * 2 * 3 and all(record in more for record in results)


def test_results_of_runs_side_by_side_are_merged(tmp_path, capsys):
    """Each file has a policy of its own; one of other settings is refused, and nothing is written."""
    settings = {"seed": 0}
    record = {"model": "m", "task": "single", "context": 1, "sample": 0, "score": 1.0, "read": 1.0}
    for number, label in enumerate(("quest 16/16", "mean 16/16")):
        policy = Policy.of({"algorithm": label.split()[0], "budget": 16, "page_size": 16})
        store = Store(tmp_path / f"{number}.json")
        store.agree(settings, {label: policy})
        for each in ("dense", label):
            store.add(record | {"policy": each, "text": "t", "steps": 1})
        store.write()
    out = ["--json", str(tmp_path / "out.json"), "--merge"]
    assert cli.main([*out, str(tmp_path / "0.json"), str(tmp_path / "1.json")]) == 0
    content = _content(tmp_path)
    assert [one["policy"] for one in content["results"]] == ["dense", "mean 16/16", "quest 16/16"]
    assert content["policies"].keys() == {"quest 16/16", "mean 16/16"}
    other = Store(tmp_path / "2.json", {"seed": 1})
    other.add(record | {"policy": "dense", "text": "t", "steps": 1})
    other.write()
    assert cli.main([*out, str(tmp_path / "2.json")]) == 2
    assert cli.main([*out, str(tmp_path / "none.json")]) == 2
    assert "no such file" in capsys.readouterr().err.replace("\n", "")
    assert _content(tmp_path) == content


def test_results_of_other_settings_are_not_mixed(arguments, tmp_path, capsys):
    store = Store(tmp_path / "out.json", {"seed": 1}, {}, {})
    record = {"model": "m", "task": "single", "context": 1, "sample": 0, "policy": "dense"}
    store.add(record)
    store.write()
    assert cli.main(arguments) == 2
    assert "was made with seed 1, and this run has 0" in capsys.readouterr().err.replace("\n", " ")
    (tmp_path / "out.json").write_text("{}")
    assert cli.main(arguments) == 2
    assert "is not a file of results" in capsys.readouterr().err.replace("\n", " ")


def test_decoding_that_changes_the_context_is_noticed(model_folder):
    from transformers import AutoModelForCausalLM

    from benchmarks.accuracy.decode import PrefixError, StaticPrefix

    prefix = StaticPrefix(AutoModelForCausalLM.from_pretrained(model_folder).eval(), 64)
    prefix.prefill(torch.randint(300, (2, 40)), 16)
    held = prefix.cache.layers[1].values
    held[:, :, 40:] += 1
    prefix.check()
    held[0, 0, 39, 0] += 1
    with pytest.raises(PrefixError, match="values of the context, layer 1"):
        prefix.check()
    prefix.restore()
    prefix.check()


# The report.


def _record(task, sample, policy, **more):
    names = ("model", "task", "context", "sample", "policy")
    return dict(zip(names, ("m", task, 4096, sample, policy))) | {"read": 0.25} | more


def test_a_report_by_hand():
    bins = [0] * 101
    bins[40], bins[90] = 1, 9
    found = {
        "positions": 2,
        "captured": [[900, 500], [800, 800]],
        "oracle": [[1000, 1000], [1000, 800]],
        "captured_bins": bins,
        "ratio_bins": bins,
    }
    records = [
        _record("single", 0, "dense", score=1.0),
        _record("single", 1, "dense", score=1.0),
        _record("multi-value", 0, "dense", score=0.5),
        _record("tracking", 0, "dense", score=0.0),
        _record("perplexity", 0, "dense", nll=2.0),
        _record("single", 0, "p", score=1.0, mass=found),
        _record("multi-value", 0, "p", score=0.25),
        _record("tracking", 0, "p", score=0.0),
        _record("perplexity", 0, "p", nll=2.1),
        _record("single", 7, "p", score=0.0),  # no dense result to compare with
    ]
    dense, sparse = report.summarise(records).values()
    assert dense.scores["single", 4096] == 1 and dense.perplexity == pytest.approx(math.exp(2))
    assert sparse.relative == {("single", 4096): 1.0, ("multi-value", 4096): 0.5}
    assert sparse.worst == (0.5, ("multi-value", 4096))
    assert sparse.perplexity_ratio == pytest.approx(math.exp(0.1))
    assert sparse.mass is not None
    assert sparse.mass.mean == pytest.approx(0.75) and sparse.mass.p05 == 0.4
    assert sparse.mass.ratio == pytest.approx(0.75 / 0.95)
    assert sparse.mass.worst_layer == (pytest.approx(0.7), 0)
    assert sparse.mass.worst_head == (pytest.approx(0.5), 0, 1)
    assert report.markdown(records).splitlines()[2:] == [
        "| m | 4,096 | dense | 25% |  |  | 7.389 |  |  |",
        "| m | 4,096 | `p` | 25% | 75% | 50% `multi-value` | x 1.1052 | 0.750 | 0.700 (0) |",
    ]


def test_a_policy_that_names_layers_must_fit_the_model(arguments, tmp_path, capsys):
    path = tmp_path / "layers.yaml"
    path.write_text("layers: {9: dense}\n")
    assert cli.main([*arguments, "--policy", str(path)]) == 2
    assert "layer key 9 matches no attention layer" in capsys.readouterr().err.replace("\n", " ")
    with pytest.raises(PolicyError):
        policies.explicit(["nothing.yaml"])
