"""Recorded vjps: played, they give what the vjp gives in Python, for other values and in every order."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from helpers.calls import needs_library
from helpers.rules import RULES, calls, dtype_of, local, played_and_in_python, random_like
from helpers.thinning import in_turn, label

import torch_manualgrad as mg
from torch_manualgrad import derivatives
from torch_manualgrad.core.libraries import calls_library, refuse_recording
from torch_manualgrad.core.override import compiled_calls

pytestmark = needs_library

aten = torch.ops.aten
WAYS = {"plain": {}, "strong": {"strong_zero": True}}


def names_in_graph(tensors):
    seen, waiting = [], [t.grad_fn for t in tensors if t is not None and t.grad_fn is not None]
    while waiting and len(seen) < 2000:
        node = waiting.pop()
        seen.append(node.name())
        waiting += [n for n, _ in node.next_functions if n is not None]
    return seen


def same(found, expected):
    """Bit for bit; nan is equal to nan."""
    if found is None or expected is None:
        return found is expected
    found, expected = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in (found, expected))
    return found.shape == expected.shape and torch.equal(found.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("rule, turn, way", in_turn(RULES, [0, 1], WAYS), ids=label)
def test_every_rule_for_other_values(rule, turn, way):
    dtype = dtype_of(rule, turn)
    for number, call in enumerate(calls(rule, dtype)):
        if number == (2 if dtype is torch.float64 else 1):
            break
        if not call.inputs:
            continue
        both = played_and_in_python(call, rule, [0.75 * x for x in call.inputs], **WAYS[way])
        if both is None:
            continue
        found, expected = both
        assert len(found) == len(expected), call
        for i, (a, b) in enumerate(zip(found, expected)):
            assert same(a, b), f"{call}: result {i} is {a}, and in Python {b}"
        assert names_in_graph(found) == names_in_graph(expected), call


def step(f, *inputs, graph=False):
    return torch.autograd.grad(f(*inputs).sum(), inputs, create_graph=graph)


def entries(f):
    """How many vjps Python runs, and how many are played, while f runs."""
    before = compiled_calls.counts().python, compiled_calls.recordings_played()
    result = f()
    return result, compiled_calls.counts().python - before[0], compiled_calls.recordings_played() - before[1]


def leaf(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


MODELS = {
    "linear": (lambda x, w, b: torch.nn.functional.linear(x, w, b), [(4, 3), (5, 3), (5,)]),
    "layer norm": (lambda x, w, b: torch.nn.functional.layer_norm(x, (3,), w, b), [(4, 3), (3,), (3,)]),
    "gelu": (torch.nn.functional.gelu, [(4, 3)]),
    "products": (lambda x, y: (x * y + x / (1 + y**2)).tanh(), [(4, 3), (3,)]),
    "softmax": (lambda x: x.softmax(-1).log(), [(4, 3)]),
    "norm": (lambda x: x.norm(dim=1), [(4, 3)]),
}


@pytest.mark.parametrize("model", MODELS)
def test_two_orders_need_no_python(model):
    f, shapes = MODELS[model]

    def twice():
        inputs = [leaf(*shape, seed=i) for i, shape in enumerate(shapes)]
        grads = step(f, *inputs, graph=True)
        return torch.autograd.grad([g for g in grads if g.requires_grad], inputs, random_like(grads), allow_unused=True)

    with mg.override("*"), compiled_calls.recording_after(1):
        expected = twice()
        for _ in range(4):  # nodes that are made in a recording are recorded in turn
            twice()
        found, python, played = entries(twice)
    assert played > 0 and python == 0
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


# -- what a recording depends on --------------------------------------------------------------------------------------


def vjp_of(rule, x, cotangent=None, graph=False):
    with mg.override(rule):
        y = torch.sin(x)
        return torch.autograd.grad(y, x, torch.ones_like(y) if cotangent is None else cotangent, create_graph=graph)[0]


def own(vjp):
    """A rule for the sine with a vjp that passes for one of the package's, whose vjps are recorded."""
    vjp.__module__ = "torch_manualgrad.derivatives"
    return local("aten::sin", vjp={"self": vjp})


def played(rule, *given):
    """The last of several gradients, and whether it was played; the gradients before are recorded."""
    with compiled_calls.recording_after(0):
        for x in given[:-1]:
            vjp_of(rule, x)
        found, python, count = entries(lambda: vjp_of(rule, given[-1]))
    return found, count == 1 and python == 0


