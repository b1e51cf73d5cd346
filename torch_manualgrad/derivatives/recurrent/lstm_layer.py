"""One layer of an LSTM in one direction: mkldnn_rnn_layer, which torch.nn.LSTM calls on the CPU in single precision.

$x$ is the input over time; $h$, the output, and $c$ are the states. The gates $a_t = W x_t + U h_(t-1) + b$ of all
times are two products of matrices. The rest is one step of `cells` after the other.

Args:
    reverse: whether time runs backward.
    mode: 2, for an LSTM.
    has_biases: whether there are biases.
    batch_sizes: empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import always, formula, meets_nothing, rule

from .cells import lstm_cell, lstm_cell_backward, lstm_cell_jvp

LSTM = 2  # PyTorch's number for this kind of recurrent layer


def _check(mode: int, batch_sizes: Sequence[int]) -> None:
    if mode != LSTM or len(batch_sizes):
        raise NotImplementedError(
            f"mode={mode}, batch_sizes={list(batch_sizes)}: expected an LSTM (mode={LSTM}) and no batch_sizes"
        )


def in_time(reverse: bool, *tensors: Any) -> tuple[Any, ...]:
    """The tensors in the order of the steps, which is reversed if ``reverse``; a second call undoes it."""
    return tuple(x.flip(0) if reverse and x is not None else x for x in tensors)


def _steps(
    input: Tensor, weights: Sequence[Tensor], has_biases: bool, hx: Tensor, cx: Tensor, output: Tensor
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The gates of each step and its initial $c$, as lists, and the initial $h$ of all steps, as a tensor."""
    h = torch.cat((hx.reshape(1, *output.shape[1:]), output.narrow(0, 0, output.shape[0] - 1)))
    a = input @ weights[0].mT + h @ weights[1].mT
    gates = (a + (weights[2] + weights[3]) if has_biases else a).unbind(0)
    c = [cx.reshape(output.shape[1:])]
    for a in gates[:-1]:
        c.append(lstm_cell(a, c[-1])[1])
    return list(gates), c, h


