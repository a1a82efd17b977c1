// The parts of the Python module that are bound in files of their own.
#pragma once

#include <nanobind/nanobind.h>

namespace tandem {

// Dense matrices, attention and small row-wise operations. After ExpertEngine, whose threads they use.
void bind_dense(nanobind::module_& m);

}  // namespace tandem
