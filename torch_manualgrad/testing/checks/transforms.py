"""Checks of transforms: vmap, fake tensors, the compiler, strides, opcheck, kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.override.kernels import without_overrides
from ...core.override.override import active
from ..comparison import modes
from ..comparison.context import Context
from ..comparison.passes import Pairs
from ..comparison.problem import Problem, seed_generators
from ..inputs import tree
from ..inputs.written import without_grad
from ..numerics.arithmetic import magnitude

BATCH = 3
OVERLOAD, PACKET = type(torch.ops.aten.sin.default), type(torch.ops.aten.sin)
_OPS: tuple[type, ...] = (OVERLOAD, PACKET, getattr(torch.library, "CustomOpDef", OVERLOAD))


def variants_of(x: Tensor, position: int) -> list[Tensor]:
    """`BATCH` tensors like `x`: itself and neighbours, which stay in the domain and off other branches."""
    if not tree.is_differentiable(x):
        return [x] * BATCH
    generator = torch.Generator().manual_seed(position)
    wide = torch.complex128 if x.is_complex() else torch.float64
    steps = [
        torch.randn(x.shape, dtype=wide, generator=generator, device="cpu").to(x.device, x.dtype)
        for _ in range(BATCH - 1)
    ]
    return [x, *(x + 0.01 * magnitude(x) * step for step in steps)]


def outputs_of(p: Problem, leaves: Sequence[Any], raw: bool = False) -> tuple[Tensor, ...]:
    args, kwargs = tree.rebuild(p.arguments, leaves)
    if p.random:
        seed_generators(p.seed)
    result = p.fn(*args, **kwargs)
    return tuple(tree.tensors(result if raw or p.readout is None else p.readout(result)))


REPEATS = 30  # some of LAPACK's drivers are not reproducible: the last bit depends on the address of the memory


def forward(c: Context) -> None:
    """Outputs are those of the reference, and bitwise identical to PyTorch's own where rules act."""
    if c.reference is not None:
        _same_outputs(c, "forward", c.reference)
    _forward_of_rules(c)


def _forward_of_rules(c: Context) -> None:
    """Compare with PyTorch's outputs, with and without inputs that require grad."""
    acting = active()
    if not acting or any(a.forward for a in acting):
        return
    p = c.problem

    def stock(leaves: Sequence[Any]) -> tuple[Tensor, ...]:
        with without_overrides():
            return outputs_of(p, leaves, raw=True)

    # PyTorch's own values may depend on whether a gradient is required, as it then uses another LAPACK driver
    asking = [x.detach().requires_grad_() if i in p.index else x for i, x in enumerate(p.leaves)]
    try:
        expected = [(leaves, stock(leaves)) for leaves in (p.leaves, asking)]
    except Exception:
        return  # there is nothing to compare with

    def compute() -> str:
        for leaves, first in expected:
            if (found := _differs(outputs_of(p, leaves, raw=True), first)) and not agree_somewhere(leaves):
                return found
        return ""

    def agree_somewhere(leaves: Sequence[Any]) -> bool:
        between = []  # kept alive, so that each pair has other addresses
        for k in range(REPEATS):
            between.append(torch.empty(2 * k + 1, device="cpu"))
            ours = outputs_of(p, leaves, raw=True)
            between.append(torch.empty(k + 1, device="cpu"))
            if not _differs(ours, stock(leaves)):
                return True
        return False

    c.verdict("forward", "outputs", compute)


def _differs(ours: Sequence[Tensor], stock: Sequence[Tensor]) -> str:
    """The first difference of shape, dtype or values (two nans are equal); empty if there is none."""
    if len(ours) != len(stock):
        return f"{len(ours)} outputs, PyTorch's are {len(stock)}"
    for j, (a, b) in enumerate(zip(ours, stock, strict=True)):
        for what in ("shape", "dtype"):
            if getattr(a, what) != getattr(b, what):
                return f"output {j}: {what} {getattr(a, what)}, PyTorch's is {getattr(b, what)}"
        if not bool(((a == b) | ((a != a) & (b != b))).all()):
            return f"output {j}: other values than PyTorch's"
    return ""