def test_the_vjp_is_recorded_once_and_played():
    runs = []
    rule = own(lambda grad, self: (runs.append(1), grad * self.cos())[1])
    x, y = leaf(3), leaf(3, seed=1)
    found, was_played = played(rule, x, x, y)
    assert was_played and len(runs) == 1
    assert torch.equal(found, y.detach().cos())


def test_the_first_call_of_a_key_is_not_recorded():
    runs = []
    rule = own(lambda grad, self: (runs.append(1), grad * self.cos())[1])
    x = leaf(3)
    for _ in range(4):
        vjp_of(rule, x)
    assert len(runs) == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda: leaf(4),
        lambda: leaf(3, 1),
        lambda: leaf(3, dtype=torch.float32),
        lambda: leaf(6).detach()[::2].requires_grad_(),
        lambda: leaf(3, dtype=torch.complex128),
    ],
    ids=["size", "dims", "dtype", "strides", "complex"],
)
def test_what_a_formula_may_depend_on_is_in_the_key(other):
    rule = own(lambda grad, self: grad * self.cos().conj() * (1 + self.numel() + self.dim() + self.stride(0)))
    x = other()
    found, _ = played(rule, leaf(3), leaf(3), x)
    torch.testing.assert_close(found, x.detach().cos().conj() * (1 + x.numel() + x.dim() + x.stride(0)))


def test_grad_mode_is_in_the_key():
    rule = own(lambda grad, self: grad * self.cos() * (3 if torch.is_grad_enabled() else 1))
    x = leaf(3)
    with compiled_calls.recording_after(0):
        for _ in range(3):
            assert torch.equal(vjp_of(rule, x), x.detach().cos())
            assert torch.equal(vjp_of(rule, x, graph=True), 3 * x.detach().cos())


def test_one_tensor_in_two_places():
    rule = own(lambda grad, self: grad + 1 if grad is self else grad * self.cos())
    x = leaf(3)
    with compiled_calls.recording_after(0):
        for _ in range(3):
            assert torch.equal(vjp_of(rule, x), x.detach().cos())
            assert torch.equal(vjp_of(rule, x, cotangent=x), x + 1)


