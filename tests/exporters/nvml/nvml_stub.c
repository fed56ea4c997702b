/* A libnvidia-ml.so.1 for tests: reports the GPUs that a text file describes, with their faults.
 *
 *     gcc -shared -fPIC -O1 -pthread -Wall -Werror -o libnvidia-ml.so.1 nvml_stub.c
 *     NVML_STUB_FILE=gpus.txt LD_LIBRARY_PATH=. python ...
 *
 * The file is read again whenever it is replaced. Each line is "SCOPE KEY VALUE"; the first match counts. Scopes are
 * "system", "gpuN", "gpu*" (for GPUs that have no line of their own), "gpuN/migI" (the I-th MIG device) and
 * "gpuN/giK" (GPU instance K). What a GPU has no line for, it does not support.
 *
 *   system  count N | driver VERSION | unprivileged 1 | xid SEQ:GPU:CODE,...  (each SEQ is delivered once a process)
 *           generation N      calls fail with LIB_RM_VERSION_MISMATCH in a process that loaded the library under
 *                             another generation, as after an upgrade of the driver
 *   any     fault:FUNCTION CODE | fault:* CODE     the call, or every call, returns CODE
 *           hang:FUNCTION 1 | hang:* 1             the call blocks until the line is gone
 *           crash:FUNCTION 1                       the call ends the process with SIGSEGV
 *           delay:* MICROSECONDS                   every call takes this much longer
 *   gpu     name uuid mem_total mem_used mem_reserved util util_mem power limit energy temp sm_clock mem_clock
 *           ecc_corrected ecc_uncorrected throttle minor mig procs gprocs      procs: PID:BYTES[:GI:CI],...
 *   mig     name uuid gi ci mem_total mem_used procs
 *   gi      profile start size
 */
#define _GNU_SOURCE
#ifdef STUB_WITH_NVML_H
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>
#else
#include "nvml_abi.h"
#endif
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, UNSUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, TOO_SMALL = 7,
       TIMED_OUT = 10, RM_MISMATCH = 18, BAD_VERSION = 25 };
enum { GPUS = 64, MIGS = 16, LINES = 4096, NO_INSTANCE = -1 };
#define ANY 0xFFFFFFFFu

struct nvmlDevice_st { int gpu, mig; };
struct nvmlGpuInstance_st { int gpu, id; };
struct nvmlEventSet_st { unsigned long long delivered, gpus; };

static struct nvmlDevice_st physical[GPUS], children[GPUS][MIGS];
static struct nvmlGpuInstance_st instances[GPUS][MIGS];
static struct nvmlEventSet_st event_set;
static unsigned long long born_under;
static int references;

static struct { char *scope, *key, *value; } line[LINES];
static int lines;
static char *text;
static struct timespec read_at;
static ino_t read_inode;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void refresh(void) {
    const char *path = getenv("NVML_STUB_FILE");
    struct stat now;
    if (!path || stat(path, &now)) return;
    if (text && now.st_ino == read_inode && now.st_mtim.tv_sec == read_at.tv_sec && now.st_mtim.tv_nsec == read_at.tv_nsec)
        return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    char *fresh = calloc(1, (size_t)now.st_size + 1);
    size_t got = fread(fresh, 1, (size_t)now.st_size, file);
    fresh[got] = 0;
    fclose(file);
    free(text);
    text = fresh, read_inode = now.st_ino, read_at = now.st_mtim, lines = 0;
    char *rest = fresh, *row;
    while ((row = strsep(&rest, "\n")) && lines < LINES) {
        char *scope = strsep(&row, " "), *key = row ? strsep(&row, " ") : NULL;
        if (key && row) line[lines].scope = scope, line[lines].key = key, line[lines].value = row, lines++;
    }
}

static int look_up(const char *scope, const char *key, char *out, size_t size) {
    int found = 0;
    pthread_mutex_lock(&lock);
    refresh();
    for (int i = 0; i < lines && !found; i++)
        if (!strcmp(line[i].scope, scope) && !strcmp(line[i].key, key)) found = 1, snprintf(out, size, "%s", line[i].value);
    pthread_mutex_unlock(&lock);
    return found;
}

static int of_gpu(int gpu, const char *key, char *out, size_t size) {
    char scope[32];
    snprintf(scope, sizeof scope, "gpu%d", gpu);
    return look_up(scope, key, out, size) || look_up("gpu*", key, out, size);
}

