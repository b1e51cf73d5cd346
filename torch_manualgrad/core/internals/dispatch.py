"""The dispatcher: keys, kernels, operators, and the state of this thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._library import custom_ops, simple_registry  # the registered custom operators, and their fake kernels
from torch._library.autograd import make_autograd_impl  # their kernel at the key Autograd

__all__ = [
    "below_autograd",
    "below_autograd_keys",
    "below_in_place_keys",
    "bits_unread",
    "current_node",
    "custom_op_overload",
    "custom_ops_with_backward",
    "decomposes_by",
    "entry",
    "forget_dispatch",
    "in_function_mode",
    "is_autocast_enabled",
    "is_below_autograd",
    "is_composite",
    "is_recorded_by_jit",
    "is_view",
    "library_backward",
    "modes_are_active",
    "nothing_above_autograd",
    "operators",
    "own_kernel",
    "parse_schema",
    "python_function",
    "reading_bits",
    "register_fake",
    "release",
    "set_autocast_off",
    "shares_memory",
    "values_hidden",
    "version_of",
]


# Keys below autograd, for a redispatch; and the guard under which nested aten calls also skip autograd and the tracking
# of views: a kernel's result that is a view of its own temporary is an ordinary tensor outside.
below_autograd_keys = torch._C._after_autograd_keyset
below_in_place_keys = torch._C._after_ADInplaceOrView_keyset  # also below counting writes and tracking views
below_autograd: Any = torch._C._AutoDispatchBelowADInplaceOrView

# True if autocast is on for any device type.
is_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

parse_schema = torch._C.parse_schema


def bits_unread() -> bool:
    """Whether PyTorch ignores conj and neg bits on this thread, as inside ``__torch_dispatch__``."""
    return _key_excluded(_conjugate)


def reading_bits() -> Any:
    """A guard that makes PyTorch read conj and neg bits again, for code that may use ``A.mH``."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


# Whether torch.jit.trace records the calls of this thread. It is off inside of a recorded operator; for some operators,
# such as convolution, it records the operators that they call instead.
is_recorded_by_jit: Callable[[], bool] = torch._C._is_tracing


def is_view(x: torch.Tensor) -> bool:
    """Whether autograd treats it as a view, so that writes to it must reach its base."""
    return x._is_view()


def version_of(x: torch.Tensor) -> int:
    """The number of writes to the memory of `x` that autograd has seen, through `x` or a view."""
    return 0 if x.is_inference() else x._version


def is_composite(op: Any) -> bool:
    """Whether autograd sees only the operators that it calls: a registration at Autograd would have no effect."""
    name = op.name()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if not torch._C._dispatch_has_kernel(name):  # prim::device, which fake tensors call
        return False
    return has(name, "CompositeImplicitAutograd") and not has(name, "CPU")


# Whether a tensor in the last argument, a tuple, shares its storage with another one there or with an argument.
shares_memory: Callable[[Sequence[Any], dict[str, Any], tuple[Tensor, ...]], bool] = (
    torch._C._any_output_is_alias_to_input_or_output
)


def own_kernel(op: Any, key: str) -> Callable[..., Any]:
    """The kernel of an operator at a key, called as ``kernel(keyset, *args, **kwargs)``.

    The kernel of a ``torch.library.custom_op`` is in Python, and is rebuilt: under a dispatch mode the dispatcher would
    call the Python kernel registered last instead.
    """
    definition = custom_ops.OPDEFS.get(op._schema.name)
    if definition is not None and key.startswith("Autograd"):
        return make_autograd_impl(op, definition)
    return torch.library.get_kernel(op, key).call_boxed


def custom_ops_with_backward() -> Iterator[Any]:
    """The operators of ``torch.library.custom_op`` that have a backward; none has a jvp, and tangents end there."""
    for definition in custom_ops.OPDEFS.values():
        if definition._backward_fn is not None and (op := custom_op_overload(definition)) is not None:
            yield op


def library_backward(op: Any) -> tuple[Callable[..., Any] | None, Callable[..., Any]] | None:
    """The arguments of ``register_autograd`` for an operator of ``torch.library.custom_op``: (setup_context, backward)."""
    definition = custom_ops.OPDEFS.get(op._schema.name)
    if definition is None or definition._backward_fn is None:
        return None
    return definition._setup_context_fn, definition._backward_fn


