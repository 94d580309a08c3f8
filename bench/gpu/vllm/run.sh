#!/usr/bin/env bash
# vLLM with kvd, with other caches and with none, on one GPU: bench/gpu/vllm/run.sh PART [bench.py's options]
#   check        answers are those of the engine's own cache: both model runners, engine restarted, daemon restarted   (about 5 minutes)
#   check-async  the same with loads beside the steps
#   time         kvd against native offload, both runners, a connector that does nothing, and none; eager              (about 8 minutes)
#   graph1, graph2   the same with CUDA graphs: runner V2 (with none and nothing), runner V1                            (about 8 minutes each)
#   lmcache      LMCache in process and as a server
#   disk         after a restart of the daemon, from its disk
#   anything else: names of configurations (bench.py --help)
# Where a machine has no vLLM: .vllm[1-9]/site.tar.xz.* (or .vllm0/) are unpacked to ~/v/site; where kvd is not built: a bundle (scripts/offline-bundle) named in BUNDLE,
# or .gpu/kvd-*.tar.xz. Results: $OUT (default bench-out): results.json, table.md, log.txt.
set -euo pipefail
cd "$(dirname "$0")/../../.."

site=$HOME/v/site
archive=.vllm[1-9]
compgen -G '.vllm0/site.tar.xz.*' >/dev/null && archive=.vllm0 # without LMCache
if compgen -G "$archive/site.tar.xz.*" >/dev/null && [ ! -e "$HOME/v/done" ]; then
	mkdir -p "$site"
	# shellcheck disable=SC2086
	cat $archive/site.tar.xz.* | xz -dc | tar -xf - -C "$site"
	touch "$HOME/v/done"
fi
if [ -d "$site" ]; then
	export PYTHONPATH="$site:${PYTHONPATH:-}"
fi

kvd=build/release
bundle=${BUNDLE:-$(compgen -G '.gpu/kvd-*.tar.xz' | head -n 1 || true)}
if [ -n "$bundle" ]; then
	kvd=$HOME/k/kvd
	if [ ! -e "$kvd/done" ]; then
		rm -rf "$HOME/k"
		mkdir -p "$kvd" "$HOME/k/site"
		tar -xf "$bundle" -C "$kvd" --strip-components=1
		python3 -m zipfile -e "$kvd"/wheels/kvd_vllm-*.whl "$HOME/k/site"
		touch "$kvd/done"
	fi
	export PYTHONPATH="$HOME/k/site:${PYTHONPATH:-}"
fi
python3 -c 'import kvd_vllm._kvd as k; print(k.version, k.__file__)'

part=${1:?a part: check, time, graph1, graph2, lmcache, disk, or names of configurations}
shift
case $part in
check) set -- check-v2 check-v1 "$@" ;;
check-async) set -- check-v2-async check-v1-async "$@" ;;
time) set -- none-v2 kvd-v2 native-v2 kvd-v1 native-v1 nothing-v2 "$@" ;;
graph1) set -- --graph none-v2 kvd-v2 native-v2 nothing-v2 "$@" ;;
graph2) set -- --graph kvd-v1 native-v1 none-v1 "$@" ;;
lmcache) set -- lmcache-v2 lmserver-v2 "$@" ;;
disk) set -- disk-v2 disk-v1 "$@" ;;
*) set -- "$part" "$@" ;;
esac
exec python3 bench/gpu/vllm/bench.py --kvd "$kvd" --out "${OUT:-bench-out}" "$@"
