"""Formulas that are called from outside check their arguments, and rules that call them do not."""

import _thread
import contextlib
import inspect
import re
import time

import pytest
import torch
from torch import zeros

import torch_manualgrad as mg
from torch_manualgrad.arguments import ArgumentError
from torch_manualgrad.core import formula_calls
from torch_manualgrad.core.declared_arguments import Declared, check_declared, declared

F64 = torch.float64


def outer(
    x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None, reduction: int, mode: str, flags: list[bool]
) -> torch.Tensor:
    """A product.

    Args:
        x: a, (*, m, n), real.
        y: (*, 2 n), or (k,)
            on a second line.
        mask: bool, the shape of ``x``; None for none.
        reduction: 0, 1 or 2 for none, mean, sum.
        mode: "left" or "right".
        flags: which of the two are wanted.

    Returns:
        Nothing.
    """
    return x


def test_declarations_are_read_from_docstrings():
    found = declared(outer, lambda name: None)
    assert found["x"] == Declared(shapes=(("*", "m", "n"),), dtype="real")
    assert found["y"].shapes == (("*", "2 n"), ("k",))
    assert found["mask"] == Declared(as_shape_of="x", dtype="bool")
    assert found["reduction"].choices == (0, 1, 2)
    assert found["mode"].choices == ("left", "right")
    assert found["flags"].length == 2


@pytest.mark.parametrize(
    "changed, text",
    [
        ({"x": torch.ones(3)}, r"x: expected shape \(\*, m, n\), got \[3\]"),
        ({"x": torch.ones(2, 3, dtype=torch.complex64)}, "x: expected a real dtype"),
        ({"y": torch.ones(2, 5)}, r"y: expected shape \(\*, 2 n\) or \(k,\) with 2 n = 6, got \[2, 5\]"),
        ({"x": torch.ones(4, 2, 3), "y": torch.ones(5, 6)}, r"y: expected .* whose batch dims broadcast with \[4\]"),
        ({"mask": torch.ones(2, 3)}, "mask: expected torch.bool"),
        ({"mask": torch.ones(2, 4, dtype=torch.bool)}, r"mask: expected the shape of x, \[2, 3\], got \[2, 4\]"),
        ({"reduction": 7}, "reduction: expected one of 0, 1, 2, got 7"),
        ({"mode": "up"}, "mode: expected one of 'left', 'right', got 'up'"),
        ({"flags": [True]}, r"flags: expected 2 entries, got \[True\]"),
    ],
)
def test_an_argument_that_breaks_its_declaration_is_named(changed, text):
    about = declared(outer, lambda name: None)
    values = {"x": torch.ones(2, 3), "y": torch.ones(6), "mask": None, "reduction": 0, "mode": "left"}
    check_declared("f", about, values)
    with pytest.raises(ArgumentError, match=f"f: {text}"):
        check_declared("f", about, values | changed)


def test_every_formula_declares_its_arguments():
    for f in mg.ops.values():
        if f.reference.__module__.startswith("torch_manualgrad."):
            assert f.calls.declared.keys() == {*f.signature.names}, f.name


def spectrum(n):
    return torch.randn(n, dtype=torch.complex128)


