"""Makes the autograd functions of a `Derivative`, and the Python classes of their graph nodes.

Each function acts on one functorch level. A call is plain without transforms, dual levels and tensor subclasses.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..internals import (
    SavedTensor,
    SingleLevelFunction as _SingleLevelFunction,
    address,
    base_class,
    below_autograd,
    constants_replicated,
    followed as _followed,
    forward_ad_enabled,
    is_autocast_enabled,
    memory_of,
    node_names,
    only_autograd,
    primal,
    register_class,
    rename,
    set_autocast_off,
    skipped_by_dynamo,
    tangents_possible,
    value_of,
)
from ..libraries import calls_library
from ..schema import Signature, flatten, is_differentiable, tensors_in, unflatten
from .derivative import Derivative

__all__ = [
    "FACTS",
    "Call",
    "Functions",
    "SingleLevelFunction",
    "followed",
    "function_class",
    "function_name",
    "functions",
    "general_function",
    "level_function",
    "node_name",
    "node_type",
    "picker",
    "plain_function",
    "pull_back",
    "push_forward",
    "save",
    "saved",
    "show_saved",
    "spread",
]


class SingleLevelFunction(_SingleLevelFunction):
    """``torch.autograd.Function`` for use inside an `impl_autograd`, where it acts on one functorch level.

    Subclass it like ``torch.autograd.Function``, with or without ``setup_context``. Its ``forward`` calls
    ``op.below_autograd(...)``. Its ``jvp`` reads the primals from ``ctx.saved_tensors``, and can be differentiated
    again.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "jvp" in cls.__dict__:
            rule = cls.jvp

            @functools.wraps(rule)
            def jvp(ctx: Any, *tangents: Any) -> Any:
                context = _Primals(ctx)
                with forward_ad_enabled(True):
                    return rule(context, *tangents)

            cls.jvp = staticmethod(jvp)  # type: ignore[method-assign]


