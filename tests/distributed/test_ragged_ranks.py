"""Nested tensors whose batches differ from rank to rank: DDP has the gradients of one process with all of them."""

import sys
from pathlib import Path

import pytest
import torch
from helpers.processes import once, run_program
from ragged_ranks import RANKS

pytestmark = pytest.mark.skipif(not torch.distributed.is_available() or sys.platform != "linux", reason="gloo on Linux")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    program = Path(__file__).parent / "ragged_ranks.py"
    folder = once(tmp_path_factory, "ragged_ranks", lambda folder: run_program(program, folder))
    return [torch.load(folder / f"{number}.pt") for number in range(RANKS + 1)]


@pytest.mark.parametrize("layout", ["torch.jagged", "torch.strided"])
def test_ranks_with_their_own_sentences_agree_with_one_process(found, layout):
    *ranks, alone = (result[layout] for result in found)
    losses = torch.stack([result.pop("loss") for result in ranks])
    torch.testing.assert_close(losses.mean(), alone.pop("loss"), rtol=1e-12, atol=0)
    assert losses[0] != losses[1]
    for result in ranks:
        torch.testing.assert_close(result, alone, rtol=1e-10, atol=1e-14)
