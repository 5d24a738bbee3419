"""Tasks of the user's own files, which need no network, and the metrics that come out."""

import io
import json
import logging
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from ngpt_train.config import load_config
from ngpt_train.config.sections.records import EvalConfig
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.data.tokenizers.tokenizer import BytesTokenizer
from ngpt_train.evaluation.tasks import task_files
from ngpt_train.evaluation.tasks.adapter import Scored, log_likelihoods
from ngpt_train.evaluation.tasks.run_tasks import TaskResults, Tasks
from ngpt_train.models import Decoder
from ngpt_train.models.gpt.keys import GPTConfig
from ngpt_train.models.gpt_encoder_decoder.keys import GPTEncoderDecoderConfig
from tests.unit.evaluation.large import ALONE, large

CHOICES = [
    {"query": "Ice is", "choices": ["cold", "a warm and very long word", "red"], "gold": 0},
    {"query": "Fire is", "choices": ["wet", "hot"], "gold": 1},
    {"query": "Grass is", "choices": ["green", "loud"], "gold": 0},
]
SEEN, DARK = "The cat saw the dog and", "It was dark so"
OPTIONS = [
    {"context_options": [f"{SEEN} the cat", f"{SEEN} the dog"], "continuation": "barked.", "gold": 1},
    {"context_options": [f"{DARK} the lamp", f"{DARK} the sun"], "continuation": "was lit.", "gold": 0},
]
LAST_WORDS = [{"context": "one two three four", "continuation": "five"}, {"context": "a b c", "continuation": "d"}]
TEXTS = [{"text": "A text of some words."}, {"text": "Another one, which is longer than the first text."}]
YAML = """
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: choices.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{query}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: gold
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
WRITTEN = (
    YAML.replace("multiple_choice", "generate_until")
    .replace("task: mine", "task: written")
    .replace(
        "doc_to_target: gold", 'doc_to_target: "{{choices[gold]}}"\ngeneration_kwargs: {until: ["."], max_gen_toks: 3}'
    )
    .replace("doc_to_choice: choices\n", "")
    .replace("metric: acc,", "metric: exact_match,")
)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    below = tmp_path / "tasks"
    below.mkdir()
    files = {"choices": CHOICES, "options": OPTIONS, "last_words": LAST_WORDS, "texts": TEXTS}
    for name, rows in files.items():
        (below / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (below / "mine.yaml").write_text(YAML)
    (below / "written.yaml").write_text(WRITTEN)
    return below


def gpt() -> Decoder:
    config = GPTConfig(d_model=16, n_layers=1, n_heads=2, d_mlp=32, vocab_size=257, context=48)
    return large(config, 5, seed=3).double()


def asked(directory: Path | None, *names: str) -> Tasks:
    path = None if directory is None else str(directory)
    return Tasks(EvalConfig(tasks=list(names), tasks_path=path), GPTConfig(), ALONE)


def log_p(model: Decoder, context: str, continuation: str) -> float:
    ids = [256, *f"{context}{continuation}".encode()]
    return float(log_likelihoods(model, [Scored(ids, len(continuation))], ALONE)[0][0])


def test_own_files(directory: Path, tmp_path: Path) -> None:
    """Every form of line, its metrics by hand. Caught: an answer scored without the space before it, acc_norm by
    tokens, options scored as continuations, the mean of all metrics, a task that the file of another one answers."""
    model = gpt()
    names = ("choices", "options", "last_words", "texts", "mine", "written")
    results = asked(directory, *names)(model, BytesTokenizer(), ALONE)
    tasks = results.tasks
    assert [*tasks] == list(names)

    def best(row: dict[str, Any], norm: bool, query: str = "{}") -> int:
        of_choices = [
            log_p(model, query.format(row["query"]), f" {choice}") / (len(choice) if norm else 1)
            for choice in row["choices"]
        ]
        return of_choices.index(max(of_choices))

    hits = [float(best(row, False) == row["gold"]) for row in CHOICES]
    n, mean = len(hits), sum(hits) / len(hits)
    assert tasks["choices"]["acc"] == mean
    error = math.sqrt(sum((hit - mean) ** 2 for hit in hits) / (n - 1) / n)
    assert tasks["choices"]["acc_stderr"] == pytest.approx(error)
    assert tasks["choices"]["acc_norm"] == sum(best(row, True) == row["gold"] for row in CHOICES) / n
    assert tasks["choices"]["n"] == n
    question = "Question: {}\nAnswer:"
    assert tasks["choices"]["chance"] == tasks["mine"]["chance"] == pytest.approx((1 / 3 + 1 / 2 + 1 / 2) / 3)
    assert tasks["options"]["chance"] == 0.5
    assert "chance" not in {*tasks["last_words"], *tasks["texts"], *tasks["written"]}
    assert "mean_chance" not in results.mean(), "last_words has none"
    assert "chance 0.4444  (3 documents)" in results.lines()[0]
    assert tasks["mine"]["acc"] == sum(best(row, False, question) == row["gold"] for row in CHOICES) / n

    of_options = [[log_p(model, x, f" {row['continuation']}") for x in row["context_options"]] for row in OPTIONS]
    right = [values.index(max(values)) == row["gold"] for values, row in zip(of_options, OPTIONS, strict=True)]
    assert tasks["options"]["acc"] == sum(right) / 2

    of_words = [log_p(model, row["context"], f" {row['continuation']}") for row in LAST_WORDS]
    assert tasks["last_words"]["perplexity"] == pytest.approx(math.exp(-sum(of_words) / 2), rel=1e-9)
    assert tasks["last_words"]["acc"] == 0
    # The eos in front of a text is a target too, after another one: the harness's way for such tokenizers.
    assert len(TEXTS[0]["text"]) < 47 < len(TEXTS[1]["text"])
    ids = [256, 256, *TEXTS[0]["text"].encode()]
    items = {item["doc_id"]: item["resps"] for item in results.items["texts"]}
    assert items[0][0][0] == pytest.approx(log_likelihoods(model, [Scored(ids, len(ids) - 1)], ALONE)[0][0], rel=1e-9)
    n_bytes = sum(len(row["text"]) for row in TEXTS)
    total = sum(items[i][0][0] for i in (0, 1))
    assert tasks["texts"]["bits_per_byte"] == pytest.approx(-total / math.log(2) / n_bytes, rel=1e-9)
    assert "exact_match" in tasks["written"]

    means = results.mean()
    with_acc = [tasks[name]["acc"] for name in ("choices", "options", "last_words", "mine")]
    assert means["mean"] == pytest.approx(sum(with_acc) / 4)
    assert means["mean_acc_norm"] == pytest.approx(
        (sum(with_acc) - tasks["choices"]["acc"] + tasks["choices"]["acc_norm"]) / 4
    )
    results.write_items(tmp_path / "items.jsonl")
    first = json.loads((tmp_path / "items.jsonl").read_text().splitlines()[0])
    assert first["arguments"][1] == ["Ice is", " a warm and very long word"]
    assert first["resps"][1][0][0] == pytest.approx(log_p(model, "Ice is", " a warm and very long word"))
    assert first["acc"] == hits[0]


def test_perplexities_beyond_a_float(directory: Path) -> None:
    """Caught: an OverflowError of the harness's exp or of its standard error, which ends a training run; infinity in a
    JSON file."""
    word = "語" * 200  # of 600 bytes
    (directory / "words.jsonl").write_text(json.dumps({"context": "one", "continuation": word}) + "\n")
    (directory / "large.jsonl").write_text(
        "".join(json.dumps({"context": "one", "continuation": word[:n]}) + "\n" for n in (20, 22, 24))
    )
    (directory / "long.jsonl").write_text(json.dumps({"text": word}) + "\n")
    results = asked(directory, "words", "large", "long", "texts")(gpt(), BytesTokenizer(), ALONE)
    tasks = results.as_json()["tasks"]
    assert (results.tasks["words"]["perplexity"], results.tasks["long"]["word_perplexity"]) == (math.inf, math.inf)
    assert (tasks["words"]["perplexity"], tasks["long"]["word_perplexity"]) == (None, None)
    assert tasks["large"]["perplexity"] > 1e160, "its square is beyond a float"
    assert tasks["long"]["byte_perplexity"] > 1
    assert math.isfinite(tasks["texts"]["word_perplexity"])
    json.dumps(results.as_json(), allow_nan=False)
    assert len(results.lines()[0]) < 80


def test_groups_of_own_files(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a group's files looked for in the current directory; a group in the mean beside its tasks, or
    a traceback for both; the chance of a group from its documents, where its tasks count the same, and the reverse."""
    monkeypatch.chdir("/")
    (directory / "other.yaml").write_text(YAML.replace("task: mine", "task: other\ntag: tagged"))
    of_two = YAML.replace("mine", "two").replace("choices.jsonl", "two.jsonl")
    (directory / "two.yaml").write_text(of_two)
    (directory / "two.jsonl").write_text(json.dumps(CHOICES[1]) + "\n")

    def group(name: str, tasks: str, by_size: str = "true") -> None:
        aggregate = f"[{{metric: acc, aggregation: mean, weight_by_size: {by_size}}}]"
        (directory / f"{name}.yaml").write_text(f"group: {name}\ntask: {tasks}\naggregate_metric_list: {aggregate}\n")

    group("both", "[mine, other]")
    group("by_document", "[mine, two]")
    group("by_task", "[mine, two]", "false")
    model = gpt()
    for name, chance in {"by_document": (4 / 3 + 1 / 2) / 4, "by_task": (4 / 9 + 1 / 2) / 2}.items():
        assert asked(directory, name)(model, BytesTokenizer(), ALONE).tasks[name]["chance"] == pytest.approx(chance)
    with pytest.raises(ConfigError, match=r"tasks=\[both,mine\]: Duplicate task 'mine'"):
        asked(directory, "both", "mine")
    results = asked(directory, "both", "choices")(model, BytesTokenizer(), ALONE)
    assert [*results.tasks] == ["both", "choices"]
    assert [*results.items] == ["mine", "other", "choices"]
    hits = [item["acc"] for item in results.items["mine"]]
    assert results.tasks["both"]["acc"] == sum(hits) / len(hits)
    assert results.mean()["mean"] == (results.tasks["both"]["acc"] + results.tasks["choices"]["acc"]) / 2
    assert [*asked(directory, "tagged")(model, BytesTokenizer(), ALONE).tasks] == ["other"]


