// A decode step on a GPU, captured once in a graph and replayed with other lengths. Needs no CUDA header or compiler.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include <latte/latte.hpp>

namespace {

constexpr int kSkipped = 77;                           // CTest: could not run here
constexpr std::uint16_t kOne = 0x3f80, kNan = 0x7fc0;  // bf16

// What an engine has anyway: an array in the device's memory.
template <class T>
class Array {
 public:
  Array(const latte::Backend& gpu, const std::vector<T>& values)
      : gpu_(gpu), count_(values.size()), memory_(latte::DeviceMemory::allocate(gpu, count_ * sizeof(T)).value()) {
    write(values);
  }
  T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  void write(const std::vector<T>& values) {
    ok_ = ok_ && latte::copy_to_device(gpu_, data(), values.data(), count_ * sizeof(T)).ok();
  }
  std::vector<T> read(latte::Stream stream) {
    std::vector<T> values(count_);
    ok_ = ok_ && latte::copy_to_host(gpu_, values.data(), data(), count_ * sizeof(T), stream).ok();
    return values;
  }
  bool ok() const { return ok_; }  // every copy so far

 private:
  latte::Backend gpu_;
  std::size_t count_;
  latte::DeviceMemory memory_;
  bool ok_ = true;
};

// One request of up to 100 tokens, 16 heads. Even tokens are all ones, odd ones all zeros, unused slots NaN.
bool decode_and_check(const latte::Backend& gpu) {
  std::vector<std::uint16_t> tokens(2 * 64 * 576, kNan);
  for (std::size_t i = 0; i < 100 * 576; ++i) tokens[i] = i / 576 % 2 == 0 ? kOne : 0;
  Array<std::uint16_t> q(gpu, std::vector<std::uint16_t>(16 * 576, kOne)), cache(gpu, tokens);
  Array<std::int32_t> pages(gpu, {0, 1}), seq_lens(gpu, {0}), query_start(gpu, {0, 1});
  Array<float> out(gpu, std::vector<float>(16 * 512));

  // readme:begin
  using enum latte::Dtype;
  auto stream = latte::OwnedStream::create(gpu).value();
  latte::DecodeProblem problem{.heads = 16, .out_dtype = f32};
  auto builder = latte::MetadataBuilder::create(gpu, problem, {.max_requests = 1, .max_kv_tokens = 100}).value();
  latte::DeviceLengths lengths{
      .requests = 1, .seq_lens = seq_lens.data(), .query_start = query_start.data(), .query_tokens = 1};
  latte::DecodeArgs layer{.q = latte::dense(q.data(), bf16, {1, 16, 576}),
                          .kv_cache = latte::dense(cache.data(), bf16, {2, 64, 576}),
                          .pages = {.block_table = pages.data(), .block_table_stride = 2, .max_pages = 2},
                          .out = latte::dense(out.data(), f32, {1, 16, 512}),
                          .scale = std::log(3.0f) / 576,
                          .stream = stream.get()};
  const auto queue_step = [&]() -> latte::Status {
    auto step = builder.build_on_device(0, lengths, stream.get());  // one small kernel reads the lengths
    return step ? latte::decode(*step, layer) : step.status();      // one launch; a model has one for every layer
  };
  auto graph = latte::Graph::capture(gpu, stream.get(), queue_step).value();
  // readme:end

  // A one weighs e^(ln 3) = 3, a zero 1. Of 100 tokens half are ones: 3 / (3 + 1). A single token is a one.
  const auto replay = [&](std::int32_t length, float expected) {
    seq_lens.write({length});
    if (!graph.launch(stream.get()).ok()) return false;
    for (const float x : out.read(stream.get()))
      if (!(std::abs(x - expected) < 1e-3f)) return false;
    return true;
  };
  const bool right = replay(100, 0.75f) && replay(1, 1.0f) && replay(100, 0.75f);
  return right && q.ok() && cache.ok() && pages.ok() && seq_lens.ok() && query_start.ok() && out.ok();
}

}  // namespace

int main() {
  const latte::Result<latte::Backend> gpu = latte::Backend::open({.name = "cuda"});
  if (!gpu) {
    std::printf("no GPU to show this on: %s\n", gpu.status().message().c_str());
    return kSkipped;
  }
  const bool right = decode_and_check(*gpu);
  std::puts(right ? "one graph, three replays, every output as expected" : "wrong");
  return right ? 0 : 1;
}