class _Primals:
    """The context of a jvp. Its saved tensors carry no tangents of this level."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self._saved = ctx.saved_tensors

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(t if t is None else primal(t) for t in self._saved)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class Call:
    """Facts about one call. The autograd function receives this object and the flat values.

    Attributes:
        keyset: of the call, for the redispatch.
        lengths: for each argument the length of its list, or None if it is not a list; None if the operator takes no
            lists.
        dual: whether an input has a tangent.
        plain: whether the call is plain.
        grad_mode: whether grad mode is on, for the outer levels.
        out_lengths: the lengths of the outputs, set by the forward.
    """

    __slots__ = ("dual", "grad_mode", "keyset", "lengths", "out_lengths", "plain")

    def __init__(self, keyset: Any, lengths: Sequence[int | None] | None, dual: bool, plain: bool) -> None:
        self.keyset, self.lengths, self.dual, self.plain = keyset, lengths, dual, plain
        self.grad_mode = torch.is_grad_enabled()
        self.out_lengths: Sequence[int | None] | None = None


def general_function(derivative: Derivative) -> Any:
    """The autograd function of one derivative. It takes and returns flat sequences, without lists."""
    signature = derivative.signature
    one_output = len(signature.returns) == 1 and not signature.output_lists
    all_differentiable = all(derivative.differentiable)

    def forward(ctx: Any, call: Call, *flat: Any) -> Any:
        values = flat if call.lengths is None else unflatten(flat, call.lengths)
        if call.plain:
            result = derivative.run_below(values)
            outputs = (result,) if one_output else signature.outputs(result)
            tensors, ctx.static = derivative.residuals(values, outputs)
        else:
            # An autograd function switches grad mode and forward AD off. Both are needed: an outer functorch level must
            # track this computation, or a second derivative loses the term through a saved output; not if the caller
            # has switched grad mode off. A level's wrapper hides a lazy conjugation, such as of cuSOLVER's Vh, from
            # views and from the tangent.
            with torch.set_grad_enabled(call.grad_mode), forward_ad_enabled(True), below_autograd():
                result = derivative.redispatch(call.keyset, values)
                outputs = (result,) if one_output else signature.outputs(result)
                outputs = tuple(o.resolve_conj() if isinstance(o, Tensor) and o.is_conj() else o for o in outputs)
                tensors, ctx.static = derivative.residuals(values, outputs)
        ctx.set_materialize_grads(False)
        if derivative.selective:
            needs = ctx.needs_input_grad[1:]
            tensors = derivative.kept(tensors, tuple(needs[i] for i in signature.tensor_like))
        save(ctx, tensors)
        ctx.lengths = call.lengths
        flat_outputs: Sequence[Any] = outputs
        if signature.output_lists:
            flat_outputs, call.out_lengths = flatten(outputs, signature.output_lists)
        ctx.out_lengths = call.out_lengths
        if call.dual:  # save_for_forward keeps every input alive until the backward
            ctx.save_for_forward(*[v for v in (*flat, *flat_outputs) if isinstance(v, Tensor)])
            ctx.n_inputs = len(flat)
            ctx.constants = [None if isinstance(v, Tensor) else (v,) for v in (*flat, *flat_outputs)]
        if not all_differentiable:
            ctx.mark_non_differentiable(*tensors_in(o for o, yes in zip(outputs, derivative.differentiable) if not yes))
        return outputs[0] if one_output else tuple(flat_outputs)

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[1:]
        if all(g is None for g in grads):  # undefined means zero
            return (None, *[None for _ in needed])
        if ctx.out_lengths is not None:
            grads = tuple(unflatten(grads, ctx.out_lengths))
        if ctx.lengths is not None:
            needed = unflatten(needed, ctx.lengths)
        found = pull_back(derivative, ctx, needed, grads)
        if ctx.lengths is not None:
            found = spread(found, ctx.lengths)
        return (None, *found)

    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        saved = iter(ctx.saved_tensors)
        with forward_ad_enabled(True):
            known = [primal(next(saved)) if c is None else c[0] for c in ctx.constants]
        inputs, outputs = known[: ctx.n_inputs], known[ctx.n_inputs :]
        found = push_forward(derivative, inputs, outputs, tangents, ctx.lengths, ctx.out_lengths)
        return found[0] if one_output else tuple(found)

    return function_class(derivative, forward, backward, jvp)


def plain_function(
    derivative: Derivative, write: Callable[[Sequence[Any], Sequence[Any]], Any] | None = None, others: int = 0
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward and the backward for plain calls of an operator without lists. Most calls are plain, so this does little.

    The caller guarantees that the call is plain and that a tensor requires grad. The forward takes ``(values,
    *tensors)``: the result of `Signature.bind`, then the tensors in it.

    Args:
        derivative: of the operator.
        write: ``(values, tensors) -> result`` writes the result to one of the tensors.
        others: the number of extra tensors after those in the values. Their gradient is None.
    """
    residuals, places = derivative.residuals, derivative.signature.tensor_like
    nothing, selective = [None] * len(derivative.signature.names), derivative.selective
    one_output, one_vjp = len(derivative.signature.returns) == 1, derivative.one_vjp
    fixed = [i for i, yes in enumerate(derivative.differentiable) if not yes]
    no_gradient = (None,) * (1 + len(places) + others)

    def forward(ctx: Any, values: Any, *tensors: Any) -> Any:
        if write is None:
            result = derivative.run_below(values)
        else:
            result = write(values, tensors)
            ctx.mark_dirty(result)
        outputs = (result,) if one_output else tuple(result)
        if fixed:
            ctx.mark_non_differentiable(*[outputs[i] for i in fixed if outputs[i] is not None])
        kept, ctx.static = residuals(values, outputs)
        save(ctx, derivative.kept(kept, ctx.needs_input_grad[1:]) if selective else kept)
        ctx.set_materialize_grads(False)
        return result if one_output else outputs

    def backward(ctx: Any, *grads: Any) -> Any:
        for grad in grads:
            if grad is not None:
                break
        else:
            return no_gradient
        needed: list[Any] = nothing.copy()
        for i, wanted in zip(places, ctx.needs_input_grad[1:]):
            needed[i] = wanted
        compiling = torch.compiler.is_dynamo_compiling()
        if compiling or not derivative.pure or torch.is_grad_enabled() or is_autocast_enabled() or not only_autograd():
            found = pull_back(derivative, ctx, needed, grads)
        else:
            kept = saved(ctx)  # Read them first: this may run the user's hooks, which must not run inside the guard.
            with below_autograd():
                if one_vjp is not None:
                    return None, one_vjp((*kept, *ctx.static, *grads, (True,))), *no_gradient[:others]
                found = derivative.vjp(needed, kept, ctx.static, grads)
        return (None, *[found[i] for i in places], *no_gradient[:others])

    return forward, backward


