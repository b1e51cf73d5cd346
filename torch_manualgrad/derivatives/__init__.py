"""Formulas and rules, one file per family. Importing this package registers all of them."""

from . import (
    catalogue,
    convolution,
    elementwise,
    fft,
    indexing,
    linalg,
    loss,
    nn,
    public_functions,
    recomputed,
    recurrent,
    reduction,
    shape,
    sparse,
    strong_zeros,
)

from . import flops  # isort: skip  # last: it reads the formulas that the other modules register
from torch_manualgrad.core.rule import samples_in

samples_in(f"{__name__}.samples")
