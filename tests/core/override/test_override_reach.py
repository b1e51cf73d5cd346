"""Rules acting on aten's operators: where they act, with everything else, and that nothing else changes."""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers.sine import DOUBLE, factor
from helpers.tensors import random, same
from helpers.transforms import NESTINGS
from torch._subclasses import FakeTensorMode
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import torch_manualgrad as mg
from torch_manualgrad.core.rule import bound_to, parameters

# -- where it acts ---------------------------------------------------------------------------------------------------


def threefold(name):
    ((key, formula),) = mg.rules[name].vjp.items()
    body = getattr(formula, "reference", formula)

    def scaled(*args):
        found = body(*args)
        return 3 * found if isinstance(found, torch.Tensor) else [None if g is None else 3 * g for g in found]

    bound_to(scaled, parameters(formula))
    return mg.rule(name, vjp={key: scaled}, register=False)


@pytest.mark.parametrize(
    "name, caller",
    [
        ("aten::linalg_vector_norm", lambda x: torch.norm(x)),
        ("aten::linalg_vector_norm", lambda x: torch.linalg.norm(x)),
        ("aten::linalg_vector_norm", lambda x: torch.linalg.matrix_norm(x)),
        ("aten::dist", lambda x: torch.dist(x, x.detach() + 1)),
        ("aten::_cdist_forward", lambda x: torch.cdist(x, x.detach() + 1, p=3.0)),
        ("aten::_euclidean_dist", lambda x: torch.cdist(x, x.detach() + 1, compute_mode="use_mm_for_euclid_dist")),
        ("aten::_pdist_forward", lambda x: torch.nn.functional.pdist(x)),
        ("aten::renorm", lambda x: torch.renorm(x, 2, 0, 0.1)),
    ],
)
def test_composite_callers_are_reached(name, caller):
    x, rule = random(3, 4), threefold(name)

    def gradient():
        return grad(lambda x: caller(x).pow(2).sum())(x)

    stock = gradient()
    with mg.override(rule):
        under = gradient()
    same(under, 3 * stock, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128])
def test_forward_values_are_stocks_to_the_bit(dtype):
    x = random(4, 5).to(dtype)
    calls = [
        lambda x: torch.linalg.vector_norm(x, 3.0, 1),
        lambda x: torch.norm(x, 2, 0),
        lambda x: torch.dist(x, 2 * x, 3),
        lambda x: torch.renorm(x, 2, 0, 1.0),
    ]
    if dtype in (torch.float64, torch.float32):
        calls += [lambda x: torch.cdist(x, 2 * x, 1.5), lambda x: torch.nn.functional.pdist(x, 3.0)]
    for call in calls:
        stock = call(x)
        with mg.override("*"):
            assert call(x).equal(stock)
            assert call(x.clone().requires_grad_()).equal(stock)
            with torch.inference_mode():
                assert call(x).equal(stock)
            assert vmap(call)(x[None])[0].equal(stock)
            if dtype is not torch.bfloat16:
                assert jvp(call, (x,), (x,))[0].equal(stock)


def test_no_graph_where_none_is_wanted():
    x = random(3).requires_grad_()
    with mg.override("*", DOUBLE):
        with torch.no_grad():
            assert not torch.sin(x).requires_grad and not torch.norm(x).requires_grad
        with torch.inference_mode():
            assert torch.sin(x).is_inference()
        assert not torch.sin(x.detach()).requires_grad
        assert torch.sin(x).requires_grad


def product(grad, self, other):
    return (grad * other.conj()).sum_to_size(self.shape)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float32, torch.complex64])
@pytest.mark.parametrize("shape", [(3,), ()])
def test_numbers_promote_as_in_stock(dtype, shape):
    """Also after the block, and under torch.func, where a number among tensors cannot come to a Python kernel."""
    vjp = {"self": product, "other": lambda grad, self, other: product(grad, other, self)}
    rule = mg.rule("aten::mul.Tensor", vjp=vjp, register=False)
    x = (3 * random(*shape)).to(dtype)

    numbers = [True, 3, 0.1, 0.1j]
    try:
        x * 0.1j
    except NotImplementedError:  # complex bfloat16, which torch 2.15 has and does not multiply
        numbers.pop()

    def run():
        found = [x * n for n in numbers] + [vmap(lambda x, n=n: x * n)(x[None]) for n in numbers[1:]]
        if dtype is torch.float32:
            found += [grad(lambda x: (x * 0.1).sum())(x), jacfwd(jacrev(lambda x: (x * x * 0.1).sum()))(x)]
        return found

    stock = run()
    with mg.override(rule):
        found = run()
    for one, other, after in zip(found, stock, run()):
        assert one.dtype == other.dtype == after.dtype and one.equal(other) and after.equal(other)


# -- with everything else --------------------------------------------------------------------------------------------

SINE = mg.rule("aten::sin", vjp={"self": lambda grad, self: grad * self.cos()}, register=False)
COSINE = mg.rule("aten::cos", vjp={"self": lambda grad, self: -grad * self.sin()}, register=False)
EXP = mg.rule(
    "aten::exp",
    vjp={"self": lambda grad, result: grad * result},
    jvp={"result": lambda self_t, self_p: self_t * self_p.exp()},
    register=False,
)
PROOF = ("*", SINE, COSINE, EXP)


def smooth(x):
    n = torch.linalg.vector_norm(x, 3.0) + torch.norm(x) * torch.dist(x, 2 * x.sin(), 3.0)
    return n.sin() * x.exp().sum() + (x.cos() * x).sum()


