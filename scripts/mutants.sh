#!/usr/bin/env bash
# make mutants: each line of tests/mutants/*.tsv breaks one rule of a folder, and some test of that folder must fail for it. engine-overlap.tsv is of tests/engine/overlap.
# usage: scripts/mutants.sh [--check | --keep] [EXPRESSION]     EXPRESSION: only the mutants so named
#   --check: only that each line still names one place     --keep: write down which test each dies of (tests/mutants/killers): it is built and run first
# Works on a copy of the tracked files in build/mutants. Exit 1: a mutant lives, does not compile, or names no place.
set -euo pipefail
cd "$(dirname "$0")/.."
copy=build/mutants
killers=tests/mutants/killers
mutant=${TMPDIR:-/tmp}/mutant.$$
mode=run
case ${1:-} in --check | --keep) mode=${1#--} && shift ;; esac
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

build() {
	cmake --build $copy/build/release --target "$1" >$copy.log 2>&1
}

# FOLDER TESTS: `killer` is the first of these tests that fails, or that runs after ten minutes; empty if none does.
run_tests() {
	killer=
	timeout -k 5 600 ctest --test-dir "$copy/build/release/$1" -R "$2" -j "$(nproc)" --stop-on-failure >$copy.log 2>&1 ||
		killer=$(awk '/\*\*\*/ && !/Skipped/ {failed = failed ? failed : $4} /^ *Start/ {last = $NF} END {print failed ? failed : last}' $copy.log)
}

# NAME FOLDER: the test that it died of before, then all of the folder. 1: it does not compile.
kill_mutant() {
	local test=${killer_of[$1]:-} target
	target=test_${test//./_}
	killer=
	if [ -n "$test" ] && build "$target"; then
		run_tests "$2" "^${test//./[.]}\$"
	fi
	if [ -z "$killer" ]; then
		build "$2/all" || return 1
		run_tests "$2" .
	fi
}

keep_killers() {
	for name in "${!killer_of[@]}"; do
		printf '%s\t%s\n' "$name" "${killer_of[$name]}"
	done | LC_ALL=C sort >$killers
}

declare -A built killer_of
while IFS=$'\t' read -r name test; do
	killer_of[$name]=$test
done < <(cat $killers 2>/dev/null)
if [ $mode != check ]; then
	mkdir -p $copy
	# What an aborted run has left is put right with the time of today, so that its object is built again; what was deleted goes.
	(cd $copy && find . -path ./build -prune -o -type f -printf '%P\n') | sort | comm -23 - <(git ls-files | sort) | (cd $copy && xargs -r rm -f)
	git ls-files | while IFS= read -r file; do
		cmp -s "$file" "$copy/$file" || install -D "$file" "$copy/$file"
	done
	(cd $copy && cmake --preset release -DKVD_WERROR=OFF) >$copy.log 2>&1 || { tail $copy.log; exit 1; }
fi
[ $mode != keep ] || trap keep_killers EXIT
lives=0
total=0
while IFS=$'\t' read -r list name file old new; do
	case $name in '' | \#*) continue ;; esac
	[[ $name =~ $wanted ]] || continue
	total=$((total + 1))
	folder=$(basename "$list" .tsv)
	folder=tests/${folder//-//}
	if [ $mode != check ] && [ -z "${built[$folder]:-}" ]; then
		build "$folder/all" || { tail $copy.log; exit 1; }
		built[$folder]=1
	fi
	if ! mutate "$file" "$old" "$new" >"$mutant"; then
		echo "$name: $file does not have its text exactly once"
		lives=$((lives + 1))
	elif [ $mode != check ]; then
		cp "$mutant" "$copy/$file"
		if ! kill_mutant "$name" "$folder"; then
			echo "$name: does not compile"
			lives=$((lives + 1))
		elif [ -z "$killer" ]; then
			echo "$name: LIVES"
			lives=$((lives + 1))
		else
			echo "$name: dies of $killer"
			killer_of[$name]=$killer
		fi
		cp "$file" "$copy/$file"
	fi
done < <(awk '{print FILENAME "\t" $0}' tests/mutants/*.tsv)
rm -f "$mutant"
echo "mutants: $total, $lives not killed"
[ $lives -eq 0 ]
