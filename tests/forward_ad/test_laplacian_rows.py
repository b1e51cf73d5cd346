"""Laplacians with block-diagonal Jacobians beside those without."""

import math
import sys

import pytest
import torch
from helpers.tensors import seeded_by_shape
from helpers.thinning import every, label
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

from torch_manualgrad.forward_ad import laplacian
from torch_manualgrad.forward_ad.jets import rows as jet_rows

JETS_LAPLACIAN = sys.modules["torch_manualgrad.forward_ad.jets.laplacian"]  # its name is that of a function too


def network(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*layers).double()


NET = network(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 4))
W, V = seeded_by_shape(3, 5), seeded_by_shape(4, 3)


def in_place(x):
    y = x.sin()
    y += x
    y.mul_(x)
    return y


def spins(x):
    up, down = NET(x[:, :2]), NET(x[:, 2:].sin())
    return torch.cat([up, down], 1), torch.cat([up[:, :1].exp(), up[:, 1:]], 1)


# Of (2, 4, 3): a batch, rows, coordinates.
APART = {
    "network": NET,
    "sizes": lambda x: (x * W[:, 0] + seeded_by_shape(5, 1, 4, 3)).sin() * x[..., :1] * seeded_by_shape(2, 4, 1),
    "transposed": lambda x: torch.exp((x.mT.sin() * seeded_by_shape(4)).permute(2, 0, 1) / 2).transpose(0, 1),
    "reshaped": lambda x: (x.reshape(8, 3).sin() @ W).reshape(2, 4, 5).unsqueeze(1).flatten(2).cos().view(1, 2, -1),
    "grouped": lambda x: x.reshape(2, 4, 3, 1).expand(2, 4, 3, 2).flatten(1).sin().unflatten(1, (4, 3, 2)).prod(-1),
    "columns": lambda x: (x[..., 0].sin() * x[..., 2], *(y.exp() for y in x.split([1, 2], -1)), *x.unbind(-1)),
    "indices": lambda x: (x[:, 1:3].sin() * seeded_by_shape(2, 3), x[:, 2].cos().prod(-1), x[..., ::2].exp(), x[:, -1:].square()),
    "one by one": lambda x: torch.stack([NET(x[:, i]).sum(-1) ** 2 for i in range(4)], 1),
    "one row alone": lambda x: torch.linalg.slogdet(x[:, 1, :, None] * x[:, 1, None] + torch.eye(3))[1],
    "spins": spins,
    "features": lambda x: torch.cat([x, x.norm(dim=-1, keepdim=True), seeded_by_shape(2, 4, 1)], -1).prod(-1),
    "stacked": lambda x: torch.stack([x.sin(), x**2, seeded_by_shape(2, 4, 3)], -1).prod(-1) + torch.stack([x, x * x], 1).prod(1),
    "sums": lambda x: x.exp().sum(-1) + x.sin().mean(-1) ** 2 + x.square().amax(-1) + x.norm(dim=-1) + x.cumsum(-1)[..., 2],
    "selections": lambda x: torch.where(x > 0, x**3, x.sin()).relu().max(-1)[0].clamp(0.1) + x.softmax(-1)[..., 0],
    "einsum": lambda x: torch.einsum("bni,ij->bnj", x, W).sin() + torch.einsum("ji,bni->bnj", W.mT, x.cos()),
    "from the left": lambda x: (V @ x.mT.sin()).square().mT,
    "in place": in_place,
    "norms": lambda x: F.normalize(x, dim=-1) * F.gelu(x) + F.layer_norm(x, (3,), W[:, 0]) + torch.linalg.norm(x, dim=-1)[..., None],
    "chosen columns": lambda x: x.sin().index_select(-1, torch.tensor([2, 0])).cumprod(-1) * x.min(-1, keepdim=True)[0],
    "held constant": lambda x: x.sin() * x.detach().exp() + torch.zeros_like(x) + x * (x > 0),
}  # fmt: skip
MIXED = {
    "sum": lambda x: NET(x).sum(1) ** 2 + x.square().sum((1, 2)).sin()[:, None],
    "attention": lambda x: x + F.scaled_dot_product_attention(x, 2 * x, x.sin()),
    "slogdet": lambda x: torch.linalg.slogdet(NET(x))[1],
    "pairs": lambda x: (x[:, :, None] - x[:, None]).square().sum(-1) + 1 / (1 + torch.cdist(x, x + 1)),
    "gram": lambda x: x @ x.mT.exp(),
    "over rows": lambda x: x.softmax(1) + x.cumsum(1) * x.flip(1) + x.sort(1)[0] + x.roll(1, 1).sin(),
    "permuted rows": lambda x: x[:, [2, 0, 1, 3]].sin() * x + x[:, ::2].repeat_interleave(2, 1).cos(),
    "rows beside others": lambda x: torch.cat([x[:, 2:].sin(), x[:, :2]], 1) * x + torch.cat([x, V[None].expand(2, 4, 3)], 1)[:, 1:5],
    "rows in two dimensions": lambda x: x.reshape(2, 2, 2, 3).sin().prod(1) + x.reshape(2, 6, 2).cos().sum(1)[..., None],
    "two rows": lambda x: x[:, 0] * x[:, 1].sin() + x[:, :2].prod(1) * x[:, 2],
    "in place of rows": lambda x: in_place(x).mul_(x.sum(1, keepdim=True)).sin(),
    "mean of examples": lambda x: x.sin() * x.mean((1, 2), keepdim=True),
    "diagonal": lambda x: (x[:, :3] * x[:, 1:2]).diagonal(dim1=1, dim2=2).exp(),
}  # fmt: skip


