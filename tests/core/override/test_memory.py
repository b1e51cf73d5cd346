"""override(memory=True): fewer bytes are saved, and values and gradients keep their bits."""

import contextlib
import copy
import dataclasses
import functools
import gc
import pickle
import threading
import weakref

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_manualgrad as mg
from torch_manualgrad.core.override import memory
from torch_manualgrad.core.rule import reached, recomputables

N = 16  # elements, so that a recipe of (N, 8, N) pays


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def saved_bytes(*outputs):
    """The bytes of the distinct storages that the graphs of these tensors keep."""
    storages, seen, nodes = {}, set(), [y.grad_fn for y in outputs]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for packed in packed_of(node):
            for kept in packed.tensors() if isinstance(packed, memory.Kept | memory.Packed) else [packed]:
                if kept is not None:
                    storages[kept.untyped_storage().data_ptr()] = kept.untyped_storage().nbytes()
        nodes += [before for before, _ in node.next_functions]
    return sum(storages.values())


def packed_of(node):
    """What hooks have packed for a node."""
    saved = [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_")]
    return [x.data for each in saved for x in (each if isinstance(each, tuple) else [each])]


def recipes(*outputs):
    """How many saved tensors of these graphs are recipes."""
    found, seen, nodes = 0, set(), [y.grad_fn for y in outputs]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for packed in packed_of(node):
            found += isinstance(packed, memory.Packed) or getattr(packed, "replaced", None) is not None
        nodes += [before for before, _ in node.next_functions]
    return found


def bits(x):
    return x.detach().contiguous().view(-1).view(torch.uint8)


def assert_bitwise(found, expected):
    assert len(found) == len(expected)
    for x, y in zip(found, expected):
        if x is None or y is None:
            assert x is y
        else:
            assert x.dtype is y.dtype and x.stride() == y.stride() and torch.equal(bits(x), bits(y))


def gradients(function, inputs, order=1):
    """The value, the gradients, and with ``order`` 2 the gradients of the sum of squares of those."""
    y = function(*inputs)
    loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().abs()
    found = torch.autograd.grad(loss, inputs, create_graph=order > 1, allow_unused=True)
    result = [y, *found]
    if order > 1:
        again = sum(g.abs().square().sum() for g in found if g is not None and g.requires_grad)
        result += torch.autograd.grad(again, inputs, allow_unused=True)
    return result


def x(*shape, dtype=torch.float32):
    return torch.randn(*(shape or (N, 8, N)), dtype=dtype).requires_grad_()


def weight(*shape, dtype=torch.float32):
    return (torch.randn(*shape, dtype=dtype) / 4).requires_grad_()


def linear(y, w):
    return F.linear(y, w)


ELEMENTWISE = {
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.5),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "softplus": lambda x: F.softplus(x, 2.0, 3.0),
    "scaled": lambda x: F.silu(x) * 0.5,
    "gated": lambda x: F.silu(x) * (x + 0),
    "chain": lambda x: F.relu(F.gelu(F.silu(x))),
    "long chain": lambda x: functools.reduce(lambda y, f: f(y), [F.silu, F.gelu, F.mish] * 3, x),
    "relu of relu": lambda x: F.relu(F.silu(x) + 1).relu(),
    "relu in place": lambda x: F.silu(x).relu_(),
    "add in place": lambda x: F.silu(x).add_(x),
    "scalar in place": lambda x: F.gelu(x).mul_(3),
    "silu in place": lambda x: F.silu(x + 1, inplace=True),
    "write to a view": lambda x: _write_to_view(F.gelu(x)),
    "layer_norm": lambda x: F.layer_norm(x, (N,)),
    "layer_norm, unknown eps": lambda x: F.layer_norm(x, (N,), eps=0.37),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "rms_norm": lambda x: F.rms_norm(x, (N,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "instance_norm": lambda x: F.instance_norm(x),
    "dropout": lambda x: _seeded(F.dropout)(F.gelu(x), 0.5),
    "normed": lambda x: F.relu(F.batch_norm(x, None, None, training=True)),
    "used twice": lambda x: F.gelu(x) + F.silu(F.gelu(x)),
    "none": torch.tanh,
}


def _write_to_view(y):
    y[0].mul_(2)
    return y


def _seeded(function):
    def run(*args):
        torch.manual_seed(1)
        return function(*args)

    return run


VIEWS = {
    "itself": lambda y: y,
    "transpose": lambda y: y.transpose(0, 2),
    "reshape": lambda y: y.reshape(N, 8, 1, N).flatten(0, 1)[None],
    "permute": lambda y: y.permute(2, 1, 0).contiguous(),
    "unsqueeze": lambda y: y.unsqueeze(1)[:, 0],
    "expand": lambda y: y[:, None].expand(N, 2, 8, N)[:, 1],
    "part": lambda y: y[2:, 1:],
}
RULES = {"rules": (), "all": ("*",)}


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("names", RULES.values(), ids=RULES)
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_bits_are_the_same(name, order, names, strong):
    for view in VIEWS.values() if (order, names, strong) == (1, (), False) else [VIEWS["transpose"]]:
        inputs = [x(), weight(N, view(torch.empty(N, 8, N)).shape[-1])]

        def program(x, w, view=view):
            return linear(view(ELEMENTWISE[name](x * 1.5)), w)

        # without hooks, strong zeros take PyTorch's gradients where they are finite, which are rounded differently
        no_op = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda t: t)
        with mg.override(*names, strong_zero=strong), no_op if strong else contextlib.nullcontext():
            expected = gradients(program, inputs, order)
        with mg.override(*names, strong_zero=strong, memory=True):
            found = gradients(program, inputs, order)
        assert_bitwise(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_dtypes(name, dtype):
    def program(x, w):
        return linear(ELEMENTWISE[name](x * 1.5), w)

    inputs = [x(dtype=dtype), weight(8, N, dtype=dtype)]
    with mg.override():
        expected = gradients(program, inputs)
    with mg.override(memory=True):
        assert_bitwise(gradients(program, inputs), expected)


def test_complex():
    inputs = [x(dtype=torch.complex64), weight(8, N, dtype=torch.complex64)]

    def program(x, w):
        y = torch.sigmoid(x) * x
        return torch.view_as_real(linear(y.conj() * y, w))

    expected = gradients(program, inputs, 2)
    with mg.override(memory=True):
        assert_bitwise(gradients(program, inputs, 2), expected)


RECIPES = [
    name
    for name in ELEMENTWISE
    if name
    not in (
        "silu in place",
        "write to a view",
        "layer_norm, unknown eps",
        "rms_norm",
        "scalar in place",
        "add in place",
    )
    and name not in ("none", "instance_norm", "layer_norm", "hardsigmoid", "mish")
    and not (name == "group_norm" and reached("2.15"))  # whose node keeps no eps
]


@pytest.mark.parametrize("name", RECIPES)
def test_fewer_bytes(name):
    inputs = [x(), weight(8, N)]

    def program(x, w):
        return linear(ELEMENTWISE[name](x * 1.5), w)

    expected = saved_bytes(program(*inputs))
    with mg.override(memory=True):
        y = program(*inputs)
        assert recipes(y)
        assert saved_bytes(y) < expected


class Transformer(nn.Module):
    def __init__(self, width=32, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, n, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, w))
        return x + self.mlp(self.norm2(x))


class ResNet(nn.Module):
    def __init__(self, channels=8, inplace=False):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace)

    def forward(self, x):
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y = y.add_(x) if self.relu.inplace else x + y
        return self.relu(y)


