"""Programs around a compiled function: buffers, random numbers, views, shapes, warnings."""

import gc
import warnings
import weakref
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from helpers.processes import run_program
from helpers.programs import PROGRAMS
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_manualgrad as mg
from torch_manualgrad.compiling import backend
from torch_manualgrad.compiling.function import Function, lowerings
from torch_manualgrad.compiling.program import Program
from torch_manualgrad.compiling.watching import watch
from torch_manualgrad.core.rule import reached


def compiled(function, **options):
    return mg.compile(function, lowering="eager", fullgraph=True, **options)


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    torch.manual_seed(0)


def points(*shape, **kwargs):
    return torch.randn(*shape, dtype=torch.float64, **kwargs)


def test_a_backend_that_is_called_by_hand_takes_any_tensors():
    """Dynamo's guards do not stand before it then."""
    graph = torch.fx.symbolic_trace(lambda x: (x.sin() + x.sum(),))
    run = backend(graph, [torch.randn(4)], lowering="inductor", fallback=False)
    for x in (torch.randn(4), torch.randn(9), torch.randn(2, 3), torch.randn(4, dtype=torch.float64)):
        (y,) = run(x)
        torch.testing.assert_close(y, x.sin() + x.sum())


def test_dropout_has_one_mask_in_every_order():
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1)).double()
    x = points(5, 4, requires_grad=True)
    f = compiled(net)

    def orders(call):
        torch.manual_seed(3)
        y = call(x).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        (h,) = torch.autograd.grad(g.pow(2).sum(), net[0].weight, create_graph=True)
        return y, g, h, torch.autograd.grad(h.sin().sum(), x)[0]

    for _ in range(2):
        torch.testing.assert_close(orders(f), orders(net))


def test_a_random_distribution_that_is_computed_runs_uncompiled():
    f = mg.compile(lambda x: torch.bernoulli(x.sigmoid()) * x, lowering="eager")
    with pytest.warns(RuntimeWarning, match="runs uncompiled.*bernoulli.*draws random numbers"):
        f(points(3, requires_grad=True)).sum().backward()
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="draws random numbers"):
        compiled(lambda x: torch.bernoulli(x.sigmoid()) * x)(points(3))


def test_buffers_and_parameters_after_some_steps():
    def trained(wrap):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)).double()
        f, optimizer = wrap(net), torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            f(points(2, 3, 6, 6)).pow(2).sum().backward()
            optimizer.step()
        return net.state_dict()

    found, expected = trained(compiled), trained(lambda net: net)
    torch.testing.assert_close(found, expected)
    assert expected["1.num_batches_tracked"] == 3


def test_an_input_that_is_written_to():
    def f(x, y):
        x.mul_(y)
        return x.sum()

    p, y = points(3, requires_grad=True), points(3, requires_grad=True)

    def run(call):
        x = p * 1
        result = call(x, y) + x.sin().sum()
        return x, result, *torch.autograd.grad(result, [p, y])

    torch.testing.assert_close(run(compiled(f)), run(f))


def test_outputs_that_are_views_share_memory_as_they_do_uncompiled():
    def f(x):
        y = x.sin()
        return x.t(), x, y, y[0]

    x = points(2, 3)
    transposed, same, y, row = compiled(f)(x)
    transposed[0, 0] = 5
    y[0, 0] = 7
    assert same is x and x[0, 0] == 5 and row[0] == 7


def test_outputs_that_are_no_tensors():
    x = points(2)
    y, number, none, more = compiled(lambda x: (x.sin(), 3, None, {"a": x.cos()}))(x)
    assert number == 3 and none is None
    torch.testing.assert_close((y, more["a"]), (x.sin(), x.cos()))


def test_other_shapes_and_no_gradients():
    f = compiled(lambda x: x.sin() * 2, dynamic=True)
    for n in (3, 4, 5):
        x = points(n, requires_grad=True)
        torch.testing.assert_close(torch.autograd.grad(f(x).sum(), x)[0], 2 * x.cos())
    with torch.no_grad():
        assert not f(x).requires_grad


