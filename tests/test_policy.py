"""Policies: fields and their ranges, keys and their order, and the words of every error."""

import dataclasses
import json
import re

import pytest

from hsa_compile.errors import HsaError, PolicyError, nearest
from hsa_compile.policy import (
    PRESETS,
    LayerName,
    LayerPolicy,
    Policy,
    algorithm_names,
    describe,
)

LAYERS = [LayerName(i, f"model.layers.{i}.self_attn") for i in range(8)]
DENSE = LayerPolicy(algorithm="dense")


def sparse_where(policy: Policy, layers: list[LayerName] = LAYERS) -> list[int]:
    """Indices of the layers that a policy leaves sparse."""
    chosen = policy.resolve(layers)
    return [layer.index for layer, one in zip(layers, chosen) if one.algorithm != "dense"]


def says(*parts: str) -> str:
    """A pattern for a message with these parts, in this order."""
    return ".*".join(re.escape(part) for part in parts)


# Fields


def test_the_default_layer():
    assert LayerPolicy() == LayerPolicy("cuboid", 2048, "auto", 4, 64, "softmax_mean", "device")
    assert PRESETS["default"] == PRESETS["cuboid"] == PRESETS["balanced"] == Policy()
    names = ("dense", "cuboid", "heavy_hitters", "mean", "quest", "streaming", "three_level")
    assert algorithm_names() == names


