"""The columns of the table of parity: importing this enters every way in `WAYS`."""

# isort: skip_file
from . import (
    base,
    batched,
    without_data,
    compilers,
    saved_tensors,
    in_place,
    strides,
    subclasses,
    tracking,
    transforms,
    modules,
    hooks,
    sizes,
)
from .base import CHEAP, DEAR, HANDFUL, SLOW, WAYS, Numbers, Program, Way, first, variables

__all__ = ["CHEAP", "DEAR", "HANDFUL", "SLOW", "WAYS", "Numbers", "Program", "Way", "first", "variables"]
