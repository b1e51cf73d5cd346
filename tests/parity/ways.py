"""The columns of the table: ways of using a differentiable function, each a small program that runs on stock PyTorch.

A way takes a `Call` and returns named numbers. What it returns under "forward" is the operator's output, the same bit for
bit with and without rules; a value that is no tensor has to be the same too. Every other number is compared with that of
the way's `reference`, which is the same mathematics with nothing special about it.
"""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from rows import Call
from torch import Tensor
from torch.autograd.graph import allow_mutation_on_saved_tensors, save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torch_manualgrad as mg
from torch_manualgrad.testing.problem import Problem, inner

Numbers = Mapping[str, Any]
Program = Callable[[Call], Numbers]

DTYPES = (torch.float64, torch.complex128)

# what a way costs: all rows always; a handful of rows always and all in the slow tests; the slow tests only
CHEAP, DEAR, SLOW = "cheap", "dear", "slow"
HANDFUL = (
    "aten::linalg_vector_norm",
    "aten::_cdist_forward",
    "aten::linalg_lu",
    "aten::linalg_qr",
    "aten::_linalg_svd",
    "aten::linalg_matrix_exp",
    "aten::mm",
)


@dataclass(frozen=True)
class Way:
    """One way of using a function.

    Attributes:
        reference: the same without the way; None: what stock gives this way is the reference.
        cost: one of `CHEAP`, `DEAR`, `SLOW`.
        dtypes: of the samples.
        rtol: how far rounding may go, relative to the largest component; by the dtype where it is None.
    """

    name: str
    run: Program
    reference: Program | None
    cost: str = CHEAP
    dtypes: Sequence[torch.dtype] = DTYPES
    rtol: float | None = None


WAYS: dict[str, Way] = {}


def way(name: str, reference: Program | None, **about: Any) -> Callable[[Program], Program]:
    """Enter a program in the registry."""

    def enter(run: Program) -> Program:
        assert name not in WAYS, name
        WAYS[name] = Way(name, run, reference, **about)
        return run

    return enter


# -- what programs are made of ----------------------------------------------------------------------------------------


def variables(p: Problem) -> list[Tensor]:
    """Fresh leaves that require grad."""
    return [x.detach().clone().requires_grad_() for x in p.primals]


def gradient(value: Tensor, at: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """The gradient of a real scalar; zero where autograd says None."""
    if not value.requires_grad:
        return [torch.zeros_like(x) for x in at]
    found = torch.autograd.grad(value, at, allow_unused=True, **options)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, at)]


def total(p: Problem, outputs: Sequence[Tensor]) -> Tensor:
    """The loss of outputs that a program has in hand."""
    losses = p.losses(outputs)
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def named(name: str, values: Sequence[Any]) -> dict[str, Any]:
    return {f"{name} {i}": v for i, v in enumerate(values)}


def once(p: Problem, call: Callable[..., Sequence[Tensor]] | None = None, **options: Any) -> dict[str, Any]:
    """Forward and gradient of the loss."""
    xs = variables(p)
    out = (call or p.call)(*xs)
    kept = [o.detach().clone() for o in out]
    return named("forward", kept) | named("gradient", gradient(total(p, out), xs, **options))


def first(c: Call) -> Numbers:
    """The reference of most ways: forward and gradient."""
    return once(c.problem)


def product_with_hessian(p: Problem, call: Callable[..., Sequence[Tensor]]) -> dict[str, Any]:
    xs = variables(p)
    grads = gradient(total(p, call(*xs)), xs, create_graph=True)
    return named("hessian", gradient(inner(grads, p.u), xs))


def second(c: Call) -> Numbers:
    """Forward, gradient, and the product of the Hessian with a direction."""
    return twice(c.problem, c.problem.call)


def twice(p: Problem, call: Callable[..., Sequence[Tensor]]) -> dict[str, Any]:
    """First and second order; an error of the second stands in the place of its numbers, as stock may have the first only."""
    found = once(p, call)
    try:
        return found | product_with_hessian(p, call)
    except Exception as error:
        return found | {"hessian": error}


@way("plain", second)
def plain(c: Call) -> Numbers:
    """Backward twice: the row's own comparison of stock with the rule."""
    return second(c)


OTHER_DTYPES = (torch.float32, torch.complex64, torch.float16, torch.bfloat16)


def first_in_double(c: Call) -> Numbers:
    """The reference for narrow dtypes."""
    return once(c.problem.wide())


@way("other dtypes", first_in_double, dtypes=OTHER_DTYPES)
def other_dtypes(c: Call) -> Numbers:
    return first(c)


# -- batched gradients, vectorised Jacobians --------------------------------------------------------------------------


def cotangents(p: Problem, count: int) -> list[list[Tensor]]:
    """Several cotangents of each output."""
    generator = torch.Generator().manual_seed(7)
    wide = [torch.complex128 if o.is_complex() else torch.float64 for o in (p.base[i] for i in p.outputs)]
    shapes = [(p.base[i].shape, p.base[i].dtype) for i in p.outputs]
    return [
        [torch.randn(s, dtype=w, generator=generator).to(d) for w, (s, d) in zip(wide, shapes)] for _ in range(count)
    ]


def pullback(out: Sequence[Tensor], xs: Sequence[Tensor], at: Sequence[Tensor], **options: Any) -> list[Tensor]:
    live = [(o, g) for o, g in zip(out, at) if o.requires_grad]
    found = torch.autograd.grad([o for o, _ in live], xs, [g for _, g in live], allow_unused=True, **options)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, xs)]


