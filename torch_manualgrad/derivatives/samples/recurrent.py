"""Samples of the rules of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..recurrent.cells import lstm_cell
from ..recurrent.lstm_layer import LSTM, in_time

# -- cells -------------------------------------------------------------------------------------------------------------


def _samples(parts: int) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        generator = torch.Generator().manual_seed(0)
        sizes = ((2, parts * 3), (2, parts * 3), (2, 3), (parts * 3,), (parts * 3,))
        given = [torch.randn(*s, dtype=dtype, generator=generator, device="cpu").to("cuda") for s in sizes]
        yield Sample(*given)
        yield Sample(*given[:3])

    return samples


samples_for("aten::_thnn_fused_lstm_cell")(_samples(4))
samples_for("aten::_thnn_fused_gru_cell")(_samples(3))


# -- networks ----------------------------------------------------------------------------------------------------------


@samples_for("aten::_cudnn_rnn")
def networks(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """One layer of each kind."""
    device = "cuda" if torch.cuda.is_available() else device
    if dtype.is_complex:
        return
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, generator=generator, device="cpu").to(device)

    for mode, gates in ((0, 3), (1, 3), (LSTM, 12), (3, 9)):
        weights = [draw(gates, 2), draw(gates, 3), draw(gates), draw(gates)]
        states = draw(1, 2, 3), draw(1, 2, 3) if mode == LSTM else None
        yield Sample(draw(3, 2, 2), weights, 4, None, *states, mode, 3, 0, 1, False, 0.0, True, False, [], None)


@probe_for("aten::_cudnn_rnn")
def network_probe(*args: Any) -> tuple[Tensor, ...]:
    """The output and the last states."""
    found = torch.ops.aten._cudnn_rnn(*args)
    return tuple(found[: 2 if args[5] is None else 3])


# -- lstm layer --------------------------------------------------------------------------------------------------------


@samples_for("aten::mkldnn_rnn_layer")
def lstm_layer(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """In single precision, the highest that the operator takes."""
    if dtype.is_complex:
        return
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(device)

    t, b, m, n = 3, 2, 2, 1
    for reverse in (False, True):
        weights = [draw(4 * n, m), draw(4 * n, n), draw(4 * n), draw(4 * n)]
        # not for training: then the workspace, which no derivative here reads, is not initialized everywhere
        yield Sample(
            draw(t, b, m), *weights, draw(b, n), draw(b, n), reverse, [], LSTM, n, 1, True, False, False, False
        )


@probe_for("aten::mkldnn_rnn_layer")
def lstm_layer_probe(
    input: Tensor, w: Tensor, u: Tensor, v: Tensor, b: Tensor, hx: Tensor, cx: Tensor, reverse: bool, *rest: Any
) -> Any:
    """The operator on contiguous tensors, as it misreads others; in double precision, its definition."""
    if not input.numel():
        raise ValueError("an empty batch, for which PyTorch's kernel ends the process")
    if input.dtype != torch.float64:
        given = [x.contiguous() for x in (input, w, u, v, b, hx, cx)]
        return torch.ops.aten.mkldnn_rnn_layer(*given, reverse, *rest)[:3]
    has_biases = rest[4]
    (x,) = in_time(reverse, input)
    h, c = hx, cx
    found = []
    for step in x:
        h, c = lstm_cell(step @ w.mT + h @ u.mT + (v + b if has_biases else 0), c)
        found.append(h)
    (output,) = in_time(reverse, torch.stack(found))
    return output, h, c
