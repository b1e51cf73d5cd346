"""override on torch's own nested tensors: where it acts, for how long, on which inputs, and that nothing else changes.

That every operator is right under it is in test_nested_probe.py.
"""

import contextlib
import re
import threading

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from helpers.interpreters import run_python
from helpers.tensors import random, same

import torch_manualgrad as mg
from torch_manualgrad.core.override import compiled_calls as calls
from torch_manualgrad.core.override.compiled_nested import differentiates_views, nested_counts
from torch_manualgrad.core.override.replacements import Replacements, replacements, stock
from torch_manualgrad.nested import Ragged

LAYOUTS = [torch.strided, torch.jagged]
both_layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def nest(layout, *shapes, requires_grad=True):
    components = [random(*s, seed=i) for i, s in enumerate(shapes or ((2, 3), (4, 3)))]
    return torch.nested.nested_tensor(components, layout=layout, requires_grad=requires_grad)


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


# -- what PyTorch does, it does under override: sizes, refusals, views, what results share ----------------------------


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


# -- every structure and dtype, graphs, and what is refused -----------------------------------------------------------

STRUCTURES = {
    "two ragged dims": ((2, 3), (4, 5), (1, 2)),
    "the last dim": ((3, 2), (3, 4)),
    "one component": ((2, 3),),
    "equal sizes": ((2, 3), (2, 3)),
    "an empty component": ((2, 3), (0, 3), (1, 3)),
}
CALLS = {
    "softmax": lambda x, d: torch.softmax(x, d),
    "sum": lambda x, d: x.sum(d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "var": lambda x, d: x.var(d),
    "cumsum": lambda x, d: x.cumsum(d),
    "gelu": lambda x, d: F.gelu(x),
    "arithmetic": lambda x, d: x * x + x / 2 - 1 / (x * x + 1) + 2.0**x,
    "last": lambda x, d: x.select(-1, -1),
    "transpose": lambda x, d: x.transpose(-1, -2),
}


def ragged_dims(name):
    return {d for d, sizes in enumerate(zip(*STRUCTURES[name]), 1) if len({*sizes}) > 1} or {1}


def like_the_components(call, name, layout, transposed, dtype):
    """Values and gradients; not contiguous too, transposed by PyTorch before."""
    given = [random(*s, seed=i).to(dtype).requires_grad_() for i, s in enumerate(STRUCTURES[name])]

    def with_gradients(parts):
        loss = sum((p * p).sum().real if dtype.is_complex else (p * p).sum() for p in parts)
        grads = torch.autograd.grad(loss, given, allow_unused=True)
        return [*parts, *(torch.zeros_like(c) if g is None else g for g, c in zip(grads, given))]

    for dim in (1, 2):
        with (
            mg.override("nested") if dtype.is_complex else contextlib.nullcontext()
        ):  # stock makes none with a gradient
            x = torch.nested.as_nested_tensor([c.mT if transposed else c for c in given], layout=layout)
            x = x.transpose(1, 2) if transposed else x
        with mg.override("nested"):
            found = with_gradients(CALLS[call](x, dim).unbind())
        tolerance = {torch.bfloat16: 4e-2, torch.float32: 1e-4}.get(dtype, 1e-9)
        for f, e in zip(found, with_gradients([CALLS[call](c, dim - 1) for c in given]), strict=True):
            assert f.dtype is e.dtype
            torch.testing.assert_close(f, e, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("call", CALLS)
def test_structures(call, name):
    for transposed in (False, True):
        like_the_components(call, name, torch.strided, transposed, torch.float64)
        if ragged_dims(name) == {1 + transposed}:  # torch makes a jagged tensor ragged in dim 1
            like_the_components(call, name, torch.jagged, transposed, torch.float64)


@both_layouts
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(call, layout, dtype):
    like_the_components(call, "an empty component", layout, False, dtype)


@pytest.mark.parametrize("call", ["sum", "var", "cumsum", "arithmetic", "last", "transpose"])
def test_complex(call):
    like_the_components(call, "an empty component", torch.jagged, False, torch.complex128)
    with pytest.raises(RuntimeError, match="does not support automatic differentiation for outputs with complex dtype"):
        like_the_components(call, "an empty component", torch.strided, False, torch.complex128)


@both_layouts
def test_bad_input_raises_pytorchs_errors(layout):
    x = nest(layout)
    calls = {
        "index: 5 is out of range": lambda: x.select(0, 5),
        "index: 3 is out of range for dim 2": lambda: x.select(-1, 3),
        "index: 2 is out of range for component 0": lambda: x.select(1, 2),
        "dim: 3 is out of range": lambda: torch.softmax(x, 3),
        "the batch": lambda: torch.softmax(x, 0),
        "do not add up": lambda: x.split_with_sizes([1, 1], -1),
        "a ragged dim of": lambda: x.chunk(2, 1),
        "no matrix product": lambda: x @ random(4, 2),
        "differ": lambda: x + nest(layout, (3, 3), (3, 3)),
    }
    reads_beyond = ["index: 3 is out of range for dim 2", "index: 2 is out of range for component 0"]
    for message, call in calls.items():
        if layout is torch.strided and message in reads_beyond:
            with mg.override("nested"), pytest.raises(IndexError, match=message):
                call()
            continue
        with pytest.raises(Exception) as stocks:
            call()
        with mg.override("nested"), pytest.raises(type(stocks.value)) as error:
            call()
        ours, pytorchs = (re.sub(r"j\d+", "j", str(e.value)) for e in (error, stocks))
        assert ours.startswith(f"{pytorchs}\ntorch_manualgrad: ")
        assert re.search(message, ours.removeprefix(pytorchs))
        assert re.search(message, str(error.value.__cause__)), "ours is the cause"


@pytest.mark.parametrize("tracked", [True, False], ids=["tracked", "untracked"])
@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: x.cumsum(9), "dim: 9 is out of range for a nested tensor of 3 dims"),
        (lambda x: x.mean(9), "dim: 9 is out of range"),
        (lambda x: F.glu(x, -1), "glu: dim: expected a dense dim of even size, got -1"),
        (lambda x: F.celu(x, 0.0), "ZeroDivisionError: alpha cannot be 0"),
        (lambda x: x + random(5), "other: shape [5] does not broadcast"),
    ],
)
def test_an_error_names_the_argument_where_pytorchs_is_about_its_class(call, message, tracked):
    x = nest(torch.strided)
    with mg.override("nested"), pytest.raises(Exception, match=re.escape(f"torch_manualgrad: {message}")):
        call(x if tracked else x.detach())