@pytest.mark.parametrize(
    "field, value, message",
    [
        (
            "algorithm",
            "cubiod",
            ["algorithm 'cubiod'", "'dense', 'cuboid', 'heavy_hitters', 'mean', 'quest'"],
        ),
        ("algorithm", "QUEST", ["did you mean 'quest'?"]),
        ("algorithm", None, ["algorithm None", "'dense', 'cuboid'"]),
        ("budget", 0, ["budget 0 is not valid", "int >= 1 (tokens)", "float in (0, 1]"]),
        ("budget", -1, ["budget -1"]),
        ("budget", 0.0, ["budget 0.0"]),
        ("budget", 1.5, ["budget 1.5"]),
        ("budget", float("nan"), ["budget nan"]),
        ("budget", float("inf"), ["budget inf"]),
        ("budget", True, ["budget True"]),
        ("budget", "2048", ["budget '2048'", "or a list of ints >= 1 (tokens of each KV head)"]),
        ("budget", [], ["budget []"]),
        ("budget", [64, 0], ["budget [64, 0]"]),
        ("budget", (64, True), ["budget (64, True)"]),
        ("budget", [0.5, 64], ["budget [0.5, 64]"]),
        ("page_size", 48, ["page_size 48", "8, 16, 32, 64 (tokens) or 'auto'"]),
        ("page_size", 32.0, ["page_size 32.0"]),
        ("page_size", "Auto", ["page_size 'Auto'", "or 'auto'; did you mean 'auto'?"]),
        ("page_size", None, ["page_size None", "8, 16, 32, 64 (tokens) or 'auto'"]),
        ("sink", -1, ["sink -1", "int >= 0 (tokens)"]),
        ("sink", True, ["sink True"]),
        ("recent", 0.5, ["recent 0.5", "int >= 0 (tokens)"]),
        ("group_reduce", "mean", ["group_reduce 'mean'", "'softmax_mean', 'max'"]),
        ("placement", "devise", ["placement 'devise'", "'device', 'host'; did you mean 'device'?"]),
        ("pool", 0.5, ["pool 0.5", "a number from 1 to 64"]),
        ("pool", 65, ["pool 65", "a number from 1 to 64"]),
        ("pool", "2", ["pool '2'", "a number from 1 to 64"]),
        (
            "prefetch",
            "next_ranks",
            ["prefetch 'next_ranks'", "'none', 'next_rank', 'cross_layer'", "mean 'next_rank'?"],
        ),
        ("prefetch", None, ["prefetch None", "'none', 'next_rank', 'cross_layer'"]),
        (
            "granularity",
            "tokens",
            ["granularity 'tokens' is not valid", "'page', 'two_stage', 'token'"],
        ),
        ("granularity", "two-stage", ["did you mean 'two_stage'?"]),
        ("first_stage", 0.5, ["first_stage 0.5", "a number from 1 to 64, times the budget"]),
        ("first_stage", True, ["first_stage True"]),
        ("top_p", 0, ["top_p 0 is not valid", "a number above 0 and up to 1"]),
        ("top_p", 1.5, ["top_p 1.5", "a number above 0 and up to 1"]),
        ("top_p", True, ["top_p True", "a number above 0 and up to 1"]),
        ("min_budget", -1, ["min_budget -1 is not valid", "an int >= 0 (tokens)"]),
        ("min_budget", 64.0, ["min_budget 64.0", "an int >= 0 (tokens)"]),
        ("dense_below", -0.1, ["dense_below -0.1 is not valid", "a number from 0 to 1"]),
        ("dense_below", 1.5, ["dense_below 1.5", "a number from 0 to 1"]),
        ("dense_below", True, ["dense_below True", "a number from 0 to 1"]),
        ("dense_below", float("nan"), ["dense_below nan", "a number from 0 to 1"]),
        ("unselected", "centroid", ["unselected 'centroid'", "mean 'centroids'?"]),
        ("prototypes", 0, ["prototypes 0 is not valid", "an int from 1 to 1024"]),
        ("prototypes", 64.0, ["prototypes 64.0", "an int from 1 to 1024"]),
        ("unselected", None, ["unselected None", "'drop', 'centroids'"]),
        ("monitor", -1, ["monitor -1 is not valid", "an int >= 0 (steps; 0 is never)"]),
        ("monitor", 1.0, ["monitor 1.0", "an int >= 0"]),
        ("monitor_bound", 2, ["monitor_bound 2 is not valid", "a number from 0 to 1"]),
        ("monitor_bound", 0.5, ["monitor_bound 0.5", "0 without a monitor"]),
        ("ahead", 0, ["ahead 0 is not valid", "a number above 0 and up to 4"]),
        ("ahead", 4.5, ["ahead 4.5", "a number above 0 and up to 4"]),
        ("ahead", float("nan"), ["ahead nan", "a number above 0"]),
        ("ahead", True, ["ahead True", "a number above 0"]),
        ("ahead", "0.5", ["ahead '0.5'", "a number above 0"]),
    ],
)
def test_a_bad_field_names_value_and_valid(field, value, message):
    with pytest.raises(PolicyError, match=says(*message)):
        LayerPolicy(**{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"algorithm": "streaming"}, "top_p 0.9 is not valid; valid: 1 with algorithm 'streaming'"),
        (
            {"algorithm": "heavy_hitters"},
            "top_p 0.9 is not valid; valid: 1 with algorithm 'heavy_hitters'",
        ),
        ({"algorithm": "dense"}, "top_p 0.9 is not valid; valid: 1 with algorithm 'dense'"),
        ({"group_reduce": "max"}, "top_p 0.9 is not valid; valid: 1 with group_reduce 'max'"),
        ({"budget": 128}, "min_budget 256 is not valid; valid: at most the budget (128 tokens)"),
        (
            {"budget": [512, 128]},
            "min_budget 256 is not valid; valid: at most the smallest budget (128 tokens)",
        ),
    ],
    ids=str,
)
def test_a_share_needs_an_estimate_and_room(fields: dict[str, object], message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        LayerPolicy(top_p=0.9, **fields)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"algorithm": "streaming"}, "valid: 0 with algorithm 'streaming'"),
        ({"algorithm": "dense"}, "valid: 0 with algorithm 'dense'"),
        ({"group_reduce": "max"}, "valid: 0 with group_reduce 'max'"),
        ({"placement": "host"}, "valid: 0 with placement 'host', whose pool"),
        ({"top_p": 0.4}, "valid: at most top_p (0.4), at which rows stop"),
    ],
    ids=str,
)
def test_dense_below_needs_an_estimate_and_every_page(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(PolicyError, match=says("dense_below 0.5 is not valid; " + message)):
        LayerPolicy(dense_below=0.5, **fields)


def test_dense_below_in_words() -> None:
    layer = LayerPolicy(dense_below=1)
    assert layer.stops == (1.0, 0, [], 1.0)
    assert describe(layer) == describe(LayerPolicy()) + " dense_below=1"
    both = LayerPolicy(dense_below=0.5, top_p=0.9, budget=[512, 256], page_size=32)
    assert both.stops == (0.9, 8, [16, 8], 0.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decay": 0}, "decay 0 is not valid; valid: a number above 0 and up to 1"),
        ({"decay": 1.01}, "decay 1.01 is not valid"),
        ({"decay": True}, "decay True is not valid"),
        ({"decay": "0.9"}, "decay '0.9' is not valid"),
        (
            {"algorithm": "heavy_hitters", "group_reduce": "max"},
            "group_reduce 'max' is not valid; valid: 'softmax_mean' with algorithm 'heavy_hitters'",
        ),
        (
            {"algorithm": "heavy_hitters", "placement": "host", "prefetch": "cross_layer"},
            "prefetch 'cross_layer' is not valid; valid: 'none', 'next_rank' with algorithm 'heavy",
        ),
        (
            {"algorithm": "heavy_hitters", "budget": [64, 32]},
            "budget [64, 32] is not valid; valid: one number with algorithm 'heavy_hitters'",
        ),
    ],
    ids=str,
)
def test_what_accumulates_refuses(fields: dict[str, object], message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        LayerPolicy(**fields)
    assert str(caught.value).startswith(message)


def test_a_decay_in_words() -> None:
    layer = LayerPolicy(algorithm="heavy_hitters", decay=1)
    assert layer.decay == 1.0 and describe(layer).endswith("recent=64 decay=1")
    assert "decay" not in describe(LayerPolicy(algorithm="heavy_hitters"))
    assert "decay" not in describe(LayerPolicy(decay=0.5))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"unselected": "centroids"}, "unselected 'centroids' is not valid; valid: 'drop' with"),
        ({"prefetch": "next_rank"}, "prefetch 'next_rank' is not valid; valid: 'none' with"),
        ({"top_p": 0.9}, "top_p 0.9 is not valid; valid: 1 with algorithm 'three_level'"),
    ],
    ids=str,
)
def test_what_three_levels_have_no_use_for(fields: dict[str, object], message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        LayerPolicy(algorithm="three_level", **fields)
    assert str(caught.value).startswith(message)
    assert "three_level" in str(caught.value)


def test_a_share_in_words() -> None:
    layer = LayerPolicy(top_p=0.9)
    assert layer.stops == (0.9, 8)
    assert LayerPolicy().stops == ()
    assert describe(layer) == describe(LayerPolicy()) + " top_p=0.9 min=256"


def test_signs_are_about_a_cuboid() -> None:
    message = (
        "algorithm 'mean' is not valid; valid: 'cuboid', 'three_level' with granularity 'token'"
    )
    with pytest.raises(PolicyError, match=says(message)):
        LayerPolicy(granularity="token", algorithm="mean")
    assert (
        describe(LayerPolicy(granularity="token")) == describe(LayerPolicy()) + " granularity=token"
    )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "placement",
            "host",
            "placement 'host' is not valid; valid: 'device' with granularity 'two_stage'",
        ),
        (
            "prefetch",
            "next_rank",
            "prefetch 'next_rank' is not valid; valid: 'none' with granularity 'two_stage'",
        ),
        ("top_p", 0.9, "top_p 0.9 is not valid; valid: 1 with granularity 'two_stage'"),
        ("dense_below", 0.5, "dense_below 0.5 is not valid; valid: 0 with granularity 'two_stage'"),
        ("budget", [64, 32], "budget [64, 32] is not valid; valid: one number with granularity"),
        ("unselected", "centroids", "unselected 'centroids' is not valid; valid: 'drop' with"),
        ("algorithm", "three_level", "algorithm 'three_level' is not valid; valid: one with page"),
        ("algorithm", "heavy_hitters", "algorithm 'heavy_hitters' is not valid; valid: one with"),
        (
            "algorithm",
            "streaming",
            "algorithm 'streaming' is not valid; valid: one with page scores",
        ),
    ],
)
def test_what_single_tokens_do_not_combine_with(field: str, value: object, message: str) -> None:
    with pytest.raises(PolicyError, match=says(message)):
        LayerPolicy(granularity="two_stage", **{field: value})


