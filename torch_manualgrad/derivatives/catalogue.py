"""Operators without a rule and PyTorch's functions without a formula, each with the reason.

Operators without a rule are views, composites, operators without a derivative, and gaps.
``tests/derivatives/test_catalogue.py`` compares these entries with PyTorch's schemas and with its table of derivatives.
"""

from torch_manualgrad.core.rule.catalogue import composite, gap, nondifferentiable, not_a_formula, view

view(
    "aten::_conj",
    "aten::_fw_primal",
    "aten::_make_dual",
    "aten::_neg_view",
    "aten::_nested_get_values",
    "aten::_nested_view_from_buffer",
    "aten::_nested_view_from_jagged",
    "aten::_reshape_alias",
    "aten::_sparse_broadcast_to",
    "aten::_test_autograd_multiple_dispatch_view",
    "aten::alias",
    "aten::as_strided",
    "aten::detach",
    "aten::diagonal",
    "aten::expand",
    "aten::lift_fresh",
    "aten::permute",
    "aten::select.int",
    "aten::slice.Tensor",
    "aten::slice_inverse",
    "aten::split.Tensor",
    "aten::split_with_sizes",
    "aten::squeeze",
    "aten::squeeze.dim",
    "aten::squeeze.dims",
    "aten::t",
    "aten::transpose.int",
    "aten::unbind.int",
    "aten::unfold",
    "aten::unsqueeze",
    "aten::values",
    "aten::view",
    "aten::view_as_complex",
    "aten::view_as_real",
)

# Booleans, indices and counts are piecewise constant.
nondifferentiable(
    "aten::_is_all_true",
    "aten::_is_any_true",
    "aten::all",
    "aten::all.dim",
    "aten::all.dims",
    "aten::any",
    "aten::any.dim",
    "aten::any.dims",
    "aten::eq.Scalar",
    "aten::eq.Tensor",
    "aten::ge.Scalar",
    "aten::ge.Tensor",
    "aten::gt.Scalar",
    "aten::gt.Tensor",
    "aten::le.Scalar",
    "aten::le.Tensor",
    "aten::lt.Scalar",
    "aten::lt.Tensor",
    "aten::ne.Scalar",
    "aten::ne.Tensor",
    "aten::isnan",
    reason="the result is boolean",
)
nondifferentiable(
    "aten::argmax",
    "aten::argmin",
    "aten::argsort",
    "aten::argsort.stable",
    "aten::bucketize.Scalar",
    "aten::bucketize.Tensor",
    "aten::count_nonzero",
    "aten::count_nonzero.dim_IntList",
    "aten::hash_tensor",
    "aten::histc",
    "aten::nonzero",
    "aten::one_hot",
    "aten::searchsorted.Scalar",
    "aten::searchsorted.Tensor",
    reason="the result is an index or a count",
)
nondifferentiable("aten::multinomial", reason="the result is an index drawn at random")
nondifferentiable(
    "aten::_indices",
    "aten::ccol_indices",
    "aten::col_indices",
    "aten::crow_indices",
    "aten::indices",
    "aten::row_indices",
    reason="the result is the indices of a sparse tensor",
)
nondifferentiable(
    "aten::_values",
    reason="PyTorch returns the values of a sparse tensor detached; values returns them with their history",
)
nondifferentiable("aten::view.dtype", reason="the bits of the input are read as numbers of another dtype")
nondifferentiable(
    "aten::_efficientzerotensor",
    "aten::_new_zeros_with_same_feature_meta",
    "aten::empty_like",
    "aten::full_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::new_full",
    "aten::new_ones",
    "aten::new_zeros",
    "aten::ones_like",
    "aten::rand_like",
    "aten::rand_like.generator",
    "aten::randint_like",
    "aten::randint_like.Tensor",
    "aten::randint_like.Tensor_generator",
    "aten::randint_like.generator",
    "aten::randint_like.low_dtype",
    "aten::randint_like.low_generator_dtype",
    "aten::randn_like",
    "aten::randn_like.generator",
    "aten::zeros_like",
    reason="only the shape, dtype and device of the input are read",
)

