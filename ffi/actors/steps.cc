#include "ffi/actors/steps.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>

namespace nb = nanobind;

namespace gear_jax {
namespace actors {

Steps::Steps(const std::vector<std::string>& names, nb::list columns) {
  for (size_t i = 0; i < names.size(); ++i) {
    Field field;
    nb::object column = columns[i];
    if (PyObject_GetBuffer(column.ptr(), &field.buffer, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
      PyErr_Clear();  // a dtype of ml_dtypes
      usable_ = false;
      return;
    }
    const Py_buffer& b = field.buffer;
    field.step_bytes = b.itemsize;
    for (int d = 2; d < b.ndim; ++d) field.step_bytes *= b.shape[d];
    field.slot_bytes = field.step_bytes * b.shape[1];
    fields_.push_back(field);
    Node* node = &root_;
    for (size_t begin = 0; begin <= names[i].size() && !names[i].empty();) {
      const size_t end = std::min(names[i].find('/', begin), names[i].size());
      const std::string part = names[i].substr(begin, end - begin);
      if (node->below.empty() || nb::cast<std::string>(node->below.back().key) != part) {
        node->below.emplace_back();
        node->below.back().key = nb::steal(PyUnicode_InternFromString(part.c_str()));
      }
      node = &node->below.back();
      begin = end + 1;
    }
    node->field = static_cast<int>(i);
  }
}

Steps::~Steps() {
  for (Field& field : fields_) PyBuffer_Release(&field.buffer);
}

bool Steps::Write(nb::handle step, int64_t s, int64_t t) const { return usable_ && WriteNode(root_, step.ptr(), s, t); }

bool Steps::WriteNode(const Node& node, PyObject* value, int64_t s, int64_t t) const {
  if (node.field >= 0) return WriteField(fields_[node.field], value, s, t);
  if (!PyDict_CheckExact(value) || PyDict_Size(value) != static_cast<Py_ssize_t>(node.below.size())) return false;
  for (const Node& child : node.below) {
    PyObject* found = PyDict_GetItemWithError(value, child.key.ptr());
    if (found == nullptr) {
      PyErr_Clear();
      return false;
    }
    if (!WriteNode(child, found, s, t)) return false;
  }
  return true;
}

bool Steps::WriteField(const Field& field, PyObject* value, int64_t s, int64_t t) const {
  const Py_buffer& to = field.buffer;
  if (s < 0 || s >= to.shape[0] || t < 0 || t >= to.shape[1]) return false;
  Py_buffer from;
  if (PyObject_GetBuffer(value, &from, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
    PyErr_Clear();
    return false;
  }
  bool fits = from.ndim == to.ndim - 2 && from.len == field.step_bytes && from.format != nullptr &&
              std::strcmp(from.format, to.format) == 0;
  for (int d = 0; fits && d < from.ndim; ++d) fits = from.shape[d] == to.shape[d + 2];
  if (fits) {
    std::memcpy(static_cast<uint8_t*>(to.buf) + s * field.slot_bytes + t * field.step_bytes, from.buf,
                static_cast<size_t>(field.step_bytes));
  }
  PyBuffer_Release(&from);
  return fits;
}

}  // namespace actors
}  // namespace gear_jax
