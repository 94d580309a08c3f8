#!/usr/bin/env bash
# make mutants: each line of tests/mutants/*.tsv breaks one rule of a folder, and some test of that folder must fail for it. engine-overlap.tsv is of tests/engine/overlap.
# usage: scripts/mutants.sh [--check] [EXPRESSION]     --check: only that each line still names one place; EXPRESSION: the mutants so named
# Works on a copy of the tracked files in build/mutants. Exit 1: a mutant lives, does not compile, or names no place.
set -euo pipefail
cd "$(dirname "$0")/.."
copy=build/mutants
check=0
[ "${1:-}" != --check ] || { check=1; shift; }
wanted=${1:-.}

# FILE OLD NEW: the file with its only OLD replaced, on standard output.
mutate() {
	OLD=$2 NEW=$3 awk '
		{ text = text $0 "\n" }
		END {
			at = index(text, ENVIRON["OLD"])
			rest = substr(text, at + length(ENVIRON["OLD"]))
			if (!at || index(rest, ENVIRON["OLD"])) exit 1
			printf "%s%s%s", substr(text, 1, at - 1), ENVIRON["NEW"], rest
		}' "$1"
}

if [ $check -eq 0 ]; then
	mkdir -p $copy
	# What an aborted run has left is put right with the time of today, so that its object is built again; what was deleted goes.
	(cd $copy && find . -path ./build -prune -o -type f -printf '%P\n') | sort | comm -23 - <(git ls-files | sort) | (cd $copy && xargs -r rm -f)
	git ls-files | while IFS= read -r file; do
		cmp -s "$file" "$copy/$file" || install -D "$file" "$copy/$file"
	done
	(cd $copy && cmake --preset release -DKVD_WERROR=OFF) >$copy.log 2>&1 || { tail $copy.log; exit 1; }
fi
declare -A built
lives=0
total=0
while IFS=$'\t' read -r list name file old new; do
	case $name in '' | \#*) continue ;; esac
	[[ $name =~ $wanted ]] || continue
	total=$((total + 1))
	folder=$(basename "$list" .tsv)
	folder=tests/${folder//-//}
	if [ $check -eq 0 ] && [ -z "${built[$folder]:-}" ]; then
		cmake --build $copy/build/release --target "$folder/all" >$copy.log 2>&1 || { tail $copy.log; exit 1; }
		built[$folder]=1
	fi
	if ! mutate "$file" "$old" "$new" >"${TMPDIR:-/tmp}/mutant.$$"; then
		echo "$name: $file does not have its text exactly once"
		lives=$((lives + 1))
	elif [ $check -eq 0 ]; then
		cp "${TMPDIR:-/tmp}/mutant.$$" "$copy/$file"
		if ! cmake --build $copy/build/release --target "$folder/all" >$copy.log 2>&1; then
			echo "$name: does not compile"
			lives=$((lives + 1))
		elif ctest --test-dir "$copy/build/release/$folder" -j "$(nproc)" --timeout 120 --stop-on-failure >$copy.log 2>&1; then
			echo "$name: LIVES"
			lives=$((lives + 1))
		else
			echo "$name: dies of $(awk '/\*\*\*/ {print $4; exit}' $copy.log)"
		fi
		cp "$file" "$copy/$file"
	fi
done < <(awk '{print FILENAME "\t" $0}' tests/mutants/*.tsv)
rm -f "${TMPDIR:-/tmp}/mutant.$$"
echo "mutants: $total, $lives not killed"
[ $lives -eq 0 ]
