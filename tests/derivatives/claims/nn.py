"""Normalizations, attention and dropout."""

import torch
from torch.utils.checkpoint import checkpoint

from claims import F64, own, point

ONES = torch.ones(4, dtype=F64)


def at_ones(f):
    """The gradient of a sum, all of whose inputs are 1."""

    def gradient():
        torch.manual_seed(0)
        x = ONES.clone().requires_grad_()
        return torch.autograd.grad(f(x)[0].sum(), x)[0]

    return gradient


def dropped():
    """In training, which is what no flag means: the gradient of a linear map is its result at 1."""
    torch.manual_seed(0)
    return torch.native_dropout(ONES, 0.5, None)[0]


def rrelu(x):
    return torch.ops.aten.rrelu_with_noise_functional(-x, torch.zeros_like(x), 0.2, 0.2, True)


def recomputed_rrelu():
    x = (-ONES).requires_grad_()
    y = checkpoint(lambda x: torch.nn.functional.rrelu(x, 0.2, 0.2, training=True), x, use_reentrant=False)
    return torch.autograd.grad(y.sum(), x)[0]


PROOFS = {
    "aten::native_layer_norm": {"values": [own("fwd-fwd")]},
    "aten::native_layer_norm_backward": {"values": [own("rev-rev")]},
    "aten::native_batch_norm": {"values": [own("fwd-fwd")]},
    "aten::_native_batch_norm_legit": {"values": [own("fwd-fwd")]},
    "aten::_native_batch_norm_legit.no_stats": {"values": [own("fwd-fwd")]},
    "aten::_native_batch_norm_legit_functional": {"values": [own("fwd-fwd")]},
    "aten::_batch_norm_with_update": {"values": [own("fwd-fwd")]},
    "aten::_batch_norm_with_update_functional": {"values": [own("fwd-fwd")]},
    "aten::native_batch_norm_backward": {"values": [own("rev-rev")]},
    "aten::batch_norm_backward": {"values": [own("rev-rev")]},
    "aten::native_group_norm_backward": {"missing": [own("rev")]},
    "aten::_scaled_dot_product_flash_attention_for_cpu": {"missing": [own("fwd")]},
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": {"missing": [own("rev")]},
    "aten::native_dropout": {"values": [point(at_ones(lambda x: torch.native_dropout(x, 0.5, None)), dropped())]},
    "aten::native_dropout_backward": {"missing": [own("fwd")]},
    "aten::rrelu_with_noise_functional": {"values": [point(at_ones(rrelu), -0.2 * ONES)]},
    "aten::rrelu_with_noise": {"values": [point(recomputed_rrelu, 0.2 * ONES)]},
    "aten::rrelu_with_noise_backward": {"values": [own("fwd")], "missing": [own("rev")]},
    "aten::_masked_softmax": {"missing": [own("fwd")]},
    "aten::_weight_norm_interface": {"values": [own("rev-rev")]},
    "aten::_weight_norm_interface_backward": {"missing": [own("rev")]},
}
for _name in ("efficient", "flash", "cudnn"):  # of GPUs
    _operator = f"aten::_scaled_dot_product_{_name}_attention"
    PROOFS |= {_operator: {"missing": [own("fwd")]}, f"{_operator}_backward": {"missing": [own("rev")]}}
