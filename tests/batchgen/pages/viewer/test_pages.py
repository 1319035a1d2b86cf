"""The pages of `batchgen view`, of jobs that run, were killed or are graded, and of two jobs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa
import pytest

from batchgen.config.groups.output_config import ScoreConfig
from batchgen.evals.grades.folder_grades import JobGrades
from batchgen.evals.scores.job_score import job_scores, save_score
from batchgen.evals.scores.samples import Samples
from batchgen.pages.rows.row_facts import RowFacts
from batchgen.pages.viewer.job_view import votes
from batchgen.pages.viewer.pages import Site
from batchgen.storage.folder.read_job import JobFolderReader
from tests.support.jobs.fake_job import FakeJob
from tests.support.jobs.finished_job import POST, finished_job
from tests.support.jobs.finished_job import row as job_row
from tests.support.jobs.viewed_page import Page, get, read, site
from tests.support.jobs.written_job import grade_job, write_job

EVIL = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "'></pre></title><style>*{}</style>",
    "{{ 7 * 7 }} \N{RIGHT-TO-LEFT OVERRIDE}\N{ZERO WIDTH SPACE} ]]>",
    "back\\slash and long: " + "\u4e2d" * 2000,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two graded jobs with the same questions."""
    folders = [tmp_path_factory.mktemp("pair") / name for name in "ab"]
    for seed, folder in enumerate(folders):
        write_job(folder, 60, 2, rows_per_shard=25, texts=EVIL, seed=seed, errors=0.05)
        grade_job(folder, scored=True)
    return folders


@pytest.fixture(scope="module")
def pair_site(pair: list[Path]) -> Site:
    return site(*pair)


def crawl(pages: Site, first: str) -> dict[str, Page]:
    """Pages that links lead to, a few of each kind."""
    seen: dict[str, Page] = {}
    todo, count = deque([first]), Counter[str]()
    while todo:
        target = todo.popleft()
        path = urlsplit(target).path
        if target in seen or count[path] == 5:
            continue
        count[path] += 1
        response = get(pages, target)
        assert response.status in (200, 404), (target, response.body.decode())
        seen[target] = Page(response)
        for link in seen[target].links:
            parts = urlsplit(link)
            assert not parts.scheme and not parts.netloc and "/" not in parts.path[2:], link
            todo.append(link.partition("#")[0])
    return seen


@pytest.mark.thorough
def test_every_page_keeps_texts_texts(pair: list[Path], pair_site: Site) -> None:
    """Whatever answers hold, the elements of pages are those of the templates."""
    pages = crawl(pair_site, "rows?from=40") | crawl(site(pair[0]), "./")
    assert {"row", "rows", "./", "flip", "step"} <= {urlsplit(t).path for t in pages}
    for target, page in pages.items():
        scripts = [attrs for tag, attrs in page.tags if tag == "script"]
        assert scripts == [{"src": "keys.js", "defer": None}], target
        assert not {tag for tag, _ in page.tags} & {"img", "style", "iframe", "base"}, target
        names = {name for _, attrs in page.tags for name in attrs}
        assert not any(name.startswith("on") or name == "style" for name in names), target
    shown = pages["./"].text + pages["rows?from=40"].text
    assert "<script>alert(1)</script>" in shown and "⟨U+202E⟩" in shown
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in shown


def test_names_that_try_to_break_out(tmp_path: Path) -> None:
    """Ids, columns, types of errors and folders are strangers' texts, too."""
    folder = tmp_path / 'o"><b>'
    FakeJob(str(folder), rows=14, text_column='"><i>').run()
    path = folder / "metrics.json"
    metrics = json.loads(path.read_text())
    metrics["errors"] = {'"><u onx=1>': 3}
    path.write_text(json.dumps(metrics))
    pages = site(folder)
    for target in ("", "rows", "row?n=3&x='><s>", "find?id=<s>", "rows?text=\"'><s>", "<s>?<s>"):
        tags = {tag for tag, _ in Page(get(pages, target)).tags}
        assert not tags & {"i", "u", "s"} and "b" not in tags - {"b"}, target
    assert '"><i>' in read(pages, "rows").text


