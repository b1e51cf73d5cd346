"""Transforms, dual numbers and autograd functions, at their levels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._C._functorch import get_inplace_requires_grad_allowed, set_inplace_requires_grad_allowed
from torch._functorch import eager_transforms
from torch._functorch.autograd_function import custom_function_call_vmap_helper
from torch._functorch.pyfunctorch import (
    retrieve_current_functorch_interpreter,
    temporarily_clear_interpreter_stack,
    temporarily_pop_interpreter_stack,
)
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction
from torch.utils import _pytree as pytree

from .dispatch import below_autograd, modes_are_active
from .dynamo import breaks_graphs

__all__ = [
    "PLAIN",
    "SingleLevelFunction",
    "above_the_call",
    "at_next_level",
    "batched_for_random_numbers",
    "differentiate_in_transform",
    "dual",
    "enable_single_level_autograd_function",
    "forward_ad_enabled",
    "forward_mode_outside",
    "fresh_alias",
    "fresh_variable",
    "function_arguments_replaced",
    "has_tangent",
    "has_tangent_below_autograd",
    "in_batched_gradients",
    "in_functorch",
    "innermost_is_jvp",
    "inside_of_batched_gradients",
    "is_batched",
    "is_escaped",
    "is_followed_outside",
    "is_functionalizing",
    "is_functorch_wrapped",
    "is_known_zero",
    "is_tracked_here",
    "level_in_node",
    "levels_of",
    "needs_reverse",
    "only_autograd",
    "only_autograd_and_own_levels",
    "outside_of_batched_gradients",
    "own_levels_are_open",
    "primal",
    "saved_tensors_are_hooked",
    "saved_tensors_unhooked",
    "some_dual_level",
    "tangent",
    "tangents_possible",
    "transform_depth",
    "transforms_ended",
    "transforms_in_dual_level",
    "transforms_usable",
    "transforms_usable_below",
    "transforms_usable_on_fake",
    "unattached",
    "unwrap_if_dead",
    "vmap_call",
    "with_level_moved",
    "with_tensors",
]


class SingleLevelFunction(_SingleLevelFunction):
    """An autograd.Function that acts on only one functorch level, as required in a kernel at the key Autograd."""

    # compiled autograd reads it from every node's class, but only torch.autograd.Function has it
    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)

    @classmethod
    def call_backward_at_once(cls) -> None:
        """Let autograd call ``backward`` directly, not through a method that looks it up at every call."""
        cls._backward_cls.apply = cls.backward  # type: ignore[attr-defined]


# True while any torch.func transform is running on this thread.
in_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active


def transform_depth() -> int:
    """The number of torch.func transforms running on this thread."""
    return torch._C._functorch.maybe_current_level() or 0


def is_functionalizing() -> bool:
    """Whether the innermost transform is ``torch.func.functionalize``, which does not wrap Python numbers."""
    innermost = torch._C._functorch.peek_interpreter_stack()
    return innermost is not None and innermost.key() == torch._C._functorch.TransformType.Functionalize


def forward_mode_outside() -> bool:
    """Whether forward mode encloses the torch.func transform of a kernel's level, and will see the kernel's calls."""
    transforms = [i.key() for i in torch._C._functorch.get_interpreter_stack() or ()]
    jvp = torch._C._functorch.TransformType.Jvp
    return jvp in transforms[:-1] or bool(transforms) and jvp not in transforms and forward_ad._current_level >= 0


# Switches forward mode on or off (autograd.Function switches it off around forward and jvp).
forward_ad_enabled = forward_ad._set_fwd_grad_enabled


# The keys that a thread skips while torch.func is in the middle of a call, including modes.
_OFF_IN_CALLS = [
    torch._C._dispatch_key_parse(name)
    for name in ("FuncTorchDynamicLayerFrontMode", "FuncTorchGradWrapper", "FuncTorchBatched", "PythonTLSSnapshot",
                 "Conjugate", "Negative", "ZeroTensor", "Functionalize")
]  # fmt: skip


# The keys that are off below autograd, including the end of torch.func calls.
_OFF_BELOW_AUTOGRAD = [
    torch._C._dispatch_key_parse(name)
    for name in ("AutogradFunctionality", "ADInplaceOrView", "FuncTorchDynamicLayerBackMode")
]


def _visible_to_modes(excluded: Any) -> Any:
    for key in _OFF_IN_CALLS:
        excluded = excluded.remove(key)
    return excluded


def at_next_level(function: Callable[..., Any], *values: Any) -> Any:
    """``function(*values)``, with its calls visible to modes: for use in the kernel at the key Autograd.

    There, in the middle of a torch.func call, an entered mode has no effect. The values must have no tangent at this
    level and not be tracked at it; they are passed to the outer level, and the result is passed back.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    if not in_functorch() or not excluded.has(_OFF_IN_CALLS[0]):
        return function(*values)
    level = retrieve_current_functorch_interpreter().level()
    values = pytree.tree_map_only(Tensor, lambda x: torch._C._functorch._unwrap_for_grad(x, level), values)
    guard = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), _visible_to_modes(excluded))
    with guard, temporarily_pop_interpreter_stack():
        result = function(*values)
    return pytree.tree_map_only(Tensor, lambda x: torch._C._functorch._wrap_for_grad(x, level), result)


