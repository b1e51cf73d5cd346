"""Calls on nested tensors that stay with PyTorch, as its own graph differentiates them: csrc/calls/nested.cpp.

PyTorch's nodes for these calls are right in first order where a cotangent lies in memory as PyTorch expects, which a hook
sees to. They compute by operators that are in our table too (`backward`), and have derivatives there. So a graph that was
made while ours were active is right in every order, whenever its backward comes.
"""

from __future__ import annotations

from ..core.override.compiled_nested import NestedCalls, Way
from .backward import BACKWARD

__all__ = ["ARITHMETIC", "CALLS"]

ARITHMETIC = [f"{name}.{other}" for name in ("add", "sub", "mul", "div") for other in ("Tensor", "Scalar")]

CALLS = NestedCalls(
    {
        f"aten::{name}": way
        for name, way in {
            **dict.fromkeys(BACKWARD, Way.NONE),
            **dict.fromkeys(("softmax.int", "sum.dim_IntList", "gelu"), Way.STAYS),
            **dict.fromkeys(("relu", "neg", *ARITHMETIC), Way.STAYS | Way.JAGGED),
            **dict.fromkeys(("layer_norm", "linear"), Way.STAYS | Way.PARAMETERS),
            "silu": Way.STAYS | Way.JAGGED | Way.SILU,
            "silu_backward": Way.SILU_BACKWARD,
            "values": Way.STAYS,
        }.items()
    }
)
