"""How rules are written: `rule`, and in one line `elementwise` and `linear_in`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.strong_arithmetic import by_element, strong_product
from ..internals import is_composite
from ..once import is_defining
from ..schema import Signature, signature_of
from ..versions import UNTRIED, reached
from .definition import Formulas, FromResult, Rule, exists, operator, rules
from .derivative import derivative_of
from .formulas import ArgumentBinding, bound_to, parameters
from .samples import LINE, Interval, Sampler, drawn

__all__ = [
    "Ratio",
    "elementwise",
    "linear_in",
    "rule",
]


def rule(
    name: str,
    *,
    vjp: Formulas | None = None,
    jvp: Formulas | None = None,
    register: bool = True,
    since: str | None = None,
    until: str | None = None,
    **about: Any,
) -> Any:
    """Bind formulas to the operator ``name``, and add the rule to ``mg.rules``.

    A formula's parameters are bound by their names: inputs and outputs of the schema (``result``, ``result0``, ...
    where unnamed), ``grad`` for the cotangent, or ``grad_<output>`` if there are several outputs or an input is called
    grad, ``<input>_p`` and ``<input>_t`` for primal and tangent, and ``output_mask`` for the inputs of its key that
    need a gradient. ``<name>_sizes``, ``<name>_strides``, ``<name>_storage_offset``, ``<name>_dtype``,
    ``<name>_device``, ``<name>_layout`` and ``<name>_blocksize`` (None without blocks) of an input or output, or of
    each tensor in a list, are available in a vjp without saving the tensor. A tensor is saved for the backward only if
    a formula for an input that requires grad names it. A missing cotangent or tangent is None. If all of those that a
    formula names are missing, it is not called, and its results are zero. Gradients that are not needed are dropped.

    Args:
        name: ``"aten::linalg_lu"``, ``"aten::norm.Scalar"``; any operator, not only aten's.
        vjp: input, or tuple of inputs, -> formula for its gradient.
        jvp: output, or tuple of outputs, -> formula for its tangent; without any, a jvp is derived from the vjp.
        register: False makes an unregistered rule, to pass to `override`.
        since: the first torch with the operator, not composite, such as "2.11".
        until: the first torch without it.
        about: the further attributes of `Rule`. ``improves`` is a claim, several, or a dictionary from each to the
            first torch in which it no longer holds: ``{"values": "2.15", "speed": None}``. A gap is a reason, or a
            reason and the first torch without the gap.

    Returns:
        The rule; None if, by ``since`` or ``until``, this torch lacks the operator, which is then in
        ``mg.rules.absent``.

    Raises:
        ValueError: no such operator, a name that is not in the schema, or a second rule for the same operator.
    """
    if reason := _absent(name, since, until):
        if register:
            rules.without(name.removesuffix(".default"), reason)
        return None
    made = Rule(name, vjp, jvp, **about)
    if made.kind == "elementwise" and any(n.startswith("grad") for n in made.signature.tensor_names):
        by_element(made.aten)  # other rules pass their cotangents to this kernel
    if not is_defining():
        derivative_of(made)  # raises for a formula with an unknown parameter
    return rules.add(made.name, made) if register else made


def _absent(name: str, since: str | None, until: str | None) -> str:
    """Why this torch lacks the operator, if that is expected."""
    reason = ""
    if since is not None and not reached(since):
        reason = f"torch {torch.__version__} has no {name}, which comes with {since}"
    if until is not None and reached(until):
        reason = f"torch {torch.__version__} has no {name}, which is gone since {until}"
    # otherwise the package could not be imported there
    if not reason and reached(UNTRIED) and str(name).startswith("aten::"):
        reason = f"torch {torch.__version__} has no {name}"
    return reason if reason and (not exists(name) or is_composite(operator(name))) else ""


# -- elementwise operators -------------------------------------------------------------------------------------------------
# The derivative of the output with respect to an input is one function of one element. It determines the vjp, ``grad *
# conj(d)``, the jvp, ``d * tangent``, all higher orders, because it is itself differentiated, and the samples.


ElementDerivative = Callable[..., Any] | complex | str | None


def elementwise(
    name: str,
    derivative: ElementDerivative | Mapping[str, ElementDerivative],
    *,
    domain: Interval | Mapping[str, Interval] = LINE,
    real_only: bool = False,
    arguments: Sequence[Mapping[str, Any]] = ({},),
    samples: Sampler | None = None,
    source: str = "ATen derivatives.yaml",
    from_result: FromResult | None = None,
    tangent: Callable[..., Any] | None = None,
    rounds: bool = True,
    **about: Any,
) -> Rule | None:
    """Bind an elementwise operator to the derivative of its output, and add the rule to ``mg.rules``.

    ``elementwise("aten::sin", lambda self: self.cos())`` is the whole rule of the sine. A complex operator is assumed
    holomorphic; others, such as ``abs``, need an ordinary `rule`.

    Args:
        name: the operator, of one output.
        derivative: of the output with respect to the only tensor among the inputs; for several tensors, one for each by
            name. A function's parameters bind by name: the inputs and the output (``result``). It returns a tensor, a
            number, a `Ratio`, or None, which is zero everywhere. A boolean tensor selects: where it is False the
            product is zero, even with nan. A function or formula with a parameter ``grad`` is the product itself, with
            the conjugate. Instead of a function: a number or None, a constant, or the name of an input or the output.
            Cotangents of inputs that were broadcast are summed.
        domain: the open interval of default samples, which avoid its ends and zero; or one for each tensor.
        real_only: the operator takes no complex tensors.
        arguments: values of the other arguments, by name; there are samples with each value.
        samples: instead of those, ``(dtype, device) -> iterable of Sample``.
        source: of the derivative.
        from_result: the derivative as a function of the result, for the in-place operator.
        tangent: a formula for the tangent of the output, if it is not computed as the sum of the products; it binds
            names like a jvp. Its result is broadcast and cast to the output.
        rounds: half precision is converted to single for the derivative. False for a derivative that is one kernel of
            PyTorch's, which converts by itself.
        about: further arguments of `rule`, such as ``improves`` or ``since``; ``finite=True`` if the derivative is a
            finite number for all inputs, including nan, or a choice.

    Returns:
        The rule; None where this torch lacks the operator, as declared by ``since`` or ``until``.

    Raises:
        ValueError: the operator takes several tensors and one function is given, it returns several outputs, or `rule`
            refuses the rest.
    """
    if not exists(name):
        return rule(name, **about)
    signature = signature_of(operator(name))
    inputs = signature.tensor_names
    if len(signature.returns) != 1:
        raise ValueError(f"elementwise {name}: the operator has {len(signature.returns)} outputs, and one is expected")
    if not isinstance(derivative, Mapping):
        if len(inputs) != 1:
            raise ValueError(
                f"elementwise {name}: one derivative is given, and the operator takes the tensors {inputs}"
            )
        derivative = {inputs[0]: derivative}
    (output,) = signature.output_names
    if from_result is not None:
        about["from_result"] = replace(
            from_result, vjp=_pullback(inputs[0], from_result.vjp, broadcasts=False, rounds=True)
        )
    domains = domain if isinstance(domain, Mapping) else dict.fromkeys(inputs, domain)
    rounds = rounds and not about.get("finite")
    # in alphabetical order as in PyTorch: autograd then sums up a second derivative in PyTorch's order
    return rule(
        name,
        vjp={x: _pullback(x, d, broadcasts=len(inputs) > 1, rounds=rounds) for x, d in sorted(derivative.items())},
        jvp={output: _pushforward(derivative, output, rounds=rounds) if tangent is None else _cast(tangent, output)},
        kind="elementwise",
        source=source,
        samples=samples,
        default_samples=functools.partial(drawn, signature, domains, real_only, arguments),
        **about,
    )


class Ratio(NamedTuple):
    """A derivative ``above / below``: a cotangent is multiplied and divided, with PyTorch's rounding, and a cotangent
    of 0 gives 0 even if the ratio would overflow.
    """

    above: Any
    below: Any


def _in_range(above: Any, below: Any) -> tuple[Any, Any]:
    """A ratio and a power of two with this product: 1 / x is infinite for a denormal x, but its products may not be."""
    if not isinstance(below, Tensor):
        return above / below, 1
    info = torch.finfo(below.dtype)
    scale = torch.where(below.detach().abs() < 4 * info.tiny, 2.0**64, 1.0).to(below.dtype.to_real())
    return above / (below * scale), scale


def _conjugate(x: Any, yes: bool) -> Any:
    return x if not yes else x.conj() if isinstance(x, Tensor) else x.conjugate()


def _times(factor: Tensor, derivative: Any, *, conjugate: bool, strong: bool) -> Tensor:
    if derivative is None:
        return torch.zeros_like(factor)
    if isinstance(derivative, Ratio):
        above, below = (_conjugate(x, conjugate) for x in derivative)
        if strong:
            ratio, scale = _in_range(above, below)
            return strong_product(factor, ratio) * scale
        return (factor if type(above) is int and above == 1 else factor * above) / below
    if conjugate and type(derivative) is int and derivative == 1:
        return factor  # a cotangent; a tangent must not share the memory of another
    if isinstance(derivative, Tensor) and derivative.dtype is torch.bool:
        return torch.where(derivative, factor, 0)
    derivative = _conjugate(derivative, conjugate)
    return strong_product(factor, derivative) if strong else factor * derivative


def _is_product(derivative: ElementDerivative) -> bool:
    return callable(derivative) and "grad" in parameters(derivative)


def _as_function(derivative: ElementDerivative) -> Callable[..., Any]:
    if isinstance(derivative, str):
        return bound_to(lambda value: value, [derivative])
    return derivative if callable(derivative) else lambda: derivative


def _product(given: ElementDerivative, strong: bool) -> tuple[list[str], Callable[..., Tensor]]:
    """A derivative's parameters besides ``grad``, and its product ``(factor, *known, conjugate=) -> Tensor``."""
    derivative = _as_function(given)
    names = parameters(derivative)
    if isinstance(derivative, ArgumentBinding) and derivative.renames_only:
        derivative = derivative.formula
    if "grad" not in names:
        return names, lambda factor, *known, conjugate: _times(
            factor, derivative(*known), conjugate=conjugate, strong=strong
        )
    place = names.index("grad")

    def product(factor: Tensor, *known: Any, conjugate: bool) -> Tensor:
        if conjugate:
            return derivative(*known[:place], factor, *known[place:])
        return derivative(*known[:place], factor.conj(), *known[place:]).conj()

    return names[:place] + names[place + 1 :], product


