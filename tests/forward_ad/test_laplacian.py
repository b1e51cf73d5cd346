"""Laplacians and their like beside Hessians."""

import pytest
import torch
from helpers.tensors import seeded_by_shape
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_manualgrad import forward_ad
from torch_manualgrad.forward_ad import biharmonic, ggn_vp, hessian_diagonal, hvp, laplacian, weighted_laplacian
from torch_manualgrad.forward_ad.jets import products as jet_products, scaled as jet_scaled
from torch_manualgrad.forward_ad.jets.tensor import Space


def network(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*layers).double()


MLP = network(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.SiLU(), nn.LayerNorm(5), nn.Linear(5, 2))


def hessian(f, x):
    """(*out, n, n); in reverse mode twice, in which PyTorch is right."""
    with sdpa_kernel(SDPBackend.MATH):  # the other has no second derivative
        found = torch.func.jacrev(torch.func.jacrev(f))(x)
    return found.reshape(*found.shape[: found.ndim - 2 * x.ndim], x.numel(), x.numel())


def trace(f, x):
    return hessian(f, x).diagonal(dim1=-2, dim2=-1).sum(-1)


def attention(x):
    return F.scaled_dot_product_attention(x, 2 * x, x.sin(), is_causal=True)


FUNCTIONS = {
    "network": (MLP, (3,)),
    "products": (lambda x: (x[0] * x[1].exp()).sum() + x[:, 1].sin().prod() + x.mT @ x, (3, 2)),
    "softmax": (lambda x: x.softmax(-1) * x.log_softmax(0) + x.norm(), (2, 3)),
    "broadcast": (
        lambda x: torch.atan2(x, x[0] + 2) * x.flatten()[:, None, None] / (3 + x.mT[1, :, None].cos()),
        (2, 2),
    ),
    "powers": (lambda x: (x.abs() + 1) ** 2.5 + 2**x + (x.abs() + 1) ** x.sum(0) + x**3, (2, 3)),
    "selections": (lambda x: x.max(0)[0] ** 2 + x.relu().square().sum() + x[x > 0].sin().sum(), (2, 3)),
    "joined": (lambda x: torch.cat([x, x.sin()], 1).flatten().cumsum(0) * x.sum(), (2, 2)),
    "matrices": (
        lambda x: torch.linalg.inv(x) @ torch.linalg.solve(x, x @ x.sin()) * torch.linalg.slogdet(x)[1],
        (3, 3),
    ),
    "spectrum": (lambda x: torch.linalg.eigvalsh(x @ x.mT) + torch.linalg.det(x), (2, 2)),
    "attention": (attention, (1, 3, 2)),
    "constant": (lambda x: torch.ones(2, dtype=x.dtype), (3,)),
    "linear": (lambda x: 3 * x.sum(0) + 1, (3, 2)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_beside_the_hessian(name):
    f, shape = FUNCTIONS[name]
    x = seeded_by_shape(*shape)
    value, jacobian, found = laplacian(f, with_jacobian=True)(x)
    if name == "constant":
        assert found.eq(0).all() and jacobian.eq(0).all() and jacobian.shape == (2, 3)
        return
    H = hessian(f, x)
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)  # noqa: E731
    close(found, H.diagonal(dim1=-2, dim2=-1).sum(-1))
    close(value, f(x))
    close(jacobian, torch.func.jacrev(f)(x))
    weight = seeded_by_shape(x.numel(), x.numel())
    weight = weight + weight.mT
    close(weighted_laplacian(f, weight)(x), (weight * H).sum((-2, -1)))
    close(weighted_laplacian(f, weight[0])(x), H.diagonal(dim1=-2, dim2=-1) @ weight[0])
    close(hessian_diagonal(f)(x).flatten(value.ndim), H.diagonal(dim1=-2, dim2=-1))


def test_batches_and_vmap():
    x = seeded_by_shape(4, 3)
    expected = torch.stack([trace(MLP, row) for row in x])
    torch.testing.assert_close(laplacian(MLP, batch_dims=1)(x), expected)
    torch.testing.assert_close(torch.vmap(laplacian(MLP))(x), expected)
    _, jacobian, _ = laplacian(MLP, batch_dims=1, with_jacobian=True)(x)
    torch.testing.assert_close(jacobian, torch.vmap(torch.func.jacrev(MLP))(x))
    diagonal = hessian_diagonal(MLP, batch_dims=1)(x)
    assert diagonal.shape == (4, 2, 3)
    torch.testing.assert_close(diagonal.sum(-1), expected)


def test_other_arguments_and_trees():
    x, a = seeded_by_shape(3), seeded_by_shape(3)
    found = laplacian(lambda x, a: {"f": (a * x**2).sum(), "g": [x.prod()]})(x, a)
    torch.testing.assert_close(found["f"], 2 * a.sum())
    assert found["g"][0] == 0


def test_biharmonic_of_a_known_function():
    """sin(a x) cosh(b y) has the Laplacian (b^2 - a^2) times itself."""
    f = lambda p: torch.sin(1.3 * p[..., 0]) * torch.cosh(0.7 * p[..., 1])  # noqa: E731
    x = seeded_by_shape(5, 2)
    eigenvalue = 0.7**2 - 1.3**2
    torch.testing.assert_close(biharmonic(f, batch_dims=1)(x), eigenvalue**2 * f(x))
    torch.testing.assert_close(biharmonic(f)(x[0]), eigenvalue**2 * f(x[0]))
    smooth = MLP[:4]  # without the LayerNorm, of which PyTorch's fourth derivative is wrong
    torch.testing.assert_close(
        biharmonic(smooth)(seeded_by_shape(3)), trace(lambda y: trace(smooth, y), seeded_by_shape(3))
    )


def test_training_through_it():
    x = seeded_by_shape(4, 3)
    names, parameters = zip(*MLP.named_parameters())

    def loss(*ps):
        call = lambda x: torch.func.functional_call(MLP, dict(zip(names, ps)), (x,))  # noqa: E731
        return laplacian(call, batch_dims=1)(x).square().mean()

    found = torch.autograd.grad(loss(*parameters), parameters, allow_unused=True)
    inside = torch.func.grad(loss, argnums=tuple(range(len(parameters))))(*[p.detach() for p in parameters])
    for p, a, b in zip(parameters, found, inside):
        torch.testing.assert_close(torch.zeros_like(p) if a is None else a, b)
    ps = [p.detach() for p in parameters]
    step, direction = 1e-5, [seeded_by_shape(*p.shape) for p in ps]
    above, below = (loss(*[p + h * d for p, d in zip(ps, direction)]) for h in (step, -step))
    slope = sum((g * d).sum() for g, d in zip(inside, direction))
    torch.testing.assert_close(slope, (above - below) / (2 * step), rtol=1e-6, atol=1e-8)


def test_the_gradient_of_a_laplacian_in_its_argument():
    f = laplacian(MLP, batch_dims=1)
    x = seeded_by_shape(2, 3)
    first = torch.func.jacrev(f)(x)
    torch.testing.assert_close(torch.func.jacfwd(f)(x), first)
    weights = seeded_by_shape(3).requires_grad_()
    (found,) = torch.autograd.grad(weighted_laplacian(MLP, weights)(x[0]).sum(), weights)
    torch.testing.assert_close(found, hessian_diagonal(MLP)(x[0]).sum(0))


def test_jacobians_kept_as_products(monkeypatch):
    """Elementwise functions in a chain, a Jacobian that is read twice, an end that nobody reads; few elements at a time."""
    wide = network(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8))

    def f(x):
        first = wide[0](x).tanh().sin()
        h = wide[2](first)
        return wide[2](h.tanh() + first).exp().unsqueeze(0).flatten(0, 1).sigmoid()

    x = seeded_by_shape(2, 4, 3)
    monkeypatch.setattr(jet_scaled, "BLOCK", 20)
    for g in (f, lambda x: (wide(x).tanh() @ seeded_by_shape(8, 8).requires_grad_()).sum(-1)):
        found = laplacian(g, batch_dims=1, with_jacobian=True)(x)
        assert not found[0].requires_grad or found[2].requires_grad
        with torch.no_grad(), monkeypatch.context() as patch:
            products = []
            real = jet_scaled.matmul
            patch.setattr(jet_products, "matmul", lambda x, y: products.append(type(x)) or real(x, y))
            untracked = laplacian(g, batch_dims=1, with_jacobian=True)(x)
            assert jet_scaled.Scaled in products
            patch.setattr(jet_scaled, "_plain", lambda *_: False)
            expected = laplacian(g, batch_dims=1, with_jacobian=True)(x)
        for a, b, c in zip(found, untracked, expected):
            torch.testing.assert_close(a, c)
            torch.testing.assert_close(b, c)


