"""Series inside of series: of PyTorch's operators, next to one series of higher order, and of factorizations."""

import pytest
import torch
from helpers.tensors import seeded_by_shape
from helpers.thinning import every, label
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

import torch_manualgrad as mg
from torch_manualgrad.forward_ad import biharmonic, directional, hessian_diagonal, laplacian

F64 = torch.float64
OPERATORS = [info for info in op_db if info.supports_autograd and F64 in info.dtypes]


def inputs_of(info):
    """Some samples: functions of a tensor, and the tensor."""
    for sample in list(info.sample_inputs("cpu", F64, requires_grad=False))[:60:15]:
        x = sample.input
        if isinstance(x, torch.Tensor) and x.layout is torch.strided and x.is_floating_point() and 0 < x.numel() <= 300:

            def function(x, sample=sample):
                torch.manual_seed(0)
                return info.op(x, *sample.args, **sample.kwargs)

            yield function, x.clone()


@pytest.mark.parametrize("info", every(12, OPERATORS), ids=label)
def test_first_derivatives_of_first_derivatives(info):
    for function, x in inputs_of(info):
        v = torch.linspace(0.5, 1.5, x.numel(), dtype=F64).reshape(x.shape)
        try:
            expected = tree_leaves(directional(function, x, v, 2))[1::2]
        except (NotImplementedError, TypeError):  # without a series
            continue
        found = tree_leaves(directional(lambda y: directional(function, y, v, 1), x, v, 1))  # noqa: B023
        torch.testing.assert_close(found, expected, equal_nan=True)


A, B = seeded_by_shape(3, 3), seeded_by_shape(3, 2)


def matrix(x):
    return torch.eye(3, dtype=F64) * (2 + x[0].sin()) + A * x[1].exp() * x[0]


OF_MATRICES = {
    "det": lambda x: torch.linalg.det(matrix(x)),
    "slogdet": lambda x: torch.linalg.slogdet(matrix(x))[1],
    "solve": lambda x: torch.linalg.solve(matrix(x), B * x[0]).sum(),
    "lstsq": lambda x: torch.linalg.lstsq(matrix(x), B).solution.sum(),
    "eigvals": lambda x: torch.linalg.eigvals(matrix(x)).abs().sum(),
    "qr": lambda x: torch.linalg.qr(matrix(x))[1].sum(),
    "layer norm": lambda x: torch.nn.functional.layer_norm(matrix(x), (3,)).pow(3).sum(),
}


def trace_of_hessian(f):
    return lambda x: torch.func.hessian(f)(x).trace()


@pytest.mark.parametrize("name", OF_MATRICES)
def test_laplacians_of_laplacians(name):
    f, x = OF_MATRICES[name], torch.tensor([0.4, 0.3], dtype=F64)
    with mg.override("*"):
        expected = trace_of_hessian(trace_of_hessian(f))(x)
    for found in (biharmonic(f)(x), laplacian(lambda y: hessian_diagonal(f)(y).sum())(x)):
        torch.testing.assert_close(found, expected)
