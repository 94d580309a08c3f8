#!/usr/bin/env bash
# Everything beyond `make test`: lint, a second compiler, short fuzzing, sanitizers. Ends with the seconds of each step and ctest's summary.
# FUZZ_SECONDS (default 12) is spent on each fuzzer. LINT_THIRD=0: clang-tidy on all files (scripts/lint.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/steps.sh
jobs=$(nproc) # twice as many tests: they wait more than they compute
seconds=${FUZZ_SECONDS:-12}

configure() {
	local log
	log=$(mktemp)
	if ! cmake --preset "$1" "${@:2}" >"$log" 2>&1; then
		cat "$log"
		exit 1
	fi
	rm -f "$log"
}

# A program of a Debian package, without the server that the package would start: package, path.
fetch_program() {
	mkdir -p build/tools
	(cd build/tools && apt-get download "$1" && dpkg-deb --fsys-tarfile "$1"_*.deb | tar -x --strip-components=3 ".$2")
	rm -f build/tools/"$1"_*.deb
}

# Tests and their programs, "e2e.adopt test_e2e_adopt"; the program of a script is the daemon.
list_programs() {
	ctest --test-dir build/release -N -V | awk '
		/^[0-9]+: Test command: / { program = $4; sub(".*/", "", program); program = $4 ~ /build\/release\/bin/ ? program : "kvd" }
		/^ *Test +#[0-9]+: / { print $NF, program }'
}

# Of those, the ones in which there is more than one thread: in the program, or in the daemon that it starts.
keep_threaded() {
	local name program
	while read -r name program; do
		if [[ $name =~ ^(e2e|engine|proxy[.]program|kernels[.](kill|gpu_load)) ]] || [[ $program != kvd && $(nm -D --undefined-only "build/release/bin/$program") == *pthread_create* ]]; then
			echo "$name $program"
		fi
	done
}

scripts/deps.sh build lint ci
export PATH=$PWD/build/tools:$PATH
command -v promtool >/dev/null || fetch_program prometheus /usr/bin/promtool
command -v nginx >/dev/null || fetch_program nginx /usr/sbin/nginx

step "lint"
configure release
cmake --build build/release -j "$jobs"
LINT_THIRD=${LINT_THIRD:-1} scripts/lint.sh

step "second compiler, with AddressSanitizer and UndefinedBehaviorSanitizer"
configure fuzz
cmake --build build/fuzz -j "$jobs"

step "fuzzing, $seconds s each"
scripts/fuzz.sh "$seconds"

step "tests with AddressSanitizer and UndefinedBehaviorSanitizer"
# intercept_tls_get_addr: the leak detector of clang 14 may crash on thread-local memory of libraries that were loaded later, as UCX's are.
ASAN_OPTIONS=detect_stack_use_after_return=1:intercept_tls_get_addr=0 UBSAN_OPTIONS=print_stacktrace=1 \
	scripts/test.sh build/fuzz -j $((2 * jobs)) -LE 'no-asan|structure' --timeout 300

step "ThreadSanitizer"
configure tsan
threaded=$(list_programs | keep_threaded)
mapfile -t programs < <(printf '%s\n' "$threaded" | sed 's/.* //' | sort -u)
ninja -C build/tsan {common,kernels,storage,daemon,client,connectors,proxy,engine}/all "${programs[@]}"
step "tests with ThreadSanitizer"
CHECK_TABLE=1 scripts/test.sh build/tsan --preset tsan -j $((2 * jobs)) -LE 'no-tsan|structure' --timeout 300 \
	-R "^($(printf '%s\n' "$threaded" | sed 's/ .*//; s/[.]/[.]/g' | paste -sd '|'))\$"
