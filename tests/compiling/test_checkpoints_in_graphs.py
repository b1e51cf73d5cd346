"""Checkpoints in compiled functions: derivatives, memory, random numbers and policies."""

import functools

import pytest
import torch
from helpers import modes
from helpers.interpreters import run_python
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional as F

import torch_manualgrad as mg
from torch_manualgrad.checkpointing import checkpoint_name, save_budget, save_names, save_products

pytestmark = pytest.mark.filterwarnings("error:torch_manualgrad")

GRAPHS = functools.partial(mg.compiling.backend, lowering="eager", fallback=False)
F64 = torch.float64
X, Y = torch.tensor([0.3, 0.7, 1.1], dtype=F64), torch.tensor([0.5, -0.4, 0.9], dtype=F64)
linear = nn.Linear(3, 3, dtype=F64)


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


def programs(checkpoint):
    def nested(x, y):
        inner = checkpoint(lambda x: x.sin() * y)
        return (checkpoint(lambda x: inner(x) * inner(x.cos()))(x) ** 2).sum()

    def trees(x, y):
        found = checkpoint(lambda pair, *, scale: {"a": pair[0].sin() * pair[1] * scale, "n": 3})((x * y, y), scale=2)
        return (found["a"] ** found["n"]).sum()

    def named(y):
        return lambda x: checkpoint_name(checkpoint_name(x.sin() * y, "inner").exp() * x, "outer").sin()

    inner, budget = save_names("inner"), save_budget(24)

    return {
        "module": lambda x, y: (checkpoint(linear)(x * y).tanh() ** 2).sum(),
        "products": lambda x, y: (checkpoint(lambda x: linear(linear(x).sin()) * y, save_products)(x) ** 2).sum(),
        "names": lambda x, y: (checkpoint(named(y), inner)(x) ** 2).sum(),
        "budget": lambda x, y: (checkpoint(lambda x: linear(linear(x).sin()) * y, budget)(x) ** 2).sum(),
        "nested": nested,
        "trees": trees,
        "detached": lambda x, y: (checkpoint(lambda x: x.detach().sin() * x * y)(x * y) ** 2).sum(),
        "under grad": lambda x, y: (grad(lambda x: checkpoint(lambda x: (x**3 * y).sum())(x))(x) ** 2).sum(),
        "under vmap": lambda x, y: (vmap(checkpoint(lambda x: x.sin() * y))(torch.stack([x, x * y])) ** 2).sum(),
        "of a rule": lambda x, y: (checkpoint(lambda x: doubled(x) * y)(x * y) ** 2).sum(),
    }


@mg.custom_vjp
def doubled(x):
    return x.sin()


doubled.defvjp(lambda x: (doubled(x), x), lambda x, g: (2 * g * x.cos(),))

COMPILED, PLAIN = programs(mg.checkpoint), programs(lambda f, policy=None: f)


def names(*fast):
    return [pytest.param(n, marks=() if n in fast else pytest.mark.slow) for n in COMPILED]


def compare(name, compiled, wanted):
    for mode in wanted:
        found, expected = modes.derivatives(compiled, (X, Y), mode), modes.derivatives(PLAIN[name], (X, Y), mode)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=lambda m: f"{mode}: {m}")


@pytest.mark.parametrize("name", names("module", "nested"))
def test_graphs_have_the_derivatives(name):
    compare(name, mg.compile(COMPILED[name], fullgraph=True, lowering="eager"), ("", "rev", "revrev", "fwd", "fwdrev"))


@pytest.mark.parametrize("name", [n for n in names("trees", "of a rule") if n.values[0] != "budget"])
def test_graphs_of_pytorch_have_the_derivatives(name):
    compare(name, torch.compile(COMPILED[name], fullgraph=True, backend="aot_eager"), ("", "rev"))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_inductor_has_the_derivatives(name):
    compare(name, mg.compile(COMPILED[name], fullgraph=True), ("rev", "revrev", "fwd", "fwdfwd", "revrevrev"))
    if name != "budget":
        compare(name, torch.compile(COMPILED[name], fullgraph=True), ("", "rev"))


