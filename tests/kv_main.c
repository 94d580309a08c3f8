/* The main() of a program of several files of tests. */
#include "kv_cmocka.h"

KV_TEST_MAIN(NULL, NULL)
