"""The table of everything that `check` can run: the six modes, then the checks, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import (
    batched,
    built,
    derivatives,
    edges,
    lifetimes,
    precision,
    programs,
    repeated,
    residuals,
    third_order,
    tracing,
    transforms,
)
from .context import Context
from .modes import MODES


@dataclass(frozen=True)
class Check:
    """One column of a report.

    Attributes:
        run: adds its results to the context.
        differentiates: whether it needs something to differentiate.
        default: whether `check` runs it unless told otherwise.
    """

    run: Callable[[Context], None]
    differentiates: bool = True
    default: bool = True


TABLE: dict[str, Check] = {
    "rev": Check(derivatives.rev),
    "fwd": Check(derivatives.fwd),
    **{mode: Check(derivatives.second(mode)) for mode in MODES if "-" in mode},
    "forward": Check(transforms.forward, differentiates=False),
    "agreement": Check(derivatives.agreement),
    "duality": Check(derivatives.duality),
    "undefined cotangents": Check(derivatives.undefined_cotangents),
    "built inputs": Check(built.built_inputs),
    "vmap": Check(transforms.vmap, differentiates=False),
    "vmap-grad": Check(transforms.vmap_grad),
    "noncontiguous": Check(transforms.noncontiguous, differentiates=False),
    "kernel": Check(transforms.kernel, differentiates=False),
    "fake": Check(tracing.fake, differentiates=False),
    "opcheck": Check(transforms.opcheck, differentiates=False),
    "batched gradients": Check(batched.batched_gradients, default=False),
    "meta": Check(tracing.meta, differentiates=False, default=False),
    "make_fx": Check(tracing.traced, differentiates=False, default=False),
    "checkpoint": Check(programs.checkpointed),
    "residuals": Check(residuals.residuals),
    "leaks": Check(lifetimes.leaks),
    "determinism": Check(repeated.determinism, differentiates=False, default=False),
    "compiled autograd": Check(programs.compiled_autograd, default=False),
    "third order": Check(third_order.third_order, default=False),
    "precision": Check(precision.precision, default=False),
    "autocast": Check(precision.autocast, default=False),
    "compile": Check(transforms.compiled, default=False),
    "edges": Check(edges.edges, default=False),
}

#: Every check.
ALL_CHECKS: tuple[str, ...] = tuple(name for name in TABLE if name not in MODES)
#: What `check` runs by default: all that are cheap.
CHECKS: tuple[str, ...] = tuple(name for name in ALL_CHECKS if TABLE[name].default)
