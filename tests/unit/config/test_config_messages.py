"""Every mistake of a user ends in one message that names the key, the value and the way out, and in exit code 2."""

import os
import sys
from pathlib import Path

import pytest

from ngpt_train.__main__ import main
from ngpt_train.config.sections import records

# Words that only someone who knows the libraries underneath could read.
INTERNALS = ("Traceback", "hydra", "omegaconf", "full_key", "reference_type", "object_type", "override grammar")

# Arguments after `train`, and the parts of the message that say what is wrong and what to do.
COMMAND_LINES: dict[str | tuple[str, ...], str] = {
    # Names
    "model=ngtp": "did you mean ngpt | options angpt, composed, ",
    "modle=ngpt": "did you mean model",
    "train.step=10": "train.steps",
    "lr=1e-3": "optim.lr",
    "model.mlp=plain": "model=ngpt has no such key | model=gpt",
    "model.name=gpt": "model=NAME",
    "parallel=tp": "no tensor and no context parallelism | parallel=fsdp or hsdp",
    "parallel.tensor_parallel_size=2": "no tensor and no context parallelism | parallel=fsdp or hsdp",
    # Values
    "train.steps=ten": "an integer >= 1",
    "train.steps=1e4": "write 10000",
    "train.steps=": "train.steps=: | empty | an integer >= 1",
    "train.steps='5'": "write 5 without quotes",
    "train.steps='-5'": "an integer >= 1\n",
    "train.steps=" + 5000 * "9": "an integer >= 1",
    "optim.betas='[0.9,0.95]'": "write [0.9,0.95] without quotes",
    "run.name=null": "must be text; leave it out | run.name=auto",
    "run.root=???": "??? stands for no value",
    "optim.lr=.inf": "finite",
    "optim.clip_norm=1" + 400 * "0": "a number > 0 or null | finite",
    "optim.lr=0": "a number > 0 or auto",
    "optim.betas=[0.9]": "[0.9,0.95]",
    "optim.betas=[0.9,1]": "optim.betas=[0.9,1.0] | < 1",
    "optim.betas=[0.9": "[0.9,0.95]",
    "schedule.kind=inverse_sqrt schedule.final_lr=1e-4": "schedule.final_lr=0.0001 | schedule.final_lr=0",
    "schedule.kind=ramp schedule.warmup_steps=5": "the whole run is a warmup",
    "schedule.kind=ramp schedule.warmup_tokens=5": "Set schedule.warmup_tokens=0",
    "model.context=64 train.batch_rows=8 train.steps=50 schedule.warmup_tokens=25600": "25088 or less, a step has 512",
    "parallel.shard=2": "parallel=hsdp",
    "parallel=ddp parallel.gather=step": "parallel=fsdp or hsdp",
    "parallel=single parallel.scatter=step": "parallel=fsdp or hsdp",
    "schedule.decay_fraction=0.1": "schedule.kind=cosine | schedule.kind=wsd",
    "schedule.warmup_tokens=375e6": "write 375000000",
    "schedule.rho=0.3": "schedule.kind=cosine | schedule.kind=log, or leave schedule.rho out",
    "model=gpt model.n_classes=1 optim.z_loss=1": "optim.z_loss=1.0 | squared error | Set optim.z_loss=0",
    "optim.gate_eps=1e-6": "optim.gate_eps has no effect | set optim.gate_power=0.5",
    "model=gpt optim.angle_cap=0.1": "optim.angle_cap=0.1, model.name=gpt | model.constraint=projection",
    "model.constraint=none optim.angle_cap=0.1": "length 1 | model.constraint=projection",
    "eval.contexts=[64,1.5]": "a list of integers >= 1",
    "logging.wandb.tags=[a,1]": "a list of words | [a,b]",
    "eval.rows=null": "eval.rows=null, eval.tokens=null | eval.rows=64",
    "model=normformer model.positions=learned model.context=64 eval.contexts=[32,128]": "64 tokens | Leave 128 out",
    "model=ntransformer model.context=96 eval.contexts=[96,48]": "64 tokens to read and 32 to continue | Leave 48 out",
    "data.pack=best_fit eval.contexts=[512]": "eval.contexts=[512], data.pack=best_fit | same",
    "optim.lr_table.tiny.256=0.1": "Set optim.lr",
    "optim.lr=1e300": "> 0 and <= 1000 or auto",
    "model.n_layers=1" + 20 * "0": "model.n_layers=10000 | >= 1 and <= 10000\n",
    "run.name=a/../b": "not a directory name",
    "data.path=${nope}": "'nope' not found",
    # Syntax
    "run=first": "a section | run.name",
    "model=[gpt,ngpt]": "one option | -m",
    "optim.lr=1e-3,3e-3": "-m",
    "scale tiny": "scale: no '=' | scale=OPTION",
    ("optim.lr= 3",): "optim.lr= 3: a space | Write optim.lr=3, without spaces",
    ("run.name = x",): "run.name = x: a space | Write run.name=x, without spaces",
    "+experiment=quickstart": "Write experiment=quickstart",
    "+train.stpes=5": "train.stpes=5: no such key | train.steps",
    "~train.stop_at": "Write train.stop_at=VALUE",
    "--train.steps=5": "write train.steps=5",
    "--config-dir /no/such/directory": "--config-dir=/no/such/directory | no such directory",
    "optim.lr=1e-3 optim.lr=2e-3": "given twice | optim.lr=1e-3",
    # Combinations
    "model.n_heads=5 model.d_model=128": "model.n_heads=5 | 4 or 8",
    "model.d_model=100 model.n_heads=4": "model.d_model=100 | even | 2 or 5 | 96 or 104",
    "model.d_model=100 model.n_heads=4 model.n_kv_heads=2": "even | n_heads that work: 2 or 10",
    "model=ngpt model.update_mlp=slep": "riemannian or null | slerp",
    "model=ngpt model.norm_eps=1": "a number >= 0 and < 1",
    "model=ngpt model.s_qk.kind=scalar model.s_qk.shared=true": "model.s_qk.shared has no effect",
    "model=ngpt model.update=slerp model.update_mlp=slerp model.update_attn=lerp": "model.update has no",
    "model=gpt model.activation=relu2": "model.activation=relu2, model.mlp=gated | Set model.mlp=plain",
    "model=composed model.activation=relu": "model.activation=relu, model.mlp=gated | Set model.mlp=plain",
    "model.dropout=0.1": "model.embedding_dropout | model.residual_dropout",
    # One placement each, so that none is left for the key of both.
    "model=composed model.norm_placement=peri model.attn_norm_placement=pre model.mlp_norm_placement=post": "no effect",
    "model=composed model.qk_norm=true model.qkv_norm=true": "both normalise q and k | to false",
    "model=composed model.norm=pn model.qk_norm=true": "model.qk_norm=true, model.norm=pn | per token",
    "model=composed model.norm=layer model.group_scaling=1 model.qkv_norm=true": "Set one of them",
    "model=composed model.group_scaling=2": "model.group_scaling=2, model.norm=rms | no effect",
    "model=composed model.norm=pn model.ffn_norm=norm model.d_mlp=510": "the MLP's hidden width | 508 or 512",
    "model=composed model.norm=dyt model.norm_eps=0.1": "model.norm_eps=0.1, model.norm=dyt | no effect",
    "model=composed model.separate_gains=true model.norm=layer": "only RMSNorm's gain | Set model.norm=rms",
    "model=composed model.separate_gains=true model.mlp_norm_placement=reordered": "with reordered | pre or peri",
    "model=composed model.input_gain_decay=true optim.weight_decay=0": "nothing decays | optim.weight_decay above 0",
    "model=composed model.input_gain_decay=true model.norm=layer_plain": "model.input_gain_decay has no effect",
    "model=composed model.input_gain_decay=true model.norm_placement=post": "model.norm_placement=post | no effect",
    "model=gpt model.logit_soft_cap=0": "model.logit_soft_cap=0 | a number > 0",
    "model=composed_encoder_decoder model.positions=learned": "rotary, sinusoidal or none",
    "model=powernorm model.group_scaling=3": "model.d_model=128 | 2 or 4",
    "model=powernorm model.norm=layer model.statistics=synchronised": "no effect | model.statistics=per_rank",
    "model=powernorm model.psi_warmup_steps=50 train.steps=50": "not causal | below 50",
    "model=normformer model.rope_base=500": "model.positions=sinusoidal | no effect | =10000",
    "model.s_qk.kind=fixed model.s_qk.scale=2": "no effect | model.s_qk.scale=1/sqrt(d)",
    "model.constraint=ball model.init.hidden=0.02": "model.constraint=ball | no effect | =1/sqrt(d_model)",
    "model=angpt model.init.embedding=1": "model.init.embedding=1.0, model.name=angpt | no effect",
    "model=angpt model.reference.d_model=64": "no effect | model.reference.d_model=null",
    "model=angpt recipe=gpt": "optim.weight_decay=0.1 | model.name=angpt",
    "model.n_kv_heads=3 model.n_heads=4": "model.n_kv_heads=3 | 2 or 4",
    "train.batch_tokens=1000 model.context=256": "train.batch_tokens=1000 | 768 or 1024",
    "train.batch_tokens=2048 train.batch_rows=8": "train.batch_tokens=2048",
    "train.batch_rows=null": "Set one",
    "train.micro_rows=5 train.batch_rows=16": "train.micro_rows=5 | 4 or 8 | 15 or 20",
    "train.stop_at=501 train.steps=500": "train.stop_at=501",
    "schedule.warmup_steps=500 train.steps=500": "schedule.warmup_steps=500",
    "schedule.final_lr=1": "schedule.final_lr=1.0 | optim.lr=",
    "optim.weight_decay=0.1": "Set optim.weight_decay=0",
    "recipe=gpt": "optim.weight_decay=0.1 | model.name=ngpt",
    "model=gpt optim.name=adam": "optim.name=adamw",
    "optim.reference.tokens=1000": "optim.reference.tokens=1000, optim.lr_rule=none | optim.lr_rule=hyperp",
    "optim.lr_rule=hyperp": "optim.lr_rule=hyperp: no run is named | optim.reference.n_layers",
    "model=angpt optim.name=muonh optim.lr=1": "model.name=angpt | become shorter | muon or normuon",
    "model.constraint=ball optim.name=adamh optim.lr=1": "become shorter | muon or normuon",
    "recipe=nugpt optim.lr_rule=hyperp": "no factor of depth | one of them to none",
    "model=gpt optim.name=muonh optim.lr=1": "optim.weight_decay=0.1 | keeps its length | optim.weight_decay=0",
    "optim.name=muonh optim.lr=1 optim.adjust_lr=match_rms_adamw": "no effect | optim.adjust_lr=null",
    "optim.name=adamh optim.lr=1 optim.nesterov=false": "optim.name=adamh | no effect | optim.nesterov=null",
    "optim.momentum=0.9": "optim.name=adam | no effect | optim.momentum=null",
    "scale=8m optim.name=muon": "no learning rate for scale=8m and optim.name=muon | Set optim.lr",
    "optim.name=moun": "adam, adamw, muon",
    "model.tied_embeddings=true optim.groups.output=1": "optim.groups.output=1.0 | optim.groups.embedding",
    "recipe=nugpt optim.groups.vector=1": "optim.groups.vector=1.0 | a rate for each | model.lr_rule=none",
    "recipe=nugpt optim.name=muon optim.lr=1": "model.lr_rule=nugpt | of Adam's steps | optim.name=adam",
    "model=ngpt model.logit_preconditioning=1 model.s_z.kind=scalar": "one number is 1 | s_z.kind=vector",
    "model=composed model.norm=layer_plain optim.name=muonh optim.lr=1 optim.weight_decay=0": "no gain | muon",
    "model=composed model.norm_placement=reordered optim.name=adamh optim.lr=1 optim.weight_decay=0": "before them",
    "model=gpt model.init.residual=0 optim.name=adamh optim.lr=1 optim.weight_decay=0": "the length 0 | muon",
    "data=local": "data.path=null | data.path=PATH",
    "data.path=books": "data=local",
    "scale.name=huge optim.lr=auto": "scale=huge | Set optim.lr",
    "tokenizer=bytes tokenizer.path=x": "tokenizer=sentencepiece",
    "checkpoint.keep_every=150 checkpoint.every=100": "checkpoint.keep_every=150 | multiple of 100",
    "run.overwrite=true run.resume=must": "run.overwrite=true",
    # Multirun
    "-m optim.lr=1e-3,fast": "optim.lr=fast | a number > 0 or auto",
    "-m optim.lr=interval(0,1)": "List the values",
    "-m run.name=a/b run.seed=1,2": "run.name=a/b/0 | at most one '/'",
}

