// The types of nodes: hundreds of classes, in a file of their own, as each costs the compiler something.
#include "node.h"

namespace manualgrad {
namespace {

template <size_t>
struct NumberedNode final : RuleNode {
  using RuleNode::RuleNode;
};

template <size_t I>
RuleNode* make_numbered(const Table& table) {
  return new NumberedNode<I>(table);
}

template <size_t... I>
std::array<NodeType, kNodeTypes> make_node_types(std::index_sequence<I...>) {
  return {{{&typeid(NumberedNode<I>), &make_numbered<I>}...}};
}

}  // namespace

RuleNode::RuleNode(const Table& t) : shared(t.shared_from_this()), table(t) {}

RuleNode::~RuleNode() = default;

const std::array<NodeType, kNodeTypes> node_types = make_node_types(std::make_index_sequence<kNodeTypes>());

}  // namespace manualgrad
