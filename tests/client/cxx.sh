#!/bin/sh
# kvc.h is C++: compiles as C++11 with all warnings: cxx.sh COMPILER INCLUDE_DIR
set -eu
echo 'int main() { return 0; }' | "$1" -x c++ -fsyntax-only - 2>/dev/null || { echo "SKIP: $1 cannot compile C++"; exit 77; }
printf '#include <kvc.h>\nint main() { kvc_config_t c = kvc_config_t(); c.struct_size = sizeof c; kvc_t *k = 0; return kvc_attach(&c, &k) == KVC_OK; }\n' |
	"$1" -x c++ -std=c++11 -Wall -Wextra -Wpedantic -Wold-style-cast -Werror -fsyntax-only -isystem /nowhere -I "$2" -
