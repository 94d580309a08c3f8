#!/usr/bin/env bash
# Runs ctest and lists, before its summary, what was skipped and why, and with CHECK_TABLE=1 the seconds of a check's steps (steps.sh). The status is
# ctest's. test.sh BUILD [ctest's arguments]
set -o pipefail
build=$1
ulimit -Sn 1024 # what a login has; a test that needs more raises it, as the daemon does

# The reasons in ctest's log, of the tests that the summary (standard input) calls skipped and of those that skipped a part.
list_skipped() {
	awk '
		NR == FNR { whole[$3] = $NF == "(Skipped)"; next }
		/^[0-9]+\/[0-9]+ Test: / { name = substr($0, index($0, ": ") + 2); next }
		/^Command: / { next }
		match($0, /SKIP: |skipped: /) && !seen[name, $0]++ {
			print "\t" name (whole[name] ? ": " : ", in part: ") substr($0, RSTART + RLENGTH)
			explained[name] = 1
		}
		END {
			for (name in whole) {
				if (whole[name] && !explained[name]) {
					print "\t" name ": no reason given"
				}
			}
		}' - "$build/Testing/Temporary/LastTest.log"
}

ctest --test-dir "$build" --output-on-failure "${@:2}" 2>&1 | {
	summary=
	while IFS= read -r line; do
		if [[ -n $summary || $line =~ ^[0-9]+%\ tests\ passed ]]; then
			summary+=$line$'\n'
		else
			printf '%s\n' "$line"
		fi
	done
	if [ -n "${CHECK_TABLE:-}" ]; then
		. "${BASH_SOURCE%/*}/steps.sh"
		printf 'Seconds:\n%s\n\n' "$(steps_table)"
	fi
	if [ -n "$summary" ]; then
		skipped=$(printf %s "$summary" | list_skipped)
		printf '%s%s' "${skipped:+Skipped, and why:$'\n'$skipped$'\n\n'}" "$summary"
	fi
}
