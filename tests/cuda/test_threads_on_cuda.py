"""CUDA kernels that ask for shared memory, from two threads of the host at once."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from cuda_on_host.cases import from_two_threads


def test_two_threads_with_much_shared_memory():
    from_two_threads("cuda")
