/* TLS 1.3 with external PSKs: OpenSSL's callbacks, errors and key updates. */
#include "net/tls.h"

#include "kv/env.h"

#include <errno.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <openssl/ssl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define CIPHER       "TLS_AES_128_GCM_SHA256"
#define RECORD_MOST  ((size_t)SSL3_RT_MAX_PLAIN_LENGTH)
#define BUFFER_BYTES (8 * (RECORD_MOST + 32)) /* records with their heads and tags */

static const unsigned char cipher_id_[] = {0x13, 0x01};

struct kvd_tls {
	SSL *ssl;
	kvd_key_ring_t ring;
	kvd_pair_key_t key;
	int fd, is_dialler, has_key, is_old, is_open, wants_write;
	int is_sender;                  /* the buffer has what is sent */
	uint32_t records, records_most; /* sent under the key of now */
	uint64_t renewals;
	uint8_t *buffer; /* between OpenSSL and the socket, in one direction; NULL: none */
	size_t buffer_at, buffer_len;
	uint64_t sent; /* out of the buffer */
};

/* ---- keys ------------------------------------------------------------------------------------ */

static void derive(kv_slice_t secret, const char *label, uint8_t out[KVD_PSK_BYTES])
{
	unsigned int n = KVD_PSK_BYTES;

	kv_assert(HMAC(EVP_sha256(), secret.data, (int)secret.len, (const uint8_t *)label, strlen(label), out, &n) &&
		  n == KVD_PSK_BYTES);
}

/* Names have no '>' and no '#'. */
void kvd_pair_key_init(kvd_pair_key_t *key, const char *own_name, const char *peer, kv_slice_t secret)
{
	uint8_t number[KVD_PSK_BYTES];

	memset(key, 0, sizeof *key);
	derive(secret, "kvd peers, TLS 1.3 PSK", key->psk);
	derive(secret, "kvd peers, number of the key", number);
	memcpy(&key->number, number, sizeof key->number);
	snprintf(key->peer, sizeof key->peer, "%s", peer);
	snprintf(key->to_peer, sizeof key->to_peer, "kvd %s>%s#%08x", own_name, peer, key->number);
	snprintf(key->from_peer, sizeof key->from_peer, "kvd %s>%s#%08x", peer, own_name, key->number);
}

int kvd_tls_equal(const void *a, const void *b, size_t len)
{
	return CRYPTO_memcmp(a, b, len) == 0;
}

static SSL_SESSION *make_session(SSL *ssl, const kvd_pair_key_t *key)
{
	SSL_SESSION *session = SSL_SESSION_new();

	if (session && SSL_SESSION_set1_master_key(session, key->psk, sizeof key->psk) &&
	    SSL_SESSION_set_cipher(session, SSL_CIPHER_find(ssl, cipher_id_)) &&
	    SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION)) {
		return session;
	}
	SSL_SESSION_free(session);

	return NULL;
}

/* ---- OpenSSL's callbacks --------------------------------------------------------------------- */

static int use_key(SSL *ssl, const EVP_MD *md, const unsigned char **p_identity, size_t *p_len, SSL_SESSION **p_session)
{
	const kvd_tls_t *tls = SSL_get_app_data(ssl);

	*p_session = NULL;
	if (md && EVP_MD_get_type(md) != NID_sha256) {
		return 1; /* asked for again after a retry; never with this cipher */
	}
	*p_identity = (const unsigned char *)tls->key.to_peer;
	*p_len = strlen(tls->key.to_peer);
	*p_session = make_session(ssl, &tls->key);

	return *p_session != NULL;
}

/* An identity is that of a key whole, or unknown. */
static int find_key(SSL *ssl, const unsigned char *identity, size_t len, SSL_SESSION **p_session)
{
	kvd_tls_t *tls = SSL_get_app_data(ssl);
	const kvd_pair_key_t *key;

	*p_session = NULL;
	for (uint32_t i = 0; (key = tls->ring.at(tls->ring.ctx, i)); i++) {
		if (strlen(key->from_peer) == len && memcmp(key->from_peer, identity, len) == 0) {
			tls->key = *key;
			tls->has_key = 1;
			*p_session = make_session(ssl, key);
			return *p_session != NULL;
		}
	}

	return 1; /* none: the handshake goes on, and finds that there is no certificate */
}

