// Prefill with context on the GPU: older tokens from the paged cache, chunk by chunk.
#include <gtest/gtest.h>

#include "tests/gpu/prefill_support.hpp"

namespace latte::testkit {
namespace {

class GpuPrefillContext : public OnGpu {};

PrefillCase context_case(std::vector<PrefillRequest> requests) {
  PrefillCase c = gpu_prefill(std::move(requests), 3);
  c.latent = 512;
  c.rope = 64;
  c.page_size = 64;
  return c;
}

// The hook copies each chunk to the host, expands it there and copies keys and values back.
TEST_F(GpuPrefillContext, InChunksAgreesWithTheOracle) {
  for (KvFormat format : {KvFormat::bf16, KvFormat::f16, KvFormat::fp8_e4m3, KvFormat::fp8_ds_mla})
    for (Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::fp8_e4m3}) {
      PrefillCase c =
          context_case({{40, 40, 350}, {33, 20, 0}, {1, 1, 701}, {0, 5, 9}, {65, 65, 1}, {3, 0, 17}, {30, 50, 264}});
      c.dtype = dtype;
      c.out_dtype = dtype == Dtype::f16 ? Dtype::f16 : Dtype::bf16;
      c.kv_format = format;
      c.page_size = dtype == Dtype::bf16 ? 64 : 7;
      c.page_form = dtype == Dtype::f16 ? PageForm::csr : PageForm::block_table;
      if (const Support support = backend().supports(c.problem()); !support.ok) {
        ADD_FAILURE() << c.name() << ": " << support.reason;
        continue;
      }
      std::int32_t chunks_before = 0;
      for (std::int32_t tokens : {1333, 541, 1}) {  // all at once, most of it, and the fewest there may be
        c.context_workspace_bytes = workspace_for_chunks(backend(), c, tokens).value();
        PreparedPrefill prepared(c);
        const auto report = run_case(backend(), prepared);
        ASSERT_TRUE(succeeded(report.status())) << c.name();
        EXPECT_TRUE(report->ok()) << report->message();
        EXPECT_GT(report->chunks, chunks_before);
        chunks_before = report->chunks;
      }
    }
}

// The same tensors and pages, in steps where the other requests have no context. In fp32, where another order shows.
TEST_F(GpuPrefillContext, OfNeighboursDoesNotChangeBatchInvariantBits) {
  for (Dtype dtype : {Dtype::bf16, Dtype::fp8_e4m3}) {
    PrefillCase c = context_case({{40, 40, 350}, {33, 20, 0}, {1, 1, 701}, {65, 65, 1}, {30, 50, 264}});
    c.dtype = dtype;
    c.out_dtype = Dtype::f32;
    c.context_workspace_bytes = workspace_for_chunks(backend(), c, 1).value();
    const auto step = DevicePrefillStep::make(backend(), c, {.policy = Policy::batch_invariant(128)});
    ContextExpander expander(backend(), step->batch());
    std::vector<std::int32_t> chunks;
    const auto run = [&](const std::vector<std::int32_t>& context_lens) {
      expander.reset();
      PrefillArgs args = step->args(stream());
      expander.attach(args);
      PrefillLengths lengths = step->batch().lengths();
      lengths.context_lens = context_lens;
      const auto metadata = step->builder.build(0, lengths, stream()).value();
      chunks.push_back(metadata.chunks());
      ASSERT_TRUE(succeeded(step->poison()));
      ASSERT_TRUE(succeeded(prefill(metadata, args)));
      ASSERT_TRUE(succeeded(backend().synchronize(stream())));
      ASSERT_TRUE(succeeded(step->device.download_outputs(step->batch())));
    };
    const auto given = step->batch().lengths().context_lens;
    const std::vector<std::int32_t> all(given.begin(), given.end());
    run(all);
    ASSERT_TRUE(succeeded(expander.finished()));
    const Comparison result = compare_prefill(step->prepared, step->builder.math(), expander.expanded());
    EXPECT_TRUE(result.ok) << c.name() << ": " << result.message;
    std::vector<std::vector<std::byte>> expected;
    for (std::int32_t r = 0; r < static_cast<std::int32_t>(all.size()); ++r)
      expected.push_back(step->batch().result_bits(r));
    for (std::size_t kept = 0; kept < all.size(); ++kept) {
      std::vector<std::int32_t> lens(all.size(), 0);
      lens[kept] = all[kept];
      run(lens);
      EXPECT_EQ(step->batch().result_bits(static_cast<std::int32_t>(kept)), expected[kept])
          << c.name() << " request " << kept;
    }
    EXPECT_GT(chunks.front(), 2);
    EXPECT_EQ(chunks[2], 0);  // the one that has no context, kept
  }
}

// The plans of the new tokens and of every chunk.
TEST_F(GpuPrefillContext, PlansMayLieInTheCallersMemory) {
  PrefillCase c = context_case({{40, 40, 350}, {33, 20, 0}, {1, 1, 701}});
  c.context_workspace_bytes = workspace_for_chunks(backend(), c, 1).value();
  BuilderOptions options{.slots = 2};
  const BuilderNeeds needs = PrefillBuilder::needs(backend(), c.problem(), c.limits(), options).value();
  const auto memory = DeviceMemory::allocate(backend(), needs.plan.bytes).value();
  const std::vector<std::byte> garbage(memory.size(), std::byte{0xee});
  ASSERT_TRUE(succeeded(copy_to_device(backend(), memory.data(), garbage.data(), garbage.size())));
  options.plan_memory = {memory.data(), memory.size()};
  PreparedPrefill prepared(c);
  const auto report = run_case(backend(), prepared, options);
  ASSERT_TRUE(succeeded(report.status()));
  EXPECT_TRUE(report->ok()) << report->message();
  EXPECT_GT(report->chunks, 1);
}

// An expansion that only queues work, as a captured one must: the first run's keys and values are kept on the device,
// and copied from there by gather_kv, to which they are a cache of one page.
class KeptExpansion {
 public:
  KeptExpansion(const Backend& backend, const PrefillArgs& args)
      : backend_(backend), expand_(args.expand), user_(args.user), page_(upload<std::int32_t>(backend, {0})) {}