# PyTorch declares these not differentiable.
nondifferentiable(
    "aten::special_chebyshev_polynomial_t.x_scalar",
    "aten::special_chebyshev_polynomial_u.x_scalar",
    "aten::special_chebyshev_polynomial_v.x_scalar",
    "aten::special_chebyshev_polynomial_w.x_scalar",
    "aten::special_hermite_polynomial_h.x_scalar",
    "aten::special_hermite_polynomial_he.x_scalar",
    "aten::special_laguerre_polynomial_l.x_scalar",
    "aten::special_legendre_polynomial_p.x_scalar",
    "aten::special_shifted_chebyshev_polynomial_t.x_scalar",
    "aten::special_shifted_chebyshev_polynomial_u.x_scalar",
    "aten::special_shifted_chebyshev_polynomial_v.x_scalar",
    "aten::special_shifted_chebyshev_polynomial_w.x_scalar",
    reason="the only tensor is the degree of an orthogonal polynomial; PyTorch declares no derivative in it",
)
gap(
    *(
        f"aten::{name}.{kinds}"
        for name in ("linspace", "logspace")
        for kinds in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")
    ),
    reason="torch.linspace and torch.logspace bypass autograd: the gradient through them is silently zero, and no override "
    "reaches them; start + (end - start) * torch.linspace(0, 1, steps) has all derivatives",
)
gap(
    "aten::miopen_rnn_backward",
    reason="its derivative is the second derivative of miopen_rnn, which only AMD devices have",
)
composite("aten::conj_physical", reason="_conj_physical if the input is complex, else the input itself")
gap(
    "aten::_fused_moving_avg_obs_fq_helper",
    reason="it takes float32 only, which is too imprecise for a check by finite differences; PyTorch has its straight-through "
    "estimate in reverse mode, in every order",
)

# Normalizations and attention.
gap(
    "aten::_native_batch_norm_legit_no_training",
    "aten::_batch_norm_no_update",
    reason="batch normalization in evaluation mode is affine in each input: PyTorch's derivatives are right in every order",
)
composite("aten::_fused_rms_norm", reason="divides by the root mean square; GPUs have a kernel for it")
gap(
    "aten::_cudnn_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_flash_attention_forward",
    reason="called by the fused attention operators of GPUs, which have rules",
)
gap(
    "aten::_scaled_dot_product_fused_attention_overrideable",
    reason="attention of devices that are not part of PyTorch, which has the first order in reverse mode",
)
gap(
    "aten::lift",
    reason="it returns its argument itself, which a Python autograd function treats as a view; PyTorch has its derivative",
)

gap(
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::unique_dim_consecutive",
    reason="the number of values jumps when two become equal; PyTorch has no derivative either",
)

# Random numbers.
nondifferentiable(
    "aten::bernoulli",
    "aten::bernoulli.Tensor",
    "aten::bernoulli.float",
    "aten::bernoulli.p",
    "aten::cauchy",
    "aten::exponential",
    "aten::geometric",
    "aten::log_normal",
    "aten::normal",
    "aten::normal.Tensor_Tensor",
    "aten::normal.Tensor_float",
    "aten::normal.float_Tensor",
    "aten::poisson",
    "aten::random",
    "aten::random.from",
    "aten::random.to",
    "aten::uniform",
    reason="the result is drawn at random, and PyTorch's gradient is zero; torch.distributions has samples with gradients",
)
gap(
    "aten::_standard_gamma_grad",
    "aten::_dirichlet_grad",
    reason="the rules of _standard_gamma and _sample_dirichlet have their own gradients, which can be differentiated again",
)
gap(
    "aten::_ctc_loss_backward",
    "aten::_ctc_loss_backward.Tensor",
    reason="the rule of _ctc_loss has its own gradient, which can be differentiated again",
)
gap(
    "aten::_segment_reduce_backward",
    reason="the rule of segment_reduce has its own gradient, which can be differentiated again",
)
gap(
    "aten::embedding_renorm",
    reason="PyTorch renormalizes the rows in place and outside of autograd; it has no derivative",
)
gap(
    "aten::_test_autograd_multiple_dispatch.fullcoverage",
    "aten::_test_autograd_multiple_dispatch.ntonly",
    "aten::_test_warn_in_autograd",
    reason="an operator of PyTorch's own tests, whose gradient is made up",
)

# Indices and shapes.
composite("aten::chunk", reason="split, a view")
gap(
    "aten::to_padded_tensor",
    "aten::_nested_from_padded",
    "aten::_nested_from_padded_tensor",
    "aten::_nested_tensor_from_mask",
    "aten::_nested_tensor_from_tensor_list",
    reason="rules are for dense tensors; for nested tensors, mg.nested replaces whole calls, such as to_padded_tensor",
)
gap("aten::_pin_memory", reason="needs a GPU, and returns the values unchanged; PyTorch has reverse mode")

# Convolution and pooling.
composite("aten::max_pool2d", reason="max_pool2d_with_indices; MPS has its own kernel")
gap(
    "aten::max_pool2d_backward",
    reason="only MPS implements it, and it has no indices of the maxima for a gather; PyTorch differentiates it once",
)
gap(
    "aten::mkldnn_adaptive_avg_pool2d",
    "aten::mkldnn_adaptive_avg_pool2d_backward",
    "aten::mkldnn_max_pool2d",
    "aten::mkldnn_max_pool2d_backward",
    "aten::mkldnn_max_pool3d",
    "aten::mkldnn_max_pool3d_backward",
    reason="takes only tensors in oneDNN's layout, and rules are for dense tensors; PyTorch differentiates it once",
)
gap(
    "aten::cudnn_affine_grid_generator_backward",
    reason="only cuDNN implements it, and no derivative calls it: affine_grid_generator_backward is used instead",
)