def test_lists_and_their_links(pair: list[Path]) -> None:
    pages = site(pair[0])
    first = read(pages, "rows")
    assert "Rows 0 to 49 (of 60, from 0)" in first.text
    later = read(pages, next(link for link in first.links if link.startswith("rows?from=")))
    assert "Rows 50 to 59 (of 60, from 0)" in later.text and "rows?from=0" in later.links
    wrong = read(pages, "rows?mark=wrong&text=SCRIPT")
    assert "searched 120 answers from row 0 to the end" in wrong.text
    row = next(link for link in wrong.links if link.startswith("row?"))
    assert dict(parse_qsl(row.partition("?")[2])).keys() == {"mark", "text", "n"}
    after = next(link for link in read(pages, row).links if link.startswith("step?") and "to" not in
                 dict(parse_qsl(link.partition("?")[2])))  # fmt: skip
    assert read(pages, after).text.count("wrong") and "mark=wrong" in after
    assert "No such row" in read(pages, "rows?text=nothing+like+it").text
    assert "No finished row from here on" in read(pages, "rows?from=60").text


def test_a_row_with_its_samples_and_tokens(pair: list[Path]) -> None:
    pages = site(pair[0])
    row = read(pages, "row?n=7&sample_a=1")
    classes = [attrs.get("class") or "" for tag, attrs in row.tags if tag == "a"]
    chips = [name.split() for name in classes if name.startswith("chip")]
    assert ["current" in chip for chip in chips] == [False, True]
    assert "What is 7 plus 0?" in row.text and "toks" not in str(row.tags)
    tokens = read(pages, "row?n=7&sample_a=1&tokens=yes")
    assert "tokens are shown by their ids" in tokens.text
    assert any(attrs.get("class") == "toks" for _, attrs in tokens.tags)
    assert "There is no such row before row 0" in read(pages, "step?n=0&to=back", 404).text
    assert "There is no such row after row 59" in read(pages, "step?n=59", 404).text
    assert "is not finished, or there is none" in read(pages, "row?n=60", 404).text


@pytest.mark.parametrize(
    ("target", "status", "message"),
    [
        ("row", 400, "n must be a whole number"),
        ("row?n=-1", 400, "n must be a whole number"),
        ("row?n=1e3", 400, "n must be a whole number"),
        ("row?n=" + "9" * 18, 404, "is not finished, or there is none"),
        ("row?n=1&sample_a=x", 400, "sample_a must be"),
        ("rows?mark=x", 400, "mark must be one of"),
        ("rows?from=x", 400, "from must be"),
        ("rows?text=x&column=row_index", 400, "no text column"),
        ("find?id=nobody", 404, "No finished row of jobs/a has the row_id 'nobody'"),
        ("find", 404, "has the row_id ''"),
        ("flip?i=0", 404, "need two jobs"),
        ("report?job=0", 404, "no report"),
        ("report?job=7", 404, "no report"),
        ("../config.yaml", 404, "There is no such page"),
        ("data/part-00000.parquet", 404, "There is no such page"),
        ("keys.js/../view.css", 404, "There is no such page"),
        ("%2e%2e/config.yaml", 404, "There is no such page"),
    ],
)
def test_pages_that_are_not_there(pair: list[Path], target: str, status: int, message: str) -> None:
    assert message in read(site(pair[0]), target, status).text


def test_files_of_its_own() -> None:
    pages = Site([])
    for name, kind in {"keys.js": "text/javascript", "base.css": "text/css", "row.css": "text/css",
                       "view.css": "text/css", "icon.svg": "image/svg+xml"}.items():  # fmt: skip
        assert pages.respond(name, {}).kind.partition(";")[0] == kind
        assert b"http" not in pages.respond(name, {}).body.replace(b"http://www.w3.org/", b"")


def test_the_report_of_a_job_runs_nothing(tmp_path: Path) -> None:
    write_job(tmp_path / "out", 2, 1)
    (tmp_path / "out" / "report.html").write_text("<script>alert(1)</script>")
    pages = site(tmp_path / "out")
    assert "report?job=0" in read(pages, "").links
    found = get(pages, "report?job=0")
    assert found.body == b"<script>alert(1)</script>"
    assert "default-src 'none'" in found.policy and "script-src" not in found.policy
    assert found.policy.endswith("; sandbox")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "out" / "report.html").unlink()
    (tmp_path / "out" / "report.html").symlink_to(tmp_path / "secret")
    assert get(pages, "report?job=0").status == 404


