"""Refuses keys that exclude each other, and a verb that lacks what it needs. What an architecture excludes is in its
keys.py."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from operator import attrgetter
from pathlib import Path

from ngpt_train.config.analysis import check_analysis
from ngpt_train.config.keys import AUTO, Conflict, nearest_divisors, nearest_multiples
from ngpt_train.config.mixture import mixture_of
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.places import check_directory, check_file, check_paths, check_read, example_run
from ngpt_train.config.resolve import auto_warmup
from ngpt_train.config.schema import Config
from ngpt_train.config.sections.analysis import AnalyzeConfig, ProbeConfig
from ngpt_train.config.sections.data import DataConfig, TokenizerConfig
from ngpt_train.config.sections.optim import ScheduleConfig
from ngpt_train.config.sections.parallel import ParallelConfig
from ngpt_train.config.sections.records import CheckpointConfig
from ngpt_train.config.sections.study import STUDY_VERBS, TransferConfig, is_of_study
from ngpt_train.config.sections.verbs import EvalConfig, LengthConfig
from ngpt_train.config.texts import check_texts
from ngpt_train.config.validate import Origin, mistake, report_together, show

# One level of directories: multirun numbers its jobs <name>/<k>.
_PART = "[A-Za-z0-9_][A-Za-z0-9._-]{0,199}"  # file systems take 255 bytes
_RUN_NAME = re.compile(f"{_PART}(/{_PART})?")


def check(config: Config, world_size: int | None = None, origins: Mapping[str, Origin] | None = None) -> None:
    """Raises ConfigError for values that exclude each other. `config` is resolved; `world_size` is the
    number of ranks, by default torchrun's."""
    world_size = world_size or int(os.environ.get("WORLD_SIZE", "1"))
    conflicts = chain(
        _run(config),
        of_model(config.model),
        _dropout(config),
        _batch(config, world_size),
        _cuda_graphs(config, world_size),
        _optimization(config),
        _source(config.data, config.tokenizer),
        _rows(config.data, config.model),
        _tokenizer(config.tokenizer),
        _checkpoints(config.checkpoint, config.eval),
        _contexts(config),
        _tasks(config.eval),
        _length(config.evaluate.length, config.eval),
    )
    for conflict in conflicts:
        raise report_together(config, conflict, origins or {})


def check_contexts(config: Config) -> None:
    """Raises ConfigError unless config.model, which may be a checkpoint's, can be validated at eval.contexts."""
    for conflict in _contexts(config):
        raise report_together(config, conflict, {})


