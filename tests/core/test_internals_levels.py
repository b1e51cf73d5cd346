"""What core/internals/levels.py relies on: the key above autograd, and the Python objects of storages."""

import gc
import threading
import weakref

import torch

from torch_manualgrad.core import internals
from torch_manualgrad.core.internals import levels
from torch_manualgrad.forward_ad import dual_level


def test_calls_are_intercepted_above_autograd_in_forward_and_backward():
    seen = []

    def handler(op, *args, **kwargs):
        seen.append((op.name(), any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)))
        with internals.below_levels():
            return op(*args, **kwargs)

    release()
    internals.intercept(handler)
    try:
        x = torch.ones(2, 2, requires_grad=True)
        with internals.intercepting():
            y = torch.nn.functional.linear(x, x).sum()
            torch.autograd.grad(y, x, create_graph=True)
            with internals.below_levels():
                x.cos()
        x.sin()
        assert ("aten::linear", True) in seen and ("aten::mm", True) in seen  # composite, and of the backward pass
        assert not {"aten::cos", "aten::sin"} & {name for name, _ in seen}
        seen.clear()
        with internals.intercepting():
            internals.decomposed(torch.ops.aten.linear.default, (x, x), {})
        assert {name for name, _ in seen} <= {"aten::t", "aten::matmul", "aten::addmm", "aten::mm"}
    finally:
        release()  # the next level registers its own


def release():
    for library in levels._libraries:
        internals.release(library)
    levels._libraries.clear()


def test_a_storage_has_one_object_while_it_lives():
    x = torch.ones(3)
    reference, key = weakref.ref(internals.storage_of(x)), id(internals.storage_of(x))
    view = x[1:]
    del x
    gc.collect()
    assert reference() is internals.storage_of(view) and id(internals.storage_of(view)) == key
    del view
    assert reference() is None
    assert internals.storage_of(torch.eye(2).to_sparse()) is None
    inner = []
    torch.vmap(lambda y: inner.append(internals.storage_of(y)) or y)(torch.ones(2, 3))
    assert inner[0].nbytes() == 24


def test_thread_state_stays_on_its_thread():
    internals.put_on_this_thread("here")
    try:
        found = []
        thread = threading.Thread(target=lambda: found.append(internals.on_this_thread()))
        thread.start()
        thread.join()
        assert found == [None] and internals.on_this_thread() == "here"
    finally:
        internals.put_on_this_thread(None)


def test_accumulating():
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(internals.accumulating())
            return grad

    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: seen.append(internals.accumulating()))
    Probe.apply(x).sum().backward()
    assert seen == [False, True] and not internals.accumulating()


def test_fwd_grad_and_kernels():
    enabled = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            enabled.append(internals.fwd_grad_is_enabled())
            return x.clone()

    Probe.apply(torch.ones(2))
    assert enabled == [False] and internals.fwd_grad_is_enabled()
    assert internals.has_autograd_kernel(torch.ops.aten.sin.default)
    with torch.library._scoped_library("mgdual", "FRAGMENT") as library:
        library.define("bare(Tensor x) -> Tensor")
        assert not internals.has_autograd_kernel(torch.ops.mgdual.bare.default)
    assert torch.equal(internals.neg_view(torch.ones(2)), -torch.ones(2)) and internals.neg_view(torch.ones(2)).is_neg()


def test_packing_later():
    events = []

    def pack(x):
        events.append("pack")
        return x * 1

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: 2 * x):
        with internals.packing_later(lambda: torch.no_grad()):
            y = x.sin()
            events.append("called")
    assert events == ["called", "pack"]
    assert torch.allclose(torch.autograd.grad(y.sum(), x)[0], torch.tensor(2.0).cos().expand(2))


def test_levels_leave_nothing_behind():
    with dual_level():
        assert torch.nn.Parameter(torch.ones(2)).requires_grad and not internals.only_autograd()
    assert "_make_subclass" not in vars(torch.Tensor) and internals.only_autograd()
