"""Writes the pages of the documentation that are generated from the code.

    python scripts/docs/reference.py            # writes them
    python scripts/docs/reference.py --check    # writes nothing; exits with 1 if a page is stale

docs/reference/config.md comes from the comments of conf/, docs/reference/commands.md from the help
texts, docs/reference/models.md from the registry of models, docs/reference/exams.md from exams.yaml
and conf/experiment/, docs/reference/extractions.md from the texts of extractions.yaml,
docs/reference/job.schema.json from the keys and their types, a table of the overview from the
sources, and the diagrams of the design pages from diagrams.py.
"""

from __future__ import annotations

import inspect
import io
import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path

from diagrams import diagrams
from exams import exams_page
from extractions import extractions_page
from job_schema import schema_text

from batchgen.cli.conf_files import GroupChoice, read_choice
from batchgen.cli.help import help_text
from batchgen.cli.verb_table import VERBS, run_verb
from batchgen.config.groups.config_keys import GROUPS, choices, default_choices
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.conv_model import ConvForCausalLM
from batchgen.engine.models.hybrid import HybridForCausalLM
from batchgen.engine.models.mamba_model import MambaForCausalLM
from batchgen.engine.models.mla_model import LatentForCausalLM
from batchgen.engine.models.model_registry import MODELS, RELATIVES

ROOT = Path(__file__).parents[2]
WRITTEN_BY = (
    "<!-- Written by scripts/docs/reference.py: change the code that it reads, not this page. -->"
)
# Kinds of additions to batchgen, and a word that only the files of one example contain.
ADDITIONS = (
    ("a model of a known kind", "Glm4MoeLiteForCausalLM"),
    ("a column of a value per token", "DRAFT_ACCEPTED"),
    ("a count per row", "num_commit_forwards"),
    ("a post step", "ParseScore"),
    ("a row step", "OrderChoices"),
    ("a paradigm", "DLLMStrategy"),
    ("a launcher", "RayLauncher"),
    ("a verb", "batchgen.cli.verbs.validate"),
    ("a sampling option", "min_p"),
)
CONFIG_HEAD = """# Keys

Every key of a job, from the comments of `conf/`. A key is written `KEY=VALUE` on the command line
and `KEY: VALUE` in a job file; a choice of a group is written `GROUP=CHOICE`.
`batchgen --help GROUP` prints the same texts. For a choice that is not the first of its group,
only the keys with a different explanation are listed."""
COMMANDS_HEAD = """# Commands

`batchgen` runs a job or, with a verb as its first word, works with the folder of one. This page
prints the `--help` of each verb."""


MODELS_HEAD = """# Models

The families of models, by the `architectures` of their config.json. Checkpoints are safetensors or,
where the table says so, GGUF; weights may be in FP8, those of gpt-oss in MXFP4, and those of AWQ,
GPTQ, compressed-tensors and ModelOpt are kept in 4 bits or dequantised
([Sampling](../guides/sampling.md)). Families with experts write the column `routed_experts`.
DeepseekV3 also loads R1, Moonlight and Kimi-K2, whose tokenizers are code of their repositories,
which is never run: put a converted tokenizer.json into the folder. Glm4MoeLite is GLM-4.7-Flash.
Llama4 has contexts of 1,048,576 tokens here. With LongRoPE (Phi-3, Phi-4-mini) rows of more than
4,096 tokens are rotated by other angles: a row whose prompt is shorter and that could grow past
this limit is an error (`crosses_longrope`), because all of it would have to be computed again.
Images are read by Gemma3, Gemma4, Qwen2_5_VL, Qwen3VL, Qwen3_5 and their Moe kinds; the vision
towers of other families are not loaded. Of causal families, classifiers and reward models
(…ForSequenceClassification) and decoders without a head (…Model) load, too
([Embeddings and rewards](../guides/embeddings.md))."""
MISSING_HEAD = """## What is not supported

The error for such a model names the nearest family, and what that lacks."""


def config_page() -> str:
    """Return the text of docs/reference/config.md."""
    parts = [CONFIG_HEAD]
    for group in GROUPS:
        parts.append(f"## {group}")
        default = default_choices().get(group)
        last_rows: dict[str, str] = {}
        for name in sorted(choices(group), key=lambda name: name != default):
            parts += _choice(read_choice(group, name), last_rows, is_default=name == default)
    for name in ("rows", "post"):
        parts.append(f"## {name}\n\n```text\n{help_text([name])}\n```")
    return "\n\n".join(parts) + "\n"


def _choice(choice: GroupChoice, last_rows: dict[str, str], *, is_default: bool) -> Iterator[str]:
    """Yield the Markdown of one choice of a group: what it is, and a table of its keys. The table
    leaves out a key whose row equals the last one for that key, which `last_rows` keeps by key."""
    yield f"### `{choice.group}={choice.name}`" + (" (the default)" if is_default else "")
    if choice.about:
        yield _prose(choice.about)
    rows = []
    for entry in choice.entries:
        if entry.name in ("kind", "_target_"):
            continue
        text = _escaped(" ".join(" ".join(entry.comment).split()))
        row = f"| `{choice.group}.{entry.name}` | {_code(entry.value)} | {text} |"
        if last_rows.get(entry.name) != row:
            last_rows[entry.name] = row
            rows.append(row)
    if rows:
        yield "\n".join(["| key | value | meaning |", "|---|---|---|", *rows])


