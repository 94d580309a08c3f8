#!/usr/bin/env bash
# kve-chat calls answers different when one is, or when one is missing; what it could not write is an error; its JSON is JSON: chat.sh KVE_CHAT
set -eu
chat="$1 --no-cache --users 2 --branches 1 --turns 2 --systems 1 --system-tokens 64 --message-tokens 16 --new-tokens 4"
dir=$(mktemp -d /tmp/kvd-test-XXXXXX)
trap 'rm -rf "$dir"' EXIT

# says EXIT_CODE WORD: the run against the reference.
says() {
	code=0
	$chat --reference "$dir/ref" >"$dir/out" || code=$?
	cat "$dir/out"
	[ "$code" -eq "$1" ] && grep -q " $2\$" "$dir/out"
}

$chat --write-reference "$dir/ref"
says 0 yes
cp "$dir/ref" "$dir/good"
echo 0123456789abcdef >>"$dir/ref"
says 1 NO
sed '1s/.*/0123456789abcdef/' "$dir/good" >"$dir/ref"
says 1 NO
sed '$d' "$dir/good" >"$dir/ref"
says 1 NO

# refuses WORD OPTION...: exit code 64, and the word is in what it says.
refuses() {
	word=$1
	shift
	code=0
	$chat "$@" 2>"$dir/err" || code=$?
	[ "$code" -eq 64 ] && grep -q -- "$word" "$dir/err"
}

# With experts, on any number of ranks, in one batch and in two microbatches; a model without experts has none.
expert_parallel="--model moe --enable-expert-parallel"
$chat --model moe --write-reference "$dir/ref"
for ranks in 2 4; do
	$chat $expert_parallel --data-parallel-size $ranks --reference "$dir/ref" >"$dir/out"
done
$chat $expert_parallel --data-parallel-size 2 --enable-dbo --dbo-prefill-token-threshold 2 --dbo-decode-token-threshold 1 --reference "$dir/ref" --json >"$dir/out"
grep -q '"dbo_steps":[1-9]' "$dir/out"
refuses 'divide' $expert_parallel --data-parallel-size 3
refuses '--enable-expert-parallel' --model moe --data-parallel-size 2
refuses 'model of experts' --enable-expert-parallel
refuses '1 to 8' --data-parallel-size 0
refuses '1 to 8' --data-parallel-size 9
refuses '--data-parallel-size 2' $expert_parallel --enable-dbo
refuses 'prefill-token-threshold is 0' --dbo-prefill-token-threshold 0
refuses usage --model else
refuses '--bf16 does not serve this model' --bf16 cpu

# The same model from its config.json; a key that is missing, out of range, or not served is named.
cat >"$dir/config.json" <<-'END'
	{
	 "architectures": ["Qwen3MoeForCausalLM"],
	 "model_type": "qwen3_moe",
	 "vocab_size": 1024,
	 "hidden_size": 128,
	 "num_hidden_layers": 4,
	 "num_attention_heads": 4,
	 "num_key_value_heads": 2,
	 "head_dim": 64,
	 "max_position_embeddings": 4099,
	 "rope_theta": 10000.0,
	 "rms_norm_eps": 1e-05,
	 "intermediate_size": 6144,
	 "shared_expert_intermediate_size": 128,
	 "num_experts": 32,
	 "num_experts_per_tok": 4,
	 "moe_intermediate_size": 64,
	 "norm_topk_prob": true,
	 "decoder_sparse_step": 1,
	 "mlp_only_layers": [],
	 "hidden_act": "silu",
	 "attention_bias": false,
	 "rope_scaling": null,
	 "seed": 1
	}
END
$chat --config "$dir/config.json" --reference "$dir/ref" >"$dir/out"
# changed SED WORD: the file so changed is refused.
changed() {
	sed "$1" "$dir/config.json" >"$dir/bad.json"
	refuses "$2" --config "$dir/bad.json"
	[ "$(wc -l <"$dir/err")" -eq 1 ]
}
for key in vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim max_position_embeddings rope_theta num_experts num_experts_per_tok moe_intermediate_size rms_norm_eps model_type; do
	changed "/\"$key\"/d" "\"$key\" "
	changed "s/\"$key\": [^,]*/\"$key\": 70000000001/" "\"$key\" "
done
changed 's/"head_dim": 64/"head_dim": "48"/' '"head_dim" is'
changed 's/"head_dim": 64/"head_dim": 50/' '"head_dim" is 50'
changed 's/10000.0/10000.5/' '"rope_theta" is 10000.5'
changed 's/"decoder_sparse_step": 1/"decoder_sparse_step": 2/' '"decoder_sparse_step" is 2; only 1'
changed 's/"mlp_only_layers": \[\]/"mlp_only_layers": [0]/' '"mlp_only_layers" is \[0\]'
changed 's/"rope_scaling": null/"rope_scaling": {"type": "yarn"}/' '"rope_scaling" is'
changed 's/"norm_topk_prob": true/"norm_topk_prob": 1/' '"norm_topk_prob" must'
changed 's/"seed": 1/"seed": -1/' '"seed" must'
changed 's/"seed": 1/"quantization_config": {}/' '"quantization_config" is not served'
changed 's/"num_attention_heads": 4/"num_attention_heads": 5/' '"num_attention_heads" must'
changed 's/"seed": 1/"reduction_groups": 3/' '"reduction_groups" does not divide'
changed '1d' JSON
# Where memory does not suffice the sum is said. A program with AddressSanitizer does not start within that limit.
if (ulimit -v 4194304 && exec "$1" --help) >/dev/null 2>&1; then
	sed 's/"vocab_size": 1024/"vocab_size": 1048576/; s/"hidden_size": 128/"hidden_size": 1024/' "$dir/config.json" >"$dir/large.json"
	code=0
	(ulimit -v 4194304 && exec $chat --config "$dir/large.json") 2>"$dir/err" || code=$?
	[ "$code" -eq 70 ]
	[[ $(<"$dir/err") == *'no memory for the model: 8.'*' GiB of weights'* ]]
fi
refuses 'cannot be read' --config "$dir/none"

# Nothing that it was to write is lost in silence.
fails() {
	code=0
	"$@" >"$dir/out" 2>"$dir/err" || code=$?
	[ "$code" -eq 74 ]
}
lost() { $chat "$@" >/dev/full; }
fails $chat --write-reference /dev/full
grep -q '^/dev/full: ' "$dir/err"
fails $chat --log /dev/full
fails lost --json

# A phase is one's own text.
$chat --json --log "$dir/log" --phase 'a "b" \c' >"$dir/out"
for file in out log; do
	grep -q '^{"phase":"a \\"b\\" \\\\c","' "$dir/$file"
done