/* ---- contexts -------------------------------------------------------------------------------- */

static SSL_CTX *make_context(int is_dialler)
{
	SSL_CTX *context = SSL_CTX_new(is_dialler ? TLS_client_method() : TLS_server_method());

	if (!context || !SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) ||
	    !SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION) || !SSL_CTX_set_ciphersuites(context, CIPHER) ||
	    !SSL_CTX_set1_groups_list(context, "X25519:P-256") || !SSL_CTX_set_num_tickets(context, 0)) {
		SSL_CTX_free(context);
		return NULL;
	}
	SSL_CTX_set_options(context, SSL_OP_NO_TICKET);
	SSL_CTX_clear_options(context, SSL_OP_ENABLE_MIDDLEBOX_COMPAT);
	SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
	SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
	if (is_dialler) {
		SSL_CTX_set_verify(context, SSL_VERIFY_PEER, NULL); /* no certificate is good */
		SSL_CTX_set_psk_use_session_callback(context, use_key);
	} else {
		SSL_CTX_set_psk_find_session_callback(context, find_key);
	}

	return context;
}

static int random_bytes(unsigned char *out, int n)
{
	kv_random(&kv_env_posix, out, (size_t)n);

	return 1;
}

static int random_status(void)
{
	return 1;
}

/* Where getrandom is refused OpenSSL has no randomness: it reads no device, and kv_random() does. */
static void ensure_randomness(void)
{
	static const RAND_METHOD own = {.bytes = random_bytes, .pseudorand = random_bytes, .status = random_status};
	unsigned char byte;

	if (RAND_bytes(&byte, 1) != 1) {
		ERR_clear_error();
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* another way is a provider, 100 lines */
		(void)RAND_set_rand_method(&own);
#pragma GCC diagnostic pop
	}
}

static kvd_tls_t *create(int fd, int is_dialler)
{
	static SSL_CTX *contexts[2];
	kvd_tls_t *tls = calloc(1, sizeof *tls);

	if (!contexts[is_dialler]) {
		ensure_randomness();
		contexts[is_dialler] = make_context(is_dialler);
	}
	if (!tls || !contexts[is_dialler] || !(tls->ssl = SSL_new(contexts[is_dialler])) || !SSL_set_fd(tls->ssl, fd)) {
		kvd_tls_free(tls);
		return NULL;
	}
	tls->fd = fd;
	tls->is_dialler = is_dialler;
	tls->records_most = KVD_TLS_RECORDS;
	SSL_set_app_data(tls->ssl, tls);

	return tls;
}

kvd_tls_t *kvd_tls_dial(int fd, const kvd_pair_key_t *key)
{
	kvd_tls_t *tls = create(fd, 1);

	if (tls) {
		tls->key = *key;
		SSL_set_connect_state(tls->ssl);
	}

	return tls;
}

kvd_tls_t *kvd_tls_accept(int fd, kvd_key_ring_t ring)
{
	kvd_tls_t *tls = create(fd, 0);

	if (tls) {
		tls->ring = ring;
		SSL_set_accept_state(tls->ssl);
	}

	return tls;
}

void kvd_tls_free(kvd_tls_t *tls)
{
	if (tls) {
		SSL_free(tls->ssl);
		free(tls->buffer);
		OPENSSL_cleanse(&tls->key, sizeof tls->key);
		free(tls);
	}
}

/* ---- many records in one call ------------------------------------------------------------------ */

static int has_unsent(const kvd_tls_t *tls)
{
	return tls->is_sender && tls->buffer_at < tls->buffer_len;
}

