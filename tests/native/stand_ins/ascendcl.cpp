// SPDX-License-Identifier: Apache-2.0
// libascendcl for a machine without an NPU: device memory is host memory, streams are threads.
//
// Only what torch_npu needs to hold tensors, copy them, order streams and launch kernels. A missing call stops the
// process with its name (npu_build.py generates those).
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>
#include <acl/acl_rt.h>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <new>
#include <vector>

#include "notes.h"
#include "streams.h"

namespace stand_in {
namespace {

constexpr aclError kBadParameter = 107000;
constexpr aclError kBadDevice = 107001;
constexpr aclError kNoContext = 107002;
constexpr aclError kNoMemory = 207001;
constexpr int kMaxDevices = 16;
constexpr int kVectorCores = 40;
constexpr int kUnwritten = 0xCD;  // contents of fresh memory, which no program may rely on
constexpr size_t kPage = size_t{2} << 20;

// Process-wide state lives until the process ends: torch_npu's own threads still call in while it exits.
struct Device {
  Stream own_stream;
  char context = 0;
};

struct Pages {  // physical memory
  int file;
};

struct Reserved {
  void* room;
  size_t size;
};

struct State {
  std::mutex lock;
  std::map<uintptr_t, size_t> allocations;
  std::map<uintptr_t, Reserved> reserved;
  std::map<uintptr_t, size_t> mapped;
  std::map<int, std::unique_ptr<Device>> devices;
  std::map<Stream*, int> streams;  // and their devices
  std::map<void*, std::shared_ptr<Recording>> graphs;
  std::mutex words;
  std::condition_variable written;  // a word that a stream waits for
};

State& state() {
  static State* const all = new State;
  return *all;
}

thread_local int current_device = 0;
thread_local bool device_is_set = false;

int device_count() {
  return number_of("STAND_IN_DEVICES", 2);
}

// Notes the device that is current in a thread which uses memory, a stream or an event; -1 if it has set none. The
// device itself goes by its context: it takes the current one's, whichever device the thread means.
void note_use(const char* call) {
  if (!notes_wanted()) return;
  const int index = device_is_set ? current_device : -1;
  note("use " + std::to_string(syscall(SYS_gettid)) + " " + std::to_string(index) + " " + call);
}

Device& device(int index) {
  const std::lock_guard<std::mutex> hold(state().lock);
  auto& found = state().devices[index];
  if (!found) found = std::make_unique<Device>();
  return *found;
}

aclError allocate(void** at, size_t size) {
  // Aligned as on the device: to 512 bytes.
  const size_t rounded = (size + 511) / 512 * 512;
  *at = std::aligned_alloc(512, rounded ? rounded : 512);
  if (*at == nullptr) return kNoMemory;
  std::memset(*at, kUnwritten, rounded);
  const std::lock_guard<std::mutex> hold(state().lock);
  state().allocations[reinterpret_cast<uintptr_t>(*at)] = size;
  return ACL_SUCCESS;
}

aclError release(void* at) {
  {
    const std::lock_guard<std::mutex> hold(state().lock);
    if (state().allocations.erase(reinterpret_cast<uintptr_t>(at)) == 0) return kBadParameter;
  }
  std::free(at);
  return ACL_SUCCESS;
}

// Neighbouring pages are one allocation: a copy may cross from one to the next. The caller holds the state's lock.
void add_allocation(uintptr_t start, size_t size) {
  auto& all = state().allocations;
  auto after = all.upper_bound(start);
  if (after != all.end() && start + size == after->first && state().mapped.count(after->first)) {
    size += after->second;
    after = all.erase(after);
  }
  if (after != all.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == start && state().mapped.count(before->first)) {
      before->second += size;
      return;
    }
  }
  all[start] = size;
}

void remove_allocation(uintptr_t start, size_t size) {
  auto& all = state().allocations;
  const auto found = std::prev(all.upper_bound(start));
  const uintptr_t first = found->first, end = found->first + found->second;
  all.erase(found);
  if (first < start) all[first] = start - first;
  if (start + size < end) all[start + size] = end - (start + size);
}

struct Event {
  std::mutex lock;
  std::shared_ptr<Mark> mark;          // of the last record
  std::weak_ptr<Recording> recording;  // the capture in which it was recorded

