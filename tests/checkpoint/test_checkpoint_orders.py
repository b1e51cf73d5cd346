"""Functions that are computed again in the backward: the same numbers as without, in all modes and at every order."""

from __future__ import annotations

import random as python_random

import pytest
import torch
from helpers.modes import MODES, derivatives
from helpers.tensors import close, random
from torch.autograd import forward_ad as fwAD
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F

import torch_manualgrad as mg
from torch_manualgrad.checkpointing import checkpoint_name, save_budget, save_names, save_products
from torch_manualgrad.testing import check

F64, C128 = torch.float64, torch.complex128
X, Y = random(3), random(3, seed=1)
W = random(3, 3, seed=2)


def cell(x, y):
    return torch.tanh(x @ W + y) * x.exp()


def nested(x, y):
    return mg.checkpoint(cell)(mg.checkpoint(lambda x: x.sin() * y)(x), y) + x


def of_trees(x, y):
    out = mg.checkpoint(
        lambda p, n, scale=1.0: {"a": cell(p["x"], p["y"]) * n, "k": p["k"] + 1, "b": [p["y"] * scale]}
    )({"x": x, "y": y, "k": torch.tensor(1)}, 3, scale=2.0)
    assert out["k"] == 2 and not out["k"].requires_grad
    return out["a"] * out["b"][0]


def in_closure(x, y):
    z = x * y
    return mg.checkpoint(lambda x: cell(x, z) + y)(x)


CASES = {
    "a function": (mg.checkpoint(cell), cell, (X, Y)),
    "nested": (nested, lambda x, y: cell(x.sin() * y, y) + x, (X, Y)),
    "trees": (of_trees, lambda x, y: cell(x, y) * 3 * y * 2, (X, Y)),
    "tensors in a closure": (in_closure, lambda x, y: cell(x, x * y) + y, (X, Y)),
    "an argument in a closure too": (
        lambda x, y: mg.checkpoint(lambda a: cell(a, y) * x)(x), lambda x, y: cell(x, y) * x, (X, Y)
    ),
    "chained": (
        lambda x, y: mg.checkpoint(cell)(mg.checkpoint(cell)(x, y), y), lambda x, y: cell(cell(x, y), y), (X, Y)
    ),
    "its argument as the result": (lambda x: mg.checkpoint(lambda x: (x, x * x))(x)[0] * x, lambda x: x * x, (X,)),
    "with a rule of its own": (
        lambda x: mg.checkpoint(doubled_sine)(x) * x, lambda x: (2 * x.sin() - x.sin().detach()) * x, (X,)
    ),
}  # fmt: skip


@mg.custom_jvp
def doubled_sine(x):
    return x.sin()


doubled_sine.defjvps(lambda t, out, x: 2 * x.cos() * t)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_every_mode(name, mode):
    ours, plain, inputs = CASES[name]
    assert torch.equal(ours(*inputs), plain(*inputs))
    close(derivatives(ours, inputs, mode), derivatives(plain, inputs, mode))


def test_by_finite_differences():
    """And vmap, fake tensors, checkpoints of PyTorch and more; complex numbers too."""
    f = mg.checkpoint(lambda z, w: torch.sin(z) * w.conj() + z.abs())
    check(f, [(random(2, dtype=C128), random(2, dtype=C128, seed=1))])
    check(mg.checkpoint(cell), [(X, Y)])


STEPS = [
    cell,
    lambda x, y: torch.sin(x) * y,
    lambda x, y: F.dropout(x, 0.4) * y.exp(),
    lambda x, y: doubled_sine(x * y) + x,
    lambda x, y: vmap(lambda a, b: a * b.cos())(x, y),
    lambda x, y: vmap(cell, (None, 0))(x, torch.stack([x, y])).sum(0),
    lambda x, y: grad(lambda x: cell(x, y).sum())(x),
    lambda x, y: torch.relu(x) + vjp(cell, x, y)[1](y)[1],
]


@pytest.mark.parametrize("seed", range(16))
def test_random_programs(seed):
    """Steps, each in up to two checkpoints, that read one of their arguments by closure or not."""

    def program(wrap):
        chosen = python_random.Random(seed)

        def f(x, y):
            for step in chosen.choices(STEPS, k=4):
                depth = chosen.randrange(3)
                closure = STEPS.index(step) < 4 and chosen.random() < 0.5  # a transform does not find what is in one
                g = (lambda x, y=y, step=step: step(x, y)) if closure else step
                for _ in range(depth):
                    g = wrap(g)
                x, y = (g(x) if closure else g(x, y)).tanh(), x  # third derivatives grow
            chosen.seed(seed)
            return x + y

        return f

    for mode in (m for m in MODES if len(m) < 9 or (seed + MODES.index(m)) % 8 == 0):
        found = []
        for wrap in (mg.checkpoint, lambda f: f):
            torch.manual_seed(0)
            found.append(derivatives(program(wrap), (X, Y), mode))
        close(*found, rtol=1e-7)


