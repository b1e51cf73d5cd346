"""Compiled functions next to the functions themselves, in every mode and order, and the same rules active."""

import pytest
import torch
from helpers import modes
from helpers.programs import PROGRAMS

import torch_manualgrad as mg

MODES = modes.MODES
THREE_ORDERS = ("mlp", "detached", "partly_untracked", "in_place", "equal_gradients", "potential")
# their second derivatives take long to trace
LONG = ("transformer", "factors", "residual_network", "lstm_layer", "normalizations", "reductions", "special_functions")


def compare(name, modes_of, lowering):
    function, inputs = PROGRAMS[name]
    torch.compiler.reset()
    with mg.override():
        compiled = mg.compile(function, dynamic=False, fullgraph=True, lowering=lowering)
        for mode in ("", *modes_of):
            expected = modes.derivatives(function, inputs, mode)
            found = modes.derivatives(compiled, inputs, mode)
            assert len(found) == len(expected)
            for a, b in zip(found, expected):
                assert a.dtype == b.dtype and a.shape == b.shape
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, equal_nan=True, msg=lambda m: f"{mode}: {m}")


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in (*LONG, *THREE_ORDERS)])
def test_graphs_have_the_derivatives_of_the_function(name):
    compare(name, ("fwd", "revrev"), "eager")


@pytest.mark.parametrize("name", LONG)
def test_graphs_have_the_first_derivatives_of_the_function(name):
    compare(name, ("rev", "fwd"), "eager")


@pytest.mark.parametrize("name", THREE_ORDERS)
def test_graphs_have_the_first_three_derivatives(name):
    compare(name, ("fwd", "revrev", "fwdrev", "revfwd", "fwdfwd", "revrevrev", "revrevfwd", "fwdfwdrev"), "eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_graphs_have_every_derivative_of_the_function(name):
    compare(name, MODES, "eager")


def test_inductor_has_the_derivatives_of_the_function():
    compare("mlp", ("fwd", "revrev"), "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_inductor_has_every_derivative_of_the_function(name):
    compare(name, MODES, "inductor")
