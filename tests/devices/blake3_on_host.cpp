// Runs the kernel of a CUDA source on the host, with one thread for each of a thread block, and a barrier.
#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ static inline
#define __shared__ static
#define __launch_bounds__(threads)
#define __align__(bytes) alignas(bytes)
#define __syncthreads() everybody.arrive_and_wait()

struct Index {
  unsigned x;
};
static thread_local Index threadIdx;
static Index blockIdx, gridDim;
static std::barrier<> everybody(256);

static int __syncthreads_or(int value) {
  static std::atomic<int> any;
  everybody.arrive_and_wait();
  any = 0;
  everybody.arrive_and_wait();
  if (value) any = 1;
  everybody.arrive_and_wait();
  return any;
}

#include SOURCE

// `grid` thread blocks, one after another.
extern "C" void run(const u8 *memory, const Part *parts, Result *results, int count, unsigned grid) {
  gridDim.x = grid;
  for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) {
    std::vector<std::thread> threads;
    for (unsigned index = 0; index < THREADS; index++)
      threads.emplace_back([=] {
        threadIdx.x = index;
        inspect_parts(memory, parts, results, count);
      });
    for (auto &thread : threads) thread.join();
  }
}
