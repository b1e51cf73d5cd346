"""Which calls of a formula a kernel takes, and that nothing else changes."""

import pytest
import torch
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.core.formula import Kernel

ran: list[str] = []


def _by_two(x: Tensor, y: Tensor | None, k: int) -> Tensor:
    ran.append("kernel")
    return 2 * x if y is None else 2 * x + k * y


@mg.formula(
    kernels=Kernel("cpu", when=lambda k, x: k < 3 and x.shape[-1] == 2, python=_by_two), namespace="kernelchoicetest"
)
def doubled(x: Tensor, y: Tensor | None, k: int) -> Tensor:
    """2 x + k y. Source: none."""
    ran.append("body")
    return x + x if y is None else x + x + k * y


del mg.ops._entries["kernelchoicetest::doubled"]  # tests of every formula are not for this one


def which(call, *args, **kwargs):
    ran.clear()
    call(*args, **kwargs)
    return ran.copy()


X, Y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])


@pytest.mark.parametrize(
    "call", [doubled, torch.ops.kernelchoicetest.doubled, torch.ops.kernelchoicetest.doubled.default]
)
def test_taken_by_size_and_device(call):
    assert which(call, X, Y, 1) == ["kernel"]
    assert which(call, X, None, k=1) == which(call, x=X, y=Y, k=1) == ["kernel"]
    assert which(call, X, Y, 3) == ["body"]
    assert which(call, X[:1], None, 1) == ["body"]
    assert which(call, X.to("meta"), None, 1) == ["body"]


def test_what_autograd_tracks_is_the_body():
    x = X.clone().requires_grad_()
    assert which(doubled, x, Y, 1) == ["body"]
    with torch.no_grad():
        assert which(doubled, x, Y, 1) == ["kernel"]
    assert which(torch.func.grad(lambda x: doubled(x, Y, 1).sum()), X) == ["body"]
    _, tangent = torch.func.jvp(lambda x: doubled(x, Y, 1), (X,), (Y,))
    assert torch.equal(tangent, 2 * Y)


def _by_seven(x: Tensor, k: int = 7) -> Tensor:
    ran.append("kernel")
    return k * x


@mg.formula(kernels=Kernel(python=_by_seven, tracked=True), namespace="kernelchoicetest")
def multiplied(x: Tensor, k: int = 7) -> Tensor:
    """k x. Source: none."""
    ran.append("body")
    return k * x


del mg.ops._entries["kernelchoicetest::multiplied"]


def test_a_kernel_that_takes_what_autograd_tracks():
    x = X.clone().requires_grad_()
    assert which(multiplied, X) == which(multiplied, x) == which(multiplied, x, k=7) == ["kernel"]
    assert which(torch.func.grad(lambda x: multiplied(x).sum()), X)[0] == "kernel"
    assert torch.equal(torch.autograd.grad(multiplied(x, 3).sum(), x)[0], torch.full((2,), 3.0))
    assert multiplied(x.to("meta")).is_meta


def test_transforms_see_the_body():
    assert torch.equal(torch.vmap(lambda x: doubled(x, Y, 1))(torch.stack((X, Y))), torch.stack((2 * X + Y, 3 * Y)))
    torch.autograd.gradcheck(
        torch.ops.kernelchoicetest.doubled.python, (X.double().requires_grad_(), Y.double().requires_grad_(), 2),
        check_forward_ad=True, check_batched_grad=True,
    )  # fmt: skip
    compiled = torch.compile(lambda x: doubled(x, None, 1), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(X), 2 * X)
    assert which(compiled, X) == ["kernel"]


def test_refused():
    def scaled(x: Tensor, k: int) -> Tensor:
        return k * x

    def keyword(x: Tensor, *, k: int) -> Tensor:
        return k * x

    with pytest.raises(ValueError, match="when= asks for 'y', which is not one of"):
        mg.formula(kernels=Kernel("cpu", when=lambda y: True), namespace="kernelchoicetest")(scaled)
    with pytest.raises(ValueError, match="no keyword-only arguments"):
        mg.formula(kernels=Kernel("cpu"), namespace="kernelchoicetest")(keyword)
    with pytest.raises(ValueError, match="kernel= makes it opaque"):
        mg.formula(kernels=Kernel("cpu"), kernel=("cpu",))(scaled)
    with pytest.raises(RuntimeError, match="is transparent"):
        doubled.impl("cpu")(_by_two)


def test_compiled_kernels_are_overloads():
    for formula in mg.ops.values():
        namespace, _, name = formula.name.partition("::")
        for overload, op in formula.overloads.items():
            assert op.op is getattr(getattr(getattr(torch.ops, namespace), name), overload)
            assert [a.name for a in op.op._schema.arguments] == formula.signature.names
