// A CUDA runtime without a GPU: the functions that torch's CUDA build calls, done in this process's memory.
//
// Streams are threads, so that work is done some time after it was enqueued, in any order that events allow; captures
// are recorded and replayed; calls that CUDA refuses during a capture are refused. Kernels are not run: operators.cpp
// replaces them by the CPU's operators.
//
// EMULATED_DEVICES (2), EMULATED_MB for each (8192), EMULATED_DELAY_US: the longest pause before each piece of work.
// EMULATED_LOG=1 logs refused calls, and the kernels that were not run.

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
#define FAIL(code) return failed(code, __func__)

using Work = std::function<void()>;
using Lock = std::unique_lock<std::mutex>;
using Clock = std::chrono::steady_clock;

namespace {

long setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value ? atol(value) : otherwise;
}

constexpr int kMostDevices = 16;
constexpr size_t kFilled = 64 << 20;  // smaller memory is filled, so that no code relies on zeros
constexpr size_t kSmall = 4096;       // pageable copies up to so many bytes do not count: torch's own scalars
const int kDevices = setting("EMULATED_DEVICES", 2);
const size_t kBytes = static_cast<size_t>(setting("EMULATED_MB", 8192)) << 20;
const long kDelay = setting("EMULATED_DELAY_US", 0);
const bool kLog = getenv("EMULATED_LOG") != nullptr;

std::mutex everything;
std::condition_variable progress;
thread_local int current_device = 0;
thread_local bool has_context = false;  // the runtime creates a thread's context, the driver needs it
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

cudaError_t failed(cudaError_t code, const char* where) {
  if (kLog) fprintf(stderr, "[emulated] %s: error %d\n", where, code);
  return last_error = code;
}

struct Stream;

struct Capture {
  std::shared_ptr<std::vector<Work>> graph = std::make_shared<std::vector<Work>>();
  cudaStreamCaptureMode mode;
  std::thread::id thread = std::this_thread::get_id();
  unsigned long long id;
  bool invalid = false;
};

struct Stream {
  int device;
  int priority;
  std::deque<Work> queue;
  uint64_t asked = 0, done = 0;
  std::shared_ptr<Capture> capture;
  std::condition_variable wanted;
};

struct Event {
  Stream* stream = nullptr;  // none: never recorded
  uint64_t place = 0;
  std::shared_ptr<Capture> capture;
  Clock::time_point when;
};

using Graph = std::shared_ptr<std::vector<Work>>;

std::set<Stream*> streams;
Stream* defaults[kMostDevices] = {};
std::vector<std::shared_ptr<Capture>> captures;  // that have not ended
unsigned long long captures_begun = 0;

void serve(Stream* stream) {
  std::minstd_rand chance(reinterpret_cast<uintptr_t>(stream) >> 4);
  for (;;) {
    Work work;
    {
      Lock lock(everything);
      stream->wanted.wait(lock, [&] { return !stream->queue.empty(); });
      work = std::move(stream->queue.front());
      stream->queue.pop_front();
    }
    if (kDelay) std::this_thread::sleep_for(std::chrono::microseconds(chance() % kDelay));
    work();
    Lock lock(everything);
    stream->done++;
    progress.notify_all();
  }
}

// From here to "memory": with `everything` locked, unless a name says otherwise.

Stream* new_stream(int device, int priority) {
  auto* stream = new Stream{device, priority};
  std::thread(serve, stream).detach();
  streams.insert(stream);
  return stream;
}

Stream* found(cudaStream_t handle) {
  has_context = true;
  if (reinterpret_cast<uintptr_t>(handle) > 2) return reinterpret_cast<Stream*>(handle);
  Stream*& stream = defaults[current_device];
  if (!stream) stream = new_stream(current_device, 0);
  return stream;
}

void ask(Stream* stream, Work work) {
  if (stream->capture) {
    stream->capture->graph->push_back(std::move(work));
    return;
  }
  stream->queue.push_back(std::move(work));
  stream->asked++;
  stream->wanted.notify_all();
}

// Whether a capture forbids calls that might wait: one of this thread, or in the default mode one of any thread.
bool forbidden() {
  bool any = false;
  for (auto& capture : captures) {
    bool all = capture->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
    bool own = capture->mode != cudaStreamCaptureModeRelaxed && capture->thread == std::this_thread::get_id();
    if (thread_mode != cudaStreamCaptureModeRelaxed && (all || own)) any = capture->invalid = true;
  }
  return any;
}

bool invalidated(std::shared_ptr<Capture>& capture) { return capture && (capture->invalid = true); }

