"""Laplacians of batches: an operator that mixes the examples raises, with its name; those of each example alone do not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_manualgrad as mg
from torch_manualgrad.forward_ad import biharmonic, hessian_diagonal, laplacian, weighted_laplacian

B, D = 5, 6
generator = torch.Generator().manual_seed(0)
X = torch.randn(B, D, dtype=torch.float64, generator=generator)
IMAGES = torch.randn(B, 2, 5, 5, dtype=torch.float64, generator=generator)
SEQUENCES = torch.randn(B, 3, 4, dtype=torch.float64, generator=generator)
W = torch.randn(D, D, dtype=torch.float64, generator=generator)


def module(make, *args, **kwargs):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(*args, **kwargs).double().requires_grad_(False)


MLP = module(lambda: nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, 3), nn.Softplus(), nn.Linear(3, 1)))
NORM = module(nn.BatchNorm1d, D)
ENCODER = module(nn.TransformerEncoderLayer, 4, 2, 8, batch_first=True, dropout=0.0)

MIXED = {
    "batch norm": (lambda x: NORM(x.sin()), X, "mean"),
    "batch norm of images": (lambda x: F.batch_norm(x, None, None, training=True), IMAGES, "mean"),
    "mean": (lambda x: x.sin() - x.sin().mean(0), X, "mean.dim"),
    "sum": (lambda x: x.sin().sum(), X, "aten::sum"),
    "mean of all": (lambda x: MLP(x).mean(), X, "aten::mean"),
    "logsumexp": (lambda x: x.logsumexp(0), X, "amax"),
    "softmax": (lambda x: x.softmax(0), X, "amax"),
    "cumsum": (lambda x: x.sin().cumsum(0), X, "aten::cumsum"),
    "products of examples": (lambda x: x @ x.mT, X, "aten::mm"),
    "matrix from the left": (lambda x: W[:B, :B] @ x.sin(), X, "aten::mm"),
    "neighbours": (lambda x: x.sin() * x.roll(1, 0), X, "aten::mul"),
    "differences": (lambda x: x[1:].sin() - x[:-1], X, "aten::sub"),
    "maximum": (lambda x: x.sin().amax(0), X, "aten::amax"),
    "largest of two": (lambda x: x[:2, :1].amax(0), X, "aten::amax"),
    "sort": (lambda x: x.sort(0).values.sin(), X, "aten::sort"),
    "median": (lambda x: x[:3].median(0).values.sin(), X, "aten::median"),
    "attention over the batch": (lambda x: F.scaled_dot_product_attention(x, x, x), X, "aten::"),
    "norm": (lambda x: x / x.norm(), X, "norm"),
    "standard deviation": (lambda x: x.exp().std(0), X, "aten::"),
    "convolution over the batch": (
        lambda x: F.conv1d(x.mT[:, None], torch.ones(1, 1, 3).double()),
        X,
        "aten::convolution",
    ),
    "einsum": (lambda x: torch.einsum("bi,bj->ij", x, x.sin()), X, "aten::bmm"),
    "spectrum": (lambda x: torch.fft.rfft(x, dim=0).abs(), X, "fft"),
    "distances": (lambda x: torch.cdist(x, x + 1), X, "cdist"),
    "covariance": (lambda x: torch.linalg.slogdet(x.mT @ x)[1], X, "aten::mm"),
    "one example for all": (lambda x: x.exp() - x[:1], X, "aten::sub"),
    "in place": (lambda x: x.sin().sub_(x.mean(0)), X, "aten::mean"),
    "pairs": (lambda x: x[:4].reshape(2, -1).square().sum(1), X, "aten::sum"),
    "an operator of one's own": (lambda x: mg.linalg.nuclear_norm(x), X, "singular_value_sum"),
}
ALONE = {
    "MLP": (MLP, X),
    "eval batch norm": (lambda x: F.batch_norm(x.sin(), W[0], W[1].exp()), X),
    "layer norm": (module(nn.LayerNorm, D), X),
    "group norm": (module(nn.GroupNorm, 2, 4), SEQUENCES.mT),
    "instance norm": (module(nn.InstanceNorm2d, 2), IMAGES),
    "rms norm": (module(nn.RMSNorm, D), X),
    "softmax": (lambda x: x.softmax(-1) + x.log_softmax(1) + x.logsumexp(1, keepdim=True), X),
    "encoder": (ENCODER, SEQUENCES),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x.sin(), x.cos(), is_causal=True), SEQUENCES),
    "multihead attention": (lambda x: ATTENTION(x, x, x)[0], SEQUENCES),
    "convolutions": (
        module(
            lambda: nn.Sequential(
                nn.Conv2d(2, 3, 3),
                nn.SiLU(),
                nn.AvgPool2d(2),
                nn.Conv2d(3, 2, 1),
                nn.MaxPool2d(1),
                nn.Flatten(),
                nn.Linear(2, 1),
            )
        ),
        IMAGES,
    ),
    "transposed convolution": (module(nn.ConvTranspose2d, 2, 1, 2), IMAGES),
    "padding, interpolation": (lambda x: F.interpolate(F.pad(x, (1, 0, 2, 1)), scale_factor=2).sin(), IMAGES),
    "reductions": (lambda x: x.prod(1) + x.std(1) + x.norm(dim=1) + x.amax(1) ** 2 + x.cumsum(1)[:, 2].exp(), X),
    "sort, topk": (lambda x: x.sort(1).values ** 2 + x.topk(3).values.prod(1, keepdim=True), X),
    "views": (
        lambda x: x.reshape(B, 2, 3).transpose(0, 1).flatten(1).reshape(2, B, 3).permute(1, 2, 0).flatten(1).exp() * x,
        X,
    ),
    "examples in one dimension": (lambda x: (x.reshape(-1).sin() * x.flatten()).reshape(B, -1).sum(1), X),
    "split and joined": (lambda x: torch.cat([p.sin() for p in x.split(2)]) * torch.stack(list(x.unbind(0))), X),
    "there and back": (lambda x: x.flip(0).sin().flip(0) * x.roll(2, 0).roll(-2, 0), X),
    "a permutation": (lambda x: x[torch.tensor([3, 1, 0, 2, 4])].exp()[torch.tensor([2, 1, 3, 0, 4])] * x, X),
    "matrices": (
        lambda x: (
            torch.linalg.slogdet(x @ x.mT + torch.eye(3).double())[1] + torch.linalg.inv(x @ x.mT + 1).sum((1, 2))
        ),
        SEQUENCES,
    ),
    "factors": (lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(3).double()).sum((1, 2)), SEQUENCES),
    "singular values": (lambda x: torch.linalg.svdvals(x).log().sum(-1) + mg.linalg.nuclear_norm(x), SEQUENCES),
    "functions of matrices": (
        lambda x: mg.linalg.sqrtm(x @ x.mT + 3 * torch.eye(3).double(), assume="hermitian"),
        SEQUENCES,
    ),
    "distances": (lambda x: torch.cdist(x, x + 1).sum((1, 2)), SEQUENCES),
    "einsum": (lambda x: torch.einsum("bik,bjk->bij", x, x.sin()).tanh(), SEQUENCES),
    "spectrum": (lambda x: torch.fft.rfft(x).abs(), X),
    "where": (
        lambda x: torch.where(x > 0, x.sin(), x**3) + x.clamp(-1, 1) ** 2 + F.relu(x - 0.1) ** 3 + F.hardtanh(x),
        X,
    ),
    "domains": (
        lambda x: x.square().log() + (x.square() + 1).acosh() + x.tanh().atanh() + (x.square() + 3).lgamma(),
        X,
    ),
    "in place": (lambda x: x.sin().mul_(x).add_(1), X),
    "constants": (lambda x: x.sin() + torch.zeros_like(x) + x.detach().mean(0), X),
    "complex": (
        lambda x: torch.polar(x.exp(), x).real * torch.view_as_complex(x.reshape(B, 3, 2)).abs().sum(1, keepdim=True),
        X,
    ),
    "loss": (lambda x: F.cross_entropy(x, torch.tensor([0, 3, 1, 2, 5]), reduction="none"), X),
    "a grid": (
        lambda x: F.grid_sample(x[:, :1], x[:, 1:].tanh().reshape(B, 5, 5, 1).expand(-1, -1, -1, 2) * 0.3),
        IMAGES,
    ),
}
ATTENTION = module(nn.MultiheadAttention, 4, 2, batch_first=True)


@pytest.mark.parametrize("name", MIXED)
def test_an_operator_that_mixes_examples_raises(name):
    f, x, operator = MIXED[name]
    with pytest.raises(ValueError, match=r"laplacian\(batch_dims=1\): .*" + operator + ".* mixes examples"):
        laplacian(f, batch_dims=1)(x)


def one_by_one(f, x):
    """The function of each example, as a batch of one."""
    return torch.cat([laplacian(f, batch_dims=1)(x[i : i + 1]) for i in range(len(x))])


@pytest.mark.parametrize("name", ALONE)
def test_functions_of_each_example_do_not(name):
    f, x = ALONE[name]
    found = laplacian(f, batch_dims=1)(x)
    if name in (
        "a permutation",
        "loss",
        "views",
        "split and joined",
        "examples in one dimension",
        "constants",
        "complex",
        "a grid",
    ):
        eye = torch.eye(x.numel(), dtype=x.dtype).reshape(-1, *x.shape)
        found, expected = found.sum(), sum(mg.forward_ad.directional(lambda y: f(y).sum(), x, v, 2)[1] for v in eye)
    else:
        expected = one_by_one(f, x)
    torch.testing.assert_close(found, expected)


def test_other_functions_of_a_batch():
    mixing = lambda x: x.sin() - x.mean(0)  # noqa: E731
    with pytest.raises(ValueError, match=r"weighted_laplacian\(batch_dims=1\): aten::mean.dim mixes"):
        weighted_laplacian(mixing, W[0].exp(), batch_dims=1)(X)
    with pytest.raises(ValueError, match=r"hessian_diagonal\(batch_dims=1\): aten::mean.dim mixes"):
        hessian_diagonal(mixing, batch_dims=1)(X)
    with pytest.raises(ValueError, match="aten::mean.dim mixes"):
        biharmonic(mixing, batch_dims=1)(X[:, :2])
    with pytest.raises(ValueError, match="aten::mean.dim mixes"):
        laplacian(mixing, batch_dims=1, block_dim=1)(X)
    with pytest.raises(ValueError, match="aten::mean.dim mixes"):
        laplacian(lambda x: x - x.sin().mean(1, keepdim=True), batch_dims=2)(SEQUENCES)
    net = lambda x: x.sin().sum(-1) * x.square().prod(-1)  # noqa: E731
    hessian_diagonal(net, batch_dims=1)(X)
    weighted_laplacian(net, W[0].exp(), batch_dims=1)(X)
    biharmonic(net, batch_dims=1)(X[:, :2])
    laplacian(net, batch_dims=2)(SEQUENCES)
    laplacian(lambda x: torch.linalg.slogdet(x @ x.mT)[1], batch_dims=1, block_dim=1)(SEQUENCES)


def test_a_series_inside_of_a_batch():
    """The Laplacian of a score: the inner derivative is of each example too."""
    score = lambda x: mg.forward_ad.directional(lambda y: y.sin().prod(-1), x, torch.ones_like(x), 1)[0]  # noqa: E731
    torch.testing.assert_close(laplacian(score, batch_dims=1)(X), one_by_one(score, X))
    with pytest.raises(ValueError, match="mixes examples"):
        laplacian(lambda x: score(x) - score(x).mean(), batch_dims=1)(X)


def test_many_examples_and_shared_results():
    many = torch.randn(1000, 3, generator=generator)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    before = torch.random.get_rng_state()
    laplacian(net, batch_dims=1)(many)
    assert (torch.random.get_rng_state() == before).all()
    with pytest.raises(ValueError, match="aten::sub.Tensor mixes"):
        laplacian(lambda x: x[513:514].exp() - x[1:2], batch_dims=1)(many)
    with pytest.raises(ValueError, match="aten::sum.dim_IntList mixes"):
        laplacian(lambda x: x[::512].exp().sum(0), batch_dims=1)(many)


def test_one_example_is_not_a_batch():
    torch.testing.assert_close(laplacian(lambda x: x.sin().sum(0), batch_dims=1)(X[:1]), -X[0].sin())
    torch.testing.assert_close(laplacian(lambda x: x.sin().sum())(X), -X.sin().sum())


def test_under_transforms():
    net = laplacian(MLP, batch_dims=1)
    torch.testing.assert_close(torch.vmap(net)(torch.stack([X, X.sin()]))[1], net(X.sin()))
    assert torch.func.grad(lambda x: net(x).sum())(X).shape == X.shape
    with pytest.raises(ValueError, match="mixes"):
        torch.vmap(laplacian(lambda y: y.sin() - y.mean(0), batch_dims=1))(torch.stack([X, X]))


@pytest.mark.slow
def test_compiled():
    net = lambda x: laplacian(MLP, batch_dims=1)(x)  # noqa: E731
    torch.compiler.reset()
    compiled = torch.compile(net, backend="aot_eager", dynamic=False, fullgraph=True)
    torch.testing.assert_close(compiled(X), net(X))
    mixing = torch.compile(lambda x: laplacian(lambda y: y.sin() - y.mean(0), batch_dims=1)(x), backend="aot_eager")
    with pytest.raises(Exception, match="aten::mean.dim mixes"):
        mixing(X)
