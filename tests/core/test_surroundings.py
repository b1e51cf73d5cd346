"""What may surround a call: checkpointing, hooks on saved tensors, compiled autograd, modes, autocast, functionalize.

On the core, with one operator or two; tests/parity tries every rule.
"""

from contextlib import nullcontext

import pytest
import torch
from helpers.calls import needs_library
from helpers.ops import define
from helpers.tensors import random, same
from torch._dynamo import compiled_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import torch_manualgrad as mg
from torch_manualgrad.core.override import compiled_calls

FUNCTIONS = {
    "one tensor": torch.linalg.vector_norm,
    "several inputs": lambda x: torch.linalg.solve(x, x.mT).sum(),
    "several outputs": lambda x: torch.linalg.svd(x)[1].sum(),
    "constant outputs": lambda x: torch.linalg.slogdet(x)[1],
    "an opaque formula in Python": lambda x: torch.linalg.matrix_exp(x).square().sum(),
}
functions = pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)

cube = define(
    "(Tensor x) -> Tensor",
    lambda x: x**3,
    save_for_backward=lambda inputs, output: inputs.x,
    backward=lambda ctx, x, grad: {"x": 3 * grad * x**2},
)


def well_conditioned():
    return (random(4, 4) + 4 * torch.eye(4)).requires_grad_()


def gradient(f, x, order=1):
    (g,) = torch.autograd.grad(f(x), x, create_graph=order > 1)
    return g if order == 1 else torch.autograd.grad(g.square().sum(), x)[0]


@functions
@pytest.mark.parametrize("order", [1, 2])
def test_checkpoint(f, order):
    """The operator's node is the first that asks for what was saved, and the recomputation runs inside of that."""
    x = well_conditioned()
    stock = gradient(f, x, order)
    with mg.override("*"):
        same(gradient(lambda x: checkpoint(f, x, use_reentrant=False), x, order), stock)
        same(
            gradient(lambda x: checkpoint(lambda y: f(y.sin()), x, use_reentrant=False), x, order),
            gradient(lambda x: f(x.sin()), x, order),
        )
    same(gradient(lambda x: checkpoint(lambda x: cube(x).sum(), x, use_reentrant=False), x), 3 * x.detach() ** 2)


@functions
@pytest.mark.parametrize("order", [1, 2])
def test_hooks_on_saved_tensors_that_differentiate(f, order):
    x = well_conditioned()
    stock = gradient(f, x, order)
    slopes, inside = [], []

    def unpack(saved):
        if not inside:
            inside.append(True)
            with torch.enable_grad():
                t = torch.ones(2, requires_grad=True)
                slopes.append(torch.autograd.grad((t * t).sum(), t)[0])
            inside.clear()
        return saved

    with mg.override("*"), torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        same(gradient(f, x, order), stock)
    assert slopes and all(s.eq(2).all() for s in slopes)


@pytest.mark.parametrize("f", [*FUNCTIONS.values(), lambda x: cube(x).sum()], ids=[*FUNCTIONS, "custom op"])
def test_compiled_autograd_over_an_eager_forward(f):
    x = well_conditioned()
    stock = gradient(f, x)
    with mg.override("*"):
        y = f(x)
        with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            y.backward()
    same(x.grad, stock)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_the_conjugate_inside_an_opaque_body_counts_under_a_dispatch_mode():
    """There PyTorch passes over conj and neg bits, which a lazy ``.mH`` sets."""
    A = random(4, 4, dtype=torch.complex128).requires_grad_()
    adjoint = define("(Tensor x) -> Tensor", lambda x: x.mH.sin() + x.conj().imag.mT)
    weight = random(4, 4, dtype=torch.complex128, seed=1)

    def loss(A):
        return (torch.linalg.matrix_exp(A) * weight).sum().abs()

    with mg.override("*"):
        eager = gradient(loss, A)
        with Passing():
            same(gradient(loss, A), eager)
    with Passing(), torch.no_grad():
        same(adjoint(A), A.mH.sin() + A.conj().imag.mT)


def seen_by(make):
    """A subclass, and the operators that its ``__torch_dispatch__`` has been called with."""
    seen = []

    class Seeing(torch.Tensor):
        @staticmethod
        def __new__(cls, elem):
            x = make(cls, elem)
            x.elem = elem
            return x

        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if not func.__name__.startswith("sym_"):  # its sizes, which anyone may ask for
                seen.append(func)
            args, kwargs = tree_map_only(cls, lambda x: x.elem, (args, kwargs or {}))
            return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))

    return Seeing, seen


