// CUDA's runtime and driver, cuBLAS and NCCL of a GPU that computes nothing. Every call succeeds; kernels, copies, waits
// and collectives are reported. Device memory is memory of the host, and whatever is read back from it is zero.
// Functions without outputs are not here: build.py generates them from the symbols that torch's libraries need.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <string>
#include <sys/mman.h>

#include "driver_types.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {
using Watcher = void (*)(const char *kind, const char *name, long bytes);
using Ranges = std::map<uintptr_t, size_t>;
struct State {
  std::mutex lock;
  Ranges device, pinned;
  std::map<const void *, std::string> kernels;  // by the address that the host launches
};
State &state() { static State *made = new State; return *made; }  // outlives all destructors
std::atomic<Watcher> watcher{nullptr};
thread_local int current_device = 0;

int report(const char *kind, const char *name, long bytes = 0) {
  if (Watcher call = watcher.load()) call(kind, name, bytes);
  return 0;
}
bool within(const Ranges &ranges, const void *address) {
  std::lock_guard<std::mutex> guard(state().lock);
  auto next = ranges.upper_bound((uintptr_t)address);
  if (next == ranges.begin()) return false;
  --next;
  return (uintptr_t)address < next->first + next->second;
}
void keep(Ranges &ranges, void *address, size_t bytes) {
  std::lock_guard<std::mutex> guard(state().lock);
  ranges[(uintptr_t)address] = bytes;
}
size_t forget(Ranges &ranges, void *address) {
  std::lock_guard<std::mutex> guard(state().lock);
  auto found = ranges.find((uintptr_t)address);
  if (found == ranges.end()) return 0;
  size_t bytes = found->second;
  ranges.erase(found);
  return bytes;
}
template <class T> int fresh(T *handle) {
  static std::atomic<uintptr_t> next{0x1000};
  *(uintptr_t *)handle = next += 64;
  return 0;
}
int launched(const void *kernel) {
  std::string name = "unknown kernel";
  {
    std::lock_guard<std::mutex> guard(state().lock);
    auto found = state().kernels.find(kernel);
    if (found != state().kernels.end()) name = found->second;
  }
  return report("kernel", name.c_str());
}
void register_kernel(const void *key, const char *name) {
  std::lock_guard<std::mutex> guard(state().lock);
  state().kernels[key] = name;
}
int copied(void *to, const void *from, size_t bytes, bool waits) {
  bool to_device = within(state().device, to), from_device = within(state().device, from);
  if (to_device && from_device) return report("kernel", "copy on the device");
  const void *host = to_device ? from : to;
  const char *way = to_device ? "to device" : "to host";
  report(within(state().pinned, host) ? "pinned" : "pageable", way, bytes);
  if (waits) report("wait", "cudaMemcpy");
  if (to_device) memcpy(to, from, bytes); else memset(to, 0, bytes);
  return 0;
}
int none() { return 0; }
int entry(const char *name, void **function, int *found) {
  void *here = dlsym(RTLD_DEFAULT, name);
  *function = here ? here : (void *)none;
  if (found) *found = 0;
  return 0;
}
// An H100 with 80 GB, by CUDA's numbers of attributes.
const std::map<int, int> ATTRIBUTES = {
    {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 49152}, {10, 32},
    {12, 65536}, {13, 1980000}, {16, 132}, {36, 2619000}, {37, 5120}, {38, 52428800}, {39, 2048}, {75, 9},
    {76, 0}, {81, 233472}, {82, 65536}, {97, 232448}};
int attribute(int which) { auto found = ATTRIBUTES.find(which); return found == ATTRIBUTES.end() ? 1 : found->second; }
const char NAME[] = "NVIDIA H100 80GB HBM3";
const size_t MEMORY = 80ull << 30;
long element(int type) { static const int bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; return bytes[type]; }
int collective(const char *name, size_t count, int type) { return report("collective", name, count * element(type)); }
}  // namespace

API void stand_in_watch(Watcher call) { watcher = call; }
API int stand_in_call(const char *kind, const char *name) { return report(kind, name); }  // of generated functions

