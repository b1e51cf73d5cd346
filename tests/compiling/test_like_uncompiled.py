"""Programs at the edge of what a graph can say: compiled or not, they do what they do uncompiled."""

import functools
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad as fwAD, grad
from torch.utils.checkpoint import checkpoint

import torch_manualgrad as mg

CASES = {}


def case(function):
    """A case is a program of a wrapper, which compiles a function or returns it as it is."""
    CASES[function.__name__] = function
    return function


def ones(*shape, **kwargs):
    return torch.ones(shape, dtype=torch.float64, **kwargs)


@case
def saved_tensor_hooks_of_another_call(wrap):
    f, x = wrap(lambda x: x * x), ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: 2 * t):
        f(x)
    return grad(f(x).sum(), x)


@case
def checkpointing_at_the_first_call(wrap):
    x = ones(2, requires_grad=True)
    return grad(checkpoint(wrap(lambda x: (x.sin() * x.exp()).tanh()), x, use_reentrant=False).sum(), x)


@case
def batched_gradients_have_a_history(wrap):
    x = ones(2, requires_grad=True)
    y = wrap(torch.sin)(x)
    (jacobian,) = grad(y, x, torch.eye(2, dtype=x.dtype), is_grads_batched=True, create_graph=True)
    return grad(jacobian.pow(2).sum() + y.sum(), x)


@case
def an_optimizer_step(wrap):
    p = ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([p], 0.1, momentum=0.9)
    step = wrap(optimizer.step)
    for _ in range(3):
        p.grad = ones(1)
        step()
    return p.detach(), optimizer.state[p]["momentum_buffer"]


@case
def data_has_no_history(wrap):
    x = ones(2, requires_grad=True)
    return grad(wrap(lambda x: x.data * x * 3)(x).sum(), x)


@case
def a_write_through_data(wrap):
    def f(x):
        y = x * 2
        y.data.mul_(3)
        return y * 1

    x = ones(2, requires_grad=True)
    y = wrap(f)(x)
    return y, *grad(y.sum(), x)


@case
def a_transform_that_is_not_tracked(wrap):
    def f(x):
        with torch.no_grad():
            g = torch.func.grad(lambda a: (a**3).sum())(x)
        return g * x

    x = ones(2, requires_grad=True)
    return grad(wrap(f)(x).sum(), x)


@case
def a_write_through_a_view_under_no_grad(wrap):
    buffer = torch.zeros(2, 2, dtype=torch.float64)

    def f(x):
        with torch.no_grad():
            buffer[0].copy_(x)
        return (x * buffer[0]).sum()

    x = ones(2, requires_grad=True)
    y = wrap(f)(x)
    return y, buffer, *grad(y, x)


@case
def a_write_through_detach(wrap):
    def f(x):
        y = x * 2
        y.detach().mul_(3)
        return y * 1

    return wrap(f)(ones(2))


@case
def a_detached_output_shares_memory(wrap):
    x = ones(2)
    y, z = wrap(lambda x: (x.detach(), x.sin().detach()))(x)
    y.add_(1)
    return x, z


@case
def a_detached_output_shares_memory_beside_a_transform(wrap):
    x = ones(2)
    y, z = wrap(lambda x: (x.detach(), torch.func.grad(lambda x: x.sin().sum())(x)))(x)
    y.add_(1)
    return x, z


@case
def detached_outputs_share_memory_with_each_other(wrap):
    def f(x):
        y = x.sin()
        return y.detach(), y.detach()[0], y

    x = ones(2, 2, requires_grad=True)
    detached, row, y = wrap(f)(x)
    detached.add_(1)
    return detached, row, y, *map(torch.tensor, (detached.requires_grad, row.requires_grad, y.requires_grad))


@case
def a_write_to_what_was_detached_before(wrap):
    def f(x):
        y = x * 1
        before = y.detach()
        y.add_(1)
        return y * before

    x = ones(2, requires_grad=True)
    return grad(wrap(f)(x).sum(), x)


@case
def a_write_to_what_was_detached_before_beside_a_transform(wrap):
    def f(x):
        y = x * 1
        before = y.data
        y.add_(1)
        return y * before, torch.func.grad(lambda x: x.sin().sum())(x)

    return wrap(f)(ones(2))


