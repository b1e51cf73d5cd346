"""Programs that use PyTorch's nested tensors as models do: the same values and gradients under override as without."""

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_manualgrad as mg
from torch_manualgrad.core.internals import pytree

LENGTHS = (3, 5, 1)
LAYOUTS = (torch.strided, torch.jagged)


@pytest.fixture(autouse=True)
def quiet():
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
    warnings.filterwarnings("ignore", "enable_nested_tensor is True")


def batch(layout, requires_grad=False, width=8):
    components = [torch.randn(n, width) for n in LENGTHS]
    return torch.nested.nested_tensor(components, layout=layout, requires_grad=requires_grad)


def plain(tree):
    """Nested tensors as their components."""
    found = []
    for x in pytree.tree_leaves(tree):
        found += x.unbind() if isinstance(x, Tensor) and x.is_nested else [x]
    return found


def chain():
    return nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.5), nn.Softmax(-1)
    )


class Attention(nn.Module):
    """Split and joined heads, as in PyTorch's own tutorial on nested tensors."""

    def __init__(self):
        super().__init__()
        self.inward, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, is_causal=False):
        q, k, v = (y.unflatten(-1, [2, 4]).transpose(1, 2) for y in self.inward(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(-2))


def trained(make, run):
    """Values of ``run(model, x)``, and gradients of the model and of x."""

    def program(layout):
        model, x = make(), batch(layout, requires_grad=True)
        out = run(model, x)
        loss = sum(p.float().sin().sum() for p in plain(out) if p.requires_grad)
        loss.backward()
        return [out, x.grad, *(p.grad for p in model.parameters())]

    return program


def embedded(layout):
    table, head = nn.Embedding(10, 8), nn.Linear(8, 4)
    tokens = torch.nested.nested_tensor([torch.arange(n) for n in LENGTHS], layout=layout)
    out = head(F.gelu(table(tokens)))
    sum(p.square().sum() for p in plain(out)).backward()
    return [out, table.weight.grad, head.weight.grad]


def encoder(layout):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    padded, absent = torch.randn(3, 5, 8), torch.arange(5) >= torch.tensor(LENGTHS)[:, None]
    with torch.no_grad():
        fast = model(padded, src_key_padding_mask=absent)  # by nested tensors inside
    slow = model.train()(padded, src_key_padding_mask=absent)
    slow.square().sum().backward()
    return [fast, slow, *(p.grad for p in model.parameters())]


def multihead(layout):
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = batch(torch.strided)  # it takes no other
    with torch.no_grad():
        return model(x, x, x, need_weights=False)[0]


def components_with_gradients(layout):
    components = [torch.randn(n, 8, requires_grad=True) for n in LENGTHS]
    x = torch.nested.as_nested_tensor(components, layout=layout)
    out = F.gelu(x * 2).softmax(-1)
    sum(p.square().sum() for p in plain(out)).backward()
    return [out, *(c.grad for c in components)]


def autocast(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)


def twice(layout):
    """Checkpointed inside a model, alone and in the middle."""
    model, x = chain().eval(), batch(layout, requires_grad=True)
    middle = checkpoint(model, x, use_reentrant=False)
    out = checkpoint(lambda y: F.layer_norm(y, (8,)).softmax(-1), middle, use_reentrant=False)
    sum(p.sin().sum() for p in plain(out)).backward()
    return [out, x.grad, *(p.grad for p in model.parameters())]


def saved_and_copied(layout):
    x = batch(layout, requires_grad=True)
    if layout is torch.strided:
        copies = [x.detach().clone()]
    else:
        stream = io.BytesIO()
        torch.save(x, stream)
        stream.seek(0)
        copies = [copy.deepcopy(x), pickle.loads(pickle.dumps(x)), torch.load(stream, weights_only=False)]
    outs = [F.silu(c * 2) for c in copies]
    return [*copies, *outs]


def optimized(layout):
    """Three steps of a small model."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1)), batch(layout)
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = sum(p.square().mean() for p in plain(model(x)))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def functional(layout):
    model, x = chain().eval(), batch(layout)
    parameters = {n: p * 1.5 for n, p in model.named_parameters()}
    out = torch.func.functional_call(model, parameters, (x,))
    return [out, *torch.autograd.grad(sum(p.sin().sum() for p in plain(out)), list(model.parameters()))]


def residuals(model, x):
    for _ in range(2):
        x = x + model(F.layer_norm(x, (8,)))
    return x


def retained(layout):
    x = batch(layout, requires_grad=True)
    y = (x * 2).softmax(-1)
    loss = sum(p.sin().sum() for p in plain(y))
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    return [first, torch.autograd.grad(loss, x)[0]]


def hooked(layout):
    """A hook on a jagged tensor, one on what is saved, and a change in place of a result."""
    if layout is torch.strided:
        return []
    x, seen = batch(layout, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone() if t.layout is torch.strided else t, lambda t: t):
        y = F.gelu(x * 1.5)
        y.register_hook(lambda g: seen.append(g.detach()))
        z = y * 3
        z += 1
        z.mul_(2)
    sum(p.sin().sum() for p in plain(z)).backward()
    return [z, x.grad, *seen]


def padded_and_back(layout):
    x = batch(layout, requires_grad=True)
    dense = x.to_padded_tensor(0.0)
    out = (dense.softmax(1) @ torch.ones(8, 2)).sum()
    out.backward()
    return [dense, x.grad]


def narrowed(layout):
    """Jagged tensors with holes, through PyTorch's functions and ours."""
    lengths = torch.tensor([2, 4, 1])
    padded = torch.randn(3, 5, 8, requires_grad=True)
    x = torch.nested.narrow(padded, 1, torch.zeros(3, dtype=torch.int64), lengths, layout=torch.jagged)
    y = (F.gelu(x).sin() * 2 + x.exp()).tanh().softmax(-1) + x
    sum(p.square().sum() for p in plain(y)).backward()
    return [y, padded.grad]


PROGRAMS = {
    "chain": trained(chain, lambda model, x: model(x)),
    "autocast": trained(chain, autocast),
    "attention": trained(Attention, lambda model, x: model(x)),
    "causal": trained(Attention, lambda model, x: model(x, is_causal=True)),
    "attention, autocast": trained(Attention, autocast),
    "residuals": trained(chain, residuals),
    "checkpoint": trained(chain, lambda model, x: checkpoint(model, x, use_reentrant=False)),
    "reentrant": trained(chain, lambda model, x: checkpoint(model, x, use_reentrant=True)),
    **{f.__name__: f for f in (embedded, encoder, multihead, components_with_gradients, twice, saved_and_copied)},
    **{f.__name__: f for f in (optimized, functional, retained, hooked, padded_and_back, narrowed)},
}


def outcome(program, layout):
    torch.manual_seed(0)
    try:
        return program(layout), None
    except Exception as error:
        return None, error


@pytest.mark.parametrize("chosen", [(), ("*",)], ids=["override()", 'override("*")'])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_without(name, layout, chosen):
    stocks, refused = outcome(PROGRAMS[name], layout)
    with mg.override(*chosen):
        ours, error = outcome(PROGRAMS[name], layout)
    if refused is not None:  # PyTorch has no such program in this layout
        return
    if error is not None:
        raise error
    tolerance = 2e-2 if "autocast" in name else 1e-5
    for o, s in zip(pytree.tree_leaves(ours), pytree.tree_leaves(stocks), strict=True):
        assert (o is None) == (s is None)
        if s is None:
            continue
        assert (type(o), o.dtype, o.is_nested, o.layout) == (type(s), s.dtype, s.is_nested, s.layout)
        for a, b in zip(plain(o), plain(s), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_checkpoints_and_custom_rules_say_what_they_take(layout):
    components = [torch.ones(n, 2, requires_grad=True) for n in (2, 3)]
    x = torch.nested.as_nested_tensor(components, layout=layout)
    doubled = mg.custom_vjp(lambda x: 2 * x)
    doubled.defvjp(lambda x: (2 * x, None), lambda _, grad: (2 * grad,))
    for call in (doubled, mg.checkpoint(lambda x: 2 * x)):
        with pytest.raises(NotImplementedError, match=f"a nested tensor of layout {layout}: pass its values"):
            call(x)
    words = mg.nested.Ragged.from_components(components)
    total = mg.checkpoint(lambda x: (2 * x).sin())(words).values.sum()
    torch.testing.assert_close(torch.autograd.grad(total, components[0])[0], 2 * torch.full((2, 2), 2.0).cos())
