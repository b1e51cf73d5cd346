"""What a name means to override: the rules of an operator, and of all that a public function reaches."""

from __future__ import annotations

import pytest
import torch
from helpers.calls import is_pytorchs
from helpers.tensors import random
from helpers.thinning import every
from torch.utils._python_dispatch import TorchDispatchMode

import torch_manualgrad as mg
from torch_manualgrad.core.rule import reached as torch_reached
from torch_manualgrad.core.rule.catalogue import operators_of
from torch_manualgrad.testing.database.opinfo import op_db


def functions(public):
    """The function of that name, and its twin among Tensor's methods; none in a torch that has it not."""
    found = []
    for place in (torch, torch.Tensor):
        for part in public.split("."):
            place = getattr(place, part, None)
        found += [place] if place is not None else []
    return found


PUBLIC = [public for public in operators_of if functions(public)]
MANY = 40  # samples of one entry of the database, spread evenly


def chunks():
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions  # since torch 2.13

    return LinearCrossEntropyOptions(batch_chunk_size=2)


# What PyTorch's operator database does not call, or calls inside of another function.
CALLS = {
    "_weight_norm": lambda f: f(random(2, 3), random(2, 1), 0),
    "bilinear": lambda f: f(random(2, 3), random(2, 4), random(5, 3, 4), None),
    "chain_matmul": lambda f: f(random(2, 3), random(3, 4)),
    "conv_tbc": lambda f: f(random(3, 1, 2), random(2, 2, 2), random(2)),
    "linalg.cond": lambda f: f(random(3, 3), 1),
    "cosine_similarity": lambda f: f(random(2, 3), random(2, 3)),
    "nn.functional.embedding_bag": lambda f: f(
        torch.tensor([0, 2]), random(3, 2).requires_grad_(), torch.tensor([0, 1])
    ),
    "frobenius_norm": lambda f: f(random(2, 3), [0, 1]),
    "grid_sampler": lambda f: [f(random(1, 1, *[2] * d), random(1, *[1] * d, d), 0, 0, False) for d in (2, 3)],
    "nn.functional.fractional_max_pool2d": lambda f: f(random(1, 3, 3), 2, [1, 1]),
    "nn.functional.fractional_max_pool3d": lambda f: f(random(1, 3, 3, 3), 2, [1, 1, 1]),
    "nn.functional.multi_head_attention_forward": lambda f: torch.nn.MultiheadAttention(4, 2).double()(
        *[random(3, 4).requires_grad_()] * 3
    ),
    "native_dropout": lambda f: f(random(2, 3), 0.5, True),
    "nn.functional.scaled_dot_product_attention": lambda f: [
        f(*[random(1, 2, 3, 4).requires_grad_()] * 3, attn_mask=m) for m in (None, random(3, 3).requires_grad_())
    ],
    "nn.functional.linear_cross_entropy": lambda f: [
        f(random(4, 2), random(3, 2), torch.tensor([0, 1, 2, 0]), reduction=r, options=chunks())
        for r in ("mean", "none")
    ],
    "native_group_norm": lambda f: f(random(2, 4, 3), None, None, 2, 4, 3, 2, 1e-5),
    "norm_except_dim": lambda f: f(random(2, 3), 2, 0),
    "nuclear_norm": lambda f: f(random(2, 3)),
    "pairwise_distance": lambda f: f(random(2, 3), random(2, 3)),
    "pca_lowrank": lambda f: f(random(5, 4)),
    "pdist": lambda f: f(random(3, 2)),
    "qr": lambda f: f(random(3, 2)),
    "slogdet": lambda f: f(random(3, 3)),
    "svd_lowrank": lambda f: [f(random(5, 4)), f(random(4, 5))],
}


