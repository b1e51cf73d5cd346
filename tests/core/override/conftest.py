"""No test of override leaves a rule active."""

import pytest
import torch
from ops_for_tests import random
from sine_rules_for_tests import factor


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert factor() == 1
    assert torch.linalg.vector_norm(random(3).requires_grad_()).grad_fn.name() == "LinalgVectorNormBackward0"