@case
def a_write_to_what_was_viewed_without_grad_before(wrap):
    def f(x, w):
        with torch.no_grad():
            row = x[0]
        x.mul_(3)
        return row * w

    x, w = ones(2, 3), ones(3, requires_grad=True)
    return *grad(wrap(f)(x, w).sum(), w), x


@case
def grad_mode_is_left_switched_off(wrap):
    def f(x):
        y = x * x
        torch.set_grad_enabled(False)
        return y.clone(), y

    f, x, found = wrap(f), ones(2, requires_grad=True), []
    for _ in range(2):
        with torch.enable_grad():
            results = f(x)
            found.append(torch.tensor([torch.is_grad_enabled(), *[r.requires_grad for r in results]]))
    return *found, *results


@case
def the_default_dtype_is_changed_at_each_call(wrap):
    def f(x):
        torch.set_default_dtype(torch.float64)
        return x + torch.ones(2)

    f, found = wrap(f), []
    before = torch.get_default_dtype()
    try:
        for _ in range(2):
            torch.set_default_dtype(torch.float32)
            found += [f(torch.ones(2)), torch.tensor(torch.get_default_dtype() is torch.float64)]
    finally:
        torch.set_default_dtype(before)
    return tuple(found)


@case
def an_argument_that_no_grad_returns_has_its_history(wrap):
    def f(x):
        y = x.sin()
        with torch.no_grad():
            same, other, row = y.contiguous().to(x.dtype), y * 2, y[0]
        return same * x * other * row

    x = ones(2, 3, requires_grad=True)
    return grad(wrap(f)(x).sum(), x)


@case
def a_write_to_an_argument_that_no_grad_returns(wrap):
    def f(x):
        with torch.no_grad():
            same = x.contiguous()
        x.mul_(3)
        return same * 2

    return wrap(f)(ones(2))


@case
def an_argument_out(wrap):
    def f(x, y):
        z = torch.empty_like(x)
        torch.add(x, y, out=z)
        return z

    return wrap(f)(ones(2), ones(2))


@case
def a_transposition_in_place(wrap):
    def f(x):
        y = x.sin()
        v = y[0]
        y.t_()
        return y, v

    return wrap(f)(ones(2, 3))


@case
def inputs_that_overlap(wrap):
    def f(x, v):
        x.mul_(2)
        return v.sum()

    base = ones(4)
    return wrap(f)(base, base[:2])


@case
def a_write_to_an_output_leaves_residuals(wrap):
    x = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    z = wrap(lambda x: x.exp()[0] * 1)(x)
    z.mul_(2)
    return grad(z.sum(), x)


@case
def grad_mode_switched_on(wrap):
    def f(x):
        with torch.enable_grad():
            return x.sin()

    with torch.no_grad():
        y = wrap(f)(ones(2, requires_grad=True))
    return y, torch.tensor(y.requires_grad)


@case
def autocast_switched_off(wrap):
    def f(x):
        with torch.autocast("cpu", enabled=False):
            return x @ x

    with torch.autocast("cpu", dtype=torch.bfloat16):
        return wrap(f)(torch.full((2, 2), 1.001))


@case
def no_output_has_a_tangent(wrap):
    with fwAD.dual_level():
        return wrap(lambda x: (x > 0, x.argmax()))(fwAD.make_dual(ones(2), ones(2)))


@case
def attention_with_dropout(wrap):
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, dropout=0.5).double()
    x = torch.randn(5, 2, 8, dtype=torch.float64, requires_grad=True)
    (g,) = grad(wrap(lambda x: model(x, x, x, need_weights=False)[0])(x).sin().sum(), x, create_graph=True)
    return grad(g.sin().sum(), x)


@case
def an_embedding_of_bounded_norm(wrap):
    torch.manual_seed(0)
    model = nn.Embedding(10, 4, max_norm=0.5)
    wrap(model)(torch.tensor([1, 2])).sum().backward()
    return model.weight.detach(), model.weight.grad


@case
def sparse_gradients(wrap):
    torch.manual_seed(0)
    model = nn.Embedding(10, 4, sparse=True)
    wrap(model)(torch.tensor([1, 2])).sum().backward()
    return model.weight.grad.to_dense()


@case
def dropout_in_evaluation(wrap):
    return wrap(lambda x: torch.native_dropout(x, 0.5, False)[0])(ones(2, 4))


