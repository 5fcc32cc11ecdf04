/* Counting checks, and the tests of other files that the program runs. */
#ifndef LATTE_TESTS_C_ABI_CHECKS_H
#define LATTE_TESTS_C_ABI_CHECKS_H

#include "latte/latte.h"

/* Not assert(): these stay in every build. */
#define CHECK(condition) check((condition) != 0, #condition, __FILE__, __LINE__)
#define CHECK_CODE(expected, call) check_code((expected), (call), #call, __FILE__, __LINE__)

int check(int ok, const char* what, const char* file, int line);
int check_code(latte_code expected, latte_code got, const char* what, const char* file, int line);

void prefill_numbers(void);
void prefill_context(void);
void prefill_versions_and_nulls(void);
void workspace_slices(void);
void plans_in_a_workspace(void);
void reserved_fields(void);
void handles_after_errors(void);

#endif
