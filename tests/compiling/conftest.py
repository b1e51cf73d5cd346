"""A function that has been compiled too often raises: Dynamo would run it uncompiled, and a test of it would test nothing."""

import pytest
import torch._dynamo


@pytest.fixture(autouse=True)
def raise_at_the_recompile_limit():
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