  std::shared_ptr<Mark> last() {
    const std::lock_guard<std::mutex> hold(lock);
    return mark;
  }
};

}  // namespace

Stream& stream_of(void* handle) {
  return handle ? *static_cast<Stream*>(handle) : device(current_device).own_stream;
}

Allocation allocation_of(const void* at) {
  const auto address = reinterpret_cast<uintptr_t>(at);
  const std::lock_guard<std::mutex> hold(state().lock);
  auto after = state().allocations.upper_bound(address);
  if (after == state().allocations.begin()) return {nullptr, 0};
  --after;
  if (address >= after->first + after->second) return {nullptr, 0};
  return {reinterpret_cast<char*>(after->first), after->second};
}

namespace {

size_t allocated() {
  const std::lock_guard<std::mutex> hold(state().lock);
  size_t sum = 0;
  for (const auto& [start, size] : state().allocations) sum += size;
  return sum;
}

bool is_allocated(const void* at, size_t size) {
  const Allocation found = allocation_of(at);
  return found.start != nullptr && static_cast<const char*>(at) + size <= found.start + found.size;
}

}  // namespace
}  // namespace stand_in

using namespace stand_in;  // NOLINT: the functions below are C

extern "C" {

aclError aclInit(const char*) {
  return ACL_SUCCESS;
}
aclError aclFinalize() {
  return ACL_SUCCESS;
}
const char* aclGetRecentErrMsg() {
  return "the stand-in for libascendcl keeps no messages";
}
const char* aclrtGetSocName() {
  return "Ascend910B1";
}
void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}
aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) {
  *value = 0;
  return ACL_SUCCESS;
}
aclError aclrtSetSysParamOpt(aclSysParamOpt, int64_t) {
  return ACL_SUCCESS;
}
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) {
  return ACL_SUCCESS;
}
aclError aclrtPeekAtLastError(aclrtLastErrLevel) {
  return ACL_SUCCESS;
}
aclError aclrtGetLastError(aclrtLastErrLevel) {
  return ACL_SUCCESS;
}

// ---- devices

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(device_count());
  return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t index) {
  if (index < 0 || index >= device_count() || index >= kMaxDevices) return kBadDevice;
  current_device = index;
  device_is_set = true;
  return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t* index) {
  *index = current_device;
  return device_is_set ? ACL_SUCCESS : kNoContext;
}

aclError aclrtResetDevice(int32_t) {
  return ACL_SUCCESS;
}

aclError aclrtGetCurrentContext(aclrtContext* context) {
  *context = &device(current_device).context;
  return device_is_set ? ACL_SUCCESS : kNoContext;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  for (int index = 0; index < device_count(); ++index) {
    if (&device(index).context == context) return aclrtSetDevice(index);
  }
  return kBadParameter;
}

aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return ACL_SUCCESS;
}

aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t* value) {
  *value = kVectorCores;
  return ACL_SUCCESS;
}
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t* value) {
  *value = kVectorCores;
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType, uint32_t* value) {
  *value = kVectorCores;
  return ACL_SUCCESS;
}
aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType, uint32_t* value) {
  *value = kVectorCores;
  return ACL_SUCCESS;
}
aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return ACL_SUCCESS;
}
aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) {
  return ACL_SUCCESS;
}
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) {
  return ACL_SUCCESS;
}
aclError aclrtSetOpWaitTimeout(uint32_t) {
  return ACL_SUCCESS;
}
aclError aclrtSetOpExecuteTimeOut(uint32_t) {
  return ACL_SUCCESS;
}

// ---- memory

