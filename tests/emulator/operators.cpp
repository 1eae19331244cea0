// torch's operators for CUDA, run by the CPU's kernels in the order of the emulated device's streams.
//
// Device memory is memory of this process, so that a CPU tensor can view it. Outputs are allocated at once, with the
// sizes that the operator returns for zeros; the work goes to the current stream, or into the capture that it is in.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <functional>
#include <iostream>
#include <set>

using Work = std::function<void()>;
using Values = std::vector<c10::IValue>;
using Tensors = std::vector<at::Tensor>;
using Change = std::function<at::Tensor(const at::Tensor&)>;

extern "C" void emulated_ask(cudaStream_t stream, Work* work);

namespace {

// Operators that run no kernel, return views, or have no kernel on the CPU.
constexpr const char* kLeft[] = {"as_strided", "copy_", "cudnn", "_cudnn", "_efficient", "empty", "_flash",
                                 "is_pinned", "is_set_to", "_local_scalar_dense", "_pin_memory", "record_stream",
                                 "_reshape_alias", "resize", "_scaled_dot_product", "set_", "unfold", "view"};
// The sizes of these operators' results depend on values: the host waits for them, as it does with CUDA.
const std::set<std::string> kByValue = {"aten::nonzero",  "aten::masked_select", "aten::_unique2",
                                        "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave"};

c10::IValue changed(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isDevice()) return c10::Device(c10::kCPU);
  if (value.isGenerator()) return {};
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorList()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      list.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

void collect(const c10::IValue& value, Tensors& found) {
  if (value.isTensor()) found.push_back(value.toTensor());
  if (value.isTensorList())
    for (const at::Tensor& tensor : value.toTensorList()) found.push_back(tensor);
  if (value.isOptionalTensorList())
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      if (tensor) found.push_back(*tensor);
}

bool elsewhere(const at::Tensor& tensor) { return !tensor.defined() || !tensor.is_cuda(); }

at::Tensor viewed(const at::Tensor& tensor) {
  if (elsewhere(tensor)) return tensor;
  auto view = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::dtype(tensor.scalar_type()));
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) view.unsafeGetTensorImpl()->set_wrapped_number(true);
  return view;
}

at::Tensor zeros_for(const at::Tensor& tensor) {
  if (elsewhere(tensor)) return tensor;
  auto zeros = at::empty_strided(tensor.sizes(), tensor.strides(), at::dtype(tensor.scalar_type()));
  if (zeros.numel()) memset(zeros.data_ptr(), 0, zeros.storage().nbytes());
  return zeros;
}

Values all(const Values& values, const Change& change) {
  Values result;
  for (auto& value : values) result.push_back(changed(value, change));
  return result;
}

Values computed(const c10::OperatorHandle& op, Values values) {
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(&values);
  return values;
}

// Enqueue work that cannot fail: an operator's error about bad values is only printed, as with CUDA.
void ask(cudaStream_t stream, std::string name, Work work) {
  emulated_ask(stream, new Work([name = std::move(name), work = std::move(work)] {
    try {
      work();
    } catch (const std::exception& error) {
      std::cerr << "[emulated] " << name << ": " << error.what() << std::endl;
    }
  }));
}

bool writes(const c10::FunctionSchema& schema) {
  bool any = false;
  for (auto& argument : schema.arguments()) any |= argument.alias_info() && argument.alias_info()->isWrite();
  for (auto& result : schema.returns()) any &= result.alias_info() != nullptr;
  return any;
}

// Whether an operator's results, or their sizes, depend on values, so that the host waits for them.
bool waits(const c10::FunctionSchema& schema, const Values& arguments) {
  for (auto& result : schema.returns())
    if (!result.type()->isSubtypeOf(*c10::TensorType::get()) && result.type()->kind() != c10::TypeKind::ListType)
      return true;
  auto& name = schema.name();
  Tensors tensors;
  for (auto& argument : arguments) collect(argument, tensors);
  bool masked = std::any_of(tensors.begin() + !tensors.empty(), tensors.end(), [](auto& tensor) {
    return tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
  });
  return kByValue.count(name) || (name == "aten::index" && masked);
}

