"""Every use of private torch API, and every difference between torch releases, in one place."""

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hsa_compile.errors import HsaError


def inductor_config_names() -> frozenset[str]:
    """Names of Inductor's config entries, dotted where nested, as in "triton.cudagraphs"."""
    from torch._inductor import config

    return frozenset(config.get_config_copy())


def inductor_config_type(name: str) -> type | None:
    """The class that a value of config entry ``name`` must be an instance of.

    None where the entry is annotated with more than a plain class, which ``torch.compile`` leaves
    unchecked for its own options too.
    """
    from typing import get_origin

    from torch._inductor import config

    declared = config.get_type(name)
    return declared if isinstance(declared, type) and get_origin(declared) is None else None


def mode_names() -> tuple[str, ...]:
    """The modes of ``torch.compile``: "default", "reduce-overhead", "max-autotune" and so on."""
    from torch._inductor import list_mode_options

    return tuple(list_mode_options())


def mode_options(mode: str) -> dict[str, object]:
    """The Inductor config patches that ``mode`` (one of :func:`mode_names`) stands for."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options()[mode])


def statically_known_true(condition: object) -> bool:
    """Whether a comparison of sizes holds for every input that the guards admit; adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true as known

    return bool(known(condition))  # type: ignore[arg-type]


def trace_mode(graph: torch.fx.Graph) -> Any:
    """The fake mode in which Dynamo traced the graph: that of its ``example_value``s."""
    for node in graph.nodes:
        held = node.meta.get("example_value")
        if isinstance(held, torch.Tensor) and is_fake(held):
            return held.fake_mode  # type: ignore[attr-defined]
    raise ValueError("the graph holds no traced tensor")


def compile_input(traced: Any) -> Any:
    """A fake of the same shape for the backend, which has a fake mode of its own (Dynamo starts a fresh one)."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    mode = (
        context.fake_mode
        if context is not None and context.fake_mode is not None
        else traced.fake_mode
    )
    return fake_tensor(mode, traced.shape, traced.stride(), traced.dtype, traced.device)


def fake_tensor(
    fake_mode: Any,
    shape: Sequence[Any],
    strides: Sequence[Any] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A fake tensor of this shape; contiguous where ``strides`` is None."""
    with fake_mode:
        if strides is None:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=device)


def mark_input(node: torch.fx.Node, *, static_address: bool) -> None:
    """Give a placeholder of ours what AOTAutograd asks of Dynamo's: a source, and whether its address is stable."""
    from torch._dynamo.source import LocalSource

    node._dynamo_source = LocalSource(node.name)  # type: ignore[attr-defined]
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"} if static_address else {}


def overloads(target: object) -> list[torch._ops.OpOverload]:
    """The ops that a call's target stands for: itself, or what its packet holds but for ``out=``; else none."""
    if isinstance(target, torch._ops.OpOverload):
        return [target]
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads() if "out" not in name]
    return []


def is_higher_order(target: object) -> bool:
    """Whether a call's target takes graphs or kernels, whose writes its schema does not tell."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def is_flex_attention(target: object) -> bool:
    """Whether a call's target is ``flex_attention`` as Dynamo traces it."""
    from torch._higher_order_ops.flex_attention import flex_attention

    return target is flex_attention


@dataclass(frozen=True)
class BlockLists:
    """What ``flex_attention`` is given of a ``BlockMask``, as the graph holds it.

    In each row of ``q_block`` queries, the first ``count`` blocks of ``kv_block`` keys that ``indices`` names are
    attended where ``mask_mod`` says so, those of ``full_count`` and ``full_indices`` (perhaps None) wherever they are:
    counts ``[B or 1, H or 1, rows]``, indices ``[B or 1, H or 1, rows, blocks]``.
    """

    count: Any
    indices: Any
    full_count: Any
    full_indices: Any
    q_block: int
    kv_block: int
    mask_mod: Any

    @property
    def whole(self) -> bool:
        """Whether one block is larger than any sequence, as where no ``BlockMask`` was given."""
        from torch.nn.attention.flex_attention import _LARGE_SPARSE_BLOCK_SIZE as large

        return self.q_block == self.kv_block == large


def block_lists(block_mask: Sequence[Any]) -> BlockLists | None:
    """The block mask of a ``flex_attention`` call, ``BlockMask.as_tuple``; None where its form is not known.

    Before the sizes, 2.13 added what only a backward pass reads.
    """
    if len(block_mask) < 9 or not all(isinstance(size, int) for size in block_mask[-3:-1]):
        return None
    return BlockLists(*block_mask[2:6], *block_mask[-3:])


def is_mutable(op: torch._ops.OpOverload) -> bool:
    """Whether an op declares to write an argument."""
    return op._schema.is_mutable