def transformer():
    return nn.Sequential(Transformer(), Transformer()), torch.randn(2, 32, 32)


def resnet(inplace=False):
    return nn.Sequential(*[ResNet(inplace=inplace) for _ in range(4)]), torch.randn(4, 8, 16, 16)


def resnet_evaluation():
    model, x = resnet()
    return model.eval(), x


def resnet_channels_last():
    model, x = resnet()
    return model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)


MODELS = {
    "transformer": transformer,
    "resnet": resnet,
    "resnet in place": functools.partial(resnet, True),
    "resnet in evaluation": resnet_evaluation,
    "resnet channels last": resnet_channels_last,
}


def step(model, x):
    """The loss, the gradients and the buffers after a step."""
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss, *[p.grad for p in model.parameters()], *[b.clone() for b in model.buffers()]]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_models(make, autocast):
    model, inputs = make()
    other = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = step(model, inputs)
        with mg.override(memory=True):
            assert_bitwise(step(other, inputs), expected)
    expected = saved_bytes(model(inputs).sum())
    with mg.override(memory=True):
        assert saved_bytes(model(inputs).sum()) < 0.85 * expected


NODES = {"all": (("*",), False), "strong zeros": ((), True)}
KEPT = {("resnet in place", "all"), ("resnet in evaluation", "all"), ("resnet in evaluation", "strong zeros")}


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("name", MODELS)
def test_fewer_bytes_with_nodes_of_rules(name, nodes, monkeypatch):
    """C++ nodes of rules do not show what hooks have packed: the bytes are counted by what the hooks have returned."""
    alive, first = [], memory.Kept.__init__

    def init(self, *arguments):
        first(self, *arguments)
        alive.append(weakref.ref(self))

    def packed_bytes():
        del alive[:]
        loss = model(inputs).sum()
        storages = {x.untyped_storage() for kept in alive if kept() is not None for x in kept().tensors()}
        assert loss.grad_fn
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    monkeypatch.setattr(memory.Kept, "__init__", init)
    model, inputs = MODELS[name]()
    names, strong = NODES[nodes]
    with mg.override(*names, strong_zero=strong, memory=True):
        found = packed_bytes()
        with monkeypatch.context() as without:
            without.setattr(memory, "recomputables", {})
            expected = packed_bytes()
    assert found == expected if (name, nodes) in KEPT else found < 0.85 * expected


