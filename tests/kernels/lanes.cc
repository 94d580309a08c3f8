// The threads of a block in turns: one that is ready, drawn from a seed, runs to its next meeting. Bytes, digests and the
// order of things are the device's; speed is not.
#include "lanes.h"

#include <setjmp.h>
#include <ucontext.h>

lanes_dim threadIdx, blockIdx, blockDim, gridDim;
uint64_t lanes_given[2][LANES_THREADS];
unsigned lanes_exchanges[LANES_THREADS];
std::map<uint64_t *, lanes_copy> lanes_loads;
lanes_way lanes_ways[LANES_THREADS];

struct lane {
	ucontext_t context;
	jmp_buf at; // once it has begun: a system call cheaper
	bool has_begun;
	std::vector<uint8_t> stack;
};

struct meeting {
	int line;
	std::vector<unsigned> threads; // that have come
};

static lane lanes[LANES_THREADS];
static jmp_buf outside;
static void (*thread_body)();
static std::vector<unsigned> ready;
static meeting of_warp[LANES_THREADS / 32], of_block;
static unsigned alive, blocks_left;
static uint64_t rng = 1;

extern "C" void lanes_seed(uint64_t seed)
{
	rng = seed;
}

static unsigned below(size_t n)
{
	uint64_t z = rng += 0x9e3779b97f4a7c15u;

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;

	return (unsigned)((z ^ (z >> 31)) % n);
}

// ---- meeting ------------------------------------------------------------------------------------

static void leave()
{
	if (_setjmp(lanes[threadIdx.x].at) == 0) {
		_longjmp(outside, 1);
	}
}

static void end_if_all(meeting &m, unsigned all)
{
	if (m.threads.size() == all) {
		ready.insert(ready.end(), m.threads.begin(), m.threads.end());
		m.threads.clear();
	}
}

static void meet(meeting &m, int line, unsigned all)
{
	LANES_CHECK(m.threads.empty() || m.line == line); // all of them meet at the same place
	m.line = line;
	m.threads.push_back(threadIdx.x);
	end_if_all(m, all);
	leave();
}

void lanes_meet(int line)
{
	meet(of_warp[threadIdx.x / 32], line, 32);
}

void lanes_meet_block(int line)
{
	meet(of_block, line, alive);
}

void lanes_pass()
{
	ready.push_back(threadIdx.x);
	leave();
}

// ---- running ------------------------------------------------------------------------------------

static void run_thread()
{
	thread_body();
	end_if_all(of_block, --alive);
	_longjmp(outside, 1);
}

static void open_thread(unsigned i)
{
	lane &l = lanes[i];

	l.stack.resize(256 << 10);
	l.has_begun = false;
	lanes_exchanges[i] = 0;
	lanes_ways[i].loads.clear(); // empty ones may be left
	getcontext(&l.context);
	l.context.uc_stack.ss_sp = l.stack.data();
	l.context.uc_stack.ss_size = l.stack.size();
	makecontext(&l.context, run_thread, 0);
	ready.push_back(i);
}

static void go_on(unsigned i)
{
	threadIdx.x = i;
	if (_setjmp(outside) == 0) {
		if (lanes[i].has_begun) {
			_longjmp(lanes[i].at, 1);
		}
		lanes[i].has_begun = true;
		setcontext(&lanes[i].context);
	}
}

bool lanes_all_stored()
{
	for (const lanes_way &way : lanes_ways) {
		if (!way.stores.empty() || !way.landing.empty() || !way.store.empty()) {
			return false;
		}
	}

	return blocks_left == 0;
}

static void run_block(unsigned threads)
{
	const unsigned ahead = below(threads / 16); // a warp that mostly is; in every second block, none

	alive = threads;
	for (unsigned i = 0; i < threads; i++) {
		open_thread(i);
	}
	while (!ready.empty()) {
		unsigned at = below(ready.size()), i;

		for (unsigned tries = 0; tries < 16 && ready[at] / 32 != ahead; tries++) {
			at = below(ready.size());
		}
		i = ready[at];
		ready[at] = ready.back();
		ready.pop_back();
		go_on(i);
	}
	LANES_CHECK(alive == 0); // else some wait where the others do not come
	LANES_CHECK(lanes_loads.empty());
	for (const lanes_way &way : lanes_ways) {
		LANES_CHECK(way.stores.empty() && way.landing.empty() && way.store.empty() && way.load.empty());
	}
}

void lanes_run(unsigned grid, unsigned threads, void (*body)(), void *shared, size_t bytes, size_t room)
{
	std::vector<unsigned> blocks;

	LANES_CHECK(grid > 0 && threads > 0 && threads % 32 == 0 && threads <= LANES_THREADS && bytes <= room);
	for (unsigned i = 0; i < grid; i++) {
		blocks.insert(blocks.begin() + below(i + 1), i);
	}
	thread_body = body;
	gridDim.x = grid;
	blockDim.x = threads;
	for (blocks_left = grid; blocks_left-- > 0;) {
		blockIdx.x = blocks[blocks_left];
		memset(shared, 0xee, room);
		run_block(threads);
		for (size_t i = bytes; i < room; i++) {
			LANES_CHECK(((const uint8_t *)shared)[i] == 0xee);
		}
	}
}
