/* The revision of a program that does not link the one of the build: a test. */
#include "kv/system.h"

const char kv_revision[] = "";
