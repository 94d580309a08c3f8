#!/bin/bash
# Build and run the GPU programs on a machine that has a GPU, nvcc and gcc, and nothing else of ours: no CMake, no packages.
#   bench/gpu/run.sh part1|part2|all|moe|right|gemm|kill|kvx|disk|probe|peer|ep|ep_kill|nccl|moe_engine [out]   parts and pieces: README.md
#   bench/gpu/run.sh build   only build, to run elsewhere: the other parts build nothing when the programs are there
# out (default build/gpu/out) gets the logs, *.json (a line a row) and goals.txt. BUILD: where to build (default build/gpu). XXHASH_INCLUDE: folder of
# xxhash.h where the system has none. KVD_CUBLAS: cuBLAS where the system does not find it. The kills, kvx and disk need a build of kvd: build/release, a bundle
# (scripts/offline-bundle) named in BUNDLE, or .gpu/kvd-*.tar.xz. DISK: where the disk tier is measured (else TMPDIR, or /tmp). QUICK=1: a minute or so each.
# SECONDS_A_PART: what has not begun by then is left out, what runs is cut off (585).
set -euo pipefail
cd "$(dirname "$0")/../.."
part=${1:?part1, part2, all, build, or a piece}
out=${2:-build/gpu/out}
quick=${QUICK:-}
build=${BUILD:-build/gpu}
nvcc=$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
include=(-I kernels/include -I common/include -I kernels -I bench ${XXHASH_INCLUDE:+-I "$XXHASH_INCLUDE"})

c()
{
	gcc -std=gnu17 -O2 -g -D_GNU_SOURCE '-DKVD_VERSION="of run.sh"' -Wall -Wextra "${include[@]}" "${@:2}" -c -o "$build/${1//\//_}.o" "$1"
}

