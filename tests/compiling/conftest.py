"""Tests raise at Dynamo's recompile limit, beyond which a function runs uncompiled and a test of it proves nothing."""

import pytest
import torch._dynamo


@pytest.fixture(autouse=True)
def raise_at_the_recompile_limit():
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
