"""Reductions, softmax and cumulative sums of nested tensors: against a loop over the components, and in every mode."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.tensors import rounded
from torch import Tensor

from torch_manualgrad import nested as N
from torch_manualgrad.nested import Ragged
from torch_manualgrad.testing import Sample, check

INF = math.inf


def batch(sizes: list[tuple[int, ...]], ragged: list[int], dtype: torch.dtype = torch.float64) -> Ragged:
    return Ragged.from_components([rounded(*s, dtype=dtype, seed=i) for i, s in enumerate(sizes)], ragged_dims=ragged)


BATCHES = {
    "first": ([(3, 2), (4, 2), (1, 2)], [1]),
    "last": ([(2, 3), (2, 1)], [2]),
    "middle": ([(2, 3, 2), (2, 1, 2), (2, 4, 2)], [2]),
    "only": ([(5,), (2,)], [1]),
    "one": ([(4, 2)], [1]),
    "two": ([(2, 3), (3, 1), (1, 2)], [1, 2]),
    "two apart": ([(2, 2, 3), (3, 2, 1)], [1, 3]),
    "two of three": ([(2, 2, 3), (2, 3, 1)], [2, 3]),
    "three": ([(2, 1, 3), (1, 3, 2)], [1, 2, 3]),
}
PACKED = [k for k, (_, ragged) in BATCHES.items() if len(ragged) == 1]

OURS = {
    "sum": N.sum,
    "mean": N.mean,
    "prod": N.prod,
    "amax": N.amax,
    "amin": N.amin,
    "max": N.max,
    "min": N.min,
    "logsumexp": N.logsumexp,
    "var": lambda x, dim, keepdim=False: N.var(x, dim, correction=0, keepdim=keepdim),
    "std": lambda x, dim, keepdim=False: N.std(x, dim, correction=0.5, keepdim=keepdim),
    **{f"norm {p}": lambda x, dim, keepdim=False, p=p: N.vector_norm(x, p, dim, keepdim) for p in (0, 1, 2, 3, 0.5, -1, INF, -INF)},
}  # fmt: skip
DENSE = {
    **{name: getattr(torch, name) for name in ("sum", "mean", "prod", "amax", "amin", "max", "min", "logsumexp")},
    "var": lambda x, dim, keepdim: torch.var(x, dim, correction=0, keepdim=keepdim),
    "std": lambda x, dim, keepdim: torch.std(x, dim, correction=0.5, keepdim=keepdim),
    **{f"norm {p}": lambda x, dim, keepdim, p=p: torch.linalg.vector_norm(x, p, dim, keepdim) for p in (0, 1, 2, 3, 0.5, -1, INF, -INF)},
}  # fmt: skip
MAPS = {"softmax": N.softmax, "log_softmax": N.log_softmax, "cumsum": N.cumsum}
ONE_DIM = ("prod", "max", "min")


def parts(result: Ragged | Tensor) -> list[Tensor]:
    return list(result.components()) if isinstance(result, Ragged) else list(result)


def all_close(actual: list[Tensor], expected: list[Tensor], **tolerance: float) -> None:
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e, equal_nan=True, **tolerance)


def first(result):
    return result[0] if isinstance(result, tuple) else result


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("which", BATCHES)
def test_one_dim_is_the_loop_over_components(which, name):
    x = batch(*BATCHES[which])
    for dim, keepdim in itertools.product(range(1, x.dim()), (False, True)):
        ours = OURS[name](x, dim - x.dim() if keepdim else dim, keepdim)
        dense = [DENSE[name](c, dim - 1, keepdim) for c in x.components()]
        if isinstance(ours, tuple):
            all_close(parts(ours.indices), [d.indices for d in dense])
            ours, dense = ours.values, [d.values for d in dense]
        all_close(parts(ours), dense)
        if dim in x.ragged_dims and x.sizes is None:
            assert isinstance(ours, Tensor)
        else:
            assert ours.dim() == x.dim() - (not keepdim)


@pytest.mark.parametrize("name", [n for n in OURS if n not in ONE_DIM])
@pytest.mark.parametrize("which", BATCHES)
def test_several_dims(which, name):
    x = batch(*BATCHES[which])
    inner = range(1, x.dim())
    choices = [c for n in inner[1:] for c in itertools.combinations(inner, n)]
    for dims, keepdim in itertools.product(choices, (False, True)):
        if x.sizes is not None and len(dims) < len(inner):
            with pytest.raises(ValueError, match="with several ragged dims, expected one component dim or all"):
                OURS[name](x, dims, keepdim)
            continue
        all_close(
            parts(OURS[name](x, dims, keepdim)),
            [DENSE[name](c, [d - 1 for d in dims], keepdim) for c in x.components()],
        )


@pytest.mark.parametrize("name", [n for n in OURS if n not in ONE_DIM])
def test_the_batch_goes_with_the_ragged_dim(name):
    x = batch(*BATCHES["middle"])
    all_close([OURS[name](x, (0, 2))], [DENSE[name](x.values, 1, False)])
    all_close([OURS[name](x, (0, 2, 3))], [DENSE[name](x.values, (1, 2), False)])
    all_close([OURS[name](x, (0, -2), True)], [DENSE[name](x.values, 1, True)[None]])
    for which in BATCHES:
        x = batch(*BATCHES[which])
        total = DENSE[name](x.values.flatten(), 0, False)
        all_close([OURS[name](x, None)], [total])
        assert OURS[name](x, tuple(range(x.dim())), True).shape == (1,) * x.dim()


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("which", BATCHES)
def test_maps(which, name):
    x = batch(*BATCHES[which])
    for dim in range(1, x.dim()):
        all_close(parts(MAPS[name](x, dim)), [getattr(torch, name)(c, dim - 1) for c in x.components()])
        assert MAPS[name](x, dim - x.dim()).shape == x.shape


def test_glu():
    x = batch([(3, 4), (2, 4)], [1])
    all_close(parts(N.glu(x)), [torch.nn.functional.glu(c) for c in x.components()])
    x = batch([(2, 3), (2, 1)], [2])
    all_close(parts(N.glu(x, 1)), [torch.nn.functional.glu(c, 0) for c in x.components()])
    for dim in (0, 2):
        with pytest.raises(ValueError, match="dim: expected a d"):
            N.glu(x, dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int32], ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_dtypes(dtype, index):
    values = (rounded(9, 3, dtype=torch.complex128 if dtype.is_complex else torch.float64) * 3).to(dtype)
    x = Ragged(values, torch.tensor([0, 4, 9], dtype=index), (2, None, 3))
    wide = Ragged(values.to(torch.complex128 if dtype.is_complex else torch.float64), x.offsets, x.shape)
    names = {"sum", "amax", "amin", "max", "min", "cumsum"} if dtype == torch.int32 else {*OURS, *MAPS}
    if dtype.is_complex:
        names -= {"amax", "amin", "max", "min", "softmax", "log_softmax", *(n for n in names if "norm" in n)}
        names |= {"norm 2", "norm 3", "norm 1", "norm inf"}
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3}.get(dtype, 1e-4)
    for name in sorted(names):
        ours, reference = (first((OURS | MAPS)[name](r, 1)) for r in (x, wide))
        ours, reference = (r.values if isinstance(r, Ragged) else r for r in (ours, reference))
        kept = name in MAPS or name in ("sum", "prod", "mean", "logsumexp")
        expected = torch.int64 if dtype == torch.int32 and kept else dtype if kept else dtype.to_real()
        assert ours.dtype == (dtype if "ma" in name[1:3] or name in ("max", "min") else expected), name
        torch.testing.assert_close(ours.to(reference.dtype), reference, rtol=tolerance, atol=tolerance, msg=name)
    for name in ("mean", "var") if dtype == torch.int32 else ():
        with pytest.raises(TypeError, match="^x: expected floating point or complex values, got torch.int32"):
            OURS[name](x, 1)


INTEGERS = {
    "prod": lambda x, d: x.prod(d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "sum": lambda x, d: x.sum(d),
    "cumsum": lambda x, d: x.cumsum(d),
    "amax": lambda x, d: x.amax(d),
    "amin": lambda x, d: x.amin(d),
    "max": lambda x, d: x.max(d)[0],
    "argmin": lambda x, d: x.min(d)[1],
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64], ids=str)
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_and_booleans(name, dim, dtype):
    x = Ragged((rounded(9, 3) * 3).abs().to(dtype), torch.tensor([0, 4, 5, 9]), (3, None, 3))
    for found, component in zip(INTEGERS[name](x, dim), x, strict=True):
        torch.testing.assert_close(found, INTEGERS[name](component, dim - 1))
    assert name != "prod" or torch.equal(x.prod(), x.values.prod())


def test_empty_components():
    x = Ragged(rounded(3, 2), torch.tensor([0, 0, 3, 3]), (3, None, 2))
    for name, empty in {"sum": 0, "prod": 1, "mean": math.nan, "var": math.nan, "logsumexp": -INF, "norm 2": 0}.items():
        ours = OURS[name](x, 1)
        all_close([ours[1]], [DENSE[name](x.values, 0, False)])
        all_close([ours[0], ours[2]], [torch.full((2,), float(empty), dtype=torch.float64)] * 2)
    for name in ("amax", "amin", "max", "min"):
        with pytest.raises(IndexError, match="component 0 is empty along the reduced dim"):
            OURS[name](x, 1)
    all_close([MAPS["softmax"](x, 1).values], [x.values.softmax(0)])


@pytest.mark.parametrize("count", [0, 2])
def test_no_entries_at_all(count):
    x = Ragged(rounded(0, 2).requires_grad_(), torch.zeros(count + 1, dtype=torch.int64), (count, None, 2))
    for name in OURS:
        if name not in ("amax", "amin", "max", "min", "norm inf", "norm -inf") or not count:
            ours = first(OURS[name](x, 1))
            assert ours.shape == (count, 2), name
            assert torch.autograd.grad(ours.sum(), x.values)[0].shape == (0, 2)
    for name in MAPS:
        assert MAPS[name](x, 1).values.shape == (0, 2)


# -- derivatives ------------------------------------------------------------------------------------------------------


def of_values(function, x: Ragged, *args, **kwargs):
    def f(values: Tensor):
        result = function(x.like(values), *args, **kwargs)
        result = first(result)
        return result.values if isinstance(result, Ragged) else result

    return f


@pytest.mark.parametrize("name", [*OURS, *MAPS])
@pytest.mark.parametrize("which", ["middle", "only", "two"])
def test_every_mode(which, name):
    x = batch(*BATCHES[which])
    for dim in [x.ragged_dims[0]] if which != "middle" else [2, (2, 3)]:
        if isinstance(dim, tuple) and name in (*ONE_DIM, *MAPS):
            continue
        # with several ragged dims, the size of the result is read from the sizes
        gaps = {"fake": "a fake tensor has none to read"} if which == "two" and name in OURS else {}
        check(of_values((OURS | MAPS)[name], x, dim), [Sample(x.values)], name=name, gaps=gaps)


@pytest.mark.parametrize(
    "name",
    ["sum", "mean", "prod", "var", "std", "logsumexp", "norm 2", "norm 3", "amax", "softmax", "log_softmax", "cumsum"],
)
def test_every_mode_over_a_dense_dim(name):
    x = batch(*BATCHES["middle"])
    check(of_values((OURS | MAPS)[name], x, 1), [Sample(x.values)], name=name)


@pytest.mark.parametrize("name", ["sum", "prod", "logsumexp", "norm 3", "norm 2"])
def test_every_mode_of_complex_values(name):
    x = batch(*BATCHES["middle"], dtype=torch.complex128)
    check(of_values(OURS[name], x, 2), [Sample(x.values)], name=name)


@pytest.mark.parametrize("name", ["sum", "softmax", "log_softmax", "amax", "logsumexp"])
def test_compiled(name):
    x = batch(*BATCHES["first"])
    check(of_values((OURS | MAPS)[name], x, 1), [Sample(x.values)], modes=("rev",), checks=("compile",), name=name)


@pytest.mark.parametrize("which, dim", [("first", 1), ("first", 2), ("only", 1)])
def test_products_of_zeros(which, dim):
    x = batch(*BATCHES[which])
    values = x.values.clone()
    values[0], values[1], values[-1] = 0, 0, 0
    check(of_values(N.prod, x, dim), [Sample(values)])

    x = Ragged(torch.zeros(4, dtype=torch.float64), torch.tensor([0, 1, 4]), (2, None))
    f = torch.func.hessian(lambda v: N.prod(x.like(v), 1)[1])
    third = torch.func.jacrev(f)(x.values)
    expected = torch.zeros_like(third)
    for place in itertools.permutations((1, 2, 3)):
        expected[place] = 1
    assert torch.equal(third, expected)


def test_ties_share_and_the_first_is_chosen():
    values = torch.tensor([1.0, 2.0, 2.0, 2.0, -1.0, -1.0, 3.0], dtype=torch.float64, requires_grad=True)
    x = Ragged(values, torch.tensor([0, 4, 7]), (2, None))

    def gradient(y: Tensor) -> list[float]:
        return torch.autograd.grad(y.sum(), values)[0].tolist()

    third = 1 / 3
    assert gradient(N.amax(x, 1)) == [0, third, third, third, 0, 0, 1]
    assert gradient(N.amin(x, 1)) == [1, 0, 0, 0, 0.5, 0.5, 0]
    assert gradient(N.max(x, 1).values) == [0, 1, 0, 0, 0, 0, 1] and N.max(x, 1).indices.tolist() == [1, 2]
    assert gradient(N.min(x, 1).values) == [1, 0, 0, 0, 1, 0, 0] and N.min(x, 1).indices.tolist() == [0, 0]
    assert torch.func.jvp(lambda v: N.amax(x.like(v), 1), (values.detach(),), (torch.arange(7.0).double(),))[
        1
    ].tolist() == [2, 6]
    rows = Ragged(torch.ones(4, 2, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3, 4]), (2, None, 2))
    (shared,) = torch.autograd.grad(N.amax(rows, (1, 2)).sum(), rows.values)
    torch.testing.assert_close(shared, torch.tensor([1 / 6] * 3 + [0.5], dtype=torch.float64)[:, None].expand(4, 2))


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
@pytest.mark.parametrize("p", [2, 3, 0.5, -1.5])
def test_norms_do_not_overflow(p, scale):
    x = batch(*BATCHES["first"])
    ones = Ragged(x.values.requires_grad_(), x.offsets, x.shape)
    scaled = Ragged((x.values.detach() * scale).requires_grad_(), x.offsets, x.shape)
    a, b = (N.vector_norm(r, p, 1) for r in (ones, scaled))
    torch.testing.assert_close(b / scale, a)
    torch.testing.assert_close(torch.autograd.grad(b.sum(), scaled.values), torch.autograd.grad(a.sum(), ones.values))


@pytest.mark.parametrize("p", [0, 0.5, 1, 1.5, 2, 3, -1, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_at_zero_every_derivative_is_finite(p, dtype):
    x = Ragged(torch.zeros(5, 2, dtype=dtype), torch.tensor([0, 3, 3, 5]), (3, None, 2))
    if math.isinf(p):
        x = Ragged(x.values, torch.tensor([0, 3, 5]), (2, None, 2))
    some = x.values.clone()
    some[0] = 1

    def f(v: Tensor) -> Tensor:
        return N.vector_norm(x.like(v), p, 1).sum()

    for values in (x.values, some):
        v = values.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(v), v, create_graph=True)
        (h,) = torch.autograd.grad(g.abs().square().sum() + 0 * v.abs().square().sum(), v)
        assert g.isfinite().all() and h.isfinite().all()
        assert p == 1 or math.isinf(p) or values.any() or not g.any()


def test_equal_entries_have_no_deviation():
    x = batch(*BATCHES["first"])
    values = torch.ones_like(x.values, requires_grad=True)
    y = N.std(x.like(values), 1, correction=0)
    (g,) = torch.autograd.grad(y.sum(), values, create_graph=True)
    (h,) = torch.autograd.grad(g.sum() + 0 * values.sum(), values)
    assert not y.any() and not g.any() and h.isfinite().all()


def test_minus_infinity_takes_no_part():
    x = batch(*BATCHES["first"])
    values = x.values.clone()
    values[0], values[7] = -INF, -INF  # one entry of three; all of the last component
    values.requires_grad_()
    y = N.logsumexp(x.like(values), 1)
    all_close(list(y), [c.logsumexp(0) for c in x.like(values).components()])
    (g,) = torch.autograd.grad(y[:2].sum() + y[2].exp().sum(), values)
    assert g.isfinite().all() and not g[[0, 7]].any()
    s = N.softmax(x.like(values), 1).values
    assert not s[0].any() and s[1:7].isfinite().all() and s[7].isnan().all()


@pytest.mark.parametrize("function", [N.amax, N.softmax, N.log_softmax, N.logsumexp, N.cumsum, N.sum, N.prod])
def test_nan_stays_in_its_component(function):
    x = batch(*BATCHES["first"])
    values = x.values.clone()
    values[1, 0] = math.nan
    result = function(x.like(values), 1)
    for c, clean in enumerate([False, True, True]):
        part = parts(result)[c]
        assert part[..., 1].isfinite().all()
        assert part[..., 0].isfinite().all() == clean


# -- torch's nested tensors and errors --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_torchs_nested_tensors(layout):
    components = [rounded(3, 2), rounded(1, 2, seed=1), rounded(4, 2, seed=2)]
    leaves = [c.clone().requires_grad_() for c in components]
    x = torch.nested.as_nested_tensor(leaves, layout=layout)
    soft, total, last = N.softmax(x, 1), N.sum(x, 1), N.sum(x, 2)
    assert soft.is_nested and soft.layout == layout and not total.is_nested and last.is_nested
    all_close(list(soft.unbind()), [c.softmax(0) for c in leaves])
    all_close(list(total), [c.sum(0) for c in leaves])
    all_close(list(last.unbind()), [c.sum(1) for c in leaves])
    weights = [rounded(*c.shape, seed=5) for c in components]
    ours = torch.autograd.grad(sum((w * s).sum() for w, s in zip(weights, soft.unbind())), leaves)
    dense = torch.autograd.grad(sum((w * c.softmax(0)).sum() for w, c in zip(weights, leaves)), leaves)
    all_close(list(ours), list(dense))
    assert N.max(x, 1).indices.tolist() == [c.max(0).indices.tolist() for c in components]


@pytest.mark.parametrize("function", [N.sum, N.mean, N.amax, N.softmax, N.cumsum, N.prod, N.max])
def test_wrong_dims(function):
    x = batch(*BATCHES["first"])
    for dim in (3, -4):
        with pytest.raises(IndexError, match=f"dim: {dim} is out of range for a nested tensor of 3 dims"):
            function(x, dim)
    with pytest.raises(ValueError, match="dim: .*the batch"):
        function(x, 0)


def test_other_errors():
    x = batch(*BATCHES["first"])
    with pytest.raises(RuntimeError, match=r"dim: a dim appears twice in \[1, -2\]"):
        N.sum(x, (1, -2))
    with pytest.raises(ValueError, match="dim: the batch is reduced only together with the ragged dims"):
        N.sum(x, (0, 2))
    with pytest.raises(ValueError, match="keepdim: given without a dim"):
        N.max(x, None, True)
    with pytest.raises(TypeError, match="expected a Ragged or a nested tensor"):
        N.sum(rounded(3, 2), 1)
