#!/usr/bin/env bash
# docs.reading: every path and every function that README.md, docs/READING.md and docs/reading/ name exists; so does every link of a document. docs/README.md names every page. In docs/reading/ each
# function of a table's row is defined in a file of that row.
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
done < <(grep -ohE '`(common|kernels|storage|daemon|client|connectors|proxy|engine|tests|conf|docs|scripts|bench)/[A-Za-z0-9_./-]*`' "${pages[@]}" | tr -d '`' | sort -u)
while read -r name; do
	grep -rqE "^[a-z].*\b$name\(" --include='*.[ch]' common kernels storage daemon client connectors || complain "docs name $name(), which does not exist"
done < <(grep -ohE '`[a-z0-9_]+\(\)`' "${pages[@]}" | tr -d '`()' | sort -u)
while read -r row; do
	mapfile -t files < <(grep -oE '`(kernels|storage|daemon|client|connectors)/[A-Za-z0-9_./-]*`' <<<"$row" | tr -d '`')
	while read -r name; do
		[ ${#files[@]} -gt 0 ] || complain "docs/reading names $name() in a row without its file"
		[ ${#files[@]} -eq 0 ] || grep -rqE "^[a-z].*\b$name\(" "${files[@]}" || complain "docs/reading names $name(), which is not in ${files[*]}"
	done < <(grep -oE '`[a-z0-9_]+\(\)`' <<<"$row" | tr -d '`()')
done < <(grep -h '^|' docs/reading/*.md)
for page in README.md docs/*.md docs/*/*.md; do
	while read -r path; do
		[ -e "$(dirname "$page")/$path" ] || complain "$page links to $path, which does not exist"
	done < <(grep -oE '\]\([A-Za-z0-9_./-]+\)' "$page" | sed 's/^](//; s/)$//' | sort -u)
done
for page in docs/*.md; do
	[ "$page" = docs/README.md ] || grep -qF "\`${page#docs/}\`" docs/README.md || complain "docs/README.md does not name ${page#docs/}"
done
exit $bad
