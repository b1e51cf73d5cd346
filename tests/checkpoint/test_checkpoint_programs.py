"""Programs with checkpoints: memory, policies, compilers, overrides, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref

import pytest
import torch
import torch.utils.checkpoint
from helpers.tensors import close, random
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.nn import functional as F

import torch_manualgrad as mg
from torch_manualgrad import checkpoint
from torch_manualgrad.checkpointing import checkpoint_name, offload, save_budget, save_names, save_products
from torch_manualgrad.implicit import HiddenTensorError

F64 = torch.float64
X, Y = random(3), random(3, seed=1)
W = random(3, 3, seed=2)


def cell(x, y):
    return torch.tanh(x @ W + y) * x.exp()


def gradients(f):
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    first = torch.autograd.grad(f(x, y).sin().sum(), (x, y), create_graph=True)
    return [*first, *torch.autograd.grad(sum(g.sin().sum() for g in first), (x, y))]


# -- memory -----------------------------------------------------------------------------------------------------------


def saved_bytes(f):
    """The storages that autograd saves in a call, each once."""
    saved = {}

    def pack(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = f()
    assert out.requires_grad
    return sum(saved.values())


def deep(wrap, count=16):
    """A chain of blocks, each a chain of functions."""
    w = random(64, 64) / 8

    def block(x):
        for _ in range(4):
            x = torch.tanh(x @ w).exp().sin()
        return x

    def net(x):
        for _ in range(count):
            x = wrap(block)(x)
        return x

    return net


def test_a_graph_keeps_one_tensor_for_each_block():
    x = random(8, 64).requires_grad_()
    plain, ours = (saved_bytes(lambda: deep(wrap)(x)) for wrap in (lambda f: f, mg.checkpoint))  # noqa: B023
    weights = 64 * 64 * 8
    assert ours <= 17 * x.nbytes < plain / 7
    theirs = saved_bytes(
        lambda: deep(lambda f: lambda x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False))(x)
    )
    assert ours <= theirs + weights


def held_bytes(f):
    """The bytes that were allocated in a call and are held by its result."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out = f()
    assert out.requires_grad
    return sum(e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")


@pytest.mark.parametrize("mode", ["reverse over reverse", "reverse over forward", "dual numbers"])
def test_second_derivatives_save_memory_too(mode):
    x, found = random(8, 64).requires_grad_(), []
    for wrap in (mg.checkpoint, lambda f: f):
        net = deep(wrap)
        if mode == "reverse over reverse":
            out = net(x)
            found.append(held_bytes(lambda: torch.autograd.grad(out.sum(), x, create_graph=True)[0]))  # noqa: B023
        elif mode == "reverse over forward":
            found.append(held_bytes(lambda: jvp(net, (x,), (torch.ones_like(x),))[1]))  # noqa: B023
        else:
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
                found.append(held_bytes(lambda: torch.autograd.forward_ad.unpack_dual(net(dual)).tangent))  # noqa: B023
    assert found[0] < 90 * x.nbytes and found[0] < found[1] / 4


def counted(policy, compute=None):
    """The number of products in the forward and in the backward, and the saved tensors."""
    calls = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    w = [random(8, 8, seed=k).requires_grad_() for k in range(3)]

    def f(x):
        x = torch.tanh(x @ w[0])
        x = checkpoint_name(x @ w[1], "middle").sin()
        return torch.tanh(x @ w[2])

    f = compute or f
    x = random(4, 8).requires_grad_()
    out = []
    memory = saved_bytes(lambda: out.append(mg.checkpoint(f, policy)(x)) or out[0])
    with Count():
        out[0].sum().backward()
    found = [x.grad, *[p.grad for p in w]]
    x.grad = None
    for p in w:
        p.grad = None
    f(x).sum().backward()
    assert all(map(torch.equal, found, [x.grad, *[p.grad for p in w]]))
    return sum("mm" in c for c in calls), memory // x.nbytes


def test_what_policies_save():
    bare, few = counted(None)
    assert counted(save_products) == (bare - 3, few + 3)
    assert counted(save_names("middle")) == (bare - 1, few + 1)
    assert counted(save_names("another")) == (bare, few)
    size = random(4, 8).nbytes
    assert counted(save_budget(0)) == (bare, few)
    assert counted(save_budget(2 * size)) == (bare - 2, few + 2)
    assert repr(save_names("a", "b")) == "save_names('a', 'b')" and repr(save_budget(3)) == "save_budget(3)"


def test_what_offload_saves_is_what_the_host_keeps(monkeypatch):
    moved = []

    def on_host(x):
        moved.append((x, x.clone()))
        return moved[-1][1]

    assert repr(offload(save_names("a"))) == "offload(save_names('a'))"
    expected = counted(save_products)
    assert counted(offload(save_products)) == expected  # they are there
    monkeypatch.setattr("torch_manualgrad.checkpointing.policies._on_host", on_host)
    assert counted(offload(save_products)) == expected and len(moved) == 3
    assert counted(offload(save_names("middle"))) == counted(save_names("middle")) and len(moved) == 4
    assert counted(offload(save_budget(2 * random(4, 8).nbytes))) == (expected[0] + 1, expected[1] - 1)

    gone = []
    original = lambda x: gone.append(weakref.ref(x)) or on_host(x)  # noqa: E731
    monkeypatch.setattr("torch_manualgrad.checkpointing.policies._on_host", original)
    moved.clear()
    x = random(4, 3).requires_grad_()
    out = mg.checkpoint(lambda x: (x @ W).sin(), offload(save_products))(x)
    del moved[0]
    assert gone[0]() is None  # only the copy is kept
    close(torch.autograd.grad(out.sum(), x)[0], torch.autograd.grad((x @ W).sin().sum(), x)[0])


def test_a_compiler_leaves_offload_to_the_eager_call():
    x = random(4, 3).requires_grad_()
    f = mg.checkpoint(lambda x: (x @ W).sin(), offload(save_products))
    for backend in ("aot_eager", "manualgrad"):
        torch.compiler.reset()
        found = torch.compile(lambda x: f(x) * 2, backend=backend)(x)  # noqa: B023
        close(torch.autograd.grad(found.sum(), x)[0], torch.autograd.grad(2 * (x @ W).sin().sum(), x)[0])
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda x: f(x) * 2, backend="aot_eager", fullgraph=True)(x)


