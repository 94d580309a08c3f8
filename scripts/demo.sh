#!/usr/bin/env bash
# make demo: a small transformer that stops recomputing prompts it has seen; across turns, across a killed engine, across a killed daemon.
#   scripts/demo.sh [BUILD_DIR]      SEED=1 (of the chat and of the trace), TRACE=file (replay your own trace instead)
# Everything lives in a temporary directory and is gone afterwards. Exit 1: an answer differs from the run without any cache, or a check fails.
demo=demo # of the frame
engine=
processes() { echo "$engine"; }
# shellcheck source=scripts/demo-frame.sh
. "$(dirname "$0")/demo-frame.sh"

start_daemon() {
	start_kvd --cpu.size=96MiB --cpu.slab_size=16MiB --index.max_blocks=65536 --nvme.path="$dir/disk" --nvme.size=384MiB --nvme.file_size=64MiB --log.level=info
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

replay() {
	local trace=${TRACE:-$dir/trace.jsonl} what="your trace ${TRACE:-}"
	if [ -z "${TRACE:-}" ]; then
		awk -v seed="$seed" -f scripts/demo-trace.awk >"$trace"
		what="a synthetic trace of conversations (TRACE=file make demo replays yours)"
	fi
	say "kvctl replay: the requests of $what"
	ctl replay --live --trace "$trace" || fail "the replay found wrong bytes or did not end"
}

[ -z "${TRACE:-}" ] || [ -r "$TRACE" ] || fail "cannot read TRACE=$TRACE"
run_chat
served
check_daemon ""
chart
replay
say "The demo took $SECONDS s."