def test_a_job_that_runs(tmp_path: Path) -> None:
    """Rows of shards and journals are there as they finish, also without grades."""
    folder = tmp_path / "out"
    job = FakeJob(str(folder), rows=40, rows_per_shard=4, bad=False)
    with pytest.raises(RuntimeError, match="fell off the bus"):
        replace(job, fail_at_step=9).run()
    assert list((folder / "data").iterdir()) and list((folder / "journal").iterdir())
    pages = site(folder)
    assert "failed, " in read(pages, "").text and "have no grades" in read(pages, "").text
    rows = list(JobFolderReader(folder).rows(["row_index", "row_id", "text"]))
    listed = read(pages, "rows").text
    assert all(row["row_id"] in listed for row in rows)
    for row in (rows[0], rows[-1]):
        first, *_ = JobFolderReader(folder).find(row["row_id"])
        assert first["text"] in read(pages, f"find?id={row['row_id']}").text
    missing = sorted(set(range(40)) - {row["row_index"] for row in rows})
    read(pages, f"row?n={missing[0]}", 404)
    assert "this job has no grades" in read(pages, "rows?mark=right", 400).text
    job.run()
    assert f"id{missing[0]}" in read(pages, f"row?n={missing[0]}").text
    assert "complete, 40 questions, 80 answers" in read(pages, "").text


