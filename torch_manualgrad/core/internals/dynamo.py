"""The compiler and its tools: guards of compiled graphs, fake tensors, pytrees."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any, NoReturn, TypeVar

import torch
from torch._guards import CompileContext
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.utils import _pytree as pytree

__all__ = [
    "FakeTensorMode",
    "NoMetaKernel",
    "OperatorOfGraphs",
    "breaks_graphs",
    "compiled_backward",
    "constant_in_graphs",
    "graph_breaks",
    "graph_is_for",
    "guard_compiled_graphs",
    "is_compiled",
    "is_dynamo_at_work",
    "is_exporting",
    "is_in_compiled_autograd",
    "is_node_open",
    "keeps_values",
    "pytree",
    "run_uncompiled",
    "runs_eagerly",
    "skip_frame",
    "skipped_by_dynamo",
    "trace_autograd_functions",
    "trace_gradients",
    "traced_with_graph",
    "uncompiled",
    "wrap_compiled",
    "wrapped_attributes",
]

_F = TypeVar("_F", bound=Callable[..., Any])

# Raised by an operator without a meta kernel on device meta, and on fake tensors.
NoMetaKernel = (NotImplementedError, UnsupportedOperatorException)


def compiled_backward() -> AbstractContextManager[None]:
    """Context manager: autograd compiles each backward as a whole, and runs the graph, without a compiler below."""
    from torch._dynamo import compiled_autograd  # here, as importing Dynamo takes a second

    context: AbstractContextManager[None] = compiled_autograd._enable(torch.compile(backend="eager"))
    return context


def skipped_by_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function. Dynamo compiles neither its frames nor those that it calls.

    After a graph break, the rest of a compiled function calls operators eagerly with Dynamo still on: their kernels in
    Python would be compiled one by one, again for each operator. If Dynamo inlines the function, nothing changes.
    """
    frames: Any = torch._C._dynamo.eval_frame
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is not None and hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    return function


