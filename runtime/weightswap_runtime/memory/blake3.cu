// BLAKE3 of blocks of at most 1 MiB, each by the threads of one thread block: a thread hashes chunks of 1 KiB, and the
// tree above them is made in shared memory. https://github.com/BLAKE3-team/BLAKE3-specs/blob/master/blake3.pdf
// The words pass through registers anyway, so each is also compared with the bit patterns that are not finite.
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define CHUNK 1024u
#define MOST_CHUNKS 1024u
#define THREADS 256u
#define CHUNK_START 1u
#define CHUNK_END 2u
#define PARENT 4u
#define ROOT 8u

#define INITIAL_VALUE(index) \
  ((index) == 0 ? 0x6A09E667u : (index) == 1 ? 0xBB67AE85u : (index) == 2 ? 0x3C6EF372u : (index) == 3 ? 0xA54FF53Au \
   : (index) == 4 ? 0x510E527Fu : (index) == 5 ? 0x9B05688Cu : (index) == 6 ? 0x1F83D9ABu : 0x5BE0CD19u)

__device__ __forceinline__ u32 rotated(u32 value, int count) { return (value >> count) | (value << (32 - count)); }

__device__ __forceinline__ void mix(u32 *state, int a, int b, int c, int d, u32 x, u32 y) {
  state[a] += state[b] + x;
  state[d] = rotated(state[d] ^ state[a], 16);
  state[c] += state[d];
  state[b] = rotated(state[b] ^ state[c], 12);
  state[a] += state[b] + y;
  state[d] = rotated(state[d] ^ state[a], 8);
  state[c] += state[d];
  state[b] = rotated(state[b] ^ state[c], 7);
}

// `value`, a chaining value of eight words, becomes that of `value` and a message of 16 words, which is permuted.
__device__ __forceinline__ void compress(u32 *value, u32 *message, u32 counter, u32 length, u32 flags) {
  u32 state[16];
#pragma unroll
  for (int i = 0; i < 8; i++) state[i] = value[i];
#pragma unroll
  for (int i = 0; i < 4; i++) state[8 + i] = INITIAL_VALUE(i);
  state[12] = counter;
  state[13] = 0; // a block has few chunks
  state[14] = length;
  state[15] = flags;
#pragma unroll
  for (int round = 0; round < 7; round++) {
    mix(state, 0, 4, 8, 12, message[0], message[1]);
    mix(state, 1, 5, 9, 13, message[2], message[3]);
    mix(state, 2, 6, 10, 14, message[4], message[5]);
    mix(state, 3, 7, 11, 15, message[6], message[7]);
    mix(state, 0, 5, 10, 15, message[8], message[9]);
    mix(state, 1, 6, 11, 12, message[10], message[11]);
    mix(state, 2, 7, 8, 13, message[12], message[13]);
    mix(state, 3, 4, 9, 14, message[14], message[15]);
    const u32 old[16] = {message[0],  message[1],  message[2],  message[3],  message[4],  message[5],
                         message[6],  message[7],  message[8],  message[9],  message[10], message[11],
                         message[12], message[13], message[14], message[15]};
    const int order[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
#pragma unroll
    for (int i = 0; i < 16; i++) message[i] = old[order[i]];
  }
#pragma unroll
  for (int i = 0; i < 8; i++) value[i] = state[i] ^ state[i + 8];
}

struct __align__(16) Quad {
  u32 word[4];
};

// Little-endian words of up to 64 bytes; what lies beyond them is zero. `data` is at a multiple of 16 if there are 64.
__device__ __forceinline__ void load(const u8 *data, u32 length, u32 *message) {
  if (length == 64) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const Quad quad = ((const Quad *)data)[i];
#pragma unroll
      for (u32 j = 0; j < 4; j++) message[4 * i + j] = quad.word[j];
    }
    return;
  }
#pragma unroll
  for (u32 i = 0; i < 16; i++) {
    message[i] = 0;
#pragma unroll
    for (u32 byte = 0; byte < 4; byte++)
      if (4 * i + byte < length) message[i] |= (u32)data[4 * i + byte] << (8 * byte);
  }
}

// A block in memory, and which of its elements are not finite: those whose bits in `mask` are those of `value`. A word
// has one to four elements, in lanes; `even` and `odd` are the highest bits of the lanes that count in words with an even
// and an odd index, and `ones` the lowest bits of all lanes.
struct Part {
  u64 offset, length;
  u32 value, mask, even, odd, ones, unused;
};

