/* The superblock in memory and as bytes: see super.h. */
#include "super.h"

#include "kv/digest.h"
#include "geometry.h"
#include "slothdr.h"

#define SUPER_MAGIC 0x524550555344564bull /* "KVDSUPER" */

/* All integers little-endian. Classes follow the head, then spaces. */
typedef struct raw_super {
	uint64_t magic;
	uint64_t check; /* XXH3-64 of the whole image, this field as 0 */
	uint32_t version;
	uint32_t head_bytes;
	uint64_t generation;
	uint64_t uuid;
	uint64_t bytes;
	uint32_t class_count;
	uint32_t space_count;
} raw_super_t;

typedef struct raw_class {
	char ns[KVS_SUPER_MAX_NS];
	uint32_t block_bytes;
	uint32_t heads;
	uint32_t leaves;
	uint32_t leaf_bytes;
	uint32_t page_bytes;
	uint32_t slots_per_file;
} raw_class_t;

/* Followed by identity_len bytes. */
typedef struct raw_space {
	uint8_t root[32];
	uint64_t epoch;
	char ns[KVS_SUPER_MAX_NS];
	uint32_t identity_len;
	uint32_t withdrawals;
} raw_space_t;

_Static_assert(sizeof(raw_super_t) == 56 && sizeof(raw_class_t) == 88 && sizeof(raw_space_t) == 112,
	       "superblock records");

kv_status_t kvs_super_init(kvs_super_t *super, const kv_env_t *env)
{
	*super = (kvs_super_t){.env = env, .bytes = sizeof(raw_super_t)};
	super->classes = kv_alloc(env, KVS_SUPER_MAX_CLASSES * sizeof *super->classes);
	if (!super->classes) {
		return KV_ERR_NOMEM;
	}

	return KV_OK;
}

void kvs_super_fini(kvs_super_t *super)
{
	for (uint32_t i = 0; i < super->space_count; i++) {
		kv_free(super->env, super->spaces[i].identity);
	}
	kv_free(super->env, super->spaces);
	kv_free(super->env, super->classes);
	super->spaces = NULL;
	super->classes = NULL;
	super->space_count = 0;
	super->class_count = 0;
}

kv_status_t kvs_super_class_add(kvs_super_t *super, const kvs_super_class_t *slot_class, uint32_t *p_class)
{
	/* An image over the limit would be written, but not read again. */
	if (super->class_count == KVS_SUPER_MAX_CLASSES || super->bytes + sizeof(raw_class_t) > KVS_SUPER_MAX_BYTES) {
		return KV_ERR_LIMIT;
	}

	super->classes[super->class_count] = *slot_class;
	super->bytes += sizeof(raw_class_t);
	*p_class = super->class_count++;

	return KV_OK;
}

/* Index of the space, or of the place where it belongs. */
static uint32_t space_place(const kvs_super_t *super, const uint8_t root[32], int *p_found)
{
	uint32_t low = 0;
	uint32_t high = super->space_count;

	*p_found = 0;
	while (low < high) {
		uint32_t middle = low + (high - low) / 2u;
		int order = memcmp(super->spaces[middle].root, root, 32);

		if (order == 0) {
			*p_found = 1;
			return middle;
		}
		if (order < 0) {
			low = middle + 1u;
		} else {
			high = middle;
		}
	}

	return low;
}

static kv_status_t spaces_grow(kvs_super_t *super)
{
	uint32_t cap = super->space_cap ? super->space_cap * 2u : 16u;
	void *grown;

	if (super->space_count < super->space_cap) {
		return KV_OK;
	}

	grown = kv_resize(super->env, super->spaces, super->space_cap * sizeof *super->spaces,
			  cap * sizeof *super->spaces);
	if (!grown) {
		return KV_ERR_NOMEM;
	}
	super->spaces = grown;
	super->space_cap = cap;

	return KV_OK;
}

static kv_status_t space_insert(kvs_super_t *super, uint32_t at, const raw_space_t *raw, const char *identity)
{
	kvs_super_space_t *space;
	kv_status_t status;
	char *text;

	if (super->space_count == KVS_SUPER_MAX_SPACES ||
	    super->bytes + sizeof *raw + raw->identity_len > KVS_SUPER_MAX_BYTES) {
		return KV_ERR_LIMIT;
	}
	status = spaces_grow(super);
	if (status != KV_OK) {
		return status;
	}
	text = kv_alloc(super->env, raw->identity_len + 1u);
	if (!text) {
		return KV_ERR_NOMEM;
	}

	space = &super->spaces[at];
	memmove(space + 1, space, (super->space_count - at) * sizeof *space);
	*space = (kvs_super_space_t){.epoch = raw->epoch,
				     .withdrawals = raw->withdrawals,
				     .identity = text,
				     .identity_len = raw->identity_len};
	memcpy(space->root, raw->root, sizeof space->root);
	memcpy(space->ns, raw->ns, KVS_SUPER_MAX_NS);
	memcpy(text, identity, raw->identity_len);
	super->space_count++;
	super->bytes += sizeof *raw + raw->identity_len;

	return KV_OK;
}