aclError aclrtMalloc(void** at, size_t size, aclrtMemMallocPolicy) {
  return allocate(at, size);
}
aclError aclrtMallocAlign32(void** at, size_t size, aclrtMemMallocPolicy) {
  return allocate(at, size);
}
aclError aclrtMallocHost(void** at, size_t size) {
  return allocate(at, size);
}
aclError aclrtMallocHostWithCfg(void** at, uint64_t size, aclrtMallocConfig*) {
  return allocate(at, size);
}
aclError aclrtFree(void* at) {
  return release(at);
}
aclError aclrtFreeHost(void* at) {
  return release(at);
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  *total = size_t{16} << 30;
  *free = *total - allocated();
  return ACL_SUCCESS;
}

aclError aclrtMemcpy(void* dst, size_t room, const void* src, size_t size, aclrtMemcpyKind kind) {
  note_use(__func__);
  if (size > room || (kind == ACL_MEMCPY_DEVICE_TO_HOST && !is_allocated(src, size))) return kBadParameter;
  std::memmove(dst, src, size);
  return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void* dst, size_t room, const void* src, size_t size, aclrtMemcpyKind, aclrtStream stream) {
  note_use(__func__);
  if (size > room) return kBadParameter;
  stream_of(stream).submit([=] { std::memmove(dst, src, size); });
  return ACL_SUCCESS;
}

aclError aclrtMemset(void* at, size_t room, int32_t value, size_t size) {
  note_use(__func__);
  if (size > room) return kBadParameter;
  std::memset(at, value, size);
  return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void* at, size_t room, int32_t value, size_t size, aclrtStream stream) {
  note_use(__func__);
  if (size > room) return kBadParameter;
  stream_of(stream).submit([=] { std::memset(at, value, size); });
  return ACL_SUCCESS;
}

aclError aclrtPointerGetAttributes(const void* at, aclrtPtrAttributes* attributes) {
  std::memset(attributes, 0, sizeof *attributes);
  (void)at;
  return ACL_SUCCESS;
}

// ---- virtual memory: addresses are reserved first, and get memory page by page

aclError aclrtReserveMemAddress(void** at, size_t size, size_t, void*, uint64_t) {
  void* room = mmap(nullptr, size + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return kNoMemory;
  *at = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(room) + kPage - 1) / kPage * kPage);
  const std::lock_guard<std::mutex> hold(state().lock);
  state().reserved[reinterpret_cast<uintptr_t>(*at)] = {room, size + kPage};
  return ACL_SUCCESS;
}

aclError aclrtReleaseMemAddress(void* at) {
  const std::lock_guard<std::mutex> hold(state().lock);
  const auto found = state().reserved.find(reinterpret_cast<uintptr_t>(at));
  if (found == state().reserved.end()) return kBadParameter;
  munmap(found->second.room, found->second.size);
  state().reserved.erase(found);
  return ACL_SUCCESS;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t size, const aclrtPhysicalMemProp*, uint64_t) {
  const int file = memfd_create("stand-in", MFD_CLOEXEC);
  if (file < 0) return kNoMemory;
  if (ftruncate(file, static_cast<off_t>(size)) != 0) {
    close(file);
    return kNoMemory;
  }
  *handle = reinterpret_cast<aclrtDrvMemHandle>(new Pages{file});
  return ACL_SUCCESS;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  auto* pages = reinterpret_cast<Pages*>(handle);
  close(pages->file);
  delete pages;
  return ACL_SUCCESS;
}

aclError aclrtMapMem(void* at, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t) {
  const int file = reinterpret_cast<Pages*>(handle)->file;
  const auto start = static_cast<off_t>(offset);
  if (mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, start) == MAP_FAILED) return kNoMemory;
  std::memset(at, kUnwritten, size);
  const std::lock_guard<std::mutex> hold(state().lock);
  state().mapped[reinterpret_cast<uintptr_t>(at)] = size;
  add_allocation(reinterpret_cast<uintptr_t>(at), size);
  return ACL_SUCCESS;
}

