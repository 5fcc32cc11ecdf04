// Streaming KV blocks into the stages, and query rows beside them.
#pragma once

#include "cuda/prim/copy.cuh"
#include "cuda/sm90/decode/config.cuh"
#include "cuda/sm90/decode/instances.cuh"

namespace latte::cuda::sm90 {

// Walks the KV blocks of a thread block's records, one after the other.
template <class Config>
class KvCursor {
 public:
  __device__ KvCursor(const KernelCall& call, const Share& share, const LaunchShape& shape)
      : kv_(call.kv), query_start_(call.lengths.query_start), share_(share), shape_(shape), next_record_(share.begin) {
    next_piece();
  }

  __device__ bool more() const { return position_ < kv_end_; }
  // Whether the current block is older than the step: the launch before this one has not written it.
  __device__ bool settled() const { return position_ + tokens() <= settled_; }
  // Tokens of the current block.
  __device__ std::int32_t tokens() const { return min(Config::kTokens, kv_end_ - position_); }

  struct Place {
    std::int32_t page, token;  // `page` as the list has it
  };
  // The page of the current block's i-th token, and the token's place in it. Positions are clamped to the list.
  __device__ Place find(std::int32_t i) const {
    const std::int32_t token = min(position_ + i, kv_end_ - 1);
    const std::int32_t entry = shape_.by_page_size.divide(token);
    std::int64_t index = entry, last = kv_.list_pages - 1;
    if (kv_.indptr)
      index = max(std::int64_t{0}, index + kv_.indptr[request_]);
    else
      index += request_ * kv_.row_stride, last += request_ * kv_.row_stride;
    return {.page = kv_.list_pages > 0 ? kv_.pages[min(index, last)] : 0, .token = token - entry * kv_.page_size};
  }
  __device__ std::int32_t clamped(std::int32_t page) const { return max(0, min(page, shape_.last_page)); }

  // Goes to the next block. Whether it is of the same piece.
  __device__ bool next() {
    position_ += Config::kTokens;
    if (more()) return true;
    next_piece();
    return false;
  }

 private:
  // The next piece that has blocks; without one there is no more.
  __device__ void next_piece() {
    while (next_record_ < share_.end) {
      const Piece piece = share_.piece(next_record_++);
      if (piece.rows <= 0 || piece.tokens() <= 0) continue;
      position_ = piece.record.kv_begin;
      kv_end_ = piece.record.kv_end;
      request_ = piece.record.request;
      if (shape_.overlap_previous)
        settled_ = kv_end_ + piece.record.kv_after - (query_start_[request_ + 1] - query_start_[request_]);
      return;
    }
  }

  const CacheView& kv_;
  const std::int32_t* const query_start_;
  const Share& share_;
  const LaunchShape& shape_;
  std::int32_t next_record_;
  std::int32_t settled_ = INT32_MAX;
  std::int32_t request_ = 0, position_ = 0, kv_end_ = 0;  // of the piece: the current block's first token, and the end
};

// Loaders have find(), which asks for pages, and load(), which looks at the answer and fills a stage, each unit of it
// once await(unit) has seen that it is free. A block is full only when the whole stage was, as the scorer writes to all
// of it. With kFindsAhead find() also takes how many tokens ahead of the block.

// Loads blocks by the copy engine, in boxes of whole slabs: a power of two of them that divides the page, up to
// kBoxTokens (launch.cu). A lane of one warp issues a box.
template <class Config>
class BoxLoader {
 public:
  __device__ BoxLoader(const CUtensorMap& map, const LaunchShape& shape)
      : map_(map), shape_(shape), policy_(prim::l2_policy(!shape.kv_fits_l2)) {}

  // Asks for the page of this lane's box.
  __device__ auto find(const KvCursor<Config>& cursor) const {
    return cursor.find(box() << (3 + shape_.box_slabs_log2));
  }
  static constexpr bool kFindsAhead = false;