static int write_record(BIO *bio, const char *data, int len)
{
	kvd_tls_t *tls = BIO_get_data(bio);
	kv_status_t status = KV_OK;

	BIO_clear_retry_flags(bio);
	if (tls->buffer_len + (size_t)len > BUFFER_BYTES) {
		status = kvd_tls_flush(tls);
	}
	if (status == KV_PENDING) {
		BIO_set_retry_write(bio);
	}
	if (status != KV_OK) {
		return -1;
	}
	memcpy(tls->buffer + tls->buffer_len, data, (size_t)len);
	tls->buffer_len += (size_t)len;

	return len;
}

/* OpenSSL's own read-ahead moves all that it has at each record. */
static int read_part(BIO *bio, char *out, int cap)
{
	kvd_tls_t *tls = BIO_get_data(bio);
	ssize_t n = (ssize_t)(tls->buffer_len - tls->buffer_at);

	BIO_clear_retry_flags(bio);
	if (n == 0) {
		n = recv(tls->fd, tls->buffer, BUFFER_BYTES, 0);
		if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
			BIO_set_retry_read(bio);
		}
		if (n <= 0) {
			return (int)n;
		}
		tls->buffer_at = 0;
		tls->buffer_len = (size_t)n;
	}
	n = n < cap ? n : cap;
	memcpy(out, tls->buffer + tls->buffer_at, (size_t)n);
	tls->buffer_at += (size_t)n;

	return (int)n;
}

/* OpenSSL flushes behind a KeyUpdate, and forgets it where it would have to wait. Here it never has to:
 * kvd_tls_flush() sends what is in the buffer. */
static long control_buffer(BIO *bio, int what, long number, void *ptr)
{
	(void)bio;
	(void)number;
	(void)ptr;

	return what == BIO_CTRL_FLUSH;
}

kv_status_t kvd_tls_buffer(kvd_tls_t *tls, int is_sender)
{
	static BIO_METHOD *method;
	BIO *bio;

	if (!method && (method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "many records"))) {
		BIO_meth_set_write(method, write_record);
		BIO_meth_set_read(method, read_part);
		BIO_meth_set_ctrl(method, control_buffer);
	}
	bio = method ? BIO_new(method) : NULL;
	tls->buffer = bio ? malloc(BUFFER_BYTES) : NULL;
	if (!tls->buffer) {
		BIO_free(bio);
		return KV_ERR_NOMEM;
	}
	BIO_set_data(bio, tls);
	BIO_set_init(bio, 1);
	if (is_sender) {
		SSL_set0_wbio(tls->ssl, bio);
	} else {
		SSL_set0_rbio(tls->ssl, bio);
	}
	tls->is_sender = is_sender;

	return KV_OK;
}

kv_status_t kvd_tls_flush(kvd_tls_t *tls)
{
	while (has_unsent(tls)) {
		const ssize_t n =
			send(tls->fd, tls->buffer + tls->buffer_at, tls->buffer_len - tls->buffer_at, MSG_NOSIGNAL);

		if (n < 0) {
			return errno == EAGAIN || errno == EINTR ? KV_PENDING : KV_ERR_CLOSED;
		}
		tls->sent += (uint64_t)n;
		tls->buffer_at += (size_t)n;
		if (tls->buffer_at == tls->buffer_len) {
			tls->buffer_at = tls->buffer_len = 0;
		}
	}

	return KV_OK;
}

/* ---- what OpenSSL answers -------------------------------------------------------------------- */

static kv_status_t status_of_reason(const kvd_tls_t *tls, int reason)
{
	switch (reason) {
	case SSL_R_UNEXPECTED_EOF_WHILE_READING:
		return KV_ERR_CLOSED;
	case SSL_R_UNSUPPORTED_PROTOCOL:
	case SSL_R_VERSION_TOO_LOW:
		return KV_ERR_VERSION;
	case SSL_R_BINDER_DOES_NOT_VERIFY:
	case SSL_R_DECRYPTION_FAILED_OR_BAD_RECORD_MAC:
	case SSL_R_DIGEST_CHECK_FAILED: /* of a handshake that was changed */
	case SSL_R_CERTIFICATE_VERIFY_FAILED:
		return KV_ERR_SECRET;
	case SSL_R_NO_SUITABLE_SIGNATURE_ALGORITHM:
	case SSL_R_MISSING_SIGALGS_EXTENSION:
	case SSL_R_NO_SHARED_SIGNATURE_ALGORITHMS:
		return tls->has_key ? KV_ERR_PROTO : KV_ERR_NOT_FOUND;
	default:
		/* What the other side says of our handshake: that it does not know the key, or has another one. */
		return tls->is_dialler && !tls->is_open && reason >= SSL_AD_REASON_OFFSET ? KV_ERR_SECRET
											  : KV_ERR_PROTO;
	}
}