aclError aclrtUnmapMem(void* at) {
  const std::lock_guard<std::mutex> hold(state().lock);
  const auto found = state().mapped.find(reinterpret_cast<uintptr_t>(at));
  if (found == state().mapped.end()) return kBadParameter;
  const size_t size = found->second;
  state().mapped.erase(found);
  remove_allocation(reinterpret_cast<uintptr_t>(at), size);
  constexpr int kNothing = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return mmap(at, size, PROT_NONE, kNothing, -1, 0) == MAP_FAILED ? kNoMemory : ACL_SUCCESS;
}

// ---- streams

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  note_use(__func__);
  auto* made = new Stream;
  *stream = made;
  const std::lock_guard<std::mutex> hold(state().lock);
  state().streams[made] = current_device;
  return ACL_SUCCESS;
}
aclError aclrtCreateStream(aclrtStream* stream) {
  return aclrtCreateStreamWithConfig(stream, 0, 0);
}
aclError aclrtDestroyStream(aclrtStream stream) {
  {
    const std::lock_guard<std::mutex> hold(state().lock);
    state().streams.erase(static_cast<Stream*>(stream));
  }
  delete static_cast<Stream*>(stream);
  return ACL_SUCCESS;
}
aclError aclrtDestroyStreamForce(aclrtStream stream) {
  return aclrtDestroyStream(stream);
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
  note_use(__func__);
  stream_of(stream).synchronize();
  return ACL_SUCCESS;
}
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) {
  return aclrtSynchronizeStream(stream);
}

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  note_use(__func__);
  *status = stream_of(stream).idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = static_cast<int32_t>(reinterpret_cast<uintptr_t>(stream) >> 4 & 0x7fffff);
  return ACL_SUCCESS;
}

aclError aclrtLaunchCallback(aclrtCallback callback, void* data, aclrtCallbackBlockType, aclrtStream stream) {
  stream_of(stream).submit([=] { callback(data); });
  return ACL_SUCCESS;
}

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* data) {
  stream_of(stream).submit([=] { function(data); });
  return ACL_SUCCESS;
}

// ---- events

aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) {
  *event = new Event;
  return ACL_SUCCESS;
}
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) {
  return aclrtCreateEventWithFlag(event, flag);
}
aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<Event*>(event);
  return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream handle_of_stream) {
  note_use(__func__);
  auto* event = static_cast<Event*>(handle);
  auto& stream = stream_of(handle_of_stream);
  auto mark = stream.mark();
  const std::lock_guard<std::mutex> hold(event->lock);
  event->mark = std::move(mark);
  event->recording = stream.recording;
  return ACL_SUCCESS;
}
aclError aclrtResetEvent(aclrtEvent, aclrtStream) {
  return ACL_SUCCESS;
}

aclError aclrtStreamWaitEvent(aclrtStream handle_of_stream, aclrtEvent handle) {
  note_use(__func__);
  auto* event = static_cast<Event*>(handle);
  const auto mark = event->last();
  if (!mark) return ACL_SUCCESS;
  auto& stream = stream_of(handle_of_stream);
  // What waits for a stream that is captured is captured with it.
  if (auto recording = event->recording.lock()) stream.recording = recording;
  stream.enqueue([mark] { mark->wait(); });
  return ACL_SUCCESS;
}

// ---- words in memory that streams write and wait for: torch_npu's external events

aclError aclrtValueWrite(void* at, uint64_t value, uint32_t, aclrtStream stream) {
  stream_of(stream).submit_at_replay([=] {
    const std::lock_guard<std::mutex> hold(state().words);
    *static_cast<uint64_t*>(at) = value;
    state().written.notify_all();
  });
  return ACL_SUCCESS;
}