kv_status_t kvs_super_space_set(kvs_super_t *super, const uint8_t root[32], const char *ns, const char *identity,
				uint64_t epoch)
{
	raw_space_t raw = {.epoch = epoch};
	size_t identity_len = strlen(identity);
	size_t ns_len = strlen(ns);
	int found;
	uint32_t at = space_place(super, root, &found);

	if (found) {
		super->spaces[at].withdrawals = super->spaces[at].epoch == epoch ? super->spaces[at].withdrawals : 0;
		super->spaces[at].epoch = epoch;
		return KV_OK;
	}
	if (ns_len > KVS_SUPER_MAX_NS || identity_len > KVS_SUPER_MAX_IDENTITY) {
		return KV_ERR_TOO_BIG;
	}

	memcpy(raw.root, root, sizeof raw.root);
	memcpy(raw.ns, ns, ns_len);
	raw.identity_len = (uint32_t)identity_len;

	return space_insert(super, at, &raw, identity);
}

uint64_t kvs_super_last_epoch(const kvs_super_t *super)
{
	uint64_t last = 0;

	for (uint32_t i = 0; i < super->space_count; i++) {
		last = super->spaces[i].epoch > last ? super->spaces[i].epoch : last;
	}

	return last;
}

uint32_t kvs_super_spaces_drop(kvs_super_t *super, kvs_root_used_fn used, void *ctx)
{
	const uint64_t last = kvs_super_last_epoch(super);
	const uint32_t count = super->space_count;

	super->space_count = 0;
	for (uint32_t i = 0; i < count; i++) {
		const kvs_super_space_t space = super->spaces[i];

		if (space.epoch == last || used(ctx, space.root)) {
			super->spaces[super->space_count++] = space;
		} else {
			super->bytes -= sizeof(raw_space_t) + space.identity_len;
			kv_free(super->env, space.identity);
		}
	}

	return count - super->space_count;
}

kv_status_t kvs_super_space_withdraw(kvs_super_t *super, const uint8_t root[32])
{
	int found;
	uint32_t at = space_place(super, root, &found);

	if (!found) {
		return KV_MISS;
	}
	if (super->spaces[at].withdrawals >= KVS_SLOTHDR_MAX_WITHDRAWALS) {
		return KV_ERR_LIMIT;
	}
	super->spaces[at].withdrawals++;

	return KV_OK;
}

const kvs_super_space_t *kvs_super_space_find(const kvs_super_t *super, const uint8_t root[32])
{
	int found;
	uint32_t at = space_place(super, root, &found);

	return found ? &super->spaces[at] : NULL;
}

static uint8_t *encode_spaces(const kvs_super_t *super, uint8_t *p)
{
	for (uint32_t i = 0; i < super->space_count; i++) {
		const kvs_super_space_t *space = &super->spaces[i];
		raw_space_t raw = {
			.epoch = space->epoch, .identity_len = space->identity_len, .withdrawals = space->withdrawals};

		memcpy(raw.root, space->root, sizeof raw.root);
		memcpy(raw.ns, space->ns, sizeof raw.ns);
		memcpy(p, &raw, sizeof raw);
		memcpy(p + sizeof raw, space->identity, space->identity_len);
		p += sizeof raw + space->identity_len;
	}

	return p;
}

kv_status_t kvs_super_encode(kvs_super_t *super, uint8_t **p_image, size_t *p_len)
{
	raw_super_t head = {
		.magic = SUPER_MAGIC,
		.version = KVS_SUPER_VERSION,
		.head_bytes = sizeof head,
		.generation = super->generation + 1u,
		.uuid = super->uuid,
		.bytes = super->bytes,
		.class_count = super->class_count,
		.space_count = super->space_count,
	};
	uint8_t *image = kv_alloc(super->env, super->bytes);
	uint8_t *p;

	if (!image) {
		return KV_ERR_NOMEM;
	}

	p = image + sizeof head;
	for (uint32_t i = 0; i < super->class_count; i++) {
		const kvs_super_class_t *c = &super->classes[i];
		const kvs_geometry_t *g = &c->geometry;
		raw_class_t raw = {.block_bytes = g->block_bytes,
				   .heads = g->heads,
				   .leaves = g->leaves,
				   .leaf_bytes = g->leaf_bytes,
				   .page_bytes = g->page_bytes,
				   .slots_per_file = c->slots_per_file};

		memcpy(raw.ns, c->ns, sizeof raw.ns);
		memcpy(p, &raw, sizeof raw);
		p += sizeof raw;
	}
	p = encode_spaces(super, p);
	kv_assert(p == image + super->bytes);

	memcpy(image, &head, sizeof head);
	head.check = kv_digest(image, super->bytes);
	memcpy(image, &head, sizeof head);
	super->generation++;
	*p_image = image;
	*p_len = super->bytes;

	return KV_OK;
}