static int of_device(nvmlDevice_t d, const char *key, char *out, size_t size) {
    char scope[48];
    if (d->mig == NO_INSTANCE) return of_gpu(d->gpu, key, out, size);
    snprintf(scope, sizeof scope, "gpu%d/mig%d", d->gpu, d->mig);
    return look_up(scope, key, out, size);
}

static unsigned long long system_number(const char *key, unsigned long long otherwise) {
    char value[64];
    return look_up("system", key, value, sizeof value) ? strtoull(value, NULL, 0) : otherwise;
}

static int number(nvmlDevice_t d, const char *key, unsigned long long *out) {
    char value[64];
    if (!of_device(d, key, value, sizeof value)) return 0;
    *out = strtoull(value, NULL, 0);
    return 1;
}

/* gpu < 0: a call of the system. */
static int listed(int gpu, const char *what, const char *function, unsigned long long *out) {
    char key[96], value[64];
    const char *names[] = {function, "*"};
    for (int i = 0; i < 2; i++) {
        snprintf(key, sizeof key, "%s:%s", what, names[i]);
        if (look_up("system", key, value, sizeof value) || (gpu >= 0 && of_gpu(gpu, key, value, sizeof value))) {
            *out = strtoull(value, NULL, 0);
            return 1;
        }
    }
    return 0;
}

static nvmlReturn_t begin(int gpu, const char *function) {
    unsigned long long value;
    while (listed(gpu, "hang", function, &value) && value) usleep(2000);
    if (listed(gpu, "crash", function, &value) && value) raise(SIGSEGV);
    if (listed(gpu, "delay", function, &value)) usleep((useconds_t)value);
    if (listed(gpu, "fault", function, &value) && value) return (nvmlReturn_t)value;
    if (system_number("generation", 0) != born_under) return RM_MISMATCH;
    return OK;
}

#define SYSTEM do { nvmlReturn_t r_ = begin(-1, __func__); if (r_) return r_; if (!references) return UNINITIALIZED; } while (0)
#define DEVICE(d) do { if (!references) return UNINITIALIZED; if (!(d)) return INVALID; \
                       nvmlReturn_t r_ = begin((d)->gpu, __func__); if (r_) return r_; } while (0)
#define MANAGE(d) do { DEVICE(d); if (system_number("unprivileged", 0)) return NO_PERMISSION; } while (0)

__attribute__((constructor)) static void loaded(void) {
    born_under = system_number("generation", 0);
    for (int gpu = 0; gpu < GPUS; gpu++) {
        physical[gpu].gpu = gpu, physical[gpu].mig = NO_INSTANCE;
        for (int i = 0; i < MIGS; i++) {
            children[gpu][i].gpu = instances[gpu][i].gpu = gpu;
            children[gpu][i].mig = instances[gpu][i].id = i;
        }
    }
}

static nvmlReturn_t copy(const char *from, char *to, unsigned int size) {
    if (strlen(from) + 1 > size) return TOO_SMALL;
    strcpy(to, from);
    return OK;
}

/* --- library and system */

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    nvmlReturn_t result = begin(-1, __func__);
    if (!result) references++;
    return result;
}

nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlShutdown(void) {
    SYSTEM;
    references--;
    return OK;
}

const char *nvmlErrorString(nvmlReturn_t result) {
    switch ((int)result) {
    case OK: return "Success";
    case UNSUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case 9: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    case 16: return "GPU requires reset";
    case RM_MISMATCH: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *out, unsigned int size) {
    SYSTEM;
    char value[80] = "575.57.08";
    look_up("system", "driver", value, sizeof value);
    return copy(value, out, size);
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *out, unsigned int size) { SYSTEM; return copy("12.575.57.08", out, size); }
nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *out) { SYSTEM; *out = 12090; return OK; }

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *out) {
    SYSTEM;
    unsigned long long count = system_number("count", 0);
    *out = count > GPUS ? GPUS : (unsigned int)count;
    return OK;
}

