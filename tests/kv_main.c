/* The main() of every program of tests that has none of its own. */
#include "kv_cmocka.h"

KV_TEST_MAIN(NULL, NULL)
