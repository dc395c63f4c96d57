// Stands in for NVIDIA's driver, so that torch's CUDA wheel runs on fake tensors where there is no GPU.
// Built twice: as a library to preload, whose functions hide the CUDA runtime's, and as an empty libcuda.so.1.
#include <string.h>
#include <driver_types.h>

typedef int result; // 0: success

#ifdef DRIVER
result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 0; return 0; }
#else
result cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "a fake GPU");
  p->major = 9; // the minor one is 0; torch chooses its attention kernels by it
  p->multiProcessorCount = 132;
  p->totalGlobalMem = 80ul << 30;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->regsPerMultiprocessor = 65536;
  p->maxGridSize[0] = 2147483647;
  p->maxThreadsDim[0] = 1024;
  return 0;
}
result cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
result cudaGetDeviceCount(int *count) { *count = 1; return 0; }
result cudaGetDevice(int *device) { *device = 0; return 0; }
result cudaSetDevice(int device) { return 0; }
result cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 1; return 0; }
result cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
result cudaGetLastError(void) { return 0; }
result cudaPeekAtLastError(void) { return 0; }
result cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
result cudaStreamGetCaptureInfo(void *stream, int *status) { *status = 0; return 0; }
result cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { return 0; }
result cudaEventCreateWithFlags(void **event, unsigned flags) { *event = (void *)1; return 0; }
result cudaEventRecord(void *event, void *stream) { return 0; }
result cudaEventQuery(void *event) { return 0; }
result cudaEventDestroy(void *event) { return 0; }
#endif