@pytest.mark.parametrize("names", RULES.values(), ids=RULES)
def test_the_garbage_collector_at_every_step(names):
    """Objects that a graph owns are traversed while it is built, differentiated and dropped, also by other threads."""
    model, inputs = transformer()
    images, pictures = resnet()
    expected = [step(copy.deepcopy(model), inputs), step(copy.deepcopy(images), pictures)]
    found = []

    def work():
        with mg.override(*names, memory=True):
            found.append([step(copy.deepcopy(model), inputs), step(copy.deepcopy(images), pictures)])
            y = F.gelu(x() * 2)
            z = linear(y, weight(8, N))
            ring = [y.grad_fn, z.grad_fn]
            ring.append(ring)  # freed by the collector

    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        work()
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert len(found) == 3
    if not names:
        for each in found:
            for one, other in zip(each, expected):
                assert_bitwise(one, other)


@pytest.mark.parametrize("function", [lambda x: F.gelu(x) * x.sqrt(), lambda x: F.relu(x) ** x, torch.hypot])
def test_strong_zeros_differ_by_rounding_only(function):
    """Hooks leave finite gradients to the rule, which rounds them differently (docs/memory.md)."""
    inputs = [x(dtype=torch.float64), x(dtype=torch.float64)] if function is torch.hypot else [x(dtype=torch.float64)]
    with torch.no_grad():
        for t in inputs:
            t.abs_()[0] = 0
    results = []
    for options in ({}, {"memory": True}):
        with mg.override(strong_zero=True, **options):
            results.append(torch.autograd.grad(function(*inputs).sum(), inputs))
    torch.testing.assert_close(*results, equal_nan=True)


def test_values_are_computed_once_for_their_readers_and_freed(monkeypatch):
    calls = []
    entry = recomputables["GeluBackward0"]
    counted = dataclasses.replace(entry, call=lambda *a: calls.append(1) or entry.call(*a))
    monkeypatch.setitem(recomputables, "GeluBackward0", counted)
    with mg.override(memory=True):
        y = F.gelu(x() * 2)
        loss = sum(linear(y, weight(8, N)).sum() for _ in range(3))
        recipe = y.grad_fn.metadata[memory._SOURCE]()
        loss.backward(retain_graph=True)
        assert len(calls) == 1 and not recipe.is_held
        loss.backward()
        assert len(calls) == 2 and not recipe.is_held
        del recipe
        assert y.grad_fn.metadata[memory._SOURCE]() is None


@pytest.mark.parametrize("names", RULES.values(), ids=RULES)
@pytest.mark.parametrize("function", [torch.exp, torch.exp_, torch.relu, torch.relu_, F.gelu], ids=lambda f: f.__name__)
def test_a_graph_that_is_dropped_is_freed(function, names):
    class Probe:
        pass

    with mg.override(*names, memory=True):
        y = function(x() * 2)
        z = linear(y, weight(8, N))
        probe = y.grad_fn.metadata["probe"] = Probe()
    ref = weakref.ref(probe)
    del probe, y, z
    assert ref() is None  # without the garbage collector, which does not see through nodes


