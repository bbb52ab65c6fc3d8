#!/usr/bin/env bash
# Resolve pyproject.toml afresh, layer by layer, and pin what each layer adds.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"

specs() { "$work/venv/bin/python" - "$1" <<'PY'
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
layer = sys.argv[1]
print("\n".join(project["dependencies"] if layer == "base" else project["optional-dependencies"][layer]))
PY
}
# A local build's suffix ("+cpu") names a file, not a release.
frozen() { "$work/venv/bin/pip" freeze 2>/dev/null | grep -viE '^(pip|setuptools|wheel)==' | sed 's/+.*$//' | sort; }

: > "$work/before"
for layer in base local worker dev; do
  specs "$layer" > "$work/specs"
  "$work/venv/bin/pip" install -q -r "$work/specs"
  frozen > "$work/after"
  {
    echo "# $layer: made by \`make lock\` from pyproject.toml; edit that, not this file."
    case $layer in local | worker) echo "-r base.lock" ;; dev) printf -- '-r local.lock\n-r worker.lock\n' ;; esac
    comm -13 "$work/before" "$work/after"
  } > "requirements/$layer.lock"
  cp "$work/after" "$work/before"
done
