#!/usr/bin/env bash
# Runs ctest and lists, before its summary, what was skipped and why, and with CHECK_TABLE=1 the seconds of a check's steps (steps.sh). The status is
# ctest's. With TEST_AGAIN=1 at most two tests that failed beside others run once more, alone, and what they do then counts (decision 098).
# test.sh BUILD [ctest's arguments]
set -o pipefail
build=$1
summary_of_run=$(mktemp)
trap 'rm -f "$summary_of_run"' EXIT
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

# Runs ctest with the arguments, and keeps its summary.
run_ctest() {
	ctest --test-dir "$build" --output-on-failure "$@" 2>&1 | {
		summary=
		while IFS= read -r line; do
			if [[ -n $summary || $line =~ ^[0-9]+%\ tests\ passed ]]; then
				summary+=$line$'\n'
			else
				printf '%s\n' "$line"
			fi
		done
		printf %s "$summary" >"$summary_of_run"
		if [ -n "${CHECK_TABLE:-}" ]; then
			. "${BASH_SOURCE%/*}/steps.sh"
			printf 'Seconds:\n%s\n\n' "$(steps_table)"
		fi
		if [ -n "$summary" ]; then
			skipped=$(printf %s "$summary" | list_skipped)
			printf '%s%s' "${skipped:+Skipped, and why:$'\n'$skipped$'\n\n'}" "$summary"
		fi
	}
}

# The tests that failed, if an assertion may have failed by chance: no crash, no time limit, no report of a sanitizer, and no more than two.
list_doubtful() {
	! grep -Eq 'ERROR: [A-Za-z]+Sanitizer|WARNING: ThreadSanitizer|: runtime error: ' "$build/Testing/Temporary/LastTest.log" &&
		awk '
			/FAILED:$/ { failed = 1; next }
			failed && $2 == "-" { n++; other += $NF != "(Failed)"; names = names (n > 1 ? "|" : "") $3 }
			END { if (n > 0 && n <= 2 && !other) { gsub(/[.]/, "[.]", names); print names } else exit 1 }' "$summary_of_run"
}

run_ctest "${@:2}"
status=$?
if [ "$status" -ne 0 ] && [ -n "${TEST_AGAIN:-}" ] && doubtful=$(list_doubtful); then
	printf '\nFailed beside other tests, and run once more alone: %s\n' "${doubtful//'[.]'/.}"
	run_ctest -R "^($doubtful)\$"
	status=$?
fi
exit "$status"