/* Of a call that has failed. */
static kv_status_t status_of(kvd_tls_t *tls, int result)
{
	const int error = errno, what = SSL_get_error(tls->ssl, result);
	kv_status_t status = KV_ERR_CLOSED;

	tls->wants_write = what == SSL_ERROR_WANT_WRITE;
	if (what == SSL_ERROR_WANT_READ || what == SSL_ERROR_WANT_WRITE) {
		return KV_PENDING;
	}
	if (what == SSL_ERROR_SSL) {
		status = status_of_reason(tls, ERR_GET_REASON(ERR_peek_error()));
	}
	ERR_clear_error();
	errno = error;

	return status;
}

/* Its HELLO comes whole, or it is taken for garbage. */
static int is_old(const kvd_tls_t *tls)
{
	uint32_t magic = 0;

	return !tls->is_dialler && BIO_number_read(SSL_get_rbio(tls->ssl)) == 0 &&
	       recv(tls->fd, &magic, sizeof magic, MSG_PEEK | MSG_DONTWAIT) == sizeof magic && magic == KVD_NET_MAGIC;
}

kv_status_t kvd_tls_handshake(kvd_tls_t *tls)
{
	int result;

	if (is_old(tls)) {
		tls->is_old = 1;
		return KV_ERR_VERSION;
	}
	ERR_clear_error();
	result = SSL_do_handshake(tls->ssl);
	if (result != 1) {
		kv_status_t status = status_of(tls, result);

		return status == KV_PENDING && BIO_number_read(SSL_get_rbio(tls->ssl)) > KVD_TLS_EARLY_BYTES
			       ? KV_ERR_TOO_BIG
			       : status;
	}
	if (!SSL_session_reused(tls->ssl)) {
		return KV_ERR_SECRET; /* OpenSSL's word for: with the PSK */
	}
	tls->is_open = tls->has_key = 1;
	tls->wants_write = 0;

	return KV_OK;
}

kv_status_t kvd_tls_read(kvd_tls_t *tls, void *out, size_t cap, size_t *p_n)
{
	ERR_clear_error();

	return SSL_read_ex(tls->ssl, out, cap, p_n) ? KV_OK : status_of(tls, 0);
}

kv_status_t kvd_tls_write(kvd_tls_t *tls, const void *data, size_t len, size_t *p_n)
{
	ERR_clear_error();
	if (tls->records >= tls->records_most) {
		/* For what we send; the other side counts its own. It goes in front of these bytes. */
		if (!SSL_key_update(tls->ssl, SSL_KEY_UPDATE_NOT_REQUESTED)) {
			return status_of(tls, 0);
		}
		tls->records = 0;
		tls->renewals++;
	}
	if (!SSL_write_ex(tls->ssl, data, len < RECORD_MOST ? len : RECORD_MOST, p_n)) {
		return status_of(tls, 0);
	}
	tls->wants_write = 0;
	tls->records++;

	return KV_OK;
}

uint64_t kvd_tls_sent(const kvd_tls_t *tls)
{
	return tls->sent;
}

int kvd_tls_wants_write(const kvd_tls_t *tls)
{
	return tls->wants_write || has_unsent(tls);
}

const kvd_pair_key_t *kvd_tls_key(const kvd_tls_t *tls)
{
	return tls->has_key ? &tls->key : NULL;
}

int kvd_tls_is_old(const kvd_tls_t *tls)
{
	return tls->is_old;
}

void kvd_tls_set_records(kvd_tls_t *tls, uint32_t records)
{
	tls->records_most = records;
}

uint64_t kvd_tls_renewals(const kvd_tls_t *tls)
{
	return tls->renewals;
}
