"""Each strategy, on the calls that derivatives make: parts that are computed alone are parts of the whole."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from helpers.sharding_cases import CASES, definite, labels, square
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad.core.internals import DispatchMode
from torch_manualgrad.core.schema import Signature
from torch_manualgrad.distributed.placements import PARTIAL, REPLICATED, Batched, Body, Lines

AT_MOST = 3  # calls of one operator


class Calls(DispatchMode):
    """The calls of operators that have a strategy."""

    def __init__(self):
        super().__init__()
        self.found = defaultdict(list)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removesuffix(".default")
        result = func(*args, **(kwargs or {}))
        if name.startswith("manualgrad::") and name in mg.distributed.strategies and len(self.found[name]) < AT_MOST:
            self.found[name].append((func, args, result))
        return result


def dense(x):
    return x.values if isinstance(x, mg.nested.Ragged) else x


def programs():
    yield lambda x, y: torch.cdist(x, y, 1.0), [random(3, 4, 2), random(3, 5, 2, seed=1)]
    for lengths, x in ((torch.tensor([[1, 3], [2, 2], [0, 4]]), random(3, 4)), (torch.tensor([1, 2]), random(3, 4))):
        yield lambda x, n=lengths: torch.segment_reduce(x, "mean", lengths=n, axis=n.ndim - 1), [x]
    for reduction in ("none", "sum"):
        yield lambda x, y, r=reduction: F.multi_margin_loss(x, y, 2, reduction=r), [random(5, 3), labels(5)]
        yield lambda x, y, r=reduction: F.multilabel_margin_loss(x, y, reduction=r), [random(5, 3), labels(5, 3)]
    for case in CASES.values():
        yield case.function, [make(3)[0] for make in case.inputs]
    A, S = square(3, 3, 3), definite(3, 3, 3)
    yield mg.linalg.expm, [A]
    yield lambda S: mg.linalg.sqrtm(S, assume="hermitian"), [S]
    yield lambda A: mg.linalg.polar(A).U, [A]
    yield mg.linalg.solve_sylvester, [S, S, A]
    yield mg.linalg.solve_lyapunov, [S, A]
    yield mg.linalg.solve_discrete_lyapunov, [S / 20, A]
    yield mg.linalg.expm_multiply, [A, S[..., :1]]
    yield lambda A, S: mg.linalg.eigh_generalized(A, S).eigenvalues, [A, S]
    yield lambda A: mg.linalg.schur(A, order="modulus").T.abs(), [A]
    yield mg.linalg.nuclear_norm, [A]
    yield mg.linalg.spectral_norm, [A]
    words = [random(n, 4, seed=n) for n in (2, 5)]
    for function in (
        lambda x: mg.nested.softmax(x, 1),
        lambda x: mg.nested.log_softmax(x, 1),
        lambda x: mg.nested.sum(x, 1),
        lambda x: mg.nested.layer_norm(x, (4,)),
        lambda x: mg.nested.rms_norm(x, (4,)),
        mg.nested.silu,
    ):
        yield lambda x, y, f=function: dense(f(mg.nested.Ragged.from_components([x, y]))), words


def recorded():
    with mg.override("*"), Calls() as calls:
        for function, inputs in programs():
            xs = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
            y = function(*xs)
            wanted = [x for x in xs if x.requires_grad]
            first = torch.autograd.grad(y, wanted, torch.ones_like(y), create_graph=True, allow_unused=True)
            again = [g for g in first if g is not None and g.requires_grad]
            if again:
                torch.autograd.grad(again, wanted, [torch.ones_like(g) for g in again], allow_unused=True)
            with forward_ad.dual_level():
                function(*[forward_ad.make_dual(x.detach(), torch.ones_like(x)) if x.requires_grad else x for x in xs])
    return dict(calls.found)


@pytest.fixture(scope="module")
def calls():
    return recorded()


def part(x, placement, rank, ranks):
    if placement in (REPLICATED, PARTIAL):
        return x
    parts = x.chunk(ranks, placement)
    return parts[rank] if rank < len(parts) else x.narrow(placement, 0, 0)


def whole(parts, placement):
    if placement == PARTIAL:
        return sum(parts)
    return parts[0] if placement == REPLICATED else torch.cat(parts, placement)


def disagreements(strategy, op, args, expected, ranks=2):
    """The placements under which the ranks together do not find what one finds, and how many placements there are."""
    signature = Signature(op._schema)
    values = signature.bind(args, {})
    tensors = {n: values[signature.names.index(n)] for n in signature.tensor_names}
    constants = {n: v for n, v in zip(signature.names, values) if n not in tensors}
    placed = list(strategy(tensors, constants))
    wrong = []
    for outputs, inputs in placed:
        given = iter(inputs)
        places = [next(given) if i in signature.tensor_like and v is not None else None for i, v in enumerate(values)]
        by_rank = []
        for rank in range(ranks):
            own = [v if p is None else part(v, p, rank, ranks) for v, p in zip(values, places)]
            by_rank.append(signature.outputs(op(*own)))
        found = [whole(parts, p) for parts, p in zip(zip(*by_rank), outputs)]
        if not all(
            f.shape == e.shape and torch.allclose(f, e, rtol=1e-9, atol=1e-12, equal_nan=True)
            for f, e in zip(found, signature.outputs(expected))
        ):
            wrong.append((outputs, inputs))
    return wrong, len(placed)


OURS = [n for n, s in mg.distributed.strategies.items() if n.startswith("manualgrad::") and not isinstance(s, Body)]


@pytest.mark.parametrize("name", OURS)
def test_parts_are_parts_of_the_whole(calls, name):
    for op, args, expected in calls.get(name, ()):
        wrong, _ = disagreements(mg.distributed.strategies[name], op, args, expected)
        assert not wrong


def test_most_strategies_are_met(calls):
    placeable = {
        name
        for name, found in calls.items()
        if name in OURS and any(disagreements(mg.distributed.strategies[name], *call)[1] for call in found)
    }
    assert len(placeable) >= 25, sorted(set(OURS) - placeable)


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("cdist_backward", 2),  # the batch and the coordinates
        ("pdist_backward", 1),
        ("multi_margin_loss_gradient", 1),
        ("multilabel_margin_loss_gradient", 1),
        ("segment_reduce_backward", 1),
    ],
)
def test_a_strategy_has_its_placements_tried(calls, name, ways):
    name = f"manualgrad::{name}"
    assert max(disagreements(mg.distributed.strategies[name], *call)[1] for call in calls[name]) == ways


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("native_layer_norm_backward", Batched("n, n, n, n, n, n -> n, n, n", shared=("weight", "bias"))),  # not summed
        ("norm_backward", Lines("self", "p", within=True)),
        ("cumprod_backward.python", Lines("input", "dim", within=True)),  # along a line
        ("linalg_matrix_exp_differential", Batched("n, n -> n")),  # into a matrix
        ("segment_reduce_backward", Batched(", , , -> ")),  # along segments
    ],
)
def test_a_wrong_strategy_is_found(calls, name, fault):
    found = calls[f"manualgrad::{name}"]

    def is_found(op, args, expected):
        try:
            return bool(disagreements(fault, op, args, expected)[0])
        except (RuntimeError, IndexError, TypeError, ValueError):
            return True

    assert any(is_found(*call) for call in found)
