// SPDX-License-Identifier: Apache-2.0
// The operators of the NPU on a machine without one: each runs as the CPU's operator, over the NPU's own memory.
//
// torch_npu's kernels end in libraries of CANN. `ascend_host::take` replaces one of them by a boxed kernel, which waits
// for the current stream, shows the operator the same bytes as CPU tensors, and puts new results into device memory.
// Operators unknown to torch (npu::, atb::) are defined in reference.py. An operator without a definition stops the
// process.
//
// With STAND_IN_LATE_US the paged cache is late: a stream's writes are there for its own operators at once, and land in
// the cache itself in the stream's tail. So a reader of the cache that does not wait for the stream finds old bytes,
// and a writer that does not wait is overwritten.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "notes.h"
#include "streams.h"

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;

bool on_npu(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

stand_in::Stream& current_stream(c10::DeviceIndex device) {
  return stand_in::stream_of(c10_npu::getCurrentNPUStream(device).stream());
}

// ---- late caches

class LateCache {
 public:
  LateCache(c10::Storage storage, stand_in::Stream* stream) : stream(stream), storage_(std::move(storage)) {}

  stand_in::Stream* const stream;

  // The cache as the stream's operators see it: the memory, which others write too (a prefill engine), with the
  // stream's own writes that have not landed. For one operator at a time.
  char* seen() {
    const std::lock_guard<std::mutex> hold(lock_);
    const char* bytes = truth();
    seen_.assign(bytes, bytes + storage_.nbytes());
    for (const auto& changes : tail_) put(*changes, seen_.data());
    before_ = seen_;
    return seen_.data();
  }

  // Queue an operator's changes in the stream's tail.
  void follow() {
    constexpr size_t kStep = 4096;
    auto changes = std::make_shared<Changes>();
    for (size_t at = 0; at < seen_.size(); at += kStep) {
      const size_t length = std::min(kStep, seen_.size() - at);
      if (std::memcmp(&seen_[at], &before_[at], length) == 0) continue;
      // Only the bytes that differ: another engine may be writing blocks beside them.
      for (size_t i = at; i < at + length;) {
        if (seen_[i] == before_[i]) {
          ++i;
          continue;
        }
        size_t end = i;
        while (end < at + length && seen_[end] != before_[end]) ++end;
        changes->push_back({i, {&seen_[i], &seen_[i] + (end - i)}});
        i = end;
      }
    }
    if (changes->empty()) return;
    {
      const std::lock_guard<std::mutex> hold(lock_);
      tail_.push_back(changes);
    }
    stream->submit_to_tail([this, storage = storage_] {
      const std::lock_guard<std::mutex> hold(lock_);
      put(*tail_.front(), truth());
      tail_.pop_front();
    });
  }

 private:
  struct Change {
    size_t offset;
    std::vector<char> bytes;
  };
  using Changes = std::vector<Change>;

  static void put(const Changes& changes, char* to) {
    for (const Change& change : changes) std::memcpy(to + change.offset, change.bytes.data(), change.bytes.size());
  }

  char* truth() const { return static_cast<char*>(storage_.mutable_data()); }

  c10::Storage storage_;
  std::mutex lock_;                            // of the changes that have not landed, and of their landing
  std::deque<std::shared_ptr<Changes>> tail_;  // by operator, in order
  std::vector<char> seen_, before_;            // for the running operator: with its writes, and without
};

class LateCaches {
 public:
  LateCaches() : wanted_(stand_in::number_of("STAND_IN_LATE_US", 0) > 0) {}

  bool wanted() const { return wanted_; }

  LateCache* find(const c10::Storage& storage) {
    if (!wanted_) return nullptr;
    const std::lock_guard<std::mutex> hold(lock_);
    const auto found = all_.find(storage.data());
    return found == all_.end() ? nullptr : found->second.get();
  }

  LateCache* make(const c10::Storage& storage, stand_in::Stream* stream) {
    const std::lock_guard<std::mutex> hold(lock_);
    auto& found = all_[storage.data()];
    if (!found) found = std::make_unique<LateCache>(storage, stream);
    return found.get();
  }

 private:
  const bool wanted_;
  std::mutex lock_;
  std::map<const void*, std::unique_ptr<LateCache>> all_;
};

LateCaches& late_caches() {
  static auto* const all = new LateCaches;
  return *all;
}

// ---- one call

// The same bytes as a CPU tensor, which keeps the NPU's storage alive.
Tensor host_view(const Tensor& tensor) {
  if (!on_npu(tensor)) return tensor;
  c10::Storage keep = tensor.storage();
  void* start = keep.mutable_data();
  LateCache* late = late_caches().find(keep);
  if (late != nullptr && late->stream == &current_stream(tensor.device().index())) start = late->seen();
  Tensor view = at::for_blob(start, tensor.sizes())
                    .strides(tensor.strides())
                    .storage_offset(tensor.storage_offset())
                    .deleter([keep](void*) {})
                    .options(at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU))
                    .make_tensor();
  if (tensor.is_conj()) view = view.conj();
  return tensor.is_neg() ? view._neg_view() : view;
}

