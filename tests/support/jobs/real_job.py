"""Jobs with a real (tiny) model: its folder, the rows, and the command line that runs it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from batchgen.config.compose.compose_config import compose
from batchgen.jobs.resolve.open_job import resolve_job
from batchgen.jobs.run.job_end import JobResult
from batchgen.jobs.run.run_job import execute_job

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
ROWS = [{"id": f"r{i}", "q": f"What is {i} + {i}?" + " Please." * (i % 4)} for i in range(11)]
VOCAB = {"vocab_size": 257, "eos_token_id": 256}


def save_tokenizer(folder: Path, first: str = "") -> None:
    """A tokenizer of bytes and <eos>; `first` gets the id 0 instead of the byte that has it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {c: i for i, c in enumerate(alphabet)}
    if first:
        ids = {first: 0, **{c: i for c, i in ids.items() if i}}
    raw = Tokenizer(models.BPE(ids, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<eos>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)


def overrides(model: Path, rows: Path, out: Path | str, *more: str) -> list[str]:
    """A command line; without the report, which takes a quarter of the time of such a job."""
    return [
        "model=hf", f"model.path={model}", "dataset=files", f"dataset.path={rows}",
        "dataset.id_column=id", "prompt.user='{{ q }}'", "sampling=sample", "sampling.n=2",
        "sampling.max_new_tokens=12", "sampling.seed=3", "engine.kv_cache_gib=0.01",
        "engine.device=cpu", "output.rows_per_shard=4", "output.report=false",
        f"output.dir={out}", *more,
    ]  # fmt: skip


def run(arguments: list[str]) -> JobResult:
    config = compose({}, arguments)
    return execute_job(config, resolve_job(config))


def contents(folder: Path) -> dict[str, str]:
    """Digest of every file of a job's folder; .lock names its last holder."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