// Nonzero if a lane of a word is not finite. https://graphics.stanford.edu/~seander/bithacks.html#ZeroInWord
__device__ __forceinline__ u32 not_finite(u32 word, const Part &part, u32 lanes) {
  const u32 differing = (word ^ part.value) & part.mask;
  return (differing - part.ones) & ~differing & lanes;
}

// The chaining value of a chunk of at most 1024 bytes; `flags` is ROOT where there is no other. Sets bits of `found` if
// an element is not finite.
__device__ __forceinline__ void hash_chunk(const u8 *data, u32 length, u32 counter, u32 flags, const Part &part,
                                           u32 *found, u32 *value) {
#pragma unroll
  for (int i = 0; i < 8; i++) value[i] = INITIAL_VALUE(i);
  u32 done = 0, start = CHUNK_START;
  do {
    const u32 left = length - done, step = left < 64 ? left : 64;
    u32 message[16];
    load(data + done, step, message);
#pragma unroll
    for (int i = 0; i < 16; i++) *found |= not_finite(message[i], part, i % 2 ? part.odd : part.even);
    compress(value, message, counter, step, start | (done + step == length ? CHUNK_END | flags : 0));
    done += step;
    start = 0;
  } while (done < length);
}

// The chaining value of two neighbours of eight words each, over the first.
__device__ __forceinline__ void join(const u32 *pair, u32 flags, u32 *value) {
  u32 message[16];
#pragma unroll
  for (int i = 0; i < 16; i++) message[i] = pair[i];
#pragma unroll
  for (int i = 0; i < 8; i++) value[i] = INITIAL_VALUE(i);
  compress(value, message, 0, 64, PARENT | flags);
}

__device__ __forceinline__ u32 chunks_of(u32 length) { return length ? (length + CHUNK - 1) / CHUNK : 1; }

__device__ __forceinline__ void hash_one(const u8 *data, u32 chunks, u32 index, const Part &part, u32 *found,
                                         u32 *values) {
  const u32 begin = index * CHUNK, left = (u32)part.length - begin, flags = chunks == 1 ? ROOT : 0;
  hash_chunk(data + begin, left < CHUNK ? left : CHUNK, index, flags, part, found, values + 8 * index);
}

// What is found in a part: its digest, and 1 if elements are not finite.
struct Result {
  u8 digest[32];
  u32 has_nonfinite;
};

__device__ __forceinline__ void inspect(const u8 *memory, const Part &part, u32 *values, Result *result) {
  const u8 *data = memory + part.offset;
  const u32 chunks = chunks_of((u32)part.length);
  u32 found = 0;
  for (u32 index = threadIdx.x; index < chunks; index += THREADS) hash_one(data, chunks, index, part, &found, values);
  found = __syncthreads_or(found != 0);
  for (u32 count = chunks; count > 1; count = (count + 1) / 2) { // one level of the tree; a last odd one goes up
    u32 joined[MOST_CHUNKS / 2 / THREADS][8];
#pragma unroll
    for (u32 turn = 0; turn < MOST_CHUNKS / 2 / THREADS; turn++) {
      const u32 pair = turn * THREADS + threadIdx.x;
      if (2 * pair + 1 < count)
        join(values + 16 * pair, count == 2 ? ROOT : 0, joined[turn]);
      else if (2 * pair + 1 == count)
        for (int i = 0; i < 8; i++) joined[turn][i] = values[16 * pair + i];
    }
    __syncthreads();
#pragma unroll
    for (u32 turn = 0; turn < MOST_CHUNKS / 2 / THREADS; turn++) {
      const u32 pair = turn * THREADS + threadIdx.x;
      if (2 * pair < count)
        for (int i = 0; i < 8; i++) values[8 * pair + i] = joined[turn][i];
    }
    __syncthreads();
  }
  if (threadIdx.x < 32) result->digest[threadIdx.x] = (u8)(values[threadIdx.x / 4] >> (8 * (threadIdx.x % 4)));
  if (threadIdx.x == 0) result->has_nonfinite = found ? 1 : 0;
  __syncthreads(); // before `values` is used again
}

// Any number of thread blocks of THREADS threads each: few of them leave the GPU to others for as long as it takes.
extern "C" __global__ void __launch_bounds__(THREADS)
    inspect_parts(const u8 *memory, const Part *parts, Result *results, int count) {
  __shared__ u32 values[8 * MOST_CHUNKS];
  for (int index = blockIdx.x; index < count; index += gridDim.x) {
    const Part part = parts[index]; // in registers
    inspect(memory, part, values, results + index);
  }
}