def test_tokens_are_bought_one_by_one() -> None:
    layer = LayerPolicy(granularity="two_stage", budget=100, first_stage=2.5)
    assert not layer.holds(101) and layer.holds(100) and LayerPolicy(budget=100).holds(104)
    assert layer.of_pages == LayerPolicy(budget=250, first_stage=2.5)
    assert LayerPolicy(granularity="two_stage", budget=0.3).of_pages.budget == 1.0
    assert (
        describe(layer)
        == describe(LayerPolicy(budget=100)) + " granularity=two_stage first_stage=2.5"
    )
    layers = Policy.load(
        {"default": {"granularity": "two_stage"}, "layers": {0: {"algorithm": "dense"}}}
    )
    assert sparse_where(layers) == list(range(1, 8))


def test_a_pool_holds_the_selection_and_what_is_loaded_ahead():
    message = ["pool 1.2 is not valid", "at least 1.25", "'next_rank' and ahead 0.25"]
    with pytest.raises(PolicyError, match=says(*message)):
        LayerPolicy(pool=1.2, prefetch="next_rank")
    with pytest.raises(PolicyError, match=says("layers[0]: pool 2.0", "at least 3")):
        Policy.load({"layers": {0: {"prefetch": "next_rank", "ahead": 2}}})
    assert LayerPolicy(pool=1.25, prefetch="next_rank").ahead == 0.25
    # What "next_rank" alone looks at is no fault elsewhere, as pool is none with placement "device".
    assert LayerPolicy(pool=1, ahead=4, prefetch="cross_layer").pool == 1.0
    assert LayerPolicy(prefetch="cross_layer").placement == "device"


