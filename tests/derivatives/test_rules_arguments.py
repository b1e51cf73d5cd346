"""Formulas called by hand with what does not fit: an error that names the argument and its value."""

import pytest
import torch
from torch import zeros

import torch_manualgrad as mg

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
