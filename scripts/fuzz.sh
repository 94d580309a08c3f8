#!/usr/bin/env bash
# Build the fuzzers and run each for some seconds on its corpus; a finding is kept in build/fuzz/findings and fails the run.
# usage: scripts/fuzz.sh [seconds] [fuzzer ...]
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-20}
shift || true

[ -e build/fuzz/build.ninja ] || cmake --preset fuzz >/dev/null
mapfile -t known < <(sed -n 's/^[[:space:]]*kvd_fuzzer(NAME \([a-z_]*\).*/\1/p' tests/fuzz/CMakeLists.txt)
[ $# -gt 0 ] || set -- "${known[@]}"
cmake --build build/fuzz --target "${@/#/fuzz_}"

findings=build/fuzz/findings
mkdir -p "$findings"
run() {
	local corpus=tests/fuzz/corpus/$1 work=build/fuzz/corpus/$1 log=build/fuzz/$1.log
	mkdir -p "$work"
	[ -d "$corpus" ] || mkdir -p "$corpus"
	if ! ASAN_OPTIONS=allocator_may_return_null=1 "build/fuzz/bin/fuzz_$1" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
		-artifact_prefix="$findings/$1-" "$work" "$corpus" >"$log" 2>&1; then
		tail -n 40 "$log"
		echo "fuzz: $1 has a finding; it is in $findings"
		return 1
	fi
	printf 'fuzz: %-12s %s\n' "$1" "$(grep -Eo 'Done [0-9]+ runs in [0-9]+' "$log" | tail -n 1)"
}
export -f run
export seconds findings
printf '%s\n' "$@" | xargs -P "$(nproc)" -I{} bash -c 'run "$1"' _ {}
