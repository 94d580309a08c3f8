/* Messages between the daemon and its keeper. */
#include "keeper_socket.h"

#include "kv/env.h"
#include "kv/log.h"
#include "kv/sock.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define CAP_MIN 64u

/* ---- the queue ------------------------------------------------------------------------------- */

static int is_writer(const char *name)
{
	return strncmp(name, KVD_KEEPER_WRITER, sizeof KVD_KEEPER_WRITER - 1) == 0;
}

/* The entry waits no longer: it was sent, or taken back. */
static void clear_entry(kvd_keeper_queue_t *queue, kvd_keeper_entry_t *entry)
{
	queue->waiting -= entry->word.verb != 0;
	queue->writers -= entry->fd >= 0 && is_writer(entry->word.name);
	if (entry->fd >= 0 && strcmp(entry->word.name, KVD_KEEPER_CONFIG) == 0) {
		close(entry->fd);
	}
	entry->fd = -1;
	entry->word.verb = 0;
}

/* What was taken back goes first. */
static void compact(kvd_keeper_queue_t *queue)
{
	uint32_t kept = 0;

	for (uint32_t i = queue->first; i < queue->count; i++) {
		if (queue->entries[i].word.verb != 0) {
			queue->entries[kept++] = queue->entries[i];
		}
	}
	queue->first = 0;
	queue->count = kept;
}

static int grow(kvd_keeper_queue_t *queue, uint32_t more)
{
	uint32_t cap = queue->cap > CAP_MIN ? queue->cap : CAP_MIN;
	kvd_keeper_entry_t *entries;

	if (queue->count + more <= queue->cap) {
		return 1;
	}
	compact(queue);
	while (cap < queue->count + more || cap < 2u * queue->count) { /* so it is not compacted all the time */
		cap *= 2u;
	}
	if (cap <= queue->cap) {
		return 1;
	}
	entries = realloc(queue->entries, cap * sizeof *entries);
	if (!entries) {
		return queue->count + more <= queue->cap;
	}
	queue->entries = entries;
	queue->cap = cap;

	return 1;
}

kv_status_t kvd_keeper_reserve(kvd_keeper_queue_t *queue, uint32_t more)
{
	kv_status_t status = KV_OK;

	if (queue->fd < 0) {
		return KV_OK;
	}
	if (queue->waiting + more > KVD_KEEPER_NAMES) {
		status = KV_ERR_BUSY;
	} else if (!grow(queue, more)) {
		status = KV_ERR_NOMEM;
	}
	if (status != KV_OK) {
		kv_metric_add(queue->metrics, KV_M_KEEPER_REFUSED, 1);
	}

	return status;
}

/* The socket's answer: 1 sent, 0 not now, -1 never. */
static int try_send(const kvd_keeper_queue_t *queue, const kvd_keeper_entry_t *entry)
{
	if (kv_sock_send_message(queue->fd, &entry->word, sizeof entry->word, entry->fd, MSG_DONTWAIT) >= 0) {
		return 1;
	}
	if (errno == EAGAIN || errno == EINTR || errno == ENOBUFS || errno == ENOMEM || errno == ETOOMANYREFS) {
		return 0;
	}
	kv_log(KV_LOG_WARN, "keeper", "a descriptor was not handed in: name %s error \"%s\"", entry->word.name,
	       strerror(errno));

	return -1;
}

void kvd_keeper_flush(kvd_keeper_queue_t *queue)
{
	const uint32_t before = queue->count;

	while (queue->first < queue->count) {
		kvd_keeper_entry_t *entry = &queue->entries[queue->first];

		if (entry->word.verb != 0 && try_send(queue, entry) == 0) {
			break;
		}
		clear_entry(queue, entry);
		queue->first++;
	}
	if (queue->first == queue->count) {
		queue->first = queue->count = 0;
	}
	if (before > 0) {
		kv_metric_set(queue->metrics, KV_M_KEEPER_WAITING, queue->waiting);
	}
}

/* A message without a descriptor is not refused: it lets go of a name that the keeper holds, so there are as many at
 * most. */
