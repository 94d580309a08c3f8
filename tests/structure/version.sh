#!/bin/bash
# version.sh PROGRAM...: --version of each names the program, and the version and revision that the first one names.
set -euo pipefail

said=$("$1" --version)
said=${said#* }
for program in "$@"; do
	line=$("$program" --version)
	if [[ $line != "${program##*/} ${said%%)*})"* ]]; then
		echo "$program --version says \"$line\", not \"${program##*/} ${said%%)*})\""
		exit 1
	fi
done