def test_a_job_without_a_finished_row(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        FakeJob(str(tmp_path / "out"), bad=False, fail_at_step=1).run()
    pages = site(tmp_path / "out")
    assert "No row is finished yet" in read(pages, "").text
    assert "No finished row from here on" in read(pages, "rows").text
    assert "No such row" in read(pages, "rows?text=x").text
    read(pages, "row?n=0", 404)
    read(pages, "find?id=id0", 404)


def test_a_second_job_that_has_just_begun(pair: list[Path], tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        FakeJob(str(tmp_path / "out"), bad=False, fail_at_step=1).run()
    pages = site(pair[0], tmp_path / "out")
    for target in ("", "rows", "row?n=3"):
        assert "What is 3 plus 0?" in read(pages, target).text or not target
    assert "is not complete" in read(pages, "").text


def test_two_jobs_side_by_side(pair_site: Site) -> None:
    pages = pair_site
    assert "sample_b=1" in str(read(pages, "row?n=5").links)
    flips = read(pages, "")
    assert "B is worse" in flips.text and "B − A" in flips.text
    first = read(pages, "flip?i=0")
    assert "Next flipped" in first.text and "flip?i=1" in first.links
    assert "Previous flipped" not in first.text
    assert "flip?i=0" in read(pages, "flip?i=1").links
    count = sum(int(n) for n in re.findall(r"B is (?:worse|better) \((\d+)\)", flips.text))
    assert count > 5 and read(pages, f"flip?i={count}", 404)
    assert len([link for link in flips.links if link.startswith("flip?")]) == min(count, 50)


def test_the_first_page_of_two_jobs_says_in_what_they_differ(tmp_path: Path) -> None:
    for name, heat in (("a", 0.5), ("b", 1.0)):
        rows = [job_row(i, 0, "yes" if i % 3 or name == "a" else "no") for i in range(30)]
        config = {"sampling": {"temperature": heat, "top_p": 0.9}, "prompt": {"user": "<i>"}}
        finished_job(tmp_path / name, rows, graded=True, config=config)
    text = "".join(read(site(tmp_path / "a", tmp_path / "b"), "").text.split())
    assert "Whatdifferssampling.temperature0.51.0Differencequestions30inboth" in text
    assert "top_p" not in text[: text.index("Difference")]
    assert re.search(r"B−A-33\.3points,-[0-9.]+to-[0-9.]+,p", text)
    assert text.index("Difference") < text.index("Flippedrows") < text.index("Bisworse:")
    same = read(site(tmp_path / "a", copied(tmp_path / "a", tmp_path / "c")), "")
    assert "No setting that decides answers." in same.text


def copied(job: Path, to: Path) -> Path:
    shutil.copytree(job, to)
    return to


def test_flipped_rows_show_the_question_the_target_and_both_answers(tmp_path: Path) -> None:
    """The samples that differ most, and the same ones on the page of the row."""
    texts = {"a": [("no", "yes"), ("yes", "yes")] * 40, "b": [("no", "no"), ("yes", "yes")] * 40}
    for name, answers in texts.items():
        rows = [
            job_row(i, k, text) for i, pair in enumerate(answers) for k, text in enumerate(pair)
        ]
        finished_job(tmp_path / name, rows, graded=True, config={"sampling": {"n": 2}})
    pages = site(tmp_path / "a", tmp_path / "b")
    listed = read(pages, "")
    assert "B is worse (40)" in listed.text and "1 to 40 of 40 flipped rows" in listed.text
    first = " ".join(listed.text[listed.text.index("id0") :].split())
    assert first.startswith(
        "id0 B is worse: 50.0% to 0.0% target yes question 0 A right yes answer yes B wrong no "
        "answer no id2 "
    )
    query = dict(parse_qsl(str(pages.respond("flip", {"i": "0"}).location).partition("?")[2]))
    assert query == {"n": "0", "flip": "0", "sample_a": "1", "sample_b": "0"}
    assert "No flipped rows from here on" in read(pages, "?from=40").text
    assert "B is better (40)" in read(site(tmp_path / "b", tmp_path / "a"), "?from=20").text


def test_two_jobs_show_the_prompt_once_and_how_their_texts_differ(tmp_path: Path) -> None:
    texts: dict[str, list[str | None]] = {
        "a": ["so it is 18.", "same", None],
        "b": ["so it is 19.", "same", "x"],
    }
    for name, said in texts.items():
        rows = [job_row(i, 0, text) for i, text in enumerate(said)]
        finished_job(tmp_path / name, rows)
    pages = site(tmp_path / "a", tmp_path / "b")
    row = read(pages, "row?n=0")
    assert row.text.count("Q: question 0") == 1
    assert "1 word only in A, 1 only in B" in row.text
    shown = get(pages, "row?n=0").body.decode()
    assert '<del title="only in A">18</del><ins title="only in B">19</ins>' in shown
    assert "Both texts have the same words" in read(pages, "row?n=1").text
    assert "Difference of" not in read(pages, "row?n=2").text
    config = tmp_path / "b" / "config.yaml"
    config.write_text(config.read_text().replace("Q: {{", "Question: {{"))
    other = read(site(tmp_path / "a", tmp_path / "b"), "row?n=0").text
    assert "Q: question 0" in other and "Question: question 0" in other


def test_jobs_in_another_order_are_joined_by_id(tmp_path: Path) -> None:
    """A and B have the same ids at other places, and each one that the other lacks."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(folders):
        write_job(folder, 30, 1, rows_per_shard=7, ids="shuffled", seed=number)
    a, b = (
        {
            row["row_id"]: row["row_index"]
            for row in JobFolderReader(f).rows(["row_id", "row_index"])
        }
        for f in folders
    )
    assert a == b
    rename(folders[1], lambda index: list(a)[29 - index] if index else "only in b")
    pages = site(*folders)
    listed = read(pages, "rows").text
    assert listed.count("has no finished row with this id") == 1
    text = next(row["text"] for row in JobFolderReader(folders[1]).rows() if row["row_index"] == 25)
    assert text in read(pages, "row?n=4").text
    assert "has no finished row with this id" in read(pages, "row?n=29").text


def rename(folder: Path, name: Any) -> None:
    """Give the rows of a job other ids."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in (folder / "data").iterdir():
        table = pq.read_table(path)
        ids = pa.array([name(index) for index in table["row_index"].to_pylist()])
        pq.write_table(table.set_column(0, table.schema.field(0), ids), path)


@pytest.mark.thorough
def test_what_cannot_be_compared_says_why(pair: list[Path], tmp_path: Path) -> None:
    write_job(tmp_path / "bare", 60, 2, rows_per_shard=25)
    ungraded = site(pair[0], tmp_path / "bare")
    assert "has no grades" in read(ungraded, "").text
    assert "What is 5 plus 0?" in read(ungraded, "row?n=5").text
    other = tmp_path / "other"
    write_job(other, 60, 2, rows_per_shard=25)
    config = other / "config.yaml"
    config.write_text(config.read_text().replace("{{ question }}", "{{ question }} Now!"))
    grade_job(other, scored=True)
    pages = site(pair[0], other)
    refused = read(pages, "")
    assert "are different exams" in refused.text and "./?anyway=yes" in refused.links
    assert "Different exams" in read(pages, "?anyway=yes").text
    assert "Next flipped" in read(pages, "flip?i=0&anyway=yes").text
    assert "are different exams" in read(pages, "flip?i=0", 400).text


@pytest.mark.thorough
def test_the_server_starts_without_the_libraries_of_models(tmp_path: Path) -> None:
    write_job(tmp_path / "out", 3, 1)
    program = """
import sys
from pathlib import Path
from batchgen.cli.verbs import view
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.pages.viewer.job_view import JobView
from batchgen.pages.viewer.job_view import votes
from batchgen.pages.viewer.pages import Site
from batchgen.pages.viewer.server import ViewServer
site = Site([JobView(JobFolderReader(Path(sys.argv[1])), "out")])
for page, keys in (("", ""), ("rows", ""), ("row", "n"), ("row", "n tokens")):
    assert site.respond(page, dict.fromkeys(keys.split(), "1")).status == 200
print({"torch", "transformers", "datasets"} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "out")],
        capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[4],
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("set()\n", 0), done.stderr


def test_a_folder_that_goes_away(tmp_path: Path) -> None:
    write_job(tmp_path / "out", 3, 1)
    pages = site(tmp_path / "out")
    read(pages, "rows")
    (tmp_path / "out").rename(tmp_path / "gone")
    assert "has been deleted: start batchgen view again" in read(pages, "rows", 404).text


def test_sorted_lists_and_their_rows(pair: list[Path]) -> None:
    """The next row is the next one of the order, also over the end of a page."""
    pages = site(pair[0])
    first = read(pages, "rows?sort=longest&least=1")
    assert "1 to 50 of" in first.text and "answers were looked at" in first.text
    notes = [int(n) for n in re.findall(r"(\d+) tokens\n", first.text)]
    assert len(notes) == 50 and notes == sorted(notes, reverse=True)
    places = [link for link in first.links if link.startswith("row?")]
    assert "51 to" in read(pages, "rows?sort=longest&least=1&from=50").text
    row = read(pages, places[0])
    order = list(dict.fromkeys(dict(parse_qsl(urlsplit(link).query))["n"] for link in places))
    assert "rows?least=1&sort=longest" in row.links
    after = next(link for link in row.links if link.startswith("step?") and "to=" not in link)
    location = pages.respond("step", dict(parse_qsl(urlsplit(after).query))).location
    assert dict(parse_qsl(urlsplit(str(location)).query))["n"] == order[1]
    assert "has no row before this one" in read(
        pages, f"step?n={order[0]}&sort=longest&least=1&to=back", 404
    ).text  # fmt: skip
    assert "sort must be one of" in read(pages, "rows?sort=x", 400).text


def test_votes_and_downloads(pair: list[Path]) -> None:
    pages = site(pair[0])
    listed = read(pages, "rows?mark=wrong&show=votes&sort=disagreeing")
    assert "agreement 50%" in listed.text and re.search(r"1 × \d+ wrong", listed.text)
    assert "target" in listed.text
    found = pages.respond("download", {"mark": "wrong", "format": "jsonl"})
    assert found.chunks is not None and found.file_name == "a-rows.jsonl"
    lines = [json.loads(line) for line in b"".join(found.chunks).splitlines()]
    assert lines and {line["mark"] for line in lines} == {0.0}
    assert "format must be" in read(pages, "download?format=exe", 400).text


def test_votes_show_answers_and_not_their_keys(tmp_path: Path) -> None:
    """The key of a mathematical answer is nothing to read."""

    def sample(number: int, **grades: Any) -> RowFacts:
        row = job_row(0, number, "text" if grades else None)
        return RowFacts(row, grades or None)

    math = [
        sample(0, mark=1.0, answer="1/2", answer_key="Rational(1, 2)"),
        sample(1, mark=1.0, answer="0.5", answer_key="Rational(1, 2)"),
        sample(2, mark=0.0, answer=None, answer_key=None),
        sample(3),
    ]
    assert [(vote.shown, vote.count) for vote in votes(math)] == [
        ("1/2", 2), ("no answer", 1), ("no answer", 1),
    ]  # fmt: skip
    without_column = [sample(0, mark=1.0, answer_key="b"), sample(1, mark=1.0, answer_key="b")]
    assert [(vote.shown, vote.count) for vote in votes(without_column)] == [("b", 2)]


def test_subsets_have_a_table_and_a_filter(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    fields = [pa.field("topic", pa.int64())]
    rows = [job_row(i, text="yes" if i % 3 else "no", topic=i % 2) for i in range(12)]
    finished_job(folder, rows, fields, config={"score": {"subset": "topic"}})
    JobGrades(folder).make(POST, "text", ScoreConfig())
    save_score(folder, job_scores(Samples(folder, ScoreConfig(subset="topic"))))
    pages = site(folder)
    first = read(pages, "")
    assert "rows?subset=1" in first.links and "66.7%" in first.text
    listed = read(pages, "rows?subset=1&mark=wrong")
    ids = [row["row_id"] for row in rows if row["topic"] == 1 and row["text"] == "no"]
    assert re.findall(r"id\d+", listed.text) == ids
    bare = tmp_path / "bare"
    write_job(bare, 3, 1)
    assert "this job has no subsets" in read(site(bare), "rows?subset=1", 400).text