def test_mean() -> None:
    """The standard error of the mean is for independent tasks."""
    tasks = {"a": {"acc": 0.5, "acc_stderr": 0.3, "acc_norm": 0.7, "acc_norm_stderr": 0.1}, "b": {"ppl": 3.0}}
    tasks["c"] = {"acc": 0.1, "acc_stderr": 0.4}
    found = TaskResults(tasks, {}).mean()
    errors = {"mean_stderr": 0.25, "mean_acc_norm_stderr": math.hypot(0.1, 0.4) / 2}
    assert found == pytest.approx({"mean": 0.3, "mean_acc_norm": 0.4, **errors})
    assert TaskResults({"b": {"ppl": 3.0}}, {}).metrics() == {"b/ppl": 3.0}
    tasks = {"a": {"acc": 0.5, "acc_stderr": 0.3, "chance": 0.25}, "c": {"acc": 0.1, "acc_stderr": 0.4, "chance": 0.5}}
    found = TaskResults(tasks, {})
    assert found.mean()["mean_chance"] == 0.375
    assert re.sub(" +", " ", found.lines()[-1]) == (
        "mean of 2 tasks acc 0.3000 ± 0.2500 acc_norm 0.3000 ± 0.2500 chance 0.3750"
    )


ODD = [  # the content of a JSONL file, and the problem
    ('{"question": "?"}', "odd.jsonl: its first line has the fields question"),
    ("", "odd.jsonl: empty"),
    ('{"text": ""}', "all texts of odd are empty"),
    *(
        (
            f"{json.dumps(first)}\n\n{second if isinstance(second, str) else json.dumps(second)}",
            f"odd.jsonl, line 3: {says}",
        )
        for first, second, says in [
            (CHOICES[0], {"query": "a", "choices": ["b"], "gold": 1}, "gold=1 is no number of a choice, 0 to 0"),
            (CHOICES[0], {"query": "a", "choices": ["b"], "gold": "b"}, 'gold="b" is no number of a choice'),
            (CHOICES[0], {"query": "a", "choices": ["b", ""], "gold": 0}, "one of choices is empty"),
            (CHOICES[0], {"query": "a", "choices": "b", "gold": 0}, "choices is no list of texts"),
            (CHOICES[0], {"query": "a"}, "it lacks choices and gold, which the first line has"),
            (OPTIONS[0], {**OPTIONS[0], "continuation": None}, "continuation=null is no text"),
            (TEXTS[0], ["text"], "it is no JSON object"),
            (TEXTS[0], '{"text": "some', "it is no JSON object"),
        ]
    ),
]


