"""The likely causes of a failure, from the pattern of the results of one sample."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comparison import modes
from ..comparison.report import OK, RAISES, WRONG, Cause, Result
from ..numerics.arithmetic import widen
from .probe import Probe, linear, single

#: The causes that can be named.
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
#: Causes that explain an error; the others explain wrong results only.
_RAISING = ("missing cotangent", "gradient shape", "once_differentiable", "needs_input_grad")


@dataclass(frozen=True)
class Found:
    """A cause, and the columns whose failures it explains."""

    cause: Cause
    checks: tuple[str, ...]

    def explains(self, r: Result) -> bool:
        return r.check in self.checks and (r.outcome == WRONG or (r.outcome == RAISES and self.cause.key in _RAISING))


def causes(probe: Probe) -> list[Found]:
    """The known mistakes that explain the failures of one sample; none where the evidence is missing."""
    return [Found(Cause(key, text), checks) for source in _SOURCES for key, text, checks in source(Evidence(probe))]


#: Keys of causes, with a sentence and with the columns whose failures they explain.
Said = Iterator[tuple[str, str, tuple[str, ...]]]


class Evidence:
    """The results of one sample, by column."""

    def __init__(self, probe: Probe) -> None:
        self.probe, self.p = probe, probe.p
        self.results = probe.c.results

    def of(self, check: str, engine: str = "") -> list[Result]:
        return [r for r in self.results if r.check == check and r.engine.startswith(engine)]

    def right(self, *checks: str) -> bool:
        """Whether each is right in some engine and wrong in none; an engine that raises is ignored."""
        outcomes = [{r.outcome for r in self.of(c)} for c in checks]
        return all(OK in found and found <= {OK, RAISES} for found in outcomes)

    def finitely_wrong(self, *checks: str) -> bool:
        """Whether one of them is a wrong finite number."""
        return any(r.outcome == WRONG and math.isfinite(r.ours) for c in checks for r in self.of(c))

    def wrong_engine(self, check: str) -> str:
        """The engine whose joint derivative is wrong; empty if none is."""
        return next((r.engine for r in self.of(check) if r.outcome == WRONG and r.engine in ("eager", "func")), "")

    def close(self, a: Tensor, b: Tensor) -> bool:
        relative, absolute = self.probe.c.tolerance.first
        limit = 10 * (relative * max(largest(a), largest(b)) + absolute)
        return a.shape == b.shape and largest(a - b) <= limit


def largest(x: Tensor) -> float:
    return float(widen(x).abs().max()) if x.numel() else 0.0


def first_order(e: Evidence) -> Said:
    """Patterns that relate wrong gradients or tangents to the right ones."""
    rev = _first_order(e, "rev", "fwd", "vjp")
    fwd = _first_order(e, "fwd", "rev", "jvp")
    for key, text, names in rev:
        # an input that is disconnected in one mode is disconnected in the other
        both = key == "zero" and any((key, names) == (k, n) for k, _, n in fwd)
        fwd = [item for item in fwd if not (both and item[0] == "zero")]
        yield key, text, (*_FROM_VJP, *_FROM_JVP) if both else _FROM_VJP
    for key, text, _ in fwd:
        yield key, text, _FROM_JVP


_FROM_VJP = ("rev", "rev-rev", "fwd-rev", "rev-fwd", "duality", "agreement", "undefined cotangents")
_FROM_JVP = ("fwd", "fwd-fwd", "fwd-rev", "rev-fwd", "duality", "agreement")


def _first_order(e: Evidence, mode: str, other: str, formula: str) -> list[tuple[str, str, str]]:
    """Key, sentence and inputs of each pattern in the wrong results of one mode."""
    engine = e.wrong_engine(mode)
    if not engine:
        return []
    pairs = e.probe.gradient(mode, engine)
    wrong = [i for i, (ours, right) in enumerate(pairs) if not e.close(ours, right)]
    if mode == "rev" and wrong and (said := _ignored_cotangent(e, engine)):
        return [("ignored cotangent", said, "")]
    inputs: dict[tuple[str, str], list[str]] = {}
    for i in wrong:
        if (like := _compare(e, mode, engine, i, *pairs[i])) is not None:
            inputs.setdefault(like, []).append(e.p.names[i])
    found = []
    for (key, text), of in inputs.items():
        names = " and ".join(of)
        found.append((key, text.format(what=f"{_WHAT[mode]} {names}", formula=formula), names))
    if not found and e.right(other):
        # where the other mode is right, so is the function
        text = f"{_MODE[mode]} is wrong and {_MODE[other]} is right: the {formula}, not the function"
        found.append((formula, text, ""))
    return found


_WHAT = {"rev": "the gradient of", "fwd": "the tangent for"}
_MODE = {"rev": "reverse mode", "fwd": "forward mode"}


def _compare(e: Evidence, mode: str, engine: str, i: int, ours: Tensor, right: Tensor) -> tuple[str, str] | None:
    if largest(ours) == 0:
        missing = {
            "rev": "it is not connected to the result (detached, or computed outside of autograd)",
            "fwd": "the {formula} drops it, or there is none (torch.library.custom_op has none, and gives zeros)",
        }
        return "zero", f"{{what}} is zero: {missing[mode]}"
    ratio = _ratio(ours, right)
    if e.close(ours, ratio * right):
        if abs(ratio + 1) < 1e-3:
            return "sign", "{what} is the right one times -1: a sign in the {formula}"
        if (meaning := _meaning(e, i, ratio)) is not None or int((right != 0).sum()) >= 3:
            return (
                "factor",
                f"{{what}} is the right one times {ratio:.4g}{meaning or ''}: a factor in the {{formula}}",
            )
    if mode == "rev":
        return _turned(e, engine, i, ours, right)
    return None


def _turned(e: Evidence, engine: str, i: int, ours: Tensor, right: Tensor) -> tuple[str, str] | None:
    """Whether the gradient is the right one transposed or conjugated, or that of the transposed Jacobian."""
    conjugate = (
        "conjugate",
        "{what} is without a conjugate: the {formula} of a complex function has the conjugate of its derivative",
    )
    if right.is_complex() and e.close(ours, right.conj()):
        return conjugate
    if right.dim() >= 2 and right.shape[-1] == right.shape[-2] and e.close(ours, right.mT):
        return "transpose", "{what} is the transpose of the right one: a transpose in the {formula}"
    p = e.p
    ours, right = _linear(e, engine, p.weights, "linear", i)
    if right.is_complex():
        _, flipped = _linear(e, engine, [w.conj().resolve_conj() for w in p.weights], "conjugate", i)
        if right.numel() and e.close(ours, flipped.conj()):
            return conjugate
    elif len(p.weights) == 1 and p.weights[0].numel() == right.numel() > 1:
        # J w instead of J^T w: row k of J is the right gradient of entry k of the output
        rows = [e.probe.gradient("rev", engine, single(p, k), k) for k in e.probe.outputs]
        if rows and all(rows):
            w = p.weights[0].reshape(-1).to(right.dtype)
            swapped = torch.stack([(row[i][1].reshape(-1) * w).sum() for row in rows]).reshape(right.shape)
            if e.close(ours, swapped):
                text = "{what} is J w for the cotangent w, with the Jacobian J: the {formula} is without J's transpose"
                return "transpose", text
    return None


def _linear(e: Evidence, engine: str, weights: Sequence[Tensor], key: str, i: int) -> tuple[Tensor, Tensor]:
    """One gradient, ours and the right one, for a loss whose cotangent does not depend on the result."""
    pairs = e.probe.gradient("rev", engine, linear(e.p, weights), key)
    return pairs[i] if pairs else (torch.zeros(0, device="cpu"), torch.ones(0, device="cpu"))


def _ignored_cotangent(e: Evidence, engine: str) -> str | None:
    """Some outputs' cotangents have a right gradient, and the others' have none."""
    p = e.p
    if len(p.outputs) < 2:
        return None
    ignored, others = [], []
    for j, output in enumerate(p.outputs):
        weights, squares = (
            [x if k == j else torch.zeros_like(x) for k, x in enumerate(of)] for of in (p.weights, p.squares)
        )
        pairs = e.probe.gradient("rev", engine, p.but(weights=weights, squares=squares), ("output", j))
        if all(e.close(a, b) for a, b in pairs):
            others.append(output)
        elif all(largest(a) == 0 for a, _ in pairs):
            ignored.append(f"output {output}")
    if not ignored or len(ignored) + len(others) < len(p.outputs):
        return None
    return f"the cotangent of {' and '.join(ignored)} has no effect: the vjp ignores it"


def _ratio(ours: Tensor, right: Tensor) -> complex | float:
    """c for which c times the right one is nearest to ours."""
    size = float((right.abs() ** 2).sum())
    product = (right.conj() * ours).sum().item() / size if size else 0.0
    near = product.real if isinstance(product, complex) and abs(product.imag) < 1e-6 * abs(product) else product
    return near


def _meaning(e: Evidence, i: int, ratio: complex | float) -> str | None:
    """The meaning of a factor, if it is a size of this problem."""
    p = e.p
    tensors = [(p.names[i], p.primals[i]), *((f"output {j}", p.base[j]) for j in p.outputs)]
    known = [(2, "")]
    for name, x in tensors:
        known += [(n, f"the size of dimension {d} of {name}") for d, n in enumerate(x.shape)]
        known += [(x.numel(), f"the number of elements of {name}")]
    for n, meaning in known:
        for value, said in ((n, f"{n}"), (1 / max(n, 1), f"1/{n}")):
            for sign in (1, -1):
                if n > 1 and abs(ratio - sign * value) < 1e-4 * value:
                    return f" ({'-' if sign < 0 else ''}{said}: {meaning})" if meaning else ""
    return None


def needs_input_grad(e: Evidence) -> Said:
    alone = [r for r in e.of("rev", "eager, ") if r.failed]
    joint = e.of("rev", "eager")[:1]
    if alone and joint and joint[0].outcome == OK and joint[0].engine == "eager":
        names = " and ".join(r.engine.removeprefix("eager, ").removesuffix(" alone") for r in alone)
        yield (
            "needs_input_grad",
            f"the gradient of {names} is right if every input requires grad, and wrong if that input alone does: the vjp "
            "misuses ctx.needs_input_grad",
            ("rev",),
        )


def missing_cotangent(e: Evidence) -> Said:
    failed = [r for r in e.of("undefined cotangents") if r.failed and "rev-rev" not in r.engine]
    if failed and e.right("rev"):
        what = "raises" if failed[0].outcome == RAISES else "is wrong"
        said = f"the vjp {what} if an output is not used, so that its cotangent is None or zero"
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