@pytest.fixture
def mixed(monkeypatch):
    """How often rows were mixed."""
    seen = []
    real = jet_rows.densified

    def counting(x):
        if isinstance(getattr(x, "space", None), jet_rows.RowSpace):
            seen.append(x)
        return real(x)

    monkeypatch.setattr(jet_rows, "densified", counting)
    return seen


def without_blocks(f, **options):
    """The Laplacian along all directions from the start."""

    def of(x):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(JETS_LAPLACIAN, "_FEW", math.inf)
            return laplacian(f, **options)(x)

    return of


def compare(f, x, batch_dims=0, **blocks):
    options = {"batch_dims": batch_dims, "with_jacobian": True}
    expected = without_blocks(f, **options)(x)
    torch.testing.assert_close(laplacian(f, **options, **blocks)(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [*APART, *MIXED])
def test_beside_the_whole_jacobian(name, mixed):
    f = APART.get(name) or MIXED[name]
    x = seeded_by_shape(2, 4, 3)
    laplacian(f, batch_dims=1, block_dim=1)(x)
    assert bool(mixed) == (name in MIXED)
    compare(f, x, batch_dims=1, block_dim=-2)


def test_other_places_of_the_rows(mixed):
    x = seeded_by_shape(2, 4, 3)
    compare(lambda x: NET(x.sin()), x[0], block_dim=0)
    compare(lambda x: (x.mT @ W).sin() * x.sum(-2)[..., None], x.mT, batch_dims=1, block_dim=2)
    compare(lambda x: x.exp() * seeded_by_shape(4, 1), x, block_dim=1)  # the batch's are among the others
    compare(lambda x: x.sin().prod(-1), x, batch_dims=1, block_dim=2)
    assert len(mixed) == 1  # the last
    compare(torch.sin, seeded_by_shape(1, 3), block_dim=0)
    compare(torch.sin, seeded_by_shape(0, 3), block_dim=0)
    compare(lambda x: {"f": torch.ones(3), "g": [x.prod()]}, x[0], block_dim=0)
    for dim in (0, 3, -4):
        with pytest.raises(ValueError, match="block_dim"):
            laplacian(NET, batch_dims=1, block_dim=dim)(x)


def test_blocks_by_default(mixed):
    """Those of the first dimension after the batch, of an argument that is not small."""
    for x, batch_dims in ((seeded_by_shape(2, 4, 3), 1), (seeded_by_shape(4, 3), 0), (seeded_by_shape(2, 9), 1)):
        for f in (torch.sin, lambda x: NET(x[..., :3].exp()), lambda x: x.sin().sum(-1), lambda x: x.sin().flatten()):
            if f(x).shape[:batch_dims] == x.shape[:batch_dims]:
                compare(f, x, batch_dims)
    seen = len(mixed)
    assert seen
    laplacian(lambda x: x.sum().sin())(seeded_by_shape(8))
    assert len(mixed) == seen


@pytest.mark.parametrize(
    "info", every(12, [i for i in op_db if i.supports_forward_ad and torch.float64 in i.dtypes]), ids=label
)
def test_each_operator_after_a_function_of_each_row(info):
    for sample in list(info.sample_inputs("cpu", torch.float64))[:24:3]:
        x = sample.input
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or not x.ndim or not 8 < x.numel() < 200:
            continue

        def f(y):
            found = info.op(y, *sample.args, **sample.kwargs)  # noqa: B023
            return [z for z in tree_leaves(found) if isinstance(z, torch.Tensor) and z.is_floating_point()]

        torch.manual_seed(0)
        try:
            expected = without_blocks(f, with_jacobian=True)(x)
        except (NotImplementedError, RuntimeError, TypeError, ValueError):  # no series
            continue
        torch.manual_seed(0)
        found = laplacian(f, with_jacobian=True)(x)
        for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            b = torch.where(b.isnan() & (a == 0), 0, b)  # nan times the zeros of another row
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, equal_nan=True)


