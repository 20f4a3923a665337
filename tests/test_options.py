"""Options: ours checked, Inductor's passed through, and the words of every error."""

import re

import pytest

from hsa_compile import compat
from hsa_compile.errors import HsaError, OptionError, PolicyError
from hsa_compile.options import Options, parse_options
from hsa_compile.policy import Policy


def says(*parts: str) -> str:
    """A pattern for a message with these parts, in this order."""
    return ".*".join(re.escape(part) for part in parts)


def test_nothing_given():
    assert parse_options(None, None) == parse_options({}, None) == Options()
    assert Options() == Options(Policy(), strict=False, run="inductor", inductor={})


def test_ours_are_taken_and_the_rest_is_inductors():
    given = {
        "policy": {"budget": 64},
        "strict": True,
        "run": "eager",
        "max-autotune": True,
        "triton.cudagraphs": False,
    }
    options = parse_options(given, None)
    assert options.policy == Policy.load({"budget": 64})
    assert options.strict is True and options.run == "eager"
    assert options.inductor == {"max_autotune": True, "triton.cudagraphs": False}
    assert len(given) == 5


@pytest.mark.parametrize("mode", compat.mode_names())
def test_a_mode_means_what_it_means_to_inductor(mode):
    expected = compat.mode_options(mode)
    assert parse_options(None, mode).inductor == expected
    assert parse_options({"mode": mode}, None).inductor == expected
    assert parse_options({"mode": mode}, mode).inductor == expected
    assert set(expected) <= compat.inductor_config_names()


def test_reduce_overhead_is_cuda_graphs():
    assert parse_options({"mode": "reduce-overhead"}, None).inductor == {"triton.cudagraphs": True}


def test_an_explicit_option_wins_over_the_mode():
    options = parse_options({"triton.cudagraphs": False, "mode": "max-autotune"}, None)
    assert options.inductor["triton.cudagraphs"] is False
    assert options.inductor["max_autotune"] is True


def test_a_mode_is_not_shared_between_calls():
    first, second = (parse_options(None, "max-autotune").inductor for _ in range(2))
    assert first == second and first is not second


@pytest.mark.parametrize(
    "options, mode, message",
    [
        ({"polcy": "dense"}, None, ["unknown option 'polcy'", "did you mean 'policy'?"]),
        (
            {"Strict": True},
            None,
            [
                "'Strict'",
                "'policy', 'strict', 'run', 'mode', 'benchmark_without_io_wrong_results', and the names",
            ],
        ),
        ({"max_autotun": True}, None, ["'max_autotun'", "did you mean 'max_autotune'?"]),
        ({"cudagraphs": True}, None, ["'cudagraphs'", "did you mean 'triton.cudagraphs'?"]),
        ({"budget": 64}, None, ["unknown option 'budget'", "options={'policy': {'budget': ...}}"]),
        ({3: True}, None, ["unknown option 3", "torch._inductor.config"]),
        ({"strict": "yes"}, None, ["option 'strict' 'yes'", "valid: True, False"]),
        ({"strict": 1}, None, ["option 'strict' 1"]),
        ({"run": "egaer"}, None, ["option 'run' 'egaer'", "'inductor', 'eager'", "mean 'eager'?"]),
        ({"run": None}, None, ["option 'run' None", "'inductor', 'eager'"]),
        ({"mode": "lite"}, "default", ["option 'mode' 'lite' contradicts mode='default'"]),
        ({"mode": "reduce-overheads"}, None, ["mode 'reduce-overheads'", "mean 'reduce-overhead'"]),
        (None, "max_autotune", ["mode 'max_autotune'", "did you mean 'max-autotune'?"]),
        ({"mode": 3}, None, ["mode 3", "'default'"]),
        ({"max_autotune": 1}, None, ["option 'max_autotune' 1", "type bool, not int"]),
        ({"max-autotune": True, "max_autotune": False}, None, ["'max_autotune' is given twice"]),
        (["strict"], None, ["options ['strict']", "a mapping"]),
    ],
)
def test_a_bad_option_names_value_and_valid(options, mode, message):
    with pytest.raises(OptionError, match=says(*message)):
        parse_options(options, mode)


def test_an_option_error_is_a_value_error():
    assert issubclass(OptionError, ValueError) and issubclass(OptionError, HsaError)


def test_a_bad_policy_is_a_policy_error():
    with pytest.raises(PolicyError, match=says("policy: default: budget 0 is not valid")):
        parse_options({"policy": {"budget": 0}}, None)


def test_options_with_several_types_are_left_to_inductor():
    unchecked = [
        n for n in compat.inductor_config_names() if compat.inductor_config_type(n) is None
    ]
    assert unchecked
    assert parse_options({unchecked[0]: "anything"}, None).inductor == {unchecked[0]: "anything"}


def test_a_benchmark_without_io_is_loud():
    name = "benchmark_without_io_wrong_results"
    with pytest.warns(RuntimeWarning, match="every result of placement 'host' is wrong"):
        assert parse_options({name: True}, None).skip_io
    assert not parse_options({name: False}, None).skip_io
    with pytest.raises(
        OptionError, match=says(f"option '{name}' 1 is not valid; valid: True, False")
    ):
        parse_options({name: 1}, None)
