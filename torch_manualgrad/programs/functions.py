"""Functions of lists of tensors: their vjps and jvps, with other arguments, and under the autocast of another call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..core.forward import is_in_forward_ad
from ..core.internals import is_autocast_enabled, only_autograd_and_own_levels

__all__ = ["Values", "in_this_autocast", "matching", "placed", "pull_back", "push_forward"]

Values = Sequence[Tensor]


def placed(values: Sequence[Any], places: Sequence[int], changed: Sequence[Any]) -> list[Any]:
    """The values, with those at ``places`` replaced."""
    made = list(values)
    for i, x in zip(places, changed):
        made[i] = x
    return made


def matching(values: Values, like: Values) -> list[Tensor]:
    """The values in the dtypes of other tensors."""
    return [v if v.dtype == x.dtype else v.to(x.dtype) for v, x in zip(values, like)]


def pull_back(function: Callable[..., Values], primals: Values) -> tuple[Values, Callable[[Values], Values]]:
    """The results of a function, and its vjp, which can be called repeatedly."""
    state: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    if only_autograd_and_own_levels():
        if not torch.is_inference_mode_enabled():
            return _plain_pull_back(function, primals)
        state = functools.partial(torch.inference_mode, False)  # it excludes autograd, whatever the grad mode
    with state():
        pair: Any = torch.func.vjp(lambda *values: tuple(function(*values)), *primals)
    results, pull = pair

    def vjp(cotangents: Values) -> Values:
        with state():
            found: Any = pull(tuple(matching(cotangents, results)))
        return found

    return results, vjp


def _plain_pull_back(function: Callable[..., Values], primals: Values) -> tuple[Values, Callable[[Values], Values]]:
    """`pull_back` in plain autograd: faster, and also for compressed sparse tensors, which torch.func cannot wrap."""
    tracked = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = [x.view_as(x) if tracked and x.requires_grad else _untracked(x).requires_grad_() for x in primals]
        results = tuple(function(*inputs))

    def vjp(cotangents: Values) -> Values:
        pairs = [(r, c) for r, c in zip(results, matching(cotangents, results)) if r.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(inputs)
        if pairs:
            outputs, given = zip(*pairs)
            create = torch.is_grad_enabled()
            found = torch.autograd.grad(
                outputs, inputs, given, retain_graph=True, create_graph=create, allow_unused=True
            )
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs)]

    return results, vjp


def _untracked(x: Tensor) -> Tensor:
    """The tensor without a history, and with its tangents."""
    if not is_in_forward_ad(x):
        return x.detach()
    with torch.no_grad():
        return x.clone()


def push_forward(function: Callable[..., Values], primals: Values, tangents: Values) -> Values:
    """The jvp, as the vjp of the vjp, so that no operator needs forward mode."""
    results, pull = pull_back(function, primals)
    point = [torch.ones_like(r) for r in results]  # the same at every point: the vjp is linear
    return pull_back(lambda *cotangents: pull(cotangents), point)[1](matching(tangents, primals))


def in_this_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under the current autocast, even if it is called later; solvers run without autocast."""
    if not is_autocast_enabled():
        return function
    types = [d for d in ("cpu", "cuda", "xpu", "mps") if torch.is_autocast_enabled(d)]
    dtypes = {d: torch.get_autocast_dtype(d) for d in types}

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for device, dtype in dtypes.items():
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
            return function(*args)

    return call
