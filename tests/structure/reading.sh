#!/usr/bin/env bash
# docs.reading: every path named in README.md and docs/READING.md exists.
set -euo pipefail
cd "$1"
bad=0
while read -r path; do
	if [ ! -e "$path" ]; then
		echo "docs name $path, which does not exist"
		bad=1
	fi
done < <(grep -ohE '`(common|kernels|storage|daemon|client|connectors|engine|tests|conf|docs|scripts|bench)/[A-Za-z0-9_./-]*`' README.md docs/READING.md | tr -d '`' | sort -u)
while read -r path; do
	if [ ! -e "$path" ] && [ ! -e "docs/$path" ]; then
		echo "docs link to $path, which does not exist"
		bad=1
	fi
done < <(grep -ohE '\]\([A-Za-z0-9_./-]+\)' README.md docs/*.md | sed 's/^](//; s/)$//; s|^\.\./||' | sort -u)
exit $bad
