// Orderings and greedy colorings on the CPU; the contract is in coloring.h.
#include "coloring.h"

#include <numeric>
#include <vector>

namespace manualgrad {
namespace {

using Numbers = std::vector<int64_t>;

Tensor tensor_of(const Numbers& values, const Tensor& like) {
  Tensor out = allocate({static_cast<int64_t>(values.size())}, like);
  std::copy(values.begin(), values.end(), static_cast<int64_t*>(out.mutable_data_ptr()));
  return out;
}

Integers order_of(const Tensor& order, int64_t count) {
  const Integers given = integers(order, "order");
  MANUALGRAD_CHECK(given.size == count, "manualgrad_sparsity: order: expected ", count, " vertices, got ", given.size);
  std::vector<bool> seen(count);
  for (int64_t k = 0; k < count; ++k) {
    MANUALGRAD_CHECK(given[k] >= 0 && given[k] < count && !seen[given[k]],
                     "manualgrad_sparsity: order: no permutation");
    seen[given[k]] = true;
  }
  return given;
}

// The vertices that share a net with a vertex, each once.
class Neighbors {
 public:
  Neighbors(const Tensor& vertex_ptr, const Tensor& nets, const Tensor& net_ptr, const Tensor& vertices)
      : nets_(rows(vertex_ptr, nets, net_ptr.numel() - 1, "nets")),
        vertices_(rows(net_ptr, vertices, vertex_ptr.numel() - 1, "vertices")),
        mark_(count(), -1) {}

  int64_t count() const { return nets_.count(); }

  template <class F>
  void visit(int64_t v, const F& f) {
    ++stamp_;
    mark_[v] = stamp_;
    for (int64_t p = nets_.begin[v]; p < nets_.begin[v + 1]; ++p) {
      const int64_t net = nets_.entry[p];
      for (int64_t q = vertices_.begin[net]; q < vertices_.begin[net + 1]; ++q) {
        const int64_t w = vertices_.entry[q];
        if (mark_[w] == stamp_) continue;
        mark_[w] = stamp_;
        f(w);
      }
    }
  }

 private:
  Rows nets_, vertices_;
  Numbers mark_;
  int64_t stamp_ = 0;
};

// Vertices by a key that changes by one; an entry whose key has changed since is skipped.
class Buckets {
 public:
  explicit Buckets(int64_t largest) : stacks_(largest + 2) {}
  void push(int64_t v, int64_t key) { stacks_[key].push_back(v); }
  bool pop(int64_t key, int64_t& v) {
    if (stacks_[key].empty()) return false;
    v = stacks_[key].back();
    stacks_[key].pop_back();
    return true;
  }
  int64_t size() const { return static_cast<int64_t>(stacks_.size()); }

 private:
  std::vector<Numbers> stacks_;
};

Numbers degrees(Neighbors& graph) {
  Numbers found(graph.count());
  for (int64_t v = 0; v < graph.count(); ++v) graph.visit(v, [&](int64_t) { ++found[v]; });
  return found;
}

Numbers by_degree(const Numbers& degree, bool ascending) {
  Numbers order(degree.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return ascending ? degree[a] < degree[b] : degree[a] > degree[b]; });
  return order;
}

Numbers smallest_last(Neighbors& graph, Numbers degree) {
  const int64_t n = graph.count();
  Buckets buckets(n);
  for (int64_t v = 0; v < n; ++v) buckets.push(v, degree[v]);
  Numbers order(n);
  int64_t key = 0;
  for (int64_t left = n; left > 0;) {
    int64_t v = 0;
    if (!buckets.pop(key, v)) {
      ++key;
      continue;
    }
    if (degree[v] != key) continue;
    degree[v] = -1;
    order[--left] = v;
    graph.visit(v, [&](int64_t w) {
      if (degree[w] > 0) buckets.push(w, --degree[w]);
    });
    key = std::max<int64_t>(key - 1, 0);
  }
  return order;
}

Numbers incidence(Neighbors& graph, const Numbers& degree) {
  const int64_t n = graph.count();
  Buckets buckets(n);
  for (const int64_t v : by_degree(degree, true)) buckets.push(v, 0);
  Numbers ordered(n), order;
  order.reserve(n);
  for (int64_t key = 0; static_cast<int64_t>(order.size()) < n;) {
    int64_t v = 0;
    if (!buckets.pop(key, v)) {
      --key;
      continue;
    }
    if (ordered[v] != key) continue;
    ordered[v] = -1;
    order.push_back(v);
    graph.visit(v, [&](int64_t w) {
      if (ordered[w] >= 0) buckets.push(w, ++ordered[w]);
    });
    key = std::min(key + 1, n);
  }
  return order;
}

Tensor degree_order(const Tensor& vertex_ptr, const Tensor& nets, const Tensor& net_ptr, const Tensor& vertices,
                    int64_t kind) {
  Neighbors graph(vertex_ptr, nets, net_ptr, vertices);
  const Numbers degree = degrees(graph);
  MANUALGRAD_CHECK(kind >= 0 && kind <= 2, "manualgrad_sparsity::degree_order: kind: expected 0, 1 or 2, got ", kind);
  if (kind == 0) return tensor_of(by_degree(degree, false), nets);
  return tensor_of(kind == 1 ? smallest_last(graph, degree) : incidence(graph, degree), nets);
}

// The least color that is not forbidden to v.
int64_t least(const Numbers& forbidden, int64_t v) {
  int64_t c = 0;
  while (forbidden[c] == v) ++c;
  return c;
}

Tensor distance2(const Tensor& vertex_ptr, const Tensor& nets, const Tensor& net_ptr, const Tensor& vertices,
                 const Tensor& order) {
  const Rows of_vertex = rows(vertex_ptr, nets, net_ptr.numel() - 1, "nets");
  const Rows of_net = rows(net_ptr, vertices, vertex_ptr.numel() - 1, "vertices");
  const int64_t n = of_vertex.count();
  const Integers given = order_of(order, n);
  Numbers color(n, -1), forbidden(n + 1, -1);
  for (int64_t k = 0; k < n; ++k) {
    const int64_t v = given[k];
    for (int64_t p = of_vertex.begin[v]; p < of_vertex.begin[v + 1]; ++p) {
      const int64_t net = of_vertex.entry[p];
      for (int64_t q = of_net.begin[net]; q < of_net.begin[net + 1]; ++q) {
        const int64_t c = color[of_net.entry[q]];
        if (c >= 0) forbidden[c] = v;
      }
    }
    color[v] = least(forbidden, v);
  }
  return tensor_of(color, order);
}

// A symmetric pattern with, for each entry (i, j), the place of (j, i).
struct Graph {
  Rows row;
  Numbers mirror;

