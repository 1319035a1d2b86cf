"""Attacks by folders, job files and names that strangers made."""

from __future__ import annotations

from strangers.attack import MODEL, Attack, Work


def remote_code(work: Work) -> str | None:
    """A job file asks for the code that comes with a model."""
    job = work.path / "job.yaml"
    job.write_text("model: {choice: nano_hybrid, trust_remote_code: true}\n")
    run = work.batchgen(job, "--dry-run")
    return run.refused("trust_remote_code")


def remote_code_typed(work: Work) -> str | None:
    """Even the user cannot ask for the code that comes with a model."""
    return work.batchgen(MODEL, "model.trust_remote_code=true", "--dry-run").refused("never runs")


ATTACKS: tuple[Attack, ...] = (remote_code, remote_code_typed)