# The same for whole command lines, in a directory with runs/a, which is empty.
VERBS: dict[str | tuple[str, ...], str] = {
    "trian model=ngpt": "trian | did you mean train | prepare",
    "model=ngpt": "the verb comes first | train model=ngpt",
    "train --cfg all": "--cfg all | --cfg job",
    "train --cfg=all": "--cfg all | --cfg job",
    "import runs/a": "Write import.source=runs/a",
    "train --config-dir": "--config-dir DIR",
    "bench step": "no verb any more | `python -m benchmarks.NAME`",
    "generate": "generate.checkpoint=null | generate.checkpoint=runs/NAME",
    "evaluate evaluate.checkpoint=x evaluate.out=/no/such/x.json": "evaluate.out= | /no/such is not a directory",
    "evaluate evaluate.checkpoint=x evaluate.out=x.npz": "losses of rows | evaluate.out=x.json",
    "evaluate evaluate.checkpoint=x evaluate.length.contexts=[]": "evaluate.length.contexts=[]: no context",
    "evaluate evaluate.checkpoint=x evaluate.length.rope=[ntk] evaluate.length.stride=7": "no such evaluation | [1024]",
    "evaluate evaluate.checkpoint=x evaluate.length_penalty=3": "length_penalty | evaluate.beams=null: nothing is",
    "evaluate evaluate.checkpoint=x evaluate.length.contexts=[64] evaluate.beams=5": "evaluate.beams=5 | one after",
    "plan plan.out=/": "plan.out=/: is a directory",
    "plan plan.out=/proc/x.json": "plan.out=/proc/x.json | cannot be written",
    "plan scale=debug plan.world_size=3": "train.batch_rows=8 | 3 ranks | 6 or 9",
    "prepare data=tokens data.path=x": "data.kind=tokens: nothing to prepare",
    ("prepare", "data=mixture", "data.mixture=a 1 local x; b 1 local y"): "data.kind=mixture: one source at a time",
    ("generate", "generate.prompt=\udce9t\udce9"): "generate.prompt= | not UTF-8",
    # A fix that leads to a key, not to `runs/a=VALUE`, for a user who has just run `audit runs/a`.
    "evaluate runs/a": "Write evaluate.checkpoint=runs/a",
    "generate checkpoint=runs/a": "Write generate.checkpoint=runs/a",
    "analyze runs/a": "Write analyze.checkpoints=[runs/a]",
    "evaluate nowhere": "Write nowhere=VALUE",
    "audit": "For example: ngpt-train audit runs/",
    "probe probe.checkpoint=[runs/a]": "did you mean probe.checkpoints",
}