def test_part_of_a_backward_keeps_no_value_longer_than_its_readers():
    with mg.override(memory=True):
        w = [weight(8, N) for _ in range(2)]
        y = F.gelu(x() * 2)
        first, second = linear(y, w[0]).sum(), linear(y, w[1]).sum()
        recipe = y.grad_fn.metadata[memory._SOURCE]()
        first.backward()
        assert recipe.is_held  # the second reads it
        del second
        assert not recipe.is_held


def test_a_freed_producer():
    inputs = x(), weight(8, N)

    def program(x, w):
        h = x * 2
        y = F.gelu(h)
        z = linear(y, w).sum()
        torch.autograd.grad(y.sum(), h)  # releases the node of gelu
        return torch.autograd.grad(z, w)

    expected = program(*inputs)
    with mg.override(memory=True):
        assert_bitwise(program(*inputs), expected)


def test_writes_between_are_errors():
    with mg.override(memory=True):
        h = x().sin()
        w = weight(8, N)
        z = linear(F.gelu(h), w)
        h.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(z.sum(), w)
        p = weight(N, N)  # what is kept as it is
        z = linear(x(), p).tanh()
        with torch.no_grad():
            p.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


@pytest.mark.parametrize("between", ["result", "input", "before relu"])
def test_writes_without_grad_before_the_tensor_is_saved(between):
    def program(x, w):
        h = x * 2
        y = F.batch_norm(h, None, None, training=True) if between == "before relu" else F.gelu(h)
        with torch.no_grad():
            (h if between == "input" else y)[0].mul_(3)
        if between == "before relu":
            y = torch.relu(y)
        return torch.autograd.grad(linear(y, w).square().sum(), w)

    inputs = x(), weight(8, N)
    expected = program(*inputs)
    with mg.override(memory=True):
        assert_bitwise(program(*inputs), expected)


@pytest.mark.parametrize("written", ["running_mean", "running_var", "weight", "bias"])
@pytest.mark.parametrize("function", [torch.relu, lambda x: x], ids=["relu", "alone"])
def test_a_tensor_that_is_written_to_before_the_result_is_saved(function, written):
    norm, given, w = nn.BatchNorm1d(64).eval(), torch.randn(64, 64), weight(64, 64)
    norm.running_var.add_(torch.rand(64))

    def program():
        state = copy.deepcopy(norm.state_dict())
        y = function(norm(given))
        with torch.no_grad():
            getattr(norm, written).mul_(2)
        z = (y @ w).square().sum()
        norm.load_state_dict(state)
        return torch.autograd.grad(z, w)

    expected = program()
    with mg.override(memory=True):
        assert_bitwise(program(), expected)


def test_a_bias_that_the_optimizer_writes_to():
    norm, conv = nn.BatchNorm1d(8), nn.Conv1d(8, 4, 1)
    inputs = torch.randn(N, 8, N)

    def program(late):
        y = norm(inputs)
        if not late:
            with torch.no_grad():
                norm.bias.add_(1)
        z = conv(y)
        if late:
            with torch.no_grad():
                norm.bias.add_(1)
        norm(inputs)  # running statistics
        return torch.autograd.grad(z.square().sum(), conv.weight)

    for late in (True, False):
        state = copy.deepcopy(norm.state_dict())
        expected = program(late)
        norm.load_state_dict(state)
        with mg.override(memory=True):
            assert_bitwise(program(late), expected)


def test_a_planted_recipe_is_found(monkeypatch):
    """Gradients differ from PyTorch's if a recipe is wrong; those that are compared first are not used."""
    inputs = x(), weight(8, N)

    def program(x, w):
        return linear(F.gelu(x * 2), w)

    expected = gradients(program, inputs)
    entry = recomputables["GeluBackward0"]
    wrong = dataclasses.replace(entry, call=lambda *a: entry.call(*a) + 1e-6)
    monkeypatch.setitem(recomputables, "GeluBackward0", wrong)
    with mg.override(memory=True), pytest.raises(AssertionError):
        assert_bitwise(gradients(program, inputs), expected)
    monkeypatch.undo()
    model, images = resnet()
    expected = step(copy.deepcopy(model), images)
    for node in ("ReluBackward0", "NativeBatchNormBackward0"):
        entry = recomputables[node]
        wrong = dataclasses.replace(entry, call=lambda *a, f=entry.call: f(*a) + 1e-6, in_place={})
        monkeypatch.setitem(recomputables, node, wrong)
        with mg.override(memory=True):
            assert_bitwise(step(copy.deepcopy(model), images), expected)
            assert not recipes(copy.deepcopy(model)(images).sum())
        monkeypatch.undo()


