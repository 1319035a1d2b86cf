"""Command lines in Hydra's grammar: Hydra makes the same job of them as we do."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from batchgen.cli.hydra_arguments import hydra_argument, hydra_arguments
from batchgen.cli.options import parse_options
from batchgen.cli.run_options import composed
from batchgen.config.compose.load_config import load_config, resolved
from batchgen.config.compose.trust import TYPED
from batchgen.util.errors import ConfigError


@pytest.mark.parametrize(
    "value",
    [
        *("", "a", "null", "12", "a=b, (c) [d] {e}: {{ f }}", "it's", 'say "it\'s"', "a\nb\tc"),
        *("\\", "\\'", "a\\", r"\d+\\n", r"C:\x", "${sampling.seed}", r"\${name}", " a ", "é😀"),
        *(None, True, False, 3, -0.5, 1e-9, 1e300, [], ["a,b", 1, None], [["x"], ["'"]], {}),
        {"$defs": {"a b": [1, "c:d"]}, "type": "object", "x.y": None},
    ],
)
def test_a_value_comes_back_from_the_grammar(value: Any) -> None:
    override = OverridesParser.create().parse_override(hydra_argument("++a.b", value))
    assert override.value() == value and type(override.value()) is type(value)


@pytest.mark.parametrize("value", [{"1": "a"}, {"it's": 1}, {"true": 2}])
def test_a_value_that_the_grammar_has_no_text_for(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^a\.b: Hydra's launchers cannot take"):
        hydra_argument("++a.b", value)


JOB = """
model: {path: m, dtype: float32}
prompt.user: "{{ q }} a=b, it's\\n"
strategy: {_target_: my.Strategy, k: 3, names: [a, "b, c"]}
post:
  - {_target_: batchgen.grading.extract.Extract, methods: [boxed, "it's, {so}"]}
  - {_target_: batchgen.grading.grade.Grade, method: function, function: {_target_: f.g, b: [0.5]}}
sampling: {choice: sample, stop: ["\\n\\n", "}"]}
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["model.path=~/a b", r"prompt.user={{ q }}, (a) \n\\theta 'x'", "sampling.stop=END"],
        ["experiment=gsm8k", "model=hf", "model.path=m", "dataset.limit=5"],
        ["experiment=gsm8k", "rows=[{_target_: a.B, seed: 3}]", "~post"],
        ["constraint.pattern=\\d+'\"", "output.dir=o/${sampling.seed}", "sampling.seed=4"],
        ["prompt.template_kwargs={enable_thinking: false}", "prompt.template_kwargs.b=2"],
        ["+prompt.template_kwargs.c=x", "sampling=sample", "sampling.temperature=0.5"],
        ["strategy=dllm", "model=nano_sdar", "dataset=nano_eval", "output.columns=[logprobs]"],
        ['constraint.schema={"type": "object", "properties": {"a b": {"enum": ["x, y", 1]}}}'],
        ["job.yaml", "sampling.n=2", "--trust=job.yaml"],
    ],
)
def test_hydra_composes_the_same_job(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    options = parse_options(arguments)
    made = hydra_arguments(options, sweep=False)
    assert not made.swept
    with initialize_config_module("batchgen.conf", version_base="1.3"):
        cfg = compose("config", overrides=made.fixed)
    values: Any = OmegaConf.to_container(cfg)
    assert resolved(load_config(values, TYPED)) == resolved(composed(options))


def test_swept_arguments() -> None:
    options = parse_options(
        [
            *("sampling.seed=range(0,3)", "sampling=glob(*)", 'prompt.user="a\\nb","c, d"'),
            *("sampling.top_p=interval(0.1,1)", "model.path=m"),
        ]
    )
    made = hydra_arguments(options, sweep=True)
    assert made.fixed == ["model=hf", "++model.path='m'"]
    assert made.swept == [
        "++sampling.seed=range(0,3)",
        "sampling=greedy,model,sample",
        "++prompt.user='a\nb','c, d'",
        "++sampling.top_p=interval(0.1,1)",
    ]
    assert made.names == {}  # nobody knows yet what the jobs will be
    assert made.typed["++prompt.user='a\nb'"] == 'prompt.user="a\\nb"'


def test_swept_texts_have_the_escapes_of_double_quotes() -> None:
    arguments = [r'sampling.stop=["\n"],["\\n","b"]', r'prompt.user="\n","\\n",c']
    arguments.append(r"""prompt.answer=choice("\n",'a,b',c)""")
    made = hydra_arguments(parse_options(arguments), sweep=True)
    assert made.swept == [
        "++sampling.stop=['\n'],['\\n','b']",
        "++prompt.user='\n','\\n','c'",
        "++prompt.answer='\n','a,b','c'",
    ]


def test_names_are_those_of_a_sweep_of_ours() -> None:
    options = parse_options(["sampling.seed=1,2", "prompt.user=a/b,a?b", "output.dir=o"])
    made = hydra_arguments(options, sweep=True)
    names = list(made.names.values())
    assert names[0] == "sampling.seed=1,prompt.user=a-b" and len(set(names)) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sampling.sed=1,2"], "did you mean sampling.seed?"),
        (["model=hff,hf"], "model has no choice hff"),
        (["sampling.seed=1,2", "sampling.stop=[a"], "the closing ] is missing"),
        (["model=glob(x*)"], "nothing matches this pattern"),
        ([r"sampling.stop='\nclass'"], r"\n in single quotes may be the end of a line"),
        ([r"sampling.stop='\n',a"], r"\n in single quotes may be the end of a line"),
        ([r"prompt.user=choice('\n',a)"], r"\n in single quotes may be the end of a line"),
        ([r"prompt.user=shuffle('a,b',c)"], "shuffle takes no quotes: list the values as a,b"),
        ([r"sampling.stop=[a,'\n'],b"], r"\n in single quotes may be the end of a line"),
    ],
)
def test_mistakes_are_named_before_hydra_sees_them(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hydra_arguments(parse_options(arguments), sweep=True)
    assert message in str(caught.value)
