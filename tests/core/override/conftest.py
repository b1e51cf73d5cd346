"""No test of override leaves a rule active."""

import pytest
import torch
from helpers.calls import is_pytorchs
from helpers.sine import factor
from helpers.tensors import random


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert factor() == 1
    assert is_pytorchs(torch.linalg.vector_norm(random(3).requires_grad_()).grad_fn)
