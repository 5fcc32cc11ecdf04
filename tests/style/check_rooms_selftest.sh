#!/bin/sh
# Shows that check_rooms.sh can fail: plants one forbidden include at a time in a tree that is otherwise clean.
set -eu

check=$(dirname "$0")/check_rooms.sh
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT

mkdir -p "$tree/include/latte" "$tree/bench" "$tree/examples"
for room in core plan cpu cuda backend testkit cli; do mkdir -p "$tree/src/$room"; done

failed=0

# plant DIRECTORY INCLUDE pass|fail
plant() {
  printf '#pragma once\n#include %s\n' "$2" >"$tree/$1/planted.hpp"
  if sh "$check" "$tree" >"$tree/log" 2>&1; then got=pass; else got=fail; fi
  if [ "$got" != "$3" ]; then
    echo "$1 including $2: expected $3, got $got"
    cat "$tree/log"
    failed=1
  elif [ "$3" = fail ] && ! grep -q "^$1/planted.hpp:2: " "$tree/log"; then
    echo "$1 including $2: the file and line were not named"
    cat "$tree/log"
    failed=1
  fi
  rm "$tree/$1/planted.hpp"
}

# A tree without sources is an error, not a success.
if sh "$check" "$tree" >/dev/null 2>&1; then
  echo "an empty tree passed"
  failed=1
fi

plant include/latte '<vector>' pass
plant include/latte '"latte/plan.hpp"' pass
plant include/latte '"core/checked.hpp"' fail
plant include/latte '<cuda_runtime.h>' fail
plant include/latte '<immintrin.h>' fail
plant include/latte '<fmt/core.h>' fail
plant src/core '<cmath>' pass
plant src/core '"core/checked.hpp"' pass
plant src/core '"plan/layout.hpp"' fail
plant src/core '"cpu/cpu.hpp"' fail
plant src/plan '"core/checked.hpp"' pass
plant src/plan '"cpu/cpu.hpp"' fail
plant src/plan '<unistd.h>' fail
plant src/cpu '<hwy/highway.h>' pass
plant src/cpu '"hwy/highway.h"' pass
plant src/cpu '<sys/syscall.h>' pass
plant src/cpu '<immintrin.h>' pass
plant src/cpu '"backend/backend.hpp"' fail
plant src/cpu '"cuda/call.hpp"' fail
plant src/cpu '<cuda_runtime.h>' fail
plant src/cuda '<cuda_runtime.h>' pass
plant src/cuda '<cuda.h>' pass
plant src/cuda '"plan/layout.hpp"' pass
plant src/cuda '"cpu/cpu.hpp"' fail
plant src/cuda '"backend/impl.hpp"' fail
plant src/backend '"cpu/cpu.hpp"' pass
plant src/backend '"cuda/host/cuda.hpp"' pass
plant src/backend '<cuda_runtime.h>' fail
plant src/backend '"cli/table.hpp"' fail
plant src/backend '<hwy/highway.h>' fail
plant src/testkit '"latte/latte.hpp"' pass
plant src/testkit '"core/checked.hpp"' fail
plant src/cli '"testkit/oracle.hpp"' pass
plant src/cli '<CLI/CLI.hpp>' pass
plant src/cli '"cpu/cpu.hpp"' fail
plant src/cli '"backend/backend.hpp"' fail
plant src/cli '"cuda/host/cuda.hpp"' fail
plant src/cli '<cuda_runtime.h>' fail
plant src/cli '"../cpu/cpu.hpp"' fail
plant bench '<benchmark/benchmark.h>' pass
plant bench '"plan/layout.hpp"' fail
plant examples '<latte/latte.hpp>' pass
plant examples '"testkit/oracle.hpp"' fail

exit "$failed"
