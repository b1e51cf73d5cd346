"""Programs of packages from pip: each a model of its smallest size with random weights, and the loss of one step."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Built = tuple[nn.Module, Callable[[nn.Module, int], Tensor]]  # the model, and its loss at a step


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        build: given the dtype, makes the model, and the function that gives its loss at a step.
        heavy: compiling it takes minutes.
        single: it computes a part in single precision, whatever the dtype.
        one_thread: its package has state of the process that calls change: two threads differ on stock, from run to run.
    """

    name: str
    package: str
    build: Callable[[torch.dtype], Built]
    heavy: bool = False
    single: bool = False
    one_thread: bool = False

    @property
    def available(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


PROGRAMS: dict[str, Program] = {}


def program(package: str, heavy: bool = False, single: bool = False, one_thread: bool = False) -> Callable[[Any], Any]:
    def add(build: Callable[[torch.dtype], Built]) -> Callable[[torch.dtype], Built]:
        name = build.__name__.removeprefix("_")
        PROGRAMS[name] = Program(name, package, build, heavy, single, one_thread)
        return build

    return add


def drawn(step: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).to(dtype)


def integers(step: int, high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(step))


# -- torch itself -----------------------------------------------------------------------------------------------------


@program("torch")
def _mlp(dtype: torch.dtype) -> Built:
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.2), nn.Linear(16, 3))
    return model.to(dtype), lambda m, i: F.cross_entropy(m(drawn(i, 8, 6, dtype=dtype)), integers(i, 3, 8))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(11, 5, mode="mean")
        self.tokens = nn.Embedding(11, 5, padding_idx=0)
        self.lstm = nn.LSTM(5, 6, 2, bidirectional=True, dropout=0.1, proj_size=4, batch_first=True)
        self.gru = nn.GRU(8, 6, batch_first=True)
        self.rnn = nn.RNN(6, 4, nonlinearity="relu")
        self.cell = nn.LSTMCell(4, 4)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = nn.utils.rnn.pack_padded_sequence(self.tokens(tokens), lengths, batch_first=True, enforce_sorted=False)
        y = self.gru(self.lstm(x)[0])[0]
        padded, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True)
        z, _ = self.rnn(padded)
        h, _ = self.cell(z[:, -1])
        return h.sum(-1) + self.embedding(tokens).sum(-1)


@program("torch")
def _recurrent(dtype: torch.dtype) -> Built:
    return _Recurrent().to(dtype), lambda m, i: m(integers(i, 11, 3, 7), torch.tensor([7, 3, 5])).square().mean()


@program("torch")
def _transformer(dtype: torch.dtype) -> Built:
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=dtype)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])

    def loss(m: nn.Module, i: int) -> Tensor:
        source, target = drawn(i, 2, 6, 8, dtype=dtype), drawn(i + 9, 2, 5, 8, dtype=dtype)
        return m(source, target, tgt_mask=mask, src_key_padding_mask=padding).square().mean()

    return model.to(dtype), loss


@program("torch")
def _speech_ctc(dtype: torch.dtype) -> Built:
    model = nn.Sequential(
        nn.Conv1d(4, 8, 3, stride=2), nn.BatchNorm1d(8), nn.PReLU(), nn.Conv1d(8, 8, 3, groups=4, padding="same"), nn.Mish(),
        nn.GroupNorm(2, 8), nn.Conv1d(8, 6, 1),
    )  # fmt: skip

    def loss(m: nn.Module, i: int) -> Tensor:
        scores = m(drawn(i, 3, 4, 30, dtype=dtype)).permute(2, 0, 1).log_softmax(-1)
        return F.ctc_loss(scores, integers(i, 5, 3, 4) + 1, torch.tensor([14, 12, 9]), torch.tensor([4, 3, 2]))

    return model.to(dtype), loss


@program("torch")
def _parametrized(dtype: torch.dtype) -> Built:
    from torch.nn.utils import parametrizations as p

    model = nn.Sequential(
        p.weight_norm(nn.Conv2d(2, 4, 3)), nn.InstanceNorm2d(4, affine=True), nn.SiLU(),
        p.spectral_norm(nn.Conv2d(4, 4, 3)), nn.AdaptiveAvgPool2d(2), nn.Flatten(), p.orthogonal(nn.Linear(16, 8)),
        nn.Softplus(), nn.utils.spectral_norm(nn.Linear(8, 3)), nn.utils.weight_norm(nn.Linear(3, 3)),
    )  # fmt: skip
    return model.to(dtype), lambda m, i: F.smooth_l1_loss(
        m(drawn(i, 3, 2, 9, 9, dtype=dtype)), drawn(i, 3, 3, dtype=dtype)
    )


