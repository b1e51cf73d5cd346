"""Every operator on nested tensors, measured against a loop over the components with dense torch.

A case is measured as a `Ragged` and as torch's nested tensors of both layouts, through a loss on the components of the
result: values, gradient, gradient of the gradient, and directional derivative.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from nested_cases import WIDTH, Case, Pieces
from torch import Tensor

from torch_manualgrad import nested
from torch_manualgrad.nested import Ragged

__all__ = ["KINDS", "MEASURES", "measure"]

KINDS = ("Ragged", "strided", "jagged")
MEASURES = ("forward", "backward", "second order", "jvp")

# -- the functions ----------------------------------------------------------------------------------------------------


def _stock_functions(layout: torch.layout) -> Any:
    """PyTorch's functions under the names of `torch_manualgrad.nested`."""
    here: dict[str, Any] = {}
    for name in nested.__all__:
        found = getattr(torch, name, None) or getattr(F, name, None)
        if found is not None:
            here[name] = found
    here["gelu"], here["dropout"], here["silu"], here["threshold"] = F.gelu, F.dropout, F.silu, F.threshold
    here["layer_norm"], here["vector_norm"] = F.layer_norm, torch.linalg.vector_norm
    here["to_padded_tensor"] = torch.nested.to_padded_tensor
    here["slice"] = lambda x, dim, start, end: x[(slice(None),) * dim + (slice(start, end),)]
    here["values"] = lambda x: x.values().reshape(-1, WIDTH)
    here["from_values"] = _jagged_from_values if layout is torch.jagged else _strided_from_values
    here["from_padded"] = _jagged_from_padded if layout is torch.jagged else _strided_from_padded
    return types.SimpleNamespace(**here)


def _jagged_from_values(like: Any, values: Tensor) -> Any:
    return torch.nested.nested_tensor_from_jagged(values, like.offsets())


def _strided_from_values(like: Any, values: Tensor) -> Any:
    parts = values.split([c.shape[0] for c in like.unbind()])
    return torch.nested.as_nested_tensor(list(parts))


def _jagged_from_padded(like: Any, padded: Tensor) -> Any:
    lengths = like.offsets().diff()
    return torch.nested.narrow(padded, 1, torch.zeros_like(lengths), lengths, layout=torch.jagged)


def _strided_from_padded(like: Any, padded: Tensor) -> Any:
    sizes = torch.tensor([list(c.shape) for c in like.unbind()])
    return torch.ops.aten._nested_from_padded(padded, sizes)


def _our_functions() -> Any:
    here = {name: getattr(nested, name) for name in nested.__all__}
    here["values"] = lambda x: x.values
    here["from_values"] = lambda like, values: Ragged(values, like.offsets, like.shape)
    here["from_padded"] = lambda like, padded: Ragged.from_padded(padded, like.lengths)
    return types.SimpleNamespace(**here)


_LAYOUTS = {"strided": torch.strided, "jagged": torch.jagged}


def _functions(kind: str) -> Any:
    return _stock_functions(_LAYOUTS[kind]) if kind in _LAYOUTS else _our_functions()


def _made(kind: str, components: Sequence[Tensor]) -> Any:
    """The nested tensor of these components."""
    ragged = [d for d, sizes in enumerate(zip(*(c.shape for c in components))) if len(set(sizes)) > 1] or [0]
    if kind == "Ragged":
        return Ragged.from_components(components)
    if kind == "jagged" and ragged != [0]:
        made = torch.nested.as_nested_tensor([c.transpose(0, ragged[0]) for c in components], layout=torch.jagged)
        return made.transpose(1, ragged[0] + 1)
    return torch.nested.as_nested_tensor(list(components), layout=_LAYOUTS[kind])


def pieces(result: Any) -> Pieces:
    """The components of a result, of lists one after the other; in a list a dense tensor is one piece."""
    if isinstance(result, Ragged):
        return result.components()
    if isinstance(result, (list, tuple)):
        return [p for r in result for p in ([r] if isinstance(r, Tensor) and not r.is_nested else pieces(r))]
    return list(result.unbind()) if result.dim() else [result]


# -- measuring --------------------------------------------------------------------------------------------------------


def _inputs(case: Case) -> Pieces:
    generator = torch.Generator().manual_seed(0)
    shapes = [s for argument in case.shapes for s in argument] + list(case.dense)
    return [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]


def _split(case: Case, inputs: Sequence[Tensor]) -> tuple[list[list[Tensor]], list[Tensor]]:
    """The inputs as lists of components, and dense operands."""
    lists, at = [], 0
    for argument in case.shapes:
        lists.append(list(inputs[at : at + len(argument)]))
        at += len(argument)
    return lists, list(inputs[at:])


def _result(case: Case, kind: str, inputs: Sequence[Tensor]) -> Pieces:
    lists, dense = _split(case, inputs)
    torch.manual_seed(0)
    return pieces(case.call(_functions(kind), *(_made(kind, c) for c in lists), *dense))


def _expected(case: Case, kind: str, inputs: Sequence[Tensor]) -> Pieces:
    lists, dense = _split(case, inputs)
    drawn = (_result(case, kind, [x.detach() for x in _inputs(case)]),) if case.random else ()
    return case.reference(*lists, *dense, *drawn)


def _loss(found: Pieces) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i, p in enumerate(found):
        weight = torch.arange(1.0, 1 + p.numel(), dtype=p.dtype).reshape(p.shape) + i
        total = total + (weight.cos() * p.sin()).sum()
    return total


def _take(what: str, function: Callable[[Sequence[Tensor]], Pieces], inputs: Pieces) -> list[Tensor]:
    """The tensors that are compared."""
    if what == "forward":
        return function(inputs)
    if what == "jvp":
        with fwAD.dual_level():
            out = _loss(function([fwAD.make_dual(x, (1 + x).cos()) for x in inputs]))
            tangent = fwAD.unpack_dual(out).tangent
            return [out.detach(), torch.zeros_like(out) if tangent is None else tangent]
    leaves = [x.clone().requires_grad_() for x in inputs]
    first = torch.autograd.grad(_loss(function(leaves)), leaves, create_graph=what == "second order", allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, first)]
    if what == "backward":
        return filled
    along = sum((g * (2 + x).detach().sin()).sum() for g, x in zip(filled, leaves))
    second = torch.autograd.grad(along, leaves, allow_unused=True)  # type: ignore[arg-type]
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, second)]


def measure(case: Case, kind: str, what: str) -> tuple[str, str]:
    """Measure one case.

    Args:
        case: the case.
        kind: of `KINDS`; for the nested tensors it is PyTorch's calls that are measured, under any override that is
            active.
        what: of `MEASURES`.

    Returns:
        "right", "wrong" or "raises", and why.
    """
    inputs = _inputs(case)
    expected = _take(what, lambda given: _expected(case, kind, given), inputs)
    try:
        found = _take(what, lambda given: _result(case, kind, given), inputs)
    except Exception as error:
        return "raises", f"{type(error).__name__}: {error}"
    if [f.shape for f in found] != [e.shape for e in expected]:
        return "wrong", f"shapes {[list(f.shape) for f in found]} in place of {[list(e.shape) for e in expected]}"
    apart = max(float((f - e).detach().abs().max()) for f, e in zip(found, expected))
    return ("right", "") if apart < 1e-9 else ("wrong", f"off by {apart:.1e}")
