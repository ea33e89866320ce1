/* A libcuda.so.1 whose calls succeed, except the one that LLMGW_STUB_CUDA names: "cuInit=802". */
#include <stdlib.h>
#include <string.h>
#include <stdint.h>

static int want(const char *call) {
    const char *said = getenv("LLMGW_STUB_CUDA");
    size_t n = strlen(call);
    return said && !strncmp(said, call, n) && said[n] == '=' ? atoi(said + n + 1) : 0;
}
int cuInit(unsigned flags) { (void)flags; return want("cuInit"); }
int cuDeviceGet(int *out, int ordinal) { *out = ordinal; return want("cuDeviceGet"); }
int cuDevicePrimaryCtxRetain(void **out, int device) { (void)device; *out = out; return want("cuDevicePrimaryCtxRetain"); }
int cuCtxSetCurrent(void *context) { (void)context; return 0; }
int cuMemAlloc_v2(uint64_t *out, size_t size) { *out = (uint64_t)(uintptr_t)malloc(size); return want("cuMemAlloc"); }
int cuMemsetD8_v2(uint64_t at, unsigned char value, size_t size) { memset((void *)(uintptr_t)at, value, size); return want("cuMemsetD8"); }
int cuCtxSynchronize(void) { return want("cuCtxSynchronize"); }
int cuMemFree_v2(uint64_t at) { free((void *)(uintptr_t)at); return 0; }
