"""The default checks in two parts: those of what is kept, built and traced, and those of numbers."""

from torch_manualgrad.testing import CHECKS

# What they look at depends on a function and the kinds of its arguments: where samples differ in their values alone, one
# is enough. The check "fake" is with the others, for every sample and dtype.
STRUCTURAL = ("opcheck", "checkpoint", "residuals", "leaks", "built inputs")
OF_NUMBERS = tuple(check for check in CHECKS if check not in STRUCTURAL)
assert {*STRUCTURAL} <= {*CHECKS}
