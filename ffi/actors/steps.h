// Steps out of Python into a ring: the usual case of Writer.append, without a Python object for each part of it.
#ifndef GEAR_JAX_FFI_ACTORS_STEPS_H_
#define GEAR_JAX_FFI_ACTORS_STEPS_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

namespace gear_jax {
namespace actors {

// Columns that steps are written to. Holds on to their memory.
class Steps {
 public:
  // names: of the columns, paths in nested dicts ("a/b"). columns: C-contiguous arrays [R, T, *shape].
  Steps(const std::vector<std::string>& names, nanobind::list columns);
  ~Steps();
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;

  // Writes a step, nested dicts of arrays, to step t of slot s. False, having written some columns or none, if it is
  // not exactly that: other keys, shapes, dtypes, strides, or another container.
  bool Write(nanobind::handle step, int64_t s, int64_t t) const;

 private:
  struct Field {
    Py_buffer buffer;  // [R, T, *shape]
    int64_t slot_bytes, step_bytes;
  };
  struct Node {
    nanobind::object key;
    int field = -1;  // of a leaf
    std::vector<Node> below;
  };
  bool WriteNode(const Node& node, PyObject* value, int64_t s, int64_t t) const;
  bool WriteField(const Field& field, PyObject* value, int64_t s, int64_t t) const;

  std::vector<Field> fields_;
  Node root_;
  bool usable_ = true;  // whether Python can describe the columns' dtypes to others
};

}  // namespace actors
}  // namespace gear_jax

#endif  // GEAR_JAX_FFI_ACTORS_STEPS_H_
