"""PyTorch's operators at a dual level, of inputs that autograd does not track, next to torch.func.jvp.

Some functions of PyTorch call another kernel, which has no derivative, if nothing seems to be differentiated.
"""

import pytest
import torch
from helpers.thinning import every, label
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

import torch_manualgrad as mg
from torch_manualgrad.forward_ad import dual_level, make_dual, unpack_dual

F64 = torch.float64
OPERATORS = [info for info in op_db if info.supports_autograd and F64 in info.dtypes]


def inputs_of(info):
    """Some samples: functions of a tensor, and the tensor."""
    for sample in list(info.sample_inputs("cpu", F64, requires_grad=False))[:60:7]:
        x = sample.input
        if isinstance(x, torch.Tensor) and x.layout is torch.strided and x.is_floating_point() and x.numel() <= 2000:

            def function(x, sample=sample):
                torch.manual_seed(0)
                found = tree_leaves(info.op(x, *sample.args, **sample.kwargs))
                return tuple(
                    y for y in found if isinstance(y, torch.Tensor) and (y.is_floating_point() or y.is_complex())
                )

            yield function, x.clone()


@pytest.mark.parametrize("info", every(12, OPERATORS), ids=label)
@pytest.mark.parametrize("grad_mode", [True, False])
def test_no_tangent_is_lost(info, grad_mode):
    for function, x in inputs_of(info):
        v = torch.linspace(0.5, 1.5, x.numel(), dtype=F64).reshape(x.shape)
        with torch.set_grad_enabled(grad_mode):
            try:
                with mg.override():
                    _, expected = torch.func.jvp(function, (x.clone(),), (v,))
            except (RuntimeError, NotImplementedError, ValueError):  # PyTorch has no forward mode without gradients
                continue
            with dual_level():
                try:
                    found = function(make_dual(x.clone(), v))
                except NotImplementedError as error:  # it reads a running statistic
                    assert "is unknown" in str(error)
                    continue
                for y, e in zip(found, expected):
                    try:
                        t = unpack_dual(y).tangent
                    except NotImplementedError as error:  # of a saved statistic
                        assert "is unknown" in str(error)
                        continue
                    t = torch.zeros_like(e) if t is None else t
                    torch.testing.assert_close(t, e, rtol=1e-6, atol=1e-8, equal_nan=True)


@pytest.mark.parametrize("info", every(12, OPERATORS, 5), ids=label)
def test_gradients_of_tangents_inside_of_a_level(info):
    """Next to torch.func under the same rules. Where that has no gradient either, a level may raise."""
    for function, x in inputs_of(info):
        v = torch.linspace(0.5, 1.5, x.numel(), dtype=F64).reshape(x.shape)

        def of(tangents):
            return sum(
                (t * torch.linspace(1, 2, t.numel()).reshape(t.shape)).sum().real for t in tangents if t is not None
            )

        def expected():
            leaf = x.clone().requires_grad_()
            total = of(torch.func.jvp(function, (leaf,), (v,))[1])  # noqa: B023
            return torch.autograd.grad(total, leaf, materialize_grads=True)[0] if total.requires_grad else None

        with mg.override("*"):
            try:
                right = expected()
            except (RuntimeError, NotImplementedError, ValueError):
                continue
            leaf = x.clone().requires_grad_()
            with dual_level():
                try:
                    total = of(unpack_dual(y).tangent for y in function(make_dual(leaf, v)))
                    if right is None or not isinstance(total, torch.Tensor) or not total.requires_grad:
                        assert right is None or not right.any()
                        continue
                    found = torch.autograd.grad(total, leaf, materialize_grads=True)[0]
                except NotImplementedError as error:
                    assert "is unknown" in str(error)
                    continue
        torch.testing.assert_close(found, torch.zeros_like(x) if right is None else right, equal_nan=True)
