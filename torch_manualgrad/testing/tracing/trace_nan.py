"""`trace_nan`: the operation that made a nan or infinity from finite numbers, with its mode and source line."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

from ...arguments import described
from ...core.internals import DispatchMode, current_node, is_known_zero
from ...core.rule import Sample, ops
from ..inputs import tree
from .lines import line_of

__all__ = ["NanReport", "Origin", "trace_nan"]

#: The modes that are looked at, in this order.
NAN_MODES = ("forward", "rev", "fwd", "rev-rev", "fwd-rev", "rev-fwd", "fwd-fwd")

# operators whose results are uninitialized memory
_UNSET = ("empty", "new_empty", "resize_")


@dataclass(frozen=True)
class Origin:
    """One operation that made a nan or an infinity.

    Attributes:
        value: "nan", "inf" or "-inf".
        operator: the operation, ``aten::div.Tensor``.
        node: the node of the graph whose backward it is part of, ``SqrtBackward0``; "" in a forward.
        formula: the formula of this package that called it; "" outside of one.
        index: the position of the first such entry in the operator's result.
        operands: the operands at that position, where they have one; numbers as they are.
        line: the line of the user's code that made the call, in a backward the line of the forward:
            ``file.py:12: y = x.sqrt()``.
        because: for a nan that was made from an infinity, the origin of the infinity; None if the operands were finite.
    """

    value: str
    operator: str
    node: str
    formula: str
    index: tuple[int, ...]
    operands: tuple[str, ...]
    line: str
    because: Origin | None = None

    def __str__(self) -> str:
        where = f" in the backward of {self.node.removesuffix('0').removesuffix('Backward')}" if self.node else ""
        where += f", called by {self.formula}" if self.formula else ""
        text = f"{self.value} made by {self.operator}({', '.join(self.operands)}){where}, at {list(self.index)} of its result"
        text += f"\n    {self.line}" if self.line else ""
        return f"{text}\n  from {self.because}" if self.because else text


@dataclass(frozen=True)
class NanReport:
    """The findings of `trace_nan`: mode -> origin, without modes whose results are finite. Prints as text."""

    origins: dict[str, Origin] = field(default_factory=dict)
    unreached: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every number was finite, in all modes."""
        return not self.origins

    @property
    def first(self) -> Origin | None:
        """The origin in the first mode that has one."""
        return next(iter(self.origins.values()), None)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain dictionaries and lists."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{mode}: {origin}" for mode, origin in self.origins.items()]
        lines += [f"{mode}: not looked at, {reason}" for mode, reason in self.unreached.items()]
        return "\n".join(lines) or "every number is finite, in every mode"


def trace_nan(
    f: Callable[..., Any], *inputs: Any, modes: Sequence[str] = NAN_MODES, infinities: bool = True, seed: int = 0
) -> NanReport:
    """Find the operation that first makes a nan, or an infinity, out of finite numbers, mode by mode.

    Unlike `torch.autograd.detect_anomaly`, it looks at every operation, in the forward and inside of a backward,
    and follows only values that reach the result: a nan that `torch.where` drops is not a fault. If a nan was made from
    an infinity, it also reports the origin of the infinity.

    Args:
        f: a function of tensors, or a module.
        inputs: the call, as `check` takes one: a tuple of positional arguments or a `Sample`, which has keywords too. The
            arguments may also be given one by one: ``trace_nan(f, x, y)`` is ``trace_nan(f, (x, y))``; a function of one
            tuple takes ``((x, y),)``. All floating point and complex tensors among them are differentiated, and all
            parameters of a module; cotangents and tangents are ones.
        modes: some of "forward", "rev", "fwd", "rev-rev", "fwd-rev", "rev-fwd", "fwd-fwd"; the outer transform first.
        infinities: whether a result that is infinite, and not nan, counts.
        seed: of the random numbers that `f` draws, the same in every mode.

    Returns:
        The report: an `Origin` for each mode whose result is not finite. An infinite argument or constant has an origin
        too, whose operator is the first one that it was seen in.

    Raises:
        TypeError: several calls are given, as to `check`; it takes one.
        ValueError: an unknown mode.
        Exception: whatever `f` raises.
    """
    if not callable(f):
        raise TypeError(f"trace_nan: f: expected a function, got {described(f)}")
    if isinstance(modes, str):
        raise TypeError(f"trace_nan: modes: expected a list or tuple, each entry a str, got {modes!r}")
    for mode in modes:
        if mode not in NAN_MODES:
            raise ValueError(f"modes: unknown mode {mode!r}; known: {', '.join(NAN_MODES)}")
    parameters = list(f.parameters()) if isinstance(f, torch.nn.Module) else []
    f, inputs = _call(f, inputs)
    found = NanReport()
    for mode in modes:
        # anomaly mode, which records the lines of the forward, prints pages of them for every error
        keeping_lines = torch.autograd.set_detect_anomaly(True, check_nan=False)
        with warnings.catch_warnings(), torch.random.fork_rng(), keeping_lines, _Watch() as watch:
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            try:
                results = _RUN[mode](f, inputs, parameters)
            except Exception as error:
                if mode == "forward":
                    raise
                found.unreached[mode] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                continue
        origin = watch.origin_of(results, infinities)
        if origin is not None:
            found.origins[mode] = origin
    return found