def _prose(lines: tuple[str, ...]) -> str:
    """Convert comment lines to Markdown; indented lines become code."""
    shown = [""]
    for line in lines:
        is_code = line.startswith("  ")
        if is_code and shown[-1][:4].strip():
            shown.append("")
        shown.append(f"    {line.strip()}" if is_code else _escaped(line))
    return "\n".join(shown).strip("\n")


def _escaped(text: str) -> str:
    """Escape what Markdown would take for markup or for the end of a table cell."""
    return re.sub(r"([<*|])", r"\\\1", text)


def _code(value: str) -> str:
    """Return a value on one line as Markdown code; nothing for an empty one."""
    value = " ".join(value.split())
    return f"`{value}`".replace("|", "\\|") if value else ""


def commands_page() -> str:
    """Return the text of docs/reference/commands.md."""
    parts = [COMMANDS_HEAD, f"## `batchgen`\n\n```text\n{help_text([])}\n```"]
    for name in VERBS:
        printed = io.StringIO()
        with redirect_stdout(printed):
            try:
                run_verb(name, ["--help"])
            except SystemExit:
                pass
        parts.append(f"## `batchgen {name}`\n\n```text\n{printed.getvalue().strip()}\n```")
    return "\n\n".join(parts) + "\n"


def models_page() -> str:
    """Return the text of docs/reference/models.md."""
    missing = [
        "| architecture | nearest | what that lacks |",
        "|---|---|---|",
        *(f"| {name} | {near} | {what} |" for name, (near, what) in RELATIVES.items()),
    ]
    return f"{MODELS_HEAD}\n\n{family_table()}\n\n{MISSING_HEAD}\n\n" + "\n".join(missing) + "\n"


def family_table() -> str:
    """Return a table with a row per model file: its architectures, and what supports them."""
    lines = [
        "| family | models | layers | `strategy=` | drafts of its own head | GGUF |",
        "|---|---|---|---|---|---|",
    ]
    seen = set()
    for architecture, entry in MODELS.items():
        model: type[CausalLM] = vars(import_module(entry.module))[architecture]
        if entry.module in seen:
            continue
        seen.add(entry.module)
        # The class does not say whether a model has experts or a head for drafts: its configuration
        # decides. So look for them in the source of the model's file.
        source = inspect.getsource(import_module(entry.module))
        imports_experts = re.search(r"^from \S*(moe|expert)", source, re.MULTILINE)
        has_experts = "Moe" in architecture or imports_experts is not None
        has_head = "mtp_layers" in source
        mixer = "attention"
        if issubclass(model, LatentForCausalLM):
            mixer = "latent attention"
        elif issubclass(model, HybridForCausalLM):
            mixer = "attention and gated delta networks"
        elif issubclass(model, MambaForCausalLM):
            mixer = "attention and Mamba2"
        elif issubclass(model, ConvForCausalLM):
            mixer = "attention and short convolutions"
        paradigms = "`dllm`" if model.is_diffusion else "`ar`, `ar_spec`"
        if model.denoises_canvases:
            paradigms = "`canvas`"
        name = architecture.partition("For")[0]
        about = (inspect.getdoc(import_module(entry.module)) or "").split("\n\n")[0]
        published = re.split(r" \(|[:.]( |$)", " ".join(about.split()))[0]
        lines.append(
            f"| {name} | {published} | {mixer}{', experts' if has_experts else ''} | {paradigms} | "
            f"{'yes' if has_head else ''} | {'yes' if entry.gguf else ''} |"
        )
    return "\n".join(lines)


def touched_table() -> str:
    """Return a table of the files that an example of each kind of addition touches, without
    experiments and tests."""
    lines = ["| addition | example | files that name it |", "|---|---|---|"]
    files = [
        path
        for folder in ("batchgen", "conf", "engine", "kernels", "strategies")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".yaml") and "experiment" not in path.parts
    ]
    for addition, word in ADDITIONS:
        found = re.compile(rf"\b{re.escape(word)}\b")
        names = [str(f.relative_to(ROOT)) for f in files if found.search(f.read_text("utf-8"))]
        listed = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| {addition} | `{word}` | {len(names)}: {listed} |")
    return "\n".join(lines)


def with_tables(page: Path, **tables: str) -> str:
    """Return the text of a page, in which each table replaces what stands between the comments
    `<!-- NAME -->` and `<!-- /NAME -->`. Keywords are the names."""
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        before, start, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        assert start and end, f"{page} has no marks for {name}"
        text = f"{before}{start}\n{table}\n\n{end}{after}"
    return text


def pages() -> dict[Path, str]:
    """Return the contents of all generated pages, and of pages that contain generated tables."""
    overview = ROOT / "docs/design/overview.md"
    return {
        ROOT / "docs/reference/config.md": f"{WRITTEN_BY}\n\n{config_page()}",
        ROOT / "docs/reference/commands.md": f"{WRITTEN_BY}\n\n{commands_page()}",
        ROOT / "docs/reference/exams.md": f"{WRITTEN_BY}\n\n{exams_page()}",
        ROOT / "docs/reference/extractions.md": f"{WRITTEN_BY}\n\n{extractions_page()}",
        ROOT / "docs/reference/job.schema.json": schema_text(),
        ROOT / "docs/reference/models.md": f"{WRITTEN_BY}\n\n{models_page()}",
        overview: with_tables(overview, touched=touched_table()),
        **diagrams(overview, ROOT / "docs/images"),
    }


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    os.environ["COLUMNS"] = "80"
    stale = []
    for path, text in pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path)
            if not check:
                path.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{'stale' if check else 'written'}: {path.relative_to(ROOT)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
