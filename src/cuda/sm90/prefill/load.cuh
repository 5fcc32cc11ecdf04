// The loaders: a warp each for queries, keys and values brings them to shared memory, from a piece's last block to its
// first, as far ahead of the products as there is room. By tensor copies, but for fp8 values: as soon as those are
// transposed they lie as they should.
#pragma once

#include "cuda/sm90/prefill/transpose.cuh"

namespace latte::cuda::sm90::prefill {

template <class T>
class Loader {
 public:
  using Stages = Ring<Shape<T>::kStages>;

  __device__ Loader(Storage<T>& storage, const PrefillCall& call, const Maps& maps)
      : storage_(storage), call_(call), maps_(maps), lane_(static_cast<int>(threadIdx.x) % 32) {}

  // One warp each, so that none waits for what another one needs.
  __device__ void run_queries(const Share& share) {
    for (std::int32_t index = share.begin; index < share.end; ++index) load_queries(share.whole_piece(index));
  }
  __device__ void run_keys(const Share& share) {
    for_pieces(share, [&](const Piece& piece) {
      for (std::int32_t block = piece.blocks() - 1; block >= 0; --block) load_keys(piece, block);
    });
  }
  __device__ void run_values(const Share& share) {
    if constexpr (kIsFp8<T>) storage_.transposer.launch_known.wait(0);
    for_pieces(share, [&](const Piece& piece) {
      if constexpr (kIsFp8<T>) {
        const std::int32_t first = first_transposed(call_, piece);
        std::int32_t ready = 0;  // blocks from here on downwards that are there
        for (std::int32_t block = piece.blocks() - 1; block >= 0; --block) {
          ready = (ready > 0 ? ready : await_transposed(first, block)) - 1;
          load_transposed(first + block);
        }
      } else {
        for (std::int32_t block = piece.blocks() - 1; block >= 0; --block) load_values(piece, block);
      }
    });
  }

 private:
  template <class Load>
  __device__ void for_pieces(const Share& share, const Load& load) {
    for (std::int32_t index = share.begin; index < share.end; ++index) {
      const Piece piece = share.piece(index);
      if (piece.tokens() > 0) load(piece);
    }
  }

  // Every piece comes this way, those without tokens too: consumers read it here and not from the plan, which is far.
  __device__ void load_queries(const Piece& piece) {
#pragma unroll 1
    for (int side = 0; side < kConsumers; ++side) {
      constexpr int kHalf = kRows / kConsumers;
      prim::Barrier& full = storage_.q_full[side];
      storage_.q_empty[side].wait(queries_.empty());
      __syncwarp();  // or a lane might miss a phase
      if (lane_ != 0) continue;
      if (side == 0) storage_.pieces[queries_.count % Storage<T>::kPieces] = piece;
      if (piece.tokens() > 0) {
        full.arrive_expecting(Storage<T>::kKeyBytes / kConsumers);
        load_groups(maps_.q, full, storage_.q + side * kHalf * Storage<T>::kRowBytes, piece.token + side * kHalf,
                    piece.head);
      } else {
        full.arrive();
      }
    }
    ++queries_.count;
  }

  __device__ void load_keys(const Piece& piece, std::int32_t block) {
    const int slot = keys_.slot();
    storage_.k_empty[slot].wait(keys_.empty());
    __syncwarp();
    if (lane_ == 0) {
      storage_.k_full[slot].arrive_expecting(Storage<T>::kKeyBytes);
      load_groups(maps_.k, storage_.k_full[slot], storage_.k[slot], piece.kv_row + block * kTokens, piece.head);
    }
    ++keys_.count;
  }

  __device__ void load_values(const Piece& piece, std::int32_t block) {
    const int slot = values_.slot();
    storage_.v_empty[slot].wait(values_.empty());
    ++values_.count;
    prim::Barrier& full = storage_.v_full[slot];
    const std::int32_t tokens = piece.tokens() - block * kTokens;
    prim::Barrier& landed = tokens < kTokens ? storage_.v_landed : full;
    if (lane_ == 0) {
      landed.arrive_expecting(Storage<T>::kValueBytes);
#pragma unroll
      for (int box = 0; box < Shape<T>::kValueBoxes; ++box)
        prim::load_box(maps_.v, landed, prim::shared_address(storage_.v[slot]) + box * kTokens * kRowBytes, box * 64,
                       piece.kv_row + block * kTokens, piece.head);
    }
    if (tokens < kTokens) {
      landed.wait(tails_++ % 2);
      __syncwarp();
      clear_rows(storage_.v[slot], tokens);
      full.arrive();
    } else if (lane_ != 0) {
      full.arrive();
    }
  }

  __device__ void load_transposed(std::int32_t block) {
    const int slot = values_.slot();
    storage_.v_empty[slot].wait(values_.empty());
    ++values_.count;
    prim::Barrier& full = storage_.v_full[slot];
    if (lane_ == 0) {
      full.arrive_expecting(Storage<T>::kValueBytes);
      prim::load_bytes(full, prim::shared_address(storage_.v[slot]),
                       call_.values.data + std::int64_t{block} * Storage<T>::kValueBytes, Storage<T>::kValueBytes);
    } else {
      full.arrive();
    }
  }
  // Waits for a block that somebody transposes. Returns how many are there from it on downwards, up to one a lane. One
  // fence behind the asking: a load that acquires throws L1 away each time.
  __device__ std::int32_t await_transposed(std::int32_t first, std::int32_t block) {
    const std::int32_t mine = block - lane_;
    const std::uint32_t* const ready = call_.values.ready + first + mine;
    std::uint32_t missing;
    do {
      missing = __ballot_sync(~0u, mine >= 0 && prim::load_relaxed(ready) != storage_.transposer.launch);
    } while (missing % 2 != 0);
    prim::fence_gpu();
    __syncwarp();
    prim::fence_async_proxy_global();
    return missing == 0 ? 32 : __ffs(static_cast<int>(missing)) - 1;
  }

  // Rows behind the piece's last token belong to somebody else and may be NaN, which a probability of 0 does not undo.
  __device__ void clear_rows(std::byte* values, std::int32_t from) {
#pragma unroll 1
    for (int box = 0; box < Shape<T>::kValueBoxes; ++box)
      clear_rows_from(prim::shared_address(values) + box * kTokens * kRowBytes, from, lane_);
    prim::fence_async_proxy();
  }

  __device__ void load_groups(const CUtensorMap& map, prim::Barrier& full, std::byte* to, std::int32_t row,
                              std::int32_t head) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group)
      prim::load_box(map, full, prim::shared_address(to) + group * Storage<T>::kGroupBytes, group * kGroupColumns, row,
                     head);
  }

  Storage<T>& storage_;
  const PrefillCall& call_;
  const Maps& maps_;
  const int lane_;
  Ring<1> queries_;
  Stages keys_, values_;
  std::uint32_t tails_ = 0;
};

}  // namespace latte::cuda::sm90::prefill
