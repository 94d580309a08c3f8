#!/bin/sh
# What scripts/test.sh says of skipped tests: each reason, then ctest's summary as the last lines, and ctest's status.
# skips.sh SOURCES
set -eu
dir=$(mktemp -d "${TMPDIR:-/tmp}/kvd-skips.XXXXXX")
trap 'rm -rf "$dir"' EXIT
cat >"$dir/CTestTestfile.cmake" <<'END'
add_test(passes true)
add_test(part sh -c "echo '# SKIP: needs root'")
add_test(whole sh -c "echo seed; echo '# SKIP: there is no GPU'; exit 77")
add_test(mute sh -c "exit 77")
set_tests_properties(whole mute PROPERTIES SKIP_RETURN_CODE 77)
END
failed=0
says() { # LINE
	grep -q "^	$1$" "$dir/said" || { echo "not said: $1"; failed=1; }
}
"$1/scripts/test.sh" "$dir" >"$dir/said" || { echo "skipped tests fail"; failed=1; }
says "part, in part: needs root"
says "whole: there is no GPU"
says "mute: no reason given"
last=$(tail -n 1 "$dir/said")
[ "$last" = "	  4 - mute (Skipped)" ] || { echo "the last line is: $last"; failed=1; }
echo 'add_test(fails false)' >>"$dir/CTestTestfile.cmake"
if "$1/scripts/test.sh" "$dir" >"$dir/said"; then
	echo "a failed test is none"
	failed=1
fi
grep -q '^80% tests passed, 1 tests failed out of 5$' "$dir/said" || { echo "no summary of a failed run"; failed=1; }
[ "$failed" -eq 0 ] || cat "$dir/said"
exit "$failed"