@case
def writes_to_results_that_may_be_the_argument(wrap):
    operators = (
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: torch.dropout(x, 0.0, True),
        lambda x: F.dropout2d(x, 0.5, training=False),
        lambda x: F.alpha_dropout(x, 0.5, training=False),
        lambda x: x.contiguous(),
        lambda x: x.double(),
        lambda x: x.expand_as(x),
        lambda x: x.real,
        lambda x: +x,
    )
    found = []
    for operator in operators:
        torch.compiler.reset()  # there is a limit of graphs per code

        def f(x, operator=operator):
            y = x * 2
            operator(y).mul_(3)
            operator(x).mul_(y)
            return y, operator(x)

        x = ones(1, 2, 2, 2, requires_grad=True)
        z = x.sin()
        y, same = wrap(f)(z)
        found += [z, y, *grad((y * z).sum(), x), torch.tensor(same is z)]
    return found


@case
def random_numbers_of_a_transposed_tensor(wrap):
    torch.manual_seed(0)
    return wrap(lambda x: F.dropout(x.t()) + torch.randn_like(x.t()))(ones(2, 3))


@case
def no_inputs(wrap):
    return wrap(lambda n: torch.arange(3.0) * n)(2)


@case
def sixteen_bits(wrap):
    x = torch.linspace(-1, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    y = wrap(lambda x: x * 2 + x.relu())(x)
    return y, *grad(y.sum(), x)


def tangents(outputs):
    return [torch.zeros_like(x) if (t := fwAD.unpack_dual(x).tangent) is None else t.clone() for x in outputs]


@case
def constants_in_forward_mode(wrap):
    def f(x):
        y = x.sin()
        y[[1]] = 0.3
        return x[[0, 0, 2]] * torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype) + y

    x = ones(3, requires_grad=True)
    with warnings.catch_warnings(), fwAD.dual_level():
        warnings.filterwarnings("error", message="torch_manualgrad")
        y = wrap(f)(fwAD.make_dual(x, 2 * ones(3)))
        (g,) = grad(y.sin().sum(), x)
        found = tangents([y, g])
    return *found, torch.func.hessian(lambda x: wrap(f)(x).sin().sum())(x)


@case
def inputs_returned_in_forward_mode(wrap):
    def f(x):
        x.sin()
        return {"x": x}

    with fwAD.dual_level():
        return tangents([wrap(f)(fwAD.make_dual(ones(2, requires_grad=True), 2 * ones(2)))["x"]])


@case
def outputs_without_a_gradient_in_forward_mode(wrap):
    def f(x):
        with torch.no_grad():
            y = x * x
        return y, x.detach().sin(), (x > 0).sum()

    x = ones(2, requires_grad=True)
    with fwAD.dual_level():
        y, z, _ = wrap(f)(fwAD.make_dual(x, 2 * ones(2)))
        found = tangents([y, z])
        return *found, *map(torch.tensor, (y.requires_grad, z.requires_grad)), *grad((x * y * z).sum(), x)


@case
def tangents_with_a_history_beside_a_variable(wrap):
    x, t = ones(2, requires_grad=True), 2 * ones(2)
    t.requires_grad_()
    with fwAD.dual_level():
        _, y = wrap(lambda x, y: (x.sin(), y.sin()))(x, fwAD.make_dual(ones(2), t))
        return torch.tensor(y.requires_grad), *grad(fwAD.unpack_dual(y).tangent.sum(), t)


@case
def expanded_outputs_without_a_tangent(wrap):
    def f(x, y):
        return x.sin(), y.sin().expand(2, 2), y.sin().unfold(0, 1, 1).expand(2, 2), y.cos().repeat(2).unfold(0, 2, 1)

    with fwAD.dual_level():
        return tangents(wrap(f)(fwAD.make_dual(ones(2), 2 * ones(2)), ones(2)))


