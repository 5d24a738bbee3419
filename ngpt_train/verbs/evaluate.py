"""`evaluate`: validation loss of a checkpoint, on its run's data or other data; or its answers to tasks; or its
loss by context and by position on whole documents; or its translations."""

import itertools
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ngpt_train.config.arguments import name_of
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.places import check_beside
from ngpt_train.config.schema import Config
from ngpt_train.config.sections.records import check_contexts
from ngpt_train.config.validate import mistake, show
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import write_atomically, write_json
from ngpt_train.core.recorded import ANSWERS, finite, measured
from ngpt_train.data import open_dataset
from ngpt_train.data.sources import documents_by_split, open_source
from ngpt_train.data.tokenizers.tokenizer import tokenizer_identity
from ngpt_train.distributed.world import join_world
from ngpt_train.evaluation.restore import Restored, find_trained, restore
from ngpt_train.evaluation.translations import scores, translated_pairs
from ngpt_train.evaluation.trust import is_text_of, taken
from ngpt_train.evaluation.validation import Evaluations, file_name
from ngpt_train.models.encoder_decoder import EncoderDecoder

logger = logging.getLogger(__name__)

ROWS = ("eval.rows", "eval.tokens")  # either says how much text is evaluated


def main(config: Config, overrides: Sequence[str]) -> int:
    """Prints loss (nats per token), perplexity and bits per byte, and writes them to evaluate.out, and the loss of each
    row beside it; returns 0.

    Model and tokenizer are the checkpoint's. The data is the run's own unless the command line names another; of an
    experiment only the data is used. Raises ConfigError for an override that contradicts the checkpoint, DataError
    where checkpoint or data cannot be used, or the data has another tokenizer than the model.
    """
    if config.eval.tasks is not None:
        return on_tasks(config, overrides)
    if config.evaluate.length.contexts is not None:
        return on_length(config, overrides)
    if config.evaluate.beams is not None:
        return on_translations(config, overrides)
    trained = find_trained("evaluate", config, overrides, also_used=("data", *ROWS, "eval.contexts", "parallel"))
    combined = combine(config, trained.config, overrides)
    check_contexts(combined)
    contexts = sorted({combined.model.context, *(combined.eval.contexts or [])})
    of_labels = [f"{{stem}}{ANSWERS}"] if combined.model.n_classes else []
    rows = [file_name("{stem}", context, combined.model.context) for context in contexts]
    out, files = output(config, *rows, *of_labels)
    world = join_world(config)
    restored = restore(trained, config, world)
    tokenizer = restored.tokenizer
    dataset = world.on_all_without_timeout(lambda: open_dataset(combined, tokenizer, world.on_main_without_timeout))
    if tokenizer_identity(dataset.tokenizer) != tokenizer_identity(tokenizer):
        raise DataError(
            f"evaluate.checkpoint={config.evaluate.checkpoint}: the model was trained with the tokenizer "
            f"{tokenizer.name} with eos {tokenizer.eos}, the tokens at {dataset.path} were made with "
            f"{dataset.tokenizer.name} with eos {dataset.tokenizer.eos}. "
            "Prepare the text with the model's tokenizer (tokenizer.path=CHECKPOINT/tokenizer.model)."
        )
    validation = Evaluations(dataset.validation, dataset.tokenizer, combined)
    for note in validation.notes():
        logger.info(note)
    is_other_text = combined.data is config.data and config.data.kind in ("local", "hf", "openwebtext")
    if is_other_text or combined.data.val_fraction == 1:
        logger.info(of_text(combined))
    losses = validation.row_losses(restored.model, world)
    data = {"data": combined.data.path or combined.data.kind, "data_fingerprint": dataset.fingerprint}
    result = {**identity(restored), **data, **validation.metrics(losses)}
    if world.is_main:
        on = f"{described(restored)} on {result['data']} ({result['rows']} rows)"
        print(f"{on}: loss {result['loss']:.6f}  {measured(result, digits=6)}")
        for context in sorted(losses.keys() - {combined.model.context}):
            of_context = losses[context].metrics()
            print(
                f"  at context {context} ({of_context['rows']} rows): loss {of_context['loss']:.6f}  "
                f"ppl {of_context['ppl']:.4f}  bits per byte {of_context['bits_per_byte']:.6f}"
            )
        if out is not None:
            for context, name in zip(contexts, files, strict=False):  # with answers there is one more file
                losses[context].write(out.with_name(name))
            write(out, result, files)
    return 0


