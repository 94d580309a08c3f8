/* OpenSSL alone: the same bytes through TLS 1.3 over loopback, with a key that both sides have, and no daemon. */
#include "transfer_link.h"

#include "bench.h"

#include <openssl/ssl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define WRITE  (128u << 10) /* at a time: eight records */
#define KEY    32u
#define CIPHER "TLS_AES_128_GCM_SHA256"

typedef struct side {
	SSL *ssl;
	uint8_t *memory;
	size_t bytes;
	int has_failed;
} side_t;

static unsigned int tell_key(SSL *ssl, const char *hint, char *name, unsigned int name_max, unsigned char *key,
			     unsigned int key_max)
{
	(void)ssl;
	(void)hint;
	if (name_max < 2 || key_max < KEY) {
		return 0;
	}
	memcpy(name, "b", 2);
	memset(key, 7, KEY);

	return KEY;
}

static unsigned int find_key(SSL *ssl, const char *name, unsigned char *key, unsigned int key_max)
{
	char same[2];

	return name ? tell_key(ssl, NULL, same, sizeof same, key, key_max) : 0;
}

/* NULL: not possible. */
static SSL *open_side(int fd, int is_client)
{
	SSL_CTX *context = SSL_CTX_new(is_client ? TLS_client_method() : TLS_server_method());
	SSL *ssl = NULL;

	if (context && SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) &&
	    SSL_CTX_set_ciphersuites(context, CIPHER) && SSL_CTX_set_num_tickets(context, 0)) {
		SSL_CTX_set_psk_client_callback(context, tell_key);
		SSL_CTX_set_psk_server_callback(context, find_key);
		ssl = SSL_new(context);
	}
	SSL_CTX_free(context);
	if (ssl && !SSL_set_fd(ssl, fd)) {
		SSL_free(ssl);
		ssl = NULL;
	}

	return ssl;
}

static void *send_all(void *arg)
{
	side_t *side = arg;

	side->has_failed = SSL_connect(side->ssl) != 1;
	for (size_t at = 0; at < side->bytes && !side->has_failed;) {
		const size_t left = side->bytes - at;
		const int n = SSL_write(side->ssl, side->memory + at, (int)(left < WRITE ? left : WRITE));

		side->has_failed = n <= 0;
		at += n > 0 ? (size_t)n : 0;
	}

	return NULL;
}

static void receive_all(side_t *side)
{
	for (size_t at = 0; at < side->bytes && !side->has_failed;) {
		const int n = SSL_read(side->ssl, side->memory + at % TRANSFER_WINDOW, (int)TRANSFER_READ);

		side->has_failed = n <= 0;
		at += n > 0 ? (size_t)n : 0;
	}
}

double transfer_tls_rate(uint8_t *memory, size_t bytes)
{
	side_t from = {.memory = memory, .bytes = bytes};
	side_t to = {.memory = bench_memory(TRANSFER_WINDOW + TRANSFER_READ), .bytes = bytes};
	bench_sample_t sample = {0};
	bench_clock_t start;
	int fds[2] = {-1, -1};
	pthread_t sender;

	if (to.memory && transfer_connect(fds) == 0) {
		from.ssl = open_side(fds[0], 1);
		to.ssl = open_side(fds[1], 0);
		bench_fill(to.memory, TRANSFER_WINDOW + TRANSFER_READ, 2);
	}
	if (from.ssl && to.ssl && pthread_create(&sender, NULL, send_all, &from) == 0) {
		to.has_failed = SSL_accept(to.ssl) != 1;
		start = bench_start();
		receive_all(&to);
		shutdown(fds[1], SHUT_RDWR);
		pthread_join(sender, NULL);
		(void)bench_rate(start, (double)bytes, 1, &sample);
	}
	SSL_free(from.ssl);
	SSL_free(to.ssl);
	close(fds[0]);
	close(fds[1]);
	free(to.memory);

	return from.has_failed || to.has_failed ? 0 : sample.value;
}