// A copy in memory of the device, with the same strides.
Tensor device_copy(const Tensor& host, c10::Device device) {
  const Tensor plain = host.resolve_conj().resolve_neg();
  Tensor copy = at::empty_strided(plain.sizes(), plain.strides(), plain.options().device(device).pinned_memory(false));
  if (plain.numel() > 0) {
    int64_t extent = 1;
    for (int64_t d = 0; d < plain.dim(); ++d) extent += (plain.size(d) - 1) * plain.stride(d);
    std::memcpy(copy.data_ptr(), plain.const_data_ptr(), extent * plain.element_size());
  }
  return copy;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool ends_in(std::string_view end, std::string_view name) {
  return name.size() >= end.size() && name.substr(name.size() - end.size()) == end;
}

bool multiplies(const std::string& name) {
  for (const char* product :
       {"aten::matmul", "aten::linear", "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}) {
    if (name == product) return true;
  }
  return false;
}

std::string title(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// Notes an operator and the stream that runs it: the process's first one is 0.
void note_operator(const std::string& name, const stand_in::Stream& stream) {
  static std::mutex lock;
  static auto* const numbers = new std::map<const stand_in::Stream*, size_t>;
  size_t number;
  {
    const std::lock_guard<std::mutex> hold(lock);
    number = numbers->emplace(&stream, numbers->size()).first->second;
  }
  stand_in::note("operator " + name + " " + std::to_string(number));
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), first_(stack->size() - schema_.arguments().size()) {}

  void run() {
    look_at_arguments();
    if (!device_) return call_on_host();
    auto& stream = current_stream(device_->index());
    if (stand_in::notes_wanted()) note_operator(title(op_.operator_name()), stream);
    if (!stream.updating.empty()) return update(stream);
    stream.wait_without_tail();
    make_caches_late();
    call_on_host();
    const size_t results = stack_->size() - schema_.returns().size();
    for (size_t i = 0; i < schema_.returns().size(); ++i)
      (*stack_)[results + i] = for_device(i, (*stack_)[results + i]);
    resize_outputs();
    for (LateCache* cache : written_caches_) cache->follow();
    if (stream.recording) record(stream);
  }

  // As a step of a graph, with the stack of its capture: the results go to where they were then.
  void run_again(const Stack& results) {
    look_at_arguments();
    call_on_host();
    const size_t first = stack_->size() - results.size();
    for (size_t i = 0; i < results.size(); ++i) {
      const IValue& made = (*stack_)[first + i];
      if (made.isTensor()) {
        put_again(made.toTensor(), results[i].toTensor());
      } else if (made.isTensorList()) {
        const auto to = results[i].toTensorVector();
        const auto from = made.toTensorVector();
        for (size_t n = 0; n < from.size(); ++n) put_again(from[n], to[n]);
      }
    }
  }

 private:
  void look_at_arguments() {
    given_.assign(stack_->begin() + first_, stack_->end());
    for (const IValue& value : given_) look_for_device(value);
    if (device_ && !device_->has_index()) device_ = c10_npu::getCurrentNPUStream().device();
  }

  void call_on_host() {
    for (size_t i = 0; i < given_.size(); ++i) (*stack_)[first_ + i] = for_host(i);
    hosts_.assign(stack_->begin() + first_, stack_->end());
    if (multiplies(op_.operator_name().name)) {
      call_wide();
    } else {
      op_.callBoxed(stack_);
    }
  }

  // A new result goes into the memory of the captured one; what is a view of an argument, or was written, is there.
  void put_again(const Tensor& made, const Tensor& captured) {
    if (!made.defined() || !on_npu(captured)) return;
    for (const auto& [original, shown] : shown_) {
      if (shown.storage().data() == made.storage().data()) return;
    }
    host_view(captured).copy_(made);
  }

  void record(stand_in::Stream& stream);

  // The next step of a task group gets these arguments. Nothing runs; all results are arguments.
  void update(stand_in::Stream& stream);

  // In double precision, rounded once: so a row's product does not depend on the number of rows, nor an answer on its
  // batch.
  void call_wide() {
    const auto arguments = schema_.arguments().size();
    std::optional<at::ScalarType> narrow;
    for (size_t i = 0; i < arguments; ++i) {
      IValue& value = (*stack_)[first_ + i];
      if (!value.isTensor() || !at::isFloatingType(value.toTensor().scalar_type())) continue;
      if (!is_written(schema_.arguments()[i])) narrow = value.toTensor().scalar_type();
      value = value.toTensor().to(at::kDouble);
    }
    op_.callBoxed(stack_);
    for (size_t i = 0; i < arguments; ++i) {
      if (!hosts_[i].isTensor() || !is_written(schema_.arguments()[i])) continue;
      const Tensor out = hosts_[i].toTensor(), wide = (*stack_)[stack_->size() - 1].toTensor();
      if (out.sizes() != wide.sizes()) out.resize_(wide.sizes());
      out.copy_(wide);
    }
    IValue& result = (*stack_)[stack_->size() - 1];
    if (narrow) result = result.toTensor().to(*narrow);
  }

  void look_for_device(const IValue& value) {
    if (device_) return;
    if (value.isTensor()) {
      if (on_npu(value.toTensor())) device_ = value.toTensor().device();
    } else if (value.isDevice()) {
      if (value.toDevice().type() == c10::DeviceType::PrivateUse1) device_ = value.toDevice();
    } else if (value.isList()) {
      for (const IValue& item : value.toListRef()) look_for_device(item);
    }
  }

  void make_caches_late() {
    if (!late_caches().wanted()) return;
    auto* stream = &current_stream(device_->index());
    for (size_t i = 0; i < given_.size(); ++i) {
      const auto& argument = schema_.arguments()[i];
      if (!given_[i].isTensor() || !on_npu(given_[i].toTensor())) continue;
      const c10::Storage& storage = given_[i].toTensor().storage();
      // Not every operator that fills a cache declares that it writes: npu_kv_rmsnorm_rope_cache does not, nor does
      // npu_causal_conv1d_custom. An indexer's keys come by npu_scatter_nd_update_, and all of DeepSeek-V4's entries by
      // npu_scatter_nd_update_v2, which fill nothing else.
      const std::string& name = op_.operator_name().name;
      const bool scatters = ends_in("scatter_nd_update_", name) || ends_in("scatter_nd_update_v2", name);
      const bool named = ends_in("cache", argument.name()) && (ends_in("cache", name) || is_written(argument));
      const bool fills = named || (scatters && is_written(argument)) || ends_in("state", argument.name());
      if (!fills && !is_written(argument)) continue;
      LateCache* cache = fills ? late_caches().make(storage, stream) : late_caches().find(storage);
      if (cache != nullptr && cache->stream == stream) written_caches_.push_back(cache);
    }
  }

  IValue for_host(size_t i) {
    const IValue& value = given_[i];
    if (value.isTensor()) {
      const Tensor& tensor = value.toTensor();
      // An empty output will be resized, which a view of foreign memory cannot be.
      if (on_npu(tensor) && tensor.numel() == 0 && is_written(schema_.arguments()[i])) {
        return at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
      }
      return show(tensor);
    }
    if (value.isTensorList()) {
      std::vector<Tensor> views;
      for (const Tensor& tensor : value.toTensorVector()) views.push_back(show(tensor));
      return views;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> views;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList().vec()) {
        views.push_back(tensor ? std::optional<Tensor>(host_view(*tensor)) : std::nullopt);
      }
      return views;
    }
    if (value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1) return c10::Device(at::kCPU);
    if (value.isGenerator()) return {};  // the CPU's: torch.manual_seed seeds both
    return value;
  }

  Tensor show(const Tensor& tensor) {
    Tensor view = host_view(tensor);
    if (on_npu(tensor)) shown_.emplace_back(tensor, view);
    return view;
  }

  // A result: an argument that was written, a view of an argument, or new.
  IValue for_device(size_t i, const IValue& value) {
    const auto* alias = schema_.returns()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      for (size_t a = 0; a < given_.size(); ++a) {
        const auto* of_argument = schema_.arguments()[a].alias_info();
        if (of_argument != nullptr && *of_argument == *alias) return given_[a];
      }
    }
    if (value.isTensor()) return on_device(value.toTensor());
    if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(on_device(tensor));
      return tensors;
    }
    return value;
  }

  Tensor on_device(const Tensor& host) {
    if (!host.defined() || !host.device().is_cpu()) return host;
    for (const auto& [original, shown] : shown_) {
      if (shown.numel() == 0 || shown.storage().data() != host.storage().data()) continue;
      return at::as_strided(original, host.sizes(), host.strides(), host.storage_offset());
    }
    return device_copy(host, *device_);
  }

  void resize_outputs() {
    for (size_t a = 0; a < given_.size(); ++a) {
      if (!is_written(schema_.arguments()[a]) || !given_[a].isTensor()) continue;
      const Tensor original = given_[a].toTensor();
      if (!on_npu(original) || original.numel() != 0) continue;
      const Tensor host = hosts_[a].toTensor();
      if (host.sizes() == original.sizes()) continue;
      original.resize_(host.sizes());
      host_view(original).copy_(host);
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack* const stack_;
  const size_t first_;
  std::vector<IValue> given_, hosts_;             // the arguments, and as the CPU's operator gets them
  std::vector<std::pair<Tensor, Tensor>> shown_;  // the NPU's tensors among them, and their views
  std::vector<LateCache*> written_caches_;
  std::optional<c10::Device> device_;
};

// ---- graphs

// An operator of a graph. Its tensors stay alive as long as the graph.
class Operator : public stand_in::Step {
 public:
  Operator(c10::OperatorHandle op, std::vector<IValue> given, Stack results)
      : op(op), given_(std::move(given)), results_(std::move(results)) {}

  void run() override {
    const c10::InferenceMode no_gradients;
    const std::lock_guard<std::mutex> hold(lock_);
    Stack stack(given_);
    Call(op, &stack).run_again(results_);
  }

  void update(std::vector<IValue> given, Stack results) {
    const std::lock_guard<std::mutex> hold(lock_);
    given_ = std::move(given);
    results_ = std::move(results);
  }

  const c10::OperatorHandle op;

 private:
  std::mutex lock_;  // a replay may have begun when the update comes; the step then waits for an event
  std::vector<IValue> given_;
  Stack results_;
};

void Call::record(stand_in::Stream& stream) {
  Stack results(stack_->end() - static_cast<std::ptrdiff_t>(schema_.returns().size()), stack_->end());
  stream.recording->steps.push_back(std::make_shared<Operator>(op_, given_, std::move(results)));
}

void Call::update(stand_in::Stream& stream) {
  auto* step = dynamic_cast<Operator*>(stream.updating.front().get());
  TORCH_CHECK(step != nullptr && step->op == op_, "not the task group's next operator: ", title(op_.operator_name()));
  TORCH_CHECK(schema_.arguments().back().name() == "out", "a graph's operator with results of its own: ", schema_);
  const IValue& out = given_.back();
  Stack results;
  if (out.isTensorList()) {
    for (const Tensor& tensor : out.toTensorVector()) results.emplace_back(tensor);
  }
  TORCH_CHECK(results.size() == schema_.returns().size(), "not as many outputs as results: ", schema_);
  stack_->resize(first_);
  stack_->insert(stack_->end(), results.begin(), results.end());
  step->update(given_, std::move(results));
  stream.updating.pop_front();
}

// ---- taking over

std::mutex calls_lock;
std::map<std::string, int64_t>& calls() {
  static auto* const all = new std::map<std::string, int64_t>;
  return *all;
}

void on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  if (!op.hasComputedKernelForDispatchKey(DispatchKey::CPU)) {
    std::fprintf(stderr, "no reference for the operator %s\n", title(op.operator_name()).c_str());
    std::_Exit(74);
  }
  {
    const std::lock_guard<std::mutex> hold(calls_lock);
    ++calls()[title(op.operator_name())];
  }
  Call(op, stack).run();
}

