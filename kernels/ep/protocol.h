/* protocol.h -- the arithmetic of epochs, slots and flags of expert-parallel dispatch and combine.
 *
 * Pure functions alone: device code, the CPU twin (twin.c) and the model checker (tests/kernels/ep/test_ep_model.c) use
 * the same ones.
 *
 * A rank numbers its dispatches 1, 2, 3, ... for as long as the group lives; the combine of a dispatch has its number.
 * Ranks number alike. Memory that a peer writes is divided into slots, and each source has two flags there, one for
 * dispatches and one for combines. A sender stores rows and counts, and then releases its flag with the number:
 * monotone, never reset.
 *
 * Why a slot needs no acknowledgement: dispatch n overwrites what dispatch n - k has left. It is sent after combine
 * n - k has arrived from every rank (kvk_ep_may_send()), and a rank sends that combine after it has read that dispatch.
 * Combine n overwrites combine n - k. It follows the arrival of dispatch n, which the owner has sent after it had read
 * combine n - k.
 */
#ifndef KVK_EP_PROTOCOL_H
#define KVK_EP_PROTOCOL_H

#include <stdint.h>

#ifdef __CUDACC__
#define KVK_EP_RULE static __host__ __device__ __forceinline__
#else
#define KVK_EP_RULE static inline
#endif

/* The slot of a number, of in_flight slots. */
KVK_EP_RULE uint32_t kvk_ep_slot(uint64_t number, uint32_t in_flight)
{
	return (uint32_t)(number % in_flight);
}

/* Has the source released that number? A flag may have gone on to later ones. */
KVK_EP_RULE int kvk_ep_has_arrived(uint64_t flag, uint64_t number)
{
	return flag >= number;
}

/* May that dispatch be sent by a rank that has read the combines up to `read`? */
KVK_EP_RULE int kvk_ep_may_send(uint64_t number, uint64_t read, uint32_t in_flight)
{
	return number <= read + in_flight;
}

/* A rank that gives up reports how far it has come, and for whom it waits: the number of its calls, the one that waits
 * included, and a bit a rank. Never 0. */
KVK_EP_RULE uint64_t kvk_ep_report(uint64_t calls, uint32_t missing)
{
	return calls << 8 | missing;
}

/* The ranks that are lost, a bit each; 0: nobody has reported. All ranks call the halves in one order. A rank that
 * waits because of another one has come further than that one, so those for whom the hindmost reporter waits wait for
 * nobody. */
KVK_EP_RULE uint32_t kvk_ep_name_lost(const uint64_t *reports, uint32_t ranks)
{
	uint64_t hindmost = UINT64_MAX;
	uint32_t lost = 0;

	for (uint32_t r = 0; r < ranks; r++) {
		if (reports[r] != 0 && reports[r] >> 8 <= hindmost) {
			lost = (reports[r] >> 8 == hindmost ? lost : 0) | (uint32_t)(reports[r] & 0xff);
			hindmost = reports[r] >> 8;
		}
	}

	return lost;
}

#endif
