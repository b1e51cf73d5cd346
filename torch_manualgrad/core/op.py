"""Custom ops whose every implementation, the autograd kernel included, can be replaced later or swapped for a while."""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from . import compile_cache
from .autograd import Derivative, Mode, any_tangent, apply, differentiated, redispatch, transposing
from .gradients import ShapeOf, check_gradients, check_tangents, explain
from .internals import (
    below_autograd,
    bits_unread,
    enable_single_level_autograd_function,
    forward_ad_enabled,
    pytree,
    reading_bits,
    release,
    saved_tensors_are_hooked,
    shares_memory,
    unwrap_if_dead,
    vmap_call,
)
from .schema import Signature, tensors_in

__all__ = ["BackwardContext", "CustomOp", "Swap", "custom_op"]

# Where a kernel for one type of device is registered with the dispatcher.
_DEVICE_KEYS = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS", "xpu": "XPU", "hpu": "HPU", "meta": "Meta"}
_KINDS = ("default", "fake", "vmap", "save_for_backward", "backward", "jvp", "autograd")

_count = itertools.count(1)
_defined: dict[str, CustomOp] = {}  # every op of ours, by its name
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class BackwardContext(NamedTuple):
    """The first argument of a backward.

    Attributes:
        needs_input_grad: input name -> whether its gradient is wanted; a list of bool for a list of tensors.
    """

    needs_input_grad: dict[str, Any]


@dataclass(frozen=True)
class Implementation:
    """One function registered for an op, and where it was written."""

    function: Callable[..., Any]
    output_differentiability: tuple[bool, ...] | None = None

    @property
    def identity(self) -> str:
        """The same for the same function in this process, and never for two."""
        try:
            number = _numbers.setdefault(self.function, next(_count))
        except TypeError:  # a callable object that cannot be hashed or weakly referenced
            number = id(self.function)
        return f"{number}{self.output_differentiability or ''}"

    @functools.cached_property
    def location(self) -> str:
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(self.function)