def test_what_is_written_to_is_not_saved():
    for f in (lambda x: torch.relu_(x @ W) * 2, lambda x: (x @ W).mul_(x).add_(1).sin()):
        x = random(4, 3).requires_grad_()
        for policy in (None, save_products):
            found = torch.autograd.grad(mg.checkpoint(f, policy)(x).sum(), x)
            close(found, torch.autograd.grad(f(x).sum(), x))


def test_a_function_that_does_something_else_is_found_with_a_policy():
    for first, later in (
        (lambda x: x @ W, lambda x: x.sin()),
        (lambda x: (x @ W) @ x, lambda x: (x @ W).sin() @ x),
        (lambda x: x.sin() @ W, lambda x: x.sin()),
    ):
        steps = {"now": first}
        x = random(3, 3).requires_grad_()
        out = mg.checkpoint(lambda x: steps["now"](x), save_products)(x)  # noqa: B023
        steps["now"] = later
        with pytest.raises(RuntimeError, match="<lambda> was called again in the backward, and called"):
            out.sum().backward()


def test_nothing_is_kept_after_the_graph():
    x, w = X.clone().requires_grad_(), Y.clone().requires_grad_() * 1
    holder = weakref.ref(w)
    out = mg.checkpoint(lambda x, w=w: cell(x, w), save_products)(x)
    del w
    out.sum().backward()
    del out
    gc.collect()
    assert holder() is None


# -- what a function reads --------------------------------------------------------------------------------------------


def test_a_function_in_a_loop_has_the_variables_of_its_call():
    x, blocks = X.clone().requires_grad_(), [torch.sin, torch.exp, torch.tanh]
    out = plain = x
    for k, block in enumerate(blocks):
        out, plain = mg.checkpoint(lambda x: block(x) * (k + 1))(out), block(plain) * (k + 1)  # noqa: B023
    close(torch.autograd.grad(out.sum(), x), torch.autograd.grad(plain.sum(), x))