@pytest.mark.parametrize("transforms", NESTINGS, ids=lambda c: "-".join(t.__name__ for t in c))
def test_every_nesting_of_transforms(transforms):
    def run(f, x):
        for t in transforms:
            f = t(f)
        return f(x)

    def plain(x):
        def norm(v, p):
            return v.abs().pow(p).sum().pow(1 / p)

        n = norm(x, 3.0) + norm(x, 2.0) * norm(x - 2 * x.sin(), 3.0)
        return n.sin() * x.exp().sum() + (x.cos() * x).sum()

    x = random(2)
    with mg.override(*PROOF):
        found = run(smooth, x)
    same(found, run(plain, x))


def test_vmap_inside_and_outside():
    rows = random(3, 4)
    ways = [
        lambda: vmap(smooth)(rows),
        lambda: vmap(grad(smooth))(rows),
        lambda: grad(lambda rows: vmap(smooth)(rows).sum())(rows),
        lambda: vmap(hessian(smooth))(rows),
        lambda: vmap(lambda x: jvp(smooth, (x,), (x,))[1])(rows),
        lambda: vmap(vmap(grad(smooth)), in_dims=1)(torch.stack([rows, rows])),
    ]
    for way in ways:
        stock = way()
        with mg.override(*PROOF):
            same(way(), stock)


def test_dual_numbers_and_gradcheck():
    x, t = random(4), random(4, seed=1)
    stock = jvp(smooth, (x,), (t,))[1]
    with mg.override(*PROOF):
        with fwAD.dual_level():
            same(fwAD.unpack_dual(smooth(fwAD.make_dual(x, t))).tangent, stock)
        x.requires_grad_()
        torch.autograd.gradcheck(smooth, x, check_forward_ad=True, check_batched_grad=True)
        torch.autograd.gradgradcheck(smooth, x, check_fwd_over_rev=True)


def sparse(layout):
    return lambda: torch.eye(3).to_sparse(layout=layout).requires_grad_()


def nested(layout):
    return lambda: torch.nested.nested_tensor([torch.ones(2, 3), -torch.ones(4, 3)], layout=layout, requires_grad=True)


@pytest.mark.parametrize(
    "make",
    [sparse(torch.sparse_coo), sparse(torch.sparse_csr), nested(torch.strided), nested(torch.jagged)],
    ids=["coo", "csr", "strided nested", "jagged"],
)
@pytest.mark.parametrize("context", [contextlib.nullcontext, fwAD.dual_level])
@pytest.mark.filterwarnings("ignore")
def test_under_rules_tensors_that_are_not_dense_behave_as_stock(make, context):
    """Their formulas are for dense tensors: elsewhere values, gradients and errors are PyTorch's."""
    wrong = (
        mg.rule("aten::abs", vjp={"self": lambda grad: 7 * grad}, register=False),
        mg.rule("aten::cat", vjp={"tensors": lambda grad, tensors: [7 * grad for _ in tensors]}, register=False),
        mg.rule("aten::mul.Tensor", vjp={"self": lambda grad: grad / 7}, register=False),
    )

    def dense(x):
        return [v.to_dense() if v.layout is not torch.strided else v for v in (x.unbind() if x.is_nested else [x])]

    def outcome(f):
        try:
            x = make()
            y = f(x)
            g = torch.autograd.grad(y, x, torch.ones_like(y))[0] if y.requires_grad else y
            return [v.detach() for v in dense(y) + dense(g)]
        except (RuntimeError, NotImplementedError, ValueError) as error:
            return str(error)

    worked = 0
    for f in (
        torch.abs,
        torch.norm,
        lambda x: torch.linalg.vector_norm(x, 2.0, -1),
        lambda x: torch.cat([x, x]),
        lambda x: x * 2.5,
        lambda x: x.detach().abs(),
        lambda x: x.detach() * 2.5,
    ):
        stock = outcome(f)
        with mg.override(*mg.rules.values(), *wrong), context():
            under = outcome(f)
        worked += type(stock) is list
        assert type(under) is type(stock), under
        same(under, stock) if type(stock) is list else None
    assert worked >= 2


@pytest.mark.parametrize("where", ["meta", "fake"])
def test_tensors_without_data(where):
    with mg.override("*", DOUBLE), FakeTensorMode() if where == "fake" else contextlib.nullcontext():
        x = torch.ones(3, 4, device="cpu" if where == "fake" else "meta", requires_grad=True)
        for f in (torch.sin, torch.norm, lambda x: torch.cdist(x, x + 1), lambda x: torch.linalg.vector_norm(x, 3, 1)):
            assert torch.autograd.grad(f(x).sum(), x)[0].shape == (3, 4)


def test_mixed_with_a_custom_op_and_autocast():
    with mg.override(DOUBLE), torch.autocast("cpu", torch.bfloat16):
        assert factor() == 2


@pytest.mark.parametrize(
    "call", [torch.linalg.vector_norm, lambda x: torch.norm(x, 3, 0), lambda x: torch.dist(x, 2 * x)]
)
def test_saved_tensors_are_autograds_own(call):
    """Nothing keeps a graph alive, and a change in place of what was saved is caught: on the short way as on the long."""
    gc.collect()
    gc.disable()
    try:
        with mg.override("*"):
            x = random(4).requires_grad_() * 1
            y = call(x)
            probe = y.grad_fn.metadata["probe"] = random(
                1
            )  # nodes of C++ take no weak reference; this lives as they do
            left = [weakref.ref(t) for t in (x, y, probe)]
            del x, y, probe
            assert [r() for r in left] == [None] * 3
            x = random(4).requires_grad_() * 1
            y = call(x)
            x.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward()
    finally:
        gc.enable()