@contextmanager
def transforms_usable() -> Iterator[None]:
    """Context manager: user code in a kernel may call ``torch.func``, also in the middle of a torch.func call.

    There, the innermost level takes no other call. So another of the same number and kind replaces it, for the same tensors.
    """
    if not in_functorch() or not torch._C._dispatch_tls_local_exclude_set().has(_OFF_IN_CALLS[0]):
        with transforms_in_dual_level():
            yield
        return
    level = retrieve_current_functorch_interpreter()
    with _outside_of_call(level), temporarily_pop_interpreter_stack():
        _push_level_like(level)
        try:
            yield
        finally:  # no decrement, after which the results would no longer belong to the level
            torch._C._functorch.pop_dynamic_layer_stack()


@contextmanager
def transforms_usable_below() -> Iterator[None]:
    """Context manager: a vmap rule may call ``torch.func``, and runs as if the vmap were not."""
    level = torch._C._functorch.peek_interpreter_stack()
    if level is None:  # a mode calls the kernel
        yield
        return
    with temporarily_pop_interpreter_stack(), _outside_of_call(level):
        yield


@contextmanager
def transforms_usable_on_fake() -> Iterator[None]:
    """Context manager: a fake kernel, which runs below autograd, may call ``torch.func``."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (
        *_OFF_IN_CALLS[:3],
        _OFF_BELOW_AUTOGRAD[-1],
    ):  # not those of autograd, which torch.func needs only at its levels
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


def _outside_of_call(level: Any) -> Any:
    """A guard with the keys that were on before the call came to ``level``."""
    excluded = _visible_to_modes(torch._C._dispatch_tls_local_exclude_set())
    included = torch._C._dispatch_tls_local_include_set()
    if level.key() == torch._C._functorch.TransformType.Vmap:  # it switches autograd off, for itself alone
        for key in _OFF_BELOW_AUTOGRAD:
            excluded = excluded.remove(key)
        included = included.add(torch._C.DispatchKey.ADInplaceOrView)
    return torch._C._ForceDispatchKeyGuard(included, excluded)


def _push_level_like(level: Any) -> None:
    kind, functorch = level.key(), torch._C._functorch
    if kind == functorch.TransformType.Vmap:
        functorch._vmap_increment_nesting(level.batch_size(), level.randomness())
    elif kind == functorch.TransformType.Grad:
        with torch.set_grad_enabled(level.prev_grad_mode()):
            functorch._grad_increment_nesting()
    elif kind == functorch.TransformType.Jvp:
        with forward_ad_enabled(level.prev_fwd_grad_mode()):
            functorch._jvp_increment_nesting()
    else:
        functorch._func_increment_nesting(level.functionalize_add_back_views())


class _Replaced(threading.local):
    """The replacements for arguments of ``torch.autograd.Function.apply`` on this thread, the innermost last."""

    def __init__(self) -> None:
        self.functions: list[Callable[[Any], Any]] = []


_replaced = _Replaced()
_replacing = 0  # the number of contexts in the process
_replacing_lock = threading.Lock()
_apply: Any = torch.autograd.Function.__dict__["apply"]


def _apply_replaced(cls: Any, *args: Any, **kwargs: Any) -> Any:
    for function in reversed(_replaced.functions):
        args = tuple([function(x) for x in args])
    return _apply.__get__(None, cls)(*args, **kwargs)


@contextmanager
def function_arguments_replaced(function: Callable[[Any], Any]) -> Iterator[None]:
    """A context that passes ``function(x)`` for each argument x of ``autograd.Function.apply``, which no mode sees."""
    global _replacing
    with _replacing_lock:
        _replacing += 1
        if _replacing == 1:
            torch.autograd.Function.apply = classmethod(_apply_replaced)  # type: ignore[assignment, method-assign]
    _replaced.functions.append(function)
    try:
        yield
    finally:
        _replaced.functions.pop()
        with _replacing_lock:
            _replacing -= 1
            if not _replacing:
                torch.autograd.Function.apply = _apply  # type: ignore[method-assign]


@contextmanager
def above_the_call() -> Iterator[None]:
    """Context manager: a kernel's calls pass through torch.func and autograd again; dispatch modes stay."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (*_OFF_IN_CALLS, *_OFF_BELOW_AUTOGRAD):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set().add(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(included, excluded), temporarily_clear_interpreter_stack():
        yield


