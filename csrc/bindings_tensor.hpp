// Tensors as the bindings take them: device, type, sizes and address. Bindings request values by
// name, type and count before they read or write anything.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "attention.hpp"
#include "recurrent.hpp"
#include "tensor_ops.hpp"
#include "values.hpp"

namespace tandem {

// Types of a tensor's values. The first five are those of ElementType.
enum class Element : int { kFp32, kBf16, kInt64, kInt32, kBool, kFp16, kByte, kOther };

// A torch tensor, or an object with Python's buffer protocol. It does not keep the memory alive.
// Methods that return parts of it throw a TypeError that says what was found.
class Tensor {
 public:
  static constexpr int kMostDims = 8;

  // Returns false, without a Python error, if the object is not a tensor.
  bool read(PyObject* object) noexcept;

  int dims() const { return dims_; }
  // Negative numbers count from the last dimension; a missing dimension has size 1.
  std::int64_t size(int dim) const;
  std::int64_t stride(int dim) const;
  std::int64_t count() const;
  std::int64_t element_bytes() const { return element_bytes_; }
  Element element() const { return element_; }
  bool has_gaps() const;

  // Returns `count` contiguous values.
  template <typename T>
  T* dense(const char* name, std::int64_t count) const {
    return static_cast<T*>(values(name, element_of<std::remove_const_t<T>>(), count,
                                  !std::is_const_v<T>));
  }
  void* values(const char* name, Element element, std::int64_t count, bool is_written = false) const;
  void* values(const char* name, ValueType type, std::int64_t count, bool is_written = false) const {
    return values(name, element_of(type), count, is_written);
  }
  // Returns `bytes` contiguous bytes of any type.
  std::uint8_t* memory(const char* name, std::int64_t bytes, bool is_written = false) const;
  // Returns values in host memory with any strides; checks `sizes`, of which -1 is any size.
  void* strided(const char* name, Element element, std::initializer_list<std::int64_t> sizes,
                bool is_written = false) const;
  void* strided(const char* name, ValueType type, std::initializer_list<std::int64_t> sizes) const {
    return strided(name, element_of(type), sizes);
  }
  void require_host(const char* name, bool is_written = false) const;
  // Returns the address for any strides.
  void* data(const char* name, bool is_written = false) const {
    require_host(name, is_written);
    return data_;
  }
  void require_dims(const char* name, int dims) const;

  // Accepts fp32 and bf16; token_type accepts fp16 too.
  ValueType value_type(const char* name) const;
  ValueType token_type(const char* name) const;
  ElementType element_type(const char* name) const;

  [[noreturn]] void refuse(const char* name, const std::string& expected) const;

 private:
  template <typename T>
  static constexpr Element element_of() {
    if constexpr (std::is_same_v<T, float>) return Element::kFp32;
    if constexpr (std::is_same_v<T, std::int64_t>) return Element::kInt64;
    if constexpr (std::is_same_v<T, std::int32_t>) return Element::kInt32;
    return Element::kByte;
  }
  static constexpr Element element_of(ValueType type) {
    return type == ValueType::kFp32   ? Element::kFp32
           : type == ValueType::kBf16 ? Element::kBf16
                                      : Element::kFp16;
  }
  bool read_torch(PyObject* object, bool is_on_host);
  bool read_buffer(PyObject* object);
  std::string described() const;

  std::uint8_t* data_ = nullptr;
  Element element_ = Element::kOther;
  bool is_on_host_ = true, is_read_only_ = false;
  int dims_ = 0;
  std::int64_t element_bytes_ = 1;
  std::array<std::int64_t, kMostDims> sizes_{}, strides_{};
};

using MaybeTensor = std::optional<Tensor>;

// Values of an optional tensor; null if it is missing.
template <typename T>
T* dense_or_null(const MaybeTensor& tensor, const char* name, std::int64_t count) {
  return tensor ? tensor->dense<T>(name, count) : nullptr;
}

// (tokens, heads, dim) with a contiguous last dimension; -1 in `heads` or `dim`: any size.
HeadView heads_of(const Tensor& x, const char* name, ValueType type, std::int64_t tokens,
                  std::int64_t heads, std::int64_t dim);

// Refuses numbers of a call from Python. Throws std::invalid_argument.
[[noreturn]] void refuse_call(const std::string& sentence);
void require(bool is_met, const char* expected);

}  // namespace tandem

namespace nanobind::detail {

template <>
struct type_caster<tandem::Tensor> {
  NB_TYPE_CASTER(tandem::Tensor, const_name("Tensor"))
  bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
    return value.read(source.ptr());
  }
};

}  // namespace nanobind::detail