def custom_op_overload(given: Any) -> Any | None:
    """The ``OpOverload`` of a packet of ``torch.ops`` or of a ``torch.library.custom_op``, or itself; else None."""
    if isinstance(given, custom_ops.CustomOpDef):
        return given._opoverload
    if isinstance(given, torch._ops.OpOverloadPacket):
        return getattr(given, "default", None)
    return given if isinstance(given, torch._ops.OpOverload) else None


def decomposes_by(op: Any, function: Callable[..., Any]) -> None:
    """Let tracers, which see the operator below autograd, trace the function instead."""
    op.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(function)


def entry(op: Any) -> Callable[..., Any]:
    """The function that an ``OpOverload`` calls: one Python frame fewer for a small operator."""
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


_key_included, _key_excluded = (
    torch._C._dispatch_tls_is_dispatch_key_included,
    torch._C._dispatch_tls_is_dispatch_key_excluded,
)
_conjugate = torch._C.DispatchKey.Conjugate
_vmap_of_gradients, _modes = torch._C._dispatch_key_parse("VmapMode"), torch._C._len_torch_dispatch_stack


def is_below_autograd() -> bool:
    """Whether this thread is inside of `below_autograd`, where calls go to the device's kernel."""
    return _key_excluded(torch._C.DispatchKey.ADInplaceOrView)


# Whether a mode of this thread receives every call of a torch function or method, even reads of attributes.
in_function_mode: Callable[[], bool] = torch._C._is_torch_function_mode_enabled

_included = torch._C._dispatch_tls_local_include_set
_by_default = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect).add(torch._C.DispatchKey.ADInplaceOrView)
_included_by_default: int = _by_default.raw_repr()
_autograd = torch._C.DispatchKey.AutogradFunctionality


def nothing_above_autograd() -> bool:
    """Whether plain calls go directly to the key Autograd: no transform, dispatch mode, tracer or autocast."""
    return _included().raw_repr() == _included_by_default and not _key_excluded(_autograd) and not is_autocast_enabled()


# The node of autograd's graph whose backward this thread runs; None outside of one.
current_node: Callable[[], Any] = torch._C._current_autograd_node


def values_hidden() -> bool:
    """Whether a plain tensor on this thread may have no readable value: under a tracer or another mode, which would
    miss its use, and under the vmap of batched gradients (``is_grads_batched``), where it has several."""
    return _modes() > 0 or _key_included(_vmap_of_gradients)


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


def modes_are_active() -> bool:
    """Whether a dispatch mode, such as a tracer, sees the calls of this thread."""
    return _modes() > 0


def forget_dispatch(op: Any) -> None:
    """Let tracers use the current registrations of ``op``: they cache the kernel at a non-alias key."""
    op._dispatch_cache.clear()


def operators(
    namespace: str, accepts: Callable[[Any], bool] = lambda schema: True, *, prefix: str = "", out: bool = True
) -> Iterator[Any]:
    """The ``OpOverload`` objects of a namespace; ``dir(torch.ops.aten)`` lists only those used so far.

    Args:
        namespace: such as "aten".
        accepts: selects operators by their schema, before the object is made, which is the slowest step.
        prefix: of the names.
        out: whether to include overloads that write to ``out``.
    """
    start, space = f"{namespace}::", getattr(torch.ops, namespace)
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.partition(".")
        if not full.startswith(start + prefix) or overload.endswith("out") and not out:
            continue
        try:
            schema = torch._C._get_schema(name, overload)
        except RuntimeError:  # it has kernels, but no schema
            continue
        if accepts(schema):
            packet = getattr(space, name.removeprefix(start), None)
            if (found := getattr(packet, overload or "default", None)) is not None:
                yield found


def register_fake(library: torch.library.Library, name: str, function: Callable[..., Any], source: str) -> None:
    """Like ``torch.library.register_fake``, with the source location as an argument.

    PyTorch's looks it up: it reads the caller's file and searches all modules, 20 ms for this package's operators.
    """
    holder = simple_registry.singleton.find(f"{library.ns}::{name}").fake_impl
    library._registration_handles.append(holder.register(function, source, lib=library))


def release(library: torch.library.Library) -> None:
    """Undo the registrations of ``library`` now, without waiting for the garbage collector."""
    library._destroy()
