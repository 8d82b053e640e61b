// parallelkit._cpu: the native collectives on raw pointers. parallelkit/ops.py is its only user.
#include <pybind11/functional.h>

#include "../from_python.h"
#include "sharded_step.h"
#include "worker.h"

namespace py = pybind11;

namespace pk {

void bind_adam(py::module_& module);  // bindings_adam.cpp

namespace {

// Whether Ctrl-C was pressed; the KeyboardInterrupt is then pending in Python.
bool interrupted() {
  const py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// One rank's slab of a segment as a Python buffer; tensors made from it keep the mapping.
struct Slab {
  std::shared_ptr<Segment> segment;
  int rank;
};

using Reply = std::tuple<int, int, double>;  // what Python gets of a Result

py::list bytes_of(const std::vector<std::string>& messages) {
  py::list all;
  for (const std::string& each : messages) all.append(py::bytes(each));
  return all;
}

// A communicator and the thread that runs what was submitted to it.
class Rank {
 public:
  Rank(std::shared_ptr<Segment> control, int rank, int size, const std::vector<int>& pids,
       int cores, std::uint64_t slot_bytes, double timeout_seconds, bool ring)
      : comm(std::move(control), rank, size, pids, cores, slot_bytes, timeout_seconds, ring) {}

  template <class Work>
  Reply now(Work work) {
    Result result;
    {
      const py::gil_scoped_release no_gil;
      if (const auto task = worker.pending()) wait_for(*task);
      result = work(comm, Communicator::Interrupted(interrupted));
    }
    return checked(result);
  }

  template <class Work>
  std::shared_ptr<Task> later(std::string told, Work work) {
    return worker.submit([this, told = std::move(told), work] {
      const auto collective = [&](const auto& stop) { return work(comm, stop); };
      return comm.explained(collective, told);
    });
  }

  std::pair<Reply, py::list> wait(Task& task) {
    Result result;
    {
      const py::gil_scoped_release no_gil;
      result = wait_for(task);
    }
    return {checked(result), bytes_of(result.heard)};
  }

  Communicator comm;
  Worker worker;

 private:
  Result wait_for(Task& task) {
    return task.wait(interrupted, [this] { comm.break_group(Outcome::interrupted, comm.rank()); });
  }
  static Reply checked(const Result& result) {
    if (PyErr_Occurred()) throw py::error_already_set();
    return {int(result.outcome), result.rank, result.total};
  }
};

}  // namespace
}  // namespace pk

PYBIND11_MODULE(_cpu, module) {
  using namespace pk;

  module.attr("outcomes") = outcome_names();

  py::class_<Segment, std::shared_ptr<Segment>>(module, "Segment")
      .def_static(
          "create",
          [](const std::string& folder, const py::bytes& secret, int size, std::uint64_t bytes) {
            const int descriptor = Segment::create(folder, secret, size, bytes);
            return std::pair(Segment::path_of(descriptor), descriptor);
          })
      .def_static("open",
                  [](const std::string& path, const py::bytes& secret, int size,
                     std::uint64_t bytes) { return Segment::open(path, secret, size, bytes); })
      .def_static("map", &Segment::map, py::call_guard<py::gil_scoped_release>())
      .def_static("local", &Segment::local)
      .def("slab", [](std::shared_ptr<Segment> segment, int rank) {
        return Slab{std::move(segment), rank};
      });

  py::class_<Slab>(module, "Slab", py::buffer_protocol()).def_buffer([](Slab& slab) {
    return py::buffer_info(reinterpret_cast<std::uint8_t*>(slab.segment->slab(slab.rank)),
                           py::ssize_t(slab.segment->slab_bytes()));
  });

  // Those a small collective passes are local to the module, which makes them quicker to find.
  py::class_<TensorList, std::shared_ptr<TensorList>>(module, "TensorList", py::module_local());

  bind_adam(module);

  py::class_<Task, std::shared_ptr<Task>>(module, "Task").def("done", &Task::done);

  py::class_<Rank>(module, "Communicator", py::module_local())
      .def(py::init<std::shared_ptr<Segment>, int, int, const std::vector<int>&, int, std::uint64_t,
                    double, bool>(),
           py::arg("control"), py::arg("rank"), py::arg("size"), py::arg("pids"), py::arg("cores"),
           py::arg("slot_bytes"), py::arg("timeout_seconds"), py::arg("ring"))
      .def_static("control_bytes", &Communicator::control_bytes)
      .def("add_segment", [](Rank& self, const std::shared_ptr<Segment>& segment,
                             std::uint64_t name) { self.comm.add_segment(segment, name); })
      .def("tensors",
           [](Rank& self, const std::vector<py::tuple>& tensors) {  // address, bytes, dtype
             auto list = std::make_shared<TensorList>();
             for (const py::tuple& each : tensors) {
               list->add(pointer(each[0].cast<std::uintptr_t>()), each[1].cast<std::uint64_t>(),
                         Dtype(each[2].cast<int>()));
             }
             self.comm.locate(*list);
             return list;
           })
      .def("all_reduce",
           [](Rank& self, const TensorList& list, const Header& header, int threads) {
             return self.now([&](Communicator& comm, const Communicator::Interrupted& stop) {
               return comm.all_reduce(list, header, threads, stop);
             });
           })
      .def("start_all_reduce",
           [](Rank& self, std::shared_ptr<TensorList> list, const Header& header, int threads,
              std::string told) {
             return self.later(std::move(told), [=](Communicator& comm, const auto& stop) {
               return comm.all_reduce(*list, header, threads, stop);
             });
           })
      .def("wait", &Rank::wait)
      .def("reduce_scatter",
           [](Rank& self, const TensorList& list, std::uintptr_t shard, std::uint64_t element_bytes,
              const Header& header, int threads) {
             return self.now([&](Communicator& comm, const Communicator::Interrupted& stop) {
               return comm.reduce_scatter(list, pointer(shard), element_bytes, header, threads,
                                          stop);
             });
           })
      .def("start_reduce_scatter",
           [](Rank& self, std::shared_ptr<TensorList> list, std::uintptr_t shard,
              std::uint64_t element_bytes, const Header& header, int threads, std::string told) {
             return self.later(std::move(told), [=](Communicator& comm, const auto& stop) {
               return comm.reduce_scatter(*list, pointer(shard), element_bytes, header, threads,
                                          stop);
             });
           })
      .def("all_gather",
           [](Rank& self, const TensorList& list, std::uintptr_t shard, std::uint64_t element_bytes,
              const Header& header, int threads) {
             return self.now([&](Communicator& comm, const Communicator::Interrupted& stop) {
               return comm.all_gather(list, pointer(shard), element_bytes, header, threads, stop);
             });
           })
      .def("measure_gradient",
           [](Rank& self, ShardedStep& step, const Header& header, int threads) {
             return self.now([&](Communicator& comm, const Communicator::Interrupted& stop) {
               return step.measure(comm, header, threads, stop);
             });
           })
      .def("sharded_step",
           [](Rank& self, ShardedStep& step, const Header& header, int threads) {
             return self.now([&](Communicator& comm, const Communicator::Interrupted& stop) {
               return step.run(comm, header, threads, stop);
             });
           })
      .def("barrier",
           [](Rank& self) {
             return self.now([](Communicator& comm, const Communicator::Interrupted& stop) {
               return comm.barrier(stop);
             });
           })
      .def("exchange",
           [](Rank& self, const std::string& message, std::uint64_t subject) {
             std::vector<std::string> messages;
             const Reply reply =
                 self.now([&](Communicator& comm, const Communicator::Interrupted& stop) {
                   return comm.exchange(message, subject, messages, stop);
                 });
             return std::pair(reply, bytes_of(messages));
           })
      .def("leave", [](Rank& self) { self.comm.leave(); })
      .def_property_readonly("broken", [](const Rank& self) { return self.comm.broken(); })
      .def_property_readonly("traffic", [](const Rank& self) {
        const Traffic& traffic = self.comm.traffic();
        return py::make_tuple(traffic.read.load(), traffic.written.load(), traffic.staged.load());
      });

  module.def("kernels", [] { return std::string(kernels().name); });
  module.attr("max_ranks") = kMaxRanks;
  module.attr("interface") = 4;  // parallelkit/ops.py wants the same number
}
