"""Memory traffic budgets of the kernels of small matrices, as counted on the simulated device.

For each operator, order and dtype, cuda_traffic.csv has the wavefronts of shared memory and the sectors of global memory of a warp
full of matrices, and the fewest that the same bytes need. `run.py --write-traffic` writes it.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import torch

PATH = Path(__file__).resolve().parents[1] / "cuda_traffic.csv"


class Traffic(NamedTuple):
    wavefronts: int
    fewest_wavefronts: int
    sectors: int
    fewest_sectors: int


def read_traffic() -> dict[tuple[str, int, torch.dtype], Traffic]:
    with PATH.open(newline="") as file:
        return {
            (row["operator"], int(row["n"]), getattr(torch, row["dtype"])): Traffic(
                *(int(row[field]) for field in Traffic._fields)
            )
            for row in csv.DictReader(file)
        }
