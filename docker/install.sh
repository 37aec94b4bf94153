#!/bin/sh
# Install the whole stack into a virtual environment and check that it works together.
#   install.sh VENV          PYTHON= the interpreter (3.11 or newer), EXTRAS= cpu,dev (default) or gpu
# Used by the Makefile and by the images, so that there is one way to install.
set -eu
VENV=${1:?usage: install.sh VENV}
PYTHON=${PYTHON:-python3}
EXTRAS=${EXTRAS:-cpu,dev}
TORCH=2.13.0
cd "$(dirname "$0")/.."

fail() { echo "accredit: $*" >&2; exit 1; }
command -v "$PYTHON" >/dev/null || fail "$PYTHON: not found; name an interpreter with PYTHON=/path/to/python3.11"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$PYTHON is $("$PYTHON" -V 2>&1), expected Python 3.11 or newer; name one with PYTHON="
"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$PYTHON has no venv module; on Debian and Ubuntu: apt-get install python3-venv"

echo "installing into $VENV (about 3 minutes and 4 GB the first time)"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
case $EXTRAS in
*cpu*)
    # the plain torch wheel brings gigabytes of CUDA; PyTorch's own index is asked where the configured one has no CPU build
    pip install "torch==$TORCH+cpu" 2>/dev/null ||
        pip install "torch==$TORCH+cpu" --index-url https://download.pytorch.org/whl/cpu ||
        fail "torch $TORCH+cpu was found neither in pip's sources nor in PyTorch's CPU index"
    ;;
esac
pip install --editable ".[$EXTRAS]"
case $EXTRAS in
*cpu*)
    # vLLM's requirements pull builds of these for CUDA, which do not import beside CPU torch; nothing here needs them
    pip uninstall --yes torchvision torchaudio torchcodec 2>/dev/null
    ;;
esac
"$VENV/bin/python" -m cluster.doctor
touch "$VENV/.ready"
