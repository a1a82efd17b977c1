// The only file that knows Python: it exposes the kernels as the module tandem.kernels._native.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cpu_features.hpp"

namespace nb = nanobind;

NB_MODULE(_native, m) {
  nb::class_<tandem::CpuFeatures>(m, "CpuFeatures")
      .def_ro("vendor", &tandem::CpuFeatures::vendor)
      .def_ro("instruction_sets", &tandem::CpuFeatures::instruction_sets)
      .def_ro("l1_data_bytes", &tandem::CpuFeatures::l1_data_bytes)
      .def_ro("l2_bytes", &tandem::CpuFeatures::l2_bytes)
      .def_ro("l3_bytes", &tandem::CpuFeatures::l3_bytes);
  m.def("detect_cpu_features", &tandem::detect_cpu_features);
}