@pytest.mark.slow
def test_compiled():
    f = laplacian(MLP[:3], batch_dims=1)
    x = seeded_by_shape(4, 3)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(x), f(x))


def test_products_with_the_hessian():
    x, v = seeded_by_shape(3), seeded_by_shape(3).cos()
    f = lambda x: MLP(x).square().sum()  # noqa: E731
    torch.testing.assert_close(hvp(f, x, v), hessian(f, x) @ v)
    loss = lambda y: y.logsumexp(0)  # noqa: E731
    J = torch.func.jacrev(MLP)(x)
    torch.testing.assert_close(ggn_vp(MLP, loss, x, v), J.mT @ hessian(loss, MLP(x)) @ J @ v)


def test_a_weight_that_is_not_symmetric():
    x, W = seeded_by_shape(3), seeded_by_shape(3, 3)
    H = torch.stack([hessian(lambda y, i=i: MLP(y)[i], x) for i in range(MLP(x).numel())])
    torch.testing.assert_close(weighted_laplacian(MLP, W)(x), (W * H).sum((-2, -1)).reshape(MLP(x).shape))


def cubed(x):
    return x.sin().sum() ** 3


def weighted_trace(W, x):
    """The trace of W H, in closed form: W and x may be complex."""
    s, cosines = x.sin().sum(), x.cos()
    return ((6 * s * torch.outer(cosines, cosines) - torch.diag(3 * s**2 * x.sin())) * W).sum()