class _Pair(Derivative):
    """save_for_backward and backward, and a jvp if there is one."""

    pure = False

    def __init__(self, op: CustomOp, save: Implementation, backward: Implementation, jvp: Implementation | None):
        self.save = save
        self.rule = backward
        self.tangent_rule = jvp
        super().__init__(op.op, op.signature, backward.output_differentiability)

    def residuals(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Tensor | None], Any]:
        saved = self._save(inputs, outputs)
        # enough of the arguments to check the gradients against
        shapes = [_skeleton(v) for v in inputs]
        if isinstance(saved, Tensor):
            tensors, rest, spec = [saved], None, None
        else:
            leaves, spec = pytree.tree_flatten(saved)
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            rest = [None if isinstance(x, Tensor) else (x,) for x in leaves]
        for x in tensors:
            if _is_one_of(x, inputs) or _is_one_of(x, outputs):
                continue
            known = list(tensors_in((*inputs, *outputs)))
            if not _is_one_of(x, known) and (x.is_floating_point() or x.is_complex()):
                # It was computed here and has no history: the next derivative computes it again, from all of these.
                origin = [_skeleton(v) for v in (*inputs, *outputs)]
                return [*tensors, *known], (spec, rest, shapes, origin)
        return tensors, (spec, rest, shapes, None)

    def vjp(self, needed: Sequence[Any], tensors: Sequence[Any], static: Any, grads: Sequence[Any]) -> Sequence[Any]:
        spec, rest, shapes, origin = static
        if grads[0] is None and not any(True for _ in tensors_in(grads)):
            return [None] * len(shapes)
        tensors = [unwrap_if_dead(t) for t in tensors]
        if origin is not None and (torch.is_grad_enabled() or any_tangent(tensors)):
            known = iter(tensors[1 if rest is None else sum(r is None for r in rest) :])
            values = [_restore(s, known) for s in origin]
            saved = self._save(values[: len(shapes)], values[len(shapes) :])
        elif rest is None:
            saved = tensors[0]
        else:
            given = iter(tensors)
            saved = pytree.tree_unflatten([next(given) if r is None else r[0] for r in rest], spec)
        context = BackwardContext({self.signature.names[i]: needed[i] for i in self.signature.tensor_like})
        found = self.rule.function(context, saved, *grads)
        return check_gradients(self.signature, self.rule.location, shapes, found)

    def jvp(self, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        if self.tangent_rule is None:
            return super().jvp(inputs, outputs, tangents)
        return _user_jvp(self.signature, self.tangent_rule, inputs, outputs, tangents)

    def _save(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        return self.save.function(self.signature.Inputs(*inputs), _named_outputs(self.signature, outputs))


class _JvpOnly(Derivative):
    """A jvp without a backward."""

    def __init__(self, op: CustomOp, jvp: Implementation):
        self.tangent_rule = jvp
        super().__init__(op.op, op.signature)

    def residuals(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Tensor | None], Any]:
        return (), None

    def jvp(self, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        return _user_jvp(self.signature, self.tangent_rule, inputs, outputs, tangents)


class ReferenceDerivative(Derivative):
    """The derivative of the reference implementation itself, for an op whose reference is differentiable.

    Reverse: the reference is differentiated when the backward runs, so the forward costs no more than its kernel.
    Forward, and where the backward will run in the middle of a call (torch.func.vjp cannot): the reference runs in
    place of the op, see `CustomOp.kernel`.
    """

    @property
    def pure(self) -> bool:  # type: ignore[override]
        return not saved_tensors_are_hooked()

    def __init__(self, op: CustomOp, reference: Callable[..., Any]):
        self.reference = reference
        super().__init__(op.op, op.signature)

    def residuals(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Tensor | None], Any]:
        constants = [None if isinstance(v, Tensor) else (v,) for v in inputs]
        return [v if isinstance(v, Tensor) else None for v in inputs], constants

    def vjp(self, needed: Sequence[Any], tensors: Sequence[Any], static: Any, grads: Sequence[Any]) -> Sequence[Any]:
        places = [i for i, n in enumerate(needed) if n]
        values = [unwrap_if_dead(t) if s is None else s[0] for t, s in zip(tensors, static)]
        if not torch.compiler.is_dynamo_compiling() and saved_tensors_are_hooked():
            return self._plain_vjp(places, values, grads)

        def of_needed(*wanted: Tensor) -> Any:
            full = list(values)
            for i, w in zip(places, wanted):
                full[i] = w
            args, kwargs = self.signature.split(full)
            return self.reference(*args, **kwargs)

        outputs, pullback = torch.func.vjp(of_needed, *[values[i] for i in places])  # type: ignore[misc]
        full = [torch.zeros_like(o) if g is None else g for o, g in zip(self.signature.outputs(outputs), grads)]
        result: list[Any] = [None] * len(values)
        for i, g in zip(places, pullback(full[0] if len(full) == 1 else tuple(full))):
            result[i] = g
        return result

    def _plain_vjp(self, places: Sequence[int], values: list[Any], grads: Sequence[Any]) -> Sequence[Any]:
        """The same in plain autograd: torch.func refuses to run where saved tensors have hooks."""
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad():
            for i in places:  # a node of its own: one tensor may stand for two arguments
                x = values[i]
                values[i] = x.view_as(x) if differentiable and x.requires_grad else x.detach().requires_grad_()
            args, kwargs = self.signature.split(values)
            outputs = self.signature.outputs(self.reference(*args, **kwargs))
            pairs = [(o, g) for o, g in zip(outputs, grads) if g is not None and o.requires_grad]
        wanted = [values[i] for i in places]
        found: Sequence[Any] = [None] * len(wanted)
        if pairs:
            found = torch.autograd.grad(
                [o for o, _ in pairs], wanted, [g for _, g in pairs], create_graph=differentiable, allow_unused=True
            )
        result: list[Any] = [None] * len(values)
        for i, x, g in zip(places, wanted, found):
            # a number that is zero, as torch.func.vjp gives: None would make the caller's graph miss its input
            result[i] = torch.zeros_like(x) if g is None else g
        return result


def _is_one_of(x: Tensor, others: Sequence[Any]) -> bool:
    for other in others:
        if x is other:
            return True
    return False


def _skeleton(value: Any) -> Any:
    if isinstance(value, Tensor):
        return ShapeOf(value.shape)
    return [_skeleton(v) for v in value] if isinstance(value, (list, tuple)) else value


def _restore(skeleton: Any, tensors: Any) -> Any:
    if isinstance(skeleton, ShapeOf):
        return next(tensors)
    return [_restore(s, tensors) for s in skeleton] if isinstance(skeleton, list) else skeleton


def _named_outputs(signature: Signature, outputs: Sequence[Any]) -> Any:
    return outputs[0] if len(signature.returns) == 1 else signature.Outputs(*outputs)


def _user_jvp(
    signature: Signature, rule: Implementation, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]
) -> list[Any]:
    found = rule.function(signature.Inputs(*inputs), _named_outputs(signature, outputs), signature.Inputs(*tangents))
    return check_tangents(signature, rule.location, outputs, found)


