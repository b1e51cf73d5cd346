"""Operators on nested tensors, with derivatives in every mode."""

from . import operators as operators, structure_formulas as structure_formulas, tensor_like as tensor_like
from .activations import celu, elu, gelu, hardtanh, leaky_relu, mish, relu, selu, silu, softplus, threshold
from .arithmetic import add, div, maximum, minimum, mul, pow, sub
from .attention import scaled_dot_product_attention
from .batching import collate
from .extrema import amax, amin, max, min
from .layer_normalization import layer_norm
from .maps import cumsum, glu, log_softmax, softmax
from .matmul import linear, matmul
from .ragged import Ragged
from .reductions import logsumexp, mean, prod, std, sum, var, vector_norm
from .rms_normalization import rms_norm
from .selection import narrow, select, slice
from .structure import chunk, dropout, split, split_with_sizes, to_padded_tensor, transpose, unbind

__all__ = [
    "Ragged",
    "add",
    "amax",
    "amin",
    "celu",
    "chunk",
    "collate",
    "cumsum",
    "div",
    "dropout",
    "elu",
    "gelu",
    "glu",
    "hardtanh",
    "layer_norm",
    "leaky_relu",
    "linear",
    "log_softmax",
    "logsumexp",
    "matmul",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mish",
    "mul",
    "narrow",
    "pow",
    "prod",
    "relu",
    "rms_norm",
    "scaled_dot_product_attention",
    "select",
    "selu",
    "silu",
    "slice",
    "softmax",
    "softplus",
    "split",
    "split_with_sizes",
    "std",
    "sub",
    "sum",
    "threshold",
    "to_padded_tensor",
    "transpose",
    "unbind",
    "var",
    "vector_norm",
]
