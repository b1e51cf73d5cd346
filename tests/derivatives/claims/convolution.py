"""Convolution, pooling and sampling."""

from torch_manualgrad.derivatives.convolution.backends import BACKEND_RULES

from claims import own

FORWARD = {"missing": [own("fwd")]}
SLOW = ("_slow_conv2d_forward", "slow_conv3d_forward", "slow_conv_dilated2d", "slow_conv_dilated3d")
TRANSPOSED = ("slow_conv_transpose2d", "slow_conv_transpose3d")
SAMPLERS = ("grid_sampler_2d", "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback")
PROOFS = {
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
}