// Kernels: nvcc's registration gives their names.
API void **__cudaRegisterFatBinary(void *) { static void *handle[8]; return handle; }
API void __cudaRegisterFunction(void **, const void *host, char *, const char *name, int, void *, void *, void *, void *, int *) { register_kernel(host, name); }
API char __cudaInitModule(void **) { return 1; }
static thread_local struct { unsigned sizes[6]; size_t shared; void *stream; } launch;
struct Dim { unsigned x, y, z; };
API unsigned __cudaPushCallConfiguration(Dim grid, Dim block, size_t shared, void *stream) {
  launch = {{grid.x, grid.y, grid.z, block.x, block.y, block.z}, shared, stream};
  return 0;
}
API int __cudaPopCallConfiguration(Dim *grid, Dim *block, size_t *shared, void **stream) {
  memcpy(grid, launch.sizes, sizeof *grid), memcpy(block, launch.sizes + 3, sizeof *block);
  *shared = launch.shared, *stream = launch.stream;
  return 0;
}
API int __cudaGetKernel(const void **kernel, const void *host) { *kernel = host; return 0; }
API int __cudaLaunchKernel(const void *kernel) { return launched(kernel); }
API int cudaLaunchKernel(const void *kernel) { return launched(kernel); }
API int cudaLaunchKernelExC(void *, const void *kernel, void **) { return launched(kernel); }
API int cudaLibraryLoadData(void **library) { return fresh(library); }
API int cudaLibraryGetKernel(void **kernel, void *, const char *name) { fresh(kernel); register_kernel(*kernel, name); return 0; }

// The device.
API int cudaGetDeviceCount(int *count) { const char *set = getenv("STAND_IN_GPUS"); *count = set ? atoi(set) : 1; return 0; }
API int cudaGetDevice(int *device) { *device = current_device; return 0; }
API int cudaSetDevice(int device) { current_device = device; return 0; }
API int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
API int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
API int cudaDeviceGetAttribute(int *value, int which, int) { *value = attribute(which); return 0; }
API int cudaGetDeviceProperties(cudaDeviceProp *found, int) {
  memset(found, 0, sizeof *found);
  strcpy(found->name, NAME);
  found->major = 9, found->totalGlobalMem = MEMORY, found->multiProcessorCount = attribute(16);
  found->warpSize = attribute(10), found->maxThreadsPerBlock = attribute(1);
  found->maxThreadsPerMultiProcessor = attribute(39), found->regsPerBlock = found->regsPerMultiprocessor = attribute(12);
  found->sharedMemPerBlock = attribute(8), found->sharedMemPerBlockOptin = attribute(97);
  found->sharedMemPerMultiprocessor = attribute(81), found->l2CacheSize = attribute(38);
  found->unifiedAddressing = found->concurrentKernels = 1;
  for (int axis = 0; axis < 3; axis++) found->maxThreadsDim[axis] = attribute(2 + axis), found->maxGridSize[axis] = attribute(5 + axis);
  return 0;
}
API int cudaDeviceCanAccessPeer(int *can) { *can = 1; return 0; }
API int cudaDeviceGetPCIBusId(char *text, int length, int device) { snprintf(text, length, "0000:%02x:00.0", device); return 0; }
API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return 0; }
API const char *cudaGetErrorName(int) { return "stand-in"; }
API const char *cudaGetErrorString(int) { return "stand-in"; }
API int cudaMemGetInfo(size_t *free, size_t *total) { *free = MEMORY - (1ull << 30), *total = MEMORY; return 0; }
API int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long, int *found) { return entry(name, function, found); }
API int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long, int *found) { return entry(name, function, found); }
API int cudaFuncGetAttributes(cudaFuncAttributes *found) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024, found->numRegs = 32, found->binaryVersion = found->ptxVersion = 90;
  return 0;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks) { *blocks = 2; return 0; }
API int cudaGetSymbolAddress(void **address) { static char memory[1 << 16]; *address = memory; return 0; }

// Memory.
API int cudaMalloc(void **address, size_t bytes) {
  *address = mmap(nullptr, bytes + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*address == MAP_FAILED) return 2;
  keep(state().device, *address, bytes);
  return 0;
}
API int cudaFree(void *address) { if (size_t bytes = forget(state().device, address)) munmap(address, bytes + 4096), report("wait", "cudaFree"); return 0; }
API int cudaHostAlloc(void **address, size_t bytes, unsigned) { *address = aligned_alloc(4096, (bytes + 4095) & ~4095ul); keep(state().pinned, *address, bytes); return report("pinned memory", "cudaHostAlloc", bytes); }
API int cudaFreeHost(void *address) { forget(state().pinned, address); free(address); return 0; }
API int cudaHostRegister(void *address, size_t bytes, unsigned) { keep(state().pinned, address, bytes); return report("pinned memory", "cudaHostRegister", bytes); }
API int cudaHostUnregister(void *address) { forget(state().pinned, address); return 0; }
API int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int, void *) { return copied(to, from, bytes, false); }
API int cudaMemcpy(void *to, const void *from, size_t bytes, int) { return copied(to, from, bytes, true); }
API int cudaMemsetAsync() { return report("kernel", "memset"); }
API int cudaPointerGetAttributes(cudaPointerAttributes *found, const void *address) {
  memset(found, 0, sizeof *found);
  if (within(state().device, address)) found->type = cudaMemoryTypeDevice, found->devicePointer = (void *)address;
  else if (within(state().pinned, address)) found->type = cudaMemoryTypeHost, found->hostPointer = found->devicePointer = (void *)address;
  return 0;
}

