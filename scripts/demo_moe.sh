#!/usr/bin/env bash
# make demo-moe: a small mixture of experts on several ranks: each has requests and a cache of its own, tokens travel to the experts and back, and the KV is in kvd.
#   scripts/demo_moe.sh [BUILD_DIR]      SEED=1 (of the chat)
# Everything lives in a temporary directory and is gone afterwards. Exit 1: an answer differs from the run on one rank without any cache, or a check fails.
demo="demo-moe" # of the frame
processes() { :; }
# shellcheck source=scripts/demo-frame.sh
. "$(dirname "$0")/demo-frame.sh"

# moe RANKS PHASE OPTION...: a new engine process
moe() {
	chat --model moe --data-parallel-size "$1" --enable-expert-parallel --phase "$2" "${@:3}"
	report -v what=last
	report -v what=ranks
}

say "A mixture of 32 experts, 4 a token, on the CPU answers the 42 requests of a chat, seed $seed. Each phase is a new engine process."
say "0. One rank has all requests and all experts; without kvd every prompt is computed."
moe 1 "one rank, without kvd" --no-cache --write-reference "$dir/reference"
say "1. Two ranks have the conversations in turn, a cache of their own each, and 16 experts; with kvd, empty at first."
start_kvd --cpu.size=96MiB --cpu.slab_size=16MiB --index.max_blocks=65536 --nvme.path="$dir/disk" --nvme.size=384MiB --nvme.file_size=64MiB --log.level=info
moe 2 "two ranks, first chat" --socket "$socket" --reference "$dir/reference"
say "2. The same chat again: each rank loads what either has saved."
moe 2 "two ranks, again" --socket "$socket" --reference "$dir/reference"
say "3. The daemon is killed with kill -9. Four ranks, steps in two microbatches (dual batch overlap)."
kill -9 "$(daemon_pid)"
moe 4 "four ranks, DBO" --socket "$socket" --reference "$dir/reference" --enable-dbo --dbo-decode-token-threshold 2 --dbo-prefill-token-threshold 2
report -v what=overlap || fail "no step was made in two microbatches"
served
check_daemon ""
say "Time to the first token, median, of prompts that were mostly found:"
report -v what=chart -v 'block=#'
report -v what=verdict || fail "nothing was found, or an answer differs"
say "A step of 8 layers by a virtual clock, streams as rows. As one batch, what travels is waited for:"
"$build/bin/kve" schedule --mode seq --layers 8 --attention 200 --dispatch 300 --experts 400 --combine 300
say "As two microbatches of half the tokens, it travels while the other one computes:"
"$build/bin/kve" schedule --mode dbo --layers 8 --attention 100 --dispatch 150 --experts 200 --combine 150
say "The demo took $SECONDS s."
