/*
 * A stand-in for libnvidia-ml.so.1 whose answers come from a script, so that the real bindings and
 * the real helper process can be tried where there is no GPU.
 *
 * The script is the text file that $FAKE_NVML_SCRIPT names, looked at again whenever it changes:
 *
 *     node.count 8            devices on the bus
 *     node.init error:18      what nvmlInit answers
 *     all.temperature 61      a value of every device ...
 *     3.temperature 93        ... and of device 3, which wins
 *     3.ecc_unc_vol error:3   an NVML error instead of a value
 *     4.temperature hang      the call never returns
 *     3.lost 1                every call about device 3 says that it is lost
 *     3.absent 1              device 3 is not listed, and those behind it move up
 *     event 1 3 79            event number 1: Xid 79 on device 3 (numbers only grow)
 *
 * A number before the dot is the device's place on the bus, which never moves; its index may.
 * What the script does not mention is not supported.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, TIMEOUT = 10, LOST = 15 };
enum { DEVICES = 16, RULES = 4096, EVENTS = 1024, ALL = -2, NODE = -1 };

typedef struct { int place; } Device;
typedef struct { int place; char key[40]; int error; int hang; long long number; } Rule;
typedef struct { unsigned long long number; int place; unsigned long long xid; } Event;
typedef struct { unsigned long long seen; unsigned members; } EventSet;

static Device devices[DEVICES];
static Rule rules[RULES];
static Event events[EVENTS];
static int rule_count, event_count;
static struct timespec read_at;
static ino_t read_inode;
static off_t read_size;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void parse_line(const char *line)
{
    char owner[16], key[40], value[32];
    Event event;
    int place;

    if (sscanf(line, "event %llu %d %llu", &event.number, &place, &event.xid) == 3) {
        event.place = place;
        if (event_count < EVENTS)
            events[event_count++] = event;
        return;
    }
    if (sscanf(line, "%15[^.].%39s %31s", owner, key, value) != 3 || rule_count >= RULES)
        return;
    Rule *rule = &rules[rule_count++];
    memset(rule, 0, sizeof *rule);
    rule->place = !strcmp(owner, "all") ? ALL : !strcmp(owner, "node") ? NODE : atoi(owner);
    memcpy(rule->key, key, sizeof rule->key);
    if (!strcmp(value, "hang"))
        rule->hang = 1;
    else if (!strncmp(value, "error:", 6))
        rule->error = atoi(value + 6);
    else
        rule->number = strtoll(value, NULL, 0);
}

static void refresh(void)
{
    const char *path = getenv("FAKE_NVML_SCRIPT");
    struct stat now;
    char line[256];

    if (!path || stat(path, &now))
        return;
    if (now.st_ino == read_inode && now.st_size == read_size &&
        now.st_mtim.tv_sec == read_at.tv_sec && now.st_mtim.tv_nsec == read_at.tv_nsec)
        return;
    FILE *file = fopen(path, "r");
    if (!file)
        return;
    read_inode = now.st_ino;
    read_size = now.st_size;
    read_at = now.st_mtim;
    rule_count = event_count = 0;
    while (fgets(line, sizeof line, file))
        parse_line(line);
    fclose(file);
}

/* Answers a key: the device's own rule, else the one for all.  Sleeps for ever where told to. */
static int look_up(int place, const char *key, long long *number)
{
    Rule found;
    int best = 0;

    pthread_mutex_lock(&lock);
    refresh();
    for (int i = 0; i < rule_count; i++) {
        int rank = rules[i].place == place ? 2 : rules[i].place == ALL && place >= 0 ? 1 : 0;
        if (rank && rank >= best && !strcmp(rules[i].key, key)) {
            found = rules[i];
            best = rank;
        }
    }
    pthread_mutex_unlock(&lock);
    if (!best)
        return UNSUPPORTED;
    while (found.hang)
        pause();
    *number = found.number;
    return found.error;
}

static int ask(const Device *device, const char *key, long long *number)
{
    long long gone = 0;

    if (look_up(device->place, "lost", &gone) == SUCCESS && gone)
        return LOST;
    return look_up(device->place, key, number);
}

static int ask_u32(const Device *device, const char *key, unsigned *out)
{
    long long number = 0;
    int answer = ask(device, key, &number);
    if (answer == SUCCESS)
        *out = (unsigned)number;
    return answer;
}