def mark_static_address(tensor: torch.Tensor) -> None:
    """Tell Dynamo that the memory of a tensor stays where it is: CUDA graphs then read and write it in place."""
    torch._dynamo.mark_static_address(tensor)


def _reader(at: int, dim: int | None) -> Callable[[Sequence[Any]], int]:
    if dim is None:
        return lambda arguments: int(arguments[at])
    return lambda arguments: int(arguments[at].shape[dim])


def symbol_values(inputs: Sequence[object]) -> dict[Any, Callable[[Sequence[Any]], int]]:
    """How to read each size symbol of a graph off its arguments, from the values that its placeholders held."""
    readers: dict[Any, Callable[[Sequence[Any]], int]] = {}
    for at, held in enumerate(inputs):
        if isinstance(held, torch.SymInt) and held.node.expr.is_symbol:
            readers.setdefault(held.node.expr, _reader(at, None))
        elif isinstance(held, torch.Tensor):
            for dim, size in enumerate(held.shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                    readers.setdefault(size.node.expr, _reader(at, dim))
    return readers


def expression(size: Any) -> Any:
    """The sympy expression of a size."""
    import sympy

    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def hint(size: Any) -> int:
    """A size as it was when the graph was traced."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    held = size.node.hint
    return int(held) if held is not None else 8192


def _register_decompositions(table: Mapping[Any, Callable[..., Any]]) -> None:
    """Add to Inductor's own table: one given to ``compile_fx`` would become part of, and spoil, its cache key."""
    from torch._inductor import decomposition

    if any(operator not in decomposition.decompositions for operator in table):
        decomposition.decompositions.update(table)
        decomposition.fast_random_decomps.cache_clear()


def compile_with_inductor(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    decompositions: Mapping[Any, Callable[..., Any]],
    identity: str,
    graph_pass: Callable[[torch.fx.Graph], None] | None = None,
) -> Callable[..., Any]:
    """``compile_fx`` with decompositions and a pass of ours; ``identity`` becomes part of every compile-cache key."""
    from torch._inductor.compile_fx import compile_fx

    _register_decompositions(decompositions)
    merged = dict(patches)
    merged[_PASS_SLOT] = _graph_pass(identity, graph_pass, merged.get(_PASS_SLOT))
    return compile_fx(gm, list(inputs), config_patches=merged)  # type: ignore[return-value]


_PASS_SLOT = "post_grad_custom_pre_pass"


def _graph_pass(identity: str, ours: Callable[[torch.fx.Graph], None] | None, chained: Any) -> Any:
    """A graph pass that carries ``identity`` in its uuid, and runs ours and the one that a user had there."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    chained = chained if chained is not None else getattr(config, _PASS_SLOT)

    class GraphPass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            if ours is not None:
                ours(graph)
            if chained is not None:
                chained(graph)

        def uuid(self) -> Any:
            if chained is None:
                return identity
            theirs = chained.uuid() if isinstance(chained, CustomGraphPass) else None
            return None if theirs is None else (identity, theirs)

    return GraphPass()


def storage_key(tensor: torch.Tensor) -> int:
    """The same for all tensors on one storage, fake ones too, while one of them lives."""
    return tensor.untyped_storage()._cdata


def written_storage(tensor: torch.Tensor) -> int | None:
    """The :func:`storage_key` of what a write reaches, or None where that cannot be told: within ``vmap``."""
    try:
        return storage_key(tensor)
    except NotImplementedError:
        return None


def tensors_on(storage: torch.UntypedStorage) -> int:
    """How many tensors are on a storage, which the object ``storage`` itself is, too."""
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # type: ignore[attr-defined]


def storage_is_shared(storage: torch.UntypedStorage) -> bool:
    """Whether more than one tensor is on a storage."""
    return tensors_on(storage) > 1


def swap_memory(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give ``tensor`` the memory of ``other``, which has its shape and strides; it remains the same object."""
    with torch.inference_mode(tensor.is_inference()):
        tensor.data = other


def trace_artifact(name: str, payload: str) -> None:
    """Put text into the structured trace that ``tlparse`` shows."""
    from torch._logging import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: payload,
    )


def is_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def same_memory(one: Any, other: Any) -> bool:
    """Whether two tensors, fake ones too, are views of the same memory."""
    storages = (one.untyped_storage(), other.untyped_storage())
    return bool(storages[0]._cdata == storages[1]._cdata)


