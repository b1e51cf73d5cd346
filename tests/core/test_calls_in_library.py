"""Calls with lists of tensors, calls in place and decisions by metadata are served without Python, and as Python serves them."""

from __future__ import annotations

import pytest
import torch
from helpers.calls import needs_library

import torch_manualgrad as mg
from torch_manualgrad.core.override import compiled_calls
from torch_manualgrad.core.rule import ByMetadata

pytestmark = needs_library


def leaf(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def derivatives(f, inputs, order=2):
    """The outputs of f, and their derivatives of each order along themselves."""
    found = [f(*inputs)]
    results = [*found]
    for _ in range(order):
        grads = torch.autograd.grad([y.sin().sum() for y in found], inputs, create_graph=True, allow_unused=True)
        found = [g for g in grads if g is not None and g.requires_grad]
        results += grads
        if not found:
            break
    return results


def in_python(f):
    before = compiled_calls.counts().python
    f()
    return compiled_calls.counts().python - before


def check_without_python(f, inputs):
    expected = derivatives(f, inputs)
    with mg.override("*"):
        for _ in range(4):
            found = derivatives(f, inputs)
        assert in_python(lambda: derivatives(f, inputs)) == 0
        y = f(*inputs)
    assert "AutogradFunction" not in str(type(y.grad_fn).__mro__)  # the class of a node of Python
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


ROWS = torch.tensor([2, 0])
LISTS = {
    "cat": lambda x, y: torch.cat([x * y, y, x.detach()], 1),
    "cat, one tensor": lambda x, y: torch.cat([x * y]),
    "stack": lambda x, y: torch.stack([x, y, x], 1),
    "block_diag": lambda x, y: torch.block_diag(x, y),
    "index": lambda x, y: (x * y)[ROWS],
    "index after a slice": lambda x, y: (x * y)[:, ROWS],
    "index_put": lambda x, y: torch.index_put(x * y, (ROWS,), y[:2], accumulate=True),
    "unsafe_split": lambda x, y: torch.stack([z.sin() for z in torch.unsafe_split(x * y, 2, 1)]),
    "unsafe_split, one used": lambda x, y: torch.unsafe_split(x * y, 2, 1)[1],
}


@pytest.mark.parametrize("name", LISTS)
def test_lists(name):
    check_without_python(LISTS[name], (leaf(3, 4), leaf(3, 4, seed=1)))


def test_lengths_and_what_is_tracked_are_told_apart():
    x, y = leaf(2, 3), leaf(4, 3, seed=1)
    with mg.override("*"), compiled_calls.recording_after(0):
        for parts in ([x, y], [y, x], [x, y, x], [x.detach(), y], [x, y], [y], [x, x]):
            for _ in range(3):
                out = torch.cat(parts)
                cotangent = torch.arange(out.numel()).to(out).view_as(out)
                wanted = [p for p in {id(p): p for p in parts}.values() if p.requires_grad]
                found = torch.autograd.grad(out, wanted, cotangent)
                pieces = cotangent.split([len(p) for p in parts])
                for w, g in zip(wanted, found):
                    assert torch.equal(g, sum(c for p, c in zip(parts, pieces) if p is w))


def test_kernels_of_formulas_in_recordings():
    """The backward of a layer norm is one operator of ours where it is differentiated again; its mask is a constant."""
    tensors = leaf(4, 3), leaf(3, seed=1), leaf(3, seed=2)

    def twice(wanted):
        y = torch.nn.functional.layer_norm(tensors[0], (3,), *tensors[1:])
        grads = torch.autograd.grad(y.sin().sum(), wanted, create_graph=True)
        return [*grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), tensors)]

    for wanted in (tensors[:1], tensors[1:], tensors, tensors[:2], tensors[2:]):
        expected = twice(wanted)
        with mg.override("*"):
            for _ in range(5):
                for a, b in zip(twice(wanted), expected, strict=True):
                    torch.testing.assert_close(a, b)
            assert in_python(lambda: twice(wanted)) == 0


def test_a_tangent_in_a_list():
    x, y = leaf(2, 3), leaf(2, 3, seed=1)
    with mg.override("*"), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, y.detach())
        out = torch.cat([y, dual])
        tangent = torch.autograd.forward_ad.unpack_dual(out).tangent
        assert torch.equal(tangent, torch.cat([torch.zeros_like(y), y]))


def test_a_list_that_is_saved_is_an_attribute():
    rows = [None, torch.tensor([0, 1])]
    with mg.override("*"):
        node = torch.ops.aten.index.Tensor(leaf(3, 4) * 1, rows).grad_fn
    none, indices = node._saved_indices
    assert none is None and torch.equal(indices, rows[1])
    assert torch.equal(node._raw_saved_indices[1].unpack(), rows[1])