def _call(f: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function of positional arguments, and the arguments of the one call."""
    if len(inputs) != 1 or not isinstance(inputs[0], (Sample, tuple, list)):
        return f, inputs
    (given,) = inputs
    if isinstance(given, list):
        if given and all(isinstance(one, (Sample, tuple)) for one in given):
            raise TypeError(
                f"trace_nan: inputs: expected one call, a Sample or a tuple of arguments, got a list of {len(given)}"
            )
        return f, inputs  # an argument that is a list of tensors, as of torch.stack
    if isinstance(given, Sample) and given.kwargs:
        return lambda args, kwargs: f(*args, **kwargs), (given.args, given.kwargs)
    return f, given.args if isinstance(given, Sample) else given


# -- the modes --------------------------------------------------------------------------------------------------------

Run = Callable[[Callable[..., Any], Sequence[Any], Sequence[Tensor]], Sequence["Tensor | None"]]


def _differentiated(inputs: Sequence[Any]) -> tuple[list[Any], list[Tensor]]:
    """Copies of the inputs, and the leaves among them that are differentiated."""
    leaves = [
        x.detach().clone().requires_grad_() if tree.is_differentiable(x) else x for _, x in tree.leaves(tuple(inputs))
    ]
    return tree.rebuild(tuple(inputs), leaves), [x for x in leaves if tree.is_differentiable(x)]


def _outputs(result: Any) -> list[Tensor]:
    return [o for o in tree.tensors(result) if tree.is_differentiable(o)]


def _forward(f: Any, inputs: Any, parameters: Any) -> Sequence[Tensor | None]:
    with torch.no_grad():
        return _outputs(f(*inputs))


def _gradients(outputs: Sequence[Tensor], at: Sequence[Tensor], create_graph: bool = False) -> list[Tensor]:
    outputs = [o for o in outputs if o.requires_grad]
    if not outputs or not at:
        return []
    ones = [torch.ones_like(o) for o in outputs]
    found = torch.autograd.grad(outputs, at, ones, create_graph=create_graph, allow_unused=True)
    return [g for g in found if g is not None]


def _rev(f: Any, inputs: Any, parameters: Any) -> Sequence[Tensor | None]:
    fresh, leaves = _differentiated(inputs)
    return _gradients(_outputs(f(*fresh)), [*leaves, *parameters])


def _rev_rev(f: Any, inputs: Any, parameters: Any) -> Sequence[Tensor | None]:
    fresh, leaves = _differentiated(inputs)
    at = [*leaves, *parameters]
    return _gradients(_gradients(_outputs(f(*fresh)), at, create_graph=True), at)


def _dual(inputs: Any) -> tuple[Any, list[Tensor]]:
    fresh, leaves = _differentiated(inputs)
    duals = {id(x): fwAD.make_dual(x, torch.ones_like(x)) for x in leaves}
    return tree.rebuild(fresh, [duals.get(id(x), x) for _, x in tree.leaves(fresh)]), leaves


def _tangents(results: Sequence[Tensor]) -> list[Tensor]:
    return [t for t in (fwAD.unpack_dual(o).tangent for o in results) if t is not None]


def _fwd(f: Any, inputs: Any, parameters: Any) -> Sequence[Tensor | None]:
    with fwAD.dual_level(), torch.no_grad():
        return _tangents(_outputs(f(*_dual(inputs)[0])))


def _fwd_rev(f: Any, inputs: Any, parameters: Any) -> Sequence[Tensor | None]:
    with fwAD.dual_level():
        fresh, _ = _dual(inputs)
        at = [x for _, x in tree.leaves(fresh) if tree.is_differentiable(x)]
        return _tangents(_gradients(_outputs(f(*fresh)), at, create_graph=True))


def _rev_fwd(f: Any, inputs: Any, parameters: Any) -> Sequence[Tensor | None]:
    with fwAD.dual_level():
        fresh, leaves = _dual(inputs)
        return _gradients(_tangents(_outputs(f(*fresh))), leaves)


def _fwd_fwd(f: Any, inputs: Any, parameters: Any) -> Sequence[Tensor | None]:
    flat = [x.detach() if tree.is_differentiable(x) else x for _, x in tree.leaves(tuple(inputs))]
    places = [i for i, x in enumerate(flat) if tree.is_differentiable(x)]
    ones = tuple(torch.ones_like(flat[i]) for i in places)

    def call(*xs: Tensor) -> list[Tensor]:
        values = list(flat)
        for i, x in zip(places, xs, strict=True):
            values[i] = x
        return _outputs(f(*tree.rebuild(tuple(inputs), values)))

    def along(*xs: Tensor) -> Any:
        return torch.func.jvp(call, xs, ones)[1]

    tangents: list[Tensor] = torch.func.jvp(along, tuple(flat[i] for i in places), ones)[1]
    return tangents


_RUN: dict[str, Run] = {
    "forward": _forward,
    "rev": _rev,
    "fwd": _fwd,
    "rev-rev": _rev_rev,
    "fwd-rev": _fwd_rev,
    "rev-fwd": _rev_fwd,
    "fwd-fwd": _fwd_fwd,
}


# -- what is watched --------------------------------------------------------------------------------------------------


@dataclass
class _Origins:
    """The origins of a storage's nan and of its infinity."""

    nan: Origin | None = None
    infinity: Origin | None = None


class _Watch(DispatchMode):
    """Records for each storage with an entry that is not finite the operation that made the first one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: dict[int, _Origins] = {}
        self.kept: list[Tensor] = []  # so that no storage takes the address of another

    def origin_of(self, results: Sequence[Tensor | None], infinities: bool) -> Origin | None:
        """The origin in the first result that is not finite; a nan goes before an infinity."""
        found = [(r, self.known.get(_address(r))) for r in results if r is not None and _is_watched(r)]
        for result, origins in found:
            if origins is not None and origins.nan is not None and bool(result.isnan().any()):
                return origins.nan
        for result, origins in found:
            if infinities and origins is not None and origins.infinity is not None and bool(result.isinf().any()):
                return origins.infinity
        return None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = list(tree.leaves((args, kwargs)))
        values = [_snapshot(x) for _, x in operands]
        nans = [_first_origin(self.known, x, "nan") for _, x in operands if _has(x, torch.isnan)]
        infinities = [_first_origin(self.known, x, "infinity") for _, x in operands if _has(x, torch.isinf)]
        result = func(*args, **kwargs)
        if func._schema.name.removeprefix("aten::").startswith(_UNSET):
            return result
        for x in tree.tensors(result):
            if not _is_watched(x):
                continue
            has_nan, has_infinity = _has(x, torch.isnan), _has(x, torch.isinf)
            if not has_nan and not has_infinity:
                if x.numel() * x.element_size() >= x.untyped_storage().nbytes():
                    self.known.pop(_address(x), None)  # it was written over
                continue
            origins = self.known.setdefault(_address(x), _Origins())
            self.kept.append(x)
            if has_infinity:
                given = next(filter(None, infinities), None)
                origins.infinity = origins.infinity or given or _made(func, x, torch.isinf, values)
            if has_nan:
                given = next(filter(None, nans), None)
                if given is None:
                    given = _made(func, x, torch.isnan, values)
                    given = replace(given, because=next(filter(None, infinities), None))
                origins.nan = origins.nan or given
        return result


def _is_watched(x: Any) -> bool:
    return tree.is_differentiable(x) and x.layout == torch.strided and x.device.type != "meta" and not is_known_zero(x)


def _has(x: Any, what: Callable[[Tensor], Tensor]) -> bool:
    if isinstance(x, (float, complex)):
        return bool(what(torch.tensor(x, device="cpu")))
    return _is_watched(x) and bool(what(x).any())


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _first_origin(known: dict[int, _Origins], x: Any, what: str) -> Origin | None:
    origins = known.get(_address(x)) if isinstance(x, Tensor) else None
    found: Origin | None = getattr(origins, what, None)
    return found


def _snapshot(x: Any) -> Any:
    """A description of an operand after the call, which may have written to it."""
    return x.detach().clone() if _is_watched(x) else x


def _made(func: Any, result: Tensor, what: Callable[[Tensor], Tensor], operands: Sequence[Any]) -> Origin:
    index = tuple(int(i) for i in what(result).nonzero()[0])
    entry = complex(result[index].item())
    number = entry.real if entry.real != entry.real or abs(entry.real) == float("inf") else entry.imag
    node = current_node()
    return Origin(
        value=str(number),
        operator=str(func._schema.name) + (f".{func._schema.overload_name}" if func._schema.overload_name else ""),
        node="" if node is None else node.name(),
        formula=_formula(),
        index=index,
        operands=tuple(_shown(x, index if torch.Tag.pointwise in func.tags else None, result.shape) for x in operands),
        line=line_of(node),
    )


def _shown(x: Any, index: tuple[int, ...] | None, shape: torch.Size) -> str:
    """An operand: for a pointwise operator, its entry at the position; for another one, its shape and range."""
    if not isinstance(x, Tensor):
        return str(x)
    if index is not None:
        return f"{x.expand(shape)[index].item():.6g}"
    if not _is_watched(x) or x.is_complex() or x.numel() == 0:
        return f"{list(x.shape)}"
    return f"{list(x.shape)} from {x.min().item():.6g} to {x.max().item():.6g}"


def _formula() -> str:
    """The innermost formula among the callers."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        name = frame.f_code.co_name
        if name in ops and frame.f_code is getattr(ops[name].reference, "__code__", None):
            return name
    return ""
