#!/usr/bin/env bash
# p1_a_replay_counts_like_exact_lru_and_checks_every_byte: kvctl replay on traces small enough to be worked out by hand, and on broken ones.
# usage: replay.sh KVCTL
set -euo pipefail
kvctl=$1
dir=$(mktemp -d /tmp/kvd-test-replay.XXXXXX)
daemon=
replay=
trap 'kill -9 $daemon $replay 2>/dev/null || true; rm -rf "$dir"' EXIT
bad=0

field() { sed -n "s/.*\"$1\":\([0-9.]*\).*/\1/p" <<<"$2"; }
expect() {
	if [ "$2" != "$3" ]; then
		echo "$1: got $2, expected $3"
		bad=1
	fi
}

# Four blocks of room. After the second request 3 is the oldest leaf, so the third request costs it, and the fourth hits 1 and 2: 4 of 10 blocks.
cat >"$dir/trace" <<'TRACE'
{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
{"timestamp": 1, "input_length": 1536, "output_length": 1, "hash_ids": [1, 2, 3]}

{"timestamp": 2, "input_length": 1024, "output_length": 1, "hash_ids": [4, 5]}
{"timestamp": 3, "input_length": 1536, "output_length": 1, "hash_ids": [1, 2, 3]}
TRACE
out=$("$kvctl" replay --trace "$dir/trace" --policy lru --blocks 4 --json | tail -n 1)
expect "requests" "$(field requests "$out")" 4
expect "hit percent" "$(field token_hit_percent "$out" | cut -c1-4)" 40.0
expect "wrong bytes" "$(field wrong_bytes "$out")" 0
expect "failures" "$(field failures "$out")" 0

# A request of more blocks than there is room for offers its first two only; its partly filled last block counts its true remainder.
cat >"$dir/long" <<'TRACE'
{"timestamp": 0, "input_length": 1100, "output_length": 1, "hash_ids": [1, 2, 3]}
{"timestamp": 1, "input_length": 1100, "output_length": 1, "hash_ids": [1, 2, 3]}
TRACE
out=$("$kvctl" replay --trace "$dir/long" --blocks 2 --json | tail -n 1)
expect "hit tokens of a long request" "$(field hit_tokens "$out")" 1024
out=$("$kvctl" replay --trace "$dir/long" --blocks 3 --json | tail -n 1)
expect "hit tokens of a partly filled block" "$(field hit_tokens "$out")" 1100

# Several processes at once.
for i in $(seq 200); do
	echo "{\"timestamp\": $i, \"input_length\": 2560, \"output_length\": 1, \"hash_ids\": [1, 2, $((i % 7 + 10)), $((i % 21 + 100)), $((i + 1000))]}"
done >"$dir/many"
out=$("$kvctl" replay --trace "$dir/many" --blocks 40 --clients 3 --block-bytes 20000 --json | tail -n 1)
expect "requests of three clients" "$(field requests "$out")" 200
expect "wrong bytes of three clients" "$(field wrong_bytes "$out")" 0

# Broken input: a sentence with the line, and the exit code of the status.
refuse() {
	local code=0
	text=$("$kvctl" replay --trace "$dir/broken" --blocks 4 2>&1) || code=$?
	expect "exit code of $1" "$code" 65
	if [[ $text != *"broken:2"* ]]; then
		echo "$1: the message does not name the line: $text"
		bad=1
	fi
}
{ head -n 1 "$dir/trace"; echo '{"timestamp": 1, "input_length": -5, "output_length": 1, "hash_ids": []}'; } >"$dir/broken"
refuse "a negative length"
{ head -n 1 "$dir/trace"; echo '{"timestamp": 1, '; } >"$dir/broken"
refuse "a cut-off line"
{ head -n 1 "$dir/trace"; echo '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": ["x"]}'; } >"$dir/broken"
refuse "an id that is no number"

# A daemon that dies midway: the exit code says so, and what it had evicted before cannot be taken off a count that is gone.
awk 'BEGIN { for (i = 1; i <= 40000; i++) printf "{\"timestamp\": %d, \"input_length\": 1024, \"output_length\": 1, \"hash_ids\": [%d, %d]}\n", i, 2 * i, 2 * i + 1 }' >"$dir/endless"
"$(dirname "$kvctl")/kvd" --run_dir="$dir/run" --cpu.size=4MiB --http.listen=off --events.enabled=off --keeper=off 2>"$dir/log" &
daemon=$!
evicted() { field "kvd_evicted_total{tier=cpu}" "$("$kvctl" --socket "$dir/run/default.sock" --timeout 60s stats "kvd_evicted_total{tier=cpu}" --json 2>/dev/null)"; }
until [ "$(evicted)" ]; do
	kill -0 $daemon || { cat "$dir/log"; exit 1; }
	sleep 0.01
done
"$kvctl" --socket "$dir/run/default.sock" replay --live --trace "$dir/endless" --limit 800 >/dev/null
before=$(evicted)
setsid "$kvctl" --socket "$dir/run/default.sock" replay --live --trace "$dir/endless" --json >"$dir/out" 2>"$dir/said" &
replay=$!
# It and its client process are stopped for each look, so that they cannot end before the daemon does, however slow the machine.
until kill -STOP -- -$replay 2>/dev/null; do sleep 0.01; done
mkfifo "$dir/nothing"
exec 9<>"$dir/nothing"
until [ "$(evicted)" -gt "$before" ]; do
	kill -CONT -- -$replay
	read -r -t 0.01 -u 9 || true # a sleep that starts no process
	kill -STOP -- -$replay
done
kill -9 $daemon
kill -CONT -- -$replay
code=0
wait $replay || code=$?
wait $daemon || true
daemon=
replay=
expect "exit code when the daemon has gone" "$code" 69
expect "what is said when the daemon has gone" "$(grep -c 'client 0 gave up after [0-9]* requests' "$dir/said")" 1
expect "evictions of a daemon that has gone" "$(field evictions "$(cat "$dir/out")")" 0
[ $bad -eq 0 ] || cat "$dir/out" "$dir/said"
exit $bad