/* --- identity */

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *out) {
    if (!references) return UNINITIALIZED;
    if (index >= system_number("count", 0) || index >= GPUS) return INVALID;
    DEVICE(&physical[index]);
    *out = &physical[index];
    return OK;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t d, char *out, unsigned int size) {
    DEVICE(d);
    char value[96];
    if (!of_device(d, "uuid", value, sizeof value) || !strcmp(value, "-")) {
        if (d->mig != NO_INSTANCE) snprintf(value, sizeof value, "MIG-1e57ab1e-0000-4000-%04d-%012d", d->mig, d->gpu);
        else snprintf(value, sizeof value, "GPU-1e57ab1e-0000-4000-8000-%012d", d->gpu);
    }
    return copy(value, out, size);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out) {
    SYSTEM;
    char own[96];
    for (unsigned int gpu = 0; gpu < system_number("count", 0) && gpu < GPUS; gpu++)
        for (int at = -1; at < MIGS; at++) {
            nvmlDevice_t d = at < 0 ? &physical[gpu] : &children[gpu][at];
            if (!nvmlDeviceGetUUID(d, own, sizeof own) && !strcmp(own, uuid)) { *out = d; return OK; }
        }
    return NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t d, char *out, unsigned int size) {
    DEVICE(d);
    char value[96];
    return of_device(d, "name", value, sizeof value) ? copy(value, out, size) : UNSUPPORTED;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t d, unsigned int *out) { DEVICE(d); *out = (unsigned int)d->gpu; return OK; }

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t d, nvmlPciInfo_t *out) {
    DEVICE(d);
    memset(out, 0, sizeof *out);
    out->bus = 0x17u + (unsigned int)d->gpu;
    snprintf(out->busId, sizeof out->busId, "00000000:%02X:00.0", out->bus);
    snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "0000:%02X:00.0", out->bus);
    return OK;
}

/* --- readings */

#define READING(FUNCTION, KEY, TYPE)                            \
    nvmlReturn_t FUNCTION(nvmlDevice_t d, TYPE *out) {          \
        DEVICE(d);                                              \
        unsigned long long value;                               \
        if (!number(d, KEY, &value)) return UNSUPPORTED;        \
        *out = (TYPE)value;                                     \
        return OK;                                              \
    }

READING(nvmlDeviceGetMinorNumber, "minor", unsigned int)
READING(nvmlDeviceGetPowerUsage, "power", unsigned int)
READING(nvmlDeviceGetEnforcedPowerLimit, "limit", unsigned int)
READING(nvmlDeviceGetPowerManagementLimit, "limit", unsigned int)
READING(nvmlDeviceGetTotalEnergyConsumption, "energy", unsigned long long)
READING(nvmlDeviceGetCurrentClocksEventReasons, "throttle", unsigned long long)
READING(nvmlDeviceGetCurrentClocksThrottleReasons, "throttle", unsigned long long)

static nvmlReturn_t memory_of(nvmlDevice_t d, nvmlMemory_v2_t *out) {
    if (!number(d, "mem_total", &out->total)) return UNSUPPORTED;
    out->used = out->reserved = 0;
    number(d, "mem_used", &out->used);
    number(d, "mem_reserved", &out->reserved);
    out->free = out->total - out->used - out->reserved;
    return OK;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t d, nvmlMemory_v2_t *out) {
    DEVICE(d);
    if (out->version != (sizeof(nvmlMemory_v2_t) | 2u << 24)) return BAD_VERSION;
    return memory_of(d, out);
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t d, nvmlMemory_t *out) {
    DEVICE(d);
    nvmlMemory_v2_t full;
    nvmlReturn_t result = memory_of(d, &full);
    /* The first version of the structure counts reserved memory as used. */
    if (!result) out->total = full.total, out->free = full.free, out->used = full.used + full.reserved;
    return result;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t d, nvmlUtilization_t *out) {
    DEVICE(d);
    unsigned long long mig = 0, busy, memory = 0;
    number(d, "mig", &mig);
    if (mig || !number(d, "util", &busy)) return UNSUPPORTED;
    number(d, "util_mem", &memory);
    out->gpu = (unsigned int)busy, out->memory = (unsigned int)memory;
    return OK;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t d, nvmlTemperatureSensors_t sensor, unsigned int *out) {
    DEVICE(d);
    unsigned long long value;
    if (sensor != 0) return INVALID;
    if (!number(d, "temp", &value)) return UNSUPPORTED;
    *out = (unsigned int)value;
    return OK;
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t d, nvmlTemperature_t *out) {
    unsigned int value = 0;
    DEVICE(d);
    if (out->version != (sizeof *out | 1u << 24)) return BAD_VERSION;
    nvmlReturn_t result = nvmlDeviceGetTemperature(d, out->sensorType, &value);
    out->temperature = (int)value;
    return result;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t d, nvmlClockType_t type, unsigned int *out) {
    DEVICE(d);
    unsigned long long value;
    if (!number(d, type == 2 ? "mem_clock" : "sm_clock", &value)) return UNSUPPORTED;
    *out = (unsigned int)value;
    return OK;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t d, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter,
                                         unsigned long long *out) {
    DEVICE(d);
    (void)counter;
    return number(d, type == 0 ? "ecc_corrected" : "ecc_uncorrected", out) ? OK : UNSUPPORTED;
}

