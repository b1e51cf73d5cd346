// Entering and leaving blocks: methods in C, so that no signal handler of Python's runs between their steps.
//
// Python runs signal handlers between bytecodes. If `__exit__` is a Python function, a handler may raise before its
// first line, and the block is never left. Here Python code runs only before and after the one step that changes what
// is active, never during it.
//
// Without Python's headers this file is empty, and the methods are written in Python.
#include "guarded.h"
#include "state.h"

#include <ATen/record_function.h>

#if __has_include(<Python.h>)
#define Py_LIMITED_API 0x030A0000  // one library for every Python from 3.10 on
#include <Python.h>

namespace manualgrad {
namespace {

// A reference to a Python object; null where Python has raised.
struct Object {
  Object() = default;
  explicit Object(PyObject* o) : object(o) {}
  Object(Object&& other) noexcept : object(std::exchange(other.object, nullptr)) {}
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  ~Object() { Py_XDECREF(object); }
  explicit operator bool() const { return object != nullptr; }
  PyObject* object = nullptr;
};

// Set once, and kept: `truth.entries` is the tuple of active handles, `settle` updates everything derived from it.
PyObject *truth = nullptr, *settle = nullptr;

bool read(PyObject* handle, const char* name, int64_t* found) {
  const Object value(PyObject_GetAttrString(handle, name));
  if (!value) return false;
  *found = PyLong_AsLongLong(value.object);
  return *found != -1 || PyErr_Occurred() == nullptr;
}

// Makes the handles of this tuple the active ones, or raises and changes nothing.
bool put(PyObject* handles) {
  std::vector<Entry> entries;
  try {
    for (Py_ssize_t i = 0; i < PyTuple_Size(handles); ++i) {
      PyObject* const handle = PyTuple_GetItem(handles, i);
      int64_t layer = 0, thread = 0;
      if (!read(handle, "number", &layer) || !read(handle, "thread", &thread)) return false;
      entries.push_back({layer_of(layer), static_cast<uint64_t>(thread)});
    }
    return activate(entries, [&] { return PyObject_SetAttrString(truth, "entries", handles) == 0; });
  } catch (const std::exception& error) {
    if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_RuntimeError, error.what());
    return false;
  }
}

// Removes the handle from the active ones, along with those of threads that have ended, and appends it if `with`. Or
// raises and changes nothing.
bool exchange(PyObject* handle, bool with) {
  const Object before(PyObject_GetAttrString(truth, "entries"));  // kept until the end: finalizers take locks
  const Object list(before ? PyList_New(0) : nullptr);
  if (!list) return false;
  for (Py_ssize_t i = 0; i < PyTuple_Size(before.object); ++i) {
    PyObject* const other = PyTuple_GetItem(before.object, i);
    int64_t thread = 0;
    if (!read(other, "thread", &thread)) return false;
    if (other == handle || (thread != 0 && !is_running(thread))) continue;
    if (PyList_Append(list.object, other) < 0) return false;
  }
  if (with && PyList_Append(list.object, handle) < 0) return false;
  const Object handles(PyList_AsTuple(list.object));
  return handles && put(handles.object);
}

bool settled() { return static_cast<bool>(Object(PyObject_CallNoArgs(settle))); }

// Keeps the exception that Python has raised while f runs, and raises it again.
template <class F>
void while_raised(F&& f) {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  f();
  PyErr_Clear();
  PyErr_Restore(type, value, trace);
}

bool add(PyObject* handle) {
  if (!exchange(handle, true)) return false;
  if (settled()) return true;
  while_raised([&] {
    exchange(handle, false);
    settled();
  });
  return false;
}

bool remove(PyObject* handle) {
  if (!exchange(handle, false)) return false;
  if (settled()) return true;
  while_raised([] { settled(); });
  return false;
}

PyObject* enter(PyObject* self, PyObject*) {
  Object handle(PyObject_CallMethod(self, "_prepare", nullptr));
  const Object entered(handle ? PyObject_GetAttrString(self, "_entered") : nullptr);
  if (!entered || PyList_Append(entered.object, handle.object) < 0) return nullptr;
  if (add(handle.object)) return std::exchange(handle.object, nullptr);
  while_raised([&] {
    const Py_ssize_t n = PyList_Size(entered.object);
    PyList_SetSlice(entered.object, n - 1, n, nullptr);
  });
  return nullptr;
}

PyObject* leave(PyObject* self, PyObject*) {
  const Object entered(PyObject_GetAttrString(self, "_entered"));
  if (!entered) return nullptr;
  const auto here = static_cast<int64_t>(at::RecordFunction::currentThreadId());
  for (Py_ssize_t i = PyList_Size(entered.object) - 1; i >= 0; --i) {
    PyObject* const handle = PyList_GetItem(entered.object, i);
    int64_t thread = 0;
    if (!read(handle, "thread", &thread)) return nullptr;
    if (thread != 0 && thread != here) continue;
    Py_INCREF(handle);
    const Object kept(handle);
    if (!exchange(handle, false)) return nullptr;
    PyList_SetSlice(entered.object, i, i + 1, nullptr);
    if (settled()) Py_RETURN_NONE;
    while_raised([] { settled(); });
    return nullptr;
  }
  return PyObject_CallMethod(self, "_not_entered", nullptr);  // raises
}

PyObject* added(PyObject*, PyObject* handle) {
  if (!add(handle)) return nullptr;
  Py_RETURN_NONE;
}

PyObject* removed(PyObject*, PyObject* handle) {
  if (!remove(handle)) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef of_block[] = {
    {"__enter__", enter, METH_NOARGS, "Activate what `_prepare` returns, as a whole or not at all."},
    {"__exit__", leave, METH_VARARGS, "Deactivate what was entered last, whatever interrupts."},
    {nullptr, nullptr, 0, nullptr}};
PyMethodDef functions[] = {{"add", added, METH_O, "Activate a handle."},
                           {"remove", removed, METH_O, "Deactivate a handle."}};

PyType_Slot slots[] = {{Py_tp_methods, of_block}, {0, nullptr}};
PyType_Spec spec = {"torch_manualgrad.core.activation.Block", 0, 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};

}  // namespace
}  // namespace manualgrad

// (the class, add, remove), or None where there is none.
MANUALGRAD_API PyObject* manualgrad_calls_block(PyObject* truth, PyObject* settle) {
  using namespace manualgrad;
  Py_INCREF(truth);
  Py_INCREF(settle);
  manualgrad::truth = truth;
  manualgrad::settle = settle;
  const Object type(PyType_FromSpec(&spec)), first(PyCFunction_New(&functions[0], nullptr)),
      second(PyCFunction_New(&functions[1], nullptr));
  if (!type || !first || !second) return nullptr;
  return PyTuple_Pack(3, type.object, first.object, second.object);
}
#endif
