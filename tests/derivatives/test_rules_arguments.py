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
        ("renorm_backward", (zeros(3), zeros(3, 3), 2.0, 0, 1.0), "grad: expected shape \\[3, 3\\], got \\[3\\]"),
        ("renorm_backward", (zeros(3, 3), zeros(3, 3), -2.0, 0, 1.0), "p: expected a number above 0, got -2.0"),
        ("renorm_jvp", (zeros(3, 3), zeros(3, 3), 2.0, 0, -1.0), "maxnorm: .* got -1.0"),
        ("linalg_matrix_exp_differential", (zeros(3, 4), zeros(3, 4), False), "self: expected square matrices"),
        ("linalg_matrix_exp_differential", (zeros(3), zeros(3), True), "self: expected square matrices, got shape"),
        ("linalg_matrix_exp_differential", (EYE, zeros(2, 2), False), "grad: expected .*\\[3, 3\\].* got .*\\[2, 2\\]"),
        (
            "linalg_matrix_exp_differential",
            (EYE.long(), EYE.long(), False),
            "self: expected a floating point or complex dtype, got torch.int64",
        ),
        ("linalg_qr_backward", (EYE, None, EYE, EYE, EYE, "full"), "mode: expected .* got 'full'"),
        ("linalg_qr_jvp", (EYE, EYE, EYE, EYE, "full"), "mode: expected .* got 'full'"),
    ],
)
def test_what_does_not_fit_is_named(name, arguments, message):
    with pytest.raises(RuntimeError, match=message):
        mg.ops[name](*arguments)
