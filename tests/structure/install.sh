#!/bin/bash
# What is installed works from any prefix, without configuration of the linker: install.sh BUILD_DIR C_COMPILER
set -euo pipefail
build=$1
cc=$2
dir=$(mktemp -d /tmp/kvd-test-XXXXXX)
trap 'rm -rf "$dir"' EXIT
cd "$(dirname "$0")/../.."
prefix=$dir/opt/kvd

cmake --install "$build" --prefix "$prefix" >/dev/null
"$prefix/bin/kvctl" version --socket "$dir/none" >"$dir/version"
grep -q "not reachable" "$dir/version"
"$prefix/bin/kvd" --config "$prefix/etc/kvd/kvd.conf" --check-config >/dev/null
echo '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}' >"$dir/trace"
PATH=/usr/bin:/bin "$prefix/bin/kvctl" replay --trace "$dir/trace" --blocks 4 >/dev/null

# A struct that may grow can.
tests/structure/structs.sh "$prefix/include"

# The metadata library is loaded by its own program only.
[ -x "$prefix/bin/kvd-meta" ]
[ -x "$prefix/bin/kvd-net" ]
[ -x "$prefix/bin/kvd-gpu" ]
needed=$(readelf -d "$prefix/bin/kvd")
[[ $needed == *libmicrohttpd* && $needed != *librocksdb* && $needed != *libzmq* ]]

# A program of the user's, in C and in C++, by pkg-config alone.
PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name kvx.pc)")
export PKG_CONFIG_PATH
[ "$(pkg-config --variable=includedir kvc | xargs realpath)" = "$prefix/include" ]
read -ra flags <<<"$(pkg-config --cflags kvx)"
read -ra libs <<<"$(pkg-config --libs kvx) -Wl,-rpath,$(pkg-config --variable=libdir kvx)"
cat >"$dir/user.c" <<'END'
#include <kvx.h>
int main(void)
{
	kvc_config_t config = kvc_config_t();
	kvx_config_t nothing = kvx_config_t();
	kvc_t *kvc = 0;
	kvx_t *kvx = 0;
	config.struct_size = sizeof config;
	config.socket = "/nonexistent/kvd.sock";
	nothing.struct_size = sizeof nothing;
	return kvc_attach(&config, &kvc) != KVC_ERR_UNREACHABLE || kvx_attach(&nothing, &kvx) != KVC_ERR_ARG;
}
END
if echo 'int main() { return 0; }' | "$cc" -x c++ -fsyntax-only - 2>/dev/null; then
	"$cc" -x c++ -std=c++11 -Wall -Wextra -Wpedantic -Wold-style-cast -Werror "${flags[@]}" "$dir/user.c" -o "$dir/user" "${libs[@]}"
	"$dir/user"
fi
sed -i 's/= kv[cx]_config_t()/= {0}/' "$dir/user.c"
"$cc" -std=c11 -Wall -Wextra -Wpedantic -Werror "${flags[@]}" "$dir/user.c" -o "$dir/user" "${libs[@]}"
"$dir/user"

# The example of docs/client.md, by find_package(kvd): one process puts, another gets.
mkdir "$dir/example"
cp examples/prefix.c "$dir/example"
sed -n '/^```cmake$/,/^```$/p' docs/client.md | sed '/^```/d' >"$dir/example/CMakeLists.txt"
CC=$cc cmake -S "$dir/example" -B "$dir/example/build" -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
cmake --build "$dir/example/build" >/dev/null
"$prefix/bin/kvd" --run_dir="$dir/run" --cpu.size=64MiB --cpu.slab_size=16MiB --http.listen=off --limits.silence=10s >"$dir/kvd.log" 2>&1 &
kvd=$!
trap 'kill "$kvd"; wait; rm -rf "$dir"' EXIT
socket=$dir/run/default.sock
for _ in $(seq 1200); do
	"$prefix/bin/kvctl" status --socket "$socket" >/dev/null 2>&1 && break
	sleep 0.05
done
status=0
"$dir/example/build/prefix" "$socket" get >"$dir/said" || status=$?
[ "$status" -eq 2 ]
"$dir/example/build/prefix" "$socket" put >>"$dir/said"
"$dir/example/build/prefix" "$socket" get >>"$dir/said"
diff - "$dir/said" <<'END'
a miss, reason 1
stored 4 blocks of 16384 bytes
read 4 of 4 blocks; the last one holds 4
END

# The example of docs/handover.md, by pkg-config: one process hands a prompt to another, which waits for it.
"$cc" -std=c11 -Wall -Wextra -Wpedantic -Werror "${flags[@]}" examples/handover.c -o "$dir/handover" "${libs[@]}"
"$dir/handover" "$socket" recv >"$dir/received" &
consumer=$!
"$dir/handover" "$socket" send >"$dir/sent"
wait "$consumer"
grep -qx 'done: 6 blocks handed over' "$dir/sent"
grep -qx 'done: compute from token 87; the last one there holds 87, first token: 42' "$dir/received"

# The unit names what was installed, and an edited configuration outlives the next installation.
grep -qx "ExecStart=$prefix/bin/kvd --config $prefix/etc/kvd/kvd.conf" "$prefix/lib/systemd/system/kvd.service"
if command -v systemd-analyze >/dev/null; then
	systemd-analyze verify "$prefix/lib/systemd/system/kvd.service"
fi
echo 'cpu.size: 2GiB' >"$prefix/etc/kvd/kvd.conf"
cmake --install "$build" --prefix "$prefix" >/dev/null
grep -qx 'cpu.size: 2GiB' "$prefix/etc/kvd/kvd.conf"