# The position of the argument with a transform's number in nodes of Dynamo's graphs, by the name of their target.
_LEVELS = {"_wrap_for_grad": 1, "_unwrap_for_grad": 1, "_add_batch_dim": 2, "_remove_batch_dim": 1}


def level_in_node(node: Any) -> int | None:
    """The number of a transform of torch.func that a node of Dynamo's graph names."""
    place = _LEVELS.get(getattr(node.target, "__name__", "")) if node.op == "call_function" else None
    return None if place is None else node.args[place]


def with_level_moved(target: Any, args: tuple[Any, ...], by: int) -> tuple[Any, ...]:
    """The arguments of such a node, called inside of ``by`` more transforms than in the trace."""
    place = _LEVELS.get(getattr(target, "__name__", ""))
    return args if place is None else (*args[:place], args[place] + by, *args[place + 1 :])


@contextmanager
def transforms_ended() -> Iterator[None]:
    """A context that closes open transforms after an error, for graphs that begin and end transforms."""
    depth = transform_depth()
    try:
        yield
    except BaseException:
        while transform_depth() > depth:
            torch._C._functorch.pop_dynamic_layer_stack()
        raise


def innermost_is_jvp() -> bool:
    """Whether the innermost transform is ``torch.func.jvp``, at whose level nothing is tracked in reverse mode."""
    innermost = torch._C._functorch.peek_interpreter_stack()
    return innermost is not None and innermost.key() == torch._C._functorch.TransformType.Jvp


@contextmanager
def transforms_in_dual_level() -> Iterator[None]:
    """Context manager: ``torch.func.jvp`` works inside of a ``dual_level``, and shares it, like nested jvps."""
    if forward_ad._current_level < 0 or eager_transforms.JVP_NESTING:
        yield
        return
    eager_transforms.JVP_NESTING += 1
    try:
        yield
    finally:
        eager_transforms.JVP_NESTING -= 1


@breaks_graphs("the nesting of vmaps is read by changing it")  # a graph that ends in between would leave it changed
def _level_of_batched_gradients() -> int:
    level: int = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


def in_batched_gradients() -> bool:
    """Whether the vmap of batched gradients (``is_grads_batched``) is running."""
    return _level_of_batched_gradients() > 0


def outside_of_batched_gradients(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[int | None], int]:
    """The tensors without the vmap of batched gradients (``is_grads_batched``), the dim of the batch in each, and its level.

    The level is 0 if that vmap is not running.
    """
    level = _level_of_batched_gradients()
    if level < 1:
        return list(tensors), [None] * len(tensors), 0
    made, dims = [], []
    for x in tensors:
        batched = torch._C._functorch.is_legacy_batchedtensor(x)
        made.append(torch._remove_batch_dim(x, level, 1, 0) if batched else x)
        dims.append(0 if batched else None)
    return made, dims, level if 0 in dims else 0


def inside_of_batched_gradients(tensors: Sequence[Tensor], level: int) -> list[Tensor]:
    """Tensors with the batch first, wrapped again by that vmap."""
    return [torch._add_batch_dim(x, 0, level) for x in tensors]


def is_batched(x: Tensor) -> bool:
    """Whether a running vmap has batched ``x``, at any level."""
    x = unwrap_if_dead(x)
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


