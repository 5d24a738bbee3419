"""The configuration on disk: exact, without secrets, and compared on a resume."""

import re
from pathlib import Path

import pytest
import yaml

from ngpt_train.config import Config, ConfigError, DataError, load_config
from ngpt_train.config.stored import check_resume, read_yaml, to_dict, to_yaml, write_yaml


@pytest.mark.parametrize("model", ["gpt", "ngpt"])
def test_round_trip(model: str, tmp_path: Path) -> None:
    """Caught: values that a careless YAML writer turns into something else; the field's name in the place of the
    key's, where the key is a word of Python."""
    changes = ["run.name=1e5", "optim.lr=1e-7", "data.text_field=off", "checkpoint.async=false"]
    config = load_config([f"model={model}", *changes])
    config.generate.prompt = "${x} é no: # \n"
    write_yaml(config, tmp_path / "config.yaml")
    stored = read_yaml(tmp_path / "config.yaml")
    assert stored == config
    assert type(stored.model) is type(config.model)
    assert config.checkpoint.asynchronous is False
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["checkpoint"]["async"] is False
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_stored_keys_may_be_missing_and_integers_are_floats(tmp_path: Path) -> None:
    tree = to_dict(load_config())
    del tree["parallel"], tree["train"]["profile"]
    tree["optim"]["lr"] = 1
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    stored = read_yaml(tmp_path / "config.yaml")
    assert stored.parallel.kind == "auto"
    assert isinstance(stored.optim.lr, float)


def test_keys_that_are_gone_are_not_read(tmp_path: Path) -> None:
    """Caught: a run of an earlier version that is refused for a key of a verb."""
    config = load_config()
    tree = to_dict(config) | {"bench": {"what": "data", "out": None}}
    tree["transfer"]["patch"] = None
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    assert read_yaml(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tree: tree["train"].update(step=5), ["train.step=5", "train.steps"]),
        (lambda tree: tree["train"].update(steps="ten"), ["train.steps=ten", "an integer >= 1"]),
        (lambda tree: tree["model"].update(name="gtp"), ["model.name=gtp", "gpt, gpt_encoder_decoder, ngpt"]),
        (lambda tree: tree["model"].update(bias=True), ["model.bias=true"]),
        (lambda tree: tree.update(train=5), ["train=5"]),
        (lambda tree: tree.update(train=None), ["train=null"]),
        (lambda tree: tree.clear(), ["not the config of a run"]),
    ],
)
def test_stored_config_is_checked(change, says: list[str], tmp_path: Path) -> None:
    tree = to_dict(load_config(["model=ngpt"]))
    change(tree)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(DataError) as caught:
        read_yaml(path)
    for text in [str(path), *says]:
        assert text in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"a: [1", b"- a"])
def test_unreadable_stored_config(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"config\.yaml"):
        read_yaml(path)


def test_secrets_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "sentencepiece")
    monkeypatch.setenv("USE_KEY", "1")
    config = load_config(
        ["data=local", "data.path=s3://me:p@ss@host/x?key=a1&n=2", "run.name=x_hunter2", "run.root=a@b/c"]
    )
    text = to_yaml(config)
    for secret in ("a1", "hunter2", "p@ss"):
        assert secret not in text
    for harmless in (
        "sentencepiece",
        "s3://<redacted>@host/x?key=<redacted>&n=2",
        "a@b/c",
        "max_new_tokens: null",
        "1/sqrt(d)",
    ):
        assert harmless in text
    assert config.run.name == "x_hunter2"


def resumed(*changes: str) -> Config:
    """The configuration of a run that was started without `changes`."""
    arguments = {"model": "gpt", "optim.lr": "3e-3", "train.steps": "500", "scale": "125m"} | dict(
        change.split("=", 1) for change in changes
    )
    return load_config([f"{name}={value}" for name, value in arguments.items()])


@pytest.mark.parametrize(
    "changes",
    [
        "run.name=other run.root=x run.resume=must run.max_time=1 run.init_from=x train.steps=1000 train.stop_at=100 "
        "train.micro_rows=2 train.compile=true train.activation_checkpointing=full train.device=cpu train.profile=true "
        "parallel=ddp kernels=torch parallel.timeout=5 checkpoint.every=7 checkpoint.keep_last=9 "
        "logging.every=1 logging.tensorboard=true logging.wandb.mode=offline data.cache=x data.text_gb=null "
        # Records say which rows they are of.
        "eval.every=3 eval.rows=7 eval.budget=null eval.contexts=[2048]",
        "train.cuda_graphs=true model.vocab_size=4096",
        "train.batch_tokens=524288",  # the same as the scale's 512 rows
        "schedule.warmup_tokens=26000000",  # 49.6 steps: the same 50
    ],
)
def test_harmless_changes_on_resume(changes: str) -> None:
    check_resume(resumed(), resumed(*changes.split()))


