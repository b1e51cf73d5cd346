"""Programs of diffusers, torch_geometric, kornia, gpytorch, botorch and torchdiffeq."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from program_list import Built, drawn, integers, program
from torch import Tensor, nn
from torch.nn import functional as F

# -- others -----------------------------------------------------------------------------------------------------------


@program("diffusers", heavy=True)
def _diffusion(dtype: torch.dtype) -> Built:
    from diffusers import DDPMScheduler, UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=8, attention_head_dim=4, norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    schedule = DDPMScheduler(50)

    def loss(m: nn.Module, i: int) -> Tensor:
        image, noise, at = (
            drawn(i, 2, 4, 8, 8, dtype=dtype),
            drawn(i + 9, 2, 4, 8, 8, dtype=dtype),
            integers(i, 50, 2),
        )
        return F.mse_loss(m(schedule.add_noise(image, noise, at), at, drawn(i, 2, 3, 8, dtype=dtype)).sample, noise)

    return model.to(dtype), loss


@program("diffusers", heavy=True)
def _autoencoder(dtype: torch.dtype) -> Built:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
    )

    def loss(m: nn.Module, i: int) -> Tensor:
        image = drawn(i, 2, 3, 16, 16, dtype=dtype)
        found = m.encode(image).latent_dist
        return F.l1_loss(m.decode(found.sample()).sample, image) + found.kl().mean() * 1e-3

    return model.to(dtype), loss


def _graph(name: str, layers: Callable[[Any], list[Any]]) -> None:
    def build(dtype: torch.dtype) -> Built:
        from torch_geometric import nn as g

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(layers(g))
                self.norm, self.readout = g.GraphNorm(8), nn.Linear(8, 3)

            def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
                for layer in self.layers:
                    x = F.dropout(F.elu(layer(x, edges)), 0.1, self.training)
                x = self.norm(x, batch)
                x = g.global_mean_pool(x, batch) + g.global_max_pool(x, batch) + g.global_add_pool(x, batch)
                return F.log_softmax(self.readout(x), -1)

        def loss(m: nn.Module, i: int) -> Tensor:
            batch = torch.arange(20).div(7, rounding_mode="floor")
            return F.nll_loss(m(drawn(i, 20, 5, dtype=dtype), integers(i, 20, 2, 60), batch), integers(i, 3, 3))

        return Net().to(dtype), loss

    build.__name__ = name
    program("torch_geometric")(build)


_graph("gcn", lambda g: [g.GCNConv(5, 8), g.GCNConv(8, 8)])
_graph("gat", lambda g: [g.GATv2Conv(5, 4, heads=2), g.GATConv(8, 8), g.TransformerConv(8, 8)])
_graph(
    "graph_others",
    lambda g: [
        g.SAGEConv(5, 8, aggr=["mean", "max", "std", "softmax"]),
        g.GINConv(nn.Linear(8, 8)),
        g.ChebConv(8, 8, 3),
        g.PNAConv(8, 8, ["mean", "min"], ["identity", "attenuation"], torch.tensor([1, 3, 4])),
    ],
)


@program("kornia")
def _kornia(dtype: torch.dtype) -> Built:
    import kornia as K

    class Warp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.angle, self.move = nn.Parameter(torch.tensor([0.3, -0.2])), nn.Parameter(torch.randn(2, 8))
            self.axis = nn.Parameter(torch.randn(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            x = K.geometry.transform.rotate(x, self.angle * 20)
            corners = x.new_tensor([[[0, 0], [11, 0], [11, 11], [0, 11]]]).expand(2, 4, 2)
            H = K.geometry.transform.get_perspective_transform(corners, corners + self.move.view(2, 4, 2).tanh())
            x = K.geometry.transform.warp_perspective(x, H, (12, 12))
            R = K.geometry.conversions.axis_angle_to_rotation_matrix(self.axis)
            q = K.geometry.conversions.rotation_matrix_to_quaternion(R)
            x = K.filters.gaussian_blur2d(K.enhance.adjust_hue(x.sigmoid(), 0.1), (3, 3), (1.0, 1.0))
            edges = (
                K.filters.sobel(K.color.rgb_to_lab(x))
                + K.filters.median_blur(x, (3, 3))
                + K.filters.bilateral_blur(x, 3, 0.1, (1.5, 1.5))
            )
            F8 = K.geometry.epipolar.find_fundamental(
                q.new_ones(2, 9, 2) + self.move.sum() * drawn(3, 2, 9, 2, dtype=dtype), drawn(4, 2, 9, 2, dtype=dtype)
            )
            return (
                K.losses.ssim_loss(edges, x, 5) + q.abs().sum() + K.losses.total_variation(x).mean() + F8.square().sum()
            )

    return Warp().to(dtype), lambda m, i: m(drawn(i, 2, 3, 12, 12, dtype=dtype))


@program("gpytorch", one_thread=True)  # its settings
def _gaussian_process(dtype: torch.dtype) -> Built:
    import gpytorch as g

    x = torch.linspace(0, 1, 12, dtype=dtype)

    class GP(g.models.ExactGP):
        def __init__(self) -> None:
            super().__init__(x, x.sin(), g.likelihoods.GaussianLikelihood())
            self.mean, self.kernel = (
                g.means.LinearMean(1),
                g.kernels.ScaleKernel(g.kernels.MaternKernel(2.5) + g.kernels.PeriodicKernel()),
            )

        def forward(self, x: Tensor) -> Any:
            return g.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    def loss(m: nn.Module, i: int) -> Tensor:
        return -g.mlls.ExactMarginalLogLikelihood(m.likelihood, m)(m(x), (5 * x + i).sin())

    return GP().to(dtype), loss


@program("botorch")
def _botorch(dtype: torch.dtype) -> Built:
    from botorch.acquisition.logei import qLogExpectedImprovement
    from botorch.models import SingleTaskGP
    from botorch.sampling import SobolQMCNormalSampler

    x = drawn(1, 8, 2, dtype=dtype).sigmoid()
    gp = SingleTaskGP(x, (x * 4).sin().sum(-1, keepdim=True)).eval()
    gain = qLogExpectedImprovement(gp, best_f=1.0, sampler=SobolQMCNormalSampler(torch.Size([16]), seed=3))

    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.at = nn.Parameter(drawn(2, 3, 2, dtype=dtype).sigmoid())

        def forward(self) -> Tensor:
            return -gain(self.at).sum()

    return Choice(), lambda m, i: m()


@program("torchdiffeq")
def _neural_ode(dtype: torch.dtype) -> Built:
    from torchdiffeq import odeint, odeint_adjoint

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return self.net(y) * t.cos()

    def loss(m: nn.Module, i: int) -> Tensor:
        start, times = drawn(i, 2, 3, dtype=dtype), torch.linspace(0, 1, 4, dtype=dtype)
        ends = odeint(m, start, times, method="rk4") + odeint_adjoint(
            m, start, times, method="dopri5", rtol=1e-5, atol=1e-5
        )
        return ends.square().mean()

    return Field().to(dtype), loss
