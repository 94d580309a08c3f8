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

chat() { "$build/bin/kve-chat" --seed "$seed" "$@"; }

start_daemon() {
	"$build/bin/kvd" --run_dir="$dir/run" --cpu.size=96MiB --cpu.slab_size=16MiB --index.max_blocks=65536 \
		--nvme.path="$dir/disk" --nvme.size=384MiB --nvme.file_size=64MiB --http.listen=off --log.level=info \
		>"$dir/kvd.log" 2>&1 &
	keeper=$!
	wait_for 20 "the daemon to answer" answers
}

# An engine is killed -9 after a third of its requests; what it had stored stays.
killed_engine() {
	chat --socket "$socket" --phase "engine, killed" --log "$dir/killed.log" --reference "$dir/reference" >/dev/null &
	engine=$!
	wait_for 60 "the engine's first answers" lines_in "$dir/killed.log" 14
	kill -9 "$engine"
	wait "$engine" 2>/dev/null || true
	engine=
}

# The daemon is killed -9 while an engine works; the engine goes on, and finds it again.
killed_daemon() {
	local status=0
	chat --socket "$socket" --phase "3 daemon killed meanwhile" --log "$dir/outage.log" --reference "$dir/reference" &
	engine=$!
	wait_for 60 "the engine's first answers" lines_in "$dir/outage.log" 6
	kill -9 "$(daemon_pid)"
	wait "$engine" || status=$?
	engine=
	[ "$status" -eq 0 ] || fail "the run over the daemon's death ended with status $status"
}

run_chat() {
	say "A chat of several users on a small transformer, seed $seed. Each phase is a new engine process with an empty cache of its own."
	chat --no-cache --header --phase "0 no cache" --write-reference "$dir/reference"
	start_daemon
	chat --socket "$socket" --phase "1 cold" --reference "$dir/reference"
	killed_engine
	chat --socket "$socket" --phase "2 engine killed, restarted" --reference "$dir/reference"
	killed_daemon
	chat --socket "$socket" --phase "4 after it" --reference "$dir/reference"
}

check() {
	say "kvctl check"
	"$build/bin/kvctl" check --socket "$socket" || fail "kvctl check found something"
}

replay() {
	local trace=${TRACE:-$dir/trace.jsonl}
	if [ -z "${TRACE:-}" ]; then
		awk -v seed="$seed" -f scripts/demo-trace.awk >"$trace"
	fi
	say "kvctl replay --trace $trace ($(wc -l <"$trace") requests)"
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
replay
say "The demo took $SECONDS s. Every answer was the one of the run without any cache."