def test_tensors_that_are_not_found_are_refused():
    class Slotted:
        __slots__ = ("w",)

    for make in (lambda: Y.clone().requires_grad_(), lambda: Y.clone().requires_grad_() * 1):
        hidden = Slotted()
        hidden.w = make()
        x = X.clone().requires_grad_()
        for policy in (None, save_products):
            with pytest.raises(mg.implicit.HiddenTensorError, match="a tensor of shape .3."):
                mg.checkpoint(lambda x: x * hidden.w, policy)(x)  # noqa: B023
    hidden = Slotted()

    def transformed(w):
        hidden.w = w
        return mg.checkpoint(lambda x: x * hidden.w)(X * w.sum()).sum()

    with pytest.raises(mg.implicit.HiddenTensorError, match="a tensor of shape .3."):
        grad(transformed)(Y)


def test_a_transform_inside():
    """It cannot read a tensor in a closure, which has to be an argument."""
    f = lambda x, w: vmap(lambda a, b: a * b.sin())(x, w) + grad(lambda w: (w**3 * x).sum())(w)  # noqa: E731
    x, w = X.clone().requires_grad_(), Y.clone().requires_grad_()
    found, expected = (torch.autograd.grad(g(x, w).sum(), (x, w)) for g in (mg.checkpoint(f), f))
    close(found, expected)
    close(
        hessian(lambda x, w: mg.checkpoint(f)(x, w).sum(), (0, 1))(X, Y), hessian(lambda *a: f(*a).sum(), (0, 1))(X, Y)
    )
    for call in (
        lambda: mg.checkpoint(lambda x: f(x, w))(x),
        lambda: grad(lambda w: mg.checkpoint(lambda x: f(x, w))(X).sum())(Y),
    ):
        with pytest.raises(mg.implicit.HiddenTensorError, match="argument: w. Pass it as an argument"):
            call()


def test_a_gradient_of_autograd_inside():
    """As forces are."""

    def forces(x, w):
        x = x.requires_grad_() if x.is_leaf else x
        (g,) = torch.autograd.grad((w * x**4).sum(), x, create_graph=True)
        return g * w

    x, w = X.clone().requires_grad_(), Y.clone().requires_grad_()
    found, expected = (torch.autograd.grad(g(x, w).sin().sum(), (x, w)) for g in (mg.checkpoint(forces), forces))
    close(found, expected)
    close(torch.autograd.grad(mg.checkpoint(lambda x: forces(x, w))(x).sin().sum(), (x, w)), expected)


def test_tensors_in_objects():
    class Config:
        def __init__(self):
            self.layers = {"a": [torch.nn.Linear(3, 3, dtype=F64)], "scale": (Y.clone().requires_grad_(),)}

        def apply(self, x):
            return self.layers["a"][0](x) * self.layers["scale"][0]

        def __call__(self, x):
            return self.apply(x)

    config = Config()
    inputs = [*config.layers["a"][0].parameters(), config.layers["scale"][0]]
    for f in (config, config.apply, lambda x: config.apply(x)):
        found = torch.autograd.grad(mg.checkpoint(f)(X).sum(), inputs)
        close(found, torch.autograd.grad(config.apply(X).sum(), inputs))
    found = torch.autograd.grad(mg.checkpoint(lambda c, x, k: c(x) * k)(config, X, k=2).sum(), inputs)
    close(found, torch.autograd.grad(2 * config.apply(X).sum(), inputs))


def test_buffers_and_state():
    norm = torch.nn.BatchNorm1d(3, dtype=F64)
    norm.register_buffer("steps", torch.zeros((), dtype=F64))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm

        def forward(self, x):
            norm.steps = norm.steps + 1
            return self.norm(x) * norm.steps

    x = random(5, 3).requires_grad_()
    out = mg.checkpoint(Net())(x)
    (found,) = torch.autograd.grad(out.square().sum(), x)
    assert norm.steps == 1
    close(
        found, torch.autograd.grad((torch.nn.functional.batch_norm(x, None, None, training=True)).square().sum(), x)[0]
    )


