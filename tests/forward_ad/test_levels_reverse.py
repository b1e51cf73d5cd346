"""Dual levels and reverse mode: gradients of tangents, and tangents of gradients."""

import pytest
import torch
import torch.nn.functional as F

import torch_manualgrad as mg
from torch_manualgrad.forward_ad import dual_level, make_dual, unpack_dual

W = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) / 2


def written(x):
    b = x.new_zeros(4)
    b[1:] = x[:3] ** 2
    b[:2].mul_(x[2:])
    return (b.exp() * x).sum()


def checkpointed(x):
    return torch.utils.checkpoint.checkpoint(lambda y: (W @ y.sin()).tanh().sum(), x, use_reentrant=False)


FUNCTIONS = {
    "network": lambda x: (F.layer_norm(F.gelu(W @ x), (4,)) @ W).square().sum(),
    "written in place": written,
    "softmax": lambda x: (x[:, None] * x).softmax(0).diagonal().log().sum(),
    "matrix": lambda x: torch.linalg.slogdet(W + 3 * torch.diag(x.exp()))[1],
    "batch norm": lambda x: (F.batch_norm(W * x, None, None, training=True) ** 3 * x).sum(),
    "checkpoint": checkpointed,
}


def exact(function, x, v):
    """Value, directional derivative, gradient and Hessian times v, by torch.func."""
    with mg.override("*"):
        value, slope = torch.func.jvp(function, (x,), (v,))
        gradient, product = torch.func.jvp(torch.func.grad(function), (x,), (v,))
    return value, slope, gradient, product


def close(a, b):
    return torch.allclose(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_reverse_over_forward(name):
    function, (x, v) = FUNCTIONS[name], torch.rand(2, 4, dtype=torch.float64) + 0.2
    _, slope, gradient, product = exact(FUNCTIONS[name] if name != "checkpoint" else plain, x, v)
    leaf, direction = x.clone().requires_grad_(), v.clone().requires_grad_()
    with dual_level():
        t = unpack_dual(function(make_dual(leaf, direction))).tangent
        assert close(t, slope)
        by_x, by_v = torch.autograd.grad(t, (leaf, direction))
    assert close(by_x, product) and close(by_v, gradient)


@pytest.mark.parametrize("kept", [False, True], ids=["freed", "create_graph"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_over_reverse(name, kept):
    function, (x, v) = FUNCTIONS[name], torch.rand(2, 4, dtype=torch.float64) + 0.2
    _, _, gradient, product = exact(FUNCTIONS[name] if name != "checkpoint" else plain, x, v)
    with dual_level():
        dual = make_dual(x.clone().requires_grad_(), v)
        y = function(dual)
        if name == "matrix" and not kept:  # PyTorch's formula computes with factors that, it says, have no derivative
            with pytest.raises(NotImplementedError, match="LU of aten::_linalg_slogdet.*create_graph=True"):
                torch.autograd.grad(y, dual)
            return
        found = unpack_dual(torch.autograd.grad(y, dual, create_graph=kept)[0])
        assert close(found.primal, gradient) and close(found.tangent, product)


def plain(x):
    return (W @ x.sin()).tanh().sum()


def test_backward_accumulates_tangents():
    """x.grad of two backward passes has the tangent of their sum."""
    x, v = torch.rand(2, 4, dtype=torch.float64)
    _, _, _, product = exact(plain, x, v)
    with dual_level():
        dual = make_dual(x.clone().requires_grad_(), v)
        dual.retain_grad()
        weight = W.clone().requires_grad_()
        for _ in range(2):
            plain(dual).backward()
            (weight @ dual).sum().backward()
        assert close(unpack_dual(dual.grad).tangent, 2 * product)
        assert close(unpack_dual(weight.grad).tangent, 2 * v.expand(4, 4))


def test_third_derivatives_in_mixed_modes():
    """The gradient of v . H v, at two levels, and the Hessian times v and w of a gradient."""
    x, v, w = torch.rand(3, 4, dtype=torch.float64) + 0.2
    function = FUNCTIONS["softmax"]
    with mg.override("*"):
        slope = lambda x: torch.func.jvp(function, (x,), (v,))[1]  # noqa: E731
        expected = torch.func.grad(lambda x: torch.func.jvp(slope, (x,), (w,))[1])(x)
    leaf = x.clone().requires_grad_()
    with dual_level() as a, dual_level() as b:
        y = function(make_dual(make_dual(leaf, v, level=a), w, level=b))
        t = unpack_dual(unpack_dual(y, level=b).tangent, level=a).tangent
        assert close(torch.autograd.grad(t, leaf)[0], expected)
        dual = make_dual(make_dual(leaf, v, level=a), w, level=b)
        (gradient,) = torch.autograd.grad(function(dual), dual)
        assert close(unpack_dual(unpack_dual(gradient, level=b).tangent, level=a).tangent, expected)


def test_offloaded_residuals_keep_their_tangents():
    """A hook on saved tensors copies them; the copies have tangents as well."""
    x, v = torch.rand(2, 4, dtype=torch.float64)
    with dual_level():
        dual = make_dual(x.clone().requires_grad_(), v)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t * 1):
            y = dual.sin().sum()
        (gradient,) = torch.autograd.grad(y, dual)
        assert close(unpack_dual(gradient).tangent, -x.sin() * v)


def test_no_graph_is_made_for_nothing():
    with dual_level():
        x = make_dual(torch.rand(3), torch.rand(3).requires_grad_())
        with torch.no_grad():
            assert not unpack_dual(x.sin()).tangent.requires_grad
        assert unpack_dual(x.sin()).tangent.requires_grad and not x.sin().requires_grad


@pytest.mark.parametrize("mode", ["rules active", "autocast"])
def test_with_overrides_and_autocast(mode):
    x, v = torch.rand(2, 4, 4)
    function = lambda x: (F.linear(x, x.sin()).softmax(-1) @ x).norm()  # noqa: E731
    expected = torch.func.jvp(function, (x,), (v,))[1]
    with mg.override("*") if mode == "rules active" else torch.autocast("cpu"), dual_level():
        found = unpack_dual(function(make_dual(x, v))).tangent
    assert torch.allclose(found.float(), expected, rtol=1e-5 if mode == "rules active" else 0.05)
