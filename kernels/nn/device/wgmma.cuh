/* wgmma.cuh -- what kernels share that use the matrix instructions of a warp group (sm_90a). These are asynchronous:
 * open() before the first one, close() after the last one of a group; wait<N>() until at most N groups still run. */
#ifndef KVK_NN_WGMMA_CUH
#define KVK_NN_WGMMA_CUH

#include "cuda/device/bulk.cuh"

namespace wgmma {

/* A factor in shared memory, in columns of rows of 128 bytes, eight of them 1,024 bytes behind the eight before, in the
 * swizzle of 128 bytes (1 in the two upper bits). 16 inputs further in a row is 32 bytes, 2 here, since addresses are
 * swizzled after they are summed. `column`: bytes to the next column, if outputs lie side by side; else 16. */
static __device__ __forceinline__ uint64_t describe(uint32_t address, uint32_t column = 16u)
{
	return (uint64_t)1 << 62 | (uint64_t)(1024u >> 4) << 32 | (uint64_t)(column >> 4) << 16 | (address & 0x3ffffu) >> 4;
}

/* What threads have written to registers comes before. */
static __device__ __forceinline__ void open(void)
{
	asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void close(void)
{
	asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int N> static __device__ __forceinline__ void wait(void)
{
	asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* Nothing that touches these sums, a multiple of four, moves across it. */
template <uint32_t COUNT> static __device__ __forceinline__ void hold(float *d)
{
#pragma unroll
	for (uint32_t i = 0; i < COUNT; i += 4u) {
		asm volatile("" : "+f"(d[i]), "+f"(d[i + 1u]), "+f"(d[i + 2u]), "+f"(d[i + 3u])::"memory");
	}
}

/* One arrival for the whole warp, of what all its lanes did before. */
static __device__ __forceinline__ void arrive(uint64_t *barrier)
{
	__syncwarp();
	if (threadIdx.x % 32u == 0) {
		asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
	}
}

/* d [+]= a b: 64 x 16 inputs of a times 16 x N of b, both in shared memory. Of a thread: d[4 i + 2 h + j] is element
 * (16 * warp + lane / 4 + 8 h, 8 i + 2 (lane % 4) + j). */
template <uint32_t N>
static __device__ __forceinline__ void multiply(float *d, uint64_t a, uint64_t b, uint32_t add);

/* The N / 2 sums of a thread as operands, and their numbers: each width has those of the width before. */
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D_8   D4(0)
#define D_16  D_8, D4(4)
#define D_24  D_16, D4(8)
#define D_32  D_24, D4(12)
#define D_40  D_32, D4(16)
#define D_48  D_40, D4(20)
#define D_56  D_48, D4(24)
#define D_64  D_56, D4(28)
#define D_72  D_64, D4(32)
#define D_80  D_72, D4(36)
#define D_88  D_80, D4(40)
#define D_96  D_88, D4(44)
#define D_104 D_96, D4(48)
#define D_112 D_104, D4(52)
#define D_120 D_112, D4(56)
#define D_128 D_120, D4(60)
#define D_136 D_128, D4(64)
#define D_144 D_136, D4(68)
#define D_152 D_144, D4(72)
#define D_160 D_152, D4(76)
#define D_256 D_160, D4(80), D4(84), D4(88), D4(92), D4(96), D4(100), D4(104), D4(108), D4(112), D4(116), D4(120), D4(124)
#define N_8   "%0,%1,%2,%3"
#define N_16  N_8 ",%4,%5,%6,%7"
#define N_24  N_16 ",%8,%9,%10,%11"
#define N_32  N_24 ",%12,%13,%14,%15"
#define N_40  N_32 ",%16,%17,%18,%19"
#define N_48  N_40 ",%20,%21,%22,%23"
#define N_56  N_48 ",%24,%25,%26,%27"
#define N_64  N_56 ",%28,%29,%30,%31"
#define N_72  N_64 ",%32,%33,%34,%35"
#define N_80  N_72 ",%36,%37,%38,%39"
#define N_88  N_80 ",%40,%41,%42,%43"
#define N_96  N_88 ",%44,%45,%46,%47"
#define N_104 N_96 ",%48,%49,%50,%51"
#define N_112 N_104 ",%52,%53,%54,%55"
#define N_120 N_112 ",%56,%57,%58,%59"
#define N_128 N_120 ",%60,%61,%62,%63"
#define N_136 N_128 ",%64,%65,%66,%67"
#define N_144 N_136 ",%68,%69,%70,%71"
#define N_152 N_144 ",%72,%73,%74,%75"
#define N_160 N_152 ",%76,%77,%78,%79"
#define N_256 N_160 \
	",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95" \
	",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
	",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

/* a, b and add are the operands behind the sums. */
#define MULTIPLY(n, a_, b_, add_)                                                                                      \
	template <>                                                                                                    \
	__device__ __forceinline__ void multiply<n>(float *d, uint64_t a, uint64_t b, uint32_t add)                    \
	{                                                                                                              \
		asm volatile("{\n"                                                                                     \
			     ".reg .pred add;\n"                                                                       \
			     "setp.ne.b32 add, %" #add_ ", 0;\n"                                                       \
			     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" N_##n "}, "                  \
			     "%" #a_ ", %" #b_ ", add, 1, 1, 0, 0;\n"                                                  \
			     "}\n"                                                                                     \
			     : D_##n                                                                                   \
			     : "l"(a), "l"(b), "r"(add)                                                                \
			     : "memory");                                                                              \
	}

MULTIPLY(8, 4, 5, 6)
MULTIPLY(16, 8, 9, 10)
MULTIPLY(24, 12, 13, 14)
MULTIPLY(32, 16, 17, 18)
MULTIPLY(40, 20, 21, 22)
MULTIPLY(48, 24, 25, 26)
MULTIPLY(56, 28, 29, 30)
MULTIPLY(64, 32, 33, 34)
MULTIPLY(72, 36, 37, 38)
MULTIPLY(80, 40, 41, 42)
MULTIPLY(88, 44, 45, 46)
MULTIPLY(96, 48, 49, 50)
MULTIPLY(104, 52, 53, 54)
MULTIPLY(112, 56, 57, 58)
MULTIPLY(120, 60, 61, 62)
MULTIPLY(128, 64, 65, 66)
MULTIPLY(136, 68, 69, 70)
MULTIPLY(144, 72, 73, 74)
MULTIPLY(152, 76, 77, 78)
MULTIPLY(160, 80, 81, 82)
MULTIPLY(256, 128, 129, 130)

#undef MULTIPLY
#undef D_8
#undef D_16
#undef D_24
#undef D_32
#undef D_40
#undef D_48
#undef D_56
#undef D_64
#undef D_72
#undef D_80
#undef D_88
#undef D_96
#undef D_104
#undef D_112
#undef D_120
#undef D_128
#undef D_136
#undef D_144
#undef D_152
#undef D_160
#undef D_256
#undef N_8
#undef N_16
#undef N_24
#undef N_32
#undef N_40
#undef N_48
#undef N_56
#undef N_64
#undef N_72
#undef N_80
#undef N_88
#undef N_96
#undef N_104
#undef N_112
#undef N_120
#undef N_128
#undef N_136
#undef N_144
#undef N_152
#undef N_160
#undef N_256
#undef D4

} // namespace wgmma

#endif
