#!/bin/sh
# Shows that check_kernels.sh can fail: reports with one thing wrong at a time.
set -eu

check=$(dirname "$0")/check_kernels.sh
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
failed=0

# report STACK STORES LOADS REGISTERS SHARED [TRAPS]
report() {
  cat >"$tree/kernel.cu.o.ptxas" <<REPORT
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN5latte6decodeEi' for 'sm_90a'
ptxas info    : Function properties for _ZN5latte6decodeEi
    $1 bytes stack frame, $2 bytes spill stores, $3 bytes spill loads
ptxas info    : Used $4 registers, used 2 barriers, $5 bytes smem, 416 bytes cmem[0]
traps ${6-0}
REPORT
}

# expect STATUS WHAT
expect() {
  status=0
  sh "$check" "$tree" "$tree/budget" >"$tree/log" 2>&1 || status=$?
  if [ "$status" -ne "$1" ]; then
    echo "$2: expected exit status $1, got $status"
    cat "$tree/log"
    failed=1
  fi
}

expect 77 "no report"
printf '# name registers shared\ndecode 168 1024\n' >"$tree/budget"
report 0 0 0 168 1024 && expect 0 "a kernel within its budget"
report 8 0 0 168 1024 && expect 1 "a stack"
report 0 4 0 168 1024 && expect 1 "a spill"
report 0 0 4 168 1024 && expect 1 "a spill loaded back"
report 0 0 0 169 1024 && expect 1 "a register too many"
report 0 0 0 168 1028 && expect 1 "too much shared memory"
report 0 0 0 168 1024 2 && expect 1 "traps"
report 0 0 0 168 1024 && sed -i /traps/d "$tree/kernel.cu.o.ptxas" && expect 1 "a report that does not know about traps"
printf 'decode 168\nprefill 100\n' >"$tree/budget"
report 0 0 0 168 0 && expect 1 "a budget for no kernel"
printf 'decode 168\n' >"$tree/budget"
report 0 0 0 168 99999 && expect 0 "shared memory without a budget"
printf 'prefill 100\n' >"$tree/budget"
report 0 0 0 50 0 && expect 1 "a kernel without a budget"
printf '# nothing\n' >"$tree/budget"
report 0 0 0 50 0 && expect 1 "a budget without lines"
printf 'decode =168\n' >"$tree/budget"
report 0 0 0 168 0 && expect 0 "registers exactly as told"
report 0 0 0 167 0 && expect 1 "a register fewer than told"
report 0 0 0 169 0 && expect 1 "a register more than told"
printf 'decode 168\n' >"$tree/budget"
report 0 0 0 99 0 && expect 0 "fewer registers than a budget allows"
rm "$tree/budget"
report 0 0 0 50 0 && expect 1 "no budget"
printf 'decode 168\n' >"$tree/budget"
printf 'ptxas info    : 0 bytes gmem\ntraps 0\n' >"$tree/kernel.cu.o.ptxas"
expect 1 "a report that names no kernel"

exit "$failed"
