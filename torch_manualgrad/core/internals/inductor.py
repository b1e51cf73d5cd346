"""PyTorch's parts of a compiler backend: tracing to ATen, AOTAutograd's partitioner, inductor."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import logging
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import _disable_current_modes

from .functorch import saved_tensors_unhooked, tracing_threads
from .tracing import outside_of_compiler

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "checkpoint_policy",
    "checkpointed_region",
    "code_in_cpp",
    "compiled",
    "compiler_lock",
    "hide_traces_from_other_threads",
    "in_clean_state",
    "inductors",
    "is_traced_by_fx",
    "keep_aliases_of_dropout",
    "outside_of_transforms",
    "partitioned",
    "switch_grad_mode",
    "traced",
    "without_first_call",
]

# Called by Dynamo's graphs when a program enters or leaves torch.no_grad().
switch_grad_mode: Any = torch._C._set_grad_enabled

# Called by Dynamo's graphs for torch.utils.checkpoint, with a graph and the values that it reads.
checkpointed_region: Any = torch.ops.higher_order.tag_activation_checkpoint


def checkpoint_policy(region: torch.fx.GraphModule) -> Any:
    """The policy of a checkpointed region: None if nothing is saved, False if its contexts are not those of a policy."""
    make = region.meta.get("_checkpoint_context_fn")
    return None if make is None else getattr(make()[0], "policy_fn", False)


_included = torch._C._dispatch_tls_local_include_set()
_excluded = torch._C._dispatch_tls_local_exclude_set()


@contextlib.contextmanager
def in_clean_state(autocast: bool = False) -> Iterator[None]:
    """Outside of all modes, transforms and dispatch guards: a graph may be traced in the middle of a backward.

    Args:
        autocast: keep autocast if it is on.
    """
    excluded = _excluded
    if autocast:
        excluded = excluded & torch._C._dispatch_tls_local_exclude_set()
    with (
        torch._C._ForceDispatchKeyGuard(_included, excluded),
        _disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        outside_of_compiler(),
        saved_tensors_unhooked(),
        torch.autograd.set_detect_anomaly(False) if torch.is_anomaly_enabled() else contextlib.nullcontext(),
        torch.enable_grad(),
    ):
        try:
            yield
        except BaseException as error:
            # an error in the middle of printing a tensor keeps a dispatch guard in its frames, which must end in here
            traceback.clear_frames(error.__traceback__)
            raise


@contextlib.contextmanager
def compiler_lock() -> Iterator[None]:
    """Dynamo's lock: tracing patches global state.

    Errors of fake kernels are not logged. They are raised here, and handled where an operator takes no open sizes.
    """
    from torch._dynamo.convert_frame import compile_lock  # importing the compiler is slow

    log = logging.getLogger("torch._subclasses.fake_tensor")
    with compile_lock:
        before, log.disabled = log.disabled, True
        try:
            yield
        finally:
            log.disabled = before


@contextlib.contextmanager
def outside_of_transforms() -> Iterator[None]:
    """Outside of all modes and transforms, where Dynamo compiles calls."""
    with (
        torch._C._ForceDispatchKeyGuard(_included, _excluded),
        _disable_current_modes(),
        temporarily_clear_interpreter_stack(),
    ):
        yield


def hide_traces_from_other_threads() -> None:
    """Let functions that are compiled from now on run while another thread is inside of `traced` or `compiled`.

    PyTorch's flag is for all threads, and a compiled function raises where it is set.
    """
    fx: Any = torch.fx._symbolic_trace
    is_tracing = fx.is_fx_symbolic_tracing
    if hasattr(is_tracing, "of_torch_manualgrad"):
        return

    @functools.wraps(is_tracing)
    def is_tracing_here() -> bool:
        return is_tracing() and (not tracing_threads or threading.get_ident() in tracing_threads)

    is_tracing_here.of_torch_manualgrad = True  # type: ignore[attr-defined]
    fx.is_fx_symbolic_tracing = is_tracing_here


def keep_aliases_of_dropout() -> None:
    """From now on dropout that drops nothing returns its argument in `traced`, as the operator does.

    PyTorch's version in Python copies it, and a write to the result would not be one to the argument.
    """

    def kept(kernel: Any) -> Any:
        @functools.wraps(kernel)
        def dropout(input: Any, p: float, train: bool) -> Any:
            drops = train and p != 0
            return kernel(input, p, train) if drops or threading.get_ident() not in tracing_threads else input

        dropout.of_torch_manualgrad = True  # type: ignore[attr-defined]
        return dropout

    op: Any = torch.ops.aten.dropout.default
    kernels = {key: k for key, k in op.py_kernels.items() if not hasattr(k, "of_torch_manualgrad")}
    op.py_kernels.update({key: kept(kernel) for key, kernel in kernels.items()})
    op._dispatch_cache.clear()


def is_traced_by_fx() -> bool:
    """Whether `make_fx` or ``torch.fx.symbolic_trace`` traces, where a function compiled by Dynamo raises."""
    return torch.fx._symbolic_trace.is_fx_symbolic_tracing()


@contextlib.contextmanager
def _tracing_here() -> Iterator[None]:
    """Context manager: marks this thread as tracing."""
    thread = threading.get_ident()
    nested = thread in tracing_threads
    tracing_threads.add(thread)
    try:
        yield
    finally:
        if not nested:
            tracing_threads.discard(thread)


def traced(
    function: Callable[..., Any],
    fakes: Sequence[Any],
    mode: Any,
    *,
    decompose: Mapping[Any, Callable[..., Any]],
    like_inductor: bool = False,
    composites: bool = False,
) -> torch.fx.GraphModule:
    """The ATen operators that a function of flat arguments calls.

    Args:
        function: returns a flat sequence of tensors and numbers.
        fakes: the arguments, fake tensors and symbolic numbers.
        mode: their fake mode.
        decompose: decompositions of some operators.
        like_inductor: decompose others like inductor.
        composites: replace operators with undeclared writes, such as batch norm, by ones that declare them.
    """
    from torch._dispatch.python import enable_python_dispatcher  # importing the compiler is slow
    from torch.fx.experimental.proxy_tensor import make_fx  # importing the compiler is slow

    table = {**decompose}
    if like_inductor:
        from torch._inductor.decomposition import select_decomp_table  # importing the compiler is slow

        table = {**select_decomp_table(), **decompose}
    # PyTorch has operators on open sizes only in Python
    in_python = composites or mode.shape_env is not None
    dispatcher = enable_python_dispatcher() if in_python else contextlib.nullcontext()
    with mode, dispatcher, _tracing_here():
        graph = make_fx(function, decomposition_table=table, _allow_non_fake_inputs=True)(*fakes)
    return _with_dtypes_of_attention(graph)


def _with_dtypes_of_attention(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph with the dtype that the second result of attention on the CPU has.

    The fake kernel of torch 2.10 says float32 in float64, too: a residual would be rounded to that.
    """
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    for node in graph.graph.find_nodes(op="call_function", target=attention):
        query: Any = node.args[0]
        wide = torch.promote_types(query.meta["val"].dtype, torch.float32)
        for user in node.users:
            if user.args[1:] == (1,) and user.meta["val"].dtype != wide:
                user.meta["val"] = user.meta["val"].to(wide)
    return graph