_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def _widened(values: Iterable[Any]) -> list[Any]:
    """Half precision as single: a formula of several operators would round after each, but a kernel rounds once."""
    return [x.to(_WIDE[x.dtype]) if isinstance(x, Tensor) and x.dtype in _WIDE else x for x in values]


def _pullback(
    name: str, derivative: ElementDerivative, *, broadcasts: bool, rounds: bool, strong: bool = False
) -> Callable[..., Any]:
    """The vjp for one input, whose formula rounds or is a choice. Its attribute ``strong`` has strong zeros."""
    asked, product = _product(derivative, strong)

    def vjp(grad: Tensor, dtype: torch.dtype, *known: Any) -> Tensor:
        sizes = None
        if broadcasts:
            sizes, *known = known  # type: ignore[assignment]
        if rounds:
            grad, *known = _widened((grad, *known))  # type: ignore[assignment]
        found = product(grad, *known, conjugate=True)
        if found.is_complex() and not dtype.is_complex:
            found = found.real
        return (found if sizes is None else found.sum_to_size(sizes)).to(dtype)

    vjp.derivative = derivative  # type: ignore[attr-defined]  # shown to readers
    if not strong and not _is_product(derivative):
        vjp.strong = _pullback(  # type: ignore[attr-defined]
            name, derivative, broadcasts=broadcasts, rounds=rounds, strong=True
        )
    facts = [f"{name}_dtype", f"{name}_sizes"] if broadcasts else [f"{name}_dtype"]
    return bound_to(vjp, ["grad", *facts, *asked])


