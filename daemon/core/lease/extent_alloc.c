#include "core/lease/extent_alloc.h"

static kvd_extent_t *extent_at(const kvd_extent_alloc_t *alloc, uint32_t id)
{
	return kvd_obj_at(alloc->extents, id);
}

/* Class c has extents of [2^c, 2^(c+1)) units. */
static uint32_t class_of(uint32_t units)
{
	return 31u - (uint32_t)__builtin_clz(units);
}

static void link_free(kvd_extent_alloc_t *alloc, uint32_t id)
{
	kvd_extent_t *extent = extent_at(alloc, id);
	uint32_t c = class_of(extent->units);

	extent->taken = 0;
	kvd_list_push_front(&alloc->free[c], alloc->extents, offsetof(kvd_extent_t, of_class), id);
	alloc->classes |= 1u << c;
	alloc->units_free += extent->units;
}

static void unlink_free(kvd_extent_alloc_t *alloc, uint32_t id)
{
	kvd_extent_t *extent = extent_at(alloc, id);
	uint32_t c = class_of(extent->units);

	kvd_list_remove(&alloc->free[c], alloc->extents, offsetof(kvd_extent_t, of_class), id);
	if (alloc->free[c].head == KVD_NONE) {
		alloc->classes &= ~(1u << c);
	}
	alloc->units_free -= extent->units;
	extent->taken = 1;
}

kv_status_t kvd_extent_alloc_init(kvd_extent_alloc_t *alloc, kvd_obj_pool_t *extents, void *base, uint64_t bytes,
				  uint32_t skip)
{
	uint32_t first = (skip + KVD_EXTENT_UNIT - 1) / KVD_EXTENT_UNIT;
	kv_status_t status;

	if (bytes / KVD_EXTENT_UNIT <= first || bytes / KVD_EXTENT_UNIT > INT32_MAX) {
		return KV_ERR_ARG;
	}
	*alloc = (kvd_extent_alloc_t){
		.extents = extents, .base = base, .units = (uint32_t)(bytes / KVD_EXTENT_UNIT) - first};
	for (uint32_t c = 0; c < KVD_EXTENT_CLASSES; c++) {
		alloc->free[c] = KVD_LIST_EMPTY;
	}
	status = kvd_obj_pool_get(extents, &alloc->first);
	if (status != KV_OK) {
		return status;
	}
	*extent_at(alloc, alloc->first) =
		(kvd_extent_t){.first = first, .units = alloc->units, .left = KVD_NONE, .right = KVD_NONE};
	link_free(alloc, alloc->first);

	return KV_OK;
}

void kvd_extent_alloc_fini(kvd_extent_alloc_t *alloc)
{
	uint32_t id = alloc->first;

	while (id != KVD_NONE) {
		uint32_t right = extent_at(alloc, id)->right;

		kvd_obj_pool_put(alloc->extents, id);
		id = right;
	}
	alloc->first = KVD_NONE;
}

/* A free extent of at least `units`: the head of the first class whose every member fits, else the head of the class
 * below if it does. */
static uint32_t find_free(const kvd_extent_alloc_t *alloc, uint32_t units)
{
	uint32_t c = class_of(units);
	uint32_t above = c + 1 < KVD_EXTENT_CLASSES ? alloc->classes & ~((2u << c) - 1u) : 0;

	if (alloc->free[c].head != KVD_NONE && extent_at(alloc, alloc->free[c].head)->units >= units) {
		return alloc->free[c].head;
	}
	if (above) {
		return alloc->free[__builtin_ctz(above)].head;
	}

	/* Bounded: all members of the class may be too small. */
	for (uint32_t id = alloc->free[c].head, tries = 0; id != KVD_NONE && tries < 16; tries++) {
		kvd_extent_t *extent = extent_at(alloc, id);

		if (extent->units >= units) {
			return id;
		}
		id = extent->of_class.next;
	}

	return KVD_NONE;
}

kv_status_t kvd_extent_take(kvd_extent_alloc_t *alloc, uint64_t bytes, uint32_t *p_extent, uint64_t *p_offset)
{
	uint64_t wanted = (bytes + KVD_EXTENT_UNIT - 1) / KVD_EXTENT_UNIT;
	uint32_t units = (uint32_t)wanted, id;
	kvd_extent_t *extent;

	if (wanted == 0 || wanted > alloc->units_free) {
		return KV_ERR_BUSY;
	}
	id = find_free(alloc, units);
	if (id == KVD_NONE) {
		return KV_ERR_BUSY;
	}

	extent = extent_at(alloc, id);
	if (extent->units > units) {
		uint32_t rest_id;
		kv_status_t status = kvd_obj_pool_get(alloc->extents, &rest_id);

		if (status != KV_OK) {
			return KV_ERR_BUSY;
		}
		unlink_free(alloc, id);
		*extent_at(alloc, rest_id) = (kvd_extent_t){.first = extent->first + units,
							    .units = extent->units - units,
							    .left = id,
							    .right = extent->right};
		if (extent->right != KVD_NONE) {
			extent_at(alloc, extent->right)->left = rest_id;
		}
		extent->right = rest_id;
		extent->units = units;
		link_free(alloc, rest_id);
	} else {
		unlink_free(alloc, id);
	}
	*p_extent = id;
	*p_offset = (uint64_t)extent->first * KVD_EXTENT_UNIT;

	return KV_OK;
}

/* `right` vanishes into `left`; neither is in a free list. */
static void merge_extents(kvd_extent_alloc_t *alloc, uint32_t left, uint32_t right)
{
	kvd_extent_t *l = extent_at(alloc, left), *r = extent_at(alloc, right);

	l->units += r->units;
	l->right = r->right;
	if (r->right != KVD_NONE) {
		extent_at(alloc, r->right)->left = left;
	}
	kvd_obj_pool_put(alloc->extents, right);
}

void kvd_extent_give(kvd_extent_alloc_t *alloc, uint32_t id)
{
	kvd_extent_t *extent = extent_at(alloc, id);
	uint32_t left = extent->left, right = extent->right;

	kv_assert(extent->taken);
	if (right != KVD_NONE && !extent_at(alloc, right)->taken) {
		unlink_free(alloc, right);
		merge_extents(alloc, id, right);
	}
	if (left != KVD_NONE && !extent_at(alloc, left)->taken) {
		unlink_free(alloc, left);
		merge_extents(alloc, left, id);
		id = left;
	}
	link_free(alloc, id);
}

int kvd_extent_alloc_check(const kvd_extent_alloc_t *alloc)
{
	uint64_t sum = 0, free_sum = 0;
	uint32_t before = KVD_NONE;
	int before_free = 0;

	for (uint32_t id = alloc->first; id != KVD_NONE; id = extent_at(alloc, id)->right) {
		const kvd_extent_t *extent = extent_at(alloc, id);

		if (extent->left != before || (before_free && !extent->taken)) {
			return 0;
		}
		if (before != KVD_NONE &&
		    extent_at(alloc, before)->first + extent_at(alloc, before)->units != extent->first) {
			return 0;
		}
		sum += extent->units;
		free_sum += extent->taken ? 0 : extent->units;
		before_free = !extent->taken;
		before = id;
	}

	return sum == alloc->units && free_sum == alloc->units_free;
}
