// Views of strided nested tensors: PyTorch's forward, with a derivative that it lacks, or has in first order only.
#pragma once

#include "node.h"
#include "strided.h"

#include <ATen/ops/_nested_tensor_from_tensor_list.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/functions/utils.h>

namespace manualgrad {

// Pieces along one dim: where each begins, and how long it is. Along the batch a piece may be a component itself.
struct Pieces {
  int64_t dim;
  std::vector<int64_t> starts, lengths;
};

// The gradient of a nested tensor, given those of its pieces in order; zeros where there is none. It consists of
// differentiable operators, which read cotangents component by component, in any memory layout.
struct PiecesBackward : public Node {
  PiecesBackward(const at::Tensor& x, Pieces p)
      : pieces(std::move(p)), sizes(nested(x)->get_nested_sizes()), options(x.options()) {}

  std::string name() const override { return "NestedPiecesBackward"; }

  variable_list apply(variable_list&& grads) override {
    if (std::none_of(grads.begin(), grads.end(), [](const at::Tensor& g) { return g.defined(); }))
      return {at::Tensor()};
    std::optional<at::AutoDispatchBelowADInplaceOrView> untracked;
    if (!c10::GradMode::is_enabled()) untracked.emplace();
    std::vector<variable_list> parts;  // the components of each piece
    for (const at::Tensor& g : grads) {
      parts.push_back(!g.defined() ? variable_list() : g.is_nested() ? g.unbind() : variable_list{g});
    }
    const int64_t count = sizes.size(0);
    variable_list found;
    found.reserve(count);
    for (int64_t b = 0; b < count; ++b) found.push_back(pieces.dim == 0 ? selected(parts, b) : joined(parts, b));
    return {at::_nested_tensor_from_tensor_list(found, options.dtype().toScalarType(), std::nullopt, options.device())};
  }

 private:
  std::vector<int64_t> shape(int64_t component) const {
    const auto* size = sizes.const_data_ptr<int64_t>() + component * sizes.size(1);
    return {size, size + sizes.size(1)};
  }

  at::Tensor zeros(const std::vector<int64_t>& shape) const {
    return at::zeros(shape, options.layout(c10::kStrided).requires_grad(std::nullopt));
  }

  at::Tensor selected(const std::vector<variable_list>& parts, int64_t component) const {
    for (size_t i = 0; i < parts.size(); ++i) {
      const int64_t place = component - pieces.starts[i];
      if (place >= 0 && place < static_cast<int64_t>(parts[i].size())) return parts[i][place];
    }
    return zeros(shape(component));
  }

  at::Tensor joined(const std::vector<variable_list>& parts, int64_t component) const {
    auto size = shape(component);
    int64_t& length = size[pieces.dim - 1];
    variable_list row;
    for (size_t i = 0; i < parts.size(); ++i) {
      length = pieces.lengths[i];
      row.push_back(parts[i].empty() ? zeros(size) : parts[i][component]);
    }
    return at::cat(row, pieces.dim - 1);
  }

  const Pieces pieces;
  const at::Tensor sizes;
  const at::TensorOptions options;
};

// `views` of x, which PyTorch has made below autograd, as outputs of one node. Writing to one of them raises, as for
// PyTorch's views that are several results of one call, or that a custom function has made.
inline std::vector<at::Tensor> nested_pieces(const at::Tensor& x, at::TensorList views, int64_t dim,
                                             at::IntArrayRef starts, at::IntArrayRef lengths) {
  using torch::autograd::CreationMeta;
  TORCH_CHECK(x.is_nested() && x.layout() == c10::kStrided, "x: expected a strided nested tensor");
  TORCH_CHECK(0 <= dim && dim < x.dim(), "dim: ", dim, " is out of range for ", x.dim(), " dims");
  TORCH_CHECK(views.size() == starts.size() && views.size() == lengths.size(), "starts, lengths: expected ",
              views.size(), ", got ", starts.size(), " and ", lengths.size());
  auto node = make_node<NodePointer, PiecesBackward>(x, Pieces{dim, starts.vec(), lengths.vec()});
  node->set_next_edges(torch::autograd::collect_next_edges(x));
  std::vector<at::Tensor> found;
  found.reserve(views.size());
  for (const at::Tensor& view : views) {
    auto replay = std::make_unique<torch::autograd::ErroringViewFunc>("a piece of a nested tensor is not made again");
    found.push_back(torch::autograd::as_view(
        x, view, /*is_bw_differentiable=*/true, /*is_fw_differentiable=*/false, std::move(replay), nullptr,
        views.size() == 1 ? CreationMeta::IN_CUSTOM_FUNCTION : CreationMeta::MULTI_OUTPUT_NODE));
    const auto place = node->add_input_metadata(found.back());
    torch::autograd::impl::set_gradient_edge(found.back(), torch::autograd::Edge(node, place));
  }
  return found;
}

}  // namespace manualgrad