def test_a_policy_error_is_a_value_error():
    assert issubclass(PolicyError, ValueError) and issubclass(PolicyError, HsaError)


@pytest.mark.parametrize(
    "budget, page_size, length, pages",
    [
        (1, 32, 1000, 1),
        (32, 32, 1000, 1),
        (33, 32, 1000, 2),
        (2048, 16, 64, 128),
        (1.0, 32, 1000, 32),
        (0.25, 32, 1024, 8),
        (0.25, 32, 1025, 9),
        (0.01, 64, 1, 1),
        (2048, "auto", 32_768, 128),
        (2048, "auto", 32_769, 64),
        (2048, "auto", 98_305, 32),
        (0.5, "auto", 65_536, 1024),
        (0.5, "auto", 98_400, 769),
        # In binary, 0.07 * 3200 is above 224, and would pay for an eighth page.
        (0.07, 32, 3200, 7),
    ],
)
def test_pages_round_the_budget_up(budget, page_size, length, pages):
    assert LayerPolicy(budget=budget, page_size=page_size).pages(length) == pages


def test_a_budget_for_each_kv_head() -> None:
    layer = LayerPolicy(budget=[100, 2048], page_size=16)
    assert layer.budget == (100, 2048) and layer == LayerPolicy(budget=(100, 2048), page_size=16)
    assert (layer.head_pages, layer.pages(10)) == ((7, 128), 128)
    assert layer.stops == (1.0, 0, [7, 128])
    assert dataclasses.replace(layer, top_p=0.5, min_budget=48).stops == (0.5, 3, [7, 128])
    assert LayerPolicy().head_pages == ()
    assert describe(layer) == "cuboid budget=100,2048 page=16 sink=4 recent=64"
    one, other = LayerPolicy(budget=[64]), LayerPolicy(budget=64)
    assert one != other and len({one, other, LayerPolicy(budget=(64,))}) == 2
    assert Policy(one).canonical() != Policy(other).canonical()


