"""The backend ``"manualgrad"`` of torch.compile."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..core import compile_cache
from ..core.internals import (
    PLAIN,
    hide_traces_from_other_threads,
    is_in_compiled_autograd,
    keep_aliases_of_dropout,
    keeps_values,
    skip_frame,
    trace_autograd_functions,
    trace_gradients,
    wrap_compiled,
)
from ..core.override.override import active_rules
from ..custom_rules.autograd_functions import rule_of
from . import watching
from .function import Options, Unsupported, lowerings
from .programs import Programs
from .transforms import recorded, under_transforms

__all__ = ["backend", "compile"]


def backend(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    lowering: str = "inductor",
    fallback: bool = True,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs so that it can be differentiated to any order; for ``torch.compile(backend=...)``.

    Args:
        graph: the graph.
        example_inputs: not read; each graph is traced at its first call with tensors of new shapes, dtypes or devices.
        lowering: "inductor", or "eager" to run graphs of ATen operators as they are, which compiles nothing.
        fallback: run unsupported programs uncompiled, with a warning. Otherwise raise.
        options: the last two by name, as ``torch.compile(options=...)`` passes them.

    Returns:
        A function with the outputs of the graph.

    Raises:
        TypeError, ValueError: an option is unknown, or has a wrong value.
    """
    chosen = _options("backend", {"lowering": lowering, "fallback": fallback, **(options or {})})
    chosen = chosen._replace(line=watching.line_of(graph))
    if any(map(_has_wrong_shape, _nodes(graph))):  # the graph, and the code around it, may hold them as numbers
        wrong = Unsupported("Dynamo of this torch is wrong about the shapes of torch.lstm")
        chosen.report("a function runs uncompiled", wrong)
        skip_frame(str(wrong))
    if is_in_compiled_autograd():  # its graphs write to the ``grad`` of tensors, and take lists
        chosen.report("a backward runs uncompiled", Unsupported("it is a graph of compiled autograd"))
        return graph.forward
    programs, keeps = Programs(graph, chosen), keeps_values()

    def run(*values: Any) -> Any:
        watching.note_run()
        if any(type(v) not in PLAIN for v in values if isinstance(v, Tensor)):
            return graph(*values)  # a subclass may lack the operators that rules call
        program, given = programs.of(values)
        if program is None or not program.takes(given):
            with active_rules():
                return graph(*values)
        stand_ins = recorded(program, given, keeps)
        return program(*given) if stand_ins is None else stand_ins

    return run


def compile(function: Any = None, /, *, dynamic: bool | None = None, fullgraph: bool = False, **options: Any) -> Any:
    """``torch.compile`` with derivatives of every order. Usable as a decorator.

    Args:
        function: a function or module.
        dynamic: as in ``torch.compile``.
        fullgraph: raise where Dynamo cannot trace the whole function, or a graph cannot be compiled.
        options: of `backend`.

    Returns:
        The result of ``torch.compile``.

    Raises:
        TypeError, ValueError: an option is unknown, or has a wrong value.
    """
    if function is None:
        return functools.partial(compile, dynamic=dynamic, fullgraph=fullgraph, **options)
    if type(fullgraph) is not bool:
        raise TypeError(f"compile: fullgraph: expected a bool, got {fullgraph!r}")
    given = options.get("options")
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"compile: options: expected a dictionary, got {given!r}")
    _options(
        "compile", {**{n: x for n, x in options.items() if n != "options"}, **(given or {})}, "dynamic, fullgraph, "
    )
    chosen = functools.partial(backend, **{"fallback": not fullgraph, **options})
    return torch.compile(function, backend=chosen, dynamic=dynamic, fullgraph=fullgraph)


def _options(where: str, given: Mapping[str, Any], others: str = "") -> Options:
    if unknown := sorted(given.keys() - {"lowering", "fallback"}):
        raise TypeError(f"{where}: no option {unknown[0]!r}; expected {others}lowering or fallback")
    chosen = Options(**given)
    if chosen.lowering not in lowerings:
        expected = ", ".join(map(repr, lowerings))
        raise ValueError(f"{where}: lowering: expected one of {expected}, got {chosen.lowering!r}")
    if type(chosen.fallback) is not bool:
        raise TypeError(f"{where}: fallback: expected a bool, got {chosen.fallback!r}")
    return chosen


def _nodes(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of one of Dynamo's graphs, and of the graphs of regions and calls inside."""
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def _has_wrong_shape(node: fx.Node) -> bool:
    """Whether a node is an LSTM whose states have more than three dimensions, as batched ones do in torch 2.10."""
    found = node.meta.get("example_value") if node.target is torch.lstm else None
    return found is not None and found[1].dim() > 3


def _is_ours(function: Any) -> bool:
    return getattr(function, "func", function) is backend


def _report(what: str) -> None:
    watching.note_refusal("", f"{what}, and runs uncompiled")
    warnings.warn(f"torch_manualgrad: {what}, and runs uncompiled", RuntimeWarning, stacklevel=2)


def _under_transforms(
    function: Any, compiled: Callable[..., Any], chosen: Any, fullgraph: bool, as_one_graph: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Wrap a result of torch.compile, so that its transforms are compiled, too; ``chosen`` is the backend with its options."""
    given = {**getattr(chosen, "kwargs", {}).get("options", {})}
    fallback = not fullgraph and given.get("fallback", True)
    return under_transforms(function, compiled, as_one_graph, Options(fallback=fallback))


trace_autograd_functions(_is_ours, rule_of, _report)
trace_gradients(_is_ours)
hide_traces_from_other_threads()
keep_aliases_of_dropout()
wrap_compiled(_is_ours, _under_transforms)
compile_cache.settle()  # Dynamo is imported now: its guard must be set before the first graph, which it would drop
