"""No test of override leaves a rule active."""

import pytest
import torch
from calls_for_tests import is_pytorchs
from ops_for_tests import random
from sine_rules_for_tests import factor


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert factor() == 1
    assert is_pytorchs(torch.linalg.vector_norm(random(3).requires_grad_()).grad_fn)