@case
def copies_share_no_memory_with_their_source(wrap):
    def f(x, y):
        whole, row, of_row = torch.empty_like(x), x.prod(1), torch.zeros_like(x)
        whole.copy_(x)
        row.copy_(x[0])
        of_row[:] = y
        source, other = x.sin(), x.cos()
        other.copy_(source)
        return whole, row, of_row, source, other

    found = []
    for x, y in ((ones(3, 3), ones(3)), (ones(3, 3, requires_grad=True), ones(3, requires_grad=True))):
        outputs = wrap(f)(x, y)
        storages = {t.untyped_storage().data_ptr() for t in (x, y, *outputs)}
        strides = [torch.tensor(t.stride()) for t in outputs]
        found += [*outputs, *strides, torch.tensor(len(storages))]
    return found


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("source", ["like", "transposed", "expanded", "scalar", "float32", "gaps"])
def test_a_copy_has_the_layout_of_what_it_overwrites(source, transposed):
    x = torch.rand(3, 3, dtype=torch.float64)
    x = x.t() if transposed else x
    y = {
        "like": lambda: x.sin(),
        "transposed": lambda: x.t().sin(),
        "expanded": lambda: x[0].sin(),
        "scalar": lambda: x[0, 0].sin(),
        "float32": lambda: x.t().float(),
        "gaps": lambda: torch.rand(3, 6, dtype=x.dtype)[:, ::2],
    }[source]()

    def f(x, y):
        whole, turned = x * 1, x * 1
        whole.copy_(y)
        turned.t().copy_(y)
        return whole, whole * 2, turned, turned[0]

    torch.compiler.reset()
    for found, expected in zip(mg.compile(f, lowering="eager")(x, y), f(x, y)):
        assert torch.equal(found, expected) and found.stride() == expected.stride()


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_copies_into_dims_of_any_order(order):
    def laid_out(x):
        return x.permute(order).contiguous().permute(sorted(range(3), key=order.__getitem__))

    x, y = (laid_out(torch.rand(3, 3, 3, dtype=torch.float64)).requires_grad_() for _ in range(2))

    def copies(x, y):
        whole, part = torch.empty_like(x), x.sin()
        whole.copy_(y.contiguous() * x)
        part[1].copy_(y[0] * x[2])
        return whole, part

    def joined(x, y):
        return (torch.cat([x * 2, y], 1),)

    for f in (copies, joined):
        torch.compiler.reset()
        g = mg.compile(f, lowering="eager", fullgraph=True)
        found, expected = g(x, y), f(x, y)
        assert [t.stride() for t in found] == [t.stride() for t in expected]
        weights = [torch.rand_like(t) for t in expected]
        torch.testing.assert_close(grad(found, (x, y), weights), grad(expected, (x, y), weights))
        for moving in ((0,), (1,), (0, 1)):
            with fwAD.dual_level():
                given = [fwAD.make_dual(t, t.cos()) if i in moving else t for i, t in enumerate((x, y))]
                for a, b in zip(g(*given), f(*given)):
                    torch.testing.assert_close(fwAD.unpack_dual(a), fwAD.unpack_dual(b))


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_program_does_what_it_does_uncompiled(name):
    torch.compiler.reset()
    with warnings.catch_warnings(), mg.override():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        expected = CASES[name](lambda f: f)
        torch.manual_seed(1)
        found = CASES[name](lambda f: mg.compile(f, lowering="eager"))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("forward", [lambda f: f, functools.partial(mg.compile, lowering="eager")])
def test_a_backward_compiled_as_a_whole(forward):
    torch.compiler.reset()
    x, w = ones(2, requires_grad=True), ones(2, requires_grad=True)
    y = forward(lambda x, w: (x.sin() * w).exp().sum())(x, w)
    expected = grad(y, (x, w), retain_graph=True)
    graphs = torch.compile(backend="manualgrad", options={"lowering": "eager"})
    with pytest.warns(RuntimeWarning, match="it is a graph of compiled autograd"):
        with torch._dynamo.compiled_autograd._enable(graphs):
            y.backward()
    torch.testing.assert_close((x.grad, w.grad), expected)


def test_a_backward_inside_that_is_compiled_as_a_whole():
    def step(x):
        x.sin().prod().backward()
        return x.grad.clone()

    torch.compiler.reset()
    x, y = ones(2, requires_grad=True), ones(2, requires_grad=True)
    with warnings.catch_warnings(), torch._dynamo.config.patch(compiled_autograd=True):
        warnings.simplefilter("ignore")
        torch.testing.assert_close(mg.compile(step, lowering="eager")(x), step(y))


