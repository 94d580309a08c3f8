#!/usr/bin/env bash
# p10_a_pool_larger_than_memory_is_refused_with_the_numbers: of the machine, of control groups of both versions, and of the process.
# usage: memory.sh KVD
set -euo pipefail
kvd=$1
dir=$(mktemp -d /tmp/kvd-test-XXXXXX)
trap 'rm -rf "$dir"' EXIT
bad=0

# says CODE TEXT COMMAND...: its exit code, and a part of what it says.
says() {
	local want=$1 text=$2 code=0
	shift 2
	"$@" >"$dir/out" 2>&1 || code=$?
	if [ "$code" -ne "$want" ] || ! grep -qF -- "$text" "$dir/out"; then
		echo "$*: exit code $code, not $want, or no \"$text\" in:"
		cat "$dir/out"
		bad=1
	fi
}

says 78 "cpu.size is 4PiB, but there can be no more than" "$kvd" --cpu.size=4PiB --check-config
says 78 "cpu.size is 4PiB, but there can be no more than" "$kvd" --cpu.size=4PiB --run_dir="$dir/run" --http.listen=off
[ ! -e "$dir/run" ] || { echo "something was started"; bad=1; }
# A sanitizer's shadow takes more address space than that.
if (ulimit -v 1048576 && exec "$kvd" --version) >/dev/null 2>&1; then
	# shellcheck disable=SC2016
	says 78 "RLIMIT_AS (ulimit -v) of this process is 1GiB" bash -c 'ulimit -v 1048576 && exec "$0" --cpu.size=2GiB --check-config' "$kvd"
fi
# shellcheck disable=SC2016
says 78 "RLIMIT_FSIZE (ulimit -f) of this process is 1MiB" bash -c 'ulimit -f 1024 && exec "$0" --cpu.size=8MiB --cpu.slab_size=2MiB --check-config' "$kvd"

# With files of our own in the place of the kernel's, in a mount namespace. inside SETUP ARGUMENTS...: kvd is the process that SETUP has written about.
inside() {
	local setup=$1
	shift
	unshare --mount --propagation private bash -euc "mount -t tmpfs none /sys/fs/cgroup; f=$dir/f; mkdir -p \$f; $setup; exec \"\$@\"" - "$kvd" "$@"
}
machine='printf "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\nHugetlb: 1048576 kB\n" >$f/meminfo; mount --bind $f/meminfo /proc/meminfo'
group() { # LINE of /proc/self/cgroup
	echo "$machine; echo '$1' >\$f/cgroup; mount --bind \$f/cgroup /proc/\$\$/cgroup"
}
if ! inside "$machine" --version >/dev/null 2>&1; then
	echo "# SKIP: no mount namespaces here"
	[ $bad -eq 0 ] && exit 77
	exit 1
fi
none="$(group 3:pids:/a)"
says 0 "is valid" inside "$none" --cpu.size=4GiB --cpu.huge_pages=off --check-config
says 78 "no more than 7GiB (this machine)" inside "$none" --cpu.size=7.1GiB --cpu.huge_pages=off --check-config
says 0 "only 4GiB (this machine) and 0B of reserved huge pages are available now" inside "$none" --cpu.size=4.1GiB --cpu.huge_pages=off --check-config
says 75 "only 4GiB (this machine)" inside "$none" --cpu.size=4.1GiB --cpu.huge_pages=off --run_dir="$dir/run" --http.listen=off

# The nearest limit counts, wherever above the process it stands; files that are cached would be given back.
v2="$(group 0::/pod/box); d=/sys/fs/cgroup/pod; mkdir -p \$d/box; echo max >\$d/box/memory.max; echo 2147483648 >\$d/memory.max
	echo 1610612736 >\$d/memory.current; printf 'anon 5\ninactive_file 268435456\nactive_file 268435456\n' >\$d/memory.stat"
says 78 "no more than 2GiB (control group /pod)" inside "$v2" --cpu.size=2.1GiB --cpu.huge_pages=off --check-config
says 0 "only 1GiB (control group /pod)" inside "$v2" --cpu.size=1.1GiB --cpu.huge_pages=off --check-config
says 75 "only 1GiB (control group /pod)" inside "$v2" --cpu.size=1.1GiB --cpu.huge_pages=off --run_dir="$dir/run" --http.listen=off
says 78 "no more than 1GiB (control group /pod/box)" inside "$v2; echo 1073741824 >\$d/box/memory.high" --cpu.size=1.1GiB --cpu.huge_pages=off --check-config

# In a container the path is the host's, and the group lies at the root.
v1="$(group 4:memory:/docker/abc); d=/sys/fs/cgroup/memory; mkdir -p \$d; echo 1073741824 >\$d/memory.limit_in_bytes
	echo 536870912 >\$d/memory.usage_in_bytes; printf 'cache 1\ntotal_inactive_file 134217728\ntotal_active_file 0\n' >\$d/memory.stat"
