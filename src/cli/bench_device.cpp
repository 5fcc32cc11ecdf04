// Times on a device: N calls captured in one graph, replayed; a call's time is the replay's over N.
#include <algorithm>
#include <chrono>
#include <cmath>

#include <fmt/format.h>

#include "cli/bench.hpp"
#include "cli/spec_case.hpp"
#include "latte/latte.hpp"
#include "testkit/device_batch.hpp"
#include "testkit/device_prefill.hpp"

namespace latte::cli {
namespace {

using Clock = std::chrono::steady_clock;
using testkit::DeviceBatch;
using testkit::DevicePrefill;

constexpr int kHostPlanSamples = 51;
constexpr double kReplayUs = 10'000;  // of calls in one graph: long beside the launch of the graph itself
constexpr int kMaxCalls = 2000;
constexpr int kMinReplays = 7, kMaxReplays = 2000;

double since_us(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

class GraphBench {
 public:
  static Result<GraphBench> create(const Backend& backend) {
    Result<OwnedStream> stream = OwnedStream::create(backend);
    if (!stream) return stream.status();
    Result<Timer> timer = Timer::create(backend);
    if (!timer) return timer.status();
    return GraphBench(backend, std::move(*stream), std::move(*timer));
  }
  Stream stream() const { return stream_.get(); }

  // `queue(i)` queues call i; calls of a graph use i = 0, 1, ... and come in multiples of `round`.
  template <class Queue>
  Result<Timing> measure(const BenchSettings& settings, std::int32_t round, Queue queue) const {
    // A short graph first: it warms clocks and caches, tells errors, and how many calls the long one takes.
    const Result<Graph> trial = capture(round, queue);
    if (!trial) return trial.status();
    double trial_us = 0;
    for (int i = 0; i < 3; ++i) {
      const Result<double> us = replay(*trial);
      if (!us) return us.status();
      trial_us = *us;
    }
    const double rounds = std::ceil(kReplayUs / std::max(trial_us, 1e-3));
    const auto calls = static_cast<std::int32_t>(
        round * std::clamp<double>(rounds, 1, std::max(1.0, static_cast<double>(kMaxCalls) / round)));
    const Result<Graph> graph = capture(calls, queue);
    if (!graph) return graph.status();
    if (const Result<double> warm = replay(*graph); !warm) return warm.status();

    std::vector<double> samples;
    const auto wanted = static_cast<std::size_t>(settings.repeats > 0 ? settings.repeats : kMaxReplays);
    const auto least = static_cast<std::size_t>(settings.repeats > 0 ? settings.repeats : kMinReplays);
    const Clock::time_point begin = Clock::now();
    while (samples.size() < wanted && (samples.size() < least || since_us(begin) < settings.min_seconds * 1e6)) {
      const Result<double> us = replay(*graph);
      if (!us) return us.status();
      samples.push_back(*us / calls);
    }
    return summarize(samples);
  }

 private:
  GraphBench(const Backend& backend, OwnedStream stream, Timer timer)
      : backend_(backend), stream_(std::move(stream)), timer_(std::move(timer)) {}

  template <class Queue>
  Result<Graph> capture(std::int32_t calls, Queue queue) const {
    return Graph::capture(backend_, stream(), [&]() -> Status {
      for (std::int32_t i = 0; i < calls; ++i)
        if (Status status = queue(i); !status.ok()) return status;
      return {};
    });
  }

  Result<double> replay(const Graph& graph) const {
    if (Status status = timer_.start(stream()); !status.ok()) return status;
    if (Status status = graph.launch(stream()); !status.ok()) return status;
    if (Status status = timer_.stop(stream()); !status.ok()) return status;
    return timer_.microseconds();
  }

  Backend backend_;
  OwnedStream stream_;
  Timer timer_;
};

template <class Batch, class Case>
Result<std::vector<Batch>> make_batches(const Backend& backend, const Case& description,
                                        std::int64_t working_set_bytes) {
  const Result<std::int32_t> copies = copies_that_fit(backend, description, working_set_bytes);
  if (!copies) return copies.status();
  std::vector<Batch> batches;
  Case copy = description;
  for (std::int32_t i = 0; i < *copies; ++i) {
    copy.seed = description.seed + static_cast<std::uint64_t>(i);
    Result<Batch> batch = Batch::random(backend, copy);
    if (!batch) return batch.status();
    batches.push_back(std::move(*batch));
  }
  return batches;
}

// Planning on the host and queueing its upload; the device is idle when each begins.
template <class Builder, class Lengths>
Result<Timing> measure_host_plan(const Backend& backend, Builder& builder, const Lengths& lengths, Stream stream) {
  std::vector<double> samples;
  for (int i = 0; i < kHostPlanSamples; ++i) {
    const Clock::time_point start = Clock::now();
    if (const auto built = builder.build(0, lengths, stream); !built) return built.status();
    samples.push_back(since_us(start));
    if (const Status status = backend.synchronize(stream); !status.ok()) return status;
  }
  return summarize(samples);
}

}  // namespace

Result<BenchRow> measure_on_device(const Backend& backend, const BatchSpec& spec,
                                   const testkit::DecodeCase& description, const BenchSettings& settings) {
  Result<MetadataBuilder> builder = MetadataBuilder::create(
      backend, description.problem(), description.limits(settings.workers), {.policy = settings.policy});
  if (!builder) return builder.status();
  const Result<GraphBench> bench = GraphBench::create(backend);
  if (!bench) return bench.status();
  const Result<std::vector<DeviceBatch>> batches =
      make_batches<DeviceBatch>(backend, description, settings.working_set_bytes);
  if (!batches) return batches.status();
  const BatchLengths lengths = batch_lengths(spec);
  const Stream stream = bench->stream();

  const Result<Timing> plan_host = measure_host_plan(backend, *builder, lengths.view(), stream);
  if (!plan_host) return plan_host.status();
  const Result<Timing> plan = bench->measure(settings, 1, [&](std::int32_t) -> Status {
    return builder->build_on_device(0, batches->front().lengths(), stream).status();
  });
  if (!plan) return plan.status();

  const Result<DecodeMetadata> metadata = builder->build(0, lengths.view(), stream);
  if (!metadata) return metadata.status();
  if (const Status status = backend.synchronize(stream); !status.ok()) return status;
  const Result<Timing> time =
      bench->measure(settings, static_cast<std::int32_t>(batches->size()), [&](std::int32_t call) {
        DecodeArgs args = (*batches)[static_cast<std::size_t>(call) % batches->size()].args();
        args.stream = stream;
        args.overlap_previous = settings.overlap;
        return decode(*metadata, args);
      });
  if (!time) return time.status();
  if (const Status status = backend.synchronize(stream); !status.ok()) return status;
  BenchRow row = make_row(spec, description, settings);
  row.kernel = builder->kernel();
  row.policy = builder->plan_config().policy;
  row.time = *time;
  row.plan = *plan;
  row.plan_host = *plan_host;
  row.on_device = true;
  return row;
}

Result<BenchRow> measure_on_device(const Backend& backend, const BatchSpec& spec,
                                   const testkit::PrefillCase& description, const BenchSettings& settings) {
  Result<PrefillBuilder> builder = PrefillBuilder::create(
      backend, description.problem(), description.limits(settings.workers), {.policy = settings.policy});
  if (!builder) return builder.status();
  const Result<GraphBench> bench = GraphBench::create(backend);
  if (!bench) return bench.status();
  const Result<std::vector<DevicePrefill>> batches =
      make_batches<DevicePrefill>(backend, description, settings.working_set_bytes);
  if (!batches) return batches.status();
  std::vector<std::int32_t> query_start{0}, kv_start{0};
  for (const testkit::PrefillRequest& request : description.requests) {
    query_start.push_back(query_start.back() + request.query_tokens);
    kv_start.push_back(kv_start.back() + request.kv_tokens);
  }
  const PrefillLengths lengths{.query_start = query_start, .kv_start = kv_start};
  const Stream stream = bench->stream();
  const Result<Timing> plan = measure_host_plan(backend, *builder, lengths, stream);
  if (!plan) return plan.status();
  const Result<PrefillMetadata> metadata = builder->build(0, lengths, stream);
  if (!metadata) return metadata.status();
  if (const Status status = backend.synchronize(stream); !status.ok()) return status;
  const Result<Timing> time =
      bench->measure(settings, static_cast<std::int32_t>(batches->size()), [&](std::int32_t call) {
        PrefillArgs args = (*batches)[static_cast<std::size_t>(call) % batches->size()].args();
        args.stream = stream;
        return prefill(*metadata, args);
      });
  if (!time) return time.status();
  if (const Status status = backend.synchronize(stream); !status.ok()) return status;
  BenchRow row = make_row(spec, description, settings);
  row.kernel = builder->kernel();
  row.policy = builder->plan_config().policy;
  row.math = prefill_math_name(builder->math());
  row.time = *time;
  row.plan = row.plan_host = *plan;
  row.on_device = true;
  return row;
}

}  // namespace latte::cli