def _pushforward(
    derivatives: Mapping[str, ElementDerivative], output: str, *, rounds: bool, strong: bool = False
) -> Callable[..., Any]:
    """The jvp: the sum over all inputs. Its attribute ``strong`` is the variant with strong zeros."""
    products = {x: _product(d, strong) for x, d in derivatives.items()}
    everything = [p for asked, _ in products.values() for p in asked]
    names = list(dict.fromkeys([output, *[f"{x}_t" for x in derivatives], *everything]))
    terms = [
        (names.index(f"{x}_t"), product, [names.index(p) for p in asked]) for x, (asked, product) in products.items()
    ]

    def jvp(*known: Any) -> Tensor | None:
        result, total = known[0], None
        if rounds:
            known = tuple(_widened(known))
        for place, product, places in terms:
            if (tangent := known[place]) is not None:
                term = product(tangent, *[known[i] for i in places], conjugate=False)
                total = term if total is None else total + term
        return None if total is None else total.expand(result.shape).to(result.dtype)

    if not strong and not any(map(_is_product, derivatives.values())):
        jvp.strong = _pushforward(derivatives, output, rounds=rounds, strong=True)  # type: ignore[attr-defined]
    return bound_to(jvp, names)


def _cast(tangent: Callable[..., Any], output: str) -> Callable[..., Any]:
    asked = parameters(tangent)
    names = list(dict.fromkeys([output, *asked]))
    places = [names.index(n) for n in asked]

    def jvp(*known: Any) -> Tensor:
        found: Tensor = tangent(*_widened([known[i] for i in places]))
        return found.expand(known[0].shape).to(known[0].dtype)

    return bound_to(jvp, names)