def test_untracked_outputs_have_no_history_and_keep_their_tangents():
    def f(x):
        with torch.no_grad():
            y = x.sin()
        return y, x.cos(), x.exp().detach()

    x = points(3, requires_grad=True)
    y, z, w = compiled(f)(x)
    assert not y.requires_grad and z.requires_grad and not w.requires_grad
    if reached("2.15"):  # Dynamo takes no dual tensors
        return
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        y, _, w = compiled(f)(dual)
        assert not y.requires_grad and not w.requires_grad
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(y).tangent, x.detach().cos())
        assert not torch.autograd.forward_ad.unpack_dual(w).tangent.any()


def test_a_write_to_a_tracked_tensor_without_tracking_runs_uncompiled():
    def f(x):
        y = x * 2
        with torch.no_grad():
            y.mul_(3)
        return y.sum()

    x = points(3, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="runs uncompiled.*under torch.no_grad"):
        (g,) = torch.autograd.grad(mg.compile(f, lowering="eager")(x), x)
    torch.testing.assert_close(g, torch.full_like(x, 2))


def test_a_function_with_a_backward_of_its_own_keeps_it():
    class Double(torch.autograd.Function):
        generate_vmap_rule = True
        forward = staticmethod(lambda x: x.clone())
        setup_context = staticmethod(lambda ctx, inputs, output: None)
        backward = staticmethod(lambda ctx, g: 2 * g)
        jvp = staticmethod(lambda ctx, t: 2 * t)

    x = points(3, requires_grad=True)
    f = mg.compile(lambda x: Double.apply(x * 3).sum(), lowering="eager")
    with pytest.warns(RuntimeWarning, match="Double.apply has derivatives of its own, and runs uncompiled"):
        y = f(x)
    torch.testing.assert_close(torch.autograd.grad(y, x)[0], torch.full_like(x, 6))
    torch.testing.assert_close(torch.func.grad(f)(x.detach()), torch.full_like(x, 6))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        assert torch.autograd.forward_ad.unpack_dual(f(dual)).tangent == 18
    inner = mg.compile(lambda x: torch.func.jvp(Double.apply, (x,), (x,))[1], lowering="eager")
    torch.testing.assert_close(inner(x.detach()), 2 * x.detach())
    with pytest.raises(RuntimeError, match="Double.apply has derivatives of its own"):
        compiled(lambda x: Double.apply(x))(x)


