/* kv_cmocka.h -- cmocka with the headers it wants, in the order it wants. */
#ifndef KV_CMOCKA_H
#define KV_CMOCKA_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#endif
