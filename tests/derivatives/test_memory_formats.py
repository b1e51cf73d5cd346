"""The first gradient of an image in channels last has the strides that PyTorch gives it, under every override."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

import torch_manualgrad as mg

ZEROS, ONES = torch.zeros(4), torch.ones(4)
SHAPES = {torch.channels_last: (2, 4, 6, 6), torch.channels_last_3d: (2, 4, 2, 6, 6)}
FUNCTIONS = {
    "group_norm": lambda x: F.group_norm(x, 2),
    "group_norm, affine": lambda x: F.group_norm(x, 2, ONES, ZEROS),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch_norm, evaluation": lambda x: F.batch_norm(x, ZEROS, ONES),
    "instance_norm": F.instance_norm,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "normalize": F.normalize,
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "gelu": F.gelu,
    "silu": F.silu,
    "elu": F.elu,
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
    "glu": lambda x: F.glu(x, 1),
    "product": lambda x: x * x,
    "pow": lambda x: x.abs() ** 1.5,
    "atan2": lambda x: torch.atan2(x, x + 3),
    "hypot": lambda x: torch.hypot(x, x),
    "where": lambda x: torch.where(x > 0, x, 0),
    "clamp": lambda x: x.clamp(0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0),
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean((2, 3)),
    "amax": lambda x: x.amax(1),
    "max": lambda x: x.max(1)[0],
    "sort": lambda x: x.sort(1)[0],
    "std": lambda x: x.std(1),
    "norm": lambda x: x.norm(dim=1),
    "vector_norm": torch.linalg.vector_norm,
    "cumsum": lambda x: x.cumsum(1),
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x]),
    "index": lambda x: x[:, [0, 1]],
    "flip": lambda x: x.flip(2),
    "roll": lambda x: x.roll(1, 2),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() + 1),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x.detach() + 2),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
}
OF_IMAGES = {
    "conv2d": lambda x: F.conv2d(x, torch.ones(4, 4, 3, 3)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, torch.ones(4, 4, 3, 3)),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 3),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 3),
    "lp_pool2d": lambda x: F.lp_pool2d(x, 2, 2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "grid_sample": lambda x: F.grid_sample(x, torch.zeros(2, 5, 5, 2), align_corners=False),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(2, 6, 6, dtype=torch.long)),
}


def strides(f, layout, override):
    """Of the result and of the gradient, for a cotangent in channels last."""
    shape = SHAPES[layout]
    x = torch.linspace(-2, 3, torch.Size(shape).numel()).reshape(shape)
    x = x.contiguous(memory_format=layout).requires_grad_()
    with override():
        y = f(x)
        g = torch.ones(y.shape)
        g = g.contiguous(memory_format=layout) if y.dim() == len(shape) else g
        (of_x,) = torch.autograd.grad(y, x, g)
    return y.stride(), of_x.stride()


CASES = [(name, f, layout) for layout in SHAPES for name, f in FUNCTIONS.items()]
CASES += [(name, f, torch.channels_last) for name, f in OF_IMAGES.items()]


@pytest.mark.parametrize(("name", "f", "layout"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_gradients_keep_channels_last_as_pytorchs_do(name, f, layout):
    stock = strides(f, layout, contextlib.nullcontext)
    assert strides(f, layout, mg.override) == strides(f, layout, lambda: mg.override("*")) == stock