def followed(ctx: Any) -> Sequence[bool]:
    """For each input of the node whose backward runs, whether the engine needs its gradient."""
    count = len(ctx.needs_input_grad) - 1
    if calls_library is None or torch.compiler.is_dynamo_compiling():
        return _followed(ctx)
    answers = (ctypes.c_bool * count)()
    return list(answers) if calls_library.manualgrad_calls_followed(answers, count) == count else _followed(ctx)


class Functions:
    """The autograd functions of one derivative. Each is made at its first use: making a class is slow, and most are never used."""

    def __init__(self, derivative: Derivative) -> None:
        self._derivative = derivative

    @functools.cached_property
    def general(self) -> Any:
        """The function for any call."""
        return general_function(self._derivative).apply

    @functools.cached_property
    def plain(self) -> Any:
        """The function for plain calls. None if the operator has lists, or an output that is not a tensor."""
        bodies = self._plain_bodies
        return None if bodies is None else function_class(self._derivative, *bodies).apply

    @property
    def plain_backward(self) -> Any:
        """The backward of `plain`."""
        return None if self._plain_bodies is None else self._plain_bodies[1]

    @functools.cached_property
    def _plain_bodies(self) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
        signature = self._derivative.signature
        if signature.lists or not all(r.is_tensor for r in signature.returns):
            return None
        return self._derivative.plain_bodies() or plain_function(self._derivative)


def functions(derivative: Derivative) -> Functions:
    """The autograd functions of a derivative."""
    found: Functions | None = derivative.functions
    if found is None:
        found = derivative.functions = Functions(derivative)
    return found


def picker(places: Sequence[int]) -> Callable[[Any], Any]:
    """A function that picks the items at ``places`` of a tuple, as a tuple. It runs in C, without a Python frame."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def level_function(name: str, **methods: Callable[..., Any]) -> Any:
    """An autograd function that acts on one functorch level.

    Args:
        name: of the function. Its graph nodes have this name followed by "Backward".
        methods: ``forward``, ``backward`` and, if there is one, ``jvp``.
    """
    return type(name, (_SingleLevelFunction,), {kind: staticmethod(method) for kind, method in methods.items()})


def function_class(derivative: Derivative, *methods: Callable[..., Any]) -> Any:
    """An autograd function whose graph node is named after the operator, like PyTorch's."""
    members = {m.__name__: skipped_by_dynamo(m) for m in methods}
    made = level_function(function_name(derivative.signature), **members)
    made.call_backward_at_once()
    show_saved(made, derivative)
    return made


def save(ctx: Any, tensors: Sequence[Tensor | None]) -> None:
    """Save tensors for the backward. A node that saves none can run a second time, like PyTorch's."""
    for x in tensors:
        if x is not None:
            ctx.save_for_backward(*tensors)
            return
    ctx.nothing_saved = tuple(tensors)


def saved(ctx: Any) -> tuple[Tensor | None, ...]:
    """The tensors that `save` saved."""
    nothing = getattr(ctx, "nothing_saved", None)
    return ctx.saved_tensors if nothing is None else nothing


