"""Checks of a function on tensors without values: device meta, fake tensors, graphs of make_fx."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ...core.internals import DispatchMode, FakeTensorMode, NoMetaKernel
from ..comparison.context import Context
from ..comparison.passes import Pairs, both, compared, cotangents, gradients, labels, same, variables
from ..comparison.problem import Problem
from ..inputs import tree
from ..inputs.modules import called_with
from .transforms import other_layout, outputs_of, variants_of

T = TypeVar("T")


def fake(c: Context) -> None:
    """Outputs under fake tensors have the real ones' shape, dtype, device and strides.

    Not applicable if one of PyTorch's own operators has a result whose shape depends on values, such as ``nonzero``.
    """
    c.verdict("fake", "outputs", partial(other_fakes, c.problem, c.problem.leaves))


def other_fakes(p: Problem, leaves: Sequence[Any]) -> str | None:
    """The first difference between fake outputs and real ones; empty if there is none, None if this is not applicable."""

    def compute(watched: _Raising) -> str:
        real = outputs_of(p, leaves, raw=True)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, watched:
            fakes = outputs_of(p, [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in leaves], raw=True)
        return other_layout([f"output {j}" for j in range(len(real))], fakes, real)

    return _excused(compute, _Raising())


def meta(c: Context) -> None:
    """Outputs on device meta, and gradients of fake tensors, have the real ones' shape, dtype and strides.

    Not applicable if one of PyTorch's own operators has no meta kernel or has results that depend on values, or to sparse
    tensors, which have no meta kernels. A user's operator must have a fake kernel: a failure there is a failure of the
    function.
    """
    p = c.problem
    if _with_sparse(p):
        return
    c.verdict("meta", "outputs on meta", partial(_excused, partial(_outputs_on_meta, p), _Raising()))
    if p.applicable and c.gap("rev", "eager") is None:
        c.verdict("meta", "gradients of fakes", partial(_excused, partial(_gradients_of_fakes, p), _Raising()))


def _with_sparse(p: Problem) -> bool:
    return any(tree.is_sparse(x) for x in (*p.leaves, *p.base) if isinstance(x, Tensor))


class _Raising(DispatchMode):
    """Remembers the operator that raised, and whether some of its arguments had values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operator: Any = None
        self.mixed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            if self.operator is None:
                devices = [x.device.type for x in tree.tensors((args, kwargs)) if x.dim()]
                self.operator, self.mixed = func, "meta" in devices and set(devices) != {"meta"}
            raise

    def excuses(self, error: Exception) -> bool:
        """Whether the error comes from one of PyTorch's own operators that cannot run without values.

        The operator may also have been called with a tensor that has values, such as a tensor of a closure.
        """
        if self.operator is None or self.operator.namespace not in ("aten", "prims"):
            return False
        of_values = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        return self.mixed or isinstance(error, NoMetaKernel) or bool(of_values & set(self.operator.tags))


def _excused(compute: Callable[[_Raising], T | None], watched: _Raising) -> T | None:
    """The computed result; None if one of PyTorch's own operators cannot run."""
    try:
        return compute(watched)
    except Exception as error:
        if watched.excuses(error):
            return None
        raise


def _outputs_on_meta(p: Problem, watched: _Raising) -> str:
    other = p.at([_on_meta(x) for x in p.leaves])
    if isinstance(module := p.fn, torch.nn.Module):
        own = {name: _on_meta(x) for name, x in (*module.named_parameters(), *module.named_buffers())}
        other.fn = lambda *args, **kwargs: called_with(module, own, args, kwargs)
    with torch.no_grad(), watched:
        ours = other.flat(*other.primals)
    return other_layout(labels(p)[: len(p.base)], ours, p.base)


def _on_meta(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _gradients_of_fakes(p: Problem, watched: _Raising) -> str:
    xs, given = variables(p), cotangents(p)
    real = gradients(p, p.flat(*xs), xs, given)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        leaves = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in p.leaves]
        for i, x in zip(p.index, xs, strict=True):
            leaves[i] = mode.from_tensor(x.detach()).requires_grad_()
        other = p.at(leaves)
        with watched:
            outputs = other.flat(*other.primals)
            fake = gradients(p, outputs, other.primals, [mode.from_tensor(ct) for ct in given])
    return other_layout([f"gradient of {name}" for name in p.names], fake, real)


def traced(c: Context) -> None:
    """The graph of outputs and gradients that `make_fx` traces, against eager, at the sample and at a neighbour of it.

    The tracing modes are "real" and "symbolic". If a function reads values of its inputs behind the tracer's back, for
    example through NumPy, the sample's values become constants of the graph, which is then wrong at the neighbour. Not
    applicable if the tracer refuses because one of PyTorch's own operators depends on values (`Tensor.item`); if random
    numbers are drawn, so that two runs of the graph differ; or to sparse tensors, which the tracer does not take.
    """
    p = c.problem
    if _with_sparse(p) or (p.applicable and c.gap("rev", "eager")):
        return
    given = cotangents(p)
    neighbour = [variants_of(x, i)[1] for i, x in enumerate(p.primals)]

    def program(*inputs: Tensor) -> list[Tensor | None]:
        xs = [x.detach().requires_grad_() for x in inputs[: len(p.primals)]]
        return both(p, xs, inputs[len(p.primals) :])

    def pairs(tracing_mode: Any, watched: _Raising) -> Pairs | None:
        def traced(*inputs: Tensor) -> list[Tensor | None]:
            with watched:
                return program(*inputs)

        # tensors that the function holds itself are constants of the graph
        graph = make_fx(traced, tracing_mode=tracing_mode, _allow_non_fake_inputs=True)(*p.primals, *given)
        one, other = (graph(*p.primals, *given) for _ in range(2))
        if not all(same(a, b) for a, b in zip(one, other, strict=True)):
            return None
        found = []
        for where, at in (("", p.primals), (" at a neighbour of the sample that was traced", neighbour)):
            inputs = (*at, *given)
            found += [(f"{name}{where}", *two) for name, *two in compared(p, graph(*inputs), program(*inputs))]
        return found

    for tracing_mode in ("real", "symbolic"):
        watched = _Raising()
        c.equal("make_fx", tracing_mode, partial(_excused, partial(pairs, tracing_mode), watched))
        if watched.operator is not None:
            break  # the other one would refuse too
