#!/bin/sh
# Shows that scripts/sanitize_gpu can fail: a sanitizer and tests that are made up, with one thing wrong at a time.
set -eu

check=$(dirname "$0")/../../scripts/sanitize_gpu
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
failed=0

# says FILE STATUS TEXT: makes a program of it.
says() {
  printf '#!/bin/sh\ncat <<TEXT\n%s\nTEXT\nexit %s\n' "$3" "$2" >"$tree/$1"
  chmod +x "$tree/$1"
}

# expect STATUS WHAT [ARGUMENT...]
expect() {
  wanted=$1
  what=$2
  shift 2
  status=0
  LATTE_COMPUTE_SANITIZER=$tree/sanitizer LATTE_SANITIZE_SECONDS=1 sh "$check" "$tree/tests" "$@" >"$tree/log" 2>&1 ||
    status=$?
  if [ "$status" -ne "$wanted" ]; then
    echo "$what: expected exit status $wanted, got $status"
    cat "$tree/log"
    failed=1
  fi
}

ran='[  PASSED  ] 3 tests.'
clean='========= ERROR SUMMARY: 0 errors'
expect 1 "no tests"
says tests 0 "$ran"
expect 77 "no sanitizer"
says sanitizer 0 "$ran
$clean"
expect 0 "no errors"
expect 2 "a tool that there is not" synccheck
says sanitizer 86 "$ran
========= ERROR SUMMARY: 2 errors"
expect 1 "errors"
says sanitizer 0 "$ran
========= RACECHECK SUMMARY: 10 hazards displayed (0 errors, 10 warnings)"
expect 1 "hazards, though the exit status is 0" racecheck
says sanitizer 0 "$ran
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
expect 0 "no hazards" racecheck
says sanitizer 1 "[  PASSED  ] 2 tests.
[  FAILED  ] 1 test, listed below:
$clean"
expect 1 "a test that fails"
says sanitizer 0 "[  PASSED  ] 0 tests.
$clean"
expect 1 "no test that ran"
says sanitizer 0 "$ran"
expect 1 "no summary"
printf '#!/bin/sh\nexec sleep 20\n' >"$tree/sanitizer"
expect 1 "a tool that does not end" memcheck
says sanitizer 0 "$ran
$clean"
says tests 0 "unsupported: device: expected a GPU and its driver, got no GPU
[  SKIPPED ] GpuDecode.LseHasFreeStridesAndIsOptional (0 ms)
[  PASSED  ] 0 tests."
expect 77 "no GPU"
says tests 1 "[  FAILED  ] 1 test, listed below:"
expect 1 "tests that fail by themselves"

exit "$failed"
