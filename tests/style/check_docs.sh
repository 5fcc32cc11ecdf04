#!/bin/sh
# check_docs.sh ROOT: are the README's examples those that are compiled, and does every relative link lead somewhere?
# Links are those of README.md, CONTRIBUTING.md, CHANGELOG.md and docs/, outside of code. Prints what is wrong, exits 1.
set -eu

cd "$1"
status=0

shown=$(mktemp)
compiled=$(mktemp)
trap 'rm -f "$shown" "$compiled"' EXIT

# same_code MARKER FILE: is the README's code between the markers what $compiled holds of FILE?
same_code() {
  awk -v begin="<!-- $1:begin -->" -v end="<!-- $1:end -->" '
    $0 == end { inside = 0 }
    inside && /^```/ { fenced = !fenced; next }
    inside && fenced { print }
    $0 == begin { inside = 1 }
  ' README.md >"$shown"
  if ! diff -u "$compiled" "$shown"; then
    echo "README.md: the code between the $1 markers is not $2"
    status=1
  fi
}

cat examples/quickstart.cpp >"$compiled"
same_code quickstart examples/quickstart.cpp
# same_part MARKER FILE COLUMNS: of this one the README shows the marked part, which stands so many columns further in.
same_part() {
  awk -v columns="$3" '
    /^ *\/\/ readme:end$/ { inside = 0 }
    inside { print substr($0, columns + 1) }
    /^ *\/\/ readme:begin$/ { inside = 1 }
  ' "$2" >"$compiled"
  same_code "$1" "the part that $2 marks"
}
same_part device-graph examples/device_graph.cpp 2
same_part expand examples/chunked_prefill.cpp 0

# One link a line: "file line target".
links() {
  # File names in this tree have no spaces.
  # shellcheck disable=SC2046
  awk '
    FNR == 1 { fenced = 0 }
    /^[ \t]*```/ { fenced = !fenced; next }
    fenced { next }
    {
      text = $0
      gsub(/`[^`]*`/, "", text)
      while (match(text, /\]\([^)]*\)/)) {
        target = substr(text, RSTART + 2, RLENGTH - 3)
        text = substr(text, RSTART + RLENGTH)
        sub(/[ \t].*/, "", target)  # a title
        print FILENAME, FNR, target
      }
    }
  ' README.md $(for file in CONTRIBUTING.md CHANGELOG.md; do [ ! -f "$file" ] || echo "$file"; done) \
    $(find docs -name '*.md' 2>/dev/null | sort)
}

# Anchors are GitHub's: headings in lower case, without punctuation, spaces as dashes.
has_anchor() {
  sed -n 's/^##* *//p' "$1" | tr '[:upper:]' '[:lower:]' | sed 's/[^a-z0-9 _-]//g; s/ /-/g' | grep -qx -e "$2"
}

count=0
while read -r file line target; do
  [ -n "$file" ] || continue
  case $target in
    http://* | https://* | mailto:*) continue ;;
  esac
  count=$((count + 1))
  path=${target%%#*}
  case $path in
    '') path=$file ;;
    *) path=$(dirname "$file")/$path ;;
  esac
  if [ ! -e "$path" ]; then
    echo "$file:$line: $target does not exist"
    status=1
  elif [ "$target" != "${target#*#}" ] && ! has_anchor "$path" "${target#*#}"; then
    echo "$file:$line: $target has no such heading"
    status=1
  fi
done <<EOF
$(links)
EOF

[ "$status" -ne 0 ] || echo "the examples are the compiled ones, and $count links lead somewhere"
exit "$status"
