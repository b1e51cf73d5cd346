"""PyTorch's nested tensors of both layouts."""

import pytest
import torch

from helpers.tensors import random

LAYOUTS = [torch.strided, torch.jagged]
both_layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def nest(layout, *shapes, requires_grad=True):
    components = [random(*s, seed=i) for i, s in enumerate(shapes or ((2, 3), (4, 3)))]
    return torch.nested.nested_tensor(components, layout=layout, requires_grad=requires_grad)
