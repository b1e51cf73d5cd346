"""A sample as Python code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.rule import Sample
from . import tree

#: Tensors with more elements are not written out.
MOST = 64


def source(sample: Sample) -> str:
    """``Sample(torch.tensor(...), ...)``; where a tensor is too large or not strided, shapes only."""
    tensors = tree.tensors((sample.args, sample.kwargs))
    if any(x.numel() > MOST or tree.is_sparse(x) or x.is_nested for x in tensors):
        return repr(sample)
    inner = [_value(a) for a in sample.args] + [f"{k}={_value(v)}" for k, v in sample.kwargs.items()]
    return f"Sample({', '.join(inner)})"


def _value(x: Any) -> str:
    if isinstance(x, Tensor):
        return _tensor(x)
    if type(x) is list:
        return f"[{', '.join(map(_value, x))}]"
    if type(x) is tuple:
        return f"({', '.join(map(_value, x))}{',' if len(x) == 1 else ''})"
    if type(x) is dict:
        return "{" + ", ".join(f"{k!r}: {_value(v)}" for k, v in x.items()) + "}"
    return _number(x) if isinstance(x, (float, complex)) else repr(x)


def _tensor(x: Tensor) -> str:
    options = "" if x.device.type == "cpu" else f", device={str(x.device)!r}"
    values = x.detach().cpu()
    if x.numel() == 0:
        text = f"torch.empty({tuple(x.shape)}, dtype={x.dtype}{options})"
    else:
        # a list of floats is of the default dtype, and of integers int64
        implied = torch.int64 if x.dtype == torch.int64 else torch.get_default_dtype()
        implied = torch.bool if x.dtype == torch.bool else implied
        dtype = "" if x.dtype == implied else f", dtype={x.dtype}"
        text = f"torch.tensor({_nested(values.tolist(), x.dtype)}{dtype}{options})"
    if not x.is_contiguous() and 0 not in x.stride():
        text = f"torch.empty_strided({tuple(x.shape)}, {x.stride()}, dtype={x.dtype}{options}).copy_({text})"
    return f"{text}.requires_grad_()" if x.requires_grad else text


def _nested(values: Any, dtype: torch.dtype) -> str:
    if isinstance(values, list):
        return f"[{', '.join(_nested(v, dtype) for v in values)}]"
    if isinstance(values, complex):
        return f"complex({_shortest(values.real, dtype)}, {_shortest(values.imag, dtype)})"
    return _shortest(values, dtype) if isinstance(values, float) else repr(values)


def _shortest(value: float, dtype: torch.dtype) -> str:
    """The fewest digits that give the same value in this dtype."""
    # a complex number is rounded in each part
    real = {torch.complex64: torch.float32, torch.complex32: torch.float16}.get(dtype, dtype)
    real = torch.float64 if real.is_complex else real
    for digits in (3, 5, 9):
        short = float(f"{value:.{digits}g}")
        if float(torch.tensor(short, dtype=real, device="cpu")) == value:
            return _number(short)
    return _number(value)


def _number(value: float | complex) -> str:
    text = repr(value)
    return f"float({text!r})" if text.strip("-") in ("nan", "inf") else text
