"""The page about a pipeline: graph, costs, samples and sets, all of which may be strangers'."""

import json
import re
from pathlib import Path

import pytest

from batchgen.pages.report.funnel import StepCounts
from batchgen.pages.report.pipeline_facts import ExportedSet, PipelineFacts
from batchgen.pages.report.pipeline_report import pipeline_html, write_report
from batchgen.util.errors import ConfigError
from tests.support.jobs.written_job import grade_job, write_job

_ASK = StepCounts(
    "ask", "ask.0123456789", "complete", [("rows", 8), ("Explode", 15), ("Dedupe", 14)],
    answers=14, errors=1, device_s=90.0, price_per_hour=2.0,
)  # fmt: skip
_JUDGE = StepCounts("judge", "judge.0123456789", "complete", [("answers", 13)], 13, device_s=30.0)
_SET = ExportedSet("sft.jsonl", "judge", "sft", "9 rows")
_FACTS = PipelineFacts([_ASK, _JUDGE], {"ask": [], "judge": ["ask"]}, [_SET], [])


def test_steps_are_a_graph_with_counts_and_costs_are_bars() -> None:
    page = pipeline_html("runs/my_pipe/", _FACTS, ["ask"])
    assert '<h1 dir="auto" title="runs/my_pipe/">my_pipe</h1>' in page
    graph, bars = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    for text in ("14 rows → 13 answers", "13 rows → 13 answers", "sft.jsonl", "9 rows"):
        assert f">{text}</text>" in graph
    assert graph.count('class="edge"') == 2 and graph.count('class="box step"') == 2
    assert ">0:01:30 (75%)</text>" in bars and ">30.0 s (25%)</text>" in bars
    assert "Prices: ask 0.05." in page
    assert "ask: made 7 by Explode" in page and "ask: dropped 1 by Dedupe" in page
    assert '<a href="ask.0123456789/report.html">ask</a>' in page
    assert 'href="judge.0123456789/report.html"' not in page


def test_a_strangers_names_are_texts_and_nothing_is_loaded() -> None:
    evil = '"><script>x</script>'
    step = StepCounts(evil, "a.0123456789", "<em>", [("rows", 3), ("<i>", 1)], 1, device_s=1.0)
    facts = PipelineFacts([step], {evil: []}, [ExportedSet(evil, evil, "<u>", "<u>")], [])
    page = pipeline_html(evil, facts, [evil])
    assert not re.search(r"<(em|i|u|script)>", page)
    assert "default-src 'none'; style-src 'sha256-" in page.replace("&#39;", "'")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A pipeline of two graded steps, the older version of one, and an exported set."""
    for name, seed in (("solve.0000000001", 0), ("solve.0000000002", 1), ("rate.0000000003", 2)):
        write_job(tmp_path / name, 9, 2, rows_per_shard=4, seed=seed)
        grade_job(tmp_path / name, scored=True)
    versions: dict[str, object] = {
        at: {"base": at, "edition": 0, "parents": {}} for at in ("0000000001", "0000000002")
    }
    rate = {"base": "0000000003", "edition": 0, "parents": {"solve": "0000000002"}}
    steps = {
        "solve": {"current": "0000000002", "versions": versions},
        "rate": {"current": "0000000003", "versions": {"0000000003": rate}},
    }
    (tmp_path / "pipeline.json").write_text(json.dumps({"steps": steps, "format_version": 1}))
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "sft.jsonl").write_text("{}\n{}\n")
    made = {"request": "r", "digests": ["d"], "of": "rate.0000000003", "settings": {"to": "sft"}}
    exports = {"format_version": 2, "exports": {"sft.jsonl": made, "../../x": made, "gone": made}}
    (tmp_path / "export" / "exports.json").write_text(json.dumps(exports))
    return tmp_path


def test_the_page_has_samples_of_each_step_and_the_sets_that_are_there(out: Path) -> None:
    facts = PipelineFacts.of(out)
    assert facts is not None and facts.parents == {"solve": [], "rate": ["solve"]}
    assert facts.sets == [ExportedSet("sft.jsonl", "rate", "sft", "2 rows")]
    assert facts.old == ["solve.0000000001"]
    page = write_report(out, "out").read_text()
    samples = page[page.index('id="samples"') :]
    assert samples.count('<details class="item">') == 6
    names = re.findall(r'class="name" dir="auto">(\d+)<', samples)
    assert names == 2 * ["0", "4", "8"]  # the first, the middle and the last of nine
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_a_damaged_step_hides_no_other(out: Path) -> None:
    (out / "rate.0000000003" / "metrics.json").write_text("[")
    (out / "export" / "exports.json").write_text("[")
    page = write_report(out, "out").read_text()
    assert "damaged" in page and page.count('<details class="item">') >= 3
    assert 'id="sets"' not in page


def test_a_folder_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not the folder of a pipeline"):
        write_report(tmp_path, "here")
