#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, on a machine where nothing can be installed from a network:
#
#   tests/gpu/run.sh tests    [WHEELS] [TESTS …]     what pytest is given; by default tests
#   tests/gpu/run.sh sanitize [WHEELS] [TESTS …]     by default tests/gpu
#   tests/gpu/run.sh bench    [WHEELS] "NAME ARGS" … such as "stall" "overlap --seconds 60"
#   tests/gpu/run.sh codecs   [WHEELS] [ARGS …]      speeds of the codecs alone (check_codecs.py)
#   tests/gpu/run.sh with     [WHEELS] COMMAND …     any command, where `python3` finds all of this
#
# WHEELS is a folder of wheels to use beside what the machine's python3 has (nvCOMP, KvikIO, zstandard, xxhash, …), or
# "" for none. Results go to $OUT, or to bench/results. A bench that fails does not keep the next from running.
set -euo pipefail
cd "$(dirname "$0")/../.."
what=${1:-tests}
wheels=${2:-}
shift $(($# < 2 ? $# : 2))
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir -p "$work/path/tidegate"
for file in engine/*; do ln -s "$PWD/$file" "$work/path/tidegate/"; done
ln -s "$PWD/codec" "$PWD/storage" "$work/path/tidegate/"
export PYTHONPATH="$work/path:$PWD" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
if [ -n "$wheels" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$work/site" "$wheels"/*.whl
  PYTHONPATH="$PYTHONPATH:$work/site"
fi
out=${OUT:-bench/results}

status=0
case $what in
  tests)
    python3 -m pytest -m gpu -q --maxfail 20 --timeout 240 --durations 5 --tb short -p no:cacheprovider \
      --junitxml="$out/gpu-tests.xml" "${@:-tests}" || status=$?
    ;;
  sanitize)
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 --target-processes all \
      python3 -m pytest -m gpu -q --timeout 500 -p no:cacheprovider "${@:-tests/gpu}" -k small || status=$?
    ;;
  bench)
    for bench in "$@"; do
      echo "== bench.$bench"
      # shellcheck disable=SC2086 # the arguments of a bench are words
      timeout 240 python3 -m bench.$bench || { echo "bench.$bench failed: $?"; status=1; }
    done
    ;;
  codecs)
    python3 -m tests.gpu.check_codecs "$@" || status=$?
    ;;
  with)
    "$@" || status=$?
    ;;
  *)
    echo "usage: run.sh tests|sanitize|bench|codecs|with [WHEELS] …" >&2
    exit 2
    ;;
esac
exit $status