ELSEWHERE = torch.ones(3, dtype=torch.float64)
REFUSED = {
    "a value is read": lambda grad, self: grad * (2 if self.sum() > 0 else self.cos()),
    "a value is read by item": lambda grad, self: grad * self.cos() * float(self.detach().abs().max() > 0),
    "a tensor made of numbers": lambda grad, self: grad * self.cos() * torch.tensor([1.0, 1.0, 1.0]),
    "a tensor from elsewhere": lambda grad, self: grad * self.cos() * ELSEWHERE,
    "random numbers": lambda grad, self: grad * self.cos() + 0 * torch.rand(3),
    "a write to the cotangent": lambda grad, self: grad.mul_(1) * self.cos(),
    "a write to a view of it": lambda grad, self: (grad[:2].mul_(1), grad * self.cos())[1],
    "a result from elsewhere": lambda grad, self: ELSEWHERE,
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_formula_that_cannot_be_recorded_stays_in_python(why):
    vjp = REFUSED[why]
    rule, x, y = own(lambda grad, self: vjp(grad, self)), leaf(3), -leaf(3, seed=1)
    with compiled_calls.recording_after(-1):
        expected = vjp_of(rule, y)
    found, was_played = played(rule, x, x, y)
    refusal = calls_library.manualgrad_calls_refusal()
    assert not was_played and refusal
    assert why != "a tensor made of numbers" or b"no operator has filled" in refusal  # and not by chance in the proof
    assert torch.equal(found, expected)


def test_another_packages_vjp_is_not_recorded():
    runs = []
    rule = local("aten::sin", vjp={"self": lambda grad, self: (runs.append(1), grad * self.cos())[1]})
    _, was_played = played(rule, leaf(3), leaf(3), leaf(3))
    assert len(runs) == 3 and not was_played


def test_an_implementation_that_is_registered_later_is_called():
    op = mg.custom_op("recordings::double(Tensor x) -> Tensor")(lambda x: 2 * x)
    try:
        rule = own(lambda grad, self: op(grad) * self.cos())
        x = leaf(3)
        with compiled_calls.recording_after(0):
            for _ in range(3):
                assert torch.equal(vjp_of(rule, x), 2 * x.detach().cos())
            op.impl("cpu")(lambda x: 5 * x)
            for _ in range(3):
                assert torch.equal(vjp_of(rule, x), 5 * x.detach().cos())
    finally:
        op.undefine()


def test_detach_and_no_grad_inside_of_a_formula_are_kept():
    def vjp(grad, self):
        with torch.no_grad():
            fixed = self.exp()
        return grad * self.cos() * fixed + self.detach() * grad

    rule, x = own(vjp), leaf(3)
    with compiled_calls.recording_after(0):
        for _ in range(3):
            g = vjp_of(rule, x, graph=True)
            (second,) = torch.autograd.grad(g.sum(), x)
            torch.testing.assert_close(second, -x.detach().sin() * x.detach().exp())


def test_data_of_an_argument_is_a_constant():
    rule, x = own(lambda grad, self: grad * self.data.cos()), leaf(3)
    with compiled_calls.recording_after(0):
        for _ in range(3):
            g = vjp_of(rule, x, graph=True)
            assert torch.equal(g, x.detach().cos()) and not g.requires_grad


def test_an_autograd_function_inside_of_a_formula_is_not_played():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.cos()

        @staticmethod
        def backward(ctx, g):
            return 100 * g

    rule, x = own(lambda grad, self: grad * Twice.apply(self)), leaf(3)
    with compiled_calls.recording_after(0):
        for _ in range(3):
            (second,) = torch.autograd.grad(vjp_of(rule, x, graph=True).sum(), x)
            assert torch.equal(second, torch.full_like(x, 100))


# -- what else acts on a backward -------------------------------------------------------------------------------------


def test_modes_and_transforms_see_every_operator():
    rule, x = own(lambda grad, self: grad * self.cos()), leaf(3)

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    with compiled_calls.recording_after(0):
        for _ in range(3):
            vjp_of(rule, x)
        with Seen():
            vjp_of(rule, x)
        assert "aten::cos" in Seen.names
        with mg.override(rule):
            y = torch.sin(x)
            rows = torch.autograd.grad(y, x, torch.eye(3, dtype=x.dtype), is_grads_batched=True)[0]
        assert torch.equal(rows, torch.diag(x.detach().cos()))


def test_hooks_on_saved_tensors_and_a_second_backward():
    rule, x = own(lambda grad, self: grad * self.cos()), leaf(3)
    with compiled_calls.recording_after(0), mg.override(rule):
        for _ in range(3):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(force=True), torch.from_numpy):
                y = torch.sin(x)
            assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], x.detach().cos())
            y.sum().backward()
            with pytest.raises(RuntimeError, match="second time"):
                y.sum().backward()


def test_a_checkpoint_around_a_gradient_is_recomputed_from_the_same_tensors():
    def inner(x):
        y = x.sin()
        (g,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        return g.sin() + g.exp()

    def gradient(x):
        out = torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)
        return torch.autograd.grad((out**2).sum(), x)[0]

    for seed in range(5):
        x = leaf(4, 3, seed=seed)
        with mg.override("*"):
            with compiled_calls.recording_after(-1):
                expected = gradient(x)
            found = gradient(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_hooks_on_saved_tensors_are_called_as_often():
    def packs(x):
        count = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (count.append(1), t)[1], lambda t: t):
            (g,) = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)
            torch.autograd.grad(g.square().sum(), x, create_graph=True)
        return len(count)

    with mg.override("*"):
        with compiled_calls.recording_after(-1):
            expected = packs(leaf(3))
        assert [packs(leaf(3, seed=k)) for k in range(5)] == 5 * [expected]
        step(lambda x: x.sin().exp(), leaf(3), graph=True)
        assert packs(leaf(3)) == expected


# -- a formula that differentiates a function itself: the rules that are active then act on that -----------------------


def second_derivative():
    A = torch.eye(3, dtype=torch.float64).requires_grad_()
    (g,) = torch.autograd.grad(torch.linalg.matrix_exp(A).sum(), A, create_graph=True)
    return torch.autograd.grad(g.sum(), A)[0]


