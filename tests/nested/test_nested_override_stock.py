"""What PyTorch does on its own nested tensors, it does under override: sizes, refusals, views, what results share."""

import pytest
import torch
import torch.nn.functional as F
from helpers.interpreters import run_python
from helpers.nested_layouts import both_layouts, nest
from helpers.tensors import random, same

import torch_manualgrad as mg
from torch_manualgrad.core.override.compiled_nested import differentiates_views


def test_a_nested_int_is_not_a_number():
    """PyTorch's size of a ragged dim, of which a number would be a sentinel."""
    x = nest(torch.jagged)
    n = x.size(1)
    calls = [
        lambda x: x * n,
        lambda x: n * x,
        lambda x: x / n,
        lambda x: n / x,
        lambda x: x + n,
        lambda x: x - n,
        lambda x: n - x,
        lambda x: x**n,
        lambda x: torch.add(x, x, alpha=n),
        lambda x: F.threshold(x, n, 0.0),
        lambda x: F.leaky_relu(x, n),
        lambda x: F.elu(x, n),
        lambda x: F.softplus(x, n),
        lambda x: x.select(2, n),
        lambda x: x.narrow(2, 0, n),
        lambda x: x.to_padded_tensor(n),
        lambda x: x.sum(n),
        lambda x: x.softmax(n),
    ]
    for tracked in (True, False):
        for call in calls:
            with pytest.raises((RuntimeError, AttributeError, TypeError)):
                call(x if tracked else x.detach())
            with mg.override("nested"), pytest.raises((RuntimeError, AttributeError, TypeError)):
                call(x if tracked else x.detach())
    with mg.override("nested"):  # there it is a size, which torch 2.10 makes anew in each call of size()
        assert x.reshape(2, n, 3, 1).dim() == 4 and F.layer_norm(x, (n, 3)).size(1) == n


def test_calls_that_we_reject_fall_back_to_pytorch():
    heads = nest(torch.strided, (2, 3, 4), (3, 5, 4))
    rows, lengths = nest(torch.strided, (2, 3), (4, 3)), nest(torch.jagged, (2, 3, 2), (4, 3, 2))
    calls = [
        lambda: torch.nested.to_padded_tensor(rows, 0.0, output_size=(2, 6, 5)),
        lambda: torch.nested.to_padded_tensor(rows, 0.0, output_size=(4, 6, 3)),
        lambda: F.scaled_dot_product_attention(heads, heads, heads),
        lambda: lengths.sum((0, 1)),
        lambda: lengths.amax((0, 1, 2)),
        lambda: lengths.transpose(1, 3).prod(-1),
        lambda: F.layer_norm(lengths, (lengths.size(1), 3, 2)),
        lambda: lengths.to_padded_tensor(0.0, (2, 3, 3, 2)),
        lambda: lengths.argmax(1),
        lambda: lengths.transpose(1, 2).argmax(2),
    ]
    for call in calls:
        found = call()
        with mg.override("nested"):
            under = call()
        assert (under.is_nested, under.layout, under.dim()) == (found.is_nested, found.layout, found.dim())
        for u, f in zip(under.unbind() if under.dim() else [under], found.unbind() if found.dim() else [found]):
            same(u, f)


VIEWS = {
    "select, batch": lambda x: x.select(0, 1),
    "select": lambda x: x.select(-1, 1),
    "chunk": lambda x: x.chunk(2, -1)[1],
    "split": lambda x: x.split_with_sizes([1, 3], -1)[1],
    "transpose": lambda x: x.transpose(1, 2),
    "values": lambda x: x.values(),
    "unbind": lambda x: x.unbind()[0],
}


@both_layouts
@pytest.mark.parametrize("name", VIEWS)
def test_a_write_to_a_view_reaches_the_base_or_raises(layout, name):
    for tracked in (False, True):
        x = nest(layout, (2, 4), (3, 4), requires_grad=tracked) * 1
        before = [c.detach().clone() for c in x.unbind()]
        view = VIEWS[name]
        with mg.override("nested"):
            y = view(x)
            copied = ("select",) if differentiates_views() else ("select", "chunk", "split")
            if tracked and layout is torch.strided and name in copied:
                assert y._base is None  # a copy: PyTorch's own reads memory that is freed, or has no gradient
                continue
            try:
                y.mul_(7)
            except RuntimeError:
                continue
        assert any(not torch.equal(b, c) for b, c in zip(before, x.unbind()))


def test_a_result_shares_offsets_and_metadata():
    x = torch.nested.nested_tensor([random(n, 4) for n in (2, 5)], layout=torch.jagged, requires_grad=True)
    fresh = torch.nested.nested_tensor_from_jagged(x.values().detach(), x.offsets()).requires_grad_()
    holes = torch.nested.nested_tensor_from_jagged(random(9, 4), torch.tensor([1, 3, 8]), torch.tensor([2, 4]))
    late = torch.nested.nested_tensor_from_jagged(random(9, 4), torch.tensor([1, 3, 8]))  # rows that are not used
    by_stock = [
        F.silu,
        lambda x: x * 2,
        lambda x: x * x,
        lambda x: F.linear(x, random(3, 4)),
        lambda x: x.transpose(1, 2),
    ]
    calls = [
        *by_stock,
        F.gelu,
        lambda x: x + random(4),
        lambda x: x * random(2, 1, 4),
        lambda x: x.softmax(-1),
        lambda x: x.softmax(1),
        lambda x: x.cumsum(1),
        lambda x: F.layer_norm(x, (4,)),
        lambda x: x @ random(2, 4, 3),
        lambda x: x.chunk(2, -1)[0],
        lambda x: x.sum(-1),
        lambda x: x.mean(-1, keepdim=True),
    ]
    with mg.override("nested"):
        for given in (x, fresh, holes.requires_grad_(), late.requires_grad_()):
            for call in calls:
                y = call(given)
                assert y.offsets() is given.offsets() and y.lengths() is given.lengths()
                if (
                    given._metadata_cache or call not in by_stock
                ):  # PyTorch's own shares what is known, not what will be
                    assert y._metadata_cache is given._metadata_cache
                assert y.size(y._ragged_idx) == given.size(1)
                assert y.values().shape[y._ragged_idx - 1] == given.values().shape[0]
                g = torch.autograd.grad([*(c.sum() for c in y.sin().unbind())], given)[0]  # PyTorch's own among ours
                assert g.size(1) == given.size(1) and g.values().shape == given.values().shape


UNREGISTERED = """
import torch, torch_manualgrad as mg

with mg.override("*"):
    pass
handle = mg.install("nested")  # which takes for PyTorch's own what rules have registered
mg.unregister()
x = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], requires_grad=True)
for f in (torch.sin, torch.relu, torch.clone, torch.nn.functional.gelu, lambda x: torch.softmax(x, -1)):
    f(x)
handle.remove()
for f in (torch.sin, torch.relu, torch.clone, torch.nn.functional.gelu, lambda x: torch.softmax(x, -1)):
    f(x)
"""


def test_the_fallback_of_a_replacement_stays_registered(tmp_path):
    done = run_python("-c", UNREGISTERED, folder=tmp_path)
    assert done.returncode == 0, done.stderr