says 78 "no more than 1GiB (control group /)" inside "$v1" --cpu.size=1.1GiB --cpu.huge_pages=off --check-config
says 75 "only 640MiB (control group /)" inside "$v1" --cpu.size=700MiB --cpu.huge_pages=off --run_dir="$dir/run" --http.listen=off

# The whole daemon counts, not only its largest part: said, for the pool itself takes no page that is not there.
whole=(--cpu.size=1GiB --cpu.huge_pages=off "--namespaces=a,b" --events.buffer=32MiB --events.send_buffer=4MiB --check-config)
part='cpu.size 1GiB, index 200MiB and mirrors 128MiB (index.max_blocks), receive and event buffers 328MiB, kvd-meta, kvd-net and the rest 100MiB'
small="$v2; echo 1717986918 >\$d/box/memory.max; echo 0 >\$d/memory.current"
says 0 "may need 1.73GiB in all: $part; there can be no more than 1.59GiB (control group /pod/box)" inside "$small" "${whole[@]}"
inside "$v2; echo 0 >\$d/memory.current" "${whole[@]}" >"$dir/out" 2>&1 && ! grep -F 'may need' "$dir/out" || bad=1

# Whose signal ended the daemon. kill_daemon WORDS [now]: what the keeper says; now: the kernel has counted one more.
kill_daemon() {
	local shell keeper
	inside "$v2; echo 'oom_kill 3' >\$d/box/memory.events" --cpu.size=8MiB --cpu.slab_size=2MiB --cpu.huge_pages=off --run_dir="$dir/run" --http.listen=off --events.enabled=off >"$dir/log" 2>&1 &
	shell=$!
	until [ -S "$dir/run/default.sock" ]; do
		kill -0 $shell || { cat "$dir/log"; exit 1; }
		sleep 0.01
	done
	keeper=$(pgrep -P $shell)
	[ $# -eq 1 ] || nsenter -t "$keeper" -m sh -c "echo 'oom_kill 4' >/sys/fs/cgroup/pod/box/memory.events; echo 4194304 >/sys/fs/cgroup/pod/box/memory.max"
	kill -9 "$(pgrep -P "$keeper" -x kvd)"
	until grep -q 'the daemon has died' "$dir/log"; do sleep 0.01; done
	kill "$keeper"
	wait $shell || true
	[ $# -eq 1 ] || grep -F 'keeper: cpu.size is 8MiB, but there can be no more than 4MiB (control group /pod/box)' "$dir/log" >/dev/null || { echo "the limit was not looked at:"; cat "$dir/log"; bad=1; }
	grep -F 'the daemon has died' "$dir/log" | grep -F "$1" >/dev/null || { echo "no \"$1\" in:"; cat "$dir/log"; bad=1; }
	rm -rf "$dir/run"
}
kill_daemon 'signal 9 by "the kernel, for want of memory in control group /pod/box"' now
kill_daemon 'signal 9 by "somebody"'

# Without room for the mirror no engine attaches: status says so, and the log once, however often they ask.
kvctl=${kvd%/*}/kvctl
echo '{"timestamp":0,"input_length":16,"output_length":1,"hash_ids":[1]}' >"$dir/trace"
inside "$v2" --cpu.size=8MiB --cpu.slab_size=2MiB --cpu.huge_pages=off --index.max_blocks=67108864 --run_dir="$dir/run" --http.listen=off --events.enabled=off >"$dir/log" 2>&1 &
shell=$!
until [ -S "$dir/run/default.sock" ]; do
	kill -0 $shell || { cat "$dir/log"; exit 1; }
	sleep 0.01
done
says 0 "healthy" "$kvctl" --socket "$dir/run/default.sock" status
for _ in 1 2 3; do
	! "$kvctl" --socket "$dir/run/default.sock" --timeout 1s replay --live --trace "$dir/trace" >/dev/null 2>&1 || { echo "an engine has attached"; bad=1; }
done
says 2 "there is no memory for the mirror" "$kvctl" --socket "$dir/run/default.sock" status
[ "$(grep -cF 'no memory for the mirror' "$dir/log")" -eq 1 ] || { cat "$dir/log"; bad=1; }
kill "$(pgrep -P $shell)"
wait $shell || true
rm -rf "$dir/run"

# Reserved huge pages are beside all that.
huge="$v1; h=/sys/kernel/mm/hugepages/hugepages-2048kB; [ -d \$h ] || { echo no huge pages here; exit 99; }
	mkdir \$f/huge; echo 1024 >\$f/huge/nr_hugepages; echo 512 >\$f/huge/free_hugepages; echo 0 >\$f/huge/resv_hugepages; mount --bind \$f/huge \$h"
if [ -d /sys/kernel/mm/hugepages/hugepages-2048kB ]; then
	says 0 "only 640MiB (control group /) and 1GiB of reserved huge pages" inside "$huge" --cpu.size=3GiB --check-config
	rm -r "$dir/f/huge"
	says 78 "no more than 1GiB (control group /) and 2GiB of reserved huge pages" inside "$huge" --cpu.size=3.1GiB --check-config
fi
exit $bad
