"""Copies of views."""

import torch

from claims import after_a_write, own

aten = torch.ops.aten


def copied(call, *shape):
    return {"values": [after_a_write(call, *shape)]}


COMPLEX = {"missing": [own("rev", torch.complex128)]}


PROOFS = {
    "aten::alias_copy": copied(aten.alias_copy),
    "aten::view_copy": copied(lambda x: aten.view_copy(x, [4]), 2, 2),
    "aten::squeeze_copy": copied(aten.squeeze_copy, 2, 1),
    "aten::squeeze_copy.dim": copied(lambda x: aten.squeeze_copy.dim(x, 1), 2, 1),
    "aten::squeeze_copy.dims": copied(lambda x: aten.squeeze_copy.dims(x, [1]), 2, 1),
    "aten::unsqueeze_copy": copied(lambda x: aten.unsqueeze_copy(x, 0), 2),
    "aten::expand_copy": copied(lambda x: aten.expand_copy(x, [2]), 2),
    "aten::t_copy": copied(aten.t_copy, 2),
    "aten::transpose_copy.int": copied(lambda x: aten.transpose_copy.int(x, 0, 1), 1, 2),
    "aten::permute_copy": copied(lambda x: aten.permute_copy(x, [0]), 2),
    "aten::select_copy.int": copied(lambda x: aten.select_copy.int(x, 0, 0), 1) | COMPLEX,
    "aten::slice_copy.Tensor": copied(aten.slice_copy.Tensor, 2) | COMPLEX,
    "aten::diagonal_copy": copied(aten.diagonal_copy, 1, 1),
    "aten::unfold_copy": copied(lambda x: aten.unfold_copy(x, 0, 2, 2), 4),
    "aten::unbind_copy.int": copied(aten.unbind_copy.int, 1),
    "aten::split_copy.Tensor": copied(lambda x: aten.split_copy.Tensor(x, 2), 2),
    "aten::split_with_sizes_copy": copied(lambda x: aten.split_with_sizes_copy(x, [2]), 2),
}
