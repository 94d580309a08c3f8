# The frame of the demos, to be sourced: a build, a temporary directory, and the processes in it. The demo sets `demo`, its name, and defines processes(), which
# prints what it has started. $kvd is the daemon that it waits with; empty: none yet.
# shellcheck shell=bash disable=SC2034,SC2154
set -euo pipefail
cd "$(dirname "$0")/.."

build=$(cd "${1:-build/release}" && pwd)
seed=${SEED:-1}
dir=$(mktemp -d "${TMPDIR:-/tmp}/kvd-$demo.XXXXXX")
socket=$dir/run/default.sock
kvd=

stop() {
	local pid
	for pid in $(processes) $kvd; do
		kill -TERM "$pid" 2>/dev/null || true
	done
	for pid in $(processes) $kvd; do
		wait "$pid" 2>/dev/null || true
	done
	rm -rf "$dir"
}
trap stop EXIT
trap 'exit 130' INT TERM

say() { printf '\n%s\n' "$*"; }

fail() {
	printf '%s: %s\n' "$demo" "$*" >&2
	if [ -s "$dir/kvd.log" ]; then
		printf '%s: the last lines of the daemon'\''s log:\n' "$demo" >&2
		tail -n 20 "$dir/kvd.log" >&2
	fi
	exit 1
}

# Wait until a command succeeds, as long as there is a daemon: wait_for SECONDS WHAT COMMAND...
wait_for() {
	local end=$((SECONDS + $1)) what=$2
	shift 2
	until "$@"; do
		kill -0 "$kvd" 2>/dev/null || fail "kvd has ended: waited for $what"
		[ "$SECONDS" -lt "$end" ] || fail "waited too long for $what"
		sleep 0.02
	done
}

ctl() { "$build/bin/kvctl" --socket "$socket" "$@"; }
answers() { ctl status >/dev/null 2>&1; }
lines_in() { [ -f "$1" ] && [ "$(wc -l <"$1")" -ge "$2" ]; }

# start_kvd OPTION...: $kvd, which answers.
start_kvd() {
	"$build/bin/kvd" --run_dir="$dir/run" --http.listen=off "$@" >"$dir/kvd.log" 2>&1 &
	kvd=$!
	wait_for 20 "the daemon to answer" answers
}

# kvctl check, with a sentence before what it says.
check_daemon() {
	ctl check >"$dir/check" || {
		cat "$dir/check"
		fail "kvctl check found something"
	}
	say "$1kvctl check: $(tail -n 1 "$dir/check")"
}

# ---- of the demos of the chat ----

# The daemon is the child of the keeper, which is $kvd.
daemon_pid() {
	local status
	for status in /proc/[0-9]*/status; do
		if grep -qs "^PPid:[[:space:]]*$kvd\$" "$status"; then
			basename "$(dirname "$status")"
			return
		fi
	done
	fail "the keeper has no daemon"
}

# A run of the chat; what came of it is added to results.
chat() { "$build/bin/kve-chat" --seed "$seed" --json "$@" >>"$dir/results"; }

report() { awk "$@" -f scripts/demo-report.awk "$dir/results"; }

# Equal answers alone would also come from a cache that never gives anything.
served() {
	ctl stats prefix_hit | awk '/_tokens_total/ {n += $2} END {exit !n}' ||
		fail "not one token came from kvd"
}