// Streams and events: all work is over when it is queued.
API int cudaStreamCreate(void **stream) { return fresh(stream); }
API int cudaStreamCreateWithFlags(void **stream, unsigned) { return fresh(stream); }
API int cudaStreamCreateWithPriority(void **stream, unsigned, int) { return fresh(stream); }
API int cudaStreamGetPriority(void *, int *priority) { *priority = 0; return 0; }
API int cudaStreamIsCapturing(void *, int *captures) { *captures = 0; return 0; }
API int cudaStreamGetCaptureInfo(void *, int *captures, unsigned long long *number, ...) { *captures = 0; if (number) *number = 0; return 0; }
API int cudaEventCreate(void **event) { return fresh(event); }
API int cudaEventCreateWithFlags(void **event, unsigned) { return fresh(event); }
API int cudaEventElapsedTime(float *milliseconds) { *milliseconds = 1; return 0; }
API int cudaStreamSynchronize() { return report("wait", "cudaStreamSynchronize"); }
API int cudaDeviceSynchronize() { return report("wait", "cudaDeviceSynchronize"); }
API int cudaEventSynchronize() { return report("wait", "cudaEventSynchronize"); }

// cuBLAS.
API int cublasCreate_v2(void **handle) { return fresh(handle); }
API int cublasGetMathMode(void *, int *mode) { *mode = 0; return 0; }
API int cublasGetPointerMode_v2(void *, int *mode) { *mode = 0; return 0; }
API size_t cublasLtGetVersion() { return 130101; }
API int cublasLtMatmulDescCreate(void **made) { return fresh(made); }
API int cublasLtMatrixLayoutCreate(void **made) { return fresh(made); }
API int cublasLtMatmulPreferenceCreate(void **made) { return fresh(made); }
API int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int, void *result, int *found) { memset(result, 0, 96); *found = 1; return 0; }

// NCCL.
struct Identifier { char bytes[128]; };
API int ncclGetVersion(int *version) { *version = 22907; return 0; }
API int ncclGetUniqueId(Identifier *made) { memset(made, 7, sizeof *made); return 0; }
API int ncclCommInitRankConfig(void **made, int ranks, Identifier, int, void *) { report("group", "init", ranks); return fresh(made); }
API int ncclCommInitRank(void **made, int ranks, Identifier, int) { report("group", "init", ranks); return fresh(made); }
API int ncclCommInitRankScalable(void **made, int ranks, int, int, void *, void *) { report("group", "init", ranks); return fresh(made); }
API int ncclCommSplit(void *, int colour, int, void **made, void *) { report("group", colour < 0 ? "split of others" : "split"); return fresh(made); }
API int ncclCommGetAsyncError(void *, int *error) { *error = 0; return 0; }
API int ncclCommCount(void *, int *ranks) { *ranks = 1; return 0; }
API int ncclCommUserRank(void *, int *rank) { *rank = 0; return 0; }
API int ncclRedOpCreatePreMulSum(int *operation) { *operation = 8; return 0; }
API const char *ncclGetErrorString(int) { return "stand-in"; }
API const char *ncclGetLastError(void *) { return "stand-in"; }
API int ncclAllReduce(void *, void *, size_t n, int type) { return collective("all_reduce", n, type); }
API int ncclAllGather(void *, void *, size_t n, int type) { return collective("all_gather", n, type); }
API int ncclReduceScatter(void *, void *, size_t n, int type) { return collective("reduce_scatter", n, type); }
API int ncclBroadcast(void *, void *, size_t n, int type) { return collective("broadcast", n, type); }
API int ncclBcast(void *, size_t n, int type) { return collective("broadcast", n, type); }
API int ncclReduce(void *, void *, size_t n, int type) { return collective("reduce", n, type); }
API int ncclAlltoAll(void *, void *, size_t n, int type) { return collective("all_to_all", n, type); }
API int ncclSend(void *, size_t n, int type) { return collective("send", n, type); }
API int ncclRecv(void *, size_t n, int type) { return collective("receive", n, type); }

