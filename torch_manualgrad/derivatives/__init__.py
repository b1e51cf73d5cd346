"""The formulas and the rules, one file a family; importing this package registers all of them."""

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

from . import flops  # isort: skip  # last: it counts the formulas of the others
from torch_manualgrad.core.rule import samples_in

samples_in(f"{__name__}.samples")
