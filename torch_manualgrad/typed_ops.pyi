"""Written by tools/stubs.py: the types of the formulas in ``mg.ops``."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.types import Number

from .core.registry import Registry
from .core.rule import Formula

class _adjugate_again(Formula):
    def __call__(_, A: Tensor, result: Tensor, LU: Tensor, pivots: Tensor) -> Tensor: ...

class _airy_ai(Formula):
    def __call__(_, x: Tensor) -> Tensor: ...

class _airy_ai_slope(Formula):
    def __call__(_, x: Tensor) -> Tensor: ...

class _amaxamin_jvp(Formula):
    def __call__(_, x: Tensor, dx: Tensor, result: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor: ...

class _aminmax_backward(Formula):
    def __call__(_, self: Tensor, dim: int | None, keepdim: bool, grad_min: Tensor | None, grad_max: Tensor | None, min: Tensor, max: Tensor) -> Tensor: ...

class _aminmax_jvp(Formula):
    def __call__(_, self_p: Tensor, self_t: Tensor, result: Tensor, dim: int | None, keepdim: bool) -> Tensor: ...

class _angle_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor) -> Tensor: ...

class _as_strided_backward(Formula):
    def __call__(_, grad: Tensor, self_sizes: Sequence[int], self_strides: Sequence[int], self_offset: int, size: Sequence[int], stride: Sequence[int], storage_offset: int | None) -> Tensor: ...

class _as_strided_scatter_backward(Formula):
    def __call__(_, grad: Tensor, self_offset: int, src_sizes: Sequence[int], size: Sequence[int], stride: Sequence[int], storage_offset: int | None) -> tuple[Tensor, Tensor]: ...

class _as_strided_scatter_jvp(Formula):
    def __call__(_, self_p: Tensor, self_t: Tensor | None, src_p: Tensor, src_t: Tensor | None, size: Sequence[int], stride: Sequence[int], storage_offset: int | None) -> Tensor: ...

class _atan2_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, other: Tensor, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor]: ...

class _attention_backward(Formula):
    def __call__(_, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor, Tensor]: ...

class _attention_backward_jvp(Formula):
    def __call__(_, grad_out: Tensor, grad_out_t: Tensor | None, query: Tensor, query_t: Tensor | None, key: Tensor, key_t: Tensor | None, value: Tensor, value_t: Tensor | None, attn_mask: Tensor | None, attn_mask_t: Tensor | None, is_causal: bool, scale: float | None, of_mask: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

class _attention_backward_jvp_of_block(Formula):
    def __call__(_, grad_out: Tensor, grad_out_t: Tensor | None, query: Tensor, query_t: Tensor | None, key: Tensor, key_t: Tensor | None, value: Tensor, value_t: Tensor | None, attn_mask: Tensor | None, attn_mask_t: Tensor | None, first: int, is_causal: bool, scale: float | None, of_mask: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

class _attention_jvp(Formula):
    def __call__(_, query: Tensor, query_t: Tensor | None, key: Tensor, key_t: Tensor | None, value: Tensor, value_t: Tensor | None, attn_mask: Tensor | None, attn_mask_t: Tensor | None, is_causal: bool, scale: float | None) -> Tensor: ...

class _attention_jvp_jvp(Formula):
    def __call__(_, query: Tensor, query_t: Tensor | None, query_u: Tensor | None, query_tu: Tensor | None, key: Tensor, key_t: Tensor | None, key_u: Tensor | None, key_tu: Tensor | None, value: Tensor, value_t: Tensor | None, value_u: Tensor | None, value_tu: Tensor | None, attn_mask: Tensor | None, attn_mask_t: Tensor | None, attn_mask_u: Tensor | None, attn_mask_tu: Tensor | None, is_causal: bool, scale: float | None) -> Tensor: ...

class _attention_jvp_jvp_of_block(Formula):
    def __call__(_, query: Tensor, query_t: Tensor | None, query_u: Tensor | None, query_tu: Tensor | None, key: Tensor, key_t: Tensor | None, key_u: Tensor | None, key_tu: Tensor | None, value: Tensor, value_t: Tensor | None, value_u: Tensor | None, value_tu: Tensor | None, attn_mask: Tensor | None, attn_mask_t: Tensor | None, attn_mask_u: Tensor | None, attn_mask_tu: Tensor | None, first: int, is_causal: bool, scale: float | None) -> Tensor: ...

class _attention_mask_backward(Formula):
    def __call__(_, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, is_causal: bool, scale: float | None) -> Tensor: ...

class _batch_norm_backward_jvp(Formula):
    def __call__(_, grad_out: Tensor, grad_out_t: Tensor | None, input: Tensor, input_t: Tensor | None, weight: Tensor | None, weight_t: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None, train: bool, eps: float, running_mean_t: Tensor | None = None, running_var_t: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]: ...

class _batch_norm_jvp(Formula):
    def __call__(_, input_p: Tensor, input_t: Tensor | None, weight_p: Tensor | None, weight_t: Tensor | None, bias_t: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None, train: bool, eps: float, running_mean_t: Tensor | None = None, running_var_t: Tensor | None = None) -> Tensor: ...

class _batchnorm_double_backward(Formula):
    def __call__(_, input: Tensor, gamma: Tensor | None, ggI: Tensor | None, ggG: Tensor | None, ggB: Tensor | None, gO: Tensor, running_mean: Tensor | None, running_var: Tensor | None, training: bool, eps: float) -> tuple[Tensor, Tensor, Tensor]: ...

class _bessel_j0(Formula):
    def __call__(_, self: Tensor) -> Tensor: ...

class _bessel_j1(Formula):
    def __call__(_, self: Tensor) -> Tensor: ...

class _bessel_y0(Formula):
    def __call__(_, self: Tensor) -> Tensor: ...

class _bessel_y1(Formula):
    def __call__(_, self: Tensor) -> Tensor: ...

class _binary_cross_entropy_double_backward(Formula):
    def __call__(_, grad_output: Tensor, grad: Tensor, input: Tensor, target: Tensor, weight: Tensor | None, reduction: int) -> Tensor: ...

class _binary_cross_entropy_double_backward_grad_output(Formula):
    def __call__(_, grad: Tensor, input: Tensor, target: Tensor, weight: Tensor | None, reduction: int) -> Tensor: ...

class _binary_cross_entropy_double_backward_target(Formula):
    def __call__(_, grad: Tensor, grad_output: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, reduction: int) -> Tensor: ...

class _binary_cross_entropy_target_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, reduction: int) -> Tensor: ...

class _binary_cross_entropy_with_logits_backward(Formula):
    def __call__(_, grad: Tensor, input: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None, reduction: int) -> Tensor: ...

class _binary_cross_entropy_with_logits_target_backward(Formula):
    def __call__(_, grad_output: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None, reduction: int) -> Tensor: ...

class _block_diag_backward(Formula):
    def __call__(_, grad: Tensor, sizes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[Tensor]: ...

class _block_diag_jvp(Formula):
    def __call__(_, tensors_p: Sequence[Tensor], tensors_t: Sequence[Tensor | None]) -> Tensor: ...

class _cat_jvp(Formula):
    def __call__(_, tensors_p: Sequence[Tensor], tensors_t: Sequence[Tensor | None], dim: int) -> Tensor: ...

class _cat_tensors_backward(Formula):
    def __call__(_, grad: Tensor, sizes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], dim: int) -> list[Tensor]: ...

class _cdist_backward(Formula):
    def __call__(_, grad: Tensor, x1: Tensor, x2: Tensor, p: float, cdist: Tensor) -> Tensor: ...

class _cdist_backward_jvp(Formula):
    def __call__(_, grad: Tensor, grad_t: Tensor | None, x1: Tensor, x1_t: Tensor | None, x2: Tensor, x2_t: Tensor | None, p: float, cdist: Tensor) -> Tensor: ...

class _cdist_double_backward(Formula):
    def __call__(_, gg: Tensor, grad: Tensor, x1: Tensor, x2: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor]: ...

class _cdist_jvp(Formula):
    def __call__(_, x1_p: Tensor, x1_t: Tensor | None, x2_p: Tensor, x2_t: Tensor | None, p: float) -> Tensor: ...

class _cholesky_backward(Formula):
    def __call__(_, grad_L: Tensor, L: Tensor, upper: bool) -> Tensor: ...

class _cholesky_factor(Formula):
    def __call__(_, A: Tensor, upper: bool) -> tuple[Tensor, Tensor]: ...

class _cholesky_inverse_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, upper: bool, result: Tensor) -> Tensor: ...

class _cholesky_inverse_jvp(Formula):
    def __call__(_, self: Tensor, self_t: Tensor, result: Tensor, upper: bool) -> Tensor: ...

class _cholesky_jvp(Formula):
    def __call__(_, self_t: Tensor, L: Tensor, upper: bool) -> Tensor: ...

class _cholesky_small(Formula):
    def __call__(_, A: Tensor, upper: bool, check_errors: bool) -> tuple[Tensor, Tensor]: ...

class _cholesky_solve_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, input2: Tensor, result: Tensor, upper: bool) -> tuple[Tensor, Tensor]: ...

class _cholesky_solve_jvp(Formula):
    def __call__(_, result: Tensor, input2: Tensor, input2_t: Tensor | None, self_t: Tensor | None, upper: bool) -> Tensor: ...

class _chunk_backward_nested(Formula):
    def __call__(_, grads: Sequence[Tensor | None], self: Tensor, offsets: Tensor, chunks: int, dim: int, ragged_dim: int = 1) -> Tensor: ...

class _clamp_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, min: Tensor | None, max: Tensor | None) -> Tensor: ...

class _clamp_backward_min_max(Formula):
    def __call__(_, grad: Tensor, self: Tensor, min: Tensor, max: Tensor, grad_input_mask: Sequence[bool]) -> tuple[Tensor, Tensor]: ...

class _clamp_jvp(Formula):
    def __call__(_, self_p: Tensor, self_t: Tensor | None, min_p: Tensor | None, min_t: Tensor | None, max_p: Tensor | None, max_t: Tensor | None) -> Tensor: ...

class _complex_sign(Formula):
    def __call__(_, x: Tensor) -> Tensor: ...

class _constant(Formula):
    def __call__(_, x: Tensor) -> Tensor: ...

class _constant_pad_nd_backward(Formula):
    def __call__(_, grad: Tensor, pad: Sequence[int]) -> Tensor: ...

class _convolution_backward_jvp_grad_bias(Formula):
    def __call__(_, grad_out_t: Tensor, grad_bias: Tensor) -> Tensor: ...

class _convolution_jvp(Formula):
    def __call__(_, input_p: Tensor, input_t: Tensor | None, weight_p: Tensor, weight_t: Tensor | None, bias_p: Tensor | None, bias_t: Tensor | None, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int) -> Tensor: ...

class _copysign_tensor_self_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, result: Tensor) -> Tensor: ...

class _ctc_loss_gradient(Formula):
    def __call__(_, grad: Tensor, log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, neg_log_likelihood: Tensor, log_alpha: Tensor, blank: int) -> Tensor: ...

class _cummaxmin_backward(Formula):
    def __call__(_, grad: Tensor, sizes: Sequence[int], indices: Tensor, dim: int) -> Tensor: ...

class _cumprod_backward(Formula):
    def __call__(_, grad: Tensor, input: Tensor, dim: int, output: Tensor) -> Tensor: ...

class _cumprod_jvp(Formula):
    def __call__(_, self_t: Tensor, self_p: Tensor, result: Tensor, dim: int) -> Tensor: ...

class _cumsum_backward(Formula):
    def __call__(_, grad: Tensor, dim: int) -> Tensor: ...

class _deg2rad_backward(Formula):
    def __call__(_, grad: Tensor) -> Tensor: ...

class _dirichlet_grad(Formula):
    def __call__(_, x: Tensor, alpha: Tensor, total: Tensor) -> Tensor: ...

class _div_tensor_other_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, other: Tensor, rounding_mode: str | None = None) -> Tensor: ...

class _div_tensor_self_backward(Formula):
    def __call__(_, grad: Tensor, other: Tensor, self_st: torch.dtype, rounding_mode: str | None = None) -> Tensor: ...

class _dot_backward(Formula):
    def __call__(_, grad: Tensor, other: Tensor) -> Tensor: ...

class _eigh_jacobi(Formula):
    def __call__(_, A: Tensor, lower: bool = True) -> tuple[Tensor, Tensor]: ...

class _eigh_small(Formula):
    def __call__(_, A: Tensor, lower: bool = True, vectors: bool = True) -> tuple[Tensor, Tensor]: ...

class _eigh_tridiagonal(Formula):
    def __call__(_, A: Tensor, lower: bool = True) -> tuple[Tensor, Tensor]: ...

class _elu_double_backward(Formula):
    def __call__(_, grad: Tensor, grad_output: Tensor, alpha: Number, scale: Number, input_scale: Number, is_result: bool, self_or_result: Tensor) -> Tensor: ...

class _embedding_bag_adjoint(Formula):
    def __call__(_, grad: Tensor, indices: Tensor, offset2bag: Tensor, maximum_indices: Tensor, num_weights: int, scale_grad_by_freq: bool, mode: int, per_sample_weights: Tensor | None, padding_idx: int) -> Tensor: ...

class _embedding_bag_linear(Formula):
    def __call__(_, weight: Tensor, indices: Tensor, offset2bag: Tensor, maximum_indices: Tensor, bags: int, scale_grad_by_freq: bool, mode: int, per_sample_weights: Tensor | None, padding_idx: int) -> Tensor: ...

class _embedding_bag_weights(Formula):
    def __call__(_, grad: Tensor, weight: Tensor, indices: Tensor, offset2bag: Tensor, scale_grad_by_freq: bool, padding_idx: int) -> Tensor: ...

class _embedding_dense_double_backward_symint(Formula):
    def __call__(_, grad: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool = False) -> Tensor: ...

class _evenly_distribute_backward(Formula):
    def __call__(_, grad: Tensor, input: Tensor, value: Tensor) -> Tensor: ...

class _evenly_read_jvp(Formula):
    def __call__(_, fw_grad: Tensor, input: Tensor, value: Tensor) -> Tensor: ...

class _exponential_action(Formula):
    def __call__(_, A: Tensor, B: Tensor) -> Tensor: ...

class _exponential_action_backward(Formula):
    def __call__(_, A: Tensor, B: Tensor, grad: Tensor) -> Tensor: ...

class _exponential_function(Formula):
    def __call__(_, A: Tensor, E: Tensor) -> Tensor: ...

class _fake_quantize_cachemask_backward(Formula):
    def __call__(_, grad: Tensor, mask: Tensor) -> Tensor: ...

class _fake_quantize_learnable_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int, grad_factor: float, axis: int | None = None) -> tuple[Tensor, Tensor, Tensor]: ...

class _fake_quantize_learnable_jvp(Formula):
    def __call__(_, self: Tensor, self_t: Tensor | None, scale: Tensor, scale_t: Tensor | None, zero_point: Tensor, zero_point_t: Tensor | None, quant_min: int, quant_max: int, grad_factor: float, axis: int | None = None) -> Tensor: ...

class _fft_c2r_backward(Formula):
    def __call__(_, grad: Tensor, dim: Sequence[int], normalization: int) -> Tensor: ...

class _fft_r2c_backward(Formula):
    def __call__(_, grad: Tensor, dim: Sequence[int], normalization: int, onesided: bool, last_dim_size: int) -> Tensor: ...

class _first_projector(Formula):
    def __call__(_, B: Tensor, S: Tensor, V: Tensor, first: Tensor) -> tuple[Tensor, Tensor]: ...

class _frexp_backward(Formula):
    def __call__(_, grad: Tensor, exponent: Tensor) -> Tensor: ...

class _gather_with_keepdimed_indices(Formula):
    def __call__(_, input: Tensor, dim: int, indices: Tensor, keepdim: bool) -> Tensor: ...

class _gaussian_elimination(Formula):
    def __call__(_, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

class _gelu_backwards_nested(Formula):
    def __call__(_, grad: Tensor, self: Tensor, approximate: str) -> Tensor: ...

class _gelu_double_backward(Formula):
    def __call__(_, ggI: Tensor, gO: Tensor, input: Tensor, approximate: str) -> Tensor: ...

class _general_function(Formula):
    def __call__(_, A: Tensor, T: Tensor, Q: Tensor, E: Tensor, p: float | None) -> Tensor: ...

class _geqrf_backward(Formula):
    def __call__(_, grad_a: Tensor | None, grad_tau: Tensor | None, self: Tensor, a: Tensor, tau: Tensor) -> Tensor: ...

class _geqrf_jvp(Formula):
    def __call__(_, self_t: Tensor, self_p: Tensor, a: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]: ...

class _glu_double_backward(Formula):
    def __call__(_, grad: Tensor, grad_output: Tensor, input: Tensor, dim: int) -> Tensor: ...

class _glu_double_backward_grad_output(Formula):
    def __call__(_, grad: Tensor, input: Tensor, dim: int) -> Tensor: ...

class _glu_jvp(Formula):
    def __call__(_, self_p: Tensor, self_t: Tensor, dim: int) -> Tensor: ...

class _grid_sampler_2d_backward(Formula):
    def __call__(_, grad_output: Tensor, input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor]: ...

class _grid_sampler_2d_double_backward(Formula):
    def __call__(_, ggI: Tensor | None, ggGrid: Tensor | None, grad_output: Tensor, input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]: ...

class _grid_sampler_3d_backward(Formula):
    def __call__(_, grad_output: Tensor, input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor]: ...

class _grid_sampler_3d_double_backward(Formula):
    def __call__(_, ggI: Tensor | None, ggGrid: Tensor | None, grad_output: Tensor, input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]: ...

class _grid_sampler_backward_jvp(Formula):
    def __call__(_, grad_output_p: Tensor, grad_output_t: Tensor | None, input_p: Tensor, input_t: Tensor | None, grid_p: Tensor, grid_t: Tensor | None, interpolation_mode: int, padding_mode: int, align_corners: bool, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor]: ...

class _grid_sampler_jvp(Formula):
    def __call__(_, input_p: Tensor, input_t: Tensor | None, grid_p: Tensor, grid_t: Tensor | None, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Tensor: ...

class _group_norm_backward_jvp(Formula):
    def __call__(_, grad_out: Tensor, grad_out_t: Tensor | None, input: Tensor, input_t: Tensor | None, weight: Tensor | None, weight_t: Tensor | None, rstd: Tensor, N: int, C: int, HxW: int, group: int) -> tuple[Tensor, Tensor, Tensor]: ...

class _group_norm_double_backward(Formula):
    def __call__(_, input: Tensor, weight: Tensor | None, ggI: Tensor | None, ggG: Tensor | None, ggB: Tensor | None, grad_out: Tensor, rstd: Tensor, N: int, C: int, HxW: int, group: int) -> tuple[Tensor, Tensor, Tensor]: ...

class _group_norm_invstd_jvp(Formula):
    def __call__(_, input_p: Tensor, input_t: Tensor, invstd_p: Tensor, group: int, eps: float) -> Tensor: ...

class _group_norm_jvp(Formula):
    def __call__(_, input_p: Tensor, input_t: Tensor | None, weight_p: Tensor | None, weight_t: Tensor | None, bias_t: Tensor | None, group: int, eps: float) -> Tensor: ...

class _group_norm_mean_jvp(Formula):
    def __call__(_, input_t: Tensor, mean_p: Tensor, group: int) -> Tensor: ...

class _hermitian_function(Formula):
    def __call__(_, A: Tensor, L: Tensor, V: Tensor, J: Tensor, D: Tensor, E: Tensor) -> Tensor: ...

class _hermitian_inverse(Formula):
    def __call__(_, P: Tensor, L: Tensor, V: Tensor) -> Tensor: ...

class _hermitian_lyapunov(Formula):
    def __call__(_, P: Tensor, L: Tensor, V: Tensor, C: Tensor) -> Tensor: ...

class _hermitian_root(Formula):
    def __call__(_, A: Tensor, L: Tensor, V: Tensor) -> Tensor: ...

class _householder_product_backward(Formula):
    def __call__(_, grad: Tensor, input: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]: ...

class _householder_product_jvp(Formula):
    def __call__(_, input_t: Tensor | None, tau_t: Tensor | None, input_p: Tensor, tau_p: Tensor) -> Tensor: ...

class _huber_loss_backward(Formula):
    def __call__(_, grad_output: Tensor, self: Tensor, target: Tensor, reduction: int, delta: float) -> Tensor: ...

class _huber_loss_double_backward(Formula):
    def __call__(_, grad: Tensor, input: Tensor, target: Tensor, reduction: int, delta: float) -> Tensor: ...

class _huber_loss_double_backward_grad_output(Formula):
    def __call__(_, grad: Tensor, grad_output: Tensor, input: Tensor, target: Tensor, reduction: int, delta: float) -> Tensor: ...

class _i1_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, result: Tensor) -> Tensor: ...

class _i1e_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, result: Tensor) -> Tensor: ...

class _igamma_self_derivative(Formula):
    def __call__(_, a: Tensor, x: Tensor) -> Tensor: ...

class _index_backward(Formula):
    def __call__(_, zeros_like_self: Tensor, indices: Sequence[Tensor | None], grad: Tensor) -> Tensor: ...

class _index_reduce_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, include_self: bool, result: Tensor) -> tuple[Tensor, Tensor]: ...

class _index_reduce_jvp(Formula):
    def __call__(_, self_p: Tensor, self_t: Tensor | None, dim: int, index: Tensor, source_p: Tensor, source_t: Tensor | None, reduce: str, include_self: bool, result: Tensor) -> Tensor: ...

class _infinitely_differentiable_logit_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, eps: float | None) -> Tensor: ...

class _infinitely_differentiable_mish_backward(Formula):
    def __call__(_, grad_output: Tensor, input: Tensor) -> Tensor: ...

class _infinitely_differentiable_native_dropout_backward(Formula):
    def __call__(_, grad: Tensor, mask: Tensor, scale: float) -> Tensor: ...

class _infinitely_differentiable_native_group_norm_backward(Formula):
    def __call__(_, dY: Tensor | None, dmean: Tensor | None, drstd: Tensor | None, X: Tensor, gamma: Tensor | None, N: int, C: int, HxW: int, group: int, eps: float) -> tuple[Tensor, Tensor, Tensor]: ...

class _infinitely_differentiable_native_rms_norm_backward(Formula):
    def __call__(_, dY: Tensor | None, drstd: Tensor | None, input: Tensor, normalized_shape: Sequence[int], rstd: Tensor, weight_opt: Tensor | None) -> tuple[Tensor, Tensor]: ...

class _infinitely_differentiable_silu_backward(Formula):
    def __call__(_, grad_output: Tensor, input: Tensor) -> Tensor: ...

class _largest_singular_value(Formula):
    def __call__(_, A: Tensor, S: Tensor, V: Tensor, first: Tensor) -> Tensor: ...

class _layer_norm_backward_jvp(Formula):
    def __call__(_, grad_out: Tensor, grad_out_t: Tensor | None, input: Tensor, input_t: Tensor | None, weight: Tensor | None, weight_t: Tensor | None, normalized_shape: Sequence[int], rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

class _layer_norm_backward_nested(Formula):
    def __call__(_, grad: Tensor, input: Tensor, normalized_shape: Sequence[int], mean: Tensor, rstd: Tensor, weight: Tensor | None, grad_input_mask: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]: ...

class _layer_norm_double_backward(Formula):
    def __call__(_, input_t: Tensor, gamma: Tensor | None, ggI: Tensor | None, ggG: Tensor | None, ggB: Tensor | None, gO_t: Tensor, save_mean_t: Tensor, save_invstd_t: Tensor, normalized_shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]: ...

class _layer_norm_jvp(Formula):
    def __call__(_, input_p: Tensor, input_t: Tensor | None, weight_p: Tensor | None, weight_t: Tensor | None, bias_t: Tensor | None, normalized_shape: Sequence[int], eps: float) -> Tensor: ...

class _layer_norm_nested(Formula):
    def __call__(_, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]: ...

class _linalg_cross_backward(Formula):
    def __call__(_, grad: Tensor, other: Tensor, dim: int) -> Tensor: ...

class _linalg_cross_jvp(Formula):
    def __call__(_, self_p: Tensor, self_t: Tensor | None, other_p: Tensor, other_t: Tensor | None, dim: int) -> Tensor: ...

class _linalg_det_backward(Formula):
    def __call__(_, grad_result: Tensor, result: Tensor, A: Tensor, LU: Tensor, pivots: Tensor) -> Tensor: ...

class _linalg_det_jvp(Formula):
    def __call__(_, A_t: Tensor, result: Tensor, A: Tensor, LU: Tensor, pivots: Tensor) -> Tensor: ...

class _linalg_eig_backward(Formula):
    def __call__(_, grad_L: Tensor | None, grad_V: Tensor | None, L: Tensor, V: Tensor, is_hermitian: bool, rtol: float | None = None, atol: float = 0.0, broadening: float = 0.0, gauge: str = 'warn') -> Tensor: ...

class _linalg_eig_jvp(Formula):
    def __call__(_, A_t: Tensor, L: Tensor, V: Tensor, is_hermitian: bool, rtol: float | None = None, atol: float = 0.0, broadening: float = 0.0, gauge: str = 'warn') -> tuple[Tensor, Tensor]: ...

class _linalg_eigh_backward(Formula):
    def __call__(_, grad_L: Tensor | None, grad_V: Tensor | None, L: Tensor, V: Tensor, rtol: float | None = None, atol: float = 0.0, broadening: float = 0.0, gauge: str = 'warn') -> Tensor: ...

class _linalg_eigh_jvp(Formula):
    def __call__(_, A_t: Tensor, L: Tensor, V: Tensor, rtol: float | None = None, atol: float = 0.0, broadening: float = 0.0, gauge: str = 'warn') -> tuple[Tensor, Tensor]: ...

class _linalg_inv_backward(Formula):
    def __call__(_, grad_inverse: Tensor, inverse: Tensor) -> Tensor: ...

class _linalg_inv_jvp(Formula):
    def __call__(_, A_t: Tensor, inverse: Tensor) -> Tensor: ...

class _linalg_lstsq_backward(Formula):
    def __call__(_, grad_solution: Tensor | None, grad_residuals: Tensor | None, self: Tensor, b: Tensor, solution: Tensor, rank: Tensor, rcond: float | None = None) -> tuple[Tensor, Tensor]: ...

class _linalg_lstsq_jvp(Formula):
    def __call__(_, self: Tensor, b: Tensor, self_t: Tensor, b_t: Tensor) -> Tensor: ...

class _linalg_lstsq_residuals_jvp(Formula):
    def __call__(_, self: Tensor, b: Tensor, self_t: Tensor | None, b_t: Tensor | None, solution: Tensor, residuals: Tensor) -> Tensor: ...

class _linalg_lstsq_solution_jvp(Formula):
    def __call__(_, self: Tensor, b: Tensor, self_t: Tensor | None, b_t: Tensor | None, solution: Tensor, rank: Tensor, rcond: float | None = None) -> Tensor: ...

class _linalg_lu_backward(Formula):
    def __call__(_, grad_L: Tensor | None, grad_U: Tensor | None, P: Tensor, L: Tensor, U: Tensor, pivot: bool) -> Tensor: ...

class _linalg_lu_jvp(Formula):
    def __call__(_, A_t: Tensor, P: Tensor, L: Tensor, U: Tensor, pivot: bool) -> tuple[Tensor, Tensor]: ...

class _linalg_lu_solve_LU(Formula):
    def __call__(_, grad: Tensor, LU: Tensor, pivots: Tensor, result: Tensor, left: bool, adjoint: bool) -> Tensor: ...

class _linalg_lu_solve_jvp(Formula):
    def __call__(_, result: Tensor, LU: Tensor, pivots: Tensor, LU_t: Tensor | None, B_t: Tensor | None, left: bool, adjoint: bool) -> Tensor: ...

class _linalg_matrix_exp_differential(Formula):
    def __call__(_, self: Tensor, grad: Tensor, adjoint: bool) -> Tensor: ...

class _linalg_matrix_sqrth_differential(Formula):
    def __call__(_, self: Tensor, grad: Tensor) -> Tensor: ...

class _linalg_polar_backward(Formula):
    def __call__(_, grad_U: Tensor | None, grad_H: Tensor | None, A: Tensor, U: Tensor, H: Tensor) -> Tensor: ...

class _linalg_polar_jvp(Formula):
    def __call__(_, dA: Tensor, A: Tensor, U: Tensor, H: Tensor) -> tuple[Tensor, Tensor]: ...

class _linalg_qr_backward(Formula):
    def __call__(_, grad_Q: Tensor | None, grad_R: Tensor | None, A: Tensor, Q: Tensor, R: Tensor, mode: str) -> Tensor: ...

class _linalg_qr_jvp(Formula):
    def __call__(_, A_t: Tensor, A_p: Tensor, Q: Tensor, R: Tensor, mode: str) -> tuple[Tensor, Tensor]: ...

class _linalg_solve_backward(Formula):
    def __call__(_, grad_result: Tensor, result: Tensor, A: Tensor, LU: Tensor, pivots: Tensor, left: bool) -> tuple[Tensor, Tensor]: ...

class _linalg_solve_jvp(Formula):
    def __call__(_, dA: Tensor | None, dB: Tensor | None, X: Tensor, A: Tensor, LU: Tensor, pivots: Tensor, left: bool) -> Tensor: ...

class _linalg_solve_triangular_backward(Formula):
    def __call__(_, grad: Tensor, A: Tensor, X: Tensor, upper: bool, left: bool, unitriangular: bool) -> tuple[Tensor, Tensor]: ...

class _linalg_solve_triangular_forward_AD(Formula):
    def __call__(_, self_t: Tensor | None, B_t: Tensor | None, self: Tensor, result: Tensor, upper: bool, left: bool, unitriangular: bool) -> Tensor: ...

class _linalg_svd_jvp(Formula):
    def __call__(_, A_t: Tensor, U: Tensor, S: Tensor, Vh: Tensor, rtol: float | None = None, atol: float = 0.0, broadening: float = 0.0, gauge: str = 'warn') -> tuple[Tensor, Tensor, Tensor]: ...

class _linalg_vector_norm_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, ord: float, result: Tensor, dim: Sequence[int] | None, keepdim: bool) -> Tensor: ...

class _linalg_vector_norm_jvp(Formula):
    def __call__(_, self_p: Tensor, self_t: Tensor, ord: float, result: Tensor, dim: Sequence[int] | None, keepdim: bool) -> Tensor: ...

class _linear_backward(Formula):
    def __call__(_, self: Tensor, grad_output: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

class _linear_cross_entropy_backward(Formula):
    def __call__(_, grad: Tensor, input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None, reduction: str, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]: ...

class _linear_cross_entropy_jvp(Formula):
    def __call__(_, input_p: Tensor, input_t: Tensor | None, linear_weight_p: Tensor, linear_weight_t: Tensor | None, target_p: Tensor, target_t: Tensor | None, linear_bias_p: Tensor | None, linear_bias_t: Tensor | None, weight: Tensor | None, reduction: str, ignore_index: int) -> Tensor: ...

class _linear_cross_entropy_target_backward(Formula):
    def __call__(_, grad: Tensor, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, weight: Tensor | None, reduction: str) -> Tensor: ...

class _linear_double_backward(Formula):
    def __call__(_, grad_grad_input: Tensor | None, grad_grad_weight: Tensor | None, grad_grad_bias: Tensor | None, self: Tensor, grad_output: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

class _log1p_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor) -> Tensor: ...

class _log_sigmoid_double_backward(Formula):
    def __call__(_, grad: Tensor, input: Tensor) -> Tensor: ...

class _log_softmax_jvp(Formula):
    def __call__(_, self_t: Tensor, output: Tensor, dim: int) -> Tensor: ...

class _logcumsumexp_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, result: Tensor, dim: int) -> Tensor: ...

class _logcumsumexp_jvp(Formula):
    def __call__(_, self_p: Tensor, self_t: Tensor, result: Tensor, dim: int) -> Tensor: ...

class _logsumexp_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, result: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor: ...

class _logsumexp_jvp(Formula):
    def __call__(_, self_p: Tensor, self_t: Tensor, result: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor: ...

class _lstsq_pinv(Formula):
    def __call__(_, A: Tensor, rank: Tensor, rcond: float | None) -> Tensor: ...

class _lu_factor_ex_backward(Formula):
    def __call__(_, grad_LU: Tensor, LU: Tensor, pivots: Tensor, pivot: bool) -> Tensor: ...

class _lu_factor_ex_jvp(Formula):
    def __call__(_, A_t: Tensor, LU: Tensor, pivots: Tensor, pivot: bool) -> Tensor: ...

class _lu_finite(Formula):
    def __call__(_, A: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

class _lu_small(Formula):
    def __call__(_, A: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

class _lu_unpack_backward(Formula):
    def __call__(_, grad_L: Tensor | None, grad_U: Tensor | None, m: int, n: int) -> Tensor: ...

class _masked_fill_backward(Formula):
    def __call__(_, grad: Tensor, mask: Tensor) -> Tensor: ...

class _masked_scatter_backward(Formula):
    def __call__(_, grad_output: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor: ...

class _masked_softmax_differential(Formula):
    def __call__(_, x: Tensor, output: Tensor, mask: Tensor, dim: int | None, mask_type: int | None) -> Tensor: ...

class _matmul_backward_nested(Formula):
    def __call__(_, grad: Tensor, self: Tensor | None, other: Tensor | None, offsets: Tensor, grad_input_mask: Sequence[bool]) -> tuple[Tensor, Tensor]: ...

class _max_pool_double_backward(Formula):
    def __call__(_, grad: Tensor, indices: Tensor, dim: int) -> Tensor: ...

class _maximum_scalar_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, scalar: Number) -> Tensor: ...

class _mean_backward(Formula):
    def __call__(_, grad: Tensor, shape: Sequence[int], dim: Sequence[int] | None, numel: int, keepdim: bool) -> Tensor: ...

class _mkldnn_rnn_layer_differentiable_backward(Formula):
    def __call__(_, input: Tensor, weight0: Tensor, weight1: Tensor, weight2: Tensor, weight3: Tensor, hx_: Tensor, cx_tmp: Tensor, output: Tensor, grad_output_r_opt: Tensor | None, grad_hy_r_opt: Tensor | None, grad_cy_r_opt: Tensor | None, reverse: bool, mode: int, has_biases: bool, batch_sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]: ...

class _mkldnn_rnn_layer_jvp(Formula):
    def __call__(_, input_p: Tensor, input_t: Tensor | None, weight0_p: Tensor, weight0_t: Tensor | None, weight1_p: Tensor, weight1_t: Tensor | None, weight2_p: Tensor, weight2_t: Tensor | None, weight3_p: Tensor, weight3_t: Tensor | None, hx__p: Tensor, hx__t: Tensor | None, cx__p: Tensor, cx__t: Tensor | None, result0: Tensor, reverse: bool, mode: int, has_biases: bool, batch_sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]: ...

class _mm_mat1_backward(Formula):
    def __call__(_, grad: Tensor, mat2: Tensor, mat1_strides: Sequence[int] | None = None, alpha: Number = 1) -> Tensor: ...

class _mm_mat1_sparse_backward(Formula):
    def __call__(_, grad: Tensor, mat1: Tensor, mat2: Tensor, alpha: Number = 1) -> Tensor: ...

class _mm_mat2_backward(Formula):
    def __call__(_, grad: Tensor, mat1: Tensor, mat2_strides: Sequence[int] | None = None, alpha: Number = 1) -> Tensor: ...

class _modified_bessel_i1(Formula):
    def __call__(_, self: Tensor) -> Tensor: ...

class _modified_bessel_k0(Formula):
    def __call__(_, self: Tensor) -> Tensor: ...

class _modified_bessel_k1(Formula):
    def __call__(_, self: Tensor) -> Tensor: ...

class _mse_loss_double_backward(Formula):
    def __call__(_, grad: Tensor, input: Tensor, reduction: int) -> Tensor: ...

class _mul_tensor_backward(Formula):
    def __call__(_, grad: Tensor, other: Tensor, self_st: torch.dtype) -> Tensor: ...

class _multi_margin_loss_double_backward(Formula):
    def __call__(_, grad: Tensor, grad_output: Tensor, self: Tensor, target: Tensor, p: Number, margin: Number, weight: Tensor | None, reduction: int) -> Tensor: ...

class _multi_margin_loss_gradient(Formula):
    def __call__(_, grad_output: Tensor, self: Tensor, target: Tensor, p: Number, margin: Number, weight: Tensor | None, reduction: int) -> Tensor: ...

class _multi_margin_loss_jvp(Formula):
    def __call__(_, self_p: Tensor, self_t: Tensor, target: Tensor, p: Number, margin: Number, weight: Tensor | None, reduction: int) -> Tensor: ...

class _multilabel_margin_loss_gradient(Formula):
    def __call__(_, grad_output: Tensor, self: Tensor, target: Tensor, reduction: int, is_target: Tensor) -> Tensor: ...

class _mv_mat_backward(Formula):
    def __call__(_, grad: Tensor, vec: Tensor, alpha: Number = 1) -> Tensor: ...

class _mv_vec_backward(Formula):
    def __call__(_, grad: Tensor, mat: Tensor, alpha: Number = 1) -> Tensor: ...

class _mvlgamma_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, p: int) -> Tensor: ...

class _nan_unless_zero(Formula):
    def __call__(_, x: Tensor, undefined: Tensor) -> Tensor: ...

class _nansum_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, dim: Sequence[int] | None, keepdim: bool) -> Tensor: ...

class _native_batch_norm_backward(Formula):
    def __call__(_, grad_out: Tensor, input: Tensor, weight: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None, save_mean: Tensor | None, save_invstd: Tensor | None, train: bool, eps: float, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]: ...

class _native_dropout_double_backward(Formula):
    def __call__(_, ggI: Tensor, grad: Tensor, mask: Tensor, scale: float) -> Tensor: ...

class _native_layer_norm_backward(Formula):
    def __call__(_, grad_out: Tensor, input: Tensor, normalized_shape: Sequence[int], mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]: ...

class _nested_attention(Formula):
    def __call__(_, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]: ...

class _nested_attention_backward(Formula):
    def __call__(_, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, q_offsets: Tensor, k_offsets: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]: ...

class _nested_inner(Formula):
    def __call__(_, x: Tensor, y: Tensor, offsets: Tensor) -> Tensor: ...

class _nested_linear_backward(Formula):
    def __call__(_, input: Tensor, grad_output: Tensor, weight: Tensor, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]: ...

class _nested_log_softmax_backward(Formula):
    def __call__(_, grad: Tensor, output: Tensor, offsets: Tensor, dim: int) -> Tensor: ...

class _nested_rows(Formula):
    def __call__(_, x: Tensor, w: Tensor, offsets: Tensor) -> Tensor: ...

class _nested_softmax_backward(Formula):
    def __call__(_, grad: Tensor, output: Tensor, offsets: Tensor, dim: int) -> Tensor: ...

class _norm_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, p: float, norm: Tensor, dim: Sequence[int] | None = None, keepdim: bool = True) -> Tensor: ...

class _norm_jvp(Formula):
    def __call__(_, self_p: Tensor, self_t: Tensor, p: float, norm: Tensor, dim: Sequence[int] | None = None, keepdim: bool = True) -> Tensor: ...

class _ormqr_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, tau: Tensor, other: Tensor, left: bool, transpose: bool) -> tuple[Tensor, Tensor, Tensor]: ...

class _ormqr_jvp(Formula):
    def __call__(_, self_t: Tensor | None, tau_t: Tensor | None, other_t: Tensor | None, self_p: Tensor, tau_p: Tensor, other_p: Tensor, left: bool, transpose: bool) -> Tensor: ...

class _orthogonal_polynomial(Formula):
    def __call__(_, x: Tensor, n: Tensor, family: str, order: int) -> Tensor: ...

class _pack_padded_sequence_backward(Formula):
    def __call__(_, grad: Tensor, input_size: Sequence[int], batch_sizes: Tensor, batch_first: bool) -> Tensor: ...

class _pdist_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, p: float, pdist: Tensor) -> Tensor: ...

class _pdist_backward_jvp(Formula):
    def __call__(_, grad: Tensor, grad_t: Tensor | None, self: Tensor, self_t: Tensor | None, p: float, pdist: Tensor) -> Tensor: ...

class _pdist_double_backward(Formula):
    def __call__(_, gg: Tensor, grad: Tensor, self: Tensor, p: float) -> tuple[Tensor, Tensor]: ...

class _pdist_jvp(Formula):
    def __call__(_, self_p: Tensor, self_t: Tensor, p: float) -> Tensor: ...

class _permute_backwards(Formula):
    def __call__(_, grad: Tensor, fwd_dims: Sequence[int]) -> Tensor: ...

class _pinv_backward(Formula):
    def __call__(_, grad: Tensor, result: Tensor, self: Tensor) -> Tensor: ...

class _pinv_differential(Formula):
    def __call__(_, A: Tensor, rank: Tensor, E: Tensor) -> Tensor: ...

class _pinv_jvp(Formula):
    def __call__(_, self: Tensor, result: Tensor, self_t: Tensor) -> Tensor: ...

class _pinv_truncated_backward(Formula):
    def __call__(_, grad: Tensor, result: Tensor, self: Tensor) -> Tensor: ...

class _pinv_truncated_jvp(Formula):
    def __call__(_, self: Tensor, result: Tensor, self_t: Tensor) -> Tensor: ...

class _polar_backward(Formula):
    def __call__(_, grad: Tensor, result: Tensor) -> tuple[Tensor, Tensor]: ...

class _polar_factor(Formula):
    def __call__(_, A: Tensor, W: Tensor, S: Tensor, V: Tensor, unitary: bool) -> Tensor: ...

class _pow_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, exponent: Number) -> Tensor: ...

class _pow_backward_exponent(Formula):
    def __call__(_, grad: Tensor, self: Tensor, exponent: Tensor, result: Tensor) -> Tensor: ...

class _pow_backward_self(Formula):
    def __call__(_, grad: Tensor, self: Tensor, exponent: Tensor) -> Tensor: ...

class _prelu_jvp(Formula):
    def __call__(_, self_p: Tensor, weight_p: Tensor, self_t: Tensor | None, weight_t: Tensor | None) -> Tensor: ...

class _principal_schur(Formula):
    def __call__(_, A: Tensor) -> tuple[Tensor, Tensor]: ...

class _prod_backward(Formula):
    def __call__(_, grad: Tensor, input: Tensor, result: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor: ...

class _prod_safe_zeros_backward(Formula):
    def __call__(_, grad: Tensor, inp: Tensor, dim: int) -> Tensor: ...

class _qr_rounding_backward(Formula):
    def __call__(_, grad_Q: Tensor | None, grad_R: Tensor | None, Q: Tensor, R: Tensor, c: int) -> tuple[Tensor, Tensor]: ...

class _qr_rounding_jvp(Formula):
    def __call__(_, A_t: Tensor, Q: Tensor, R: Tensor, c: int) -> tuple[Tensor, Tensor, Tensor]: ...

class _rad2deg_backward(Formula):
    def __call__(_, grad: Tensor) -> Tensor: ...

class _renorm_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, p: float, dim: int, maxnorm: float) -> Tensor: ...

class _renorm_jvp(Formula):
    def __call__(_, self_p: Tensor, self_t: Tensor, p: float, dim: int, maxnorm: float) -> Tensor: ...

class _repeat_backward(Formula):
    def __call__(_, grad: Tensor, repeats: Sequence[int], input_shape: Sequence[int]) -> Tensor: ...

class _rms_norm_backward_nested(Formula):
    def __call__(_, grad: Tensor, input: Tensor, normalized_shape: Sequence[int], rstd: Tensor, weight: Tensor | None, grad_input_mask: Sequence[bool]) -> tuple[Tensor, Tensor]: ...

class _rms_norm_double_backward(Formula):
    def __call__(_, input: Tensor, weight: Tensor | None, ggI: Tensor | None, ggG: Tensor | None, grad_out: Tensor, normalized_shape: Sequence[int], rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

class _rms_norm_jvp(Formula):
    def __call__(_, input_p: Tensor, input_t: Tensor | None, weight_p: Tensor | None, weight_t: Tensor | None, saved_rstd: Tensor, normalized_shape: Sequence[int]) -> Tensor: ...

class _rms_norm_nested(Formula):
    def __call__(_, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]: ...

class _rms_norm_rstd_jvp(Formula):
    def __call__(_, input_p: Tensor, input_t: Tensor, saved_rstd: Tensor, normalized_shape: Sequence[int]) -> Tensor: ...

class _rrelu_with_noise_backward(Formula):
    def __call__(_, grad_output: Tensor, self: Tensor, noise: Tensor, lower: float, upper: float, training: bool) -> Tensor: ...

class _scale_grad_by_count(Formula):
    def __call__(_, grad: Tensor, mask: Tensor, dims: Sequence[int]) -> Tensor: ...

class _scaled_modified_bessel_k0(Formula):
    def __call__(_, x: Tensor) -> Tensor: ...

class _scaled_modified_bessel_k1(Formula):
    def __call__(_, x: Tensor) -> Tensor: ...

class _scatter_prod_factors(Formula):
    def __call__(_, src: Tensor, dim: int, index: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]: ...

class _scatter_reduce_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, include_self: bool, result: Tensor) -> tuple[Tensor, Tensor]: ...

class _scatter_reduce_jvp(Formula):
    def __call__(_, self_p: Tensor, self_t: Tensor | None, dim: int, index: Tensor, src_p: Tensor, src_t: Tensor | None, reduce: str, include_self: bool, result: Tensor) -> Tensor: ...

class _scatter_src_backward(Formula):
    def __call__(_, grad: Tensor, dim: int, index: Tensor, src_sizes: Sequence[int]) -> Tensor: ...

class _schur_backward(Formula):
    def __call__(_, grad_T: Tensor | None, grad_Q: Tensor | None, T: Tensor, Q: Tensor, gauge: str = 'warn') -> Tensor: ...

class _schur_form(Formula):
    def __call__(_, A: Tensor) -> tuple[Tensor, Tensor]: ...

class _schur_jvp(Formula):
    def __call__(_, A_t: Tensor, T: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]: ...

class _segment_amax(Formula):
    def __call__(_, values: Tensor, offsets: Tensor, dim: int) -> Tensor: ...

class _segment_amax_backward(Formula):
    def __call__(_, grad: Tensor, values: Tensor, result: Tensor, offsets: Tensor, dim: int) -> Tensor: ...

class _segment_log_softmax(Formula):
    def __call__(_, values: Tensor, offsets: Tensor, dim: int) -> Tensor: ...

class _segment_reduce_backward(Formula):
    def __call__(_, grad: Tensor, output: Tensor, data: Tensor, reduce: str, lengths: Tensor | None, offsets: Tensor | None, axis: int, initial: Number | None) -> Tensor: ...

class _segment_softmax(Formula):
    def __call__(_, values: Tensor, offsets: Tensor, dim: int) -> Tensor: ...

class _segment_sum(Formula):
    def __call__(_, values: Tensor, offsets: Tensor, dim: int) -> Tensor: ...

class _sgn_backward(Formula):
    def __call__(_, x: Tensor, gx: Tensor, sgn: Tensor) -> Tensor: ...

class _silu_backward_nested(Formula):
    def __call__(_, grad_output: Tensor, self: Tensor) -> Tensor: ...

class _silu_nested(Formula):
    def __call__(_, self: Tensor) -> Tensor: ...

class _sinc_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor) -> Tensor: ...

class _singular_value_sum(Formula):
    def __call__(_, A: Tensor, W: Tensor, S: Tensor, V: Tensor) -> Tensor: ...

class _skew_lyapunov(Formula):
    def __call__(_, P: Tensor, L: Tensor, V: Tensor, C: Tensor) -> Tensor: ...

class _slice_backward_wrapper(Formula):
    def __call__(_, grad: Tensor, input_sizes: Sequence[int], dim: int, start: int | None, end: int | None, step: int) -> Tensor: ...

class _slogdet_backward(Formula):
    def __call__(_, grad_sign: Tensor | None, grad_logabsdet: Tensor | None, A: Tensor, sign: Tensor, LU: Tensor, pivots: Tensor) -> Tensor: ...

class _slogdet_jvp(Formula):
    def __call__(_, A_t: Tensor, A: Tensor, sign: Tensor, LU: Tensor, pivots: Tensor) -> tuple[Tensor, Tensor]: ...

class _smooth_l1_loss_double_backward(Formula):
    def __call__(_, grad: Tensor, input: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor: ...

class _soft_margin_loss_backward(Formula):
    def __call__(_, grad_output: Tensor, self: Tensor, target: Tensor, reduction: int) -> Tensor: ...

class _soft_margin_loss_double_backward(Formula):
    def __call__(_, grad: Tensor, input: Tensor, target: Tensor, reduction: int) -> Tensor: ...

class _soft_margin_loss_double_backward_grad_output(Formula):
    def __call__(_, grad: Tensor, grad_output: Tensor, input: Tensor, target: Tensor, reduction: int) -> Tensor: ...

class _softmax_differential(Formula):
    def __call__(_, x: Tensor, output: Tensor, dim: int) -> Tensor: ...

class _softmax_double_backward(Formula):
    def __call__(_, grad: Tensor, grad_output: Tensor, dim: int, output: Tensor) -> Tensor: ...

class _softplus_double_backward(Formula):
    def __call__(_, grad: Tensor, input: Tensor, beta: Number, threshold: Number) -> Tensor: ...

class _solve_again(Formula):
    def __call__(_, A: Tensor, LU: Tensor, pivots: Tensor, B: Tensor, left: bool, adjoint: bool) -> Tensor: ...

class _solve_backward_A(Formula):
    def __call__(_, grad: Tensor, self: Tensor, A: Tensor, solution: Tensor) -> Tensor: ...

class _solve_backward_self(Formula):
    def __call__(_, grad: Tensor, self: Tensor, A: Tensor) -> Tensor: ...

class _solve_eliminated(Formula):
    def __call__(_, LU: Tensor, pivots: Tensor, B: Tensor, adjoint: bool) -> Tensor: ...

class _solve_jvp(Formula):
    def __call__(_, X: Tensor, A: Tensor, dA: Tensor | None, dB: Tensor | None) -> Tensor: ...

class _solve_small(Formula):
    def __call__(_, A: Tensor, B: Tensor, check_errors: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

class _sparse_coo_tensor_values_backward(Formula):
    def __call__(_, grad: Tensor, indices: Tensor) -> Tensor: ...

class _sparse_mask_backward(Formula):
    def __call__(_, grad: Tensor, mask: Tensor, self_sizes: Sequence[int], sparse: bool) -> Tensor: ...

class _sparse_mm_reduce_backward(Formula):
    def __call__(_, self: Tensor, grad: Tensor, other: Tensor, reduce: str, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor]: ...

class _sparse_mm_reduce_jvp(Formula):
    def __call__(_, self_p: Tensor, other_p: Tensor, other_t: Tensor, reduce: str) -> Tensor: ...

class _sparse_sampled_addmm_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, mat1: Tensor, mat2: Tensor, alpha: Number, beta: Number, grad_input_mask: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]: ...

class _sparse_sparse_matmul_backward(Formula):
    def __call__(_, grad: Tensor, a: Tensor, b: Tensor, grad_order: int) -> Tensor: ...

class _split_backward(Formula):
    def __call__(_, grads: Sequence[Tensor | None], split_size: int, dim: int, sizes: Sequence[int]) -> Tensor: ...

class _split_with_sizes_backward(Formula):
    def __call__(_, grads: Sequence[Tensor | None], split_sizes: Sequence[int], dim: int, sizes: Sequence[int]) -> Tensor: ...

class _stack_jvp(Formula):
    def __call__(_, tensors_p: Sequence[Tensor], tensors_t: Sequence[Tensor | None], dim: int) -> Tensor: ...

class _stack_tensors_backward(Formula):
    def __call__(_, grad: Tensor, dim: int, dtypes: Sequence[torch.dtype]) -> list[Tensor]: ...

class _standard_gamma_grad(Formula):
    def __call__(_, a: Tensor, x: Tensor) -> Tensor: ...

class _std_backward(Formula):
    def __call__(_, result: Tensor, grad: Tensor, self: Tensor, dim: Sequence[int] | None, correction: Number | None, keepdim: bool) -> Tensor: ...

class _std_jvp(Formula):
    def __call__(_, self_t: Tensor, self_p: Tensor, result: Tensor, dim: Sequence[int] | None, correction: Number | None, keepdim: bool) -> Tensor: ...

class _std_mean_backward(Formula):
    def __call__(_, gstd: Tensor | None, gmean: Tensor | None, self: Tensor, std: Tensor, dim: Sequence[int] | None, correction: Number | None, keepdim: bool) -> Tensor: ...

class _stein_solution(Formula):
    def __call__(_, A: Tensor, B: Tensor, C: Tensor, T: Tensor, Q: Tensor, S: Tensor, P: Tensor, adjoint: bool) -> Tensor: ...

class _sum_backward(Formula):
    def __call__(_, grad: Tensor, sizes: Sequence[int], dim: Sequence[int] | None, keepdim: bool) -> Tensor: ...

class _svd_backward(Formula):
    def __call__(_, grad_U: Tensor | None, grad_S: Tensor | None, grad_Vh: Tensor | None, U: Tensor, S: Tensor, Vh: Tensor, rtol: float | None = None, atol: float = 0.0, broadening: float = 0.0, gauge: str = 'warn') -> Tensor: ...

class _svd_jacobi(Formula):
    def __call__(_, A: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

class _svd_small(Formula):
    def __call__(_, A: Tensor, vectors: bool = True) -> tuple[Tensor, Tensor, Tensor]: ...

class _sylvester_solution(Formula):
    def __call__(_, A: Tensor, B: Tensor, C: Tensor, T: Tensor, Q: Tensor, S: Tensor, P: Tensor, adjoint: bool) -> Tensor: ...

class _take_backward(Formula):
    def __call__(_, grad: Tensor, self_sizes: Sequence[int], index: Tensor) -> Tensor: ...

class _threshold_backwards_nested(Formula):
    def __call__(_, grad_output: Tensor, input: Tensor, threshold: float) -> Tensor: ...

class _to_sparse_backward(Formula):
    def __call__(_, grad: Tensor, self_layout: torch.layout, self_blocksize: Sequence[int] | None) -> Tensor: ...

class _triangular_solve_backward(Formula):
    def __call__(_, grad_solution: Tensor | None, grad_cloned_coefficient: Tensor | None, self: Tensor, A: Tensor, solution: Tensor, upper: bool, transpose: bool, unitriangular: bool) -> tuple[Tensor, Tensor]: ...

class _triangular_solve_jvp(Formula):
    def __call__(_, solution: Tensor, A: Tensor, A_t: Tensor | None, self_t: Tensor | None, upper: bool, transpose: bool, unitriangular: bool) -> Tensor: ...

class _unbind_backward(Formula):
    def __call__(_, grads: Sequence[Tensor | None], dim: int) -> Tensor: ...

class _unbind_backward_nested(Formula):
    def __call__(_, grads: Sequence[Tensor | None], nt_sizes: Tensor, dim: int, values: Tensor) -> Tensor: ...

class _unbind_backward_nested_jagged(Formula):
    def __call__(_, grads: Sequence[Tensor | None], self: Tensor, offsets: Tensor, dim: int, ragged_dim: int = 1) -> Tensor: ...

class _value_selecting_reduction_backward(Formula):
    def __call__(_, grad: Tensor, dim: int, indices: Tensor, sizes: Sequence[int], keepdim: bool) -> Tensor: ...

class _values_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor) -> Tensor: ...

class _var_backward(Formula):
    def __call__(_, grad: Tensor, self: Tensor, dim: Sequence[int] | None, correction: Number | None, keepdim: bool) -> Tensor: ...

class _var_jvp(Formula):
    def __call__(_, self_t: Tensor, self_p: Tensor, dim: Sequence[int] | None, correction: Number | None, keepdim: bool) -> Tensor: ...

class _var_mean_backward(Formula):
    def __call__(_, gvar: Tensor | None, gmean: Tensor | None, self: Tensor, dim: Sequence[int] | None, correction: Number | None, keepdim: bool) -> Tensor: ...

class _weight_norm_backward(Formula):
    def __call__(_, grad_w: Tensor, saved_v: Tensor, saved_g: Tensor, saved_norms: Tensor, dim: int) -> tuple[Tensor, Tensor]: ...

class _weight_norm_backward_jvp(Formula):
    def __call__(_, grad_w: Tensor, grad_w_t: Tensor | None, saved_v: Tensor, saved_v_t: Tensor | None, saved_g: Tensor, saved_g_t: Tensor | None, saved_norms: Tensor, dim: int) -> tuple[Tensor, Tensor]: ...

class _weight_norm_jvp(Formula):
    def __call__(_, v: Tensor, v_t: Tensor | None, g: Tensor, g_t: Tensor | None, saved_norms: Tensor, dim: int) -> Tensor: ...

class _zeta_self_derivative(Formula):
    def __call__(_, s: Tensor, x: Tensor) -> Tensor: ...

class Ops(Registry[Formula]):
    adjugate_again: _adjugate_again
    airy_ai: _airy_ai
    airy_ai_slope: _airy_ai_slope
    amaxamin_jvp: _amaxamin_jvp
    aminmax_backward: _aminmax_backward
    aminmax_jvp: _aminmax_jvp
    angle_backward: _angle_backward
    as_strided_backward: _as_strided_backward
    as_strided_scatter_backward: _as_strided_scatter_backward
    as_strided_scatter_jvp: _as_strided_scatter_jvp
    atan2_backward: _atan2_backward
    attention_backward: _attention_backward
    attention_backward_jvp: _attention_backward_jvp
    attention_backward_jvp_of_block: _attention_backward_jvp_of_block
    attention_jvp: _attention_jvp
    attention_jvp_jvp: _attention_jvp_jvp
    attention_jvp_jvp_of_block: _attention_jvp_jvp_of_block
    attention_mask_backward: _attention_mask_backward
    batch_norm_backward_jvp: _batch_norm_backward_jvp
    batch_norm_jvp: _batch_norm_jvp
    batchnorm_double_backward: _batchnorm_double_backward
    bessel_j0: _bessel_j0
    bessel_j1: _bessel_j1
    bessel_y0: _bessel_y0
    bessel_y1: _bessel_y1
    binary_cross_entropy_double_backward: _binary_cross_entropy_double_backward
    binary_cross_entropy_double_backward_grad_output: _binary_cross_entropy_double_backward_grad_output
    binary_cross_entropy_double_backward_target: _binary_cross_entropy_double_backward_target
    binary_cross_entropy_target_backward: _binary_cross_entropy_target_backward
    binary_cross_entropy_with_logits_backward: _binary_cross_entropy_with_logits_backward
    binary_cross_entropy_with_logits_target_backward: _binary_cross_entropy_with_logits_target_backward
    block_diag_backward: _block_diag_backward
    block_diag_jvp: _block_diag_jvp
    cat_jvp: _cat_jvp
    cat_tensors_backward: _cat_tensors_backward
    cdist_backward: _cdist_backward
    cdist_backward_jvp: _cdist_backward_jvp
    cdist_double_backward: _cdist_double_backward
    cdist_jvp: _cdist_jvp
    cholesky_backward: _cholesky_backward
    cholesky_factor: _cholesky_factor
    cholesky_inverse_backward: _cholesky_inverse_backward
    cholesky_inverse_jvp: _cholesky_inverse_jvp
    cholesky_jvp: _cholesky_jvp
    cholesky_small: _cholesky_small
    cholesky_solve_backward: _cholesky_solve_backward
    cholesky_solve_jvp: _cholesky_solve_jvp
    chunk_backward_nested: _chunk_backward_nested
    clamp_backward: _clamp_backward
    clamp_backward_min_max: _clamp_backward_min_max
    clamp_jvp: _clamp_jvp
    complex_sign: _complex_sign
    constant: _constant
    constant_pad_nd_backward: _constant_pad_nd_backward
    convolution_backward_jvp_grad_bias: _convolution_backward_jvp_grad_bias
    convolution_jvp: _convolution_jvp
    copysign_tensor_self_backward: _copysign_tensor_self_backward
    ctc_loss_gradient: _ctc_loss_gradient
    cummaxmin_backward: _cummaxmin_backward
    cumprod_backward: _cumprod_backward
    cumprod_jvp: _cumprod_jvp
    cumsum_backward: _cumsum_backward
    deg2rad_backward: _deg2rad_backward
    dirichlet_grad: _dirichlet_grad
    div_tensor_other_backward: _div_tensor_other_backward
    div_tensor_self_backward: _div_tensor_self_backward
    dot_backward: _dot_backward
    eigh_jacobi: _eigh_jacobi
    eigh_small: _eigh_small
    eigh_tridiagonal: _eigh_tridiagonal
    elu_double_backward: _elu_double_backward
    embedding_bag_adjoint: _embedding_bag_adjoint
    embedding_bag_linear: _embedding_bag_linear
    embedding_bag_weights: _embedding_bag_weights
    embedding_dense_double_backward_symint: _embedding_dense_double_backward_symint
    evenly_distribute_backward: _evenly_distribute_backward
    evenly_read_jvp: _evenly_read_jvp
    exponential_action: _exponential_action
    exponential_action_backward: _exponential_action_backward
    exponential_function: _exponential_function
    fake_quantize_cachemask_backward: _fake_quantize_cachemask_backward
    fake_quantize_learnable_backward: _fake_quantize_learnable_backward
    fake_quantize_learnable_jvp: _fake_quantize_learnable_jvp
    fft_c2r_backward: _fft_c2r_backward
    fft_r2c_backward: _fft_r2c_backward
    first_projector: _first_projector
    frexp_backward: _frexp_backward
    gather_with_keepdimed_indices: _gather_with_keepdimed_indices
    gaussian_elimination: _gaussian_elimination
    gelu_backwards_nested: _gelu_backwards_nested
    gelu_double_backward: _gelu_double_backward
    general_function: _general_function
    geqrf_backward: _geqrf_backward
    geqrf_jvp: _geqrf_jvp
    glu_double_backward: _glu_double_backward
    glu_double_backward_grad_output: _glu_double_backward_grad_output
    glu_jvp: _glu_jvp
    grid_sampler_2d_backward: _grid_sampler_2d_backward
    grid_sampler_2d_double_backward: _grid_sampler_2d_double_backward
    grid_sampler_3d_backward: _grid_sampler_3d_backward
    grid_sampler_3d_double_backward: _grid_sampler_3d_double_backward
    grid_sampler_backward_jvp: _grid_sampler_backward_jvp
    grid_sampler_jvp: _grid_sampler_jvp
    group_norm_backward_jvp: _group_norm_backward_jvp
    group_norm_double_backward: _group_norm_double_backward
    group_norm_invstd_jvp: _group_norm_invstd_jvp
    group_norm_jvp: _group_norm_jvp
    group_norm_mean_jvp: _group_norm_mean_jvp
    hermitian_function: _hermitian_function
    hermitian_inverse: _hermitian_inverse
    hermitian_lyapunov: _hermitian_lyapunov
    hermitian_root: _hermitian_root
    householder_product_backward: _householder_product_backward
    householder_product_jvp: _householder_product_jvp
    huber_loss_backward: _huber_loss_backward
    huber_loss_double_backward: _huber_loss_double_backward
    huber_loss_double_backward_grad_output: _huber_loss_double_backward_grad_output
    i1_backward: _i1_backward
    i1e_backward: _i1e_backward
    igamma_self_derivative: _igamma_self_derivative
    index_backward: _index_backward
    index_reduce_backward: _index_reduce_backward
    index_reduce_jvp: _index_reduce_jvp
    infinitely_differentiable_logit_backward: _infinitely_differentiable_logit_backward
    infinitely_differentiable_mish_backward: _infinitely_differentiable_mish_backward
    infinitely_differentiable_native_dropout_backward: _infinitely_differentiable_native_dropout_backward
    infinitely_differentiable_native_group_norm_backward: _infinitely_differentiable_native_group_norm_backward
    infinitely_differentiable_native_rms_norm_backward: _infinitely_differentiable_native_rms_norm_backward
    infinitely_differentiable_silu_backward: _infinitely_differentiable_silu_backward
    largest_singular_value: _largest_singular_value
    layer_norm_backward_jvp: _layer_norm_backward_jvp
    layer_norm_backward_nested: _layer_norm_backward_nested
    layer_norm_double_backward: _layer_norm_double_backward
    layer_norm_jvp: _layer_norm_jvp
    layer_norm_nested: _layer_norm_nested
    linalg_cross_backward: _linalg_cross_backward
    linalg_cross_jvp: _linalg_cross_jvp
    linalg_det_backward: _linalg_det_backward
    linalg_det_jvp: _linalg_det_jvp
    linalg_eig_backward: _linalg_eig_backward
    linalg_eig_jvp: _linalg_eig_jvp
    linalg_eigh_backward: _linalg_eigh_backward
    linalg_eigh_jvp: _linalg_eigh_jvp
    linalg_inv_backward: _linalg_inv_backward
    linalg_inv_jvp: _linalg_inv_jvp
    linalg_lstsq_backward: _linalg_lstsq_backward
    linalg_lstsq_jvp: _linalg_lstsq_jvp
    linalg_lstsq_residuals_jvp: _linalg_lstsq_residuals_jvp
    linalg_lstsq_solution_jvp: _linalg_lstsq_solution_jvp
    linalg_lu_backward: _linalg_lu_backward
    linalg_lu_jvp: _linalg_lu_jvp
    linalg_lu_solve_LU: _linalg_lu_solve_LU
    linalg_lu_solve_jvp: _linalg_lu_solve_jvp
    linalg_matrix_exp_differential: _linalg_matrix_exp_differential
    linalg_matrix_sqrth_differential: _linalg_matrix_sqrth_differential
    linalg_polar_backward: _linalg_polar_backward
    linalg_polar_jvp: _linalg_polar_jvp
    linalg_qr_backward: _linalg_qr_backward
    linalg_qr_jvp: _linalg_qr_jvp
    linalg_solve_backward: _linalg_solve_backward
    linalg_solve_jvp: _linalg_solve_jvp
    linalg_solve_triangular_backward: _linalg_solve_triangular_backward
    linalg_solve_triangular_forward_AD: _linalg_solve_triangular_forward_AD
    linalg_svd_jvp: _linalg_svd_jvp
    linalg_vector_norm_backward: _linalg_vector_norm_backward
    linalg_vector_norm_jvp: _linalg_vector_norm_jvp
    linear_backward: _linear_backward
    linear_cross_entropy_backward: _linear_cross_entropy_backward
    linear_cross_entropy_jvp: _linear_cross_entropy_jvp
    linear_cross_entropy_target_backward: _linear_cross_entropy_target_backward
    linear_double_backward: _linear_double_backward
    log1p_backward: _log1p_backward
    log_sigmoid_double_backward: _log_sigmoid_double_backward
    log_softmax_jvp: _log_softmax_jvp
    logcumsumexp_backward: _logcumsumexp_backward
    logcumsumexp_jvp: _logcumsumexp_jvp
    logsumexp_backward: _logsumexp_backward
    logsumexp_jvp: _logsumexp_jvp
    lstsq_pinv: _lstsq_pinv
    lu_factor_ex_backward: _lu_factor_ex_backward
    lu_factor_ex_jvp: _lu_factor_ex_jvp
    lu_finite: _lu_finite
    lu_small: _lu_small
    lu_unpack_backward: _lu_unpack_backward
    masked_fill_backward: _masked_fill_backward
    masked_scatter_backward: _masked_scatter_backward
    masked_softmax_differential: _masked_softmax_differential
    matmul_backward_nested: _matmul_backward_nested
    max_pool_double_backward: _max_pool_double_backward
    maximum_scalar_backward: _maximum_scalar_backward
    mean_backward: _mean_backward
    mkldnn_rnn_layer_differentiable_backward: _mkldnn_rnn_layer_differentiable_backward
    mkldnn_rnn_layer_jvp: _mkldnn_rnn_layer_jvp
    mm_mat1_backward: _mm_mat1_backward
    mm_mat1_sparse_backward: _mm_mat1_sparse_backward
    mm_mat2_backward: _mm_mat2_backward
    modified_bessel_i1: _modified_bessel_i1
    modified_bessel_k0: _modified_bessel_k0
    modified_bessel_k1: _modified_bessel_k1
    mse_loss_double_backward: _mse_loss_double_backward
    mul_tensor_backward: _mul_tensor_backward
    multi_margin_loss_double_backward: _multi_margin_loss_double_backward
    multi_margin_loss_gradient: _multi_margin_loss_gradient
    multi_margin_loss_jvp: _multi_margin_loss_jvp
    multilabel_margin_loss_gradient: _multilabel_margin_loss_gradient
    mv_mat_backward: _mv_mat_backward
    mv_vec_backward: _mv_vec_backward
    mvlgamma_backward: _mvlgamma_backward
    nan_unless_zero: _nan_unless_zero
    nansum_backward: _nansum_backward
    native_batch_norm_backward: _native_batch_norm_backward
    native_dropout_double_backward: _native_dropout_double_backward
    native_layer_norm_backward: _native_layer_norm_backward
    nested_attention: _nested_attention
    nested_attention_backward: _nested_attention_backward
    nested_inner: _nested_inner
    nested_linear_backward: _nested_linear_backward
    nested_log_softmax_backward: _nested_log_softmax_backward
    nested_rows: _nested_rows
    nested_softmax_backward: _nested_softmax_backward
    norm_backward: _norm_backward
    norm_jvp: _norm_jvp
    ormqr_backward: _ormqr_backward
    ormqr_jvp: _ormqr_jvp
    orthogonal_polynomial: _orthogonal_polynomial
    pack_padded_sequence_backward: _pack_padded_sequence_backward
    pdist_backward: _pdist_backward
    pdist_backward_jvp: _pdist_backward_jvp
    pdist_double_backward: _pdist_double_backward
    pdist_jvp: _pdist_jvp
    permute_backwards: _permute_backwards
    pinv_backward: _pinv_backward
    pinv_differential: _pinv_differential
    pinv_jvp: _pinv_jvp
    pinv_truncated_backward: _pinv_truncated_backward
    pinv_truncated_jvp: _pinv_truncated_jvp
    polar_backward: _polar_backward
    polar_factor: _polar_factor
    pow_backward: _pow_backward
    pow_backward_exponent: _pow_backward_exponent
    pow_backward_self: _pow_backward_self
    prelu_jvp: _prelu_jvp
    principal_schur: _principal_schur
    prod_backward: _prod_backward
    prod_safe_zeros_backward: _prod_safe_zeros_backward
    qr_rounding_backward: _qr_rounding_backward
    qr_rounding_jvp: _qr_rounding_jvp
    rad2deg_backward: _rad2deg_backward
    renorm_backward: _renorm_backward
    renorm_jvp: _renorm_jvp
    repeat_backward: _repeat_backward
    rms_norm_backward_nested: _rms_norm_backward_nested
    rms_norm_double_backward: _rms_norm_double_backward
    rms_norm_jvp: _rms_norm_jvp
    rms_norm_nested: _rms_norm_nested
    rms_norm_rstd_jvp: _rms_norm_rstd_jvp
    rrelu_with_noise_backward: _rrelu_with_noise_backward
    scale_grad_by_count: _scale_grad_by_count
    scaled_modified_bessel_k0: _scaled_modified_bessel_k0
    scaled_modified_bessel_k1: _scaled_modified_bessel_k1
    scatter_prod_factors: _scatter_prod_factors
    scatter_reduce_backward: _scatter_reduce_backward
    scatter_reduce_jvp: _scatter_reduce_jvp
    scatter_src_backward: _scatter_src_backward
    schur_backward: _schur_backward
    schur_form: _schur_form
    schur_jvp: _schur_jvp
    segment_amax: _segment_amax
    segment_amax_backward: _segment_amax_backward
    segment_log_softmax: _segment_log_softmax
    segment_reduce_backward: _segment_reduce_backward
    segment_softmax: _segment_softmax
    segment_sum: _segment_sum
    sgn_backward: _sgn_backward
    silu_backward_nested: _silu_backward_nested
    silu_nested: _silu_nested
    sinc_backward: _sinc_backward
    singular_value_sum: _singular_value_sum
    skew_lyapunov: _skew_lyapunov
    slice_backward_wrapper: _slice_backward_wrapper
    slogdet_backward: _slogdet_backward
    slogdet_jvp: _slogdet_jvp
    smooth_l1_loss_double_backward: _smooth_l1_loss_double_backward
    soft_margin_loss_backward: _soft_margin_loss_backward
    soft_margin_loss_double_backward: _soft_margin_loss_double_backward
    soft_margin_loss_double_backward_grad_output: _soft_margin_loss_double_backward_grad_output
    softmax_differential: _softmax_differential
    softmax_double_backward: _softmax_double_backward
    softplus_double_backward: _softplus_double_backward
    solve_again: _solve_again
    solve_backward_A: _solve_backward_A
    solve_backward_self: _solve_backward_self
    solve_eliminated: _solve_eliminated
    solve_jvp: _solve_jvp
    solve_small: _solve_small
    sparse_coo_tensor_values_backward: _sparse_coo_tensor_values_backward
    sparse_mask_backward: _sparse_mask_backward
    sparse_mm_reduce_backward: _sparse_mm_reduce_backward
    sparse_mm_reduce_jvp: _sparse_mm_reduce_jvp
    sparse_sampled_addmm_backward: _sparse_sampled_addmm_backward
    sparse_sparse_matmul_backward: _sparse_sparse_matmul_backward
    split_backward: _split_backward
    split_with_sizes_backward: _split_with_sizes_backward
    stack_jvp: _stack_jvp
    stack_tensors_backward: _stack_tensors_backward
    standard_gamma_grad: _standard_gamma_grad
    std_backward: _std_backward
    std_jvp: _std_jvp
    std_mean_backward: _std_mean_backward
    stein_solution: _stein_solution
    sum_backward: _sum_backward
    svd_backward: _svd_backward
    svd_jacobi: _svd_jacobi
    svd_small: _svd_small
    sylvester_solution: _sylvester_solution
    take_backward: _take_backward
    threshold_backwards_nested: _threshold_backwards_nested
    to_sparse_backward: _to_sparse_backward
    triangular_solve_backward: _triangular_solve_backward
    triangular_solve_jvp: _triangular_solve_jvp
    unbind_backward: _unbind_backward
    unbind_backward_nested: _unbind_backward_nested
    unbind_backward_nested_jagged: _unbind_backward_nested_jagged
    value_selecting_reduction_backward: _value_selecting_reduction_backward
    values_backward: _values_backward
    var_backward: _var_backward
    var_jvp: _var_jvp
    var_mean_backward: _var_mean_backward
    weight_norm_backward: _weight_norm_backward
    weight_norm_backward_jvp: _weight_norm_backward_jvp
    weight_norm_jvp: _weight_norm_jvp
    zeta_self_derivative: _zeta_self_derivative

ops: Ops
