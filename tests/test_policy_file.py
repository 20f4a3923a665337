"""Policy files: JSON and YAML, and the words of every error."""

import json
import re
import sys
from pathlib import Path

import pytest

from hsa_compile.errors import PolicyError
from hsa_compile.policy import LayerName, LayerPolicy, Policy, describe

LAYERS = [LayerName(i, f"model.layers.{i}.self_attn") for i in range(8)]


def says(*parts: str) -> str:
    """A pattern for a message with these parts, in this order."""
    return ".*".join(re.escape(part) for part in parts)


YAML = """\
default: {algorithm: quest, budget: 1024}
layers:
  0-1: dense
  -1: {budget: 0.5}
  -3--2: mean
  "*.4.*": dense
"""


def test_yaml_and_json_files_say_the_same(tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "policy.yaml").write_text(YAML)
    policy = Policy.load(tmp_path / "policy.yaml")
    assert [describe(one).split(" sink")[0] for one in policy.resolve(LAYERS)] == [
        "dense",
        "dense",
        "quest budget=1024 page=auto",
        "quest budget=1024 page=auto",
        "dense",
        "mean budget=2048 page=auto",
        "mean budget=2048 page=auto",
        "quest budget=0.5 page=auto",
    ]
    (tmp_path / "policy.JSON").write_text(json.dumps(policy.to_dict()))
    assert Policy.load(tmp_path / "policy.JSON") == policy


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("p.json", '{"default":\n dense}', ["p.json': line 2, column 2: "]),
        ("p.json", '{"layers": {"0": "dense", "0": "mean"}}', ["key '0' is there twice"]),
        ("p.json", '{"budget": NaN}', ["p.json': default: budget nan"]),
        ("p.json", '"dense"', ["p.json': content 'dense'", "keys 'default' and 'layers'"]),
        ("p.yaml", "", ["p.yaml': content None", "keys 'default' and 'layers'"]),
        ("p.yaml", "default: dense\nlayers: [", ["p.yaml': line 2, column 10: "]),
        ("p.yaml", "layers:\n  *.4: dense\n", ["p.yaml': line 2, "]),
        ("p.yml", "layers:\n  0: dense\n  0: mean\n", ["line 3: key '0' is there twice"]),
        ("p.yaml", "layers: {0: {budget: 2001-99-99}}", ["p.yaml': cannot be parsed: month"]),
        ("p.yaml", "layers: {0: {budgte: 1}}", ["p.yaml': layers[0]: unknown field 'budgte'"]),
        ("p.yaml", "layers: &a\n  0: *a\n", ["p.yaml': layers[0]: unknown field 0"]),
    ],
)
def test_a_bad_file_names_itself_and_the_place(tmp_path, name, text, message):
    if not name.endswith(".json"):
        pytest.importorskip("yaml")
    (tmp_path / name).write_text(text)
    with pytest.raises(PolicyError, match=says("policy file", *message)):
        Policy.load(tmp_path / name)


def test_a_missing_file_names_the_one_that_is_there(tmp_path):
    (tmp_path / "policy.yml").write_text("{}")
    with pytest.raises(PolicyError, match=says("no such file; did you mean 'policy.yml'?")):
        Policy.load(str(tmp_path / "policy.yaml"))
    with pytest.raises(PolicyError, match=says("policy file", "no such file") + "$"):
        Policy.load(Path("no") / "such" / "folder.json")


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "p.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PolicyError, match=says("p.json': cannot be read: 'utf-8'")):
        Policy.load(tmp_path / "p.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(PolicyError, match=says("folder.json': cannot be read: ")):
        Policy.load(tmp_path / "folder.json")


def test_yaml_without_pyyaml_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "p.yaml").write_text(YAML)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(PolicyError, match=says("needs PyYAML (pip install PyYAML)", ".json")):
        Policy.load(tmp_path / "p.yaml")


POLICIES = [
    None,
    "dense",
    "accurate",
    {"budget": 0.25, "pool": 3, "recent": 0},
    {
        "default": "dense",
        "layers": {"1-2": {"algorithm": "mean", "budget": 1}, -1: {"preset": "quest"}},
    },
    {"default": {"budget": 1}, "layers": {"*.2.*": {"budget": 1.0}, "3": "default", "5?": "dense"}},
    {"default": {"placement": "host"}, "layers": {0: {"algorithm": "dense"}}},
]


@pytest.mark.parametrize("source", POLICIES, ids=str)
@pytest.mark.parametrize("name", ["policy.yaml", "policy.json"])
def test_what_is_saved_loads_equal(tmp_path, name, source):
    policy = Policy.load(source)
    policy.save(tmp_path / name, note="measured\ntwice")
    assert Policy.load(tmp_path / name) == policy
    text = (tmp_path / name).read_text()
    assert "monitor" not in text, "defaults are not spelled out"
    assert text.startswith("# measured\n# twice\ndefault:" if name.endswith("yaml") else "{\n")


RECORDS = [
    # A layer that goes back to what is usual, in which the field is of no use.
    Policy(
        LayerPolicy(algorithm="heavy_hitters", decay=0.5),
        (("0", LayerPolicy(algorithm="mean")), ("1", LayerPolicy(algorithm="heavy_hitters"))),
    ),
    # Fields without use, as dataclasses.replace leaves them.
    Policy(LayerPolicy(decay=0.5, prototypes=8, min_budget=16)),
    Policy(layers=(("2", LayerPolicy(algorithm="streaming", group_reduce="max")),)),
]


@pytest.mark.parametrize("policy", RECORDS, ids=["usual", "idle", "idle layer"])
def test_what_has_no_effect_is_kept_too(tmp_path, policy):
    policy.save(tmp_path / "policy.yaml")
    assert Policy.load(tmp_path / "policy.yaml") == policy
    assert Policy.load(policy.to_dict()) == policy


def test_a_saved_file_is_readable(tmp_path):
    policy = Policy.load(
        {"default": {"budget": 512}, "layers": {"0-1": "dense", 5: {"algorithm": "mean"}}}
    )
    policy.save(tmp_path / "policy.yml")
    assert (tmp_path / "policy.yml").read_text() == (
        "default: {algorithm: cuboid, budget: 512}\n"
        "layers:\n"
        "  0-1: dense\n"
        "  5: {algorithm: mean, budget: 512}\n"
    )


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(
        PolicyError, match=says("policy.yam", "suffix '.yam'", "did you mean '.yaml'?")
    ):
        Policy().save(tmp_path / "policy.yam")
    with pytest.raises(PolicyError, match=says("cannot be written")):
        Policy().save(tmp_path / "none" / "policy.yaml")