def check_arguments(verb: str, overrides: Sequence[str]) -> None:
    """Raises ConfigError for what `verb` never takes. A recipe would be checked against the default model first."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"
    if verb in ("analyze", "probe") and under_torchrun:
        raise mistake(f"{verb}: not under torchrun, it is one process", f"Start it with: ngpt-train {verb} ...")
    if verb in STUDY_VERBS and under_torchrun:
        problem = f"{verb}: not under torchrun, where every rank would start the runs by itself"
        raise mistake(problem, f"Start it with: ngpt-train {verb} ...; study.jobs has runs side by side")
    check_paths(verb, overrides)
    for override in overrides:
        name, _, option = (part.strip() for part in override.partition("="))
        if verb in ("evaluate", "generate", "analyze", "probe", "export") and name == "recipe":
            raise mistake(f"{override}: how a model was trained, which the checkpoint has decided", "Leave it out")
        if verb not in STUDY_VERBS and name == "study" and option != "null":
            raise mistake(f"{override}: a study is many runs", f"Start it with: ngpt-train study {override}")


def arguments_of(verb: str, overrides: Sequence[str]) -> list[str]:
    """The arguments that make the config of a verb. Of those that make a study they are the study's. All others
    are for its runs, and are checked with its arms, which choose the models that they belong to."""
    return [override for override in overrides if verb not in STUDY_VERBS or is_of_study(override)]


def check_verb(config: Config, verb: str) -> None:
    """Raises ConfigError for what `verb` cannot do without, or cannot write to."""
    section = getattr(config, verb, None)
    if getattr(section, "checkpoint", "") is None:
        fix = f"For example {verb}.checkpoint={example_run(config)}"
        raise mistake(f"{verb}.checkpoint=null: no checkpoint is named", fix)
    averaging = section if verb in ("generate", "evaluate", "export") else None
    if averaging is not None and averaging.average > 1 and averaging.weights == "ema":
        fix = f"Set {verb}.average=1 or {verb}.weights=trained"
        raise mistake(f"{verb}.average={averaging.average}, {verb}.weights=ema: an average of averages", fix)
    if isinstance(section, (AnalyzeConfig, ProbeConfig)):
        check_analysis(verb, section)
    check_read(config, verb)
    if isinstance(section, (AnalyzeConfig, ProbeConfig, TransferConfig)) and section.out is not None:
        check_directory(f"{verb}.out={section.out}", Path(section.out).expanduser())
    if verb == "generate":
        check_texts(config.generate)
    if verb != "evaluate" and config.data.val_fraction == 1:
        problem = "data.val_fraction=1: all of the text would validate, and none is left to train on"
        raise mistake(problem, "Set it below 1; `evaluate` alone takes 1, for the loss on all of a text")
    if verb == "prepare" and config.data.kind in ("tokens", "mixture"):
        problem = "nothing to prepare" if config.data.kind == "tokens" else "one source at a time is prepared"
        raise mistake(f"data.kind={config.data.kind}: {problem}", "Choose text: data=embedded, local or hf")
    if verb == "plan":
        check(config, config.plan.world_size)
    if verb == "evaluate" and config.evaluate.out is not None and config.evaluate.out.endswith(".npz"):
        problem = f"evaluate.out={config.evaluate.out}: the losses of rows take this name, the result is JSON"
        raise mistake(problem, f"For example evaluate.out={config.evaluate.out.removesuffix('.npz')}.json")
    # What several ranks print is written by the first, whose host alone needs the directory.
    names_directory = verb in ("compare", "transfer", "analyze", "probe", "export", "import")
    out = None if names_directory else getattr(section, "out", None)
    if out and os.environ.get("RANK", "0") == "0":
        check_file(f"{verb}.out={out}", Path(out).expanduser())


def _run(config: Config) -> Iterator[Conflict]:
    run = config.run
    if not _RUN_NAME.fullmatch(run.name):
        fix = "Letters, digits, '.', '_' and '-', at most one '/', parts of 200 at most, none with '.' or '-' first"
        yield "run.name", "not a directory name", fix
    if run.resume_step is not None and (run.overwrite or run.resume == "never"):
        problem = "the run is to go on, and to be deleted or refused"
        yield "run.resume_step run.overwrite run.resume", problem, "Keep one of them"
    if run.overwrite and run.resume == "must":
        yield "run.overwrite run.resume", "overwriting deletes the run that must be resumed", "Keep one of them"
    if config.logging.tensorboard and find_spec("tensorboard") is None:
        fix = "pip install 'ngpt-train[tensorboard]', or set logging.tensorboard=false"
        yield "logging.tensorboard", "the package tensorboard is not installed", fix


def of_model(model: ModelConfig) -> Iterator[Conflict]:
    assert isinstance(model.n_kv_heads, int)
    pairs = 2 if model.uses_rope else 1  # RoPE turns pairs of a head's dimensions
    if model.d_model % (model.n_heads * pairs):
        width, rest = divmod(model.d_model, model.n_heads)
        odd = f"RoPE needs an even width of each head, this is {width}"
        # As many key/value heads as heads are what auto has become: they follow.
        unit = 1 if model.n_kv_heads == model.n_heads else model.n_kv_heads
        whole = model.d_model // pairs if model.d_model % pairs == 0 else 0
        heads = nearest_divisors("model.n_heads", model.n_heads, whole, unit)
        widths = nearest_multiples("model.d_model", model.d_model, model.n_heads * pairs)
        fix = "\n  ".join(filter(None, [heads, widths]))
        yield "model.n_heads model.d_model", "the heads do not divide the width" if rest else odd, fix
    if model.n_heads % model.n_kv_heads:
        fix = nearest_divisors("model.n_kv_heads", model.n_kv_heads, model.n_heads)
        yield "model.n_kv_heads model.n_heads", "the key/value heads do not divide the heads", fix
    for switch, name in model.without_effect():
        value, default = (attrgetter(name)(of) for of in (model, type(model)()))
        if value not in (default, 0 if default == AUTO else default):
            key, fix = f"model.{name}", f"Leave it out, or set model.{name}={show(default)}"
            yield f"{key} model.{switch}", f"{key} has no effect then", fix


def _dropout(config: Config) -> Iterator[Conflict]:
    model, kernel = config.model, config.kernels.attention
    for name in ("residual_dropout", "attention_dropout"):
        if getattr(model, name) and not model.applies_dropout:
            fix = f"Set model.{name}=0, or have its blocks apply dropout (docs/add_an_architecture.md)"
            yield f"model.{name} model.name", "the blocks of this architecture drop nothing", fix
    if model.attention_dropout and kernel not in (AUTO, "sdpa"):
        problem = f"the dropout of {kernel} depends on more than seed, step and row"
        fix = "Set kernels.attention=auto, or model.attention_dropout=0"
        yield "model.attention_dropout kernels.attention", problem, fix


def _batch(config: Config, world_size: int) -> Iterator[Conflict]:
    if config.parallel.kind == "single" and world_size > 1:
        problem = f"one process, but there are {world_size} ranks"
        yield "parallel.kind", problem, "Set parallel=auto, ddp, fsdp or hsdp, or use one rank"
    shard = config.parallel.shard
    if isinstance(shard, int) and config.parallel.kind != "hsdp":
        yield "parallel.shard parallel.kind", "only hsdp has groups", "Set parallel=hsdp, or leave parallel.shard out"
    elif isinstance(shard, int) and world_size % shard:
        fix = nearest_divisors("parallel.shard", shard, world_size)
        yield "parallel.shard", f"the groups do not divide {world_size} ranks", fix
    for name, default in (("gather", ParallelConfig.gather), ("scatter", ParallelConfig.scatter)):
        if getattr(config.parallel, name) != default and config.parallel.kind in ("single", "ddp"):
            fix = f"Set parallel=fsdp or hsdp, or leave parallel.{name} out"
            yield f"parallel.{name} parallel.kind", "every rank holds whole matrices and gradients anyway", fix
    rows, micro = config.train.rows_per_step, config.train.micro_rows
    ranks = f"{world_size} ranks" if world_size > 1 else "one rank"
    if isinstance(micro, int) and rows % (micro * world_size):
        names, unit = "train.batch_rows train.micro_rows", micro * world_size
        problem = f"the batch is no multiple of {micro} rows on {ranks}"
    elif rows % world_size:
        names, unit = "train.batch_rows", world_size
        problem = f"the batch cannot be shared evenly by {ranks}"
    else:
        return
    fix = nearest_multiples("train.batch_rows", rows, unit)
    if isinstance(micro, int) and rows % world_size == 0:
        fix = f"{nearest_divisors('train.micro_rows', micro, rows // world_size)}\n  {fix}"
    yield names, problem, fix


def _cuda_graphs(config: Config, world_size: int) -> Iterator[Conflict]:
    """What CUDA graphs need, and what distributed/cuda_graphs.py does not support."""
    kind, without = config.parallel.kind, "or train.cuda_graphs=false"
    if not config.train.cuda_graphs:
        return
    if config.train.device == "cpu":
        yield "train.cuda_graphs train.device", "CPUs have no CUDA graphs", f"Set train.device=cuda, {without}"
    if config.train.compile is False:
        fix = f"Set train.compile=true, {without}"
        yield "train.cuda_graphs train.compile", "only compiled blocks are recorded", fix
    if kind in ("ddp", "fsdp", "hsdp") or world_size > 1:
        ranks = f", and there are {world_size}" if world_size > 1 else ""
        problem = f"only one process, without DDP and FSDP2{ranks}"
        yield "train.cuda_graphs parallel.kind", problem, f"Use one rank and parallel=single, {without}"


def _optimization(config: Config) -> Iterator[Conflict]:
    train, schedule, optim = config.train, config.schedule, config.optim
    if train.stop_at is not None and train.stop_at > train.steps:
        yield "train.stop_at train.steps", "stops after the end", f"Set train.stop_at to {train.steps} or less"
    if int(schedule.warmup_steps) >= train.steps:
        problem = "the warmup leaves no step at the full learning rate"
        fix = f"Set schedule.warmup_steps below {train.steps}; auto would be {auto_warmup(config)}"
        in_tokens = ""
        if schedule.warmup_tokens is not None:
            in_tokens, tokens = "schedule.warmup_tokens ", train.rows_per_step * config.model.context
            fix = f"Set schedule.warmup_tokens to {(train.steps - 1) * tokens} or less, a step has {tokens}"
        yield f"{in_tokens}schedule.warmup_steps train.steps", problem, fix
    if schedule.kind == "ramp" and schedule.warmup_steps:
        key = "schedule.warmup_steps" if schedule.warmup_tokens is None else "schedule.warmup_tokens"
        yield f"{key} schedule.kind", "the whole run is a warmup", f"Set {key}=0"
    if schedule.kind in ("constant", "inverse_sqrt", "ramp") and schedule.final_lr:
        problem = "this kind falls to no learning rate of one's choice"
        key = "schedule.final_lr" if schedule.final_share is None else "schedule.final_share"
        yield f"{key} schedule.kind", problem, f"Set {key}=0, or another kind"
    if schedule.decay_fraction != ScheduleConfig().decay_fraction and schedule.kind != "wsd":
        fix = "Set schedule.kind=wsd, or leave schedule.decay_fraction out"
        yield "schedule.decay_fraction schedule.kind", "only wsd decays in a last part of the steps", fix
    yield from config.model.conflicts(config)
    if schedule.final_lr > float(optim.lr):
        yield "schedule.final_lr optim.lr", "ends above the peak", f"Set schedule.final_lr to {optim.lr} or less"
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        yield "optim.betas", "not two numbers >= 0 and < 1", "For example optim.betas=[0.9,0.95]"
    if optim.weight_decay and optim.name == "adam":
        yield "optim.weight_decay optim.name", "adam never decays", "Set optim.name=adamw or optim.weight_decay=0"


def _source(data: DataConfig, tokenizer: TokenizerConfig) -> Iterator[Conflict]:
    path, repo = "data.path data.kind", "data.repo data.kind"
    if data.kind in ("local", "tokens") and data.path is None:
        yield path, "no data is named", "Set data.path=PATH"
    if data.kind == "mixture":
        texts = all(source.data.kind != "tokens" for source in mixture_of(data))
        if tokenizer.kind == "words" and tokenizer.from_text and texts:
            fix = "Name a vocabulary with tokenizer.path=FILE, or choose another tokenizer"
            yield "tokenizer.kind data.kind", "the words of a mixture are not counted", fix
    elif data.mixture is not None:
        yield "data.mixture data.kind", "the text is no mixture", "Choose data=mixture, or leave data.mixture out"
    if data.kind == "mixture" and data.path is not None:
        yield path, "a mixture names the path of each source", "Leave data.path out"
    if data.kind == "embedded" and data.path is not None:
        yield path, "the embedded text reads no path", "Choose data=local for text or data=tokens for prepared shards"
    if data.on_hub and data.path is not None:
        yield path, "a data set of the hub reads no path", "Choose data=local for files, or leave data.path out"
    if data.on_hub and data.repo is None:
        yield repo, "no data set is named", "Set data.repo=OWNER/NAME"
    if not data.on_hub and data.repo is not None:
        yield repo, "the text is not read from the hub", "Choose data=hf, or leave data.repo out"
    if not data.on_hub and data.files is not None:
        fix = "Choose data=hf, or set data.files=null; data.path=GLOB names files of your own"
        yield "data.files data.kind", "the text is not read from the hub", fix
    if not data.on_hub and data.text_gb is not None:
        yield "data.text_gb data.kind", "the size of the text is read from the files", "Leave data.text_gb out"
    if data.val_files is not None and data.kind not in ("local", "hf", "openwebtext"):
        fix = "Choose data=local or data=hf, or leave data.val_files out"
        yield "data.val_files data.kind", "the text has no files to choose from", fix
    for name in ("val_files", "keep_empty"):
        if getattr(data, name) and data.streamed:
            fix = f"Set data.streaming=false, or leave data.{name} out"
            yield f"data.{name} data.kind data.streaming", "text is streamed without it", fix
    if tokenizer.kind == "words" and tokenizer.from_text and data.streamed and data.kind != "mixture":
        fix = "Set data.streaming=false, or name a vocabulary with tokenizer.path=FILE"
        yield "tokenizer.kind data.streaming", "counting the words takes all of the text", fix
    if data.kind == "tokens" and data.streamed:
        fix = "Leave data.streaming out, or choose data=local"
        yield "data.streaming data.kind", "prepared shards are tokens already", fix


def _rows(data: DataConfig, model: ModelConfig) -> Iterator[Conflict]:
    if data.objective != model.objective:
        fix = f"Set data.objective={model.objective}, or choose another model"
        yield "data.objective model.name", "the model is not made for this objective", fix
    if data.objective == "prefix_continuation":
        for name, differs in {"data.pack": data.pack != "concat", "data.document_mask": data.document_mask}.items():
            if differs:
                yield f"{name} data.objective", "a row is one document then", f"Leave {name} out"


def _tokenizer(tokenizer: TokenizerConfig) -> Iterator[Conflict]:
    names = "tokenizer.path tokenizer.kind"
    if tokenizer.path is not None and tokenizer.kind == "bytes":
        fix = "Choose tokenizer=sentencepiece or another, or leave tokenizer.path out"
        yield names, "bytes reads no model file", fix
    if tokenizer.path is None and tokenizer.kind == "hf":
        yield names, "no tokenizer.json is named", "Set tokenizer.path=FILE"
    if tokenizer.eos is not None and tokenizer.kind != "hf":
        yield "tokenizer.eos tokenizer.kind", "the tokenizer knows its own", "Leave tokenizer.eos out"


def _checkpoints(checkpoint: CheckpointConfig, validation: EvalConfig) -> Iterator[Conflict]:
    keep, every = checkpoint.keep_every, checkpoint.every
    if checkpoint.keep_best and every and (not validation.every or every % validation.every):
        fix = f"Set eval.every to {every}, or to a divisor of it"
        yield "checkpoint.keep_best checkpoint.every eval.every", "not every checkpoint is validated", fix
    if keep is not None and (every == 0 or keep % every):
        fix = f"Set checkpoint.keep_every to a multiple of {every}" if every else "Set checkpoint.every"
        yield "checkpoint.keep_every checkpoint.every", "no checkpoint is written at these steps", fix


def _tasks(validation: EvalConfig) -> Iterator[Conflict]:
    if validation.tasks == []:
        yield "eval.tasks", "no task", "Name one, as in tasks=[arc_easy], or leave it out"
    if any("/" in name or name in ("", ".", "..") for name in validation.tasks or []):
        fix = (
            "Name the directory with eval.tasks_path=DIR, and here its files without their endings, as in tasks=[NAME]"
        )
        yield "eval.tasks", "a path where names stand", fix
    if validation.tasks and find_spec("lm_eval") is None:
        yield "eval.tasks", "the package lm-eval is not installed", "pip install 'ngpt-train[eval]'"
    elif validation.tasks and tuple(map(int, re.findall(r"\d+", found := version("lm_eval"))[:3])) < (0, 4, 12):
        yield "eval.tasks", f"lm-eval {found} is too old", "pip install 'ngpt-train[eval]', for 0.4.12 or later"


def _length(length: LengthConfig, validation: EvalConfig) -> Iterator[Conflict]:
    if length.contexts == []:
        yield "evaluate.length.contexts", "no context", "Name one, as in [1024], or leave it out"
    if length.contexts is not None and validation.tasks is not None:
        yield "evaluate.length.contexts eval.tasks", "two evaluations", "Start one after the other"
    if not length.rope or not set(length.rope) <= {"none", "linear", "ntk"}:
        yield "evaluate.length.rope", "not a list of none, linear and ntk", "For example [none,ntk]"
    if length.contexts is not None and length.stride is not None and length.stride > min(length.contexts):
        problem = "the window would leave tokens out"
        yield "evaluate.length.stride evaluate.length.contexts", problem, f"At most {min(length.contexts)}"


def _contexts(config: Config) -> Iterator[Conflict]:
    for context in config.eval.contexts or []:
        problem = config.model.refuses_rows_of(context) if context != config.model.context else None
        if problem:
            yield "eval.contexts model.name model.context", problem, f"Leave {context} out of eval.contexts"
    if config.eval.contexts and config.data.pack == "best_fit":
        problem = "documents that fit together in one context are others in another, so the text would not be the same"
        yield "eval.contexts data.pack", problem, "Leave eval.contexts out, or `evaluate` with data.pack=concat"
