"""The table of everything that `check` can run: the six modes, then the checks, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..comparison.context import Context
from ..comparison.modes import MODES
from . import (
    batched_gradients,
    built_inputs,
    compiled_orders,
    derivatives,
    determinism,
    edges,
    fake_tensors,
    leaks,
    precision,
    programs,
    residuals,
    third_order,
    transforms,
)


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
    "built inputs": Check(built_inputs.built_inputs),
    "vmap": Check(transforms.vmap, differentiates=False),
    "vmap-grad": Check(transforms.vmap_grad),
    "noncontiguous": Check(transforms.noncontiguous, differentiates=False),
    "kernel": Check(transforms.kernel, differentiates=False),
    "fake": Check(fake_tensors.fake, differentiates=False),
    "opcheck": Check(transforms.opcheck, differentiates=False),
    "batched gradients": Check(batched_gradients.batched_gradients, default=False),
    "meta": Check(fake_tensors.meta, differentiates=False, default=False),
    "make_fx": Check(fake_tensors.traced, differentiates=False, default=False),
    "checkpoint": Check(programs.checkpointed),
    "residuals": Check(residuals.residuals),
    "leaks": Check(leaks.leaks),
    "determinism": Check(determinism.determinism, differentiates=False, default=False),
    "compiled autograd": Check(programs.compiled_autograd, default=False),
    "third order": Check(third_order.third_order, default=False),
    "precision": Check(precision.precision, default=False),
    "autocast": Check(precision.autocast, default=False),
    "compile": Check(transforms.compiled, default=False),
    "compiled": Check(compiled_orders.compiled, differentiates=False, default=False),
    "edges": Check(edges.edges, default=False),
}

#: Every check.
ALL_CHECKS: tuple[str, ...] = tuple(name for name in TABLE if name not in MODES)
#: The checks that run by default: all cheap ones.
CHECKS: tuple[str, ...] = tuple(name for name in ALL_CHECKS if TABLE[name].default)
#: The modes and checks for when time is short: pytest's ``--derivatives-fast`` and ``manualgrad check --fast``.
FAST_MODES: tuple[str, ...] = ("rev", "fwd", "rev-rev")
#: All default checks but `opcheck`, which compiles.
FAST_CHECKS: tuple[str, ...] = tuple(name for name in CHECKS if name != "opcheck")