def pull_back(derivative: Derivative, ctx: Any, needed: Sequence[Any], grads: Sequence[Any]) -> Sequence[Any]:
    """Runs the vjp with autocast off. If nothing will differentiate the result, it runs below autograd."""
    tensors: Sequence[Any] = saved(
        ctx
    )  # Read them first: this may run the user's hooks, which must not run inside the guard.
    if torch.compiler.is_dynamo_compiling():  # compiled autograd traces the graph, but not guards
        return derivative.vjp(needed, tensors, ctx.static, grads)
    if is_autocast_enabled():
        with set_autocast_off():
            if derivative.is_narrowed(tensors, grads):
                tensors, grads = _of_one_precision(tensors, grads)
            return derivative.vjp(needed, tensors, ctx.static, grads)
    if not derivative.pure or torch.is_grad_enabled() or tangents_possible((*tensors, *grads)):
        tensors = _without_negations(tensors)
        with constants_replicated((*tensors, *grads)):
            return derivative.vjp(needed, tensors, ctx.static, grads)
    with below_autograd():
        return derivative.vjp(needed, tensors, ctx.static, grads)


def _without_negations(values: Sequence[Any]) -> Sequence[Any]:
    """The values, with lazy negations carried out: PyTorch cannot take a view of one that has a tangent."""
    return [x.resolve_neg() if isinstance(x, Tensor) and x.is_neg() else x for x in values]


def push_forward(
    derivative: Derivative,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    tangents: Sequence[Any],
    lengths: Sequence[int | None] | None,
    out_lengths: Sequence[int | None] | None,
) -> list[Any]:
    """Runs the jvp with autocast off.

    Args:
        derivative: of the operator.
        inputs, outputs: the primals, flat.
        tangents: of the inputs, flat; None for zero.
        lengths, out_lengths: as in `Call`.

    Returns:
        A tensor for each differentiable output, which autograd.Function requires, and None for any other; flat.
    """
    flat_outputs, smooth = outputs, derivative.differentiable
    of_inputs, of_tangents = _memories(inputs), _memories(tangents)
    # Forward AD is on, because an outer level may differentiate the formula again.
    with forward_ad_enabled(True), set_autocast_off() if is_autocast_enabled() else nullcontext():
        inputs = _without_negations(inputs)
        if lengths is not None:
            inputs, tangents = unflatten(inputs, lengths), tuple(unflatten(tangents, lengths))
        if out_lengths is not None:
            outputs = unflatten(outputs, out_lengths)
        with constants_replicated((*inputs, *outputs)):
            found = derivative.jvp(inputs, outputs, tangents)
    if out_lengths is not None:
        found = spread(found, out_lengths)
        smooth = tuple(yes for yes, n in zip(smooth, out_lengths) for _ in range(1 if n is None else n))
    made: list[Any] = []
    for t, o, yes in zip(found, flat_outputs, smooth):
        if not yes or isinstance(o, Tensor) and not is_differentiable(o):
            made.append(None)
        elif t is None:
            made.append(_zero(o))
        else:  # a write to an output that is no view must change no tangent but its own
            if _memories([t]) & of_tangents and not _memories([o]) & of_inputs:
                with forward_ad_enabled(True):
                    t = t.clone()
            made.append(t)
            of_tangents |= _memories([t])
            of_inputs |= _memories([o])
    return made


def _memories(values: Sequence[Any]) -> set[int]:
    found = {memory_of(value_of(x)) for x in values if isinstance(x, Tensor)}
    return {memory for memory in found if memory is not None}


