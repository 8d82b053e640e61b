// ShardedStep for Python; Communicator's own methods that run one stand in bindings.cpp.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "../from_python.h"
#include "sharded_step.h"
#include "team.h"

namespace py = pybind11;

namespace pk {
namespace {

double copy_gradient(std::uintptr_t to, std::uintptr_t from, std::uint64_t count, int dtype,
                     int threads, bool stream) {
  const std::uint64_t size = size_of(Dtype(dtype));
  threads = useful_threads(count * size, threads);
  std::vector<double> largest(std::size_t(threads), 0.0);
  run_threads(threads, [&](int thread, int of) {
    const Range part = share_of({0, count * size}, of, thread);
    largest[std::size_t(thread)] =
        kernels().copy(Dtype(dtype), pointer<std::byte>(from) + part.begin,
                       pointer<std::byte>(to) + part.begin, part.size() / size, stream);
  });
  return *std::max_element(largest.begin(), largest.end());
}

}  // namespace

void bind_adam(py::module_& module) {
  py::class_<ShardedStep, std::shared_ptr<ShardedStep>>(module, "ShardedStep")
      .def(py::init<std::shared_ptr<TensorList>, bool>(), py::arg("shared"), py::arg("averaged"))
      .def("add_parameter",
           [](ShardedStep& self, int dtype, bool stochastic, int in_norm,
              std::ptrdiff_t param_stride, std::ptrdiff_t grad_stride) {
             StepParameter p{};
             p.dtype = Dtype(dtype);
             p.stochastic = stochastic;
             p.in_norm = InNorm(in_norm);
             p.param_stride = param_stride;
             p.grad_stride = grad_stride;
             self.parameters.push_back(p);
           })
      .def("add_piece",
           [](ShardedStep& self, std::uint32_t parameter, std::uint32_t number, std::uint64_t first,
              std::uint64_t count, std::uintptr_t master, int kind, const Addresses3& moments,
              const Addresses3& scales) {
             self.pieces.push_back({parameter, number, first, count, pointer<float>(master),
                                    moments_of(kind, moments, scales)});
           })
      // For every parameter (address, address of the gradient or 0, its dtype, index of a setting),
      // and the settings (beta1, beta2, decay, step size, 1/sqrt(bias2), eps, step count,
      // maximize).
      .def("set",
           [](ShardedStep& self,
              const std::vector<std::tuple<std::uintptr_t, std::uintptr_t, int, std::uint32_t>>&
                  parameters,
              const std::vector<std::tuple<double, double, double, double, double, double,
                                           std::uint64_t, bool>>& settings) {
             if (parameters.size() != self.parameters.size()) {
               throw std::invalid_argument("one entry for each parameter");
             }
             for (std::size_t i = 0; i < parameters.size(); ++i) {
               const auto& [param, grad, dtype, setting] = parameters[i];
               StepParameter& p = self.parameters[i];
               p.param = pointer(param);
               p.grad = pointer(grad);
               p.grad_dtype = Dtype(dtype);
               p.setting = setting;
             }
             self.settings.clear();
             for (const auto& [b1, b2, decay, size, bias2, eps, count, maximize] : settings) {
               self.settings.push_back({{b1, b2, decay, size, bias2, eps}, count, maximize});
             }
           })
      .def_property_readonly(
          "squares", [](const ShardedStep& s) { return std::pair(s.squares, s.split_squares); })
      .def_property_readonly("traffic", [](const ShardedStep& s) {
        return std::pair(s.bytes_read(), s.bytes_written());
      });
  // Copy `count` elements, past the caches if asked; the largest magnitude, infinity where
  // something is not finite.
  module.def("copy_gradient", copy_gradient, py::call_guard<py::gil_scoped_release>());
  module.def("peer_strides", [](const TensorList& list) {
    std::vector<std::ptrdiff_t> strides;
    for (const Span& span : list.spans()) strides.push_back(span.stride);
    return strides;
  });
}

}  // namespace pk
