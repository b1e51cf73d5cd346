"""PyTorch's own tests of gradients, for the operators that reach a rule, run without its test runner.

``torch.testing._internal``, which every wheel of PyTorch has, holds the operator database and the checks that PyTorch's
test_ops_gradients, test_ops_fwd_gradients and test_ops put together; what they put together is here.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from torch_manualgrad.testing.database.opinfo import entries, reached

DTYPES = (torch.float64, torch.complex128)
PASSES, SKIPPED = "passes", "skipped"


class _Gradients:
    """What the checks of the database need from a test case."""

    def __init__(self) -> None:
        from torch.testing._internal.common_utils import TestGradients

        self.case = TestGradients()

    def check(self, op: Any, dtype: torch.dtype, variant: Any, kind: str, **options: Any) -> None:
        self.case._check_helper("cpu", dtype, op, variant, kind, **options)

    def in_place(self, op: Any) -> Any:
        return None if op.get_inplace() is None else self.case._get_safe_inplace(op.get_inplace())


def _grad(g: _Gradients, op: Any, dtype: torch.dtype) -> None:
    g.check(op, dtype, op.get_op(), "gradcheck")


def _grad_in_place(g: _Gradients, op: Any, dtype: torch.dtype) -> None:
    g.check(op, dtype, g.in_place(op), "gradcheck")


def _grad_grad(g: _Gradients, op: Any, dtype: torch.dtype) -> None:
    g.check(op, dtype, op.get_op(), "bwgrad_bwgrad")


def _grad_grad_in_place(g: _Gradients, op: Any, dtype: torch.dtype) -> None:
    g.check(op, dtype, g.in_place(op), "bwgrad_bwgrad")


def _forward_over_reverse(g: _Gradients, op: Any, dtype: torch.dtype) -> None:
    g.check(op, dtype, op.get_op(), "fwgrad_bwgrad")


def _forward(g: _Gradients, op: Any, dtype: torch.dtype) -> None:
    _forward_of(g, op, dtype, op.get_op())


def _forward_in_place(g: _Gradients, op: Any, dtype: torch.dtype) -> None:
    _forward_of(g, op, dtype, g.in_place(op))


def _forward_of(g: _Gradients, op: Any, dtype: torch.dtype, variant: Any) -> None:
    batched = op.check_batched_forward_grad
    g.check(
        op,
        dtype,
        variant,
        "gradcheck",
        check_forward_ad=True,
        check_backward_ad=False,
        check_batched_grad=False,
        check_batched_forward_grad=batched,
    )


def _compliance(kind: str) -> Callable[[_Gradients, Any, torch.dtype], None]:
    """The formula runs on a wrapper subclass that refuses what a composite must not do, and gives the same numbers."""

    def check(g: _Gradients, op: Any, dtype: torch.dtype) -> None:
        from torch.testing._internal import composite_compliance

        for sample in op.sample_inputs("cpu", dtype, requires_grad=True):
            args = [sample.input, *sample.args]
            options = (op.gradcheck_wrapper, g.case.assertEqual)
            if kind == "backward":
                composite_compliance.check_backward_formula(
                    op.get_op(), args, sample.kwargs, sample.output_process_fn_grad, *options
                )
            else:
                composite_compliance.check_forward_ad_formula(op.get_op(), args, sample.kwargs, *options)

    return check


TESTS: dict[str, Callable[[_Gradients, Any, torch.dtype], None]] = {
    "fn_grad": _grad,
    "inplace_grad": _grad_in_place,
    "fn_gradgrad": _grad_grad,
    "inplace_gradgrad": _grad_grad_in_place,
    "fn_fwgrad_bwgrad": _forward_over_reverse,
    "forward_mode_AD": _forward,
    "inplace_forward_mode_AD": _forward_in_place,
    "composite compliance, backward": _compliance("backward"),
    "composite compliance, forward_ad": _compliance("forward"),
}


def run(name: str, dtype: torch.dtype, test: str, context: AbstractContextManager[Any]) -> dict[str, str]:
    """Variant of the operator -> passes, skipped, or the error in a line."""
    import unittest

    found: dict[str, str] = {}
    for op in entries(name):
        if dtype not in op.supported_backward_dtypes("cpu") or not op.supports_autograd:
            continue
        op = copy.copy(op)
        torch.manual_seed(0)
        with context, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                TESTS[test](_Gradients(), op, dtype)
                found[op.formatted_name] = PASSES
            except unittest.SkipTest:
                found[op.formatted_name] = SKIPPED
            except Exception as error:
                lines = [line for line in str(error).strip().splitlines() if line.strip()] or [""]
                found[op.formatted_name] = f"{type(error).__name__}: {lines[0][:200]}"
    return found


def names() -> list[str]:
    """The database's names of the operators that reach a rule."""
    return list(dict.fromkeys(reached()))
