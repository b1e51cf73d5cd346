// The fields of layout.h by name, for the test that compares them with those of Python.
#include "layout.h"

#include "guarded.h"
#include "table.h"

namespace manualgrad {
namespace {

#define FIELD(Struct, field) {#Struct "." #field, offsetof(layout::Struct, field), sizeof(layout::Struct::field)}
#define CONSTANT(Enum, value) {#Enum "." #value, static_cast<size_t>(Enum::value), 0}

struct Entry {
  const char* name;
  size_t offset, size;  // of a constant: its value, and 0
};

constexpr Entry kEntries[] = {
    FIELD(Literal, kind),
    FIELD(Literal, integer),
    FIELD(Literal, real),
    FIELD(Literal, text),
    FIELD(Condition, constant),
    FIELD(Condition, value),
    FIELD(Argument, source),
    FIELD(Argument, index),
    FIELD(Argument, literal),
    FIELD(Compiled, formula),
    FIELD(Compiled, inputs),
    FIELD(Compiled, devices),
    FIELD(Compiled, largest),
    FIELD(Compiled, reports),
    FIELD(Compiled, real),
    FIELD(Compiled, only),
    FIELD(Compiled, contiguous),
    FIELD(Compiled, one_batch),
    FIELD(Compiled, square),
    FIELD(Compiled, nonzero),
    FIELD(Compiled, arguments),
    FIELD(Fact, place),
    FIELD(Fact, what),
    FIELD(Use, saved),
    FIELD(Use, inputs),
    FIELD(Rule, version),
    FIELD(Rule, bytes),
    FIELD(Rule, number),
    FIELD(Rule, node),
    FIELD(Rule, node_type),
    FIELD(Rule, in_python),
    FIELD(Rule, replaces_forward),
    FIELD(Rule, check_stock),
    FIELD(Rule, strong_zero),
    FIELD(Rule, selective),
    FIELD(Rule, lists),
    FIELD(Rule, in_place),
    FIELD(Rule, pushes),
    FIELD(Rule, records),
    FIELD(Rule, defers),
    FIELD(Rule, order),
    FIELD(Rule, complex_order),
    FIELD(Rule, entries),
    FIELD(Rule, argument_count),
    FIELD(Rule, tensors),
    FIELD(Rule, saved),
    FIELD(Rule, constants),
    FIELD(Rule, pushed),
    FIELD(Rule, facts),
    FIELD(Rule, differentiable),
    FIELD(Rule, uses),
    FIELD(Rule, compiled),
    FIELD(Served, slot),
    FIELD(Served, table),
    FIELD(Layer, version),
    FIELD(Layer, bytes),
    FIELD(Layer, rules),
    FIELD(Layer, forward_modes),
    FIELD(Layer, nested),
    CONSTANT(layout::Kind, kNone),
    CONSTANT(layout::Kind, kBool),
    CONSTANT(layout::Kind, kInt),
    CONSTANT(layout::Kind, kFloat),
    CONSTANT(layout::Kind, kString),
    CONSTANT(Source::Kind, kSaved),
    CONSTANT(Source::Kind, kConstant),
    CONSTANT(Source::Kind, kGrad),
    CONSTANT(Source::Kind, kLiteral),
    CONSTANT(Source::Kind, kNeeded),
    CONSTANT(Table::Fact, kSizes),
    CONSTANT(Table::Fact, kStrides),
    CONSTANT(Table::Fact, kDtype),
    CONSTANT(Table::Deferral, kNever),
    CONSTANT(Table::Deferral, kPythonDecides),
    CONSTANT(Table::Deferral, kButManySmall),
    CONSTANT(Table::Deferral, kAlways),
    CONSTANT(Table::Deferral, kReal),
    CONSTANT(Table::Deferral, kUnlessPlain),
    CONSTANT(Table::Deferral, kUnlessTracked),
    CONSTANT(Table::Deferral, kMetadataDecides),
    CONSTANT(Table::Records, kNothing),
    CONSTANT(Table::Records, kVjp),
    CONSTANT(Table::Records, kWhereFinite),
};

}  // namespace
}  // namespace manualgrad

// Field or constant `index`, its name, offset and size; 0 past the last.
MANUALGRAD_API int64_t manualgrad_calls_layout(int64_t index, const char** name, int64_t* offset, int64_t* size) {
  if (index >= static_cast<int64_t>(std::size(manualgrad::kEntries))) return 0;
  const auto& entry = manualgrad::kEntries[index];
  *name = entry.name;
  *offset = static_cast<int64_t>(entry.offset);
  *size = static_cast<int64_t>(entry.size);
  return 1;
}
