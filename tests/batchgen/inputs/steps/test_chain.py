"""Chains of steps: what becomes of a row follows from the rows up to it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from datasets import Features, Value
from datasets.features import List
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from batchgen.evals.graders.choices import OrderChoices
from batchgen.inputs.dataset.source import Row
from batchgen.inputs.row_index.chain import Chain, IndexRow, Step, path_id
from batchgen.inputs.steps.against import Against
from batchgen.inputs.steps.choose import Balance, Filter, Keep
from batchgen.inputs.steps.chunk import Chunk
from batchgen.inputs.steps.dedupe import Dedupe
from batchgen.inputs.steps.join import Join
from batchgen.inputs.steps.pieces import Cross, Pick
from batchgen.inputs.steps.split import Explode
from batchgen.inputs.steps.table_step import KEPT, StepRow, TableStep, Taken
from batchgen.util.errors import ConfigError
from tests.support.jobs.finished_job import finished_job
from tests.support.jobs.finished_job import row as answer

FEATURES = Features(
    {
        "text": Value("string"),
        "topic": Value("string"),
        "number": Value("int64"),
        "items": List(Value("string")),
        "right": Value("string"),
        "wrong": Value("string"),
    }
)
WORDS = ("red", "green", "blue", "ant", "bee", "cat")
texts = st.none() | st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)
fields = st.fixed_dictionaries(
    {
        "text": texts,
        "topic": st.sampled_from(["a", "b", "c", None]),
        "number": st.none() | st.integers(0, 9),
        "items": st.none() | st.lists(st.sampled_from(WORDS), max_size=4),
        "right": st.sampled_from(["yes", None]),
        "wrong": st.just("no"),
    }
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """One that splits at spaces, and says where its tokens lie."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?")


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tables")
    contents: dict[str, list[dict[str, Any]]] = {
        "scores": [{"topic": "a", "score": 1.5, "more": ["x"]}, {"topic": "b", "score": None}],
        "bench": [{"text": "red green blue ant"}, {"text": "bee"}, {"text": None}],
        "persona": [{"persona": "a nurse"}, {"persona": "a pilot"}, {"persona": "a cook"}],
    }
    for name, rows in contents.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    return {name: str(folder / f"{name}.jsonl") for name in contents}


def steps(tables: dict[str, str]) -> st.SearchStrategy[list[Step]]:
    """Chains of any steps. A step that makes a column is in a chain once."""
    choosing: list[Step] = [
        Filter(where="number > 3"),
        Filter(where="topic != 'c' and text|length > 8"),
        Dedupe(by=("text",)),
        Dedupe(by=("topic", "number")),
        Dedupe(by=("text",), near=0.6, ngram=1),
        Dedupe(by=("text",), near=0.9, ngram=2),
        Balance(by=("topic",), most=2),
        Keep(share=0.5),
        Keep(rows=5),
        Against(path=tables["bench"], column="text", ngram=3),
        OrderChoices(columns=("right", "wrong"), order="rotated"),
    ]
    making: list[Step] = [
        Explode(column="items", as_="item"),
        Explode(column="items", most=2),
        Chunk(column="text", tokens=4, overlap=2, as_="piece"),
        Join(path=tables["scores"], on=("topic",), columns=("score",), missing="null"),
        Join(path=tables["scores"], on=("topic",), columns={"more": "again"}, missing="error"),
        Join(path=tables["scores"], on=("topic",), columns={"score": "third"}, missing="drop"),
        Pick(pieces={"persona": tables["persona"], "style": ["terse", "formal"]}, times=2),
        Pick(pieces={"seed_word": ["x", "y"]}),
        Cross(pieces={"tone": ["dry", "warm"], "length": [1, 2]}),
    ]
    several = st.lists(st.sampled_from(choosing), max_size=4)
    once = st.lists(st.sampled_from(making), max_size=3, unique_by=id)

    def is_possible(chain: list[Step]) -> bool:
        return sum(isinstance(step, Explode) for step in chain) < 2

    return (
        st.tuples(several, once)
        .map(lambda both: both[0] + both[1])
        .flatmap(st.permutations)
        .map(list)
        .filter(is_possible)
    )


