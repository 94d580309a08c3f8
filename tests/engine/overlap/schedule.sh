#!/bin/sh
# kve schedule: the figures of the cost model, a timeline in characters and as a trace, and one sentence for each bad input: schedule.sh KVE
# shellcheck disable=SC2154 # kve.sh sets kve and dir
. "$(dirname "$0")/../kve.sh"
halves="--attention 100 --dispatch 150 --experts 200 --combine 150"

# shellcheck disable=SC2086
"$kve" schedule --mode dbo --layers 8 $halves --timeline "$dir/trace" >"$dir/out" 2>"$dir/err"
cat >"$dir/expected" <<'END'
dbo, layers 8: 5700 us; bound 4800 us (compute 4800, transport 4800)
transport under compute of the other microbatch: 81.2 %; overlap efficiency 0.81
END
sed -n 1,2p "$dir/out" | cmp - "$dir/expected" || fail "the figures are not those of the cost model"
[ "$(sed -n '4,$p' "$dir/out" | sed 's/ .*//' | tr '\n' ' ')" = "compute transport " ] || fail "the rows are not the streams"
# Two streams and 8 layers x 2 microbatches x 7 phases; the last combine ends the step.
[ "$(grep -c '"ph":"M"' "$dir/trace")" -eq 2 ] && [ "$(grep -c '"ph":"X"' "$dir/trace")" -eq 112 ] || fail "the trace does not have all items"
grep -q '"tid":1,"ts":5550,"dur":150,"name":"combine send 0"' "$dir/trace" || fail "the last combine is not at the end of the trace"
python3 -m json.tool "$dir/trace" >/dev/null || fail "the trace is no JSON"

"$kve" schedule --mode=seq --layers=1 --attention=10 --dispatch=20 --experts=30 --combine=40 --shared=7 >"$dir/out"
cat >"$dir/expected" <<'END'
seq, layers 1: 100 us; bound 60 us (compute 47, transport 60)
transport under compute of the other microbatch: 0.0 %; overlap efficiency 0.15
until the end of layer 0, 100 us: A attention, E experts, S shared experts, D dispatch, C combine; then the microbatch; . nothing
compute    A000000000....................E00000000000000000000000000000S000000.................................
transport  ..........D0000000000000000000..............................C000000000000000000000000000000000000000
END
cmp "$dir/out" "$dir/expected" || fail "the timeline of one layer is another"

bad 2 'the command is "schedule"'
bad 2 'not "measure"' measure
bad 2 '--layers is missing' schedule
bad 2 '--combine is missing' schedule --layers 1 --attention 1 --experts 1 --dispatch 1
bad 2 '`both` is not one of seq,dbo' schedule --mode both
bad 2 'layers: 0 is below the minimum, 1' schedule --layers 0
bad 2 'layers: 1001 is above the maximum, 1000' schedule --layers 1001
bad 2 'attention: `-5` is not a whole number' schedule --attention -5
bad 2 'above the maximum' schedule --experts 1000000001
bad 2 'did you mean `layers`?' schedule --layer 3
bad 2 '--layers needs a value' schedule --layers
bad 2 '"5" is not an option' schedule 5
# shellcheck disable=SC2086
bad 74 "$dir/none/trace" schedule --layers 1 $halves --timeline "$dir/none/trace"
# shellcheck disable=SC2086
bad 74 /dev/full schedule --layers 1 $halves --timeline /dev/full
code=0
# shellcheck disable=SC2086
"$kve" schedule --layers 1 $halves >/dev/full 2>"$dir/err" || code=$?
[ "$code" -eq 74 ] || fail "what could not be printed is no error"
for name in mode layers attention experts dispatch combine shared timeline; do
	"$kve" --help >"$dir/out"
	grep -q "^  --$name " "$dir/out" || fail "--help does not name --$name"
done
