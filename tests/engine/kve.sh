# shellcheck shell=sh
# For tests of kve's commands, sourced with its path as the first argument: $kve, a folder $dir that goes at the end, fail and bad.
set -eu
kve=$1
dir=$(mktemp -d /tmp/kvd-test-XXXXXX)
trap 'rm -rf "$dir"' EXIT

fail() {
	echo "$1"
	cat "$dir/out" "$dir/err"
	exit 1
}

# bad EXIT_CODE SENTENCE ARGUMENT...: it ends so, with one line that has the sentence.
bad() {
	code=0
	expected=$1 sentence=$2
	shift 2
	"$kve" "$@" >"$dir/out" 2>"$dir/err" || code=$?
	[ "$code" -eq "$expected" ] || fail "exit code $code of: $*"
	[ "$(wc -l <"$dir/err")" -eq 1 ] || fail "not one line for: $*"
	grep -qF -e "$sentence" "$dir/err" || fail "another sentence for: $*"
}
