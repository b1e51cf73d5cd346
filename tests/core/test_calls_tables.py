"""The tables that drive csrc/calls: each gives what its vjp gives, or is refused."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch
from helpers.calls import made, needs_library, vector

import torch_manualgrad as mg
from torch_manualgrad.core.libraries import calls_library, checked
from torch_manualgrad.core.override import compiled_calls, compiled_table
from torch_manualgrad.core.rule import CompiledVjp, Formula, rule

pytestmark = needs_library


def opaque(function):
    """A formula that is in no registry, and has a kernel on the CPU."""
    return Formula(function, ("cpu",), "calls_tests")


def test_every_compiled_vjp_equals_its_vjp():
    for made_rule in mg.rules.values():
        if made_rule.compiled_vjp is None:
            continue
        served = 0
        for sample in made_rule.samples(torch.float64, "cpu"):

            def gradients(x, sample=sample, op=made_rule.aten):
                outputs = op(x, *sample.args[1:], **sample.kwargs)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                smooth = [o for o in outputs if o.requires_grad]
                return torch.autograd.grad([o.sum() for o in smooth], x)[0]

            x = sample.args[0].detach().clone().requires_grad_()
            with mg.override(made_rule):
                found, count = made(lambda: gradients(x))
                with compiled_calls.in_python():
                    expected, none = made(lambda: gradients(x))
            served += count[1]
            assert none == (0, 0, 0)
            torch.testing.assert_close(found, expected, equal_nan=True)
        assert served, made_rule.name


def test_the_structs_of_python_are_those_of_the_library():
    name, offset, size = ctypes.c_char_p(), ctypes.c_int64(), ctypes.c_int64()
    compiled, index = {}, 0
    while calls_library.manualgrad_calls_layout(
        ctypes.c_int64(index), ctypes.byref(name), ctypes.byref(offset), ctypes.byref(size)
    ):
        compiled[name.value.decode()] = (offset.value, size.value)
        index += 1
    here = {}
    for struct, kind in compiled_table.LAYOUT.items():
        if issubclass(kind, ctypes.Structure):
            fields = [(field, getattr(kind, field)) for field, _ in kind._fields_]
            here |= {f"{struct}.{field}": (at.offset, at.size) for field, at in fields}
        else:
            here |= {f"{struct}.k{one.name.title().replace('_', '')}": (one.value, 0) for one in kind}
    assert here == compiled


def test_another_layout_is_refused():
    rule, layer = compiled_table.describe(1 << 40, compiled_table.IN_PYTHON), compiled_table.layer([], [], False)
    for sent, define in (
        (rule, calls_library.manualgrad_calls_define_rule),
        (layer, calls_library.manualgrad_calls_define_layer),
    ):
        for field in ("version", "bytes"):
            before = getattr(sent, field)
            setattr(sent, field, before + 1)
            with pytest.raises(RuntimeError, match="layout.*build the library again"):
                checked(define(ctypes.byref(sent)))
            setattr(sent, field, before)


def test_numbers_of_dtypes_are_those_of_libtorch():
    def dtype_of(grad, self_dtype):
        assert self_dtype is wanted
        return grad

    made_rule = rule("aten::sin", vjp={"self": dtype_of}, register=False)
    with mg.override(made_rule):
        for wanted in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128):
            x = torch.ones(2, dtype=wanted, requires_grad=True)
            assert made(lambda: torch.sin(x).backward(torch.ones_like(x)))[1][2] == 1  # noqa: B023


def test_a_name_that_is_in_no_rule_is_refused():
    formula = mg.ops.norm_backward
    with pytest.raises(ValueError, match="compiled_vjp"):
        rule(
            "aten::sin",
            vjp={"self": lambda grad, self: grad},
            compiled_vjp=CompiledVjp("self", formula, {"p": "missing"}),
            register=False,
        )


def test_only_tensors_that_requested_gradients_read_are_saved():
    x, y = vector().detach(), vector(1)
    product = {"self": lambda grad, other: grad * other, "other": lambda grad, self: grad * self}
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t)
    with mg.override(rule("aten::mul.Tensor", vjp=product, register=False)), hooks:
        z, count = made(lambda: x * y)
    assert count == (1, 0, 0) and kept == [x.data_ptr()] and z.requires_grad


@opaque
def product_backward(
    grad: torch.Tensor,
    self: torch.Tensor,
    other: torch.Tensor,
    needs_self: bool,
    needs_other: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both gradients of a product, and whether ``other`` has a zero."""
    empty = grad.new_empty(0)
    given = (grad * other if needs_self else empty, grad * self if needs_other else empty)
    return (*given, (other == 0).any())


