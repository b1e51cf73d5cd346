"""What the tests of nested tensors share."""

import warnings

import pytest


@pytest.fixture(autouse=True)
def quiet():
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