# An option, the content of its file below the user's directory, and the parts of the message beside the file's path.
# The files of scale/, recipe/ and experiment/ begin with HEADER.
HEADER = "# @package _global_\n"
FILES: list[tuple[str, str, str]] = [
    ("model=my", "defaults: [gpt]\nqk_nrom: true\n", "model.qk_nrom=true | model.qk_norm"),
    ("model=my", "d_model: 96\n", "architecture | - ngpt"),
    ("model=my", "defaults: [ngpt]\nmodel:\n  d_model: 96\n", "model.model.d_model=96 | d_model | @package"),
    ("model=my", "defaults: [my]\nd_model: 96\n", "model=my: builds upon itself: my -> my | Take my out"),
    ("model=my", "defaults: ngpt\n", "defaults=ngpt | not a list"),
    ("model=my", "defaults: [ngpt]\n_target_: os.system\n", "model._target_=os.system | no such key"),
    ("model=my", "defaults: [ngpt]\nd_model: 128\nn_heads: 5\n", "model.n_heads=5 | 4 or 8"),
    ("scale=my", "train:\n  steps: ten\n", "train.steps=ten | an integer >= 1"),
    ("recipe=my", f"optim: {{lr: {5000 * '9'}}}\n", "cannot be read as YAML"),
    ("scale=my", "run:\n  root: ???\n", "run.root=??? | ??? stands for no value"),
    ("scale=my", "run: ???\n", "run=??? | a section"),
    ("experiment=my", "train.steps: 3\n", "train.steps: only | Write train: {steps: 3}"),
    ("model=my", "defaults: [ngpt]\nmodel.d_model: 96\n", "model.d_model: only | Write d_model: 96"),
    ("scale=my", "logging:\n  wandb.mode: offline\n", "Write logging: {wandb: {mode: offline}}"),
    ("scale=my", "train:\n\tsteps: 5\n", "line 3 | not valid YAML"),
    ("scale=my", "train:\n  steps: 5\n  steps: 6\n", "line 4 | duplicate key steps"),
    ("recipe=my", "optim: {lr_table: {tiny: {256: [{lr: 1, optim: moun}]}}}\n", "entry 1: optim is none of adam"),
    ("logging=my", "wandb:\n  mode: off\n", "logging.wandb.mode=false | offline"),
    ("experiment=my", "defaults:\n  - override /modl: gpt\n", "modl | did you mean model"),
    ("experiment=my", "defaults:\n  - override /model: gtp\n", "model=gtp | mean gpt"),
    ("experiment=my", "defaults:\n  - /model: gpt\n", "model=gpt | override /model: gpt"),
    ("experiment=my", "run:\n  root: ${nope}\n", "run.root=${nope} | 'nope' not found"),
    ("experiment=my", "train: {batch_rows: 8, batch_tokens: 2048}\n", "train.batch_rows=8, train.batch_tokens=2048"),
    ("scale=my", "- a\n- b\n", "a list | mapping"),
    # Rows of a table.
    ("experiment=my/a", "rows: {a: {train.step: 3}}\n", "train.step=3 | train.steps | row a"),
    ("experiment=my/a", "rows: {a: {model: null}}\n", "model=null: no such option | row a"),
    ("experiment=my/a", "rows: {a: {train.steps: '5'}}\n", "train.steps=5 | without quotes | row a"),
    ("experiment=my/a", "rows: {a: {model: gpt, model.s_qk.init: 1}}\n", "model.s_qk.init=1: no such key | row a"),
    ("experiment=my/a", "rows: {a: {model: {s_qk: {init: 2}}}}\n", "Write model.s_qk.init: 2 | row a"),
    ("experiment=my/a", "rows: {a: {optim.lr_table: {tiny: {256: 1}}}}\n", "Set optim.lr | row a"),
    ("experiment=my/a", "rows: {a: {experiment: quickstart}}\n", "experiment=quickstart | row a"),
    ("experiment=my/a", "rows: {a: {run.root: '${nope}'}}\n", "run.root=${nope} | 'nope' not found | row a"),
    ("experiment=my/a", "rows: {a: {schedule.warmup_steps: 500, train.steps: 3}}\n", "train.steps is set in"),
    ("experiment=my/a", "rows: {a: 5}\n", "5: a row is a mapping | row a"),
    ("experiment=my/a", "rows:\n  a: {}\n  a: {}\n", "duplicate key a"),
    ("experiment=my/a", "rows:\n  a b: {}\n", "a b: not a name for a row"),
    ("experiment=my/a", "rows:\n  [a, b]\n", "rows=[a,b]: not a mapping"),
    ("experiment=my/a", "rows:\n  a: {train.steps: 3}\ntrain: 5\n", "train=5: train is a section"),
    ("experiment=my/a", "rows:\n  a: {model: gpt}\ndefaults: model\n", "defaults=model: not a list"),
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


def words(command: str | tuple[str, ...]) -> list[str]:
    return command.split() if isinstance(command, str) else list(command)


@pytest.mark.parametrize(("command", "says"), COMMAND_LINES.items())
def test_command_line(command: str | tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = message_of(words(command), capsys)
    assert any(word.lstrip("+~-").partition("=")[0].strip() in message for word in words(command))
    for text in says.split(" | "):
        assert text in message


@pytest.mark.parametrize(("command", "says"), VERBS.items())
def test_verb_and_options(
    command: str | tuple[str, ...],
    says: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    assert main(words(command)) == 2
    message = capsys.readouterr().err
    for text in says.split(" | "):
        assert text in message


def written(choice: str, content: str, directory: Path) -> Path:
    group, _, option = choice.partition("=")
    path = directory / group / f"{option.partition('/')[0]}.yaml"
    path.parent.mkdir()
    path.write_text(content)
    return path


@pytest.mark.parametrize(("choice", "content", "says"), FILES)
def test_yaml_file(choice: str, content: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = HEADER if choice.startswith(("scale", "recipe", "experiment")) else ""
    path = written(choice, header + content, tmp_path)
    message = message_of([choice, "--config-dir", str(tmp_path)], capsys)
    for text in [*says.split(" | "), str(path)]:
        assert text in message


@pytest.mark.parametrize(
    ("choice", "content"), [("scale=my", "train: {steps: 5}"), ("experiment=my/a", "rows: {a: {}}")]
)
def test_a_file_without_its_header(
    choice: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(choice, content, tmp_path)
    message = message_of([choice, "--config-dir", str(tmp_path)], capsys)
    assert f"{path}: the first line is not '# @package _global_'" in message


def test_a_row_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written("experiment=t", f"{HEADER}rows:\n  a: {{}}\n  b: {{}}\n", tmp_path)
    for choice, says in {
        "t/c": "experiment=t/c: t has no c | t has a, b",
        "t": "experiment=t: several | experiment=t/a | t has a, b",
        "t/a,t/b": "one option | -m experiment=a,b",
    }.items():
        message = message_of([f"experiment={choice}", "--config-dir", str(tmp_path)], capsys)
        assert all(text in message for text in says.split(" | "))


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
    ("ranks", "arguments", "says"),
    [
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


def test_tensorboard_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    message = message_of(["logging.tensorboard=true"], capsys)
    assert "logging.tensorboard=true" in message
    assert "ngpt-train[tensorboard]" in message


@pytest.mark.parametrize("old", ["0.4.11", "0.3.0"])
def test_an_old_harness(old: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Caught: an ImportError from deep inside, hours later; versions that are compared as text."""
    monkeypatch.setattr(records, "version", lambda name: old)
    assert f"lm-eval {old} is too old" in message_of(["eval.tasks=[arc_easy]"], capsys)
    for new in ("0.4.12", "0.5.0rc1", "1.0"):
        monkeypatch.setattr(records, "version", lambda name, new=new: new)
        assert main(["train", "eval.tasks=[arc_easy]", "--cfg", "job"]) == 0