# Products, sparse tensors, recurrent layers.
composite(
    "aten::linear", "aten::matmul", reason="mm, bmm, mv, dot, addmm; PyTorch's derivative is for nested tensors and MPS"
)
gap(
    "aten::linear_backward",
    reason="a kernel for nested tensors and MPS only; linear_backward and linear_double_backward are formulas here",
)
gap(
    "aten::_mkldnn_reshape",
    "aten::mkldnn_linear",
    "aten::to_mkldnn",
    reason="for tensors in the mkldnn layout, which have no tangents and, in PyTorch, no second derivatives",
)
gap(
    "aten::_coalesce",
    "aten::_to_dense",
    reason="PyTorch's reverse mode is right, and the operators that it calls have rules; a sparse tensor has no tangent",
)
gap(
    "aten::mkldnn_rnn_layer_backward",
    reason="called only for a gradient that is not differentiated again; the rule of mkldnn_rnn_layer has the higher orders",
)
gap(
    "aten::_cudnn_rnn_backward",
    reason="the rule of _cudnn_rnn has all orders, and calls this operator only for the first",
)
gap(
    "aten::miopen_rnn",
    reason="all layers of a network share one opaque buffer; without MIOpen, PyTorch calls cells that have rules",
)
gap(
    "aten::_lstm_mps",
    "aten::lstm_mps_backward",
    reason="all layers of a network in one operator, which only Apple's devices have",
)
gap(
    "aten::_cudnn_ctc_loss",
    "aten::_cudnn_ctc_loss.Tensor",
    "aten::miopen_ctc_loss",
    "aten::miopen_ctc_loss.Tensor",
    reason="only GPUs have it, and the forward returns its gradient: PyTorch has no second derivative",
)

# Functions of FunctionsManual.h that are not in mg.ops.
not_a_formula(
    "batch_norm_backward",
    reason="it is an ATen operator, which has a rule; native_batch_norm_backward and batchnorm_double_backward are "
    "its formulas",
)
not_a_formula(
    "safe_logsumexp_jvp",
    reason="logsumexp_jvp is 0 where all inputs are -inf, which is the difference between the two in PyTorch",
)
not_a_formula(
    "_cudnn_ctc_loss_backward",
    "_miopen_ctc_loss_backward",
    reason="it multiplies by a gradient that the GPU operator returns, which is a constant to further derivatives; "
    "ctc_loss_gradient can be differentiated again",
)
not_a_formula(
    "bessel_j1_backward",
    "bessel_y1_backward",
    reason="a one-line rule: the slope is made of other Bessel functions",
)
not_a_formula(
    "_cdist_backward_backward",
    "_pdist_backward_backward",
    reason="they are called cdist_double_backward and pdist_double_backward here",
)
not_a_formula(
    "grid_sampler_2d_jvp",
    "grid_sampler_3d_jvp",
    reason="grid_sampler_jvp covers both",
)
not_a_formula(
    "native_group_norm_backward_dispatcher",
    reason="it chooses between an operator of ATen and infinitely_differentiable_native_group_norm_backward",
)
not_a_formula(
    "error_for_max_pool2d_double_backward",
    reason="in PyTorch it raises, because max_pool2d_backward of MPS has no second derivative; max_pool2d_with_indices has "
    "all orders here",
)
not_a_formula(
    "warn_backwards", reason="the identity with a warning, the derivative of an operator of PyTorch's own tests"
)
not_a_formula(
    "fft_backward",
    "sparse_constructor_values_backward",
    reason="PyTorch declares it but does not define it; fft_r2c_backward and fft_c2r_backward are used instead, and "
    "sparse_coo_tensor_values_backward here",
)
not_a_formula(
    "not_implemented",
    "not_implemented_list",
    "strides_or_error",
    reason="it raises one of PyTorch's errors",
)
not_a_formula(
    "any_variable_defined",
    "copy_range",
    "toNonOptFwGrad",
    "toNonOptPrimal",
    "toNonOptTensor",
    "update_wrapped_number",
    "wrap_opt_if",
    reason="a helper of PyTorch's generated C++ code, not a derivative",
)
not_a_formula(
    "_safe_size",
    "apply_loss_reduction",
    "handle_r_to_c",
    "masked_fill_inplace_if_safe",
    "maybe_multiply",
    "restore_reduced_dims",
    "reverse_dim",
    "reverse_list",
    "reverse_list_symint",
    "unsqueeze_multiple",
    "unsqueeze_to",
    reason="a helper of derivatives, not a derivative itself",
)
