"""Proofs of what rules claim over PyTorch's own derivatives: a module for each family, and what they share.

Each module has PROOFS: operator -> claim -> functions of the rule that return "ok", "wrong" or "raises".
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
from helpers.tensors import random
from torch.func import grad, jvp

from torch_manualgrad.testing import check

F64 = torch.float64


def own(mode, dtype=F64):
    """The rule's own samples in one mode: ok, wrong or raises."""

    def outcome(rule):
        report = check(
            rule.probe, rule.samples(dtype, "cpu"), modes=(mode,), checks=(), raise_on_failure=False, diagnose=False
        )
        return report.outcome(mode)

    return outcome


def point(compute, expected, rtol=1e-6):
    """A value at one place."""

    def outcome(rule):
        try:
            found = compute()
        except (RuntimeError, NotImplementedError):
            return "raises"
        return "ok" if torch.allclose(found, torch.as_tensor(expected, dtype=F64), rtol=rtol) else "wrong"

    return outcome


def tangent(f, *shape):
    """That there is a forward derivative."""
    x, t = random(*shape), random(*shape, seed=1)
    step = 1e-6
    return [point(lambda: jvp(f, (x,), (t,))[1], (f(x + step * t) - f(x - step * t)) / (2 * step))]


def derivatives(f, x, *expected):
    """The first derivatives of a function of one number at x, as far as they are given."""
    found = []
    for value in expected:
        f = grad(f)
        found.append(point(lambda f=f: f(scalar(x)), value))
    return found


def scalar(x):
    return torch.tensor(x, dtype=F64)


def proofs() -> dict[str, dict[str, list[Callable[..., str]]]]:
    """Those of all modules of this package."""
    found: dict[str, Any] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        for name, claims in importlib.import_module(module.name).PROOFS.items():
            assert name not in found, f"{name} is proven twice"
            found[name] = claims
    return found
