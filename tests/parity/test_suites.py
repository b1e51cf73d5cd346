"""PyTorch's own gradient tests, with rules installed: what passes on stock passes, except for what pinned.md declares."""

from contextlib import nullcontext

import pytest
from cells import MODES, pinned_tests
from suites import DTYPES, PASSES, TESTS, names, run

import torch_manualgrad as mg


@pytest.mark.slow
@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("name", names())
def test_pytorchs_gradient_tests(name, test):
    declared = pinned_tests()
    for dtype in DTYPES:
        stock = run(name, dtype, test, nullcontext())
        for mode, chosen in MODES.items():
            ours = run(name, dtype, test, mg.override(*chosen))
            for variant, outcome in stock.items():
                key = f"{test} {variant} {str(dtype).removeprefix('torch.')}"
                if outcome == PASSES and key not in declared:
                    assert ours[variant] == PASSES, (mode, key, ours[variant])
                if key in declared and mode in declared[key]:
                    assert ours[variant] != PASSES, f"declared in pinned.md, and passes now: {key}, {mode}"
