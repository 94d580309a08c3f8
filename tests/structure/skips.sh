#!/bin/sh
# What scripts/test.sh says of skipped tests: each reason, then ctest's summary as the last lines, and ctest's status; which failed tests it runs again.
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
sources=$1
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
again() { # COMMAND EXPECTED WHAT: a test that does this is run once more, and this is the status
	rm -f "$dir/once"
	printf 'add_test(passes true)\nadd_test(doubtful sh -c "%s")\nset_tests_properties(doubtful PROPERTIES TIMEOUT 2)\n' "$1" >"$dir/CTestTestfile.cmake"
	status=0
	TEST_AGAIN=1 "$sources/scripts/test.sh" "$dir" >"$dir/said" || status=1
	[ "$status" -eq "$2" ] || { echo "a test that $3: status $status"; failed=1; }
}
first="test -e '$dir/once' || { touch '$dir/once';"
again "$first exit 1; }" 0 "fails once"
again "exit 1" 1 "fails twice"
again "$first echo 'WARNING: ThreadSanitizer: data race'; exit 1; }" 1 "fails once by a sanitizer"
again "$first kill -SEGV \$\$; }" 1 "crashes once"
again "$first sleep 9; }" 1 "hangs once"
[ "$failed" -eq 0 ] || cat "$dir/said"
exit "$failed"
