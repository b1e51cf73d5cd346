"""Patterns of the operators in PyTorch's database, next to their dense derivatives: no entry may be missing."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from torch_manualgrad.core.internals import pytree
from torch_manualgrad.sparsity import PatternError
from torch_manualgrad.sparsity.detection import detect
from torch_manualgrad.testing.database.opinfo import op_db

# Their results depend on numbers that the operator, or its test, reads from the input.
REFUSED = {
    "cov": "compares a tensor",
    "istft": "compares sums of the window with 0",
    "linalg.lstsq": "the shapes of results depend on the rank",
    "nn.functional.gaussian_nll_loss": "raises if a variance is negative",
    "to_sparse": "the result is no dense tensor",
}
MOST, MOST_TWICE = 40, 12  # elements of an input, for first and for second derivatives
MOST_RESULTS = 500


def operators(dtype=torch.float64):
    return [op for op in op_db() if op.supports_autograd and dtype in op.supported_dtypes("cpu")]


def flat(out) -> Tensor:
    """All floating point results in one vector, complex ones as pairs."""
    found = [
        torch.view_as_real(x.resolve_conj()).reshape(-1) if x.is_complex() else x.reshape(-1)
        for x in pytree.tree_leaves(out)
        if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) and x.layout is torch.strided
    ]
    return torch.cat([x.to(torch.float64) for x in found])


def functions(op, dtype, most):
    """(function of one real tensor, that tensor), for each tensor of each sample and for all together, at most so many.

    A complex tensor is a function of its real and imaginary parts.
    """
    made = 0
    for sample in op.sample_inputs("cpu", dtype, requires_grad=False):
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        given = [k for k, x in enumerate(leaves) if isinstance(x, Tensor) and x.layout is torch.strided]
        given = [k for k in given if leaves[k].is_floating_point() or leaves[k].is_complex()]
        for places in [*([k] for k in given), *([given] if len(given) > 1 else [])]:
            parts = [flat(leaves[k].detach()) for k in places]
            if not 0 < sum(map(len, parts)) <= MOST:
                continue
            sizes = [len(part) for part in parts]

            def call(x, places=places, leaves=leaves, spec=spec, sample=sample, sizes=sizes):
                changed = [*leaves]
                for k, part in zip(places, x.split(sizes)):
                    pairs = torch.view_as_complex(part.reshape(-1, 2)) if leaves[k].is_complex() else part
                    changed[k] = pairs.reshape(leaves[k].shape).to(leaves[k].dtype)
                input, args, kwargs = pytree.tree_unflatten(changed, spec)
                torch.manual_seed(1)
                out = op(input, *args, **kwargs)
                return flat(out if sample.output_process_fn_grad is None else sample.output_process_fn_grad(out))

            yield call, torch.cat(parts)
            made += 1
            if made == most:
                return


def jacobian(f, x):
    return torch.autograd.functional.jacobian(f, x).reshape(-1, x.numel())


def hessian(f, x):
    return torch.autograd.functional.hessian(f, x).reshape(x.numel(), -1)


def missing(pattern, derivative) -> bool:
    return bool((derivative.isfinite() & (derivative != 0) & ~pattern.dense()).any())


def examine(op, most: int, dtype=torch.float64) -> tuple[int, set[str]]:
    """The number of functions that were compared, and what is wrong."""
    compared, wrong = 0, set()
    torch.manual_seed(0)
    for f, x in functions(op, dtype, most):
        points = [x.clone(), x + 0.05 * torch.randn_like(x)]
        try:
            if f(x).numel() > MOST_RESULTS:  # PyTorch calls a backward for each
                continue
            derivatives = [jacobian(f, p) for p in points]
        except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError):
            continue  # not differentiable in this argument, or invalid near it
        try:
            found = detect(f, x, ())
        except PatternError as error:
            if op.name not in REFUSED:
                wrong.add(str(error))
            continue
        compared += 1
        if any(missing(found.pattern, j) for j in derivatives):
            wrong.add("first derivative")
        if x.numel() > MOST_TWICE:
            continue
        weights = torch.randn(found.output.shape, dtype=torch.float64)
        g = lambda x: (f(x) * weights).sum()  # noqa: E731
        try:
            derivatives = [hessian(g, p) for p in points]
        except (RuntimeError, NotImplementedError):
            continue
        if any(missing(detect(g, x, (), second=True).pattern, h) for h in derivatives):
            wrong.add("second derivative")
    return compared, wrong


def sweep(chosen, most, dtype=torch.float64):
    total, wrong = 0, {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in chosen:
            compared, found = examine(op, most, dtype)
            total += compared
            if found:
                wrong[op.formatted_name] = found
    assert not wrong
    return total


def test_no_entry_is_missing_in_samples_of_an_eighth_of_the_operators():
    assert sweep(operators()[::8], 3) > 80


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
def test_no_entry_is_missing(dtype, part):
    assert sweep(operators(dtype)[part::4], 100, dtype) > 500


def test_a_refusal_is_declared_only_for_operators_that_refuse():
    for name in REFUSED:
        refused = 0
        for op in [op for op in op_db() if op.name == name]:
            dtype = torch.float64 if torch.float64 in op.supported_dtypes("cpu") else torch.complex128
            for f, x in functions(op, dtype, 40):
                try:
                    detect(f, x, ())
                except PatternError:
                    refused += 1
                except (RuntimeError, TypeError):
                    continue
        assert refused, name
