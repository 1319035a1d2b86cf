"""The list of the jobs below a folder, some of which are strangers'."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from batchgen.cli.verbs import view
from batchgen.pages.viewer import jobs_below as below
from batchgen.pages.viewer.folder_site import FolderSite
from batchgen.pages.viewer.jobs_below import jobs_below
from batchgen.util.shorten import short_name
from tests.support.jobs.viewed_page import Page, get, read
from tests.support.jobs.written_job import grade_job, write_job


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Two graded jobs, one of them in a sweep, and a folder without a job."""
    folder = tmp_path / "outputs"
    for seed, name in enumerate(("first", "sweep/day/7")):
        write_job(folder / name, 20, 2, rows_per_shard=8, seed=seed)
        grade_job(folder / name, scored=True)
    (folder / "notes").mkdir()
    return folder


def links(outputs: Path) -> dict[str, str]:
    """Where each job of the list leads to, by its name."""
    return {job.name: f"{job.key}/" for job in jobs_below(outputs).jobs}


def test_the_list_names_each_job_and_leads_to_its_pages(outputs: Path) -> None:
    pages = FolderSite(outputs, "outputs")
    listed = read(pages, "")
    for text in ("2 jobs", "first", "sweep/day/7", "complete", "40", "none", "demo"):
        assert text in listed.text
    score = json.loads((outputs / "first" / "metrics.json").read_text())["score"]["avg"]["value"]
    assert f"{100 * score:.1f}%" in listed.text and "No job in: notes." in listed.text
    found = links(outputs)
    assert set(found.values()) <= set(listed.links)
    first = read(pages, found["sweep/day/7"])
    assert "../" in first.links and "complete, 20 questions, 40 answers" in first.text
    assert "What is 3 plus 0?" in read(pages, found["sweep/day/7"] + "row?n=3").text
    assert get(pages, found["first"] + "view.css").kind.startswith("text/css")


def order(outputs: Path, query: str) -> list[str]:
    """The names of the jobs that a query lists, as they stand there."""
    names = {f"{job.key}/": job.name for job in jobs_below(outputs).jobs}
    return [
        names[link] for link in read(FolderSite(outputs, "outputs"), query).links if link in names
    ]


def test_jobs_of_one_folder_stand_together_with_what_tells_them_apart(outputs: Path) -> None:
    write_job(outputs / "sweep" / "day" / "n=8,seed=1", 5, 1)
    listed = read(FolderSite(outputs, "outputs"), "")
    assert "sweep/day 2 jobs" in " ".join(listed.text.split())
    assert ("wbr", {}) in listed.tags and "n=8,seed=1" in listed.text
    assert listed.text.count("sweep/day") == 1
    metrics = json.loads((outputs / "first" / "metrics.json").read_text())
    bounds = metrics["score"]["avg"]["population"]
    assert f"{100 * bounds['low']:.1f}% to {100 * bounds['high']:.1f}%" in listed.text
    metrics["attempts"][0]["started"] = "2026-11-27T10:46:58+0000"
    (outputs / "first" / "metrics.json").write_text(json.dumps(metrics))
    assert "2026-11-27 10:46" in read(FolderSite(outputs, "outputs"), "").text


def test_the_list_is_sorted_and_filtered(outputs: Path) -> None:
    write_job(outputs / "small", 5, 1)
    path = outputs / "first" / "metrics.json"
    values = json.loads(path.read_text())
    values["score"]["avg"]["value"] = 0.01
    path.write_text(json.dumps({**values, "status": "stopped"}))
    assert order(outputs, "") == ["first", "small", "sweep/day/7"]
    assert order(outputs, "?sort=score") == ["sweep/day/7", "first", "small"]  # without one: last
    assert order(outputs, "?sort=answers")[-1] == "small"
    assert order(outputs, "?text=day+NONE") == ["sweep/day/7"]  # both words, of name and model
    assert order(outputs, "?state=stopped") == ["first"]
    assert "No job matches" in read(FolderSite(outputs, "outputs"), "?text=zzz").text
    read(FolderSite(outputs, "outputs"), "?sort=colour", 400)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("package://batchgen/data/nano_sdar/eval.jsonl", "eval.jsonl"),
        ("package://a/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"),
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("models/mine/", "mine"),
        ("/", "/"),
        ("", ""),
    ],
)
def test_short_names(path: str, name: str) -> None:
    assert short_name(path) == name


def test_two_jobs_of_the_list_side_by_side(outputs: Path) -> None:
    pages, keys = FolderSite(outputs, "outputs"), [k[:-1] for k in links(outputs).values()]
    location = pages.respond("pair", {"a": keys[0], "b": keys[1]}).location
    assert location == f"{keys[0]}-{keys[1]}/"
    assert "B is worse" in read(pages, location).text
    for query in ({"a": keys[0]}, {"a": keys[0], "b": keys[0]}):
        assert "Choose one job as A" in Page(pages.respond("pair", query)).text


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "target", ["0123/", "../", "first/", "{key}-{key}/", "{key}-0/", "{key}/../../etc/passwd"]
)
def test_nothing_else_is_served(outputs: Path, target: str) -> None:
    pages = FolderSite(outputs, "outputs")
    read(pages, target.replace("{key}", links(outputs)["first"][:-1]), 404)


