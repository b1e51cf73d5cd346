"""Tensor subclasses and modes of dispatch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from rows import Call
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from torch_manualgrad.testing.numerics.arithmetic import inner

from .base import Numbers, first, gradient, named, second, total, variables, way
from .batched import REAL, pullback
from .strides import pulled


@way("TwoTensor", first, dtypes=REAL)
def two_tensor(c: Call) -> Numbers:
    """Real only: the class drops the bit for conjugation, and stock's complex numbers are wrong with it."""
    from torch.testing._internal.two_tensor import TwoTensor

    p = c.problem
    xs = [TwoTensor(x.detach().clone(), x.detach().clone()).requires_grad_() for x in p.primals]
    out = p.call(*xs)
    forward = [o.detach().b if isinstance(o, TwoTensor) else o.detach() for o in out]
    grads = gradient(total(p, out), xs)
    return named("forward", forward) | named("gradient", [g.b if isinstance(g, TwoTensor) else g for g in grads])


class Named(torch.Tensor):
    """A subclass with PyTorch's own ``__torch_function__``, which keeps the class."""


@way("__torch_function__ subclass", first)
def function_subclass(c: Call) -> Numbers:
    p = c.problem
    xs = [x.detach().clone().as_subclass(Named).requires_grad_() for x in p.primals]
    out = p.call(*xs)
    types = [type(o).__name__ for o in out]
    forward = [o.detach().as_subclass(Tensor).clone() for o in out]
    grads = [g.as_subclass(Tensor) for g in gradient(total(p, out), xs)]
    return named("forward", forward) | named("gradient", grads) | {"types": types}


class Wrapper(torch.Tensor):
    """Holds a tensor and passes every operator on to it; carries the bits for conjugation and negation of what it holds."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            dtype=held.dtype,
            device=held.device,
            requires_grad=held.requires_grad,
        )
        torch._C._set_conj(made, held.is_conj())
        torch._C._set_neg(made, held.is_neg())
        return made

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inside = func(
            *tree_map_only(Wrapper, lambda x: x.held, args), **tree_map_only(Wrapper, lambda x: x.held, kwargs)
        )
        return return_and_correct_aliasing(func, args, kwargs, tree_map_only(Tensor, Wrapper, inside))


def unwrapped(x: Tensor) -> Tensor:
    return (x.held if isinstance(x, Wrapper) else x).resolve_conj().resolve_neg()


def wrapped(c: Call, make: Callable[[Tensor], Tensor] = lambda x: x.detach().clone()) -> Numbers:
    p = c.problem
    xs = [Wrapper(make(x)).requires_grad_() for x in p.primals]
    out = p.call(*xs)
    forward = [unwrapped(o.detach()) for o in out]
    found = named("output", forward) | named("gradient", [unwrapped(g) for g in gradient(total(p, out), xs)])
    try:
        seconds = gradient(inner(gradient(total(p, p.call(*xs)), xs, create_graph=True), p.u), xs)
    except Exception as error:
        return found | {"hessian": error}
    return found | named("hessian", [unwrapped(g) for g in seconds])


def outputs_and_second(c: Call) -> Numbers:
    return {k.replace("forward", "output"): v for k, v in second(c).items()}


way("wrapper subclass", outputs_and_second)(wrapped)
way("wrapper subclass, lazily conjugated inside", outputs_and_second)(
    lambda c: wrapped(c, lambda x: x.detach().conj().resolve_conj().conj())
)


class Passing(TorchDispatchMode):
    """Sees every operator and passes it on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@way("TorchDispatchMode", second)
def dispatch_mode(c: Call) -> Numbers:
    with Passing():
        return second(c)


@way("TorchDispatchMode in the backward only", first)
def dispatch_mode_in_backward(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    out = p.call(*xs)
    forward = [o.detach().clone() for o in out]
    value = total(p, out)
    with Passing():
        grads = gradient(value, xs)
    return named("forward", forward) | named("gradient", grads)


@way("FlopCounterMode", second)
def flops(c: Call) -> Numbers:
    from torch.utils.flop_counter import FlopCounterMode

    p = c.problem
    xs = variables(p)
    with FlopCounterMode(display=False) as forward:
        out = p.call(*xs)
        value = total(p, out)
    with FlopCounterMode(display=False) as backward:
        gradient(value, xs)
    with FlopCounterMode(display=False):
        numbers = second(c)
    counted = {"flops of the forward": forward.get_total_flops(), "backward counted": backward.get_total_flops() > 0}
    return {**numbers, **counted}


class Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@way("TorchFunctionMode", second)
def function_mode(c: Call) -> Numbers:
    with Watching():
        return second(c)


def forward_and_ones(c: Call) -> Numbers:
    ones = {k.replace("gradient", "ones"): v for k, v in pulled(c).items()}
    return {**first(c), **ones, **tangents(c)}


def tangents(c: Call) -> Numbers:
    p = c.problem
    try:
        with fwAD.dual_level():
            out = p.call(*(fwAD.make_dual(x, u) for x, u in zip(p.primals, p.u)))
            return named("tangent", [fwAD.unpack_dual(o).tangent for o in out])
    except Exception as error:
        return {"tangent": error}


@way("default device meta", forward_and_ones)
def default_device(c: Call) -> Numbers:
    """Tensors that the derivative makes are where its inputs are."""
    p = c.problem
    xs = variables(p)
    with torch.device("meta"):
        out = p.call(*xs)
        grads = pullback(out, xs, [torch.ones_like(o) for o in out])
        forward = [o.detach().clone() for o in out]
        return {**named("forward", forward), **named("ones", grads), **tangents(c)}


def with_default_dtype(c: Call) -> Numbers:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        return second(c)
    finally:
        torch.set_default_dtype(before)


way("default dtype float16", second)(with_default_dtype)


@way("autocast", None, dtypes=(torch.float32,), rtol=3e-2)
def autocast(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = p.call(*xs)
    dtypes = [o.dtype for o in out]
    forward = [o.detach().clone() for o in out]
    grads = pullback(out, xs, [torch.ones_like(o) for o in out])
    return named("forward", forward) | named("gradient", grads) | {"dtypes": dtypes}


@way("autocast around the backward too", None, dtypes=(torch.float32,), rtol=2e-1)
def autocast_everywhere(c: Call) -> Numbers:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return autocast(c)


@way("anomaly mode", second)
def anomaly(c: Call) -> Numbers:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly(check_nan=True):
            return second(c)


@way("warnings are errors", second)
def no_warnings(c: Call) -> Numbers:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return second(c)


@way("deterministic algorithms", second)
def deterministic(c: Call) -> Numbers:
    torch.use_deterministic_algorithms(True)
    try:
        return second(c)
    finally:
        torch.use_deterministic_algorithms(False)


@way("state of the random generator", None)
def generator_state(c: Call) -> Numbers:
    if c.problem.random:
        raise RuntimeError("draws random numbers")
    before = torch.get_rng_state()
    second(c)
    return {"untouched": bool(torch.equal(before, torch.get_rng_state()))}
