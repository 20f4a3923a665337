"""``options`` and ``mode`` are ignored, or are a TypeError.

pytorch#98486, #149209, #169939. Right: what is given is applied, what is misspelled is named together with what is
valid, and ``mode`` is taken.
"""

import pytest
import torch
from torch._dynamo.utils import counters

from .helpers import (
    LOSSLESS,
    SPARSE,
    Shape,
    Static,
    close,
    compile_hsa,
    decisions,
    rule,
    run_static,
    sites,
)

SHAPE = Shape(steps=2)


def test_options_are_applied() -> None:
    """The same layer under three policies is three things."""
    compiled = compile_hsa(Static(), SPARSE)
    close(run_static(compiled, SHAPE), run_static(Static(rule(SPARSE)), SHAPE))
    assert "quest budget=48" in sites(compiled)[0].policy
    compiled = compile_hsa(Static(), "dense")
    close(run_static(compiled, SHAPE), run_static(Static(), SHAPE))
    assert decisions(compiled) == {("dense", "dense by policy")}
    compiled = compile_hsa(
        Static(), LOSSLESS, **{"max_autotune": False, "triton.cudagraphs": False}
    )
    close(run_static(compiled, SHAPE), run_static(Static(), SHAPE))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"polcy": SPARSE}, ("'polcy'", "'policy'", "'strict'", "did you mean 'policy'")),
        ({"policy": {"budgt": 4}}, ("'budgt'", "'budget'", "'page_size'", "did you mean 'budget'")),
        ({"budget": 4}, ("'budget'", "a field of a policy")),
        ({"policy": {"page_size": 17}}, ("17", "8, 16, 32, 64")),
        ({"policy": {"algorithm": "qest"}}, ("'qest'", "did you mean 'quest'", "'cuboid'")),
        ({"max_autotun": True}, ("'max_autotun'", "did you mean 'max_autotune'")),
        ({"strict": "yes"}, ("'strict'", "True, False")),
        ({"mode": "fast"}, ("'fast'", "'reduce-overhead'")),
    ],
)
def test_typos_list_what_is_valid(options: dict, named: tuple[str, ...]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Static(), backend="hsa", options={"run": "eager", **options})
    with pytest.raises(Exception) as raised:
        run_static(compiled, SHAPE)
    assert all(part in str(raised.value) for part in named), str(raised.value)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_mode_is_taken(mode: str) -> None:
    """Beside the options, where torch refuses the keyword; and alone, under the default policy."""
    compiled = compile_hsa(Static(), SPARSE, mode=mode)
    close(run_static(compiled, SHAPE), run_static(Static(rule(SPARSE)), SHAPE))
    torch._dynamo.reset()
    counters.clear()
    seen = []

    def backend(gm, inputs, **kwargs):
        from hsa_compile.backend import hsa_backend

        seen.append(kwargs)
        return hsa_backend(gm, inputs, options={"run": "eager"}, **kwargs)

    compiled = torch.compile(Static(), backend=backend, mode=mode)
    close(run_static(compiled, SHAPE), run_static(Static(), SHAPE))
    assert seen in ([{"mode": mode}], [{}])
