"""Calls on nested tensors that stay with PyTorch and are differentiated in its own graph: csrc/calls/nested.cpp.

PyTorch's nodes for these calls are right in first order if the cotangent has the layout that PyTorch expects. A hook
ensures this. The nodes call operators that our table replaces with differentiable ones (`backward`). So a graph that was
built while the replacements were active is right in every order, whenever its backward runs.
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
