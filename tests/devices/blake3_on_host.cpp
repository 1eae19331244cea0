// Runs the kernel of a CUDA source on the host, with one thread for each of a thread block, and a barrier.
#include <barrier>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ static inline
#define __shared__ static
#define __launch_bounds__(threads)
#define __syncthreads() everybody.arrive_and_wait()

struct Index {
  unsigned x;
};
static thread_local Index threadIdx;
static Index blockIdx;
static std::barrier<> everybody(256);

#include SOURCE

extern "C" void run(const u8 *memory, const u64 *parts, u8 *digests, unsigned blocks) {
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
    std::vector<std::thread> threads;
    for (unsigned index = 0; index < THREADS; index++)
      threads.emplace_back([=] {
        threadIdx.x = index;
        digest_blocks(memory, parts, digests);
      });
    for (auto &thread : threads) thread.join();
  }
}
