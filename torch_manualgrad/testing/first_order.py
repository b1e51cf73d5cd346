"""What a wrong first derivative has in common with the right one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .evidence import Evidence, Said, largest
from .probe import linear, single


def first_order(e: Evidence) -> Said:
    """What the wrong gradients, or tangents, have in common with the right ones."""
    rev = _first_order(e, "rev", "fwd", "vjp")
    fwd = _first_order(e, "fwd", "rev", "jvp")
    for key, text, names in rev:
        # what is not connected in one mode is not in the other
        both = key == "zero" and any((key, names) == (k, n) for k, _, n in fwd)
        fwd = [item for item in fwd if not (both and item[0] == "zero")]
        yield key, text, (*_FROM_VJP, *_FROM_JVP) if both else _FROM_VJP
    for key, text, _ in fwd:
        yield key, text, _FROM_JVP


_FROM_VJP = ("rev", "rev-rev", "fwd-rev", "rev-fwd", "duality", "agreement", "undefined cotangents")
_FROM_JVP = ("fwd", "fwd-fwd", "fwd-rev", "rev-fwd", "duality", "agreement")


def _first_order(e: Evidence, mode: str, other: str, formula: str) -> list[tuple[str, str, str]]:
    """Key, sentence and the inputs that it is of, for what is wrong in one mode."""
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
        # J w in place of J^T w: row k of J is the right gradient of entry k of the output
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
    return pairs[i] if pairs else (torch.zeros(0), torch.ones(0))


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
    """What a factor is, if it is a number that means something here."""
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
