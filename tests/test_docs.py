"""Every code block of README and docs runs: Python blocks in order, their printed output compared; shell blocks command by command;
programs in the .rasp language load."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import anyformer as af
from anyformer.cli import main
from anyformer.learning.demo_targets import DEMO_CLASS, demo_tasks
from anyformer.rasp import load_rasp

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that holds what ``anyformer demo`` writes (untrained here), and the trained Llama of the examples."""
    monkeypatch.chdir(tmp_path)
    machine = af.PathTree.for_class(DEMO_CLASS)
    for name, task in demo_tasks().items():
        target = af.Transformer(DEMO_CLASS, token_names=task.token_names)
        target.save(tmp_path / "demo" / "targets" / name)
        af.compile(target, machine).save(tmp_path / "demo" / "programs" / name)
    shutil.copytree(ROOT / "examples" / "llama" / "model", tmp_path / "examples" / "llama" / "model")
    for program in (ROOT / "examples").glob("*.rasp"):
        shutil.copy(program, tmp_path / "examples")
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_run_and_print_what_they_say(page: Path, elsewhere: Path) -> None:
    torch.manual_seed(0)
    names: dict = {"__name__": page.stem}
    printed = None
    for language, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(code, str(page), "exec"), names)
            printed = out.getvalue()
        elif language == "text":
            assert printed == code
        elif language == "rasp":
            load_rasp(code)
        else:
            assert language == "bash", f"{page.name}: a block of language {language!r} is run by nobody"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_shell_blocks_run(page: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for language, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in code.splitlines() if language == "bash" else []:
            command = shlex.split(line, comments=True)
            if command[0] == "make":
                subprocess.run(["make", "-n", *command[1:]], cwd=ROOT, check=True, capture_output=True)
            else:
                assert command[0] == "anyformer" and main(command[1:]) == 0, line


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name)
def test_links_to_files_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (page.parent / link).exists(), link


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(example: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_every_benchmark_names_its_claim() -> None:
    for file in (ROOT / "benchmarks").glob("*.py"):
        if file.name != "measure.py":
            assert "claim(" in file.read_text(encoding="utf-8") and f"benchmarks/{file.name}" in PAGES[0].read_text(
                encoding="utf-8"
            )


def test_the_readme_holds_the_measured_figures() -> None:
    """The demo's table and the table of claims are what the committed results say; no claim failed, none is a placeholder."""
    readme = PAGES[0].read_text(encoding="utf-8")
    for p in json.loads((ROOT / "results" / "demo.json").read_text())["programs"]:
        row = (
            f"| {p['task']} | {p['target_accuracy']:.2f} % | {p['program_accuracy']:.2f} % | {p['max_abs_error']:.1e} ({p['dtype']}) "
            f"| {p['max_pattern_error']:.1e} | agrees to {p['literal_error']:.1e} |"
        )
        assert row in readme
    output = (ROOT / "results" / "benchmarks.txt").read_text()
    assert "FAILS" not in output and not re.search(r"\| [A-Z_]{5,} \|", readme)
    for file in (ROOT / "benchmarks").glob("*.py"):
        assert file.name == "measure.py" or f"benchmarks/{file.name}" in output
    for figure in re.findall(r"^holds: (?!slope|seconds to).*: ([0-9.e+-]+) \(", output, re.M):
        assert figure in readme or "ratio of conditions" in output, figure


def test_the_page_lists_every_family() -> None:
    pytest.importorskip("flint")
    from anyformer.approximation.families import FAMILIES

    text = (ROOT / "docs" / "certify.md").read_text(encoding="utf-8")
    listed = text.split("Families by name: ")[1].split(".\n")[0].replace("\n", " ")
    assert listed.split(", ") == list(FAMILIES)