IN_PLACE = {
    "relu_": lambda x, y: (x * y).relu_() * y,
    "add_": lambda x, y: (x * y).add_(y, alpha=3),
    "add_ of a number": lambda x, y: (x * y).add_(2.5),
    "mul_ by a number": lambda x, y: (x * y).mul_(0.5),
    "mul_ by a constant": lambda x, y: (x * y).mul_(y.detach()),
    "exp_": lambda x, y: (x * y).exp_(),
    "masked_fill_": lambda x, y: (x * y).masked_fill_(x > 0, 0.25),
    "clamp_": lambda x, y: (x * y).clamp_(-0.3, 0.4),
    "addmm_": lambda x, y: (x * y).addmm_(x, y.mT @ y),
    "on a constant": lambda x, y: x.detach().clone().add_(y),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name):
    check_without_python(IN_PLACE[name], (leaf(3, 4), leaf(3, 4, seed=1)))


HARD = {
    "what is overwritten is kept": lambda x, y: (x * y).mul_(y),
    "a view": lambda x, y: (lambda z: (z[1:].sub_(y[:2]), z)[1])(x * y),
    "a base of views": lambda x, y: (lambda z: (z.mT, z.add_(y))[0])(x * y),
    "itself": lambda x, y: (lambda z: z.add_(z))(x * y),
}


@pytest.mark.parametrize("name", HARD)
def test_in_place_where_python_serves(name):
    f, inputs = HARD[name], (leaf(3, 4), leaf(3, 4, seed=1))
    expected = derivatives(f, inputs)
    with mg.override("*"):
        for _ in range(4):
            for a, b in zip(derivatives(f, inputs), expected, strict=True):
                torch.testing.assert_close(a, b)


def test_in_place_with_an_operand_on_the_same_memory():
    """PyTorch has an error for it in the backward, as it keeps the operand."""
    x, y = leaf(3, 4), leaf(3, 4, seed=1)
    expected = derivatives(lambda x, y: (x * y) * (x * y).detach(), (x, y))

    def write(x, y):
        z = x * y
        return z.mul_(z.detach())

    with mg.override("*"):
        for a, b in zip(derivatives(write, (x, y)), expected, strict=True):
            torch.testing.assert_close(a, b)


def test_in_place_counts_versions_and_refuses_as_pytorch():
    x = leaf(3)
    with mg.override("*"):
        y = x * 2
        before = y._version
        z = y.exp()
        y.add_(1)
        assert y._version == before + 1
        w = z * 1
        w.add_(x)
        z.mul_(2.0)  # exp's derivative keeps its result
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            w.sum().backward()
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            x.add_(1)
        with pytest.raises(RuntimeError, match="shape"):
            (x * 1).add_(torch.ones(2, 3))
        with pytest.raises(RuntimeError, match="dtype|type"):
            (x * 1).add_(1j)


def test_hooks_of_a_tensor_that_is_written_to():
    def gradients():
        x, seen = leaf(3), []
        y = x * 2
        y.register_hook(lambda g: seen.append(g.clone()))
        y.retain_grad()
        y.add_(x)
        y.register_hook(lambda g: seen.append(g.clone()))
        (y**2).sum().backward()
        return [*seen, y.grad, x.grad]

    expected = gradients()
    with mg.override("*"):
        found = gradients()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_a_decision_by_metadata_is_asked_for_once(monkeypatch):
    asked, rule = [], compiled_calls._rule
    monkeypatch.setattr(compiled_calls, "_rule", lambda number: (asked.append(number), rule(number))[1])
    assert isinstance(mg.rules["aten::scatter.src"].defer_to_stock, ByMetadata)
    index = torch.tensor([0, 2, 1])
    with mg.override():
        for count in (3, 2, 3, 2, 3):
            x = leaf(4)
            y = x.scatter(0, index[:count], leaf(3, seed=1))  # PyTorch's, where the sizes are the same
            assert count == 3 or torch.autograd.grad(y.sum(), x)[0].sum() == 2
    assert len(asked) == 2


@pytest.mark.parametrize("which", [(), ("*",)], ids=["improving", "all"])
def test_a_write_to_an_expanded_tensor_is_pytorchs(which):
    """index_put_ warns that it is deprecated; most other operators refuse it."""
    rows, value = (torch.tensor([0]),), torch.ones(1, 1, requires_grad=True)

    def write():
        return torch.zeros(1, 4).expand(3, 4).index_put_(rows, value)

    with pytest.warns(UserWarning, match="expanded"):
        expected = write()
    with mg.override(*which):
        with pytest.warns(UserWarning, match="expanded"):
            found = write()
        with pytest.raises(RuntimeError, match="single memory location"):
            torch.zeros(1, 4).expand(3, 4).add_(value)
    assert torch.equal(found, expected) and found.requires_grad


def test_a_masked_write_of_one_of_its_own_elements():
    """PyTorch reads the value before it writes, as for a fill; by an index it refuses the same."""

    def write(x):
        y = x * 1
        y[y > 3] = y[0]
        return y

    x = torch.arange(6.0, dtype=torch.float64).requires_grad_()
    expected = derivatives(write, (x,))
    with mg.override("*"):
        for a, b in zip(derivatives(write, (x,)), expected, strict=True):
            torch.testing.assert_close(a, b)
        with pytest.raises(RuntimeError, match="memory"):
            y = x * 1
            y[torch.tensor([1, 2])] = y[0]