def rows_of_jacobian(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    out = p.call(*xs)
    found = [pullback(out, xs, at, retain_graph=True) for at in cotangents(p, 3)]
    return named("rows", [torch.stack(rows) for rows in zip(*found)])


@way("is_grads_batched", rows_of_jacobian)
def batched(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    out = p.call(*xs)
    live = [(o, torch.stack(g)) for o, g in zip(out, zip(*cotangents(p, 3))) if o.requires_grad]
    found = torch.autograd.grad(
        [o for o, _ in live], xs, [g for _, g in live], is_grads_batched=True, allow_unused=True
    )
    return named("rows", [torch.zeros_like(x).expand(3, *x.shape) if g is None else g for g, x in zip(found, xs)])


def rows_of_hessian(c: Call) -> Numbers:
    return _rows_of_hessian(c, batched=False)


def _rows_of_hessian(c: Call, batched: bool) -> Numbers:
    p = c.problem
    xs = variables(p)
    live = [g for g in gradient(total(p, p.call(*xs)), xs, create_graph=True) if g.requires_grad]
    generator = torch.Generator().manual_seed(8)
    wide = [torch.randn(3, *g.shape, dtype=torch.float64, generator=generator).to(g.dtype) for g in live]
    if batched:
        found = torch.autograd.grad(live, xs, wide, is_grads_batched=True, allow_unused=True)
        return named(
            "hessian", [torch.zeros_like(x).expand(3, *x.shape) if g is None else g for g, x in zip(found, xs)]
        )
    rows = [pullback(live, xs, at, retain_graph=True) for at in zip(*wide)]
    return named("hessian", [torch.stack(r) for r in zip(*rows)])


@way("is_grads_batched, second order", rows_of_hessian)
def batched_twice(c: Call) -> Numbers:
    return _rows_of_hessian(c, batched=True)


def jacobian(c: Call, **options: Any) -> Numbers:
    p = c.problem
    found = torch.autograd.functional.jacobian(p.call, p.primals, **options)
    return named("jacobian", [x for per_output in found for x in per_output])


def hessian(c: Call, **options: Any) -> Numbers:
    p = c.problem
    found = torch.autograd.functional.hessian(lambda *xs: total(p, p.call(*xs)), p.primals, **options)
    return named("hessian", [x for row in found for x in row])


REAL = (torch.float64,)  # of complex functions these are no Jacobians
way("jacobian, vectorize", jacobian, dtypes=REAL)(partial(jacobian, vectorize=True))
way("jacobian, vectorize, forward mode", jacobian, dtypes=REAL)(
    partial(jacobian, vectorize=True, strategy="forward-mode")
)
way("hessian, vectorize", hessian, cost=DEAR, dtypes=REAL)(partial(hessian, vectorize=True))
way("hessian, vectorize, forward over reverse", hessian, cost=DEAR, dtypes=REAL)(
    partial(hessian, vectorize=True, outer_jacobian_strategy="forward-mode")
)


# -- without data: meta, fake, traced ---------------------------------------------------------------------------------


def structure(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.dtype, x.device.type


def without_data(c: Call, convert: Callable[[Tensor], Tensor]) -> Numbers:
    p = c.problem
    other = p.at([convert(x) if isinstance(x, Tensor) else x for x in p.leaves])
    xs = [x.detach().requires_grad_() for x in other.primals]
    out = other.call(*xs)
    grads = pullback(out, xs, [torch.ones_like(o) for o in out], create_graph=True)
    found = {"outputs": [structure(o) for o in out], "gradient": [structure(g) for g in grads]}
    again = [g for g in grads if g.requires_grad]
    try:
        twice = pullback(again, xs, [torch.ones_like(g) for g in again]) if again else []
    except Exception as error:
        return found | {"hessian": error}
    return found | {"hessian": [structure(g) for g in twice]}


@way("meta device", None)
def meta(c: Call) -> Numbers:
    return without_data(c, lambda x: x.to("meta"))


@way("fake tensors", None, cost=DEAR)
def fake(c: Call) -> Numbers:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return without_data(c, mode.from_tensor)


def inputs_of_a_graph(p: Problem, near: float) -> list[Tensor]:
    """Every tensor that the program reads: leaves, moved a little where they are differentiated, and cotangents."""
    moved = {i: x + near * u for i, x, u in zip(p.index, p.primals, p.u)}
    leaves = [moved.get(i, x) for i, x in enumerate(p.leaves) if isinstance(x, Tensor)]
    return [*leaves, *cotangents(p, 1)[0]]


def forward_and_gradient(p: Problem, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Outputs and gradients as a function of `inputs_of_a_graph`, without a constant tensor in it."""
    given = iter(tensors)
    leaves = [next(given) if isinstance(x, Tensor) else x for x in p.leaves]
    other = p.at([x.detach().requires_grad_() if i in p.index else x for i, x in enumerate(leaves)])
    out = other.call(*other.primals)
    grads = pullback(out, other.primals, list(given))
    return (*[o.detach() for o in out], *grads)


def by_func(p: Problem, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The same by `torch.func`, which other transforms take."""
    given = iter(tensors)
    leaves = [next(given) if isinstance(x, Tensor) else x for x in p.leaves]
    other = p.at(leaves)
    out, pull = torch.func.vjp(other.call, *other.primals)
    return (*out, *pull(tuple(given)))


def there(c: Call) -> Numbers:
    p = c.problem
    return _split(p, forward_and_gradient(p, *inputs_of_a_graph(p, 0.01)))


def _split(p: Problem, found: Sequence[Tensor]) -> dict[str, Any]:
    n = len(p.outputs)
    return named("forward", found[:n]) | named("gradient", found[n:])


def traced(c: Call, mode: str, functionalise: bool = False) -> Numbers:
    """A graph made at the sample, evaluated near it: nothing of the sample may be baked in."""
    from torch.fx.experimental.proxy_tensor import make_fx

    p = c.problem
    f = torch.func.functionalize(partial(by_func, p)) if functionalise else partial(forward_and_gradient, p)
    graph = make_fx(f, tracing_mode=mode)(*inputs_of_a_graph(p, 0.0))
    return _split(p, graph(*inputs_of_a_graph(p, 0.01)))


way("make_fx, real", there, cost=DEAR)(lambda c: traced(c, "real"))
way("make_fx, fake", there, cost=DEAR)(lambda c: traced(c, "fake"))
way("make_fx, symbolic", there, cost=DEAR)(lambda c: traced(c, "symbolic"))
way("make_fx of functionalize", there, cost=DEAR)(lambda c: traced(c, "real", functionalise=True))


@way("functionalize", there)
def functionalised(c: Call) -> Numbers:
    p = c.problem
    return _split(p, torch.func.functionalize(partial(by_func, p))(*inputs_of_a_graph(p, 0.01)))


@way("torch.jit.trace", first, cost=DEAR)
def jit_traced(c: Call) -> Numbers:
    p = c.problem
    traced = torch.jit.trace(lambda *xs: p.call(*xs), p.primals, check_trace=False)

    def call(*xs: Tensor) -> Sequence[Tensor]:
        found = traced(*xs)
        return found if isinstance(found, (tuple, list)) else (found,)

    return once(p, call)


@way("torch.export", first, cost=DEAR)
def exported(c: Call) -> Numbers:
    p = c.problem

    class Model(torch.nn.Module):
        def forward(self, *xs: Tensor) -> Any:
            return p.call(*xs)

    program = torch.export.export(Model(), p.primals)
    operators = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    return once(p, program.module()) | {"operators": operators}


# -- compilers --------------------------------------------------------------------------------------------------------


@contextmanager
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()


def compiled(c: Call, backend: str) -> Numbers:
    with fresh_compiler():
        return once(c.problem, torch.compile(lambda *xs: c.problem.call(*xs), backend=backend, fullgraph=True))


way("compile, aot_eager", first, cost=DEAR)(lambda c: compiled(c, "aot_eager"))
way("compile, inductor", first, cost=SLOW)(lambda c: compiled(c, "inductor"))


@way("compile of func.grad", first, cost=DEAR)
def compiled_gradient(c: Call) -> Numbers:
    p = c.problem
    with fresh_compiler():
        everything = tuple(range(len(p.primals)))
        f = torch.func.grad(lambda *xs: total(p, p.call(*xs)), argnums=everything)
        found = torch.compile(lambda *xs: f(*xs), backend="aot_eager", fullgraph=True)(*p.primals)
    return named("gradient", found)


@way("compiled autograd", first, cost=DEAR)
def compiled_autograd(c: Call) -> Numbers:
    from torch._dynamo import compiled_autograd

    p = c.problem
    xs = variables(p)
    out = p.call(*xs)
    forward = [o.detach().clone() for o in out]
    value = total(p, out)
    with fresh_compiler(), compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
        value.backward()
    return named("forward", forward) | named("gradient", [accumulated(x) for x in xs])


def accumulated(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


# -- saved tensors ----------------------------------------------------------------------------------------------------


def chain(p: Problem, before: bool, after: bool) -> Callable[..., tuple[Tensor, ...]]:
    """The function between products by one, whose nodes save tensors too."""

    def f(*xs: Tensor) -> tuple[Tensor, ...]:
        out = p.call(*(x * torch.ones_like(x) for x in xs) if before else xs)
        return tuple(o * torch.ones_like(o) for o in out) if after else out

    return f


PLACES = {"alone": (False, False), "first": (False, True), "last": (True, False), "in the middle": (True, True)}


def checkpointed(c: Call, places: tuple[bool, bool], **options: Any) -> Numbers:
    f = chain(c.problem, *places)
    return once(c.problem, lambda *xs: checkpoint(f, *xs, **options))


for place, places in PLACES.items():
    way(f"checkpoint, {place}", first)(partial(checkpointed, places=places, use_reentrant=False))


@way("checkpoint, reentrant", first)
def checkpointed_reentrant(c: Call) -> Numbers:
    """By `backward`, as such a checkpoint refuses autograd.grad."""
    p = c.problem
    xs = variables(p)
    out = checkpoint(chain(p, True, True), *xs, use_reentrant=True)
    forward = [o.detach().clone() for o in out]
    total(p, out).backward()
    return named("forward", forward) | named("gradient", [accumulated(x) for x in xs])


@way("checkpoint, twice differentiated", second)
def checkpointed_twice(c: Call) -> Numbers:
    p = c.problem
    f = chain(p, True, True)
    call = partial(checkpoint, f, use_reentrant=False)
    return twice(p, call)


@way("checkpoint inside checkpoint", first)
def checkpointed_nested(c: Call) -> Numbers:
    call = partial(checkpoint, c.problem.call, use_reentrant=False)
    return once(c.problem, partial(checkpoint, lambda *xs: call(*xs), use_reentrant=False))


@way("checkpoint, selective", first)
def checkpointed_selectively(c: Call) -> Numbers:
    ours = {rule.aten for rule in mg.rules.values()}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in ours else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpointed(c, (True, True), use_reentrant=False, context_fn=contexts)


def hooked(c: Call, hooks: AbstractContextManager[Any]) -> Numbers:
    p = c.problem
    xs = variables(p)
    with hooks:
        out = p.call(*xs)
    forward = [o.detach().clone() for o in out]
    return named("forward", forward) | named("gradient", gradient(total(p, out), xs))


@way("saved tensors, offloaded", first)
def offloaded(c: Call) -> Numbers:
    return hooked(c, save_on_cpu())


@way("saved tensors, packed to bytes", first)
def packed(c: Call) -> Numbers:
    def unpack(data: bytes) -> Any:
        return torch.load(io.BytesIO(data))

    def pack(x: Tensor) -> bytes:
        stream = io.BytesIO()
        torch.save(x.detach(), stream)
        return stream.getvalue()

    return hooked(c, saved_tensors_hooks(pack, unpack))


@way("saved tensors, hooks that differentiate", first)
def hooks_that_differentiate(c: Call) -> Numbers:
    """What a hook computes is recorded where it asks for that, as in a backward of stock's."""
    p = c.problem

    def unpack(x: Tensor) -> Tensor:
        with torch.enable_grad():
            inputs = variables(p)
            (slope,) = torch.autograd.grad(total(p, p.call(*inputs)), inputs[0])
            one = torch.ones((), dtype=torch.float64, requires_grad=True)
            (factor,) = torch.autograd.grad(one * 1, one)
        assert slope.shape == inputs[0].shape
        return x * factor.to(x.dtype) if x.is_floating_point() or x.is_complex() else x

    return hooked(c, saved_tensors_hooks(lambda x: x.detach(), unpack))


@way("saved tensors, second order through hooks", second)
def hooks_and_second_order(c: Call) -> Numbers:
    p = c.problem
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        return twice(p, p.call)


# -- changes in place -------------------------------------------------------------------------------------------------


def tripled(p: Problem, *xs: Tensor) -> list[Tensor]:
    return [o * 3 + 1 for o in p.call(*xs)]


def out_of_place(c: Call) -> Numbers:
    return _without_forward(once(c.bare, partial(tripled, c.bare)))


def _without_forward(found: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in found.items() if not k.startswith("forward")}


@way("in place on the output", out_of_place)
def in_place_on_output(c: Call) -> Numbers:
    p = c.bare

    def call(*xs: Tensor) -> Sequence[Tensor]:
        out = p.call(*xs)
        for o in out:
            o *= 3
            o += 1
        return out

    return _without_forward(once(p, call))


@way("in place on the output, mutation of saved tensors allowed", out_of_place)
def in_place_allowed(c: Call) -> Numbers:
    with allow_mutation_on_saved_tensors():
        return in_place_on_output(c)


def raw_gradient(c: Call) -> Numbers:
    return _without_forward(once(c.bare))


@way("in place on an input before the backward", raw_gradient)
def in_place_on_input(c: Call) -> Numbers:
    """Raises, or is right where the derivative does not read the input."""
    p = c.bare
    xs = variables(p)
    inputs = [x * 1 for x in xs]
    out = p.call(*inputs)
    value = total(p, out)
    for x in inputs:
        x.mul_(2)
    return named("gradient", gradient(value, xs))


def _one_written(c: Call, write: bool) -> Numbers:
    p = c.bare
    found: dict[str, Any] = {}
    for i in range(len(p.primals)):
        for j in range(len(p.primals)):
            xs = [x.detach().clone().requires_grad_(i == k) for k, x in enumerate(p.primals)]
            inputs = [x * 1 for x in xs]
            value = total(p, p.call(*inputs))
            if write:
                inputs[j].mul_(2)
            try:
                found[f"gradient {i}, {j} written"] = gradient(value, [xs[i]])[0]
            except RuntimeError as error:
                found[f"gradient {i}, {j} written"] = error
    return found


@way("in place on one input, a gradient of one asked for", partial(_one_written, write=False))
def in_place_on_one_input(c: Call) -> Numbers:
    """What only the gradients of other inputs read is not kept."""
    return _one_written(c, write=True)


@way("views written after the forward", lambda c: _without_forward(once(c.bare, partial(halved, c.bare))))
def views_of_output_written(c: Call) -> Numbers:
    p = c.bare

    def call(*xs: Tensor) -> Sequence[Tensor]:
        out = p.call(*xs)
        for o in out:
            view = o.view(o.shape) if not o.dim() else o.transpose(0, -1)[..., :1]
            view.mul_(0.5)
        return out

    return _without_forward(once(p, call))


def halved(p: Problem, *xs: Tensor) -> list[Tensor]:
    result = []
    for o in p.call(*xs):
        factor = torch.ones_like(o)
        (factor if not o.dim() else factor.transpose(0, -1)[..., :1]).mul_(0.5)
        result.append(o * factor)
    return result


# -- views and strides ------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]]] = {
    "transposed": lambda x: (
        x.permute(*reversed(range(x.dim()))).contiguous(),
        lambda b: b.permute(*reversed(range(b.dim()))),
    ),
    "every second element": lambda x: (torch.stack((x, x + 1), -1), lambda b: b[..., 0]),
    "a slice": lambda x: (torch.cat((x.unsqueeze(0), x.unsqueeze(0) + 1)), lambda b: b[:1].squeeze(0)),
    "expanded": lambda x: (x.unsqueeze(0), lambda b: b.expand(2, *b.shape[1:])[1]),
    "lazily conjugated": lambda x: (x.conj().resolve_conj(), lambda b: b.conj()),
    "lazily negated": lambda x: (
        (x.conj().resolve_conj(), lambda b: torch.complex(b.real, b.imag).conj())
        if x.is_complex()
        else (-x, lambda b: torch.complex(torch.zeros_like(b), b).conj().imag)
    ),
}


def from_view(c: Call, form: str, copied: bool) -> Numbers:
    p = c.problem
    pairs = [LAYOUTS[form](x.detach()) for x in p.primals]
    bases = [b.clone().requires_grad_() for b, _ in pairs]
    views = [f(b) for b, (_, f) in zip(bases, pairs)]
    out = p.call(*(v.clone(memory_format=torch.contiguous_format) if copied else v for v in views))
    return named("output", [o.detach() for o in out]) | named("gradient", gradient(total(p, out), bases))


for form in LAYOUTS:
    way(f"input {form}", partial(from_view, form=form, copied=True))(partial(from_view, form=form, copied=False))


def pulled(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    out = p.call(*xs)
    return named("gradient", pullback(out, xs, [o.detach().new_ones(()).expand(o.shape).clone() for o in out]))


@way("cotangent expanded", pulled)
def expanded_cotangent(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    out = p.call(*xs)
    return named("gradient", pullback(out, xs, [o.detach().new_ones(()).expand(o.shape) for o in out]))


def from_cotangents(c: Call, form: Callable[[Tensor], Tensor] = lambda g: g) -> Numbers:
    p = c.problem
    xs = variables(p)
    out = p.call(*xs)
    return named("gradient", pullback(out, xs, [form(g) for g in cotangents(p, 1)[0]]))


way("cotangent lazily conjugated", from_cotangents)(
    lambda c: from_cotangents(c, lambda g: g.conj().resolve_conj().conj())
)
way("cotangent with other strides", from_cotangents)(
    lambda c: from_cotangents(c, lambda g: torch.stack((g, g + 1), 0).movedim(0, -1)[..., 0])
)


# -- tensor subclasses and modes --------------------------------------------------------------------------------------


@way("TwoTensor", first, dtypes=REAL)
def two_tensor(c: Call) -> Numbers:
    """Real only: the class drops the bit for conjugation, and stock's complex numbers are wrong with it."""
    from torch.testing._internal.two_tensor import TwoTensor

    p = c.problem
    xs = [TwoTensor(x.detach().clone(), x.detach().clone()).requires_grad_() for x in p.primals]
    out = p.call(*xs)
    forward = [o.detach().b if isinstance(o, TwoTensor) else o.detach() for o in out]
    grads = gradient(total(p, out), xs)
    return named("forward", forward) | named("gradient", [g.b if isinstance(g, TwoTensor) else g for g in grads])


class Named(torch.Tensor):
    """A subclass with PyTorch's own ``__torch_function__``, which keeps the class."""


@way("__torch_function__ subclass", first)
def function_subclass(c: Call) -> Numbers:
    p = c.problem
    xs = [x.detach().clone().as_subclass(Named).requires_grad_() for x in p.primals]
    out = p.call(*xs)
    types = [type(o).__name__ for o in out]
    forward = [o.detach().as_subclass(Tensor).clone() for o in out]
    grads = [g.as_subclass(Tensor) for g in gradient(total(p, out), xs)]
    return named("forward", forward) | named("gradient", grads) | {"types": types}


class Wrapper(torch.Tensor):
    """Holds a tensor and passes every operator on to it; carries the bits for conjugation and negation of what it holds."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            dtype=held.dtype,
            device=held.device,
            requires_grad=held.requires_grad,
        )
        torch._C._set_conj(made, held.is_conj())
        torch._C._set_neg(made, held.is_neg())
        return made

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inside = func(
            *tree_map_only(Wrapper, lambda x: x.held, args), **tree_map_only(Wrapper, lambda x: x.held, kwargs)
        )
        return return_and_correct_aliasing(func, args, kwargs, tree_map_only(Tensor, Wrapper, inside))


def unwrapped(x: Tensor) -> Tensor:
    return (x.held if isinstance(x, Wrapper) else x).resolve_conj().resolve_neg()


def wrapped(c: Call, make: Callable[[Tensor], Tensor] = lambda x: x.detach().clone()) -> Numbers:
    p = c.problem
    xs = [Wrapper(make(x)).requires_grad_() for x in p.primals]
    out = p.call(*xs)
    forward = [unwrapped(o.detach()) for o in out]
    found = named("output", forward) | named("gradient", [unwrapped(g) for g in gradient(total(p, out), xs)])
    try:
        seconds = gradient(inner(gradient(total(p, p.call(*xs)), xs, create_graph=True), p.u), xs)
    except Exception as error:
        return found | {"hessian": error}
    return found | named("hessian", [unwrapped(g) for g in seconds])


def outputs_and_second(c: Call) -> Numbers:
    return {k.replace("forward", "output"): v for k, v in second(c).items()}


way("wrapper subclass", outputs_and_second)(wrapped)
way("wrapper subclass, lazily conjugated inside", outputs_and_second)(
    lambda c: wrapped(c, lambda x: x.detach().conj().resolve_conj().conj())
)


class Passing(TorchDispatchMode):
    """Sees every operator and passes it on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@way("TorchDispatchMode", second)
def dispatch_mode(c: Call) -> Numbers:
    with Passing():
        return second(c)


@way("TorchDispatchMode in the backward only", first)
def dispatch_mode_in_backward(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    out = p.call(*xs)
    forward = [o.detach().clone() for o in out]
    value = total(p, out)
    with Passing():
        grads = gradient(value, xs)
    return named("forward", forward) | named("gradient", grads)


@way("FlopCounterMode", second)
def flops(c: Call) -> Numbers:
    from torch.utils.flop_counter import FlopCounterMode

    p = c.problem
    xs = variables(p)
    with FlopCounterMode(display=False) as forward:
        out = p.call(*xs)
        value = total(p, out)
    with FlopCounterMode(display=False) as backward:
        gradient(value, xs)
    with FlopCounterMode(display=False):
        numbers = second(c)
    counted = {"flops of the forward": forward.get_total_flops(), "backward counted": backward.get_total_flops() > 0}
    return {**numbers, **counted}


class Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@way("TorchFunctionMode", second)
def function_mode(c: Call) -> Numbers:
    with Watching():
        return second(c)


def forward_and_ones(c: Call) -> Numbers:
    ones = {k.replace("gradient", "ones"): v for k, v in pulled(c).items()}
    return {**first(c), **ones, **tangents(c)}


def tangents(c: Call) -> Numbers:
    p = c.problem
    try:
        with fwAD.dual_level():
            out = p.call(*(fwAD.make_dual(x, u) for x, u in zip(p.primals, p.u)))
            return named("tangent", [fwAD.unpack_dual(o).tangent for o in out])
    except Exception as error:
        return {"tangent": error}


@way("default device meta", forward_and_ones)
def default_device(c: Call) -> Numbers:
    """Tensors that the derivative makes are where its inputs are."""
    p = c.problem
    xs = variables(p)
    with torch.device("meta"):
        out = p.call(*xs)
        grads = pullback(out, xs, [torch.ones_like(o) for o in out])
        forward = [o.detach().clone() for o in out]
        return {**named("forward", forward), **named("ones", grads), **tangents(c)}


def with_default_dtype(c: Call) -> Numbers:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        return second(c)
    finally:
        torch.set_default_dtype(before)


way("default dtype float16", second)(with_default_dtype)


@way("autocast", None, dtypes=(torch.float32,), rtol=3e-2)
def autocast(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = p.call(*xs)
    dtypes = [o.dtype for o in out]
    forward = [o.detach().clone() for o in out]
    grads = pullback(out, xs, [torch.ones_like(o) for o in out])
    return named("forward", forward) | named("gradient", grads) | {"dtypes": dtypes}


@way("autocast around the backward too", None, dtypes=(torch.float32,), rtol=2e-1)
def autocast_everywhere(c: Call) -> Numbers:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return autocast(c)


@way("anomaly mode", second)
def anomaly(c: Call) -> Numbers:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly(check_nan=True):
            return second(c)


@way("warnings are errors", second)
def no_warnings(c: Call) -> Numbers:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return second(c)


@way("deterministic algorithms", second)
def deterministic(c: Call) -> Numbers:
    torch.use_deterministic_algorithms(True)
    try:
        return second(c)
    finally:
        torch.use_deterministic_algorithms(False)


@way("state of the random generator", None)
def generator_state(c: Call) -> Numbers:
    before = torch.get_rng_state()
    second(c)
    return {"untouched": bool(torch.equal(before, torch.get_rng_state()))}


# -- whether anything is recorded -------------------------------------------------------------------------------------


def flags(out: Sequence[Tensor]) -> list[Any]:
    return [(o.requires_grad, o.is_leaf, o.grad_fn is None, o.is_inference()) for o in out]


@way("no_grad", None)
def without_grad(c: Call) -> Numbers:
    with torch.no_grad():
        out = c.bare.call(*variables(c.bare))
    return named("forward", out) | {"flags": flags(out)}


@way("inference mode", None)
def inference(c: Call) -> Numbers:
    with torch.inference_mode():
        out = c.bare.call(*c.bare.primals)
        inside = c.bare.call(*(x.clone() for x in c.bare.primals))
    return named("forward", [*out, *inside]) | {"flags": flags((*out, *inside))}


@way("grad mode switched on and off", second)
def toggled(c: Call) -> Numbers:
    p = c.problem

    def call(*xs: Tensor) -> Sequence[Tensor]:
        with torch.set_grad_enabled(False):
            p.call(*xs)
            with torch.enable_grad():
                return p.call(*xs)

    return twice(p, call)


@way("flags of the outputs", None)
def output_flags(c: Call) -> Numbers:
    p = c.bare
    args = variables(p)
    flat = p.flat(*args)
    return {"flags": flags(flat), "layouts": [(tuple(o.shape), o.dtype, o.stride()) for o in flat]}


def subsets(c: Call) -> list[list[int]]:
    n = len(c.problem.primals)
    return [[i] for i in range(n)] if n > 1 else [[0]]


@way("each input alone", first)
def alone(c: Call) -> Numbers:
    """Only one of the inputs requires grad."""
    p = c.problem
    found: dict[str, Any] = {}
    for (i,) in subsets(c):
        xs = [x.detach().clone().requires_grad_(i == j) for j, x in enumerate(p.primals)]
        found[f"gradient {i}"] = gradient(total(p, p.call(*xs)), [xs[i]])[0]
    return found


@way("each output alone", lambda c: _each_output(c, together=True))
def each_output(c: Call) -> Numbers:
    return _each_output(c, together=False)


def _each_output(c: Call, together: bool) -> Numbers:
    """Its cotangent alone is defined; or all are, the others as zeros."""
    p = c.problem
    found: dict[str, Any] = {}
    for j in range(len(p.outputs)):
        xs = variables(p)
        losses = p.losses(p.call(*xs))
        value = torch.stack([loss * (i == j) for i, loss in enumerate(losses)]).sum() if together else losses[j]
        found |= named(f"gradient of {j} in", gradient(value, xs))
    return found


@way("through .grad, graph retained", first)
def retained(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    out = p.call(*xs)
    forward = [o.detach().clone() for o in out]
    value = total(p, out)
    value.backward(retain_graph=True)
    value.backward()
    return named("forward", forward) | named("gradient", [accumulated(x) / 2 for x in xs])


@way("backward twice without the graph", None)
def freed(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    value = total(p, p.call(*xs))
    value.backward()
    try:
        value.backward()
    except RuntimeError as error:
        return {"refused": type(error).__name__}
    return {"refused": ""}


@way("create_graph and .grad", second)
def through_grad(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    out = p.call(*xs)
    forward = [o.detach().clone() for o in out]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a cycle of references, which is undone below
        total(p, out).backward(create_graph=True)
    grads = [accumulated(x) for x in xs]
    for x in xs:
        x.grad = None
    live = inner(grads, p.u)
    return (
        named("forward", forward)
        | named("gradient", [g.detach() for g in grads])
        | named("hessian", gradient(live, xs) if live.requires_grad else [torch.zeros_like(x) for x in xs])
    )


# -- transforms -------------------------------------------------------------------------------------------------------


def _loss(p: Problem) -> Callable[..., Tensor]:
    return lambda *xs: total(p, p.call(*xs))


@way("func.grad", first)
def func_grad(c: Call) -> Numbers:
    p = c.problem
    everything = tuple(range(len(p.primals)))
    return named("gradient", torch.func.grad(_loss(p), argnums=everything)(*p.primals))


@way("func.vjp", lambda c: {**first(c), **from_cotangents(c)})
def func_vjp(c: Call) -> Numbers:
    p = c.problem
    out, pull = torch.func.vjp(p.call, *p.primals)
    return named("forward", out) | named("gradient", pull(tuple(cotangents(p, 1)[0])))


def slope(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    return {"slope": inner(gradient(_loss(p)(*xs), xs), p.u)}


@way("func.jvp", slope)
def func_jvp(c: Call) -> Numbers:
    p = c.problem
    return {"slope": torch.func.jvp(_loss(p), p.primals, p.u)[1]}


@way("dual numbers", slope)
def dual(c: Call) -> Numbers:
    p = c.problem
    with fwAD.dual_level():
        found = fwAD.unpack_dual(_loss(p)(*(fwAD.make_dual(x, u) for x, u in zip(p.primals, p.u)))).tangent
    return {"slope": torch.zeros(()) if found is None else found}


@way("dual numbers, lazily conjugated tangents", slope)
def dual_conjugated(c: Call) -> Numbers:
    p = c.problem
    with fwAD.dual_level():
        tangents = [u.conj().resolve_conj().conj() for u in p.u]
        found = fwAD.unpack_dual(_loss(p)(*(fwAD.make_dual(x, u) for x, u in zip(p.primals, tangents)))).tangent
    return {"slope": torch.zeros(()) if found is None else found}


@way("dual numbers that require grad", lambda c: {**slope(c), **product_with_hessian(c.problem, c.problem.call)})
def dual_and_grad(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    with fwAD.dual_level():
        found = fwAD.unpack_dual(_loss(p)(*(fwAD.make_dual(x, u) for x, u in zip(xs, p.u)))).tangent
        assert found is not None
        return {"slope": found.detach()} | named("hessian", gradient(found, xs))


@way("vmap", lambda c: _mapped(c, loop=True))
def func_vmap(c: Call) -> Numbers:
    return _mapped(c, loop=False)


def _mapped(c: Call, loop: bool) -> Numbers:
    p = c.problem
    everything = tuple(range(len(p.primals)))
    f = torch.func.grad(_loss(p), argnums=everything)
    batch = [torch.stack((x, x + 0.01 * u)) for x, u in zip(p.primals, p.u)]
    if not loop:
        return named("gradient", torch.func.vmap(f)(*batch))
    found = []
    for at in zip(*batch):
        xs = [x.detach().clone().requires_grad_() for x in at]
        found.append(gradient(_loss(p)(*xs), xs))
    return named("gradient", [torch.stack(g) for g in zip(*found)])


@way("func.hessian times a direction", lambda c: product_with_hessian(c.problem, c.problem.call))
def func_second(c: Call) -> Numbers:
    p = c.problem
    everything = tuple(range(len(p.primals)))
    first = torch.func.grad(_loss(p), argnums=everything)
    return named("hessian", torch.func.grad(lambda *xs: inner(first(*xs), p.u), argnums=everything)(*p.primals))


# -- modules and processes --------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """The function of its own parameters."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.row = call
        self.parameters_ = torch.nn.ParameterList(
            [torch.nn.Parameter(x.detach().clone()) for x in call.problem.primals]
        )

    def forward(self, *_: Tensor) -> Any:
        return self.row.problem.call(*self.parameters_)


def of_model(model: Model) -> Numbers:
    out = model()
    forward = [o.detach().clone() for o in out]
    total(model.row.problem, out).backward()
    return named("forward", forward) | named("gradient", [accumulated(x) for x in model.parameters_])


@way("module, deepcopied", first)
def deepcopied(c: Call) -> Numbers:
    model = Model(c)
    of_model(model)
    other = copy.deepcopy(model)
    other.zero_grad()
    return of_model(other)


@way("module, pickled", first)
def pickled(c: Call) -> Numbers:
    model = Model(c)
    of_model(model)
    other = pickle.loads(pickle.dumps(model))
    other.zero_grad()
    return of_model(other)


@way("functional_call", first)
def functional_call(c: Call) -> Numbers:
    model = Model(c)
    p = c.problem

    def loss(values: dict[str, Tensor]) -> Tensor:
        return total(p, torch.func.functional_call(model, values, ()))

    found = torch.func.grad(loss)({k: v.detach() for k, v in model.named_parameters()})
    return named("gradient", list(found.values()))


def in_threads(f: Callable[[], Any], count: int = 3) -> list[Any]:
    """What `f` returns in each of several threads that run at once; raises what one of them raised."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = f()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return results


@way("threads", lambda c: {f"thread {i}, {n}": v for n, v in second(c).items() for i in range(3)})
def threads(c: Call) -> Numbers:
    results = in_threads(lambda: [second(c) for _ in range(2)][-1])
    return {f"thread {i}, {n}": v for i, found in enumerate(results) for n, v in found.items()}


@way("DataParallel: forward in threads, one backward", first)
def data_parallel(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    grad = torch.is_grad_enabled()

    def replica() -> Sequence[Tensor]:
        with torch.set_grad_enabled(grad):
            return p.call(*xs)

    outs = in_threads(replica)
    total(p, [sum(o[1:], o[0]) / len(outs) for o in zip(*outs)]).backward()
    return named("gradient", [accumulated(x) for x in xs])


@way("one graph, backward in threads", first)
def backward_in_threads(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    value = _loss(p)(*xs)
    grads = in_threads(lambda: gradient(value, xs, retain_graph=True))
    return named("gradient", grads[-1])


@way("forked process", first, cost=DEAR)
def forked(c: Call) -> Numbers:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def child() -> None:
        stream = io.BytesIO()
        torch.save(dict(first(c)), stream)
        there.send_bytes(stream.getvalue())

    process = context.Process(target=child)
    process.start()
    there.close()
    try:
        if not here.poll(60):
            raise RuntimeError("the forked process does not answer")
        return dict(torch.load(io.BytesIO(here.recv_bytes())))
    except EOFError:
        raise RuntimeError(f"the forked process ended with {process.exitcode}") from None
    finally:
        process.kill()
        process.join()


# -- hooks and names --------------------------------------------------------------------------------------------------


@way("hooks on tensors and nodes", first)
def hooks(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    seen: list[str] = []
    for i, x in enumerate(xs):
        x.register_post_accumulate_grad_hook(lambda x, i=i: seen.append(f"accumulated {i}"))
    out = p.call(*(x * 1 for x in xs))
    forward = [o.detach().clone() for o in out]
    for o in out:
        if o.requires_grad:
            o.retain_grad()
            o.register_hook(lambda g: g * 2)
            o.grad_fn.register_prehook(lambda gs: tuple(None if g is None else g / 2 for g in gs))
            o.grad_fn.register_hook(lambda gs, _: seen.append("node"))
    value = total(p, out)
    value.register_hook(lambda g: g * 1)
    value.backward()
    return named("forward", forward) | named("gradient", [accumulated(x) for x in xs]) | {"seen": sorted(seen)}


@way("hooks on a module", first)
def module_hooks(c: Call) -> Numbers:
    class Inner(torch.nn.Module):
        def forward(self, *xs: Tensor) -> Any:
            return c.problem.call(*xs)

    model = Inner()
    model.register_full_backward_pre_hook(lambda m, gs: tuple(None if g is None else g * 2 for g in gs))
    model.register_full_backward_hook(lambda m, gi, go: tuple(None if g is None else g / 2 for g in gi))
    return once(c.problem, model)


@way("names of nodes", None)
def node_names(c: Call) -> Numbers:
    out = c.bare.call(*variables(c.bare))
    return {"nodes": [o.grad_fn.name().rstrip("0123456789") if o.grad_fn is not None else None for o in out]}


@way("inside an autograd.Function that differentiates in its backward", first)
def reentrant(c: Call) -> Numbers:
    p = c.problem

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *xs: Tensor) -> Any:
            with torch.enable_grad():
                ctx.xs = [x.detach().requires_grad_() for x in xs]
                ctx.out = p.call(*ctx.xs)
            return tuple(o.detach() for o in ctx.out)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return tuple(pullback(ctx.out, ctx.xs, grads))

    return once(p, Inner.apply)


@way("names in the profiler", None, cost=DEAR)
def profiler_names(c: Call) -> Numbers:
    """Which operators of the rules' names are seen by the profiler in the forward."""
    from torch.profiler import ProfilerActivity, profile

    ours = set(mg.rules)
    xs = variables(c.bare)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        c.bare.call(*xs)
    plain = {n.split(".")[0] for n in ours}
    return {"names": sorted({e.key for e in seen.key_averages() if e.key in plain})}


# -- sizes ------------------------------------------------------------------------------------------------------------


def scaled(c: Call, factor: float) -> Numbers:
    p = c.problem
    other = p.but(primals=tuple(x * factor for x in p.primals))
    xs = variables(other)
    out = other.call(*xs)
    grads = pullback(out, xs, [torch.ones_like(o) for o in out])
    return named("forward", [o.detach().clone() for o in out]) | named("gradient", grads)


def scaled_in_double(c: Call, factor: float) -> Numbers:
    """The same in double precision, where the factor is no extreme."""
    return scaled(Call(c.row, c.dtype, c.position, c.problem.wide()), factor)


for exponent in (-120, -62, -40, -15, 15, 40, 62, 120):
    way(
        f"float32, scale 2^{exponent}",
        partial(scaled_in_double, factor=2.0**exponent),
        dtypes=(torch.float32, torch.complex64),
    )(partial(scaled, factor=2.0**exponent))


def scaled_by_degree(c: Call, exponent: int) -> Numbers:
    """The same for a homogeneous function, from the sample as it is; nan for what is not homogeneous."""
    one, two = scaled(c, 1.0), scaled(c, 2.0)
    found = {}
    for name, x in one.items():
        ratios = (two[name] / x).abs()[x != 0]
        degree = round(float(ratios.median().log2())) if ratios.numel() else 0
        homogeneous = torch.allclose(two[name], x * 2.0**degree, rtol=1e-9, atol=0)
        power = degree * exponent
        found[name] = x * 2.0**power if homogeneous and abs(power) < 1020 else x * torch.nan
    return found


for exponent in (-1000, -600, -510, -300, 300, 510, 600, 1000):
    way(f"float64, scale 2^{exponent}", partial(scaled_by_degree, exponent=exponent))(
        partial(scaled, factor=2.0**exponent)
    )


@way("empty batch", None)
def empty_batch(c: Call) -> Numbers:
    p = c.problem
    if c.row.name == "aten::_pdist_forward":
        raise RuntimeError("PyTorch's kernel divides by zero there, which ends the process")
    leaves = [x.new_empty((0, *x.shape)) if isinstance(x, Tensor) and x.dim() else x for x in p.leaves]
    other = p.at(leaves)
    xs = variables(other)
    args = other.flat(*xs)
    out = [o for o in args if o.is_floating_point() or o.is_complex()]
    grads = pullback(out, xs, [torch.ones_like(o) for o in out])
    return named("output", [o.detach() for o in out]) | named("gradient", grads)


@way("sparse inputs", None)
def sparse(c: Call) -> Numbers:
    p = c.problem
    if not p.primals[0].dim():
        raise RuntimeError("no dims")
    other = p.at([x.to_sparse() if i == p.index[0] else x for i, x in enumerate(p.leaves)])
    xs = [x.detach().requires_grad_() for x in other.primals]
    out = other.call(*xs)
    grads = pullback(out, xs, [torch.ones_like(o) for o in out])
    dense = [g.to_dense() if g.layout is not torch.strided else g for g in grads]
    return named("output", [(o.to_dense() if o.layout is not torch.strided else o).detach() for o in out]) | named(
        "gradient", dense
    )
