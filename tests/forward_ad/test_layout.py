"""The layout contract of forward mode: what PyTorch's ``autograd_meta.cpp`` says of views, writes and tangents, as a table."""

import itertools

import pytest
import torch

from torch_manualgrad.forward_ad import dual_level, has_same_meta, make_dual, unpack_dual
from torch_manualgrad.forward_ad.levels.layout import Shadow, Shadows

DTYPE = torch.complex128

# A view of a (4, 4) complex tensor, and the same of its tangent. Each holds memory that some others hold too.
VIEWS = {
    "as_strided": lambda x: x.as_strided((2, 3), (4, 1), 1),
    "as_strided with gaps": lambda x: x.as_strided((2, 2), (8, 3), 2),
    "transpose": lambda x: x.transpose(0, 1),
    "diagonal": lambda x: x.diagonal(1),
    "select": lambda x: x[1],
    "slice": lambda x: x[::2, 1:],
    "chunk": lambda x: x.chunk(2, 1)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "view": lambda x: x.view(2, 8)[0],
    "conj": lambda x: x.conj(),
    "conj of a part": lambda x: x[1:].mT.conj(),
    "real": lambda x: x.real,
    "imag": lambda x: x.imag[1],
    "imag of conj": lambda x: x.conj().imag,  # has the neg bit
    "view_as_real": lambda x: torch.view_as_real(x)[..., 1],
}
READ_ONLY = {"expand": lambda x: x[:1].expand(3, 4), "unfold": lambda x: x.unfold(0, 2, 1)}


def fill(x, seed):
    return torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed))


# The six cases. Each is linear: on tangents it does what it does on primals. It is given foo, a function from a tensor
# (to copy into, and a seed) to what is copied in, and two views; it returns all tensors whose tangents count.
def into_a_tensor(foo, bar, view, other):
    return [foo.copy_(bar(foo, 1))]


def from_view_to_base(foo, bar, view, other):
    part = view(foo)
    part.copy_(bar(part, 1))
    return [foo, part]


def from_base_to_views(foo, bar, view, other):
    part, second = view(foo), other(foo)
    foo.copy_(bar(foo, 1))
    return [part, second, foo]


def between_views(foo, bar, view, other):
    part, second = view(foo), other(foo)
    part.copy_(bar(part, 1))
    return [second, foo, part]


def views_of_views(foo, bar, view, other):
    part = view(foo)
    inner = part.flatten()[1:] if part.is_contiguous() else part[..., 1:]
    inner.copy_(bar(inner, 1))
    late = other(foo)
    foo.mul_(2)
    return [inner, part, foo, late]


def made_later(foo, bar, view, other):
    part = view(foo)
    part.add_(bar(part, 1))
    return [other(foo), view(foo)]


CASES = [into_a_tensor, from_view_to_base, from_base_to_views, between_views, views_of_views, made_later]
PAIRS = [*zip(VIEWS, [*list(VIEWS)[1:], "as_strided"]), *itertools.product(["diagonal", "imag of conj"], READ_ONLY)]