# By hand what CMake builds where all of its packages are: the parts of kvd that copy, the harness, and the programs.
build_all()
{
	local file
	mkdir -p "$build"
	rm -f "$build"/*.o # of files that have moved since
	"$nvcc" -fatbin -std=c++17 -O3 -lineinfo -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 \
		-o "$build/gpu.fatbin" kernels/cuda/device/kernels.cu
	"$nvcc" -fatbin -std=c++17 -O3 -lineinfo -gencode arch=compute_90,code=sm_90 "${include[@]}" -o "$build/ep.fatbin" kernels/ep/device/ep.cu
	"$nvcc" -fatbin -std=c++17 -O3 -lineinfo -gencode arch=compute_90a,code=sm_90a "${include[@]}" -o "$build/nn.fatbin" kernels/nn/device/nn.cu
	printf '#define XXH_STATIC_LINKING_ONLY\n#define XXH_IMPLEMENTATION\n#include <xxhash.h>\n' >"$build/xxh.c"
	for file in common/hash/{digest,digest_portable,digest_sse2}.c common/{env,log,map,status}.c common/wire/sock.c common/text/{text,utf8}.c common/option/units.c common/os/{cgroup,version,no_revision,refused}.c \
		kernels/{layout,cpu,cuda,cuda/driver,ep,nn}/*.c bench/{harness,tools}.c tests/kernels/gpu_prop.c; do
		c "$file" "-DKVK_GPU_FATBIN=\"$(realpath "$build")/gpu.fatbin\"" "-DKVK_EP_FATBIN=\"$(realpath "$build")/ep.fatbin\"" "-DKVK_NN_FATBIN=\"$(realpath "$build")/nn.fatbin\"" -ffp-contract=off
	done
	c common/hash/digest_avx2.c -mavx2
	c common/hash/digest_avx512.c -mavx512f -mavx512bw
	gcc -O2 -w "${include[@]}" -c -o "$build/xxh.o" "$build/xxh.c"
	gcc -o "$build/gpu_prop" "$build"/{common,kernels}_*.o "$build/tests_kernels_gpu_prop.c.o" "$build/xxh.o" -ldl -lpthread -lm
	for file in gpu_copy gpu_probe gpu_ep; do
		"$nvcc" -std=c++17 -O2 -arch=sm_90 "${include[@]}" -o "$build/$file" "bench/gpu/$file.cu" \
			"$build"/{common,kernels}_*.o "$build"/bench_{harness,tools}.c.o "$build/xxh.o" -ldl -lpthread -lm
	done
	"$nvcc" -std=c++17 -O2 -arch=sm_90 "${include[@]}" -o "$build/gpu_ep_kill" bench/gpu/gpu_ep_kill.cu "$build"/{common,kernels}_*.o "$build/xxh.o" -ldl -lpthread -lm
	"$nvcc" -std=c++17 -O2 -arch=sm_90 "${include[@]}" -o "$build/gpu_nn" bench/gpu/{gpu_nn,nn_product,nn_attention,nn_rows}.cu \
		"$build"/{common,kernels}_*.o "$build"/bench_{harness,tools}.c.o "$build/xxh.o" -ldl -lpthread -lm
}

# At most this many seconds, and what is left of the part's; a piece that fails or is cut off does not keep the others from running.
limited()
{
	local session status=0 left=$((start + ${SECONDS_A_PART:-585} - SECONDS))
	if [ "$left" -le 0 ]; then
		echo "run.sh: no time is left in this part: ${*:2}"
		failed=1
		return
	fi
	setsid timeout -k 10 "$((left < $1 ? left : $1))" "${@:2}" &
	session=$!
	wait "$session" || status=$?
	pkill -KILL -s "$session" || true # what a sanitizer has started outlives it, and would keep the GPU
	if [ "$status" -eq 77 ]; then
		echo "run.sh: skipped: ${*:2}"
	elif [ "$status" -ne 0 ]; then
		echo "run.sh: status $status (124, 137: cut off after $((left < $1 ? left : $1)) s): ${*:2}"
		failed=1
	fi
}

# The name of the file, seconds, a program of the harness and its arguments.
measured()
{
	limited "$2" "${@:3}" ${quick:+--rounds 3} --out "$out/$1.json"
}

# Where a program of kvd's build is: of a bundle, or of a build.
program_of()
{
	local bundle=${BUNDLE:-$(compgen -G '.gpu/kvd-*.tar.xz' | sed -n 1p || true)}
	if [ -z "$bundle" ]; then
		echo "build/release/bin/$1"
		return
	fi
	if [ "$(cat "$build/kvd/of" 2>/dev/null)" != "$(cksum <"$bundle")" ]; then
		rm -rf "$build/kvd"
		mkdir -p "$build/kvd"
		tar -xf "$bundle" -C "$build/kvd" --strip-components=1
		cksum <"$bundle" >"$build/kvd/of"
	fi
	echo "$build/kvd/bin/$1"
}

# A function, and a program of kvd's that it needs.
with_kvd()
{
	local program
	program=$(program_of "$2")
	if [ -x "$program" ]; then
		"$1" "$program"
	else
		echo "run.sh: $2 skipped: no build of kvd here, and no bundle (BUNDLE=)"
	fi
}

load_memory() { measured kvx 40 "$1" memory --seconds 35; }
load_disk() { measured disk 58 "$1" disk ${DISK:+--with "dir=$DISK"} --seconds 45; }
kill_loop()
{
	limited 22 "$1" --kills 3 --workers 2 --control 1 --seconds 15
	limited 205 "$1" --kills "$([ -z "$quick" ] && echo 300 || echo 20)" --seconds 190
}

kvx() { with_kvd load_memory kvd-gpu-load; }
disk() { with_kvd load_disk kvd-gpu-load; }
kills() { with_kvd kill_loop kvd-gpu-kill; }
gemm() { measured gemm 100 "$build/gpu_copy" gemm; }
probe() { measured probe 60 "$build/gpu_probe" link host flag; }
count_gpus() { nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true; }
# Rows of moe.py, those named in MOE_ROWS or all.
engine()
{
	limited 330 env LD_LIBRARY_PATH="$build/kvd/lib:$build/kvd/lib/cxx${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" python3 bench/gpu/moe.py --kve "$1" --gpus "$(count_gpus)" --out "$out" \
		--rounds "$([ -z "$quick" ] && echo 20 || echo 3)" ${MOE_ROWS:-}
}
moe_engine() { with_kvd engine kve; }
operations() { measured operations 150 "$build/gpu_nn" rows-right product-right attention-right product attention; }
moe()
{
	local tool
	operations
	ep
	moe_engine
	for tool in memcheck racecheck; do
		limited 90 compute-sanitizer --tool "$tool" --error-exitcode 9 "$build/gpu_ep" right --quick
		limited 100 compute-sanitizer --tool "$tool" --error-exitcode 9 "$build/gpu_nn" attention-right --quick
	done
	limited 60 compute-sanitizer --tool memcheck --error-exitcode 9 "$build/gpu_nn" product-right --quick
}
ep() { measured ep 120 "$build/gpu_ep" right link wire host; }
nccl() { limited 200 python3 bench/gpu/nccl.py --gpu-ep "$build/gpu_ep" --out "$out"; }
ep_kill() { limited 400 "$build/gpu_ep_kill" --times "$([ -z "$quick" ] && echo 5 || echo 1)"; }
peer() { measured peer 200 "$build/gpu_copy" peer mapped; }

right()
{
	local tool cases=${quick:+200}
	limited 70 "$build/gpu_prop" --cases "${cases:-700}" --flips 10000
	limited 25 "$build/gpu_prop" --cases "${cases:-400}" --flips 0 --seed "$RANDOM"
	limited 25 "$build/gpu_prop" --cases "${cases:-300}" --flips 200 --peer 1
	for tool in memcheck racecheck; do
		limited 38 compute-sanitizer --tool "$tool" --error-exitcode 9 "$build/gpu_prop" --cases 12 --flips 12 --mib 2
	done
}

part1()
{
	measured link 420 "$build/gpu_copy" link beside both digests rivals hbm mapped peer digest
	measured staged 150 "$build/gpu_copy" staged --with mib=1280
}

part2()
{
	kvx
	disk
	gemm
	kills
	right
}

# Rows that have a goal, the missed ones first.
goals()
{
	{ cat "$out"/*.json 2>/dev/null || true; } | awk -F'"' '/"goal_met"/ {
		match($0, /"ratio":[0-9.]+/); ratio = substr($0, RSTART + 8, RLENGTH - 8)
		match($0, /"goal":"[^"]*"/); goal = substr($0, RSTART + 8, RLENGTH - 9)
		printf "%-7s %-78s %8s  %s\n", /"goal_met":true/ ? "met" : "MISSED", $4, ratio, goal
	}' | sort -s -k1,1 | tee "$out/goals.txt"
}

case $part in
part1 | part2 | right | gemm | kvx | disk | probe | peer | ep | ep_kill | nccl | moe | moe_engine | build) ;;
kill) part=kills ;;
all)
	"$0" part1 "$out"
	exec "$0" part2 "$out"
	;;
*) echo "run.sh: part1, part2, all, build, right, gemm, kill, kvx, disk, probe, peer, ep, ep_kill, nccl, moe or moe_engine" >&2 && exit 64 ;;
esac
if [ "$part" = build ] || [ ! -x "$build/gpu_nn" ]; then
	build_all
fi
[ "$part" != build ] || exit 0
mkdir -p "$out"
failed=0
start=$SECONDS
{
	"$part"
	goals
	echo "run.sh: $part took $((SECONDS - start)) s"
	exit "$failed"
} 2>&1 | tee "$out/$part.log"
