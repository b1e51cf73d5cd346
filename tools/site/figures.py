"""The figures of the site, as SVG within the page, so that their colours follow the theme.

Those of docs/performance.md are drawn by benchmarks/plots.py from its tables; those of docs/index.md and docs/degeneracy.md
are computed when the site is built.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torch_manualgrad as mg

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from matplotlib import pyplot  # noqa: E402
from plots import COLOURS, PLOTS, svg  # noqa: E402
from start import start  # noqa: E402

__all__ = ["FIGURES", "figure", "svg"]


def degeneracy() -> tuple[str, Any]:
    """The error of a gradient through the SVD over the distance of two singular values."""
    U, _, Vh = torch.linalg.svd(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    weights = torch.arange(36.0, dtype=torch.float64).reshape(6, 6).sin()

    def error(A: torch.Tensor) -> float:
        def loss(A: torch.Tensor) -> torch.Tensor:
            U, S, Vh = torch.linalg.svd(A)
            return (weights * ((U * S) @ Vh)).sum()  # which is (weights * A).sum()

        return float((torch.func.grad(loss)(A) - weights).norm() / weights.norm())

    gaps = [10.0**-k for k in range(17)]
    matrices = [(U * torch.tensor([4.0, 3.0, 1 + gap, 1.0, 0.5, 0.25], dtype=U.dtype)) @ Vh for gap in gaps]
    canvas, axis = pyplot.subplots(figsize=(8.5, 3.2), layout="constrained")
    axis.loglog(gaps, [error(A) for A in matrices], "o-", color=COLOURS[3], label="torch.linalg.svd")
    with mg.override():
        axis.loglog(gaps, [error(A) for A in matrices], "o-", color=COLOURS[0], label="the same under mg.override()")
    axis.invert_xaxis()
    axis.set(xlabel="distance of two singular values", ylabel="relative error of the gradient")
    axis.legend(frameon=False)
    return (
        f"A reconstruction of a 6 x 6 matrix, float64; torch {torch.__version__}, CPU, when this page was built.",
        canvas,
    )


FIGURES: dict[str, Callable[[], tuple[str, Any]]] = {**PLOTS, "degeneracy": degeneracy}


def figure(name: str) -> str:
    """The HTML of a figure."""
    if name == "start":
        return start()
    about, canvas = FIGURES[name]()
    return f'<figure class="drawn">{svg(canvas, name)}<figcaption>{html.escape(about)}</figcaption></figure>'
