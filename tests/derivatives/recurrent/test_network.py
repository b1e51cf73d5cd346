"""The rule of cuDNN's recurrent networks, where a CPU kernel stands in for the operators: PyTorch registers none."""

import itertools

import pytest
import torch
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad.derivatives.recurrent.network import GPU_RULE, GRU, LSTM, RELU, network_backward
from torch_manualgrad.testing import check

aten = torch.ops.aten
TANH = 1
NAMES = {RELU: "rnn_relu", TANH: "rnn_tanh", LSTM: "lstm", GRU: "gru"}
GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}


def forward(
    x, weight, stride, buffer, hx, cx, mode, size, proj, layers, batch_first, dropout, train, both, sizes, state
):
    states = (hx, cx) if mode == LSTM else hx
    how = (weight, stride >= 4, layers, 0.0, train, both, batch_first)
    y, h, *c = getattr(torch, NAMES[mode])(x, states, *how)
    return y, h, *(c or [x.new_zeros(0)]), x.new_zeros(0), x.new_zeros(0)


def backward(
    x, weight, stride, buffer, hx, cx, y, gy, gh, gc, mode, size, proj, layers, batch_first, dropout, train, both, sizes,
    state, reserve, mask,
):  # fmt: skip
    found = network_backward(x, weight, stride, hx, cx, y, gy, gh, gc, mode, batch_first, both)
    return tuple(x.new_zeros(0) if f is None else f for f in found)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_cudnn_rnn", forward, "CPU")
        library.impl("_cudnn_rnn_backward", backward, "CPU")
        yield


def case(mode, layers=1, both=False, biases=True, proj=0, batch_first=False, train=True):
    """The function of the input, the first states and the weights, and these."""
    ways, n, out = 2 if both else 1, 3, proj or 3
    shapes = []
    for layer, _ in itertools.product(range(layers), range(ways)):
        g = GATES[mode] * n
        shapes += [(g, 2 if layer == 0 else out * ways), (g, out), *([(g,), (g,)] if biases else [])]
        shapes += [(out, n)] if proj else []
    weights = [0.5 * random(*shape, seed=i) for i, shape in enumerate(shapes)]
    stride = len(shapes) // (layers * ways)
    x = random(2, 3, 2, seed=50) if batch_first else random(3, 2, 2, seed=50)
    states = [random(layers * ways, 2, out, seed=51)]
    states += [random(layers * ways, 2, n, seed=52)] if mode == LSTM else []

    def f(x, *others):
        states_, weight = others[: len(states)], list(others[len(states) :])
        hx, cx = (*states_, None)[:2]
        how = (mode, n, proj, layers, batch_first, 0.0, train, both, [], None)
        found = aten._cudnn_rnn(x, weight, stride, None, hx, cx, *how)
        return found[: 1 + len(states)]

    return f, (x, *states, *weights)


CASES = {
    "relu": (RELU,),
    "tanh, without biases": (TANH, 1, False, False),
    "lstm": (LSTM,),
    "gru": (GRU,),
    "lstm of two layers and directions": (LSTM, 2, True),
    "gru of two layers and directions": (GRU, 2, True),
    "lstm with a projection": (LSTM, 1, True, True, 2),
    "lstm with a projection, without biases": (LSTM, 1, False, False, 2),
    "tanh, the batch first": (TANH, 2, False, True, 0, True),
}


@pytest.mark.parametrize("name", CASES)
def test_every_mode(name):
    f, given = case(*CASES[name])
    with mg.override(GPU_RULE):
        check(f, [given], checks=("forward",), name=name, shrink=False)


def test_every_mode_of_the_samples():
    with mg.override(GPU_RULE):
        check(GPU_RULE.probe, GPU_RULE.samples(torch.float64, "cpu"), checks=(), shrink=False)


def test_a_third_derivative():
    f, given = case(LSTM)
    with mg.override(GPU_RULE):
        check(f, [given], modes=(), checks=("third order",), shrink=False)


def test_without_a_graph_the_backward_of_training_is_cudnns():
    calls = []
    f, given = case(LSTM)
    given = [x.requires_grad_() for x in given]
    with torch.library._scoped_library("aten", "IMPL") as library:

        def counted(*args):
            calls.append(args)
            return backward(*args)

        library.impl("_cudnn_rnn_backward", counted, "CPU", allow_override=True)
        with mg.override(GPU_RULE):
            y = f(*given)[0].sum()
            torch.autograd.grad(y, given[:2], retain_graph=True)
            torch.autograd.grad(y, given, create_graph=True)
            torch.autograd.grad(case(LSTM, train=False)[0](*given)[0].sum(), given)
    assert len(calls) == 1


def test_dropout_has_its_first_order_only():
    x, weights = random(3, 2, 2).requires_grad_(), [random(3, 2), random(3, 3)] + [random(3, 3), random(3, 3)]
    how = (TANH, 3, 0, 2, False, 0.5, True, False, [], None)
    with mg.override(GPU_RULE):
        y = aten._cudnn_rnn(x, weights, 2, None, random(2, 2, 3), None, *how)[0]
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="_cudnn_rnn_backward"):
            torch.autograd.grad(g.square().sum(), x)
        with pytest.raises(NotImplementedError, match="dropout: only cuDNN knows the mask, got 0.5"):
            torch.func.jvp(
                lambda x: aten._cudnn_rnn(x, weights, 2, None, random(2, 2, 3), None, *how)[0],
                (x.detach(),),
                (x.detach(),),
            )