def partitioned(joint: torch.fx.GraphModule, outputs: int) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """The forward and the backward of a joint graph, with the fewest bytes saved that its recomputation rules allow.

    Its operators draw no random numbers. Attention without dropout is only marked as if it did.
    """
    from torch._functorch import partitioners  # importing the compiler is slow

    keep_random_states: Any = partitioners.functionalize_rng_ops
    partitioners.functionalize_rng_ops = lambda _joint, forward, backward, *_: (forward, backward)
    try:
        return partitioners.min_cut_rematerialization_partition(joint, None, num_fwd_outputs=outputs)
    finally:
        partitioners.functionalize_rng_ops = keep_random_states


def compiled(
    graph: torch.fx.GraphModule, fakes: Sequence[Any], mode: Any, *, in_cpp: bool
) -> Callable[[list[Any]], Sequence[Any]]:
    """A decomposed graph, compiled by inductor. It takes a list of arguments, which it empties.

    ``in_cpp``: the code that calls the kernels may be in C++, not in Python.
    """
    from torch._guards import TracingContext, tracing  # importing the compiler is slow
    from torch._inductor import config  # importing the compiler is slow
    from torch._inductor.compile_fx import compile_fx_inner  # importing the compiler is slow

    in_cpp = config.cpp_wrapper or in_cpp and _is_inductors(graph)
    settings = {
        "cpp_wrapper": in_cpp,  # read by the parts of inductor that the argument does not reach
        # a loop of fewer than 8192 elements takes less time than starting a second thread
        "cpp.min_chunk_size": max(config.cpp.min_chunk_size, 8192 // torch.get_num_threads()),
    }
    with (
        tracing(TracingContext(mode)),
        torch.no_grad(),
        config.patch(settings),
        _writes_in_order(),
        _tracing_here(),  # inductor's patterns
    ):
        return compile_fx_inner(graph, fakes, is_inference=True, cpp_wrapper=in_cpp)


def _is_inductors(graph: torch.fx.GraphModule) -> bool:
    """Whether inductor has a kernel of its own for each operator.

    Its calls of other operators from C++ look these up by name, and end the process if one in Python returns a list.
    """
    from torch._inductor.lowering import fallbacks, lowerings  # importing the compiler is slow

    others = {
        *fallbacks,
        torch.ops.aten.median.dim,
    }  # whose lowering calls PyTorch's on the CPU, with a warning if from C++
    for node in graph.graph.nodes:
        if isinstance(node.target, OpOverload) and (node.target not in lowerings or node.target in others):
            return False
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_complex():  # computed by PyTorch's operators
            return False
    return True


@contextlib.contextmanager
def _writes_in_order() -> Iterator[None]:
    """Let inductor keep reads after the writes that they depend on.

    When it fits a node's loops to those of another node, it analyzes again what the node reads, and loses which version of a
    buffer that is. A fused kernel may then read a sum before ``index_put`` has added the terms (pytorch/pytorch #185509, fixed
    after torch 2.13).
    """
    from torch._inductor.dependencies import StarDep, WeakDep  # importing the compiler is slow
    from torch._inductor.scheduler import SchedulerNode  # importing the compiler is slow

    config: Any = torch.compiler.config
    recompute: Any = SchedulerNode.recompute_size_and_body

    @functools.wraps(recompute)
    def recompute_in_order(self: Any, *args: Any, **kwargs: Any) -> None:
        ordering = OrderedSet(dep for dep in self.read_writes.reads if isinstance(dep, (StarDep, WeakDep)))
        recompute(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.with_read(ordering).rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute_in_order  # type: ignore[method-assign]
    try:  # the tag keeps apart on disk what PyTorch compiles from the same graph
        with config.patch(cache_key_tag=f"{config.cache_key_tag}|writes in order"):
            yield
    finally:
        SchedulerNode.recompute_size_and_body = recompute  # type: ignore[method-assign]


def inductors(name: str) -> Callable[..., Any]:
    """Inductor's decomposition of an operator, by name. It returns NotImplemented if it keeps the operator."""
    from torch._inductor import decomposition  # importing the compiler is slow

    found: Callable[..., Any] = getattr(decomposition, name)
    return found


def without_first_call(run: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    """The function inside of a graph from `compiled`, without the work around it that its first call needs."""
    return getattr(run, "current_callable", None) or run


def code_in_cpp(run: Callable[[list[Any]], Sequence[Any]]) -> int | None:
    """The address of inductor's C++ code for a graph, from `without_first_call`; None if Python is needed to call it.

    The code is ``void inductor_entry_impl(AtenTensorHandle*, AtenTensorHandle*)``.
    """
    around: Any = getattr(run, "__code__", None)
    if around is None or around.co_freevars != ("f",) or "input_handles" not in around.co_varnames:
        return None
    if (
        "constants_tensor" in around.co_varnames or "item" in around.co_names
    ):  # more arguments, or results that are numbers
        return None
    module: Any = getattr(inspect.getclosurevars(run).nonlocals["f"], "__self__", None)
    try:
        function = ctypes.CDLL(module.__file__)["_Z19inductor_entry_implPP16AtenTensorOpaqueS1_"]
    except (AttributeError, OSError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
