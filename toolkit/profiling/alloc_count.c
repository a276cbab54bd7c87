/* Counts the bytes of CPU tensors that are alive in this process, and their highest point.
 *
 * torch takes every CPU tensor's memory from posix_memalign (c10/core/impl/alloc_cpu.cpp) and gives it back with free,
 * often on another thread than the one that took it (gloo's, autograd's). Both are interposed here by LD_PRELOAD, so the
 * count is exact whichever thread frees. Sizes are remembered by address in an open-addressed table; an entry that goes
 * lets the entries behind it move up, so lookups stay short over any length of run.
 *
 * While a record is on, every birth and death is also written down in order, with a number that the program sets to say
 * where it is (toolkit_place).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#define SLOTS ((size_t)1 << 21)

typedef struct {
  uintptr_t address; /* 0: empty */
  size_t size;
  int32_t place;
} entry;

typedef struct {
  uint64_t address;
  int64_t size; /* below zero: a death */
  int32_t place;
  int32_t elsewhere; /* on another thread than the one that began the record */
} event;

static entry table[SLOTS];
static size_t used;
static long long live_bytes, peak_bytes, lost_blocks;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static int (*next_memalign)(void **, size_t, size_t);
static void (*next_free)(void *);
static event *record;
static size_t recorded, room;
static int recording;
static pthread_t recorder;
int32_t toolkit_place;

static void note(uintptr_t address, int64_t size, int32_t place) {
  if (recorded == room) { /* mremap and not realloc: this is called from within an allocation */
    size_t more = room ? room * 2 : 1 << 16;
    void *grown = room ? mremap(record, room * sizeof(event), more * sizeof(event), MREMAP_MAYMOVE)
                       : mmap(NULL, more * sizeof(event), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (grown == MAP_FAILED) {
      recording = -1;
      return;
    }
    record = grown;
    room = more;
  }
  record[recorded++] = (event){address, size, place, !pthread_equal(pthread_self(), recorder)};
}

static size_t home_of(uintptr_t address) {
  return (size_t)((address >> 6) * UINT64_C(0x9E3779B97F4A7C15) >> 24) & (SLOTS - 1);
}

static void remember(uintptr_t address, size_t size) {
  if (used > SLOTS / 4 * 3) { /* Never seen in practice; a full table would end in an endless search. */
    lost_blocks++;
    return;
  }
  size_t at = home_of(address);
  while (table[at].address) at = (at + 1) & (SLOTS - 1);
  table[at].address = address;
  table[at].size = size;
  table[at].place = toolkit_place;
  used++;
  live_bytes += (long long)size;
  if (live_bytes > peak_bytes) peak_bytes = live_bytes;
  if (recording > 0) note(address, (int64_t)size, toolkit_place);
}

static void forget(uintptr_t address) {
  size_t at = home_of(address);
  while (table[at].address && table[at].address != address) at = (at + 1) & (SLOTS - 1);
  if (!table[at].address) return;
  live_bytes -= (long long)table[at].size;
  if (recording > 0) note(address, -(int64_t)table[at].size, toolkit_place);
  used--;
  size_t hole = at;
  for (size_t next = (at + 1) & (SLOTS - 1); table[next].address; next = (next + 1) & (SLOTS - 1)) {
    size_t home = home_of(table[next].address);
    /* The entry may move into the hole unless its home lies cyclically behind the hole. */
    if (((next - home) & (SLOTS - 1)) >= ((next - hole) & (SLOTS - 1))) {
      table[hole] = table[next];
      hole = next;
    }
  }
  table[hole].address = 0;
}

int posix_memalign(void **out, size_t alignment, size_t size) {
  if (!next_memalign) next_memalign = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
  int status = next_memalign(out, alignment, size);
  if (status == 0 && *out && ((uintptr_t)*out & 63) == 0) {
    pthread_mutex_lock(&guard);
    remember((uintptr_t)*out, size);
    pthread_mutex_unlock(&guard);
  }
  return status;
}

void free(void *block) {
  if (!next_free) next_free = (void (*)(void *))dlsym(RTLD_NEXT, "free");
  if (block && ((uintptr_t)block & 63) == 0) { /* torch asks for 64-byte alignment */
    pthread_mutex_lock(&guard);
    forget((uintptr_t)block);
    pthread_mutex_unlock(&guard);
  }
  next_free(block);
}

long long toolkit_live_bytes(void) { return live_bytes; }
long long toolkit_peak_bytes(void) { return peak_bytes; }
long long toolkit_lost_blocks(void) { return lost_blocks; }

void toolkit_reset_peak(void) {
  pthread_mutex_lock(&guard);
  peak_bytes = live_bytes;
  pthread_mutex_unlock(&guard);
}

/* What is alive now is not counted, and never was. */
void toolkit_disregard(void) {
  pthread_mutex_lock(&guard);
  for (size_t at = 0; at < SLOTS; at++)
    if (table[at].address) table[at].address = 0;
  used = 0;
  live_bytes = peak_bytes = 0;
  pthread_mutex_unlock(&guard);
}

/* Begin a record with the births of what is alive, each with the place it had then; returns their number. */
long long toolkit_record(void) {
  pthread_mutex_lock(&guard);
  recorded = 0;
  recorder = pthread_self();
  recording = 1;
  for (size_t at = 0; at < SLOTS && recording > 0; at++)
    if (table[at].address) note(table[at].address, (int64_t)table[at].size, table[at].place);
  long long held = (long long)recorded;
  pthread_mutex_unlock(&guard);
  return held;
}

/* End it: the number of events at *out, which stay until toolkit_forget; -1: there was no room for all of them. */
long long toolkit_recorded(const event **out) {
  pthread_mutex_lock(&guard);
  long long count = recording > 0 ? (long long)recorded : -1;
  recording = 0;
  *out = record;
  pthread_mutex_unlock(&guard);
  return count;
}

void toolkit_forget(void) {
  pthread_mutex_lock(&guard);
  if (room) munmap(record, room * sizeof(event));
  record = NULL;
  recorded = room = 0;
  pthread_mutex_unlock(&guard);
}
