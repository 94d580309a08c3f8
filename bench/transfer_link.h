/* transfer_link.h -- rates of the parts that a transfer over TLS is made of, in GB/s; 0: it did not work. */
#ifndef BENCH_TRANSFER_LINK_H
#define BENCH_TRANSFER_LINK_H

#include <stddef.h>
#include <stdint.h>

#define TRANSFER_READ   (64u << 10) /* at a time */
#define TRANSFER_WINDOW (64u << 20) /* peers.in_flight: where bytes land, again and again */

/* Two ends of a connection over loopback. -1: there is none. */
int transfer_connect(int fds[2]);
/* These bytes over TCP on loopback, sent in pieces of 16 KiB, a thread on each side. */
double transfer_tcp_rate(uint8_t *memory, size_t bytes);
/* The same through AES-128-GCM, records of 16 KiB, on one thread. */
double transfer_cipher_rate(const uint8_t *memory, size_t bytes);
/* The same by OpenSSL alone, TLS 1.3 over loopback with that cipher, a thread on each side. */
double transfer_tls_rate(uint8_t *memory, size_t bytes);

#endif
