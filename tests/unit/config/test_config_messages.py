"""Every mistake of a user ends in one message that names the key, the value and the way out, and in exit code 2."""

import os
import sys
from pathlib import Path

import pytest

from ngpt_train.__main__ import main
from ngpt_train.config.sections import records

# Words that only someone who knows the libraries underneath could read.
INTERNALS = ("Traceback", "hydra", "omegaconf", "full_key", "reference_type", "object_type", "override grammar")

# Arguments after `train`, then what the message must say.
COMMAND_LINES: list[tuple[list[str], list[str]]] = [
    # Names
    (["model=ngtp"], ["model=ngtp", "did you mean ngpt", "options composed, "]),
    (["modle=ngpt"], ["modle=ngpt", "did you mean model"]),
    (["train.step=10"], ["train.step=10", "train.steps"]),
    (["lr=1e-3"], ["lr=1e-3", "optim.lr"]),
    (["scale=0.5B"], ["scale=0.5B", "did you mean 0.5b"]),
    (["data=openwebtxt"], ["data=openwebtxt", "did you mean openwebtext", "embedded, hf, local"]),
    (["model.mlp=plain"], ["model.mlp=plain", "model=ngpt has no such key", "model=gpt"]),
    (["model._target_=os.system"], ["model._target_=os.system", "no such key"]),
    (["model@foo=gpt"], ["model@foo=gpt", "no such key"]),
    (["model.name=gpt"], ["model.name=gpt", "model=NAME"]),
    (["parallel=tp"], ["parallel=tp", "no tensor and no context parallelism", "parallel=fsdp or hsdp"]),
    (["parallel.tensor_parallel_size=2"], ["no tensor and no context parallelism", "parallel=fsdp or hsdp"]),
    # Values
    (["train.steps=ten"], ["train.steps=ten", "an integer >= 1"]),
    (["train.steps=1e4"], ["train.steps=1e4", "write 10000"]),
    (["train.steps="], ["train.steps=:", "empty", "an integer >= 1"]),
    (["train.steps='5'"], ["train.steps='5'", "write 5 without quotes"]),
    (["train.steps='-5'"], ["train.steps='-5'", "an integer >= 1\n"]),
    (["train.steps=" + 5000 * "9"], ["an integer >= 1"]),
    (["optim.betas='[0.9,0.95]'"], ["optim.betas='[0.9,0.95]'", "write [0.9,0.95] without quotes"]),
    (["run.name=null"], ["run.name=null", "must be text; leave it out", "run.name=auto"]),
    (["run.root=???"], ["run.root=???", "??? stands for no value"]),
    (["train.steps=???"], ["train.steps=???", "an integer >= 1; ???"]),
    (["optim.lr=fast"], ["optim.lr=fast", "a number > 0 or auto"]),
    (["optim.lr=.inf"], ["optim.lr=.inf", "finite"]),
    (["optim.clip_norm=1" + 400 * "0"], ["a number > 0 or null", "finite"]),
    (["optim.lr=0"], ["optim.lr=0", "a number > 0 or auto"]),
    (["optim.betas=[0.9]"], ["optim.betas=[0.9]", "[0.9,0.95]"]),
    (["optim.betas=[0.9,1]"], ["optim.betas=[0.9,1.0]", "< 1"]),
    (["optim.betas=[0.9"], ["optim.betas=[0.9", "[0.9,0.95]"]),
    (["schedule.kind=inverse_sqrt", "schedule.final_lr=1e-4"], ["schedule.final_lr=0.0001", "schedule.final_lr=0"]),
    (["schedule.kind=ramp", "schedule.warmup_steps=5"], ["schedule.warmup_steps=5", "the whole run is a warmup"]),
    (["schedule.kind=ramp", "schedule.warmup_tokens=5"], ["schedule.warmup_tokens=5", "Set schedule.warmup_tokens=0"]),
    (
        ["scale=debug", "model.context=64", "train.batch_rows=8", "train.steps=50", "schedule.warmup_tokens=25600"],
        ["schedule.warmup_tokens=25600", "Set schedule.warmup_tokens to 25088 or less, a step has 512"],
    ),
    (["parallel.shard=2"], ["parallel.shard=2", "parallel=hsdp"]),
    (["parallel=ddp", "parallel.gather=step"], ["parallel.gather", "parallel=fsdp or hsdp"]),
    (["parallel=single", "parallel.scatter=step"], ["parallel.scatter", "parallel=fsdp or hsdp"]),
    (["schedule.decay_fraction=0.1"], ["schedule.decay_fraction=0.1", "schedule.kind=cosine", "schedule.kind=wsd"]),
    (["schedule.warmup_tokens=375e6"], ["schedule.warmup_tokens=375e6", "write 375000000"]),
    (["eval.contexts=64"], ["eval.contexts=64", "a list of integers >= 1", "[1024,2048]"]),
    (["eval.contexts=[64,1.5]"], ["eval.contexts=[64,1.5]", "a list of integers >= 1"]),
    (["logging.wandb.tags=[a,1]"], ["logging.wandb.tags=[a,1]", "a list of words", "[a,b]"]),
    (["eval.rows=4", "eval.tokens=100"], ["eval.rows=4, eval.tokens=100", "Set one of them"]),
    (["eval.rows=null"], ["eval.rows=null, eval.tokens=null", "eval.rows=64"]),
    (
        ["model=normformer", "model.positions=learned", "model.context=64", "eval.contexts=[32,128]"],
        ["eval.contexts=[32,128]", "positions of 64 tokens", "Leave 128 out"],
    ),
    (
        ["model=ntransformer", "model.context=96", "eval.contexts=[96,48]"],
        ["eval.contexts=[96,48]", "64 tokens to read and 32 to continue", "Leave 48 out"],
    ),
    (["data.pack=best_fit", "eval.contexts=[512]"], ["eval.contexts=[512], data.pack=best_fit", "same"]),
    (["optim.lr_table.tiny.256=0.1"], ["optim.lr_table.tiny.256=0.1", "Set optim.lr"]),
    (["optim.lr=1e300"], ["optim.lr=1e300", "> 0 and <= 1000 or auto"]),
    (["train.batch_rows=1" + 20 * "0"], ["train.batch_rows=10000", "<= 10000000 or null"]),
    (["model.n_layers=1" + 20 * "0"], ["model.n_layers=10000", ">= 1 and <= 10000\n"]),
    (["model.d_model=1" + 13 * "0"], ["model.d_model=10000", ">= 1 and <= 1000000\n"]),
    (["run.seed=99999999999999999999"], ["run.seed=99999999999999999999", "<= 9223372036854775807"]),
    (["run.name=a/../b"], ["run.name=a/../b", "not a directory name"]),
    (["data.path=${nope}"], ["data.path=${nope}", "'nope' not found"]),
    (["data.path=${oc.env:NGPT_UNSET}"], ["data.path=${oc.env:NGPT_UNSET}", "NGPT_UNSET"]),
    # Syntax
    (["run=first"], ["run=first", "a section", "run.name"]),
    (["train={steps: 5}"], ["train={steps: 5}", "train.steps"]),
    (["model=[gpt,ngpt]"], ["model=[gpt,ngpt]", "one option", "-m"]),
    (["optim.lr=1e-3,3e-3"], ["optim.lr=1e-3,3e-3", "-m"]),
    (["scale", "tiny"], ["scale: no '='", "scale=OPTION", "tiny"]),
    (["optim.lr= 3"], ["optim.lr= 3: a space", "Write optim.lr=3, without spaces"]),
    (["run.name = x"], ["run.name = x: a space", "Write run.name=x, without spaces"]),
    (["+experiment=quickstart"], ["+experiment=quickstart", "Write experiment=quickstart"]),
    (["+train.stpes=5"], ["train.stpes=5: no such key", "train.steps"]),
    (["~train.stop_at"], ["~train.stop_at", "Write train.stop_at=VALUE"]),
    (["--train.steps=5"], ["--train.steps=5", "write train.steps=5"]),
    (["--config-dir", "/no/such/directory"], ["--config-dir=/no/such/directory", "no such directory"]),
    (["optim.lr=1e-3", "optim.lr=2e-3"], ["optim.lr=2e-3", "given twice", "optim.lr=1e-3"]),
    # Combinations
    (["model.n_heads=5", "model.d_model=128"], ["model.n_heads=5", "model.d_model=128", "4 or 8"]),
    (["model.d_model=100", "model.n_heads=4"], ["model.d_model=100", "even", "2 or 5", "96 or 104"]),
    (["model.d_model=100", "model.n_heads=4", "model.n_kv_heads=2"], ["even", "n_heads that work: 2 or 10"]),
    (["model=ngpt", "model.update_mlp=slep"], ["model.update_mlp=slep", "riemannian or null", "slerp"]),
    (
        ["model=ngpt", "model.update_cross=slerp"],
        ["model.update_cross=slerp: model=ngpt has no such key", "model=ntransformer"],
    ),
    (["model=ngpt", "model.norm_eps=1"], ["model.norm_eps=1", "a number >= 0 and < 1"]),
    (
        ["model=ngpt", "model.s_qk.kind=scalar", "model.s_qk.shared=true"],
        ["model.s_qk.shared=true, model.s_qk.kind=scalar: model.s_qk.shared has no effect"],
    ),
    (
        ["model=ngpt", "model.update=slerp", "model.update_mlp=slerp", "model.update_attn=lerp"],
        ["model.update=slerp, model.update_mlp=slerp: model.update has no effect"],
    ),
    (["model=gpt", "model.activation=relu2"], ["model.activation=relu2, model.mlp=gated", "Set model.mlp=plain"]),
    (["model=composed", "model.activation=relu"], ["model.activation=relu, model.mlp=gated", "Set model.mlp=plain"]),
    (["model.dropout=0.1"], ["model.dropout=0.1", "model.embedding_dropout", "model.residual_dropout"]),
    (
        # One placement each, so that none is left for the key of both.
        [
            "model=composed",
            "model.norm_placement=peri",
            "model.attn_norm_placement=pre",
            "model.mlp_norm_placement=post",
        ],
        ["model.norm_placement=peri, model.mlp_norm_placement=post: model.norm_placement has no effect"],
    ),
    (["model=composed", "model.qk_norm=true", "model.qkv_norm=true"], ["both normalise q and k", "to false"]),
    (["model=composed", "model.norm=pn", "model.qk_norm=true"], ["model.qk_norm=true, model.norm=pn", "per token"]),
    (
        ["model=composed", "model.norm=layer", "model.group_scaling=1", "model.qkv_norm=true"],
        ["model.qkv_norm=true, model.group_scaling=1", "Set one of them"],
    ),
    (["model=composed", "model.group_scaling=2"], ["model.group_scaling=2, model.norm=rms", "no effect"]),
    (
        ["model=composed", "model.norm=pn", "model.ffn_norm=norm", "model.d_mlp=510"],
        ["model.group_scaling=4, model.d_mlp=510", "the MLP's hidden width", "508 or 512"],
    ),
    (["model=composed", "model.norm=dyt", "model.norm_eps=0.1"], ["model.norm_eps=0.1, model.norm=dyt", "no effect"]),
    (["model=composed_encoder_decoder", "model.positions=learned"], ["rotary, sinusoidal or none"]),
    (["model=powernorm", "model.group_scaling=3"], ["model.group_scaling=3", "model.d_model=128", "2 or 4"]),
    (
        ["model=powernorm", "model.norm=layer", "model.statistics=synchronised"],
        ["model.statistics=synchronised, model.norm=layer", "no effect", "model.statistics=per_rank"],
    ),
    (
        ["model=powernorm", "model.psi_warmup_steps=50", "train.steps=50"],
        ["model.psi_warmup_steps=50, train.steps=50", "not causal", "below 50"],
    ),
    (
        ["model=normformer", "model.rope_base=500"],
        ["model.rope_base=500.0, model.positions=sinusoidal", "no effect", "model.rope_base=10000"],
    ),
    (
        ["model=normformer", "model.qk_norm=true"],
        ["model.qk_norm=true", "belongs to model=composed, model=composed_encoder_decoder, model=gpt, "],
    ),
    (
        ["model.s_qk.kind=fixed", "model.s_qk.scale=2"],
        ["model.s_qk.scale=2.0, model.s_qk.kind=fixed", "no effect", "model.s_qk.scale=1/sqrt(d)"],
    ),
    (["model.n_kv_heads=3", "model.n_heads=4"], ["model.n_kv_heads=3", "2 or 4"]),
    (["train.batch_tokens=1000", "model.context=256"], ["train.batch_tokens=1000", "768 or 1024"]),
    (["train.batch_tokens=2048", "train.batch_rows=8"], ["train.batch_rows=8", "train.batch_tokens=2048"]),
    (["train.batch_rows=null"], ["train.batch_rows=null", "Set one"]),
    (["train.micro_rows=5", "train.batch_rows=16"], ["train.micro_rows=5", "4 or 8", "15 or 20"]),
    (["train.stop_at=501", "train.steps=500"], ["train.stop_at=501", "train.steps=500"]),
    (["schedule.warmup_steps=500", "train.steps=500"], ["schedule.warmup_steps=500", "train.steps=500"]),
    (["schedule.final_lr=1"], ["schedule.final_lr=1.0", "optim.lr="]),
    (["optim.weight_decay=0.1"], ["optim.weight_decay=0.1", "Set optim.weight_decay=0"]),
    (["recipe=gpt"], ["optim.weight_decay=0.1", "model.name=ngpt", "recipe"]),
    (["model=gpt", "optim.name=adam"], ["optim.name=adam", "optim.name=adamw"]),
    (["data=local"], ["data.path=null", "data.path=PATH"]),
    (["data.path=books"], ["data.path=books", "data=local"]),
    (["scale.name=huge"], ["scale=huge", "Set optim.lr"]),
    (["tokenizer=bytes", "tokenizer.path=x"], ["tokenizer.path=x", "tokenizer=sentencepiece"]),
    (["checkpoint.keep_every=150", "checkpoint.every=100"], ["checkpoint.keep_every=150", "multiple of 100"]),
    (["run.overwrite=true", "run.resume=must"], ["run.overwrite=true", "run.resume=must"]),
    # Multirun
    (["-m", "optim.lr=1e-3,fast"], ["optim.lr=fast", "a number > 0 or auto"]),
    (["-m", "optim.lr=interval(0,1)"], ["optim.lr=interval(0,1)", "List the values"]),
    (["-m", "run.name=a/b", "run.seed=1,2"], ["run.name=a/b/0", "at most one '/'"]),
]

