#!/bin/bash
# What scripts/offline-bundle packs runs where it is unpacked, with no library from elsewhere but libc's and the C++ one's: bundle.sh BUILD_DIR
set -Eeuo pipefail
trap 'echo "bundle.sh: line $LINENO: $BASH_COMMAND"; cat "$dir/kvd.log" 2>/dev/null || true' ERR
cd "$(dirname "$0")/../.."
build=$1
dir=$(mktemp -d /tmp/kvd-test-XXXXXX)
keeper=
stop() {
	[ -z "$keeper" ] || kill "$keeper" 2>/dev/null || true
	wait
	rm -rf "$dir"
}
trap stop EXIT

status=0
scripts/offline-bundle --dev --build "$build" -o "$dir/bundle.tar" 2>"$dir/log" || status=$?
if [ "$status" -ne 0 ]; then
	cat "$dir/log"
	[ "$status" -eq 77 ] && echo "# SKIP: $(tail -n 1 "$dir/log")"
	exit "$status"
fi
mkdir "$dir/there"
tar -C "$dir/there" -xf "$dir/bundle.tar"
rm "$dir/bundle.tar"
there=$(echo "$dir"/there/kvd-*)
bare() { env -i PATH=/usr/bin:/bin "$@"; }

# Complete: the machine gives libc and the C++ library, the bundle all else.
bare "$there/check" >"$dir/check"
grep -qx 'all libraries are found' "$dir/check"
for program in "$there"/libexec/kv*; do
	# shellcheck disable=SC2016
	foreign=$(bare "$there/bin/with-kvd" ldd "$program" | awk '$3 ~ /^\// {print $3}' | grep -v "^$there/" |
		grep -vE '/(libc|libm|libpthread|libdl|librt|libresolv|libstdc\+\+|libgcc_s)\.so\.[0-9]+$' || true)
	if [ -n "$foreign" ]; then
		echo "$program takes from the machine: $foreign"
		exit 1
	fi
done

# The package's module is whole: Python binds every symbol of what it loads. A bundle has it wherever Python has its headers.
if python3 -c 'import os, sysconfig; raise SystemExit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' 2>/dev/null; then
	[ -d "$there/wheels" ]
fi
for wheel in "$there"/wheels/*.whl; do
	[ -e "$wheel" ] || break
	python3 -c 'import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2])' "$wheel" "$dir/package"
	PYTHONPATH="$dir/package/kvd_vllm" python3 -c 'import _kvd'
done

# It works: a daemon, an operator, and an engine that finds what another has left, equal to one without a cache.
[[ $(bare "$there/bin/kvd" --version) == kvd* ]]
env -i PATH=/usr/bin:/bin "$there/bin/kvd" --run_dir="$dir/run" --cpu.size=256MiB --http.listen=off --limits.silence=10s >"$dir/kvd.log" 2>&1 &
keeper=$!
for _ in $(seq 1200); do
	bare "$there/bin/kvctl" --socket "$dir/run/default.sock" status >/dev/null 2>&1 && break
	kill -0 "$keeper"
	sleep 0.05
done
bare "$there/bin/kvctl" --socket "$dir/run/default.sock" version >"$dir/version"
grep -q '^kvd  *[0-9]' "$dir/version"
chat() { bare "$there/bin/kve-chat" --users 1 --branches 1 --turns 2 --systems 1 --system-tokens 64 --message-tokens 16 --new-tokens 4 "$@" >"$dir/chat" || { cat "$dir/chat"; exit 1; }; }
chat --no-cache --write-reference "$dir/reference"
chat --socket "$dir/run/default.sock" --reference "$dir/reference"
for _ in $(seq 10); do # on a starved machine a load or a save that takes too long is a miss
	chat --socket "$dir/run/default.sock" --reference "$dir/reference" --log "$dir/again"
	grep -qE '"cpu_tokens":[1-9]' "$dir/again" && break
	cat "$dir/again" "$dir/chat"
done
grep -qE '"cpu_tokens":[1-9]' "$dir/again"
kill "$keeper"
wait "$keeper"
keeper=

# A user's program is built there against libkvx and runs without further words; so do kvd's own dependencies.
echo '#include <kvx.h>
#include <zmq.h>
int main(void) { int major, minor, patch; zmq_version(&major, &minor, &patch); kvx_config_t none = {0}; kvx_t *kvx; return major == 0 || kvx_attach(&none, &kvx) != KVC_ERR_ARG; }' >"$dir/user.c"
bare bash -euc ". '$there/activate'; cc '$dir/user.c' -o '$dir/user' \$(pkg-config --cflags --libs kvx libzmq) \$LDFLAGS; test \$(realpath \$(cc -print-file-name=libcrypto.a)) = '$there/lib/libcrypto.a'"
bare "$dir/user"
[[ $(bare ldd "$dir/user") == *libzmq*" $there/lib/"* ]]
bare bash -euc ". '$there/activate'; pkg-config --exists 'liburing >= 2.3' rocksdb libzmq msgpack libxxhash libcrypto libmicrohttpd yaml-0.1 json-c cmocka"
