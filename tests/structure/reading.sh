#!/usr/bin/env bash
# docs.reading: every path and every function that README.md, docs/READING.md and docs/reading/ name exists; so does every link of a document.
set -euo pipefail
cd "$1"
bad=0
pages=(README.md docs/READING.md docs/reading/*.md)
complain() {
	echo "$1"
	bad=1
}
while read -r path; do
	[ -e "$path" ] || complain "docs name $path, which does not exist"
done < <(grep -ohE '`(common|kernels|storage|daemon|client|connectors|engine|tests|conf|docs|scripts|bench)/[A-Za-z0-9_./-]*`' "${pages[@]}" | tr -d '`' | sort -u)
while read -r name; do
	grep -rqE "^[a-z].*\b$name\(" --include='*.[ch]' common kernels storage daemon client connectors || complain "docs name $name(), which does not exist"
done < <(grep -ohE '`[a-z0-9_]+\(\)`' "${pages[@]}" | tr -d '`()' | sort -u)
for page in README.md docs/*.md docs/*/*.md; do
	while read -r path; do
		[ -e "$(dirname "$page")/$path" ] || complain "$page links to $path, which does not exist"
	done < <(grep -oE '\]\([A-Za-z0-9_./-]+\)' "$page" | sed 's/^](//; s/)$//' | sort -u)
done
exit $bad
