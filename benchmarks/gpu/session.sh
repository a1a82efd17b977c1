#!/usr/bin/env bash
# The first minutes on a machine with a GPU: correctness first (before all, whether a captured graph
# and the host can hand over), then speed, everything written down.
#
#   benchmarks/gpu/session.sh OUT [build|smoke|tests|bench|accelerate|llama]...     (default: all, in this order)
#
# Needs python3 with torch (CUDA), transformers, triton and the build tools; no network. `llama` also
# needs the package gguf, and RIVAL=NAME=LLAMA_BENCH or llama-cpp-python built for CUDA. Each part has
# a limit of its own, all together have SECONDS_IN_ALL; a part at its limit is interrupted, so that it
# still says what it has found. What parts print is in OUT as it comes, no more than eight files. A
# part that fails does not keep the next from running, except the build.
set -u
out=${1:?say where the results go}; shift
parts=${*:-build smoke tests bench accelerate llama}
python=${PYTHON:-python3}
shape=${SHAPE:-qwen3-30b-a3b}
in_all=${SECONDS_IN_ALL:-580}
mkdir -p "$out"
failed=0
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$PWD/build/triton}

left() { # of a limit in seconds: what of it there is time for
    local remaining=$((in_all - SECONDS - 10))
    echo $(($1 < remaining ? $1 : remaining))
}

run() { # name, limit in seconds, command...
    local name=$1 limit; limit=$(left "$2"); shift 2
    if [ "$limit" -lt 10 ]; then
        echo "== $name: no time left of $in_all s; run it by itself"; failed=1
        return 1
    fi
    echo "== $name ($(date +%T), at most $limit s)"
    timeout -s INT -k 10 "$limit" "$@" >"$out/$name.log" 2>&1
    local code=$?
    tail -n 15 "$out/$name.log"
    echo "== $name: exit code $code"
    [ $code = 0 ] || failed=1
    return $code
}

for part in $parts; do
    case $part in
        build) run build 200 "$python" -m pip install -q --no-build-isolation --no-deps --no-index -e . || exit 1 ;;
        smoke) run smoke 300 "$python" -m tandem doctor --report "$out/report.md" ;;
        tests) run tests 400 "$python" -m pytest tests/gpu -v --tb=short --timeout=120 ;;
        bench) run bench 470 "$python" -m benchmarks.gpu --shape "$shape" --out "$out/$shape.json" \
            --seconds "$(left 440)" ${BENCH_OPTIONS:-} ;;
        accelerate) run accelerate 120 "$python" -m benchmarks.gpu.accelerate_offload --shape "$shape" ;;
        llama) run llama 300 "$python" -m benchmarks.gpu.llama_cpp --shape "$shape" ${RIVAL:+--rival "$RIVAL"} ;;
        *) echo "unknown part: $part (build, smoke, tests, bench, accelerate, llama)"; exit 2 ;;
    esac
done
exit $failed