class Reached(TorchDispatchMode):
    """The operators that autograd sees: what is composite has become others before it comes here."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().removesuffix(".default"))
        return func(*args, **(kwargs or {}))


def calls(public):
    """Thunks that call the function, and its twin among Tensor's methods."""
    for function in functions(public):
        if public in CALLS:
            yield lambda f=function: CALLS[public](f)
        for op in op_db():
            if public not in (op.name, *(alias.name for alias in op.aliases)) or op.op.__name__ == "<lambda>":
                continue
            samples = list(op.sample_inputs("cpu", torch.float64, requires_grad=True))
            for s in samples[:: 1 + len(samples) // MANY]:
                yield lambda f=function, s=s: f(s.input, *s.args, **s.kwargs)


def reached(public):
    """The operators with a rule that the function reaches, and how often it ran, or raised that it is gone."""
    ran, gone, recorded = 0, 0, Reached()
    for call in calls(public):
        try:
            with recorded:
                call()
            ran += 1
        except (RuntimeError, TypeError) as error:  # samples for the other twin
            gone += "is now removed" in str(error)
    return {n for n in recorded.names & mg.rules.keys() if mg.rules[n].kind == "rule"}, ran, gone


@pytest.mark.parametrize("public", every(3, PUBLIC))
@pytest.mark.filterwarnings("ignore")
def test_the_table_lists_the_operators_that_each_function_reaches(public):
    found, ran, gone = reached(public)
    declared = {name if "::" in name else f"aten::{name}" for name in operators_of[public]}
    if not ran and (gone or declared <= mg.rules.absent.keys()):
        return  # this torch has the name only, to say that it is gone
    assert ran and found == declared - mg.rules.absent.keys(), f"{public} reaches {sorted(found)}"


@pytest.mark.slow
def test_no_function_of_the_database_is_missing():
    for op in op_db():
        if op.supports_autograd and op.op.__name__ != "<lambda>" and not op.name.startswith(("__", "torch.ops.")):
            found, *_ = reached(op.name)
            assert not found or op.name in operators_of, f"{op.name} reaches {sorted(found)}"


# -- what is taken ---------------------------------------------------------------------------------------------------

NORMS = {f"aten::norm.Scalar{overload}" for overload in ("", "Opt_dim", "Opt_dtype", "Opt_dim_dtype")}


@pytest.mark.parametrize(
    "given, meant",
    [
        ("det", {"aten::_linalg_det"}),
        ("torch.det", {"aten::_linalg_det"}),
        ("aten::det", {"aten::_linalg_det"}),
        ("linalg_svd", {"aten::_linalg_svd"}),
        ("linalg.svd", {"aten::_linalg_svd"}),
        ("torch.linalg.svd", {"aten::_linalg_svd"}),
        ("torch.Tensor.svd", {"aten::_linalg_svd"}),
        ("linalg_solve", {"aten::_linalg_solve_ex"}),
        ("cdist", {"aten::_cdist_forward", "aten::_euclidean_dist"}),
        ("normalize", {"aten::linalg_vector_norm"}),
        ("torch.nn.functional.normalize", {"aten::linalg_vector_norm"}),
        ("norm", {*NORMS, "aten::linalg_vector_norm", "aten::_linalg_svd"}),
        ("aten::norm", NORMS),
        (torch.ops.aten.norm, NORMS),
        ("lu_solve", {"aten::linalg_lu_solve"}),
        (torch.linalg.svd, {"aten::_linalg_svd"}),
        (torch.svd, {"aten::_linalg_svd"}),
        (torch.cdist, {"aten::_cdist_forward", "aten::_euclidean_dist"}),
        (torch.norm, {"aten::linalg_vector_norm", "aten::_linalg_svd"}),
        (torch.Tensor.norm, {"aten::linalg_vector_norm", "aten::_linalg_svd"}),
        (torch.Tensor.det, {"aten::_linalg_det"}),
        (torch.dist, {"aten::dist"}),
        (torch.nn.functional.normalize, {"aten::linalg_vector_norm"}),
        (torch.nn.functional.linear, {"aten::addmm", "aten::mm"} | ({"aten::mv"} if torch_reached("2.15") else set())),
        ("tanh", {"aten::tanh"}),
        (torch.sin, {"aten::sin"}),
        (torch.Tensor.exp, {"aten::exp"}),
        (torch.ops.aten.linalg_svd, {"aten::_linalg_svd"}),
        (torch.ops.aten.linalg_svd.default, {"aten::_linalg_svd"}),
        (torch.ops.aten.cdist, {"aten::_cdist_forward", "aten::_euclidean_dist"}),
    ],
)
def test_names_and_functions(given, meant):
    with mg.override(given) as handle:
        assert {rule.name for rule in handle.rules} == meant


def test_the_norm_of_a_tensor_is_under_the_name():
    x = random(3).requires_grad_()
    with mg.override("norm"):
        assert not is_pytorchs(x.norm().grad_fn)
    assert is_pytorchs(x.norm().grad_fn)


def norm(x):
    return x


@pytest.mark.parametrize(
    "given, error, message",
    [
        ("detr", KeyError, "there is no rule 'aten::detr'; did you mean .*'det'"),
        ("torch.linalg.sdv", KeyError, "there is no rule 'torch.linalg.sdv'; did you mean .*'linalg_svd'"),
        ("nestde", KeyError, "did you mean .*'nested'"),
        ("argmax", KeyError, r"no rule acts on argmax \(nondifferentiable\): the result is an index or a count"),
        (torch.argmax, KeyError, r"no rule acts on torch.argmax \(nondifferentiable\)"),
        ("transpose.int", KeyError, r"\(view\): returns a view, which PyTorch differentiates"),
        (torch.ops.aten.t.default, KeyError, r"no rule acts on aten::t \(view\)"),
        (torch.is_complex, KeyError, "no rule acts on torch.is_complex"),
        (norm, TypeError, "override takes names, functions of torch, operators of torch.ops and rules, got <function norm"),
        (torch.nn.Linear, TypeError, "override takes names"),
        (None, TypeError, "got None"),
    ],
)  # fmt: skip
def test_functions_without_a_rule(given, error, message):
    for make in (mg.override, mg.install):
        with pytest.raises(error, match=message):
            make("dist", given)


@pytest.mark.parametrize(
    "name", ["norm", "linalg.svd", "aten::dist", "torch.linalg.norm", torch.linalg.svd, "*"], ids=str
)
def test_find_returns_the_rules_that_override_takes(name):
    with mg.override(name) as handle:
        assert tuple(mg.rules.find(name)) == handle.rules


def test_the_registry_resolves_names():
    with pytest.raises(
        KeyError, match=r"no rule 'norm'; `find\('norm'\)` returns the rules that `override` takes .*aten::norm.Sc"
    ):
        mg.rules["norm"]
    with pytest.raises(AttributeError, match=r"no rule 'linalg_svd'; `find\('linalg_svd'\)` .*: aten::_linalg_svd$"):
        _ = mg.rules.linalg_svd
    for unknown in ("nrm", "aten::nrm"):
        with pytest.raises(KeyError, match="there is no rule 'aten::nrm'; did you mean"):
            mg.rules.find(unknown)
    assert mg.ops.find("norm_jvp") == [mg.ops.norm_jvp]
    assert repr(mg.rules).startswith(f"<registry (rule, {len(mg.rules)}): 'aten::")
