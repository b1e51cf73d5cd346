"""override on torch's own nested tensors: where it acts, for how long, and that nothing else changes.

That every operator is right under it is in test_nested_probe.py.
"""

import threading

import pytest
import torch
import torch.nn.functional as F
from helpers.nested_layouts import both_layouts, nest
from helpers.tensors import random, same

import torch_manualgrad as mg
from torch_manualgrad.core.override import compiled_calls as calls
from torch_manualgrad.core.override.compiled_nested import nested_counts
from torch_manualgrad.core.override.replacements import Replacements, replacements, stock
from torch_manualgrad.nested import Ragged


def ours(layout=torch.jagged):
    """Whether our silu is active: on jagged tensors it goes over the values, strided ones are left to PyTorch in C++."""
    before = nested_counts()
    node = F.silu(nest(layout)).grad_fn
    return nested_counts() != before or node.name() != "SiluBackward0"


@both_layouts
@pytest.mark.parametrize("chosen", [(), ("*",), ("nested",), ("nested", "dist"), (replacements["nested"],)], ids=str)
def test_for_the_length_of_a_block(layout, chosen):
    assert not ours(layout)
    with mg.override(*chosen) as handle:
        assert ours(layout) and handle.replacements == (replacements["nested"],)
        with mg.override(*chosen):
            assert ours(layout)
        assert ours(layout)
    assert not ours(layout) and handle.replacements == ()


@both_layouts
def test_not_with_rules_alone(layout):
    with mg.override("dist", *mg.rules.values()) as handle:
        assert not ours(layout) and handle.replacements == ()


def test_installed_and_removed_in_any_order_and_after_an_exception():
    first, second = mg.install("nested"), mg.install("nested")
    first.remove()
    assert ours()
    first.remove()  # twice does nothing
    assert ours()
    second.remove()
    assert not ours()
    with pytest.raises(ZeroDivisionError), mg.override("nested"):
        1 / 0  # noqa: B018
    assert not ours()


def test_a_wrong_name():
    with pytest.raises(KeyError, match="neste"):
        mg.override("neste")
    with pytest.raises(ValueError, match="exists already"):
        replacements.add("nested", replacements["nested"])
    assert "operators at AutogradNestedTensor" in repr(replacements["nested"])


def test_other_threads_follow_and_are_not_cut_off():
    """A thread may be inside a kernel when the block ends: it stays registered, and passes on."""
    seen, inside, leave = [], threading.Event(), threading.Event()

    def work():
        seen.append(ours())
        inside.set()
        leave.wait()
        seen.append(ours())
        seen.append(float((nest(torch.jagged) * 2.5).values().sum() / nest(torch.jagged).values().sum()))

    thread = threading.Thread(target=work)
    with mg.override("nested"):
        thread.start()
        inside.wait()
    assert not ours()
    same((nest(torch.strided) * 2.5).values(), nest(torch.strided).values() * 2.5)  # a number passes on as a tensor
    leave.set()
    thread.join()
    assert seen[:2] == [True, False] and seen[2] == pytest.approx(2.5)
    with mg.override("nested"):
        assert ours()
    assert not ours()


def test_dense_tensors_do_not_meet_it():
    """Each operator's kernel for dense tensors is the one that was there."""
    names = list(replacements["nested"].functions)
    keys = ("AutogradCPU", "CPU")

    def kernels():
        has = torch._C._dispatch_has_computed_kernel_for_dispatch_key
        return [str(torch.library.get_kernel(n, k)) for n in names for k in keys if has(n, k)]

    before = kernels()
    with mg.override("nested"):
        assert kernels() == before


@both_layouts
def test_a_graph_keeps_the_rules_that_built_it(layout):
    x = nest(layout)
    with mg.override("nested"):
        under = torch.softmax(x, 1)
    g = torch.autograd.grad(under, x, torch.ones_like(under))[0]
    for c in g.unbind():
        same(c, torch.zeros_like(c))


@both_layouts
def test_modules_and_operators_spelt_in_every_way(layout):
    linear, norm = torch.nn.Linear(3, 3).double(), torch.nn.LayerNorm(3).double()
    model = torch.nn.Sequential(linear, torch.nn.GELU(), norm, torch.nn.SiLU(), torch.nn.ReLU(), torch.nn.Softmax(-1))
    x = nest(layout)
    dense = [c.detach().requires_grad_() for c in x.unbind()]

    def of(x):
        return (2 * model(x) - x / 2 + 1 - x * x).softmax(-1).log_softmax(dim=1)

    with mg.override():
        y = of(x)
        assert y.is_nested and y.layout is layout
        parts = y.unbind()
        loss = sum(p.sin().sum() for p in parts)
        found = torch.autograd.grad(loss, [x, *model.parameters()])
    expected = [(2 * model(c) - c / 2 + 1 - c * c).softmax(-1).log_softmax(0) for c in dense]
    for p, e in zip(parts, expected):
        same(p, e)
    total = sum(e.sin().sum() for e in expected)
    wanted = torch.autograd.grad(total, [*dense, *model.parameters()])
    for g, w in zip([*found[0].unbind(), *found[1:]], wanted):
        same(g, w)


