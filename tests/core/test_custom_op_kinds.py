"""Custom ops with results that may be None, schemas from annotations, and conditions on devices and determinism."""

import warnings
from collections.abc import Sequence

import pytest
import torch
from helpers.ops import define
from helpers.tensors import random, same
from helpers.transforms import NESTINGS, name_of, nested
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.func import grad, jvp, vmap

import torch_manualgrad as mg

# -- results that may be None -----------------------------------------------------------------------------------------


def powers(x, y=None):
    return x * x, None if y is None else y**3


def powers_backward(ctx, saved, grad_square, grad_cube):
    x, y = saved
    return {
        "x": None if grad_square is None else 2 * grad_square * x,
        "y": None if grad_cube is None else 3 * grad_cube * y**2,
    }


def powers_jvp(inputs, output, tangents):
    x, y = inputs
    cube = None if y is None or tangents.y is None else 3 * y**2 * tangents.y
    return None if tangents.x is None else 2 * x * tangents.x, cube


SCHEMA = "(Tensor x, Tensor? y=None) -> (Tensor square, Tensor? cube)"
PAIR = {"save_for_backward": lambda inputs, output: tuple(inputs), "backward": powers_backward}
OPS = {"jvp derived": define(SCHEMA, powers, **PAIR), "jvp written": define(SCHEMA, powers, **PAIR, jvp=powers_jvp)}


def loss_of(f, y):
    def loss(x):
        square, cube = f(x, None if y is None else y * x)
        assert (cube is None) is (y is None)
        return (square.sin() if cube is None else square.sin() * cube).sum()

    return loss


@pytest.mark.parametrize("transforms", NESTINGS, ids=name_of)
@pytest.mark.parametrize("key", OPS)
@pytest.mark.parametrize("y", [None, random(3, seed=1)], ids=["absent", "present"])
def test_every_nesting_equals_the_function(y, key, transforms):
    same(nested(transforms, loss_of(OPS[key], y))(random(3)), nested(transforms, loss_of(powers, y))(random(3)))


@pytest.mark.parametrize("key", OPS)
def test_check_and_opcheck(key):
    x, y = random(3), random(3, seed=1)
    mg.testing.check(OPS[key], [(x,), (x, y)])
    for args in ((x.requires_grad_(),), (x, y)):
        assert set(torch.library.opcheck(OPS[key].op, args).values()) == {"SUCCESS"}


@pytest.mark.parametrize("present", [False, True])
def test_one_optional_result(present):
    op = define("(Tensor x, bool yes) -> Tensor?", lambda x, yes: x * x if yes else None,
                save_for_backward=lambda inputs, output: inputs.x,
                backward=lambda ctx, x, grad: {"x": None if grad is None else 2 * grad * x})  # fmt: skip
    x = random(3).requires_grad_()
    for result in (op(x, present), op(x.detach(), present), torch.compile(op, backend="aot_eager")(x, present)):
        assert (result is not None) is present
    if present:
        same(torch.autograd.grad(op(x, True).sum(), x), (2 * x.detach(),))
        same(jvp(lambda x: op(x, True), (x,), (x,))[1], 2 * x * x)


def test_an_optional_list():
    def split(x, yes):
        return x * 1, [2 * x, 3 * x] if yes else None

    def backward(ctx, saved, grad, grads):
        found = 0 if grad is None else grad
        for factor, g in zip((2, 3), grads or ()):
            found = found if g is None else found + factor * g
        return {"x": found}

    op = define(
        "(Tensor x, bool yes) -> (Tensor, Tensor[]?)", split, save_for_backward=lambda i, o: (), backward=backward
    )
    x = random(3)
    assert op(x, False)[1] is None
    mg.testing.check(op, [(x, True), (x, False)])


def test_none_for_a_part_of_the_batch_raises():
    op = define("(Tensor x) -> (Tensor, Tensor?)", lambda x: (x * 1, x * 1 if x.sum() > 0 else None))
    same(vmap(lambda x: op(x)[0])(torch.ones(2, 3)), torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="None for some elements of the batch"):
        vmap(lambda x: op(x)[0])(torch.tensor([[1.0], [-1.0]]))


def test_none_where_a_tensor_is_declared_raises():
    with pytest.raises(RuntimeError, match="expected a Tensor as output 'b', got NoneType"):
        define("(Tensor x) -> (Tensor? a, Tensor b)", lambda x: (None, None))(random(3))
    with pytest.raises(RuntimeError, match="expected a Tensor as output 'a', got int"):
        define("(Tensor x) -> (Tensor? a, Tensor b)", lambda x: (1, x * 1))(random(3))


def test_no_results_under_vmap():
    seen = []
    op = define("(Tensor x) -> ()", lambda x: seen.append(x.clone()))
    vmap(lambda x: (op(x), x)[1])(random(2, 3))
    same(seen, list(random(2, 3)))


# -- schemas from annotations -----------------------------------------------------------------------------------------


def optional_result(x: Tensor, *, both: bool = False) -> tuple[Tensor, Tensor | None]:
    return x * 1, x * 2 if both else None


def optional_list(x: Tensor) -> list[Tensor] | None:
    return None


def only_optional(xs: Sequence[Tensor], n: int | None = None) -> Tensor | None:
    return None


def written(x: Tensor, buffer: Tensor, others: list[Tensor], extra: Tensor | None = None) -> None:
    buffer.add_(x)