// The driver, as Triton calls it.
API int cuInit(unsigned) { return 0; }
API int cuDriverGetVersion(int *version) { return cudaDriverGetVersion(version); }
API int cuDeviceGet(int *device, int number) { *device = number; return 0; }
API int cuDeviceGetCount(int *count) { return cudaGetDeviceCount(count); }
API int cuDeviceGetName(char *text, int length, int) { snprintf(text, length, "%s", NAME); return 0; }
API int cuDeviceGetAttribute(int *value, int which, int) { *value = attribute(which); return 0; }
API int cuCtxGetCurrent(void **context) { *context = (void *)64; return 0; }
API int cuCtxSetCurrent(void *) { return 0; }
API int cuCtxSetLimit(int, size_t) { return 0; }
API int cuCtxGetLimit(size_t *value, int) { *value = 0; return 0; }
API int cuCtxGetDevice(int *device) { *device = current_device; return 0; }
API int cuCtxPushCurrent_v2(void *) { return 0; }
API int cuCtxPopCurrent_v2(void **context) { *context = (void *)64; return 0; }
API int cuDevicePrimaryCtxRetain(void **context, int) { *context = (void *)64; return 0; }
API int cuDevicePrimaryCtxGetState(int, unsigned *flags, int *active) { *flags = 0, *active = 1; return 0; }
API int cuStreamGetCtx(void *, void **context) { *context = (void *)64; return 0; }
API int cuGetErrorString(int, const char **text) { *text = "stand-in"; return 0; }
API int cuModuleLoad(void **module, const char *) { return fresh(module); }
API int cuModuleLoadData(void **module, const void *) { return fresh(module); }
API int cuModuleLoadDataEx(void **module, const void *) { return fresh(module); }
API int cuModuleUnload(void *) { return 0; }
API int cuModuleGetFunction(void **kernel, void *, const char *name) { return cudaLibraryGetKernel(kernel, nullptr, name); }
API int cuFuncGetAttribute(int *value, int which, void *) { *value = which == 0 ? 1024 : which == 4 ? 64 : 0; return 0; }
API int cuFuncSetAttribute(void *, int, int) { return 0; }
API int cuFuncSetCacheConfig(void *, int) { return 0; }
API int cuLaunchKernel(const void *kernel) { return launched(kernel); }
API int cuLaunchKernelEx(void *, const void *kernel, void **, void **) { return launched(kernel); }
API int cuLaunchCooperativeKernel(const void *kernel) { return launched(kernel); }
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks) { *blocks = 2; return 0; }
API int cuOccupancyMaxActiveClusters(int *clusters) { *clusters = 1; return 0; }
API int cuTensorMapEncodeTiled() { return 0; }
API int cuLinkCreate_v2() { return 0; }
API int cuLinkAddData_v2() { return 0; }
API int cuLinkComplete() { return 0; }
API int cuPointerGetAttribute(uint64_t *value, int, uint64_t address) { *value = address; return 0; }
API int cuGetProcAddress_v2(const char *name, void **function, int, uint64_t, int *found) { return entry(name, function, found); }

// NVRTC, by which torch compiles some of its kernels (erfinv) when they are first used.
API int nvrtcVersion(int *major, int *minor) { *major = 13, *minor = 0; return 0; }
API int nvrtcCreateProgram(void **made) { return fresh(made); }
API int nvrtcDestroyProgram(void **) { return 0; }
API int nvrtcCompileProgram(void *) { return 0; }
API int nvrtcAddNameExpression(void *, const char *) { return 0; }
API int nvrtcGetLoweredName(void *, const char *name, const char **lowered) { *lowered = name; return 0; }
API int nvrtcGetPTXSize(void *, size_t *size) { *size = 1; return 0; }
API int nvrtcGetCUBINSize(void *, size_t *size) { *size = 1; return 0; }
API int nvrtcGetProgramLogSize(void *, size_t *size) { *size = 1; return 0; }
API int nvrtcGetPTX(void *, char *text) { *text = 0; return 0; }
API int nvrtcGetCUBIN(void *, char *text) { *text = 0; return 0; }
API int nvrtcGetProgramLog(void *, char *text) { *text = 0; return 0; }
API const char *nvrtcGetErrorString(int) { return "stand-in"; }
