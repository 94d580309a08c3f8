/* Two looks make one: is this still the lease it was? Between them its place in the lease area may be given to the next
 * lease. */
#include "impl.h"

#include "kv_case.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>

#define PAGE ((size_t)4096)

/* A header that lies across two pages: `id` at the end of the first, `state` at the start of the second. Who looks at a
 * page that is closed finds that the daemon has given the place to lease 2 just then. */
static struct {
	uint8_t *pages;
	kv_lease_header_t *header;
	uint32_t turns;
} place;

static void next_lease(int signal_number, siginfo_t *info, void *context)
{
	(void)signal_number;
	(void)context;
	if ((uint8_t *)info->si_addr < place.pages || (uint8_t *)info->si_addr >= place.pages + 2u * PAGE) {
		abort();
	}
	(void)mprotect(place.pages, 2u * PAGE, PROT_READ | PROT_WRITE);
	atomic_store(&place.header->state, KV_LEASE_NONE);
	atomic_store(&place.header->id, 2);
	atomic_store(&place.header->state, KV_LEASE_ACTIVE);
	place.turns++;
}

/* What is said of lease 1, whose place changes hands when its page `closed` is looked at. */
static kv_status_t check_while(uint32_t state, uint32_t closed)
{
	kvc_map_t *map = calloc(1, sizeof *map);
	struct sigaction now = {.sa_sigaction = next_lease, .sa_flags = SA_SIGINFO}, before;
	kvc_grant_t grant = {.map = map, .id = 1, .kind = KV_LEASE_READ};
	kv_status_t status;

	place.pages = mmap(NULL, 2u * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	assert_ptr_not_equal(place.pages, MAP_FAILED);
	place.header = (kv_lease_header_t *)(void *)(place.pages + PAGE - offsetof(kv_lease_header_t, state));
	place.turns = 0;
	atomic_store(&place.header->id, 1);
	atomic_store(&place.header->state, state);
	grant.header = place.header;
	assert_int_equal(kvc_grant_check(&grant), state == KV_LEASE_ACTIVE ? KV_OK : KV_ERR_REVOKED);

	assert_int_equal(sigaction(SIGSEGV, &now, &before), 0);
	assert_int_equal(mprotect(place.pages + closed * PAGE, PAGE, PROT_NONE), 0);
	status = kvc_grant_check(&grant);
	assert_int_equal(mprotect(place.pages, 2u * PAGE, PROT_READ | PROT_WRITE), 0);
	assert_int_equal(sigaction(SIGSEGV, &before, NULL), 0);
	assert_in_range(place.turns, state == KV_LEASE_ACTIVE, 1);
	assert_int_equal(kvc_grant_check(&grant), place.turns ? KV_ERR_REVOKED : status);
	assert_int_equal(munmap(place.pages, 2u * PAGE), 0);
	free(map);

	return status;
}

KV_CASE(p1_an_ended_lease_is_not_taken_for_the_next_at_its_offset)
{
	for (uint32_t closed = 0; closed < 2; closed++) {
		assert_int_equal(check_while(KV_LEASE_REVOKED, closed), KV_ERR_REVOKED);
		assert_int_equal(check_while(KV_LEASE_ACTIVE, closed), KV_ERR_REVOKED);
	}
}

KV_CASES_MAIN(NULL, NULL)
