"""Arguments of wrong types and values, one by one, to every public function: an error names the argument and its value."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad import forward_ad as fwd, testing
from torch_manualgrad.arguments import ArgumentError, arguments_of, checked
from torch_manualgrad.nested import Ragged

# -- linalg and nested ------------------------------------------------------------------------------------------------

F64 = torch.float64


def inputs():
    """A call of every function that is right, as keywords."""
    A = torch.eye(3, dtype=F64) + 0.1
    r = Ragged.from_components([random(n, 4) for n in (2, 3)])
    over_dim = dict(x=r, dim=1, keepdim=False)
    linalg = {
        "svd": dict(A=A, full_matrices=True, rank=1, degeneracy=mg.Degeneracy(), gauge="warn"),
        "eigh": dict(A=A, UPLO="L", degeneracy=mg.Degeneracy(), gauge="warn"),
        "eigh_generalized": dict(A=A, B=A, degeneracy=mg.Degeneracy(), gauge="warn"),
        "expm_multiply": dict(A=A, B=A, t=0.5),
        "schur": dict(A=A, order="real", gauge="warn"),
        "solve_sylvester": dict(A=A, B=A, C=A),
        "solve_lyapunov": dict(A=A, Q=A),
        "solve_discrete_lyapunov": dict(A=A / 2, Q=A),
        "lu": dict(A=A, pivot=True),
        "nuclear_norm": dict(A=A, keepdim=False),
        "spectral_norm": dict(A=A, keepdim=False),
        "polar": dict(A=A, side="left"),
        "procrustes": dict(A=A, B=A, rotation=False),
        "kabsch": dict(P=A, Q=A, weights=torch.ones(3, dtype=F64)),
        **{name: dict(A=A, assume="general") for name in ("expm", "sqrtm", "rsqrtm", "logm")},
        "powm": dict(A=A, p=0.3, assume="general"),
        "funm_hermitian": dict(A=A, f=torch.sin, derivatives=[torch.cos]),
    }
    nested = {
        **{name: dict(x=r, other=r, alpha=1) for name in ("add", "sub")},
        **{name: dict(x=r, other=r) for name in ("mul", "pow", "maximum", "minimum")},
        "div": dict(x=r, other=r, rounding_mode=None),
        **dict.fromkeys(("amax", "amin", "sum", "mean", "logsumexp", "prod", "max", "min"), over_dim),
        "vector_norm": dict(ord=2.0, **over_dim),
        **{name: dict(correction=1, **over_dim) for name in ("var", "std")},
        "cumsum": dict(x=r, dim=1),
        **{name: dict(x=r, dim=1, dtype=torch.float32) for name in ("softmax", "log_softmax")},
        "glu": dict(x=r, dim=2),
        **{name: dict(input=r) for name in ("mish", "relu", "selu", "silu")},
        **{name: dict(input=r, alpha=1.0) for name in ("celu", "elu")},
        "gelu": dict(input=r, approximate="none"),
        "hardtanh": dict(input=r, min_val=-1.0, max_val=1.0),
        "leaky_relu": dict(input=r, negative_slope=0.1),
        "softplus": dict(input=r, beta=1.0, threshold=20.0),
        "threshold": dict(input=r, threshold=0.0, value=1.0),
        "chunk": dict(x=r, chunks=2, dim=0),
        "collate": dict(samples=[torch.ones(2), torch.ones(3)], ragged=None),
        "dropout": dict(x=r, p=0.5, training=True),
        "narrow": dict(x=r, dim=2, start=0, length=1),
        "select": dict(x=r, dim=2, index=0),
        "slice": dict(x=r, dim=1, start=0, end=1, step=1),
        "split": dict(x=r, split_size=1, dim=0),
        "split_with_sizes": dict(x=r, split_sizes=[1, 1], dim=0),
        "to_padded_tensor": dict(x=r, padding=0.0, output_size=(2, 3, 4)),
        "transpose": dict(x=r, dim0=1, dim1=2),
        "unbind": dict(x=r, dim=0),
        "layer_norm": dict(input=r, normalized_shape=(4,), weight=random(4), bias=random(4), eps=1e-5),
        "rms_norm": dict(input=r, normalized_shape=(4,), weight=random(4), eps=1e-5),
        "linear": dict(input=r, weight=random(2, 4), bias=random(2)),
        "matmul": dict(self=r, other=random(4, 2)),
        "scaled_dot_product_attention": dict(
            query=r, key=r, value=r, attn_mask=None, dropout_p=0.0, is_causal=False, scale=0.5, enable_gqa=False
        ),
    }
    return {"linalg": linalg, "nested": nested}


WRONG = {
    "None": None,
    "fraction": 1.5,
    "negative": -7,
    "large": 10**6,
    "nan": float("nan"),
    "complex": 2j,
    "text": "no",
    "True": True,
    "integer tensor": torch.tensor(1),
    "number tensor": torch.tensor(0.5, dtype=F64),
    "vector": torch.ones(3, dtype=F64),
    "three dims": torch.ones(2, 5, 7, dtype=F64),
    "integer matrix": torch.ones(3, 3, dtype=torch.int64),
    "half matrix": torch.ones(3, 3, dtype=torch.float16),
    "fractions": [1.5],
    "Nones": [None],
    "empty": (),
    "dict": {},
    "object": object(),
}
# Values of the right type, which torch refuses by an error of its own; it says what is wrong with them.
BY_TORCH = {
    **{(name, "alpha", "True"): "alpha" for name in ("add", "sub")},
    ("sub", "other", "True"): "Subtraction",
    **{(name, "correction", "True"): "Subtraction" for name in ("var", "std")},
    **{(name, a, "complex"): "complex" for name in ("maximum", "minimum") for a in ("x", "other")},
    ("dropout", "p", "nan"): "got nan",
    ("collate", "samples", "Nones"): "default_collate",
}
CASES = [(package, name) for package, functions in inputs().items() for name in functions]


def test_the_table_has_every_function_and_argument():
    for package, functions in inputs().items():
        module = getattr(mg, package)
        public = {n for n in module.__all__ if inspect.isfunction(getattr(module, n))}
        assert public == set(functions)
        for name, right in functions.items():
            assert set(inspect.signature(getattr(module, name)).parameters) == set(right), name


@pytest.mark.parametrize("package, name", CASES)
def test_wrong_arguments(package, name):
    function, right = getattr(getattr(mg, package), name), inputs()[package][name]
    function(**right)
    for argument in right:
        refused = 0
        for what, value in WRONG.items():
            try:
                function(**{**right, argument: value})
            except (TypeError, ValueError, IndexError) as error:
                assert BY_TORCH.get((name, argument, what), argument) in str(error), (argument, what)
                refused += 1
            except RuntimeError as error:
                assert BY_TORCH[name, argument, what] in str(error), (argument, what)
        assert refused >= 5, argument


def test_the_value_is_named():
    r, A = inputs()["nested"]["relu"]["input"], torch.eye(3)
    linalg, nested = mg.linalg, mg.nested
    for call, error, message in (
        (lambda: nested.softmax(r, None), TypeError, "softmax: dim: expected an int, got None"),
        (lambda: nested.softmax(r, 1.0), TypeError, "softmax: dim: expected an int, got 1.0"),
        (lambda: nested.softmax(r, True), TypeError, "softmax: dim: expected an int, got True"),
        (lambda: nested.sum(r, "1"), TypeError, "sum: dim: expected .* got '1'"),
        (lambda: nested.sum(r, (1, 2.0)), TypeError, r"sum: dim: expected .* got \(1, 2.0\)"),
        (lambda: nested.split(r, None), TypeError, "split: split_size: expected .* got None"),
        (
            lambda: nested.select(r, 0, torch.tensor(1)),
            TypeError,
            r"index: expected an int, got a Tensor of shape \[\]",
        ),
        (lambda: nested.gelu(r, "fast"), ValueError, "gelu: approximate: expected 'none' or 'tanh', got 'fast'"),
        (lambda: nested.div(r, 2, rounding_mode="up"), RuntimeError, "rounding_mode: expected 'trunc' or .* got 'up'"),
        (lambda: nested.relu(A), TypeError, "relu: input: expected a Ragged or a nested tensor, got a Tensor of shape"),
        (lambda: nested.add(r, torch.ones(3)), ValueError, r"other: shape \[3\] does not broadcast"),
        (lambda: linalg.svd(A, rank=1.5), TypeError, "svd: rank: expected an int or None, got 1.5"),
        (lambda: linalg.svd(A, rank=4), ValueError, "rank: expected 1 to 3 for a matrix of shape .* got 4"),
        (lambda: linalg.svd(A, degeneracy=1e-3), TypeError, "svd: degeneracy: expected a Degeneracy, got 0.001"),
        (lambda: linalg.svd(A, gauge="no"), ValueError, "gauge: expected 'warn' or 'error' or 'ignore', got 'no'"),
        (lambda: linalg.eigh(A, "l"), RuntimeError, "UPLO: expected 'L' or 'U', got 'l'"),
        (lambda: linalg.funm_hermitian(A, 3), TypeError, "funm_hermitian: f: expected a function, got 3"),
        (lambda: linalg.funm_hermitian(A, torch.sin, [1]), TypeError, r"derivatives: expected .* got \[1\]"),
        (
            lambda: linalg.expm(A.half()),
            TypeError,
            "A: expected single or double precision, or autocast, got torch.float16",
        ),
        (
            lambda: linalg.expm(torch.tensor(1.0)),
            ValueError,
            r"A: expected a matrix or a batch of matrices, got shape \[\]",
        ),
        (lambda: linalg.lu(A, pivot=1), TypeError, "lu: pivot: expected a bool, got 1"),
        (
            lambda: linalg.svd(A.to_sparse()),
            TypeError,
            "A: expected a dense tensor, got one of layout torch.sparse_coo",
        ),
        (lambda: mg.Degeneracy(rtol="x"), TypeError, "rtol: expected a number, got 'x'"),
        (lambda: mg.Degeneracy(atol=None), TypeError, "atol: expected a number, got None"),
        (lambda: mg.Degeneracy(broadening=-1), ValueError, "broadening must not be negative, got -1"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_errors_of_shape_are_those_of_pytorch_too():
    for shape in ((), (3,), (2, 3)):
        with pytest.raises(RuntimeError):
            torch.linalg.eigh(torch.ones(shape))
        for error in (RuntimeError, ValueError):
            with pytest.raises(error, match="A: expected"):
                mg.linalg.eigh(torch.ones(shape))
    for error in (NotImplementedError, RuntimeError, TypeError):
        with pytest.raises(error, match="A: expected"):
            mg.linalg.eigh(torch.ones(2, 2, dtype=torch.float16))


@pytest.mark.parametrize("selection", [(), ("*",)])
def test_pytorchs_operators_raise_the_same_errors(selection):
    for call in (
        lambda: torch.linalg.inv(torch.tensor(1.0, requires_grad=True)),
        lambda: torch.linalg.matrix_exp(torch.ones(2, 2, dtype=torch.float16, requires_grad=True)),
        lambda: torch.linalg.svd(torch.ones(3)),
        lambda: torch.linalg.solve(torch.ones(2, 2), torch.ones(3)),
        lambda: torch.linalg.eigh(torch.ones(2, 2), UPLO="x"),
        lambda: torch.linalg.det(torch.ones(2, 2, dtype=torch.int64)),
    ):
        outcomes = []
        for active in (False, True):
            try:
                if active:
                    with mg.override(*selection):
                        call()
                else:
                    call()
                outcomes.append(None)
            except Exception as error:
                outcomes.append((type(error), str(error)))
        assert outcomes[0] == outcomes[1]


# -- the check --------------------------------------------------------------------------------------------------------


@checked
def example(
    n: int,
    x: float = 1.0,
    sizes: Sequence[int] = (),
    mode: Literal["a", "b"] | None = None,
    anything=None,
    *rest: int,
    flag: bool = False,
    **options: str,
) -> tuple:
    """Every kind of parameter."""
    return n, x, sizes, mode, anything, rest, flag, options


def test_accepted_arguments():
    assert example(1, True, [2, 3], "b", object, 7, flag=True, other=1)[0] == 1
    assert example(n=2, x=3, sizes=torch.Size([1]))[2] == (1,)
    np = pytest.importorskip("numpy")
    assert example(np.int64(3), np.float32(0.5))[0] == 3
    for error, message, call in (
        (TypeError, "example: n: expected an int, got True", lambda: example(True)),
        (TypeError, "example: n: expected an int, got array", lambda: example(np.ones(1))),
        (TypeError, "x: expected a real number, got 1j", lambda: example(1, 1j)),
        (TypeError, "sizes: expected a list or tuple, each entry an int, got 3", lambda: example(1, sizes=3)),
        (ArgumentError, "mode: expected 'a' or 'b' or None, got 'c'", lambda: example(1, mode="c")),
        (TypeError, "mode: expected 'a' or 'b' or None, got 1", lambda: example(1, mode=1)),
        (TypeError, "flag: expected a bool, got 0", lambda: example(1, flag=0)),
        (TypeError, "missing 1 required positional argument: 'n'", lambda: example()),
        (TypeError, "multiple values for argument 'n'", lambda: example(1, n=1)),
        (TypeError, "x: expected a real number, got '.{70,}\\.\\.\\.$", lambda: example(1, "x" * 500)),
    ):
        with pytest.raises(error, match=message):
            call()


def test_unannotated_arguments_are_not_checked():
    arguments_of(lambda x, y=1: x)(("anything",), {"y": None, "z": 1})


# -- forward_ad, testing, override and install ------------------------------------------------------------------------

X = torch.linspace(0.1, 1.2, 4, dtype=torch.float64)
#: They check their arguments themselves, or have none.
BY_THEMSELVES = {"make_dual", "unpack_dual", "dual_level", "audit", "trace_nan"}


def in_a_level(f):
    with fwd.dual_level():
        return f()


def defined(reference):
    mg.custom_op("public_arguments::f(Tensor x, int k=3, *, float y) -> Tensor", redefine=True)(reference).undefine()


ERRORS = {
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


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_names_the_argument_and_its_value(name):
    call, text = ERRORS[name]
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