CALLS = {
    "weight_norm_backward": (
        [torch.ones(3, 4), torch.ones(3, 4), torch.ones(3, 1), torch.ones(3, 1), 0],
        {3: torch.ones(0, 1), 0: torch.ones(2, 4), 4: 7},
    ),
    "native_layer_norm_backward": (
        [torch.ones(3, 4), torch.ones(3, 4), [4], torch.ones(3, 1), torch.ones(3, 1), None, None, [True] * 3],
        {0: torch.ones(1, 4), 3: torch.ones(1, 1), 4: torch.ones(0, 1), 2: [5], 7: [True]},
    ),
    "layer_norm_backward_nested": (
        [torch.ones(3, 4), torch.ones(3, 4), [4], torch.ones(3, 1), torch.ones(3, 1), None, [True] * 3],
        {0: torch.ones(1, 4), 3: torch.ones(1, 1), 4: torch.ones(0, 1)},
    ),
    "native_batch_norm_backward": (
        [torch.ones(5, 3), torch.ones(5, 3), None, None, None, torch.ones(3), torch.ones(3), True, 0.1, [True] * 3],
        {7: False, 5: None, 6: torch.ones(2), 0: torch.ones(2, 3)},
    ),
    "segment_reduce_backward": (
        [torch.ones(2), torch.ones(2), torch.ones(5), "sum", torch.tensor([2, 3]), None, 0, None],
        {4: torch.tensor([2, 2**62]), 2: torch.ones(1), 6: 3, 0: torch.ones(1), 3: "most"},
    ),
    "ctc_loss_gradient": (
        [torch.ones(1), torch.randn(4, 1, 3).log_softmax(2), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])]
        + [torch.ones(1), torch.zeros(1, 4, 5), 0],
        {2: torch.tensor([[1, 99]]), 3: torch.tensor([5]), 4: torch.tensor([9]), 7: 3, 6: torch.zeros(1, 4, 1)},
    ),
    "attention_backward": (
        [torch.ones(1, 2, 3, 4)] * 2 + [torch.ones(1, 2, 5, 4)] * 2 + [torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3)]
        + [None, False, None],
        {2: torch.ones(1, 0, 5, 4), 4: torch.ones(1, 2, 1, 3, 4), 5: torch.ones(1, 2, 1), 0: torch.ones(1, 1, 3, 4)},
    ),
    "fft_c2r_backward": ([torch.ones(5), [0], 0], {1: [2**62], 2: 9}),
    "fft_r2c_backward": ([spectrum(3), [0], 0, True, 4], {1: [-1], 4: 1}),
    "grid_sampler_2d_backward": (
        [torch.ones(1, 2, 3, 3), torch.ones(1, 2, 4, 4), torch.zeros(1, 3, 3, 2), 0, 0, True, [True, True]],
        {3: 7, 4: -1, 0: torch.ones(1, 2, 1, 1), 2: torch.zeros(2, 3, 3, 2)},
    ),
    "linalg_qr_backward": ([torch.eye(3)] * 5 + ["reduced"], {5: "mean", 3: torch.eye(2)}),
    "linalg_det_backward": (
        [torch.ones(())] * 2 + [torch.eye(3)] * 2 + [torch.tensor([1, 2, 3], dtype=torch.int32)],
        {3: torch.eye(2), 4: torch.tensor([1, 2], dtype=torch.int32), 2: torch.eye(2)},
    ),
    "multi_margin_loss_jvp": (
        [torch.ones(3, 4), torch.ones(3, 4), torch.tensor([0, 1, 2]), 1, 1.0, torch.ones(4), 1],
        {5: torch.ones(3)},
    ),
    "pinv_differential": (
        [torch.ones(2, 4), torch.ones(()), torch.ones(1, 2, 4)],
        {2: torch.ones(0, 2, 4)},
    ),
    "linalg_lu_solve_jvp": (
        [torch.ones(3, 1), torch.eye(3), torch.tensor([1, 2, 3], dtype=torch.int32), None, torch.ones(3, 1), True, False],
        {2: torch.tensor([1, 2, 9], dtype=torch.int32), 1: torch.eye(2)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_unchecked_kernels_never_receive_invalid_arguments(name):
    """Each of these ended the process, or returned memory that nobody had written."""
    given, changes = CALLS[name]
    for f in (mg.ops[name], getattr(torch.ops.manualgrad, name)):
        f(*given)
        for at, value in changes.items():
            with pytest.raises(ArgumentError, match=rf"\b{name}: .*expected"):
                f(*[value if i == at else v for i, v in enumerate(given)])


def test_meta_tensors_among_others_are_refused():
    A = torch.eye(3, dtype=F64)
    for f in (mg.ops.linalg_inv_jvp, torch.ops.manualgrad.linalg_inv_jvp, torch.ops.manualgrad.linalg_inv_jvp.kernel):
        with pytest.raises(ArgumentError, match="inverse: expected a tensor on meta, where A_t is"):
            f(A.to("meta"), A)
    assert mg.ops.linalg_inv_jvp(A.to("meta"), A.to("meta")).is_meta


def test_errors_of_kernels_name_the_arguments():
    x = torch.ones(3)
    with pytest.raises(ArgumentError, match=r"(?s)cumsum_backward: IndexError: Dimension.*grad=a Tensor.*dim=7"):
        mg.ops.cumsum_backward(x, 7)
    with pytest.raises(TypeError, match="mv_vec_backward: grad: expected a Tensor, got None"):
        mg.ops.mv_vec_backward(None, torch.ones(3, 4))
    with pytest.raises(TypeError, match="mv_vec_backward: missing a required argument: 'mat'"):
        mg.ops.mv_vec_backward(x)


def test_rules_pay_nothing_for_the_check(monkeypatch):
    def refuse(*_):
        raise AssertionError("checked")

    monkeypatch.setattr(formula_calls.FormulaCalls, "check", refuse)
    x = torch.randn(4, 3, dtype=F64, requires_grad=True)
    with mg.override("*"):
        y = torch.nn.functional.layer_norm(x, [3]) + x.cumsum(0) + torch.linalg.svdvals(x)
        (g,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
        torch.autograd.grad(g.sum(), x)
    with pytest.raises(AssertionError, match="checked"):
        mg.ops.cumsum_backward(x, 0)


def test_under_transforms():
    args = CALLS["ctc_loss_gradient"][0]
    many = torch.vmap(mg.ops.ctc_loss_gradient, in_dims=(0, *[None] * 7))(torch.stack([args[0]] * 2), *args[1:])
    assert many.shape == (2, 4, 1, 3)
    with pytest.raises(ArgumentError, match="log_alpha"):
        torch.vmap(mg.ops.ctc_loss_gradient, in_dims=(0, *[None] * 7))(
            torch.stack([args[0]] * 2), *args[1:6], torch.zeros(1, 2, 5), 0
        )


def test_a_package_of_its_own_is_not_read_by_its_docstring():
    def doubled_by_someone(x: torch.Tensor) -> torch.Tensor:
        """Twice x.

        Args:
            x: of shape (3, 3), say.
        """
        return 2 * x

    made = mg.formula(namespace="mgtest_calls")(doubled_by_someone)
    try:
        assert made(torch.ones(2)).shape == (2,)
    finally:
        mg.ops.remove(made.name)
        made.undefine()


@pytest.mark.parametrize("name", ["native_layer_norm_backward", "native_batch_norm_backward", "attention_backward"])
def test_kernels_get_the_strides_that_they_read(name):
    """Each read rows or statistics as if they were contiguous: wrong gradients."""
    given = [torch.randn_like(x) if isinstance(x, torch.Tensor) else x for x in CALLS[name][0]]
    f = mg.ops[name]
    expected = f(*given)
    for i, x in enumerate(given):
        if isinstance(x, torch.Tensor):
            strided = torch.stack([x, torch.randn_like(x)], -1)[..., 0]
            torch.testing.assert_close(f(*given[:i], strided, *given[i + 1 :]), expected)


def test_second_derivatives_of_pdist_are_the_same_each_time():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.randn(300, 40, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with mg.override("*"):
            (g,) = torch.autograd.grad(torch.nn.functional.pdist(x, 3.0).pow(2).sum(), x, create_graph=True)
            found = [torch.autograd.grad(g.pow(2).sum(), x, retain_graph=True)[0] for _ in range(5)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found)


def test_the_text_of_docstrings_survives_python_oo(monkeypatch):
    doc = outer.__doc__
    expected = declared(outer, lambda name: None)
    monkeypatch.setattr(outer, "__doc__", None)
    with contextlib.suppress(OSError):
        assert inspect.getsource(outer)
    assert declared(outer, lambda name: None) == expected and re.search("Args", doc)


def test_a_mask_of_another_shape_than_the_gradient():
    mask = torch.eye(3).to_sparse()
    for sizes in ([], [3], [2, 3], [3, 3, 1]):
        with pytest.raises(ValueError, match=r"self_sizes: expected \[3, 3\], the shape of mask, got"):
            mg.ops.sparse_mask_backward(torch.ones(3, 3), mask, sizes, False)
    assert mg.ops.sparse_mask_backward(torch.ones(3, 3), mask, [3, 3], False).equal(torch.eye(3))


# -- what the formulas refuse by conditions of their own --------------------------------------------------------------

EYE = torch.eye(3)


@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("renorm_backward", (zeros(3), zeros(3), 2.0, 0, 1.0), "self: expected at least two dims, got shape \\[3\\]"),
        ("renorm_backward", (zeros(3), zeros(3, 3), 2.0, 0, 1.0), "grad: expected .*\\[3, 3\\], got \\[3\\]"),
        ("renorm_backward", (zeros(3, 3), zeros(3, 3), -2.0, 0, 1.0), "p: expected a number above 0, got -2.0"),
        ("renorm_jvp", (zeros(3, 3), zeros(3, 3), 2.0, 0, -1.0), "maxnorm: .* got -1.0"),
        ("linalg_matrix_exp_differential", (zeros(3, 4), zeros(3, 4), False), "self: expected .*n, n.* got \\[3, 4\\]"),
        ("linalg_matrix_exp_differential", (zeros(3), zeros(3), True), "self: expected .*n, n.* got \\[3\\]"),
        (
            "linalg_matrix_exp_differential",
            (EYE, zeros(2, 2), False),
            "grad: expected .* n = 3, from self, got \\[2, 2\\]",
        ),
        (
            "linalg_matrix_exp_differential",
            (EYE.long(), EYE.long(), False),
            "self: expected a floating point or complex dtype, got torch.int64",
        ),
        ("linalg_qr_backward", (EYE, None, EYE, EYE, EYE, "full"), "mode: expected .* got 'full'"),
        ("linalg_qr_jvp", (EYE, EYE, EYE, EYE, "full"), "mode: expected .* got 'full'"),
    ],
)
def test_an_argument_of_the_wrong_shape_is_named(name, arguments, message):
    with pytest.raises(RuntimeError, match=message):
        mg.ops[name](*arguments)


@pytest.mark.parametrize("mapped", [False, True], ids=["", "vmap"])
@pytest.mark.parametrize("name", ["pdist_backward", "pdist_jvp"])
def test_complex_rows_have_no_distance(name, mapped):
    x, distances = zeros(2, 3, dtype=torch.complex128), zeros(1, dtype=torch.complex128)

    def call(x):
        return (
            mg.ops.pdist_jvp(x, x, 2.5) if name == "pdist_jvp" else mg.ops.pdist_backward(distances, x, 2.5, distances)
        )

    with pytest.raises((RuntimeError, ValueError), match="self.*: expected a real"):
        torch.vmap(call)(x[None]) if mapped else call(x)


def test_calls_of_a_thread_without_frames_of_python():
    """As the engine's threads for devices are: an operator is called from C++, and nothing in Python calls that."""
    operator, _ = torch._C._jit_get_operation("manualgrad::pow_backward_self")
    x, found = torch.tensor([2.0, 3.0]), []
    _thread.start_new_thread(list.extend, (found, map(operator, [torch.ones(2)], [x], [torch.tensor(2.0)])))
    for _ in range(500):
        if found:
            break
        time.sleep(0.01)
    assert torch.equal(found[0], 2 * x)
