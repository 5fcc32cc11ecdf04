// The loader: one warp that brings queries, keys and values to shared memory by tensor copies, from a piece's last
// block to its first, always a stage or more ahead of the products.
#pragma once

#include "cuda/sm90/prefill/config.cuh"

namespace latte::cuda::sm90::prefill {

// Stages the loader fills with values: those of the products, or those before they are transposed.
template <class T>
inline constexpr int kValueStages = Shape<T>::kStages;
template <>
inline constexpr int kValueStages<Fp8> = RawValues<Fp8>::kStages;

template <class T>
class Loader {
 public:
  __device__ Loader(Storage<T>& storage, const Maps& maps)
      : storage_(storage), maps_(maps), lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void run(const Share& share) {
    for (std::int32_t index = share.begin; index < share.end; ++index) {
      const Piece piece = share.piece(index);
      const std::int32_t blocks = piece.blocks();
      if (blocks == 0) continue;
      load_queries(piece);
      load_keys(piece, blocks - 1);
      for (std::int32_t block = blocks - 2; block >= 0; --block) {
        load_keys(piece, block);
        load_values(piece, block + 1);
      }
      load_values(piece, 0);
    }
  }

 private:
  __device__ void load_queries(const Piece& piece) {
    storage_.q_empty.wait(queries_.empty());
    if (lane_ == 0) {
      storage_.q_full.arrive_expecting(Storage<T>::kKeyBytes);
      load_groups(maps_.q, storage_.q_full, storage_.q, piece.token, piece.head);
    }
    ++queries_.count;
  }

  __device__ void load_keys(const Piece& piece, std::int32_t block) {
    const int slot = keys_.slot();
    storage_.k_empty[slot].wait(keys_.empty());
    if (lane_ == 0) {
      storage_.k_full[slot].arrive_expecting(Storage<T>::kKeyBytes);
      load_groups(maps_.k, storage_.k_full[slot], storage_.k[slot], piece.kv_row + block * kTokens, piece.head);
    }
    ++keys_.count;
  }

  __device__ void load_values(const Piece& piece, std::int32_t block) {
    const std::int32_t row = piece.kv_row + block * kTokens;
    const int slot = values_.slot();
    if constexpr (std::is_same_v<T, Fp8>) {
      storage_.raw_empty[slot].wait(values_.empty());
      if (lane_ == 0) {
        storage_.raw_full[slot].arrive_expecting(Storage<T>::kValueBytes);
        prim::load_box(maps_.v, storage_.raw_full[slot], prim::shared_address(storage_.raw[slot]), 0, row, piece.head);
      }
    } else {
      storage_.v_empty[slot].wait(values_.empty());
      prim::Barrier& full = storage_.v_full[slot];
      const std::int32_t tokens = piece.tokens() - block * kTokens;
      prim::Barrier& landed = tokens < kTokens ? storage_.v_landed : full;
      if (lane_ == 0) {
        landed.arrive_expecting(Storage<T>::kValueBytes);
#pragma unroll
        for (int box = 0; box < Shape<T>::kValueBoxes; ++box)
          prim::load_box(maps_.v, landed, prim::shared_address(storage_.v[slot]) + box * kTokens * kRowBytes, box * 64,
                         row, piece.head);
      }
      if (tokens < kTokens) {
        landed.wait(tails_++ % 2);
        clear_rows(storage_.v[slot], tokens);
        full.arrive();
      } else if (lane_ != 0) {
        full.arrive();
      }
    }
    ++values_.count;
  }

  // Rows behind the piece's last token belong to somebody else and may be NaN, which a probability of 0 does not undo.
  __device__ void clear_rows(std::byte* values, std::int32_t from) {
#pragma unroll 1
    for (int box = 0; box < Shape<T>::kValueBoxes; ++box) {
      const std::uint32_t base = prim::shared_address(values) + box * kTokens * kRowBytes;
      for (int at = from * kRowBytes + lane_ * 16; at < kTokens * kRowBytes; at += 32 * 16)
        prim::store_16_zeros(base + at);
    }
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
  const Maps& maps_;
  const int lane_;
  Ring<1> queries_;
  Ring<Shape<T>::kStages> keys_;
  Ring<kValueStages<T>> values_;
  std::uint32_t tails_ = 0;
};

// Bytes i of four words become word i.
__device__ __forceinline__ void transpose_bytes(const std::uint32_t (&in)[4], std::uint32_t (&out)[4]) {
  const std::uint32_t a = __byte_perm(in[0], in[1], 0x5140), b = __byte_perm(in[2], in[3], 0x5140);
  const std::uint32_t c = __byte_perm(in[0], in[1], 0x7362), d = __byte_perm(in[2], in[3], 0x7362);
  out[0] = __byte_perm(a, b, 0x5410);
  out[1] = __byte_perm(a, b, 0x7632);
  out[2] = __byte_perm(c, d, 0x5410);
  out[3] = __byte_perm(c, d, 0x7632);
}

// fp8: the three warps beside the loader's bring values from rows of tokens to rows of columns. Four tokens that are
// neighbours in a register of the probabilities (of a group of 32: 2t, 2t + 1, 2t + 8, 2t + 9, and the same 16 further
// on) become four neighbouring bytes. Tokens behind the piece's last one become zeros: they may be NaN.
class Transposer {
 public:
  __device__ explicit Transposer(Storage<Fp8>& storage)
      : storage_(storage), warp_(static_cast<int>(threadIdx.x) / 32 - 1), lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void run(const Share& share) {
    for (std::int32_t index = share.begin; index < share.end; ++index) {
      const Piece piece = share.piece(index);
      for (std::int32_t block = piece.blocks() - 1; block >= 0; --block) turn(piece.tokens() - block * kTokens);
    }
  }

 private:
  __device__ void turn(std::int32_t tokens) {
    const int from = raw_.slot(), to = values_.slot();
    storage_.raw_full[from].wait(raw_.full());
    storage_.v_empty[to].wait(values_.empty());
    const std::uint32_t rows = prim::shared_address(storage_.raw[from]);
    const std::uint32_t columns = prim::shared_address(storage_.v[to]);
    // A warp takes 16 columns of all tokens at a time, a lane four tokens: what a row of columns gets is stored at once.
    const int token = lane_ / 8 * 32 + lane_ / 4 % 2 * 16 + lane_ % 4 * 2;
#pragma unroll 1
    for (int column = 16 * warp_; column < kValues; column += 16 * 3) {
      std::uint32_t in[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = token + i % 2 + i / 2 * 8;
        prim::load_words(in[i], rows + swizzled(t, column));
        if (t >= tokens) in[i][0] = in[i][1] = in[i][2] = in[i][3] = 0;
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const std::uint32_t words[4] = {in[0][w], in[1][w], in[2][w], in[3][w]};
        std::uint32_t out[4];
        transpose_bytes(words, out);
#pragma unroll
        for (int i = 0; i < 4; ++i) prim::store_word(columns + swizzled(column + 4 * w + i, lane_ * 4), out[i]);
      }
    }
    prim::fence_async_proxy();
    storage_.v_full[to].arrive();
    storage_.raw_empty[from].arrive();
    ++raw_.count;
    ++values_.count;
  }

  // Where byte `at` of a 128-byte row lies.
  __device__ static int swizzled(int row, int at) { return row * kRowBytes + ((at / 16) ^ (row % 8)) * 16 + at % 16; }

  Storage<Fp8>& storage_;
  const int warp_, lane_;
  Ring<RawValues<Fp8>::kStages> raw_;
  Ring<Shape<Fp8>::kStages> values_;
};

}  // namespace latte::cuda::sm90::prefill
