/* A libnvidia-ml.so.1 that tells what a text file says. LLMGW_STUB_NVML names the file; it is read at every call of
 * nvmlInitWithFlags and nvmlDeviceGetCount_v2, so that a test can change the world between two questions.
 *
 *   driver 580.95.05           cuda 13000           init_rc 0
 *   gpu uuid=… name=NVIDIA_H100_80GB_HBM3 cc=9.0 total=… used=… bdf=00000000:17:00.0 numa=0 links=18:switch …
 *   pair 0 1 level=30 p2p=0
 *   mig gpu=0 uuid=MIG-… name=… total=…
 *   proc gpu=0 pid=4121 used=…
 *   event gpu=1 xid=79
 *   fail gpu=3 call=DeviceGetMemoryInfo rc=15
 *   sleep call=DeviceGetUtilizationRates ms=30000
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX 16
enum { OK = 0, INVALID = 2, NOTSUP = 3, NOPERM = 4, NOTFOUND = 6, SMALL = 7, TIMEOUT = 10 };

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process_t;
typedef struct { void *device; unsigned long long type, data; unsigned gi, ci; } event_t;
typedef struct { unsigned id, scope; long long at, latency; unsigned type; int rc; union { unsigned u; unsigned long long ull; } v; } field_t;
typedef struct { unsigned version; unsigned char cluster[16]; int status; unsigned clique; unsigned char state; unsigned health; unsigned char summary; } fabric_t;
_Static_assert(sizeof(memory_t) == 24 && sizeof(pci_t) == 68 && sizeof(process_t) == 24 && sizeof(event_t) == 32, "layout");
_Static_assert(sizeof(field_t) == 40 && sizeof(fabric_t) == 40, "layout");

typedef struct { char line[1024]; int index; } gpu_t;
static gpu_t gpus[MAX], migs[MAX];
static int mig_of[MAX], ngpus, nmigs, init_rc, cuda = 13000, nevents, next_event;
static char driver[64] = "0", events[MAX][128], lines[256][1024];
static int nlines;

static const char *get(const char *line, const char *key, char *out, const char *otherwise) {
    char want[64];
    snprintf(want, sizeof want, " %s=", key);
    const char *at = strstr(line, want);
    if (!at) { strcpy(out, otherwise); return out; }
    at += strlen(want);
    size_t n = strcspn(at, " \n");
    memcpy(out, at, n);
    out[n] = 0;
    return out;
}
static long long num(const char *line, const char *key, long long otherwise) {
    char b[256];
    get(line, key, b, "");
    return *b ? strtoll(b, NULL, 0) : otherwise;
}
static void load(void) {
    const char *path = getenv("LLMGW_STUB_NVML");
    FILE *f = path ? fopen(path, "r") : NULL;
    ngpus = nmigs = nevents = nlines = 0;
    init_rc = 0;
    char line[1024];
    while (f && fgets(line, sizeof line, f)) {
        if (nlines < 256) strcpy(lines[nlines++], line);
        if (!strncmp(line, "driver ", 7)) sscanf(line + 7, "%63s", driver);
        if (!strncmp(line, "cuda ", 5)) cuda = atoi(line + 5);
        if (!strncmp(line, "init_rc ", 8)) init_rc = atoi(line + 8);
        if (!strncmp(line, "gpu ", 4) && ngpus < MAX) { strcpy(gpus[ngpus].line, line); gpus[ngpus].index = ngpus; ngpus++; }
        if (!strncmp(line, "mig ", 4) && nmigs < MAX) { strcpy(migs[nmigs].line, line); mig_of[nmigs++] = num(line, "gpu", 0); }
        if (!strncmp(line, "event ", 6) && nevents < MAX) strcpy(events[nevents++], line);
    }
    if (f) fclose(f);
}
/* What the file wants of this call: sleeps, or the number of an error. */
static int wanted(gpu_t *g, const char *call) {
    char b[256];
    for (int i = 0; i < nlines; i++) {
        if (!strncmp(lines[i], "sleep ", 6) && !strcmp(get(lines[i], "call", b, ""), call)) usleep(1000 * num(lines[i], "ms", 0));
        if (!strncmp(lines[i], "fail ", 5) && !strcmp(get(lines[i], "call", b, ""), call) && (!g || num(lines[i], "gpu", g->index) == g->index))
            return num(lines[i], "rc", 999);
    }
    return OK;
}
#define CALL(name) int rc = wanted(g, name); if (rc) return rc
static int number(gpu_t *g, const char *key, unsigned *out) {
    long long v = num(g->line, key, -1);
    if (v < 0) return NOTSUP;
    *out = v;
    return OK;
}
static void string(const char *text, char *out, unsigned n) {
    snprintf(out, n, "%s", text);
    for (char *c = out; *c; c++) if (*c == '_') *c = ' ';
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; load(); wanted(NULL, "Init"); return init_rc; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int rc) { static char b[32]; snprintf(b, sizeof b, "error %d", rc); return b; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) { snprintf(out, n, "%s", driver); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = cuda; return OK; }
int nvmlDeviceGetCount_v2(unsigned *out) { load(); int rc = wanted(NULL, "DeviceGetCount"); *out = ngpus; return rc; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, gpu_t **out) {
    if ((int)i >= ngpus) return INVALID;
    gpu_t *g = *out = &gpus[i];
    return wanted(g, "DeviceGetHandleByIndex");
}
int nvmlDeviceGetUUID(gpu_t *g, char *out, unsigned n) { CALL("DeviceGetUUID"); char b[256]; snprintf(out, n, "%s", get(g->line, "uuid", b, "")); return OK; }
int nvmlDeviceGetName(gpu_t *g, char *out, unsigned n) { CALL("DeviceGetName"); char b[256]; string(get(g->line, "name", b, "NVIDIA"), out, n); return OK; }
int nvmlDeviceGetMinorNumber(gpu_t *g, unsigned *out) { *out = g->index; return OK; }
int nvmlDeviceGetSerial(gpu_t *g, char *out, unsigned n) { char b[256]; snprintf(out, n, "%s", get(g->line, "serial", b, "")); return *out ? OK : NOTSUP; }
int nvmlDeviceGetMemoryInfo(gpu_t *g, memory_t *m) {
    CALL("DeviceGetMemoryInfo");
    long long total = num(g->line, "total", -1), used = num(g->line, "used", 0);
    if (total < 0) return NOTSUP;
    m->total = total; m->used = used; m->free = total - used;
    return OK;
}
int nvmlDeviceGetCudaComputeCapability(gpu_t *g, int *major, int *minor) {
    char b[256];
    return sscanf(get(g->line, "cc", b, ""), "%d.%d", major, minor) == 2 ? OK : NOTSUP;
}
int nvmlDeviceGetPciInfo_v3(gpu_t *g, pci_t *p) {
    CALL("DeviceGetPciInfo");
    char b[256];
    memset(p, 0, sizeof *p);
    snprintf(p->bus_id, sizeof p->bus_id, "%s", get(g->line, "bdf", b, "00000000:00:00.0"));
    return OK;
}
int nvmlDeviceGetNumaNodeId(gpu_t *g, unsigned *out) { return number(g, "numa", out); }
int nvmlDeviceGetMigMode(gpu_t *g, unsigned *current, unsigned *pending) {
    int rc = number(g, "mig", current);
    *pending = num(g->line, "mig_pending", *current);
    return rc;
}
int nvmlDeviceGetMaxMigDeviceCount(gpu_t *g, unsigned *out) { (void)g; *out = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(gpu_t *g, unsigned i, gpu_t **out) {
    for (int n = 0; n < nmigs; n++)
        if (mig_of[n] == g->index && i-- == 0) { *out = &migs[n]; return OK; }
    return NOTFOUND;
}
int nvmlDeviceGetTotalEccErrors(gpu_t *g, int type, int counter, unsigned long long *out) {
    (void)type; (void)counter;
    unsigned v;
    int rc = number(g, "ecc_uncorr", &v);
    *out = v;
    return rc;
}
int nvmlDeviceGetRemappedRows(gpu_t *g, unsigned *c, unsigned *u, unsigned *pending, unsigned *failed) {
    *c = *u = 0;
    *pending = num(g->line, "remap_pending", 0);
    *failed = num(g->line, "remap_failed", 0);
    return OK;
}
int nvmlDeviceGetFieldValues(gpu_t *g, int n, field_t *f) {
    for (int i = 0; i < n; i++) { f[i].rc = OK; f[i].v.ull = 0; f[i].v.u = num(g->line, "recovery", 0); }
    return OK;
}
int nvmlDeviceGetGpuFabricInfoV(gpu_t *g, fabric_t *f) {
    char b[256];
    if (f->version == 0x3000028 && num(g->line, "fabric_v2", 0)) return 25;
    if (!*get(g->line, "cluster", b, "")) return NOTSUP;
    for (int i = 0; i < 16; i++) { unsigned v; sscanf(b + 2 * i, "%2x", &v); f->cluster[i] = v; }
    f->status = 0; f->clique = num(g->line, "clique", 0); f->state = num(g->line, "fabric_state", 3);
    return OK;
}
int nvmlDeviceGetTemperature(gpu_t *g, int sensor, unsigned *out) { (void)sensor; return number(g, "temp", out); }
int nvmlDeviceGetPowerUsage(gpu_t *g, unsigned *out) { return number(g, "power", out); }
int nvmlDeviceGetEnforcedPowerLimit(gpu_t *g, unsigned *out) { return number(g, "limit", out); }
int nvmlDeviceGetCurrentClocksThrottleReasons(gpu_t *g, unsigned long long *out) { *out = num(g->line, "reasons", 0); return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(gpu_t *g, unsigned *out) { return number(g, "width", out); }
int nvmlDeviceGetMaxPcieLinkWidth(gpu_t *g, unsigned *out) { return number(g, "width_max", out); }
int nvmlDeviceGetUtilizationRates(gpu_t *g, unsigned *out) { CALL("DeviceGetUtilizationRates"); out[0] = num(g->line, "util", 0); out[1] = 0; return OK; }
int nvmlDeviceGetComputeMode(gpu_t *g, unsigned *out) { *out = num(g->line, "compute_mode", 0); return OK; }
int nvmlDeviceGetNvLinkState(gpu_t *g, unsigned link, unsigned *out) {
    char b[256];
    int n = atoi(get(g->line, "links", b, "0"));
    if ((int)link >= n) return n ? INVALID : NOTSUP;
    *out = 1;
    return OK;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(gpu_t *g, unsigned link, unsigned *out) {
    (void)link;
    char b[256];
    *out = strstr(get(g->line, "links", b, ""), ":switch") ? 2 : 0;
    return OK;
}
/* links=4:BDF,BDF: the links go to these in turn */
int nvmlDeviceGetNvLinkRemotePciInfo_v2(gpu_t *g, unsigned link, pci_t *p) {
    char b[256], *at = strchr((char *)get(g->line, "links", b, ""), ':');
    memset(p, 0, sizeof *p);
    if (!at || !strncmp(at, ":switch", 7)) return NOTSUP;
    int n = 1;
    for (char *c = at; *c; c++) n += *c == ',';
    at++;
    for (int i = link % n; i > 0; i--) at = strchr(at, ',') + 1;
    snprintf(p->bus_id, sizeof p->bus_id, "%.*s", (int)strcspn(at, ", \n"), at);
    return OK;
}
static int pair(gpu_t *a, gpu_t *b, const char *key, int otherwise) {
    for (int i = 0; i < nlines; i++) {
        int x, y;
        if (sscanf(lines[i], "pair %d %d", &x, &y) == 2 && ((x == a->index && y == b->index) || (y == a->index && x == b->index)))
            return num(lines[i], key, otherwise);
    }
    return otherwise;
}
int nvmlDeviceGetTopologyCommonAncestor(gpu_t *a, gpu_t *b, unsigned *out) { *out = pair(a, b, "level", 50); return OK; }
int nvmlDeviceGetP2PStatus(gpu_t *a, gpu_t *b, int index, unsigned *out) { (void)index; *out = pair(a, b, "p2p", 6); return OK; }
int nvmlDeviceGetComputeRunningProcesses_v3(gpu_t *g, unsigned *count, process_t *out) {
    unsigned n = 0;
    for (int i = 0; i < nlines; i++)
        if (!strncmp(lines[i], "proc ", 5) && num(lines[i], "gpu", 0) == g->index) {
            if (out && n < *count) { out[n].pid = num(lines[i], "pid", 0); out[n].used = num(lines[i], "used", -1); }
            n++;
        }
    int small = n > 0 && (!out || n > *count);
    *count = n;
    return small ? SMALL : OK;
}
int nvmlEventSetCreate(void **set) { *set = &gpus; return OK; }
int nvmlDeviceGetSupportedEventTypes(gpu_t *g, unsigned long long *out) { (void)g; *out = 8; return OK; }
int nvmlDeviceRegisterEvents(gpu_t *g, unsigned long long mask, void *set) { (void)g; (void)mask; (void)set; return OK; }
int nvmlEventSetWait_v2(void *set, event_t *e, unsigned ms) {
    (void)set; (void)ms;
    if (next_event >= nevents) return TIMEOUT;
    e->device = &gpus[num(events[next_event], "gpu", 0)];
    e->type = 8;
    e->data = num(events[next_event], "xid", 0);
    next_event++;
    return OK;
}