def test_autocast_inside_and_around():
    net, x = nn.Linear(4, 4), torch.randn(5, 4, requires_grad=True)

    def inside(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return net(x).float().sin()

    torch.testing.assert_close(compiled(inside)(x), inside(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = compiled(net)(x), net(x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(torch.autograd.grad(found.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])


@pytest.mark.skipif(reached("2.15"), reason="Dynamo of this torch takes no dual tensors")
def test_gradcheck_hooks_checkpoint_and_transforms():
    f = compiled(lambda x: (x.sin() * x.exp()).sum(1))
    x = points(2, 3, requires_grad=True)
    assert torch.autograd.gradcheck(f, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(f, x)
    seen = []
    y = f(x)
    y.register_hook(seen.append)
    torch.autograd.grad(y.sum(), x)
    assert len(seen) == 1
    torch.testing.assert_close(
        torch.autograd.grad(checkpoint(f, x, use_reentrant=False).sum(), x), torch.autograd.grad(f(x).sum(), x)
    )
    expected = torch.func.hessian(lambda x: (x.sin() * x.exp()).sum())(x[0].detach())
    g = mg.compile(lambda x: (x.sin() * x.exp()).sum(), lowering="eager")
    torch.testing.assert_close(torch.func.hessian(g)(x[0].detach()), expected)


def test_only_the_gradients_that_are_asked_for_are_computed(monkeypatch):
    seen = []

    def counted(function):
        run = lower(function)

        def with_count(values):
            seen.append(function.outputs)
            return run(values)

        return with_count

    lower = lowerings["eager"]
    monkeypatch.setitem(lowerings, "eager", counted)
    x, w = points(3, requires_grad=True), points(3, requires_grad=True)
    y = compiled(lambda x, w: (x * w).sin())(x, w)
    seen.clear()
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    torch.autograd.grad(y.sum(), [x, w])
    assert seen == [1, 2]


def test_inputs_that_are_written_to_before_the_backward_raise():
    f = compiled(lambda x, w: (x * w).sin())
    for _ in range(2):  # the second forward saves what a second derivative reads
        x, w = points(3, requires_grad=True), points(3, requires_grad=True)
        (g,) = torch.autograd.grad(f(x, w).sum(), x, create_graph=True)
        with torch.no_grad():
            w.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(g.pow(2).sum(), x)


def test_an_output_that_is_a_part_of_a_residual_can_be_written_to():
    x = points(2, 3, requires_grad=True)
    y = compiled(lambda x: x.exp()[0])(x)
    with torch.no_grad():
        y.zero_()
    (g,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(g[0], x[0].exp())


def test_outputs_without_derivatives_by_inductor():
    f = mg.compile(lambda x, w: (x @ w).detach(), fullgraph=True)
    x, w = points(2, 3, requires_grad=True), points(3, 2, requires_grad=True)
    y = f(x, w)
    torch.testing.assert_close(y, (x @ w).detach())
    assert not y.requires_grad


def test_saved_cotangents_that_are_expanded():
    f = compiled(lambda x: x.pow(3))
    x = points(4, requires_grad=True)
    (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(h.sum(), x)[0], torch.full_like(x, 6))


def test_rules_that_are_swapped_are_followed():
    f = compiled(torch.sin)
    x = points(3, requires_grad=True)
    wrong = mg.elementwise("aten::sin", lambda self: 3 * self.cos(), register=False)
    torch.testing.assert_close(torch.autograd.grad(f(x).sum(), x)[0], x.cos())
    with mg.override(wrong):
        torch.testing.assert_close(torch.autograd.grad(f(x).sum(), x)[0], 3 * x.cos())
    torch.testing.assert_close(torch.autograd.grad(f(x).sum(), x)[0], x.cos())


@pytest.mark.parametrize("name", ["layer_norm", "fused_attention"])
def test_without_an_override_the_rules_give_what_pytorch_lacks(name):
    function, inputs = PROGRAMS[name]
    inputs = [x.float() for x in inputs]  # PyTorch has no second derivative of either in float32

    def penalty(call):
        variables = [x.clone().requires_grad_() for x in inputs]
        first = torch.autograd.grad(call(*variables).sum(), variables, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), variables)

    found = penalty(compiled(function))
    with mg.override():
        torch.testing.assert_close(found, penalty(function))


@pytest.mark.parametrize("names", [("aten::gelu",), ("aten::silu", "aten::gelu")])
def test_operators_beyond_an_override_have_all_derivatives(names):
    """PyTorch has none of the mean and deviation that layer norm's backward takes in a graph."""
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.GELU(), torch.nn.Linear(4, 1)
    ).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    doubled = mg.rule(
        "aten::gelu",
        vjp={
            "self": lambda grad, self, approximate: (
                2 * torch.ops.aten.gelu_backward(grad, self, approximate=approximate)
            )
        },
        register=False,
    )

    def penalty(call):
        variable = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(call(variable).sum(), variable, create_graph=True)
        return torch.autograd.grad(slope.pow(2).sum(), list(net.parameters())[:-1])

    with mg.override(*names), mg.override(doubled):
        torch.testing.assert_close(penalty(compiled(net)), penalty(net))
        assert [one.why for one in mg.active() if one.name == "aten::gelu"] == ["named"]


def test_the_backend_has_a_name_and_options():
    (entry,) = entry_points(group="torch_dynamo_backends", name="manualgrad")
    assert entry.load() is backend
    x = points(3, requires_grad=True)
    f = torch.compile(torch.sin, backend="manualgrad", options={"lowering": "eager"})
    torch.testing.assert_close(torch.autograd.grad(f(x).sum(), x)[0], x.cos())
    with pytest.raises(ValueError, match="lowering: expected one of 'inductor', 'eager', got 'fast'"):
        mg.compile(torch.sin, lowering="fast")
    with pytest.raises(Exception, match="lowering: expected one of 'inductor', 'eager', got 'fast'"):
        torch.compile(torch.sin, backend="manualgrad", options={"lowering": "fast"})(x)
    with pytest.raises(TypeError, match="no option 'lowerings'; expected dynamic, fullgraph, lowering or fallback"):
        mg.compile(torch.sin, lowerings="eager")
    with pytest.raises(Exception, match="backend: no option 'lowerings'; expected lowering or fallback"):
        torch.compile(torch.sin, backend="manualgrad", options={"lowerings": "eager"})(x)
    for wrong, message in (
        ({"fallback": "no"}, "compile: fallback: expected a bool, got 'no'"),
        ({"fullgraph": 3}, "compile: fullgraph: expected a bool, got 3"),
        ({"options": 3}, "compile: options: expected a dictionary, got 3"),
        ({"options": {"lowerings": 3}}, "compile: no option 'lowerings'"),
    ):
        with pytest.raises(TypeError, match=message):
            mg.compile(torch.sin, **wrong)


def test_grad_mode_is_that_of_the_call():
    """A graph that writes to its input, first called with grad mode on, leaves it off where it is."""
    graphs = []
    torch.compile(lambda x: x.mul_(2).sin(), backend=lambda graph, inputs: graphs.append(graph) or graph.forward)(
        points(3)
    )
    run = backend(graphs[0], [], lowering="eager")
    run(points(3))
    with torch.no_grad():
        run(points(3))
        assert not torch.is_grad_enabled()


def test_graphs_that_inductor_refuses_run_uncompiled(monkeypatch):
    from torch_manualgrad.compiling import function as functions

    def broken(function):
        raise NotImplementedError("no compiler here")

    monkeypatch.setitem(functions.lowerings, "inductor", broken)
    x = points(3, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="compiled runs uncompiled .*no compiler here"):
        (g,) = torch.autograd.grad(mg.compile(torch.sin)(x).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(g.sum(), x)[0], -x.sin())
    torch.compiler.reset()
    with pytest.raises(NotImplementedError, match="no compiler here"):
        mg.compile(torch.sin, fullgraph=True)(x)


def test_without_the_library_of_calls(monkeypatch):
    from torch_manualgrad.core.override import override as module

    monkeypatch.setattr(module, "calls_library", None)
    x = points(3, requires_grad=True)
    (g,) = torch.autograd.grad(compiled(torch.sin)(x).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(g.sum(), x)[0], -x.sin())
    assert not mg.active()


@pytest.mark.skipif(reached("2.15"), reason="Dynamo of this torch takes no dual tensors")
def test_an_expanded_tensor_that_is_written_to_in_part_by_inductor():
    """Inductor gave the copy the strides of the expanded tensor: the tangent of index_add was wrong."""
    index = torch.tensor([0, 1, 1, 2])

    def f(x):
        return x.new_zeros(3, 2).index_add(0, index, x)

    x, v = points(4, 2), points(4, 2)
    with torch.autograd.forward_ad.dual_level():
        found = mg.compile(f, dynamic=False, fullgraph=True)(torch.autograd.forward_ad.make_dual(x, v))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(found).tangent, f(v))


def test_untraceable_derivatives_run_uncompiled(monkeypatch):
    from torch_manualgrad.compiling import graphs

    def broken(*args):
        raise NotImplementedError("no trace here")

    monkeypatch.setattr(graphs, "joint", broken)
    monkeypatch.setattr(graphs, "pushed_forward", broken)
    x = points(3, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="compiled is differentiated uncompiled .*no trace here"):
        assert torch.autograd.gradcheck(mg.compile(torch.sin, lowering="eager"), x, check_forward_ad=True)


def test_forked_processes_differentiate_what_their_parent_compiled():
    run_program(Path(__file__).parent / "forking_worker.py")


def test_programs_are_freed_with_their_function():
    def programs():
        gc.collect()
        return [x for x in gc.get_objects() if isinstance(x, (Program, Function))]

    others = programs()  # referenced here, so that those of other tests are not freed meanwhile
    f = mg.compile(lambda x: x.sin(), lowering="eager")
    x = points(3, requires_grad=True)
    f(x).sum().backward()
    own = [weakref.ref(x) for x in programs() if not any(x is other for other in others)]
    assert own
    del f
    torch.compiler.reset()
    gc.collect()
    assert not any(program() for program in own)


def test_no_warning_where_everything_is_compiled():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        x = points(3, requires_grad=True)
        compiled(lambda x: x.sin().sum())(x).backward()


WITHOUT_EFFECT = {
    "out": (lambda x: torch.tensordot(x, x, dims=((1,), (0,)), out=None).sin(), lambda: points(3, 3)),
    "strides": (
        lambda x: nn.functional.adaptive_avg_pool2d(x.sin(), 1).square(),
        lambda: points(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ),
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_writes_without_effect_are_compiled(name):
    f, inputs = WITHOUT_EFFECT[name]
    x = inputs().requires_grad_()
    g = mg.compile(f, fullgraph=True, fallback=False, lowering="eager")
    torch.testing.assert_close(g(x), f(x))
    first, expected = (torch.autograd.grad(h(x).sum(), x, create_graph=True)[0] for h in (g, f))
    torch.testing.assert_close(first, expected)
    second, expected = (torch.autograd.grad(h.square().sum(), x)[0] for h in (first, expected))
    torch.testing.assert_close(second, expected)


def test_a_number_at_the_places_of_a_mask():
    def f(x, w):
        y = x * w
        y[x > 0] = w
        y[x[:, 0] < -0.5] = w[None] * 2
        return y.sin() * x

    inputs = points(5, 3).requires_grad_(), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    g = compiled(f, fallback=False)
    first = [torch.autograd.grad(h(*inputs).sum(), inputs, create_graph=True) for h in (f, g)]
    second = [torch.autograd.grad(sum(x.square().sum() for x in xs), inputs) for xs in first]
    for found, expected in zip([*first[1], *second[1]], [*first[0], *second[0]]):
        torch.testing.assert_close(found, expected)


def _put(y, x):
    y[x > 0] = 0.5
    return y


WRITES = {
    "a number at the places of a mask": _put,
    "masked_fill": lambda y, x: y.masked_fill_(x > 0, 0.5),
    "masked_scatter": lambda y, x: y.masked_scatter_(x > 0, x.exp()),
    "copy": lambda y, x: y.copy_(x.contiguous()),
    "cumsum": lambda y, x: y.cumsum_(0),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_keeps_the_layout(name, transposed):
    def f(x):
        y = x * 2
        WRITES[name](y, x)
        return y, (y.t() if transposed else y).view(-1) * 2

    x = points(5, 3).t() if transposed else points(5, 3)
    for found, expected in zip(mg.compile(f, lowering="eager", fullgraph=True)(x), f(x)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert found.stride() == expected.stride()


def test_a_write_that_is_read_by_its_strides_runs_uncompiled():
    def f(x):
        y = x * 2
        y.masked_fill_(x > 0, 0.5)
        return y.as_strided((15,), (1,)) * 2

    x = points(5, 3).t()
    with pytest.warns(RuntimeWarning, match="read by its strides"):
        torch.testing.assert_close(mg.compile(f, lowering="eager")(x), f(x))


def test_a_graph_without_tensors_runs_without_a_warning():
    def f(x):
        i = torch.tensor([1.0, 6.0])
        torch._dynamo.graph_break()
        return x[0, :2] * i

    x = points(3, 3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        torch.testing.assert_close(mg.compile(f, lowering="eager")(x), f(x))


def test_a_module_that_runs_uncompiled_leaves_others_compiled():
    """Dynamo's mark not to try again is on the code that calls modules of torch.nn."""
    x = torch.randn(3, 4)
    hooked = nn.Sequential(nn.Linear(4, 2))
    hooked[0].register_full_backward_hook(lambda module, *_: None)
    for net in (nn.LSTM(4, 2), hooked):
        with pytest.warns(RuntimeWarning, match="a function runs uncompiled"):
            torch.compile(net, backend="manualgrad", options={"lowering": "eager"})(x.requires_grad_())
    for net in (nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 2), nn.Tanh())):
        with watch() as report:
            compiled = torch.compile(net, backend="manualgrad", options={"lowering": "eager"})
            torch.testing.assert_close(compiled(x), net(x))
        assert len(report.graphs) == 1


def test_what_runs_uncompiled_has_the_derivatives_of_the_rules():
    def f(x):  # PyTorch's second derivative of the norm is nan at zero
        return (x * 1).norm() + torch.bernoulli(torch.full_like(x.detach(), 0.5)).sum() * 0

    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="runs uncompiled"):
        (g,) = torch.autograd.grad(mg.compile(f, lowering="eager")(x), x, create_graph=True)
    assert not torch.autograd.grad(g.sum(), x)[0].any()
    compiled = mg.compile(f, lowering="eager")
    with pytest.warns(RuntimeWarning, match="runs uncompiled"):
        found = torch.func.jacrev(torch.func.grad(compiled), chunk_size=1)(x.detach())
    assert not found.any()
    assert not torch.func.grad(lambda x: torch.func.grad(compiled)(x).sum())(x.detach()).any()  # it is not traced again
