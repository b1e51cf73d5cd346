"""The picture of the first page: some operators in six modes, by PyTorch and under an override, as measured."""

from __future__ import annotations

import html
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F

import torch_manualgrad as mg
from torch_manualgrad.testing import MODES, check

__all__ = ["start"]

WORDS = {"ok": "right"}


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


GRID = torch.tensor([[[[-0.5, 0.3], [0.2, 0.6]]]], dtype=torch.float64)
# the label in the picture, a function, and its arguments
ROWS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "attention": (F.scaled_dot_product_attention, tuple(_random(3, 1, 1, 4, 2))),
    "cdist": (torch.cdist, (_random(3, 2), 1 + _random(4, 2))),
    "layer_norm": (lambda x: F.layer_norm(x, [3]), (_random(2, 3),)),
    "grid_sample": (lambda x: F.grid_sample(x, GRID, align_corners=False), (_random(1, 1, 3, 3),)),
    "slogdet": (lambda A: torch.linalg.slogdet(A)[1], (_random(3, 3),)),
    "cumprod": (lambda x: torch.cumprod(x, 0), (torch.tensor([2.0, 0.0, 3.0], dtype=torch.float64),)),
}


def outcomes(function: Callable[..., Any], arguments: tuple[torch.Tensor, ...]) -> list[str]:
    """For each mode: right, wrong, nan or raises."""
    found = []
    for mode in MODES:
        report = check(
            function, [mg.Sample(*arguments)], modes=(mode,), checks=(), raise_on_failure=False, diagnose=False
        )
        outcome = report.outcome(mode)
        is_nan = outcome == "wrong" and any(math.isnan(r.ours) for r in report.results if r.check == mode)
        found.append("nan" if is_nan else WORDS.get(outcome, outcome))
    return found


def _panel(title: str, rows: dict[str, list[str]], kind: str) -> str:
    modes = "".join(f"<th>{mode}</th>" for mode in MODES)
    lines = [
        f"<tr><th>{html.escape(name)}</th>" + "".join(f'<td class="{word}">{word}</td>' for word in words) + "</tr>"
        for name, words in rows.items()
    ]
    head = '<tr><td></td><th colspan="2">first derivatives</th><th colspan="4">second derivatives</th></tr>'
    head += f"<tr><td></td>{modes}</tr>"
    return f'<div class="panel {kind}"><p>{title}</p><table class="modes">{head}{"".join(lines)}</table></div>'


def start() -> str:
    """The HTML of the picture."""
    panels = []
    version = torch.__version__.partition("+")[0]
    for title, kind, context in (
        (f"PyTorch {version}", "stock", nullcontext),
        ("the same calls, <code>with mg.override():</code>", "ours", mg.override),
    ):
        with warnings.catch_warnings(), context():
            warnings.simplefilter("ignore")
            rows = {name: outcomes(function, arguments) for name, (function, arguments) in ROWS.items()}
        panels.append(_panel(title, rows, kind))
    caption = "Measured on a CPU, against finite differences, when this page was built."
    return f'<figure class="start">{"".join(panels)}<figcaption>{caption}</figcaption></figure>'