def test_dense_pays_for_every_page():
    assert DENSE.pages(50_000) == 1563


def test_pages_are_larger_in_long_caches() -> None:
    """8, 16, 32 and 64 tokens a page; 32 where the length is not known; what was given stays."""
    layer = LayerPolicy(top_p=0.9)
    lengths = (1, 16_384, 16_385, 32_768, 32_769, 98_304, 98_305)
    sizes = [8, 8, 16, 16, 32, 32, 64]
    assert [layer.at_length(tokens).page_size for tokens in lengths] == sizes
    on_host = LayerPolicy(placement="host")
    assert [on_host.at_length(tokens).page_size for tokens in lengths] == [16, 16, *sizes[2:]]
    assert LayerPolicy(placement="host", page_size=8).at_length(1).page_size == 8
    assert layer.at_length(None) == LayerPolicy(top_p=0.9, page_size=32)
    assert (layer.stops, layer.at_length(10**6).stops) == ((0.9, 8), (0.9, 4))
    assert LayerPolicy(page_size=16).at_length(10**6).page_size == 16


def test_one_token_is_not_everything():
    token, everything = LayerPolicy(budget=1), LayerPolicy(budget=1.0)
    assert token != everything
    assert len({token, everything, LayerPolicy(budget=1)}) == 2
    assert Policy(token).canonical() != Policy(everything).canonical()


@pytest.mark.parametrize(
    "policy, line",
    [
        (LayerPolicy(), "cuboid budget=2048 page=auto sink=4 recent=64"),
        (LayerPolicy(algorithm="dense", budget=64), "dense"),
        (
            LayerPolicy("quest", 0.125, 16, 0, 1, "max"),
            "quest budget=0.125 page=16 sink=0 recent=1 group_reduce=max",
        ),
        (
            LayerPolicy(algorithm="three_level", budget=512, prototypes=32),
            "three_level budget=512 page=auto sink=4 recent=64 prototypes=32",
        ),
        (LayerPolicy(unselected="centroids"), describe(LayerPolicy()) + " unselected=centroids"),
        # Where it has no effect it is not described.
        (LayerPolicy(pool=3, prefetch="cross_layer"), describe(LayerPolicy())),
        (LayerPolicy("dense", placement="host", prefetch="cross_layer"), "dense placement=host"),
        (
            LayerPolicy(placement="host", prefetch="cross_layer", ahead=0.5),
            describe(LayerPolicy()) + " placement=host pool=2 prefetch=cross_layer",
        ),
        (
            LayerPolicy(placement="host", prefetch="next_rank", ahead=0.5),
            describe(LayerPolicy()) + " placement=host pool=2 prefetch=next_rank ahead=0.5",
        ),
    ],
)
def test_describe(policy, line):
    assert describe(policy) == line


# Forms


def test_forms_of_the_same_policy(tmp_path):
    file = tmp_path / "quest.json"
    file.write_text('{"default": "quest"}')
    quest = Policy(LayerPolicy(algorithm="quest"))
    for source in (
        "quest",
        quest,
        quest.default,
        {"default": "quest"},
        {"default": {"preset": "quest"}},
        {"algorithm": "quest"},
        {"preset": "quest"},
        str(file),
        file,
    ):
        assert Policy.load(source) == quest


def test_nothing_is_the_default():
    assert Policy.load() == Policy.load({}) == Policy.load("default") == Policy()


def test_a_layer_starts_from_the_default_or_its_preset():
    policy = Policy.load(
        {
            "default": {"budget": 512, "page_size": 16},
            "layers": {
                "0": {"sink": 8},
                "1": {"preset": "mean", "sink": 8},
                "2": "quest",
                "3": LayerPolicy(budget=64),
            },
        }
    )
    assert policy.resolve(LAYERS)[:5] == [
        LayerPolicy(budget=512, page_size=16, sink=8),
        LayerPolicy(algorithm="mean", sink=8),
        LayerPolicy(algorithm="quest"),
        LayerPolicy(budget=64),
        LayerPolicy(budget=512, page_size=16),
    ]