/* --- processes */

static nvmlReturn_t processes(nvmlDevice_t d, const char *key, unsigned int *count, nvmlProcessInfo_t *out) {
    char value[4096], *rest = value, *item;
    unsigned int room = out ? *count : 0, at = 0;
    if (!of_device(d, key, value, sizeof value)) { *count = 0; return OK; }
    while ((item = strsep(&rest, ","))) {
        unsigned int pid, gi = ANY, ci = ANY;
        char bytes[32];
        if (sscanf(item, "%u:%31[^:]:%u:%u", &pid, bytes, &gi, &ci) < 2) continue;
        if (at < room) {
            memset(&out[at], 0, sizeof out[at]);
            out[at].pid = pid, out[at].gpuInstanceId = gi, out[at].computeInstanceId = ci;
            out[at].usedGpuMemory = bytes[0] == '?' ? ~0ULL : strtoull(bytes, NULL, 0);
        }
        at++;
    }
    *count = at;
    return at > room ? TOO_SMALL : OK;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t d, unsigned int *n, nvmlProcessInfo_t *out) {
    DEVICE(d);
    return processes(d, "procs", n, out);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t d, unsigned int *n, nvmlProcessInfo_t *out) {
    DEVICE(d);
    return processes(d, "gprocs", n, out);
}

nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t d, unsigned int *n, nvmlProcessInfo_t *out) {
    DEVICE(d);
    return processes(d, "mprocs", n, out);
}

/* --- MIG: the profiles are those of an A100 80GB */

static const struct { unsigned int id, slices, memory_mb, size, starts[7], places; const char *name; } profile[] = {
    {19, 1, 9728, 1, {0, 1, 2, 3, 4, 5, 6}, 7, "MIG 1g.10gb"},
    {14, 2, 19968, 2, {0, 2, 4}, 3, "MIG 2g.20gb"},
    {9, 3, 40192, 4, {0, 4}, 2, "MIG 3g.40gb"},
    {5, 4, 40192, 4, {0}, 1, "MIG 4g.40gb"},
    {0, 7, 80384, 8, {0}, 1, "MIG 7g.80gb"},
};
enum { PROFILES = sizeof profile / sizeof profile[0] };

static int in_mig_mode(nvmlDevice_t d) {
    unsigned long long mode = 0;
    return number(d, "mig", &mode) && mode;
}

static int gi_number(int gpu, int id, const char *key, unsigned int *out) {
    char scope[48], value[32];
    snprintf(scope, sizeof scope, "gpu%d/gi%d", gpu, id);
    if (!look_up(scope, key, value, sizeof value)) return 0;
    *out = (unsigned int)strtoul(value, NULL, 0);
    return 1;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t d, unsigned int *current, unsigned int *pending) {
    DEVICE(d);
    unsigned long long mode;
    if (!number(d, "mig", &mode)) return UNSUPPORTED;
    *current = *pending = (unsigned int)mode;
    return OK;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t d, unsigned int *out) {
    DEVICE(d);
    unsigned long long mode;
    *out = number(d, "mig", &mode) ? 7 : 0;
    return OK;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t d, unsigned int index, nvmlDevice_t *out) {
    DEVICE(d);
    char value[96];
    if (!in_mig_mode(d)) return UNSUPPORTED;
    if (index >= MIGS) return INVALID;
    if (!of_device(&children[d->gpu][index], "gi", value, sizeof value)) return NOT_FOUND;
    *out = &children[d->gpu][index];
    return OK;
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t d, unsigned int *out) { DEVICE(d); *out = d->mig != NO_INSTANCE; return OK; }

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t d, nvmlDevice_t *out) {
    DEVICE(d);
    if (d->mig == NO_INSTANCE) return INVALID;
    *out = &physical[d->gpu];
    return OK;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t d, unsigned int *out) {
    DEVICE(d);
    unsigned long long value;
    if (d->mig == NO_INSTANCE || !number(d, "gi", &value)) return UNSUPPORTED;
    *out = (unsigned int)value;
    return OK;
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t d, unsigned int *out) {
    DEVICE(d);
    unsigned long long value = 0;
    if (d->mig == NO_INSTANCE) return UNSUPPORTED;
    number(d, "ci", &value);
    *out = (unsigned int)value;
    return OK;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t d, unsigned int index, nvmlGpuInstanceProfileInfo_v2_t *out) {
    DEVICE(d);
    if (out->version != (sizeof *out | 2u << 24)) return BAD_VERSION;
    if (!in_mig_mode(d) || index >= PROFILES) return UNSUPPORTED;
    out->id = profile[index].id, out->sliceCount = profile[index].slices, out->instanceCount = profile[index].places;
    out->memorySizeMB = profile[index].memory_mb;
    return copy(profile[index].name, out->name, sizeof out->name);
}

nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t d, unsigned int id, nvmlGpuInstancePlacement_t *out,
                                                           unsigned int *count) {
    MANAGE(d);
    for (int i = 0; i < PROFILES; i++)
        if (profile[i].id == id) {
            unsigned int room = *count;
            *count = profile[i].places;
            if (!out) return OK;
            if (room < profile[i].places) return TOO_SMALL;
            for (unsigned int k = 0; k < profile[i].places; k++) out[k].start = profile[i].starts[k], out[k].size = profile[i].size;
            return OK;
        }
    return INVALID;
}

nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t d, unsigned int id, nvmlGpuInstance_t *out, unsigned int *count) {
    MANAGE(d);
    *count = 0;
    for (int gi = 0; gi < MIGS; gi++) {
        unsigned int own;
        if (gi_number(d->gpu, gi, "profile", &own) && own == id) out[(*count)++] = &instances[d->gpu][gi];
    }
    return OK;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t d, unsigned int id, nvmlGpuInstance_t *out) {
    MANAGE(d);
    unsigned int own;
    if (id >= MIGS || !gi_number(d->gpu, (int)id, "profile", &own)) return NOT_FOUND;
    *out = &instances[d->gpu][id];
    return OK;
}

nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t gi, nvmlGpuInstanceInfo_t *out) {
    if (!gi) return INVALID;
    MANAGE(&physical[gi->gpu]);
    memset(out, 0, sizeof *out);
    out->device = &physical[gi->gpu], out->id = (unsigned int)gi->id;
    if (!gi_number(gi->gpu, gi->id, "profile", &out->profileId) || !gi_number(gi->gpu, gi->id, "start", &out->placement.start) ||
        !gi_number(gi->gpu, gi->id, "size", &out->placement.size))
        return NOT_FOUND;
    return OK;
}

/* --- events */

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *out) { SYSTEM; memset(&event_set, 0, sizeof event_set); *out = &event_set; return OK; }
nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) { (void)set; SYSTEM; return OK; }

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t d, unsigned long long *out) { DEVICE(d); *out = 0x8; return OK; }

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t d, unsigned long long types, nvmlEventSet_t set) {
    DEVICE(d);
    if (types & 0x8) set->gpus |= 1ULL << d->gpu;
    return OK;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *out, unsigned int timeout_ms) {
    SYSTEM;
    for (unsigned int waited = 0;; waited += 5) {
        char value[1024], *rest = value, *item;
        if (look_up("system", "xid", value, sizeof value))
            while ((item = strsep(&rest, ","))) {
                unsigned long long sequence, code;
                unsigned int gpu;
                if (sscanf(item, "%llu:%u:%llu", &sequence, &gpu, &code) != 3 || sequence <= set->delivered) continue;
                set->delivered = sequence;
                if (gpu >= GPUS || !(set->gpus >> gpu & 1)) continue;
                memset(out, 0, sizeof *out);
                out->device = &physical[gpu], out->eventType = 0x8, out->eventData = code;
                out->gpuInstanceId = out->computeInstanceId = ANY;
                return OK;
            }
        if (waited >= timeout_ms) return TIMED_OUT;
        usleep(5000);
    }
}
