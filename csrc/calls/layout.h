// Python fills these structs to describe rules and layers to this library.
//
// torch_manualgrad/core/override/compiled_table.py has the same structs for ctypes. Raise kLayoutVersion there and here
// with any change. Another version is refused; a test compares the fields by name, offset and size.
#pragma once

#include <cstddef>
#include <cstdint>

namespace manualgrad {

constexpr int64_t kLayoutVersion = 6;

namespace layout {

// Borrowed: valid until the call returns.
template <class T>
struct Span {
  const T* data;
  int64_t size;

  const T* begin() const { return data; }
  const T* end() const { return data + size; }
};
using Ints = Span<int64_t>;

enum Kind : int64_t { kNone, kBool, kInt, kFloat, kString };

struct Literal {
  int64_t kind;
  int64_t integer;   // kBool, kInt
  double real;       // kFloat
  const char* text;  // kString
};

struct Condition {
  int64_t constant;
  Literal value;
};

struct Argument {
  int64_t source;
  int64_t index;
  Literal literal;
};

struct Compiled {
  const char* formula;  // null: there is none
  Ints inputs;
  int64_t devices;
  int64_t largest;
  bool reports;
  bool real;
  Span<Condition> only;
  Ints contiguous;
  Ints one_batch;
  Ints square;
  Ints nonzero;
  Span<Argument> arguments;
};

struct Fact {
  int64_t place;
  int64_t what;
};

struct Use {
  Ints saved;
  Ints inputs;
};

struct Rule {
  int64_t version;  // kLayoutVersion; these two stay first, whatever the version
  int64_t bytes;    // of this struct
  int64_t number;
  const char* node;
  int64_t node_type;
  bool in_python;
  bool replaces_forward;
  bool check_stock;
  bool strong_zero;
  bool selective;
  bool lists;
  bool in_place;
  bool pushes;
  int64_t records;
  int64_t defers;
  int64_t order;
  int64_t complex_order;
  int64_t entries;
  int64_t argument_count;
  Ints tensors;
  Ints saved;
  Ints constants;
  Ints pushed;
  Span<Fact> facts;
  Ints differentiable;
  Span<Use> uses;
  Compiled compiled;
};

struct Served {
  int64_t slot;
  int64_t table;
};

struct Layer {
  int64_t version;
  int64_t bytes;
  Span<Served> rules;
  Span<Served> forward_modes;
  bool nested;
};

}  // namespace layout
}  // namespace manualgrad
