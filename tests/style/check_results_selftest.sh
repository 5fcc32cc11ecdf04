#!/bin/sh
# Shows that `scripts/results_table --check` can fail: a tree of made-up results, then one mistake at a time.
set -eu

table=$(dirname "$0")/../../scripts/results_table
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir -p "$tree/bench/results/h200" "$tree/docs/kernels"
pages='README.md docs/kernels/sm90_swapped.md docs/kernels/sm90_plain.md docs/kernels/sm90_prefill.md'
for page in $pages; do
  printf '# x\n\n<!-- h200:begin -->\nold\n<!-- h200:end -->\n\nrest\n' >"$tree/$page"
done
cat >"$tree/bench/results/h200/peers.json" <<END
{
 "rows": [
  {"spec": "64q1s4k", "heads": 16, "flashmla_us": 82.8, "fa3_us": 89.3},
  {"spec": "1q1s64k_63q1s2k", "heads": 128, "flashmla_us": 70.9, "fa3_us": 60.5}
 ],
 "prefill": [
  {"prompts": "8q1k", "heads": 16, "dtype": "bf16", "fa3_us": 120, "cudnn_us": 110}
 ]
}
END

failed=0

# expect STATUS NAME [WHAT THE OUTPUT MUST CONTAIN] [OPTION]
expect() {
  got=0
  sh "$table" "${4---check}" "$tree" >"$tree/log" 2>&1 || got=$?
  if [ "$got" -ne "$1" ] || { [ -n "${3-}" ] && ! grep -qF -e "$3" "$tree/log"; }; then
    echo "$2: expected $1 ${3-}, got $got:"
    cat "$tree/log"
    failed=1
  fi
}

# result SPEC HEADS TIME [REST] [COMMIT]: a line as `latte bench --json` writes it.
result() {
  printf '{"op":"decode","backend":"cuda","kernel":"sm90_%s","spec":"%s","heads":%d,"page":64,"kv":"bf16",' \
    "$([ "$2" -gt 32 ] && echo plain64_pair || echo swapped16)" "$1" "$2"
  printf '"policy":"balanced","time_us":%s,"machine":"a GPU, 1700 MHz under load","commit":"%s",%s}\n' "$3" \
    "${5-abc}" "${4-\"overlap\":\"off\",\"working_set\":0}"
}

expect 77 'no results' 'no results'
results=$tree/bench/results/h200/a.jsonl
result 64q1s4k 16 80.04 >"$results"
expect 1 'a row without a result' 'no result for 1q1s64k_63q1s2k with 128 heads'
{
  result 64q1s4k 16 75.04
  result 64q1s4k 16 76 '"overlap":"on","working_set":0'
  result 64q1s4k 16 150 '"overlap":"off","working_set":0' another
  result 64q1s4k 16 170 '"overlap":"off","working_set":0' another
  result 64q1s4k 16 160 '"overlap":"off","working_set":0' another
  result 64q1s4k 16 180 '"overlap":"serial","working_set":0' another
  result 64q1s4k 16 10 '"overlap":"serial","working_set":0' alone
  result 64q1s4k 16 90 '"overlap":"off","working_set":1000000000'
  result 1q1s64k_63q1s2k 128 55
  printf '{"op":"prefill","backend":"cuda","kernel":"sm90_prefill_bf16","spec":"8q1k","heads":16,"page":0,"kv":"bf16",'
  printf '"policy":"balanced","time_us":100,"flops":5e10,"machine":"a GPU","commit":"abc"}\n'
} >>"$results"
# Another file has a row again, at an older commit: its run counts as any other, but is not the newest.
result 64q1s4k 16 76.5 '"overlap":"off","working_set":0' older >"$tree/bench/results/h200/b.jsonl"
expect 1 'old tables' 'README.md: its table is not that'
expect 0 'tables written' '' --write
expect 0 'tables that are right'

# The fastest of all runs and the median of the newest commit, of three runs; the reference of the anchors; the better
# peer. Which commits are the newest.
for row in '| `64q1s4k` | 16 | 75.0 | 160.0 | 68.4 | 1.10 | 82.8 FlashMLA | 1.10 | 0.52 |' 'newest commit (another, abc)' '| 55.0 | 55.0 | 72.3 | 0.76 | 60.5 FA3 | 1.10 | 1.10 |'; do
  if ! grep -qF -e "$row" "$tree/README.md"; then
    echo "README.md lacks $row:"
    cat "$tree/README.md"
    failed=1
  fi
done
for page in $pages; do
  if [ "$(tail -1 "$tree/$page")" != rest ]; then
    echo "$page: what follows the table is gone"
    failed=1
  fi
done
# Overlapped is 76 over the median of 75.04 and 80.04, serial 180 over the 160 of its own commit; a commit without plain
# runs does not count.
grep -qF '| 75.0 | 68.4 | 1.10 | 0.98 | 1.12 | 90.0 | 82.8 FlashMLA |' "$tree/docs/kernels/sm90_swapped.md" || {
  cat "$tree/docs/kernels/sm90_swapped.md"
  failed=1
}
for page in $pages; do
  if grep -q 'MHz under load' "$tree/$page" || grep -v '^|' "$tree/$page" | LC_ALL=C grep -qE '^.{121}'; then
    echo "$page: the clock of one run, or a line of more than 120 columns"
    cat "$tree/$page"
    failed=1
  fi
done

grep -qF '| `8q1k` | 16 | bf16 | balanced | 100.0 | 500 | 110.0 cuDNN | 1.10 |' "$tree/docs/kernels/sm90_prefill.md" || {
  cat "$tree/docs/kernels/sm90_prefill.md"
  failed=1
}

sed 's/| 75.0 |/| 74.0 |/' "$tree/README.md" >"$tree/changed"
cp "$tree/changed" "$tree/README.md"
expect 1 'a number changed by hand' '| 74.0 |'
expect 0 'tables written again' '' --write
grep -v 'h200:end' "$tree/docs/kernels/sm90_plain.md" >"$tree/changed"
cp "$tree/changed" "$tree/docs/kernels/sm90_plain.md"
expect 1 'a marker is missing' 'sm90_plain.md: wants one'

exit "$failed"
