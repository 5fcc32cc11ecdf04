// fp8: values in the form that products take, made in the launch that multiplies them. A warp of each thread block goes
// through the blocks of values that its pieces need, in the order in which they need them, and transposes those that
// nobody has claimed yet. Nobody waits here for anyone else, so whatever is claimed will be there.
//
//   v --TMA--> fetched[2], transposed in place: ldmatrix, bytes permuted, stmatrix --bulk copy--> values.data
//   claimed[block] = launch                                                    then ready[block] = launch
#pragma once

#include "cuda/sm90/prefill/config.cuh"

namespace latte::cuda::sm90::prefill {

// The number of a piece's first block among the transposed ones.
__device__ __forceinline__ std::int32_t first_transposed(const PrefillCall& call, const Piece& piece) {
  const std::int32_t first = transposed_begin(piece.kv_row - piece.record.kv_begin, piece.record.request);
  return piece.head * call.values.blocks + first + piece.record.kv_begin / kTokens;
}

class Transposer {
 public:
  __device__ Transposer(TransposerStorage& storage, const PrefillCall& call, const Maps& maps)
      : storage_(storage), call_(call), maps_(maps), lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void run(const Share& share) {
    if (lane_ == 0) storage_.launch = prim::load_relaxed(call_.values.launches) + 1;
    storage_.launch_known.arrive();
    __syncwarp();
    launch_ = storage_.launch;
    for (std::int32_t index = share.begin; index < share.end; ++index)
      take_unclaimed(values_of(share.piece(index)), index > share.begin);
    transpose_next();
    publish();
    // Everyone has asked for the number before he is counted, so who is counted last may set the next launch's.
    if (lane_ == 0 && prim::add_wrapping_acq_rel(call_.values.counted, gridDim.x - 1) == gridDim.x - 1)
      prim::store_release(call_.values.launches, launch_);
  }

 private:
  struct Block {
    std::int32_t number = -1;          // among the transposed ones; none
    std::int32_t token = 0, head = 0;  // of v, the first
    std::int32_t tokens = 0;           // that the request has from there on
  };
  struct Values {  // of a piece
    Block first;
    std::int32_t blocks;

    __device__ Block block(std::int32_t i) const {
      return {first.number + i, first.token + i * kTokens, first.head, first.tokens - i * kTokens};
    }
  };

  __device__ Values values_of(const Piece& piece) const {
    return {{first_transposed(call_, piece), piece.kv_row, piece.head, piece.request_tokens()}, piece.blocks()};
  }

  // A look at 32 of a piece's blocks says for which to ask; where there are few, or where mostly nobody has asked for
  // any yet, it is left out. One block is fetched while the one before it is transposed.
  __device__ void take_unclaimed(const Values& values, bool some_claimed) {
    const bool look = some_claimed && values.blocks > 2;
    for (std::int32_t top = values.blocks - 1; top >= 0; top -= 32) {
      const std::int32_t mine = top - lane_;
      const std::uint32_t* const claimed = call_.values.claimed + values.first.number + mine;
      std::uint32_t left = __ballot_sync(~0u, mine >= 0 && (!look || prim::load_relaxed(claimed) != launch_));
      if (left == 0) transpose_next();  // others wait for it
      for (; left != 0; left &= left - 1) {
        Block block = values.block(top + 1 - __ffs(static_cast<int>(left)));
        if (claim(block))
          fetch(block);
        else
          block.number = -1;
        transpose_next();
        next_ = block;
      }
    }
  }

  // Whether nobody else has.
  __device__ bool claim(const Block& block) {
    std::uint32_t before = 0;
    if (lane_ == 0) before = prim::exchange(call_.values.claimed + block.number, launch_);
    return __shfl_sync(~0u, before, 0) != launch_;
  }