CHANGED = {
    "optim.lr=0.5": "optim.lr: 0.003 -> 0.5",
    "optim.z_loss=1e-4": "optim.z_loss: 0.0 -> 0.0001",
    "optim.label_smoothing=0.1": "optim.label_smoothing: 0.0 -> 0.1",
    "optim.clip_norm=null": "optim.clip_norm: 1.0 -> null",
    "run.seed=1": "run.seed: 0 -> 1",
    "model.context=128": "model.context: 1024 -> 128",
    "model.residual_dropout=0.1": "model.residual_dropout: 0.0 -> 0.1",
    "model.qk_norm=true": "model.qk_norm: false -> true",
    "train.batch_rows=8": "train.batch_rows: 512 -> 8",
    "tokenizer=bytes": "tokenizer.kind: sentencepiece -> bytes",
    "tokenizer.vocab_size=500": "tokenizer.vocab_size: 4096 -> 500",
    "data.val_fraction=0.5": "data.val_fraction: 0.02 -> 0.5",
    "data=local data.path=x": "data.kind: embedded -> local",
    "schedule.kind=constant": "schedule.kind: cosine -> constant",
    "schedule.warmup_steps=3 train.steps=1000": "schedule.warmup_steps: 50 -> 3",
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (" ".join(CHANGED), list(CHANGED.values())),
        ("schedule.warmup_tokens=20000000", ["schedule.warmup_steps: 50 -> 39"]),
        ("model=ngpt", ["model.name: gpt -> ngpt"]),
        ("train.steps=400", ["train.steps: 500 -> 400", "train.stop_at"]),
    ],
    ids=["many", "warmup_tokens", "model", "steps"],
)
def test_changes_of_mathematics_or_data_on_resume(changes: str, says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_resume(resumed(), resumed(*changes.split()))
    for text in (*says, "run.overwrite=true", "another run.name"):
        assert text in str(caught.value)


def test_a_change_that_is_allowed() -> None:
    """Caught: a key that was not named and changes with one that was, keys that a checkpoint cannot follow."""
    changes = ["optim.lr=0.5", "optim.eps=1e-6"]
    with pytest.raises(ConfigError, match=r"add run\.allow_change=\[optim\.lr,optim\.eps\]; what changes is"):
        check_resume(resumed(), resumed(*changes))
    with pytest.raises(ConfigError, match=r"optim\.eps: .* -> 1e-06") as caught:
        check_resume(resumed(), resumed(*changes, "run.allow_change=[optim.lr]"))
    assert "  optim.lr:" not in str(caught.value)
    check_resume(resumed(), resumed(*changes, "run.allow_change=[optim.lr,optim.eps]"))
    with pytest.raises(ConfigError, match=r"adamw in its checkpoint, muon here, .*\n.*run\.init_from"):
        check_resume(resumed(), resumed("optim.name=muon", "optim.lr=1", "run.allow_change=[optim.name,optim.lr]"))


@pytest.mark.parametrize("key", ["model.d_model", "optim.lrr"])
def test_a_change_that_is_never_allowed(key: str) -> None:
    """Caught: a run whose start takes a permission that its resume refuses."""
    problem = (
        "is no key; did you mean optim.lr, optim.lr_rule or" if key == "optim.lrr" else "cannot be changed on a resume"
    )
    with pytest.raises(ConfigError, match=re.escape(f"run.allow_change=[optim.lr,{key}]: {key} {problem}")):
        load_config([f"run.allow_change=[optim.lr,{key}]"])


def test_precision_is_compared_once_it_is_known() -> None:
    stored = load_config(["train.precision=fp32"])
    check_resume(stored, load_config([]))
    with pytest.raises(ConfigError, match=r"train\.precision: fp32 -> bf16"):
        check_resume(stored, load_config(["train.precision=bf16"]))


def test_resume_of_a_run_whose_values_were_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "article_body")
    monkeypatch.setenv("OTHER_TOKEN", "embedded")  # a word of the schema, which must be readable again
    write_yaml(resumed("data.text_field=article_body"), tmp_path / "config.yaml")
    stored = read_yaml(tmp_path / "config.yaml")
    assert stored.data.text_field == "<redacted>"
    check_resume(stored, resumed("data.text_field=article_body"))
    with pytest.raises(ConfigError, match=r"data\.text_field: <redacted> -> body"):
        check_resume(stored, resumed("data.text_field=body"))
    with pytest.raises(ConfigError, match=r"data\.text_field: text -> <redacted>"):
        check_resume(resumed(), resumed("data.text_field=article_body"))