// Write into arguments of the operator, whose sizes an `out=` may change.
void write(const c10::OperatorHandle& op, Values arguments, cudaStream_t stream, Values& results) {
  auto& schema = op.schema();
  size_t outputs = 0;
  for (size_t index = 0; index < arguments.size(); index++) {
    if (!schema.arguments()[index].is_out() || !arguments[index].isTensor()) continue;
    auto wanted = computed(op, all(arguments, zeros_for))[outputs++].toTensor();
    auto output = arguments[index].toTensor();
    if (output.sizes() != wanted.sizes()) output.resize_(wanted.sizes());
  }
  for (auto& result : schema.returns())
    for (size_t index = 0; index < arguments.size(); index++) {
      auto* alias = schema.arguments()[index].alias_info();
      if (alias && alias->beforeSets() == result.alias_info()->beforeSets()) results.push_back(arguments[index]);
    }
  ask(stream, schema.name(), [op, views = all(arguments, viewed)] { computed(op, views); });
}

void give(const c10::OperatorHandle& op, Values arguments, c10::Device device, cudaStream_t stream, Values& results) {
  Values sample;
  if (waits(op.schema(), arguments)) {
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    sample = computed(op, all(arguments, viewed));
  } else {
    sample = computed(op, all(arguments, zeros_for));
  }
  std::vector<Tensors> places;
  for (auto& value : sample) {
    Tensors views;
    results.push_back(changed(value, [&](const at::Tensor& like) {
      if (!like.defined()) return like;
      auto made = at::empty_strided(like.sizes(), like.strides(), at::dtype(like.scalar_type()).device(device));
      views.push_back(viewed(made));
      return made;
    }));
    places.push_back(views);
  }
  ask(stream, op.schema().name(), [op, places, views = all(arguments, viewed)] {
    auto values = computed(op, views);
    at::AutoDispatchBelowADInplaceOrView below;
    for (size_t index = 0; index < places.size(); index++) {
      Tensors found;
      collect(values[index], found);
      found.erase(std::remove_if(found.begin(), found.end(), [](auto& it) { return !it.defined(); }), found.end());
      for (size_t each = 0; each < places[index].size(); each++) at::Tensor(places[index][each]).copy_(found[each]);
    }
  });
}

void emulate(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  Values arguments(stack->end() - op.schema().arguments().size(), stack->end());
  stack->resize(stack->size() - arguments.size());
  Tensors tensors;
  for (auto& argument : arguments) collect(argument, tensors);
  auto place = std::find_if_not(tensors.begin(), tensors.end(), elsewhere);
  auto device = place == tensors.end() ? c10::Device(c10::kCUDA, c10::cuda::current_device()) : place->device();
  c10::cuda::CUDAGuard guard(device);
  auto stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  if (writes(op.schema()))
    write(op, std::move(arguments), stream, *stack);
  else
    give(op, std::move(arguments), device, stream, *stack);
}

// Between equal layouts torch calls the runtime's copy; else it would run a kernel.
at::Tensor& copied(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  bool plain = self.scalar_type() == source.scalar_type() && self.sizes() == source.sizes() &&
               self.strides() == source.strides() && self.is_non_overlapping_and_dense() && !source.is_conj() &&
               !source.is_neg();
  if (elsewhere(self) || elsewhere(source) || plain) return at::native::copy_(self, source, non_blocking);
  c10::cuda::CUDAGuard guard(source.device());
  auto stream = c10::cuda::getCurrentCUDAStream(source.device().index()).stream();
  ask(stream, "copy_", [to = viewed(self), from = viewed(source)] {
    at::AutoDispatchBelowADInplaceOrView below;
    at::Tensor(to).copy_(from);
  });
  return self;
}

bool left(const c10::OperatorHandle& op) {
  for (auto& result : op.schema().returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  std::string name = op.schema().name().substr(6);
  return name != "unfold_backward" && std::any_of(std::begin(kLeft), std::end(kLeft),
                                                  [&](const char* start) { return name.rfind(start, 0) == 0; });
}

}  // namespace

// Replace CUDA's kernels by the CPU's. Returns the number of operators.
extern "C" int emulate_operators() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  int count = 0;
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (name.name.rfind("aten::", 0) != 0 || !op || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) ||
        !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || left(*op))
      continue;
    auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&emulate>());
    count++;
  }
  library.impl("copy_", torch::CppFunction::makeFromUnboxedFunction(&copied));
  return count;
}
