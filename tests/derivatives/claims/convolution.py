"""Convolution, pooling and sampling."""

import torch
from ops_for_tests import random
from torch.func import grad

from claims import own, point
from torch_manualgrad.derivatives.convolution.backends import BACKEND_RULES

FORWARD = {"missing": [own("fwd")]}
SLOW = ("slow_conv3d_forward", "slow_conv_dilated2d", "slow_conv_dilated3d")
TRANSPOSED = ("slow_conv_transpose2d", "slow_conv_transpose3d")
SAMPLERS = ("grid_sampler_2d", "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback")
IMAGE, G = random(1, 1, 2, 3).mT, random(1, 1, 2, 1, seed=1)


def of_a_kernel(w):
    """Over an image that is not contiguous."""
    return (G * torch.ops.aten._slow_conv2d_forward(IMAGE, w, [2, 2], None, [1, 1], [0, 0])).sum()


def by_hand():
    patches = torch.stack([IMAGE[0, 0, :2], IMAGE[0, 0, 1:]])
    return (G.reshape(2, 1, 1) * patches).sum(0)[None, None]


PROOFS = {
    "aten::_slow_conv2d_forward": {
        **FORWARD,
        "values": [point(lambda: grad(of_a_kernel)(random(1, 1, 2, 2, seed=2)), by_hand())],
    },
    **{
        f"aten::{name}": FORWARD
        for name in (
            *SLOW,
            *TRANSPOSED,
            "_slow_conv2d_backward.output_mask",
            "conv_tbc",
            *SAMPLERS,
            *[f"{name}_backward" for name in SAMPLERS],
            *BACKEND_RULES,
        )
    },
}
