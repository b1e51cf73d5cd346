"""Rules acting on aten's operators: where they act, for how long, and that nothing else changes."""

import asyncio
import contextlib
import gc
import inspect
import itertools
import threading
import weakref

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from ops_for_tests import random, same
from torch._subclasses import FakeTensorMode
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import torch_manualgrad as mg
from torch_manualgrad.core.names import _choose

NESTINGS = [c for k in (1, 2, 3) for c in itertools.product((jacrev, jacfwd), repeat=k)]


def sine_times(factor, **about):
    """A rule for sin that is wrong by a factor, by which it is told."""
    return mg.rule("aten::sin", vjp={"self": lambda grad, self: factor * grad * self.cos()}, register=False, **about)


DOUBLE, TRIPLE = sine_times(2), sine_times(3)


def factor(f=torch.sin):
    """The factor in front of the gradient of sin that is active."""
    x = random(3).requires_grad_()
    ratio = torch.autograd.grad(f(x).sum(), x)[0] / x.detach().cos()
    same(ratio, ratio[0].expand_as(ratio))
    return round(ratio[0].item(), 6)


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert factor() == 1
    assert torch.linalg.vector_norm(random(3).requires_grad_()).grad_fn.name() == "LinalgVectorNormBackward0"


# -- what it takes ---------------------------------------------------------------------------------------------------

NORMS = [
    "aten::norm.Scalar",
    "aten::norm.ScalarOpt_dim",
    "aten::norm.ScalarOpt_dtype",
    "aten::norm.ScalarOpt_dim_dtype",
]


@pytest.mark.parametrize(
    "names, chosen",
    [
        (["aten::dist"], ["aten::dist"]),
        (["dist"], ["aten::dist"]),
        (["dist.default"], ["aten::dist"]),
        (["aten::norm"], NORMS),
        (["aten::norm.Scalar"], NORMS[:1]),
        ([torch.ops.aten.dist.default], ["aten::dist"]),
        ([torch.ops.aten.norm.ScalarOpt_dim], NORMS[1:2]),
        ([torch.ops.aten.norm], NORMS),
        ([DOUBLE, "dist", "dist"], ["aten::sin", "aten::dist"]),
    ],
)
def test_names(names, chosen):
    handle = mg.install(*names)
    assert [r.name for r in handle.rules] == chosen
    handle.remove()
    assert handle.rules == ()


def test_default_and_all():
    with mg.override() as handle:
        assert {r.name for r in handle.rules} == {n for n, r in mg.rules.items() if r.improves}
    with mg.override("*") as handle:
        assert {r.name for r in handle.rules} == set(mg.rules)


@pytest.mark.parametrize(
    "what, error, message",
    [
        ("linalg_vectornorm", KeyError, "there is no rule 'aten::linalg_vectornorm'; did you mean 'aten::linalg_vector_norm'"),
        ("aten::norm.Scaler", KeyError, "did you mean 'aten::norm.Scalar'"),
        ("zzzz", KeyError, "there is no rule 'aten::zzzz'"),
        (torch.ops.aten.argmax.default, KeyError, "no rule acts on aten::argmax"),
        (3, TypeError, "override takes names, functions of torch, operators of torch.ops and rules, got 3"),
    ],
)  # fmt: skip
def test_wrong_names(what, error, message):
    for make in (mg.override, mg.install):
        with pytest.raises(error, match=message):
            make("dist", what)
    assert torch.dist(random(3).requires_grad_(), random(3, seed=1)).grad_fn.name() == "DistBackward0"


# -- for how long ----------------------------------------------------------------------------------------------------


def test_nested_and_after_an_exception():
    with mg.override(DOUBLE):
        assert factor() == 2
        with contextlib.suppress(ZeroDivisionError), mg.override(TRIPLE):
            assert factor() == 3
            1 / 0  # noqa: B018
        assert factor() == 2


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_removed_in_any_order(order):
    """The one installed last, of those that remain, is active."""
    handles = [mg.install(rule) for rule in (DOUBLE, TRIPLE, DOUBLE)]
    for k, i in enumerate(order):
        handles[i].remove()
        left = [f for j, f in enumerate((2, 3, 2)) if j not in order[: k + 1]]
        assert factor() == (left[-1] if left else 1)
    handles[0].remove()  # twice does nothing


def test_one_override_object_entered_again():
    block = mg.override(DOUBLE)
    with block:
        with block, mg.override(TRIPLE):
            assert factor() == 3
        assert factor() == 2
    assert factor() == 1
    with block:
        assert factor() == 2


def test_decorator():
    @mg.override(DOUBLE)
    def inside(depth=2):
        """Documented."""
        return factor() if depth == 0 else inside(depth - 1)

    assert inside() == 2 and inside.__doc__ == "Documented."
    assert factor() == 1


