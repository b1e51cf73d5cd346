// Memory of tensors that ends at a guard page, for LD_PRELOAD. While `hostile_guard(1)` is active, each aligned allocation
// (PyTorch's CPU allocator makes no others) ends at a page without access and is filled with the pattern. When it is freed its
// pages lose their access. A read or write past the end, or after the free, is a SIGSEGV at the instruction that does it.
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define RESERVED (1ULL << 42)
#define PAGE 4096ULL
#define ALIGNMENT 16ULL  // what malloc promises; more would leave a gap before the guard page
#define LARGEST (1ULL << 28)

extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *p);

static char *region, *next;
static int active;
static unsigned char pattern;

__attribute__((constructor)) static void reserve(void) {
  region = mmap(NULL, RESERVED, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (region == MAP_FAILED) region = NULL;
  next = region;
}

// Whether there is such memory.
int hostile_guard(int on) {
  active = on && region != NULL;
  return region != NULL;
}

void hostile_pattern(int byte) { pattern = (unsigned char)byte; }

int posix_memalign(void **out, size_t alignment, size_t size) {
  if (!active) return (*out = __libc_memalign(alignment, size)) ? 0 : ENOMEM;
  if (size > LARGEST) return ENOMEM;
  uint64_t used = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  uint64_t bytes = (used + ALIGNMENT + PAGE - 1) / PAGE * PAGE;  // the block starts with its size
  char *start = __atomic_fetch_add(&next, (ptrdiff_t)(bytes + PAGE), __ATOMIC_RELAXED);
  if (start + bytes + PAGE > region + RESERVED || mprotect(start, bytes, PROT_READ | PROT_WRITE)) return ENOMEM;
  *(uint64_t *)start = bytes;
  *out = memset(start + bytes - used, pattern, used);
  return 0;
}

void free(void *p) {
  char *at = p;
  if (!region || at < region || at >= region + RESERVED) {
    __libc_free(p);
    return;
  }
  char *start = region + (at - region - ALIGNMENT) / (ptrdiff_t)PAGE * (ptrdiff_t)PAGE;
  uint64_t bytes = *(uint64_t *)start;
  madvise(start, bytes, MADV_DONTNEED);
  mprotect(start, bytes, PROT_NONE);
}