/* Everything up to the check: what the image claims to be. */
static kv_status_t check_head(const uint8_t *image, size_t len, raw_super_t *p_head)
{
	if (len < sizeof *p_head) {
		return KV_ERR_FOREIGN;
	}
	memcpy(p_head, image, sizeof *p_head);
	if (p_head->magic != SUPER_MAGIC) {
		return KV_ERR_FOREIGN;
	}
	if (p_head->version == 0 || p_head->version > KVS_SUPER_VERSION) {
		return KV_ERR_VERSION;
	}
	if (p_head->head_bytes != sizeof *p_head || p_head->bytes != len || len > KVS_SUPER_MAX_BYTES ||
	    p_head->class_count > KVS_SUPER_MAX_CLASSES || p_head->space_count > KVS_SUPER_MAX_SPACES) {
		return KV_ERR_CORRUPT;
	}

	return KV_OK;
}

size_t kvs_super_image_bytes(const uint8_t *file, size_t len)
{
	raw_super_t head;

	if (len < sizeof head) {
		return len;
	}
	memcpy(&head, file, sizeof head);

	return head.magic == SUPER_MAGIC && head.bytes >= sizeof head && head.bytes <= len ? (size_t)head.bytes : len;
}

/* XXH3-64 of the image with its check field as 0; the image stays as it is. */
static kv_status_t check_digest(const kv_env_t *env, const uint8_t *image, size_t len)
{
	raw_super_t head;
	uint64_t want;
	uint8_t *copy = kv_alloc(env, len);
	kv_status_t status;

	if (!copy) {
		return KV_ERR_NOMEM;
	}

	memcpy(copy, image, len);
	memcpy(&head, copy, sizeof head);
	want = head.check;
	head.check = 0;
	memcpy(copy, &head, sizeof head);
	status = kv_digest(copy, len) == want ? KV_OK : KV_ERR_CORRUPT;
	kv_free(env, copy);

	return status;
}

static kv_status_t decode_class(kvs_super_t *super, const raw_class_t *raw)
{
	kvs_super_class_t c = {
		.geometry = {.block_bytes = raw->block_bytes,
			     .heads = raw->heads,
			     .leaves = raw->leaves,
			     .leaf_bytes = raw->leaf_bytes,
			     .page_bytes = raw->page_bytes},
		.slots_per_file = raw->slots_per_file,
	};
	uint32_t id;

	if (kvs_geometry_check(&c.geometry) != KV_OK || raw->slots_per_file == 0 ||
	    raw->slots_per_file > KV_SLOT_MAX_INDEX + 1u) {
		return KV_ERR_CORRUPT;
	}
	memcpy(c.ns, raw->ns, sizeof raw->ns);

	return kvs_super_class_add(super, &c, &id);
}

static kv_status_t decode_spaces(kvs_super_t *super, const uint8_t *p, const uint8_t *end, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++) {
		raw_space_t raw;
		kv_status_t status;
		uint32_t at;
		int found;

		if ((size_t)(end - p) < sizeof raw) {
			return KV_ERR_CORRUPT;
		}
		memcpy(&raw, p, sizeof raw);
		p += sizeof raw;
		if (raw.identity_len > KVS_SUPER_MAX_IDENTITY || raw.identity_len > (size_t)(end - p)) {
			return KV_ERR_CORRUPT;
		}
		at = space_place(super, raw.root, &found);
		if (found) {
			return KV_ERR_CORRUPT;
		}
		status = space_insert(super, at, &raw, (const char *)p);
		if (status != KV_OK) {
			return status;
		}
		p += raw.identity_len;
	}

	return p == end ? KV_OK : KV_ERR_CORRUPT;
}

kv_status_t kvs_super_decode(kvs_super_t *super, const uint8_t *image, size_t len)
{
	const uint8_t *p = image + sizeof(raw_super_t);
	const uint8_t *end = image + len;
	raw_super_t head;
	kv_status_t status = check_head(image, len, &head);

	if (status == KV_OK) {
		status = check_digest(super->env, image, len);
	}
	if (status != KV_OK) {
		return status;
	}

	super->uuid = head.uuid;
	super->generation = head.generation;
	for (uint32_t i = 0; i < head.class_count; i++) {
		raw_class_t raw;

		if ((size_t)(end - p) < sizeof raw) {
			return KV_ERR_CORRUPT;
		}
		memcpy(&raw, p, sizeof raw);
		p += sizeof raw;
		status = decode_class(super, &raw);
		if (status != KV_OK) {
			return status;
		}
	}

	return decode_spaces(super, p, end, head.space_count);
}
