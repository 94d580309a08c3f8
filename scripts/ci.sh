#!/usr/bin/env bash
# Everything beyond `make test`: lint, the second compiler, short fuzzing, sanitizers. Ends with ctest's summary.
# FUZZ_SECONDS (default 12) is spent on each fuzzer.
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=$(nproc)
seconds=${FUZZ_SECONDS:-12}

step() { printf '\n== %s (%s s)\n' "$1" "$SECONDS"; }

configure() {
	local log
	log=$(mktemp)
	if ! cmake --preset "$1" "${@:2}" >"$log" 2>&1; then
		cat "$log"
		exit 1
	fi
	rm -f "$log"
}

# promtool without the server that Debian's package would start.
fetch_promtool() {
	mkdir -p build/tools
	(cd build/tools && apt-get download prometheus && dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x --strip-components=3 ./usr/bin/promtool)
	rm -f build/tools/prometheus_*.deb
}

scripts/deps.sh build lint ci
export PATH=$PWD/build/tools:$PATH
command -v promtool >/dev/null || fetch_promtool

step "lint"
configure release
cmake --build build/release -j "$jobs"
scripts/lint.sh

step "second compiler: clang"
configure clang -DBUILD_TESTING=OFF
cmake --build build/clang -j "$jobs"

step "fuzzing, $seconds s each"
configure fuzz -DBUILD_TESTING=ON
scripts/fuzz.sh "$seconds"

step "ThreadSanitizer"
configure tsan
cmake --build build/tsan -j "$jobs"
scripts/test.sh build/tsan --preset tsan -j "$jobs" -LE 'no-tsan|structure' --timeout 300

step "AddressSanitizer and UndefinedBehaviorSanitizer"
configure asan
cmake --build build/asan -j "$jobs"
# use_sigaltstack: gcc's runtime reports its own alternate stack now and then when a thread ends.
ASAN_OPTIONS=detect_stack_use_after_return=1:use_sigaltstack=0 UBSAN_OPTIONS=print_stacktrace=1 \
	scripts/test.sh build/asan -j "$jobs" -LE 'no-asan|structure' --timeout 300
