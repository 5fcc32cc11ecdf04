#!/bin/sh
# check_rooms.sh ROOT: do the includes point only the way the rooms allow?
#   core <- plan <- {cpu, cuda} <- backend  the library
#   testkit, cli, bench, examples           stand on the public headers
# Prints file:line and the include for each that does not, and exits 1.
set -eu

root=$1
cd "$root"

# One line per room:  directory | own headers it may include "so" | other headers it may include, both ways of quoting.
# `std` stands for the standard library, `posix` for the headers of the operating system, `toolkit` for CUDA's.
rules='
include/latte | latte                       | std
src/core      | latte core                  | std
src/plan      | latte core plan             | std
src/cpu       | latte core plan cpu         | std posix hwy intrinsics
src/cuda      | latte core plan cuda        | std toolkit
src/backend   | latte core plan cpu cuda backend | std
src/testkit   | latte testkit               | std posix fmt
src/cli       | latte testkit cli           | std posix fmt CLI nlohmann
bench         | latte testkit bench         | std posix fmt benchmark intrinsics
examples      | latte                       | std
'

files=0
status=0
while IFS='|' read -r directory own other; do
  directory=$(echo "$directory" | tr -d ' ')
  [ -n "$directory" ] || continue
  [ -d "$directory" ] || continue
  list=$(find "$directory" -type f \( -name '*.hpp' -o -name '*.cpp' -o -name '*.h' -o -name '*.c' \
    -o -name '*.cu' -o -name '*.cuh' \) | sort)
  [ -n "$list" ] || continue
  files=$((files + $(echo "$list" | wc -l)))
  # File names in this tree have no spaces.
  # shellcheck disable=SC2086
  awk -v own=" $own " -v other=" $other " -v directory="$directory" '
    function allowed(header,   room) {
      if (header ~ /(^|\/)\.\.?\//) return 0
      if (header ~ /\//) {
        room = header
        sub(/\/.*/, "", room)
        if (index(own, " " room " ")) return 1
        if (index(other, " " room " ")) return 1
        return index(other, " posix ") && room ~ /^(sys|linux|asm)$/
      }
      if (header ~ /^[a-z_0-9]+$/) return index(other, " std ")
      if (header ~ /^(std(def|int|bool|io|lib|arg)|math|string|float|limits|assert|errno|inttypes)\.h$/)
        return index(other, " std ")
      if (header ~ /^cuda(_[a-z0-9_]+)?\.h$/) return index(other, " toolkit ")
      if (header ~ /intrin\.h$|^cpuid\.h$/) return index(other, " intrinsics ")
      if (header ~ /^(unistd|sched|pthread|fcntl|signal|dlfcn|time|cpuid)\.h$/) return index(other, " posix ")
      return 0
    }
    /^[ \t]*#[ \t]*include[ \t]*[<"]/ {
      header = $0
      sub(/^[ \t]*#[ \t]*include[ \t]*[<"]/, "", header)
      sub(/[>"].*/, "", header)
      if (!allowed(header)) {
        printf "%s:%d: %s may not include %s\n", FILENAME, FNR, directory, header
        bad = 1
      }
    }
    END { exit bad }
  ' $list || status=1
done <<EOF
$rules
EOF

if [ "$files" -eq 0 ]; then
  echo "no sources found under $root" >&2
  exit 1
fi
[ "$status" -ne 0 ] || echo "$files files keep to their rooms"
exit "$status"
