#include "bindings_tensor.hpp"

#include <cstring>
#include <stdexcept>

namespace nb = nanobind;

namespace tandem {
namespace {

constexpr const char* kNames[] = {"float32", "bfloat16", "int64", "int32",
                                  "bool",    "float16",  "uint8", "another type"};
constexpr std::int64_t kBytes[] = {4, 2, 8, 4, 1, 2, 1, 1};

// Python's names and torch's types, looked up once. They are never freed.
struct Known {
  PyObject *is_cpu, *dtype, *shape, *stride, *data_ptr, *itemsize;
  std::array<PyObject*, 7> types;

  Known()
      : is_cpu(PyUnicode_InternFromString("is_cpu")),
        dtype(PyUnicode_InternFromString("dtype")),
        shape(PyUnicode_InternFromString("shape")),
        stride(PyUnicode_InternFromString("stride")),
        data_ptr(PyUnicode_InternFromString("data_ptr")),
        itemsize(PyUnicode_InternFromString("itemsize")) {
    const nb::object torch = nb::module_::import_("torch");
    for (std::size_t i = 0; i < types.size(); ++i)
      types[i] = nb::object(torch.attr(kNames[i])).release().ptr();
  }
};

const Known& known() {
  static const Known* found = new Known();
  return *found;
}

nb::object attribute(PyObject* object, PyObject* name) {
  return nb::steal(PyObject_GetAttr(object, name));
}

nb::object called(PyObject* object, PyObject* name) {
  return nb::steal(PyObject_CallMethodObjArgs(object, name, nullptr));
}

// Reads up to kMostDims sizes from a tuple; -1 if it is not a tuple, or too long.
int read_numbers(const nb::object& tuple, std::array<std::int64_t, Tensor::kMostDims>& numbers) {
  if (!tuple.is_valid() || !PyTuple_Check(tuple.ptr())) return -1;
  const Py_ssize_t count = PyTuple_Size(tuple.ptr());
  if (count > Tensor::kMostDims) return -1;
  for (Py_ssize_t i = 0; i < count; ++i) {
    numbers[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple.ptr(), i));
    if (numbers[i] < 0) return -1;
  }
  return static_cast<int>(count);
}

}  // namespace

bool Tensor::read(PyObject* object) noexcept {
  try {
    const nb::object is_cpu = attribute(object, known().is_cpu);
    PyErr_Clear();
    const bool is_read = is_cpu.is_valid() ? read_torch(object, is_cpu.ptr() == Py_True)
                                           : read_buffer(object);
    PyErr_Clear();
    return is_read;
  } catch (nb::python_error&) {  // without torch there are no torch tensors
    return false;
  }
}

bool Tensor::read_torch(PyObject* object, bool is_on_host) {
  const Known& names = known();
  const nb::object dtype = attribute(object, names.dtype);
  if (!dtype.is_valid()) return false;
  int type = 0;
  while (type < 7 && names.types[type] != dtype.ptr()) ++type;
  element_ = static_cast<Element>(type);
  element_bytes_ = kBytes[type];
  if (element_ == Element::kOther) {
    const nb::object bytes = attribute(dtype.ptr(), names.itemsize);
    element_bytes_ = bytes.is_valid() ? PyLong_AsLongLong(bytes.ptr()) : 0;
    if (element_bytes_ <= 0) return false;
  }
  dims_ = read_numbers(attribute(object, names.shape), sizes_);
  if (dims_ < 0) return false;
  is_on_host_ = is_on_host;
  if (!is_on_host_) return true;  // the address of a device tensor is not needed
  const nb::object data = called(object, names.data_ptr);
  if (!data.is_valid() || read_numbers(called(object, names.stride), strides_) != dims_)
    return false;
  data_ = static_cast<std::uint8_t*>(PyLong_AsVoidPtr(data.ptr()));
  return data_ != nullptr || count() == 0;
}

bool Tensor::read_buffer(PyObject* object) {
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view, PyBUF_STRIDED_RO | PyBUF_FORMAT) != 0) return false;
  bool is_read = view.ndim <= kMostDims && view.itemsize > 0;
  if (is_read) {
    const std::string format = view.format ? view.format : "B";
    element_bytes_ = view.itemsize;
    element_ = format == "B"                                           ? Element::kByte
               : (format == "l" || format == "q") && view.itemsize == 8 ? Element::kInt64
               : format == "f"                                         ? Element::kFp32
                                                                       : Element::kOther;
    dims_ = view.ndim;
    is_read_only_ = view.readonly != 0;
    data_ = static_cast<std::uint8_t*>(view.buf);
    for (int i = 0; i < dims_; ++i) {
      sizes_[i] = view.shape[i];
      strides_[i] = view.strides[i] / view.itemsize;
      is_read &= view.strides[i] >= 0 && view.strides[i] % view.itemsize == 0;
    }
  }
  PyBuffer_Release(&view);
  return is_read;
}