c10::SafeKernelFunction* copy_of_torch_npu = nullptr;

// Plain copies between host and device stay torch_npu's: they go through streams.
void copy(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const Tensor& to = (*stack)[stack->size() - 3].toTensor();
  const Tensor& from = (*stack)[stack->size() - 2].toTensor();
  const bool plain = on_npu(to) != on_npu(from) && to.dtype() == from.dtype() && to.sizes() == from.sizes() &&
                     to.is_contiguous() && from.is_contiguous();
  if (plain) {
    copy_of_torch_npu->callBoxed(op, keys, stack);
  } else {
    on_host(op, keys, stack);
  }
}

void take(const std::string& name, const std::string& overload) {
  static auto* const registrations = new std::vector<c10::RegistrationHandleRAII>;
  auto& dispatcher = c10::Dispatcher::singleton();
  const c10::OperatorName full{name, overload};
  const auto op = dispatcher.findSchema(full);
  TORCH_CHECK(op.has_value(), "there is no operator ", title(full));
  const bool is_copy = name == "aten::copy_";
  if (is_copy) {
    copy_of_torch_npu = new c10::SafeKernelFunction(op->getComputedKernelForDispatchKey(DispatchKey::PrivateUse1));
  }
  auto kernel = is_copy ? c10::KernelFunction::makeFromBoxedFunction<&copy>()
                        : c10::KernelFunction::makeFromBoxedFunction<&on_host>();
  registrations->push_back(
      dispatcher.registerImpl(full, DispatchKey::PrivateUse1, std::move(kernel), std::nullopt, nullptr, "ascend_host"));
}

// Operators with a kernel for the NPU and a schema; `true` if their results are views of their arguments.
std::vector<std::tuple<std::string, std::string, bool>> operators() {
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<std::tuple<std::string, std::string, bool>> found;
  for (const auto& name : dispatcher.getAllOpNamesForDispatchKey(DispatchKey::PrivateUse1)) {
    const auto op = dispatcher.findSchema(name);
    if (!op) continue;
    bool view = false;
    for (const auto& result : op->schema().returns()) {
      view = view || (result.alias_info() != nullptr && !result.alias_info()->isWrite());
    }
    found.emplace_back(name.name, name.overload_name, view);
  }
  return found;
}

std::vector<std::tuple<std::string, int64_t>> counted() {
  const std::lock_guard<std::mutex> hold(calls_lock);
  return {calls().begin(), calls().end()};
}

}  // namespace

TORCH_LIBRARY(ascend_host, library) {
  library.def("host_view(Tensor tensor) -> Tensor", &host_view);
  library.def("take(str name, str overload) -> ()", &take);
  library.def("operators", &operators);  // a schema text cannot express a list of tuples
  library.def("counted", &counted);
}