def test_a_compiled_formula_for_several_gradients_that_reports():
    def both(grad, self, other, output_mask):
        return grad * other * 7, grad * self * 7  # to be told from the compiled one

    reports: list[int] = []
    product = rule(
        "aten::mul.Tensor",
        vjp={("self", "other"): both},
        compiled_vjp=CompiledVjp(("self", "other"), product_backward, reports=lambda: reports.append(1)),
        register=False,
    )
    x, y, zero = vector(), vector(1), torch.zeros(5, dtype=torch.float64, requires_grad=True)
    ones = torch.ones(5, dtype=torch.float64)
    with mg.override(product):
        found, count = made(lambda: torch.autograd.grad(x * y, (x, y), ones))
        assert count == (1, 1, 0) and torch.equal(found[0], y) and torch.equal(found[1], x)
        (g,), count = made(lambda: torch.autograd.grad(x.detach() * y, y, ones))
        assert count == (1, 1, 0) and torch.equal(g, x)
        assert not reports
        found, count = made(lambda: torch.autograd.grad(x * zero, (x, zero), ones))
        assert count == (1, 1, 0) and torch.equal(found[1], x) and len(reports) == 1


@opaque
def cumsum_backward(grad: torch.Tensor) -> torch.Tensor:
    return 7 * grad


def test_a_compiled_formula_for_some_constants_only():
    def backward(grad, dim):
        return grad.flip(dim).cumsum(dim).flip(dim)

    sums = rule(
        "aten::cumsum",
        vjp={"self": backward},
        compiled_vjp=CompiledVjp("self", cumsum_backward, only={"dim": 1}),
        register=False,
    )
    x = vector(n=6).detach().reshape(2, 3).requires_grad_()
    with mg.override(sums):
        for dim, compiled in ((1, True), (0, False), (-1, False)):
            (g,), count = made(lambda: torch.autograd.grad(x.cumsum(dim), x, torch.ones(2, 3, dtype=x.dtype)))  # noqa: B023
            assert count == (1, compiled, not compiled) and bool((g == 7).all()) == compiled


@opaque
def solve_backward(grad: torch.Tensor, self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return 7 * grad


def test_a_compiled_formula_for_some_tensors_only():
    def backward(grad, self, other):
        return grad * other + 0 * self

    conditions = {"real": True, "contiguous": ("self",), "one_batch": ("self", "other"), "nonzero": ("other",)}
    product = rule(
        "aten::mul.Tensor",
        vjp={"self": backward},
        compiled_vjp=CompiledVjp("self", solve_backward, **conditions),
        register=False,
    )
    A = torch.ones(2, 3, 3, dtype=torch.float64)
    cases = [
        (A, A, True),
        (A, A[:, :, :1], True),
        (A, A[:1], False),  # another batch
        (A, A.unsqueeze(0), False),
        (A[0], A[0, 0], True),  # a vector
        (A.mT, A, True),  # of ones: asked below
        (A.to(torch.complex128), A.to(torch.complex128), False),
        (A, A.tril(), False),  # a zero
    ]
    with mg.override(product):
        for a, b, compiled in cases:
            x = a.clone(memory_format=torch.preserve_format).requires_grad_()
            compiled = compiled and x.is_contiguous()
            (g,), count = made(lambda: torch.autograd.grad((x * b).real.sum(), x))  # noqa: B023
            assert count == (1, compiled, not compiled) and bool((g == 7).all()) == compiled


@pytest.mark.parametrize(
    ("compiled", "message"),
    [
        (CompiledVjp("other", product_backward), "vjp for"),
        (CompiledVjp(("self", "other"), product_backward), "3 results for 2 gradients"),
        (CompiledVjp(("self", "other"), product_backward, reports=print, only={"dim": 0}), "condition on 'dim'"),
    ],
)
def test_a_compiled_vjp_that_cannot_replace_the_vjp_raises(compiled, message):
    def both(grad, self, other, output_mask):
        return grad * other, grad * self

    with pytest.raises(ValueError, match=message):
        rule("aten::mul.Tensor", vjp={("self", "other"): both}, compiled_vjp=compiled, register=False)


def test_without_the_library_python_serves_all():
    code = """
import torch
load = torch.ops.load_library
def refuse(path):
    if "_calls_" in str(path):
        raise OSError("planted")
    load(path)
torch.ops.load_library = refuse
import torch_manualgrad as mg
from torch_manualgrad.core.override import compiled_calls
assert not compiled_calls.loaded()
x = torch.ones(4, requires_grad=True)
with mg.override():
    y = torch.linalg.vector_norm(x)
    assert y.grad_fn.name() == "LinalgVectorNormBackward0" and type(y.grad_fn) is not torch._C._functions.LinalgVectorNormBackward0 and compiled_calls.counts() == (0, 0, 0)
    y.backward()
assert x.grad.tolist() == [0.5] * 4
mg.unregister()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
