"""Distributed tensors: the strategies that shard the operators. See docs/distributed.md."""

from .operators import strategies
from .placements import Batched, Body, Lines
from .registration import register

__all__ = ["Batched", "Body", "Lines", "register", "strategies"]
