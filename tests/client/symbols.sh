#!/bin/sh
# The symbols libkvc exports are exactly the functions kvc.h declares: symbols.sh LIBRARY HEADER
set -eu
want=$(mktemp)
have=$(mktemp)
trap 'rm -f "$want" "$have"' EXIT
sed -n 's/^KVC_API .*[ *]\(kvc_[a-z_]*\)(.*/\1/p' "$2" | LC_ALL=C sort >"$want"
nm -D --defined-only "$1" | awk '$2 == "T" || $2 == "D" || $2 == "B" || $2 == "R" { sub(/@.*/, "", $3); print $3 }' | LC_ALL=C sort >"$have"
[ "$(wc -l <"$want")" -ge 40 ] || { echo "only $(wc -l <"$want") functions found in $2"; exit 1; }
if ! diff -u "$want" "$have"; then
	echo "the header (-) and the library (+) do not say the same"
	exit 1
fi