def test_a_changed_parameter_is_refused():
    linear = torch.nn.Linear(3, 3, dtype=F64)
    out = mg.checkpoint(lambda x: linear(x).sin())(X)
    with torch.no_grad():
        linear.weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_parameters_that_functional_call_takes_away():
    """Also those that no transform follows: the backward runs after they are gone."""
    linear = torch.nn.Linear(3, 3, dtype=F64)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return mg.checkpoint(self.linear)(x).sin()

    weights = {"linear.weight": random(3, 3, seed=5), "linear.bias": Y.clone()}
    plain = lambda p, x: F.linear(x, p["linear.weight"], p["linear.bias"]).sin().sum()  # noqa: E731
    ours = lambda p, x: functional_call(Net(), p, (x,)).sum()  # noqa: E731
    close(grad(ours, (0, 1))(weights, X), grad(plain, (0, 1))(weights, X))
    close(grad(ours, 1)(weights, X), grad(plain, 1)(weights, X))
    x = X.clone().requires_grad_()
    close(torch.autograd.grad(ours(weights, x), x), torch.autograd.grad(plain(weights, x), x))


# -- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"strong_zero": True}])
def test_under_every_rule_of_the_package(options):
    with mg.override("*", **options):
        found, expected = gradients(mg.checkpoint(cell, save_products)), gradients(cell)
        close([*found, hessian_of(mg.checkpoint(cell))], [*expected, hessian_of(cell)])


def hessian_of(f):
    return hessian(lambda x, y: f(x, y).sum(), (0, 1))(X, Y)


