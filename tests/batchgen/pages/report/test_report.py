"""The page about a job: what it says, that it is safe, and that it stays small."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batchgen.cli.verb_table import run_verb
from batchgen.config.groups.output_config import CutTexts, ScoreConfig
from batchgen.evals.scores.job_score import job_scores, save_score
from batchgen.evals.scores.samples import Samples
from batchgen.pages.report import write_report
from batchgen.pages.report.charts import timeline_charts
from batchgen.pages.report.eval_charts import Estimate, intervals
from batchgen.pages.report.pass_rates import PassRates
from batchgen.pages.report.report_data import (
    MOST_QUESTIONS,
    MOST_ROWS,
    Collected,
    Lengths,
    collect_report,
)
from batchgen.pages.report.report_rows import JobData
from batchgen.pages.report.token_facts import token_facts
from batchgen.pages.report.write_report import MOST_BYTES, is_up_to_date, make_report, try_report
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.stores.folder_storage import FolderStorage
from batchgen.util.errors import ConfigError, JobError
from tests.support.jobs.finished_job import finished_job, row

EVIL = "<script>alert(1)</script>\"><img src=x onerror=alert(1)></style></svg>]]>\u202e'"
VOID = {"meta", "input", "br", "img", "link"}


class Page(HTMLParser):
    """What a page is made of.

    Attributes:
        tags: of all elements.
        attributes: names of all attributes.
        ids: all values of `id`.
        links: all values of `href`.
        text: what is shown, one piece after the other.
        open: elements that are not closed.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.ids: list[str] = []
        self.links: set[str] = set()
        self.text = ""
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.add(name)
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href"):
                self.links.add(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(job: Path) -> tuple[str, Page]:
    html = make_report(job, lambda ids: "".join(map(chr, ids))).read_text(encoding="utf-8")
    return html, Page(html)


def exam(questions: int = 6, samples: int = 4) -> list[dict[str, Any]]:
    """Question i has i right samples, as far as there are so many."""
    return [
        row(i, k, "yes" if k < i else "no", stop=None)
        for i in range(questions)
        for k in range(samples)
    ]


def collected(job: Path) -> Collected:
    return collect_report(JobData(JobFolderReader(job)))


@pytest.mark.parametrize(
    ("count_as", "marked", "right"), [("as_marked", 6, 3), ("wrong", 6, 1), ("left_out", 3, 1)]
)
def test_charts_count_cut_texts_as_the_scores_do(
    tmp_path: Path, count_as: CutTexts, marked: int, right: int
) -> None:
    """Rows are chosen by the marks that they show."""
    rows = [row(i, text="yes" if i < 3 else "no") for i in range(6)]
    for place in (0, 1, 3):
        rows[place]["finish_reason"] = "length"
    job = finished_job(tmp_path / "job", rows, graded=True)
    found = collect_report(JobData(JobFolderReader(job)), count_as)
    assert (found.output.marked.sum(), found.output.marks.sum()) == (marked, right)
    questions = np.concatenate([question.marks for question in found.questions])
    assert (np.isfinite(questions).sum(), np.nansum(questions)) == (marked, right)
    assert found.picked["wrong"].seen == 3 and found.picked["cut"].seen == 3


def test_a_graded_job_is_told_with_intervals_questions_and_rows(tmp_path: Path) -> None:
    rows = [*exam(), row(6, text=None), row(7, text="no " * 40, finish_reason="length")]
    job = finished_job(tmp_path / "job", rows, graded=True)
    html, page = read(job)
    score = json.loads((job / "metrics.json").read_text())["score"]["avg"]
    assert f"{100 * score['value']:.1f}%" in page.text
    assert f"new questions {100 * score['population']['low']:.1f}% to" in page.text
    for what in ("pass@4", "Score against length", "Questions", "bad_row", "row 6", "Attempts"):
        assert what in page.text
    assert "3 have samples that disagree" in page.text
    assert page.text.count("link to this row") == len(rows)
    assert "wrong 11" in page.text and "samples disagree 12" in page.text
    assert html.count('class="item') == len(rows)


def test_all_links_lead_to_a_place_in_the_page(tmp_path: Path) -> None:
    _, page = read(finished_job(tmp_path / "job", exam(), graded=True))
    assert not page.open
    assert len(set(page.ids)) == len(page.ids)
    assert page.links and {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert "#row-3-0" in page.links


def test_nothing_is_loaded_or_run_and_the_policy_says_so(tmp_path: Path) -> None:
    html, page = read(finished_job(tmp_path / "job", exam(), graded=True))
    assert not page.tags & {"script", "img", "link", "iframe", "object", "embed", "form", "base"}
    assert "style" not in page.attributes
    assert "url(" not in html and "@import" not in html
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None and "script-src" not in policy[1]
    directives = policy[1].replace("&#39;", "'").split("; ")
    assert directives[:2] == ["default-src 'none'", f"style-src 'sha256-{digest}'"]


def test_text_from_outside_stays_text_wherever_it_stands(tmp_path: Path) -> None:
    error = {"type": EVIL, "message": EVIL}
    rows = [
        row(0, text=EVIL, row_id=EVIL, question=EVIL, stop=EVIL, finish_reason=EVIL, target=EVIL),
        row(1, text=None, error=error, row_id=EVIL + "1"),
    ]
    for given in rows:
        given[EVIL] = EVIL
    column = pa.field(EVIL, pa.string(), metadata={"meaning": "as in the input"})
    group = {"path": EVIL, "name": EVIL, EVIL: EVIL}
    job = finished_job(
        tmp_path / "job",
        rows,
        [column],
        graded=True,
        config={"model": group, "dataset": group, "sampling": {"temperature": 0.0, "n": 1}},
    )
    (job / "config.yaml").write_text((job / "config.yaml").read_text() + f"# {EVIL}\n")
    html, page = read(job)
    assert not page.open
    assert not page.tags & {"script", "img"}
    assert not {name for name in page.attributes if name.startswith("on")}
    assert page.text.count("<script>alert(1)</script>") > 10
    assert "\u202e" not in html and "⟨U+202E⟩" in page.text


@pytest.mark.thorough
def test_the_page_has_a_greatest_size(tmp_path: Path) -> None:
    texts = ["x" * 300_000, "word " * 60_000, "\u202e" * 50_000, "<&>" * 90_000]
    rows = [row(i, text=text, token_ids=[65] * 900) for i, text in enumerate(texts * 2)]
    rows += [row(20 + i, text="no", row_id=text) for i, text in enumerate(texts)]
    job = finished_job(tmp_path / "job", rows, config={"extra": {"long": "y" * 200_000}})
    html, page = read(job)
    assert len(html.encode()) < MOST_BYTES
    assert page.text.count("link to this row") == len(rows)
    assert "characters left out" in page.text and "tokens left out" in page.text


@pytest.mark.thorough
def test_rows_without_room_are_shortened_and_then_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row(i, text=f"{i} " + "word " * 2000) for i in range(20)]
    job = finished_job(tmp_path / "job", rows, graded=True)
    sizes = {}
    for most in (600_000, 300_000, 80_000):
        monkeypatch.setattr(write_report, "MOST_BYTES", most)
        html, page = read(job)
        assert len(html.encode()) < most
        sizes[most] = page.text.count("link to this row")
        assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert sizes[600_000] == sizes[300_000] == 20 > sizes[80_000] > 0
    assert "had no room" in page.text


@pytest.mark.thorough
def test_many_rows_are_chosen_for_what_they_show(tmp_path: Path) -> None:
    rows = [row(i, k, "yes" if (i * 7 + k) % 5 else "no") for i in range(500) for k in range(2)]
    rows[100] = row(50, 0, text=None)
    rows[301] = row(150, 1, text="yes, it is " * 9, finish_reason="length")
    job = finished_job(tmp_path / "job", rows, in_shard=128, graded=True)
    found = collected(job)
    chosen = found.chosen()
    assert len(chosen) == MOST_ROWS
    assert "error" in chosen[50 << 31] and {"cut", "longest"} <= set(chosen[150 << 31 | 1])
    assert sum("disagreeing" in reasons for reasons in chosen.values()) == 40
    assert len(found.questions) == MOST_QUESTIONS and found.num_questions == 500
    assert found.disagreeing == sum(
        len({r["text"] for r in rows[i : i + 2] if r["text"] in ("yes", "no")}) == 2
        for i in range(0, 1000, 2)
    )
    _, page = read(job)
    assert "200 of 1,000 answers, chosen at random and for what they show" in page.text
    assert page.text.count("link to this row") == MOST_ROWS


def test_the_pass_counts_what_plain_python_counts(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = [
        row(i, k, "yes"[: random.integers(1, 4)]) if random.random() > 0.1 else row(i, k, None)
        for i in range(150)
        for k in range(3)
    ]
    found = collected(finished_job(tmp_path / "job", rows, in_shard=90, graded=True))
    lengths = [r["num_generated_tokens"] for r in rows if r["text"] is not None]
    assert found.rows == len(rows)
    assert found.reasons == {"stop": len(lengths), "error": len(rows) - len(lengths)}
    assert found.errors == {"bad_row": len(rows) - len(lengths)}
    assert found.output.counts.tolist() == np.bincount(lengths).tolist()
    assert found.output.mean == pytest.approx(np.mean(lengths))
    assert found.output.quantile(0.5) == int(np.quantile(lengths, 0.5, method="inverted_cdf"))
    assert found.output.marks.tolist() == [0, 0, 0, lengths.count(3)]
    marks = {(q.row_id, k): m for q in found.questions for k, m in enumerate(q.marks.tolist())}
    for given in rows:
        mark = marks[given["row_id"], given["sample_index"]]
        expected = None if given["text"] is None else float(given["text"] == "yes")
        assert (None if np.isnan(mark) else mark) == expected


def test_lengths_of_no_rows() -> None:
    assert Lengths().quantile(0.5) == 0 and Lengths().total == 0


def test_tokens_of_a_step_drafts_and_experts_are_counted(tmp_path: Path) -> None:
    experts = pa.field(
        "routed_experts",
        pa.list_(pa.list_(pa.list_(pa.uint8(), 2), 1)),
        metadata={"scope": "context", "moe_layers": "[4]"},
    )
    steps = pa.field("step_map", pa.list_(pa.int32()), metadata={"scope": "output"})
    drafts = pa.field("draft_accepted", pa.list_(pa.bool_()), metadata={"scope": "output"})
    rows = [
        row(0, text="abc", step_map=[1, 1, 2], draft_accepted=[True, False, False],
            routed_experts=[[[0, 1]], [[0, 2]]]),
        row(1, text="de", step_map=[1, 1], draft_accepted=[True, False],
            routed_experts=[[[3, 0]]]),
        row(2, text=None, step_map=[], draft_accepted=[], routed_experts=[]),
    ]  # fmt: skip
    job = finished_job(
        tmp_path / "job",
        rows,
        [steps, drafts, experts],
        config={"strategy": {"_target_": "batchgen.strategies.ar_spec.strategy.ARSpecStrategy"}},
        metrics={"counts": {"num_forwards": 3, "num_draft_tokens": 9, "num_accepted_tokens": 2}},
    )
    facts = token_facts(JobData(JobFolderReader(job)))
    assert facts.per_step == {2: 2, 1: 1} and facts.accepted == {1: 2, 0: 1}
    assert facts.experts is not None and facts.experts.tolist() == [[3, 1, 1, 1]]
    assert facts.layers == [4]
    _, page = read(job)
    for what in (
        "Speculation",
        "2 of 9 drafts were accepted (22.2%)",
        "Load of experts",
        "Tokens of a forwa",
    ):
        assert what in page.text


def test_time_and_blocks_come_from_the_metrics(tmp_path: Path) -> None:
    points = [[i / 10, i, 100 * i] for i in range(1, 60)]
    job = finished_job(tmp_path / "job", exam(), metrics={"timeline": points})
    metrics = json.loads((job / "metrics.json").read_text())
    metrics["attempts"][0]["engine"] = {"strategy": {"steps_per_block": {"1": 9, "2": 1}}}
    (job / "metrics.json").write_text(json.dumps(metrics))
    _, page = read(job)
    for what in ("Speed over time", "Answers over time", "1,000", "Steps of a block", "90%"):
        assert what in page.text


def test_a_job_that_is_not_complete_is_told_as_far_as_it_is(tmp_path: Path) -> None:
    rows = [row(i) for i in range(5)]
    _, page = read(finished_job(tmp_path / "job", rows, metrics={"status": "stopped"}))
    assert "not complete (stopped)" in page.text
    assert page.text.count("link to this row") == 5
    empty = finished_job(tmp_path / "empty", [], metrics={"status": "killed"})
    _, page = read(empty)
    assert "not complete (killed)" in page.text and "Rows" not in page.text.split("Written by")[1]


def test_grades_of_other_rows_are_not_shown(tmp_path: Path) -> None:
    job = finished_job(tmp_path / "job", exam(), in_shard=8, graded=True)
    (job / "grades" / "part-00001.parquet").unlink()
    _, page = read(job)
    assert "run `batchgen grade` again" in page.text
    assert "graded_against" not in page.text


def test_a_timeline_without_time_has_no_charts() -> None:
    assert timeline_charts([[0.0, 0, 0], [0.0, 1, 0], [0.0, 2, 5]]) == []


def test_the_first_subsets_may_have_no_values(tmp_path: Path) -> None:
    """The chart shows the first 100 of the subsets."""
    fields = [pa.field(name, kind) for name, kind in (("n", pa.float64()), ("kind", pa.string()))]
    rows = [row(i, n=None if i < 110 else 2.5, kind=f"k{i:03}") for i in range(120)]
    job = finished_job(tmp_path / "job", rows, fields, graded=True)
    save_score(job, job_scores(Samples(job, ScoreConfig(column="n", subset="kind"))))
    assert "The first 100 of 120." in read(job)[0]


def test_a_group_of_rows_may_have_the_name_of_all() -> None:
    values = {
        "row_id": ["a", "b"], "outcome": ["enough", "exhausted"], "num_valid": [2, 0],
        "num_samples": [2, 4], "kind": ["all", "other"],
    }  # fmt: skip
    rates = PassRates()
    rates.add(pa.table(values), np.array([0, 1]), "kind")
    assert rates.outcomes == {"enough": 1, "exhausted": 1}
    assert [line[:2] for line in rates.table()] == [("all", "2"), ("all", "1"), ("other", "1")]


def test_a_report_that_cannot_be_made_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = finished_job(tmp_path / "job", exam())
    (job / "data" / "part-00000.parquet").write_bytes(b"broken")
    assert try_report(job) is None
    said = capsys.readouterr().err
    assert "warning: " in said and f"`batchgen report {job}` tries again" in said
    with pytest.raises(JobError, match="damaged"):
        make_report(job)


def test_a_report_is_up_to_date_until_the_metrics_change(tmp_path: Path) -> None:
    job = finished_job(tmp_path / "job", exam())
    assert not is_up_to_date(FolderStorage(job))
    make_report(job)
    assert is_up_to_date(FolderStorage(job))
    (job / "metrics.json").write_text((job / "metrics.json").read_text())
    assert not is_up_to_date(FolderStorage(job))


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = finished_job(tmp_path / "job", exam(), graded=True)
    assert run_verb("report", [str(job)]) == 0
    assert capsys.readouterr().out == f"{job}/report.html\n"
    old = (job / "report.html").read_text()
    assert run_verb("score", [str(job), "score.ks=3", "--save"]) == 0
    new = (job / "report.html").read_text()
    assert "pass@3" in new and "pass@3" not in old
    assert run_verb("report", [str(tmp_path / "none")]) == 2
    with pytest.raises(ConfigError):
        make_report(tmp_path)


@pytest.mark.thorough
def test_metrics_that_say_anything_end_in_a_page_or_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stranger's metrics.json: each key away or of another type, and no JSON at all."""
    job = finished_job(tmp_path / "job", exam(), graded=True)
    path = job / "metrics.json"
    whole = json.loads(path.read_text())
    texts = ["", "[]", "7", '{"status": "running", "attempts": 3}', "[" * 100_000]
    wrong: list[Any] = [None, "x", [], {}, [1], -1]
    for key in whole:
        others = [{name: value for name, value in whole.items() if name != key}]
        others += [whole | {key: value} for value in wrong]
        texts += map(json.dumps, others)
    for text in texts:
        path.write_text(text)
        assert run_verb("report", [str(job)]) in (0, 1)
        assert "Traceback" not in capsys.readouterr().err


def test_the_page_opens_on_what_is_wrong(tmp_path: Path) -> None:
    rows = [row(i, k, "yes") for i in range(4) for k in range(2)]
    rows[3] = row(1, 1, text=None)
    rows[4] = row(2, 0, text="no", finish_reason="length")
    rows[7] = row(3, 1, text="yes", finish_reason="length")
    html, page = read(finished_job(tmp_path / "job", rows, graded=True))
    said = " ".join(page.text.split())
    assert (
        "Of 8 answers: 1 ended with an error, 1 wrong or partly wrong, 2 cut at max_new_tokens."
        in said
    )
    order = re.findall(r'class="row" id="row-(\d-\d)"', html)
    assert order == ["1-1", "2-0", "3-1", "0-0", "0-1", "1-0", "2-1", "3-0"]
    assert said.count("sample 0") == said.count("sample 1") == 4
    assert {"#row-1-1", "#row-2-0"} <= page.links


def test_a_job_without_faults_says_so_and_a_job_of_one_sample_numbers_none(tmp_path: Path) -> None:
    _, page = read(finished_job(tmp_path / "graded", [row(0)], graded=True))
    assert "No answer failed, is wrong or was cut." in page.text and "sample 0" not in page.text
    _, page = read(finished_job(tmp_path / "bare", [row(0)]))
    assert "No answer failed or was cut. Nothing here is graded." in page.text


def test_long_names_of_subsets_stand_above_their_intervals_and_stay_apart() -> None:
    names = [f"a subject with a very long name that goes on and on and on, part {i}" for i in "123"]
    chart = intervals("Subsets", [Estimate(name, 0.5, 0.4, 0.6) for name in names], "")
    labels = re.findall(r'class="label">([^<]*)<', chart.svg)
    assert len(set(labels)) == 3 and all(len(name) <= 60 for name in labels)
    assert [name for name, *_ in chart.rows] == names
    short = intervals("Subsets", [Estimate("one", 0.5, None, None)], "")
    assert 'text-anchor="end">one<' in short.svg