@pytest.mark.parametrize("dual_before", [False, True], ids=["plain", "dual"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_tangents_follow_views_and_writes(case, dual_before):
    for name, second in PAIRS:
        view, other = VIEWS[name], {**VIEWS, **READ_ONLY}[second]
        start, start_tangent = fill(torch.empty(4, 4, dtype=DTYPE), 8), fill(torch.empty(4, 4, dtype=DTYPE), 9)
        expected = case(start.clone(), fill, view, other)
        zero = start_tangent if dual_before else torch.zeros_like(start)
        tangents = case(zero.clone(), lambda x, seed: fill(x, seed + 50), view, other)
        with dual_level():
            foo = make_dual(start, start_tangent) if dual_before else start.clone()
            found = case(foo, lambda x, seed: make_dual(fill(x, seed), fill(x, seed + 50)), view, other)
            for y, value, t in zip(found, expected, tangents):
                unpacked = unpack_dual(y)
                assert torch.equal(unpacked.primal, value), (name, second)
                assert torch.allclose(unpacked.tangent, t, rtol=0, atol=1e-15), (name, second)
                assert has_same_meta(unpacked.tangent, y) and has_same_meta(unpacked.primal, y), (name, second)


@pytest.mark.parametrize("name", [*VIEWS, *READ_ONLY])
def test_the_tangent_of_a_view_is_a_view_of_the_tangent(name):
    view = {**VIEWS, **READ_ONLY}[name]
    with dual_level():
        foo = make_dual(fill(torch.empty(4, 4, dtype=DTYPE), 1), fill(torch.empty(4, 4, dtype=DTYPE), 2))
        base, part = unpack_dual(foo).tangent, unpack_dual(view(foo)).tangent
        assert base.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        assert torch.equal(part, view(base))
        base.mul_(3)  # and a change in place of one is seen in the other
        assert torch.equal(unpack_dual(view(foo)).tangent, view(base))


LAYOUTS = {
    "row-major": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "a part": lambda x: torch.cat([x, x])[1:5],
    "every second": lambda x: torch.stack([x, x], -1)[..., 1],
    "conj": lambda x: x.conj(),
    "imag of conj": lambda x: x.conj().imag,
    "expanded": lambda x: x[:, :1].expand(4, 3),
    "empty": lambda x: x[:0],
    "0-dim": lambda x: x[0, 0].clone(),
    "with dims of 1": lambda x: x[:1].as_strided((1, 4), (77, 1)),
}


@pytest.mark.parametrize("tracked", [False, True], ids=["plain", "tracked"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_dual_has_the_metadata_of_its_primal(name, tracked):
    leaf, other = (fill(torch.empty(4, 4, dtype=DTYPE), seed) for seed in (1, 2))
    primal = LAYOUTS[name](leaf.requires_grad_(tracked))
    tangent = LAYOUTS[name](other) if name == "expanded" else LAYOUTS[name](other).resolve_conj().contiguous().clone()
    with dual_level():
        dual = make_dual(primal, tangent)
        assert has_same_meta(dual, primal)
        unpacked = unpack_dual(dual)
        assert has_same_meta(unpacked.tangent, primal) and has_same_meta(unpacked.primal, primal)
        assert torch.equal(unpacked.tangent, tangent) and torch.equal(dual, primal)
        assert unpack_dual(primal).tangent is None and unpacked.tangent is not tangent
        assert dual.requires_grad == tracked
        if tracked and dual.numel():
            assert torch.autograd.grad(dual.abs().sum(), leaf)[0].abs().sum() > 0


def test_as_strided_reaches_the_rest_of_the_storage():
    whole = torch.randn(5)
    with dual_level():
        dual = make_dual(whole[:4], torch.ones(4))
        assert torch.equal(unpack_dual(dual.as_strided((5,), (1,), 0)).tangent, torch.tensor([1.0, 1, 1, 1, 0]))
        assert torch.equal(dual.as_strided((5,), (1,), 0), whole)


def test_a_write_in_place_keeps_the_tangent_where_it_is():
    with dual_level():
        x = make_dual(torch.rand(3), torch.ones(3))
        t = unpack_dual(x).tangent
        x.sin_().mul_(2)
        assert unpack_dual(x).tangent.data_ptr() == t.data_ptr()


METADATA = [  # two tensors, and whether they have the same metadata
    (torch.zeros(2, 3), torch.ones(2, 3), True),
    (torch.zeros(2, 3), torch.zeros(3, 2).t(), False),  # strides
    (torch.zeros(2, 3), torch.zeros(3, 2), False),  # sizes
    (torch.zeros(6)[1:4], torch.zeros(6)[2:5], False),  # offset
    (torch.zeros(6)[:4], torch.zeros(4), False),  # storage size
    (torch.zeros(6)[:0], torch.zeros(6)[3:3], True),  # without elements
    (torch.zeros(1, 3), torch.zeros(1, 3).as_strided((1, 3), (9, 1)), True),  # a dim of one element
    (torch.zeros(2, dtype=DTYPE), torch.zeros(2, dtype=DTYPE).conj(), False),
    (torch.zeros(2, dtype=DTYPE).imag, torch.zeros(2, dtype=DTYPE).conj().imag, False),
    (torch.zeros(4), torch.zeros(4, dtype=torch.float64), True),  # the size counts in elements
]


@pytest.mark.parametrize("a, b, expected", METADATA)
def test_has_same_meta(a, b, expected):
    assert has_same_meta(a, b) is expected and has_same_meta(b, a) is expected


def refusals():
    x, t, level = torch.randn(2, 3), torch.randn(2, 3), dual_level()
    dual = lambda: make_dual(x, t)  # noqa: E731
    yield "sizes", ValueError, r"tangent has sizes \[3, 2\], and primal \[2, 3\]", lambda: make_dual(x, t.mT)
    yield "a dual tangent", ValueError, "tangent itself has a tangent at level", lambda: make_dual(x, dual())
    yield "a second tangent", ValueError, "primal has a tangent at level .* cannot be set", lambda: make_dual(dual(), t)
    yield "integers", TypeError, "primal .* got dtype torch.int64", lambda: make_dual(torch.arange(3), torch.ones(3))
    yield "an integer tangent", TypeError, "tangent .* torch.int64", lambda: make_dual(torch.ones(3), torch.arange(3))
    yield "dtypes", TypeError, "tangent has dtype torch.float64, and primal", lambda: make_dual(x, t.double())
    yield "a device", TypeError, "tangent has device meta", lambda: make_dual(x, t.to("meta"))
    yield "a number", TypeError, "primal .* got float", lambda: make_dual(1.0, t)
    yield "sparse", TypeError, "layout torch.sparse_coo", lambda: make_dual(x.to_sparse(), t.to_sparse())
    expanded = torch.randn(3, 1).expand(3, 2)
    yield "expanded", ValueError, "primal is expanded in dim 1", lambda: make_dual(expanded, torch.randn(3, 2))
    yield "not a level", TypeError, "level must be .* got 3", lambda: make_dual(x, t, level=3)
    yield "a level not open", RuntimeError, "depth 0, closed", lambda: make_dual(x, t, level=level)
    yield "unpacking a number", TypeError, "expected a tensor, got float", lambda: unpack_dual(1.0)
    yield "another dtype", NotImplementedError, "view.dtype", lambda: dual().view(torch.bfloat16)
    yield "memory", NotImplementedError, "resize_", lambda: dual().resize_(9)
    yield "integers in it", NotImplementedError, "integers", lambda: dual().view(torch.int32).zero_()


@pytest.mark.parametrize("error, message, call", [pytest.param(*r[1:], id=r[0]) for r in refusals()])
def test_a_refusal_names_the_argument_and_its_value(error, message, call):
    with dual_level(), pytest.raises(error, match=message):
        call()


def test_without_a_level():
    with pytest.raises(RuntimeError, match="no dual level is open"):
        make_dual(torch.ones(2), torch.ones(2))
    with pytest.raises(RuntimeError, match="no dual level is open"):
        unpack_dual(torch.ones(2))


# -- planted faults: that the tests above can fail


def with_other_strides(monkeypatch):
    """A tangent that lies in memory as it came."""
    own = Shadow.of
    monkeypatch.setattr(Shadow, "of", lambda self, x: own(self, x).contiguous())


def without_views(monkeypatch):
    """A tangent that belongs to a tensor, and not to its storage: a view finds none."""
    own = Shadows.put
    monkeypatch.setattr(Shadows, "put", lambda self, storage, shadow: own(self, storage, Shadow(shadow.base.clone())))
    own_of = Shadow.of
    monkeypatch.setattr(Shadow, "of", lambda self, x: own_of(self, x).clone())


@pytest.mark.parametrize("fault", [with_other_strides, without_views])
def test_a_planted_fault_is_found(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test_tangents_follow_views_and_writes(between_views, True)