def test_hooks_on_saved_tensors():
    packed = []
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: packed.append(x.shape) or x.numpy(force=True), torch.tensor
    ):
        out = mg.checkpoint(cell)(x, y).sum()
    assert packed == [(3,), (3,)]
    close(torch.autograd.grad(out, (x, y)), torch.autograd.grad(cell(x, y).sum(), (x, y)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_of_a_checkpoint_of_pytorch(reentrant):
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    out = torch.utils.checkpoint.checkpoint(lambda x, y: mg.checkpoint(cell)(x, y) * x, x, y, use_reentrant=reentrant)
    out.sum().backward()
    close((x.grad, y.grad), torch.autograd.grad((cell(x, y) * x).sum(), (x, y)))


@pytest.mark.parametrize("backend", ["aot_eager", "manualgrad"])
def test_compiled_programs(backend):
    torch._dynamo.reset()
    linear = torch.nn.Linear(3, 3, dtype=F64)
    f = lambda x: mg.checkpoint(lambda x: F.dropout(linear(x).sin(), 0.0) * x, save_products)(x * 1) * 2  # noqa: E731
    plain = lambda x: linear(x).sin() * x * 2  # noqa: E731
    x = X.clone().requires_grad_()
    compiled = torch.compile(f, backend=backend)
    close(
        torch.autograd.grad(compiled(x).sum(), [x, linear.weight]),
        torch.autograd.grad(plain(x).sum(), [x, linear.weight]),
    )
    torch._dynamo.reset()
    slopes = torch.compile(grad(lambda x: mg.checkpoint(lambda x: linear(x).sin() * x)(x).sum()), backend=backend)
    close(slopes(X), grad(lambda x: (linear(x).sin() * x).sum())(X))
    torch._dynamo.reset()


class _Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.linear.compile(backend="aot_eager")

    def forward(self, x):
        return torch.sin(self.linear(x))


def _network():
    torch.manual_seed(0)
    layers = nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Dropout(0.2)
    return nn.Sequential(*layers).to(torch.float64)


@pytest.mark.parametrize("backend", ["aot_eager", "manualgrad"])
@pytest.mark.parametrize("kind", ["module", "module inside", "closure"])
def test_compiled_functions_that_read_parameters(kind, backend):
    options = {"options": {"lowering": "eager"}} if backend == "manualgrad" else {}
    weight, x = random(4, 4).requires_grad_(), random(5, 4, seed=1).requires_grad_()
    plain = {
        "module": _network(),
        "module inside": nn.Sequential(_Inner(), nn.Tanh()),
        "closure": lambda x: torch.tanh(x @ weight) @ weight,
    }[kind]
    module = copy.deepcopy(plain) if kind == "module" else plain
    compiled = torch.compile(module, backend=backend, **options) if kind != "module inside" else module
    parameters = list(module.parameters()) if isinstance(module, nn.Module) else [weight]
    others = list(plain.parameters()) if isinstance(plain, nn.Module) else [weight]
    for _ in range(2):
        torch.manual_seed(1)
        expected = torch.autograd.grad(plain(x).pow(3).sum(), [x, *others])
        torch.manual_seed(1)
        close(torch.autograd.grad(mg.checkpoint(compiled)(x).pow(3).sum(), [x, *parameters]), expected)
    if kind == "module":
        close(dict(module.named_buffers()), dict(plain.named_buffers()))


def test_a_compiled_module_stays_compiled():
    torch._dynamo.reset()  # other tests compile the code that calls modules
    seen = []

    def backend(graph, inputs):
        seen.append(len(inputs))
        return graph.forward

    linear, x = nn.Linear(4, 4), torch.rand(2, 4, requires_grad=True)
    mg.checkpoint(torch.compile(linear, backend=backend))(x).sum().backward()
    assert seen == [3]  # one graph serves the call and its recomputation
    assert linear.weight.grad is not None and isinstance(linear.weight, nn.Parameter)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_that_reads_attributes_of_tensors(backend):
    torch._dynamo.reset()

    def f(q, k):
        return torch.softmax(q @ k.mT, -1).to(q.device)

    compiled = mg.checkpoint(torch.compile(f, backend=backend))
    q, k = random(3, 4).requires_grad_(), random(3, 4, seed=1).requires_grad_()
    expected = torch.autograd.grad(f(q, k).square().sum(), [q, k])
    close(torch.autograd.grad(compiled(q, k).square().sum(), [q, k]), expected)
    close(grad(lambda q: compiled(q, k.detach()).square().sum())(q.detach()), expected[0])


@pytest.mark.parametrize("compiled", [False, True])
def test_modules_with_buffers_under_transforms(compiled):
    network, x, rows = _network().eval(), random(5, 4), random(2, 5, 4, seed=1)
    other = copy.deepcopy(network)
    f = mg.checkpoint(mg.compile(network, lowering="eager") if compiled else network)

    def square(f):
        return lambda x: f(x).pow(2).sum()

    for way in (
        lambda f: grad(square(f))(x),
        lambda f: jvp(f, (x,), (x,))[1],
        lambda f: hessian(square(f))(x),
        lambda f: torch.func.jacrev(torch.func.jacrev(square(f)))(x),
        lambda f: torch.func.jacfwd(torch.func.jacfwd(square(f)))(x),
        lambda f: vmap(hessian(square(f)))(rows),
    ):
        close(way(f), way(other))


def test_export():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3, dtype=F64)

        def forward(self, x):
            return mg.checkpoint(self.linear)(x).sin()

    model = Model()
    for strict in (False, True):
        program = torch.export.export(model, (X,), strict=strict)
        assert "manualgrad_programs" not in str(program.graph)
        close(program.module()(Y), model(Y))


def test_levels_and_series():
    f = lambda x: mg.checkpoint(lambda x: cell(x, Y))(x)  # noqa: E731
    ours = mg.forward_ad.jet(f, (X,), ([Y, None, None],))
    close(ours, mg.forward_ad.jet(lambda x: cell(x, Y), (X,), ([Y, None, None],)))
    close(mg.forward_ad.laplacian(f)(X), mg.forward_ad.laplacian(lambda x: cell(x, Y))(X))
    with mg.forward_ad.dual_level():
        out = mg.forward_ad.unpack_dual(f(mg.forward_ad.make_dual(X, Y)))
    close(out.tangent, jvp(lambda x: cell(x, Y), (X,), (Y,))[1])


def test_without_reverse_mode_the_function_is_called_as_it_is():
    calls = []
    f = mg.checkpoint(lambda x: (calls.append(1), x.sin())[1])
    f(X), vmap(f)(X), jvp(f, (X,), (Y,)), jvp(lambda x: jvp(f, (x,), (Y,))[1], (X,), (Y,))
    with torch.no_grad():
        f(X.clone().requires_grad_())
    assert len(calls) == 5
    grad(lambda x: f(x).sum())(X)
    assert len(calls) == 7


def test_wrong_arguments():
    with pytest.raises(TypeError, match="checkpoint: f: expected a function"):
        mg.checkpoint(3)
    with pytest.raises(TypeError, match="policy: expected None or a policy"):
        mg.checkpoint(torch.sin, "products")
    with pytest.raises(TypeError, match="name: expected a string"):
        checkpoint_name(X, 3)
    with pytest.raises(TypeError, match="names: expected strings"):
        save_names(3)
    with pytest.raises(ValueError, match="limit: expected a number of bytes"):
        save_budget(-1)
    with pytest.raises(TypeError, match="policy: expected a policy of mg.checkpointing, got"):
        offload("products")
    assert checkpoint_name(X, "a") is X


def test_training_is_the_same_to_the_bit():
    losses = []
    for wrap in (mg.checkpoint, lambda f: mg.checkpoint(f, save_products), lambda f: f):
        torch.manual_seed(0)
        net = torch.nn.ModuleList(
            [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Dropout(0.2)) for _ in range(3)]
        )
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        for _ in range(5):
            x = torch.randn(8, 4)
            for block in net:
                x = wrap(block)(x)
            optimizer.zero_grad()
            x.square().sum().backward()
            optimizer.step()
        losses.append(torch.cat([p.flatten() for p in net.parameters()]))
    assert torch.equal(losses[0], losses[2]) and torch.equal(losses[1], losses[2])