# -- operators that are linear in some of their inputs -----------------------------------------------------------------


def linear_in(name: str, vjp: Formulas, *, source: str = "ATen derivatives.yaml", **about: Any) -> Rule | None:
    """Bind an operator that is jointly linear in some inputs to their cotangents, and add the rule to ``mg.rules``.

    ``linear_in("aten::flip", {"self": lambda grad, dims: grad.flip(dims)})``. ``lerp`` is jointly linear in its first
    two inputs; ``mm`` is linear in each of two, which is different.

    The vjp must be given: PyTorch's transpose of the operator is its derivative, which would lead back to this rule.

    Args:
        name: the operator, of one output.
        vjp: input, or tuple of inputs, that it is linear in -> formula for the cotangent, bound by name as in `rule`.
        source: of the vjp.
        about: further arguments of `rule`, such as ``samples``.

    Returns:
        The rule; None where this torch lacks the operator, as declared by ``since`` or ``until``.

    Raises:
        ValueError: the operator returns several outputs, or `rule` refuses the rest.
    """
    if not exists(name):
        return rule(name, **about)
    op = operator(name)
    signature = signature_of(op)
    if len(signature.returns) != 1:
        raise ValueError(f"linear_in {name}: the operator has {len(signature.returns)} outputs, and one is expected")
    (output,) = signature.output_names
    inputs = [n for key in vjp for n in ((key,) if isinstance(key, str) else key)]
    jvp: Formulas = {output: _on_tangents(op, signature, inputs)}
    return rule(name, vjp=vjp, jvp=jvp, kind="linear", source=source, **about)


def _on_tangents(op: Any, signature: Signature, linear: list[str]) -> Callable[..., Any]:
    """``op`` with tangents instead of the inputs in which it is linear."""

    def jvp(*known: Any) -> Any:
        values = list(known[: len(signature.names)])
        tangents = dict(zip(linear, known[len(signature.names) :]))
        for name, tangent in tangents.items():
            place = signature.names.index(name)
            values[place] = _tangent(values[place], tangent)
        args, kwargs = signature.split(values)
        return op(*args, **kwargs)

    jvp.is_operator = True  # type: ignore[attr-defined]  # and adds no constant, unlike padding with a number
    return bound_to(jvp, [*signature.names, *[f"{n}_t" for n in linear]])


def _tangent(primal: Any, tangent: Any) -> Any:
    if isinstance(primal, (list, tuple)):
        return [_tangent(p, t) for p, t in zip(primal, tangent or [None] * len(primal))]
    return torch.zeros_like(primal) if tangent is None and isinstance(primal, Tensor) else tangent