static void append(kvd_keeper_queue_t *queue, char verb, const char *name, int fd)
{
	kvd_keeper_entry_t *entry;

	if (queue->fd < 0) {
		return;
	}
	if (fd >= 0 ? kvd_keeper_reserve(queue, 1) != KV_OK : !grow(queue, 1)) {
		kv_log(KV_LOG_WARN, "keeper", "no room for a message to the keeper, is it stopped? verb %c name %s",
		       verb, name);
		return;
	}
	entry = &queue->entries[queue->count++];
	*entry = (kvd_keeper_entry_t){.word.verb = verb, .fd = fd};
	snprintf(entry->word.name, sizeof entry->word.name, "%s", name);
	queue->waiting++;
	queue->writers += fd >= 0 && is_writer(name);
	kvd_keeper_flush(queue);
}

void kvd_keeper_hold(kvd_keeper_queue_t *queue, const char *name, int fd)
{
	append(queue, 'H', name, fd);
}

void kvd_keeper_keep(kvd_keeper_queue_t *queue, const char *name, int fd)
{
	append(queue, 'K', name, fd);
}

void kvd_keeper_drop(kvd_keeper_queue_t *queue, const char *name)
{
	for (uint32_t i = queue->first; i < queue->count; i++) {
		kvd_keeper_entry_t *entry = &queue->entries[i];

		if (entry->fd >= 0 && strcmp(entry->word.name, name) == 0) {
			clear_entry(queue, entry);
			if (is_writer(name)) {
				return; /* the keeper has never heard of it */
			}
		}
	}
	append(queue, 'D', name, -1);
}

void kvd_keeper_config(kvd_keeper_queue_t *queue, int fd)
{
	if (kvd_keeper_reserve(queue, 1) != KV_OK || queue->fd < 0) {
		close(fd);
		return;
	}
	append(queue, 'H', KVD_KEEPER_CONFIG, fd);
}

void kvd_keeper_serves(kvd_keeper_queue_t *queue)
{
	append(queue, 'S', "", -1);
}

void kvd_keeper_close(kvd_keeper_queue_t *queue, uint32_t wait_ms)
{
	const uint64_t until_ns = kv_now_ns(&kv_env_posix) + wait_ms * UINT64_C(1000000);
	struct pollfd room = {.fd = queue->fd, .events = POLLOUT};

	kvd_keeper_flush(queue);
	while (queue->count > 0 && kv_now_ns(&kv_env_posix) < until_ns) {
		(void)poll(&room, 1, 1);
		kvd_keeper_flush(queue);
	}
	while (queue->first < queue->count) {
		clear_entry(queue, &queue->entries[queue->first++]);
	}
	free(queue->entries);
	*queue = (kvd_keeper_queue_t){.fd = -1};
}

int kvd_keeper_answer(int keeper_fd, uint32_t names)
{
	kvd_word_t word = {.verb = 'T'};

	snprintf(word.name, sizeof word.name, "%u", names);

	return kv_sock_send_message(keeper_fd, &word, sizeof word, -1, MSG_DONTWAIT) == (ssize_t)sizeof word;
}

/* ---- the keeper's side ----------------------------------------------------------------------- */

int kvd_keeper_receive(int daemon_fd, kvd_word_t *word, int *p_fd)
{
	int fds[KV_WIRE_MAX_FDS];
	uint32_t count = 0;
	size_t len = 0;

	memset(word, 0, sizeof *word);
	if (kv_sock_recv(daemon_fd, (uint8_t *)word, sizeof *word, &len, fds, &count) != KV_OK) {
		return 0;
	}
	*p_fd = count == 1 ? fds[0] : -1;
	word->name[KVD_KEEPER_NAME - 1] = '\0';

	return 1;
}

void kvd_keeper_ask_end(int daemon_fd)
{
	if (send(daemon_fd, "E", 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
		kv_log(KV_LOG_WARN, "keeper", "the daemon cannot be asked to end: error \"%s\"", strerror(errno));
	}
}