class _ActiveRules(NamedTuple):
    """What the autograd kernel goes by: resolved when registrations change, read at every call."""

    derivative: Derivative | None = None
    autograd: Implementation | None = None
    error: str | None = None
    reverse: bool = False


class Swap:
    """Other implementations for a while; see `CustomOp.swap`."""

    def __init__(self, op: CustomOp, implementations: dict[str, Implementation | None]) -> None:
        self._op = op
        self._implementations = implementations
        self._entered: list[object] = []

    def __enter__(self) -> CustomOp:
        self._entered.append(self._op._push(self._implementations))
        return self._op

    def __exit__(self, *exception: object) -> None:
        self._op._pop(self._entered.pop())


class CustomOp:
    """An operator of the dispatcher with replaceable implementations. Made by `custom_op`.

    Calling it calls the operator ``op`` (an ``OpOverload``), which is also at ``torch.ops.<namespace>.<name>``.

    Implementations are registered with the ``impl*`` methods, each usable as a decorator, in any order, and replaced by
    registering again. At each call the autograd kernel goes by what is registered then: a whole `impl_autograd`;
    else the pair `impl_save_for_backward` and `impl_backward`, with `impl_jvp` or a jvp derived from the backward;
    else, with gradients needed, an error. Registrations act on the whole process, as PyTorch's do.
    """

    def __init__(
        self,
        schema: str,
        reference: Callable[..., Any],
        *,
        transparent: Callable[..., Any] | None = None,
        differentiable: bool = False,
        may_be_overload: bool = False,
    ) -> None:
        if not callable(reference):
            raise TypeError(f"a custom op is defined by a function, got {type(reference).__name__}")
        self.signature = Signature(schema, functional=True)
        namespace, _, packet = self.signature.name.partition("::")
        if not packet or not namespace:
            raise ValueError(f"schema {schema!r} has no namespace: expected 'namespace::name(...) -> ...'")
        overload = self.signature.schema.overload_name
        if overload and not may_be_overload:
            raise ValueError(f"schema {schema!r} names an overload; a custom op is one operator, without overloads")
        short = f"{packet}.{overload}" if overload else packet
        self.name = f"{namespace}::{short}"
        taken = getattr(getattr(torch.ops, namespace), packet, None)
        if taken is not None and (not overload or hasattr(taken, overload)):
            raise ValueError(
                f"{self.name} is already defined; a duplicate name is an error (custom_op(..., redefine=True) replaces it)"
            )
        returns = self.signature.returns
        self._one_tensor = len(returns) == 1 and returns[0].is_tensor
        self.reference = reference
        self.__doc__ = reference.__doc__ or type(self).__doc__
        self.__name__ = short
        self.__wrapped__ = reference
        self.transparent = transparent is not None
        self._differentiable = differentiable
        self._library = torch.library.Library(namespace, "FRAGMENT")
        self._library.define(str(self.signature.schema).partition("::")[2])
        self.op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        self._base: dict[str, Implementation] = {"default": Implementation(reference)}
        self._first = {"default": self._base["default"].identity}
        self._layers: list[dict[str, Implementation | None]] = []
        self._device_keys: set[str] = set()
        self._current: dict[str, Implementation] = dict(self._base)
        self._active_rules = _ActiveRules()
        if transparent is not None:
            self._library.impl(short, transparent, "CompositeImplicitAutograd")
        else:
            self._register(short)
            self._resolve()
        compile_cache.remember(self.name, compile_cache.fingerprint(reference))
        _defined[self.name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<CustomOp {self.signature.schema}>"

    def _register(self, short: str) -> None:
        """The indirections, once: each looks up what is registered when it is called."""
        library = self._library
        library.impl(short, self._run_default, "CompositeExplicitAutograd")
        library.impl(short, self.kernel, "Autograd", with_keyset=True)
        library.impl(short, self._run_vmap, "FuncTorchBatched")
        torch.library.register_fake(self.name, self._run_fake, lib=library)

    def undefine(self) -> None:
        """Take the op away, with all that is registered for it. No thread may be inside a call of it."""
        with compile_cache.changes():
            release(self._library)
            del _defined[self.name]
            compile_cache.put(self.name, "")
            compile_cache.put(f"{self.name} redefined", str(next(_count)))  # graphs have its derivatives in them

    # -- registration -------------------------------------------------------------------------------------------

    def impl(self, device: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the kernel for one type of device ("cpu", "cuda", ...), or the reference anew ("default").

        Raises:
            ValueError: the type of device is unknown.
        """
        if device != "default" and device not in _DEVICE_KEYS:
            raise ValueError(f"device {device!r} is unknown; expected one of {['default', *_DEVICE_KEYS]}")
        return lambda function: self._put(device, function)

    def impl_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register what computes shapes, dtypes and strides of the outputs; without it the reference does."""
        return self._put("fake", function)

    def impl_vmap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register ``(info, in_dims, *args) -> (output, out_dims)``, as in ``torch.library.register_vmap``.

        Without it the op runs once for each element of the batch.
        """
        return self._put("vmap", function)

    def impl_save_for_backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register ``(inputs, output) -> residuals``: any pytree. ``inputs`` is a named tuple, as is ``output`` of an
        op with several. Tensors among the residuals are saved by autograd itself, so an in-place change is caught."""
        return self._put("save_for_backward", function)

    def impl_backward(
        self,
        function: Callable[..., Any] | None = None,
        *,
        output_differentiability: Sequence[bool] | None = None,
    ) -> Any:
        """Register ``(ctx, saved, *grads) -> {input name: gradient or None}``; see `BackwardContext` for ``ctx``.

        Args:
            output_differentiability: for each output (a list counts as one) whether gradients flow into it.
                Default: all tensors.

        A cotangent that is not defined arrives as None. Every tensor argument has its key in the result, a list of
        tensors a list of gradients; None is a gradient of zero.
        """
        marks = self._check_differentiability(output_differentiability)
        if function is None:
            return lambda f: self._put("backward", f, marks)
        return self._put("backward", function, marks)

    def impl_jvp(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register ``(inputs, output, tangents) -> tangents of the outputs``. ``inputs`` and ``tangents`` are named
        tuples; an input without a tangent has None there, and None is returned for a tangent of zero. It is
        differentiated again for higher orders: compute what it needs from ``inputs`` and ``output``."""
        return self._put("jvp", function)

    def impl_autograd(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register a whole autograd kernel ``(*args, **kwargs) -> output``: it goes before all else.

        Inside it, reach the op itself through `below_autograd`, and derive autograd functions from
        `SingleLevelFunction`.
        """
        return self._put("autograd", function)

    def swap(self, **implementations: Any) -> Swap:
        """Other implementations for a while: ``with op.swap(backward=f, jvp=None): ...``.

        Args:
            implementations: ``backward``, ``save_for_backward``, ``jvp``, ``autograd``, ``vmap``, ``fake``, ``default``
                or a type of device, each a function, or None for "as if none were registered".
                ``output_differentiability`` goes with ``backward``; without it that of the registered one stays.

        Swaps nest. They act on the whole process; of several active ones, also from several threads, the one entered last
        wins, and they may end in any order. A call keeps the backward that was active when it ran.

        Raises:
            TypeError: no such kind of implementation, or not a function.
        """
        marks = implementations.pop("output_differentiability", None)
        if marks is not None and implementations.get("backward") is None:
            raise TypeError(f"{self.name}: swap(output_differentiability=...) goes with a backward, and there is none")
        known = (*_KINDS, *_DEVICE_KEYS)
        layer: dict[str, Implementation | None] = {}
        for kind, function in implementations.items():
            if kind not in known:
                raise TypeError(f"{self.name}: swap has no {kind!r}; expected some of {list(known)}")
            if function is not None and not callable(function):
                raise TypeError(
                    f"{self.name}: swap({kind}=...) takes a function or None, got {type(function).__name__}"
                )
            registered = self._base.get(kind)
            chosen = self._check_differentiability(marks)
            if chosen is None and registered is not None:
                chosen = registered.output_differentiability
            chosen = chosen if kind == "backward" else None
            layer[kind] = None if function is None else self._implementation(kind, function, chosen)
        return Swap(self, layer)

    def below_autograd(self, *args: Any, **kwargs: Any) -> Any:
        """The op without its autograd kernel at this level, for use inside an `impl_autograd`."""
        with torch.enable_grad(), forward_ad_enabled(True), below_autograd():
            return self.op(*args, **kwargs)

    def _check_differentiability(self, marks: Sequence[bool] | None) -> tuple[bool, ...] | None:
        if marks is None:
            return None
        returns = self.signature.returns
        if len(marks) != len(returns):
            raise RuntimeError(
                f"{self.name}: output_differentiability={list(marks)} has {len(marks)} entries, but the op has "
                f"{len(returns)} outputs."
            )
        for i, (mark, output) in enumerate(zip(marks, returns)):
            if mark and not output.is_tensor_like:
                raise RuntimeError(
                    f"{self.name}: output_differentiability={list(marks)} marks output {i} as differentiable, but it is "
                    f"of type {self.signature.schema.returns[i].type}, not a Tensor or a list of them."
                )
        return tuple(bool(m) for m in marks)

    def _implementation(
        self, kind: str, function: Callable[..., Any], marks: tuple[bool, ...] | None
    ) -> Implementation:
        """``function``, if it takes what it will be given. Raises TypeError otherwise."""
        made = Implementation(function, marks)
        given = {
            "save_for_backward": ["inputs", "output"],
            "backward": ["ctx", "saved", *[f"grad_{name}" for name in self.signature.output_names]],
            "jvp": ["inputs", "output", "tangents"],
        }.get(kind)
        if given is None:
            return made
        try:
            parameters = inspect.signature(function)
        except (TypeError, ValueError):  # of what is written in C nothing is known
            return made
        try:
            parameters.bind(*given)
        except TypeError:
            raise TypeError(
                f"{self.name}: the {kind} implementation, written at {made.location}, is called with {len(given)} "
                f"arguments, ({', '.join(given)}), but its parameters are {parameters}"
            ) from None
        return made

    def _put(self, kind: str, function: Callable[..., Any], marks: tuple[bool, ...] | None = None) -> Any:
        if not callable(function):
            raise TypeError(f"{self.name}: the {kind} implementation must be a function, got {type(function).__name__}")
        if self.transparent:
            raise RuntimeError(
                f"{self.name} is transparent: autograd, vmap and the compiler see through its body, so it has no place "
                f"for a {kind} implementation"
            )
        made = self._implementation(kind, function, marks)
        with compile_cache.lock:
            self._base[kind] = made
            self._first.setdefault(kind, self._base[kind].identity)
            compile_cache.remember(f"{self.name} {kind}", compile_cache.fingerprint(function))
            self._resolve()
        return function

    def _push(self, layer: dict[str, Implementation | None]) -> object:
        with compile_cache.lock:
            self._layers.append(layer := dict(layer))
            self._resolve()
        return layer

    def _pop(self, layer: object) -> None:
        with compile_cache.lock:
            self._layers = [other for other in self._layers if other is not layer]
            self._resolve()

    def _resolve(self) -> None:
        """Make what is registered the active one. Readers see the old state or the new one, nothing between."""
        current: dict[str, Implementation | None] = dict(self._base)
        for layer in self._layers:
            current.update(layer)
        self._current = {kind: i for kind, i in current.items() if i is not None}
        for device in (current.keys() & _DEVICE_KEYS.keys()) - self._device_keys:
            self._device_keys.add(device)
            self._library.impl(self.__name__, self._device_kernel(device), _DEVICE_KEYS[device])
        self._active_rules = self._derivative()
        # what differs from the first registrations: a graph compiled under those must not be used under this
        now = {kind: i.identity for kind, i in self._current.items()}
        differs = [f"{k}={now.get(k)}" for k in sorted({*now, *self._first}) if now.get(k) != self._first.get(k)]
        code = [compile_cache.fingerprint(i.function) for i in self._current.values()] if differs else []
        compile_cache.put(self.name, " ".join(differs), " ".join(code))

    def _derivative(self) -> _ActiveRules:
        get = self._current.get
        save, backward, jvp = get("save_for_backward"), get("backward"), get("jvp")
        if (whole := get("autograd")) is not None:
            return _ActiveRules(autograd=whole)
        if (save is None) != (backward is None):
            found, missing = ("backward", "save_for_backward") if save is None else ("save_for_backward", "backward")
            return _ActiveRules(
                error=f"{self.name} has a {found} implementation, written at {self._current[found].location}, but no "
                f"{missing} implementation. A gradient needs both: register the other with impl_{missing}."
            )
        if save is not None and backward is not None:
            return _ActiveRules(_Pair(self, save, backward, jvp), reverse=True)
        if self._differentiable:
            return _ActiveRules(ReferenceDerivative(self, self.reference), reverse=True)
        return _ActiveRules(_JvpOnly(self, jvp)) if jvp is not None else _ActiveRules()

    # -- kernels ------------------------------------------------------------------------------------------------

    def kernel(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """The kernel at the key Autograd."""
        rules = self._active_rules
        values = self.signature.bind(args, kwargs)
        if rules.error is not None:
            raise RuntimeError(rules.error)
        if rules.autograd is not None:
            return self._whole(rules.autograd, args, kwargs)
        mode = differentiated(self.signature, values)
        if mode is Mode.NOTHING or mode is Mode.PLAIN_NOTHING or not self.signature.returns:
            return redispatch(self.op, self.signature, keyset, values)
        if not rules.reverse and torch.is_grad_enabled() and any(x.requires_grad for x in tensors_in(values)):
            raise RuntimeError(
                f"{self.name} has no derivative in reverse mode, but an input requires grad. Register one with "
                "impl_save_for_backward and impl_backward, or call it under torch.no_grad()."
            )
        if rules.derivative is None:
            raise RuntimeError(
                f"{self.name} has no derivative in forward mode, but an input has a tangent. Register impl_jvp, or "
                "impl_save_for_backward and a differentiable impl_backward, from which a jvp is derived."
            )
        if isinstance(rules.derivative, ReferenceDerivative) and (mode is Mode.DUAL or transposing()):
            args, kwargs = self.signature.split(values)
            return self.reference(*args, **kwargs)
        return apply(rules.derivative, keyset, mode, values)

    def _whole(self, chosen: Implementation, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with enable_single_level_autograd_function():
            try:
                return chosen.function(*args, **kwargs)
            except RuntimeError as error:  # NotImplementedError is one
                if "custom_function_call" not in str(error) and "must override the setup_context" not in str(error):
                    raise
                raise RuntimeError(
                    f"{self.name}: the autograd implementation, written at {chosen.location}, applies a "
                    "torch.autograd.Function, which cannot run inside a torch.func transform here. Derive it from "
                    "torch_manualgrad.SingleLevelFunction instead."
                ) from error

    def _run_default(self, *args: Any, **kwargs: Any) -> Any:
        return self._checked(self._current.get("default", self._base["default"]), args, kwargs)

    def _device_kernel(self, device: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            chosen = self._current.get(device) or self._current.get("default", self._base["default"])
            return self._checked(chosen, args, kwargs)

        return run

    def _checked(self, chosen: Implementation, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What an implementation returned, if it fits the schema and shares no memory with an input."""
        if bits_unread():  # under a mode or in a subclass: the function would read A.mH as A.mT
            with reading_bits():
                result = chosen.function(*args, **kwargs)
        else:
            result = chosen.function(*args, **kwargs)
        if not (self._one_tensor and isinstance(result, Tensor)) or shares_memory(args, kwargs, (result,)):
            self._check(chosen, args, kwargs, result)
        return result

    def _check(self, chosen: Implementation, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        returns = self.signature.returns

        def error(what: str) -> NoReturn:
            raise RuntimeError(f"{self.name}, implemented at {chosen.location}: {what}")

        if len(returns) != 1 and (result is not None if not returns else not isinstance(result, tuple)):
            error(
                f"expected {f'a tuple of {len(returns)} outputs' if returns else 'None'}, got {type(result).__name__}."
            )
        outputs = self.signature.outputs(result)
        if len(outputs) != len(returns):
            error(f"expected a tuple of {len(returns)} outputs, got {len(outputs)}.")
        for declared, output in zip(returns, outputs):
            if declared.is_tensor and not isinstance(output, Tensor):
                error(f"expected a Tensor as output '{declared.name}', got {type(output).__name__}.")
            if declared.is_tensor_list and not isinstance(output, (list, tuple)):
                error(f"expected a list of tensors as output '{declared.name}', got {type(output).__name__}.")
        made = tuple(tensors_in(outputs))
        if shares_memory(args, kwargs, made):
            for name, value in (*zip(self.signature.names, args), *kwargs.items()):
                if any(x is y for x in made for y in tensors_in([value])):
                    error(f"an output is the input '{name}' itself. A custom op returns new tensors; return a clone.")
            error("an output shares memory with an input or another output. A custom op returns new tensors.")

    def _run_fake(self, *args: Any, **kwargs: Any) -> Any:
        fake = self._current.get("fake")
        if fake is not None:
            return fake.function(*args, **kwargs)
        try:
            return self.reference(*args, **kwargs)
        except Exception as error:
            explain(
                error,
                f"{self.name} has no fake implementation, and its reference cannot run on tensors without data. "
                "Register one with impl_fake.",
            )
            raise

    def _run_vmap(self, *args: Any, **kwargs: Any) -> Any:
        if self._differentiable and "vmap" not in self._current:
            return self.reference(*args, **kwargs)  # on batched tensors: their own vmap rules do the rest

        def call(*values: Any) -> Any:
            positional, keywords = self.signature.split(values)
            return self.op(*positional, **keywords)

        def rule(info: Any, in_dims: Sequence[Any], *values: Any) -> tuple[Any, Any]:
            chosen = self._current.get("vmap")
            positional, keywords = self.signature.split(values)
            if chosen is not None:
                return chosen.function(info, self.signature.Inputs(*in_dims), *positional, **keywords)
            return self._loop(info, in_dims, values, call)

        return vmap_call(rule, call, self.signature.bind(args, kwargs))

    def _loop(self, info: Any, in_dims: Sequence[Any], values: Sequence[Any], call: Callable[..., Any]) -> Any:
        """The vmap rule of last resort: one call for each element of the batch."""
        if info.batch_size == 0:
            raise RuntimeError(
                f"{self.name} has no vmap implementation: a batch of size 0 has no element to call it on"
            )
        results = []
        for k in range(info.batch_size):
            one = [_select(v, d, k) for v, d in zip(values, in_dims)]
            results.append(self.signature.outputs(call(*one)))
        outputs: list[Any] = []
        dims: list[Any] = []
        for column in zip(*results):
            first = column[0]
            if isinstance(first, Tensor):
                outputs.append(torch.stack(column))
                dims.append(0)
            elif isinstance(first, (list, tuple)):
                outputs.append([torch.stack(items) for items in zip(*column)])
                dims.append([0] * len(first))
            else:
                outputs.append(first)
                dims.append(None)
        return (tuple(outputs), tuple(dims)) if len(outputs) > 1 else (outputs[0], dims[0])


def _select(value: Any, dim: Any, k: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [_select(v, d, k) for v, d in zip(value, dim)]
    return value if dim is None else value.select(dim, k)


def custom_op(schema: str, *, redefine: bool = False) -> Callable[[Callable[..., Any]], CustomOp]:
    """Define an operator whose reference implementation is the decorated function.

    Args:
        schema: ``"namespace::name(Tensor x, Tensor? bias=None, *, float scale=1.0) -> (Tensor, Tensor)"``, in PyTorch's
            schema language; or ``"namespace::name"`` alone, with the types read from the function's annotations.
            Tensors, optional tensors and lists of tensors may stand anywhere, results may be tensors, lists of
            tensors or numbers. It must be functional: no argument is written to or returned.
        redefine: replace the custom op of that name, if there is one, with everything registered for it; the schema may
            be another. For notebooks, whose cells run again: no other thread may be inside a call of it. The new op is
            at ``torch.ops``; the old `CustomOp` is not to be used any more.

    Returns:
        A decorator that makes a `CustomOp`; the function is its implementation on every device until another is
        registered.

    Raises:
        ValueError: the schema cannot be read, mutates or aliases an argument, has no namespace, or the name is taken.
        TypeError: no schema is given, or what is decorated is not a function.
    """
    if not isinstance(schema, str):
        raise TypeError(f"custom_op takes a schema, 'namespace::name(...) -> ...', got {type(schema).__name__}")

    def define(function: Callable[..., Any]) -> CustomOp:
        text = schema
        if "(" not in schema:
            text = schema + torch.library.infer_schema(function, mutates_args=())
        if redefine and (old := _defined.get(text.partition("(")[0].strip())) is not None:
            old.undefine()
        return CustomOp(text, function)

    return define
