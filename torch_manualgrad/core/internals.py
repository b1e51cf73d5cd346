"""Every private PyTorch name that the package uses, and nothing else.

Each name has a line saying what it is relied on for; ``tests/core/test_internals.py`` proves that each still behaves so.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._C._functorch import get_inplace_requires_grad_allowed, set_inplace_requires_grad_allowed
from torch._functorch.autograd_function import custom_function_call_vmap_helper
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.utils import enable_single_level_autograd_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import _SingleLevelFunction
from torch.utils import _pytree as pytree

__all__ = [
    "PLAIN",
    "FakeTensorMode",
    "JaggedStructure",
    "SingleLevelFunction",
    "below_autograd",
    "below_autograd_keys",
    "bits_unread",
    "current_node",
    "dual_jagged",
    "enable_single_level_autograd_function",
    "entry",
    "forget_dispatch",
    "forward_ad_enabled",
    "fresh_variable",
    "guard_compiled_graphs",
    "has_tangent",
    "in_functorch",
    "is_autocast_enabled",
    "is_composite",
    "is_nested_int",
    "is_plain_jagged",
    "jagged_dim",
    "jagged_nested",
    "jagged_of_duals",
    "jagged_result",
    "jagged_structure",
    "known_lengths",
    "longest_known",
    "nested_strides",
    "only_autograd",
    "operators",
    "parse_schema",
    "primal",
    "python_function",
    "pytree",
    "reading_bits",
    "release",
    "replace_jagged_attention",
    "saved_tensors_are_hooked",
    "set_autocast_off",
    "shares_memory",
    "strided_nested",
    "tangents_possible",
    "traced_nested_int",
    "unwrap_if_dead",
    "values_hidden",
    "vmap_call",
]


class SingleLevelFunction(_SingleLevelFunction):
    """An autograd.Function that acts on one functorch level only, as a kernel at the Autograd key must."""

    # compiled autograd asks every node's class for it, and finds it on torch.autograd.Function alone
    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)


# Keys below autograd, for a redispatch; and the guard under which nested aten calls skip autograd too, and the record of
# what is a view of what: what a kernel returns as a view of its own temporary is a tensor of its own outside.
below_autograd_keys = torch._C._after_autograd_keyset
below_autograd: Any = torch._C._AutoDispatchBelowADInplaceOrView

# True while any torch.func transform is running on this thread.
in_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active

# Switches the recording of tangents on (autograd.Function switches it off around forward and jvp).
forward_ad_enabled = forward_ad._set_fwd_grad_enabled

# True if autocast is on for any device type.
is_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

parse_schema = torch._C.parse_schema


def saved_tensors_are_hooked() -> bool:
    """Whether hooks on saved tensors are active on this thread, under which torch.func refuses to run."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def bits_unread() -> bool:
    """Whether PyTorch passes over conj and neg bits on this thread, as it does inside ``__torch_dispatch__``."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Conjugate)


def reading_bits() -> Any:
    """A guard under which conj and neg bits count again: for code that may write ``A.mH``, and runs where they do not."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def is_composite(op: Any) -> bool:
    """Whether an operator is made of others as autograd sees it: a registration at Autograd would have no effect."""
    name = op.name()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, "CompositeImplicitAutograd") and not has(name, "CPU")


# What a saved tensor is once the torch.func transform that made it has ended: torch.func refuses dead wrappers.
unwrap_if_dead: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead


# Whether a tensor of the last argument, a tuple, shares its storage with another of it or with one of the arguments.
shares_memory: Callable[[Sequence[Any], dict[str, Any], tuple[Tensor, ...]], bool] = (
    torch._C._any_output_is_alias_to_input_or_output
)


def primal(x: Tensor) -> Tensor:
    """``x`` without its tangent at this level, connected to the levels outside.

    Not ``forward_ad.unpack_dual``: its Python level counter is unset while a compiled graph runs.
    """
    return torch._VF._unpack_dual(x, level=0)[0]


def has_tangent(x: Tensor) -> bool:
    """Whether ``x`` is a dual tensor at this level; read from the tensor, for the same reason as in `primal`."""
    global _tangents_in_graphs
    if x.is_nested or x.layout is not torch.strided:  # such a tensor cannot carry a tangent, and unpacking one raises
        return False
    found = torch._VF._unpack_dual(x, level=0)[1] is not None
    if found and type(x) not in PLAIN:
        _tangents_in_graphs = True
    return found


# Set once a graph with dual tensors has been traced: such a graph enters its level without Python's counter.
_tangents_in_graphs = False
PLAIN = (Tensor, torch.nn.Parameter)  # types that carry no tracer or wrapper of a subclass


def only_autograd() -> bool:
    """Whether no transform and no dual level is near this call: plain tensors then need nothing but autograd."""
    return forward_ad._current_level < 0 and not _tangents_in_graphs and not in_functorch()


def entry(op: Any) -> Callable[..., Any]:
    """What an ``OpOverload`` calls when it is called: one Python frame less for a small operator."""
    return getattr(op, "_op", op)


