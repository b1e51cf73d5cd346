"""Arguments of the public functions of high order: an error names each and its value."""

import pytest
import torch

import torch_manualgrad.forward_ad as fwd

X = torch.linspace(0.1, 1.2, 12, dtype=torch.float64).reshape(3, 4)
ROW = X[0]
F = torch.sin
TOTAL = lambda x: x.sin().sum()  # noqa: E731

WRONG = {
    "order 0": (lambda: fwd.directional(F, X, X, 0), "directional: order: expected from 1 to 170, got 0"),
    "order -1": (lambda: fwd.directional(F, X, X, -1), "directional: order: expected from 1 to 170, got -1"),
    "order 2**31": (lambda: fwd.directional(F, X, X, 2**31), "order: expected from 1 to 170, got 2147483648"),
    "171 terms": (lambda: fwd.jet(F, (X,), ([X] * 171,)), "series: expected at most 170 terms, got 171"),
    "batch_dims 2**31 - 1": (lambda: fwd.laplacian(F, batch_dims=2**31 - 1)(X), "batch_dims: .* got 2147483647"),
    "biharmonic batch_dims": (lambda: fwd.biharmonic(F, batch_dims=2**31 - 1)(X), "batch_dims: .* got 2147483647"),
    "a weight of nan": (
        lambda: fwd.weighted_laplacian(F, torch.full((12, 12), torch.nan))(X),
        "weight: expected finite",
    ),
    "a function of nothing": (lambda: fwd.biharmonic(object)(X), "(?s)laplacian: object.* takes no arguments.*x="),
    "a function that returns nothing": (lambda: fwd.laplacian(lambda x: None)(X), "f: expected a tensor.* got None"),
    "a function that returns a number": (
        lambda: fwd.hessian_diagonal(lambda x: 3.0)(X),
        "f: expected a tensor.* got 3.0",
    ),
    "a function that returns no tensors": (lambda: fwd.biharmonic(lambda x: ())(X), "f: expected a tensor.* got None"),
    "a function that returns a tensor and a number": (
        lambda: fwd.laplacian(lambda x: (x, 3.0))(X),
        "f: expected a tensor.* got 3.0",
    ),
    "order 1.5": (lambda: fwd.directional(F, X, X, 1.5), "directional: order: expected an int, got 1.5"),
    "order True": (lambda: fwd.directional(F, X, X, True), "directional: order: expected an int, got True"),
    "direction": (
        lambda: fwd.directional(F, X, ROW, 1),
        r"directional: v: expected the shape of x, \[3, 4\], got \[4\]",
    ),
    "complex direction": (lambda: fwd.directional(F, X, X * 1j, 1), "directional: v: expected real numbers"),
    "number": (lambda: fwd.directional(F, 0.3, X, 1), "directional: x: expected a Tensor, got 0.3"),
    "integers": (
        lambda: fwd.directional(F, X.long(), X.long(), 1),
        "x: expected real or complex numbers, got a Tensor",
    ),
    "no function": (lambda: fwd.directional(X, X, X, 1), "directional: f: expected a function, got a Tensor of shape"),
    "jet of 3": (lambda: fwd.jet(3, (X,), ([X],)), "jet: f: expected a function, got 3"),
    "a tensor for primals": (lambda: fwd.jet(F, X, [[X]]), "jet: primals: expected a list or tuple"),
    "a number for series": (lambda: fwd.jet(F, (X,), 1), "jet: series: expected a list or tuple.*got 1"),
    "flat series": (lambda: fwd.jet(F, (X,), (X,)), "jet: series: expected a list or tuple"),
    "term": (lambda: fwd.jet(F, (X,), ([X, ROW],)), r"jet: series\[0\]\[1\]: expected the shape of primals\[0\]"),
    "no terms": (lambda: fwd.jet(F, (X,), ([],)), r"jet: series: expected one length of at least 1, got lengths \[0\]"),
    "nothing": (lambda: fwd.jet(F, (), ()), r"jet: series: expected one length of at least 1, got lengths \[\]"),
    "lengths": (lambda: fwd.jet(torch.add, (X, X), ([X], [X, X])), r"got lengths \[1, 2\]"),
    "number of series": (lambda: fwd.jet(torch.add, (X, X), ([X],)), "expected one for each of 2 primals, got 1"),
    "laplacian of 3": (lambda: fwd.laplacian(3), "laplacian: f: expected a function, got 3"),
    "batch_dims -1": (lambda: fwd.laplacian(F, batch_dims=-1), "laplacian: batch_dims: expected at least 0, got -1"),
    "batch_dims 5": (
        lambda: fwd.laplacian(F, batch_dims=5)(X),
        "laplacian: batch_dims: expected at most 2 for .*, got 5",
    ),
    "batch_dims None": (lambda: fwd.laplacian(F, batch_dims=None), "laplacian: batch_dims: expected an int, got None"),
    "block_dim 2": (
        lambda: fwd.laplacian(F, block_dim=2)(X),
        r"laplacian: block_dim: .* dimensions \[0, 1\] .*, got 2",
    ),
    "block_dim of the batch": (lambda: fwd.laplacian(F, batch_dims=1, block_dim=0)(X), "block_dim: .*, got 0"),
    "laplacian at a number": (lambda: fwd.laplacian(F)(0.3), "laplacian: expected a Tensor .*, got 0.3"),
    "laplacian at integers": (lambda: fwd.laplacian(F)(X.long()), "laplacian: the first argument of f: expected real"),
    "weight": (lambda: fwd.weighted_laplacian(F, ROW)(X), r"weight: expected shape \[12\] or \[12, 12\] .*, got \[4\]"),
    "integer weight": (lambda: fwd.weighted_laplacian(F, ROW.long()), "weight: expected real or complex numbers"),
    "weighted batch_dims": (
        lambda: fwd.weighted_laplacian(F, ROW, batch_dims=-1),
        "weighted_laplacian: batch_dims: .* -1",
    ),
    "weighted too many": (
        lambda: fwd.weighted_laplacian(F, ROW, batch_dims=3)(X),
        "weighted_laplacian: batch_dims: .* 3",
    ),
    "biharmonic": (lambda: fwd.biharmonic(F, batch_dims=-2), "biharmonic: batch_dims: expected at least 0, got -2"),
    "diagonal -1": (lambda: fwd.hessian_diagonal(F, batch_dims=-1), "hessian_diagonal: batch_dims: .*, got -1"),
    "diagonal 3": (lambda: fwd.hessian_diagonal(F, batch_dims=3)(X), "hessian_diagonal: batch_dims: .*, got 3"),
    "hvp": (lambda: fwd.hvp(TOTAL, X, ROW), r"hvp: v: expected the shape of x, \[3, 4\], got \[4\]"),
    "hvp of a number": (lambda: fwd.hvp(TOTAL, X, 1.0), "hvp: v: expected a Tensor, got 1.0"),
    "ggn_vp": (lambda: fwd.ggn_vp(F, TOTAL, X, ROW), r"ggn_vp: v: expected the shape of x, \[3, 4\], got \[4\]"),
    "ggn_vp of no loss": (lambda: fwd.ggn_vp(F, None, X, X), "ggn_vp: loss: expected a function, got None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_names_the_argument_and_its_value(name):
    call, text = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=text):
        call()


def test_an_argument_without_entries():
    """The sums are 0, and the diagonal has no entries."""
    nothing = X[:0, 0]
    assert fwd.laplacian(TOTAL)(nothing) == 0
    assert fwd.biharmonic(TOTAL)(nothing) == 0
    assert fwd.weighted_laplacian(TOTAL, torch.eye(0, dtype=X.dtype))(nothing) == 0
    assert fwd.hessian_diagonal(TOTAL)(nothing).shape == (0,)
    assert fwd.hessian_diagonal(F, batch_dims=1)(X[:, :0]).shape == (3, 0, 0)


def test_orders_above_20():
    """Their factorials have more than 64 bits."""
    x = torch.tensor(0.3, dtype=torch.float64)
    found = fwd.directional(torch.exp, x, torch.ones_like(x), 25)
    torch.testing.assert_close(torch.stack(found), x.exp().expand(25))
    terms = [torch.ones_like(x), *[None] * 23, torch.ones_like(x)]
    torch.testing.assert_close(fwd.jet(torch.exp, (x,), (terms,))[1][24], 2 * x.exp())
    assert fwd.directional(torch.exp, x, torch.ones_like(x), 170)[-1].isfinite()


def test_arguments_at_the_limit_are_accepted():
    torch.testing.assert_close(fwd.laplacian(F, batch_dims=2)(X), -X.sin())
    torch.testing.assert_close(fwd.laplacian(F, batch_dims=1, block_dim=1)(X), -X.sin())
    torch.testing.assert_close(fwd.directional(F, X, torch.ones_like(X), 1)[0], X.cos())
    torch.testing.assert_close(fwd.directional(F, X * 1j, torch.ones_like(X), 1)[0], (X * 1j).cos())