// Python's lock is free meanwhile: work may need it.
class WithoutPython {
 public:
  WithoutPython() {
    static auto initialised = symbol<int()>("Py_IsInitialized");
    static auto held = symbol<int()>("PyGILState_Check");
    static auto save = symbol<void*()>("PyEval_SaveThread");
    if (initialised && initialised() && held()) state_ = save();
  }
  ~WithoutPython() {
    static auto restore = symbol<void(void*)>("PyEval_RestoreThread");
    if (state_) restore(state_);
  }

 private:
  template <typename F>
  static F* symbol(const char* name) {
    return reinterpret_cast<F*>(dlsym(RTLD_DEFAULT, name));
  }
  void* state_ = nullptr;
};

void await_unlocked(Stream* stream, uint64_t place) {
  {
    Lock lock(everything);
    if (stream->done >= place) return;
  }
  WithoutPython without;
  Lock lock(everything);
  progress.wait(lock, [&] { return stream->done >= place; });
}

}  // namespace

// Enqueue work in a stream, also while that is captured. Takes ownership of the work.
API void emulated_ask(cudaStream_t stream, Work* work) {
  Lock lock(everything);
  ask(found(stream), std::move(*work));
  delete work;
}

static cudaError_t ask_unlocked(cudaStream_t stream, Work work) {
  Lock lock(everything);
  ask(found(stream), std::move(work));
  return cudaSuccess;
}

static bool forbidden_unlocked() {
  Lock lock(everything);
  return forbidden();
}

// --- devices ---------------------------------------------------------------------------------------------------------

API cudaError_t cudaGetDeviceCount(int* count) { return *count = kDevices, cudaSuccess; }
API cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }

API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) FAIL(cudaErrorInvalidDevice);
  current_device = device;
  has_context = true;
  return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* it, int device) {
  *it = {};
  strcpy(it->name, "Emulated");
  it->uuid.bytes[0] = static_cast<char>(device);
  it->major = 9;
  it->totalGlobalMem = kBytes;
  it->warpSize = 32;
  it->multiProcessorCount = 132;
  it->maxThreadsPerBlock = it->maxThreadsDim[0] = it->maxThreadsDim[1] = 1024;
  it->maxThreadsDim[2] = 64;
  it->maxThreadsPerMultiProcessor = 2048;
  it->maxGridSize[0] = 2147483647;
  it->maxGridSize[1] = it->maxGridSize[2] = 65535;
  it->regsPerBlock = it->regsPerMultiprocessor = 65536;
  it->sharedMemPerBlock = 49152;
  it->sharedMemPerMultiprocessor = 233472;
  it->sharedMemPerBlockOptin = 232448;
  it->l2CacheSize = 60 << 20;
  it->textureAlignment = 512;
  it->unifiedAddressing = it->canMapHostMemory = it->concurrentKernels = 1;
  it->asyncEngineCount = 3;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  static const std::map<int, int> known = {
      {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrComputeCapabilityMinor, 0},
      {cudaDevAttrMultiProcessorCount, 132},  {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrWarpSize, 32},
  };
  auto place = known.find(which);
  *value = place == known.end() ? 1 : place->second;
  return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int* value, int, int) { return *value = 1, cudaSuccess; }
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

API const char* cudaGetErrorName(cudaError_t) { return "cudaErrorEmulated"; }

API const char* cudaGetErrorString(cudaError_t code) {
  if (code == cudaErrorMemoryAllocation) return "out of memory";
  if (code == cudaErrorStreamCaptureUnsupported) return "operation not permitted when stream is capturing";
  if (code == cudaErrorStreamCaptureInvalidated) return "operation failed due to a previous error during capture";
  static thread_local char text[32];
  snprintf(text, sizeof text, "emulated error %d", code);
  return text;
}

API cudaError_t cudaPeekAtLastError() { return last_error; }
API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

API cudaError_t cudaDeviceSynchronize() {
  std::vector<std::pair<Stream*, uint64_t>> places;
  {
    Lock lock(everything);
    if (forbidden()) FAIL(cudaErrorStreamCaptureUnsupported);
    for (auto* stream : streams)
      if (stream->device == current_device) places.push_back({stream, stream->asked});
  }
  for (auto& [stream, place] : places) await_unlocked(stream, place);
  return cudaSuccess;
}

// --- memory ----------------------------------------------------------------------------------------------------------