# A file below the user's directory, its content, then what the message must say beside the file's path.
FILES: list[tuple[str, str, list[str]]] = [
    ("model/my", "defaults: [gpt]\nqk_nrom: true\n", ["model.qk_nrom=true", "model.qk_norm"]),
    ("model/my", "d_model: 96\n", ["architecture", "- ngpt"]),
    ("model/my", "defaults: [ngpt]\nmodel:\n  d_model: 96\n", ["model.model.d_model=96", "d_model", "@package"]),
    ("model/my", "defaults: [my]\nd_model: 96\n", ["model=my: builds upon itself: my -> my", "Take my out"]),
    ("model/my", "defaults: ngpt\n", ["defaults=ngpt", "not a list"]),
    ("model/my", "defaults: [ngpt]\n_target_: os.system\n", ["model._target_=os.system", "no such key"]),
    ("model/my", "defaults: [ngpt]\nd_model: 128\nn_heads: 5\n", ["model.n_heads=5", "4 or 8"]),
    ("scale/my", "train:\n  steps: 5\n", ["# @package _global_"]),
    ("scale/my", "# @package _global_\ntrain:\n  steps: ten\n", ["train.steps=ten", "an integer >= 1"]),
    ("recipe/my", "# @package _global_\noptim: {lr: .inf}\n", ["optim.lr=inf", "finite"]),
    ("recipe/my", f"# @package _global_\noptim: {{lr: {5000 * '9'}}}\n", ["cannot be read as YAML"]),
    ("scale/my", "# @package _global_\nrun:\n  root: ???\n", ["run.root=???", "??? stands for no value"]),
    ("scale/my", "# @package _global_\nrun: ???\n", ["run=???", "a section"]),
    ("experiment/my", "# @package _global_\ntrain.steps: 3\n", ["train.steps: only", "Write train: {steps: 3}"]),
    ("model/my", "defaults: [ngpt]\nmodel.d_model: 96\n", ["model.d_model: only", "Write d_model: 96"]),
    (
        "scale/my",
        "# @package _global_\nlogging:\n  wandb.mode: offline\n",
        ["logging.wandb.mode: only", "Write logging: {wandb: {mode: offline}}"],
    ),
    ("scale/my", "# @package _global_\ntrain:\n\tsteps: 5\n", ["line 3", "not valid YAML"]),
    ("scale/my", "# @package _global_\ntrain:\n  steps: 5\n  steps: 6\n", ["line 4", "duplicate key steps"]),
    ("scale/my", "- a\n- b\n", ["a list", "mapping"]),
    ("recipe/my", "# @package _global_\noptim:\n  lr_table: {tiny: {256: fast}}\n", ["optim.lr_table", "fast"]),
    ("eval/my", "every: often\n", ["eval.every=often", "an integer >= 0"]),
    ("logging/my", "wandb:\n  mode: off\n", ["logging.wandb.mode=false", "offline"]),
    ("experiment/my", "# @package _global_\ndefaults:\n  - override /modl: gpt\n", ["modl", "did you mean model"]),
    ("experiment/my", "# @package _global_\ndefaults:\n  - override /model: gtp\n", ["model=gtp", "mean gpt"]),
    ("experiment/my", "# @package _global_\ndefaults:\n  - /model: gpt\n", ["model=gpt", "override /model: gpt"]),
    ("experiment/my", "# @package _global_\nrun:\n  root: ${nope}\n", ["run.root=${nope}", "'nope' not found"]),
    ("experiment/my", "", ["# @package _global_"]),
    (
        "experiment/my",
        "# @package _global_\ntrain:\n  batch_rows: 8\n  batch_tokens: 2048\n",
        ["train.batch_rows=8", "train.batch_tokens=2048"],
    ),
]


