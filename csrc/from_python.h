// What the bindings of both extensions take from Python and give to it alike.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>

#include "adam.h"
#include "protocol.h"

namespace pk {

template <class T = std::byte>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Addresses of exp_avg, exp_avg_sq and max_exp_avg_sq, or of their scales; 0 where there is none.
using Addresses3 = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t>;

inline MomentStorage moments_of(int kind, const Addresses3& moments, const Addresses3& scales) {
  const auto [m, v, x] = moments;
  const auto [ms, vs, xs] = scales;
  return {Moments(kind),      pointer<void>(m),   pointer<void>(v),  pointer<void>(x),
          pointer<float>(ms), pointer<float>(vs), pointer<float>(xs)};
}

// An outcome as Python gets it is an index into these.
inline pybind11::tuple outcome_names() {
  pybind11::list names;
  for (const char* name : kOutcomeNames) names.append(pybind11::str(name));
  return names;
}

}  // namespace pk

// What a rank says when it enters, a parallelkit.transport.Call, is a Header here. Read by hand,
// because small collectives wait for it: the caster of std::tuple takes half a microsecond more.
template <>
struct pybind11::detail::type_caster<pk::Header> {
  PYBIND11_TYPE_CASTER(pk::Header, const_name("Call"));

  bool load(handle call, bool) {
    if (!PyTuple_Check(call.ptr()) || PyTuple_GET_SIZE(call.ptr()) != 6) return false;
    const auto field = [&](Py_ssize_t index) { return PyTuple_GET_ITEM(call.ptr(), index); };
    value.signature = PyLong_AsUnsignedLongLong(field(0));
    value.layout = PyLong_AsUnsignedLongLong(field(1));
    value.weight = PyFloat_AsDouble(field(2));
    value.scale = PyFloat_AsDouble(field(3));
    value.reduction = pk::Reduction(PyLong_AsLong(field(4)));
    value.fault = PyObject_IsTrue(field(5)) != 0;
    if (!PyErr_Occurred()) return true;
    PyErr_Clear();
    return false;
  }
};
