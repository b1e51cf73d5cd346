"""A default device and a default dtype, as after ``torch.set_default_device("cuda")``, change nothing for other tensors.

The device of these tests is "meta": a tensor that is made without saying where has no values, and what is computed with it
raises or is on meta too. The dtype is double precision, and the tensors are in single precision.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator

import pytest
import torch
from helpers.devices import attempt, distance, every_mode
from helpers.tensors import random
from helpers.thinning import in_turn, label

import torch_manualgrad as mg
from torch_manualgrad.testing import check
from torch_manualgrad.testing.comparison.problem import Problem

RULES = [rule for rule in mg.rules.values() if rule.samples is not None]


@contextlib.contextmanager
def other_defaults() -> Generator[None, None, None]:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(dtype)


@pytest.mark.parametrize("rule, turn", in_turn(RULES, range(3), share=1 / 2), ids=label)
def test_rules(rule, turn):
    """On one of the first three samples."""
    found, samples = [], list(rule.samples(torch.float32, "cpu"))[:3]
    for sample in samples[turn % len(samples) :][:1] if samples else ():
        with warnings.catch_warnings(), torch.random.fork_rng(), mg.override(rule):
            warnings.simplefilter("ignore")
            problem = Problem(rule.probe, sample)
            if not problem.applicable:
                continue
            for mode, run in every_mode(problem):
                expected, refused = attempt(run)
                with other_defaults():
                    value, error = attempt(run)
                if refused is None and error is not None:
                    found.append(f"{mode}: {type(error).__name__}: {error}")
                elif refused is None and not distance(value, expected) <= 1e-5:
                    found.append(f"{mode}: {distance(value, expected)}")
    assert not found, "\n".join(found)


def test_the_checker():
    samples = [(random(3, 3),)]
    with torch.device("meta"), mg.override():
        check(torch.linalg.det, samples)


def product(x):
    return x.sin().prod()


def ragged(x):
    return mg.nested.Ragged.from_components([x, x[:1], x[:2]])


def gradient(f):
    def of(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x).sin().sum(), x)[0]

    return of


FUNCTIONS = {
    "laplacian": lambda x: mg.forward_ad.laplacian(product)(x),
    "laplacian of a batch": lambda x: mg.forward_ad.laplacian(lambda x: x.sin().prod(-1), batch_dims=1)(x),
    "hessian_diagonal": lambda x: mg.forward_ad.hessian_diagonal(product)(x),
    "biharmonic": lambda x: mg.forward_ad.biharmonic(product)(x),
    "weighted_laplacian": lambda x: mg.forward_ad.weighted_laplacian(product, x.reshape(-1))(x),
    "hvp": lambda x: mg.forward_ad.hvp(product, x, x),
    "ggn_vp": lambda x: mg.forward_ad.ggn_vp(torch.sin, product, x, x),
    "directional": lambda x: mg.forward_ad.directional(product, x, x, 4),
    "jet": lambda x: mg.forward_ad.jet(product, (x,), ([x, x, None],))[1],
    "expm": gradient(mg.linalg.expm),
    "logm": gradient(lambda x: mg.linalg.logm(x @ x.mT)),
    "polar": gradient(lambda x: mg.linalg.polar(x)[0]),
    "eigh": gradient(lambda x: mg.linalg.eigh(x + x.mT).eigenvalues),
    "nuclear_norm": gradient(mg.linalg.nuclear_norm),
    "nested softmax": gradient(lambda x: ragged(x).softmax(1).values),
    "nested sum": gradient(lambda x: ragged(x).sum(1)),
    "nested amax": gradient(lambda x: ragged(x).amax(1)),
    "nested to_padded": gradient(lambda x: ragged(x).to_padded(0.0)),
    "nested matmul": gradient(lambda x: (ragged(x) @ x).values),
    "compiled": gradient(mg.compile(lambda x: x.sin().sum(0), lowering="eager")),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    x = random(3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            found = FUNCTIONS[name](x)
        torch.testing.assert_close(found, FUNCTIONS[name](x), rtol=1e-12, atol=1e-12)