# -- transforms -------------------------------------------------------------------------------------------------------


def total(f):
    return lambda *args: f(*args).sum()


def test_transforms():
    ours, plain = mg.checkpoint(cell), cell
    for transform in (
        lambda f: grad(total(f), (0, 1)),
        lambda f: lambda x, y: vjp(f, x, y)[1](y),
        lambda f: lambda x, y: jvp(f, (x, y), (y, x)),
        lambda f: jacrev(f, (0, 1)),
        lambda f: jacfwd(f, (0, 1)),
        lambda f: hessian(total(f), (0, 1)),
        lambda f: jacrev(jacfwd(jacrev(f))),
        lambda f: lambda x, y: torch.func.linearize(f, x, y)[1](y, x),
    ):
        close(transform(ours)(X, Y), transform(plain)(X, Y), rtol=1e-12)


def test_vmap():
    A, B = random(4, 3), random(3, 4, seed=1)
    for dims, arguments in (((0, 1), (A, B)), ((0, None), (A, Y)), ((None, 1), (X, B))):
        for transform in (lambda f: f, lambda f: jacrev(f, (0, 1)), lambda f: jacfwd(f, (0, 1)), hessian_of):
            found, expected = (vmap(transform(f), dims)(*arguments) for f in (mg.checkpoint(cell), cell))
            close(found, expected, rtol=1e-12)
        f, g = (lambda x, y, f=f: vmap(f, dims)(x, y).sin().sum() for f in (mg.checkpoint(cell), cell))
        close(hessian(f, (0, 1))(*arguments), hessian(g, (0, 1))(*arguments), rtol=1e-12)
    f, g = (
        lambda x, y, f=f: vmap(lambda x: f(lambda z: cell(z, y) * y)(x))(x).sum() for f in (mg.checkpoint, lambda f: f)
    )
    close(grad(f, (0, 1))(A, Y), grad(g, (0, 1))(A, Y), rtol=1e-12)
    f, g = (
        lambda x, y, f=f: vmap(lambda y: f(lambda z: cell(z, y) * y)(x))(y).sum() for f in (mg.checkpoint, lambda f: f)
    )
    close(hessian(f, (0, 1))(X, A), hessian(g, (0, 1))(X, A), rtol=1e-12)


def hessian_of(f):
    return hessian(total(f), (0, 1))


def test_batched_gradients():
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    found = torch.autograd.functional.jacobian(mg.checkpoint(cell), (x, y), vectorize=True)
    close(found, torch.autograd.functional.jacobian(cell, (x, y)))
    f = lambda x, y: mg.checkpoint(cell)(x, y).sin().sum()  # noqa: E731
    found = torch.autograd.functional.hessian(f, (x, y), vectorize=True)
    close(found, hessian(lambda x, y: cell(x, y).sin().sum(), (0, 1))(X, Y))


# -- modules, random numbers ------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(width, 2, dropout, batch_first=True)
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)])
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x):
        y = self.norms[0](x)
        x = x + self.dropout(self.attention(y, y, y, need_weights=False)[0])
        return x + self.dropout(self.down(F.gelu(checkpoint_name(self.up(self.norms[1](x)), "hidden"))))


class Net(torch.nn.Module):
    def __init__(self, depth, width, wrap, dropout=0.0):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(width, dropout) for _ in range(depth)])
        self.wrap = wrap

    def forward(self, x):
        for block in self.blocks:
            x = self.wrap(block)(x)
        return x


def nets(wrap, depth=2, width=8, dropout=0.0, **options):
    made = []
    for one in (wrap, lambda f: f):
        torch.manual_seed(0)
        made.append(Net(depth, width, one, dropout).to(**options))
    return made


POLICIES = {
    "none": None,
    "products": save_products,
    "budget": save_budget(2000),
    "names": save_names("hidden"),
}  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradients_of_a_transformer_have_the_same_bits(policy, dropout):
    x, found = torch.randn(2, 5, 8), []
    for net in nets(lambda f: mg.checkpoint(f, POLICIES[policy]), dropout=dropout):
        torch.manual_seed(1)
        a = x.clone().requires_grad_()
        net(a).square().sum().backward()
        found.append([a.grad, torch.rand(3), *[p.grad for p in net.parameters()]])
    for ours, plain in zip(*found):
        assert torch.equal(ours, plain)


