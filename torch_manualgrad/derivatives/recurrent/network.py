"""All layers of a recurrent network in one operator: _cudnn_rnn, which nn.LSTM, nn.GRU and nn.RNN call on a GPU.

A layer has one direction or two, whose outputs are concatenated and are the input of the next layer. In one direction,
with $x$ the input over time, $h$ and $c$ the states, and $i_t = W x_t + b$ and $j_t = U h_(t-1) + b'$ the two parts of
the gates,

    LSTM: $h', c = cell(i + j, c), h = R h'$ with a projection $R$;  GRU: $h = cell(i, j, h)$;
    RNN: $h = tanh(i + j)$ or $relu(i + j)$.

The cells are those of `cells`. $i$ of all times is one product of matrices; the rest is one step after the other.

A first backward in training is cuDNN's. Everything is computed here in evaluation, where cuDNN has no backward, in forward
mode, and if a backward is differentiated again.

Args:
    input: $x$, (t, b, m), or (b, t, m) with ``batch_first``.
    weight: for each layer and direction $W$, $U$, $b$ and $b'$, and $R$; those that it does not have are left out.
    weight_stride0: the number of these for one layer and direction.
    hx, cx: the first states, (layers * directions, b, n); ``cx`` of an LSTM only.
    mode: 0 for relu, 1 for tanh, 2 for an LSTM, 3 for a GRU.
    dropout: between layers, drawn in the kernel.
    batch_sizes: of a packed sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_manualgrad.core.rule import rule, tangents_possible
from torch_manualgrad.core.rule.catalogue import gap

from .cells import (
    _thnn_differentiable_gru_cell_backward,
    _thnn_fused_gru_cell_jvp,
    gru_cell,
    lstm_cell,
    lstm_cell_backward,
    lstm_cell_jvp,
)
from .lstm_layer import LSTM, in_time

RELU, GRU = 0, 3
_HERE = torch.cuda.is_available() and torch.backends.cudnn.is_available()


class Weights(NamedTuple):
    """The weights of one direction of one layer, or their tangents; a missing bias or projection is None."""

    W: Tensor
    U: Tensor
    b: Tensor | None
    b_hidden: Tensor | None
    R: Tensor | None


class Step(NamedTuple):
    """The parts of the gates, the old states and the new $h$ before its projection."""

    i: Tensor
    j: Tensor
    h: Tensor
    c: Tensor | None
    new: Tensor


def _weights(weight: Sequence[Any], stride: int) -> list[Weights]:
    found = []
    for first in range(0, len(weight), stride):
        W, U, *rest = weight[first : first + stride]
        b, b_hidden = rest[:2] if stride >= 4 else (None, None)
        found.append(Weights(W, U, b, b_hidden, rest[-1] if stride in (3, 5) else None))
    return found


def _obstacle(num_layers: int, dropout: float, train: bool, batch_sizes: Sequence[int]) -> str:
    """An error message if the steps cannot be computed here, else ""."""
    if dropout and train and num_layers > 1:
        return f"dropout: only cuDNN knows the mask, got {dropout}"
    return "batch_sizes: expected a sequence that is not packed" if len(batch_sizes) else ""


def _plus(x: Tensor, y: Tensor | None) -> Tensor:
    return x if y is None else x + y


def _cell(mode: int, i: Tensor, j: Tensor, h: Tensor, c: Any) -> tuple[Tensor, Any]:
    if mode == LSTM:
        return lstm_cell(i + j, c)
    if mode == GRU:
        return gru_cell(i, j, h), None
    return (i + j).relu() if mode == RELU else (i + j).tanh(), None


def _cell_backward(mode: int, step: Step, of_h: Tensor, of_c: Any) -> tuple[Tensor, Tensor, Tensor | None, Any]:
    """Cotangents of $i$, $j$, the old $h$ other than through $j$, and the old $c$."""
    if mode == LSTM:
        of_gates, of_c = lstm_cell_backward(of_h, of_c, step.i + step.j, step.c)
        return of_gates, of_gates, None, of_c
    if mode == GRU:
        of_i, of_j, of_old, *_ = _thnn_differentiable_gru_cell_backward(of_h, step.i, step.j, step.h, None, None)
        return of_i, of_j, of_old, None
    slope = (step.new > 0).to(of_h.dtype) if mode == RELU else 1 - step.new * step.new
    return of_h * slope, of_h * slope, None, None


def _cell_jvp(mode: int, step: Step, i_t: Tensor, j_t: Tensor, h_t: Tensor, c_t: Any) -> tuple[Tensor, Any]:
    if mode == LSTM:
        return lstm_cell_jvp(step.i + step.j, i_t + j_t, step.c, c_t)
    if mode == GRU:
        given = (step.i, i_t, step.j, j_t, step.h, h_t)
        return _thnn_fused_gru_cell_jvp(*given, None, None, None, None), None
    slope = (step.new > 0).to(i_t.dtype) if mode == RELU else 1 - step.new * step.new
    return slope * (i_t + j_t), None


def _direction(mode: int, x: Tensor, w: Weights, h: Tensor, c: Any) -> tuple[list[Step], Tensor]:
    """The steps and the outputs of one direction, $x$ in the order of its steps."""
    steps, outputs = [], []
    for i in _plus(x @ w.W.mT, w.b).unbind(0):
        j = _plus(h @ w.U.mT, w.b_hidden)
        new, next_c = _cell(mode, i, j, h, c)
        steps.append(Step(i, j, h, c, new))
        h, c = new if w.R is None else new @ w.R.mT, next_c
        outputs.append(h)
    return steps, torch.stack(outputs)


def _direction_backward(
    mode: int, x: Tensor, w: Weights, steps: list[Step], of_outputs: Tensor, of_h: Tensor, of_c: Any
) -> tuple[Tensor, Tensor, Any, list[Tensor]]:
    """Cotangents of $x$, of the first states and of the weights, given those of the outputs and of the last states."""
    of_i, of_j, of_R = [], [], None
    for step, of_output in zip(reversed(steps), reversed(of_outputs.unbind(0))):
        of_new = of_h + of_output
        if w.R is not None:
            of_R = _plus(of_new.mT @ step.new, of_R)
            of_new = of_new @ w.R
        i, j, of_old, of_c = _cell_backward(mode, step, of_new, of_c)
        of_h = _plus(j @ w.U, of_old)
        of_i.append(i)
        of_j.append(j)
    inputs, hidden = torch.stack(of_i[::-1]), torch.stack(of_j[::-1])
    before = torch.stack([step.h for step in steps])
    found = [inputs.flatten(0, 1).mT @ x.flatten(0, 1), hidden.flatten(0, 1).mT @ before.flatten(0, 1)]
    if w.b is not None:
        found += [inputs.sum((0, 1)), hidden.sum((0, 1))]
    return inputs @ w.W, of_h, of_c, found if of_R is None else [*found, of_R]


def _direction_jvp(
    mode: int, x: Tensor, x_t: Tensor, w: Weights, w_t: Weights, steps: list[Step], h_t: Tensor, c_t: Any
) -> tuple[Tensor, Tensor, Any]:
    """Tangents of the outputs and of the last states."""
    outputs = []
    for step, i_t in zip(steps, _plus(x_t @ w.W.mT + x @ w_t.W.mT, w_t.b).unbind(0)):
        j_t = _plus(h_t @ w.U.mT + step.h @ w_t.U.mT, w_t.b_hidden)
        h_t, c_t = _cell_jvp(mode, step, i_t, j_t, h_t, c_t)
        if w.R is not None:
            assert w_t.R is not None
            h_t = h_t @ w.R.mT + step.new @ w_t.R.mT
        outputs.append(h_t)
    return torch.stack(outputs), h_t, c_t


class _Network:
    """A forward pass through all layers, with the steps of each direction."""

    def __init__(
        self,
        input: Tensor,
        weight: Sequence[Tensor],
        stride: int,
        hx: Tensor,
        cx: Tensor | None,
        mode: int,
        batch_first: bool,
        bidirectional: bool,
    ) -> None:
        self.mode, self.batch_first, self.ways = mode, batch_first, 2 if bidirectional else 1
        self.weights = _weights(weight, stride)
        self.inputs, self.steps, x = [], [], self.by_time(input)
        for first in range(0, len(self.weights), self.ways):
            self.inputs.append(x)
            outputs: list[Tensor] = []
            for k in range(first, first + self.ways):
                c = None if cx is None else cx[k]
                (along,) = in_time(self.reverse(k), x)
                steps, found = _direction(mode, along, self.weights[k], hx[k], c)
                self.steps.append(steps)
                outputs += in_time(self.reverse(k), found)
            x = torch.cat(outputs, -1)

    def by_time(self, x: Tensor) -> Tensor:
        """$x$ with time as the first dim, or such a tensor in the original order."""
        return x.transpose(0, 1) if self.batch_first else x

    def reverse(self, k: int) -> bool:
        return k % self.ways == 1

    def backward(
        self, of_output: Tensor, of_h: Sequence[Tensor], of_c: Sequence[Any]
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
        of_x, count = self.by_time(of_output), len(self.weights)
        of_hx: list[Any] = [None] * count
        of_cx: list[Any] = [None] * count
        of_weights: list[list[Tensor]] = [[] for _ in range(count)]
        for layer in range(count // self.ways - 1, -1, -1):
            x = self.inputs[layer]
            parts: list[Tensor] = []
            for k, of_outputs in zip(range(layer * self.ways, count), of_x.chunk(self.ways, -1)):
                along, of_along = in_time(self.reverse(k), x, of_outputs)
                found = _direction_backward(
                    self.mode, along, self.weights[k], self.steps[k], of_along, of_h[k], of_c[k]
                )
                of_input, of_hx[k], of_cx[k], of_weights[k] = found
                parts += in_time(self.reverse(k), of_input)
            of_x = torch.stack(parts).sum(0)
        last = None if of_cx[0] is None else torch.stack(of_cx)
        weights = [w for ws in of_weights for w in ws]
        return self.by_time(of_x), torch.stack(of_hx), last, weights

    def jvp(
        self, input_t: Tensor, weight_t: Sequence[Tensor], stride: int, hx_t: Tensor, cx_t: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        x_t, tangents = self.by_time(input_t), _weights(weight_t, stride)
        of_h, of_c = [], []
        for layer, x in enumerate(self.inputs):
            outputs: list[Tensor] = []
            for k in range(layer * self.ways, (layer + 1) * self.ways):
                c_t = None if cx_t is None else cx_t[k]
                along, along_t = in_time(self.reverse(k), x, x_t)
                found, h_t, c_t = _direction_jvp(
                    self.mode, along, along_t, self.weights[k], tangents[k], self.steps[k], hx_t[k], c_t
                )
                of_h.append(h_t)
                of_c.append(c_t)
                outputs += in_time(self.reverse(k), found)
            x_t = torch.cat(outputs, -1)
        return self.by_time(x_t), torch.stack(of_h), None if cx_t is None else torch.stack(of_c)


def network_backward(
    input: Tensor,
    weight: Sequence[Tensor],
    weight_stride0: int,
    hx: Tensor,
    cx: Tensor | None,
    output: Tensor,
    grad_output: Tensor | None,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    mode: int,
    batch_first: bool,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    """Cotangents of the input, the first states and the weights, given those of the output and of the last states."""
    network = _Network(input, weight, weight_stride0, hx, cx, mode, batch_first, bidirectional)
    of_output, of_h = (torch.zeros_like(x) if g is None else g for g, x in ((grad_output, output), (grad_hy, hx)))
    of_c: Any = [None] * len(hx) if cx is None else torch.zeros_like(cx) if grad_cy is None else grad_cy
    return network.backward(of_output, of_h, of_c)


def _vjp(
    grad_result0: Tensor | None,
    grad_result1: Tensor | None,
    grad_result2: Tensor | None,
    input: Tensor,
    weight: Sequence[Tensor],
    weight_stride0: int,
    hx: Tensor,
    cx: Tensor | None,
    result0: Tensor,
    result3: Tensor,
    result4: Tensor,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    dropout_state: Tensor | None,
    output_mask: Sequence[Any],
) -> tuple[Any, ...]:
    grads = (grad_result0, grad_result1, grad_result2)
    # cuDNN's backward is for training, and has no derivative: it raises in evaluation, and if it is differentiated
    again = torch.is_grad_enabled() or tangents_possible((input, hx, cx, *weight, *grads))
    if (again or not train) and not _obstacle(num_layers, dropout, train, batch_sizes):
        how = (mode, batch_first, bidirectional)
        return network_backward(input, weight, weight_stride0, hx, cx, result0, *grads, *how)
    sizes = (mode, hidden_size, proj_size, num_layers, batch_first, dropout, train, bidirectional, batch_sizes)
    mask = [any(m) if isinstance(m, (list, tuple)) else bool(m) for m in output_mask]
    # cuDNN writes to the reserve, which a second backward reads again
    found = torch.ops.aten._cudnn_rnn_backward(
        input,
        list(weight),
        weight_stride0,
        result4,
        hx,
        cx,
        result0,
        *grads,
        *sizes,
        dropout_state,
        result3.clone(),
        [*mask[:2], mask[2] and cx is not None, mask[3]],
    )
    return tuple(found)


def _jvp(
    input: Tensor,
    input_t: Tensor | None,
    weight: Sequence[Tensor],
    weight_t: Sequence[Tensor | None] | None,
    weight_stride0: int,
    hx: Tensor,
    hx_t: Tensor | None,
    cx: Tensor | None,
    cx_t: Tensor | None,
    mode: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor | None]:
    if obstacle := _obstacle(num_layers, dropout, train, batch_sizes):
        raise NotImplementedError(
            f"{obstacle}; inside torch.backends.cudnn.flags(enabled=False) PyTorch calls operators that have tangents"
        )
    network = _Network(input, weight, weight_stride0, hx, cx, mode, batch_first, bidirectional)

    def zero(x: Tensor, t: Tensor | None) -> Tensor:
        return torch.zeros_like(x) if t is None else t

    weights = [zero(w, t) for w, t in zip(weight, weight_t or [None] * len(weight))]
    state = None if cx is None else zero(cx, cx_t)
    return network.jvp(zero(input, input_t), weights, weight_stride0, zero(hx, hx_t), state)


GPU_RULE = rule(
    "aten::_cudnn_rnn",
    vjp={("input", "hx", "cx", "weight"): _vjp},
    jvp={("result0", "result1", "result2"): _jvp},
    not_differentiable=("result3", "result4"),
    reads_grad_mode=True,
    improves="missing",
    source="Hochreiter, Schmidhuber, doi:10.1162/neco.1997.9.8.1735; Cho et al., doi:10.3115/v1/D14-1179; ATen has none",
    register=_HERE,
)
if not _HERE:
    gap(GPU_RULE.name, reason="only GPUs have the operator; its rule is registered where such a GPU is available")