def vmap(c: Context) -> None:
    """`torch.func.vmap` against a loop, over each tensor argument alone and over all of them."""
    p = c.problem
    tensors = [i for i, x in enumerate(p.leaves) if isinstance(x, Tensor) and not tree.is_sparse(x)]
    choices = [([i], 0, f"over {p.paths[i]}") for i in tensors[:6]]
    if len(tensors) > 1:
        choices.append((tensors, 0, "over all"))
    if tensors:
        choices.append((tensors, 1, "over all, from the last dimension"))
    for chosen, start, label in choices:
        # over all of them, alternate between the first and the last dimension
        dims = [-((start + k) % 2) for k in range(len(chosen))]
        variants = [variants_of(p.leaves[i], i) for i in chosen]

        def at(values: Sequence[Tensor], chosen: list[int] = chosen) -> tuple[Tensor, ...]:
            leaves = list(p.leaves)
            for i, x in zip(chosen, values, strict=True):
                leaves[i] = x
            return outputs_of(p, leaves)

        def pairs(variants: Any = variants, dims: Any = dims, at: Any = at) -> Pairs | None:
            stacked = tuple(torch.stack(list(x), d) for x, d in zip(variants, dims, strict=True))
            together = _batched(p, lambda *v: at(v), tuple(dims), stacked)
            if together is None:
                return None
            loop = [torch.stack(o) for o in zip(*(at(row) for row in zip(*variants, strict=True)), strict=True)]
            return [(f"output {j}", a, b) for j, (a, b) in enumerate(zip(together, loop, strict=True))]

        c.equal("vmap", label, pairs)


def _batched(
    p: Problem, f: Callable[..., Any], in_dims: int | tuple[int, ...], stacked: Sequence[Tensor]
) -> tuple[Tensor, ...] | None:
    """The results of vmap; None if it cannot draw the same random numbers for the whole batch."""
    try:
        found: tuple[Tensor, ...] = torch.func.vmap(f, in_dims=in_dims, randomness="same")(*stacked)
    except RuntimeError as error:
        if p.random and "does not currently support same randomness" in str(error):
            return None
        raise
    return found


def vmap_grad(c: Context) -> None:
    """Per-sample gradients and per-sample directional derivatives against loops."""
    p = c.problem
    everything = tuple(range(len(p.primals)))
    variants = [variants_of(x, i) for i, x in enumerate(p.primals)]
    rows = list(zip(*variants, strict=True))
    stacked = tuple(torch.stack(list(x)) for x in variants)
    per_sample: dict[str, tuple[str, Callable[..., tuple[Tensor, ...]]]] = {
        "grad": ("rev", torch.func.grad(p.loss, argnums=everything)),
        "jvp": ("fwd", lambda *xs: (torch.func.jvp(p.loss, xs, p.u)[1],)),
    }
    for engine, (mode, f) in per_sample.items():
        if c.gap(mode, "func"):
            continue

        def pairs(f: Any = f) -> Pairs | None:
            together = _batched(p, f, 0, stacked)
            if together is None:
                return None
            loop = [torch.stack(o) for o in zip(*(f(*row) for row in rows), strict=True)]
            names = p.names if len(loop) == len(p.names) else ["jvp"]
            return list(zip(names, together, loop, strict=True))

        c.equal("vmap-grad", engine, pairs)


def other_layout(names: Sequence[str], fakes: Sequence[Tensor | None], real: Sequence[Tensor | None]) -> str:
    """The first difference of shape, dtype, layout, strides or device (unless that is meta); empty if there is none."""
    if len(real) != len(fakes):
        return f"{len(fakes)} tensors, really {len(real)}"
    for name, a, b in zip(names, fakes, real, strict=True):
        if a is None or b is None:
            if a is not b:
                return f"{name} is {'None' if a is None else 'a tensor'}, really {'None' if b is None else 'one'}"
            continue
        for what in ("shape", "dtype", "layout", *(() if a.is_meta else ("device",))):
            if getattr(a, what) != getattr(b, what):
                return f"{name}: {what} {getattr(a, what)}, really {getattr(b, what)}"
        if b.layout != torch.strided:
            continue
        # the stride of a dimension of size 0 or 1 has no meaning
        strides = [(n, m) for n, m, size in zip(a.stride(), b.stride(), b.shape, strict=True) if size > 1]
        if b.numel() and any(n != m for n, m in strides):
            return f"{name}: strides {a.stride()}, really {b.stride()}"
    return ""


def compiled(c: Context, check: str = "compile") -> None:
    """`torch.compile(fullgraph=True, backend="aot_eager")`, forward and gradient, against eager; first sample only."""
    p = c.problem
    if c.position > 0:
        return

    def run(p: Problem) -> tuple[list[Tensor], list[Tensor | None]]:
        xs = [x.detach().requires_grad_() for x in p.primals]
        out = p.call(*xs)
        value = torch.stack(p.losses(out)).sum()
        return list(out), list(modes.backward(value, xs))

    def pairs() -> list[tuple[str, Any, Any]]:
        torch.compiler.reset()
        out, grads = run(p)
        fn = torch.compile(lambda *args, **kwargs: p.fn(*args, **kwargs), fullgraph=True, backend="aot_eager")
        graph_out, graph_grads = run(p.but(fn=fn))
        names = [f"output {j}" for j in p.outputs] + [f"gradient of {n}" for n in p.names]
        return list(zip(names, graph_out + graph_grads, out + grads, strict=True))

    if c.gap("rev", "eager") is None:
        c.equal(check, "aot_eager", pairs)


