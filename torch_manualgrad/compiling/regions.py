"""Checkpointed regions of a graph, whose results the backward computes again.

In Dynamo's graph a region is a graph of its own. It is inlined, and each of its nodes is marked. Marks survive tracing
if the graph is run by `runner`. The partitioner saves no marked result, unless the region's policy requires it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from ..core.internals import OpOverload, checkpoint_policy, checkpointed_region

__all__ = ["are_in", "inlined", "runner", "settled"]

_numbers = itertools.count(1)


def inlined(graph: fx.GraphModule) -> fx.GraphModule:
    """Dynamo's graph with checkpointed regions inlined.

    Raises:
        NotImplementedError: the contexts of a region are not those of a policy.
    """
    if not graph.graph.find_nodes(op="call_function", target=checkpointed_region):
        return graph
    made, root = fx.Graph(), torch.nn.Module()
    made.output(_copied(graph, made, root, {}, {}))
    return fx.GraphModule(root, made)


def _copied(graph: fx.GraphModule, to: fx.Graph, root: Any, known: dict[Any, Any], marks: dict[str, Any]) -> Any:
    """Append the nodes of a graph to another, with the attributes of ``root``, and return its outputs."""
    for node in graph.graph.nodes:
        if node.op == "output":
            return fx.map_arg(node.args[0], known.__getitem__)
        if node in known:
            continue
        if node.op == "get_attr":
            if any(user.target is not checkpointed_region for user in node.users):
                name = f"held_{len(to.nodes)}"
                setattr(root, name, getattr(graph, node.target))
                known[node] = to.get_attr(name)
                known[node].meta.update(node.meta)
            continue
        if node.target is checkpointed_region and node.op == "call_function":
            body = getattr(graph, node.args[0].target)
            policy = checkpoint_policy(body)
            if policy is False:
                raise NotImplementedError("a checkpoint has contexts that are not those of a policy")
            given = [fx.map_arg(a, known.__getitem__) for a in node.args[1:]]
            inner = dict(zip(body.graph.find_nodes(op="placeholder"), given))
            inside = {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": next(_numbers)}
            known[node] = _copied(body, to, root, inner, {**inside, "policy": policy})
            for user in list(node.users):  # the results, by number
                known[user] = known[node][user.args[1]]
            continue
        known[node] = to.node_copy(node, known.__getitem__)
        if node.op != "placeholder" and marks:
            known[node].meta.update({k: v for k, v in marks.items() if k != "policy"})
            if marks["policy"] is not None:
                known[node].meta["custom"] = {**node.meta.get("custom", {}), "policy": marks["policy"]}
    raise AssertionError("a graph without an output")


def are_in(graph: fx.Graph) -> bool:
    """Whether a graph has nodes of checkpointed regions."""
    return any("recompute" in n.meta for n in graph.nodes)


def runner(graph: fx.GraphModule) -> Callable[..., Any]:
    """A graph as a function whose trace has the marks of its nodes."""
    if not are_in(graph.graph):
        return graph

    def run(*values: Any) -> Any:
        with fx.traceback.preserve_node_meta():
            return fx.Interpreter(graph).run(*values)

    return run


def settled(graph: fx.GraphModule) -> fx.GraphModule:
    """A graph of ATen operators, where policies have decided for each node whether it is saved."""
    regions: dict[int, tuple[Any, list[fx.Node]]] = {}
    for node in graph.graph.nodes:
        policy = node.meta.get("custom", {}).get("policy")
        if policy is not None and isinstance(node.target, OpOverload):
            node.meta["custom"] = {k: v for k, v in node.meta["custom"].items() if k != "policy"}
            regions.setdefault(node.meta["ac_graph_id"], (policy, []))[1].append(node)
    for policy, nodes in regions.values():
        calls = [(n.target, *fx.map_arg((n.args, n.kwargs), _value), _value(n)) for n in nodes]
        for node, saved in zip(nodes, _saved(policy, calls)):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
    return graph


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _saved(policy: Any, calls: Sequence[tuple[Any, Any, Any, Any]]) -> list[bool]:
    """Whether a policy saves the result of each call of a region."""
    if (of_region := getattr(policy, "of_region", None)) is not None:
        found: list[bool] = of_region(calls)
        return found
    context: Any = SelectiveCheckpointContext(is_recompute=False)
    choices = [policy(context, op, *args, **kwargs) for op, args, kwargs, _ in calls]
    return [c in (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE) for c in choices]