def test_a_decorated_generator_is_under_the_rules_while_its_body_runs():
    @mg.override(DOUBLE)
    def steps(n):
        """Documented."""
        got = 0
        for _ in range(n):
            try:
                got = yield factor() + got
            except KeyError:
                yield 10 * factor()
        return factor()

    running = steps(2)
    assert steps.__doc__ == "Documented." and inspect.isgenerator(running) is inspect.isgeneratorfunction(steps)
    assert next(running) == 2 and factor() == 1
    assert running.send(100) == 102 and factor() == 1
    assert running.throw(KeyError()) == 20 and factor() == 1
    with pytest.raises(StopIteration) as end:
        next(running)
    assert end.value.value == 2 and factor() == 1
    seen = []

    @mg.override(DOUBLE)
    def closed():
        try:
            yield
        finally:
            seen.append(factor())

    running = closed()
    next(running)
    running.close()
    assert seen == [2] and factor() == 1

    @mg.override(DOUBLE)
    def fails():
        yield
        1 / 0  # noqa: B018

    with pytest.raises(ZeroDivisionError):
        list(fails())
    assert factor() == 1


def test_decorated_coroutines_are_under_the_rules_while_their_bodies_run():
    seen = []

    async def other():
        for _ in range(3):
            seen.append(factor())
            await asyncio.sleep(0)

    @mg.override(DOUBLE)
    async def inside():
        found = [factor()]
        for _ in range(3):
            await asyncio.sleep(0)
            found.append(factor())
        return found

    @mg.override(TRIPLE)
    async def several():
        try:
            for _ in range(3):
                await asyncio.sleep(0)
                got = yield factor()
                seen.append(got)
        finally:
            await asyncio.sleep(0)
            seen.append(("closed", factor()))

    async def reads():
        found = []
        async for value in (running := several()):
            found += [value, factor()]
            if len(found) == 4:
                break
        await running.aclose()
        running = several()
        found += [await running.__anext__(), await running.asend("sent")]
        with pytest.raises(KeyError):
            await running.athrow(KeyError())
        return found

    async def together():
        return await asyncio.gather(inside(), other())

    assert asyncio.run(together()) == [[2, 2, 2, 2], None] and seen == [1, 1, 1]
    seen.clear()
    assert asyncio.run(reads()) == [3, 1, 3, 1, 3, 3]
    assert seen == [None, ("closed", 3), "sent", ("closed", 3)] and factor() == 1
    assert inspect.iscoroutinefunction(inside) and inspect.isasyncgenfunction(several)


@pytest.mark.parametrize("what", [torch.nn.Linear, 3])
def test_what_has_no_body_is_not_decorated(what):
    with pytest.raises(TypeError, match="a function is decorated, got .*3|decorate the methods, such as __init__"):
        mg.override(DOUBLE)(what)


def test_what_acts_now_and_why():
    assert mg.active() == []
    with mg.override("dist", "nested"):
        named = mg.active()
        with mg.override():
            improving = {a.name: a for a in mg.active()}
        assert mg.active() == named
        with mg.override("*", DOUBLE, forward=True):
            everything = {a.name: a for a in mg.active()}
    assert [(a.name, a.why, a.forward) for a in named] == [("aten::dist", "named", False), ("nested", "named", False)]
    assert repr(named[0]) == "Active(name='aten::dist', why='named', forward=False)"
    assert improving["aten::dist"].why == "improves values, speed" and improving.keys() <= everything.keys()
    assert improving["nested"].why.startswith("improves") and improving["aten::dist"].acting is mg.rules["aten::dist"]
    assert {a.why for a in everything.values()} == {"*"} and everything["aten::sin"].acting is DOUBLE
    assert {n for n, a in everything.items() if a.forward} == {n for n, r in mg.rules.items() if r.forward}
    assert mg.active() == []


def test_generator():
    def steps():
        with mg.override(DOUBLE):
            yield factor()
            yield factor()

    running = steps()
    assert next(running) == 2 and factor() == 2  # the whole process, as long as the block is open
    running.close()
    assert factor() == 1


def test_a_graph_keeps_its_rule():
    x = random(3).requires_grad_()
    with mg.override(DOUBLE):
        under = torch.sin(x)
    stock = torch.sin(x)
    with mg.override(TRIPLE):
        same(torch.autograd.grad(under.sum(), x)[0], 2 * x.detach().cos())
        same(torch.autograd.grad(stock.sum(), x)[0], x.detach().cos())


def test_other_threads_follow():
    seen = []
    with mg.override(DOUBLE):
        thread = threading.Thread(target=lambda: seen.append(factor()))
        thread.start()
        thread.join()
    assert seen == [2]


def test_gradients_in_threads_while_another_enters_and_leaves():
    stop, seen, failures = threading.Event(), set(), []

    def work():
        while not stop.is_set():
            try:
                seen.add(factor())
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for _ in range(100):
        with mg.override(DOUBLE), mg.override("norm"):
            pass
    stop.set()
    for t in threads:
        t.join()
    assert not failures and seen and seen <= {1.0, 2.0}