namespace {

struct Block {
  size_t nbytes;
  int device;
};

std::map<uintptr_t, Block> on_device;
std::map<uintptr_t, size_t> page_locked;
size_t used[kMostDevices] = {};
std::atomic<long> pageable{0};

size_t nbytes_of(const Block& block) { return block.nbytes; }
size_t nbytes_of(size_t nbytes) { return nbytes; }

template <typename Map>
auto holding(Map& map, const void* address) {
  auto place = map.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (place == map.begin()) return map.end();
  --place;
  return reinterpret_cast<uintptr_t>(address) < place->first + nbytes_of(place->second) ? place : map.end();
}

}  // namespace

API bool emulated_context() { return has_context; }

// The number of larger copies from or to pageable memory.
API long emulated_pageable_copies() { return pageable; }

API cudaError_t cudaMalloc(void** address, size_t nbytes) {
  Lock lock(everything);
  if (forbidden()) FAIL(cudaErrorStreamCaptureUnsupported);
  size_t size = std::max<size_t>(nbytes, 1);
  if (used[current_device] + size > kBytes) FAIL(cudaErrorMemoryAllocation);
  void* found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) FAIL(cudaErrorMemoryAllocation);
  if (size <= kFilled) memset(found, 0x5a, size);
  on_device[reinterpret_cast<uintptr_t>(found)] = {size, current_device};
  used[current_device] += size;
  *address = found;
  return cudaSuccess;
}

API cudaError_t cudaFree(void* address) {
  if (!address) return cudaSuccess;
  if (auto code = cudaDeviceSynchronize()) return code;
  Lock lock(everything);
  auto place = on_device.find(reinterpret_cast<uintptr_t>(address));
  if (place == on_device.end()) FAIL(cudaErrorInvalidValue);
  used[place->second.device] -= place->second.nbytes;
  munmap(address, place->second.nbytes);
  on_device.erase(place);
  return cudaSuccess;
}

API cudaError_t cudaMallocAsync(void** address, size_t nbytes, cudaStream_t) { return cudaMalloc(address, nbytes); }
API cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return cudaFree(address); }

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Lock lock(everything);
  *free = kBytes - used[current_device];
  *total = kBytes;
  return cudaSuccess;
}

API cudaError_t cudaHostAlloc(void** address, size_t nbytes, unsigned) {
  Lock lock(everything);
  if (forbidden()) FAIL(cudaErrorStreamCaptureUnsupported);
  if (posix_memalign(address, 4096, std::max<size_t>(nbytes, 1))) FAIL(cudaErrorMemoryAllocation);
  page_locked[reinterpret_cast<uintptr_t>(*address)] = nbytes;
  return cudaSuccess;
}

API cudaError_t cudaFreeHost(void* address) {
  Lock lock(everything);
  page_locked.erase(reinterpret_cast<uintptr_t>(address));
  free(address);
  return cudaSuccess;
}

API cudaError_t cudaHostRegister(void* address, size_t nbytes, unsigned) {
  Lock lock(everything);
  if (forbidden()) FAIL(cudaErrorStreamCaptureUnsupported);
  if (!page_locked.insert({reinterpret_cast<uintptr_t>(address), nbytes}).second)
    FAIL(cudaErrorHostMemoryAlreadyRegistered);
  return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void* address) {
  Lock lock(everything);
  if (!page_locked.erase(reinterpret_cast<uintptr_t>(address))) FAIL(cudaErrorHostMemoryNotRegistered);
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* it, const void* address) {
  Lock lock(everything);
  *it = {};
  it->device = cudaInvalidDeviceId;
  auto block = holding(on_device, address);
  if (block != on_device.end()) {
    it->type = cudaMemoryTypeDevice;
    it->device = block->second.device;
    it->devicePointer = const_cast<void*>(address);
  } else if (holding(page_locked, address) != page_locked.end()) {
    it->type = cudaMemoryTypeHost;
    it->device = 0;
    it->devicePointer = it->hostPointer = const_cast<void*>(address);
  }
  return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind kind, cudaStream_t handle) {
  bool crosses = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToHost;
  Stream* stream;
  uint64_t place;
  {
    Lock lock(everything);
    stream = found(handle);
    const void* on_host = kind == cudaMemcpyHostToDevice ? from : to;
    crosses = crosses && holding(page_locked, on_host) == page_locked.end();
    if (crosses && invalidated(stream->capture)) FAIL(cudaErrorStreamCaptureUnsupported);
    ask(stream, [=] { memmove(to, from, nbytes); });
    place = stream->asked;
  }
  if (!crosses) return cudaSuccess;
  if (nbytes > kSmall) pageable++;
  await_unlocked(stream, place);
  return cudaSuccess;
}

API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t nbytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDeviceToDevice, stream);
}