  // All bytes of a part are announced on its barrier, possibly after they have landed: it counts both ways.
  template <class Await>
  __device__ void load(const KvCursor<Config>& cursor, const typename KvCursor<Config>::Place& place, std::byte* stage,
                       prim::Barrier (&full)[Config::kParts], const Await& await) const {
    const std::int32_t log2 = shape_.box_slabs_log2;
    const std::int32_t boxes = ((cursor.tokens() - 1) >> (3 + log2)) + 1;
#pragma unroll
    for (int unit = 0; unit < Config::kUnits; ++unit) {
      await(unit);
      if (box() < boxes && part() < Config::kParts && (box() << (3 + log2)) / Config::kUnitTokens == unit)
        prim::load_box(map_, full[part()],
                       prim::shared_address(stage) + part() * Config::kPartBytes + (box() << log2) * Config::kSlabBytes,
                       part() * Config::kPartGroups, place.token >> 3, cursor.clamped(place.page), policy_);
    }
    // Last, when all units were free, also those that a short block has nothing for.
    if (lane() < Config::kParts) full[lane()].arrive_expecting((boxes << log2) * Config::kSlabBytes);
  }

 private:
  __device__ static std::int32_t lane() { return static_cast<std::int32_t>(threadIdx.x) % 32; }
  // The part of a lane's box, and which of the part's boxes it is. Lanes of the first part come first.
  static_assert(Config::kParts == 1 || Config::kSlabs == 8);
  __device__ std::int32_t part() const { return Config::kParts == 1 ? 0 : lane() >> (3 - shape_.box_slabs_log2); }
  __device__ std::int32_t box() const {
    return Config::kParts == 1 ? lane() : lane() & ((8 >> shape_.box_slabs_log2) - 1);
  }

  const CUtensorMap& map_;
  const LaunchShape& shape_;
  const std::uint64_t policy_;
};

// Loads blocks of pages that are no whole slabs: each of four warps copies every fourth token, 16 bytes a lane. Tokens
// past the end become zeros.
template <class Config>
class TokenLoader {
 public:
  __device__ explicit TokenLoader(const CacheView& kv) : kv_(kv) {}

  // Asks for the page of this lane's token, the lane-th of its warp's, in the block or so many tokens ahead of it.
  __device__ auto find(const KvCursor<Config>& cursor, std::int32_t ahead = 0) const {
    return cursor.find(ahead + lane() % kTokens * 4 + warp());
  }
  // An answer comes behind the copies that were asked for before: so the next block's pages are asked for first.
  static constexpr bool kFindsAhead = true;

  // A warp's tokens are the `warp`-th of every slab and the fourth after it. It copies four at a time, eight lanes
  // each, one group of columns after the other: both addresses then differ by constants, and hardly anything is
  // computed beside the copies.
  template <class Await>
  __device__ void load(const KvCursor<Config>& cursor, const typename KvCursor<Config>::Place& place, std::byte* stage,
                       prim::Barrier (&full)[Config::kParts], const Await& await) const {
    const std::int64_t offset =
        cursor.clamped(place.page) * kv_.page_stride_bytes + place.token * kv_.token_stride_bytes;
    std::int32_t me = lane();
    asm volatile("" : "+r"(me));  // what follows from it is computed anew for each block, as registers are few
    const std::int32_t quarter = me / 8, chunk = me % 8, row = warp() + quarter % 2 * 4;
    const std::uint32_t to =
        prim::shared_address(stage) + quarter / 2 * Config::kSlabBytes + row * kRowBytes + (chunk ^ row) * 16;
    const std::byte* data = static_cast<const std::byte*>(kv_.data) + chunk * 16;
    const std::int32_t left = cursor.tokens() - warp();
#pragma unroll
    for (int i = 0; i < kTokens; i += 4) {
      const std::byte* from = data + __shfl_sync(~0u, offset, i + quarter);
      if (i * 4 % Config::kUnitTokens == 0) await(i * 4 / Config::kUnitTokens);
#pragma unroll
      for (int group = 0; group < Config::kGroups; ++group)
        prim::copy_16(to + i / 2 * Config::kSlabBytes + Config::group_offset(group), from + group * kRowBytes,
                      (i + quarter) * 4 < left);
    }
#pragma unroll
    for (prim::Barrier& part : full) part.arrive_after_copies();
  }