@pytest.mark.parametrize(
    "source, message",
    [
        ("quset", ["policy 'quset'", "'.json', '.yaml', '.yml'; did you mean 'quest'?"]),
        ("policy.toml", ["policy 'policy.toml'", "'.json', '.yaml', '.yml'"]),
        (7, ["policy 7", "a Policy, a mapping, a preset ('default', 'dense'"]),
        ({"defualt": "dense"}, ["unknown key 'defualt'", "did you mean 'default'?"]),
        ({"budgets": 64}, ["policy: unknown key 'budgets'", "did you mean 'budget'?"]),
        ({"0-1": "dense"}, ["unknown key '0-1'", "layer keys such as '0-1' under 'layers'"]),
        ({"layers": {}, "budget": 64}, ["unknown key 'budget'", "put 'budget' into 'default'"]),
        ({"layers": ["dense"]}, ["layers ['dense']", "a mapping of layer keys"]),
        ({"default": None}, ["policy: default: value None", "a preset ('default', 'dense'"]),
        ({"default": "desne"}, ["default: preset 'desne'", "did you mean 'dense'?"]),
        ({"layers": {"0": "desne"}}, ["policy: layers['0']: preset 'desne'", "'dense'"]),
        ({"layers": {0: {"sinks": 1}}}, ["layers[0]: unknown field 'sinks'", "mean 'sink'?"]),
        ({"layers": {"-1": {"budget": 0}}}, ["policy: layers['-1']: budget 0", "int >= 1"]),
        ({"layers": {0: {"preset": 1}}}, ["layers[0]: preset 1", "'default', 'dense'"]),
    ],
)
def test_a_bad_policy_names_the_place(source, message):
    with pytest.raises(PolicyError, match=says(*message)):
        Policy.load(source)


def test_a_budget_for_a_dense_layer_is_refused_and_not_ignored():
    with pytest.raises(PolicyError, match=says("layers[4]: budget 64 has no effect on 'dense'")):
        Policy.load({"default": "dense", "layers": {4: {"budget": 64}}})
    policy = Policy.load(
        {"default": "dense", "layers": {4: {"algorithm": "quest", "budget": 64}, 5: {}}}
    )
    assert policy.resolve(LAYERS)[4:6] == [LayerPolicy("quest", 64), DENSE]


# Keys