@pytest.mark.parametrize("kind", ["regular", "zero", "identity"])
def test_derivatives_in_a_matrix_weight(kind):
    x, W = seeded_by_shape(3), seeded_by_shape(3, 3)
    W = {"regular": W, "zero": 0 * W, "identity": torch.eye(3, dtype=W.dtype)}[kind]  # two have equal eigenvalues
    ours = lambda W, x: weighted_laplacian(cubed, W)(x)  # noqa: E731
    grad, hessian, jvp = torch.func.grad, torch.func.hessian, torch.func.jvp
    ways = [
        lambda f: grad(f, (0, 1))(W, x),
        lambda f: jvp(f, (W, x), (W + 1, x))[1],
        lambda f: hessian(f, (0, 1))(W, x),
        lambda f: torch.func.jacrev(grad(f, (0, 1)), (0, 1))(W, x),
        lambda f: jvp(lambda *at: jvp(f, at, (W + 1, x))[1], (W, x), (W + 2, x))[1],
        lambda f: torch.func.vmap(f, (0, None))(torch.stack([W, 2 * W - 1]), x),
        lambda f: laplacian(lambda y: f(W + torch.outer(y, y), y))(x),
    ]
    for way in ways:
        torch.testing.assert_close(way(ours), way(weighted_trace))
    tracked = W.clone().requires_grad_()
    (found,) = torch.autograd.grad(ours(tracked, x), tracked)
    torch.testing.assert_close(found, grad(weighted_trace)(W, x))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(W, W + 1)
        found = torch.autograd.forward_ad.unpack_dual(ours(dual, x)).tangent
    torch.testing.assert_close(found, jvp(lambda W: weighted_trace(W, x), (W,), (W + 1,))[1])


@pytest.mark.parametrize("W", [seeded_by_shape(3, 3) * (1 + 2j), seeded_by_shape(3) * 1j, seeded_by_shape(3, 3)])
@pytest.mark.parametrize("x", [seeded_by_shape(3), seeded_by_shape(3) * (2 - 1j)])
def test_complex_weights_and_arguments(W, x):
    full = torch.diag(W) if W.ndim == 1 else W
    torch.testing.assert_close(weighted_laplacian(cubed, W)(x), weighted_trace(full, x))


def test_a_weight_that_does_not_fit():
    with pytest.raises(ValueError, match="weighted_laplacian: weight: expected shape"):
        weighted_laplacian(MLP, seeded_by_shape(2))(seeded_by_shape(3))


def test_a_lost_cross_term_is_found(monkeypatch):
    right = Space.collapsed_product
    monkeypatch.setattr(Space, "collapsed_product", lambda self, x, y: 0.9 * right(self, x, y))
    x = seeded_by_shape(3)
    assert (laplacian(MLP)(x) - trace(MLP, x)).abs().max() > 1e-4


def test_the_names():
    assert {"jet", "laplacian", "weighted_laplacian", "biharmonic", "hvp", "ggn_vp"} <= {*forward_ad.__all__}


def test_products_with_the_hessian_have_the_rules_of_the_package():
    x, index = torch.rand(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.long)

    def f(x):
        return x.scatter_reduce(1, index, x * x, "prod").sum()

    matrix, v = torch.autograd.functional.hessian(f, x).reshape(6, 6), torch.rand(2, 3, dtype=torch.float64)
    expected = (matrix @ v.reshape(6)).reshape(2, 3)
    torch.testing.assert_close(hvp(f, x, v), expected)  # wrong by PyTorch's rule of scatter_reduce
    torch.testing.assert_close(ggn_vp(lambda x: x, f, x, v), expected)
