"""Recurrent layers: torch.nn.LSTM, GRU and RNN in every mode, and the formulas of cells that only GPUs have as operators."""

import copy

import pytest
import torch
from helpers.calls import is_pytorchs
from helpers.tensors import random
from torch.func import functional_call, grad, jvp, vmap

import torch_manualgrad as mg
from torch_manualgrad.derivatives.recurrent import cells
from torch_manualgrad.testing import Sample, check

# batches of a layer that has no batching rule in PyTorch go one by one, which warns
pytestmark = pytest.mark.filterwarnings("ignore")


def modes(f, x):
    """The six, as numbers."""
    t = x.flip(0)

    def along(x):
        return jvp(f, (x,), (t,))[1]

    def pull(x):
        return (grad(f)(x) * t).sum()

    found = (pull(x), along(x), grad(pull)(x), jvp(pull, (x,), (t,))[1], jvp(along, (x,), (t,))[1], grad(along)(x))
    return [value.double().sum() for value in found]


LSTMS = {
    "two layers": {"num_layers": 2},
    "both directions": {"bidirectional": True},
    "no biases": {"bias": False},
    "projections": {"proj_size": 2},
    "batch first": {"batch_first": True},
}


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", LSTMS)
def test_lstm_in_all_modes(name, train):
    """PyTorch has another path for double precision, of operators that it differentiates."""
    torch.manual_seed(0)
    net = torch.nn.LSTM(3, 4, **LSTMS[name]).train(train)
    wide = copy.deepcopy(net).double()
    x = random(3, 2, 3)
    state = [
        random((2 if "bidir" in str(LSTMS[name]) else 1) * LSTMS[name].get("num_layers", 1), *s) for s in _states(name)
    ]

    def loss(net, dtype):
        def f(x):
            output, (h, c) = net(x, tuple(s.to(dtype) for s in state))
            return output.square().sum() + (h.sin() * h).sum() + c.square().sum()

        return f

    with mg.override():
        found = modes(loss(net, torch.float32), x.float())
    torch.testing.assert_close(found, modes(loss(wide, torch.float64), x), rtol=1e-4, atol=1e-4)


def _states(name):
    batch = 3 if name == "batch first" else 2
    return (batch, LSTMS[name].get("proj_size") or 4), (batch, 4)


def test_tangents_of_the_weights():
    torch.manual_seed(0)
    net = torch.nn.LSTM(3, 4)
    wide = copy.deepcopy(net).double()
    x = random(3, 2, 3)

    def along(net, x):
        weights = {k: v.detach() for k, v in net.named_parameters()}
        return jvp(lambda w: functional_call(net, w, (x,))[0].square().sum(), (weights,), (weights,))[1]

    with mg.override():
        found = along(net, x.float())
    torch.testing.assert_close(found.double(), along(wide, x), rtol=1e-5, atol=1e-5)


def test_per_sample_gradients():
    torch.manual_seed(0)
    net = torch.nn.LSTM(3, 4)
    x = random(4, 2, 1, 3).float()

    def f(x):
        return net(x)[0].square().sum()

    with mg.override():
        torch.testing.assert_close(vmap(grad(f))(x), torch.stack([grad(f)(one) for one in x]))


def test_a_training_step_stays_with_pytorch():
    net = torch.nn.LSTM(3, 4)
    with mg.override():
        output, _ = net(torch.ones(3, 2, 3))
    nodes, seen = [output.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if is_pytorchs(node):
            seen.add(node.name())
        nodes += [n for n, _ in node.next_functions if n is not None]
    assert "MkldnnRnnLayerBackward0" in seen


@pytest.mark.parametrize("kind", [torch.nn.GRU, torch.nn.RNN])
def test_gru_and_rnn_are_made_of_operators_with_derivatives(kind):
    torch.manual_seed(0)
    net = kind(3, 4, 2, bidirectional=True)
    wide = copy.deepcopy(net).double()
    x = random(3, 2, 3)
    with mg.override():
        found = modes(lambda x: net(x)[0].square().sum(), x.float())
    torch.testing.assert_close(found, modes(lambda x: wide(x)[0].square().sum(), x), rtol=1e-3, atol=1e-3)


# -- cells: the rules are for GPUs, the formulas are checked on the CPU -----------------------------------------------


def given(parts, biases):
    sizes = ((2, 3 * parts), (2, 3 * parts), (2, 3), (3 * parts,), (3 * parts,))
    return [random(*s, seed=i) for i, s in enumerate(sizes if biases else sizes[:3])]


def lstm(input_gates, hidden_gates, cx, *biases):
    return cells.lstm_cell(sum(biases, input_gates + hidden_gates), cx)


def gru(input_gates, hidden_gates, hx, *biases):
    bias, other = biases or (0, 0)
    return cells.gru_cell(input_gates + bias, hidden_gates + other, hx)


def gradients_by_formula(outputs, inputs, biases):
    """Of the definition above, with the rule's formula in place of autograd."""
    rest = biases or (None, None)
    if len(outputs) == 2:
        found = cells._thnn_differentiable_lstm_cell_backward(*outputs, *inputs[:2], *rest, inputs[2])
    else:
        found = cells._thnn_differentiable_gru_cell_backward(*outputs, *inputs, *rest)
    return found[: 3 + len(biases)]


@pytest.mark.parametrize("biases", [True, False], ids=["biases", "none"])
@pytest.mark.parametrize("parts, cell", [(4, lstm), (3, gru)], ids=["lstm", "gru"])
def test_cells(parts, cell, biases):
    values = [v.requires_grad_() for v in given(parts, biases)]
    y = cell(*values)
    y = y if isinstance(y, tuple) else (y,)
    weights = [random(2, 3, seed=7 + i) for i in range(len(y))]
    expected = torch.autograd.grad(y, values, weights, retain_graph=True)
    found = gradients_by_formula(weights, values[:3], values[3:])
    torch.testing.assert_close(found, expected)
    if parts == 4:  # one of the cotangents alone
        for i in (0, 1):
            alone = [w if k == i else None for k, w in enumerate(weights)]
            torch.testing.assert_close(
                gradients_by_formula(alone, values[:3], values[3:]),
                torch.autograd.grad(y[i], values, weights[i], retain_graph=True, materialize_grads=True),
            )
    tangents = [random(*v.shape, seed=20 + i) for i, v in enumerate(values)]
    pairs = [x for v, t in zip(values, tangents) for x in (v, t)] + [None] * (0 if biases else 4)
    formula = cells._thnn_fused_lstm_cell_jvp if parts == 4 else cells._thnn_fused_gru_cell_jvp
    torch.testing.assert_close(formula(*pairs), jvp(cell, tuple(values), tuple(tangents))[1])
    check(lambda *v: formula(*v, *pairs[6:]), [Sample(*pairs[:6])], modes=("rev", "fwd", "rev-rev"), checks=())


def test_arguments_that_are_not_an_lstm_raise():
    x, w = torch.ones(2, 1, 3), torch.ones(12, 3)
    with pytest.raises(NotImplementedError, match="expected an LSTM"):
        mg.ops.mkldnn_rnn_layer_differentiable_backward(
            x, w, w, w[:, 0], w[:, 0], x[0], x[0], x, None, x[0], None, False, 3, True, []
        )