def run(
    chain: Chain, rows: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> list[list[IndexRow]]:
    running, found = chain.start(tokenizer), []
    for index, values in enumerate(rows):
        found.append([] if running.full else running.take(Row(index, f"q{index}", values)))
    running.close()
    return found


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_prefix_of_the_rows_has_a_prefix_of_the_result(
    data: st.DataObject, tables: dict[str, str], tokenizer: PreTrainedTokenizerBase
) -> None:
    chain = Chain(data.draw(steps(tables)), FEATURES)
    rows = data.draw(st.lists(fields, min_size=1, max_size=16))
    stop = data.draw(st.integers(0, len(rows)))
    whole = run(chain, rows, tokenizer)
    assert run(chain, rows[:stop], tokenizer) == whole[:stop]
    made = [row for some in whole for row in some]
    assert all(len(row.path) == chain.levels for row in made)
    ids = [path_id(f"q{row.index}", row.path) for row in made]
    assert len(set(ids)) == len(ids)
    assert [(row.index, row.path) for row in made] == sorted((r.index, r.path) for r in made)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_row_is_made_again_from_that_of_the_data_set(
    data: st.DataObject, tables: dict[str, str], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Behind the chain stands one more step, which remembers what it was given."""
    seen: dict[str, Any] = {}

    @dataclass(frozen=True)
    class Remember(TableStep):
        def take(self, row: StepRow) -> Taken:
            seen[row.id] = row.fields
            return KEPT

    chain = Chain([*data.draw(steps(tables)), Remember()], FEATURES)
    rows = data.draw(st.lists(fields, min_size=1, max_size=12))
    for row, some in zip(rows, run(chain, rows, tokenizer), strict=True):
        for made in some:
            if made.failure is None:
                again = chain.restored(Row(made.index, f"q{made.index}", row), made)
                assert again == seen[path_id(f"q{made.index}", made.path)]
                assert set(again) == set(chain.features)


def one(step: Step, *rows: dict[str, Any], tokenizer: Any = None) -> tuple[Chain, list[Any], Any]:
    chain = Chain([step], FEATURES)
    running = chain.start(tokenizer)
    found = []
    for index, values in enumerate(rows):
        row = Row(index, f"q{index}", {**dict.fromkeys(FEATURES), **values})
        found += [(made, row) for made in running.take(row)]
    return chain, found, running


def ids(found: list[Any]) -> list[str]:
    return [path_id(row.id, made.path) for made, row in found]


def test_filter_keeps_what_is_true_and_shows_what_fails() -> None:
    _, found, running = one(
        Filter(where="number > 3"), {"number": 5}, {"number": 1}, {"number": None}
    )
    assert ids(found) == ["q0", "q2"]
    assert found[0][0].failure is None
    failure = found[1][0].failure
    assert failure.type == "bad_row" and "null in this row: number" in failure.message
    assert [(d.id, d.reason) for d in running.dropped] == [("q1", "number > 3 is false")]
    count = running.counts[0]
    assert (count.rows_in, count.rows_out, count.dropped, count.failed) == (3, 2, 1, 1)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Filter(where="nmber > 3"), r"rows\[0\] Filter: .*no column 'nmber'.*number"),
        (Explode(column="none"), r"rows\[0\] Explode reads the column 'none'.*items"),
        (Explode(column="text"), "holds string, and Explode takes lists"),
        (Dedupe(by=("texts",)), "Dedupe reads the column 'texts'"),
    ],
)
def test_a_column_that_is_not_there_is_refused(step: Step, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Chain([step], FEATURES)


def test_explode_makes_a_row_of_each_item() -> None:
    step = Explode(column="items", as_="item", most=3)
    chain, found, running = one(
        step, {"items": ["x", "y"]}, {"items": None}, {"items": []}, {"items": ["z"] * 1_000_000}
    )
    assert ids(found) == ["q0#0", "q0#1", "q1#0", "q3#0"]
    assert [chain.restored(row, made)["item"] for made, row in found[:2]] == ["x", "y"]
    assert "must hold a list, got null" in found[2][0].failure.message
    assert "1,000,000 items, more than most=3" in found[3][0].failure.message
    assert [d.reason for d in running.dropped] == ["the list is empty"]
    assert chain.uncopied == {"items"} and not chain.stored


def test_dedupe_says_which_row_is_the_same() -> None:
    _, found, running = one(
        Dedupe(by=("text",)), {"text": "a"}, {"text": "a "}, {"text": "a"}, {"text": None}
    )
    assert ids(found) == ["q0", "q1", "q3"]
    assert [(d.id, d.reason) for d in running.dropped] == [("q2", "same as q0")]
    assert "no value in column 'text'" in found[2][0].failure.message


def test_near_dedupe_says_how_near() -> None:
    same = "the quick brown fox jumps over the lazy dog and runs away from the farm"
    _, found, running = one(
        Dedupe(by=("text",), near=0.8, ngram=1),
        {"text": same},
        {"text": same.upper() + "!"},
        {"text": same + " today"},
        {"text": "something else altogether"},
    )
    assert ids(found) == ["q0", "q3"]
    assert [d.reason for d in running.dropped] == ["near q0, 1.00", "near q0, 0.93"]


def test_against_takes_out_what_has_a_passage_of_the_other(tables: dict[str, str]) -> None:
    step = Against(path=tables["bench"], column="text", ngram=3)
    _, found, running = one(
        step, {"text": "a Green, blue ant!"}, {"text": "green ant"}, {"text": "Bee"}
    )
    assert ids(found) == ["q1"]
    assert [d.reason for d in running.dropped] == [
        f"3 words as in row 0 of {tables['bench']}",
        f"3 words as in row 1 of {tables['bench']}",
    ]


def test_against_texts_without_words_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_text('{"text": ""}\n{"text": "?!"}\n{"text": null}\n')
    step = Against(path=str(path), column="text", ngram=3)
    with pytest.raises(ConfigError, match=r"bench.jsonl has no words in column 'text'"):
        one(step, {"text": "a green ant"})


def test_join_adds_columns_by_key(tables: dict[str, str]) -> None:
    rows = ({"topic": "b"}, {"topic": "a"}, {"topic": "c"}, {"topic": None})
    step = Join(path=tables["scores"], on=("topic",), columns={"score": "s", "more": "m"})
    chain, found, _ = one(step, *rows)
    restored = [chain.restored(row, made) for made, row in found[:2]]
    assert [(r["s"], r["m"]) for r in restored] == [(None, None), (1.5, ["x"])]
    assert "has no row with c in topic" in found[2][0].failure.message
    assert "no value in column 'topic'" in found[3][0].failure.message
    drop = Join(path=tables["scores"], on=("topic",), columns=("score",), missing="drop")
    _, found, running = one(drop, *rows)
    assert ids(found) == ["q0", "q1", "q3"] and "no c in" in running.dropped[0].reason


def test_join_by_the_id_of_the_row(tmp_path: Path) -> None:
    (tmp_path / "j.jsonl").write_text('{"id": "q1", "note": "n"}\n')
    step = Join(
        path=str(tmp_path / "j.jsonl"), on={"row_id": "id"}, columns=("note",), missing="null"
    )
    chain, found, _ = one(step, {}, {})
    assert [chain.restored(row, made)["note"] for made, row in found] == [None, "n"]


def test_keys_that_repeat_are_refused_by_name(tmp_path: Path) -> None:
    rows = "".join(f'{{"topic": "t{i % 7}", "score": {i}}}\n' for i in range(9))
    (tmp_path / "j.jsonl").write_text(rows)
    step = Join(path=str(tmp_path / "j.jsonl"), on=("topic",), columns=("score",))
    with pytest.raises(ConfigError, match=r"rows\[0\] Join: on: .*same topic \(t0; t1\)"):
        one(step, {"topic": "t0"})


def test_keys_of_other_types_are_refused(tmp_path: Path) -> None:
    (tmp_path / "j.jsonl").write_text('{"number": "1", "score": 1}\n')
    step = Join(path=str(tmp_path / "j.jsonl"), on=("number",), columns=("score",))
    with pytest.raises(ConfigError, match=r"whole numbers.*text"):
        Chain([step], FEATURES)


def test_pick_follows_from_the_id_and_cross_has_all(tables: dict[str, str]) -> None:
    pick = Pick(pieces={"persona": tables["persona"], "style": ["terse", "formal"]}, times=50)
    chain, found, _ = one(pick, {}, {})
    picked = [tuple(chain.restored(row, made)[n] for n in pick.pieces) for made, row in found]
    assert len(found) == 100 and len(set(picked)) == 6
    assert ids(found)[49:51] == ["q0#49", "q1#0"]
    _, again, _ = one(pick, {"text": "other"}, {"number": 1})
    assert [made.stored for made, _ in again] == [made.stored for made, _ in found]
    cross = Cross(pieces={"tone": ["dry", "warm"], "n": [1, 2, 3]})
    chain, found, _ = one(cross, {})
    assert [tuple(made.stored.values()) for made, _ in found] == [
        (tone, n) for tone in ("dry", "warm") for n in (1, 2, 3)
    ]
    with pytest.raises(ConfigError, match="1,001 combinations, more than most=1,000"):
        Chain([Cross(pieces={"n": list(range(1001))})], FEATURES)


def test_pieces_are_answers_of_a_job(tmp_path: Path) -> None:
    job = str(
        finished_job(tmp_path / "job", [answer(0, text="a nurse"), answer(1, text="a pilot")])
    )
    _, found, _ = one(Cross(pieces={"text": job}), {})
    assert [made.stored["text"] for made, _ in found] == ["a nurse", "a pilot"]
    _, found, _ = one(Cross(pieces={"answer": job}), {})
    pieces = [made.stored["answer"] for made, _ in found]
    assert [piece["answer_id"] for piece in pieces] == ["id0#0", "id1#0"]
    assert [piece["question"] for piece in pieces] == ["question 0", "question 1"]


def test_balance_and_keep() -> None:
    rows = [{"topic": t} for t in "aabab"]
    _, found, running = one(Balance(by=("topic",), most=2), *rows)
    assert ids(found) == ["q0", "q1", "q2", "q4"]
    assert running.dropped[0].reason == "2 earlier rows have a"
    _, found, running = one(Keep(rows=2), {}, {})
    assert ids(found) == ["q0", "q1"] and running.full
    small, large = (
        set(ids(one(Keep(share=share), *[{}] * 1000)[1])) for share in (0.1, 0.2)
    )  # fmt: skip
    assert small < large and 70 < len(small) < 130


def test_chunks_end_between_paragraphs(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "one two three.\n\nfour five six. seven\neight nine ten eleven twelve thirteen fourteen"
    chain, found, _ = one(Chunk(column="text", tokens=6), {"text": text}, tokenizer=tokenizer)
    pieces = [chain.restored(row, made)["text"] for made, row in found]
    assert pieces == [
        "one two three.",
        "four five six. seven",
        "eight nine ten eleven twelve thirteen",
        "fourteen",
    ]


@given(
    st.lists(st.sampled_from(["a ", "bb ", "c. ", "dd\n", "e\n\n", "f", "  "]), max_size=60),
    st.integers(1, 12),
    st.integers(0, 6),
)
def test_chunks_have_the_whole_text_and_no_more_tokens(
    tokenizer: PreTrainedTokenizerBase, parts: list[str], tokens: int, overlap: int
) -> None:
    text = "".join(parts)
    step = Chunk(column="text", tokens=tokens, overlap=min(overlap, tokens // 2))
    spans = list(step.spans(text, tokenizer))
    covered = {place for start, end in spans for place in range(start, end)}
    assert all(place in covered for place, sign in enumerate(text) if not sign.isspace())
    for start, end in spans:
        assert len(tokenizer.tokenize(text[start:end])) <= tokens
    assert spans == sorted(spans)
    if not step.overlap:
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_a_failed_row_goes_through_to_the_end() -> None:
    chain = Chain(
        [Filter(where="number > 3"), Explode(column="items"), Keep(rows=2), Dedupe(by=("items",))],
        FEATURES,
    )
    running = chain.start()
    rows: list[dict[str, Any]] = [
        {"number": None, "items": ["a"]},
        {"number": 4, "items": ["b", "b"]},
        {"number": 5, "items": ["c"]},
    ]
    made = [m for i, values in enumerate(rows) for m in running.take(Row(i, str(i), values))]
    assert [(m.index, m.path, m.failure is None) for m in made] == [
        (0, (0,), False),
        (1, (0,), True),
    ]
    assert running.full