def test_training_vmap_and_nesting():
    x = seeded_by_shape(2, 4, 3)
    both = [
        lambda x: laplacian(lambda y: torch.linalg.slogdet(NET(y))[1], block_dim=0)(x),
        lambda x: without_blocks(lambda y: torch.linalg.slogdet(NET(y))[1])(x),
    ]
    parameters = [p for p in NET.parameters() if p.ndim == 2]
    first, second = (torch.autograd.grad(torch.vmap(f)(x).square().sum(), parameters) for f in both)
    torch.testing.assert_close(first, second)
    first, second = (torch.func.jacrev(f)(x[0]) for f in both)
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(torch.func.jacfwd(both[0])(x[0]), second)
    inner = laplacian(NET, batch_dims=1, block_dim=1)
    expected = without_blocks(without_blocks(NET, batch_dims=1), batch_dims=1)(x)
    for block in (None, 1):
        torch.testing.assert_close(laplacian(inner, batch_dims=1, block_dim=block)(x), expected)


@pytest.mark.slow
def test_compiled():
    x = seeded_by_shape(2, 4, 3)
    for f in (
        NET[:2],
        lambda x: torch.linalg.slogdet(NET(x))[1],
        lambda x: x * x.detach().sin() + NET[0](x).sum(1)[:, None, :3],
    ):
        torch.compiler.reset()
        compiled = torch.compile(
            laplacian(f, batch_dims=1, block_dim=1), backend="aot_eager", fullgraph=True, dynamic=False
        )
        torch.testing.assert_close(compiled(x), without_blocks(f, batch_dims=1)(x))


def test_a_lost_mixing_is_found(monkeypatch):
    """Sums over any dimension taken to leave rows apart."""
    monkeypatch.setattr(jet_rows, "_reduced", lambda name, args, kwargs: args[0].rows)
    x = seeded_by_shape(2, 4, 3)
    f = lambda x: x.sin().sum(1).square()  # noqa: E731
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        compare(f, x, batch_dims=1, block_dim=1)