static int listed(int place)
{
    long long count = 0, absent = 0;
    look_up(NODE, "count", &count);
    if (place >= count || place >= DEVICES)
        return 0;
    return !(look_up(place, "absent", &absent) == SUCCESS && absent);
}

/* --- the library --- */

int nvmlInitWithFlags(unsigned flags)
{
    long long ignored = 0;
    (void)flags;
    for (int i = 0; i < DEVICES; i++)
        devices[i].place = i;
    int answer = look_up(NODE, "init", &ignored);
    return answer == UNSUPPORTED ? SUCCESS : answer;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int error)
{
    switch (error) {
    case SUCCESS: return "Success";
    case UNSUPPORTED: return "Not Supported";
    case TIMEOUT: return "Timeout";
    case LOST: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = 0;
    for (int i = 0; i < DEVICES; i++)
        *count += listed(i);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out)
{
    long long ignored;
    for (int i = 0; i < DEVICES; i++) {
        if (listed(i) && index-- == 0) {
            int answer = look_up(i, "open", &ignored);
            *out = &devices[i];
            return answer == UNSUPPORTED ? SUCCESS : answer;
        }
    }
    return INVALID;
}

static void address_of(int place, char *out, unsigned size)
{
    snprintf(out, size, "00000000:%02X:00.0", 0x18 + 8 * place);
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *address, Device **out)
{
    unsigned domain, bus, slot;
    if (sscanf(address, "%x:%x:%x", &domain, &bus, &slot) != 3)
        return INVALID;
    int place = ((int)bus - 0x18) / 8;
    if (place < 0 || !listed(place))
        return NOT_FOUND;
    *out = &devices[place];
    return SUCCESS;
}

int nvmlDeviceGetIndex(Device *device, unsigned *index)
{
    *index = 0;
    for (int i = 0; i < device->place; i++)
        *index += listed(i);
    return SUCCESS;
}

int nvmlDeviceGetUUID(Device *device, char *out, unsigned size)
{
    snprintf(out, size, "GPU-6d2f0c1e-0000-4000-8000-%012d", device->place);
    return SUCCESS;
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char address[32];
} Pci;

int nvmlDeviceGetPciInfo_v3(Device *device, Pci *out)
{
    memset(out, 0, sizeof *out);
    address_of(device->place, out->address, sizeof out->address);
    return SUCCESS;
}

int nvmlDeviceGetTemperature(Device *device, unsigned sensor, unsigned *out)
{
    (void)sensor;
    return ask_u32(device, "temperature", out);
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned *milliwatts)
{
    return ask_u32(device, "power", milliwatts);
}

typedef struct { unsigned version, sensor; int degrees; } Temperature;

int nvmlDeviceGetTemperatureV(Device *device, Temperature *out)
{
    return ask_u32(device, "temperature", (unsigned *)&out->degrees);
}

int nvmlDeviceGetTemperatureThreshold(Device *device, unsigned which, unsigned *out)
{
    return which == 0 ? ask_u32(device, "shutdown", out) : UNSUPPORTED;
}

typedef struct { unsigned version; int left; } Margin;

int nvmlDeviceGetMarginTemperature(Device *device, Margin *out)
{
    return ask_u32(device, "margin", (unsigned *)&out->left);
}

int nvmlDeviceGetTotalEccErrors(Device *device, unsigned kind, unsigned counter, uint64_t *out)
{
    static const char *names[2][2] = {{"ecc_cor_vol", "ecc_cor_agg"}, {"ecc_unc_vol", "ecc_unc_agg"}};
    long long number = 0;
    if (kind > 1 || counter > 1)
        return INVALID;
    int answer = ask(device, names[kind][counter], &number);
    if (answer == SUCCESS)
        *out = (uint64_t)number;
    return answer;
}

typedef struct { unsigned version; uint64_t counts[11]; unsigned exceeded; } Sram;

int nvmlDeviceGetSramEccErrorStatus(Device *device, Sram *out)
{
    return ask_u32(device, "sram_exceeded", &out->exceeded);
}

int nvmlDeviceGetRemappedRows(Device *device, unsigned *correctable, unsigned *uncorrectable,
                              unsigned *pending, unsigned *failure)
{
    int answer = ask_u32(device, "remap_failure", failure);
    if (answer != SUCCESS)
        return answer;
    *correctable = *uncorrectable = *pending = 0;
    ask_u32(device, "remap_cor", correctable);
    ask_u32(device, "remap_unc", uncorrectable);
    ask_u32(device, "remap_pending", pending);
    return SUCCESS;
}

int nvmlDeviceGetPcieReplayCounter(Device *device, unsigned *out)
{
    return ask_u32(device, "pcie_replay", out);
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *device, uint64_t *out)
{
    long long number = 0;
    int answer = ask(device, "throttle", &number);
    *out = (uint64_t)number;
    return answer;
}

int nvmlDeviceGetNvLinkState(Device *device, unsigned link, unsigned *active)
{
    unsigned count = 0;
    int answer = ask_u32(device, "nvlinks", &count);
    if (answer != SUCCESS)
        return answer;
    *active = 1;
    return link < count ? SUCCESS : INVALID;
}

int nvmlDeviceGetNvLinkErrorCounter(Device *device, unsigned link, unsigned counter, uint64_t *out)
{
    static const char *names[] = {"replay", "recovery", "crc_flit", "crc_data"};
    char key[40];
    long long number = 0;
    if (counter > 3)
        return INVALID;
    snprintf(key, sizeof key, "link%u_%s", link, names[counter]);
    int answer = ask(device, key, &number);
    if (answer == UNSUPPORTED) {
        snprintf(key, sizeof key, "links_%s", names[counter]);
        answer = ask(device, key, &number);
    }
    *out = (uint64_t)number;
    return answer;
}

typedef struct {
    unsigned id, scope;
    int64_t at, latency;
    unsigned type;
    int answer;
    union { uint64_t big; int small; } value;
} Field;

int nvmlDeviceGetFieldValues(Device *device, int count, Field *fields)
{
    for (int i = 0; i < count; i++) {
        char key[40];
        long long number = 0;
        snprintf(key, sizeof key, "field%u", fields[i].id);
        fields[i].answer = ask(device, key, &number);
        if (fields[i].answer == LOST)
            return LOST;
        fields[i].type = number < 0 ? 5 : 3;
        fields[i].value.big = 0;
        if (number < 0)
            fields[i].value.small = (int)number;
        else
            fields[i].value.big = (uint64_t)number;
    }
    return SUCCESS;
}

typedef struct {
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned state;
    unsigned health;
    unsigned char summary;
} Fabric;

int nvmlDeviceGetGpuFabricInfoV(Device *device, Fabric *out)
{
    unsigned summary = 0, status = 0;
    int answer = ask_u32(device, "fabric_state", &out->state);
    if (answer != SUCCESS)
        return answer;
    ask_u32(device, "fabric_status", &status);
    ask_u32(device, "fabric_summary", &summary);
    out->status = (int)status;
    if (out->version >> 24 >= 3)
        out->summary = (unsigned char)summary;
    return SUCCESS;
}

/* --- events --- */

typedef struct { Device *device; uint64_t type, data; unsigned instance, compute; } EventData;

int nvmlEventSetCreate(EventSet **out)
{
    *out = calloc(1, sizeof **out);
    pthread_mutex_lock(&lock);
    refresh();
    for (int i = 0; i < event_count; i++)
        if (events[i].number > (*out)->seen)
            (*out)->seen = events[i].number;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int nvmlEventSetFree(EventSet *set)
{
    free(set);
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(Device *device, uint64_t types, EventSet *set)
{
    long long ignored = 0;
    (void)types;
    int answer = look_up(device->place, "events", &ignored);
    if (answer != SUCCESS && answer != UNSUPPORTED)
        return answer;
    set->members |= 1u << device->place;
    return SUCCESS;
}

int nvmlEventSetWait_v2(EventSet *set, EventData *out, unsigned timeout_ms)
{
    long long ignored = 0;
    for (unsigned waited = 0;; waited += 20) {
        int answer = look_up(NODE, "event_wait", &ignored);
        if (answer != SUCCESS && answer != UNSUPPORTED)
            return answer;
        pthread_mutex_lock(&lock);
        refresh();
        for (int i = 0; i < event_count; i++) {
            if (events[i].number <= set->seen || !(set->members >> events[i].place & 1))
                continue;
            set->seen = events[i].number;
            memset(out, 0, sizeof *out);
            out->device = &devices[events[i].place];
            out->type = 8;
            out->data = events[i].xid;
            out->instance = out->compute = ~0u;
            pthread_mutex_unlock(&lock);
            return SUCCESS;
        }
        pthread_mutex_unlock(&lock);
        if (waited >= timeout_ms)
            return TIMEOUT;
        usleep(20000);
    }
}