def test_a_rule_with_its_own_forward():
    rule = mg.rule(
        "aten::gelu", vjp={"self": lambda grad, self: grad * self}, forward=lambda x, approximate: x * 2, register=False
    )
    inputs = x(), weight(8, N)

    def program(x, w):
        return linear(F.gelu(x.sin()), w)

    for forward in (False, True):
        with mg.override(rule, forward=forward):
            expected = gradients(program, inputs)
        with mg.override(rule, forward=forward, memory=True):
            assert_bitwise(gradients(program, inputs), expected)


def test_hooks_of_the_user():
    inputs = x(), weight(8, N)

    def program(x, w):
        return linear(F.relu(F.gelu(x * 2)), w)

    expected = gradients(program, inputs)
    counts = []

    def pack(t):
        counts.append(t)
        return t

    with mg.override(memory=True), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        assert_bitwise(gradients(program, inputs), expected)
    inside = len(counts)
    assert inside
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        with mg.override(memory=True):
            assert_bitwise(gradients(program, inputs), expected)
        assert len(counts) == 2 * inside
        gradients(program, inputs)
    assert len(counts) == 3 * inside
    with mg.override(memory=True):  # saved under both
        with torch.autograd.graph.save_on_cpu():
            y = F.relu(F.gelu(inputs[0] * 2))
        z = linear(y, inputs[1])
        assert_bitwise(torch.autograd.grad(z.sum(), inputs), torch.autograd.grad(program(*inputs).sum(), inputs))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    inputs = x(), weight(8, N)

    def part(x):
        return F.relu(F.gelu(x * 2))

    def inside(x):
        with mg.override(memory=True):
            return part(x)

    expected = gradients(lambda x, w: linear(part(x), w), inputs)
    expected_grads = torch.autograd.grad(linear(part(inputs[0]), inputs[1]).square().sum(), inputs)
    del expected

    def check(body):
        for t in inputs:
            t.grad = None
        linear(checkpoint(body, inputs[0], use_reentrant=reentrant), inputs[1]).square().sum().backward()
        assert_bitwise([t.grad for t in inputs], expected_grads)

    with mg.override(memory=True):
        check(part)
    check(inside)
    with mg.override("*", memory=True):
        check(part)


def test_torch_func():
    a, w = torch.randn(N, 8, N), torch.randn(8, N)

    def f(a):
        return linear(F.relu(F.gelu(a * 2)), w).square().mean()

    transforms = [
        torch.func.grad(f),
        torch.func.grad(lambda a: torch.func.grad(f)(a).square().sum()),
        lambda a: torch.func.vjp(f, a)[1](torch.ones(()))[0],
        lambda a: torch.func.jvp(f, (a,), (a,))[1],
        torch.func.vmap(torch.func.grad(f)),
        torch.func.jacrev(lambda a: linear(F.gelu(a), w)[0, 0]),
        lambda a: torch.func.vjp(torch.func.vmap(F.gelu), a)[1](a)[0],
    ]
    for transform in transforms:
        expected = transform(a)
        with mg.override(memory=True):
            assert_bitwise([transform(a)], [expected])
            y = F.gelu(a.clone().requires_grad_() * 2)
            assert recipes(linear(y, w.clone().requires_grad_()))  # the hooks are there again

    def inside(a):
        with mg.override(memory=True):
            return f(a)

    assert_bitwise([torch.func.grad(inside)(a)], [torch.func.grad(f)(a)])
    before = torch._C._autograd._saved_tensors_hooks_disable
    assert type(before).__name__ == "builtin_function_or_method"


def test_batches_of_gradients_and_tangents():
    inputs = x(), weight(8, N)

    def program():
        y = linear(F.gelu(inputs[0] * 2), inputs[1])
        v = torch.ones(3, *y.shape)
        found = torch.autograd.grad(y, inputs, v, is_grads_batched=True, retain_graph=True)
        with fwAD.dual_level():
            dual = fwAD.make_dual(inputs[0], torch.ones_like(inputs[0]))
            (g,) = torch.autograd.grad(linear(F.gelu(dual * 2), inputs[1]).sum(), dual, create_graph=True)
            return [*found, *fwAD.unpack_dual(g)]

    with mg.override():
        expected = program()
    with mg.override(memory=True):
        assert_bitwise(program(), expected)


