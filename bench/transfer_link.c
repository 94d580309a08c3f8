/* What transfer/tls-* is compared with: the same bytes over a plain TCP connection on loopback, a thread on each side,
 * and through the cipher of the connection, on one thread. */
#include "transfer_link.h"

#include "bench.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define RECORD (16u << 10)

typedef struct side {
	int fd;
	uint8_t *memory;
	size_t bytes;
	int has_failed;
} side_t;

static void *send_bytes(void *arg)
{
	side_t *side = arg;

	for (size_t at = 0; at < side->bytes && !side->has_failed;) {
		const size_t left = side->bytes - at;
		const ssize_t n = send(side->fd, side->memory + at, left < RECORD ? left : RECORD, MSG_NOSIGNAL);

		side->has_failed = n <= 0;
		at += n > 0 ? (size_t)n : 0;
	}

	return NULL;
}

static void receive_bytes(side_t *side)
{
	for (size_t at = 0; at < side->bytes && !side->has_failed;) {
		const ssize_t n = recv(side->fd, side->memory + at % TRANSFER_WINDOW, TRANSFER_READ, 0);

		side->has_failed = n <= 0;
		at += n > 0 ? (size_t)n : 0;
	}
}

int transfer_connect(int fds[2])
{
	struct sockaddr_in address = {.sin_family = AF_INET};
	socklen_t len = sizeof address;
	int listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	fds[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (bind(listening, (struct sockaddr *)&address, len) != 0 || listen(listening, 1) != 0 ||
	    getsockname(listening, (struct sockaddr *)&address, &len) != 0 ||
	    connect(fds[0], (struct sockaddr *)&address, len) != 0) {
		return -1;
	}
	fds[1] = accept(listening, NULL, NULL);
	close(listening);

	return fds[1] < 0 ? -1 : 0;
}

double transfer_tcp_rate(uint8_t *memory, size_t bytes)
{
	side_t from = {.memory = memory, .bytes = bytes},
	       to = {.memory = bench_memory(TRANSFER_WINDOW + TRANSFER_READ), .bytes = bytes};
	bench_sample_t sample = {0};
	pthread_t sender;
	bench_clock_t start;
	int fds[2] = {-1, -1};

	if (to.memory && transfer_connect(fds) == 0) {
		from.fd = fds[0];
		to.fd = fds[1];
		bench_fill(to.memory, TRANSFER_WINDOW + TRANSFER_READ, 2);
		start = bench_start();
		if (pthread_create(&sender, NULL, send_bytes, &from) == 0) {
			receive_bytes(&to);
			pthread_join(sender, NULL);
			(void)bench_rate(start, (double)bytes, 1, &sample);
		}
	}
	close(fds[0]);
	close(fds[1]);
	free(to.memory);

	return from.has_failed || to.has_failed ? 0 : sample.value;
}

double transfer_cipher_rate(const uint8_t *memory, size_t bytes)
{
	static uint8_t record[RECORD + 16];
	const uint8_t key[16] = {1}, iv[12] = {2};
	EVP_CIPHER_CTX *cipher = EVP_CIPHER_CTX_new();
	const bench_clock_t start = bench_start();
	bench_sample_t sample = {0};
	int n, is_right = cipher && EVP_EncryptInit_ex(cipher, EVP_aes_128_gcm(), NULL, key, iv);

	for (size_t at = 0; at + RECORD <= bytes && is_right; at += RECORD) {
		is_right = EVP_EncryptInit_ex(cipher, NULL, NULL, NULL, iv) &&
			   EVP_EncryptUpdate(cipher, record, &n, memory + at, RECORD) &&
			   EVP_EncryptFinal_ex(cipher, record + n, &n) &&
			   EVP_CIPHER_CTX_ctrl(cipher, EVP_CTRL_AEAD_GET_TAG, 16, record + RECORD);
	}
	(void)bench_rate(start, (double)bytes, 1, &sample);
	EVP_CIPHER_CTX_free(cipher);

	return is_right ? sample.value : 0;
}
