"""A function with a rule that differs from its derivative, so that a rule that is passed over is seen."""

import torch

import torch_manualgrad as mg


@mg.custom_vjp
def product(x, y):
    return torch.sin(x) * y


product.defvjp(
    lambda x, y: (product(x, y), (torch.cos(x), torch.sin(x), y)),
    lambda kept, g: (2 * kept[0] * g * kept[2], 3 * kept[1] * g),
)
