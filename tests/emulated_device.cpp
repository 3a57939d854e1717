// A device of PyTorch that lies in the memory of the CPU and computes there, but refuses to mix tensors as a GPU does.
//
// It is what PyTorch calls a private-use backend: it makes and views tensors by itself, and all else falls back to the
// kernels of the CPU, once it is sure that no tensor of another device is among the operands.

#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

namespace {

using at::Tensor;
using c10::SymIntArrayRef;
constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(KIND, 0);

// What a device consists of: memory, and a guard that says which one is current, and that nothing is waited for.

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* place = std::malloc(bytes > 0 ? bytes : 1);
    return {place, place, &std::free, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device device) const override { return device; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void grow(const c10::Storage& storage, size_t bytes) {
  auto larger = memory.allocate(bytes);
  std::memcpy(larger.get(), storage.data(), std::min(bytes, storage.nbytes()));
  storage.unsafeGetStorageImpl()->set_data_ptr(std::move(larger));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { grow(storage, bytes); }
};

// Tensors: made, viewed, copied and read

const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

Tensor empty(
    at::IntArrayRef size, std::optional<c10::ScalarType> type, std::optional<c10::Layout>, std::optional<c10::Device>,
    std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, KEYS, c10::dtype_or_default(type), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<c10::ScalarType> type, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, KEYS, c10::dtype_or_default(type));
}

Tensor as_strided(const Tensor& x, SymIntArrayRef size, SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) start = offset->expect_int();
  return at::cpu::as_strided(x, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

Tensor reshape_alias(const Tensor& x, SymIntArrayRef size, SymIntArrayRef stride) {
  return as_strided(x, size, stride, c10::SymInt(x.storage_offset()));
}

Tensor view(const Tensor& x, SymIntArrayRef size) {
  auto sides = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(size), x.numel());
  auto stride = at::detail::computeStride(x.sizes(), x.strides(), sides);
  TORCH_CHECK(stride.has_value(), "a tensor of other strides has no view of this size; use reshape");
  return at::cpu::as_strided(x, sides, *stride, x.storage_offset());
}

Tensor& set(Tensor& x, at::Storage storage, c10::SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::cpu::set_(
      x, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const Tensor& resize(const Tensor& x, SymIntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* impl = x.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t bytes = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (bytes > x.storage().nbytes()) grow(x.storage(), bytes);
  return x;
}

Tensor on_cpu(const Tensor& x) {  // the same memory
  if (!x.defined() || x.device().type() != KIND) return x;
  return at::from_blob(x.mutable_data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU).requires_grad(false));
}

Tensor on_device(const Tensor& x) { return x.defined() ? x.to(DEVICE) : x; }

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const Tensor& x) { return on_cpu(x).item(); }

// What is computed

void refuse_mixed(const std::vector<Tensor>& operands, const std::string& name) {
  bool here = false, elsewhere = false;
  for (const auto& x : operands) {
    if (!x.defined()) continue;
    if (x.device().type() == KIND) here = true;
    else if (x.dim() > 0) elsewhere = true;  // numbers may lie on the CPU
  }
  TORCH_CHECK(
      !(here && elsewhere), "Expected all tensors to be on the same device, but found at least two devices, emulated:0 ",
      "and cpu, in ", name);
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  std::vector<Tensor> operands;
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) operands.push_back(value.toTensor());
    else if (value.isTensorList()) for (const Tensor& x : value.toTensorList()) operands.push_back(x);
  }
  if (name.find("index") == std::string::npos) refuse_mixed(operands, name);  // indices may lie on the CPU
  at::native::cpu_fallback(op, stack);
}

Tensor convolution(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, SymIntArrayRef stride,
    SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding,
    c10::SymInt groups) {
  Tensor added = bias ? *bias : Tensor();
  refuse_mixed({x, weight, added}, "convolution");
  return on_device(at::convolution_symint(
      on_cpu(x), on_cpu(weight), on_cpu(added), stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& slope, const Tensor& x, const Tensor& weight, SymIntArrayRef stride, SymIntArrayRef padding,
    SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> wanted) {
  refuse_mixed({slope, x, weight}, "convolution_backward");
  std::vector<c10::SymInt> bias{slope.sym_size(1)};
  auto [of_x, of_weight, of_bias] = at::convolution_backward_symint(
      on_cpu(slope), on_cpu(x), on_cpu(weight), at::OptionalSymIntArrayRef(bias), stride, padding, dilation, transposed,
      output_padding, groups, wanted);
  return {on_device(of_x), on_device(of_weight), on_device(of_bias)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("view", &view);
  library.impl("set_.source_Storage_storage_offset", &set);
  library.impl("resize_", &resize);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