@pytest.mark.parametrize(
    "key, indices",
    [
        (0, [0]),
        (-1, [7]),
        ("3", [3]),
        ("-8", [0]),
        ("0-1", [0, 1]),
        (" 2 - 3 ", [2, 3]),
        ("-2--1", [6, 7]),
        ("5--1", [5, 6, 7]),
        ("-8-1", [0, 1]),
        ("6-40", [6, 7]),
        ("4-4", [4]),
        ("model.layers.*", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("*.[02].self_attn", [0, 2]),
        ("model.layers.5.self_attn", [5]),
    ],
)
def test_keys(key, indices):
    policy = Policy.load({"default": "dense", "layers": {key: "cuboid"}})
    assert sparse_where(policy) == indices


def test_later_keys_win():
    policy = Policy.load({"layers": {"*": "dense", "2-5": "cuboid", "*.3.*": "dense"}})
    assert sparse_where(policy) == [2, 4, 5]


def test_layers_without_attention_are_not_counted_as_missing():
    hybrid = [LayerName(i, f"layers.{i}.mixer") for i in (3, 7, 11)]
    policy = Policy.load({"default": "dense", "layers": {"0-3": "quest", "-1": "mean"}})
    assert sparse_where(policy, hybrid) == [3, 11]
    with pytest.raises(PolicyError, match=says("layer key 4 matches", "indices 3, 7, 11,")):
        Policy.load({"layers": {"4": "dense"}}).resolve(hybrid)


def test_without_attention_there_is_nothing_to_match():
    assert Policy.load({"layers": {"40": "dense"}}).resolve([]) == []


@pytest.mark.parametrize(
    "key, message",
    [
        ("3-1", ["layer key '3-1'", "from low to high; did you mean '1-3'?"]),
        ("-1--2", ["layer key '-1--2'", "did you mean '-2--1'?"]),
        ("4-", ["layer key '4-'", "'-2--1'", "did you mean '4--1'?"]),
        ("0,1", ["layer key '0,1'", "an index (3 or -1), a range with both ends"]),
        ("0:2", ["layer key '0:2'"]),
        ("", ["layer key ''"]),
        (True, ["layer key True"]),
        (1.0, ["layer key 1.0"]),
        (None, ["layer key None"]),
    ],
)
def test_a_malformed_key_is_refused_at_load(key, message):
    with pytest.raises(PolicyError, match=says(*message)):
        Policy.load({"layers": {key: "dense"}})


def test_a_key_given_in_two_spellings_is_refused():
    with pytest.raises(PolicyError, match=says("layer key '00' is there twice")):
        Policy.load({"layers": {0: "dense", "00": "mean"}})


def test_a_range_can_turn_out_reversed():
    policy = Policy.load({"layers": {"-2-1": "dense"}})
    assert sparse_where(policy, LAYERS[:3]) == [0, 2]
    with pytest.raises(PolicyError, match=says("'-2-1'", "from 8, this one runs from 6 to 1")):
        policy.resolve(LAYERS)


@pytest.mark.parametrize(
    "key, message",
    [
        (
            8,
            [
                "policy: layer key 8 matches no attention layer; valid: indices 0-7, module paths ",
                "did you mean 7?",
            ],
        ),
        (-12, ["layer key -12 ", "did you mean 0?"]),
        ("9-12", ["layer key '9-12' ", "did you mean 7?"]),
        ("-9", ["layer key -9", "'model.layers.0.self_attn', ", "... (8 in all)"]),
        ("10-20", ["layer key '10-20'", "indices 0-7"]),
        ("model.layer.*.self_attn", ["did you mean 'model.layers.*.self_attn'?"]),
        ("layers.*.self_attn", ["did you mean 'model.layers.*.self_attn'?"]),
        ("model.layers.3.selfattn", ["did you mean 'model.layers.3.self_attn'?"]),
        ("model.layers.3", ["layer key 'model.layers.3'", "did you mean 'model.layers."]),
    ],
)
def test_a_key_for_no_layer_names_those_that_exist(key, message):
    with pytest.raises(PolicyError, match=says(*message)):
        Policy.load({"layers": {key: "dense"}}).resolve(LAYERS)


# Round trips


MIXED = {
    "default": {"budget": 0.5, "sink": 0},
    "layers": {
        "*": "quest",
        0: "dense",
        "-2--1": {"budget": 1.0},
        "model.*.3.*": {"recent": 1, "budget": [64, 32]},
    },
}


def test_to_dict_and_json_round_trip():
    policy = Policy.load(MIXED)
    assert Policy.load(policy.to_dict()) == policy
    again = Policy.load(json.loads(json.dumps(policy.to_dict())))
    assert again == policy and hash(again) == hash(policy)
    assert again.canonical() == policy.canonical()


def test_canonical_tells_orders_apart():
    first = Policy.load({"layers": {"*": "dense", "0": "mean"}})
    second = Policy.load({"layers": {"0": "mean", "*": "dense"}})
    assert first.canonical() != second.canonical()


# Spelling


@pytest.mark.parametrize(
    "name, found",
    [
        ("Max_Autotune", "max_autotune"),
        ("cudagraphs", "triton.cudagraphs"),
        ("stirct", "strict"),
        ("zzz", None),
        ("", None),
    ],
)
def test_nearest(name, found):
    assert nearest(name, ["strict", "max_autotune", "triton.cudagraphs"]) == found


# Presets


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fits_any_model(name):
    policy = Policy.load(name)
    assert policy == PRESETS[name] == Policy.load(policy.to_dict())
    for layers in (LAYERS, LAYERS[:1], LAYERS[3:]):
        assert len(policy.resolve(layers)) == len(layers)


def test_a_preset_brings_its_layers_along():
    assert sparse_where(Policy.load("accurate")) == [1, 2, 3, 4, 5, 6, 7]
    changed = Policy.load({"preset": "accurate", "budget": 512})
    assert changed.resolve(LAYERS)[:2] == [DENSE, LayerPolicy(budget=512, page_size=16)]
    assert sparse_where(Policy.load({"default": "accurate", "layers": {"-1": "dense"}})) == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    assert sparse_where(Policy.load({"default": "accurate", "layers": {"0?": "fast"}})) == list(
        range(8)
    )
    assert sparse_where(Policy.load({"default": "accurate", "layers": {"*": "fast"}})) == list(
        range(8)
    )
    # Of one layer it says what it says of most.
    one = Policy.load(
        {"default": "dense", "layers": {"2": "accurate", "3": {"preset": "accurate", "sink": 8}}}
    )
    assert sparse_where(one) == [2, 3]
    assert one.resolve(LAYERS)[2] == PRESETS["accurate"].default


@pytest.mark.parametrize(
    ("key", "there", "dense"),
    [
        ("0?", LAYERS, [0]),
        (" -1 ?", LAYERS, [7]),
        ("0-1?", LAYERS, [0, 1]),
        ("0?", LAYERS[2:], []),
        ("0-1?", LAYERS[2:], []),
        ("9?", LAYERS, []),
        ("4--1?", LAYERS[:2], []),
    ],
)
def test_a_key_may_be_for_no_layer(key, there, dense):
    policy = Policy.load({"layers": {key: "dense"}})
    found = [layer.index for layer in there if layer.index not in sparse_where(policy, there)]
    assert found == dense
    assert Policy.load(policy.to_dict()) == policy
    strict = Policy.load({"layers": {key.rstrip("? "): "dense"}})
    if not dense:
        with pytest.raises(PolicyError):
            strict.resolve(there)


def test_optional_keys_are_checked_too():
    with pytest.raises(
        PolicyError, match=says("'3-1'", "a range from low to high; did you mean '1-3'?")
    ):
        Policy.load({"layers": {"3-1?": "dense"}})
    with pytest.raises(PolicyError, match=says("is there twice")):
        Policy.load({"layers": {"00?": "dense", "0?": "mean"}})


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        ({"decay": 0.5}, "algorithm 'heavy_hitters'"),
        ({"prototypes": 8}, "algorithm 'three_level'"),
        ({"first_stage": 2.0}, "granularity 'two_stage'"),
        ({"min_budget": 64}, "a top_p below 1"),
        (
            {"group_reduce": "max", "algorithm": "streaming"},
            "an algorithm with page scores",
        ),
        (
            {"group_reduce": "max", "algorithm": "three_level"},
            "an algorithm with page scores",
        ),
    ],
    ids=str,
)
def test_fields_of_another_algorithm(fields: dict[str, float], needs: str) -> None:
    name, value = next(iter(fields.items()))
    message = f"{name} {value!r} has no effect without {needs}"
    with pytest.raises(PolicyError, match=says(message)):
        Policy.load(fields)
    with pytest.raises(PolicyError, match=says(message)):
        Policy.load({"layers": {"0": fields}})


def test_an_optional_key_is_not_for_all_layers() -> None:
    """Where every layer is compiled by itself each is layer 0: the dense first layer of a preset is none of them."""
    policy = Policy.load("accurate")
    one, several = [LayerName(0, "a")], [LayerName(0, "a"), LayerName(1, "b")]
    assert [layer.algorithm for layer in policy.resolve(one)] == ["cuboid"]
    assert [layer.algorithm for layer in policy.resolve(several)] == ["dense", "cuboid"]