@formula
def mkldnn_rnn_layer_differentiable_backward(
    input: Tensor,
    weight0: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    weight3: Tensor,
    hx_: Tensor,
    cx_tmp: Tensor,
    output: Tensor,
    grad_output_r_opt: Tensor | None,
    grad_hy_r_opt: Tensor | None,
    grad_cy_r_opt: Tensor | None,
    reverse: bool,
    mode: int,
    has_biases: bool,
    batch_sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of the input, weights, biases and first states, given those of the output and the last states.

    Args:
        input: $x$, (t, b, m).
        weight0, weight1: $W$, (4 n, m), and $U$, (4 n, n).
        weight2, weight3: the biases, (4 n,); anything without biases.
        hx_, cx_tmp: the first states, (b, n) or (1, b, n).
        output: $h$ after each step, (t, b, n).
        grad_output_r_opt: cotangent of the output. None for zero.
        grad_hy_r_opt, grad_cy_r_opt: cotangents of the last states. None for zero.

    Returns:
        The shapes of the first seven arguments.

    Raises:
        NotImplementedError: the layer is not an LSTM, or the sequences are packed.

    References:
        ATen mkldnn_rnn_layer_differentiable_backward; Hochreiter, Schmidhuber, doi:10.1162/neco.1997.9.8.1735.
    """
    _check(mode, batch_sizes)
    input, output, grad = in_time(reverse, input, output, grad_output_r_opt)
    weights = (weight0, weight1, weight2, weight3)
    gates, c, h = _steps(input, weights, has_biases, hx_, cx_tmp, output)
    states = output.shape[1:]
    of_h, of_c = (None if g is None else g.reshape(states) for g in (grad_hy_r_opt, grad_cy_r_opt))
    of_gates = []
    for t in range(len(gates) - 1, -1, -1):
        if grad is not None:
            of_h = grad[t] if of_h is None else of_h + grad[t]
        of_a, of_c = lstm_cell_backward(of_h, of_c, gates[t], c[t])
        of_h = of_a @ weight1
        of_gates.append(of_a)
    assert of_h is not None and of_c is not None  # there is a step
    a = torch.stack(of_gates[::-1])
    (of_input,) = in_time(reverse, a @ weight0)
    flat = a.reshape(-1, a.shape[-1])
    of_weights = (flat.mT @ input.reshape(-1, input.shape[-1]), flat.mT @ h.reshape(-1, h.shape[-1]))
    of_biases = [flat.sum(0) if has_biases else torch.zeros_like(b) for b in (weight2, weight3)]
    return of_input, *of_weights, *of_biases, of_h.reshape(hx_.shape), of_c.reshape(cx_tmp.shape)


@formula
def mkldnn_rnn_layer_jvp(
    input_p: Tensor,
    input_t: Tensor | None,
    weight0_p: Tensor,
    weight0_t: Tensor | None,
    weight1_p: Tensor,
    weight1_t: Tensor | None,
    weight2_p: Tensor,
    weight2_t: Tensor | None,
    weight3_p: Tensor,
    weight3_t: Tensor | None,
    hx__p: Tensor,
    hx__t: Tensor | None,
    cx__p: Tensor,
    cx__t: Tensor | None,
    result0: Tensor,
    reverse: bool,
    mode: int,
    has_biases: bool,
    batch_sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Tangents of the output and of the last states.

    Args:
        input_p: $x$, (t, b, m).
        weight0_p: $W$, (4 n, m).
        weight1_p: $U$, (4 n, n).
        weight2_p, weight3_p: the biases, (4 n,); anything without biases.
        hx__p: the first states, (b, n) or (1, b, n).
        cx__p: see `mkldnn_rnn_layer_differentiable_backward`.
        input_t, weight0_t, weight1_t, weight2_t, weight3_t, hx__t, cx__t: tangents; None for zero.
        result0: the output, (t, b, n).

    Returns:
        (t, b, n), and the shapes of the states.

    Raises:
        NotImplementedError: see `mkldnn_rnn_layer_differentiable_backward`.

    References:
        The transpose of ATen mkldnn_rnn_layer_differentiable_backward.
    """
    _check(mode, batch_sizes)
    x, x_t, output = in_time(reverse, input_p, input_t, result0)
    gates, c, h = _steps(x, (weight0_p, weight1_p, weight2_p, weight3_p), has_biases, hx__p, cx__p, output)
    terms = [torch.zeros_like(gates[0]).expand(len(gates), *gates[0].shape)]
    terms += [] if x_t is None else [x_t @ weight0_p.mT]
    terms += [term @ w_t.mT for term, w_t in ((x, weight0_t), (h, weight1_t)) if w_t is not None]
    terms += [b_t for b_t in (weight2_t, weight3_t) if has_biases and b_t is not None]
    fixed = sum(terms[1:], terms[0])  # all terms but that of the tangent of h
    states = output.shape[1:]
    h_t, c_t = (None if s is None else s.reshape(states) for s in (hx__t, cx__t))
    found = []
    for t, a in enumerate(gates):
        a_t = fixed[t] if h_t is None else fixed[t] + h_t @ weight1_p.mT
        h_t, c_t = lstm_cell_jvp(a, a_t, c[t], c_t)
        found.append(h_t)
    assert h_t is not None and c_t is not None  # there is a step
    (output_t,) = in_time(reverse, torch.stack(found))
    return output_t, h_t.reshape(hx__p.shape), c_t.reshape(cx__p.shape)


def _vjp(
    input: Tensor,
    weight0: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    weight3: Tensor,
    hx_: Tensor,
    cx_: Tensor,
    result0: Tensor,
    result1: Tensor,
    result2: Tensor,
    result3: Tensor,
    grad_result0: Tensor | None,
    grad_result1: Tensor | None,
    grad_result2: Tensor | None,
    reverse: bool,
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    batch_first: bool,
) -> tuple[Tensor, ...]:
    given = (input, weight0, weight1, weight2, weight3, hx_, cx_)
    grads = (grad_result0, grad_result1, grad_result2)
    if torch.is_grad_enabled() or not result3.numel() or not meets_nothing((*given, *grads)):
        return mkldnn_rnn_layer_differentiable_backward(*given, result0, *grads, reverse, mode, has_biases, batch_sizes)
    # if no further derivative follows, PyTorch's own backward is called, which reads the workspace of its forward
    return torch.ops.aten.mkldnn_rnn_layer_backward(
        *given, result0, result1, result2, *grads, reverse, mode, hidden_size, num_layers, has_biases, train, bidirectional,
        batch_sizes, batch_first, result3,
    )  # fmt: skip


# -- the rule ---------------------------------------------------------------------------------------------------------


rule(
    "aten::mkldnn_rnn_layer",
    vjp={
        ("input", "weight0", "weight1", "weight2", "weight3", "hx_", "cx_"): _vjp,
    },
    jvp={("result0", "result1", "result2"): mkldnn_rnn_layer_jvp},
    not_differentiable="result3",
    reads_grad_mode=True,
    defer_to_stock=always,
    improves="missing",
    source="ATen mkldnn_rnn_layer_differentiable_backward; its jvp is new",
)
