"""The operators that only some backends have: cuDNN, MIOpen, MPS, NNPACK, oneDNN, and those that other packages implement.

Their formulas are those of aten::convolution and of grid sampling. They are in the registry where the backend is, and
entries of the catalogue elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.binding import bound_to
from torch_manualgrad.core.catalogue import gap
from torch_manualgrad.core.formula import formula
from torch_manualgrad.core.linear import linear_in
from torch_manualgrad.core.rule import Rule, Sample, rule

from .common import random
from .convolution import backward_like, convolution_jvp, convolution_like
from .grid_sampler import (
    grid_sampler_2d_backward,
    grid_sampler_2d_double_backward,
    grid_sampler_backward_jvp,
    grid_sampler_jvp,
)
from .grid_sampler_rules import double_vjps
from .pooling import linear_backward

__all__ = ["BACKEND_RULES"]