def noncontiguous(c: Context) -> None:
    """Inputs with other strides give the same outputs and the same gradients."""
    p = c.problem
    if p.random:
        return  # random numbers are drawn in the order of memory
    layouts: dict[str, Callable[[Tensor], Tensor]] = {"transposed": _transposed, "strided": _strided}
    reverse = c.gap("rev", "eager") is None

    def results(leaves: list[Any]) -> list[Tensor | None]:
        other = p.at(leaves)
        return list(outputs_of(other, leaves)) + (list(modes.gradient(other)) if reverse and p.applicable else [])

    base = c.run(
        "noncontiguous",
        "contiguous",
        lambda: results([x.contiguous() if isinstance(x, Tensor) and not tree.is_sparse(x) else x for x in p.leaves]),
    )
    if base is None:
        return
    for engine, relayout in layouts.items():
        changed = [relayout(x) if isinstance(x, Tensor) else x for x in p.leaves]
        if all(x.is_contiguous() for x in changed if isinstance(x, Tensor) and not tree.is_sparse(x)):
            continue

        def pairs(changed: list[Any] = changed) -> list[tuple[str, Any, Any]]:
            found = results(changed)
            outputs = len(found) - len(p.names) if reverse and p.applicable else len(found)
            names = [f"output {j}" for j in range(outputs)] + [f"gradient of {n}" for n in p.names]
            return list(zip(names, found, base, strict=False))

        c.equal("noncontiguous", engine, pairs)


def _transposed(x: Tensor) -> Tensor:
    """The same values with the first dimension contiguous."""
    if x.layout != torch.strided or x.is_nested:
        return x
    order = list(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def _strided(x: Tensor) -> Tensor:
    """The same values, every second one of a larger storage."""
    if x.layout != torch.strided or x.is_nested or x.dim() == 0:
        return x
    wide = torch.empty((*x.shape, 2), dtype=x.dtype, device=x.device)
    wide[..., 0] = x
    # a value that shows if a kernel reads the wrong element
    wide[..., 1] = True if x.dtype == torch.bool else 77
    return wide[..., 0]


def operator_of(fn: Any) -> Any:
    """The operator that `torch.library.opcheck` can take, or None."""
    if isinstance(fn, _OPS):
        return fn
    for name in ("op", "overload", "_opoverload", "default"):
        inner = getattr(fn, name, None)
        if isinstance(inner, _OPS):
            return inner
    return None


def opcheck(c: Context) -> None:
    """`torch.library.opcheck` of an operator; first sample only."""
    if operator_of(c.fn) is not None and c.position == 0:
        c.verdict("opcheck", "opcheck", lambda: opcheck_says(c.problem))


def opcheck_says(p: Problem) -> str:
    """The errors that `torch.library.opcheck` finds in the operator; empty if there are none."""
    values = [x.detach().requires_grad_() if i in p.index else x for i, x in enumerate(p.leaves)]
    op = operator_of(p.fn)
    args, kwargs = without_grad(op, *tree.rebuild(p.arguments, values))
    found = torch.library.opcheck(op, tuple(args), kwargs, raise_exception=False)
    return "; ".join(
        f"{test}: {' '.join(str(said).split())[:300]}" for test, said in found.items() if said != "SUCCESS"
    )


def kernel(c: Context) -> None:
    """An operator with a `reference` returns the reference's outputs."""
    reference = getattr(c.fn, "reference", None)
    if not callable(reference):
        return
    _same_outputs(c, "kernel", reference)


def _same_outputs(c: Context, check: str, reference: Callable[..., Any]) -> None:
    p = c.problem
    other = p.but(fn=reference)

    def pairs() -> list[tuple[str, Any, Any]]:
        ours, theirs = outputs_of(p, p.leaves), outputs_of(other, p.leaves)
        if len(ours) != len(theirs):
            raise AssertionError(f"{len(ours)} outputs, the reference has {len(theirs)}")
        return [(f"output {j}", a, b) for j, (a, b) in enumerate(zip(ours, theirs, strict=True))]

    c.equal(check, "reference", pairs)