std::int64_t Tensor::size(int dim) const {
  const int at = dim < 0 ? dims_ + dim : dim;
  return at < 0 || at >= dims_ ? 1 : sizes_[at];
}

std::int64_t Tensor::stride(int dim) const {
  const int at = dim < 0 ? dims_ + dim : dim;
  return at < 0 || at >= dims_ ? 0 : strides_[at];
}

std::int64_t Tensor::count() const {
  std::int64_t count = 1;
  for (int i = 0; i < dims_; ++i) count *= sizes_[i];
  return count;
}

bool Tensor::has_gaps() const {
  std::int64_t inner = 1;
  if (count() == 0) return false;
  for (int i = dims_ - 1; i >= 0; --i) {
    if (sizes_[i] == 1) continue;
    if (strides_[i] != inner) return true;
    inner *= sizes_[i];
  }
  return false;
}

void Tensor::require_host(const char* name, bool is_written) const {
  if (!is_on_host_) refuse(name, "one in host memory");
  if (is_written && is_read_only_) refuse(name, "a writable one");
}

void Tensor::require_dims(const char* name, int dims) const {
  if (dims_ != dims) refuse(name, std::to_string(dims) + " dimensions");
}

void* Tensor::values(const char* name, Element element, std::int64_t count, bool is_written) const {
  require_host(name, is_written);
  if (element_ != element || this->count() != count || has_gaps())
    refuse(name,
           std::to_string(count) + " contiguous values of " + kNames[static_cast<int>(element)]);
  return data_;
}

std::uint8_t* Tensor::memory(const char* name, std::int64_t bytes, bool is_written) const {
  require_host(name, is_written);
  if (count() * element_bytes_ != bytes || has_gaps())
    refuse(name, std::to_string(bytes) + " contiguous bytes");
  return data_;
}

void* Tensor::strided(const char* name, Element element,
                      std::initializer_list<std::int64_t> sizes, bool is_written) const {
  require_host(name, is_written);
  bool is_alike = element_ == element && dims_ == static_cast<int>(sizes.size());
  std::string expected;
  int dim = 0;
  for (const std::int64_t size : sizes) {
    is_alike = is_alike && (size < 0 || sizes_[dim] == size);
    expected += (dim++ ? ", " : "") + (size < 0 ? "any" : std::to_string(size));
  }
  if (!is_alike) refuse(name, "(" + expected + ") of " + kNames[static_cast<int>(element)]);
  return data_;
}

ValueType Tensor::value_type(const char* name) const {
  if (element_ != Element::kFp32 && element_ != Element::kBf16)
    refuse(name, "float32 or bfloat16");
  return static_cast<ValueType>(element_);
}

ValueType Tensor::token_type(const char* name) const {
  return element_ == Element::kFp16 ? ValueType::kFp16 : value_type(name);
}

ElementType Tensor::element_type(const char* name) const {
  if (element_ > Element::kBool) refuse(name, "float32, bfloat16, int64, int32 or bool");
  return static_cast<ElementType>(element_);
}

std::string Tensor::described() const {
  std::string text = "(";
  for (int i = 0; i < dims_; ++i) text += (i ? ", " : "") + std::to_string(sizes_[i]);
  text += std::string(") of ") + kNames[static_cast<int>(element_)];
  if (!is_on_host_) return text + " on a device";
  return text + (is_read_only_ ? ", read-only" : has_gaps() ? " with gaps" : "");
}

void Tensor::refuse(const char* name, const std::string& expected) const {
  const std::string sentence = std::string(name) + " is " + described() + ", expected " + expected;
  throw nb::type_error(sentence.c_str());
}

HeadView heads_of(const Tensor& x, const char* name, ValueType type, std::int64_t tokens,
                  std::int64_t heads, std::int64_t dim) {
  const void* data = x.strided(name, type, {tokens, heads, dim});
  if (x.size(2) > 1 && x.stride(2) != 1) x.refuse(name, "contiguous values for each head");
  return {data, x.stride(0), x.stride(1)};
}

void refuse_call(const std::string& sentence) { throw std::invalid_argument(sentence); }

void require(bool is_met, const char* expected) {
  if (!is_met) refuse_call(std::string("expected ") + expected);
}

}  // namespace tandem
