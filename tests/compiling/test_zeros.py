"""Backwards without some cotangents, next to the same backwards given zeros."""

import pytest
import torch
from helpers.programs import PROGRAMS
from helpers.thinning import every
from torch import nn

import torch_manualgrad as mg
from torch_manualgrad.compiling.function import Options
from torch_manualgrad.compiling.program import Program
from torch_manualgrad.compiling.zeros import _is_backward, specialized
from torch_manualgrad.core.internals import Sizes
from torch_manualgrad.core.rule import reached


@pytest.fixture(autouse=True)
def compile_anew():
    torch.compiler.reset()


class Graph:
    """The graph that Dynamo makes of a function."""

    def __init__(self, function):
        self.seen = []
        self.compiled = torch.compile(function, backend=self.keep, fullgraph=True, dynamic=False)

    def keep(self, graph, inputs):
        def run(*values):
            self.seen.append((graph, values))
            return graph(*values)

        return run


@pytest.mark.parametrize("name", every(2, PROGRAMS))
def test_cotangents_that_are_left_out_are_zero(name):
    function, inputs = PROGRAMS[name]
    graph = Graph(function)
    with mg.override():
        graph.compiled(*inputs)
        ((captured, values),) = graph.seen
        program = Program(captured, values, Options("eager", False))
        compiled = program.function
        arguments = [v for v in values if isinstance(v, torch.Tensor)]
        needs = tuple(x.is_floating_point() for x in arguments)
        for k in range(2):
            level = compiled.tower(needs).level(k)
            outputs = level.forward.primal(*arguments)
            saved = [arguments[i] if where == "input" else outputs[i] for where, i in level.saved]
            cotangents = [torch.ones_like(outputs[i]).mul_(0.3 + 0.1 * i) for i in level.smooth]
            wanted = tuple(True for _ in level.wanted)
            for i in range(len(cotangents)):
                given = tuple(j == i for j in range(len(cotangents)))
                zeros = [c if yes else torch.zeros_like(c) for c, yes in zip(cotangents, given)]
                expected = level.backward.primal(*saved, *zeros)
                found, kept = level.backward_for(given, wanted)
                result = dict(zip(kept, found.primal(*saved, cotangents[i]) if kept else ()))
                for place, whole in zip(level.wanted, expected):
                    torch.testing.assert_close(
                        result.get(place, torch.zeros_like(whole)), whole, rtol=1e-9, atol=1e-10, equal_nan=True
                    )


def test_an_operator_of_two_cotangents_needs_both_to_be_zero():
    P, L, U = torch.linalg.lu(PROGRAMS["factors"][1][0])
    names, values = ("P", "L", "U", "grad_L", "grad_U"), (P, L, U, torch.ones_like(L), torch.ones_like(U))
    graph = torch.fx.Graph()
    places = {}
    for name, value in zip(names, values):
        places[name] = graph.placeholder(name)
        places[name].meta["val"] = value
    arguments = [places[n] for n in ("grad_L", "grad_U", "P", "L", "U")]
    graph.output((graph.call_function(torch.ops.manualgrad.linalg_lu_backward.default, (*arguments, True)),))
    made, kept = specialized(torch.fx.GraphModule({}, graph), 3, (False, True), (True,), Sizes(), ())
    assert kept == (0,)
    torch.testing.assert_close(
        made(P, L, U, values[4])[0], mg.ops.linalg_lu_backward(torch.zeros_like(L), values[4], P, L, U, True)
    )


def test_a_backward_is_zero_with_its_only_cotangent():
    aten = torch.ops.aten
    assert _is_backward(aten.sigmoid_backward.default) and _is_backward(aten.native_layer_norm_backward.default)
    assert _is_backward(torch.ops.manualgrad.native_layer_norm_backward.default)
    for op in (aten.lstm_mps_backward, aten.mkldnn_rnn_layer_backward, torch.ops.manualgrad.linalg_lu_backward):
        assert not _is_backward(op.default)


LAYERS = {
    "layer norm": lambda: nn.LayerNorm(6),
    "group norm": lambda: nn.Sequential(nn.Unflatten(1, (6, 1)), nn.GroupNorm(2, 6), nn.Flatten()),
    "batch norm": lambda: nn.BatchNorm1d(6),
    "batch norm in evaluation": lambda: nn.BatchNorm1d(6).eval(),
    "rms norm": lambda: nn.RMSNorm(6),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Conv1d(6, 6, 1), nn.Flatten()),
}


