// gpu_ep_kill: two ranks of dispatch and combine (kvk/ep_gpu.h) as two processes, each on its own GPU where there are
// two. One is killed, or stands still for a time, in each phase of a step; the other one must name it in time, and its
// context must live. What has come before is compared with the twin's answer.
//   gpu_ep_kill [--times N] [--timeout-ms T]     of each phase, signal and link. Status 1: not so; 77: there is no GPU
#include "ep_batch.h"

#include <fcntl.h>
#include <map>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>

static const kvk_ep_shape_t shape = {2, 16, 4, 512, 64, 2, 2};

enum { RANKS = 2, NUMBERS = 5, FALLS_AT = 3, SEED = 4711 };
enum phase { BEFORE_SEND, SENT, SENT_AND_DONE, DISPATCHED, COMBINE_SENT, COMBINED, PHASES };
enum fall { KILL, STOP, STOP_SHORTLY, STOP_TOO_LONG, FALLS };

static const char *const PHASE_NAMES[] = {"before its dispatch", "its dispatch enqueued", "its dispatch sent", "its rows received", "its results sent", "its results received"};
static const char *const FALL_NAMES[] = {"killed", "stopped", "stopped for a quarter of the deadline", "stopped for twice the deadline"};

struct case_t {
	phase at;
	fall how;
	kvk_ep_link_kind_t link;
	uint64_t timeout_us;
};