@pytest.mark.parametrize(("content", "says"), ODD, ids=[says for _, says in ODD])
def test_a_faulty_file(directory: Path, content: str, says: str) -> None:
    """Caught: an IndexError or a ZeroDivisionError of the harness, or a message that does not name the line."""
    (directory / "odd.jsonl").write_text(f"{content}\n")
    with pytest.raises(DataError, match=re.escape(says)):
        asked(directory, "odd")


def test_what_is_no_task(directory: Path) -> None:
    """Caught: a traceback for files that are not there or are none; the harness, or the reader of a task's data, waits
    for a writer; a device without an end. An empty text among others counts."""
    (directory / "some.jsonl").write_text('{"text": ""}\n{"text": "one"}\n')
    assert asked(directory, "some")(gpt(), BytesTokenizer(), ALONE).tasks["some"]["n"] == 2
    (directory / "gone.yaml").write_text(YAML.replace("mine", "gone").replace("choices.jsonl", "nowhere.jsonl"))
    with pytest.raises(DataError, match="task gone"):
        asked(directory, "gone")
    with pytest.raises(DataError, match="no such directory"):
        asked(directory / "x", "odd")
    with pytest.raises(ConfigError, match="gives none to the beginning"):
        Tasks(EvalConfig(tasks=["texts"], tasks_path=str(directory)), GPTEncoderDecoderConfig(), ALONE)
    (directory / "x.jsonl").mkdir()
    with pytest.raises(DataError, match=r"x\.jsonl cannot be read: it is no file"):
        asked(directory, "x")
    os.mkfifo(directory / "rows.parquet")
    for pipe in ("rows.parquet", "rows.yaml"):
        with pytest.raises(DataError, match=re.escape(f"{directory / pipe} is a pipe, a socket or a device")):
            asked(directory, "x")
        (directory / pipe).unlink()
        (directory / "rows.yaml").symlink_to("/dev/zero")


