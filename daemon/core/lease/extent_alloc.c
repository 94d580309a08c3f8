#include "core/lease/extent_alloc.h"

static kvd_extent_t *extent_at(const kvd_area_t *area, uint32_t id)
{
	return kvd_pool_at(area->extents, id);
}

/* Class c refs extents of [2^c, 2^(c+1)) units. */
static uint32_t class_of(uint32_t units)
{
	return 31u - (uint32_t)__builtin_clz(units);
}

static void free_list_add(kvd_area_t *area, uint32_t id)
{
	kvd_extent_t *extent = extent_at(area, id);
	uint32_t c = class_of(extent->units);

	extent->taken = 0;
	kvd_list_push_front(&area->free[c], area->extents, offsetof(kvd_extent_t, of_class), id);
	area->classes |= 1u << c;
	area->units_free += extent->units;
}

static void free_list_remove(kvd_area_t *area, uint32_t id)
{
	kvd_extent_t *extent = extent_at(area, id);
	uint32_t c = class_of(extent->units);

	kvd_list_remove(&area->free[c], area->extents, offsetof(kvd_extent_t, of_class), id);
	if (area->free[c].head == KVD_NONE) {
		area->classes &= ~(1u << c);
	}
	area->units_free -= extent->units;
	extent->taken = 1;
}

kv_status_t kvd_area_init(kvd_area_t *area, kvd_pool_t *extents, void *base, uint64_t bytes, uint32_t skip)
{
	uint32_t first = (skip + KVD_AREA_UNIT - 1) / KVD_AREA_UNIT;
	kv_status_t status;

	if (bytes / KVD_AREA_UNIT <= first || bytes / KVD_AREA_UNIT > INT32_MAX) {
		return KV_ERR_ARG;
	}
	*area = (kvd_area_t){.extents = extents, .base = base, .units = (uint32_t)(bytes / KVD_AREA_UNIT) - first};
	for (uint32_t c = 0; c < KVD_AREA_CLASSES; c++) {
		area->free[c] = KVD_LIST_EMPTY;
	}
	status = kvd_pool_get(extents, &area->first);
	if (status != KV_OK) {
		return status;
	}
	*extent_at(area, area->first) =
		(kvd_extent_t){.first = first, .units = area->units, .left = KVD_NONE, .right = KVD_NONE};
	free_list_add(area, area->first);

	return KV_OK;
}

void kvd_area_fini(kvd_area_t *area)
{
	uint32_t id = area->first;

	while (id != KVD_NONE) {
		uint32_t right = extent_at(area, id)->right;

		kvd_pool_put(area->extents, id);
		id = right;
	}
	area->first = KVD_NONE;
}

/* A free extent of at least `units`: the head of the first class whose every member fits, else the head of the class
 * below if it does. */
static uint32_t find_free(const kvd_area_t *area, uint32_t units)
{
	uint32_t c = class_of(units);
	uint32_t above = c + 1 < KVD_AREA_CLASSES ? area->classes & ~((2u << c) - 1u) : 0;

	if (area->free[c].head != KVD_NONE && extent_at(area, area->free[c].head)->units >= units) {
		return area->free[c].head;
	}
	if (above) {
		return area->free[__builtin_ctz(above)].head;
	}

	for (uint32_t id = area->free[c].head, tries = 0; id != KVD_NONE && tries < 16; tries++) {
		kvd_extent_t *extent = extent_at(area, id);

		if (extent->units >= units) {
			return id;
		}
		id = extent->of_class.next;
	}

	return KVD_NONE;
}

kv_status_t kvd_area_take(kvd_area_t *area, uint64_t bytes, uint32_t *p_extent, uint64_t *p_offset)
{
	uint64_t wanted = (bytes + KVD_AREA_UNIT - 1) / KVD_AREA_UNIT;
	uint32_t units = (uint32_t)wanted, id;
	kvd_extent_t *extent;

	if (wanted == 0 || wanted > area->units_free) {
		return KV_ERR_BUSY;
	}
	id = find_free(area, units);
	if (id == KVD_NONE) {
		return KV_ERR_BUSY;
	}

	extent = extent_at(area, id);
	if (extent->units > units) {
		uint32_t rest_id;
		kv_status_t status = kvd_pool_get(area->extents, &rest_id);

		if (status != KV_OK) {
			return KV_ERR_BUSY;
		}
		free_list_remove(area, id);
		*extent_at(area, rest_id) = (kvd_extent_t){.first = extent->first + units,
							   .units = extent->units - units,
							   .left = id,
							   .right = extent->right};
		if (extent->right != KVD_NONE) {
			extent_at(area, extent->right)->left = rest_id;
		}
		extent->right = rest_id;
		extent->units = units;
		free_list_add(area, rest_id);
	} else {
		free_list_remove(area, id);
	}
	*p_extent = id;
	*p_offset = (uint64_t)extent->first * KVD_AREA_UNIT;

	return KV_OK;
}

/* `right` vanishes into `left`; neither is in a free list. */
static void absorb(kvd_area_t *area, uint32_t left, uint32_t right)
{
	kvd_extent_t *l = extent_at(area, left), *r = extent_at(area, right);

	l->units += r->units;
	l->right = r->right;
	if (r->right != KVD_NONE) {
		extent_at(area, r->right)->left = left;
	}
	kvd_pool_put(area->extents, right);
}

void kvd_area_give(kvd_area_t *area, uint32_t id)
{
	kvd_extent_t *extent = extent_at(area, id);
	uint32_t left = extent->left, right = extent->right;

	kv_assert(extent->taken);
	if (right != KVD_NONE && !extent_at(area, right)->taken) {
		free_list_remove(area, right);
		absorb(area, id, right);
	}
	if (left != KVD_NONE && !extent_at(area, left)->taken) {
		free_list_remove(area, left);
		absorb(area, left, id);
		id = left;
	}
	free_list_add(area, id);
}

int kvd_area_sound(const kvd_area_t *area)
{
	uint64_t sum = 0, free_sum = 0;
	uint32_t before = KVD_NONE;
	int before_free = 0;

	for (uint32_t id = area->first; id != KVD_NONE; id = extent_at(area, id)->right) {
		const kvd_extent_t *extent = extent_at(area, id);

		if (extent->left != before || (before_free && !extent->taken)) {
			return 0;
		}
		if (before != KVD_NONE &&
		    extent_at(area, before)->first + extent_at(area, before)->units != extent->first) {
			return 0;
		}
		sum += extent->units;
		free_sum += extent->taken ? 0 : extent->units;
		before_free = !extent->taken;
		before = id;
	}

	return sum == area->units && free_sum == area->units_free;
}
