"""What is likely to be at fault, by the pattern of the results of one sample."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import modes
from .evidence import Evidence, Said
from .first_order import first_order
from .probe import Probe
from .report import OK, RAISES, WRONG, Cause, Result

#: What can be named.
KEYS = (
    "sign",
    "factor",
    "zero",
    "transpose",
    "conjugate",
    "ignored cotangent",
    "missing cotangent",
    "needs_input_grad",
    "gradient shape",
    "vjp",
    "jvp",
    "detached residual",
    "once_differentiable",
    "nested jvp",
    "batching rule",
    "fake kernel",
    "strides",
)
_SECOND = ("rev-rev", "fwd-rev", "fwd-fwd", "rev-fwd")
#: What explains an error; anything else explains wrong results only.
_RAISING = ("missing cotangent", "gradient shape", "once_differentiable", "needs_input_grad")


@dataclass(frozen=True)
class Found:
    """A cause, and the columns whose failures it explains."""

    cause: Cause
    checks: tuple[str, ...]

    def explains(self, r: Result) -> bool:
        return r.check in self.checks and (r.outcome == WRONG or (r.outcome == RAISES and self.cause.key in _RAISING))


def causes(probe: Probe) -> list[Found]:
    """What the failures of one sample have in common with known mistakes; nothing where the evidence is missing."""
    return [Found(Cause(key, text), checks) for source in _SOURCES for key, text, checks in source(Evidence(probe))]


def needs_input_grad(e: Evidence) -> Said:
    alone = [r for r in e.of("rev", "eager, ") if r.failed]
    joint = e.of("rev", "eager")[:1]
    if alone and joint and joint[0].outcome == OK and joint[0].engine == "eager":
        names = " and ".join(r.engine.removeprefix("eager, ").removesuffix(" alone") for r in alone)
        yield (
            "needs_input_grad",
            f"the gradient of {names} is right where every input wants one, and not for that input alone: the vjp "
            "goes wrong by ctx.needs_input_grad",
            ("rev",),
        )


def missing_cotangent(e: Evidence) -> Said:
    failed = [r for r in e.of("undefined cotangents") if r.failed and "rev-rev" not in r.engine]
    if failed and e.right("rev"):
        what = "raises" if failed[0].outcome == RAISES else "is wrong"
        said = f"the vjp {what} where an output is not used, so that its cotangent is None or zero"
        yield "missing cotangent", said, ("undefined cotangents",)


# of PyTorch's engine, of mg.custom_op, and of `modes.gradient`
_SHAPE = re.compile(
    r"invalid gradient at index \d+ - got \[(.*?)\] but expected shape compatible with \[(.*?)\]"
    r"|the gradient for input .*? has shape \((.*?)\), but the input has shape \((.*?)\)"
    r"|the gradient of .*? is \S+ \((.*?)\), its input \S+ \((.*?)\)"
)


def gradient_shape(e: Evidence) -> Said:
    """A gradient has the shape of the result of broadcasting, or has lost a dimension of size 1."""
    said: dict[str, list[str]] = {}
    for r in e.results:
        if r.outcome == RAISES and (found := _SHAPE.search(r.detail)):
            grad, shape = ([int(n) for n in re.findall(r"\d+", g)] for g in found.groups() if g is not None)
            if (advice := _advice(grad, shape)) is not None:
                said.setdefault(f"a gradient has the shape {grad}, its input {shape}: {advice}", []).append(r.check)
    for text, checks in said.items():
        yield "gradient shape", text, tuple(dict.fromkeys(checks))


def _advice(grad: list[int], shape: list[int]) -> str | None:
    tail = grad[len(grad) - len(shape) :]
    if len(grad) >= len(shape) and all(m in (1, n) for m, n in zip(shape, tail, strict=True)):
        return "sum it over the dimensions that were broadcast"
    if [n for n in grad if n > 1] == [n for n in shape if n > 1]:
        return "a sum over dimensions that were broadcast keeps those of size 1 (keepdim=True)"
    return None


def second_order(e: Evidence) -> Said:
    if e.right("rev") or not e.finitely_wrong("rev"):
        if e.of("rev-rev") and not e.right("rev-rev") and _node(e, "torch::autograd::Error", of_gradient=True):
            yield (
                "once_differentiable",
                "the vjp is marked once_differentiable: it has no derivative",
                ("rev-rev", "fwd-rev"),
            )
        elif e.right("rev") and e.finitely_wrong("rev-rev"):
            yield (
                "detached residual",
                "the gradient is right and its own derivative is not: the vjp takes what depends on the inputs for a "
                "constant (a residual or cotangent that is detached, or an output that is not differentiable)",
                ("rev-rev", "fwd-rev", "undefined cotangents", "agreement"),
            )
    if not (e.right("fwd") and e.finitely_wrong("fwd-fwd")):
        return
    if e.right("rev") and e.finitely_wrong("rev-fwd"):
        yield (
            "detached residual",
            "the tangent is right and its own derivative is not: the jvp takes what depends on the inputs for a constant",
            ("fwd-fwd", "rev-fwd", "agreement"),
        )
    elif not e.finitely_wrong("rev-fwd") and _node(e, torch.autograd.function.BackwardCFunction):
        yield (
            "nested jvp",
            "the jvp of an autograd.Function is computed without forward mode, so that its own tangent is lost: "
            "torch.func.jvp of jvp does not work for it",
            ("fwd-fwd", "agreement"),
        )


def _node(e: Evidence, wanted: str | type, of_gradient: bool = False) -> bool:
    """Whether a node of this type or name is in the graph of the outputs, or in that of the gradient."""
    try:
        xs = [x.detach().requires_grad_() for x in e.p.primals]
        found: Sequence[Tensor | None] = e.p.call(*xs)
        if of_gradient:
            found = modes.backward(e.p.loss(*xs), xs, create_graph=True)
    except Exception:
        return False
    todo: list[Any] = [o.grad_fn for o in found if o is not None]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if node.name() == wanted if isinstance(wanted, str) else isinstance(node, wanted):
            return True
        seen.add(node)
        todo += [child for child, _ in node.next_functions]
    return False


def batching(e: Evidence) -> Said:
    if e.finitely_wrong("vmap"):
        said = "a batch gives other values than its samples one by one: the batching rule, which may mix the batch"
        yield "batching rule", said, ("vmap", "vmap-grad")
    elif e.finitely_wrong("vmap-grad") and e.right("vmap"):
        said = "per-sample derivatives differ from those of the samples one by one: the batching rule of the vjp or jvp"
        yield "batching rule", said, ("vmap-grad",)


def fake(e: Evidence) -> Said:
    for r in e.of("fake"):
        if r.outcome == WRONG:
            yield (
                "fake kernel",
                f"the fake kernel does not describe the result: {r.detail}",
                ("fake", "opcheck", "compile"),
            )


def strides(e: Evidence) -> Said:
    if e.finitely_wrong("noncontiguous"):
        said = "the same values with other strides give another result: a kernel takes its input for contiguous"
        yield "strides", said, ("noncontiguous",)


_SOURCES: tuple[Callable[[Evidence], Said], ...] = (
    first_order,
    needs_input_grad,
    missing_cotangent,
    gradient_shape,
    second_order,
    batching,
    fake,
    strides,
)
