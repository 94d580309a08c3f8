#!/bin/sh
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

# With experts, on any number of ranks; a model without experts has none.
$chat --model moe --write-reference "$dir/ref"
for ranks in 2 4; do
	$chat --model moe --expert-ranks $ranks --reference "$dir/ref" >"$dir/out"
done
for bad in "--model moe --expert-ranks 3" "--expert-ranks 2" "--model else"; do
	code=0
	# shellcheck disable=SC2086
	$chat $bad 2>/dev/null || code=$?
	[ "$code" -eq 64 ]
done

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
