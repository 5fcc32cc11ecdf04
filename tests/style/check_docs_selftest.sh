#!/bin/sh
# Shows that check_docs.sh can fail: one mistake at a time in a tree that is otherwise right.
set -eu

check=$(dirname "$0")/check_docs.sh
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir -p "$tree/docs/kernels" "$tree/examples"
printf 'int main() {\n  return 0;\n}\n' >"$tree/examples/quickstart.cpp"
part() { printf 'int main() {\n  // readme:begin\n  %s;\n  // readme:end\n}\n' "$1" >"$tree/examples/device_graph.cpp"; }
part 'capture()'
hook() { printf '// readme:begin\n%s;\n// readme:end\n' "$1" >"$tree/examples/chunked_prefill.cpp"; }
hook 'expand()'

failed=0

# expect pass|fail NAME [WHAT THE OUTPUT MUST CONTAIN]: checks the tree as it is.
expect() {
  if sh "$check" "$tree" >"$tree/log" 2>&1; then got=pass; else got=fail; fi
  if [ "$got" != "$1" ] || ! grep -qF -e "${3-}" "$tree/log"; then
    echo "$2: expected $1 ${3-}, got $got:"
    cat "$tree/log"
    failed=1
  fi
}

# readme CODE_FILE TEXT
readme() {
  {
    printf '# x\n\n<!-- quickstart:begin -->\n```cpp\n'
    cat "$1"
    printf '```\n<!-- quickstart:end -->\n\n%s\n\n' "$2"
    printf '<!-- device-graph:begin -->\n```cpp\ncapture();\n```\n<!-- device-graph:end -->\n'
    printf '<!-- expand:begin -->\n```cpp\nexpand();\n```\n<!-- expand:end -->\n'
  } >"$tree/README.md"
}
example=$tree/examples/quickstart.cpp

printf '# Page\n\n## The six arrays\n\n[up](../README.md)\n' >"$tree/docs/page.md"
readme "$example" '[page](docs/page.md#the-six-arrays) [web](https://example.org/x) `[code](nowhere.md)`'
expect pass 'a right tree'

sed 's/return 0/return 1/' "$example" >"$tree/changed"
readme "$tree/changed" ''
expect fail 'another example' 'return 1'
readme /dev/null ''
expect fail 'no example' 'not examples/quickstart.cpp'

readme "$example" ''
part 'replay()'
expect fail 'another part of an example' 'the device-graph markers'
part 'capture()'
hook 'project()'
expect fail 'another hook' 'the expand markers'
hook 'expand()'

readme "$example" '[gone](docs/gone.md)'
expect fail 'a dead link' 'README.md:11: docs/gone.md does not exist'
readme "$example" '![gone](docs/gone.svg)'
expect fail 'a missing picture' 'docs/gone.svg does not exist'
readme "$example" '[page](docs/page.md#the-seven-arrays)'
expect fail 'a dead anchor' 'the-seven-arrays has no such heading'
readme "$example" ''
printf '[gone](../page.md) [gone](page.md)\n' >"$tree/docs/kernels/deep.md"
expect fail 'a dead link below docs' 'docs/kernels/deep.md:1: page.md does not exist'
printf '```\n[gone](page.md)\n```\n' >"$tree/docs/kernels/deep.md"
expect pass 'a link in code'

exit "$failed"
