// Synchronisation on the device: mbarriers, named barriers, fences, waiting for the launch before this one.
#pragma once

#include <cstdint>

namespace latte::cuda::prim {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// An mbarrier: a phase completes when `arrivals` came and all announced bytes landed. Waiters name the phase's parity.
// Who wrote or read what the barrier guards arrives himself: a lane that arrives for its warp, after a __syncwarp the
// compiler may leave out, looks like a race to compute-sanitizer, and was no faster. A lane may speak for its warp
// where only products, which the warp has waited for as one, read what is guarded.
struct Barrier {
  std::uint64_t state;

  __device__ void init(std::uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals));
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }
  // The same without a branch, which would part the code before it from the code behind it.
  __device__ void arrive_if(bool condition) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "setp.ne.u32 p, %1, 0;\n"
        "@p mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];\n}" ::"r"(shared_address(this)),
        "r"(static_cast<std::uint32_t>(condition))
        : "memory");
  }
  __device__ void arrive_expecting(std::uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
                 "r"(bytes)
                 : "memory");
  }
  // Arrives once this thread's cp.async copies so far have landed; counts as one of the barrier's arrivals.
  __device__ void arrive_after_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(this)) : "memory");
  }
  __device__ bool passed(std::uint32_t parity) {
    std::uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(this)), "r"(parity)
        : "memory");
    return done != 0;
  }
  __device__ void wait(std::uint32_t parity) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "AGAIN:\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], %1;\n"
        "@p bra DONE;\n"
        "bra AGAIN;\n"
        "DONE:\n}" ::"r"(shared_address(this)),
        "r"(parity)
        : "memory");
  }
};

// For both, in the time of one where both have passed.
__device__ __forceinline__ void wait_both(Barrier& a, std::uint32_t a_parity, Barrier& b, std::uint32_t b_parity) {
  const bool a_passed = a.passed(a_parity), b_passed = b.passed(b_parity);
  if (a_passed && b_passed) return;
  a.wait(a_parity);
  b.wait(b_parity);
}

__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Orders this thread's ordinary shared-memory accesses before later ones of the tensor cores and the copy engine.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for global memory, and between what the copy engine did and ordinary accesses, too.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Barriers of a part of the thread block, whole warps; `kThreads` counts all who come.
template <int kId, int kThreads>
__device__ __forceinline__ void named_sync() {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}
template <int kId, int kThreads>
__device__ __forceinline__ void named_arrive() {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}
template <int kId, int kThreads>
__device__ __forceinline__ bool named_any(bool value) {
  std::uint32_t any;
  asm volatile(
      "{\n.reg .pred p, q;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "barrier.cta.red.or.pred.aligned q, %2, %3, p;\n"
      "selp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(static_cast<std::uint32_t>(value)), "n"(kId), "n"(kThreads)
      : "memory");
  return any != 0;
}

// The same with an id that the compiler does not know.
template <int kThreads>
__device__ __forceinline__ void named_sync(int id) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void named_arrive(int id) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ bool named_any(int id, bool value) {
  std::uint32_t any;
  asm volatile(
      "{\n.reg .pred p, q;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "barrier.cta.red.or.pred.aligned q, %2, %3, p;\n"
      "selp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(static_cast<std::uint32_t>(value)), "r"(id), "n"(kThreads)
      : "memory");
  return any != 0;
}

template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Programmatic dependent launch: wait for the launch before this one; let the next one start.
__device__ __forceinline__ void wait_previous_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void allow_next_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// One more, after everything this thread knows to be written.
__device__ __forceinline__ void add_release(std::uint32_t* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
// One more, or back to zero from `last`.
__device__ __forceinline__ void add_wrapping(std::uint32_t* counter, std::uint32_t last) {
  asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(counter), "r"(last) : "memory");
}
// The same for those who want to know the count before: what others wrote before they added is seen after it.
__device__ __forceinline__ std::uint32_t add_wrapping_acq_rel(std::uint32_t* counter, std::uint32_t last) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
  return before;
}
__device__ __forceinline__ std::uint32_t load_acquire(const std::uint32_t* address) {
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// What others wrote before a value that this thread has loaded is seen after it.
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ std::uint32_t load_relaxed(const std::uint32_t* address) {
  std::uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(std::uint32_t* address, std::uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed(std::uint32_t* address, std::uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
// Puts a value there and returns what was there before.
__device__ __forceinline__ std::uint32_t exchange(std::uint32_t* address, std::uint32_t value) {
  std::uint32_t before;
  asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

}  // namespace latte::cuda::prim