def saved_by(backend, checkpoint):
    torch.compiler.reset()
    blocks = [
        nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 16))
        for _ in range(3)
    ]

    def f(x):
        for block in blocks:
            x = checkpoint(block)(x)
        return x.sum()

    x, held = torch.randn(128, 16, requires_grad=True), {}
    with mg.compiling.watching.watch() as report:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.setdefault(t.data_ptr(), t), lambda t: t):
            y = torch.compile(f, backend=backend, fullgraph=True)(x)
        if backend is GRAPHS:
            torch.autograd.grad(y, x)
            assert report.graphs[0].line.startswith("test_checkpoints_in_graphs.py")
            return report.graphs[0].saved
    return sum(t.nbytes for t in held.values())


@pytest.mark.parametrize("backend", ["aot_eager", GRAPHS])
def test_a_checkpoint_saves_less_than_none_and_a_policy_less_than_everything(backend):
    none, products, everything = (
        saved_by(backend, make) for make in (mg.checkpoint, lambda f: mg.checkpoint(f, save_products), lambda f: f)
    )
    assert none < products <= everything
    assert none < everything / 2


@pytest.mark.parametrize("backend", ["inductor", "manualgrad"])
@pytest.mark.slow
def test_dropout_drops_the_same_again(backend):
    x = torch.ones(256, requires_grad=True)
    compiled = torch.compile(
        lambda x: mg.checkpoint(lambda x: F.dropout(x.exp(), 0.5))(x), backend=backend, fullgraph=True
    )
    y = compiled(x)
    (found,) = torch.autograd.grad(y.sum(), x, create_graph=backend == "manualgrad")
    assert 0 < int((y == 0).sum()) < 256
    torch.testing.assert_close(found, y)
    if backend == "manualgrad":
        torch.testing.assert_close(torch.autograd.grad(found.sum(), x)[0], y)


@pytest.mark.parametrize("backend", ["aot_eager", GRAPHS])
def test_statistics_are_updated_once(backend):
    norms = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2)]
    norms[1].load_state_dict(norms[0].state_dict())
    x = torch.randn(5, 3)
    found = torch.compile(lambda x: mg.checkpoint(norms[0])(x).sin().sum(), backend=backend, fullgraph=True)(x)
    found.backward()
    norms[1](x).sin().sum().backward()
    for a, b in zip(norms[0].state_dict().values(), norms[1].state_dict().values()):
        torch.testing.assert_close(a, b)
    for a, b in zip(norms[0].parameters(), norms[1].parameters()):
        torch.testing.assert_close(a.grad, b.grad)


def saved_of_names(backend, policy):
    """The bytes that are saved for two calls of a function with two named tensors of 32 kB each, and 72 kB of products."""
    torch.compiler.reset()
    layers = [nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 16)]

    def block(x):
        x = checkpoint_name(layers[0](x).tanh(), "first")
        x = checkpoint_name(layers[1](x).sigmoid(), "second")
        return layers[2](x).tanh()

    f = mg.checkpoint(block, policy)
    x = torch.randn(128, 16, requires_grad=True)
    held = {}
    with mg.compiling.watching.watch() as report:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.setdefault(t.data_ptr(), t), lambda t: t):
            y = torch.compile(lambda x: f(f(x)).sum(), backend=backend, fullgraph=True)(x)
        found = torch.autograd.grad(y, [x, *layers[0].parameters()])
    for a, b in zip(found, torch.autograd.grad(block(block(x)).sum(), [x, *layers[0].parameters()])):
        torch.testing.assert_close(a, b)
    return report.graphs[0].saved if backend is GRAPHS else sum(t.nbytes for t in held.values())


@pytest.mark.parametrize("backend", ["aot_eager", GRAPHS])
def test_named_tensors_are_saved(backend):
    none, other, first, second, both = (
        saved_of_names(backend, p)
        for p in (None, save_names("third"), *map(save_names, ("first", "second")), save_names("first", "second"))
    )
    size = 128 * 64 * 4  # less what the compiler would save without: layer 1 of the last call needs it
    assert none == other
    assert none + size < first <= none + 2 * size and none + size < second <= none + 2 * size
    assert both - first == second - none


