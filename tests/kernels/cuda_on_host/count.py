"""Writes the table of traffic.py to the path that is given, in a process where the host build is loaded (run.py)."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import torch
from cases import traffic_of
from helpers.factors import OPERATORS
from traffic import Traffic

ORDERS = (4, 8, 16, 32)
DTYPES = (torch.float32, torch.float64, torch.complex64)

if __name__ == "__main__":
    with Path(sys.argv[1]).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["operator", "n", "dtype", *Traffic._fields])
        for name in OPERATORS:
            for n in ORDERS:
                for dtype in DTYPES:
                    writer.writerow([name, n, str(dtype).removeprefix("torch."), *traffic_of(name, n, dtype)])