def test_kinds_of_results_are_pytorchs():
    """A strided tensor stays one where PyTorch's call keeps it nested."""
    x = nest(torch.strided, (2, 3), (4, 3))
    calls = [lambda x: x.select(1, 0), lambda x: x.select(2, 1), lambda x: x.sum(-1, keepdim=True)]
    for call in calls:
        found = call(x)
        with mg.override("nested"):
            under = call(x)
        assert under.is_nested == found.is_nested
        for u, f in zip(under.unbind(), found.unbind()):
            same(u, f)
    with mg.override("nested"):
        lasts = nest(torch.strided, (3, 2), (3, 5)).sum(-1, keepdim=True)
    assert lasts.is_nested and [c.shape for c in lasts.unbind()] == [(3, 1), (3, 1)]


@both_layouts
def test_components_are_views_where_autograd_tracks_nothing(layout):
    x = nest(layout, requires_grad=False)
    with mg.override("nested"):
        for c in x.unbind():
            c.fill_(1.0)
        x.select(0, -1).fill_(2.0)
    assert [c.unique().item() for c in x.unbind()] == [1.0, 2.0]


@both_layouts
def test_in_place_changes_of_saved_tensors_raise(layout):
    x = nest(layout)
    with mg.override("nested"):
        y = F.gelu(x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation|has been modified inplace"):
        torch.autograd.grad(y, x, torch.ones_like(y))


@both_layouts
def test_a_change_in_place_of_a_result(layout):
    """Right where the result is not what was saved, which a jagged one cannot say; caught where it is.

    Without the library of calls a strided result is a copy of its components' results, and those were saved.
    """
    x = nest(torch.strided)
    right = [torch.autograd.grad((F.gelu(c) * 2).sin().sum(), c)[0] for c in map(torch.clone, x.unbind())]
    with mg.override("nested"):
        y = F.gelu(x)
        y.mul_(2)
        loss = sum(c.sin().sum() for c in y.unbind())
    for g, r in zip(torch.autograd.grad(loss, x)[0].unbind(), right):
        same(g, r)
    x = nest(layout)
    with mg.override("nested"):
        y = torch.softmax(x, 1)
        y.mul_(2)
    ones = torch.ones_like(y)
    if layout is torch.strided and not calls.loaded():
        assert all(g.abs().max() < 1e-14 for g in torch.autograd.grad(y, x, ones)[0].unbind())
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y, x, ones)


@both_layouts
def test_no_graph_where_none_is_wanted(layout):
    x = nest(layout)
    with mg.override("nested"):
        with torch.no_grad():
            assert not torch.softmax(x, -1).requires_grad
        with torch.inference_mode():  # there is no autograd key: PyTorch's own
            assert not F.gelu(nest(layout, requires_grad=False)).requires_grad
        assert not torch.softmax(x.detach(), -1).requires_grad


def test_unsupported_calls_fall_back_to_pytorch():
    numbers = torch.nested.nested_tensor([torch.tensor(1.0), torch.tensor(2.0)])
    empty = torch.nested.nested_tensor([])
    q = nest(torch.jagged, (3, 2, 4), (5, 2, 4)).transpose(1, 2)
    with mg.override("nested"):
        same([c.item() for c in (numbers * 2).unbind()], [2.0, 4.0])
        assert torch.relu(empty).size(0) == 0
        y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        assert y.is_nested and y.size(0) == 2
        with torch.autocast("cpu", torch.bfloat16):
            assert F.scaled_dot_product_attention(*[q.float()] * 3).dtype is torch.bfloat16
            assert F.linear(nest(torch.jagged).float(), torch.zeros(5, 3)).dtype is torch.bfloat16
    across = torch.nested.nested_tensor_from_jagged(random(7, 2, 3, 4), torch.tensor([0, 2, 7]))
    with mg.override("nested"):  # a second batch dim is ragged, the sequences are not
        made = F.scaled_dot_product_attention(across, across, across)
    v = across.values()
    same(made.values(), F.scaled_dot_product_attention(v, v, v))


# -- a replacement of its own ----------------------------------------------------------------------------------------------


def test_a_family():
    calls = []

    def doubled(self):
        calls.append(self)
        if self.dim() > 2:
            return NotImplemented
        with stock():
            return torch.sin(self) * 2

    switched = []
    replacement = Replacements(
        "t", "AutogradMeta", {"aten::sin": doubled}, besides=[lambda acts, yes: switched.append((acts(), yes))]
    )
    x = torch.zeros(3, device="meta", requires_grad=True)
    first, second = mg.install(replacement), mg.install(replacement)
    assert torch.sin(x).grad_fn.name() == "MulBackward0" and len(calls) == 1
    assert torch.sin(x.reshape(1, 1, 3)).grad_fn.name() == "SinBackward0"
    first.remove()
    first.remove()
    assert torch.sin(x).grad_fn.name() == "MulBackward0" and switched == [(True, True)]
    second.remove()
    assert torch.sin(x).grad_fn.name() == "SinBackward0" and switched == [(True, True), (False, False)]
    replacement.unregister()


def test_the_values_of_a_nested_tensor():
    with mg.override("nested"):
        x = nest(torch.jagged)
        assert x.values().data_ptr() == Ragged.from_nested(x).values.data_ptr()
        g = torch.autograd.grad(x.values().pow(3).sum(), x, create_graph=True)[0]
        same(torch.autograd.grad(g.values().sum(), x)[0].values(), 6 * x.values().detach())
        moved = nest(torch.strided, requires_grad=False).transpose(1, 2)
        same(moved.contiguous().values(), torch.cat([c.reshape(-1) for c in moved.unbind()]))