  static Status keep(void* user, const ContextChunk& chunk) {
    auto& self = *static_cast<KeptExpansion*>(user);
    if (Status status = self.expand_(self.user_, chunk); !status) return status;
    Kept kept{.starts = upload<std::int32_t>(self.backend_, {0, chunk.tokens})};
    for (const auto& [from, to] : {std::pair{&chunk.k, &kept.k}, std::pair{&chunk.v, &kept.v}}) {
      std::vector<std::uint16_t> values(static_cast<std::size_t>(from->shape[0] * from->shape[1] * from->shape[2]));
      if (Status status = copy_to_host(self.backend_, values.data(), from->data, values.size() * 2, chunk.stream);
          !status)
        return status;
      *to = upload(self.backend_, values);
    }
    self.kept_.push_back(std::move(kept));
    return {};
  }

  static Status copy(void* user, const ContextChunk& chunk) {
    const auto& self = *static_cast<KeptExpansion*>(user);
    const Kept& kept = self.kept_.at(static_cast<std::size_t>(chunk.index));
    for (const auto& [from, to] : {std::pair{&kept.k, &chunk.k}, std::pair{&kept.v, &chunk.v}}) {
      const std::int64_t width = to->shape[1] * to->shape[2];
      GatherKvArgs args;
      args.kv_cache = dense(static_cast<const void*>(from->data()), Dtype::bf16, {1, chunk.tokens, width});
      args.pages = {.block_table = reinterpret_cast<const std::int32_t*>(self.page_.data()),
                    .block_table_stride = 1,
                    .max_pages = 1};
      args.out_start = {reinterpret_cast<const std::int32_t*>(kept.starts.data()), 2};
      args.tokens = chunk.tokens;
      args.out = dense(to->data, Dtype::bf16, {chunk.tokens, width});
      args.stream = chunk.stream;
      if (Status status = gather_kv(self.backend_, args); !status) return status;
    }
    return {};
  }