  __device__ void fetch(const Block& block) {
    if (lane_ == 0) {
      prim::wait_stores_read();  // from the same place
      prim::Barrier& landed = storage_.landed[fetched_.slot()];
      landed.arrive_expecting(kTokens * kValues);
      prim::load_box(maps_.v, landed, prim::shared_address(storage_.fetched[fetched_.slot()]), 0, block.token,
                     block.head);
    }
    ++fetched_.count;
  }

  // The block at hand, once others can have the one before it.
  __device__ void transpose_next() {
    publish();
    if (next_.number < 0) return;
    const std::uint32_t at = prim::shared_address(storage_.fetched[transposed_.slot()]);
    storage_.landed[transposed_.slot()].wait(transposed_.full());
    // What lies behind the request's last token belongs to somebody else and may be NaN.
    if (next_.tokens < kTokens) clear_rows_from(at, next_.tokens, lane_);
    __syncwarp();
    transpose(at);
    prim::fence_async_proxy();
    __syncwarp();
    if (lane_ == 0)
      prim::store_bytes(call_.values.data + std::int64_t{next_.number} * (kTokens * kValues), at, kTokens * kValues);
    ++transposed_.count;
    written_ = next_.number;
    next_.number = -1;
  }

  // Lets others have what was transposed, once it is written.
  __device__ void publish() {
    if (written_ < 0) return;
    if (lane_ == 0) {
      prim::wait_stores_written();
      prim::fence_async_proxy_global();
      prim::store_release(call_.values.ready + written_, launch_);
    }
    written_ = -1;
  }

  // A block in place: squares of 32 tokens x 32 columns change places with each other.
  __device__ void transpose(std::uint32_t block) const {
    static_assert(kTokens == kValues);
#pragma unroll 1
    for (int i = 0; i < kTokens / 32; ++i) {
#pragma unroll 1
      for (int j = i; j < kTokens / 32; ++j) {
        const Square below(block, j, i, lane_), above(block, i, j, lane_);
        __syncwarp();
        below.store(block, i, j, lane_);
        above.store(block, j, i, lane_);
      }
    }
  }

  // 32 tokens x 32 columns, transposed. As 16-bit values, a column of a matrix is two columns of ours: a lane gets the
  // bytes (token, column), (token, column + 1), (token + 1, column), (token + 1, column + 1), and the same eight tokens
  // on. Of each column it makes a word, and four lanes have 16 tokens of it: 2t, 2t + 1, 2t + 8, 2t + 9, t = 0 .. 3.
  struct Square {
    std::uint32_t words[2][4];

    __device__ Square(std::uint32_t block, int token, int column, int lane) {
      const int matrix = lane / 8, row = lane % 8;  // of which this lane says where it is
      const int vector = 2 * column + matrix / 2;   // of 16 columns
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t bytes[4];
        prim::load_matrix_x4_transposed(
            bytes, block + (32 * token + 16 * half + matrix % 2 * 8 + row) * kRowBytes + (vector ^ row) * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          words[half][i] = __byte_perm(bytes[i / 2 * 2], bytes[i / 2 * 2 + 1], i % 2 == 0 ? 0x6420 : 0x7531);
      }
    }
    __device__ void store(std::uint32_t block, int column, int token, int lane) const {
      const int matrix = lane / 8, row = lane % 8;
      const int of = matrix / 2 * 16 + 2 * row + matrix % 2;  // the columns of a matrix are every other one
#pragma unroll
      for (int half = 0; half < 2; ++half)
        prim::store_matrix_x4(block + (32 * column + of) * kRowBytes + ((2 * token + half) ^ of % 8) * 16, words[half]);
    }
  };

  TransposerStorage& storage_;
  const PrefillCall& call_;
  const Maps& maps_;
  const int lane_;
  std::uint32_t launch_ = 0;
  Ring<TransposerStorage::kFetched> fetched_, transposed_;
  Block next_;                 // fetched, or on its way
  std::int32_t written_ = -1;  // the block that is on its way to memory, if any
};

}  // namespace latte::cuda::sm90::prefill
