"""Arguments of the public functions of forward_ad, testing, override and install: an error names each and its value."""

import inspect

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad import forward_ad as fwd, testing

X = torch.linspace(0.1, 1.2, 4, dtype=torch.float64)
#: They check their arguments themselves, or have none.
BY_THEMSELVES = {"make_dual", "unpack_dual", "dual_level", "audit", "trace_nan"}


def in_a_level(f):
    with fwd.dual_level():
        return f()


def defined(reference):
    mg.custom_op("public_arguments::f(Tensor x, int k=3, *, float y) -> Tensor", redefine=True)(reference).undefine()


WRONG = {
    "forward": (lambda: mg.override(forward=1), "forward must be True or False, got 1"),
    "strong_zero": (lambda: mg.install(strong_zero=None), "strong_zero must be True or False, got None"),
    "scope": (lambda: mg.install(scope="x"), "scope must be one of 'process', 'thread', got 'x'"),
    "names": (lambda: mg.override(3), "names, .* got 3"),
    "an unknown name": (lambda: mg.install("nope"), "there is no rule 'aten::nope'"),
    "a module": (lambda: mg.override.module(3), "takes a torch.nn.Module, got 3"),
    "enable": (lambda: fwd.enable("nope"), r"enable: .*'nope'"),
    "enable of 3": (lambda: fwd.enable(3), r"(?s)enable: expected an operator.*got 3.*ops=\(3,\)"),
    "enable by a word": (lambda: fwd.enable(by="rule"), "enable: by: expected a list or tuple.*got 'rule'"),
    "enable by another way": (lambda: fwd.enable("aten::mv", by=["x"]), "by: unknown way 'x'"),
    "decompositions": (lambda: fwd.decompositions("aten::nope"), "decompositions: .*'aten::nope'"),
    "decompositions, replace": (lambda: fwd.decompositions("aten::trace", replace=3), "replace: expected a bool, got 3"),
    "a decomposition by 3": (lambda: fwd.decompositions({"aten::trace": 3}), "decomposition of aten::trace must be a function"),
    "register": (lambda: fwd.register_decomposition(3), "(?s)register_decomposition: expected an operator.*op=3"),
    "register, replace": (lambda: fwd.register_decomposition("aten::trace", replace=2), "replace: expected a bool, got 2"),
    "unregister": (lambda: fwd.unregister_decomposition(3), "(?s)unregister_decomposition: expected an operator.*op=3"),
    "unregister the package's": (lambda: fwd.unregister_decomposition("aten::trace"), "aten::trace is part of"),
    "make_dual": (lambda: in_a_level(lambda: fwd.make_dual(3, X)), "primal must be a tensor, got int"),
    "make_dual, level": (lambda: in_a_level(lambda: fwd.make_dual(X, X, level=3)), "level must be .*, got 3"),
    "has_same_meta": (lambda: fwd.has_same_meta(X, 3), "has_same_meta: other: expected a Tensor, got 3"),
    "recompute_mean_var": (
        lambda: fwd.recompute_mean_var(X, X, [None], True),
        r"recompute_mean_var: inner_dim_indices: .* got \[None\]",
    ),
    "recompute_mean_var, dims": (
        lambda: fwd.recompute_mean_var(X, X, [1], True),
        r"inner_dim_indices: expected dims of a tensor of shape \[4\], got \[1\]",
    ),
    "trace_nan": (lambda: testing.trace_nan(8, X), "trace_nan: f: expected a function, got 8"),
    "trace_nan, modes": (lambda: testing.trace_nan(torch.sin, X, modes=["up"]), "modes: unknown mode 'up'"),
    "check": (lambda: testing.check(True, [(X,)]), "check: fn: expected a function or a Rule, got True"),
    "check of numbers": (lambda: testing.check(torch.sin, [4]), r"check: samples\[0\]: expected a Sample .*, got 4"),
    "check of a number": (lambda: testing.check(torch.sin, 4), "check: samples: .*, got 4"),
    "check, modes": (lambda: testing.check(torch.sin, [(X,)], modes=["up"]), "modes: unknown mode 'up'"),
    "check, gaps": (lambda: testing.check(torch.sin, [(X,)], gaps={"up": ""}), "gaps: a gap names .*'up'"),
    "check_op": (lambda: testing.check_op(3), "check_op: name: expected a str, got 3"),
    "op_samples": (lambda: testing.op_samples("sin", 3), "op_samples: dtype: expected a dtype, got 3"),
    "composition": (lambda: testing.composition(3, torch.sin, (X,)), "composition: fn: expected a function, got 3"),
    "a reference without arguments": (lambda: defined(object), r"reference: expected a function of \(x, k, y\), got .*object"),
    "a reference without y": (lambda: defined(lambda x, k=3: x), r"reference: expected a function of \(x, k, y\).*'y'"),
    "a schema with two x": (
        lambda: mg.custom_op("public_arguments::g(Tensor x, Tensor x) -> Tensor")(torch.add),
        "two arguments of the schema are called 'x'",
    ),
    "offsets that are a list": (lambda: mg.nested.Ragged(X, [0, 4], [1, None]), r"offsets: expected a Tensor, got \[0, 4\]"),
    "no shape": (lambda: mg.nested.Ragged(X, torch.tensor([0, 4]), None), "shape: expected a list or tuple.*got None"),
    "sizes without data": (
        lambda: mg.nested.Ragged(X, torch.tensor([0, 4]), [1, None, None], torch.ones(1, 2, dtype=torch.long, device="meta")),
        "sizes: expected a tensor on cpu, where values are, got one on meta",
    ),
    "procrustes without data": (
        lambda: mg.linalg.procrustes(torch.ones(4, 3, device="meta"), torch.ones(4, 3)),
        "B: expected a tensor on meta, where A is, got one on cpu",
    ),
    "weights without data": (
        lambda: mg.linalg.kabsch(torch.ones(4, 3), torch.ones(4, 3), torch.ones(4, device="meta")),
        "weights: expected a tensor on cpu, where P is, got one on meta",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_error_names_the_argument_and_its_value(name):
    call, text = WRONG[name]
    with pytest.raises((TypeError, ValueError, RuntimeError, KeyError), match=text):
        call()


@pytest.mark.parametrize("module", [fwd, testing], ids=["forward_ad", "testing"])
def test_every_public_function_checks_its_arguments(module):
    functions = {n for n in module.__all__ if inspect.isfunction(getattr(module, n))}
    unchecked = {n for n in functions if not hasattr(getattr(module, n), "__wrapped__")}
    assert unchecked <= BY_THEMSELVES


def test_a_reference_may_omit_arguments_with_defaults():
    defined(lambda x, *, y: x)
    defined(lambda x, k, *, y: x)
    defined(torch.sin)
