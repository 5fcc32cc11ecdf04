/* What the header's first page promises about errors, for every struct and every handle. */
#include <string.h>

#include "checks.h"
#include "latte/latte.h"

typedef struct handles {
  latte_backend* backend;
  latte_builder* builder;
  latte_prefill_builder* prefill_builder;
} handles;

static latte_problem small_problem(void) {
  latte_problem problem = LATTE_PROBLEM_INIT;
  problem.heads = 1;
  return problem;
}

static latte_prefill_problem small_prefill_problem(void) {
  latte_prefill_problem problem = LATTE_PREFILL_PROBLEM_INIT;
  problem.heads = 1;
  return problem;
}

static latte_limits small_limits(void) {
  latte_limits limits = LATTE_LIMITS_INIT;
  limits.max_requests = 1;
  limits.max_kv_tokens = 8;
  return limits;
}

static int open_handles(handles* h) {
  latte_backend_options options = LATTE_BACKEND_OPTIONS_INIT;
  latte_problem problem = small_problem();
  latte_prefill_problem prefill_problem = small_prefill_problem();
  latte_limits limits = small_limits();
  options.threads = 1;
  memset(h, 0, sizeof *h);
  return CHECK_CODE(LATTE_OK, latte_backend_open(&options, &h->backend, NULL)) &&
         CHECK_CODE(LATTE_OK, latte_builder_create(h->backend, &problem, &limits, NULL, &h->builder, NULL)) &&
         CHECK_CODE(LATTE_OK, latte_prefill_builder_create(h->backend, &prefill_problem, &limits, NULL,
                                                           &h->prefill_builder, NULL));
}

static void close_handles(handles* h) {
  CHECK_CODE(LATTE_OK, latte_prefill_builder_destroy(h->prefill_builder, NULL));
  CHECK_CODE(LATTE_OK, latte_builder_destroy(h->builder, NULL));
  CHECK_CODE(LATTE_OK, latte_backend_close(h->backend, NULL));
}

static void check_reserved(latte_code code, const latte_error* error, const char* field) {
  CHECK_CODE(LATTE_UNSUPPORTED, code);
  CHECK(strcmp(error->field, field) == 0);
  CHECK(strcmp(error->expected, "0") == 0 && strcmp(error->got, "7") == 0);
}

/* What a later version may put there must not be ignored by this one. */
void reserved_fields(void) {
  handles h;
  latte_error error = LATTE_ERROR_INIT;
  latte_metadata metadata = LATTE_METADATA_INIT;
  latte_prefill_metadata prefill_metadata = LATTE_PREFILL_METADATA_INIT;
  if (!open_handles(&h)) return;
  {
    latte_problem problem = small_problem();
    latte_support support = LATTE_SUPPORT_INIT;
    problem.reserved = 7;
    check_reserved(latte_backend_supports(h.backend, &problem, &support, &error), &error, "problem.reserved");
  }
  {
    latte_lengths lengths = LATTE_LENGTHS_INIT;
    lengths.reserved = 7;
    check_reserved(latte_builder_build(h.builder, 0, &lengths, &metadata, &error), &error, "lengths.reserved");
  }
  {
    latte_device_lengths lengths = LATTE_DEVICE_LENGTHS_INIT;
    lengths.reserved = 7;
    check_reserved(latte_builder_build_on_device(h.builder, 0, &lengths, &metadata, &error), &error,
                   "lengths.reserved");
  }
  {
    latte_prefill_lengths lengths = LATTE_PREFILL_LENGTHS_INIT;
    lengths.reserved = 7;
    check_reserved(latte_prefill_builder_build(h.prefill_builder, 0, &lengths, &prefill_metadata, &error), &error,
                   "lengths.reserved");
  }
  {
    latte_metadata marked = LATTE_METADATA_INIT;
    latte_decode_args args = latte_decode_args_init();
    marked.reserved = 7;
    check_reserved(latte_decode(&marked, &args, &error), &error, "metadata.reserved");
    args.reserved = 7;
    check_reserved(latte_decode(&metadata, &args, &error), &error, "args.reserved");
  }
  {
    latte_prefill_args args = latte_prefill_args_init();
    args.reserved = 7;
    check_reserved(latte_prefill(&prefill_metadata, &args, &error), &error, "args.reserved");
  }
  {
    latte_write_kv_args args = latte_write_kv_args_init();
    args.reserved = 7;
    check_reserved(latte_write_kv(h.backend, &args, &error), &error, "args.reserved");
  }
  {
    latte_gather_kv_args args = latte_gather_kv_args_init();
    args.reserved = 7;
    check_reserved(latte_gather_kv(h.backend, &args, &error), &error, "args.reserved");
  }
  {
    /* A caller whose struct ends before the field has none. */
    latte_decode_args args = latte_decode_args_init();
    args.size = offsetof(latte_decode_args, workspace);
    args.reserved = 7;
    CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_decode(&metadata, &args, &error));
    CHECK(strcmp(error.field, "metadata") == 0);
  }
  close_handles(&h);
}

/* NULL, so that a caller may close whatever it has got; other outputs stay as they were. */
void handles_after_errors(void) {
  handles h, garbage;
  latte_backend_options options = LATTE_BACKEND_OPTIONS_INIT;
  latte_problem problem = small_problem();
  latte_prefill_problem prefill_problem = small_prefill_problem();
  latte_limits limits = small_limits();
  latte_workspace_need plan, workspace_need, before;
  latte_workspace* workspace;
  latte_metadata metadata = LATTE_METADATA_INIT;
  latte_lengths lengths = LATTE_LENGTHS_INIT;
  if (!open_handles(&h)) return;
  garbage = h;
  memcpy(&workspace, &h.backend, sizeof workspace);
  options.threads = -1;
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_backend_open(&options, &garbage.backend, NULL));
  CHECK(garbage.backend == NULL);
  problem.heads = 0;
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_builder_create(h.backend, &problem, &limits, NULL, &garbage.builder, NULL));
  CHECK(garbage.builder == NULL);
  prefill_problem.heads = 0;
  CHECK_CODE(LATTE_INVALID_ARGUMENT,
             latte_prefill_builder_create(h.backend, &prefill_problem, &limits, NULL, &garbage.prefill_builder, NULL));
  CHECK(garbage.prefill_builder == NULL);
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_workspace_create(h.backend, NULL, -1, LATTE_CHECKS_ON, &workspace, NULL));
  CHECK(workspace == NULL);

  memset(&before, 'x', sizeof before);
  plan = workspace_need = before;
  CHECK_CODE(LATTE_INVALID_ARGUMENT,
             latte_builder_needs(h.backend, &problem, &limits, NULL, &plan, &workspace_need, NULL));
  CHECK(memcmp(&plan, &before, sizeof plan) == 0 && memcmp(&workspace_need, &before, sizeof before) == 0);
  metadata.generation = 42;
  CHECK(latte_builder_build(h.builder, 0, &lengths, &metadata, NULL) != LATTE_OK);
  CHECK(metadata.generation == 42 && metadata.slot == NULL);
  close_handles(&h);
}