def test_a_budget_is_kept():
    size = 128 * 64 * 4
    none, *found = (saved_of_names(GRAPHS, p) for p in (None, *map(save_budget, (0, size // 4 + 100, size, 2**30))))
    assert found[0] == none
    assert [saved - none <= 2 * limit for saved, limit in zip(found, (0, size // 4 + 100, size))] == [True] * 3
    assert none < found[1] < found[2] < found[3] == saved_of_names(GRAPHS, save_products)


def test_a_budget_ends_the_graph_of_other_compilers():
    f = lambda x: mg.checkpoint(lambda x: linear(x).sin(), save_budget(64))(x * 1).sum()  # noqa: E731
    x = X.clone().requires_grad_()
    found = torch.autograd.grad(torch.compile(f, backend="aot_eager")(x), x)
    torch.testing.assert_close(found, torch.autograd.grad(linear(x).sin().sum(), x))
    torch.compiler.reset()
    with pytest.raises(Exception, match="runs outside of compiled graphs"):
        torch.compile(f, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.slow
def test_sizes_may_be_open():
    compiled = mg.compile(COMPILED["nested"], fullgraph=True, dynamic=True, lowering="eager")
    for n in (3, 4, 7):
        values = torch.linspace(0.2, 0.9, n, dtype=F64), torch.linspace(-0.4, 0.8, n, dtype=F64)
        for mode in ("rev", "revrev"):
            found, expected = (modes.derivatives(f, values, mode) for f in (compiled, PLAIN["nested"]))
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "checkpoint", [mg.checkpoint, lambda f: lambda x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)]
)
def test_attention_without_dropout(checkpoint):
    """PyTorch marks its attention as random even then."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, dtype=F64)
    found = []
    for f in (layer, torch.compile(lambda x: checkpoint(layer)(x), backend=GRAPHS, fullgraph=True)):
        x = torch.linspace(-1, 1, 24, dtype=F64).view(2, 3, 4).requires_grad_()
        with mg.override():
            (first,) = torch.autograd.grad(f(x).sin().sum(), x, create_graph=True)
            found.append((first, *torch.autograd.grad(first.square().sum(), [x, layer.linear1.weight])))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-10)


FIRST_CALL = """
import torch, torch_manualgrad as mg

class Net(torch.nn.Module):
    def forward(self, x):
        return mg.checkpoint(torch.tanh)(x)

x = torch.ones(3, requires_grad=True)
compiled = torch.compile(Net(), backend={backend!r}, fullgraph=True)
for _ in range(2):
    compiled(x).sum().backward()
torch.testing.assert_close(x.grad, 2 * (1 - torch.ones(3).tanh() ** 2))
double = mg.elementwise("aten::tanh", lambda result: 2 * (1 - result**2), register=False)
with mg.override(double):
    compiled(x).sum().backward()
torch.testing.assert_close(x.grad, 4 * (1 - torch.ones(3).tanh() ** 2))
"""


@pytest.mark.parametrize("backend", ["aot_eager", "manualgrad"])
def test_a_part_of_the_package_that_dynamo_imports(backend, tmp_path):
    """The graph that is being traced has no guard yet."""
    run = run_python("-c", FIRST_CALL.format(backend=backend), folder=tmp_path)
    assert run.returncode == 0, run.stderr


def test_a_policy_that_is_made_inside_ends_the_graph():
    def f(x, y):
        return (mg.checkpoint(lambda x: checkpoint_name(x.sin() * y, "inner").exp(), save_names("inner"))(x) ** 2).sum()

    for mode in ("rev", "revrev"):
        found = modes.derivatives(mg.compile(f, lowering="eager"), (X, Y), mode)
        torch.testing.assert_close(found, modes.derivatives(f, (X, Y), mode))
