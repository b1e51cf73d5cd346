"""One of Dynamo's graphs as a function without side effects, and the side effects around it.

The function takes the inputs and the random numbers, and returns the outputs and the new values of written inputs.
Around it, the program draws the random numbers, so that every derivative uses the same, writes to inputs, and makes the
outputs that are views of inputs or of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from ..core.calls_in_graphs import Interpreter
from ..core.internals import (
    HigherOrderOperator,
    OperatorOfGraphs,
    OpOverload,
    Sizes,
    differentiate_in_transform,
    in_clean_state,
    is_autocast_enabled,
    is_functorch_wrapped,
    is_symbol,
    pytree,
    switch_grad_mode,
    traced,
)
from ..core.override.override import active_rules
from ..core.schema import is_differentiable
from ..core.versions import reached
from . import graphs, regions
from .function import Function, Options, Unsupported
from .mixed_precision import in_float32
from .untraced import followed, is_untraced

__all__ = ["Program"]

aten = torch.ops.aten


Places = Sequence[tuple[int, Any]]
_Close = Callable[[Any], Any]
_Draw = Callable[[_Close], Tensor]


# Random operators whose results depend on the shape of the first argument only, and not on its values.
_OF_SHAPE = {
    aten.rand_like, aten.randn_like, aten.randint_like, aten.uniform, aten.normal_functional, aten.exponential,
    aten.log_normal, aten.cauchy, aten.geometric, aten.random,
}  # fmt: skip


class Program:
    """A graph of Dynamo's, for inputs of certain shapes.

    Args:
        graph: the graph.
        values: the inputs of the first call.
        options: of its functions.
        free: for each open size the inputs and dimensions that have it; the dimension is None if the input is the size
            itself.
        numbers: the inputs that are numbers, or tensors that stand for them; the graph reads their ``item``.

    Raises:
        Unsupported: the graph cannot be compiled.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        values: Sequence[Any],
        options: Options,
        free: Sequence[Places] = (),
        numbers: Sequence[int] = (),
    ) -> None:
        tracked, graph = torch.is_grad_enabled(), regions.inlined(graph)
        differentiates = bool(graph.graph.find_nodes(op="call_function", target=torch.autograd.grad))
        transforms = _refuse(graph, tracked, differentiates)
        switches = graph.graph.find_nodes(op="call_function", target=switch_grad_mode)
        # None if the graph leaves it as it is
        self.grad_mode_after = switches[-1].args[0] if switches and switches[-1].args[0] != tracked else None
        derivatives = transforms or differentiates  # their saved tensors are detached
        self.tensors = [i for i, v in enumerate(values) if isinstance(v, Tensor)]
        self.free = free
        with in_clean_state(autocast=True):
            self.sizes = Sizes(self.open_sizes(values))
            given = _fakes([values[i] for i in self.tensors], self.tensors, free, self.sizes)
            places, self.carried = self._places(len(given))
            with self.sizes.mode:
                given += [graphs.carrier(self.sizes.numbers[k]) for k in self.carried]
            constants = {i: v for i, v in enumerate(values) if not isinstance(v, Tensor)}
            open_numbers = [(i, k) for k, where in enumerate(free) for i, d in where if d is None]

            def of_tensors(constants: dict[int, Any], *tensors: Any) -> list[Any]:
                everything = dict(zip(self.tensors, tensors)) | constants
                for i, k in open_numbers:
                    where, d = places[k]
                    everything[i] = tensors[where].shape[d]
                inputs = [everything[i] for i in range(len(values))]
                whole = _Interpreted(
                    graph,
                    tracked=tracked,
                    marks_detach=derivatives or not _DETACH_IS_SHOWN,
                    requires_grad=differentiates,
                    numbers=numbers,
                )
                outputs = _flat(whole.run(*inputs))
                if any(isinstance(x, Tensor) and is_functorch_wrapped(x) for x in outputs):
                    raise Unsupported("it ends before a pullback of torch.func is called, whose history it would lose")
                if differentiates and not whole.variables and any(map(_is_tracked, outputs)):
                    raise Unsupported("its outputs require grad, and none of its inputs does")
                return outputs

            mode = self.sizes.mode
            with active_rules() if derivatives else nullcontext():
                plan = traced(
                    lambda *xs: tuple(of_tensors(constants, *xs)), given, mode, decompose=in_float32, composites=True
                )
            # since torch 2.15 a fake tensor knows the number that it was made from
            if plan.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default):
                raise Unsupported("it reads the value of a tensor, which would be a constant of the graph")
            regions.settled(plan)
            if varying := {i: values[i].item() for i in numbers if isinstance(values[i], Tensor)}:
                with mode:
                    expected = of_tensors(constants | varying, *given)
                _refuse_other_dtypes(graphs.outputs_of(plan), expected)
            if derivatives:  # the program's own detach is marked
                graphs.removed_detach(plan)
            _refuse_writes(plan)
            self.outputs, inner = _views(plan)
            graphs.set_outputs(plan, inner)
            functional = graphs.trace(plan, given, mode, keeps_writes=True, stops=not derivatives)
            self.written = _writes(functional, len(inner))
            self.noise = _noise(functional)
            fakes = [n.meta["val"] for n in functional.graph.find_nodes(op="placeholder")]
            self.function = Function(functional, fakes, self.sizes, places, "compiled", options)
            as_they_are: list[Any] = [("output", i, []) for i in range(self.function.outputs)]  # none is a view
            effects = self.written or self.noise or self.carried or len(self.tensors) != len(values)
            effects = effects or self.grad_mode_after is not None
            self._only_function = not effects and self.outputs == as_they_are != []

    def open_sizes(self, values: Sequence[Any]) -> tuple[int, ...]:
        """The open sizes, in these inputs."""
        return tuple([values[i] if d is None else values[i].shape[d] for (i, d), *_ in self.free])

    def _places(self, count: int) -> tuple[list[tuple[int, int]], list[int]]:
        """For each open size the tensor and dimension that has it, and the sizes that further tensors must carry."""
        places: list[tuple[int, int]] = []
        carried: list[int] = []
        for k, where in enumerate(self.free):
            place = next(((self.tensors.index(i), d) for i, d in where if d is not None), None)
            if place is None:
                place = count + len(carried), 0
                carried.append(k)
            places.append(place)
        return places, carried

    def fits(self, values: Sequence[Any]) -> bool:
        """Whether the assumptions about open sizes hold for these inputs."""
        return not self.free or self.sizes.allow(self.open_sizes(values))

    def takes(self, values: Sequence[Any]) -> bool:
        """Whether the program may be run for these inputs: those that it writes to share no memory with others."""
        for i in self.written:
            x = values[self.tensors[i]]
            if x.requires_grad and x.is_leaf and torch.is_grad_enabled():
                return False
            others = [values[k] for k in self.tensors if k != self.tensors[i]]
            if any(o.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for o in others):
                return False
        return True

    def __call__(self, *values: Any) -> Sequence[Any]:
        """The outputs of the graph."""
        if self._only_function:
            return self.function(*values)
        inputs = [values[i] for i in self.tensors]
        arguments = list(inputs)
        for i in self.written:
            arguments[i] = inputs[i].clone()  # the residuals must not be written to
        open_sizes = self.open_sizes(values)
        arguments += [graphs.carrier(open_sizes[k]) for k in self.carried]
        found: Sequence[Tensor] = ()  # all outputs may be views of inputs
        if self.function.outputs:
            found = self.function(*arguments, *[draw(self._closing(open_sizes)) for draw in self.noise])
        for i, value in zip(self.written, found[len(found) - len(self.written) :]):
            inputs[i].copy_(value)
        return self._finished(inputs, found, open_sizes)

    def _closing(self, open_sizes: tuple[int, ...]) -> _Close:
        """Replaces nodes and symbols of open sizes by numbers."""
        if not open_sizes:
            return lambda arguments: arguments

        def close(x: Any) -> Any:
            number = x.meta["val"] if isinstance(x, fx.Node) else x
            return self.sizes.value(number, open_sizes) if is_symbol(number) else x

        return lambda arguments: pytree.tree_map_only(
            (fx.Node, torch.SymInt, torch.SymFloat, torch.SymBool), close, arguments
        )

    def _finished(self, inputs: Sequence[Tensor], found: Sequence[Tensor], open_sizes: tuple[int, ...]) -> list[Any]:
        results, close = [], self._closing(open_sizes)
        for base, place, chain in self.outputs:
            x = inputs[place] if base == "input" else found[place] if base == "output" else close(place)
            for view in chain:
                args, kwargs = close((view.args[1:], view.kwargs))
                x = x.detach() if view.target is graphs.stop else view.target(x, *args, **kwargs)
            results.append(x)
        if self.grad_mode_after is not None:
            switch_grad_mode(self.grad_mode_after)
        return results

    def stand_ins(self, values: Sequence[Any]) -> list[Any]:
        """Outputs of the right shapes, not computed."""
        open_sizes = self.open_sizes(values)
        close = self._closing(open_sizes)
        known = [n.meta["val"] for n in graphs.outputs_of(self.function.graph)]
        made = [
            torch.empty_strided(*close((tuple(o.shape), o.stride())), dtype=o.dtype, device=o.device) for o in known
        ]
        return self._finished([values[i] for i in self.tensors], made, open_sizes)


