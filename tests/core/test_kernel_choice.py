"""Which calls of a formula a kernel takes, and that nothing else changes."""

import inspect

import pytest
import torch
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.core.rule import Kernel

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


def test_tracked_calls_run_the_body():
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


def test_a_kernel_that_accepts_tracked_calls():
    x = X.clone().requires_grad_()
    assert which(multiplied, X) == which(multiplied, x) == which(multiplied, x, k=7) == ["kernel"]
    assert which(torch.func.grad(lambda x: multiplied(x).sum()), X)[0] == "kernel"
    assert torch.equal(torch.autograd.grad(multiplied(x, 3).sum(), x)[0], torch.full((2,), 3.0))
    assert multiplied(x.to("meta")).is_meta


def _cube(y: Tensor) -> tuple[Tensor, Tensor]:
    """The cube, and whether it is not finite."""
    ran.append("kernel")
    cube = y * y * y
    return cube, ~cube.isfinite().all()


def _unless_infinite(compiled, x: Tensor, k: int = 7) -> Tensor | None:
    cube, declined = compiled(x)
    return None if declined else k * cube


@mg.formula(kernels=Kernel("cpu", compiled=_cube, python=_unless_infinite), namespace="kernelchoicetest")
def of_cube(x: Tensor, k: int = 7) -> Tensor:
    """k x^3. Source: none."""
    ran.append("body")
    return k * x**3


del mg.ops._entries["kernelchoicetest::of_cube"]


def test_a_kernel_with_other_arguments_and_results():
    x, infinite = X.clone().requires_grad_(), torch.full((2,), torch.inf)
    operator = torch.ops.kernelchoicetest.of_cube
    assert of_cube.kernels == ("cpu",)
    assert str(operator.kernel._schema).endswith("of_cube.kernel(Tensor y) -> (Tensor, Tensor)")
    for call in (of_cube, operator, operator.python):
        assert torch.equal(call(X), 7 * X**3) and torch.equal(call(X, 3), 3 * X**3)
        assert which(call, X) == ["kernel"]
        assert which(call, infinite) == ["kernel", "body"]  # which the kernel left to it
    assert which(of_cube, x) == ["body"]
    assert operator.python(X.to("meta")).is_meta
    assert torch.equal(torch.vmap(of_cube)(X), 7 * X**3)
    torch.autograd.gradcheck(operator.python, (x.detach().double().requires_grad_(),), check_forward_ad=True)
    compiled = torch.compile(of_cube, backend="aot_eager", fullgraph=True)
    assert which(compiled, X)[-1] == "kernel" and torch.equal(compiled(infinite), infinite)


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
    with pytest.raises(ValueError, match="more than one kernel in Python"):
        mg.formula(kernels=[Kernel(python=scaled), Kernel(python=keyword)], namespace="kernelchoicetest")(scaled)
    with pytest.raises(ValueError, match="for a kernel that python= calls"):
        Kernel("cpu", compiled=scaled)
    with pytest.raises(RuntimeError, match="is transparent"):
        doubled.impl("cpu")(_by_two)


def test_compiled_kernels_are_overloads():
    for formula in mg.ops.values():
        namespace, _, name = formula.name.partition("::")
        for overload, op in formula.overloads.items():
            assert op.op is getattr(getattr(getattr(torch.ops, namespace), name), overload)
            assert op.signature.names == list(inspect.signature(op.reference).parameters)
        if (python := formula.overloads.get("python")) is not None:
            assert python.signature.names == formula.signature.names