@program("torch")
def _unet(dtype: torch.dtype) -> Built:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.middle = (
                nn.Conv2d(3, 6, 3, padding=1),
                nn.Conv2d(6, 6, 3, padding=1, dilation=1, padding_mode="reflect"),
            )
            self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
            self.up, self.out = nn.ConvTranspose2d(6, 6, 2, stride=2), nn.Conv2d(12, 4, 1)
            self.shuffle = nn.PixelShuffle(2)

        def forward(self, x: Tensor) -> Tensor:
            a = F.leaky_relu(self.down(x), 0.1, inplace=True)
            b, places = self.pool(a)
            c = F.elu(self.middle(b))
            d = torch.cat([self.up(c), self.unpool(c, places) + a], 1)
            e = F.interpolate(self.out(d), scale_factor=2, mode="bicubic", align_corners=False)
            f = F.interpolate(e, size=(8, 8), mode="bilinear") + F.avg_pool2d(e, 2)[..., :8, :8]
            return self.shuffle(F.hardswish(f))

    return UNet().to(dtype), lambda m, i: F.huber_loss(
        m(drawn(i, 2, 3, 8, 8, dtype=dtype)), drawn(i, 2, 1, 16, 16, dtype=dtype)
    )


@program("torch")
def _vae(dtype: torch.dtype) -> Built:
    from torch import distributions as D

    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(6, 12), nn.Linear(12, 6)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.encoder(x).chunk(2, -1)
            scale = F.softplus(b) + 0.1
            normal = D.Normal(a, scale)
            others = [
                D.Gamma(scale, scale).rsample(), D.Beta(scale, scale + 1).rsample(), D.LogNormal(a, scale).rsample().clamp(max=5),
                D.Laplace(a, scale).rsample(), D.StudentT(scale + 3, a, scale).rsample(), D.Kumaraswamy(scale + 1, scale + 1).rsample(),
                D.Dirichlet(scale).rsample(), D.RelaxedBernoulli(scale.new_tensor(0.7), logits=a).rsample(),
                D.MultivariateNormal(a, scale_tril=torch.diag_embed(scale)).rsample(),
                D.RelaxedOneHotCategorical(scale.new_tensor(0.7), logits=a).rsample(),
            ]  # fmt: skip
            z = torch.cat([normal.rsample() + sum(others), a], -1)
            kl = (
                D.kl_divergence(normal, D.Normal(0, 1)).mean()
                + D.kl_divergence(D.Gamma(scale, scale), D.Gamma(1.0, 2.0)).mean()
            )
            return (
                F.binary_cross_entropy_with_logits(self.decoder(z), x.sigmoid())
                + kl
                - D.VonMises(a, scale).log_prob(a * 0.5).mean()
            )

    return VAE().to(dtype), lambda m, i: m(drawn(i, 5, 6, dtype=dtype))


@program("torch")
def _fake_quantized(dtype: torch.dtype) -> Built:
    from torch.ao import quantization as q

    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    model.train().qconfig = q.get_default_qat_qconfig("fbgemm")
    model = q.prepare_qat(q.fuse_modules_qat(model, [["0", "1", "2"]]))
    if dtype is not torch.float32:
        raise NotImplementedError("observers are of float32")
    return model, lambda m, i: F.cross_entropy(m(drawn(i, 4, 1, 8, 8)), integers(i, 3, 4), label_smoothing=0.1)


@program("torch")
def _spectral(dtype: torch.dtype) -> Built:
    """Fourier layers, a spectrogram, complex parameters, sparse products, scatters."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(
                torch.randn(2, 2, 5, dtype=torch.complex128 if dtype is torch.float64 else torch.complex64)
            )
            self.out = nn.Linear(16, 4, dtype=dtype)
            self.graph = torch.sparse_coo_tensor(
                torch.tensor([[0, 1, 3], [1, 2, 0]]), torch.tensor([1.0, 2.0, 3.0], dtype=dtype), (4, 4)
            )

        def forward(self, x: Tensor) -> Tensor:
            y = torch.fft.irfft(torch.einsum("bif,iof->bof", torch.fft.rfft(x)[..., :5], self.weight), n=16)
            s = (
                torch.stft(x.flatten(0, 1), 8, 4, window=torch.hann_window(8, dtype=x.dtype), return_complex=True)
                .abs()
                .clamp_min(1e-3)
            )
            z = torch.sparse.mm(self.graph, self.out(F.glu(torch.cat([y, y], -1), -1)[:, 0]).mT)
            pooled = torch.zeros_like(z).index_add(0, torch.tensor([1, 1, 0, 3]), z).scatter_reduce(
                0, torch.tensor([[0] * z.shape[1]]), z[:1], "amax")  # fmt: skip
            return pooled.cumsum(0).logsumexp(0).mean() + s.log().std() + y.sort(-1).values.diff().prod(-1).sum()

    return Spectral(), lambda m, i: m(drawn(i, 4, 2, 16, dtype=dtype))