def batched_for_random_numbers(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, one of them batched at the level of each running vmap with ``randomness="different"``."""
    made, stack = list(tensors), torch._C._functorch.get_interpreter_stack()
    place = next((i for i, x in enumerate(made) if x.is_floating_point() or x.is_complex()), None) if stack else None
    if place is None:
        return made
    for one in stack:
        if one.key() != torch._C._functorch.TransformType.Vmap:
            continue
        batch = torch._C._functorch.CVmapInterpreterPtr(one)
        if batch.randomness() != torch._C._functorch.RandomnessType.Different or any(
            _is_batched_at(x, batch.level()) for x in made
        ):
            continue
        x = made[place]
        with temporarily_clear_interpreter_stack():
            zeros = torch.zeros(batch.batchSize(), dtype=x.dtype, device=x.device).neg()  # -0.0 + x has the sign of x
            zero = torch._C._functorch._add_batch_dim(zeros, 0, batch.level())
        made[place] = zero + x
    return made


def _is_batched_at(x: Tensor, level: int) -> bool:
    x = unwrap_if_dead(x)
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x) and torch._C._functorch.maybe_get_level(x) == level:
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


def levels_of(x: Tensor) -> tuple[set[int], bool]:
    """The functorch levels that wrap ``x``, and whether it is tracked or has a tangent at any level or outside."""
    levels: set[int] = set()
    x = unwrap_if_dead(x)
    if not torch._C._functorch.is_batchedtensor(x) and (x.requires_grad or has_tangent(x)):
        return levels, True
    if not in_functorch():
        return levels, False
    interpreter = retrieve_current_functorch_interpreter()
    if torch._C._functorch.maybe_get_level(x) == interpreter.level():
        levels.add(interpreter.level())
        x = torch._C._functorch.get_unwrapped(x)
    with temporarily_pop_interpreter_stack():
        outer, tracked = levels_of(x)
    return levels | outer, tracked


def is_tracked_here(x: Tensor) -> bool:
    """Whether reverse mode tracks ``x`` at the innermost level, not only at an outer one."""
    if not x.requires_grad:
        return False
    return not in_functorch() or torch._C._functorch.maybe_get_level(x) == transform_depth()


def is_escaped(x: Tensor) -> bool:
    """Whether ``x`` belongs to a transform that is not running here; operators refuse it."""
    level = torch._C._functorch.maybe_get_level(unwrap_if_dead(x))
    return level is not None and level > transform_depth()


def needs_reverse(x: Tensor) -> bool:
    """Whether reverse mode tracks ``x``, or a tangent of it, at any level."""
    x = unwrap_if_dead(x)
    parts = [x]
    if not torch._C._functorch.is_batchedtensor(x):
        if x.requires_grad:
            return True
        parts += [t for t in [tangent(x)] if t is not None]
        if any(t.requires_grad for t in parts):
            return True
    if not in_functorch():
        return False
    level = retrieve_current_functorch_interpreter().level()
    inside = [
        torch._C._functorch.get_unwrapped(t) if torch._C._functorch.maybe_get_level(t) == level else t for t in parts
    ]
    with temporarily_pop_interpreter_stack():
        return any(map(needs_reverse, inside))


def saved_tensors_are_hooked() -> bool:
    """Whether hooks on saved tensors are active on this thread; torch.func refuses to run under them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextmanager
def saved_tensors_unhooked() -> Iterator[None]:
    """A context without this thread's hooks on saved tensors, for a graph that ends inside of it."""
    hooks: list[Any] = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)