def test_compiled():
    inputs = x(), weight(8, N)

    def program(x, w):
        return linear(F.relu(F.gelu(x * 2)), w)

    compiled = torch.compile(program, backend="aot_eager")
    with mg.override():
        expected = gradients(compiled, inputs)
    with mg.override(memory=True):
        assert_bitwise(gradients(compiled, inputs), expected)
        inner = torch.compile(lambda a: torch.func.grad(lambda a: F.gelu(a).sum())(a), backend="eager")
        a = torch.randn(N, N)
        assert_bitwise([inner(a)], [torch.func.grad(lambda a: F.gelu(a).sum())(a)])
    assert_bitwise(gradients(compiled, inputs), expected)


def test_threads():
    model, inputs = transformer()
    expected = step(copy.deepcopy(model), inputs)
    found, losses = [], []

    def work():
        with mg.override(memory=True):
            for _ in range(5):
                found.append(step(copy.deepcopy(model), inputs))

    def forward():
        with mg.override(memory=True):
            losses.append(model(inputs).square().mean())

    threads = [threading.Thread(target=work) for _ in range(4)] + [threading.Thread(target=forward)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    for result in found:
        assert_bitwise(result, expected)
    losses[0].backward()  # on another thread
    assert_bitwise([p.grad for p in model.parameters()], expected[1:])


def test_other_threads_have_no_hooks():
    found = []

    def forward():
        node = F.gelu(x() * 2).grad_fn  # the object for a saved tensor does not keep its node
        found.append(type(node._raw_saved_self.data))

    with mg.override(memory=True):
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
    assert found == [torch.Tensor]


def hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def test_blocks_end_in_any_order():
    a, b, c = mg.override(memory=True), mg.override(memory=True), mg.override()
    own = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    a.__enter__()
    b.__enter__()
    own.__enter__()
    c.__enter__()
    a.__exit__(None, None, None)
    b.__exit__(None, None, None)
    assert hooks()[0] is own.pack_hook
    own.__exit__(None, None, None)
    assert hooks() is None
    c.__exit__(None, None, None)
    handle = mg.install("gelu", memory=True)
    assert hooks() is not None
    with pytest.raises(ZeroDivisionError), mg.override(memory=True):
        raise ZeroDivisionError
    assert hooks() is not None
    thread = threading.Thread(target=handle.remove)  # elsewhere: this thread keeps all tensors from now on
    thread.start()
    thread.join()
    y = linear(F.gelu(x() * 2), weight(8, N))
    assert not recipes(y)
    y.sum().backward()
    with mg.override():
        pass
    assert hooks() is None


def test_decorator_and_copies():
    @mg.override(memory=True)
    def inside():
        return hooks() is not None

    @mg.override(memory=True)
    def steps():
        yield hooks() is not None

    assert inside() and list(steps()) == [True] and hooks() is None
    with pickle.loads(pickle.dumps(mg.override("gelu", memory=True))):
        assert hooks() is not None
    assert hooks() is None


@pytest.mark.parametrize("function", [mg.override, mg.install])
def test_memory_is_a_bool(function):
    with pytest.raises(TypeError, match="memory must be True or False, got 1"):
        function(memory=1)


def test_no_grad_and_inference_mode():
    inputs = x(), weight(8, N)
    with mg.override(memory=True):
        with torch.no_grad():
            y = F.gelu(inputs[0])
        z = linear(y, inputs[1])
        assert not recipes(z)
        z.sum().backward()
        with torch.inference_mode():
            linear(F.gelu(inputs[0]), inputs[1])


def test_a_leaf_whose_data_is_exchanged():
    w = weight(8, N)

    def program():
        y = linear(x() * 0 + 1, w).sum()
        w.data = torch.full_like(w, 2)
        return torch.autograd.grad(y, w)

    expected = program()
    with mg.override(memory=True):
        assert_bitwise(program(), expected)


def test_in_autograd_functions():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, w):
            ctx.save_for_backward(y, w)
            return y @ w

        @staticmethod
        def backward(ctx, g):
            y, w = ctx.saved_tensors
            return g @ w.mT, (y.mT @ g).sum(0)

    inputs = x(), weight(N, 3)

    def program(x, w):
        return Double.apply(F.gelu(x * 2), w)

    expected = gradients(program, inputs)
    with mg.override(memory=True):
        assert_bitwise(gradients(program, inputs), expected)