def _fakes(tensors: Sequence[Tensor], numbers: Sequence[int], free: Sequence[Places], sizes: Sizes) -> list[Tensor]:
    """Fake tensors for inputs, by number, some with open sizes."""
    made = []
    known = {where: n for n, places in zip(sizes.numbers, free) for where in places}
    for i, x in zip(numbers, tensors):
        shape = [known.get((i, d), n) for d, n in enumerate(x.shape)]
        if not any(map(is_symbol, shape)):
            made.append(sizes.mode.from_tensor(x.detach(), static_shapes=True))
            continue
        if x.is_conj() or x.is_neg() or not torch.empty_like(x, device="meta").stride() == x.stride():
            raise Unsupported("a tensor whose sizes are left open has gaps in memory, or is a lazy conjugate")
        strides: list[Any] = [0] * len(shape)
        step: Any = 1
        for d in sorted(range(len(shape)), key=lambda d: (x.stride(d), -d)):
            strides[d] = step
            step = step * shape[d]
        with sizes.mode:
            made.append(torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device))
    return made


def _flat(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


# -- tracing ----------------------------------------------------------------------------------------------------------


class _Interpreted(Interpreter):
    """Runs Dynamo's graph, or a segment of a call's graph, and marks the places where the program ends a derivative.

    Args:
        module: the graph, or the module that the segment reads from.
        graph: the segment.
        enclosing: the calls whose segment it is.
        tracked: whether grad mode is on where the graph begins.
        marks_detach: mark ``detach``; otherwise the trace shows all of them.
        requires_grad: track the inputs that require grad, because the graph calls ``torch.autograd.grad``.
        numbers: the inputs that stand for numbers, with the values of their ``item``.
    """

    stays = True

    def __init__(
        self,
        module: Any,
        graph: fx.Graph | None = None,
        enclosing: Sequence[Any] = (),
        *,
        tracked: bool = True,
        marks_detach: bool = True,
        requires_grad: bool = False,
        numbers: Sequence[int] = (),
    ) -> None:
        super().__init__(module, graph, enclosing)
        self.tracked, self.marks_detach = tracked, marks_detach
        self.marked = regions.are_in(self.graph)
        inputs = self.graph.find_nodes(op="placeholder")
        self.numbers = [inputs[i] for i in numbers]
        self.variables = [n for n in inputs if requires_grad and _is_tracked(n.meta.get("example_value"))]

    def run(self, *values: Any) -> Any:  # type: ignore[override]
        with torch.set_grad_enabled(self.tracked), torch.fx.traceback.preserve_node_meta(self.marked):
            return super().run(*values)

    def run_node(self, n: Any) -> Any:
        if n in self.variables:
            return super().run_node(n).detach().requires_grad_()
        if n.op not in ("call_function", "call_method", "call_module"):
            return super().run_node(n)
        if n.target == "item" and n.args[0] in self.numbers:
            return self.env[n.args[0]]
        untracked = self.tracked and not torch.is_grad_enabled()
        before = _versions(self.fetch_args_kwargs_from_env(n)) if untracked else []
        with followed(n) if is_untraced(n) else nullcontext():
            result = super().run_node(n)
        if self.marks_detach and (n.target in _DETACH or _is_data(n)):
            return _marked(graphs.stop, result)
        if n.target is torch.autograd.grad:
            tracks = n.kwargs["create_graph"] if "create_graph" in n.kwargs else n.args[4:5] == (True,)
            return result if tracks else _marked(graphs.constant, result)
        if not untracked or torch.is_grad_enabled():
            return result
        if any(is_differentiable(x) and x._version != version for x, version in before):
            raise Unsupported("it writes to a tensor under torch.no_grad()")
        return _marked(graphs.stop_reverse, result, [x for x, _ in before])


def _is_tracked(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


_DETACH = ("detach", torch.detach)
# Since torch 2.15 a trace has ``alias`` for ``detach``, and a program may call ``alias``, too.
_DETACH_IS_SHOWN = not reached("2.15")


def _versions(arguments: Any) -> list[tuple[Tensor, int]]:
    return [(x, x._version) for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]


def _marked(op: Any, result: Any, given: Sequence[Tensor] = ()) -> Any:
    """The result, marked. Tensors that are arguments, such as ``x.contiguous()``, are not, and keep their history."""

    def marked(x: Tensor) -> Any:
        return op(x) if is_differentiable(x) and not any(x is g for g in given) else x

    return pytree.tree_map_only(Tensor, marked, result)


def _refuse(graph: fx.GraphModule, tracked: bool, differentiates: bool) -> bool:
    """Refuse operations that a trace would not show. Returns whether there are transforms of torch.func inside."""
    nodes = [n for one in (graph, *_calls_in(graph)) for n in one.graph.nodes]
    modules = [str(getattr(n.target, "__module__", "")) + str(n.target) for n in nodes if n.op == "call_function"]
    # Dynamo also calls the latter next to each ``requires_grad_``
    transforms = any("functorch" in m and "set_inplace_requires_grad_allowed" not in m for m in modules)
    for node in nodes:
        if isinstance(node.target, HigherOrderOperator) and not isinstance(node.target, OperatorOfGraphs):
            raise Unsupported(f"it has the higher-order operator {node.target.name()}")
    for node in nodes:
        if node.op == "get_attr" and not all(isinstance(user.target, OperatorOfGraphs) for user in node.users):
            raise Unsupported(f"it holds the tensor {node.target}, which is not among its inputs")
        if node.kwargs.get("out") is not None:
            raise Unsupported("it writes to an argument out=")
        if _pulls_back_from_outside(node):
            raise Unsupported(
                "it calls a pullback of torch.func that was made outside of the graph, whose history it lacks"
            )
        if differentiates and _makes_variable(node):
            continue
        if node.target in _OF_METADATA or transforms and _is_data(node):
            raise Unsupported(f"it calls {node.target}")
        if _changes_a_setting(node):
            raise Unsupported(f"it calls {node.target.__name__}, which changes a setting of PyTorch's at each call")
        if node.target is switch_grad_mode:
            if not tracked and node.args[0]:
                raise Unsupported("it switches grad mode on, and is called under torch.no_grad()")
            if transforms and not node.args[0]:
                raise Unsupported("it has transforms of torch.func and torch.no_grad()")
    if is_autocast_enabled() and any("autocast" in m for m in modules):
        raise Unsupported("it switches autocast, and is called under autocast")
    return transforms


def _calls_in(graph: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The graphs of calls with custom derivatives, recursively."""
    for node in graph.graph.nodes:
        if isinstance(node.target, OperatorOfGraphs):
            body = getattr(graph, node.args[0].target)
            yield body
            yield from _calls_in(body)


def _pulls_back_from_outside(node: Any) -> bool:
    """Whether a node is the pullback of a call outside its graph. A trace of it has zeros as results."""
    return node.target is differentiate_in_transform and any(x.op == "placeholder" for x in node.args[1])


def _makes_variable(node: Any) -> bool:
    """Whether a node makes a tensor of the graph require grad, to differentiate by it. Dynamo does not return these."""
    return node.target == "requires_grad_" and node.args[0].op != "placeholder" and node.args[1:] in ((), (True,))


# Methods that change a tensor's properties, not its values.
_OF_METADATA = ("detach_", "requires_grad_", "set_", "resize_", "resize_as_", "retain_grad", "register_hook")


def _changes_a_setting(node: Any) -> bool:
    """Whether a node changes a setting of the process, such as the default dtype. A trace would change it only once."""
    where, name = getattr(node.target, "__module__", None), getattr(node.target, "__name__", "")
    return node.op == "call_function" and (
        where == "torch" and name.startswith("set_") or where == "torch._C" and name == "_set_deterministic_algorithms"
    )


def _is_data(node: Any) -> bool:
    """Whether a node is ``x.data``, by any of the names that Dynamo has for it."""
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and (name in ("data", "_get_data_attr") or "data" in node.args[1:2])


def _refuse_writes(plan: fx.GraphModule) -> None:
    """Refuse writes to tensors that the trace has copied, and operators that change a tensor's shape in place."""
    copied = set()
    for node in plan.graph.nodes:
        if node.target in _STOPS:
            copied.add(_chain(node, _STOPS)[-1])
        if not graphs.writes(node):
            continue
        if torch.Tag.inplace_view in node.target.tags:
            if not _keeps_places(node):
                raise Unsupported(f"{node.target} changes the shape of a tensor in place")
            node.replace_all_uses_with(node.args[0])
            plan.graph.erase_node(node)
            continue
        for argument, about in zip(node.args, node.target._schema.arguments):
            if about.alias_info is not None and about.alias_info.is_write and isinstance(argument, fx.Node):
                chain = _chain(argument, _STOPS)
                if any(n.target is aten.detach.default or n.target in _STOPS for n in chain):
                    raise Unsupported("it writes to a tensor that is detached or computed under torch.no_grad()")
                if chain[-1] in copied:
                    raise Unsupported("it writes to a tensor that was detached, or used under torch.no_grad(), before")


def _keeps_places(node: fx.Node) -> bool:
    """Whether an operator in place leaves every element of a tensor where it is: it changes strides of dims of size 1 only."""
    before: Any = node.args[0]
    x, y = before.meta["val"], node.meta["val"]
    if x.shape != y.shape or x.storage_offset() != y.storage_offset():
        return False
    return all(a == b for n, a, b in zip(x.shape, x.stride(), y.stride()) if n != 1)


_STOPS = (graphs.stop, graphs.stop_reverse)


def _refuse_other_dtypes(nodes: Sequence[Any], expected: Sequence[Any]) -> None:
    """Refuse a plan with tensors for numbers if it changes dtypes: numbers are not promoted like tensors."""
    for node, value in zip(nodes, expected):
        if isinstance(value, Tensor) and node.meta["val"].dtype != value.dtype:
            raise Unsupported("a number that varies decides a dtype")


# -- outputs that are views -------------------------------------------------------------------------------------------


def _views(graph: fx.GraphModule) -> tuple[list[tuple[str, Any, list[Any]]], list[Any]]:
    """Recipes for the outputs, and the nodes that the function must return for them."""
    outputs = graphs.outputs_of(graph)
    chains = [_chain(node) if isinstance(node, fx.Node) else [] for node in outputs]
    roots = [chain[-1] for chain in chains if chain]
    places = {n: i for i, n in enumerate(graph.graph.find_nodes(op="placeholder"))}
    made: list[tuple[str, Any, list[Any]]] = []
    inner: list[Any] = []
    for node, chain in zip(outputs, chains):
        if not chain or is_symbol(node.meta["val"]):
            made.append(("constant", node, []))
            continue
        root = chain[-1]
        if root.target is graphs.stop_reverse and (graphs.is_alias(root.args[0]) or graphs.is_piece(root.args[0])):
            raise Unsupported("it returns a view that is made under torch.no_grad()")
        views = [n for n in reversed(chain[:-1]) if not graphs.writes(n)]
        if root in places:
            made.append(("input", places[root], views))
            continue
        if roots.count(root) == 1:
            root, views = node, []
        if root not in inner:
            inner.append(root)
        made.append(("output", inner.index(root), views))
    return made, inner


def _chain(node: Any, aliases: Sequence[Any] = (graphs.stop,)) -> list[Any]:
    """The node, its base, the base of that, and so on; results of ``aliases`` count as views."""
    chain = [node]
    while chain[-1].op != "placeholder":
        if (written := graphs.returned_argument(chain[-1])) is not None:
            chain.append(written)
        elif chain[-1].target in aliases or graphs.is_alias(chain[-1]) or graphs.is_piece(chain[-1]):
            chain.append(chain[-1].args[0])
        else:
            break
    return chain


# -- inputs that are written to, and random numbers --------------------------------------------------------------------


def _writes(graph: fx.GraphModule, count: int) -> list[int]:
    """Turn the new values of written inputs into outputs. Returns these inputs, by number."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    values = {}
    for node in graph.graph.find_nodes(op="call_function", target=aten.copy_.default):
        place = placeholders.index(node.args[0])
        values[place] = node.args[1]
        node.replace_all_uses_with(node.args[1])
        graph.graph.erase_node(node)
    graphs.set_outputs(graph, [*graphs.outputs_of(graph)[:count], *values.values()])
    return list(values)


def _noise(graph: fx.GraphModule) -> list[_Draw]:
    """Turn random numbers into inputs. Returns the functions that draw them, in the program's order."""
    draws: list[_Draw] = []
    last = graph.graph.find_nodes(op="placeholder")[-1]
    for node in list(graph.graph.nodes):
        op = node.target
        if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
            continue
        if _drops_nothing(node):
            continue
        if op is aten.native_dropout.default and node.args[2] is not False:
            node = _dropout(graph.graph, node)
            op = node.target
        first = node.args[0] if node.args and _is_tensor(node.args[0]) else None
        if first is not None and op.overloadpacket not in _OF_SHAPE and op is not aten.bernoulli.p:
            raise Unsupported(f"{op} draws random numbers from a distribution that is computed")
        if any(_is_tensor(a) for a in (*node.args[1:], *node.kwargs.values())):
            raise Unsupported(f"{op} draws random numbers from a distribution that is computed")
        draws.append(_draw(op, None if first is None else first.meta["val"], node.args, node.kwargs))
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"noise_{len(draws)}")
        last.meta = dict(node.meta)
        node.replace_all_uses_with(last)
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return draws


def _drops_nothing(node: Any) -> bool:
    """Whether an operator draws numbers only for dropout, and is called with p = 0, as attention often is."""
    given = node.normalized_arguments(node.graph.owning_module, normalize_to_only_use_kwargs=True)
    return given is not None and given.kwargs.get("dropout_p") == 0


def _is_tensor(x: Any) -> bool:
    return isinstance(x, fx.Node) and not is_symbol(x.meta["val"])


def _draw(op: Any, like: Tensor | None, args: Any, kwargs: Any) -> _Draw:
    def draw(close: _Close) -> Any:
        given, named = close((args, kwargs))
        if like is None:
            return op(*given, **named)
        layout = close((tuple(like.shape), like.stride()))
        x = torch.empty_strided(*layout, dtype=like.dtype, device=like.device)
        if op is aten.bernoulli.p:  # the program calls it in place: the strides are its own
            return x.bernoulli_(*given[1:], **named)
        return op(x, *given[1:], **named)

    return draw


def _dropout(graph: Any, node: Any) -> fx.Node:
    """Replace native_dropout(x, p, train) by operators that have derivatives; one of them draws the mask."""
    x, p = node.args[:2]
    value = x.meta["val"]
    with graph.inserting_before(node):
        drawn = graph.call_function(aten.bernoulli.p, (x, 1 - p))
        drawn.meta["val"] = value
        mask = graph.call_function(aten._to_copy.default, (drawn,), {"dtype": torch.bool})
        kept = graph.call_function(aten.mul.Tensor, (x, drawn))
        result = graph.call_function(aten.mul.Tensor, (kept, 0.0 if p == 1 else 1 / (1 - p)))
        kept.meta["val"] = result.meta["val"] = value
        mask.meta["val"] = node.meta["val"][1]
    for user in list(node.users):
        user.replace_all_uses_with(mask if user.args[1] else result)
        graph.erase_node(user)
    graph.erase_node(node)
    return drawn