def test_the_page_of_a_job_that_is_not_there_leads_back_to_the_list(outputs: Path) -> None:
    pages = FolderSite(outputs, "outputs")
    assert "../" in read(pages, "0123/rows", 404).links
    assert get(pages, "0123/base.css").kind.startswith("text/css")


def test_a_job_that_runs_says_how_far_it_is(outputs: Path) -> None:
    path = outputs / "first" / "metrics.json"
    metrics = json.loads(path.read_text())
    metrics["attempts"][-1]["rows_total"] = 4000
    path.write_text(json.dumps({**metrics, "status": "failed"}))
    listed = " ".join(read(FolderSite(outputs, "outputs"), "").text.split())
    assert "none demo 20 40 of 4,000" in listed and "failed" in listed
    path.unlink()
    assert "not begun" in read(FolderSite(outputs, "outputs"), "").text


def test_a_job_that_is_new_is_listed_and_one_that_goes_is_not(outputs: Path) -> None:
    pages = FolderSite(outputs, "outputs")
    write_job(outputs / "new", 3, 1)
    assert "3 jobs" in read(pages, "").text
    old = links(outputs)
    (outputs / "first").rename(outputs.parent / "away")
    assert "2 jobs" in read(pages, "").text
    assert "There is no such job here" in read(pages, old["first"], 404).text


def test_links_are_not_followed(outputs: Path, tmp_path: Path) -> None:
    write_job(tmp_path / "elsewhere", 3, 1)
    (outputs / "linked").symlink_to(tmp_path / "elsewhere")
    (outputs / "round").symlink_to(outputs)
    secret = tmp_path / "secret.yaml"
    secret.write_text("model: {path: the-secret}")
    (outputs / "first" / "config.yaml").unlink()
    (outputs / "first" / "config.yaml").symlink_to(secret)
    pages = FolderSite(outputs, "outputs")
    listed = read(pages, "")
    assert "Links, which are not followed: linked, round." in listed.text
    assert "config.yaml is a link" in listed.text and "the-secret" not in listed.text
    assert "2 jobs" in listed.text
    refused = read(pages, links(outputs)["first"], 404)
    assert "config.yaml is a link" in refused.text and "the-secret" not in refused.text


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("manifest.json", "[1]", "is not a manifest of batchgen"),
        ("manifest.json", "[", "is not a manifest of batchgen"),
        ("manifest.json", "[" * 100_000, "damaged"),
        ("manifest.json", "{}", "is not a manifest of batchgen"),
        ("metrics.json", "[" * 100_000, "damaged"),
        ("metrics.json", json.dumps({"status": [], "rows": "many"}), "damaged"),
        ("metrics.json", json.dumps({"rows": 3}), "damaged"),
        ("metrics.json", " " * (2**24 + 1), "bytes, more than"),
    ],
)
def test_a_damaged_job_has_a_word_and_hides_no_other(
    outputs: Path, name: str, content: str, why: str
) -> None:
    (outputs / "first" / name).write_text(content)
    pages = FolderSite(outputs, "outputs")
    listed = read(pages, "")
    assert "It cannot be shown" in listed.text and why in listed.text
    assert links(outputs)["sweep/day/7"] in listed.links
    assert why in read(pages, links(outputs)["first"], 404).text


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{{", "damaged"),
        ("x: !!python/object:os.system {}", "damaged"),
        ("\x00", "damaged"),
        ("[" * 10_000, "damaged"),
        ("a: " + "b" * 2**20, "bytes, more than"),
        ("model: 3", "not the configuration of a job"),
        ("[1, 2]", "not the configuration of a job"),
        ("", "not the configuration of a job"),
        (None, "Is a directory"),
    ],
)
def test_a_job_with_a_damaged_configuration_says_so_when_it_is_opened(
    outputs: Path, content: str | None, why: str
) -> None:
    path = outputs / "first" / "config.yaml"
    path.unlink()
    path.mkdir() if content is None else path.write_text(content)
    opened = read(FolderSite(outputs, "outputs"), links(outputs)["first"], 404)
    assert "first cannot be shown" in opened.text and why in opened.text


def test_names_are_texts(outputs: Path) -> None:
    (outputs / "first").rename(outputs / '"><b onx=1>\N{RIGHT-TO-LEFT OVERRIDE}')
    (outputs / os.fsdecode(b"\xff")).mkdir()
    listed = read(FolderSite(outputs, "<i>"), "")
    assert not {"b", "i"} & {tag for tag, _ in listed.tags}
    assert "⟨U+202E⟩" in listed.text and "⟨U+DCFF⟩" in listed.text


def test_depth_and_numbers_are_bounded(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_job(outputs / "a" / "b" / "c" / "d" / "e", 3, 1)
    assert set(links(outputs)) == {"first", "sweep/day/7"}
    bounds: list[tuple[str, Any]] = [("MOST_JOBS", 1), ("MOST_ENTRIES", 2)]
    for bound, value in bounds:
        with monkeypatch.context() as patched:
            patched.setattr(below, bound, value)
            found = jobs_below(outputs)
        assert found.is_cut and len(found.jobs) <= 1
    with monkeypatch.context() as patched:
        patched.setattr(below, "MOST_JOBS", 1)
        assert "more below this folder" in read(FolderSite(outputs, "outputs"), "").text


def test_a_folder_without_any_job_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert view.main([str(tmp_path)]) == 2
    assert "there is no job up to 4 folders below it" in capsys.readouterr().err
    assert view.main([str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