static uint64_t now_us()
{
	return (uint64_t)std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---- a rank -------------------------------------------------------------------------------------

struct heap_t {
	kvk_ep_memory_t memory; // of a link through host memory
	void *mapped;           // of a GPU's
	kvk_cu_ptr_t address;   // as this rank's device reaches it
};

struct process_t {
	uint32_t rank;
	bool falls;
	case_t c;
	kvk_ep_plan_t plan;
	kvk_gpu_t *gpu;
	size_t bytes; // of a heap
	heap_t heaps[RANKS];
	kvk_ep_gpu_t *ep;
	cudaStream_t stream;
	kvk_bf16_t *rows, *outputs, *out;
	uint32_t *experts;
	float *weights;
};

template <typename T> static T *device_array(size_t n)
{
	T *p;

	CU(cudaMalloc(&p, n * sizeof(T)));

	return p;
}

static void map_heap(process_t &p, uint32_t rank, int fd)
{
	heap_t &heap = p.heaps[rank];

	if (p.c.link == KVK_EP_PEER) {
		must_kv(kvk_gpu_map(p.gpu, fd, p.bytes, &heap.mapped));
		heap.address = (kvk_cu_ptr_t)heap.mapped;
	} else {
		if (!heap.memory.base) {
			must_kv(kvk_ep_memory_map(fd, p.bytes, &heap.memory));
		}
		must_kv(kvk_gpu_register(p.gpu, heap.memory.base, heap.memory.bytes));
		must_kv(kvk_gpu_address(p.gpu, heap.memory.base, p.bytes, &heap.address));
	}
}

// Its descriptor.
static int make_heap(process_t &p)
{
	kvk_device_t *device;
	int fd;

	p.bytes = p.plan.heap_bytes;
	if (p.c.link != KVK_EP_PEER) {
		must_kv(kvk_ep_memory_create(p.bytes, &p.heaps[p.rank].memory, &fd));
		return fd;
	}
	must_kv(kvk_device_open(kvk_cuda_load(nullptr), kvk_gpu_uuid(p.gpu), &device));
	p.bytes = (p.bytes + kvk_device_grain(device) - 1) / kvk_device_grain(device) * kvk_device_grain(device);
	must_kv(kvk_device_alloc(device, p.bytes, &fd));
	kvk_device_close(device);

	return fd;
}

static void join(process_t &p, const char *directory)
{
	const int heap = make_heap(p);
	int heaps[KVK_EP_MAX_RANKS];
	kvk_ep_exchange_fault_t fault;
	const kvk_ep_exchange_t config = {&kv_env_posix, &p.plan, directory, p.rank, p.c.link, heap, 30000000};

	if (kvk_ep_exchange(&config, heaps, &fault) != KV_OK) {
		printf("rank %u: %s\n", p.rank, fault.why);
		exit(1);
	}
	for (uint32_t r = 0; r < RANKS; r++) {
		map_heap(p, r, r == p.rank ? heap : heaps[r]);
		close(r == p.rank ? heap : heaps[r]);
	}
}

static void open_rank(process_t &p, const char *directory)
{
	kvk_gpu_config_t config = {};
	kvk_ep_gpu_config_t ep = {};
	kvk_cu_ptr_t bases[RANKS];
	int count;

	CU(cudaGetDeviceCount(&count));
	config.cuda = kvk_cuda_load(nullptr);
	config.device = (int)p.rank % count;
	CU(cudaSetDevice(config.device));
	must_kv(kvk_gpu_open(&config, &p.gpu));
	must_kv(kvk_ep_plan(&shape, &p.plan, nullptr));
	join(p, directory);
	for (uint32_t r = 0; r < RANKS; r++) {
		bases[r] = p.heaps[r].address;
	}
	ep.gpu = p.gpu;
	ep.plan = &p.plan;
	ep.heaps = bases;
	ep.rank = p.rank;
	ep.link = p.c.link;
	ep.timeout_us = p.c.timeout_us;
	must_kv(kvk_ep_gpu_open(&ep, &p.ep));
	CU(cudaStreamCreateWithFlags(&p.stream, cudaStreamNonBlocking));
	p.rows = device_array<kvk_bf16_t>((size_t)shape.max_tokens * shape.hidden);
	p.out = device_array<kvk_bf16_t>((size_t)shape.max_tokens * shape.hidden);
	p.outputs = device_array<kvk_bf16_t>((size_t)p.plan.max_rows * shape.hidden);
	p.experts = device_array<uint32_t>((size_t)shape.max_tokens * shape.top_k);
	p.weights = device_array<float>((size_t)shape.max_tokens * shape.top_k);
}

static void close_rank(process_t &p)
{
	kvk_ep_gpu_close(p.ep);
	CU(cudaStreamDestroy(p.stream));
	for (void *at : {(void *)p.rows, (void *)p.out, (void *)p.outputs, (void *)p.experts, (void *)p.weights}) {
		CU(cudaFree(at));
	}
	for (heap_t &heap : p.heaps) {
		if (heap.mapped) {
			kvk_gpu_unmap(p.gpu, heap.mapped);
		} else {
			kvk_gpu_unregister(p.gpu, heap.memory.base);
			kvk_ep_memory_unmap(&heap.memory);
		}
	}
	kvk_gpu_close(p.gpu);
}

static void fall_at(const process_t &p, uint64_t number, phase at)
{
	if (p.falls && number == FALLS_AT && at == p.c.at) {
		raise(p.c.how == KILL ? SIGKILL : SIGSTOP);
	}
}

// Waits for what is enqueued. The other rank may be lost then, and that must have been noticed in time.
static kv_status_t await_stream(process_t &p, uint64_t since_us)
{
	kvk_ep_gpu_report_t report;

	CU(cudaStreamSynchronize(p.stream));
	const uint64_t waited_us = now_us() - since_us;
	const kv_status_t status = kvk_ep_gpu_check(p.ep, &report);

	if (status == KV_ERR_TIMEOUT) {
		printf("lost %u after %llu us\n", report.lost, (unsigned long long)waited_us);
	} else {
		must_kv(status);
	}

	return status;
}

static kv_status_t dispatch(process_t &p, uint64_t number, const batch_t &b, kvk_ep_gpu_rows_t *rows)
{
	const kvk_ep_tokens_t tokens = {b.n, b.most, p.rows, p.experts, p.weights};
	uint64_t given;

	CU(cudaMemcpyAsync(p.rows, b.rows.data(), b.rows.size() * 2, cudaMemcpyDefault, p.stream));
	CU(cudaMemcpyAsync(p.experts, b.experts.data(), b.experts.size() * 4, cudaMemcpyDefault, p.stream));
	CU(cudaMemcpyAsync(p.weights, b.weights.data(), b.weights.size() * 4, cudaMemcpyDefault, p.stream));
	fall_at(p, number, BEFORE_SEND);
	must_kv(kvk_ep_gpu_dispatch_send(p.ep, &tokens, (kvk_cu_stream_t)p.stream, &given));
	fall_at(p, number, SENT);
	CU(cudaStreamSynchronize(p.stream));
	fall_at(p, number, SENT_AND_DONE);
	const uint64_t since = now_us();
	must_kv(kvk_ep_gpu_dispatch_recv(p.ep, number, (kvk_cu_stream_t)p.stream, rows));

	return await_stream(p, since);
}

static kv_status_t combine(process_t &p, uint64_t number, const kvk_ep_gpu_rows_t &rows)
{
	run_experts<<<64, 128, 0, p.stream>>>(p.plan, p.rank, rows, p.outputs);
	must_kv(kvk_ep_gpu_reduce(p.ep, number, (kvk_cu_ptr_t)p.outputs, (kvk_cu_stream_t)p.stream));
	must_kv(kvk_ep_gpu_combine_send(p.ep, number, (kvk_cu_stream_t)p.stream));
	CU(cudaStreamSynchronize(p.stream));
	fall_at(p, number, COMBINE_SENT);
	const uint64_t since = now_us();
	must_kv(kvk_ep_gpu_combine_recv(p.ep, number, (kvk_cu_ptr_t)p.out, (kvk_cu_stream_t)p.stream));

	return await_stream(p, since);
}

// A step of both ranks by the twin, and this rank's part of it here.
static kv_status_t run_number(process_t &p, twins_t &twins, uint64_t number)
{
	std::vector<batch_t> batches;
	kvk_ep_gpu_rows_t rows;
	uint64_t given;

	for (uint32_t r = 0; r < RANKS; r++) {
		batches.push_back(make_batch(shape, r, (routing)(number % ROUTINGS), 0));
	}
	twins.dispatch(batches, &given);
	twins.combine(batches, number);
	kv_status_t status = dispatch(p, number, batches[p.rank], &rows);
	if (status == KV_OK) {
		fall_at(p, number, DISPATCHED);
		status = combine(p, number, rows);
	}
	if (status == KV_OK) {
		fall_at(p, number, COMBINED);
		rows_t seen((size_t)batches[p.rank].n * shape.hidden);

		CU(cudaMemcpy(seen.data(), p.out, seen.size() * 2, cudaMemcpyDefault));
		if (memcmp(seen.data(), twins.out[p.rank].data(), seen.size() * 2) != 0) {
			printf("rank %u: number %llu has other rows than the twin's\n", p.rank, (unsigned long long)number);
			exit(1);
		}
	}

	return status;
}

static int run_rank(char **args)
{
	process_t p = {};

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	setvbuf(stdout, nullptr, _IOLBF, 0);
	p.rank = (uint32_t)atoi(args[0]);
	p.falls = atoi(args[1]) != 0;
	p.c = {(phase)atoi(args[2]), (fall)atoi(args[3]), (kvk_ep_link_kind_t)atoi(args[4]), strtoull(args[5], nullptr, 10)};
	rng.seed(SEED + (uint64_t)p.c.at);
	open_rank(p, args[6]);
	twins_t twins(p.plan, p.c.link);
	for (uint64_t n = 1; n <= NUMBERS && run_number(p, twins, n) == KV_OK; n++) {
	}
	// Whatever became of the other rank.
	CU(cudaMemset(p.out, 0, 2));
	CU(cudaDeviceSynchronize());
	close_rank(p);
	printf("lives\n");

	return 0;
}

// ---- both ---------------------------------------------------------------------------------------

struct child_t {
	pid_t pid;
	int out;
};

static child_t start(uint32_t rank, bool falls, const case_t &c, const char *directory)
{
	const std::string texts[] = {std::to_string(rank), std::to_string(falls), std::to_string(c.at), std::to_string(c.how), std::to_string(c.link),
				     std::to_string(c.timeout_us)};
	std::vector<char *> args = {(char *)"gpu_ep_kill", (char *)"--rank"};
	posix_spawn_file_actions_t actions;
	child_t child;
	int ends[2];

	for (const std::string &text : texts) {
		args.push_back((char *)text.c_str());
	}
	args.push_back((char *)directory);
	args.push_back(nullptr);
	if (pipe2(ends, O_CLOEXEC) != 0) {
		exit(1);
	}
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
	if (posix_spawn(&child.pid, "/proc/self/exe", &actions, nullptr, args.data(), environ) != 0) {
		exit(1);
	}
	posix_spawn_file_actions_destroy(&actions);
	close(ends[1]);
	child.out = ends[0];

	return child;
}

// Its exit or signal, as waitpid() has it, or that it stands still; -1: it does neither for a minute, and is killed.
static int wait_for(const child_t &child)
{
	const uint64_t end = now_us() + 60000000;
	int status;

	while (waitpid(child.pid, &status, WUNTRACED | WNOHANG) == 0) {
		if (now_us() > end) {
			kill(child.pid, SIGKILL);
			waitpid(child.pid, nullptr, 0);
			return -1;
		}
		usleep(1000);
	}

	return status;
}

static std::string read_all(const child_t &child)
{
	std::string all;
	char some[512];
	ssize_t n;

	while ((n = read(child.out, some, sizeof some)) > 0) {
		all.append(some, (size_t)n);
	}
	close(child.out);

	return all;
}

// What the other rank must have said. *p_waited_us: how long after its receive it has named the lost one.
static bool is_as_it_must_be(const case_t &c, const std::string &said, uint64_t *p_waited_us)
{
	const bool lives = said.find("lives\n") != std::string::npos;
	unsigned long long waited = 0;
	uint32_t lost = 0;

	if (c.how == STOP_SHORTLY) {
		return said == "lives\n";
	}
	const int found = sscanf(said.c_str(), "lost %u after %llu us", &lost, &waited);
	*p_waited_us = waited;

	return lives && found == 2 && lost == 2 && waited * 2 <= c.timeout_us * 3;
}

// Rank 1 falls; rank 0 is watched.
static bool run_case(const case_t &c, const char *directory, uint64_t *p_waited_us)
{
	const child_t other = start(0, false, c, directory), victim = start(1, true, c, directory);
	int fell = wait_for(victim);

	if (c.how == STOP_SHORTLY || c.how == STOP_TOO_LONG) {
		usleep((useconds_t)(c.how == STOP_SHORTLY ? c.timeout_us / 4 : c.timeout_us * 2));
		kill(victim.pid, SIGCONT);
		fell = wait_for(victim);
	}
	const int ended = wait_for(other);
	if (fell != -1 && WIFSTOPPED(fell)) {
		kill(victim.pid, SIGKILL);
		waitpid(victim.pid, nullptr, 0);
	}
	const std::string said = read_all(other), victims = read_all(victim);
	const bool goes_on = c.how == STOP_SHORTLY || c.how == STOP_TOO_LONG;
	const bool is_good = ended == 0 && is_as_it_must_be(c, said, p_waited_us) && (goes_on ? fell == 0 && victims.find("lives\n") != std::string::npos : fell != -1 && !WIFEXITED(fell));

	if (!is_good) {
		printf("gpu_ep_kill: one %s, %s, link %d: the other one ends with %d, it with %d\n%s%s", FALL_NAMES[c.how], PHASE_NAMES[c.at], (int)c.link, ended, fell, said.c_str(),
		       victims.c_str());
	}

	return is_good;
}

static uint64_t free_bytes(uint32_t *p_gpus)
{
	kvk_device_info_t infos[16];
	uint64_t sum = 0;

	if (kvk_device_list(kvk_cuda_load(nullptr), infos, 16, p_gpus) != KV_OK) {
		return 0;
	}
	for (uint32_t i = 0; i < *p_gpus && i < 16; i++) {
		sum += infos[i].free_bytes;
	}

	return sum;
}

int main(int argc, char **argv)
{
	uint64_t times = 5, timeout_us = 500000, waited = 0, longest = 0;
	char directory[] = "/tmp/gpu_ep_kill.XXXXXX";
	uint32_t gpus = 0, cases = 0, good = 0;

	if (argc == 9 && strcmp(argv[1], "--rank") == 0) {
		return run_rank(argv + 2);
	}
	for (int i = 1; i + 1 < argc; i += 2) {
		times = strcmp(argv[i], "--times") == 0 ? strtoull(argv[i + 1], nullptr, 10) : times;
		timeout_us = strcmp(argv[i], "--timeout-ms") == 0 ? strtoull(argv[i + 1], nullptr, 10) * 1000 : timeout_us;
	}
	const uint64_t before = free_bytes(&gpus);
	if (before == 0 || !mkdtemp(directory)) {
		printf("gpu_ep_kill: skipped: there is no GPU\n");
		return 77;
	}
	for (uint64_t i = 0; i < times * PHASES * FALLS; i++) {
		const case_t c = {(phase)(i % PHASES), (fall)(i / PHASES % FALLS), (kvk_ep_link_kind_t)((i + i / (PHASES * FALLS)) % 3), timeout_us};

		cases++;
		good += run_case(c, directory, &waited);
		longest = std::max(longest, waited);
	}
	const uint64_t after = free_bytes(&gpus);
	rmdir(directory);
	const bool is_good = good == cases && after + (1u << 20) >= before;
	printf("gpu_ep_kill: %u of %u ranks in processes on %u GPUs were killed or stood still as must be; named after %.2f of the deadline at the longest; %lld KiB not back: %s\n", good, cases,
	       std::min(gpus, (uint32_t)RANKS), (double)longest / (double)timeout_us, (long long)(before - after) / 1024, is_good ? "good" : "BAD");

	return is_good ? 0 : 1;
}
