"""Rules acting on aten's operators: what override takes, and for how long they act."""

import asyncio
import contextlib
import inspect
import itertools
import threading

import pytest
import torch
from helpers.calls import is_pytorchs
from helpers.sine import DOUBLE, TRIPLE, factor
from helpers.tensors import random, same
from helpers.transforms import NESTINGS
from torch.func import vmap

import torch_manualgrad as mg

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
    assert is_pytorchs(torch.dist(random(3).requires_grad_(), random(3, seed=1)).grad_fn)


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
def test_an_object_without_a_body_cannot_be_decorated(what):
    with pytest.raises(TypeError, match="a function is decorated, got .*3|decorate the methods, such as __init__"):
        mg.override(DOUBLE)(what)


def test_active_lists_rules_and_their_source():
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
def test_after_the_block_stock_is_back_while_other_threads_run(another_thread, transforms):
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
    assert is_pytorchs(torch.sin(x.requires_grad_()).grad_fn)
