"""Ways to differentiate with transforms of torch.func, for tests that compare them."""

from __future__ import annotations

import warnings

import torch
from torch.func import grad, jacrev, jvp, vjp, vmap

from helpers.rules import random_like
from torch_manualgrad.testing.comparison.problem import seed_generators


def number_of(call):
    """A real number made of all outputs, whose first and second derivatives depend on each entry."""

    def f(*inputs):
        total = 0
        for k, y in enumerate(call(*inputs)):
            y = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y
            weights = torch.linspace(0.5, 1.5, max(y.numel(), 1), dtype=torch.float64, device=y.device)[
                : y.numel()
            ].reshape(y.shape)
            total = total + (y * (weights + k) + (y * weights).sin()).sum()
        return total

    return f


def places(inputs):
    return tuple(range(len(inputs)))


def pulled_back(f, inputs):
    """By the level of a vjp that has ended."""
    y, pull = vjp(f, *inputs)
    return [*pull(y), *pull(2 * y)]  # the graph is kept


def of_gradient(f, inputs):
    return lambda *xs: sum((g * g.conj()).real.sum() for g in grad(f, places(inputs))(*xs))


def twice(f, inputs):
    return grad(of_gradient(f, inputs), places(inputs))(*inputs)


def batched(f, inputs):
    return vmap(grad(f, places(inputs)))(*[torch.stack([x, x * 0.875]) for x in inputs])


def rows(f, inputs):
    """Batched cotangents, for the level of a vjp that has ended; of one input, as outer levels track the others."""
    return [
        jacrev(lambda x, k=k: torch.stack([f(*inputs[:k], x, *inputs[k + 1 :])] * 2))(inputs[k]) for k in places(inputs)
    ]


def rows_of_gradient(f, inputs):
    return [
        jacrev(lambda x, k=k: grad(f, k)(*inputs[:k], x, *inputs[k + 1 :]).flatten()[:2])(inputs[k])
        for k in places(inputs)
        if not inputs[k].is_complex()
    ]


def forward_over_reverse(f, inputs):
    return jvp(grad(f, places(inputs)), tuple(inputs), tuple(random_like(inputs)))


def reverse_over_forward(f, inputs):
    tangents = tuple(random_like(inputs))
    return grad(lambda *xs: jvp(f, xs, tangents)[1], places(inputs))(*inputs)


def reverse_over_batches(f, inputs):
    return grad(lambda *xs: vmap(f)(*[torch.stack([x, x]) for x in xs]).sum(), places(inputs))(*inputs)


def outside_autograd(f, inputs):
    """The levels end inside of PyTorch's own autograd."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    total = of_gradient(f, inputs)(*leaves)
    if not total.requires_grad:
        return [total]
    return [g for g in torch.autograd.grad(total, leaves, allow_unused=True) if g is not None]


WAYS = {
    "grad": lambda f, inputs: grad(f, places(inputs))(*inputs),
    "vjp": pulled_back,
    "grad of grad": twice,
    "vmap of grad": batched,
    "jacrev": rows,
    "jacrev of grad": rows_of_gradient,
    "jvp of grad": forward_over_reverse,
    "grad of jvp": reverse_over_forward,
    "grad of vmap": reverse_over_batches,
    "autograd of grad": outside_autograd,
}


def found_by(way, f, inputs):
    """Tensors, or the kind of error."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed_generators(0)
        try:
            return [x for x in torch.utils._pytree.tree_leaves(WAYS[way](f, inputs)) if x is not None]
        except (
            RuntimeError,
            NotImplementedError,
            ValueError,
            SystemError,
        ) as error:  # the last: batches of sparse ones
            return type(error)