def on_tasks(config: Config, overrides: Sequence[str]) -> int:
    """Prints the metrics of eval.tasks with their standard errors, and their mean, and writes them to evaluate.out, and
    what was asked and answered beside it; returns 0.

    Raises ConfigError for what is no task or none of this model, DataError where checkpoint or tasks cannot be had.
    """
    of_tasks = ("tasks", "eval.tasks", "eval.tasks_path", "parallel")
    trained = find_trained("evaluate", config, overrides, also_used=of_tasks)
    out, files = output(config, "{stem}_items.jsonl")
    from ngpt_train.evaluation.tasks.run_tasks import Tasks  # brings the harness, which a mistake need not wait for

    world = join_world(config)
    tasks = Tasks(config.eval, trained.config.model, world)
    for note in tasks.notes():
        logger.info(note)
    restored = restore(trained, config, world)
    results = tasks(restored.model, restored.tokenizer, world)
    if world.is_main:
        print(f"{described(restored)} on {', '.join(results.tasks)}")
        for line in results.lines():
            print(f"  {line}")
        if out is not None:
            results.write_items(out.with_name(files[0]))
            write(out, {**identity(restored), **results.as_json()}, files)
    return 0


def on_length(config: Config, overrides: Sequence[str]) -> int:
    """Prints the loss at each of evaluate.length.contexts on the documents of data.*, and writes it with the loss by
    position to evaluate.out, and a picture of both beside it; returns 0.

    Raises ConfigError where the model cannot read such rows, or no text is named, DataError where checkpoint or text
    cannot be had.
    """
    from ngpt_train.evaluation.length_curves import measure, plot_lengths

    wanted = config.evaluate.length
    trained = find_trained("evaluate", config, overrides, also_used=("data", "parallel"))
    check_lengths(config, trained.config.model, overrides)
    out, files = output(config, "{stem}.png")
    text = open_source(config.data)
    world = join_world(config)
    restored = restore(trained, config, world)
    contexts = sorted(set(wanted.contexts or []))
    plan = [
        (context, wanted.stride or max(1, context // 2), rope)
        for rope in dict.fromkeys(wanted.rope)
        for context in contexts
        # Up to the context of training the angles are the same, which `none` has measured.
        if rope == "none" or context > restored.config.model.context or "none" not in wanted.rope
    ]
    documents = itertools.islice(filter(None, text.documents()), wanted.documents)
    curves = measure(restored.model, restored.tokenizer, documents, plan, world)
    if not curves[0].targets:
        raise DataError(f"data.path={config.data.path}: holds no text to evaluate on; name other files")
    if world.is_main:
        print(f"{described(restored)} on {curves[0].documents} documents of {config.data.path or config.data.kind}")
        for curve in curves:
            found = curve.as_json()
            scaled = "" if curve.rope == "none" else f" (RoPE {curve.rope}, factor {curve.factor:g})"
            short = f"; {curve.shorter} documents are shorter" if curve.shorter else ""
            print(
                f"  context {curve.context}, stride {curve.stride}{scaled}: loss {found['loss']:.6f}  "
                f"ppl {found['ppl']:.4f}  bits/byte {found['bits_per_byte']:.6f}  ({curve.targets:,} targets{short})"
            )
        if out is not None:
            result = {**identity(restored), "data": config.data.path or config.data.kind}
            result["trained_context"] = restored.config.model.context
            plot_lengths(curves, restored.config.model.context, described(restored), out.with_name(files[0]))
            write(out, result | {"curves": [curve.as_json() for curve in curves]}, files)
    return 0


def on_translations(config: Config, overrides: Sequence[str]) -> int:
    """Translates the held-out pairs of data.* and prints BLEU and chrF, and writes them to evaluate.out, and
    translations and references, a line each, beside it; returns 0.

    Raises ConfigError where the model does not translate, DataError where checkpoint or pairs cannot be had.
    """
    own = config.evaluate
    trained = find_trained("evaluate", config, overrides, also_used=("data",))
    if trained.config.model.objective != "translation":
        raise mistake(f"evaluate.beams={own.beams}: the model does not translate", "Leave it out")
    combined = combine(config, trained.config, overrides)
    out, files = output(config, "{stem}_translations.txt", "{stem}_references.txt")
    pairs = documents_by_split(combined.data)[1]["validation"]
    if not pairs:
        raise DataError(f"data.path={combined.data.path}: holds no pair to evaluate on; name files with data.val_files")
    world = join_world(config)
    restored = restore(trained, config, world)
    model, tokenizer = restored.model, restored.tokenizer
    assert isinstance(model, EncoderDecoder)
    texts, references = translated_pairs(model, tokenizer, pairs, world, own.beams or 1, own.length_penalty)
    if world.is_main:
        result = {**identity(restored), "data": combined.data.path or combined.data.kind, "pairs": len(pairs)}
        result |= {"beams": own.beams, "length_penalty": own.length_penalty, **scores(texts, references, own.moses)}
        print(
            f"{described(restored)} on {result['data']} ({len(pairs):,} pairs), {own.beams} beams: BLEU "
            f"{result['bleu']:.2f} of words, {result['sacrebleu']:.2f} by sacrebleu ({result['sacrebleu_signature']}), "
            f"chrF {result['chrf']:.2f} ({result['chrf_signature']})"
        )
        if out is not None:
            for name, lines in zip(files, (texts, references), strict=True):
                write_atomically(out.with_name(name), "".join(f"{line}\n" for line in lines).encode())
            write(out, result, files)
    return 0


def output(config: Config, *beside: str) -> tuple[Path | None, list[str]]:
    """evaluate.out, and the names of the files that are written beside it; `beside`: with {stem} for its name without
    the ending. Raises ConfigError where one of them would replace what is no earlier result."""
    if config.evaluate.out is None:
        return None, []
    out = Path(config.evaluate.out).expanduser()
    files = [name.replace("{stem}", out.stem) for name in beside]
    if os.environ.get("RANK", "0") == "0":  # which alone writes, and whose host alone needs the directory
        check_beside(f"evaluate.out={config.evaluate.out}", out, files)
    return out, files


def write(out: Path, result: dict[str, Any], files: Sequence[str]) -> None:
    """Writes `result`, beside which `files` are."""
    write_json(out, finite(result))
    logger.info("written to %s: %s", out.parent, ", ".join([out.name, *files]))


def check_lengths(config: Config, model: ModelConfig, overrides: Sequence[str]) -> None:
    """Raises ConfigError unless `model` reads rows of evaluate.length.contexts, and `overrides` name a text."""
    length = config.evaluate.length
    named = f"evaluate.length.contexts={show(length.contexts)}"
    if problem := model.refuses_text():
        raise mistake(f"{named}: {problem}", "Choose a causal model's checkpoint")
    if model.source_length(model.context):
        raise mistake(f"{named}: an encoder-decoder has a source of its own length", "Choose a decoder's checkpoint")
    for context in length.contexts or []:
        if context > model.context and (problem := model.refuses_rows_of(context)):
            raise mistake(f"{named}: {problem}", f"Leave {context} out")
    if set(length.rope) != {"none"} and not model.uses_rope:
        raise mistake(f"evaluate.length.rope={show(length.rope)}: the model has no RoPE", "Leave it out")
    if not {*map(name_of, overrides)} & {"data", "data.kind", "data.path"} or config.data.kind in ("tokens", "mixture"):
        problem = f"{named}: whole documents are read, and no text is named"
        raise mistake(problem, "For example data=local data.path=books.jsonl, or data=hf data.repo=emozilla/pg19-test")


def of_text(config: Config) -> str:
    """Which part of another text than the run's own is evaluated: not all of it, as who names a file may expect."""
    data, rows = config.data, config.eval
    if data.val_files is not None:
        return f"data.val_files={data.val_files} is evaluated"
    if data.val_fraction == 1:
        limit = f"eval.rows={rows.rows}" if rows.tokens is None else f"eval.tokens={rows.tokens}"
        return "all of the text is evaluated" + ("" if rows.rows == rows.tokens else f", and of it {limit}")
    share = f"data.val_fraction={data.val_fraction:g}"
    return f"the part that training would hold out of this text is evaluated, {share}; 1 takes all of it"


def identity(restored: Restored) -> dict[str, Any]:
    """Identifies the weights of a result."""
    return {
        "checkpoint": str(restored.path),
        "step": restored.step,
        **({"averaged_steps": list(restored.averaged_steps)} if restored.averaged_steps else {}),
        **({"weights": restored.weights} if restored.weights != "trained" else {}),
    }


def described(restored: Restored) -> str:
    """The same in words."""
    return f"{restored.path}{f' ({restored.of_what})' if restored.of_what else ''}"


def combine(config: Config, of_run: Config, overrides: Sequence[str]) -> Config:
    """`config` with the model of the run, and with its text, rows and contexts where `overrides` name no others. Raises
    DataError where the run names a text that is not known to be ours."""
    overridden = {*map(name_of, overrides)}
    # Each of these names other text. Any other key of data.* changes how the run's own text is read.
    other_text = overridden & {"data", "data.kind", "data.path", "experiment"}
    if other_text and ("experiment" in other_text or not is_text_of(config, of_run)):
        data = config.data
    else:
        chosen = {key: value for key, value in vars(config.data).items() if f"data.{key}" in overridden}
        if "data.val_files" in overridden:  # other files, of which the run's part is none
            chosen.setdefault("val_range", None)
        data = replace(taken(of_run, config, overrides, opens=("data",)).data, **chosen)
    data.check_val_range()
    if overridden.intersection(ROWS):
        rows, tokens = config.eval.rows, config.eval.tokens
    else:
        rows, tokens = (None, None) if data.val_fraction == 1 else (of_run.eval.rows, of_run.eval.tokens)
    contexts = config.eval.contexts if "eval.contexts" in overridden else of_run.eval.contexts
    validation = replace(config.eval, rows=rows, tokens=tokens, contexts=contexts)
    return replace(config, model=of_run.model, data=data, eval=validation)
