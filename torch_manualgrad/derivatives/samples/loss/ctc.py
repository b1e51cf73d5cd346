"""Samples of _ctc_loss, with lengths as lists and as tensors."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..drawing import random


def _samples(dtype: torch.dtype, device: torch.device | str, as_tensors: bool) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    lp = -random(4, 2, 3, dtype=dtype, device=device).abs()
    padded = torch.tensor([[1, 2], [2, 2]], device=device)
    # all of one length: PyTorch does not initialize the rest of the second output
    for x, targets, blank in (
        (lp - 12, padded.flatten(), 0),  # where exp(lp), which PyTorch adds, is small
        (lp, padded, 0),
        (lp[:2].contiguous(), padded - 1, 2),  # the second has no alignment
    ):
        both = [[len(x)] * 2, [2] * 2]
        given = [torch.tensor(n, device=device) if as_tensors else n for n in both]
        yield Sample(x, targets, *given, blank)


def _loss_alone(operator: Any) -> Any:
    """The loss, for contiguous targets: PyTorch's forward misreads others."""
    return lambda log_probs, targets, *rest: operator(log_probs, targets.contiguous(), *rest)[0]


samples_for("aten::_ctc_loss")(partial(_samples, as_tensors=False))
samples_for("aten::_ctc_loss.Tensor")(partial(_samples, as_tensors=True))
probe_for("aten::_ctc_loss")(_loss_alone(torch.ops.aten._ctc_loss.default))
probe_for("aten::_ctc_loss.Tensor")(_loss_alone(torch.ops.aten._ctc_loss.Tensor))
