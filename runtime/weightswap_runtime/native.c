/* Hash trees of changed rows, copies of many small ranges, the search for values that are not finite, and files on
 * their way to a device. Called through ctypes; where this file was not compiled, Python does the same. Nothing here
 * allocates; the caller has checked all bounds.
 *
 * BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs) is a binary tree over chunks of 1024 bytes. A block of 1 MiB has
 * 1024 of them, so its tree is complete: node n of a block has the parent 1024 + n / 2, leaves are 0 to 1023, the root
 * is 2046. Each node is a chaining value of 32 bytes; 64 KiB of nodes for each MiB. Eight nodes are computed at a time,
 * one in each lane of a vector.
 */
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHUNK 1024
#define NODES 2048 /* of a block; the last is not used */
#define LANES 8
enum { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8 };

typedef uint32_t lanes __attribute__((vector_size(4 * LANES)));
#define INLINE static inline __attribute__((always_inline))

/* One binary for every processor: the loader chooses. Only where the linker has what that takes. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONED __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define CLONED
#endif

static const uint32_t IV[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                               0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

/* Transposes eight rows of eight words: lane k of row i becomes lane i of row k. */
INLINE void transpose(lanes row[8]) {
  lanes even[8], odd[8];
  for (int i = 0; i < 4; i++) { /* exchange halves */
    even[i] = __builtin_shuffle(row[i], row[i + 4], (lanes){0, 1, 2, 3, 8, 9, 10, 11});
    odd[i] = __builtin_shuffle(row[i], row[i + 4], (lanes){4, 5, 6, 7, 12, 13, 14, 15});
  }
  for (int i = 0; i < 4; i++) row[i] = even[i], row[i + 4] = odd[i];
  for (int j = 0; j < 8; j += 4) /* quarters */
    for (int i = j; i < j + 2; i++) {
      even[i] = __builtin_shuffle(row[i], row[i + 2], (lanes){0, 1, 8, 9, 4, 5, 12, 13});
      odd[i] = __builtin_shuffle(row[i], row[i + 2], (lanes){2, 3, 10, 11, 6, 7, 14, 15});
    }
  for (int j = 0; j < 8; j += 4)
    for (int i = j; i < j + 2; i++) row[i] = even[i], row[i + 2] = odd[i];
  for (int i = 0; i < 8; i += 2) { /* neighbours */
    lanes a = row[i], b = row[i + 1];
    row[i] = __builtin_shuffle(a, b, (lanes){0, 8, 2, 10, 4, 12, 6, 14});
    row[i + 1] = __builtin_shuffle(a, b, (lanes){1, 9, 3, 11, 5, 13, 7, 15});
  }
}

/* Loads 64 bytes from each of eight places, as 16 words in lanes. */
INLINE void load(lanes message[16], const uint8_t *const from[LANES]) {
  for (int half = 0; half < 2; half++) {
    for (int lane = 0; lane < LANES; lane++) memcpy(&message[8 * half + lane], from[lane] + 32 * half, 32);
    transpose(message + 8 * half);
  }
}

INLINE lanes splat(uint32_t word) { return (lanes){word, word, word, word, word, word, word, word}; }

#define ROTATED(x, n) (((x) >> (n)) | ((x) << (32 - (n))))
#define MIX(a, b, c, d, x, y)                                                                    \
  a += b + x, d = ROTATED(d ^ a, 16), c += d, b = ROTATED(b ^ c, 12);                            \
  a += b + y, d = ROTATED(d ^ a, 8), c += d, b = ROTATED(b ^ c, 7);

