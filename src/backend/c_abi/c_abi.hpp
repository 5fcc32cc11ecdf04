// What the C functions share: the wall that no exception passes, versioned structs, and conversions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>

#include "backend/errors.hpp"
#include "latte/decode.hpp"
#include "latte/latte.h"
#include "latte/ops.hpp"
#include "latte/prefill.hpp"
#include "latte/workspace.hpp"

struct latte_backend {
  latte::Backend backend;
  latte::MachineInfo info;  // owns the strings that the C side sees
};

struct latte_builder {
  latte::MetadataBuilder builder;
};

struct latte_prefill_builder {
  latte::PrefillBuilder builder;
};

struct latte_workspace {
  latte::Workspace workspace;
};

namespace latte::c_abi {

// A size beyond this is not a future struct but memory nobody set.
inline constexpr std::uint32_t kMaxStructBytes = 4096;

void fill_error(latte_error* error, Code code, const char* field, const char* expected, const char* got) noexcept;
latte_code report(const Status& status, latte_error* error) noexcept;

// Runs `body` (returning a Status) and turns whatever happens into a code.
template <class Body>
latte_code guarded(latte_error* error, Body body) noexcept {
  try {
    return report(body(), error);
  } catch (const std::bad_alloc&) {
    fill_error(error, Code::out_of_memory, "memory", "an allocation to succeed", "std::bad_alloc");
    return LATTE_OUT_OF_MEMORY;
  } catch (const std::exception& exception) {
    fill_error(error, Code::internal, "latte", "no exception", exception.what());
    return LATTE_INTERNAL;
  } catch (...) {
    fill_error(error, Code::internal, "latte", "no exception", "one of unknown type");
    return LATTE_INTERNAL;
  }
}

// Fields are naturally aligned and structs padded to 8 bytes, so a size that is a multiple of 8 cuts no field in two.
Status check_size(const char* name, std::uint32_t size, std::size_t least);

template <class T>
Status check_struct(const T* given, const char* name, std::size_t least) {
  static_assert(sizeof(T) % 8 == 0 && offsetof(T, size) == 0 && sizeof(T) <= kMaxStructBytes);
  if (given == nullptr) return backend::missing(name, "a struct", "null");
  return check_size(name, given->size, least);
}

// Copies what the caller's struct has over `full`, which comes with the defaults. `least`: bytes without which the
// struct says nothing.
template <class T>
Status read_struct(const T* given, const char* name, std::size_t least, T& full) {
  LATTE_RETURN_IF_ERROR(check_struct(given, name, least));
  const std::size_t size = given->size;
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (std::any_of(bytes + std::min(size, sizeof(T)), bytes + size, [](unsigned char byte) { return byte != 0; }))
    return backend::unsupported(
        std::string(name) + ".size",
        "fields that this version knows (up to " + backend::text(sizeof(T)) + " bytes), or zeros",
        backend::text(size) + " bytes");
  std::memcpy(&full, given, std::min(size, sizeof(T)));
  // A later version may give it a meaning, which its callers must not have ignored here.
  if constexpr (requires { full.reserved; })
    if (full.reserved != 0)
      return backend::unsupported(std::string(name) + ".reserved", "0", backend::text(full.reserved));
  return {};
}

// Writes as much of `full` as the caller's struct has room for. Call check_struct first.
template <class T>
void write_struct(T full, T* target) {
  full.size = target->size;
  std::memcpy(target, &full, std::min<std::size_t>(full.size, sizeof(T)));
  if (full.size > sizeof(T)) std::memset(reinterpret_cast<char*>(target) + sizeof(T), 0, full.size - sizeof(T));
}

template <class T>
Status read_span(const T* data, std::int64_t count, const char* field, std::span<const T>& span) {
  if (count < 0) return backend::invalid(field, "a count >= 0", backend::text(count));
  if (data == nullptr && count > 0) return backend::missing(field, "a pointer", "null");
  if (data != nullptr) span = {data, static_cast<std::size_t>(count)};
  return {};
}

// `last` is the enum's last value. The range is checked before the cast: 256 must not become 0.
template <class Enum>
Status read_enum(std::int32_t value, Enum last, const char* field, Enum& out) {
  if (value < 0 || value > static_cast<std::int32_t>(last))
    return backend::invalid(field, "0 .. " + backend::text(static_cast<std::int32_t>(last)), backend::text(value));
  out = static_cast<Enum>(value);
  return {};
}

Status need_backend(const latte_backend* handle);
Status read_tensor(const latte_tensor& tensor, const char* field, TensorView& view);
Status read_input(const latte_tensor& tensor, const char* field, ConstTensorView& view);
Status read_problem(const latte_problem* given, DecodeProblem& problem);
Status read_problem(const latte_prefill_problem* given, PrefillProblem& problem);
Status read_limits(const latte_limits* given, Limits& limits);
Status read_options(const latte_builder_options* given, BuilderOptions& options);

// Everything that a builder's needs and create are told.
template <class Problem>
struct Wanted {
  Problem problem;
  Limits limits;
  BuilderOptions options;
};
template <class Given, class Problem>
Status read_wanted(const latte_backend* backend, const Given* problem, const latte_limits* limits,
                   const latte_builder_options* options, Wanted<Problem>& wanted) {
  LATTE_RETURN_IF_ERROR(need_backend(backend));
  LATTE_RETURN_IF_ERROR(read_problem(problem, wanted.problem));
  LATTE_RETURN_IF_ERROR(read_limits(limits, wanted.limits));
  return read_options(options, wanted.options);
}

// What both kinds of builders share; a handle holds its builder as `builder`.
template <class Handle>
Status need_builder(const Handle* handle) {
  return handle != nullptr ? Status() : backend::missing("builder", "a builder", "null");
}
template <class Problem, class Handle, class Given>
Status create_builder(const latte_backend* backend, const Given* problem, const latte_limits* limits,
                      const latte_builder_options* options, Handle** handle) {
  if (handle == nullptr) return backend::missing("builder", "where to put the handle", "null");
  *handle = nullptr;
  Wanted<Problem> wanted;
  LATTE_RETURN_IF_ERROR(read_wanted(backend, problem, limits, options, wanted));
  auto created = decltype(Handle::builder)::create(backend->backend, wanted.problem, wanted.limits, wanted.options);
  if (!created.ok()) return created.status();
  *handle = std::make_unique<Handle>(Handle{std::move(*created)}).release();
  return {};
}
// What the info structs of both have in common.
template <class Builder, class Info>
void fill_info(const Builder& builder, Info& info) {
  const PlanConfig& config = builder.plan_config();
  const PlanSizes& sizes = builder.plan_sizes();
  info.heads = config.heads;
  info.row_tile = config.row_tile;
  info.kv_block = config.kv_block;
  info.workers = config.workers;
  info.policy_n = config.policy.n;
  info.kernel = builder.kernel();
  info.reason = builder.reason().c_str();
  info.workspace_bytes = builder.workspace_bytes();
  info.max_tiles = sizes.tiles;
  info.max_records = sizes.records;
  info.max_partials = sizes.partials;
  info.max_partial_rows = sizes.partial_rows;
  info.max_plan_words = sizes.words;
}
template <class Handle>
Status init_workspace(const Handle* handle, void* workspace, std::uint64_t bytes, Stream stream) {
  LATTE_RETURN_IF_ERROR(need_builder(handle));
  return handle->builder.init_workspace({static_cast<std::byte*>(workspace), static_cast<std::size_t>(bytes)}, stream);
}
// destroy and close. NULL is fine.
template <class Handle>
latte_code destroy_handle(Handle* handle, latte_error* error) noexcept {
  return guarded(error, [&]() -> Status {
    delete handle;
    return {};
  });
}

// The size of what `field` points to is in <field>_bytes.
Status read_memory(void* data, std::uint64_t bytes, const char* field, std::span<std::byte>& memory);
Status write_needs(const Result<BuilderNeeds>& needs, latte_workspace_need* plan, latte_workspace_need* workspace);
// Call check_struct first.
void write_support(const Support& answer, latte_support* support);
void write_plan(const Plan& made, latte_plan* plan);

// The block table or the page lists of any struct that has their fields.
template <class Args>
Status read_pages(const Args& full, PageTable& pages) {
  pages.block_table = full.block_table;
  pages.block_table_stride = full.block_table_stride;
  pages.max_pages = full.max_pages;
  LATTE_RETURN_IF_ERROR(read_span(full.page_indptr, full.page_indptr_count, "pages.page_indptr", pages.page_indptr));
  return read_span(full.page_indices, full.page_indices_count, "pages.page_indices", pages.page_indices);
}

// Copies text into a fixed array, cut to fit, always terminated.
template <std::size_t N>
void copy_text(const std::string& text, char (&target)[N]) {
  const std::size_t length = std::min(text.size(), N - 1);
  std::memcpy(target, text.data(), length);
  target[length] = '\0';
}

}  // namespace latte::c_abi