ANNOTATED = [
    (optional_result, (), "(Tensor x, *, bool both=False) -> (Tensor, Tensor?)"),
    (optional_list, (), "(Tensor x) -> Tensor[]?"),
    (only_optional, (), "(Tensor[] xs, SymInt? n=None) -> Tensor?"),
    (written, ("buffer", "extra"), "(Tensor x, Tensor(a1!) buffer, Tensor[] others, Tensor(a3!)? extra=None) -> ()"),
    (
        written,
        "unknown",
        "(Tensor(a0!) x, Tensor(a1!) buffer, Tensor(a2!)[] others, Tensor(a3!)? extra=None) -> ()",
    ),
]


@pytest.mark.parametrize(("function", "mutates", "expected"), ANNOTATED)
def test_schemas_from_annotations(function, mutates, expected):
    op = mg.custom_op("mgtest::annotated", mutates_args=mutates, redefine=True)(function)
    assert str(op.signature.schema) == f"mgtest::annotated{expected}"


def test_mutates_args_with_a_schema():
    schema = "mgtest::declared(Tensor x, Tensor(a!) buffer) -> ()"
    mg.custom_op(schema, mutates_args=("buffer",), redefine=True)(lambda x, buffer: None)
    with pytest.raises(ValueError, match=r"the schema marks \['buffer'\] as written to, but mutates_args=\('x',\)"):
        mg.custom_op(schema, mutates_args=("x",), redefine=True)(lambda x, buffer: None)
    with pytest.raises(TypeError, match="expected names of arguments in a tuple, or 'unknown', got 'buffer'"):
        mg.custom_op(schema, mutates_args="buffer")
    with pytest.raises(ValueError, match="missing"):
        mg.custom_op("mgtest::annotated", mutates_args=("missing",), redefine=True)(written)


# -- conditions on calls ----------------------------------------------------------------------------------------------


def conditional(schema="(Tensor x) -> Tensor", body=lambda x: x * 2, **conditions):
    return mg.custom_op(f"mgtest::conditional{schema}", redefine=True, **conditions)(body)


def test_device_types():
    op = conditional("(Tensor x, Tensor y) -> Tensor", lambda x, y: x * y, device_types="cuda")
    x = random(3)
    with pytest.raises(RuntimeError, match=r"argument 'x' is on device 'cpu', but the op is implemented for cuda only"):
        op(x, x)
    with pytest.raises(RuntimeError, match="argument 'x' is on device 'cpu'"):
        op(torch.ones(()), torch.ones(()))
    with FakeTensorMode():
        on_cuda, on_cpu = torch.empty(3, device="cuda"), torch.empty(3)
        assert op(on_cuda, on_cuda).device.type == "cuda"
        with pytest.raises(RuntimeError, match="argument 'y' is on device 'cpu'"):
            op(on_cuda, on_cpu)
        assert op(on_cuda, torch.empty(())).device.type == "cuda"  # a CPU tensor without dimensions
    assert op(x.to("meta"), x.to("meta")).is_meta
    op.impl("cpu")(lambda x, y: x - y)
    same(op(x, x), x - x)
    with pytest.raises(ValueError, match="device_types: 'gpu' is unknown"):
        conditional(device_types=("gpu",))


def test_same_device():
    schema, body = "(Tensor x, Tensor[] ys) -> Tensor", lambda x, ys: x * 2
    op = conditional(schema, body, same_device=True)
    x = random(3)
    same(op(x, [x]), 2 * x)
    with pytest.raises(RuntimeError, match="argument 'ys' is on device 'meta', but 'x' is on 'cpu'"):
        op(x, [x, x.to("meta")])
    assert conditional(schema, body)(x.to("meta"), [x]).is_meta
    with FakeTensorMode():
        on_cuda = torch.empty(3, device="cuda")
        op = conditional(schema, body, same_device=True)
        assert op(on_cuda, [torch.empty(())]).device.type == "cuda"
        with pytest.raises(RuntimeError, match="argument 'ys' is on device 'cpu', but 'x' is on 'cuda:0'"):
            op(on_cuda, [on_cuda, torch.empty(3)])


def test_conditions_hold_for_what_is_differentiated_and_written():
    op = conditional("(Tensor x, Tensor(a!) y) -> ()", lambda x, y: None, device_types="cuda")
    op.impl_save_for_backward(lambda inputs, output: ())
    op.impl_backward(lambda ctx, saved, g: {"x": g, "y": None})
    x = random(3)
    for call in (lambda: op(x, x.clone()), lambda: grad(lambda x: (op(x, x.clone()), x.sum())[1])(x)):
        with pytest.raises(RuntimeError, match="argument 'x' is on device 'cpu'"):
            call()


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_determinism(deterministic):
    x = random(3)
    same(conditional("(Tensor x) -> Tensor", lambda x: x * 2)(x), 2 * x)
    op = conditional("(Tensor x) -> Tensor", lambda x: x * 2, deterministic=False)
    assert torch.Tag.nondeterministic_seeded in op.op.tags
    with pytest.raises(RuntimeError, match="declared as nondeterministic"):
        op(x)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="declared as nondeterministic"):
        same(op(x), 2 * x)
    torch.use_deterministic_algorithms(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(op(x), 2 * x)


def test_tags():
    op = conditional("(Tensor x) -> Tensor", lambda x: x * 2, tags=[torch.Tag.pointwise])
    assert torch.Tag.pointwise in op.op.tags
