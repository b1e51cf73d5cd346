"""The check "edges": derivatives at inputs at the edge, which it makes itself from the user's ordinary sample.

What is judged, and what is not:

- Where the function raises, or its values are not finite, nothing is. An error in a derivative alone is a failure, unless
  it refuses an input that is not finite.
- Where the function is differentiable, its derivative has to be that number. Where it has a kink, the outcome is "not
  differentiable", and only what is certainly no generalized gradient is wrong (see `kinks`): sign(0) = 0, a half at
  relu's kink and evenly shared ties are right, and so is any other choice among the derivatives nearby. nan and inf are
  wrong at a kink whose derivatives nearby are bounded: a generalized gradient exists there, and it is finite. PyTorch
  holds to this too: a norm, a standard deviation and a distance have gradient 0 at 0.
- Where derivatives nearby grow without bound, as those of the square root at 0, nothing is said about this entry of the
  result. A cotangent of 0 that meets an infinite derivative gives nan throughout PyTorch, so that nan in a gradient is
  held against a function only if no entry of its result is of this kind or infinite. Nor is it at an infinite input, or
  one whose square is too large or too small for the dtype, as in tanh(x**2), where the 0 of a saturated function meets
  the inf of its argument. It is where the function hides an input that is nan. A solver that refuses a singular matrix is
  held against a function where nan is.
- A derivative too small or too large for its dtype is not judged, nor one where the function in its own dtype is far from
  what it is in double precision: only gross errors are found here, the other checks are sharp.
- A derivative that is mostly rounding error is not judged at a kink or at extreme scales: there, what is off has to exceed
  what factors of a few units in the last place on all inputs change.
- Second orders are judged where the gradient is differentiable.
- A kernel that does not check the sizes that it is given may read outside of its memory and end the process, as some of
  PyTorch's own backward kernels do: this check is not for those.
- A mode that raises or is wrong at the ordinary sample is left to the other checks, and so is a function that is
  constant around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from ..core.rule import Sample
from . import report, tree
from .context import Context
from .edge import MODES, SECOND, Edge, Verdict
from .edge_samples import BROADCAST, STRIDED, edge_samples
from .problem import Problem

#: No edges are tried of samples with more numbers.
LARGEST = 1000


def edges(c: Context) -> None:
    """Derivatives at edge values, shapes and layouts made from the sample."""
    p = c.problem
    if sum(x.numel() for x in p.leaves if isinstance(x, Tensor)) > LARGEST:
        return
    able = _able(c)
    if not able:
        return
    for label, leaves, second in edge_samples(p):
        try:
            edge = Edge(_problem_at(p, leaves), c.tolerance)
        except Exception:
            continue  # the function itself raises
        if label == f"inputs {STRIDED}" and edge.values_differ:
            break  # a function of the storage, as as_strided is; the check "noncontiguous" says so
        if label.endswith(BROADCAST) and not _broadcasts(p, edge, leaves):
            continue
        _judge(c, label, edge, able if second else [mode for mode in able if mode not in SECOND])


def _broadcasts(p: Problem, edge: Edge, leaves: Sequence[Any]) -> bool:
    """Whether the smaller input stands for the expanded one. Raw kernels that take any sizes read beyond their memory."""
    full = [
        x.expand(y.shape) if isinstance(x, Tensor) and x.shape != y.shape else x
        for x, y in zip(leaves, p.leaves, strict=True)
    ]
    try:
        return edge.agrees_with(_problem_at(p, full))
    except Exception:
        return False


def _able(c: Context) -> list[str]:
    """The modes that work at the ordinary sample."""
    able: list[str] = []
    try:
        ordinary = Edge(c.problem, c.tolerance)
        if ordinary.constant:
            return able
    except Exception:
        return able  # nested and sparse tensors, which cannot be moved along a direction
    for mode in MODES:
        try:
            if c.gap(*mode.split("/")) is None and not _failed(ordinary.verdict(mode)):
                able.append(mode)
        except Exception:
            continue
    return able


def _problem_at(p: Problem, leaves: list[Any]) -> Problem:
    marked = [x.detach().requires_grad_() if i in p.index else x for i, x in enumerate(leaves)]
    args, kwargs = tree.rebuild(p.arguments, marked)
    return Problem(p.fn, Sample(*args, **kwargs), readout=p.readout, outputs=p.outputs, seed=p.seed)


def _failed(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.outcome == report.WRONG


def _judge(c: Context, label: str, edge: Edge, able: Sequence[str]) -> None:
    if edge.values_differ:
        c.add("edges", f"outputs, at {label}", report.WRONG, "other values than of contiguous copies of the inputs")
        return
    for mode in able:
        if mode in SECOND and not edge.smooth:
            continue
        engine = f"{mode}, at {label}"
        verdict = c.run("edges", engine, partial(_verdict, edge, mode))
        if verdict is None:
            continue
        off = abs(verdict.ours - verdict.reference)
        relative = off / max(abs(verdict.reference), 1e-300)
        c.add("edges", engine, verdict.outcome, verdict.detail, verdict.ours, verdict.reference, off, relative)
        if _failed(verdict) and mode not in SECOND:
            able = [m for m in able if m not in SECOND]


def _verdict(edge: Edge, mode: str) -> Verdict | None:
    """The verdict on a mode, or an error if it can be held against the function."""
    try:
        return edge.verdict(mode)
    except Exception as error:
        unable = edge.hopeless or not all(bool(x.isfinite().all()) for x in edge.problem.primals)
        if unable and "INTERNAL ASSERT" not in str(error):
            return None
        if isinstance(error, LinAlgError) and not edge.nan_counts:
            return None
        if not _works_of_views(edge, mode):
            return None
        raise


def _works_of_views(edge: Edge, mode: str) -> bool:
    """Whether PyTorch has this mode for such inputs at all: it makes no dual number of an expanded tensor."""
    inputs = [x.detach().requires_grad_() for x in edge.problem.primals]
    try:
        Edge(Problem(lambda *xs: [x.view_as(x) for x in xs], Sample(*inputs)), edge.tolerance).verdict(mode)
    except Exception:
        return False
    return True
