// parallelkit._cuda: see parallelkit/_cuda.pyi, which says what everything here means.
#include <algorithm>
#include <sstream>

#include "../from_python.h"
#include "memory.h"
#include "sharded_step.h"

namespace py = pybind11;

namespace pk {
namespace {

// Its classes are others than those of the same names in parallelkit._cpu.
const py::module_local kLocal;

cudaStream_t stream_of(std::uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

std::string unavailable() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  cudaGetLastError();
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

std::pair<int, int> versions() {
  int runtime = 0, driver = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaDriverGetVersion(&driver);
  return {runtime, driver};
}

py::dict device_facts(int device) {
  cudaDeviceProp found{};
  check(cudaGetDeviceProperties(&found, device), "cudaGetDeviceProperties");
  std::string uuid;
  for (const char byte : found.uuid.bytes) {
    constexpr const char* kDigits = "0123456789abcdef";
    uuid += kDigits[(byte >> 4) & 15];
    uuid += kDigits[byte & 15];
  }
  py::dict facts;
  facts["name"] = std::string(found.name);
  facts["uuid"] = uuid;
  facts["capability"] = found.major * 10 + found.minor;
  facts["multiprocessors"] = found.multiProcessorCount;
  facts["bytes"] = found.totalGlobalMem;
  facts["vmm_fd"] = int(exports_descriptors(device));
  facts["multicast"] = int(has_multicast(device));
  return facts;
}

bool can_access_peer(int device, int peer) {
  if (device == peer) return true;
  int can = 0;
  check(cudaDeviceCanAccessPeer(&can, device, peer), "cudaDeviceCanAccessPeer");
  return can != 0;
}

int max_blocks(int device) {
  const OnDevice guard(device);
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  return multiprocessors *
         std::min({blocks_per_multiprocessor<ReduceCall>(), blocks_per_multiprocessor<GatherCall>(),
                   blocks_per_multiprocessor<NormCall>()});
}

Entry entry_of(const Header& header, std::uintptr_t weight_at = 0, std::uintptr_t total_at = 0) {
  return {header, pointer<double>(weight_at), pointer<double>(total_at)};
}

// setup.py says them as one word, 80_90_100.
py::tuple architectures() {
#define PK_TEXT_OF(word) #word
#define PK_TEXT(word) PK_TEXT_OF(word)
  std::istringstream words(PK_TEXT(PK_CUDA_ARCHS));
  py::list found;
  for (std::string word; std::getline(words, word, '_');) found.append(std::stoi(word));
  return py::tuple(found);
}

using Rows =
    std::vector<std::tuple<std::uintptr_t, std::uintptr_t, int, std::uint32_t, std::uintptr_t>>;
using Settings = std::vector<std::tuple<double, double, double, double, double, bool>>;

void set_step(ShardedStep& step, const Rows& rows, const Settings& settings) {
  std::vector<ShardedStep::Row> made;
  for (const auto& [param, grad, dtype, setting, steps] : rows) {
    made.push_back({pointer(param), pointer(grad), Dtype(dtype), setting, pointer<float>(steps)});
  }
  std::vector<ShardedStep::Setting> chosen;
  for (const auto& [lr, beta1, beta2, eps, decay, maximize] : settings) {
    chosen.push_back({{lr, beta1, beta2, eps, decay}, maximize});
  }
  step.set(made, chosen);
}

void bind_memory(py::module_& module) {
  py::class_<Memory, std::shared_ptr<Memory>>(module, "Memory", kLocal)
      .def_static("plain", &Memory::plain)
      .def_static("shareable", &Memory::shareable)
      .def_static("open_ipc",
                  [](int device, const py::bytes& handle, std::uint64_t bytes) {
                    return Memory::open_ipc(device, handle, bytes);
                  })
      .def_static("open_fd", &Memory::open_fd)
      .def("ipc_handle", [](const Memory& memory) { return py::bytes(memory.ipc_handle()); })
      .def("export_fd", &Memory::export_fd)
      .def("close", &Memory::close)
      .def_property_readonly("address", &Memory::address)
      .def_property_readonly("nbytes", &Memory::bytes);
}

void bind_step(py::module_& module) {
  py::class_<ShardedStep>(module, "ShardedStep", kLocal)
      .def(py::init<std::shared_ptr<Communicator>, bool, bool>(), py::arg("communicator"),
           py::arg("averaged"), py::arg("multicast") = false)
      .def("add_parameter",
           [](ShardedStep& self, int dtype, bool stochastic, int in_norm, bool shared_param,
              bool shared_grad) {
             self.add_parameter(
                 {Dtype(dtype), stochastic, InNorm(in_norm), shared_param, shared_grad});
           })
      .def("add_piece",
           [](ShardedStep& self, std::uint32_t parameter, std::uint32_t number, std::uint64_t first,
              std::uint64_t count, std::uintptr_t master, int kind, const Addresses3& moments,
              const Addresses3& scales) {
             self.add_piece({parameter, number, first, count, 0, pointer<float>(master),
                             moments_of(kind, moments, scales)});
           })
      .def("set", &set_step)
      .def_property_readonly("table_bytes", &ShardedStep::table_bytes)
      .def("upload", [](ShardedStep& self, std::uintptr_t table, std::uintptr_t stream) {
        self.upload(pointer(table), stream_of(stream));
      });
}

void bind_communicator(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> no_gil;  // virtual ranks wait for each other
  py::class_<Communicator, std::shared_ptr<Communicator>>(module, "Communicator", kLocal)
      .def(py::init([](int rank, int size, int device, const std::vector<std::uintptr_t>& controls,
                       int blocks, double timeout_seconds, int algorithm,
                       std::shared_ptr<VirtualRanks> virtual_ranks) {
             return std::make_shared<Communicator>(rank, size, device, controls, blocks,
                                                   timeout_seconds, Algorithm(algorithm),
                                                   std::move(virtual_ranks));
           }),
           py::arg("rank"), py::arg("size"), py::arg("device"), py::arg("controls"),
           py::arg("blocks"), py::arg("timeout_seconds"), py::arg("algorithm"),
           py::arg("virtual") = nullptr)
      .def_static("control_bytes", &Communicator::control_bytes)
      .def("add_segment", &Communicator::add_segment, py::arg("addresses"), py::arg("nbytes"),
           py::arg("multicast") = 0)
      .def("remove_segment", &Communicator::remove_segment)
      .def("tensors", &Communicator::tensors)
      .def(
          "all_reduce",
          [](Communicator& self, const TensorList& list, const Header& header,
             std::uintptr_t stream, std::uintptr_t weight_at, std::uintptr_t total_at) {
            self.all_reduce(list, entry_of(header, weight_at, total_at), stream_of(stream));
          },
          py::arg("tensors"), py::arg("call"), py::arg("stream"), py::kw_only(),
          py::arg("weight_at") = 0, py::arg("total_at") = 0, no_gil)
      .def(
          "reduce_scatter",
          [](Communicator& self, const TensorList& list, std::uintptr_t shard,
             std::uint64_t unit_bytes, const Header& header, std::uintptr_t stream,
             std::uintptr_t weight_at, std::uintptr_t total_at) {
            self.reduce_scatter(list, pointer(shard), unit_bytes,
                                entry_of(header, weight_at, total_at), stream_of(stream));
          },
          py::arg("tensors"), py::arg("shard"), py::arg("unit_bytes"), py::arg("call"),
          py::arg("stream"), py::kw_only(), py::arg("weight_at") = 0, py::arg("total_at") = 0,
          no_gil)
      .def(
          "all_gather",
          [](Communicator& self, const TensorList& list, std::uintptr_t shard,
             std::uint64_t unit_bytes, const Header& header, std::uintptr_t stream) {
            self.all_gather(list, pointer(shard), unit_bytes, entry_of(header), stream_of(stream));
          },
          py::arg("tensors"), py::arg("shard"), py::arg("unit_bytes"), py::arg("call"),
          py::arg("stream"), no_gil)
      .def(
          "gradient_norm",
          [](Communicator& self, const ShardedStep& step, const Header& header,
             std::uintptr_t stream, std::uintptr_t squares_at) {
            self.gradient_norm(step, entry_of(header), pointer<double>(squares_at),
                               stream_of(stream));
          },
          py::arg("step"), py::arg("call"), py::arg("stream"), py::kw_only(), py::arg("squares_at"),
          no_gil)
      .def(
          "sharded_step",
          [](Communicator& self, const ShardedStep& step, const Header& header,
             std::uintptr_t stream, std::uintptr_t squares_at, double max_norm, bool skip_nonfinite,
             std::uintptr_t report_at) {
            if (!squares_at && (max_norm > 0.0 || skip_nonfinite)) {
              throw std::invalid_argument(
                  "Communicator.sharded_step: max_norm and skip_nonfinite want squares_at");
            }
            self.sharded_step(
                step, entry_of(header),
                {pointer<double>(squares_at), max_norm, skip_nonfinite, pointer<double>(report_at)},
                stream_of(stream));
          },
          py::arg("step"), py::arg("call"), py::arg("stream"), py::kw_only(),
          py::arg("squares_at") = 0, py::arg("max_norm") = 0.0, py::arg("skip_nonfinite") = false,
          py::arg("report_at") = 0, no_gil)
      .def(
          "barrier",
          [](Communicator& self, std::uintptr_t stream) { self.barrier(stream_of(stream)); },
          py::arg("stream"), no_gil)
      .def("status",
           [](Communicator& self) {
             const auto [outcome, rank] = self.status();
             return std::pair(int(outcome), rank);
           })
      .def("abort",
           [](Communicator& self, int outcome, int rank) { self.abort(Outcome(outcome), rank); })
      .def("close", &Communicator::close);
}

}  // namespace
}  // namespace pk

PYBIND11_MODULE(_cuda, module) {
  using namespace pk;

  module.attr("interface") = 3;  // parallelkit/ops.py wants the same number
  module.attr("outcomes") = outcome_names();
  module.attr("algorithms") = py::make_tuple("auto", "one-shot", "direct", "ring");
  module.attr("max_ranks") = kMaxRanks;
  module.attr("max_virtual_ranks") = kMaxVirtualRanks;
  module.attr("architectures") = architectures();

  module.def("device_count", &device_count);
  module.def("unavailable", &unavailable);
  module.def("versions", &versions);
  module.def("device_facts", &device_facts);
  module.def("can_access_peer", &can_access_peer);
  module.def("max_blocks", &max_blocks);
  module.def("choose_algorithm",
             [](std::uint64_t bytes, int size) { return int(choose_algorithm(bytes, size)); });

  py::class_<VirtualRanks, std::shared_ptr<VirtualRanks>>(module, "VirtualRanks", kLocal)
      .def(py::init<int>());
  py::class_<TensorList>(module, "TensorList", kLocal)
      .def_property_readonly("nbytes", &TensorList::bytes)
      .def_property_readonly("in_place",
                             [](const TensorList& list) { return list.placement() != 0; })
      .def_property_readonly("table_bytes", &TensorList::table_bytes)
      .def("upload", [](TensorList& self, std::uintptr_t table, std::uintptr_t stream) {
        self.upload(pointer(table), stream_of(stream));
      });
  bind_memory(module);
  bind_communicator(module);
  bind_step(module);
}
