"""Convolution, pooling and sampling."""

import torch
from helpers.tensors import random
from torch.func import grad

from claims import derivatives, own, point
from torch_manualgrad.derivatives.convolution.backends import BACKEND_RULES

FORWARD = {"missing": [own("fwd")]}
SLOW = ("slow_conv3d_forward", "slow_conv_dilated2d", "slow_conv_dilated3d")
TRANSPOSED = ("slow_conv_transpose2d", "slow_conv_transpose3d")
SAMPLERS = ("grid_sampler_2d", "grid_sampler_3d")
IMAGE, G = random(1, 1, 2, 3).mT, random(1, 1, 2, 1, seed=1)


def of_a_kernel(w):
    """Over an image that is not contiguous."""
    return (G * torch.ops.aten._slow_conv2d_forward(IMAGE, w, [2, 2], None, [1, 1], [0, 0])).sum()


def by_hand():
    patches = torch.stack([IMAGE[0, 0, :2], IMAGE[0, 0, 1:]])
    return (G.reshape(2, 1, 1) * patches).sum(0)[None, None]


SAMPLED, AT = random(1, 1, 3, 3), 0.5 * random(1, 2, 2, 2, seed=1).tanh()


def penalized(sampler, at):
    """A loss, with the square of its gradient, which loses its graph in silence."""
    loss = sampler(SAMPLED.to(at.dtype), at, 0, 0, False).pow(2).sum()
    return loss + torch.autograd.grad(loss, at, create_graph=True)[0].pow(2).sum()


def gradient_of_it():
    at = AT.float().requires_grad_()
    return torch.autograd.grad(penalized(torch.ops.aten._grid_sampler_2d_cpu_fallback, at), at)[0].double()


def by_differences(step=1e-5):
    """The same of first derivatives in double precision."""

    def value(at):
        return penalized(torch.ops.aten.grid_sampler_2d, at.requires_grad_()).detach()

    directions = torch.eye(AT.numel(), dtype=AT.dtype).reshape(-1, *AT.shape)
    return torch.stack([(value(AT + step * d) - value(AT - step * d)) / (2 * step) for d in directions]).reshape(
        AT.shape
    )


def of_a_padded_output(x):
    """The square of a transposed convolution of one number with itself."""
    x = x.reshape(1, 1, 1)
    return torch.nn.functional.conv_transpose1d(x, x, None, 2, 0, 1).square().sum()


PROOFS = {
    "aten::convolution_backward": {"missing": derivatives(of_a_padded_output, 0.5, 0.5, 3, 12)[2:]},
    "aten::_slow_conv2d_forward": {
        **FORWARD,
        "values": [point(lambda: grad(of_a_kernel)(random(1, 1, 2, 2, seed=2)), by_hand())],
    },
    "aten::_grid_sampler_2d_cpu_fallback": {
        **FORWARD,
        "values": [point(gradient_of_it, by_differences(), rtol=1e-4)],
    },
    **{
        f"aten::{name}": FORWARD
        for name in (
            *SLOW,
            *TRANSPOSED,
            "_slow_conv2d_backward.output_mask",
            "conv_tbc",
            *SAMPLERS,
            *[f"{name}_backward" for name in (*SAMPLERS, "_grid_sampler_2d_cpu_fallback")],
            *BACKEND_RULES,
        )
    },
}