 private:
  static constexpr int kTokens = Config::kTokens / 4;  // a warp's share of a block
  static_assert(kTokens % 4 == 0 && Config::kUnitTokens % 16 == 0);
  __device__ static std::int32_t lane() { return static_cast<std::int32_t>(threadIdx.x) % 32; }
  __device__ static std::int32_t warp() { return static_cast<std::int32_t>(threadIdx.x) / 32 % 4; }

  const CacheView& kv_;
};

// The loader's whole work: block after block, as stages become free. `Storage` has kv, kv_full and kv_empty, and says
// whether queries come before a second block.
template <class Config, int kStages, class Storage, class Loader>
__device__ void load_blocks(Storage& s, const KernelCall& call, const Share& share, const LaunchShape& shape,
                            const Loader& loader) {
  KvCursor<Config> cursor(call, share, shape);
  if (!cursor.more()) return;
  auto place = loader.find(cursor);
  for (Ring<kStages> ring;; ++ring.count) {
    auto next_place = place;  // of the next block, where it is of the same piece
    if constexpr (Loader::kFindsAhead) next_place = loader.find(cursor, Config::kTokens);
    if (!cursor.settled()) prim::wait_previous_launch();
    if (ring.count == 1 && !shape.overlap_previous) s.await_queries();
    loader.load(cursor, place, s.kv[ring.slot()], s.kv_full[ring.slot()],
                [&](int unit) { s.kv_empty[ring.slot()][unit].wait(ring.empty()); });
    const bool same_piece = cursor.next();
    if (!cursor.more()) return;
    place = Loader::kFindsAhead && same_piece ? next_place : loader.find(cursor);
  }
}

// Where a row's query values lie; a row that is not there has those of the last. Rows past the query tensor are clamped
// to its last token.
template <class Half>
struct QueryRow {
  const Half* nope;
  const Half* rope;

  __device__ QueryRow(const KernelCall& call, const Piece& piece, std::int32_t r) {
    const RowAddress at(call, piece.packed_row(r));
    const std::int64_t token = min(at.token, call.query_tokens - 1), head = at.head;
    nope = static_cast<const Half*>(call.q.nope) + token * call.q.nope_token_stride + head * call.q.nope_head_stride;
    rope = static_cast<const Half*>(call.q.rope) + token * call.q.rope_token_stride + head * call.q.rope_head_stride;
  }
};

// Values at or past `valid` tokens of a stage become zero: 0 * NaN is NaN. By one warpgroup.
template <class Config>
__device__ void zero_tail(std::byte* stage, std::int32_t valid) {
  constexpr std::int32_t kChunks = Config::kLatent / 8;  // 16 bytes each; where they lie in the row does not matter
  const std::uint32_t kv = prim::shared_address(stage);
  for (std::int32_t i = valid * kChunks + static_cast<std::int32_t>(threadIdx.x) % kWarpgroup;
       i < Config::kTokens * kChunks; i += kWarpgroup) {
    const std::int32_t token = i / kChunks, chunk = i % kChunks;
    prim::store_16_zeros(kv + token / 8 * Config::kSlabBytes + Config::group_offset(chunk / 8) + token % 8 * kRowBytes +
                         chunk % 8 * 16);
  }
}

// Where probability rows of the tokens 8j .. 8j + 7 lie in a stage.
template <class Config>
__device__ std::uint32_t probability_row(std::byte* stage, int j, int row) {
  return prim::shared_address(stage) + j * Config::kSlabBytes + Config::kRopeOffset + row * 16;
}

}  // namespace latte::cuda::sm90
