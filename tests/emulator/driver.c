// A CUDA driver without a GPU: the functions that torch, Triton and AOTInductor's libraries call besides the runtime.

#include <stdlib.h>
#include <string.h>

extern _Bool emulated_context(void) __attribute__((weak));
extern void emulated_sum(void* stream, const float* rows, const float* row, float* sum, int count)
    __attribute__((weak));

int cuInit(unsigned flags) { return 0; }
int cuGetExportTable(const void** table, const void* which) { return *table = NULL, 500; }  // NVRTC asks
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuGetErrorName(int code, const char** text) { return *text = "CUDA_ERROR_EMULATED", 0; }
int cuGetErrorString(int code, const char** text) { return *text = "emulated error", 0; }

int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetAttribute(int* value, int which, int device) {
  switch (which) {
    case 1: *value = 1024; break;      // threads of a block
    case 8: *value = 49152; break;     // bytes of shared memory of a block
    case 10: *value = 32; break;       // threads of a warp
    case 12: case 82: *value = 65536; break;  // registers
    case 13: *value = 1980000; break;  // kHz
    case 16: *value = 132; break;      // multiprocessors
    case 36: *value = 3201000; break;  // kHz of memory
    case 37: *value = 6144; break;     // bits of its bus
    case 75: *value = 9; break;        // compute capability
    case 76: *value = 0; break;
    case 81: *value = 233472; break;   // bytes of shared memory of a multiprocessor
    case 97: *value = 232448; break;   // and at most of a block
    default: *value = 1;
  }
  return 0;
}
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) { return *flags = 0, *active = 1, 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = (void*)8, 0; }
int cuCtxGetCurrent(void** context) { return *context = (void*)8, 0; }
int cuCtxSetCurrent(void* context) { return 0; }
int cuCtxGetDevice(int* device) { return *device = 0, 0; }
int cuCtxGetLimit(size_t* value, int which) { return *value = 8 << 20, 0; }
int cuCtxSetLimit(int which, size_t value) { return 0; }
int cuPointerGetAttribute(void* value, int which, unsigned long long address) {
  return *(unsigned long long*)value = address, 0;
}

static const int no_context = 201;  // CUDA_ERROR_INVALID_CONTEXT
static int without_context(void) { return emulated_context && !emulated_context() ? no_context : 0; }

// A function is its name.
int cuModuleLoad(void** module, const char* path) { return *module = malloc(1), without_context(); }
int cuModuleLoadData(void** module, const void* image) { return *module = malloc(1), without_context(); }
int cuModuleUnload(void* module) { return without_context(); }
int cuModuleGetFunction(void** function, void* module, const char* name) { return *function = strdup(name), 0; }
int cuFuncGetAttribute(int* value, int which, void* function) {
  return *value = which == 0 ? 1024 : which == 4 ? 32 : 0, 0;
}
int cuFuncSetAttribute(void* function, int which, int value) { return 0; }
int cuFuncSetCacheConfig(void* function, int config) { return 0; }
int cuOccupancyMaxActiveClusters(int* count, void* function, void* config) { return *count = 1, 0; }
int cuTensorMapEncodeTiled(void) { return 1; }
int cuTensorMapEncodeIm2col(void) { return 1; }

int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** arguments, void** extra) {
  if (without_context()) return no_context;
  if (emulated_sum && strstr(function, "fused_add_0"))
    emulated_sum(stream, *(void**)arguments[0], *(void**)arguments[1], *(void**)arguments[2], *(int*)arguments[3]);
  return 0;
}
int cuLaunchKernelEx(void* config, void* function, void** arguments, void** extra) { return 0; }