def module_of(model: Any) -> torch.nn.Module | None:
    """The module behind a compiled module, a module, or a (compiled or wrapped) bound method of one."""
    original = original_callable(model)
    for candidate in (
        model,
        *(
            getattr(held, "__self__", None)
            for held in (model, original, getattr(original, "__wrapped__", None))
        ),
    ):
        if isinstance(candidate, torch.nn.Module):
            return getattr(candidate, "_orig_mod", candidate)
    return None


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether calling ``model`` runs what was compiled of it: by ``torch.compile(model)`` or ``model.compile()``."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def without_partials(model: Any) -> Any:
    """What a ``functools.partial`` calls; anything else as it is."""
    while isinstance(model, functools.partial):
        model = model.func
    return model


def original_callable(model: Any) -> Callable[..., Any]:
    """What was compiled: the module of an ``OptimizedModule``, the function behind a compiled function."""
    if isinstance(model, torch.nn.Module):
        return getattr(model, "_orig_mod", model)
    return getattr(model, "_torchdynamo_orig_callable", model)


def compiler_of(compiled: Any) -> Any:
    """The ``compiler`` (:class:`CompiledRoot`) of a compiled module or function; None of anything else."""
    context = getattr(compiled, "dynamo_ctx", None)
    if context is None and inspect.isfunction(compiled):
        context = inspect.getclosurevars(compiled).nonlocals.get("self")
    return _innermost(getattr(context, "callback", None))


def _innermost(callback: Any) -> Any:
    """The backend behind Dynamo's wrappers."""
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return callback


def compile_options(model: Any) -> dict[str, Any]:
    """The options with which a module was compiled for this backend; empty where it was not."""
    context = getattr(model, "dynamo_ctx", None)
    kwargs = getattr(_innermost(getattr(context, "callback", None)), "kwargs", None)
    if not isinstance(kwargs, Mapping):
        return {}
    given = dict(kwargs.get("options") or {})
    return given | ({"mode": kwargs["mode"]} if kwargs.get("mode") else {})


@dataclass(frozen=True)
class CompiledRoot:
    """What the user compiled, as seen from within its compilation.

    ``callable`` is what was given to ``torch.compile``, or None where that cannot be told. ``part`` says why the graph
    at hand is only a part of it, and is empty where it is the whole.
    """

    callable: Any
    part: str = ""
    compiler: Any = None
    """What ``torch.compile`` made of backend and options; equal for equal ones. None where that cannot be told."""


def compiled_root(gm: torch.fx.GraphModule) -> CompiledRoot:
    """The root of the compilation that is in progress.

    A graph is a part when Dynamo ended it at a graph break, or when Dynamo was entered again below the root: between
    its own frames and the wrapper around the root, the stack then holds frames that are not torch's.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    part = str(reason.reason).splitlines()[0] if reason is not None and reason.graph_break else ""
    frame, tracing = sys._getframe(1), False
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if tracing and name == "compile_wrapper" and file.endswith(_EVAL_FRAME):
            compiler = _innermost(frame.f_locals.get("callback"))
            return CompiledRoot(frame.f_locals.get("fn"), part, compiler)
        if file.endswith(_CONVERT_FRAME):
            tracing = True
        elif tracing and not part and not file.startswith(_TORCH):
            part = f"the graph breaks in {name} ({file}:{frame.f_lineno})"
        frame = frame.f_back  # type: ignore[assignment]
    return CompiledRoot(None, "")


_TORCH = os.path.dirname(torch.__file__) + os.sep
_EVAL_FRAME = os.path.join("_dynamo", "eval_frame.py")
_CONVERT_FRAME = os.path.join("_dynamo", "convert_frame.py")


def trace_once(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    backend: Callable[..., Any],
    stop: type[Exception],
) -> str | None:
    """Trace ``function`` as one graph up to ``backend``, which raises ``stop``; returns why it is not one graph."""
    from torch._dynamo.exc import BackendCompilerFailed, Unsupported

    try:
        torch.compile(function, backend=backend, fullgraph=True)(*args, **kwargs)
    except stop:
        return None
    except BackendCompilerFailed as failure:
        if isinstance(failure.inner_exception, stop):
            return None
        raise failure.inner_exception from None
    except Unsupported as broken:
        return str(broken).splitlines()[0]
    return None


def trace_through(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    backend: Callable[..., Any],
) -> None:
    """Trace and run ``function``, graph breaks included."""
    from torch._dynamo.exc import BackendCompilerFailed

    try:
        torch.compile(function, backend=backend)(*args, **kwargs)
    except BackendCompilerFailed as failure:
        raise failure.inner_exception from None


@contextlib.contextmanager
def backend_errors() -> Iterator[None]:
    """Let the errors that this package raises on purpose out of Dynamo's wrapper around what a backend raises."""
    from torch._dynamo.exc import BackendCompilerFailed

    try:
        yield
    except BackendCompilerFailed as failure:
        if isinstance(failure.inner_exception, HsaError):
            raise failure.inner_exception from None
        raise


