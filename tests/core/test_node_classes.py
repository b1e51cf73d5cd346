"""What programs that inspect a graph find in it: names and classes of nodes, saved tensors, undefined gradients."""

import gc

import pytest
import torch
from helpers.rules import has_history

import torch_manualgrad as mg
from torch_manualgrad.core.engine.node import node_name
from torch_manualgrad.core.internals import node_names
from torch_manualgrad.core.override import compiled_calls

PATHS = ["library", "python"] if compiled_calls.loaded() else ["python"]


@pytest.fixture(params=PATHS)
def everything(request):
    """All rules, with the calls in C++ or in Python."""
    with mg.override("*"):
        if request.param == "library":
            yield
        else:
            with compiled_calls.in_python():
                yield


def leaf(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


CALLS = {
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "exp": lambda a, b: a.exp(),
    "pow": lambda a, b: a**b,
    "sum": lambda a, b: a.sum(),
    "div": lambda a, b: torch.div(a, b),
    "stack": lambda a, b: torch.stack([a, b]),
    "pdist": lambda a, b: torch.pdist(torch.stack([a, b]), p=1.0),
    "in place": lambda a, b: (a * 1).mul_(b),
}


@pytest.mark.parametrize("name", CALLS)
def test_nodes_have_the_names_of_pytorchs(name, everything):
    a, b = leaf(2.0, 3.0), leaf(1.0, 4.0)
    ours = CALLS[name](a, b)
    with mg.core.override.kernels.without_overrides():
        stock = CALLS[name](a, b)
    node, expected = ours.grad_fn, stock.grad_fn
    assert node.name() == expected.name() == type(node).__name__ == type(expected).__name__
    assert isinstance(node, torch.autograd.graph.Node)
    assert str(node).partition(" at ")[0] == str(expected).partition(" at ")[0]


def test_every_rule_of_an_operator_with_a_derivative_has_pytorchs_name():
    known = set(node_names().values())
    named = [rule for rule in mg.rules.values() if node_name(rule.signature) in known]
    assert len(named) > 0.9 * sum(map(has_history, mg.rules.values()))
    assert all(hasattr(torch._C._functions, node_name(rule.signature)) for rule in named)


def test_saved_tensors_and_constants_are_attributes(everything):
    a, b = leaf(2.0, 3.0), leaf(1.0, 4.0)
    y = a * b
    assert y.grad_fn._saved_self is a
    assert y.grad_fn._saved_other is b
    assert isinstance(y.grad_fn._raw_saved_self, torch._C._autograd.SavedTensor)
    assert (a.exp().grad_fn._saved_result == a.exp()).all()
    assert a.sum().grad_fn._saved_self_sym_sizes == (2,)
    assert torch.pdist(torch.stack([a, b]), p=1.0).grad_fn._saved_p == 1.0
    y.sum().backward()
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        _ = y.grad_fn._saved_self


def test_objects_for_saved_tensors_call_nothing_of_pytorchs_class():
    """PyTorch's methods would read memory that nothing has initialized: these objects have no C++ object."""
    with mg.override("*"):
        y = leaf(2.0, 3.0).exp()
        saved = y.grad_fn._raw_saved_result
    if compiled_calls.loaded():
        own = {name for name in dir(torch._C._autograd.SavedTensor) if not name.startswith("_")}
        assert type(saved) is not torch._C._autograd.SavedTensor
        assert own <= set(vars(type(saved)))
    assert saved.unpack_hook is None and (saved.data == y).all()


def test_hooks_on_one_saved_tensor(everything):
    a, b = leaf(2.0, 3.0), leaf(1.0, 4.0)
    y = a * b
    seen = []
    y.grad_fn._raw_saved_other.register_hooks(lambda x: seen.append(x.detach().clone()) or x.detach() * 10, lambda x: x)
    assert len(seen) == 1 and (seen[0] == b).all()
    y.sum().backward()
    assert (a.grad == 10 * b).all() and (b.grad == a).all()
    with pytest.raises(RuntimeError, match="freed"):
        y.grad_fn._raw_saved_other.register_hooks(lambda x: x, lambda x: x)


def test_a_hook_has_to_return_a_tensor(everything):
    a = leaf(2.0, 3.0)
    y = a.exp()
    y.grad_fn._raw_saved_result.register_hooks(lambda x: "packed", lambda x: x)
    with pytest.raises(TypeError, match="expected to be a Tensor"):
        y.sum().backward()


def test_hooks_do_not_see_numbers():
    a = leaf(2.0, 3.0)

    def hook(x):
        raise AssertionError("a number is not given to hooks")

    with mg.override("*"), torch.autograd.graph.saved_tensors_hooks(hook, hook):
        torch.autograd.grad((a * 3).sum(), a)


def test_nodes_that_save_nothing_run_twice(everything):
    a, b = leaf(2.0, 3.0), leaf(1.0, 4.0)
    y = torch.stack([a + b, -a]).sum()
    y.backward()
    y.backward()
    assert (a.grad == 0).all() and (b.grad == 2).all()
    z = (a * b).sum()
    z.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        z.backward()


class Undefined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return None


def test_undefined_gradients_stay_undefined(everything):
    x = leaf(1.0)
    Undefined.apply(x + 1).backward()
    assert x.grad is None
    Undefined.apply(x.clone().exp()).backward()
    assert x.grad is None


def test_objects_of_nodes_are_freed(everything):
    a, b = leaf(2.0, 3.0), leaf(1.0, 4.0)
    for _ in range(100):
        product = a * b
        node = product.grad_fn
        node.register_hook(lambda *_: None)
        assert node.next_functions[0][0].variable is a
    kind = type(node)
    del node, product
    gc.collect()
    assert not any(type(x) is kind for x in gc.get_objects())