# -- what a recomputation cannot give back ----------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    """Which PyTorch's pytrees take for a leaf."""

    logits: Tensor
    loss: Tensor


def test_a_result_that_is_no_pytree_is_refused():
    x = random(3).requires_grad_()
    for f in (lambda x: Output(x.sin(), x.sum()), lambda x: torch.distributions.Normal(x, 1.0)):
        with pytest.raises(TypeError, match="would lose its derivative"):
            checkpoint(f)(x)
        with pytest.raises(TypeError, match="would lose its derivative"):
            torch.func.grad(lambda x, f=f: vars(checkpoint(f)(x)) and x.sum())(x)


class WithAuxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x):
        y = self.linear(x)
        self.aux = y.square().mean()
        return y


def test_a_gradient_through_a_tensor_that_was_left_elsewhere_raises():
    net = WithAuxiliary()
    y = checkpoint(net)(random(2, 3))
    y.sum().backward()  # of the result alone it is right
    close(net.aux, y.square().mean())
    y = checkpoint(net)(random(2, 3))
    with pytest.raises(HiddenTensorError, match="left in another place than its result"):
        (y.sum() + net.aux).backward()


def test_buffers_and_modes_are_those_of_the_call():
    x = random(5, 4)
    for training in (True, False):
        found = []
        for wrap in (lambda f: f, checkpoint):
            net = nn.BatchNorm1d(4, dtype=torch.float64).train(training)
            a = x.clone().requires_grad_()
            g = torch.autograd.grad(wrap(net)(a).pow(3).sum(), a, create_graph=True)[0]
            (h,) = torch.autograd.grad(g.sin().sum(), a)
            found.append((g, h, dict(net.named_buffers())))
        close(found[0], found[1])
    net, a = nn.BatchNorm1d(4, dtype=torch.float64).eval(), x.clone().requires_grad_()
    y = checkpoint(net)(a)
    net.train()(10 * x)
    close(torch.autograd.grad(y.sum(), a)[0], torch.full_like(x, (1 + net.eps) ** -0.5))


def test_a_large_buffer_that_has_changed_raises():
    net = nn.Module()
    net.register_buffer("table", random(200, 200))
    net.forward = lambda x: (x @ net.table).sin()
    x = random(2, 200).requires_grad_()
    y = checkpoint(net)(x)
    net.table.add_(1)
    with pytest.raises(RuntimeError, match="the tensor table, .* was written to after the call"):
        torch.autograd.grad(y.sum(), x)


def test_a_tensor_that_is_no_buffer_and_has_changed_raises():
    class Object:
        def __init__(self):
            self.table = torch.ones(2)

        def __call__(self, x):
            return x * self.table

    x, table, thing = torch.ones(2, requires_grad=True), torch.ones(2), Object()
    for f, changed, name in ((lambda x: x * table, table, "table"), (thing, thing.table, r"Object\.table")):
        y, z = mg.checkpoint(f)(x), mg.checkpoint(f)(x)
        close(torch.autograd.grad(z.sum(), x)[0], torch.ones(2))
        changed.mul_(3)
        with pytest.raises(RuntimeError, match=f"the tensor {name}, .* was written to after the call"):
            torch.autograd.grad(y.sum(), x)


