"""One step of an LSTM and of a GRU: _thnn_fused_lstm_cell, _thnn_fused_gru_cell.

The gates are sums of an input part and a hidden part, each with a bias. $s$ is the logistic function:

    LSTM: $i, f, o = s(.), g = tanh(.)$ of the gates in the order $i, f, g, o$;  $c' = f c + i g$,  $h' = o tanh(c')$.
    GRU:  $r, z = s(p + q), n = tanh(p + r q)$ of the input part $p$ and the hidden part $q$, in the order $r, z, n$;
          $h' = n + z (h - n)$.

Args:
    cx, cx_p: the old $c$, (b, n).
    hx, hx_p: the old $h$, (b, n).
    input_gates_t, hidden_gates_t, input_bias_t, hidden_bias_t, cx_t, hx_t: tangents; None for zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.rule import always, formula, rule
from torch_manualgrad.core.rule.catalogue import gap

__all__ = ["RULES", "gru_cell", "lstm_cell", "lstm_cell_backward", "lstm_cell_jvp"]


def _sum(*terms: Tensor | None) -> Tensor:
    """The sum of the terms that are not None. At least one is not."""
    given = [term for term in terms if term is not None]
    return sum(given[1:], given[0])


# -- LSTM -------------------------------------------------------------------------------------------------------------


def _activated(gates: Tensor) -> tuple[Tensor, ...]:
    i, f, g, o = gates.chunk(4, -1)
    return i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()


def lstm_cell(gates: Tensor, cx: Tensor) -> tuple[Tensor, Tensor]:
    """The new $h$ and $c$, given the sums of the gates' parts and the old $c$."""
    i, f, g, o = _activated(gates)
    cy = f * cx + i * g
    return o * cy.tanh(), cy


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, gates: Tensor, cx: Tensor
) -> tuple[Tensor, Tensor]:
    """Cotangents of the gates and of the old $c$, given those of the new $h$ and $c$; None for zero."""
    i, f, g, o = _activated(gates)
    t = (f * cx + i * g).tanh()
    of_o = torch.zeros_like(o) if grad_hy is None else grad_hy * t
    of_c = None if grad_hy is None else grad_hy * o * (1 - t * t)
    if of_c is None and grad_cy is None:
        return torch.zeros_like(gates), torch.zeros_like(cx)
    of_c = _sum(of_c, grad_cy)
    of_gates = (of_c * g * i * (1 - i), of_c * cx * f * (1 - f), of_c * i * (1 - g * g), of_o * o * (1 - o))
    return torch.cat(of_gates, -1), of_c * f


