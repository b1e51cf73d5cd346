"""Reports a loss, or a direction, that depends on the choice of a basis or of a phase."""

from __future__ import annotations

import collections
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import refuse_recording

__all__ = [
    "GAUGES",
    "GaugeError",
    "GaugeWarning",
    "check_gauge",
    "depends_on_basis",
    "gauge_independent",
    "report",
    "reported",
    "warn",
]

GAUGES = ("warn", "error", "ignore")


class GaugeError(RuntimeError):
    """The loss depends on the choice of a basis or of a phase, and so has no derivative."""


class GaugeWarning(UserWarning):
    """As `GaugeError`, but the part of the derivative that does not depend on the choice was returned."""


def check_gauge(gauge: str) -> None:
    """Check the option ``gauge`` of a formula.

    Raises:
        ValueError: it is not one of `GAUGES`.
    """
    if gauge not in GAUGES:
        raise ValueError(f"gauge: expected one of {list(GAUGES)}, got {gauge!r}")


def gauge_independent(like: Tensor) -> Tensor:
    """The flag of a result that does not depend on a gauge: False, without dims, on the device of ``like``."""
    return torch.zeros((), dtype=torch.bool, device=like.device)


def depends_on_basis(basis: Tensor, cotangent: Tensor) -> Tensor:
    """Whether a loss depends on the choice of this orthonormal basis, and not only on its span.

    Rotating the basis $X$ by $exp(W)$, with a skew-Hermitian $W$, changes the loss by $Re tr(W^H X^H G)$ at first order. This
    is 0 if $X^H G$ is Hermitian. The tolerance is the square root of rounding errors, because columns of $G$ may be small
    differences.

    Args:
        basis: $X$, (*, m, k).
        cotangent: $G$, the same shape.

    Returns:
        A bool without dims.
    """
    X, G = basis.detach(), cotangent.detach()
    noise = 8 * (X.shape[-2] * torch.finfo(X.dtype).eps) ** 0.5 * torch.linalg.matrix_norm(G, keepdim=True)
    inner = X.mH @ G
    return ((inner - inner.mH).abs() > noise).any()


_unread: collections.deque[tuple[torch.cuda.Event, Tensor, str]] = collections.deque()
_unread_lock = threading.Lock()


def _text(what: str, then: str = "the part that does not depend on it is returned") -> str:
    return (
        f"{what}: the loss or the direction depends on the choice of basis within a group of equal values or within an "
        "orthogonal complement (or on the phase of a complex vector), and so has no derivative; "
        f"{then}. "
        "Second derivatives of singular values and eigenvalues also lack the part that splits the group. Functions such as "
        "mg.linalg.polar, mg.linalg.nuclear_norm and mg.linalg.funm_hermitian do not depend on such a choice."
    )


def warn(what: str, stacklevel: int = 2) -> None:
    """Warn that a loss depends on the choice.

    Args:
        what: the derivative, at the beginning of the message.
        stacklevel: as in `warnings.warn`, counted from the caller's caller.
    """
    warnings.warn(_text(what), GaugeWarning, stacklevel=stacklevel + 1)


def report(gauge_dependent: Tensor, gauge: str, what: str) -> None:
    """Warn or raise if the flag is set. On a GPU, the warning is issued by a later call, when the flag has arrived.

    While a CUDA graph is captured nothing is reported: the flag has no value, and the replay runs no Python.

    Args:
        gauge_dependent: a bool without dims; on the device "meta" it has no value and nothing is reported.
        gauge: "warn", "error" or "ignore". Only "error" synchronizes with a GPU.
        what: the derivative, at the beginning of the message.

    Raises:
        GaugeError: the flag is set and gauge is "error".
    """
    if gauge == "ignore" or gauge_dependent.is_meta:
        return
    if gauge == "error":
        if gauge_dependent:
            raise GaugeError(_text(what, "this is an error with gauge='error'"))
        return
    if not gauge_dependent.is_cuda:
        if gauge_dependent:
            warn(what, 3)
        return
    refuse_recording("a warning")
    if torch.cuda.is_current_stream_capturing():
        return
    flag = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True).copy_(gauge_dependent, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(gauge_dependent.device))
    with _unread_lock:
        arrived = []
        while _unread and _unread[0][0].query():
            arrived.append(_unread.popleft())
        _unread.append((event, flag, _text(what)))
    for _, earlier_flag, earlier in arrived:
        if earlier_flag:
            warnings.warn(earlier, GaugeWarning, stacklevel=3)


def _as_compiled(compiled: Callable[..., tuple[Tensor, ...]], *args: Any) -> tuple[Tensor, ...]:
    return compiled(*args)


def reported(what: str, compute: Callable[..., tuple[Tensor, ...]] = _as_compiled) -> Callable[..., Any]:
    """The Python kernel of a formula whose last argument is ``gauge``: returns its results, and reports.

    Args:
        what: as in `report`.
        compute: takes the kernel's arguments without ``gauge``, and returns the formula's results and the flag for
            `report`. By default the compiled kernel.

    Returns:
        The kernel.
    """

    def kernel(*args: Any) -> Any:
        *given, gauge = args
        check_gauge(gauge)
        *results, gauge_dependent = compute(*given)
        report(gauge_dependent, gauge, what)
        return results[0] if len(results) == 1 else tuple(results)

    return kernel
