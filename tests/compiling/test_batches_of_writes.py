"""Compiled functions that write to parts of a tensor: batches of them and of their gradients, next to the uncompiled function."""

import warnings

import pytest
import torch
from torch.func import grad, jacfwd, jacrev, vmap

import torch_manualgrad as mg


@pytest.fixture(autouse=True)
def compile_anew():
    torch.compiler.reset()


def written(write):
    def function(x):
        t = x * 1
        write(t, x)
        return t.sin()

    return function


FUNCTIONS = {
    "a row": written(lambda t, x: t[0].clamp_(-1, 1)),
    "a column": written(lambda t, x: t[:, 1].sin_()),
    "the last row": written(lambda t, x: t[-1].mul_(x[0])),
    "a row by another": written(lambda t, x: t.__setitem__(0, x[1])),
    "an entry": written(lambda t, x: t[1, 2].exp_()),
    "all": written(lambda t, x: t[:].sin_()),
    "from a row on": written(lambda t, x: t[1:].mul_(2.0)),
    "up to a row": written(lambda t, x: t[:-1].mul_(x[1:])),
    "every other row": written(lambda t, x: t[::2].mul_(2.0)),
    "a block": written(lambda t, x: t[1:, 1:3].copy_(x[:2, :2])),
    "beyond the end": written(lambda t, x: t[1:10].cos_()),
    "no row": written(lambda t, x: t[2:1].cos_()),
    "a diagonal": written(lambda t, x: t.diagonal().sin_()),
    "a transposed row": written(lambda t, x: t.mT[1].sin_()),
    "a row of a view": written(lambda t, x: t.view(-1)[2:5].sin_()),
    "indices": written(lambda t, x: t.__setitem__(torch.tensor([0, 2]), x[:2].sin())),
    "a mask": written(lambda t, x: t.__setitem__(torch.eye(3, dtype=torch.bool), 2.0)),
    "select_scatter": lambda x: x.sin().select_scatter(x[1].cos(), 1, -1).sin(),
    "slice_scatter": lambda x: x.sin().slice_scatter(x[1:].cos(), 0, 0, 2).sin(),
    "as_strided": lambda x: torch.as_strided(x.sin(), (3, 2), (1, 3)).sin(),
    "as_strided, overlapping": lambda x: torch.as_strided(x.sin(), (3, 3), (1, 2), 1).sin(),
    "as_strided of a transposed tensor": lambda x: torch.as_strided(x.mT.sin(), (2, 2), (1, 3)).sin(),
}


def one_by_one(f):
    """vmap. PyTorch's is wrong about the derivative of select_scatter (the cotangent is counted several times)."""
    return lambda x: torch.stack([f(row) for row in x])


def batched_gradients(f, x, vmap):
    variable = x[0].clone().requires_grad_()
    y = f(variable)
    cotangents = torch.stack([torch.ones_like(y), torch.arange(y.numel(), dtype=x.dtype).view_as(y)])
    first, *_ = torch.autograd.grad(y, variable, cotangents, is_grads_batched=True, create_graph=True)
    return first, torch.autograd.grad(first.pow(2).sum(), variable, materialize_grads=True)[0]


def through_vmap(f, x, vmap):
    variable = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(vmap(f)(variable).pow(3).sum(), variable, create_graph=True)
    return first, torch.autograd.grad(first.pow(2).sum(), variable)[0]


WAYS = {
    "vmap of grad": lambda f, x, vmap: vmap(grad(lambda x: f(x).pow(3).sum()))(x),
    "grad of vmap": through_vmap,
    "torch.func.grad of vmap": lambda f, x, vmap: grad(lambda x: vmap(f)(x).pow(3).sum())(x),
    "jacrev": lambda f, x, vmap: jacrev(f)(x[0]),
    "jacfwd of jacrev": lambda f, x, vmap: jacfwd(jacrev(f))(x[0]),
    "batched gradients": batched_gradients,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_batches_have_the_derivatives_of_the_uncompiled_function(name):
    function = FUNCTIONS[name]
    torch.manual_seed(0)
    x = torch.randn(2, 3, 3, dtype=torch.float64)
    with mg.override(), warnings.catch_warnings():
        # a tensor that is read by its strides is differentiated uncompiled
        warnings.filterwarnings("ignore" if "as_strided" in name else "error", "torch_manualgrad")
        compiled = mg.compile(function, lowering="eager")
        for way, derivatives in WAYS.items():
            torch.testing.assert_close(
                derivatives(compiled, x, vmap),
                derivatives(function, x, one_by_one),
                msg=lambda text, way=way: f"{way}: {text}",
            )
