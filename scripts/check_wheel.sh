#!/usr/bin/env bash
# Build the wheel, install it with the core dependencies alone in a fresh environment, import every module there
# and ask every command for its help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

.venv/bin/python -m build --wheel --no-isolation --outdir "$work/dist" . >"$work/build.log" 2>&1 ||
    { cat "$work/build.log" >&2; exit 1; }
.venv/bin/python - "$work"/dist/*.whl <<'PYTHON'
import sys, zipfile
names = zipfile.ZipFile(sys.argv[1]).namelist()
strays = [name for name in names if not name.startswith(("anyformer/", "anyformer-"))]
assert not strays, f"the wheel holds files outside the package: {strays}"
for name in ("anyformer/py.typed", "anyformer/rasp/language/grammar.lark", "anyformer/rasp/language/library.rasp"):
    assert name in names, f"the wheel lacks {name}"
PYTHON

.venv/bin/python -m venv "$work/venv"
"$work/venv/bin/python" -m pip install -q -c constraints.txt "$work"/dist/*.whl
cd "$work" # so that the checkout cannot be imported

venv/bin/python - <<'PYTHON'
import importlib, importlib.util, pkgutil, sys
import anyformer
assert anyformer.__file__.startswith(sys.prefix), anyformer.__file__
assert importlib.util.find_spec("matplotlib") is None, "the environment is not the core one"
def fail(name): raise
modules = [m.name for m in pkgutil.walk_packages(anyformer.__path__, "anyformer.", onerror=fail)]
for name in modules:
    if not name.endswith(".__main__"):
        importlib.import_module(name)
print(f"wheel: {len(modules)} modules import with the core dependencies alone")
PYTHON

venv/bin/anyformer --help >help.txt || { cat help.txt >&2; exit 1; }
venv/bin/python -c 'from anyformer.cli import COMMANDS; print("\n".join(COMMANDS))' >commands.txt
[ -s commands.txt ] || { echo "anyformer.cli.COMMANDS is empty" >&2; exit 1; }
while read -r command; do
    venv/bin/anyformer "$command" --help >help.txt </dev/null ||
        { echo "anyformer $command --help failed" >&2; cat help.txt >&2; exit 1; }
done <commands.txt
echo "wheel: $(wc -l <commands.txt) commands print their help"
[ "$(venv/bin/anyformer rasp <<<'sort(tokens, tokens)("ba");')" = 'out("ba") = ["a", "b"]' ] ||
    { echo "the prompt of the installed wheel does not answer" >&2; exit 1; }