  Graph(const Tensor& crow, const Tensor& col)
      : row(rows(crow, col, crow.numel() - 1, "col")), mirror(col.numel(), -1) {
    const int64_t n = row.count();
    Numbers next(row.begin.data, row.begin.data + n);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t p = row.begin[i]; p < row.begin[i + 1]; ++p) {
        MANUALGRAD_CHECK(p == row.begin[i] || row.entry[p - 1] < row.entry[p], "manualgrad_sparsity: col: row ", i,
                         " is not sorted");
        const int64_t j = row.entry[p], q = next[j]++;
        MANUALGRAD_CHECK(q < row.begin[j + 1] && row.entry[q] == i,
                         "manualgrad_sparsity: col: the pattern is not symmetric, at (", i, ", ", j, ")");
        mirror[p] = q;
      }
    }
  }

  int64_t count() const { return row.count(); }

  // f(w, place) for the neighbors of v.
  template <class F>
  void visit(int64_t v, const F& f) const {
    for (int64_t p = row.begin[v]; p < row.begin[v + 1]; ++p) {
      if (row.entry[p] != v) f(row.entry[p], p);
    }
  }

  int64_t edge(int64_t p) const { return std::min(p, mirror[p]); }
};

Tensor star(const Tensor& crow, const Tensor& col, const Tensor& order) {
  const Graph graph(crow, col);
  const int64_t n = graph.count();
  const Integers given = order_of(order, n);
  Numbers color(n, -1), forbidden(n + 1, -1), first(n + 1), first_of(n + 1, -1);
  std::vector<bool> shared(col.numel());  // at (x, w): another neighbor of x has the color of w
  for (int64_t k = 0; k < n; ++k) {
    const int64_t v = given[k];
    const auto forbid_around = [&](int64_t w) {
      graph.visit(w, [&](int64_t x, int64_t) {
        if (color[x] >= 0) forbidden[color[x]] = v;
      });
    };
    graph.visit(v, [&](int64_t w, int64_t) {
      const int64_t c = color[w];
      if (c < 0) return;
      forbidden[c] = v;
      if (first_of[c] == v) {  // two neighbors of one color: v must differ from all their neighbors
        forbid_around(first[c]);
        forbid_around(w);
        return;
      }
      first_of[c] = v;
      first[c] = w;
      graph.visit(w, [&](int64_t x, int64_t p) {
        if (color[x] >= 0 && shared[graph.mirror[p]]) forbidden[color[x]] = v;
      });
    });
    const int64_t c = least(forbidden, v);
    color[v] = c;
    graph.visit(v, [&](int64_t x, int64_t p) {
      const int64_t here = graph.mirror[p];
      graph.visit(x, [&](int64_t y, int64_t q) {
        if (y != v && color[y] == c) shared[q] = shared[here] = true;
      });
    });
  }
  return tensor_of(color, order);
}

