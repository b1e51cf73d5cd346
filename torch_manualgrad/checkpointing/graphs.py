"""Checkpoints in compiled functions: Dynamo traces them like PyTorch's checkpoints, which compilers support."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.checkpoint import checkpoint

from ..core.internals import constant_in_graphs, graph_is_for, in_functorch
from .policies import Policy

__all__ = ["in_graph", "takes"]


@constant_in_graphs
def _in_transform() -> bool:
    return in_functorch()


def takes(policy: Policy | None) -> bool:
    """Whether the compiler of the traced graph supports a policy; only ours supports one for whole regions, none offloads."""
    if policy is None:
        return True
    return not policy.on_host and (policy.saves is not None or graph_is_for("torch_manualgrad.compiling.backend"))


def in_graph(f: Callable[..., Any], policy: Policy | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A call of a function whose results the backward of the compiled function recomputes.

    Args:
        f: the function.
        policy: what to save, or None.
        args: of the call.
        kwargs: of the call.
    """
    if _in_transform():  # the graph includes the derivative, and the compiler partitions it as a whole
        return f(*args, **kwargs)
    if policy is None:
        return checkpoint(lambda: f(*args, **kwargs), use_reentrant=False)
    return checkpoint(lambda: f(*args, **kwargs), use_reentrant=False, context_fn=policy.contexts)