def message_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    # Were the mistake accepted, --cfg would print the configuration instead of starting a run.
    code = main(["train", *arguments, "--cfg", "job"])
    captured = capsys.readouterr()
    assert code == 2, captured.out
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    for word in INTERNALS:
        assert word in " ".join(arguments) or word not in captured.err
    return captured.err


@pytest.mark.parametrize(("arguments", "says"), COMMAND_LINES, ids=" ".join)
def test_command_line(arguments: list[str], says: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    message = message_of(arguments, capsys)
    for text in says:
        assert text in message


@pytest.mark.parametrize(("name", "content", "says"), FILES)
def test_yaml_file(
    name: str,
    content: str,
    says: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / f"{name}.yaml"
    path.parent.mkdir()
    path.write_text(content)
    group, option = name.split("/")
    message = message_of([f"{group}={option}", "--config-dir", str(tmp_path)], capsys)
    for text in [*says, str(path)]:
        assert text in message


def test_experiments_that_build_upon_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment").mkdir()
    for name, other in {"a": "b", "b": "c", "c": "b"}.items():
        (tmp_path / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\ndefaults: [{other}]\n")
    message = message_of(["experiment=a", "--config-dir", str(tmp_path)], capsys)
    assert "experiment=b: builds upon itself: b -> c -> b" in message
    assert f"in the defaults of {tmp_path}/experiment/c.yaml" in message


def test_messages_keep_the_secrets_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Caught: the value of an environment variable in a message, and so in logs."""
    monkeypatch.setenv("NGPT_SECRET", "hunter2")
    message = message_of(["train.steps=${oc.env:NGPT_SECRET}"], capsys)
    assert "train.steps=${oc.env:NGPT_SECRET}" in message
    assert "Value '$NGPT_SECRET' of type 'str' could not be converted" in message
    assert "hunter2" not in message


@pytest.mark.parametrize("defaults", ["[null]", "[ngpt, override /model: gpt]"])
def test_a_defaults_list_that_has_no_order(defaults: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "my.yaml").write_text(f"defaults: {defaults}\n")
    message = message_of(["model=my", "--config-dir", str(tmp_path)], capsys)
    assert message.startswith("error: the defaults lists do not fit together: ")


@pytest.mark.parametrize("group", ["experiment", "scale"])
def test_an_option_that_is_no_file(group: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / group / "directory.yaml").mkdir(parents=True)
    (tmp_path / group / "link.yaml").symlink_to("/nowhere")
    for name, reason in {"directory": "it is no file", "link": "links to /nowhere"}.items():
        message = message_of([f"{group}={name}", "--config-dir", str(tmp_path)], capsys)
        assert f"{tmp_path}/{group}/{name}.yaml: cannot be read: " in message
        assert reason in message
    assert main(["train", "--config-dir", str(tmp_path), "--cfg", "job"]) == 0  # the others are none the worse


def test_the_example_of_a_checkpoint_is_the_newest_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one of a sweep. Caught: a hint that names a run which is not there."""
    for time, name in enumerate(("old", "sweep/0", "older")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").touch()
        os.utime(tmp_path / name / "run.json", (9 - abs(time - 1), 9 - abs(time - 1)))
    assert main(["generate", f"run.root={tmp_path}"]) == 2
    assert f"For example generate.checkpoint={tmp_path}/sweep/0\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian", "model=ngpt"], ["trian", "did you mean train", "prepare"]),
        (["model=ngpt"], ["model=ngpt", "train model=ngpt"]),
        (["train", "--cfg", "all"], ["--cfg all", "--cfg job"]),
        (["train", "--cfg=all"], ["--cfg all", "--cfg job"]),
        (["generate"], ["generate.checkpoint=null", "generate.checkpoint=runs/NAME"]),
        (["evaluate", "evaluate.checkpoint=x", "evaluate.out=/no/such/x.json"], ["evaluate.out=", "/no/such"]),
        (["evaluate", "evaluate.checkpoint=x", "evaluate.out=x.npz"], ["losses of rows", "evaluate.out=x.json"]),
        (["plan", "plan.out=/"], ["plan.out=/", "is a directory"]),
        (["plan", "plan.out=/proc/x.json"], ["plan.out=/proc/x.json", "cannot be written"]),
        (["bench", "step"], ["no verb any more", "`python -m benchmarks.NAME`"]),
        (["plan", "scale=debug", "plan.world_size=3"], ["train.batch_rows=8", "3 ranks", "6 or 9"]),
        (["prepare", "data=tokens", "data.path=x"], ["data.kind=tokens", "nothing to prepare"]),
        (
            ["prepare", "data=mixture", "data.mixture=a 1 local x; b 1 local y"],
            ["data.kind=mixture", "one source at a time"],
        ),
        (["generate", "generate.prompt=\udce9t\udce9"], ["generate.prompt=", "not UTF-8"]),
        (["train", "--config-dir"], ["--config-dir DIR"]),
    ],
)
def test_verb_and_options(
    arguments: list[str],
    says: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # without runs, one of which a message would name
    assert main(arguments) == 2
    message = capsys.readouterr().err
    for text in says:
        assert text in message


@pytest.mark.parametrize(
    ("ranks", "arguments", "says"),
    [
        ("3", ["train.batch_rows=16"], ["train.batch_rows=16", "3 ranks", "15 or 18"]),
        ("4", ["train.micro_rows=3", "train.batch_rows=16"], ["train.micro_rows=3", "2 or 4", "12 or 24"]),
        ("2", ["parallel=single"], ["parallel.kind=single", "there are 2 ranks"]),
        ("2", ["-m", "run.seed=1,2"], ["--multirun", "torchrun"]),
    ],
)
def test_under_torchrun(
    ranks: str,
    arguments: list[str],
    says: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """That rank 1 waits for rank 0 to tell the error is in tests/processes/test_launcher.py."""
    monkeypatch.setattr("ngpt_train.__main__.SECONDS_FOR_THE_TELLER", 0)
    monkeypatch.setenv("WORLD_SIZE", ranks)
    monkeypatch.setenv("RANK", "0")
    message = message_of(arguments, capsys)
    for text in says:
        assert text in message
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["train", *arguments, "--cfg", "job"]) == 2
    assert capsys.readouterr().err == ""


def test_half_a_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    assert main(["train", "--cfg", "job"]) == 2
    assert "WORLD_SIZE=2 is set in the environment, but not RANK" in capsys.readouterr().err


def test_tensorboard_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    message = message_of(["logging.tensorboard=true"], capsys)
    assert "logging.tensorboard=true" in message
    assert "ngpt-train[tensorboard]" in message


@pytest.mark.parametrize("old", ["0.4.9", "0.4.9.2", "0.4.11", "0.3.0"])
def test_an_old_harness(old: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Caught: an ImportError from deep inside, hours later; versions that are compared as text."""
    monkeypatch.setattr(records, "version", lambda name: old)
    assert f"lm-eval {old} is too old" in message_of(["eval.tasks=[arc_easy]"], capsys)
    for new in ("0.4.12", "0.5.0rc1", "1.0"):
        monkeypatch.setattr(records, "version", lambda name, new=new: new)
        assert main(["train", "eval.tasks=[arc_easy]", "--cfg", "job"]) == 0
