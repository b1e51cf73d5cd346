"""Checkpoints, offloading, and other hooks on saved tensors."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from rows import Call
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torch_manualgrad as mg
from torch_manualgrad.testing.comparison.problem import Problem

from .base import Numbers, first, gradient, named, once, second, total, twice, variables, way
from .compilers import accumulated


def chain(p: Problem, before: bool, after: bool) -> Callable[..., tuple[Tensor, ...]]:
    """The function between products by one, whose nodes save tensors too."""

    def f(*xs: Tensor) -> tuple[Tensor, ...]:
        out = p.call(*(x * torch.ones_like(x) for x in xs) if before else xs)
        return tuple(o * torch.ones_like(o) for o in out) if after else out

    return f


PLACES = {"alone": (False, False), "first": (False, True), "last": (True, False), "in the middle": (True, True)}


def checkpointed(c: Call, places: tuple[bool, bool], **options: Any) -> Numbers:
    f = chain(c.problem, *places)
    return once(c.problem, lambda *xs: checkpoint(f, *xs, **options))


for place, places in PLACES.items():
    way(f"checkpoint, {place}", first)(partial(checkpointed, places=places, use_reentrant=False))


@way("checkpoint, reentrant", first)
def checkpointed_reentrant(c: Call) -> Numbers:
    """By `backward`, as such a checkpoint refuses autograd.grad."""
    p = c.problem
    xs = variables(p)
    out = checkpoint(chain(p, True, True), *xs, use_reentrant=True)
    forward = [o.detach().clone() for o in out]
    total(p, out).backward()
    return named("forward", forward) | named("gradient", [accumulated(x) for x in xs])


@way("checkpoint, twice differentiated", second)
def checkpointed_twice(c: Call) -> Numbers:
    p = c.problem
    f = chain(p, True, True)
    call = partial(checkpoint, f, use_reentrant=False)
    return twice(p, call)


@way("checkpoint inside checkpoint", first)
def checkpointed_nested(c: Call) -> Numbers:
    call = partial(checkpoint, c.problem.call, use_reentrant=False)
    return once(c.problem, partial(checkpoint, lambda *xs: call(*xs), use_reentrant=False))


@way("checkpoint, selective", first)
def checkpointed_selectively(c: Call) -> Numbers:
    ours = {rule.aten for rule in mg.rules.values()}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in ours else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpointed(c, (True, True), use_reentrant=False, context_fn=contexts)


def hooked(c: Call, hooks: AbstractContextManager[Any]) -> Numbers:
    p = c.problem
    xs = variables(p)
    with hooks:
        out = p.call(*xs)
    forward = [o.detach().clone() for o in out]
    return named("forward", forward) | named("gradient", gradient(total(p, out), xs))


@way("saved tensors, offloaded", first)
def offloaded(c: Call) -> Numbers:
    return hooked(c, save_on_cpu())


@way("saved tensors, packed to bytes", first)
def packed(c: Call) -> Numbers:
    def unpack(data: bytes) -> Any:
        return torch.load(io.BytesIO(data))

    def pack(x: Tensor) -> bytes:
        stream = io.BytesIO()
        torch.save(x.detach(), stream)
        return stream.getvalue()

    return hooked(c, saved_tensors_hooks(pack, unpack))


@way("saved tensors, hooks that differentiate", first)
def hooks_that_differentiate(c: Call) -> Numbers:
    """What a hook computes is recorded where it asks for that, as in a backward of stock's."""
    p = c.problem

    def unpack(x: Tensor) -> Tensor:
        with torch.enable_grad():
            inputs = variables(p)
            (slope,) = torch.autograd.grad(total(p, p.call(*inputs)), inputs[0])
            one = torch.ones((), dtype=torch.float64, requires_grad=True)
            (factor,) = torch.autograd.grad(one * 1, one)
        assert slope.shape == inputs[0].shape
        return x * factor.to(x.dtype) if x.is_floating_point() or x.is_complex() else x

    return hooked(c, saved_tensors_hooks(lambda x: x.detach(), unpack))


@way("saved tensors, second order through hooks", second)
def hooks_and_second_order(c: Call) -> Numbers:
    p = c.problem
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        return twice(p, p.call)
