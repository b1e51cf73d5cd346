"""Valid calls of every formula: the arguments that it receives while rules run on their samples."""

from __future__ import annotations

import itertools
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.core.internals import DispatchMode, pytree
from torch_manualgrad.core.rule import Formula

from .calls import Target
from .mutations import guarded

#: Entries of a tensor that is recorded at most.
LARGEST = 4096


def recorded(
    public: Sequence[Target] = (), names: Sequence[str] | None = None, samples: int = 3, kept: int = 6
) -> dict[str, list[list[Any]]]:
    """Calls of the formulas, each as a list of all values.

    Args:
        public: public functions, whose valid calls are run too.
        names: of rules; None for all of them.
        samples: of each rule, in float64 and in complex128.
        kept: calls of each formula at most.

    Returns:
        Formula name -> its calls.
    """
    found: dict[str, list[list[Any]]] = {}
    bodies: dict[types.CodeType, Formula] = {}
    for f in mg.ops.values():
        for function in (f.reference, f._current["default"].function):
            code = getattr(function, "__code__", None)
            if code is not None:
                bodies[code] = f

    def profile(frame: types.FrameType, event: str, _: Any) -> None:
        if event != "call" or (f := bodies.get(frame.f_code)) is None:
            return
        if frame.f_locals.keys() >= {*f.signature.names}:
            keep(f, [frame.f_locals[n] for n in f.signature.names])

    def keep(f: Formula, values: Sequence[Any]) -> None:
        calls = found.setdefault(f.name, [])
        if len(calls) < kept:
            try:
                copies = [_copy(v) for v in values]
            except (RuntimeError, NotImplementedError):
                return
            if _is_small(copies):
                calls.append(copies)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in list(mg.rules) if names is None else names:
            rule = mg.rules[name]
            with mg.override("*"):
                for run in _programs(rule, samples):
                    _profiled(run, profile)
        with _Opaque(keep):
            for target in public:
                if not target.name.startswith(("mg.nested", "mg.linalg")):
                    continue  # they call no formulas of their own
                for args, kwargs in target.bases:
                    sample = mg.Sample(*guarded(args), **kwargs)
                    _profiled(lambda f=target.function, sample=sample: _reverse(f, sample), profile)
    return found


def _profiled(run: Callable[[], Any], profile: Any) -> None:
    sys.setprofile(profile)
    try:
        run()
    except Exception:  # a gap of a rule
        pass
    finally:
        sys.setprofile(None)


class _Opaque(DispatchMode):
    """Sees the formulas that run in C++."""

    def __init__(self, keep: Callable[[Formula, Sequence[Any]], None]) -> None:
        super().__init__()
        self._keep = keep

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "manualgrad" and name in mg.ops:
            formula = mg.ops[name]
            values = formula.signature.bind(args, kwargs or {})
            if len(values) == len(formula.signature.names):
                self._keep(formula, values)
        return func(*args, **(kwargs or {}))


def _programs(rule: Any, samples: int) -> Iterator[Callable[[], Any]]:
    call = rule.probe or rule.aten
    for dtype in (torch.float64, torch.complex128):
        try:
            given = list(itertools.islice(rule.samples(dtype, "cpu"), samples)) if rule.samples else []
        except Exception:
            continue
        for sample in given:
            yield lambda sample=sample: _reverse(call, sample)
            yield lambda sample=sample: _forward(call, sample)


def _reverse(call: Callable[..., Any], sample: Any) -> None:
    """First and second order."""
    inputs: list[Tensor] = []

    def prepare(x: Any) -> Any:
        if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
            x = x.detach().requires_grad_()
            inputs.append(x)
        return x

    args, kwargs = pytree.tree_map(prepare, (sample.args, sample.kwargs))
    outputs = [x for x in pytree.tree_leaves(call(*args, **kwargs)) if _tracked(x)]
    grads = torch.autograd.grad(
        outputs, inputs, [torch.ones_like(x) for x in outputs], create_graph=True, allow_unused=True
    )
    second = [g for g in grads if g is not None and _tracked(g)]
    if second:
        torch.autograd.grad(second, inputs, [torch.ones_like(g) for g in second], allow_unused=True)


def _forward(call: Callable[..., Any], sample: Any) -> None:
    """Forward mode, and reverse mode of it."""
    inputs: list[Tensor] = []

    def prepare(x: Any) -> Any:
        if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
            x = x.detach().requires_grad_()
            inputs.append(x)
            return torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        return x

    with torch.autograd.forward_ad.dual_level():
        args, kwargs = pytree.tree_map(prepare, (sample.args, sample.kwargs))
        leaves = [x for x in pytree.tree_leaves(call(*args, **kwargs)) if isinstance(x, Tensor)]
        tangents = [torch.autograd.forward_ad.unpack_dual(x).tangent for x in leaves]
        tangents = [t for t in tangents if t is not None and _tracked(t)]
        if tangents:
            torch.autograd.grad(tangents, inputs, [torch.ones_like(t) for t in tangents], allow_unused=True)


def _tracked(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise NotImplementedError
        with torch.no_grad():
            return torch.autograd.forward_ad.unpack_dual(value).primal.detach().clone()
    if isinstance(value, (list, tuple)):
        return [_copy(v) for v in value]
    return value


def _is_small(values: list[Any]) -> bool:
    return all(
        x.layout is not torch.strided or x.numel() <= LARGEST
        for x in pytree.tree_leaves(values)
        if isinstance(x, Tensor)
    )
