"""Derivatives of every order and mode of a function of tensors, as lists to be compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD

MODES = ["rev", "fwd", *map("".join, itertools.product(["rev", "fwd"], repeat=2))]
MODES += ["".join(m) for m in itertools.product(["rev", "fwd"], repeat=3)]


def outputs_of(result: Any) -> list[torch.Tensor]:
    flat = result if isinstance(result, (tuple, list)) else [result]
    return [o for o in flat if isinstance(o, torch.Tensor)]


def directions(tensors: Sequence[torch.Tensor], phase: float) -> list[torch.Tensor]:
    made = []
    for t in tensors:
        steps = torch.arange(t.numel(), dtype=torch.float64) + phase
        made.append((steps.sin() + 1.3).reshape(t.shape).to(t.device, t.dtype))
    return made


def bent(derivative: torch.Tensor) -> torch.Tensor:
    """A nonlinear function of a derivative, so that the next one is not a constant.

    The derivative is divided by a constant, because the sine of a large number is as wrong as that number.
    """
    mean = derivative.detach().abs().sum() / max(derivative.numel(), 1)
    return (1 + derivative / (1 + mean)).sin()


def differentiated(f: Callable[..., Any], mode: str) -> Callable[..., list[torch.Tensor]]:
    """One derivative of a function, outer last: a function of the same inputs. Reverse mode with ``torch.autograd.grad``."""
    if mode == "rev":

        def rev(*inputs: torch.Tensor) -> list[torch.Tensor]:
            outputs = [o for o in outputs_of(f(*inputs)) if o.requires_grad]
            if not outputs:
                return []
            found = torch.autograd.grad(
                outputs, inputs, directions(outputs, 0.5), create_graph=True, materialize_grads=True
            )
            return [bent(g) for g in found]

        return rev

    def fwd(*inputs: torch.Tensor) -> list[torch.Tensor]:
        duals = [fwAD.make_dual(x, t) for x, t in zip(inputs, directions(inputs, 0.2))]
        pairs = [fwAD.unpack_dual(o) for o in outputs_of(f(*duals)) if o.is_floating_point()]
        return [bent(torch.zeros_like(p) if t is None else t) for p, t in pairs]  # PyTorch has None for some zeros

    return fwd


def transformed(f: Callable[..., Any], mode: str) -> Callable[..., list[torch.Tensor]]:
    """The same with torch.func, where forward mode nests."""

    def smooth(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(o for o in outputs_of(f(*inputs)) if o.is_floating_point())

    def rev(*inputs: torch.Tensor) -> list[torch.Tensor]:
        outputs, pullback = torch.func.vjp(smooth, *inputs)
        return [bent(g) for g in pullback(tuple(directions(outputs, 0.5)))]

    def fwd(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return [bent(t) for t in torch.func.jvp(smooth, inputs, tuple(directions(inputs, 0.2)))[1]]

    return rev if mode == "rev" else fwd


def derivatives(f: Callable[..., Any], inputs: Sequence[torch.Tensor], mode: str) -> list[torch.Tensor]:
    """The values of a function, differentiated in modes that nest: the inner first, three letters each.

    Dual numbers have one level, so two or more forward modes are those of torch.func.
    """
    steps = [mode[i : i + 3] for i in range(0, len(mode), 3)]
    nests = steps.count("fwd") > 1
    g = f
    for step in steps:
        g = (transformed if nests else differentiated)(g, step)
    if nests:
        return list(g(*inputs))
    with fwAD.dual_level() if "fwd" in steps else nullcontext():
        return [x.detach() for x in outputs_of(g(*[x.clone().requires_grad_() for x in inputs]))]