API cudaError_t cudaStreamSynchronize(cudaStream_t handle);

API cudaError_t cudaMemcpy(void* to, const void* from, size_t nbytes, cudaMemcpyKind) {
  if (forbidden_unlocked()) FAIL(cudaErrorStreamCaptureUnsupported);
  ask_unlocked(nullptr, [=] { memmove(to, from, nbytes); });
  return cudaStreamSynchronize(nullptr);
}

API cudaError_t cudaMemsetAsync(void* to, int value, size_t nbytes, cudaStream_t stream) {
  return ask_unlocked(stream, [=] { memset(to, value, nbytes); });
}

API cudaError_t cudaMemset(void* to, int value, size_t nbytes) { return cudaMemsetAsync(to, value, nbytes, nullptr); }
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }

// --- streams and events ----------------------------------------------------------------------------------------------

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int priority) {
  Lock lock(everything);
  *handle = reinterpret_cast<cudaStream_t>(new_stream(current_device, priority));
  return cudaSuccess;
}

API cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  Lock lock(everything);
  *priority = found(handle)->priority;
  return cudaSuccess;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Stream* stream;
  uint64_t place;
  {
    Lock lock(everything);
    stream = found(handle);
    if (invalidated(stream->capture) || forbidden()) FAIL(cudaErrorStreamCaptureUnsupported);
    place = stream->asked;
  }
  await_unlocked(stream, place);
  return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Lock lock(everything);
  Stream* stream = found(handle);
  if (invalidated(stream->capture)) FAIL(cudaErrorStreamCaptureUnsupported);
  return stream->done >= stream->asked ? cudaSuccess : cudaErrorNotReady;
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return ask_unlocked(stream, [=] { function(data); });
}

API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  return ask_unlocked(stream, [=] { function(stream, cudaSuccess, data); });
}

// Never freed: pending work may still read it.
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned) {
  *handle = reinterpret_cast<cudaEvent_t>(new Event());
  return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t of, unsigned) {
  auto* event = reinterpret_cast<Event*>(handle);
  Lock lock(everything);
  event->stream = found(of);
  event->capture = event->stream->capture;
  if (event->capture) return cudaSuccess;
  ask(event->stream, [event] { event->when = Clock::now(); });
  event->place = event->stream->asked;
  return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  auto* event = reinterpret_cast<Event*>(handle);
  Lock lock(everything);
  if (invalidated(event->capture)) FAIL(cudaErrorCapturedEvent);
  if (forbidden()) FAIL(cudaErrorStreamCaptureUnsupported);
  return !event->stream || event->stream->done >= event->place ? cudaSuccess : cudaErrorNotReady;
}

API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  auto* event = reinterpret_cast<Event*>(handle);
  {
    Lock lock(everything);
    if (invalidated(event->capture)) FAIL(cudaErrorCapturedEvent);
    if (forbidden()) FAIL(cudaErrorStreamCaptureUnsupported);
  }
  if (event->stream) await_unlocked(event->stream, event->place);
  return cudaSuccess;
}

API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  auto *first = reinterpret_cast<Event*>(from), *last = reinterpret_cast<Event*>(to);
  *milliseconds = std::chrono::duration<float, std::milli>(last->when - first->when).count();
  return cudaSuccess;
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t of, unsigned) {
  auto* event = reinterpret_cast<Event*>(of);
  Lock lock(everything);
  Stream *stream = found(handle), *other = event->stream;
  if (!other) return cudaSuccess;
  if (event->capture) {  // the stream joins the capture
    if (std::find(captures.begin(), captures.end(), event->capture) == captures.end()) FAIL(cudaErrorCapturedEvent);
    if (stream->capture && stream->capture != event->capture) FAIL(cudaErrorStreamCaptureMerge);
    stream->capture = event->capture;
    return cudaSuccess;
  }
  if (invalidated(stream->capture)) FAIL(cudaErrorStreamCaptureIsolation);
  if (other == stream) return cudaSuccess;
  ask(stream, [other, place = event->place] {
    Lock lock(everything);
    progress.wait(lock, [&] { return other->done >= place; });
  });
  return cudaSuccess;
}

