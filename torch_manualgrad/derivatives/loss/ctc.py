"""Connectionist temporal classification: $-log Z$, with $Z$ the probability of all alignments of a sequence of labels.

The states $s = 0, ..., 2 S$ are the labels with blanks around them, and $m(s)$ the symbol of a state. With $lp$ the
log-probabilities,

    a_t(s) = lp_t(m(s)) + log(exp a_(t-1)(s) + exp a_(t-1)(s - 1) + [m(s) != m(s - 2)] exp a_(t-1)(s - 2)),

from $a_(-1) = log [s = 0]$; $b_t$ is the same from the end, without $lp_t$, and $Z$ is the sum of $exp a$ over the last two
states. The derivative is that of a sum of products, at any $lp$, normalized or not:

    d(-log Z) / d lp_t(c) = -sum_(m(s) = c) exp(a_t(s) + b_t(s) - log Z).

PyTorch adds $exp(lp_t(c))$, because it assumes a log_softmax before the loss. The derivative of such a log_softmax gives the
same with and without this term.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, refuse_recording, rule

__all__ = ["lengths", "occupancies"]

aten = torch.ops.aten


def _log_sum(terms: Sequence[Tensor]) -> Tensor:
    """log sum exp of tensors; where all are $-inf$, it is $-inf$ and its derivatives are zero."""
    stacked = torch.stack(tuple(terms))
    largest = stacked.detach().amax(0)
    impossible = largest == -inf
    largest = torch.where(impossible, 0, largest)
    total = torch.where(impossible, 1, (stacked - largest).exp().sum(0))
    return torch.where(impossible, -inf, largest + total.log())


def _labels(targets: Tensor, target_lengths: Tensor, longest: int, blank: int) -> Tensor:
    """The symbols of the states, (N, 2 S + 1); those after the end of a sequence are blanks."""
    steps = torch.arange(longest, device=targets.device)
    if targets.dim() == 1:  # the sequences are concatenated
        starts = target_lengths.cumsum(0) - target_lengths
        places = (starts[:, None] + steps).clamp(max=max(targets.numel() - 1, 0))
        given = targets[places] if targets.numel() else places
    else:
        given = targets[:, :longest]
    given = torch.where(steps < target_lengths[:, None], given, blank).long()
    between = torch.full_like(given, blank)
    return torch.cat((torch.stack((between, given), -1).flatten(1), torch.full_like(target_lengths, blank)[:, None]), 1)


def _moved(x: Tensor, steps: int) -> Tensor:
    """$x$, moved by this number of states to the right, or to the left if negative, and filled with $-inf$."""
    if steps > 0:
        return torch.nn.functional.pad(x, (steps, 0), value=-inf)[:, : x.shape[1]]
    return torch.nn.functional.pad(x, (0, -steps), value=-inf)[:, -steps:]


def occupancies(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, longest: int, blank: int
) -> Tensor:
    """The probability of each symbol at each time, given the labels: zero where no alignment is possible.

    Args:
        log_probs: $lp$, (T, N, C).
        targets: the labels, (N, S) or concatenated.
        input_lengths, target_lengths: (N,).
        longest: $S$, the largest of the target lengths, or more.
        blank: the index of the blank.

    Returns:
        (T, N, C), zero after the end of an input.
    """
    states = _labels(targets, target_lengths, longest, blank)
    place = torch.arange(2 * longest + 1, device=log_probs.device)
    skips = torch.nn.functional.pad(states[:, 2:] != states[:, :-2], (min(2, 2 * longest + 1), 0))
    skips_left = torch.nn.functional.pad(skips, (0, 2))[:, 2:]
    last = (place == 2 * target_lengths[:, None]) | (place == 2 * target_lengths[:, None] - 1)
    symbols = states.expand(log_probs.shape[0], -1, -1)
    emitted = log_probs.gather(2, symbols)
    runs = torch.arange(log_probs.shape[0], device=log_probs.device)[:, None, None] < input_lengths[:, None]
    start = torch.where(place == 0, 0.0, -inf).to(log_probs).expand(states.shape)
    end = torch.where(last, 0.0, -inf).to(log_probs)

    a, before = start, []
    for lp, run in zip(emitted, runs):
        a = torch.where(run, lp + _log_sum((a, _moved(a, 1), torch.where(skips, _moved(a, 2), -inf))), a)
        before.append(a)
    log_z = _log_sum((a + end).unbind(1))[:, None]

    b, behind = end, []
    for lp, run in zip(reversed(emitted), reversed(runs)):
        behind.append(b)
        c = b + lp
        b = torch.where(run, _log_sum((c, _moved(c, -1), torch.where(skips_left, _moved(c, -2), -inf))), b)

    possible = log_z > -inf
    if not before:
        return torch.zeros_like(log_probs)
    exponent = torch.stack(before) + torch.stack(behind[::-1]) - torch.where(possible, log_z, 0)
    share = torch.where(runs & possible, exponent, -inf).exp()
    return torch.zeros_like(log_probs).scatter_add(2, symbols, share)


def _alignments_fit(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    neg_log_likelihood: Tensor,
    log_alpha: Tensor,
    blank: int,
) -> str:
    """An error message if labels or lengths do not fit, else "". The kernel uses them as places in memory."""
    T, N, C = log_probs.shape
    longest = (log_alpha.shape[-1] - 1) // 2
    if not 0 <= blank < C:
        return f"blank: expected one of {C} symbols, got {blank}"
    if targets.dim() == 2:
        longest = min(longest, targets.shape[1])
    elif N and int(target_lengths.sum()) > targets.numel():
        return (
            f"target_lengths: expected lengths that add up to {targets.numel()}, the size of targets, or less, got more"
        )
    for name, x, most in (("input_lengths", input_lengths, T), ("target_lengths", target_lengths, longest)):
        if x.numel() and not 0 <= int(x.min()) <= int(x.max()) <= most:
            return f"{name}: expected numbers from 0 to {most}, got {int(x.min())} to {int(x.max())}"
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < C:
        return f"targets: expected symbols from 0 to {C - 1}, got {int(targets.min())} to {int(targets.max())}"
    return ""


@formula(kernel=("default",), requires=_alignments_fit)
def ctc_loss_gradient(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    neg_log_likelihood: Tensor,
    log_alpha: Tensor,
    blank: int,
) -> Tensor:
    """Cotangent of $lp$, given that of $-log Z$: $-g sum exp(a_t(s) + b_t(s) - log Z)$ over the states $s$ of a symbol.

    Args:
        grad: $g$, (N,).
        log_probs: $lp$, (T, N, C).
        targets: the labels, integers, (N, S), or concatenated, (L,).
        input_lengths: (N,), integers; may be on the CPU.
        target_lengths: (N,), integers; may be on the CPU.
        neg_log_likelihood: $-log Z$, (N,), as _ctc_loss returns it; in further derivatives it is a function of
            ``log_probs``.
        log_alpha: $a$, (N, T, A); likewise. $A$ is $2 S + 1$ for the longest labels.
        blank: the index of the blank.

    Returns:
        The shape of ``log_probs``.

    Note:
        Where not differentiable: where no alignment is possible. The loss is infinite, and the result 0.

    References:
        Graves, Fernandez, Gomez, Schmidhuber, Connectionist temporal classification, doi:10.1145/1143844.1143891,
        equations 5 to 14. ATen _ctc_loss_backward adds exp(lp), as equation 16 does.
    """
    longest = (log_alpha.shape[-1] - 1) // 2
    return -grad[:, None] * occupancies(log_probs, targets, input_lengths, target_lengths, longest, blank)


@ctc_loss_gradient.impl("default")
def _(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    neg_log_likelihood: Tensor,
    log_alpha: Tensor,
    blank: int,
) -> Tensor:
    # PyTorch's kernel assumes that these are contiguous
    targets, input_lengths, target_lengths = (x.contiguous() for x in (targets, input_lengths, target_lengths))
    # lp without its largest entry at each time: then the exp(lp) that PyTorch adds is at most 1, and can be subtracted
    times = torch.arange(log_probs.shape[0], device=log_probs.device)
    inside = times[:, None] < input_lengths.to(log_probs.device)
    top = log_probs.amax(2)
    top = torch.where(inside & (top > -inf), top, 0)
    lp = log_probs - top[..., None]
    ones = torch.ones_like(grad)
    known = (neg_log_likelihood + top.sum(0), log_alpha - top.cumsum(0).mT[..., None])
    if log_probs.is_cuda:
        refuse_recording("lengths as numbers")
        sizes: Any = (input_lengths.tolist(), target_lengths.tolist())
        found = aten._ctc_loss_backward(ones, lp, targets, *sizes, *known, blank, True)
    else:
        found = aten._ctc_loss_backward.Tensor(ones, lp, targets, input_lengths, target_lengths, *known, blank, True)
    wanted = inside[..., None] & (neg_log_likelihood < inf)[:, None] & (lp > -inf)
    return (grad[:, None] * torch.where(wanted, found - lp.exp(), 0)).contiguous()


def lengths(given: Any, like: Tensor) -> Tensor:
    """Lengths as a tensor, even if the operator takes a list."""
    return given.to(like.device) if isinstance(given, Tensor) else torch.tensor(given, device=like.device)


def _vjp(
    grad_result0: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    result0: Tensor,
    result1: Tensor,
    blank: int,
) -> Tensor:
    sizes = (lengths(n, log_probs) for n in (input_lengths, target_lengths))
    return ctc_loss_gradient(grad_result0, log_probs, targets, *sizes, result0, result1, blank)


def _jvp(
    log_probs_p: Tensor,
    log_probs_t: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    result0: Tensor,
    result1: Tensor,
    blank: int,
) -> Tensor:
    ones = torch.ones_like(result0)
    slope = _vjp(ones, log_probs_p, targets, input_lengths, target_lengths, result0, result1, blank)
    return (slope * log_probs_t).sum((0, 2))


for _overload in ("", ".Tensor"):
    rule(
        f"aten::_ctc_loss{_overload}",
        vjp={"log_probs": _vjp},
        jvp={"result0": _jvp},
        not_differentiable="result1",
        improves=("values", "missing"),
        gaps={"fake": "PyTorch's forward has no fake kernel"},
        source="Graves et al., doi:10.1145/1143844.1143891, equations 5 to 14",
    )
