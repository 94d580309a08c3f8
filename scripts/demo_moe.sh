#!/usr/bin/env bash
# make demo-moe: a small mixture of experts on several ranks: each has requests and a cache of its own, tokens travel to the experts and back, and the KV is in kvd. In fp32, then in BF16.
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

# bf16 RANKS PHASE OPTION...: the same model in BF16; a shorter chat, with results of its own
bf16() {
	"$build/bin/kve-chat" --seed "$seed" --json --model moe --bf16 "$device" --users 4 --branches 0 --turns 3 --data-parallel-size "$1" --enable-expert-parallel \
		--phase "$2" "${@:3}" >>"$dir/bf16"
	awk -v what=last -f scripts/demo-report.awk "$dir/bf16"
	awk -v what=ranks -f scripts/demo-report.awk "$dir/bf16"
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
device=cpu how="as GPUs compute it, here by the twins of their kernels"
if "$build/bin/kve" bench --device gpu --rounds 1 >"$dir/gpu" 2>&1; then
	device=gpu how="on a GPU"
fi
say "4. The same model in BF16, $how: one rank without kvd."
bf16 1 "BF16, without kvd" --no-cache --write-reference "$dir/reference-bf16"
say "   Two ranks with kvd, whose blocks in fp32 are another model's; then again, in two microbatches."
bf16 2 "BF16, two ranks" --socket "$socket" --reference "$dir/reference-bf16"
bf16 2 "BF16, again" --socket "$socket" --reference "$dir/reference-bf16" --enable-dbo --dbo-decode-token-threshold 2 --dbo-prefill-token-threshold 2
awk -v what=overlap -f scripts/demo-report.awk "$dir/bf16" || fail "no step in BF16 was made in two microbatches"
awk -v what=verdict -f scripts/demo-report.awk "$dir/bf16" || fail "nothing was found in BF16, or an answer differs"
check_daemon ""
say "Time to the first token, median, of prompts that were mostly found:"
report -v what=chart -v 'block=#'
report -v what=verdict || fail "nothing was found, or an answer differs"
say "A step of 8 layers by a virtual clock, streams as rows. As one batch, what travels is waited for:"
"$build/bin/kve" schedule --mode seq --layers 8 --attention 200 --dispatch 300 --experts 400 --combine 300
say "As two microbatches of half the tokens, it travels while the other one computes:"
"$build/bin/kve" schedule --mode dbo --layers 8 --attention 100 --dispatch 150 --experts 200 --combine 150
say "The demo took $SECONDS s."