def _of_one_precision(tensors: Sequence[Any], grads: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The tensors in the widest precision among them."""
    floating = [t for t in tensors_in((*tensors, *grads)) if is_differentiable(t)]
    real = {t.dtype.to_real() for t in floating}
    if len(real) < 2:
        return tensors, grads
    widest = functools.reduce(torch.promote_types, real)

    def wide(t: Any) -> Any:
        if isinstance(t, list):
            return [wide(x) for x in t]
        if not isinstance(t, Tensor) or not is_differentiable(t):
            return t
        return t.to(widest.to_complex() if t.is_complex() else widest)

    return [wide(t) for t in tensors], [wide(g) for g in grads]


def spread(values: Sequence[Any], lengths: Sequence[int | None]) -> list[Any]:
    """`flatten` for gradients and tangents, where None may stand for a whole list."""
    flat: list[Any] = []
    for value, length in zip(values, lengths):
        if length is None:
            flat.append(value)
        else:
            flat += [None] * length if value is None else value
    return flat


def _zero(output: Any) -> Tensor | None:
    if not isinstance(output, Tensor) or not is_differentiable(output):
        return None
    made = torch.zeros_like(output)
    if made.stride() == output.stride() or not made.numel():
        return made
    # autograd copies a tangent into the layout of its primal, and cannot if elements of that share memory
    end = 1 + sum((n - 1) * stride for n, stride in zip(output.shape, output.stride()))
    return output.new_zeros(end).as_strided(output.shape, output.stride())


# -- names and attributes of nodes ------------------------------------------------------------------------------------
#
# Programs that inspect a graph read these: the name of a node, a saved tensor (``_saved_self``, ``_raw_saved_self``), hooks
# on one saved tensor. A node has attributes for the values that its rule saves, which may be fewer or more than PyTorch's.

# A fact is a property that is saved instead of a tensor, such as its sizes. The names are those of PyTorch's nodes.
FACTS = {"sizes": "sym_sizes", "strides": "sym_strides", "storage_offset": "sym_storage_offset", "dtype": "scalar_type"}


def function_name(signature: Signature) -> str:
    """The autograd function's name; the node's name has "Backward" appended."""
    words = signature.name.split("::")[-1].removesuffix("_forward").split("_")
    return "".join(word.title() for word in words)


def node_name(signature: Signature) -> str:
    """The name of the operator's graph node: PyTorch's, if PyTorch has a node for the operator."""
    namespace, _, name = signature.full_name.partition("::")
    known = node_names() if namespace == "aten" else {}
    return known.get(name) or f"{function_name(signature)}Backward"


# -- nodes of an autograd function in Python --------------------------------------------------------------------------


def show_saved(function: Any, derivative: Derivative) -> None:
    """Name the nodes of an autograd function, and give them attributes for the saved values."""
    made = rename(function, node_name(derivative.signature))
    tensors, lists, constants = derivative.saved_names
    for i, name in enumerate(tensors):
        setattr(made, f"_saved_{name}", property(_from_context(i, lists, "saved_tensors")))
        setattr(made, f"_raw_saved_{name}", property(_from_context(i, lists, "_raw_saved_tensors")))
    for i, name in enumerate(constants):
        setattr(made, f"_saved_{name}", property(_constant_of_context(i, bool(lists))))


def _from_context(place: int, lists: list[int], attribute: str) -> Callable[[Any], Any]:
    def read(node: Any) -> Any:
        found = getattr(node, attribute)
        if lists:
            found = unflatten(found, node.static[0])
        return tuple(found[place]) if place in lists else found[place]

    return read


def _constant_of_context(place: int, lists: bool) -> Callable[[Any], Any]:
    return lambda node: (node.static[1] if lists else node.static)[place]


# -- nodes made in C++, csrc/calls ------------------------------------------------------------------------------------

_types: dict[Any, int] = {}  # by the name and the attributes


def node_type(derivative: Derivative) -> int:
    """The number of the C++ node type for plain calls, one for each name and set of attributes; 0 if no type is free."""
    tensors, lists, constants = derivative.saved_names
    key = (node_name(derivative.signature), tensors, constants, tuple(lists))
    if key not in _types:
        number = len(_types) + 1
        if number >= calls_library.manualgrad_calls_node_types():
            return 0
        register_class(calls_library.manualgrad_calls_node_type(number), _node_class(*key))
        _types[key] = number
    return _types[key]


def _node_class(name: str, tensors: tuple[str, ...], constants: tuple[str, ...], lists: tuple[int, ...]) -> type:
    members: dict[str, Any] = {"__slots__": (), "__module__": "builtins", "__new__": _no_instance}
    for i, saved in enumerate(tensors):
        for prefix, read in (("_saved_", _saved), ("_raw_saved_", _raw_saved)):
            found = _of_list(read, i, i in lists, len(constants) + 1) if lists else read(i)
            members[prefix + saved] = property(found)
    for i, constant in enumerate(constants):
        members[f"_saved_{constant}"] = property(_constant(i))
    return type(name, (base_class(),), members)


def _no_instance(cls: type, *args: Any, **kwargs: Any) -> Any:
    raise TypeError(f"cannot create '{cls.__name__}' instances")


def _saved(place: int) -> Callable[[Any], Any]:
    def read(node: Any) -> Any:
        return torch.ops.manualgrad_calls.saved(address(node), place)

    return read


def _of_list(
    read: Callable[[int], Callable[[Any], Any]], place: int, is_list: bool, lengths: int
) -> Callable[[Any], Any]:
    """Reads one saved argument of an operator with lists, whose elements are saved one by one.

    Args:
        read: makes the function that reads one saved tensor.
        place: of the argument among the saved ones.
        is_list: whether the argument is a list.
        lengths: the place of the constant with the length of each saved argument, -1 for a tensor.
    """

    def read_all(node: Any) -> Any:
        counts = [1 if n < 0 else n for n in _constant(lengths)(node)]
        start = sum(counts[:place])
        found = tuple(read(i)(node) for i in range(start, start + counts[place]))
        return found if is_list else found[0]

    return read_all


def _constant(place: int) -> Callable[[Any], Any]:
    def read(node: Any) -> Any:
        found = torch.ops.manualgrad_calls.constant(address(node), place)
        return tuple(found) if isinstance(found, list) else found

    return read


def _raw_saved(place: int) -> Callable[[Any], Any]:
    def read(node: Any) -> Any:
        made = _SavedTensor.__new__(_SavedTensor)
        made.node, made.place = node, place
        return made

    return read


class _SavedTensor(SavedTensor):  # type: ignore[misc]
    """One saved tensor of a C++ node. It overrides PyTorch's methods, which read a C++ object that it does not have."""

    node: Any
    place: int

    def register_hooks(self, pack_hook: Callable[[Any], Any], unpack_hook: Callable[[Any], Any]) -> None:
        number = next(_hook_numbers)
        _hooks[number] = (pack_hook, unpack_hook)
        torch.ops.manualgrad_calls.register_hooks(address(self.node), self.place, number)

    def unpack(self) -> Any:
        return torch.ops.manualgrad_calls.saved(address(self.node), self.place)

    @property
    def data(self) -> Any:
        """The saved tensor, or the result of the unpack hook."""
        return self.unpack()

    @property
    def unpack_hook(self) -> None:
        """None: `data` is unpacked."""
        return None


# -- hooks, called from C++ -------------------------------------------------------------------------------------------

_hook_numbers = itertools.count(1)
_hooks: dict[int, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {}
_packed: dict[int, Any] = {}


def _pack(number: int, tensor: Any) -> bool:
    _packed[number] = _hooks[number][0](tensor)
    return True


def _unpack(number: int) -> Any:
    found = _hooks[number][1](_packed[number])
    if not isinstance(found, torch.Tensor):
        raise TypeError(
            f"Output of saved tensor unpack_hook expected to be a Tensor but got result of type {type(found).__name__}"
        )
    return found


def _drop(number: int) -> bool:
    _packed.pop(number, None)
    return _hooks.pop(number, None) is not None


if calls_library is not None:
    _operators = torch.library.Library("manualgrad_calls", "FRAGMENT")
    _operators.define("pack(int number, Tensor tensor) -> bool")
    _operators.impl("pack", skipped_by_dynamo(_pack), "CPU")
    _operators.define("unpack(int number) -> Tensor")
    _operators.impl("unpack", skipped_by_dynamo(_unpack), "CPU")
    _operators.define("drop_hooks(int number) -> bool")
    _operators.impl("drop_hooks", skipped_by_dynamo(_drop), "CPU")