def test_second_derivatives_of_a_transformer():
    found = []
    for net in nets(mg.checkpoint, dropout=0.3, dtype=F64):
        x = random(2, 5, 8).requires_grad_()
        torch.manual_seed(1)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            (first,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
            second = torch.autograd.grad(first.square().sum(), [x, *net.parameters()], allow_unused=True)
        found.append([first, *[g for g in second if g is not None]])
    close(*found, rtol=1e-10)


def made(module, *args):
    """The same weights in each process: how near a difference is depends on them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return module(*args).to(F64)


DROPOUTS = {
    "functional": lambda x: F.dropout(x, 0.4),
    "by keyword": lambda x: F.dropout(input=x, p=0.4, training=True),
    "operator": lambda x: torch.dropout(x, 0.4, True),
    "in place": lambda x: F.dropout(x * 1, 0.4, inplace=True),
    "operator in place": lambda x: torch.dropout_(x * 1, 0.4, train=True),
    "module": torch.nn.Dropout(0.4),
    "of channels": torch.nn.Dropout1d(0.4),
    "of channels without a batch": lambda x: torch.stack([F.dropout1d(y, 0.4) for y in x]),
    "of images": lambda x: (
        F.dropout2d(x[..., None], 0.4, inplace=True)[..., 0] * F.dropout3d(x[..., None, None], 0.4)[..., 0, 0]
    ),
    "of features": torch.nn.FeatureAlphaDropout(0.4),
    "after a layer norm": lambda x: F.dropout(F.layer_norm(F.dropout(x, 0.4).sin(), (4,)), 0.4),
    "in evaluation": lambda x: F.dropout(x, 0.4, False) + F.dropout(x, 0.0) + torch.dropout(x, p=0.4, train=False),
    "transformer": made(Block, 4, 0.4),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_a_mask_is_the_same_in_every_derivative(name):
    """PyTorch draws other masks under torch.func if a tensor is not contiguous. The function is quadratic, or nearly."""
    linear = made(torch.nn.Linear, 4, 4)
    block = mg.checkpoint(lambda x: DROPOUTS[name](linear(x).transpose(0, 1)))
    x, v = random(2, 3, 4), random(2, 3, 4, seed=1)

    def f(x):
        torch.manual_seed(0)
        return block(x).square().sum()

    def slope(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x), x)[0]

    def dual(g):
        with fwAD.dual_level():
            return fwAD.unpack_dual(g(fwAD.make_dual(x, v))).tangent.detach()

    h = 1e-5
    with mg.override(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        first, second = ((g(x + h * v) - g(x - h * v)).detach() / (2 * h) for g in (f, slope))
        y = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(y), y, create_graph=True)
        (reverse,) = torch.autograd.grad(g, y, v)
        with fwAD.dual_level():  # forward mode enters after the call
            (g,) = torch.autograd.grad(f(y), y, create_graph=True)
            (late,) = torch.autograd.grad((g * v).sum(), y)
        for found, expected in (
            (jvp(f, (x,), (v,))[1], first),
            (dual(f), first),
            (grad(f)(x), slope(x)),
            (reverse, second),
            (late, second),
            (jvp(grad(f), (x,), (v,))[1], second),
            (grad(lambda x: jvp(f, (x,), (v,))[1])(x), second),
            (dual(grad(f)), second),
        ):
            close(found, expected, rtol=1e-6, atol=1e-6)
        (g,) = torch.autograd.grad(f(y), y, create_graph=True)
        batched = lambda: torch.autograd.grad(g, y, torch.stack([v, 2 * v]), is_grads_batched=True)[0]  # noqa: E731
        if name in ("of features", "transformer"):  # PyTorch draws the masks in C++
            for program in (batched, lambda: hessian(f)(x)):
                with pytest.raises(RuntimeError, match="random"):
                    program()
            return
        close(batched(), torch.stack([second, 2 * second]), rtol=1e-6, atol=1e-6)
        close((hessian(f)(x) * v).sum((-3, -2, -1)), second, rtol=1e-6, atol=1e-6)


def test_parameters_by_functional_call():
    ours, plain = nets(mg.checkpoint, dtype=F64)
    x, parameters = random(2, 5, 8), {n: p.detach() for n, p in plain.named_parameters()}
    loss = lambda net: lambda p, x: functional_call(net, p, (x,)).square().sum()  # noqa: E731
    close(grad(loss(ours))(parameters, x), grad(loss(plain))(parameters, x), rtol=1e-12)
    per_example = lambda net: vmap(grad(loss(net)), (None, 0))  # noqa: E731
    close(per_example(ours)(parameters, x[:, None]), per_example(plain)(parameters, x[:, None]), rtol=1e-12)
    tangents = {n: p.sin() for n, p in parameters.items()}
    second = lambda net: jvp(grad(loss(net)), (parameters, x), (tangents, x.cos()))[1]  # noqa: E731
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        close(second(ours), second(plain), rtol=1e-10)


LINEAR = {
    "dropout": lambda w: F.dropout(F.dropout(w, 0.5) * 3, 0.4),
    "noise": lambda w: w * torch.randn_like(w),
    "integers": lambda w: w * torch.randint(1, 100, (w.shape[-1],)),
    "no random numbers": lambda w: w * 3,
}


def value_and_slope(f, w):
    """The slope is also the value at 1, if the random numbers are the same."""
    value, pullback = vjp(f, w)
    return value, pullback(torch.ones_like(w))[0]


def value_and_tangent(f, w):
    return jvp(f, (w,), (torch.ones_like(w),))


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("way", [value_and_slope, value_and_tangent])
@pytest.mark.parametrize("name", LINEAR)
def test_each_element_of_a_batch_has_its_random_numbers(name, way, batches):
    """Also where no argument is batched."""
    w, rows = torch.ones(40, dtype=F64), {}
    for kind, f in {"plain": LINEAR[name], "checkpoint": mg.checkpoint(LINEAR[name])}.items():

        def one(x, f=f):
            return [y + 0 * x for y in way(f, w)]

        for _ in range(batches):
            one = vmap(one, randomness="different")
        values, slopes = one(torch.ones(3, 2, dtype=F64) if batches == 2 else torch.ones(3, dtype=F64))
        close(slopes, values)
        rows[kind] = len({tuple(row.tolist()) for row in values.flatten(0, -2)})
    assert rows["checkpoint"] == rows["plain"] == (1 if name == "no random numbers" else 3 * batches)


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_dropout_under_vmap(randomness):
    found = []
    for wrap in (mg.checkpoint, lambda f: f):
        f = lambda x: wrap(lambda x: F.dropout(x.sin(), 0.5) * F.dropout(x, 0.5))(x).sum()  # noqa: B023, E731
        for transform in (grad, lambda f: grad(lambda x: grad(f)(x).sin().sum())):
            torch.manual_seed(0)
            found.append(vmap(transform(f), randomness=randomness)(random(4, 10)))
    assert torch.equal(found[0], found[2])
    close(found[1], found[3])


@pytest.mark.parametrize("mode", MODES)
def test_dropout_in_every_mode_has_the_mask_of_the_call(mode):
    f = lambda x: F.dropout(x.sin(), 0.5) * F.dropout(x, 0.5)  # noqa: E731
    found = []
    for g in (mg.checkpoint(f), f):
        torch.manual_seed(0)
        found.append([*derivatives(g, [random(20)], mode), torch.rand(2, dtype=F64)])
    close(*found)


def test_autocast_is_that_of_the_call():
    found = []
    for net in nets(mg.checkpoint):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = net(torch.ones(2, 5, 8))
        out.sum().backward()
        found.append([out, *[p.grad for p in net.parameters()]])
    for ours, plain in zip(*found):
        assert torch.equal(ours, plain)


def test_an_autograd_function_that_reads_a_tensor_in_a_closure():
    class Scale(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x, w):
            return x * w

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g * w, g * x

    for policy in POLICIES.values():
        x, w = X.clone().requires_grad_(), Y.clone().requires_grad_()
        out = mg.checkpoint(lambda x: Scale.apply(x, w) * w.sin(), policy)(x)  # noqa: B023
        found = torch.autograd.grad(out.sum(), (x, w), create_graph=True)
        close(found, torch.autograd.grad((x * w * w.sin()).sum(), (x, w), create_graph=True))
        second = torch.autograd.grad(sum((g**2).sum() for g in found), (x, w))
        first = torch.autograd.grad((x * w * w.sin()).sum(), (x, w), create_graph=True)
        close(second, torch.autograd.grad(sum((g**2).sum() for g in first), (x, w)))
    f = lambda w: mg.checkpoint(lambda x: Scale.apply(x, w) * w.sin())(X).sum()  # noqa: E731
    close(hessian_of_one(f)(Y), hessian_of_one(lambda w: (X * w * w.sin()).sum())(Y))


def hessian_of_one(f):
    return lambda w: grad(lambda w: grad(f)(w).sin().sum())(w)


def test_memory_of_twelve_layers():
    """Saved tensors and one recomputed layer together stay below 2 sqrt(12) layers."""
    x, found = torch.randn(2, 16, 32), {}
    for name, net in zip(("ours", "plain"), nets(mg.checkpoint, depth=12, width=32)):
        parameters = {p.data_ptr() for p in net.parameters()}

        def pack(x, name=name, parameters=parameters):
            if x.data_ptr() not in parameters:
                found.setdefault(name, {})[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            found[name, "out"] = net(x.clone().requires_grad_())
    ours, plain = (sum(found[name].values()) for name in ("ours", "plain"))
    assert ours <= 13 * x.nbytes
    assert ours + plain / 12 < 2 * 12**0.5 * plain / 12 / 2
