#!/bin/bash
# What kvctl prints and its exit codes, against the fake daemon: kvctl.sh KVCTL FAKE_KVD GOLDEN_DIR   (UPDATE=1 writes the golden files)
set -u
kvctl=$1
fake=$2
golden=$3
dir=$(mktemp -d /tmp/kvd-test-XXXXXX)
trap 'rm -rf "$dir"' EXIT
export LC_ALL=C.UTF-8 NO_COLOR=1
unset KVD_SOCKET
failed=0

# run NAME EXIT_CODE ARGUMENTS...: standard output and error must be the golden file, the directory's name taken out.
run() {
	local name=$1 want=$2 code
	shift 2
	"$kvctl" "$@" >"$dir/out" 2>"$dir/err" </dev/null
	code=$?
	{ cat "$dir/out"; sed 's/^/! /' "$dir/err"; } | sed -e "s|$dir|DIR|g" -e "s|kvctl [0-9.]* ([^()]*) (kvc [0-9.]*|kvctl V (R) (kvc V|" -e 's|"revision":"[^"]*"|"revision":"R"|' -e 's|"kvctl":"[0-9.]*","libkvc":"kvc [0-9.]*|"kvctl":"V","libkvc":"kvc V|' >"$dir/have"
	if [ "$code" -ne "$want" ]; then
		echo "$name: exit code $code, not $want"
		cat "$dir/have"
		failed=1
	fi
	if [ "${UPDATE:-}" ]; then
		cp "$dir/have" "$golden/$name"
	elif ! diff -u "$golden/$name" "$dir/have"; then
		failed=1
	fi
}

coproc FAKE { exec "$fake" "$dir/s"; }
read -r _ <&"${FAKE[0]}"
printf '%s\n' "$(seq -s ', ' 1 35)" >"$dir/tokens"
echo '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}' >"$dir/trace"

run status 2 status --socket "$dir/s"
run status-json 2 status --json --socket="$dir/s"
run check 2 --socket "$dir/s" check
run check-json 2 --socket "$dir/s" check --json
run stats 0 --socket "$dir/s" stats hit big
run stats-json 0 --socket "$dir/s" stats --json
run stats-none 1 --socket "$dir/s" stats nosuch
run config 0 --socket "$dir/s" config
run explain 1 --socket "$dir/s" explain --tokens "@$dir/tokens"
run explain-json 1 --socket "$dir/s" explain --tokens "[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]" --space 0 --json
run explain-space 1 --socket "$dir/s" explain --tokens 1 --space 7
run explain-no-group 64 --socket "$dir/s" explain --tokens "@$dir/tokens" --group 3
run explain-bad 64 --socket "$dir/s" explain --tokens 1,2,x
run explain-directory 64 --socket "$dir/s" explain --tokens "@$dir"
printf '1,2\0x' >"$dir/zero"
run explain-not-text 64 --socket "$dir/s" explain --tokens "@$dir/zero"
run explain-no-identity 1 --socket "$dir/s" explain --tokens 1 --identity "$(printf 'model=%s\n' typo)"
run explain-unreachable 69 --socket "$dir/none" explain --tokens 1
run explain-unreachable-json 69 --socket "$dir/none" explain --tokens 1 --json
run transfers 0 --socket "$dir/s" transfers
run transfers-json 0 --socket "$dir/s" transfers --json
run version 0 --socket "$dir/s" version
run version-json 0 --socket "$dir/s" --version --json
run unreachable 69 --socket "$dir/none" status
run unreachable-json 69 --socket "$dir/none" check --json
run usage 64
run unknown 64 statsu
run unknown-option 64 --statsu
run bad-timeout 64 --timeout 5 status
run bad-color 64 --color maybe status
run no-value 64 status --socket
run replay-no-trace 64 replay --json
run replay-bad-number 64 replay --trace x --blocks 0 --json
run replay-unknown 64 replay --bogus
run replay-no-daemon 64 replay --trace "$dir/trace" --json
run replay-not-live 64 replay --trace "$dir/trace" --socket "$dir/s"
run replay-live-policy 64 replay --trace "$dir/trace" --live --policy lru
run replay-unreachable 69 replay --trace "$dir/trace" --live --socket "$dir/none"
run reset-no-space 64 --socket "$dir/s" reset --yes
run reset-unknown 1 --socket "$dir/s" reset --space 7 --yes
run reset-not-asked 64 --socket "$dir/s" reset --space 0
run reset-dry 0 --socket "$dir/s" reset --space 0 --dry-run
run reset-dry-json 0 --socket "$dir/s" reset --space 0 --dry-run --json
run reset 0 --socket "$dir/s" reset --space 0 --yes
run reset-unreachable 69 --socket "$dir/none" reset --space 0 --yes
run other-option 64 status --tokens 1 --socket "$dir/s"
run too-many 64 check now --socket "$dir/s"
run bad-detail 64 status --detail 3 --socket "$dir/s"
run help-explain 0 explain --help
run help-reset 0 help reset
run help-replay 0 help replay
run help-explain-json 0 explain --help --json

# A line that is too long is refused at once, its end is not waited for.
mkfifo "$dir/long"
exec 9<>"$dir/long"
head -c 4198000 /dev/zero >&9 &
timeout 20 "$kvctl" replay --trace "$dir/long" --blocks 4
code=$?
if [ "$code" -ne 65 ]; then
	echo "long line: exit code $code, not 65"
	failed=1
fi
exec 9>&-

# What could not be written was not said: the document is longer than stdio's buffer.
"$kvctl" help requests --json >/dev/full
code=$?
if [ "$code" -ne 75 ]; then
	echo "full: exit code $code, not 75"
	failed=1
fi

eval "exec ${FAKE[1]}>&-"
wait
exit $failed
