"""``torch.compile`` of functions on distributed tensors: right, in one graph, with our operators in it."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest
import torch
from helpers.processes import once, run_program
from helpers.sharding_cases import CASES

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or sys.platform != "linux" or torch.__version__ < "2.13",
    reason="gloo on Linux; before 2.13 PyTorch lacks strategies for half of the operators that formulas are made of",
)

# While it traces, PyTorch takes these apart before any rule is asked, and compares the labels with a tensor of one rank.
REFUSED = ("multi_margin_loss", "multilabel_margin_loss")


@pytest.fixture(scope="session")
def found(tmp_path_factory):
    """What a rank found of all cases; both run beside each other, once."""

    @functools.cache
    def of(backend, rank):
        program = functools.partial(run_program, Path(__file__).parent / "compiled_worker.py", backend)
        return json.loads((once(tmp_path_factory, f"compiled_{backend}", program) / f"{rank}").read_text())

    return of


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_function_agrees_with_one_process(found, name, backend):
    for rank in range(2):
        errors = found(backend, rank)[name]
        if name in REFUSED:
            assert "mixed torch.Tensor and DTensor" in errors
        else:
            assert not isinstance(errors, str), errors
            assert all(e < 1e-9 for e in errors), errors
