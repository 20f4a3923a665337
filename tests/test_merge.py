"""Equal nodes are computed once; nodes that only look equal stay apart."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from hsa_compile.passes.merge import merge_equal


def merged(function: Callable[..., object], *inputs: Tensor) -> int:
    """Calls that are left in the ATen graph of ``function``, which still computes the same."""
    graph_module = make_fx(function)(*(x.clone() for x in inputs))
    merge_equal(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    mine, theirs = ([x.clone() for x in inputs] for _ in range(2))
    torch.manual_seed(0)
    want = function(*theirs)
    torch.manual_seed(0)
    torch.testing.assert_close(graph_module(*mine), want, rtol=0, atol=0)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    return sum(node.op == "call_function" for node in graph_module.graph.nodes)


def test_a_chain_is_computed_once() -> None:
    assert merged(lambda x: ((x + 1).sin() * (x + 1).sin()).sum(), torch.randn(3)) == 4


def test_constants_of_other_types_stay_apart() -> None:
    x = torch.arange(3)
    assert merged(lambda x: torch.stack([(x + 1).double(), (x + 1.0).double()]), x) == 5
    assert merged(lambda x: (x * 0.0).exp() + (x * -0.0).exp(), torch.randn(3)) == 5


def test_random_numbers_stay_apart() -> None:
    assert merged(lambda x: torch.rand_like(x) - torch.rand_like(x), torch.randn(3)) == 3


def test_a_write_between_keeps_them_apart() -> None:
    def function(x: Tensor) -> Tensor:
        first = x.sin().sum()
        x.mul_(2)
        return first + x.sin().sum()

    assert merged(function, torch.randn(3)) == 6


def test_results_keep_their_own_memory() -> None:
    """Two tensors that are returned are two, though they are equal."""
    graph_module = make_fx(lambda x: (x + 1, x + 1))(torch.randn(3))
    merge_equal(graph_module.graph)
    graph_module.recompile()
    a, b = graph_module(torch.zeros(3))
    assert a.data_ptr() != b.data_ptr()


def test_results_of_several_tensors_are_let_be() -> None:
    def function(x: Tensor) -> Tensor:
        return x.sort().values + x.sort().values

    assert merged(function, torch.randn(3)) == 7