def is_known_zero(x: Tensor) -> bool:
    """Whether ``x`` is a zero without memory, which PyTorch's forward mode uses for tangents."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x._is_zerotensor()


# Unwraps a saved tensor after the end of its torch.func transform, because torch.func refuses dead wrappers.
unwrap_if_dead: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead


def primal(x: Tensor) -> Tensor:
    """``x`` without its tangent at this level, connected to the outer levels.

    Not ``forward_ad.unpack_dual``: its Python level counter is unset while a compiled graph runs.
    """
    if x.layout is not torch.strided and not x.is_nested:  # sparse: it cannot carry a tangent, and unpacking it raises
        return x
    return torch._VF._unpack_dual(x, level=0)[0]


def tangent(x: Tensor) -> Tensor | None:
    """The tangent of ``x`` at this level, connected to the outer levels."""
    return torch._VF._unpack_dual(x, level=0)[1] if has_tangent(x) else None


@contextmanager
def some_dual_level() -> Iterator[None]:
    """A context with a level for `dual`: the open one, because there cannot be two, or a new one."""
    if forward_ad._current_level < 0:
        with forward_ad.dual_level():
            yield
    else:
        with forward_ad._set_fwd_grad_enabled(True):
            yield


def dual(x: Tensor, tangent: Tensor) -> Tensor:
    """``x`` with a tangent at this level; not ``forward_ad.make_dual``, for the same reason as in `primal`."""
    return torch._VF._make_dual(x, tangent, level=0)


def has_tangent(x: Tensor) -> bool:
    """Whether ``x`` is a dual tensor at this level; read from the tensor, for the same reason as in `primal`."""
    global _tangents_in_graphs
    if x.is_nested or x.layout is not torch.strided:  # such a tensor cannot carry a tangent, and unpacking one raises
        return False
    # a subclass would see the view that this makes, a tracer record it, and a fake mode refuse that of a graph's constant
    if type(x) not in PLAIN or modes_are_active() and not is_functorch_wrapped(x):
        with torch._C._DisableTorchDispatch():
            found = torch._VF._unpack_dual(x, level=0)[1] is not None
    else:
        found = torch._VF._unpack_dual(x, level=0)[1] is not None
    if found and type(x) not in PLAIN and threading.get_ident() not in tracing_threads:
        _tangents_in_graphs = True
    return found


# Set once Dynamo has traced dual tensors: its graphs enter a level without Python's counter.
_tangents_in_graphs = False

tracing_threads: set[int] = set()  # inside of `traced`, whose graphs have tangents as ordinary tensors

_own_levels = 0  # the number of open levels of `torch_manualgrad.forward_ad` in the process


def count_own_levels(change: int) -> None:
    """Record that levels were opened or closed."""
    global _own_levels
    _own_levels += change


def own_levels_are_open() -> bool:
    """Whether a level of `torch_manualgrad.forward_ad` is open in the process."""
    return _own_levels > 0


# Whether a transform made the tensor; it remains true after the transform has ended.
is_functorch_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor

# Called by torch.func.grad, torch.func.vjp and their pullbacks with outputs and inputs, and a node in Dynamo's graphs.
differentiate_in_transform: Callable[..., Any] = eager_transforms._autograd_grad

PLAIN = (Tensor, torch.nn.Parameter)  # types that carry no tracer or wrapper of a subclass


def only_autograd() -> bool:
    """Whether no transform and no dual level is active: plain tensors then need only autograd."""
    return forward_ad._current_level < 0 and not _tangents_in_graphs and not _own_levels and not in_functorch()


def only_autograd_and_own_levels() -> bool:
    """`only_autograd`, or inside of levels of `torch_manualgrad.forward_ad`, in which no transform can run."""
    return forward_ad._current_level < 0 and not _tangents_in_graphs and not in_functorch()


def has_tangent_below_autograd(x: Tensor) -> bool:
    """`has_tangent` inside of a dispatch mode, below autograd."""
    keys = torch._C.DispatchKey
    with (
        torch._C._SetExcludeDispatchKeyGuard(keys.AutogradFunctionality, False),
        torch._C._SetExcludeDispatchKeyGuard(keys.ADInplaceOrView, False),
    ):
        return has_tangent(x)


def is_followed_outside(batches: Sequence[Tensor]) -> bool:
    """False only if nothing outside of the innermost vmap differentiates results of these: all levels are vmap's, and
    autograd tracks none of the whole batches."""
    if forward_ad._current_level >= 0 or _tangents_in_graphs or _own_levels:
        return True
    for x in batches:
        while torch._C._functorch.is_batchedtensor(x):
            x = torch._C._functorch.get_unwrapped(x)
        if is_functorch_wrapped(x) or type(x) not in PLAIN or x.requires_grad:
            return True
    return False


def tangents_possible(tensors: Sequence[Tensor | None]) -> bool:
    """False only if none of these tensors can be dual: cheap, while `has_tangent` makes a view."""
    if not only_autograd():
        return True
    for x in tensors:
        if x is not None and type(x) not in PLAIN:
            return True
    return False


def fresh_variable(x: Tensor) -> Tensor:
    """A tensor of ones shaped like ``x`` that requires grad at this level, also in the middle of a functorch call."""
    return _requiring_grad(torch.ones_like(x))


def fresh_alias(x: Tensor) -> Tensor:
    """``x`` as a leaf that requires grad here, connected to the outer levels. Only below a kernel at Autograd."""
    return _requiring_grad(unattached(x))


def unattached(x: Tensor) -> Tensor:
    """``x`` without its history here, but unlike `detach` with outer levels. Only below a kernel at Autograd."""
    with below_autograd():
        return x.view_as(x)


def _requiring_grad(x: Tensor) -> Tensor:
    allowed = get_inplace_requires_grad_allowed()
    set_inplace_requires_grad_allowed(True)
    try:
        return x.requires_grad_()
    finally:
        set_inplace_requires_grad_allowed(allowed)


def vmap_call(rule: Callable[..., tuple[Any, Any]], op: Callable[..., Any], values: Sequence[Any]) -> Any:
    """Run a vmap rule ``(info, in_dims, *values) -> (output, out_dims)`` at the current vmap level.

    If no value is batched at this level, ``op`` is called instead. Only inside a kernel at FuncTorchBatched.
    """
    interpreter: Any = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(interpreter, rule, op, *values)


def with_tensors(module: torch.nn.Module, tensors: dict[str, Tensor]) -> AbstractContextManager[None]:
    """Context manager: some parameters and buffers of a module, by name, are replaced by these tensors."""
    return torch.nn.utils.stateless._reparametrize_module(module, tensors)