/* The compression function on eight lanes: `value` is the chaining value, before and after. */
INLINE void compress(lanes value[8], const lanes m[16], const lanes *counter, uint32_t flags) {
  static const uint8_t order[7][16] = {
      {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
      {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1}, {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
      {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4}, {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
      {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13}};
  lanes v[16];
  for (int i = 0; i < 8; i++) v[i] = value[i];
  for (int i = 0; i < 4; i++) v[8 + i] = splat(IV[i]);
  v[12] = *counter;
  v[13] = splat(0);
  v[14] = splat(64); /* bytes of the message */
  v[15] = splat(flags);
#pragma GCC unroll 7
  for (int r = 0; r < 7; r++) {
    const uint8_t *o = order[r];
    MIX(v[0], v[4], v[8], v[12], m[o[0]], m[o[1]])
    MIX(v[1], v[5], v[9], v[13], m[o[2]], m[o[3]])
    MIX(v[2], v[6], v[10], v[14], m[o[4]], m[o[5]])
    MIX(v[3], v[7], v[11], v[15], m[o[6]], m[o[7]])
    MIX(v[0], v[5], v[10], v[15], m[o[8]], m[o[9]])
    MIX(v[1], v[6], v[11], v[12], m[o[10]], m[o[11]])
    MIX(v[2], v[7], v[8], v[13], m[o[12]], m[o[13]])
    MIX(v[3], v[4], v[9], v[14], m[o[14]], m[o[15]])
  }
  for (int i = 0; i < 8; i++) value[i] = v[i] ^ v[i + 8];
}

INLINE void start(lanes value[8]) {
  for (int i = 0; i < 8; i++) value[i] = splat(IV[i]);
}

INLINE void store(lanes value[8], uint8_t *const to[LANES], int count) {
  transpose(value);
  for (int lane = 0; lane < count; lane++) memcpy(to[lane], &value[lane], 32);
}

CLONED static void hash_chunks(const uint8_t *const from[LANES], const uint32_t number[LANES], uint8_t *const to[LANES],
                               int count) {
  lanes value[8], message[16], counter;
  memcpy(&counter, number, sizeof counter);
  start(value);
  for (int part = 0; part < 16; part++) {
    const uint8_t *at[LANES];
    for (int lane = 0; lane < LANES; lane++) at[lane] = from[lane] + 64 * part;
    load(message, at);
    compress(value, message, &counter, (part == 0 ? CHUNK_START : 0) | (part == 15 ? CHUNK_END : 0));
  }
  store(value, to, count);
}

CLONED static void hash_parents(const uint8_t *const from[LANES], uint8_t *const to[LANES], int count, uint32_t flags) {
  lanes value[8], message[16];
  const lanes zero = {0};
  start(value);
  load(message, from);
  compress(value, message, &zero, PARENT | flags);
  store(value, to, count);
}

/* Lays ranges of new bytes over a copy of the chunk that begins at `low`. Returns the first range that ends behind it:
 * chunks come in ascending order. */
INLINE int64_t lay_over(uint8_t *copy, int64_t low, const int64_t *begins, const int64_t *ends, const int64_t *starts,
                        int64_t ranges, const uint8_t *data, int64_t next) {
  while (next < ranges && ends[next] <= low) next++;
  for (int64_t i = next; i < ranges && begins[i] < low + CHUNK; i++) {
    int64_t begin = begins[i] > low ? begins[i] : low;
    int64_t end = ends[i] < low + CHUNK ? ends[i] : low + CHUNK;
    memcpy(copy + begin - low, data + starts[i] + begin - begins[i], end - begin);
  }
  return next;
}

/* Hashes chunks of a tensor again, in ascending order, and all nodes above them.
 *
 * tree: the nodes of all blocks. memory: the tensor's bytes, or, if `compact`, the content of these chunks alone, end to
 * end. begins, ends, starts, data: ranges of new bytes to lay over them first, ascending, and where the bytes of each
 * begin in `data`. nodes: space for as many numbers as there are chunks. */
void rehash(uint8_t *tree, const uint8_t *memory, int64_t compact, const int64_t *chunks, int64_t count,
            const int64_t *begins, const int64_t *ends, const int64_t *starts, int64_t ranges, const uint8_t *data,
            int64_t *nodes) {
  uint8_t copies[LANES][CHUNK] __attribute__((aligned(64)));
  int64_t next = 0;
  for (int64_t first = 0; first < count; first += LANES) {
    const uint8_t *from[LANES];
    uint8_t *to[LANES];
    uint32_t number[LANES];
    int used = count - first < LANES ? (int)(count - first) : LANES;
    for (int lane = 0; lane < LANES; lane++) {
      int64_t index = first + (lane < used ? lane : used - 1), chunk = chunks[index];
      from[lane] = memory + (compact ? index : chunk) * CHUNK;
      number[lane] = (uint32_t)(chunk & (CHUNK - 1));
      nodes[index] = (chunk & ~(int64_t)(CHUNK - 1)) * 2 + number[lane];
      to[lane] = tree + 32 * nodes[index];
      if (!compact && index + LANES < count) /* random rows: the whole chunk will be read */
        for (int line = 0; line < CHUNK; line += 64) __builtin_prefetch(memory + chunks[index + LANES] * CHUNK + line);
      if (ranges && lane < used) {
        memcpy(copies[lane], from[lane], CHUNK);
        next = lay_over(copies[lane], chunk * CHUNK, begins, ends, starts, ranges, data, next);
      }
      if (ranges) from[lane] = copies[lane < used ? lane : used - 1];
    }
    hash_chunks(from, number, to, used);
  }
  for (int level = 0; level < 10; level++) {
    int64_t parents = 0;
    for (int64_t i = 0; i < count; i++) {
      int64_t node = nodes[i], parent = (node & ~(int64_t)(NODES - 1)) + CHUNK + (node & (NODES - 1)) / 2;
      if (!parents || nodes[parents - 1] != parent) nodes[parents++] = parent;
    }
    count = parents;
    for (int64_t first = 0; first < count; first += LANES) {
      const uint8_t *from[LANES];
      uint8_t *to[LANES];
      int used = count - first < LANES ? (int)(count - first) : LANES;
      for (int lane = 0; lane < LANES; lane++) {
        int64_t node = nodes[first + (lane < used ? lane : used - 1)];
        int64_t block = node & ~(int64_t)(NODES - 1);
        from[lane] = tree + 32 * (block + 2 * ((node & (NODES - 1)) - CHUNK));
        to[lane] = tree + 32 * node;
      }
      hash_parents(from, to, used, level == 9 ? ROOT : 0);
    }
  }
}

#define AHEAD 8 /* ranges that are fetched into the cache before their turn */
#define FETCH(memory, writes)                                                                       \
  if (i + AHEAD < count)                                                                            \
    for (int64_t at = begins[i + AHEAD], end = ends[i + AHEAD]; at < end && at < begins[i + AHEAD] + 512; at += 64) \
      __builtin_prefetch((memory) + at, writes);

/* Writes the ranges' bytes, which are end to end in `data`. */
void scatter(uint8_t *memory, const int64_t *begins, const int64_t *ends, int64_t count, const uint8_t *data) {
  for (int64_t i = 0; i < count; i++) {
    FETCH(memory, 1)
    int64_t size = ends[i] - begins[i];
    memcpy(memory + begins[i], data, size);
    data += size;
  }
}

/* Reads the ranges' bytes, end to end. */
void gather(const uint8_t *memory, const int64_t *begins, const int64_t *ends, int64_t count, uint8_t *data) {
  for (int64_t i = 0; i < count; i++) {
    FETCH(memory, 0)
    int64_t size = ends[i] - begins[i];
    memcpy(data, memory + begins[i], size);
    data += size;
  }
}

/* Copies the ranges from one memory to the same places of another. */
void copy(uint8_t *target, const uint8_t *source, const int64_t *begins, const int64_t *ends, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    FETCH(source, 0)
    FETCH(target, 1)
    memcpy(target + begins[i], source + begins[i], ends[i] - begins[i]);
  }
}

#define HAS(bits)                                                                                            \
  CLONED static int has_##bits(const void *data, int64_t nbytes, uint##bits##_t mask, uint##bits##_t value) { \
    typedef uint##bits##_t __attribute__((aligned(1), may_alias)) element; /* files need not align tensors */ \
    const element *elements = data;                                                                          \
    uint##bits##_t found = 0;                                                                                \
    for (int64_t i = 0; i < nbytes / (bits / 8); i++) found |= (elements[i] & mask) == value;                 \
    return found;                                                                                            \
  }
HAS(8)
HAS(16)
HAS(32)
HAS(64)

/* Returns whether there is an element of `size` bytes whose bits in the mask are those of the value. */
int has_pattern(const void *data, int64_t nbytes, int64_t size, uint64_t mask, uint64_t value) {
  switch (size) {
    case 1: return has_8(data, nbytes, mask, value);
    case 2: return has_16(data, nbytes, mask, value);
    case 4: return has_32(data, nbytes, mask, value);
    default: return has_64(data, nbytes, mask, value);
  }
}

#define PIECE (2 << 20) /* bytes that stay in the processor's caches between the read and the device's copy */
#define PIECES 4
#define TO_DEVICE 1        /* cudaMemcpyHostToDevice */
#define SLEEPING_EVENT 3   /* cudaEventBlockingSync | cudaEventDisableTiming */

/* Functions of the CUDA runtime; each returns 0 if it succeeds. */
typedef struct {
  int (*copy)(void *to, const void *from, size_t size, int kind, void *stream);
  int (*create)(void **event, unsigned flags);
  int (*record)(void *event, void *stream);
  int (*wait)(void *event);
  int (*destroy)(void *event);
  int (*forget)(void); /* cudaGetLastError: else torch would find a failure here behind its next kernel in this thread */
} cuda;

/* Reads all of some bytes. Returns 0; -1 if that fails or the file ends early. */
static int read_all(int file, uint8_t *to, int64_t size, int64_t at) {
  while (size > 0) {
    ssize_t got = pread(file, to, size, at);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return -1;
    to += got, at += got, size -= got;
  }
  return 0;
}

static int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Copies ranges to a device, through PIECES pieces of page-locked memory at `locked` in turn, from byte `done` of all
 * their bytes on. Returns how many bytes are done or enqueued in the stream: all, or fewer once `patience` nanoseconds
 * are over; the device has read `locked` then. Returns -1 if a read or a call of CUDA fails.
 *
 * file: where the ranges are read, unless there is `memory`. targets, begins, sizes: of each range. */
int64_t upload(const cuda *api, void *stream, int file, const uint8_t *memory, uint8_t *device, const int64_t *targets,
               const int64_t *begins, const int64_t *sizes, int64_t count, int64_t done, uint8_t *locked,
               int64_t patience) {
  void *events[PIECES];
  int created = 0, failed = 0;
  int64_t turn = 0, range = 0, at = done, end = nanoseconds() + patience;
  while (range < count && at >= sizes[range]) at -= sizes[range++];
  while (created < PIECES && !failed) failed = api->create(&events[created], SLEEPING_EVENT) || (created++, 0);
  for (; range < count && !failed; turn++) {
    int64_t size = sizes[range] - at < PIECE ? sizes[range] - at : PIECE, begin = begins[range] + at;
    uint8_t *piece = locked + turn % PIECES * PIECE;
    void *event = events[turn % PIECES];
    if (turn && nanoseconds() > end) break;
    failed = turn >= PIECES && api->wait(event);
    if (!failed && memory) memcpy(piece, memory + begin, size);
    if (!failed && !memory) failed = read_all(file, piece, size, begin);
    failed = failed || api->copy(device + targets[range] + at, piece, size, TO_DEVICE, stream) ||
             api->record(event, stream);
    at += size, done += size;
    while (range < count && at >= sizes[range]) at -= sizes[range++];
  }
  for (int64_t i = turn < PIECES ? 0 : turn - PIECES; i < turn && range < count && !failed; i++)
    failed = api->wait(events[i % PIECES]);
  while (created) api->destroy(events[--created]);
  if (failed) api->forget();
  return failed ? -1 : done;
}