// --- captures: a graph is the work that was enqueued, in order --------------------------------------------------------

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  Lock lock(everything);
  Stream* stream = found(handle);
  if (stream == defaults[current_device]) FAIL(cudaErrorStreamCaptureImplicit);
  if (stream->capture) FAIL(cudaErrorIllegalState);
  stream->capture = std::make_shared<Capture>();
  stream->capture->mode = mode;
  stream->capture->id = ++captures_begun;
  captures.push_back(stream->capture);
  return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  Lock lock(everything);
  *graph = nullptr;
  auto capture = found(handle)->capture;
  if (!capture) FAIL(cudaErrorIllegalState);
  if (capture->thread != std::this_thread::get_id() && capture->mode != cudaStreamCaptureModeRelaxed)
    FAIL(cudaErrorStreamCaptureWrongThread);
  for (auto* stream : streams)
    if (stream->capture == capture) stream->capture = nullptr;
  captures.erase(std::find(captures.begin(), captures.end(), capture));
  if (capture->invalid) FAIL(cudaErrorStreamCaptureInvalidated);
  *graph = reinterpret_cast<cudaGraph_t>(new Graph(capture->graph));
  return cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  Lock lock(everything);
  auto& capture = found(handle)->capture;
  *status = !capture           ? cudaStreamCaptureStatusNone
            : capture->invalid ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                         const cudaGraphEdgeData** edges, size_t* count) {
  cudaStreamIsCapturing(handle, status);
  Lock lock(everything);
  auto& capture = found(handle)->capture;
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t from, unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(from)));
  return cudaSuccess;
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
  return ask_unlocked(stream, [graph = *reinterpret_cast<Graph*>(handle)] {
    for (auto& work : *graph) work();
  });
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t*, size_t* count) {
  *count = (*reinterpret_cast<Graph*>(handle))->size();
  return cudaSuccess;
}

API cudaError_t cudaGraphDestroy(cudaGraph_t handle) { return delete reinterpret_cast<Graph*>(handle), cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t it) { return delete reinterpret_cast<Graph*>(it), cudaSuccess; }
API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }

// --- kernels: known by name, and not run -----------------------------------------------------------------------------

namespace {

struct Shape {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};

thread_local std::vector<Shape> shapes;
std::unordered_map<const void*, std::string> kernels;
std::set<const void*> named;

cudaError_t not_run(const void* kernel) {
  Lock lock(everything);
  if (kLog && named.insert(kernel).second) fprintf(stderr, "[emulated] not run: %s\n", kernels[kernel].c_str());
  return cudaSuccess;
}

// The only kernel that is run is torch.cuda._sleep, at 2 GHz.
cudaError_t launched(const void* kernel, void** arguments, cudaStream_t stream) {
  {
    Lock lock(everything);
    if (kernels[kernel].find("spin_kernel") == std::string::npos) arguments = nullptr;
  }
  if (!arguments) return not_run(kernel);
  std::chrono::nanoseconds time(*static_cast<int64_t*>(arguments[0]) / 2);
  return ask_unlocked(stream, [=] { std::this_thread::sleep_for(time); });
}

}  // namespace

API void** __cudaRegisterFatBinary(void*) {
  static void* any[64];
  return any;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, void*, void*, void*, void*,
                                int*) {
  kernels[kernel] = name;
}

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  shapes.push_back({grid, block, shared, static_cast<cudaStream_t>(stream)});
  return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  auto& last = shapes.back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  shapes.pop_back();
  return cudaSuccess;
}

API cudaError_t __cudaGetKernel(cudaKernel_t* found, const void* kernel) {
  *found = reinterpret_cast<cudaKernel_t>(const_cast<void*>(kernel));
  return cudaSuccess;
}

API cudaError_t cudaLaunchKernel(const void* it, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launched(it, arguments, stream);
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t it, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launched(it, arguments, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* it, void**) { return not_run(it); }
API cudaError_t cudaLaunchCooperativeKernel(const void* it, dim3, dim3, void**, size_t, cudaStream_t) {
  return not_run(it);
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* it, const void*) {
  *it = {};
  it->maxThreadsPerBlock = 1024;
  it->numRegs = 32;
  it->ptxVersion = it->binaryVersion = 90;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) {
  return *count = 2, cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t, unsigned) {
  return *count = 2, cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  return *address = const_cast<void*>(symbol), cudaSuccess;
}

// The one kernel of AOTInductor that is computed: rows of 8 plus one row, which tests/devices/test_aoti.py calls.
API void emulated_sum(cudaStream_t stream, const float* rows, const float* row, float* sum, int count) {
  ask_unlocked(stream, [=] {
    for (int index = 0; index < count; index++) sum[index] = rows[index] + row[index % 8];
  });
}

// --- not supported ---------------------------------------------------------------------------------------------------

API cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** found, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  *found = nullptr;
  if (result) *result = cudaDriverEntryPointSymbolNotFound;
  FAIL(cudaErrorNotSupported);
}
