"""The options of ``torch.compile(..., backend="hsa")``: a few of our own, the rest Inductor's."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hsa_compile import compat
from hsa_compile.errors import OptionError, did_you_mean, listed
from hsa_compile.policy import FIELDS, Policy

SKIP_IO = "benchmark_without_io_wrong_results"
OURS = ("policy", "strict", "run", "mode", SKIP_IO)
RUNS = ("inductor", "eager")


@dataclass(frozen=True)
class Options:
    """What one compilation was asked to do.

    Attributes:
        policy: how each attention layer reads its KV cache.
        strict: an attention site that stays as it was is an error.
        run: what runs the rewritten graph, "inductor" or "eager".
        inductor: config patches for Inductor, those of a mode included, by config name.
        skip_io: leave out the copies from host memory. **Results are wrong**; a benchmark takes it for the floor.
    """

    policy: Policy = field(default_factory=Policy)
    strict: bool = False
    run: str = "inductor"
    inductor: Mapping[str, object] = field(default_factory=dict)
    skip_io: bool = False


def parse_options(options: Mapping[str, Any] | None, mode: str | None) -> Options:
    """Check and sort the keyword arguments that ``torch.compile`` hands to the backend.

    Args:
        options: "policy" (anything that :meth:`Policy.load` takes), "strict" (bool), "run"
            ("inductor" or "eager"), "mode" (``torch.compile`` refuses ``mode=`` beside
            ``options=``) and "benchmark_without_io_wrong_results" (bool). Every other key is an
            Inductor config name, where "-" may stand for "_", and wins over what the mode says.
        mode: a mode of ``torch.compile``, such as "reduce-overhead".

    Raises:
        OptionError: an option is unknown, has a wrong value, or two of them contradict each other.
        PolicyError: the policy is not valid.
    """
    given = {} if options is None else options
    if not isinstance(given, Mapping):
        raise OptionError(f"options {options!r} is not valid; valid: a mapping of option names")
    strict, skip_io = (_flag(given, name) for name in ("strict", SKIP_IO))
    if skip_io:
        warnings.warn(
            f"option {SKIP_IO!r} is set: pages are not loaded from host memory, and every result of placement 'host' "
            "is wrong",
            RuntimeWarning,
            stacklevel=2,
        )
    run = given.get("run", "inductor")
    if not isinstance(run, str) or run not in RUNS:
        raise OptionError(
            f"option 'run' {run!r} is not valid; valid: {listed(RUNS)}{did_you_mean(run, RUNS)}"
        )
    explicit = _inductor_options({key: given[key] for key in given if key not in OURS})
    patches = {**_mode_patches(given.get("mode"), mode), **explicit}
    return Options(Policy.load(given.get("policy")), strict, run, patches, skip_io)


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise OptionError(f"option {name!r} {value!r} is not valid; valid: True, False")
    return value


def _mode_patches(option: object, keyword: object) -> dict[str, object]:
    if option is not None and keyword is not None and option != keyword:
        raise OptionError(
            f"option 'mode' {option!r} contradicts mode={keyword!r}; valid: one of them, or both the same"
        )
    mode = keyword if option is None else option
    if mode is None:
        return {}
    names = compat.mode_names()
    if not isinstance(mode, str) or mode not in names:
        raise OptionError(
            f"mode {mode!r} is not valid; valid: {listed(names)}{did_you_mean(mode, names)}"
        )
    return compat.mode_options(mode)


def _inductor_options(given: Mapping[str, object]) -> dict[str, object]:
    patches: dict[str, object] = {}
    names = compat.inductor_config_names() if given else frozenset()
    for option, value in given.items():
        name = option.replace("-", "_") if isinstance(option, str) else option
        if name not in names:
            raise OptionError(_unknown(option, names))
        if name in patches:
            raise OptionError(f"option {name!r} is given twice, with '-' and with '_'; valid: once")
        wanted = compat.inductor_config_type(name)
        if wanted is not None and not isinstance(value, wanted):
            raise OptionError(
                f"option {option!r} {value!r} is not valid; "
                f"valid: a value of type {wanted.__name__}, not {type(value).__name__}"
            )
        patches[name] = value
    return patches


def _unknown(option: object, names: frozenset[str]) -> str:
    if option in FIELDS:
        hint = f"; {option!r} is a field of a policy: options={{'policy': {{{option!r}: ...}}}}"
    else:
        hint = did_you_mean(option, [*OURS, *sorted(names)])
    return f"unknown option {option!r}; valid: {listed(OURS)}, and the names in torch._inductor.config{hint}"
