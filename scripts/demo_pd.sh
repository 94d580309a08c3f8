#!/usr/bin/env bash
# make demo-pd: one engine computes prompts, another one generates the answers. The KV moves through kvd, and every token and log-probability is that of one engine.
#   scripts/demo_pd.sh [BUILD_DIR]      SEED=1 (of the prompts), REQUESTS=24, PATIENCE=60 (seconds that one engine waits for the other)
# Everything lives in a temporary directory and is gone afterwards. Exit 1: an answer differs from the run on one engine, or a check fails.
demo="demo-pd" # of the frame
requests=${REQUESTS:-24}
patience=${PATIENCE:-60}
nodes= # the daemons of the last phase
prefill=
decode=
processes() { echo "$prefill $decode $nodes"; }
# shellcheck source=scripts/demo-frame.sh
. "$(dirname "$0")/demo-frame.sh"

has_transfers() { ctl transfers --json | grep '"transfer"' >/dev/null; }
has_no_transfers() { ! has_transfers; }

# engine ROLE SEED [OPTION...]: a process with kve-pd.
engine() {
	local role=$1 of=$2
	shift 2
	exec "$build/bin/kve-pd" "$role" --socket "$socket" --requests "$requests" --seed "$of" "$@"
}

# ended PID WHAT: it has ended well.
ended() {
	local status=0
	wait "$1" || status=$?
	[ "$status" -eq 0 ] || fail "$2 ended with status $status"
}

# What moved: lines of kve-pd in the file, those of the run on one engine, and the pipe. Fails if an answer differs.
report() {
	awk -F '\t' -v requests="$requests" -v pipe="$3" '
		FILENAME == ARGV[1] { if ($1 != "#") one[$1] = $2; next }
		$1 == "#" { loaded = $3; next }
		{
			seen++
			equal += one[$1] == $2
			prompt += $3; received += $4; computed += $5
			if ($6 == "OK") { whole++ } else { why[$6]++; n++ }
			ms[seen] = $7
		}
		END {
			printf "%d requests, %d tokens in their prompts\n", seen, prompt
			printf "  received   %6d tokens, %.1f MiB loaded by its ranks from %s: %d prompts whole\n", received, loaded / 1048576, pipe, whole
			printf "  computed   %6d tokens by the decoding engine", computed
			for (cause in why) printf "; %d prompts: %s", why[cause], cause
			printf "\n  answers    %d of %d equal those of one engine, to the last bit of each log-probability\n", equal, requests
			exit !(seen == requests && equal == requests)
		}' "$1" "$2" || fail "an answer is missing or differs"
}

start_daemon() {
	start_kvd --keeper=off --limits.silence=10s --cpu.size=256MiB --cpu.slab_size=64MiB --nvme.path= --events.enabled=off --handover.max_bytes=128MiB --handover.ttl="${patience}s"
}

one_engine() {
	local of
	say "0. One engine computes prompts and answers, without kvd: $requests requests each with seeds $seed and $((seed + 1))."
	for of in "$seed" "$((seed + 1))"; do
		(engine alone "$of") >"$dir/one.$of" || fail "the engine without kvd failed"
	done
}

two_processes() {
	say "1. Two processes on one daemon: prefill on 4 tensor parallel ranks, decode on 2. Prompts are handed over chunk by chunk."
	(engine decode "$seed" --ranks 2 --wait-ms "${patience}000") >"$dir/decode.1" &
	decode=$!
	(engine prefill "$seed" --ranks 4 --wait-ms "${patience}000") >"$dir/prefill.1" &
	prefill=$!
	wait_for "$patience" "the first answers" lines_in "$dir/decode.1" $((requests / 3))
	printf 'kvctl transfers, in the middle:\n'
	ctl transfers
	ended "$prefill" "the prefilling engine"
	prefill=
	ended "$decode" "the decoding engine"
	decode=
	report "$dir/one.$seed" "$dir/decode.1" "the pool of this node"
	awk -F '\t' '$1 != "#" && $4 != $3 { bad = 1 } END { exit bad }' "$dir/decode.1" || fail "not every prompt was received whole"
}

is_half_way() { lines_in "$dir/decode.2" 1 && lines_in "$dir/prefill.2" $((requests / 2)); }

lost_producer() {
	say "2. Other prompts, from 2 ranks to 4; the prefilling engine is killed with kill -9 half way. The other one computes what it lacks."
	(engine decode "$((seed + 1))" --ranks 4 --wait-ms 8000) >"$dir/decode.2" &
	decode=$!
	(engine prefill "$((seed + 1))" --ranks 2 --stop-at $((requests / 2))) >"$dir/prefill.2" &
	prefill=$!
	wait_for "$patience" "the first answer, and half of the prompts" is_half_way
	kill -9 "$prefill"
	wait "$prefill" 2>/dev/null || true
	prefill=
	ended "$decode" "the decoding engine"
	decode=
	report "$dir/one.$((seed + 1))" "$dir/decode.2" "the pool of this node"
	awk -F '\t' '$1 != "#" { received += $4; computed += $5 } END { exit !(received && computed) }' "$dir/decode.2" ||
		fail "the producer was not lost half way"
}

# node NAME PORT PEER PORT: a daemon with one peer, on the loopback interface.
node() {
	exec "$build/bin/kvd" --run_dir="$dir/$1" --keeper=off --limits.silence=10s --cpu.size=256MiB --cpu.slab_size=64MiB --nvme.path= --http.listen=off --events.enabled=off \
		--handover.ttl=60s --peers.name="$1" --peers.listen="127.0.0.1:$2" --peers.addresses="$3=127.0.0.1:$4" --peers.keys="$3=$dir/key"
}

sees() { "$build/bin/kvctl" --socket "$dir/$1/default.sock" peers --json 2>/dev/null | grep "$2" >/dev/null; }

two_nodes() {
	local port=$((20000 + RANDOM % 10000))
	say "3. Two daemons, as on two nodes, on the loopback interface of this one; prefill on one rank at the first, decode at the second. Whole blocks come over TLS."
	"$build/bin/kvctl" peer-key "$dir/key" >/dev/null
	(node prefill "$port" decode $((port + 1))) >"$dir/kvd.prefill.log" 2>&1 &
	nodes=$!
	(node decode $((port + 1)) prefill "$port") >"$dir/kvd.decode.log" 2>&1 &
	nodes="$nodes $!"
	wait_for 20 "the other node" sees decode '"state":"up"'
	(socket=$dir/decode/default.sock engine decode "$seed" --peer prefill --wait-ms 60000) >"$dir/decode.3" &
	decode=$!
	(socket=$dir/prefill/default.sock engine prefill "$seed" --wait-ms 60000) >"$dir/prefill.3" &
	prefill=$!
	ended "$prefill" "the prefilling engine"
	prefill=
	ended "$decode" "the decoding engine"
	decode=
	report "$dir/one.$seed" "$dir/decode.3" "its own pool, where the other node's blocks are now"
	"$build/bin/kvctl" --socket "$dir/decode/default.sock" peers
	awk -F '\t' '$1 != "#" && $4 == 0 { bad = 1 } END { exit bad }' "$dir/decode.3" || fail "not every prompt came over"
}

check() {
	wait_for "$((2 * patience))" "the last hand-over to end" has_no_transfers # one that nobody takes ends at its time to live
	check_daemon "No hand-over is left. "
}

one_engine
start_daemon
two_processes
lost_producer
two_nodes
check
say "The demo took $SECONDS s."