@pytest.fixture
def another_thread():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.mark.parametrize("transforms", NESTINGS[:6], ids=lambda c: "-".join(t.__name__ for t in c))
def test_after_the_block_it_is_stocks_also_while_other_threads_run(another_thread, transforms):
    """A registration cannot be taken away while a thread may be inside it; it then passes everything on."""

    def run(x):
        f = lambda x: (torch.sin(x) * 2.5 * torch.cat([x, x])[:2]).square().sum()  # noqa: E731
        for t in transforms:
            f = t(f)
        return f(x)

    wrong = [
        mg.rule("aten::mul.Tensor", vjp={"self": lambda grad, other: grad * other * 2}, register=False),
        mg.rule("aten::cat", vjp={"tensors": lambda grad, tensors: [0 * t for t in tensors]}, register=False),
    ]
    x = random(2)
    stock = run(x)
    with mg.override(DOUBLE, *wrong[1:]):
        pass
    same(run(x), stock)
    same(vmap(run)(torch.stack([x, x]))[0], stock)
    with mg.override(*wrong):
        pass
    y = x.clone().requires_grad_()
    same(torch.autograd.grad((y * 2.5).sum(), y)[0], torch.full((2,), 2.5).double())
    assert factor() == 1
    with mg.override(DOUBLE):
        assert factor() == 2
    assert torch.sin(x.requires_grad_()).grad_fn.name() == "SinBackward0"


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


# -- where it acts ---------------------------------------------------------------------------------------------------


def threefold(name):
    ((key, formula),) = mg.rules[name].vjp.items()
    body = getattr(formula, "reference", formula)

    def scaled(*args):
        found = body(*args)
        return 3 * found if isinstance(found, torch.Tensor) else [None if g is None else 3 * g for g in found]

    scaled.__signature__ = inspect.signature(body)
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


# -- a rule with a forward of its own --------------------------------------------------------------------------------


def test_forward_is_used_when_asked_for():
    rule = sine_times(2, forward=lambda x: 100 * x)
    x = random(3)
    with mg.override(rule):
        assert torch.sin(x).equal(x.sin())
    with mg.override(rule, forward=True):
        same((torch.sin(x), vmap(torch.sin)(x)), (100 * x,) * 2)
        same(torch.sin(x.clone().requires_grad_()).detach(), 100 * x)
        same(jvp(torch.sin, (x,), (x,)), (100 * x, 2 * x * x.cos()))
        assert factor() == 2
    handle = mg.install(rule, forward=True)
    same(torch.sin(x), 100 * x)
    handle.remove()


def test_calls_that_a_rule_leaves_to_pytorch(monkeypatch):
    monkeypatch.setattr(
        "torch_manualgrad.core.internals.functorch._tangents_in_graphs", False
    )  # of graphs in other tests
    asked = []
    left = sine_times(2, defer_to_stock=lambda x: asked.append(x) or len(x) < 4, improves="speed")
    monkeypatch.setattr("torch_manualgrad.core.names.rules", {left.name: left})
    monkeypatch.setattr("torch_manualgrad.core.names._remembered", _choose)  # of another registry
    x = random(3).requires_grad_()
    with mg.override():
        assert torch.sin(x).grad_fn.name() == "SinBackward0"
        assert factor(lambda x: torch.cat([x, x]).sin()[:3]) == 2
        seen, x = len(asked), x.detach()
        same(grad(lambda x: x.sin().sum())(x), 2 * x.cos())
        same(jvp(torch.sin, (x,), (x,))[1], 2 * x * x.cos())
        with fwAD.dual_level():
            same(fwAD.unpack_dual(torch.sin(fwAD.make_dual(x, x))).tangent, 2 * x * x.cos())
        assert len(asked) == seen, "where forward derivatives may follow it is not asked"
        with mg.override(left):
            assert factor() == 2
        assert factor() == 1
    with mg.override("*"):
        assert factor() == 2
    with mg.override(left):
        assert factor() == 2


def test_a_forward_is_for_dense_tensors():
    x = random(3)
    stock = x.sin()
    with mg.override(sine_times(2, forward=lambda x: 100 * x), forward=True):
        same(torch.sin(x.to_sparse()).to_dense(), stock)


def test_what_could_not_be_put_in_force_leaves_nothing_behind(monkeypatch):
    from torch_manualgrad.core import override

    first, second = sine_times(2), mg.rule("aten::atanh", vjp={"self": lambda grad: grad}, register=False)
    operator = override._Operator

    def fail(rule):
        if rule is second:
            raise MemoryError
        return operator(rule)

    monkeypatch.setattr(override, "_Operator", fail)
    monkeypatch.delitem(override._operators, second.name, raising=False)  # as if no rule had acted on it yet
    with pytest.raises(MemoryError):
        mg.install(first, second)
    assert factor() == 1


def test_a_forward_may_call_the_operator_it_replaces():
    rule = sine_times(2, forward=lambda x: 100 * torch.sin(x))
    stock = torch.sin(random(3))
    with mg.override(rule, forward=True):
        same(torch.sin(random(3)), 100 * stock)
        same(torch.sin(random(3).requires_grad_()).detach(), 100 * stock)
        same(vmap(torch.sin)(random(3)), 100 * stock)
        same(jvp(torch.sin, (random(3),), (random(3),))[0], 100 * stock)


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
