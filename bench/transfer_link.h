/* transfer_link.h -- rates of the parts that a transfer over TLS is made of, in GB/s; 0: it did not work. */
#ifndef BENCH_TRANSFER_LINK_H
#define BENCH_TRANSFER_LINK_H

#include <stddef.h>
#include <stdint.h>

/* These bytes over TCP on loopback, sent in pieces of 16 KiB, a thread on each side. */
double transfer_tcp_rate(uint8_t *memory, size_t bytes);
/* The same through AES-128-GCM, records of 16 KiB, on one thread. */
double transfer_cipher_rate(const uint8_t *memory, size_t bytes);

#endif
