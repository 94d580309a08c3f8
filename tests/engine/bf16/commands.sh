#!/bin/sh
# kve bench and kve check: their options, what they print, and one sentence for each bad input: commands.sh KVE
# shellcheck disable=SC2154 # kve.sh sets kve and dir
. "$(dirname "$0")/../kve.sh"

# model HEAD_DIM MEMBERS TYPE: a config.json of two layers; MEMBERS: those of its MLP, each with a comma behind it.
model() {
	cat <<END
{"model_type": "$3", "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
 "head_dim": $1, "max_position_embeddings": 256, "rope_theta": 10000, "rms_norm_eps": 1e-6, $2 "seed": 3}
END
}
experts='"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "reduction_groups": 4,'
model 64 '"intermediate_size": 128,' qwen3 >"$dir/dense"
model 64 "$experts" qwen3_moe >"$dir/moe"
model 32 "$experts" qwen3_moe >"$dir/narrow"
model 64 '"intermediate_size": 128,' llama >"$dir/other"

# ---- bench ----
# runs ARGUMENT...: it must
runs() {
	"$kve" "$@" >"$dir/out" 2>"$dir/err" || fail "failed: $*"
	[ ! -s "$dir/err" ] || fail "an error without a failure: $*"
}
runs bench --config "$dir/moe" --data-parallel-size 2 --tokens 8 --rounds 1 --json true --timeline "$dir/trace"
[ "$(wc -l <"$dir/out")" -eq 1 ] || fail "the figures are not one line"
python3 - "$dir/out" "$dir/trace" <<'END' || fail "the figures or the trace are not as promised"
import json, sys
figures = json.load(open(sys.argv[1]))
assert (figures["ranks"], figures["layers"], figures["tokens"], figures["context"]) == (2, 2, 8, 0), figures
assert all(figures[kind + "_us"] > 0 and figures[kind + "_transport_us"] > 0 for kind in ("seq", "dbo")), figures
assert 0 <= figures["hidden"] <= 1
events = json.load(open(sys.argv[2]))["traceEvents"]
phases = [e for e in events if e["ph"] == "X"]
# Of both microbatches, each of the two layers: QKV, attention, experts, two sends and two receives.
assert len(phases) == 2 * 2 * 7, len(phases)
assert {(e["args"]["layer"], e["args"]["microbatch"]) for e in phases} == {(l, m) for l in (0, 1) for m in (0, 1)}
assert {e["tid"] for e in phases} == {0, 1}
END
runs bench --config "$dir/dense" --tokens 8 --sequences 4 --context 200 --rounds 2
grep -q '^a rank: ' "$dir/out" || fail "the memory of a rank is not printed"
grep -q '^one batch  *[0-9.]* us a step' "$dir/out" || fail "there are no figures of one batch"
! grep -q 'two microbatches' "$dir/out" || fail "one rank made two microbatches"

# ---- check ----
# Of a model without experts all ways of one rank are compared; of one with four groups of them, those of four ranks, too.
runs check --config "$dir/dense" --requests 3
[ "$(grep -c ': 3 of 3 answers are the first way' "$dir/out")" -eq 4 ] || fail "not all ways of one rank were compared"
runs check --config "$dir/moe" --layers 1 --requests=8 --seed=2
[ "$(grep -c ': 8 of 8 answers are the first way' "$dir/out")" -eq 10 ] || fail "not all ways were compared"

# ---- bad input ----
for command in bench check; do
	bad 2 'did you mean `layers`?' $command --layer 3
	bad 2 '--device needs a value' $command --device
	bad 2 '`tpu` is not one of cpu,gpu' $command --device tpu
	bad 2 '`wire` is not one of peer,host,host-kernels' $command --link wire
	bad 2 'layers: 65 is above the maximum, 64' $command --layers 65
	bad 2 'data-parallel-size: 9 is above the maximum, 8' $command --data-parallel-size 9
	bad 2 'gpus: 0 is below the minimum, 1' $command --gpus 0
	bad 2 '"5" is not an option' $command 5
	bad 2 '--config: it cannot be read as JSON' $command --config "$dir/none"
	bad 2 '"model_type" is llama' $command --config "$dir/other"
	bad 2 'not computed in BF16: head_dim is not 64 or 128' $command --config "$dir/narrow"
done
bad 2 '--tokens is not a multiple of --sequences' bench --tokens 7 --sequences 2
bad 2 '--context and --tokens are more than' bench --config "$dir/moe" --tokens 8 --context 249
bad 2 'tokens: 1 is below the minimum, 2' bench --tokens 1
bad 2 'do not divide the model'"'"'s groups of experts' bench --config "$dir/moe" --data-parallel-size 3
bad 2 'do not divide the model'"'"'s experts: it has none' bench --config "$dir/dense" --data-parallel-size 2
bad 2 'requests: 0 is below the minimum, 1' check --requests 0
bad 1 'too few --requests' check --config "$dir/moe" --layers 1 --requests 1
bad 74 "$dir/none/trace" bench --config "$dir/dense" --tokens 2 --rounds 1 --timeline "$dir/none/trace"
# A driver of CUDA that has no GPU to show, or none at all.
for command in bench check; do
	CUDA_VISIBLE_DEVICES=-1 bad 69 '--device: ' $command --device gpu
done

"$kve" --help >"$dir/help"
# named COMMAND OPTION...: --help names them there
named() {
	awk -v command="$1:" '/^kve / { here = $2 == command } here' "$dir/help" >"$dir/out"
	shift
	for name in "$@"; do
		grep -q "^  --$name " "$dir/out" || fail "--help does not name --$name"
	done
	[ "$(grep -c '^  --' "$dir/out")" -eq $# ] || fail "--help names more options than are tested here"
}
setup="config layers device data-parallel-size gpus link pace transport-sms"
# shellcheck disable=SC2086
named bench $setup tokens sequences context rounds json timeline
# shellcheck disable=SC2086
named check $setup requests seed