def lstm_cell_jvp(gates: Tensor, gates_t: Tensor, cx: Tensor, cx_t: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tangents of the new $h$ and $c$."""
    i, f, g, o = _activated(gates)
    i_t, f_t, g_t, o_t = gates_t.chunk(4, -1)
    t = (f * cx + i * g).tanh()
    cy_t = i * (1 - i) * i_t * g + f * (1 - f) * f_t * cx + i * (1 - g * g) * g_t
    cy_t = cy_t if cx_t is None else cy_t + f * cx_t
    return o * (1 - o) * o_t * t + o * (1 - t * t) * cy_t, cy_t


@formula
def _thnn_differentiable_lstm_cell_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    input_gates: Tensor,
    hidden_gates: Tensor,
    input_bias: Tensor | None,
    hidden_bias: Tensor | None,
    cx: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of both parts of the gates, of the old $c$ and of both biases, given those of the new $h$ and $c$.

    Args:
        grad_hy, grad_cy: cotangents of the new $h$ and $c$, (b, n). None for zero.
        input_gates, hidden_gates: the parts, (b, 4 n).
        input_bias, hidden_bias: (4 n,), or both None.

    Returns:
        (b, 4 n), (b, 4 n), (b, n), (4 n,), (4 n,).

    References:
        ATen _thnn_differentiable_lstm_cell_backward; Hochreiter, Schmidhuber, doi:10.1162/neco.1997.9.8.1735.
    """
    gates = _sum(input_gates, hidden_gates, input_bias, hidden_bias)
    of_gates, of_cx = lstm_cell_backward(grad_hy, grad_cy, gates, cx)
    of_bias = of_gates.sum(0)
    return of_gates, of_gates.clone(), of_cx, of_bias, of_bias.clone()


@formula
def _thnn_fused_lstm_cell_jvp(
    input_gates_p: Tensor,
    input_gates_t: Tensor | None,
    hidden_gates_p: Tensor,
    hidden_gates_t: Tensor | None,
    cx_p: Tensor,
    cx_t: Tensor | None,
    input_bias_p: Tensor | None,
    input_bias_t: Tensor | None,
    hidden_bias_p: Tensor | None,
    hidden_bias_t: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Tangents of the new $h$ and $c$.

    Args:
        input_gates_p, hidden_gates_p: the parts, (b, 4 n).
        input_bias_p, hidden_bias_p: (4 n,), or both None.

    Returns:
        (b, n) twice.

    References:
        The transpose of ATen _thnn_differentiable_lstm_cell_backward.
    """
    gates = _sum(input_gates_p, hidden_gates_p, input_bias_p, hidden_bias_p)
    gates_t = _sum(torch.zeros_like(gates), input_gates_t, hidden_gates_t, input_bias_t, hidden_bias_t)
    return lstm_cell_jvp(gates, gates_t, cx_p, cx_t)


# -- GRU --------------------------------------------------------------------------------------------------------------


def _biased(gates: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    return (gates if bias is None else gates + bias).chunk(3, -1)


def gru_cell(input_gates: Tensor, hidden_gates: Tensor, hx: Tensor) -> Tensor:
    """The new $h$, given both parts of the gates, with their biases, and the old $h$."""
    (ir, iz, i_n), (hr, hz, hn) = input_gates.chunk(3, -1), hidden_gates.chunk(3, -1)
    n = (i_n + (ir + hr).sigmoid() * hn).tanh()
    return n + (iz + hz).sigmoid() * (hx - n)


@formula
def _thnn_differentiable_gru_cell_backward(
    grad_hy: Tensor,
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None,
    hidden_bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of both parts of the gates, of the old $h$ and of both biases, given that of the new $h$.

    Args:
        grad_hy: cotangent of the new $h$, (b, n).
        input_gates, hidden_gates: the parts, (b, 3 n).
        input_bias, hidden_bias: (3 n,), or both None.

    Returns:
        (b, 3 n), (b, 3 n), (b, n), (3 n,), (3 n,).

    References:
        ATen _thnn_differentiable_gru_cell_backward; Cho et al., doi:10.3115/v1/D14-1179.
    """
    (ir, iz, i_n), (hr, hz, hn) = _biased(input_gates, input_bias), _biased(hidden_gates, hidden_bias)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (i_n + r * hn).tanh()
    of_n = grad_hy * (1 - z) * (1 - n * n)
    of_r, of_z = of_n * hn * r * (1 - r), grad_hy * (hx - n) * z * (1 - z)
    of_input, of_hidden = torch.cat((of_r, of_z, of_n), -1), torch.cat((of_r, of_z, of_n * r), -1)
    return of_input, of_hidden, grad_hy * z, of_input.sum(0), of_hidden.sum(0)


@formula
def _thnn_fused_gru_cell_jvp(
    input_gates_p: Tensor,
    input_gates_t: Tensor | None,
    hidden_gates_p: Tensor,
    hidden_gates_t: Tensor | None,
    hx_p: Tensor,
    hx_t: Tensor | None,
    input_bias_p: Tensor | None,
    input_bias_t: Tensor | None,
    hidden_bias_p: Tensor | None,
    hidden_bias_t: Tensor | None,
) -> Tensor:
    """Tangent of the new $h$.

    Args:
        input_gates_p, hidden_gates_p: the parts, (b, 3 n).
        input_bias_p, hidden_bias_p: (3 n,), or both None.

    Returns:
        (b, n).

    References:
        The transpose of ATen _thnn_differentiable_gru_cell_backward.
    """
    (ir, iz, i_n), (hr, hz, hn) = _biased(input_gates_p, input_bias_p), _biased(hidden_gates_p, hidden_bias_p)
    zero = torch.zeros_like(input_gates_p)
    ir_t, iz_t, in_t = _sum(zero, input_gates_t, input_bias_t).chunk(3, -1)
    hr_t, hz_t, hn_t = _sum(zero, hidden_gates_t, hidden_bias_t).chunk(3, -1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (i_n + r * hn).tanh()
    n_t = (1 - n * n) * (in_t + r * hn_t + r * (1 - r) * (ir_t + hr_t) * hn)
    found = (1 - z) * n_t + z * (1 - z) * (iz_t + hz_t) * (hx_p - n)
    return found if hx_t is None else found + z * hx_t


# -- the rules, of operators that only GPUs have ----------------------------------------------------------------------


_INPUTS = ("input_gates", "hidden_gates")
_HERE = torch.cuda.is_available()

RULES = [
    rule(
        "aten::_thnn_fused_lstm_cell",
        vjp={
            (*_INPUTS, "cx", "input_bias", "hidden_bias"): _thnn_differentiable_lstm_cell_backward.bind(
                grad_hy="grad_result0", grad_cy="grad_result1"
            )
        },
        jvp={("result0", "result1"): _thnn_fused_lstm_cell_jvp},
        not_differentiable="result2",
        defer_to_stock=always,
        improves="missing",
        source="ATen _thnn_differentiable_lstm_cell_backward; its jvp is new",
        register=_HERE,
    ),
    rule(
        "aten::_thnn_fused_gru_cell",
        vjp={
            (*_INPUTS, "hx", "input_bias", "hidden_bias"): _thnn_differentiable_gru_cell_backward.bind(
                grad_hy="grad_result0"
            )
        },
        jvp={"result0": _thnn_fused_gru_cell_jvp},
        not_differentiable="result1",
        defer_to_stock=always,
        improves="missing",
        source="ATen _thnn_differentiable_gru_cell_backward; its jvp is new",
        register=_HERE,
    ),
]

if not _HERE:
    for _rule in RULES:
        gap(_rule.name, reason="only GPUs have the operator; its rule is registered where such a GPU is available")
