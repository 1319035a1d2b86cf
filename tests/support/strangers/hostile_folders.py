"""Attacks by folders, job files and names that strangers made."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.strangers.attack import COMMAND, MODEL, Attack, Work


def remote_code(work: Work) -> str | None:
    """A job file asks for the code that comes with a model."""
    job = work.path / "job.yaml"
    job.write_text("model: {choice: nano_hybrid, trust_remote_code: true}\n")
    run = work.batchgen(job, "--dry-run")
    return run.refused("trust_remote_code")


def remote_code_typed(work: Work) -> str | None:
    """Even the user cannot ask for the code that comes with a model."""
    return work.batchgen(MODEL, "model.trust_remote_code=true", "--dry-run").refused("never runs")


_STEPS = """\
post:
- {_target_: batchgen.grading.extract.Extract, methods: [whole]}
- _target_: batchgen.grading.grade.Grade
  method: function
  function: {_target_: theirs.mark}
"""


def _module(work: Work) -> None:
    """Put a module into the working directory that leaves a file when it is imported."""
    (work.path / "theirs.py").write_text("open('ran', 'w').close()\ndef mark(**given): return 1\n")


def _ran(work: Work) -> str | None:
    return "its code ran" if (work.path / "ran").exists() else None


def steps_of_a_folder(work: Work) -> str | None:
    """A folder has its answers graded by a function of its own."""
    _module(work)
    config = work.finished_job() / "config.yaml"
    text = config.read_text(encoding="utf-8").partition("post:")
    config.write_text(f"{text[0]}{_STEPS}", encoding="utf-8")
    for command in ((str(COMMAND),), (sys.executable, "-m", "batchgen")):
        run = work.batchgen("grade", "out", command=command)
        if found := run.refused("theirs.mark", "--trust") or _ran(work):
            return found
    return None


def steps_of_a_job_file(work: Work) -> str | None:
    """A job file has its answers graded by a function of its own."""
    _module(work)
    (work.path / "job.yaml").write_text(f"model: nano_hybrid\ndataset: demo\n{_STEPS}")
    for arguments in (["job.yaml"], ["job.yaml", "--dry-run"], ["plan", "job.yaml"]):
        run = work.batchgen(*arguments, command=(sys.executable, "-m", "batchgen"))
        if found := run.refused("theirs.mark", "--trust") or _ran(work):
            return found
    return None


def callbacks(work: Work) -> str | None:
    """A folder of choices gives Hydra a callback."""
    _module(work)
    choice = work.path / "conf/experiment/nice.yaml"
    choice.parent.mkdir(parents=True)
    choice.write_text("# @package _global_\nhydra: {callbacks: {x: {_target_: theirs.mark}}}\n")
    arguments = ("--config-dir=conf", "+experiment=nice", "hydra.job.name=x")
    run = work.batchgen(*arguments, command=(sys.executable, "-m", "batchgen"))
    return run.refused("--trust conf") or _ran(work)


def modules(work: Work) -> str | None:
    """The working directory has modules with the names of others."""
    work.finished_job()
    (work.path / "hydra_plugins").mkdir()
    for name in ("yaml", "pyarrow", "torch", "hydra_plugins/theirs"):
        (work.path / f"{name}.py").write_text("open('ran', 'w').close()\n")
    for arguments in (["grade", "out"], ["--cfg", "job"], ["score", "out"]):
        run = work.batchgen(*arguments, command=(sys.executable, "-m", "batchgen"))
        if run.code or _ran(work):
            return _ran(work) or run.text[-300:]
    return None


def environment(work: Work) -> str | None:
    """A job file asks for variables of the environment."""
    secret = {"STRANGERS_SECRET": "it-is-out"}
    for text in ("${oc.env:STRANGERS_SECRET}", "${oc.decode:'${oc.env:STRANGERS_SECRET}'}"):
        for key in ("model.name", "prompt.system", "output.dir"):
            job = work.path / "job.yaml"
            job.write_text(json.dumps({"model": "nano_hybrid", "dataset": "demo", key: text}))
            run = work.batchgen("job.yaml", environment=secret)
            if found := run.refused(key, "oc."):
                return found
    leaked = [path for path in work.path.rglob("*") if "it-is-out" in str(path)]
    return f"it is in the name of {leaked[0]}" if leaked else None


def links(work: Work) -> str | None:
    """A folder has links in the place of files."""
    secret = work.path / "secret"
    secret.mkdir()
    files = {name: f"it-is-out {name}" for name in ("steps.json", "config.yaml", "README.md")}
    for name, text in files.items():
        (secret / name).write_text(text)
    verbs = [["grade", "out"], ["score", "out", "--save"], ["report", "out"], ["show", "out"]]
    verbs += [["export", "out"], ["compare", "out", "out"], ["validate", "out"], ["status", "out"]]
    verbs += [[MODEL, "dataset=demo", "output.dir=out", "output.overwrite=true"]]
    turns = itertools.cycle(verbs)
    for name, target in {
        "grades": secret, "config.yaml": secret / "config.yaml", "README.md": secret / "README.md",
        "metrics.json": Path("/dev/zero"), ".lock": secret / "steps.json", "data": Path("/etc"),
    }.items():  # fmt: skip
        out = work.finished_job()
        if (out / name).is_dir():
            shutil.rmtree(out / name)
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(target)
        for verb in (next(turns), next(turns)):
            if found := work.batchgen(*verb).refused(f"{name} is a link"):
                return f"{' '.join(verb)}: {found}"
        shutil.rmtree(out)
    changed = [name for name, text in files.items() if (secret / name).read_text() != text]
    return f"{changed[0]} was written over" if changed else None


def terminal(work: Work) -> str | None:
    """Ids, texts, names of columns and files drive the terminal."""
    drives = "\x1b]52;c;eA==\x07\x9b2J\u202e"
    rows = work.rows(json.dumps({"id": f"i{drives}", f"q{drives}": drives}, ensure_ascii=False))
    user = f"prompt.user={{{{ row['q{drives}'] }}}}"
    if (run := work.job(rows, user, "dataset.id_column=id")).code not in (0, 2, 3):
        return run.text[-300:]
    work.finished_job(f"o{drives}")
    with_terminal = (sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])", str(COMMAND))
    for arguments in (
        ["show", "out", "--json"], ["show", f"o{drives}"], ["show", f"no{drives}"],
        ["show", f"o{drives}", "--row", drives], ["export", "out"], ["report", f"o{drives}"],
        ["score", f"o{drives}"], [MODEL, f"dataset.path={rows}", user, "--dry-run"],
    ):  # fmt: skip
        shown = work.batchgen(*arguments, command=with_terminal).text
        if found := next((c for c in "\x1b\x07\x9b\u202e" if c in shown), None):
            return f"batchgen {arguments!r} printed {found!r}"
    return None


def requests(work: Work) -> str | None:
    """A page asks the server of `batchgen view` for what is no address."""
    out = work.finished_job()
    view = subprocess.Popen(
        [COMMAND, "view", out], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert view.stdout is not None
        said = next(line for line in view.stdout if "http://" in line)
        found = re.search(r"http://127\.0\.0\.1:(\d+)(/[^/\s]+/)", said)
        assert found is not None, said
        for target in (
            b"http://[",
            b"http://a]b/",
            b"/\xff\x00[",
            found[2].encode() + b"row?n=\xb2",
        ):
            host = f"Host: localhost:{found[1]}\r\n\r\n".encode()
            with socket.create_connection(("127.0.0.1", int(found[1])), timeout=10) as connection:
                connection.sendall(b"GET " + target + b" HTTP/1.1\r\n" + host)
                answer = connection.recv(100)
            if not re.match(rb"HTTP/1\.[01] (200|40[0-9]) ", answer):
                return f"{target!r} got {answer!r}"
    finally:
        view.terminate()
        rest = view.communicate()[0]
    return rest[-300:] if "Traceback" in rest else None


ATTACKS: tuple[Attack, ...] = (
    *(remote_code, remote_code_typed, steps_of_a_folder, steps_of_a_job_file, callbacks, modules),
    *(environment, links, terminal, requests),
)
