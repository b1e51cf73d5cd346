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


class Graph:
    """The graph that Dynamo makes of a function."""

    def __init__(self, function):
        self.seen = []
        torch.compiler.reset()
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