def test_another_override_is_another_key():
    factor = [1.0]
    scaled = local(
        "aten::mul.Tensor",
        vjp={"self": lambda grad, other: factor[0] * grad * other, "other": lambda grad, self: grad * self},
    )
    for rules in (("*",), ("*", scaled), ("*",)):
        for factor[0] in (1.0, 100.0):
            with mg.override(*rules):
                with compiled_calls.recording_after(-1):
                    expected = second_derivative()
                for _ in range(4):
                    torch.testing.assert_close(second_derivative(), expected, rtol=0, atol=0)


class Interrupt(BaseException):
    pass


def test_an_exception_in_the_proof_is_not_lost():
    runs = []

    @mg.custom_op("recordings::interrupted(Tensor x) -> Tensor")
    def interrupted(x):
        runs.append(1)
        if len(runs) == 2:
            raise Interrupt
        return x.clone()

    try:
        rule, x = own(lambda grad, self: interrupted(grad) * self.cos()), leaf(3)
        with compiled_calls.recording_after(0):
            with pytest.raises(Interrupt):
                vjp_of(rule, x)
            assert torch.equal(vjp_of(rule, x), x.detach().cos())
    finally:
        interrupted.undefine()


def test_nothing_is_kept_alive():
    rule, x = own(lambda grad, self: grad * self.cos().exp()), leaf(1000)
    with compiled_calls.recording_after(0):
        for _ in range(3):
            g = vjp_of(rule, x, graph=True)
            gone = weakref.ref(g)
            del g
            gc.collect()
            assert gone() is None


def test_many_sizes_and_threads():
    rule = own(lambda grad, self: grad * self.cos() * self.numel())
    wrong = []

    def run(seed):
        for n in [*range(1, 300), *range(1, 50)]:
            x = leaf(n, seed=seed)
            if not torch.equal(vjp_of(rule, x), x.detach().cos() * n):
                wrong.append(n)

    with compiled_calls.recording_after(0):
        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert not wrong


SPARSE = {
    "embedding": lambda w: torch.nn.functional.embedding(torch.tensor([1, 2, 2]), w, sparse=True),
    "embedding_bag": lambda w: torch.nn.functional.embedding_bag(torch.tensor([[1, 2, 2]]), w, sparse=True, mode="sum"),
    "gather": lambda w: w.gather(0, torch.zeros(2, 3, dtype=torch.long), sparse_grad=True),
    "to_sparse": lambda w: w.to_sparse().to_dense(),
    "mm": lambda w: torch.sparse.mm(w.detach().mT.to_sparse(), w),
    "mm of two": lambda w: torch.sparse.mm(w.to_sparse(), w.mT.to_sparse()).to_dense(),
    "sum": lambda w: torch.sparse.sum(w.to_sparse(), 0).to_dense(),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients_of_many_calls(name):
    w = torch.arange(12, dtype=torch.float64).reshape(4, 3).requires_grad_()
    (expected,) = torch.autograd.grad(SPARSE[name](w).sin().sum(), w)
    with mg.override("*"):
        for _ in range(5):
            (found,) = torch.autograd.grad(SPARSE[name](w).sin().sum(), w)
            assert found.layout is expected.layout
            torch.testing.assert_close(found.to_dense(), expected.to_dense())


def test_strong_zeros_where_a_played_gradient_is_not_finite():
    x = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    with mg.override(strong_zero=True), compiled_calls.recording_after(0):
        for point in (x, x + 1, x):  # at 0 the slope is infinite, and the cotangent 0
            point = point.detach().requires_grad_()
            (g,) = torch.autograd.grad(point.sqrt(), point, torch.tensor([0.0, 1, 1]).double(), create_graph=True)
            assert g[0] == 0 and g.isfinite().all()


def test_a_formula_can_refuse():
    def vjp(grad, self):
        refuse_recording("this is why")
        return grad * self.cos()

    _, was_played = played(own(vjp), leaf(3), leaf(3), leaf(3))
    assert not was_played and calls_library.manualgrad_calls_refusal() == b"this is why"


def test_formulas_that_read_values_without_an_operator_refuse():
    """As `item` is an operator, and ``tolist`` is none."""
    folder = Path(derivatives.__file__).parent
    reading = [p for p in folder.rglob("*.py") if re.search(r"\.(tolist|numpy|data_ptr)\(", p.read_text())]
    reading = [p for p in reading if "samples" not in p.parts]
    assert reading and all("refuse_recording(" in p.read_text() for p in reading), reading