def python_function(op: Any) -> Callable[..., Any] | None:
    """The function behind ``torch.<name>`` for an operator with one overload: it parses arguments faster than ``op``.

    None if there is none. It dispatches from the top, so it is for use inside `below_autograd`.
    """
    namespace, _, name = op._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    functional = [o for o in packet.overloads() if not getattr(packet, o)._schema.is_mutable]
    if namespace != "aten" or functional != ["default"]:
        return None
    for place in ("_VariableFunctions", "_linalg", "_nn", "_special", "_fft"):
        module = getattr(torch._C, place)
        if (found := getattr(module, name, None)) is not None:
            return found
    return None


def tangents_possible(tensors: Sequence[Tensor | None]) -> bool:
    """False only if no tensor of these can be dual: cheap, where `has_tangent` makes a view."""
    if not only_autograd():
        return True
    for x in tensors:
        if x is not None and type(x) not in PLAIN:
            return True
    return False


_active_mode, _tracer_mode = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY
_key_included, _vmap_of_gradients = (
    torch._C._dispatch_tls_is_dispatch_key_included,
    torch._C._dispatch_key_parse("VmapMode"),
)


# The node of autograd's graph whose backward this thread runs; None outside of one.
current_node: Callable[[], Any] = torch._C._current_autograd_node


def values_hidden() -> bool:
    """Whether a plain tensor on this thread may have no value to read: under a tracer of real tensors, which would put
    the value into its graph, and under the vmap of batched gradients (``is_grads_batched``), where it has several."""
    return _active_mode(_tracer_mode) is not None or _key_included(_vmap_of_gradients)


@contextmanager
def set_autocast_off() -> Iterator[None]:
    """Autocast off for every device type that has it on: a derivative is computed in the dtypes of its residuals."""
    devices = [d for d in ("cpu", torch.accelerator.current_accelerator(check_available=True)) if d is not None]
    types = {torch.device(d).type for d in devices}
    active = [d for d in types if torch.is_autocast_enabled(d)]
    for device in active:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in active:
            torch.set_autocast_enabled(device, True)


def fresh_variable(x: Tensor) -> Tensor:
    """A tensor of ones shaped like ``x`` that requires grad at this level, also in the middle of a functorch call."""
    v = torch.ones_like(x)
    allowed = get_inplace_requires_grad_allowed()
    set_inplace_requires_grad_allowed(True)
    try:
        return v.requires_grad_()
    finally:
        set_inplace_requires_grad_allowed(allowed)


def vmap_call(rule: Callable[..., tuple[Any, Any]], op: Callable[..., Any], values: Sequence[Any]) -> Any:
    """Run a vmap rule ``(info, in_dims, *values) -> (output, out_dims)`` at the current vmap level.

    ``op`` is called instead where no value is batched at this level. Only inside a kernel at FuncTorchBatched.
    """
    interpreter: Any = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(interpreter, rule, op, *values)


def jagged_dim(nested: Any) -> int:
    """The ragged dim of a jagged nested tensor."""
    return int(nested._ragged_idx)


class JaggedStructure(NamedTuple):
    """What a jagged nested tensor is besides its buffer.

    PyTorch's size of the ragged dim, a nested int, is that of the tensor ``lengths``, or else ``offsets``: of the object,
    not of its contents. ``known`` is the tensor's own dict, as PyTorch hands it on: what is learnt later is learnt once.
    """

    offsets: Tensor
    lengths: Tensor | None  # given if there are places in the buffer that belong to no component
    dim: int  # the ragged one
    known: dict[str, Tensor]  # the shortest and the longest length, as sizes of empty tensors, once they are known


def jagged_structure(nested: Any) -> JaggedStructure:
    """The structure of a jagged nested tensor."""
    return JaggedStructure(nested._offsets, nested._lengths, int(nested._ragged_idx), nested._metadata_cache)


def is_plain_jagged(x: Any) -> bool:
    """Whether ``x`` is of PyTorch's own class of jagged nested tensors: without a tangent, and no tracer's."""
    return type(x) is _classes()[0]


def known_lengths(min_seqlen: Tensor | None, max_seqlen: Tensor | None) -> dict[str, Tensor]:
    """`JaggedStructure.known`, from PyTorch's two arguments."""
    found = {"min_seqlen": min_seqlen, "max_seqlen": max_seqlen}
    return {name: n for name, n in found.items() if n is not None}


def longest_known(structure: JaggedStructure) -> Any:
    """The longest length, a number or, in a graph, a symbol; None if it is not known."""
    found = structure.known.get("max_seqlen")
    return None if found is None else found.shape[0]


def is_nested_int(x: Any) -> bool:
    """Whether ``x`` is the size of a ragged dim, which is no number."""
    return isinstance(x, torch.SymInt) and x.node.is_nested_int()


def traced_nested_int(offsets: Tensor) -> Any:
    """In a graph, PyTorch's size of the ragged dim that ``offsets`` cut; None where it has none yet."""
    from torch._subclasses.functional_tensor import mb_unwrap_functional_tensor

    return getattr(mb_unwrap_functional_tensor(offsets), "nested_int_memo", None)


