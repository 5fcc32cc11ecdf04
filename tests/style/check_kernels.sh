#!/bin/sh
# check_kernels.sh OBJECTS BUDGET: do the kernels stay in registers, as ptxas reported when they were compiled?
#   OBJECTS  a directory with the *.ptxas files that scripts/keep_ptxas_report leaves beside each object
#   BUDGET   lines "pattern registers [shared]": kernels whose name matches the extended regular expression may use so
#            many registers and so many bytes of static shared memory, at most; the first line that matches counts.
#            "=168" registers are neither more nor fewer: what roles pass on to each other must be there at the launch
# Every kernel must have neither spills nor a stack, every kernel must have a line of the budget and every line a
# kernel, and there must be no trap: nvcc puts one, without a word, where it takes code for impossible, as when a
# constant of the host is asked for by its address (std::clamp takes references).
# Exits 77 (skipped) when there is nothing to look at, 1 when something is wrong.
set -eu

objects=$1
budget=$2
reports=$(find "$objects" -name '*.ptxas' 2>/dev/null | sort)
if [ -z "$reports" ]; then
  echo "no kernels were compiled"
  exit 77
fi
if [ ! -f "$budget" ]; then
  echo "no budget at $budget"
  exit 1
fi

# shellcheck disable=SC2086
if grep -E '^traps [1-9]' $reports /dev/null; then
  exit 1
fi
# shellcheck disable=SC2086
silent=$(grep -L '^traps ' $reports || true)
if [ -n "$silent" ]; then
  echo "no word about traps, compile anew: $silent"
  exit 1
fi

# One kernel a line: name, stack, spill stores, spill loads, registers, static shared memory. Names are demangled where
# something is there to do it; patterns should match either way.
# shellcheck disable=SC2086
awk '
  /Compiling entry function/ { split($0, quoted, "\047"); name = quoted[2]; next }
  /bytes stack frame/ { stack = $1; stores = $5; loads = $9; next }
  /Used [0-9]+ registers/ {
    registers = shared = 0
    for (i = 1; i <= NF; ++i) {
      if ($(i + 1) ~ /^registers/) registers = $i
      if ($(i + 1) == "bytes" && $(i + 2) ~ /^smem/) shared = $i
    }
    if (name != "") print name, stack, stores, loads, registers, shared
    name = ""
  }
' $reports | if command -v c++filt >/dev/null 2>&1; then c++filt -p; else cat; fi | sed 's/ \([*&]\)/\1/g' |
  awk -v budget="$budget" '
  BEGIN {
    while ((getline line < budget) > 0) {
      sub(/#.*/, "", line)
      fields = split(line, field, /[ \t]+/)
      if (field[1] == "") { for (i = 1; i < fields; ++i) field[i] = field[i + 1]; --fields }
      if (fields < 2 || field[1] == "") continue
      pattern[++rules] = field[1]
      exact[rules] = sub(/^=/, "", field[2])
      most[rules] = field[2]
      most_shared[rules] = fields >= 3 && field[3] != "" ? field[3] : -1
    }
  }
  {
    # A demangled name may hold spaces: the numbers are the last five fields.
    name = $1
    for (i = 2; i <= NF - 5; ++i) name = name " " $i
    stack = $(NF - 4); stores = $(NF - 3); loads = $(NF - 2); registers = $(NF - 1); shared = $NF
    ++kernels
    if (stack + stores + loads > 0) {
      printf "%s: %d bytes of stack, %d spilled, %d loaded back\n", name, stack, stores, loads
      bad = 1
    }
    for (i = 1; i <= rules && name !~ pattern[i]; ++i) continue
    if (i > rules) {
      printf "%s: no line of the budget is for this kernel\n", name
      bad = 1
    } else {
      ++matched[i]
      if (registers + 0 > most[i] + 0 || (exact[i] && registers + 0 != most[i] + 0)) {
        printf "%s: %d registers, the budget is %s%d\n", name, registers, exact[i] ? "exactly " : "", most[i]
        bad = 1
      }
      if (most_shared[i] >= 0 && shared > most_shared[i]) {
        printf "%s: %d bytes of shared memory, the budget is %d\n", name, shared, most_shared[i]
        bad = 1
      }
    }
  }
  END {
    for (i = 1; i <= rules; ++i)
      if (!matched[i]) { printf "%s: no kernel matches this line of the budget\n", pattern[i]; bad = 1 }
    if (kernels == 0) { print "the reports name no kernel"; bad = 1 }
    if (!bad) printf "%d kernels: no spills, no stack, no traps, within their budgets\n", kernels
    exit bad
  }'
