"""Indexing, and scatters of views."""

import torch
from torch.func import grad

from claims import F64, own, point

ROWS = torch.tensor([0, 0, 1])
ONE_BAG = torch.tensor([0])


def rows_by_frequency(weight):
    """Each row that is read has a gradient of one: twice a half, and once one."""
    return torch.nn.functional.embedding_bag(ROWS, weight, ONE_BAG, mode="sum", scale_grad_by_freq=True).sum()


PROOFS = {
    "aten::scatter.src": {"missing": [own("rev")]},
    "aten::scatter_add": {"missing": [own("rev")]},
    "aten::scatter_reduce.two": {"values": [own("fwd")], "missing": [own("rev")]},
    "aten::index_reduce": {"values": [own("rev-rev")], "missing": [own("fwd")]},
    "aten::index_fill.int_Tensor": {"missing": [own("rev")]},
    "aten::_index_put_impl": {"values": [own("fwd")]},
    "aten::masked_scatter_backward": {"missing": [own("fwd")]},
    "aten::embedding_dense_backward": {"values": [own("rev")]},
    "aten::_embedding_bag": {
        "values": [point(lambda: grad(rows_by_frequency)(torch.zeros(3, 1, dtype=F64)), [[1.0], [1.0], [0.0]])],
        "missing": [own("fwd")],
    },
    "aten::_embedding_bag_forward_only": {"missing": [own("rev")]},
    "aten::_embedding_bag_backward": {"missing": [own("rev")]},
    "aten::_embedding_bag_dense_backward": {"missing": [own("rev")]},
    "aten::_embedding_bag_per_sample_weights_backward": {"missing": [own("rev")]},
    "aten::narrow_copy": {"missing": [own("rev")]},
    "aten::select_scatter": {"missing": [own("rev", torch.complex128)]},
    "aten::slice_scatter": {"missing": [own("rev", torch.complex128)]},
    "aten::as_strided_scatter": {"values": [own("rev")]},
    "aten::_pack_padded_sequence": {"missing": [own("fwd")]},
}