def decompose_when_functionalised(op: torch._ops.OpOverload, function: Callable[..., Any]) -> None:
    """Give an op that writes its arguments a decomposition, which AOTAutograd asks for before it functionalises."""
    op.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(function)


# Inductor's lowerings and Triton templates (hsa_compile.lowering).


def register_lowering(op: torch._ops.OpOverload, function: Callable[..., Any]) -> None:
    """Have Inductor lower ``op`` with ``function``, which gets IR nodes where the op gets tensors."""
    from torch._inductor.lowering import register_lowering as register

    register(op, type_promotion_kind=None)(function)


def lower_to_eager(op: torch._ops.OpOverload, *args: Any) -> Any:
    """Lower ``op`` to a call of its own eager implementation."""
    from torch._inductor.lowering import fallback_handler

    return fallback_handler(op, add_to_fallback_set=False)(*args)


def triton_template(name: str, grid: Callable[..., Any], source: str) -> Any:
    """A ``TritonTemplate``; ``grid`` takes the sizes given as ``call_sizes``, the constants, and perhaps ``cdiv``."""
    from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate

    return TritonTemplate(name=name, grid=SymbolicGridFn(grid), source=source)


def choose_kernel(
    name: str,
    choices: list[Any],
    inputs: list[Any],
    layout: Any,
    examples: dict[int, Callable[[Any], Any]],
) -> Any:
    """The output node of the fastest of ``choices``, timed where there is more than one.

    ``examples`` makes the tensors to time with, by position, for inputs that random numbers do not suit.
    """
    from torch._inductor.select_algorithm import autotune_select_algorithm

    chosen = autotune_select_algorithm(name, choices, inputs, layout, input_gen_fns=examples)
    return chosen[0] if isinstance(chosen, tuple) else chosen  # (node, choice) from 2.13 on


def max_autotune() -> bool:
    """Whether Inductor is asked to time alternatives."""
    from torch._inductor import config

    return bool(config.max_autotune)


def realize(node: Any) -> Any:
    """An IR node as a buffer with final strides, copied only where no view of a buffer can express it."""
    from torch._inductor.ir import ExternKernel

    realized = ExternKernel.realize_input(node)
    with contextlib.suppress(NotImplementedError):
        realized.freeze_layout()
    return realized


def realize_in_place(node: Any) -> Any | None:
    """As :func:`realize` for a buffer that is to be written; None where that would write to a copy."""
    node.realize()
    realized = realize(node)
    return realized if realized.get_name() == node.get_name() else None


def qualified_name(target: Any) -> str:
    """``"aten::softmax"`` of an operator or of one of its overloads."""
    packet = getattr(target, "overloadpacket", target)
    return str(packet._qualified_op_name)


def scaled_sum(node: Any, factor: float, added: Any) -> Any:
    """``node * factor + added``, broadcast."""
    from torch._inductor.lowering import lowerings

    aten = torch.ops.aten
    return lowerings[aten.add.Tensor](lowerings[aten.mul.Tensor](node, factor), added)


def scratch(device: torch.device, dtype: torch.dtype, size: Sequence[Any]) -> Any:
    """An uninitialised contiguous buffer, for a kernel to write into beside its output."""
    from torch._inductor.lowering import empty_strided

    return empty_strided(list(size), None, dtype=dtype, device=device)


def contiguous_layout(device: torch.device, dtype: torch.dtype, size: Sequence[Any]) -> Any:
    """The layout of a kernel's output."""
    from torch._inductor.ir import FixedLayout, FlexibleLayout

    return FixedLayout(device, dtype, list(size), FlexibleLayout.contiguous_strides(list(size)))


def static_int(size: Any) -> int:
    """A size as a constant of the compiled code; adds a guard where it is symbolic."""
    from torch._inductor.virtualized import V

    return int(V.graph.sizevars.guard_int(size))


def expression_hint(size: Any) -> int:
    """An example value of a size within Inductor."""
    from torch._inductor.virtualized import V

    return int(V.graph.sizevars.optimization_hint(size, fallback=8192))


def expressions_equal(left: Any, right: Any) -> bool:
    """Whether two sizes within Inductor are the same for every input; adds no guard."""
    import sympy
    from torch._inductor.virtualized import V

    return bool(V.graph.sizevars.statically_known_true(sympy.Eq(left, right)))


def is_constant(size: Any) -> bool:
    """Whether a size within Inductor is a plain number."""
    import sympy

    return isinstance(size, (int, sympy.Integer))


def can_launch_early(device: torch.device) -> bool:
    """Whether kernels for this device can use programmatic dependent launch (NVIDIA, from Hopper on)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
