#!/usr/bin/env bash
# make demo: a small transformer that stops recomputing prompts it has seen; across turns, across a killed engine, across a killed daemon.
#   scripts/demo.sh [BUILD_DIR]      SEED=1 (of the chat and of the trace), TRACE=file (replay your own trace instead)
# Everything lives in a temporary directory and is gone afterwards. Exit 1: an answer differs from the run without any cache, or a check fails.
set -euo pipefail
cd "$(dirname "$0")/.."

build=$(cd "${1:-build/release}" && pwd)
seed=${SEED:-1}
dir=$(mktemp -d "${TMPDIR:-/tmp}/kvd-demo.XXXXXX")
socket=$dir/run/default.sock
keeper=
engine=

stop() {
	local pid
	for pid in $engine $keeper; do
		kill -TERM "$pid" 2>/dev/null || true
	done
	for pid in $engine $keeper; do
		wait "$pid" 2>/dev/null || true
	done
	rm -rf "$dir"
}
trap stop EXIT
trap 'exit 130' INT TERM

say() { printf '\n%s\n' "$*"; }

fail() {
	printf 'demo: %s\n' "$*" >&2
	if [ -s "$dir/kvd.log" ]; then
		printf 'demo: the last lines of the daemon'\''s log:\n' >&2
		tail -n 20 "$dir/kvd.log" >&2
	fi
	exit 1
}

# Wait until a command succeeds, as long as there is a keeper: wait_for SECONDS WHAT COMMAND...
wait_for() {
	local end=$((SECONDS + $1)) what=$2
	shift 2
	until "$@"; do
		kill -0 "$keeper" 2>/dev/null || fail "kvd has ended: waited for $what"
		[ "$SECONDS" -lt "$end" ] || fail "waited too long for $what"
		sleep 0.05
	done
}

answers() { "$build/bin/kvctl" status --socket "$socket" >/dev/null 2>&1; }

lines_in() { [ -f "$1" ] && [ "$(wc -l <"$1")" -ge "$2" ]; }

# The daemon is the keeper's child.
daemon_pid() {
	local status
	for status in /proc/[0-9]*/status; do
		if grep -qs "^PPid:[[:space:]]*$keeper\$" "$status"; then
			basename "$(dirname "$status")"
			return
		fi
	done
	fail "the keeper has no daemon"
}

# A run of the chat; what came of it is added to results.
chat() { "$build/bin/kve-chat" --seed "$seed" --json "$@" >>"$dir/results"; }

report() { awk "$@" -f scripts/demo-report.awk "$dir/results"; }

start_daemon() {
	"$build/bin/kvd" --run_dir="$dir/run" --cpu.size=96MiB --cpu.slab_size=16MiB --index.max_blocks=65536 \
		--nvme.path="$dir/disk" --nvme.size=384MiB --nvme.file_size=64MiB --http.listen=off --log.level=info \
		>"$dir/kvd.log" 2>&1 &
	keeper=$!
	wait_for 20 "the daemon to answer" answers
}

# An engine is killed -9 after a third of its requests; what it had stored stays.
killed_engine() {
	"$build/bin/kve-chat" --seed "$seed" --socket "$socket" --log "$dir/killed.log" --reference "$dir/reference" >/dev/null &
	engine=$!
	wait_for 60 "the engine's first answers" lines_in "$dir/killed.log" 14
	kill -9 "$engine"
	wait "$engine" 2>/dev/null || true
	engine=
}

# The daemon is killed -9 while an engine works; the engine goes on, and finds it again.
killed_daemon() {
	local status=0
	chat --socket "$socket" --phase "daemon killed meanwhile" --log "$dir/outage.log" --reference "$dir/reference" &
	engine=$!
	wait_for 60 "the engine's first answers" lines_in "$dir/outage.log" 6
	kill -9 "$(daemon_pid)"
	wait "$engine" || status=$?
	engine=
	[ "$status" -eq 0 ] || fail "the run over the daemon's death ended with status $status"
}

run_chat() {
	say "A small transformer on the CPU answers the 42 requests of a chat, seed $seed. Each phase is a new engine process, its own cache empty."
	say "0. Without kvd every prompt is computed."
	chat --no-cache --phase "without kvd" --write-reference "$dir/reference"
	report -v what=last
	say "1. With kvd, empty at first: later turns of a conversation load what earlier ones have stored."
	start_daemon
	chat --socket "$socket" --phase "first chat" --reference "$dir/reference"
	report -v what=last
	say "2. An engine is killed with kill -9 in the middle; a new one loads what is stored."
	killed_engine
	chat --socket "$socket" --phase "engine killed" --reference "$dir/reference"
	report -v what=last
	say "3. The daemon is killed with kill -9 while an engine works; the engine goes on and attaches again."
	killed_daemon
	report -v what=last
	say "4. The same chat once more."
	chat --socket "$socket" --phase "afterwards" --reference "$dir/reference"
	report -v what=last
}

chart() {
	local block='#'
	if [ -t 1 ] && [ "$(locale charmap 2>/dev/null)" = UTF-8 ]; then
		block='█'
	fi
	say "Time to the first token, median, of prompts that were mostly found:"
	report -v what=chart -v "block=$block"
	report -v what=verdict || fail "nothing was found, or an answer differs"
}

check() {
	"$build/bin/kvctl" check --socket "$socket" >"$dir/check" || {
		cat "$dir/check"
		fail "kvctl check found something"
	}
	say "kvctl check: $(tail -n 1 "$dir/check")"
}

replay() {
	local trace=${TRACE:-$dir/trace.jsonl} what="your trace ${TRACE:-}"
	if [ -z "${TRACE:-}" ]; then
		awk -v seed="$seed" -f scripts/demo-trace.awk >"$trace"
		what="a synthetic trace of conversations (TRACE=file make demo replays yours)"
	fi
	say "kvctl replay: the requests of $what"
	"$build/bin/kvctl" replay --live --socket "$socket" --trace "$trace" || fail "the replay found wrong bytes or did not end"
}

# Equal answers alone would also come from a cache that never gives anything.
served() {
	"$build/bin/kvctl" stats --socket "$socket" prefix_hit | awk '/_tokens_total/ {n += $2} END {exit !n}' ||
		fail "not one token came from kvd"
}

[ -z "${TRACE:-}" ] || [ -r "$TRACE" ] || fail "cannot read TRACE=$TRACE"
run_chat
served
check
chart
replay
say "The demo took $SECONDS s."