@pytest.mark.parametrize(
    "layout, call, first",
    [
        ("strided", "x.select(-1, 0)", [[1.0, 0.0, 0.0]] * 2),
        ("jagged", "x.split_with_sizes([1, 2], -1)[1]", [[0.0, 1.0, 1.0]] * 2),
    ],
)
def test_nothing_ends_the_process(layout, call, first, tmp_path):
    """As stock's backward of split does on jagged tensors: in a process of its own, or it would be this one."""
    program = f"""
import torch, torch_manualgrad as mg
x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.{layout}, requires_grad=True)
with mg.override():
    sum(c.sum() for c in {call}.unbind()).backward()
print(x.grad.unbind()[0].tolist())
"""
    done = run_python("-c", program, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(first)


def test_in_a_compiled_graph():
    offsets = torch.tensor([0, 2, 6, 7])

    def f(nt, w):
        y = torch.softmax(F.gelu(F.linear(nt, w)) * 2.0, 1)  # over the ragged dim stock's backward is wrong
        return y.sum(1)

    def gradients(function, v, w):
        nt = torch.nested.nested_tensor_from_jagged(v, offsets)
        return torch.autograd.grad((function(nt, w) * w.sum(1)).sin().sum(), (v, w))

    v, w = random(7, 3).requires_grad_(), random(5, 3, seed=1).requires_grad_()
    with mg.override("nested"):
        plain = gradients(f, v, w)
        compiled = gradients(torch.compile(f, backend="aot_eager", fullgraph=True), v, w)
    same(compiled, plain)


def test_heads_in_every_order_that_a_jagged_tensor_has():
    """Attention with split and joined heads, as a model writes it: gradient, second order, tangent."""
    given = [random(n, 8, seed=n).requires_grad_() for n in (2, 4)]

    def joined(x, attend):
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(-3, -2) for y in (x, x * 2, x * x))
        return attend(q, k, v).transpose(-3, -2).flatten(-2)

    def plain(components):
        return [joined(c, lambda q, k, v: (q @ k.mT / 2).softmax(-1) @ v) for c in components]

    def jagged(components):
        x = torch.nested.as_nested_tensor(list(components), layout=torch.jagged)
        return joined(x, F.scaled_dot_product_attention).unbind()

    def numbers(function):
        def loss(parts):
            return sum(p.sin().sum() for p in parts)

        first = torch.autograd.grad(loss(function(given)), given, create_graph=True)
        second = torch.autograd.grad(sum(g.cos().sum() for g in first), given)
        with fwAD.dual_level():
            tangent = fwAD.unpack_dual(loss(function([fwAD.make_dual(c.detach(), c.detach().cos()) for c in given])))[1]
        return [*first, *second, tangent]

    with mg.override("nested"):
        found = numbers(jagged)
    same(found, numbers(plain))


def test_a_tangent_is_not_reshaped_across_the_ragged_dim():
    x = random(6, 4)
    with mg.override("nested"), fwAD.dual_level():
        nt = torch.nested.nested_tensor_from_jagged(fwAD.make_dual(x, x), torch.tensor([0, 2, 6]))
        with pytest.raises(RuntimeError, match="the tangent of a jagged nested tensor"):
            nt.reshape(2, 2, nt.shape[1], 2)
