"""Operators whose implementations, including the autograd kernel, can be replaced or temporarily swapped."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...arguments import explain
from .. import activation, compile_cache
from ..engine.derivative import Derivative, redispatch
from ..engine.kernel import Mode, apply, differentiated
from ..engine.sharding import takes_body
from ..engine.strong_arithmetic import running
from ..engine.transpose import transposing
from ..engine.vmap import batches, loop
from ..formula_calls import FormulaCalls
from ..internals import (
    below_autograd,
    bits_unread,
    enable_single_level_autograd_function,
    forward_ad_enabled,
    is_followed_outside,
    reading_bits,
    register_fake,
    release,
    shares_memory,
    skipped_by_dynamo,
    transforms_usable,
    transforms_usable_below,
    transforms_usable_on_fake,
    vmap_call,
)
from ..libraries import forget_recordings
from ..once import imported_again
from ..registry import defined, defined_ops
from ..schema import Signature, tensors_in, with_tensors
from .calls import CallRules
from .derivatives import ReferenceDerivative, SavedBackward, Selected, select
from .implementation import (
    DEVICE_KEYS,
    BackwardContext,
    Implementation,
    check_outputs,
    check_reference,
    count,
    differentiability,
    exchange,
    implementation,
    is_foreign,
    location_of,
)
from .shortcuts import CallsInLibrary, tracked_call

__all__ = [
    "BackwardContext",
    "CustomOp",
    "Swap",
    "current_derivative",
]


class CustomOp:
    """An operator of the dispatcher with replaceable implementations. Made by `custom_op`.

    Calling it calls the operator ``op`` (an ``OpOverload``), which is also at ``torch.ops.<namespace>.<name>``.

    Implementations are registered with the ``impl*`` methods, each usable as a decorator, in any order, and replaced by
    registering again. Each call uses the implementations that are registered at that time: a whole `impl_autograd`;
    else the pair `impl_save_for_backward` and `impl_backward`, with `impl_jvp` or a jvp derived from the backward;
    else, with gradients needed, an error. Registrations act on the whole process, like PyTorch's.
    """

    def __init__(
        self,
        schema: str,
        reference: Callable[..., Any],
        *,
        transparent: Callable[..., Any] | None = None,
        differentiable: bool = False,
        may_be_overload: bool = False,
        calls: FormulaCalls | None = None,
        batched: bool = False,
        rules: CallRules | None = None,
        tags: Sequence[torch.Tag] = (),
    ) -> None:
        if not callable(reference):
            raise TypeError(f"a custom op is defined by a function, got {type(reference).__name__}")
        self.signature = self._read(schema)
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
            module = getattr(reference, "__module__", "") or ""
            if namespace == "manualgrad" and module.startswith(f"{__package__.partition('.')[0]}."):
                raise imported_again(module)
            raise ValueError(
                f"{self.name} is already defined; a duplicate name is an error (custom_op(..., redefine=True) replaces it)"
            )
        check_reference(self.name, self.signature, reference)
        returns = self.signature.returns
        self._one_tensor = len(returns) == 1 and returns[0].is_tensor and returns[0].alias is None
        self.reference = reference
        self.__doc__ = reference.__doc__ or type(self).__doc__
        self.__name__ = short
        self.__wrapped__ = reference
        self.transparent = transparent is not None
        self._differentiable = differentiable
        self._batched = batched
        self._calls = calls
        self._rules = rules
        self._library = torch.library.Library(namespace, "FRAGMENT")
        self._library.define(str(self.signature.schema).partition("::")[2], tags=tags)
        self._base: dict[str, Implementation] = {"default": Implementation(reference)}
        self._first = {"default": self._base["default"].identity}
        self._layers: list[dict[str, Implementation | None]] = []
        self._device_keys: set[str] = set()
        self._current: dict[str, Implementation] = dict(self._base)
        self.selected = Selected()
        self._in_library: CallsInLibrary | None = None
        self._tracked_call: Callable[[Sequence[Any]], Any] | None = None
        self._covered = False
        if transparent is not None:
            self._library.impl(short, transparent, "CompositeImplicitAutograd")
        else:
            self._register(short)
            if not self.signature.written:
                self._in_library = CallsInLibrary(self.op, self.signature, only_recorded=differentiable)
            self._resolve()
        compile_cache.remember(self.name, reference)
        defined_ops[self.name] = self

    @functools.cached_property
    def op(self) -> Any:
        """The operator, an ``OpOverload``, made at first use, because that takes as long as the rest of a formula."""
        namespace, _, packet = self.signature.name.partition("::")
        overload = self.signature.schema.overload_name or "default"
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or kwargs or (call := self._tracked_call) is None:
            return self.op(*args, **kwargs)
        found = call(args)
        return self.op(*args) if found is NotImplemented else found

    def __repr__(self) -> str:
        return f"<CustomOp {self.signature.schema}>"

    def __reduce__(self) -> Any:
        if defined_ops.get(self.name) is not self:
            raise pickle.PicklingError(f"{self.name} was redefined, and an op is copied and pickled by its name")
        return _named, (self.name,)

    def _read(self, schema: str) -> Signature:
        return Signature(schema, functional=True)

    def _register(self, short: str) -> None:
        """Register the indirections, once: each looks up the current implementation when it is called."""
        library = self._library
        library.impl(short, skipped_by_dynamo(self._kernel_of("default")), "CompositeExplicitAutograd")
        kernel = skipped_by_dynamo(self.kernel)
        if self._calls is not None:
            kernel = skipped_by_dynamo(self._calls.checking(kernel, skipped=1))
        library.impl(short, kernel, "Autograd", with_keyset=True)
        library.impl(short, skipped_by_dynamo(self._run_vmap), "FuncTorchBatched")
        register_fake(library, short, self._run_fake, location_of(self.reference))

    def undefine(self) -> None:
        """Unregister the op and its implementations. No call may be in flight."""
        with activation.lock:
            if self._in_library is not None:
                self._in_library.detach()
            release(self._library)
            del defined_ops[self.name]
            compile_cache.put(self.name, "")
            compile_cache.put(f"{self.name} redefined", str(next(count)))  # graphs contain its derivatives

    # -- registration -------------------------------------------------------------------------------------------

    def impl(self, device: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the kernel for one type of device, or a new reference.

        Args:
            device: "cpu", "cuda", ...; "default" for the reference.

        Returns:
            A decorator, which returns the function.

        Raises:
            ValueError: the type of device is unknown.
        """
        if device != "default" and device not in DEVICE_KEYS:
            raise ValueError(f"device {device!r} is unknown; expected one of {['default', *DEVICE_KEYS]}")
        return lambda function: self._put(device, function)

    def impl_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the function for shapes, dtypes and strides of the outputs; by default the reference."""
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

        ``saved`` is the result of `impl_save_for_backward`. A formula needs none: ``saved`` is then the named tuple of
        inputs.

        An undefined cotangent is None. The result has a key for every tensor argument, with a list of gradients for a
        list of tensors; None is a gradient of zero.

        Args:
            function: the backward; without it, a decorator is returned.
            output_differentiability: for each output (a list counts as one) whether gradients flow into it.
                Default: all tensors.

        Raises:
            RuntimeError: ``output_differentiability`` does not fit the outputs.
            TypeError: the function has the wrong parameters.
        """
        marks = differentiability(self.name, self.signature, output_differentiability)
        if function is None:
            return lambda f: self._put("backward", f, marks)
        return self._put("backward", function, marks)

    def impl_jvp(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register ``(inputs, output, tangents) -> tangents of the outputs``. ``inputs`` and ``tangents`` are named
        tuples; an input without a tangent has None there, and None is returned for a tangent of zero. It is
        differentiated again for higher orders: compute everything from ``inputs`` and ``output``."""
        return self._put("jvp", function)

    def impl_autograd(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register a whole autograd kernel ``(*args, **kwargs) -> output``, which takes precedence.

        Inside it, reach the op itself through `below_autograd`, and derive autograd functions from
        `SingleLevelFunction`.
        """
        return self._put("autograd", function)

    def swap(self, **implementations: Any) -> Swap:
        """Swap implementations temporarily: ``with op.swap(backward=f, jvp=None): ...``.

        Swaps nest, act on the whole process, and may end in any order. Of several, also from different threads, the
        last one entered wins. A call keeps the backward that it ran with.

        Args:
            implementations: ``backward``, ``save_for_backward``, ``jvp``, ``autograd``, ``vmap``, ``fake``, ``default``
                or a type of device, each a function, or None for "as if none were registered".
                ``output_differentiability`` belongs to ``backward``; by default that of the registered one.

        Returns:
            A reusable context.

        Raises:
            TypeError: no such kind of implementation, or not a function.
        """
        return Swap([(self, exchange(self.name, self.signature, self._base, implementations))])

    def below_autograd(self, *args: Any, **kwargs: Any) -> Any:
        """The op without its autograd kernel at this level, for use inside an `impl_autograd`."""
        with torch.enable_grad(), forward_ad_enabled(True), below_autograd():
            return self.op(*args, **kwargs)

    def cover(self) -> None:
        """Send all calls through the dispatcher from now on: another kernel will cover the op's own."""
        with activation.lock:
            self._covered = True
            self._resolve()

    def _put(self, kind: str, function: Callable[..., Any], marks: tuple[bool, ...] | None = None) -> Any:
        if not callable(function):
            raise TypeError(f"{self.name}: the {kind} implementation must be a function, got {type(function).__name__}")
        if self.transparent:
            raise RuntimeError(
                f"{self.name} is transparent: autograd, vmap and the compiler see through its body, so it has no place "
                f"for a {kind} implementation"
            )
        made = implementation(self.name, self.signature, kind, function, marks)
        with activation.lock:
            self._base[kind] = made
            self._first.setdefault(kind, self._base[kind].identity)
            compile_cache.remember(f"{self.name} {kind}", function)
            self._resolve()
        return function

    def _push(self, layer: dict[str, Implementation | None]) -> None:
        with activation.lock:
            self._layers = [*self._layers, layer]
            self._resolve()

    def _pop(self, layer: dict[str, Implementation | None]) -> None:
        with activation.lock:
            self._layers = [other for other in self._layers if other is not layer]
            self._resolve()

    def _resolve(self) -> None:
        """Select among the registrations. Readers see either the old state or the new one."""
        current: dict[str, Implementation | None] = dict(self._base)
        for layer in self._layers:
            current.update(layer)
        self._current = {kind: i for kind, i in current.items() if i is not None}
        for device in (current.keys() & DEVICE_KEYS.keys()) - self._device_keys:
            self._device_keys.add(device)
            self._library.impl(self.__name__, self._kernel_of(device), DEVICE_KEYS[device])
        rules = self.selected = select(
            self.name, self.op, self.signature, self._current, self.reference if self._differentiable else None
        )
        by_pair = isinstance(rules.derivative, SavedBackward) and not self._covered
        self._tracked_call = tracked_call(rules.derivative) if by_pair else None  # type: ignore[arg-type]
        if self._in_library is not None:
            batched = self._differentiable and "vmap" not in self._current
            self._in_library.act(rules.error is None and rules.autograd is None, batched)
        # the changes since the first registrations: graphs compiled under those must not be used now
        now = {kind: i.identity for kind, i in self._current.items()}
        differs = [f"{k}={now.get(k)}" for k in sorted({*now, *self._first}) if now.get(k) != self._first.get(k)]
        code = [compile_cache.fingerprint(i.function) for i in self._current.values()] if differs else []
        compile_cache.put(self.name, " ".join(differs), " ".join(code))
        forget_recordings()

    # -- kernels ------------------------------------------------------------------------------------------------

    def kernel(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """The kernel at the key Autograd."""
        rules = self.selected
        values = with_tensors(self.signature, list(self.signature.bind(args, kwargs)))
        if rules.error is not None:
            raise RuntimeError(rules.error)
        if rules.autograd is not None:
            return self._whole(rules.autograd, args, kwargs)
        mode = differentiated(self.signature, values)
        if takes_body(self.op, values):
            return self.reference(*args, **kwargs)
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
        strong = running.mode is not None
        by_body = mode is Mode.DUAL and (strong or not rules.derivative.has_own_jvp) or transposing()
        if isinstance(rules.derivative, ReferenceDerivative) and by_body:
            args, kwargs = self.signature.split(values)
            return self.reference(*args, **kwargs)
        if mode is Mode.DUAL:
            followed = rules.derivative.has_own_jvp
        else:
            followed = isinstance(rules.derivative, ReferenceDerivative) or not any(rules.derivative.differentiable)
        if followed and self._in_library:
            self._in_library.track(rules.derivative)
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

    def _kernel_of(self, device: str) -> Callable[..., Any]:
        """The kernel below autograd for one type of device, or "default"."""

        rules = self._rules

        def run(*args: Any, **kwargs: Any) -> Any:
            current = self._current
            chosen = current.get(device) or current.get("default", self._base["default"])
            if rules is not None:
                rules.check(self.signature, self.signature.bind(args, kwargs), current)
            if bits_unread():  # under a mode or in a subclass the function would read A.mH as A.mT
                with reading_bits():
                    result = chosen.function(*args, **kwargs)
            else:
                result = chosen.function(*args, **kwargs)
            # results that do not fit the schema, or share memory with an input
            if not (self._one_tensor and isinstance(result, Tensor)) or shares_memory(args, kwargs, (result,)):
                check_outputs(self.name, self.signature, chosen.location, args, kwargs, result)
            return result

        return run if self._calls is None else skipped_by_dynamo(self._calls.checking(skipped_by_dynamo(run)))

    def _run_fake(self, *args: Any, **kwargs: Any) -> Any:
        fake = self._current.get("fake")
        if self._rules is not None:
            self._rules.check(self.signature, self.signature.bind(args, kwargs), self._current, fake=True)
        run = self._run_reference_on_fake if fake is None else fake.function
        with transforms_usable_on_fake() if is_foreign(self.reference) else nullcontext():
            return run(*args, **kwargs)

    def _run_reference_on_fake(self, *args: Any, **kwargs: Any) -> Any:
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
        if self._differentiable and "vmap" not in self._current:  # on batched tensors, whose own vmap rules do the rest
            if self._batched and not is_followed_outside(list(tensors_in((*args, *kwargs.values())))):
                return self._current["default"].function(*args, **kwargs)
            with transforms_usable() if is_foreign(self.reference) else nullcontext():
                return self.reference(*args, **kwargs)

        def call(*values: Any) -> Any:
            positional, keywords = self.signature.split(values)
            return self.op(*positional, **keywords)

        def rule(info: Any, in_dims: Sequence[Any], *values: Any) -> tuple[Any, Any]:
            chosen = self._current.get("vmap")
            positional, keywords = self.signature.split(values)
            if chosen is not None:
                with transforms_usable_below() if is_foreign(chosen.function) else nullcontext():
                    found = chosen.function(info, self.signature.Inputs(*in_dims), *positional, **keywords)
                return batches(f"{self.name}: impl_vmap", found, info.batch_size)
            return loop(self.name, self.signature, call, info, in_dims, values)

        found = vmap_call(rule, call, self.signature.bind(args, kwargs))
        return found if self.signature.returns else None


def _named(name: str) -> CustomOp:
    """The op of this name: an op is copied and pickled by its name, because there is one of each."""
    op: CustomOp | None = defined(name)
    if op is None:
        raise pickle.UnpicklingError(f"{name} is not defined in this process. Import the module that defines it.")
    return op


class Swap:
    """Temporary implementations; see `CustomOp.swap`.

    A signal may interrupt `__enter__` and `__exit__` at any line, or arrive before the first line of `__exit__`. Layers
    left active then end with this object.
    """

    def __init__(self, parts: Sequence[tuple[CustomOp, dict[str, Implementation | None]]]) -> None:
        self._parts = parts
        self._entered: list[list[tuple[CustomOp, dict[str, Implementation | None]]]] = []

    def __enter__(self) -> CustomOp:
        layers = [(op, dict(layer)) for op, layer in self._parts]
        self._entered.append(layers)
        for op, layer in layers:
            op._push(layer)
        return layers[0][0]

    def __exit__(self, *exception: object) -> None:
        self._pop(self._entered[-1])
        del self._entered[-1]

    def __del__(self) -> None:
        for layers in self.__dict__.get("_entered", ()):
            self._pop(layers)

    def _pop(self, layers: Sequence[tuple[CustomOp, dict[str, Implementation | None]]]) -> None:
        for op, layer in layers:
            op._pop(layer)


def current_derivative(name: str) -> Derivative | None:
    """The current derivative of the custom op of this name; None for another operator, or without one."""
    op: CustomOp | None = defined(name)
    return None if op is None else op.selected.derivative
