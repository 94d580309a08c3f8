#include "core/ends/numbers.h"
#include "core/base/find.h"
#include "core/ends/withdraw.h"

/* Smaller epochs are of a store that an older daemon has written: another space's may be the same, so it keeps its
 * number until it is reset. */
int kvd_number_is_named(const kvd_core_t *core, const kvd_space_t *space)
{
	const kvd_tree_t *tree = kvd_tree_at(&core->ix, space->tree);

	return space->users > 0 || space->handovers > 0 || space->leaving > 0 || tree->pins > 0 || tree->puts > 0 ||
	       space->epoch < KVD_FIRST_EPOCH || kvd_withdrawals_name(core, space);
}

static void take_back(kvd_core_t *core, kvd_space_t *space)
{
	kvd_ns_t *ns = core->ns[space->ns];

	kvd_mirror_set_epoch(&ns->mirror, space->id, 0);
	ns->numbers[space->id] = NULL;
	ns->number_count--;
	space->id = 0;
	kvd_count(core, KV_M_SPACES_CLOSED, 1);
}

int kvd_number_close(kvd_core_t *core, kvd_space_t *space)
{
	if (space->id != 0 && !kvd_number_is_named(core, space)) {
		take_back(core, space);
	}

	return space->id == 0;
}

kv_status_t kvd_number_find(kvd_core_t *core, uint32_t ns, uint32_t *p_number)
{
	kvd_ns_t *name_space = core->ns[ns];
	kvd_space_t *oldest = NULL;

	for (uint32_t id = 1; id < core->config.max_spaces; id++) {
		kvd_space_t *space = name_space->numbers[id];

		if (!space) {
			*p_number = id;
			name_space->spaces_refused = 0;
			return KV_OK;
		}
		if ((!oldest || space->used < oldest->used) && !kvd_number_is_named(core, space)) {
			oldest = space;
		}
	}
	name_space->spaces_refused = !oldest;
	if (!oldest) {
		kvd_count_ns(core, ns, KV_NM_SPACES_REFUSED, 1);
		return KV_ERR_LIMIT;
	}
	*p_number = oldest->id;
	take_back(core, oldest);

	return KV_OK;
}

int kvd_core_lacks_spaces(const kvd_core_t *core, uint32_t ns)
{
	return core->ns[ns]->spaces_refused;
}

void kvd_number_give(kvd_core_t *core, kvd_space_t *space, uint32_t number)
{
	kvd_ns_t *ns = core->ns[space->ns];

	space->id = number;
	ns->numbers[number] = space;
	ns->number_count++;
	ns->number_made = number > ns->number_made ? number : ns->number_made;
	kvd_mirror_set_epoch(&ns->mirror, number, space->epoch);
}

/* ---- members --------------------------------------------------------------------------------- */

void kvd_member_open_space(kvd_core_t *core, kvd_member_t id, kvd_space_t *space)
{
	kvd_member_rec_t *member = kvd_member_find(core, id);
	const uint64_t bit = UINT64_C(1) << space->id % 64u;

	space->used = ++core->stamp;
	if (member && member->open && !(member->spaces[space->id / 64u] & bit)) {
		member->spaces[space->id / 64u] |= bit;
		space->users++;
	}
}

static void drop_user(kvd_core_t *core, kvd_member_rec_t *member, uint32_t number)
{
	kvd_space_t *space = core->ns[kvd_instance_at(core, member->instance)->ns]->numbers[number];

	member->spaces[number / 64u] &= ~(UINT64_C(1) << number % 64u);
	space->users--;
	space->used = ++core->stamp;
}

kv_status_t kvd_member_close_space(kvd_core_t *core, kvd_member_t id, uint32_t number)
{
	kvd_member_rec_t *member = kvd_member_find(core, id);

	if (!member || number >= KV_MIRROR_MAX_SPACES ||
	    !(member->spaces[number / 64u] & UINT64_C(1) << number % 64u)) {
		return member ? KV_ERR_NOT_FOUND : KV_ERR_NOT_JOINED;
	}
	drop_user(core, member, number);

	return KV_OK;
}

void kvd_member_close_spaces(kvd_core_t *core, kvd_member_rec_t *member)
{
	for (uint32_t word = 0; word < KV_COUNT_OF(member->spaces); word++) {
		while (member->spaces[word]) {
			drop_user(core, member, word * 64u + (uint32_t)__builtin_ctzll(member->spaces[word]));
		}
	}
}