MAKERS = {
    "with data": lambda cls, elem: torch.Tensor._make_subclass(cls, elem),
    "wrapper": lambda cls, elem: torch.Tensor._make_wrapper_subclass(cls, elem.shape, dtype=elem.dtype),
    "wrapper with strides": lambda cls, elem: torch.Tensor._make_wrapper_subclass(
        cls, elem.shape, strides=elem.stride(), dtype=elem.dtype, dispatch_sizes_strides_policy="strides"
    ),
    "wrapper with sizes": lambda cls, elem: torch.Tensor._make_wrapper_subclass(
        cls, elem.shape, dtype=elem.dtype, dispatch_sizes_strides_policy="sizes"
    ),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("call", (torch.abs, torch.clone, lambda x: x + x, torch.mm), ids=("abs", "clone", "add", "mm"))
@pytest.mark.parametrize("passing", (nullcontext, Passing), ids=("", "mode"))
def test_a_subclass_sees_the_operators_that_it_sees_on_stock(make, call, passing):
    """No view that a rule makes to look for a tangent."""
    cls, seen = seen_by(make)
    arguments = [cls(random(3, 3)) for _ in range(2 if call is torch.mm else 1)]
    with passing():
        call(*arguments)
        stock = list(seen)
        seen.clear()
        with mg.override("*"):
            call(*arguments)
    assert seen == stock


LOSSES = {
    "mse_loss": lambda x, y, **r: F.mse_loss(x, y, **r),
    "smooth_l1_loss": lambda x, y, **r: F.smooth_l1_loss(x, y, **r),
    "huber_loss": lambda x, y, **r: F.huber_loss(x, y, **r),
    "soft_margin_loss": lambda x, y, **r: F.soft_margin_loss(x, y.sign(), **r),
    "binary_cross_entropy": lambda x, y, **r: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), **r),
    "multi_margin_loss": lambda x, y, **r: F.multi_margin_loss(x, y.argmax(1), **r),
    "multilabel_margin_loss_forward": lambda x, y, **r: F.multilabel_margin_loss(x, y.argsort(1), **r),
    "nll_loss_forward": lambda x, y, **r: F.nll_loss(x, y.argmax(1), **r),
    "binary_cross_entropy_with_logits": lambda x, y, **r: F.binary_cross_entropy_with_logits(x, y.sigmoid(), **r),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_rule_leaves_the_forward_as_it_is_also_where_defaults_are_left_out(name):
    """torch's bindings take the default of ``reduction``, which they print as a name, for 0."""
    rule = mg.rule(f"aten::{name}", vjp={"self": lambda self: torch.zeros_like(self)}, register=False)
    x, y = random(3, 5).requires_grad_(), random(3, 5, seed=1)
    for reduction in ({}, {"reduction": "mean"}, {"reduction": "sum"}, {"reduction": "none"}):
        stock = LOSSES[name](x, y, **reduction)
        with mg.override(rule):
            assert LOSSES[name](x, y, **reduction).equal(stock)
            with torch.no_grad():
                assert LOSSES[name](x, y, **reduction).equal(stock)


def test_autocast_around_the_backward_too():
    """A forward that multiplies gives a narrow output of wide inputs; the formula gets all in one precision."""
    x = random(4, 2).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16), mg.override("*"):
        found = gradient(lambda x: torch.linalg.pinv(x).sum(), x)
    same(found, gradient(lambda x: torch.linalg.pinv(x).sum(), x), rtol=0.05, atol=0.05)


def test_an_input_without_a_vjp_is_an_error_and_no_zero():
    rule = mg.rule("aten::mul.Tensor", vjp={"self": lambda grad, other: grad * other}, register=False)
    x, y = random(3).requires_grad_(), random(3, seed=1).requires_grad_()
    with mg.override(rule):
        same(torch.autograd.grad((x * y.detach()).sum(), x)[0], y.detach())
        with pytest.raises(NotImplementedError, match="the gradient of 'other' is needed, and the rule has no vjp"):
            torch.autograd.grad((x * y).sum(), (x, y))
        if compiled_calls.loaded():  # a node in C++ knows which gradients are asked for
            same(torch.autograd.grad((x * y).sum(), x)[0], y.detach())


# -- Python numbers among tensors, where functorch sees the call first ------------------------------------------------


@needs_library
def test_a_number_stays_a_number_under_functionalize():
    x = torch.ones(3)
    traced = make_fx(torch.func.functionalize(lambda q: (q + 1) * 2.5))
    with mg.override():
        assert "scalar_tensor" not in traced(x).code
    with mg.override("*"):  # whose rules of add and mul get tensors
        traced(x)
    assert "scalar_tensor" not in traced(x).code


def test_a_number_inside_of_other_transforms():
    x = torch.tensor([2.0, 3.0], dtype=torch.float64)

    def f(q):
        return ((q + 1) * 2.5).pow(2).sum()

    expected = 12.5 * (x + 1)
    with mg.override("*"):
        torch.testing.assert_close(torch.func.grad(f)(x), expected)
        torch.testing.assert_close(torch.func.grad(torch.func.functionalize(f))(x), expected)
        torch.testing.assert_close(torch.func.functionalize(torch.func.grad(f))(x), expected)
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(f))(x[:, None])[:, 0], expected)