aclError aclrtValueWait(void* at, uint64_t value, uint32_t mode, aclrtStream stream) {
  constexpr uint32_t kAtLeast = 0, kEqual = 1;
  if (mode != kAtLeast && mode != kEqual) return kBadParameter;
  stream_of(stream).submit_at_replay([=] {
    const auto* word = static_cast<const volatile uint64_t*>(at);
    std::unique_lock<std::mutex> hold(state().words);
    state().written.wait(hold, [&] { return mode == kEqual ? *word == value : *word >= value; });
  });
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeEvent(aclrtEvent event) {
  note_use(__func__);
  if (auto mark = static_cast<Event*>(event)->last()) mark->wait();
  return ACL_SUCCESS;
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  note_use(__func__);
  const auto mark = static_cast<Event*>(event)->last();
  *status = !mark || mark->done() ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) {
  const auto mark = static_cast<Event*>(event)->last();
  *status = !mark || mark->done() ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent, aclrtEvent) {
  *milliseconds = 0;
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeDevice() {
  note_use(__func__);
  std::vector<std::shared_ptr<Mark>> marks{device(current_device).own_stream.mark()};
  {
    const std::lock_guard<std::mutex> hold(state().lock);
    for (const auto& [stream, index] : state().streams) {
      if (index == current_device) marks.push_back(stream->mark());
    }
  }
  for (const auto& mark : marks) mark->wait();
  return ACL_SUCCESS;
}
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) {
  return aclrtSynchronizeDevice();
}

// ---- graphs

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode) {
  stream_of(stream).recording = std::make_shared<Recording>();
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus* status, aclmdlRI* graph) {
  const auto& recording = stream_of(stream).recording;
  *status = recording ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  if (graph) *graph = recording.get();
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI* graph) {
  const auto recording = stream_of(stream).recording;
  if (!recording) return kBadParameter;
  *graph = recording.get();
  stream_of(stream).recording = nullptr;
  const std::lock_guard<std::mutex> hold(state().lock);
  state().graphs[*graph] = recording;
  for (auto& [other, index] : state().streams) {
    if (other->recording == recording) other->recording = nullptr;
  }
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  static thread_local aclmdlRICaptureMode current = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
  std::swap(*mode, current);
  return ACL_SUCCESS;
}

aclError aclmdlRIExecuteAsync(aclmdlRI graph, aclrtStream stream) {
  const std::lock_guard<std::mutex> hold(state().lock);
  const auto found = state().graphs.find(graph);
  if (found == state().graphs.end()) return kBadParameter;
  stream_of(stream).submit([recording = found->second] {
    for (const auto& step : recording->steps) step->run();
  });
  return ACL_SUCCESS;
}

aclError aclmdlRIDestroy(aclmdlRI graph) {
  const std::lock_guard<std::mutex> hold(state().lock);
  return state().graphs.erase(graph) ? ACL_SUCCESS : kBadParameter;
}

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream) {
  const auto& recording = stream_of(stream).recording;
  if (!recording) return kBadParameter;
  recording->group = recording->steps.size();
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp* group) {
  const auto& recording = stream_of(stream).recording;
  if (!recording) return kBadParameter;
  *group = new Steps(recording->steps.begin() + static_cast<std::ptrdiff_t>(recording->group), recording->steps.end());
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp group) {
  const auto& steps = *static_cast<Steps*>(group);
  stream_of(stream).updating.assign(steps.begin(), steps.end());
  return ACL_SUCCESS;
}

// All operators of the group have got new arguments.
aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream) {
  return stream_of(stream).updating.empty() ? ACL_SUCCESS : kBadParameter;
}

// ---- compile options and profiling: nothing to do

aclError aclSetCompileopt(aclCompileOpt, const char*) {
  return ACL_SUCCESS;
}
uint64_t MsprofGetHashId(const char*, size_t) {
  return 0;
}
int32_t MsprofRegisterCallback(uint32_t, void*) {
  return 0;
}
int32_t MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) {
  return 0;
}
int32_t MsprofReportApi(uint32_t, const void*) {
  return 0;
}
int32_t MsprofReportCompactInfo(uint32_t, const void*, uint32_t) {
  return 0;
}
uint64_t MsprofSysCycleTime() {
  return 0;
}

}  // extern "C"
