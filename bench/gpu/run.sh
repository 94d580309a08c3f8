#!/bin/bash
# Build and run the GPU programs on a machine that has a GPU, nvcc and gcc, and nothing else of ours: no CMake, no packages.
#
#   bench/gpu/run.sh right [out]   1st part: device == CPU, bit for bit; 10^4 flips; compute-sanitizer       (< 10 minutes)
#   bench/gpu/run.sh fast [out]    2nd part: the rows of the copy table, each with its reference in the same run (< 10 minutes)
#   bench/gpu/run.sh build         only build, to run elsewhere: the other parts build nothing when the programs are there
#   bench/gpu/run.sh lanes         no GPU: the kernels lane by lane on the CPU, the same property test; needs g++ (else 77)
#
# BUILD: where to build (default build/gpu). XXHASH_INCLUDE: folder of xxhash.h where the system has none. QUICK=1: a minute or so each.
set -euo pipefail
cd "$(dirname "$0")/../.."
part=${1:?right, fast, build or lanes}
out=${2:-build/gpu/out}
quick=${QUICK:-}
build=${BUILD:-build/gpu}
cuda=${CUDA_HOME:-/usr/local/cuda}
nvcc=$(command -v nvcc || echo "$cuda/bin/nvcc")
include=(-I kernels/include -I common/include -I kernels ${XXHASH_INCLUDE:+-I "$XXHASH_INCLUDE"})

c()
{
	gcc -std=gnu17 -O2 -g -D_GNU_SOURCE -Wall -Wextra "${include[@]}" "${@:2}" -c -o "$build/${1//\//_}.o" "$1"
}

# The parts of kvd that copy, by hand: what CMake builds where all of its packages are. $1: what they say of the image of the kernels.
build_parts()
{
	local file
	mkdir -p "$build"
	printf '#define XXH_STATIC_LINKING_ONLY\n#define XXH_IMPLEMENTATION\n#include <xxhash.h>\n' >"$build/xxh.c"
	for file in common/{digest,digest_portable,digest_sse2,env,log,text,utf8}.c kernels/*.c; do
		c "$file" "$1"
	done
	c common/digest_avx2.c -mavx2
	c common/digest_avx512.c -mavx512f -mavx512bw
	gcc -O2 -w "${include[@]}" -c -o "$build/xxh.o" "$build/xxh.c"
	c bench/gpu/gpu_prop.c "$1"
}

build_all()
{
	mkdir -p "$build"
	"$nvcc" -fatbin -std=c++17 -O3 -lineinfo -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 \
		-o "$build/gpu.fatbin" kernels/gpu.cu
	build_parts "-DKVK_GPU_FATBIN=\"$(realpath "$build")/gpu.fatbin\""
	gcc -o "$build/gpu_prop" "$build"/{common,kernels}_*.o "$build/bench_gpu_gpu_prop.c.o" "$build/xxh.o" -ldl -lpthread
	"$nvcc" -std=c++17 -O2 -arch=sm_90 "${include[@]}" -o "$build/gpu_copy" bench/gpu/gpu_copy.cu \
		"$build"/{common,kernels}_*.o "$build/xxh.o" -ldl -lpthread
}

right()
{
	local tool cases=${quick:+200}
	"$build/gpu_prop" --cases "${cases:-2000}" --flips 10000
	"$build/gpu_prop" --cases "${cases:-2000}" --flips 0 --seed "$RANDOM"
	for tool in memcheck racecheck; do
		compute-sanitizer --tool "$tool" --error-exitcode 9 "$build/gpu_prop" --cases 40 --flips 40 --mib 2
	done
}

fast()
{
	"$build/gpu_copy" ${quick:+--rounds 3} --json "$out/gpu_copy.json"
}

# The driver's table is lanes_driver.c's, which loads any image.
lanes()
{
	build=$build-lanes
	command -v g++ >/dev/null || { echo "run.sh: skipped: no g++" && exit 77; }
	build_parts "-DGPU_PROP_IMAGE=\"lanes\""
	c tests/kernels/lanes_driver.c
	g++ -std=gnu++17 -O2 -g -w -x c++ -I kernels -c -o "$build/lanes.o" tests/kernels/lanes.cc
	rm -f "$build/kernels_cuda.c.o"
	g++ -o "$build/gpu_prop_lanes" "$build"/{common,kernels}_*.o "$build"/bench_gpu_gpu_prop.c.o \
		"$build/tests_kernels_lanes_driver.c.o" "$build/lanes.o" "$build/xxh.o" -lpthread
	"$build/gpu_prop_lanes" --cases "${CASES:-40}" --flips 100 --mib 1 ${SEED:+--seed "$SEED"}
}

case $part in
right | fast | build)
	[ -x "$build/gpu_copy" ] && [ "$part" != build ] || build_all
	;;
lanes)
	lanes
	exit
	;;
*) echo "run.sh: right, fast, build or lanes" >&2 && exit 64 ;;
esac
mkdir -p "$out"
[ "$part" = build ] || "$part" 2>&1 | tee "$out/$part.log"
