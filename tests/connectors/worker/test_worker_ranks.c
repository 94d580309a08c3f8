/* Tensor parallel degrees: what one number of ranks has saved, any other number loads, each rank its heads. Heads may
 * be fewer than ranks, as with few KV heads or one latent vector a token: then several ranks hold copies. */
#include "connectors/worker/wr.h"

#define BLOCK_BYTES(wr) ((uint64_t)(wr)->heads * WR_LAYERS * 32u * 32u * 4u)

static const wr_t copied = {.heads = 1, .latent = 1, .rank_count = 2};
static const wr_t four_heads[] = {
	{.heads = 4, .rank_count = 1}, {.heads = 4, .rank_count = 2}, {.heads = 4, .rank_count = 4}};
static const wr_t two_heads[] = {
	{.heads = 2, .rank_count = 1}, {.heads = 2, .rank_count = 2}, {.heads = 2, .rank_count = 4}};
static const wr_t latent[] = {{.heads = 1, .latent = 1, .rank_count = 1},
			      {.heads = 1, .latent = 1, .rank_count = 2},
			      {.heads = 1, .latent = 1, .rank_count = 4}};

WR_CASE(p1_what_any_degree_has_saved_any_other_loads, four_heads[0])
{
	uint64_t saved = 0;

	for (uint32_t r = 0; r < wr->rank_count; r++) {
		saved += wr_stats(wr, r).save_bytes;
	}
	assert_int_equal(saved, 8 * BLOCK_BYTES(wr)); /* each byte once, of copies too */
	for (uint32_t count = 1; count <= WR_MAX_RANKS; count *= 2) {
		kvc_lease_t *lease;
		wr_end_t end;

		wr_set_ranks(wr, count);
		wr_fill(wr, 2);
		lease = wr_lease(wr, 0, 8);
		wr_load(wr, lease, 0, &end);
		wr_drain(wr);
		assert_int_equal(end.loaded.status, KVC_OK);
		for (uint32_t r = 0; r < count; r++) {
			for (uint32_t i = 0; i < 8; i++) {
				assert_true(wr_block_is(&wr->rank[r], wr_other[i], 1, wr_eight[i]));
			}
		}
		wr_revoke(wr, lease);
	}
}
WR_ALSO(p1_what_any_degree_has_saved_any_other_loads, four_heads[1])
WR_ALSO(p1_what_any_degree_has_saved_any_other_loads, four_heads[2])
WR_ALSO(p1_what_any_degree_has_saved_any_other_loads, two_heads[0])
WR_ALSO(p1_what_any_degree_has_saved_any_other_loads, two_heads[1])
WR_ALSO(p1_what_any_degree_has_saved_any_other_loads, two_heads[2])
WR_ALSO(p1_what_any_degree_has_saved_any_other_loads, latent[0])
WR_ALSO(p1_what_any_degree_has_saved_any_other_loads, latent[1])
WR_ALSO(p1_what_any_degree_has_saved_any_other_loads, latent[2])

/* All ranks have computed with the bytes that one of them lacks, so none of what the step has computed is kept: each
 * rank hands in a part of every block. */
WR_CASE(p1_no_block_is_saved_after_a_load_has_failed_on_a_copy, copied)
{
	kvc_put_t *put = wr_put(wr, 8, 12);

	wr_message(wr);
	wr_add_save(wr, put, 0, wr_eight, 4);
	wr_add_load(wr, NULL, 0, 7, wr_other, 1);
	kvx_msg_finish(&wr->message, wr->step);
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		wr_t one = {.message = {0}};

		if (r == wr->rank_count - 1) { /* the last rank's message alone has the load that fails */
			kvx_worker_begin_step(wr->rank[r].worker, wr->message.data, wr->message.len);
			continue;
		}
		one.step = wr->step - 1;
		wr_message(&one);
		wr_add_save(&one, put, 0, wr_eight, 4);
		kvx_msg_finish(&one.message, one.step);
		kvx_worker_begin_step(wr->rank[r].worker, one.message.data, one.message.len);
		kvx_msg_free(&one.message);
	}
	wr_run_loads(wr);
	wr_end(wr);
	assert_int_equal(wr_put_wait(put), KVC_ERR_REVOKED);
}

WR_MAIN