def test_a_tensor_that_the_function_counts_in_may_change():
    x, calls = torch.ones(2, requires_grad=True), torch.zeros(())

    def f(x):
        calls.add_(1)
        return x.sin()

    y = mg.checkpoint(f)(x)
    calls.add_(1)
    close(torch.autograd.grad(y.sum(), x)[0], torch.ones(2).cos())


def test_a_write_to_an_argument_raises():
    x, b = random(3).requires_grad_(), torch.zeros(3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="writes to tensor 1 of its arguments"):
        checkpoint(lambda x, b: x * b.add_(1))(x, b)


def test_a_write_to_an_argument_raises_under_transforms():
    writes = checkpoint(lambda x, b: x * b.add_(1))
    transformed = grad(lambda x, b: writes(x, b.clone()).sum())
    for f, args in ((transformed, (random(3), random(3))), (vmap(transformed), (random(2, 3), random(2, 3)))):
        with pytest.raises(RuntimeError, match="writes to tensor 1 of its arguments"):
            f(*args)


def test_a_compiled_function_of_dual_numbers_leaves_no_trace():
    compiled = torch.compile(torch.sin, backend="manualgrad", options={"lowering": "eager"})
    with torch.autograd.forward_ad.dual_level():
        compiled(torch.autograd.forward_ad.make_dual(random(3), random(3)))
    x = random(3).requires_grad_()
    f = checkpoint(lambda x: torch.autograd.grad((x**3).sum(), x, create_graph=True)[0])
    close(torch.autograd.grad(f(x).sum(), x)[0], 6 * x)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(3, 3, dtype=F64)
        self.of_module, self.of_method = checkpoint(self.cell), checkpoint(self.step)

    def step(self, x):
        return self.cell(x).sin()

    def forward(self, x):
        return self.of_method(x) + self.of_module(x)


@checkpoint
def decorated(x):
    return x.sin()


@pytest.mark.parametrize("made", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies_of_a_module_have_their_own_parameters(made):
    assert made(decorated) is decorated
    model = Checkpointed()
    other = made(model)
    with torch.no_grad():
        other.cell.weight.mul_(2)
    y = other.cell(X)
    close(other(X), y + y.sin())
    other(X).sum().backward()
    assert model.cell.weight.grad is None and other.cell.weight.grad is not None


def test_a_decorated_method():
    class Cell(nn.Module):
        scale = 2

        @checkpoint
        def forward(self, x):
            return self.scale * x.sin()

    x = X.clone().requires_grad_()
    close(torch.autograd.grad(Cell()(x).sum(), x)[0], 2 * X.cos())


def test_a_leaf_that_the_function_makes():
    """As a force field does."""
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def force(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(net(x).sum(), x, create_graph=True)[0]

    weights = list(net.parameters())
    found, expected = (
        torch.autograd.grad(f(random(5, 3)).square().sum(), weights, allow_unused=True)
        for f in (checkpoint(force), force)
    )
    assert [g is None or bool((g == 0).all()) for g in found] == [g is None for g in expected]
    close([g for g, e in zip(found, expected) if e is not None], [e for e in expected if e is not None])


def test_a_module_that_makes_its_parameters_in_the_first_call():
    net = nn.LazyLinear(4)
    wrapped = checkpoint(net)
    x = torch.randn(2, 3)
    for _ in range(2):
        net.zero_grad()
        wrapped(x).sum().backward()
        close(net.weight.grad, x.sum(0).expand(4, 3), rtol=1e-5)


@pytest.mark.parametrize(
    "through", [lambda w: w, lambda w: w.contiguous(), lambda w: w.to(w.dtype), lambda w: w.requires_grad_()]
)
def test_a_hidden_leaf_that_passes_through_a_function_is_refused(through):
    """Some functions return their argument, which is then not a tensor that they made."""
    w = random(3).requires_grad_()
    hidden = weakref.ref(w)  # which no search finds
    with pytest.raises(HiddenTensorError):
        checkpoint(lambda x: x * through(hidden()))(random(3).requires_grad_())