class DisjointSets {
 public:
  explicit DisjointSets(int64_t size) : parent_(size) { std::iota(parent_.begin(), parent_.end(), int64_t{0}); }
  int64_t find(int64_t e) {
    while (parent_[e] != e) e = parent_[e] = parent_[parent_[e]];
    return e;
  }
  void merge(int64_t a, int64_t b) { parent_[find(a)] = find(b); }

 private:
  Numbers parent_;
};

Tensor acyclic(const Tensor& crow, const Tensor& col, const Tensor& order) {
  const Graph graph(crow, col);
  const int64_t n = graph.count();
  const Integers given = order_of(order, n);
  Numbers color(n, -1), forbidden(n + 1, -1), first(n + 1), first_of(n + 1, -1);
  Numbers visit_of(col.numel(), -1), visit_from(col.numel());
  DisjointSets trees(col.numel());  // of edges: the connected ones of two colors
  for (int64_t k = 0; k < n; ++k) {
    const int64_t v = given[k];
    graph.visit(v, [&](int64_t w, int64_t) {
      if (color[w] >= 0) forbidden[color[w]] = v;
    });
    graph.visit(v, [&](int64_t w, int64_t) {
      if (color[w] < 0) return;
      graph.visit(w, [&](int64_t x, int64_t p) {
        if (color[x] < 0 || forbidden[color[x]] == v) return;
        const int64_t tree = trees.find(graph.edge(p));
        if (visit_of[tree] != v) {
          visit_of[tree] = v;
          visit_from[tree] = w;
        } else if (visit_from[tree] != w) {
          forbidden[color[x]] = v;
        }
      });
    });
    const int64_t c = color[v] = least(forbidden, v);
    graph.visit(v, [&](int64_t w, int64_t p) {
      if (color[w] < 0) return;
      if (first_of[color[w]] == v) {
        trees.merge(graph.edge(p), graph.edge(first[color[w]]));
      } else {
        first_of[color[w]] = v;
        first[color[w]] = p;
      }
      graph.visit(w, [&](int64_t x, int64_t q) {
        if (x != v && color[x] == c) trees.merge(graph.edge(p), graph.edge(q));
      });
    });
  }
  return tensor_of(color, order);
}

// For each entry off the diagonal the step at which it is known, and at (v, u) whether it is read in row v: 2 step + 1,
// or 2 step in the row of the other end; -1 on the diagonal, -2 on a cycle.
Tensor elimination(const Tensor& crow, const Tensor& col, const Tensor& colors) {
  const Graph graph(crow, col);
  const int64_t n = graph.count();
  const Integers color = integers(colors, "colors");
  MANUALGRAD_CHECK(color.size == n, "manualgrad_sparsity::elimination: colors: expected ", n, ", got ", color.size);
  Numbers step(col.numel(), -2), left(col.numel()), group(col.numel(), -1), first(n + 1), first_of(n + 1, -1);
  for (int64_t v = 0; v < n; ++v) {
    for (int64_t p = graph.row.begin[v]; p < graph.row.begin[v + 1]; ++p) {
      if (graph.row.entry[p] == v) step[p] = -1;
    }
    graph.visit(v, [&](int64_t w, int64_t p) {
      const int64_t c = color[w];
      MANUALGRAD_CHECK(c >= 0 && c < n, "manualgrad_sparsity::elimination: colors: ", c, " is out of range");
      if (first_of[c] != v) {
        first_of[c] = v;
        first[c] = p;
      }
      group[p] = first[c];
      ++left[first[c]];
    });
  }
  // places (v, w) that are the last unknown ones among the neighbors of v of one color
  Numbers now, then;
  for (int64_t p = 0; p < col.numel(); ++p) {
    if (group[p] == p && left[p] == 1) now.push_back(p);
  }
  for (int64_t k = 0; !now.empty(); ++k, now.swap(then), then.clear()) {
    for (const int64_t g : now) {
      if (left[g] != 1) continue;
      int64_t p = g;
      while (group[p] != g || step[p] != -2) ++p;
      step[p] = 2 * k + 1;
      step[graph.mirror[p]] = 2 * k;
      left[g] = 0;
      const int64_t other = group[graph.mirror[p]];
      if (--left[other] == 1) then.push_back(other);
    }
  }
  return tensor_of(step, colors);
}

void add_to(Library& library) {
  library.impl("degree_order", TORCH_BOX(&degree_order));
  library.impl("distance2", TORCH_BOX(&distance2));
  library.impl("star", TORCH_BOX(&star));
  library.impl("acyclic", TORCH_BOX(&acyclic));
  library.impl("elimination", TORCH_BOX(&elimination));
}

}  // namespace
}  // namespace manualgrad

STABLE_TORCH_LIBRARY_IMPL(manualgrad_sparsity, CPU, library) { manualgrad::add_to(library); }