def breaks_graphs(reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator. If a compiled function calls the function, Dynamo ends the graph and runs the call eagerly.

    Like ``torch.compiler.disable(reason=...)``, which imports Dynamo.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return skipped_by_dynamo(function)

    return mark


def trace_autograd_functions(
    is_ours: Callable[[Any], bool], rule_of: Callable[[Any], Any], report: Callable[[str], None]
) -> None:
    """Make Dynamo trace ``applied`` of the rule of an autograd.Function instead of ``apply``; without one, the graph ends.

    By default, if its arguments do not require grad, such as dual numbers and the arguments of a transform, Dynamo traces
    the forward as plain code and drops the other methods.

    Args:
        is_ours: whether a graph is for this backend.
        rule_of: the rule of a Function, or None.
        report: called with a sentence.
    """
    from torch._dynamo.exc import (  # importing the compiler is slow
        ObservedException,
        TorchDynamoException,
        TorchRuntimeError,
        Unsupported,
        unimplemented,
    )
    from torch._dynamo.source import AttrSource, GlobalSource  # importing the compiler is slow
    from torch._dynamo.variables.base import VariableTracker  # importing the compiler is slow
    from torch._dynamo.variables.misc import AutogradFunctionVariable  # importing the compiler is slow

    apply: Any = AutogradFunctionVariable.call_apply
    if hasattr(apply, "of_torch_manualgrad"):
        return

    @functools.wraps(apply)
    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not is_ours(_innermost(tx.output.compiler_fn)):
            return apply(self, tx, args, kwargs)
        what = f"{self.fn_cls.__name__}.apply has derivatives of its own"
        rule = rule_of(self.fn_cls)
        if rule is not None and not kwargs:
            source: Any = AttrSource(GlobalSource(tx.output.install_global_by_id("autograd_function", rule)), "applied")
            try:
                return VariableTracker.build(tx, rule.applied, source=source).call_function(tx, args, kwargs)
            except Unsupported:
                report(what)
                raise
            except Exception as error:
                of_program = (ObservedException, TorchRuntimeError)
                if isinstance(error, TorchDynamoException) and not isinstance(error, of_program):
                    raise  # such as those by which Dynamo begins again
                # uncompiled it may not raise: fewer gradients are needed, and the forward is not tracked
        report(what)
        unimplemented(gb_type=what, context=self.fn_cls.__name__, explanation=what, hints=[])

    backward: Any = AutogradFunctionVariable.call_backward

    @functools.wraps(backward)
    def call_backward(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not is_ours(_innermost(tx.output.compiler_fn)):
            return backward(self, tx, args, kwargs)
        source = self.source and AttrSource(self.source, "backward")
        return VariableTracker.build(tx, self.fn_cls.backward, source=source).call_function(tx, args, kwargs)

    method: Any = AutogradFunctionVariable.call_method

    @functools.wraps(method)
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "apply" and is_ours(_innermost(tx.output.compiler_fn)):
            return self.call_apply(tx, args, kwargs)  # also if the class is allowed in graphs
        return method(self, tx, name, args, kwargs)

    call_apply.of_torch_manualgrad = True  # type: ignore[attr-defined]
    AutogradFunctionVariable.call_apply = call_apply  # type: ignore[method-assign]
    AutogradFunctionVariable.call_backward = call_backward  # type: ignore[method-assign]
    AutogradFunctionVariable.call_method = call_method  # type: ignore[method-assign]


def trace_gradients(is_ours: Callable[[Any], bool]) -> None:
    """Make Dynamo trace ``torch.autograd.grad`` into a graph; by default it ends the graph. Older versions cannot.

    Dynamo also drops a graph whose outputs depend on a tensor that was made and set to require grad inside, because
    PyTorch's backend loses that history. This backend keeps it, and needs the check only if that tensor itself is
    returned.

    Args:
        is_ours: whether a graph is for this backend.
    """
    from torch._dynamo import config  # importing the compiler is slow
    from torch._dynamo.output_graph import OutputGraph  # importing the compiler is slow
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable  # importing the compiler is slow

    handlers: Any = TorchInGraphFunctionVariable._get_handlers()
    handler = handlers.get(torch.autograd.grad)
    if handler is None or hasattr(handler, "of_torch_manualgrad"):
        return
    check: Any = getattr(OutputGraph, "_check_requires_grad_intermediate_outputs", None)

    @functools.wraps(handler)
    def handle(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(_innermost(tx.output.compiler_fn)):
            return handler(self, tx, *args, **kwargs)
        with config.patch(trace_autograd_ops=True):
            return handler(self, tx, *args, **kwargs)

    @functools.wraps(check)
    def check_outputs(self: Any, outputs: Any, tx: Any) -> None:
        made_inside = {v.as_proxy().node for v in self.leaf_var_creation_order if not v.source}
        returned = {v.as_proxy().node for v in outputs if v.is_tensor()}
        if not is_ours(_innermost(self.compiler_fn)) or made_inside & returned:
            check(self, outputs, tx)

    handle.of_torch_manualgrad = True  # type: ignore[attr-defined]
    handlers[torch.autograd.grad] = handle
    if check is not None:
        OutputGraph._check_requires_grad_intermediate_outputs = check_outputs  # type: ignore[method-assign,assignment]


def wrap_compiled(is_ours: Callable[[Any], bool], wrap: Callable[..., Callable[..., Any]]) -> None:
    """Wrap each function that torch.compile returns from now on, and the forward of each module.

    Args:
        is_ours: whether it is compiled by this backend.
        wrap: called with the function, the compiled function, the backend, ``fullgraph``, and a function that compiles another
            one in the same way as one graph.
    """
    from torch._dynamo.eval_frame import OptimizeContext  # importing the compiler is slow

    original: Any = OptimizeContext.__call__
    if hasattr(original, "of_torch_manualgrad"):
        return

    @skipped_by_dynamo  # a compiled function may compile others between its graphs
    @functools.wraps(original)
    def compile(self: Any, function: Any) -> Any:
        backend = _given(self.callback)
        if not is_ours(_innermost(backend)):
            return original(self, function)
        if isinstance(getattr(function, "__wrapped__", None), torch.nn.Module):
            function = _with_own_code(function)
        made = original(self, function)
        if not inspect.isfunction(made):
            return made

        def as_one_graph(function: Any) -> Any:
            return torch.compile(function, backend=backend, dynamic=self._dynamic, fullgraph=True)

        wrapped: Any = wrap(function, made, backend, self.fullgraph, as_one_graph)
        wrapped._torchdynamo_wrapper_id = id(wrapped)  # Dynamo may take it for its own wrapper
        return wrapped

    compile.of_torch_manualgrad = True  # type: ignore[attr-defined]
    OptimizeContext.__call__ = compile  # type: ignore[method-assign]


def _with_own_code(function: Any) -> Any:
    """A copy, with code of its own, of the function in which PyTorch calls a torch.nn module.

    PyTorch calls all of them from the same code. To this Dynamo attaches the graphs, their limit, and the mark not to retry.
    """
    code, name = function.__code__.replace(), function.__name__
    made = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    return functools.update_wrapper(made, function.__wrapped__, wrapped_attributes(function.__wrapped__))


def keeps_values() -> bool:
    """Whether the function of the graph that Dynamo has just made stores values, other than constants, in existing objects.

    For a backend.
    """
    from torch._dynamo.symbolic_convert import tls  # importing the compiler is slow
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew  # importing the compiler is slow
    from torch._dynamo.variables.torch_function import TorchFunctionModeStackVariable  # importing the compiler is slow

    translator: Any = getattr(tls, "current_tx", None)
    if translator is None:  # the backend is called by hand
        return False
    effects = translator.output.side_effects
    for v in effects.id_to_variable.values():
        is_new = isinstance(v.mutation_type, (AttributeMutationNew, ValueMutationNew))
        if effects.is_modified(v) and not is_new and not isinstance(v, TorchFunctionModeStackVariable):
            attributes = effects.store_attr_mutations.get(v)
            if not attributes or not all(x.is_python_constant() for x in attributes.values()):
                return True
    return False


def is_in_compiled_autograd() -> bool:
    """Whether compiled autograd runs a backward here."""
    module: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and module.in_compiled_autograd_region


def is_compiled(thing: object) -> bool:
    """Whether a function or module was made by ``torch.compile``."""
    if isinstance(thing, torch.nn.Module):
        return "_orig_mod" in thing._modules or thing._compiled_call_impl is not None
    return isinstance(thing, FunctionType) and "_torchdynamo_orig_callable" in vars(thing)


def uncompiled(function: Any) -> Any:
    """The function that a compiled one was made from."""
    return function._torchdynamo_orig_callable


def run_uncompiled(wanted: bool = True) -> AbstractContextManager[None]:
    """Context manager: if wanted, compiled functions run uncompiled, in all threads. Modes then see their operations."""
    return contextlib.nullcontext() if not wanted or runs_eagerly() else torch.compiler.set_stance("force_eager")


def runs_eagerly() -> bool:
    """Whether calls of compiled functions run eagerly here: the stance "force_eager"."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and frames._stance.stance == "force_eager"


def skip_frame(reason: str) -> NoReturn:
    """Make Dynamo drop its trace of a function, which runs uncompiled; for a backend."""
    from torch._dynamo.exc import SkipFrame  # importing the compiler is slow

    raise SkipFrame(reason)


def constant_in_graphs(function: _F) -> _F:
    """Make Dynamo call a function of constants while it traces, and keep the result.

    Like ``torch.compiler.assume_constant_result``, which imports Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def wrapped_attributes(function: Callable[..., Any]) -> tuple[str, ...]:
    """The attributes that ``functools.wraps`` copies, if the function has them.

    ``wraps`` itself skips missing ones, but Dynamo of torch 2.10 raises an internal error where a builtin lacks one.
    """
    return tuple([n for n in functools.WRAPPER_ASSIGNMENTS if hasattr(function, n)])


def is_exporting() -> bool:
    """Like ``torch.compiler.is_exporting()``, which Dynamo of torch 2.10 assumes true in ``torch.compile``, too."""
    return torch.compiler._is_exporting_flag


class OperatorOfGraphs(HigherOrderOperator):
    """An operator whose first argument is a function, which Dynamo replaces by its graph and the tensors that it reads.

    Args:
        name: of the operator.
        uncompiled: called with the function if Dynamo could not trace it; calls the operator eagerly.

    Attributes:
        kind: ``kind(graph)(values)`` is called instead of the operator, in all modes.
    """

    def __init__(self, name: str, uncompiled: Callable[[Any], Any]) -> None:
        super().__init__(name)  # type: ignore[no-untyped-call]
        self.kind: Any = None
        self._uncompiled = uncompiled

    def __call__(self, body: Any, *values: Any) -> Any:
        return self.kind(body)(values) if isinstance(body, torch.fx.GraphModule) else self._uncompiled(body)


def traced_with_graph(op: Any) -> None:
    """Make Dynamo turn a call of the operator into a node, with the function's graph and the values that this reads.

    A Dynamo version with its table of operators elsewhere ends the graph at the call.
    """
    from torch._dynamo.variables import higher_order_ops  # importing the compiler is slow

    known: Any = getattr(higher_order_ops, "_hop_name_to_variable_class", {})
    # since torch 2.15 Dynamo refuses such graphs by default, and every mark is an alias
    allowed = {"supports_aliasing": True, "supports_input_mutation": True}
    known.setdefault(op.__name__, type("CallWithDerivatives", (higher_order_ops.WrapHigherOrderVariable,), allowed))


def is_node_open(test: Callable[[Any], bool]) -> bool:
    """Whether Dynamo is tracing a function for a node, inside of a node for which ``test`` is true."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # importing the compiler is slow

    tracer = InstructionTranslator.current_tx().output.current_tracer
    while tracer.parent is not None:
        if any(map(test, tracer.graph.nodes)):
            return True
        tracer = tracer.parent
    return False


@constant_in_graphs
def graph_is_for(module: str) -> bool:
    """Whether Dynamo is tracing a graph for a backend that is defined in a module."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # importing the compiler is slow

    backend = _innermost(InstructionTranslator.current_tx().output.compiler_fn)
    return bool(getattr(backend, "func", backend).__module__ == module)


def graph_breaks() -> dict[str, int]:
    """The reasons why Dynamo has ended graphs in this process, with their counts."""
    if "torch._dynamo" not in sys.modules:
        return {}
    return dict(sys.modules["torch._dynamo"].utils.counters["graph_break"])


def _given(callback: Any) -> Any:
    """The backend, with its options, that a callback of Dynamo calls."""
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return callback


def _innermost(backend: Any) -> Any:
    """A backend without the wrappers of torch.compile."""
    while hasattr(backend := _given(backend), "compiler_fn"):
        backend = backend.compiler_fn
    return backend


_guarded = False


def is_dynamo_at_work() -> bool:
    """Whether Dynamo compiles a function on this thread: it runs code of the program, such as imports."""
    return CompileContext.try_get() is not None


def guard_compiled_graphs(state: Callable[[], object], begin: Callable[[], None] = lambda: None) -> bool:
    """Make every graph that Dynamo compiles from now on valid only while ``state()`` has its value at compilation.

    ``begin()`` is called when a compilation begins, on its thread. Dynamo has no public hook for an ambient guard.
    Returns whether the guard is installed; False if Dynamo is not imported yet (there is no graph to guard) or if its
    version has the hook elsewhere (the caller resets).
    """
    global _guarded
    if _guarded or "torch._dynamo.output_graph" not in sys.modules:
        return _guarded
    # here, because importing Dynamo takes a second, and if nobody has, there is nothing to guard
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.source import GlobalStateSource

    if not hasattr(OutputGraph, "init_ambient_guards") or not hasattr(GuardBuilder, "GRAD_MODE"):
        return False

    def MANUALGRAD_RULES(builder: Any, guard: Any) -> None:
        compiled_for = state()
        text = [f"torch_manualgrad: active derivatives == {compiled_for!r}"]

        def holds(_: object) -> bool:
            return state() == compiled_for

        root = builder.guard_manager.root
        try:
            root.add_lambda_guard(holds, text, guard.user_stack)
        except TypeError:  # up to 2.11 it takes no stack argument
            root.add_lambda_guard(holds, text)

    ambient = OutputGraph.init_ambient_guards

    def init_ambient_guards(self: Any) -> None:
        begin()
        ambient(self)
        self.guards.add(GlobalStateSource().make_guard(MANUALGRAD_RULES))

    OutputGraph.init_ambient_guards = init_ambient_guards  # type: ignore[method-assign]
    _guarded = True
    return True