 private:
  struct Kept {
    DeviceMemory starts, k, v;
  };

  const Backend& backend_;
  const ExpandChunk expand_;
  void* const user_;
  const DeviceMemory page_;
  std::vector<Kept> kept_;
};

TEST_F(GpuPrefillContext, ACapturedStepReplays) {
  PrefillCase c = context_case({{40, 40, 350}, {33, 20, 0}, {1, 1, 701}});
  c.context_workspace_bytes = workspace_for_chunks(backend(), c, 1).value();
  const auto step = DevicePrefillStep::make(backend(), c);
  const auto metadata = step->builder.build(0, step->batch().lengths(), stream()).value();
  ASSERT_GT(metadata.chunks(), 1);
  ContextExpander expander(backend(), step->batch());
  PrefillArgs args = step->args(stream());
  expander.attach(args);
  KeptExpansion kept(backend(), args);
  args.user = &kept;
  args.expand = KeptExpansion::keep;
  ASSERT_TRUE(succeeded(step->poison()));
  ASSERT_TRUE(succeeded(prefill(metadata, args)));
  ASSERT_TRUE(succeeded(backend().synchronize(stream())));
  ASSERT_TRUE(succeeded(step->device.download_outputs(step->batch())));
  const std::vector<std::byte> expected = step->batch().result_bits();

  args.expand = KeptExpansion::copy;
  const Result<Graph> graph = Graph::capture(backend(), stream(), [&] { return prefill(metadata, args); });
  ASSERT_TRUE(succeeded(graph.status()));
  for (int replay = 0; replay < 3; ++replay) {
    ASSERT_TRUE(succeeded(step->poison()));
    ASSERT_TRUE(succeeded(graph->launch(stream())));
    ASSERT_TRUE(succeeded(backend().synchronize(stream())));
    ASSERT_TRUE(succeeded(step->device.download_outputs(step->batch())));
    EXPECT_EQ(step->batch().result_bits(), expected) << "replay " << replay;
  }
}

// What a chunk's keys and values take: as the caller has them, converted to what is multiplied, transposed.
TEST_F(GpuPrefillContext, ChunksStayWithinTheWorkspaceWithTheirCopies) {
  constexpr std::int64_t kHeads = 8, kColumns = 192 + 128;
  struct Kind {
    Dtype dtype;
    PrefillMath math;
    std::int64_t column_bytes, transposed_bytes;
  };
  for (const Kind& kind :
       {Kind{Dtype::bf16, PrefillMath::half, 2, 0}, Kind{Dtype::bf16, PrefillMath::fp8, 2 + 1, 1},
        Kind{Dtype::fp8_e4m3, PrefillMath::automatic, 1, 1}, Kind{Dtype::fp8_e4m3, PrefillMath::half, 1 + 2, 0}}) {
    PrefillProblem problem{.heads = kHeads, .dtype = kind.dtype, .math = kind.math};
    problem.context = PrefillContext{.max_tokens = 1 << 20, .workspace_bytes = 64 << 20};
    const auto builder =
        PrefillBuilder::create(backend(), problem, {.max_requests = 2, .max_query_tokens = 64, .max_kv_tokens = 64});
    ASSERT_TRUE(succeeded(builder.status()));
    const std::int64_t token_bytes = kHeads * (kColumns * kind.column_bytes + 128 * kind.transposed_bytes);
    EXPECT_LE(builder->chunk_tokens() * token_bytes, 64 << 20);
    const std::int64_t row_bytes = 2 * (512 + 64);  // of the cache's tokens, gathered
    EXPECT_GE(builder->chunk_tokens() * (token_bytes + row_bytes), 60 << 20) << "and do not waste it";
  }
}

}  // namespace
}  // namespace latte::testkit