@pytest.mark.slow
def test_states_of_an_lstm_have_their_shape():
    torch.manual_seed(0)
    zeros, weights = ones(4, 2, 3) * 0, list(nn.LSTM(4, 3, 2, bidirectional=True).double().parameters())

    def f(x):
        _, h, c = torch.lstm(x.sin(), (zeros, zeros), weights, True, 2, 0.0, False, True, False)
        return h.size(1) * h.sum(1), c.reshape(c.shape[0], c.shape[1], -1)

    def program(wrap):
        x = ones(5, 2, 4, requires_grad=True)
        found = wrap(f)(x)
        region = wrap(lambda x: checkpoint(lambda x: f(x)[0], x, use_reentrant=False))(x)
        return *found, region, torch.func.grad(lambda x: wrap(f)(x)[0].sin().sum())(x)

    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on torch 2.10 it runs uncompiled
        torch.testing.assert_close(program(lambda f: mg.compile(f, lowering="eager")), program(lambda f: f))


def test_threads_that_call_a_function_for_the_first_time():
    from concurrent.futures import ThreadPoolExecutor

    f = mg.compile(lambda x: (x.sin() * x.exp()).tanh(), lowering="eager", dynamic=False)

    def second(i):
        x = (i + 1) * ones(3)
        x.requires_grad_()
        (g,) = grad(f(x).sum(), x, create_graph=True)
        return grad(g.sum(), x)[0]

    # threads of torch 2.10 leave each other's settings
    with torch._dynamo.config.patch(automatic_dynamic_shapes=True), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(second, range(4)))
    torch.testing.assert_close(found, [second(i) for i in range(4)])
    assert torch.equal(torch.compile(torch.cos, backend="eager")(ones(2)), ones(2).cos())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.trace(x).sin(),
        lambda x: torch.zeros(9, dtype=x.dtype).index_fill(0, torch.tensor([0, 4, 8]), x.sum()).cumsum(0).sin().sum(),
        lambda x: (x @ x.mT).index_fill(1, torch.tensor([0, 1]), x[0, 0]).sin().sum(),
    ],
)
def test_batches_of_filled_slices(function):
    """PyTorch's index_fill gives all results the last of a batch of values."""
    rows, compiled = torch.randn(2, 3, 3, dtype=torch.float64), mg.compile(function, lowering="eager")
    for transform in (torch.func.grad, torch.func.hessian):
        expected = torch.stack([transform(function)(x) for x in rows])
        torch.testing.assert_close(torch.vmap(transform(compiled))(rows), expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.T,
        lambda x: x.mT,
        lambda x: x.H,
        lambda x: x.T.mT,
        lambda x: (x.sin(), x.mT),
        lambda x: [x.mH, {"a": x.cos()}],
        lambda x: (x.sin(), x),
    ],
)
def test_an_attribute_of_an_argument_is_returned(function):
    """Dynamo reads such an attribute outside of the graph."""
    x, compiled = torch.rand(2, 3, dtype=torch.float64), mg.compile(function, lowering="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # such a function runs uncompiled
        for transform in (
            lambda f: torch.vmap(f)(x[None]),
            lambda f: torch.func.jvp(f, (x,), (x.cos(),)),
            lambda f: torch.func.jacrev(f)(x),
            lambda f: torch.func.vjp(f, x)[0],
        ):
            torch.testing.assert_close(transform(compiled), transform(function))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.group_norm(x, 2, w),
        lambda x, w: F.group_norm(x, 2, w, w),
        lambda x, w: F.batch_norm(x, torch.zeros(4).to(x), torch.ones(4).to(x), w, w, False),
        lambda x, w: F.batch_norm(x, None, None, w, None, True),
        lambda x, w: F.instance_norm(x, None, None, w, w),
        lambda x, w: F.layer_norm(x, (4,), w),
    ],
)
def test_forward_mode_of_normalizations_whose_weights_have_no_tangent(function):
    x, w = torch.randn(2, 4, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    compiled = mg.compile(function, lowering="eager", fullgraph=True)
    with mg.override():
        expected = torch.func.jvp(function, (x, w), (x.cos(), w.sin()))
        torch.testing.assert_close(torch.func.jvp(compiled, (x, w), (x.cos(), w.sin())), expected)
        for transform in (
            lambda f: torch.func.jvp(lambda x: f(x, w), (x,), (x.cos(),)),
            lambda f: torch.func.hessian(lambda x: f(x, w).sin().sum())(x),
        ):
            torch.testing.assert_close(transform(compiled), transform(function))