def jagged_nested(values: Tensor, structure: JaggedStructure) -> Any:
    """The jagged nested tensor with this buffer, without a history; it shares its memory."""
    made: Any = _classes()[0](values.detach(), **_arguments(structure))
    made._metadata_cache = structure.known  # PyTorch's class takes another dict in the place of an empty one
    return made


def jagged_result(values: Tensor, structure: JaggedStructure) -> Any:
    """`jagged_nested` that shares the counter of changes in place too, for a buffer that autograd may have saved.

    A view where ``values`` are one, so that autograd refuses a change in place.
    """
    from torch.nested._internal.nested_tensor import _nt_view_dummy

    known = [structure.known.get(name) for name in ("min_seqlen", "max_seqlen")]
    made: Any = torch._nested_view_from_jagged(
        values.detach(), structure.offsets, _nt_view_dummy(), structure.lengths, structure.dim, *known
    )
    made = made if values._is_view() else made.detach()
    made._metadata_cache = structure.known
    return made


def dual_jagged(nested: Any) -> Tensor | None:
    """The buffer, with its tangent, of what `jagged_of_duals` made; None for another nested tensor."""
    return nested._values if hasattr(nested, "carries_tangents") else None


def jagged_of_duals(values: Tensor, structure: JaggedStructure) -> Any:
    """A jagged nested tensor whose buffer is a dual tensor, for functions that read it by `dual_jagged`.

    PyTorch's class computes on its buffer below autograd, where a tangent is lost without a word: what comes so far,
    as no such function stands in its way, raises RuntimeError.
    """
    return _classes()[1](values, **_arguments(structure))


def _arguments(structure: JaggedStructure) -> dict[str, Any]:
    offsets, lengths, dim, known = structure
    return {"offsets": offsets, "lengths": lengths, "_ragged_idx": dim, "_metadata_cache": known}


@functools.cache
def _classes() -> tuple[Any, Any]:
    """PyTorch's class of jagged nested tensors, and that of those that carry a tangent."""
    from torch.nested._internal.nested_tensor import NestedTensor

    jagged: Any = NestedTensor

    class DualJagged(jagged):  # type: ignore[misc]
        carries_tangents = True

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any("Tensor" in str(r.type) for r in func._schema.returns):
                raise RuntimeError(
                    f"{func}: the tangent of a jagged nested tensor goes through the operators of torch_manualgrad.nested "
                    "only, and this is none of them"
                )
            return super().__torch_dispatch__(func, types, args, kwargs)

    return jagged, DualJagged


def nested_strides(nested: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sizes (B, D), strides (B, D) and starts (B,) of a strided nested tensor's components in its ``values()``; on the CPU."""
    return nested._nested_tensor_size(), nested._nested_tensor_strides(), nested._nested_tensor_storage_offsets()


# A strided nested tensor as a view of a flat buffer, differentiable: (buffer, sizes, strides, starts), the last three int64 on the CPU.
strided_nested: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = torch._nested_view_from_buffer


def replace_jagged_attention(function: Callable[..., Any]) -> Callable[[], None]:
    """Let scaled_dot_product_attention on jagged tensors, which never comes to be an aten call, be ``function``.

    It is given PyTorch's own as its first argument. Returns what undoes this.
    """
    from torch.nested._internal import ops as module

    ops: Any = module
    own = ops.jagged_scaled_dot_product_attention
    ops.jagged_scaled_dot_product_attention = functools.partial(function, own)

    def undo() -> None:
        ops.jagged_scaled_dot_product_attention = own

    return undo


def forget_dispatch(op: Any) -> None:
    """Let graphs be traced with what is registered for ``op`` now: a tracer keeps which kernel it found at a key that
    is no alias."""
    op._dispatch_cache.clear()


def operators(namespace: str) -> Iterator[Any]:
    """Every ``OpOverload`` of a namespace that has a schema; ``dir(torch.ops.aten)`` lists those that were asked for."""
    for full in torch._C._dispatch_get_all_op_names():
        space, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, space), name, None) if space == namespace else None
        if (found := getattr(packet, overload or "default", None)) is not None:
            yield found


def release(library: torch.library.Library) -> None:
    """Undo the registrations of ``library`` now, without waiting for the garbage collector."""
    library._destroy()


_guarded = False


def guard_compiled_graphs(state: Callable[[], object]) -> bool:
    """Make every graph that Dynamo compiles from now on valid only while ``state()`` is what it was at compilation.

    Dynamo has no public hook for an ambient guard. Returns whether the guard is in place; False where Dynamo is not
    imported yet (there is no graph to guard) or is of a version in which the hook is elsewhere (the caller resets).
    """
    global _guarded
    if _guarded or "torch._dynamo.output_graph" not in sys.modules:
        return _guarded
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
        except TypeError:  # up to 2.11 it takes no stack
            root.add_lambda_guard(holds, text)

    ambient = OutputGraph.init_ambient_guards

    def init_ambient_guards(self: Any) -> None:
        ambient(self)
        self.guards.add(GlobalStateSource().make_guard(MANUALGRAD_RULES))

    OutputGraph.init_ambient_guards = init_ambient_guards  # type: ignore[method-assign]
    _guarded = True
    return True