def test_an_unknown_name_is_refused_before_all_tasks_are_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: the harness makes its index for half a minute; the data of another task fetched first."""

    def never(*args: object) -> None:
        raise AssertionError("reads all tasks, or data")

    monkeypatch.setattr(task_files.Harness, "_of_all", property(never))
    monkeypatch.setattr(task_files, "_built", never)
    with pytest.raises(ConfigError, match=r"has no piqaa, nor is there a file of that name .*; did you mean piqa"):
        asked(directory, "choices", "arc_easy", "piqaa")


@pytest.mark.exhaustive
def test_every_name_of_the_harness_is_found_in_its_files() -> None:
    """Caught: a task, a group or a tag of a template that is refused as unknown."""
    from lm_eval.tasks import TaskManager  # which takes seconds

    assert set(TaskManager().all_tasks) <= task_files.Harness().folders_by_name.keys()


def test_offline(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of the harness are found at once; without their data the message says what to do, and a task whose data is
    handed out on application alone does not end a list. Caught: the hub's retries printed by a handler of its own and
    by ours."""
    import lm_eval.api.task

    printed = io.StringIO()
    hub = logging.getLogger("huggingface_hub")
    monkeypatch.setattr(hub, "handlers", [logging.StreamHandler(printed)])
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(printed)])
    real = lm_eval.api.task.datasets.load_dataset

    def own_files_alone(*args: Any, **kwargs: Any) -> Any:
        if kwargs["path"] == "json":
            return real(*args, **kwargs)
        hub.warning("Retrying in 1s")
        raise ConnectionError("Couldn't reach the hub\nin many lines")

    monkeypatch.setattr(lm_eval.api.task.datasets, "load_dataset", own_files_alone)
    with pytest.raises(
        DataError, match=r"the data of wsc273 cannot be had: ConnectionError: Couldn't reach the hub\. On"
    ):
        asked(None, "wsc273")
    assert printed.getvalue().count("Retrying") == 1
    with pytest.raises(DataError, match="storycloze_2016"):
        asked(None, "storycloze_2016")
    found = asked(directory, "choices", "storycloze_2016")
    assert "on application" in found.left_out["storycloze_2016"]
    assert "choices" in found.notes()[0]
    assert "storycloze_2016 is left out" in found.notes()[1]


def test_names_and_lists() -> None:
    """tasks=NAME and tasks=[...] fill one key. Caught: a list by a name that is none; a NotImplementedError of glob for
    a path, or a search through all of the harness."""
    of_paper = ["arc_easy", "hellaswag", "winogrande", "wsc273", "lambada_openai"]
    for given in ("tasks=ngpt_paper", "eval.tasks=ngpt_paper"):
        assert load_config([given]).eval.tasks == of_paper
    assert (
        load_config(["tasks=[piqa,mine]"]).eval.tasks
        == load_config(["eval.tasks=[piqa,mine]"]).eval.tasks
        == ["piqa", "mine"]
    )
    assert load_config([]).eval.tasks is None
    assert load_config(["tasks=null"]).eval.tasks is None
    with pytest.raises(ConfigError, match=r"tasks=\[arc_easy\]"):
        load_config(["tasks=arc_easy"])
    with pytest.raises(ConfigError, match="no task"):
        load_config(["tasks=[]"])
    for path in ("tasks/x.yaml", "/tasks/x", "..", "."):
        with pytest.raises(ConfigError, match="a path where names stand"):
            load_config([f"tasks=[{path}]"])