@pytest.mark.parametrize("name", LAYERS)
def test_parameters_without_a_second_derivative_get_none(name):
    """As uncompiled: to an optimizer with weight decay, zeros are another gradient than none."""
    net = nn.Sequential(nn.Linear(4, 6), nn.GELU(), LAYERS[name](), nn.Linear(6, 1)).double()
    x, found = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), []
    # uncompiled, PyTorch's group norm has zeros since torch 2.15: its derivative reads the statistics, which are outputs, too
    rules = "*" if name == "group norm" and reached("2.15") else ()
    with mg.override(*rules):
        for f in (net, mg.compile(net, lowering="eager")):
            net.zero_grad()
            (first,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
            first.square().sum().backward()
            found.append([n for n, p in net.named_parameters() if p.grad is None])
    assert found[0] == found[1] and len(found[0]) >= 1


_MASK, _PLACES = torch.eye(5, 6, dtype=torch.bool), torch.tensor([2, 0, 1, 1, 4])

LINEAR_IN_PIECES = {
    "masked_fill": lambda h: h.masked_fill(_MASK, -1e9).amax(1),
    "where": lambda h: torch.where(_MASK, h, 1.0),
    "index": lambda h: h[_PLACES],
    "gather": lambda h: h.gather(0, _PLACES[:, None].expand(-1, 6)),
    "sort": lambda h: h.sort(0).values,
    "cummax": lambda h: h.cummax(0).values,
    "clamp": lambda h: h.clamp(-1, 1),
    "maximum": lambda h: torch.maximum(h, h.new_ones(())),
    "solve": lambda h: torch.linalg.solve(torch.eye(5, dtype=h.dtype) + 0.1, h),
    "fft": lambda h: torch.fft.fft(h).real,
    "interpolate": lambda h: nn.functional.interpolate(h[None], scale_factor=2, mode="linear"),
    "trace": lambda h: h.trace(),
    "rot90": lambda h: h.rot90(),
}


@pytest.mark.parametrize("name", LINEAR_IN_PIECES)
def test_autograd_decides_which_gradients_are_none(name):
    """Whatever operators are between: no list of operators that return zeros for zeros is complete."""
    end = LINEAR_IN_PIECES[name]
    first, second = nn.Linear(4, 6).double(), nn.Linear(6, 6).double()
    x, found = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), []

    def net(x):
        return end(second(torch.nn.functional.silu(first(x))))

    with mg.override():
        for f in (net, mg.compile(net, lowering="eager")):
            (gradient,) = torch.autograd.grad(f(x).pow(2).sum(), x, create_graph=True)
            (linear,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
            parameters = [*first.parameters(), *second.parameters()]
            found += [torch.autograd.grad(g.square().sum(), parameters, allow_unused=True) for g in (gradient, linear)]
    assert found[1][3] is None
    torch.testing.assert_close(found[2:], found[:2], rtol=1e-9, atol=1e-10)


_ROWS = torch.tensor([0, 1, 1])

AFTER_A_ROOT = {
    "nothing": lambda h: h,
    "where": lambda h: torch.where(h > 0, h, 1.0),
    "masked_fill": lambda h: h.masked_fill(h < 0, 0.0),
    "masked_select": lambda h: h.masked_fill(_MASK[:3, :3], 0.0)[:, _ROWS],
    "index": lambda h: h[_ROWS],
    "index_select": lambda h: h.index_select(0, _ROWS),
    "gather": lambda h: h.gather(0, _ROWS[None].expand(3, -1)),
    "take_along_dim": lambda h: h.take_along_dim(h.detach().argsort(0), 0),
    "scatter": lambda h: torch.zeros_like(h).scatter(0, _ROWS[None], h),
    "scatter_add": lambda h: torch.ones_like(h).scatter_add(0, _ROWS[None], h),
    "index_add": lambda h: torch.ones_like(h).index_add(0, _ROWS, h),
    "index_put": lambda h: torch.ones_like(h).index_put((_ROWS,), h, accumulate=True),
    "clamp": lambda h: h.clamp(min=0.1),
    "maximum": lambda h: torch.maximum(h, h.new_ones(())),
    "minimum": lambda h: torch.minimum(h, 2 * h),
    "relu": torch.relu,
    "leaky relu": nn.functional.leaky_relu,
    "softplus": nn.functional.softplus,
    "gelu": nn.functional.gelu,
    "softmax": lambda h: h.softmax(0),
    "log_softmax": lambda h: h.log_softmax(0),
    "logsumexp": lambda h: h.logsumexp(0),
    "amax": lambda h: h.amax(0),
    "max": lambda h: h.max(0).values,
    "median": lambda h: h.median(0).values,
    "sort": lambda h: h.sort(0).values,
    "topk": lambda h: h.topk(2, 0).values,
    "kthvalue": lambda h: h.kthvalue(2, 0).values,
    "cumsum": lambda h: h.cumsum(0),
    "cumprod": lambda h: h.cumprod(0),
    "cummax": lambda h: h.cummax(0).values,
    "logcumsumexp": lambda h: h.logcumsumexp(0),
    "prod": lambda h: h.prod(0),
    "var": lambda h: h.var(0),
    "std": lambda h: h.std(0),
    "norm": lambda h: torch.linalg.vector_norm(h, dim=0),
    "norm 3": lambda h: torch.linalg.vector_norm(h, 3, dim=0),
    "layer norm": lambda h: nn.functional.layer_norm(h, (3,)),
    "group norm": lambda h: nn.functional.group_norm(h, 3),
    "batch norm": lambda h: nn.functional.batch_norm(h, None, None, training=True),
    "max pool": lambda h: nn.functional.max_pool1d(h[None], 2),
    "avg pool": lambda h: nn.functional.avg_pool1d(h[None], 2),
    "adaptive pool": lambda h: nn.functional.adaptive_avg_pool1d(h[None], 2),
    "interpolate": lambda h: nn.functional.interpolate(h[None], scale_factor=2, mode="linear"),
    "pad": lambda h: nn.functional.pad(h, (1, 1), value=2.0),
    "reflect": lambda h: nn.functional.pad(h, (1, 1), mode="reflect"),
    "slices": lambda h: h[1:, ::2].clone(),
    "as_strided": lambda h: h.as_strided((2, 2), (1, 3)).clone(),
    "unfold": lambda h: h.unfold(0, 2, 1),
    "flip": lambda h: h.flip(0),
    "tril": lambda h: h.tril(),
    "diagonal": lambda h: h.diagonal().clone(),
    "split": lambda h: torch.cat(h.split(2)[::-1]),
    "einsum": lambda h: torch.einsum("ij,kj->ik", h, 2 * h),
    "matmul": lambda h: h @ h.mT,
    "bmm": lambda h: torch.bmm(h[None], h[None]),
    "convolution": lambda h: nn.functional.conv1d(h[None], h[:, :, None]),
    "attention": lambda h: nn.functional.scaled_dot_product_attention(h[None], h[None], h[None]),
    "solve": lambda h: torch.linalg.solve(3 * torch.eye(3, dtype=h.dtype), h),
    "fft": lambda h: torch.fft.fft(h).real,
    "atan2": lambda h: torch.atan2(h, h + 1),
    "pow": lambda h: h.pow(1.5),
    "x ** y": lambda h: (h + 2).pow(h),
    "cross entropy": lambda h: nn.functional.cross_entropy(h, _ROWS),
    "mse": lambda h: nn.functional.mse_loss(h, h.detach() + 1),
    "huber": lambda h: nn.functional.huber_loss(h, torch.ones_like(h)),
    "cdist": lambda h: torch.cdist(h, h + 1),
    "to float32": lambda h: h.float(),
}


@pytest.mark.parametrize("name", every(3, AFTER_A_ROOT))
def test_a_result_that_is_not_differentiated_adds_no_nan(name):
    """The derivative of the root is infinite or nan, and an operator after it returns zeros for a cotangent of zero."""
    end = AFTER_A_ROOT[name]

    def function(x):
        return end(x.sqrt()), x.exp()

    gradients = []
    with mg.override():
        for f in (function, mg.compile(function, lowering="eager")):
            x = torch.tensor([[-1.0, 0.0, 2.0], [0.0, 3.0, -2.0], [1.0, 0.5, 0.0]], dtype=torch.float64)
            result = f(x.requires_grad_())[1]
            gradients.append(torch.autograd.grad(result.sum(), x)[0])
    torch.testing.assert_close(*gradients)
