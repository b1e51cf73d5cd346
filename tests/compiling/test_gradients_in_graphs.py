"""Functions that call torch.autograd.grad, compiled as one graph each: the same values, and derivatives of every order."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad as fwAD, grad
from torch.utils.checkpoint import checkpoint

import torch_manualgrad as mg
from torch_manualgrad.core.internals import graph_breaks
from torch_manualgrad.core.rule import reached

pytestmark = pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"),
    reason="Dynamo of this torch ends graphs at torch.autograd.grad",
)
CASES = {}


def case(function):
    """A function of tensors that require grad, and its parameters, which is compiled."""
    CASES[function.__name__] = function
    return function


def points(*shape, **kwargs):
    return torch.randn(*shape, dtype=torch.float64, **kwargs)


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    torch.manual_seed(0)


class Case:
    """A function, its arguments and the parameters that it reads."""

    def __init__(self, function, *args, parameters=()):
        self.function, self.args, self.parameters = function, args, list(parameters)

    @property
    def leaves(self):
        return [x for x in self.args if x.requires_grad] + self.parameters


def mlp(*layers):
    return nn.Sequential(*layers).double()


@case
def a_gradient_penalty():
    net = mlp(nn.Linear(3, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 1))

    def f(x):
        value = net(x)
        (g,) = grad(value.sum(), x, create_graph=True)
        return (g.norm(dim=1) - 1).pow(2).mean() - value.mean(), g

    return Case(f, points(4, 3, requires_grad=True), parameters=net.parameters())


@case
def a_gradient_without_a_history_is_a_constant():
    def f(x):
        y = x.pow(3).sum()
        (g,) = grad(y, x)
        return (x * g).sum()

    return Case(f, points(3, requires_grad=True))


@case
def a_gradient_without_a_history_that_is_returned():
    def f(x, w):
        (g,) = grad((x.exp() * w).sum(), x)
        return g, w.sin() * g

    return Case(f, points(3, requires_grad=True), points(3, requires_grad=True))


@case
def create_graph_by_its_place():
    return Case(lambda x: x * grad(x.pow(3).sum(), x, None, None, True)[0], points(3, requires_grad=True))


@case
def under_no_grad_with_a_history():
    def f(x):
        y = x.pow(3).sum()
        with torch.no_grad():
            (g,) = grad(y, x, create_graph=True)
        return g.sin()

    return Case(f, points(3, requires_grad=True))


@case
def no_grad_beside_it():
    def f(x, w):
        with torch.no_grad():
            target = (x * w).exp()
        (g,) = grad((x.sin() * w).sum(), x, create_graph=True)
        return (g - target).pow(2).sum()

    return Case(f, points(3, requires_grad=True), points(3, requires_grad=True))


@case
def detach_inside():
    def f(x):
        y = x.sin()
        (g,) = grad((y.detach() * y).sum(), x, create_graph=True)
        return g * x.detach()

    return Case(f, points(3, requires_grad=True))


@case
def inputs_that_are_not_used():
    def f(x, w):
        g, none = grad(x.sin().sum(), (x, w), create_graph=True, allow_unused=True)
        assert none is None
        g, zero = grad(g.sum(), (x, w), create_graph=True, materialize_grads=True)
        return g + zero

    return Case(f, points(3, requires_grad=True), points(3, requires_grad=True))


@case
def by_an_intermediate():
    def f(x):
        y = x.exp()
        (g,) = grad((y * y.sin()).sum(), y, create_graph=True)
        return g * y

    return Case(f, points(3, requires_grad=True))


@case
def by_an_argument_with_a_history():
    w = points(3, requires_grad=True)

    def f(x):
        (g,) = grad(x.sin().sum() * x.sum(), x, create_graph=True)
        return g.pow(2)

    return Case(f, w.exp(), parameters=[w])


@case
def cotangents():
    def f(x, v):
        (g,) = grad(x.exp() * x, x, v, create_graph=True)
        (h,) = grad(g, v, x.cos(), create_graph=True)
        return g, h

    return Case(f, points(3, requires_grad=True), points(3, requires_grad=True))


@case
def gradients_in_batches():
    def f(x):
        y = x.sin() * x.sum()
        (jacobian,) = grad(y, x, torch.eye(3, dtype=x.dtype), is_grads_batched=True, create_graph=True)
        return jacobian.exp()

    return Case(f, points(3, requires_grad=True))


@case
def three_orders():
    def f(x):
        (g,) = grad(x.sin().prod(), x, create_graph=True)
        (h,) = grad(g.sum(), x, create_graph=True)
        return grad(h.sum(), x, create_graph=True)[0]

    return Case(f, points(3, requires_grad=True))


@case
def a_laplacian():
    net = mlp(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))

    def f(x):
        (g,) = grad(net(x).sum(), x, create_graph=True)
        second = [grad(g[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
        return (second[0] + second[1] + 1).pow(2).mean()

    return Case(f, points(5, 2, requires_grad=True), parameters=net.parameters())


@case
def steps_of_an_inner_optimizer():
    net = mlp(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def f(x, rate):
        fast = dict(net.named_parameters())
        for _ in range(2):
            loss = torch.func.functional_call(net, fast, (x,)).pow(2).mean()
            gradients = grad(loss, list(fast.values()), create_graph=True)
            fast = {k: p - rate * g for (k, p), g in zip(fast.items(), gradients)}
        return torch.func.functional_call(net, fast, (x,)).pow(2).mean()

    return Case(
        f, points(5, 2), torch.tensor(0.1, dtype=torch.float64, requires_grad=True), parameters=net.parameters()
    )


@case
def random_numbers_and_buffers():
    net = mlp(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1))

    def f(x):
        (g,) = grad(net(x).sum(), x, create_graph=True)
        return g.pow(2).sum() + net[1].running_mean.sum()

    return Case(f, points(6, 3, requires_grad=True), parameters=net.parameters())


@case
def a_write_in_between():
    def f(x):
        y = x * 2
        y.mul_(x)
        (g,) = grad(y.sin().sum(), x, create_graph=True)
        return g.clone().mul_(x)

    return Case(f, points(3, requires_grad=True))


@case
def a_checkpoint_inside():
    def f(x):
        y = checkpoint(lambda x: (x.sin() * x.exp()).tanh(), x, use_reentrant=False)
        return grad(y.sum(), x, create_graph=True)[0].pow(2)

    return Case(f, points(3, requires_grad=True))


@case
def a_custom_rule_inside():
    @mg.custom_vjp
    def cubed(x):
        return x**3

    cubed.defvjp(lambda x: (x**3, x), lambda x, g: (4 * g * x**2,))  # another factor shows which one is used

    return Case(lambda x: grad(cubed(x).sum(), x, create_graph=True)[0].sin(), points(3, requires_grad=True))


@case
def a_transform_inside():
    def f(x):
        inner = torch.func.grad(lambda z: z.sin().prod())(x)
        return grad(inner.sum(), x, create_graph=True)[0]

    return Case(f, points(3, requires_grad=True))


@case
def complex_numbers():
    def f(z):
        (g,) = grad((z * z.conj()).real.sum() + z.exp().imag.sum(), z, create_graph=True)
        return torch.view_as_real(g).pow(2)

    return Case(f, torch.randn(3, dtype=torch.complex128, requires_grad=True))


@case
def views_of_gradients():
    def f(x):
        (g,) = grad(x.pow(3).sum(), x, create_graph=True)
        return g, g.t(), g[0]

    return Case(f, points(3, 2, requires_grad=True))


@case
def forces_of_positions_that_are_made_inside():
    net = mlp(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 1))

    def f(x, w):
        r = x.detach().requires_grad_()
        (force,) = grad(net(r).sum(), r)
        return force, w.exp()

    return Case(f, points(4, 3), points(3, requires_grad=True))


@case
def a_penalty_between_two_batches():
    critic, generator = mlp(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 1)), mlp(nn.Linear(2, 3))

    def f(real, z):
        fake = generator(z)
        with torch.no_grad():
            share = torch.rand(len(z), 1, dtype=z.dtype)
        between = (share * real + (1 - share) * fake.detach()).requires_grad_(True)
        (g,) = grad(critic(between), between, torch.ones(len(z), 1, dtype=z.dtype), create_graph=True)
        return critic(fake).mean() - critic(real).mean() + (g.norm(dim=1) - 1).pow(2).mean()

    return Case(f, points(4, 3), points(4, 2), parameters=[*critic.parameters(), *generator.parameters()])


@case
def energies_and_forces():
    net = mlp(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def f(x):
        x = x.detach().requires_grad_()
        energy = net(x).sum()
        (g,) = grad(energy, x, create_graph=True)
        return energy.pow(2) + g.pow(2).sum()

    return Case(f, points(4, 3), parameters=net.parameters())


def values_of(made, call):
    """The values, the gradients of a sum of squares of them, and a second derivative."""
    torch.manual_seed(3)
    outputs = call(*made.args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    found = list(outputs)
    tracked = [o for o in outputs if o.requires_grad]
    found.append(torch.tensor([o.requires_grad for o in outputs]))
    first = grad(sum(o.sin().sum() for o in tracked), made.leaves, create_graph=True, allow_unused=True)
    found += [g for g in first if g is not None]
    total = sum(g.abs().pow(2).sum() for g in first if g is not None and g.requires_grad)
    if isinstance(total, torch.Tensor):
        found += [g for g in grad(total, made.leaves, allow_unused=True, retain_graph=True) if g is not None]
    return found


FAST = (
    "a_gradient_penalty", "a_gradient_without_a_history_is_a_constant", "under_no_grad_with_a_history", "no_grad_beside_it",
    "detach_inside", "random_numbers_and_buffers", "a_custom_rule_inside", "a_penalty_between_two_batches",
    "forces_of_positions_that_are_made_inside", "energies_and_forces",
)  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in CASES])
def test_values_and_derivatives_are_those_of_the_uncompiled_program(name):
    made = CASES[name]()
    with mg.override():
        expected = [values_of(made, made.function) for _ in range(2)]
    torch.manual_seed(0)
    made = CASES[name]()
    compiled = mg.compile(made.function, lowering="eager", fullgraph=True)
    with mg.override():
        found = [values_of(made, compiled) for _ in range(2)]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_rule_that_is_swapped_is_followed_inside():
    wrong = mg.elementwise("aten::sin", lambda self: 3 * self.cos(), register=False)
    f = mg.compile(lambda x: grad(x.sin().sum(), x, create_graph=True)[0], lowering="eager", fullgraph=True)
    x = points(3, requires_grad=True)
    torch.testing.assert_close(f(x), x.cos())
    with mg.override(wrong):
        torch.testing.assert_close(f(x), 3 * x.cos())
    torch.testing.assert_close(f(x), x.cos())


def test_third_derivatives_of_a_gradient_inside():
    f = mg.compile(lambda x: grad(F.silu(x).sum(), x, create_graph=True)[0], lowering="eager", fullgraph=True)
    x = points(3, requires_grad=True)
    (h,) = grad(f(x).sum(), x, create_graph=True)
    (third,) = grad(h.sum(), x)
    expected = torch.func.vmap(torch.func.grad(torch.func.grad(torch.func.grad(lambda x: x * x.sigmoid()))))(x)
    torch.testing.assert_close(third, expected)


def test_tangents_of_gradients():
    def f(x, w):
        (g,) = grad((x.sin() * w).prod(), x, create_graph=True)
        return g, grad((x.exp() * w).sum(), x)[0]

    x, w = points(3, requires_grad=True), points(3)
    u, v = points(3), points(3)
    compiled = mg.compile(f, lowering="eager", fullgraph=not reached("2.15"))  # whose Dynamo takes no dual tensors

    def tangents(call):
        with fwAD.dual_level():
            return [fwAD.unpack_dual(y).tangent for y in call(fwAD.make_dual(x, u), fwAD.make_dual(w, v))]

    torch.testing.assert_close(tangents(compiled), tangents(f))


def test_gradients_without_a_history_that_are_views():
    net = mlp(nn.Linear(3, 2), nn.Linear(2, 2))

    def f(x, y):
        g = grad(net(x + y).sum(), (x, y, *net.parameters()))
        return g, g[0].t()

    args = points(4, 3, requires_grad=True), points(4, 3, requires_grad=True)
    found = mg.compile(f, lowering="eager", fullgraph=True)(*args)
    torch.testing.assert_close(found, f(*args))
    found[0][0].zero_()
    assert not found[1].any()


def test_programs_that_dynamo_ends_at_the_gradient_run_on():
    """Their variable is returned, or has a history outside that the gradient runs through."""

    def returned(x):
        x = x.detach().requires_grad_()
        y = x.pow(3).sum()
        return x, y, grad(y, x, create_graph=True)[0]

    net, w = mlp(nn.Linear(3, 3), nn.Tanh()), points(3, requires_grad=True)

    def through(x):
        return grad(net(x).sum(), w, create_graph=True)[0]

    def backward(x):
        net.zero_grad()
        net(x).sum().backward()
        return net[0].weight.grad.clone()

    for f, x in ((returned, points(3)), (through, w.exp()), (backward, points(3))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, expected = mg.compile(f, lowering="eager")(x), f(x)
        torch.testing.assert_close(found, expected)


def test_a_leaf_that_is_made_inside_alone_runs_uncompiled():
    def f(x):
        r = x.clone().requires_grad_()
        (g,) = grad(r.pow(3).sum(), r, create_graph=True)
        return g.sum()

    with pytest.warns(RuntimeWarning, match="outputs require grad, and none of its inputs does"):
        y = mg.compile(f, lowering="eager")(points(3))
    assert y.requires_grad


def test_other_backends_end_their_graphs_as_before():
    before = sum(graph_breaks().values())
    f = torch.compile(lambda x: grad(x.sin().sum(), x, create_graph=True)[0], backend="eager")
    x = points(3, requires_grad=True)
    torch.testing.assert_close(f(x), x.cos())
    assert sum(graph_breaks().values()) > before


def test_gradients_whose_derivative_pytorch_lacks():
    """PyTorch has no derivative of attention's backward."""

    def f(q, k, v):
        y = F.scaled_dot_product_attention(q, k, v)
        gradients = grad(y.sin().sum(), (q, k, v), create_graph=True)
        return grad(gradients, (q, k, v), (q, k, v))

    args = [points(1, 2, 4, 3, requires_grad=True) for _ in range(3)]
    with mg.override():
        expected = f(*args)
        found = mg.compile(f, lowering="eager", fullgraph=True)(*args)
    torch.testing.assert_close(found, expected)
