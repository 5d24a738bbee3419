"""From pairs to a trained model, its translations and their scores."""

import json
from pathlib import Path

import pytest

from ngpt_train.__main__ import main
from ngpt_train.core.constants import TRANSLATED
from ngpt_train.core.recorded import compared
from ngpt_train.data.tokenizers.tokenizer import BytesTokenizer, WordsTokenizer, count_words
from ngpt_train.evaluation.translations import scores, translations, whole_words
from ngpt_train.models import build_model
from ngpt_train.models.composed_encoder_decoder.keys import ComposedEncoderDecoderConfig
from ngpt_train.models.encoder_decoder import EncoderDecoder
from tests.processes.runs import fork_audits, forked, records, train
from tests.unit.data.test_pairs import texts

NAMED = ["scale=debug", "tokenizer=bytes", "model.context=128", "logging.wandb.mode=disabled"]


def run_of_pairs(directory: Path, **pairs: list[dict[str, str]]) -> list[str]:
    """The arguments of a translating run on these pairs, `train` and `val`."""
    for name, given in pairs.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in given))
    data = [f"data.path={directory / 'train.jsonl'}", f"data.val_files={directory / 'val.jsonl'}"]
    data += [f"data.cache={directory / 'cache'}", f"run.root={directory / 'runs'}", "run.name=r"]
    return ["model=ntransformer", "data=pairs", *data, *NAMED, "eval.beams=2", "optim.lr=1e-2"]


def test_a_run_translates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Caught: translations that are not the held-out pairs', or not in their order; scores of other files than the
    written ones; a search that the keys do not reach; a line break inside of a line; a text beyond half a row."""
    pytest.importorskip("sacrebleu", reason="the extra [eval] is not installed")
    from sacrebleu.metrics import BLEU, CHRF

    of_train, pairs = texts(300, seed=300), texts(20, seed=20)
    of_train[3] |= {"target": "deux\nlignes", "source": "a word"}
    pairs[3] |= {"target": "deux\nlignes", "source": "word " * 40}
    run = [*run_of_pairs(tmp_path, train=of_train, val=pairs), "train.steps=30", "eval.every=15"]
    assert main(["train", *run]) == 0
    checkpoint = str(tmp_path / "runs" / "r")
    evaluate = ["evaluate", f"evaluate.checkpoint={checkpoint}"]
    assert main([*evaluate, "evaluate.beams=2", f"evaluate.out={tmp_path / 'b.json'}"]) == 0
    said = capsys.readouterr().out
    result = json.loads((tmp_path / "b.json").read_text())
    found, references = (
        (tmp_path / f"b_{what}.txt").read_text().splitlines() for what in ("translations", "references")
    )
    assert len(found) == result["pairs"] == 20
    assert references[3] == "deux lignes"
    assert references[:3] == [pair["target"] for pair in texts(20, seed=20)[:3]]
    assert result["bleu"] == BLEU(tokenize="none").corpus_score(found, [references]).score
    assert result["sacrebleu"] == BLEU().corpus_score(found, [references]).score > 0
    assert result["chrf"] == CHRF().corpus_score(found, [references]).score
    evals = records(tmp_path / "runs" / "r", "eval")
    assert {name: evals[30][name] for name in TRANSLATED} == {name: result[name] for name in TRANSLATED}
    assert "bleu" not in evals[15]
    assert compared(evals[30], "sacrebleu") == 100 - result["sacrebleu"]
    fork_audits(monkeypatch)
    assert main(["audit", checkpoint, "audit.steps=5"]) == 0, capsys.readouterr()  # stops before the end, and at it
    capsys.readouterr()
    assert "tok:13a" in result["sacrebleu_signature"]
    assert f"{result['sacrebleu']:.2f} by sacrebleu" in said
    (tmp_path / "prompts.txt").write_text("".join(f"{pair['source']}\n" for pair in texts(20, seed=20)))
    generate = ["generate", f"generate.checkpoint={checkpoint}", f"generate.prompts={tmp_path / 'prompts.txt'}"]
    assert main([*generate, "generate.beams=2", f"generate.out={tmp_path / 'g.jsonl'}"]) == 0
    written = [json.loads(line) for line in (tmp_path / "g.jsonl").read_text().splitlines()]
    assert [one["text"] for k, one in enumerate(written) if k != 3] == [x for k, x in enumerate(found) if k != 3]
    assert main([*generate, "generate.max_new_tokens=3", "generate.beams=1"]) == 0
    assert {len(line.encode()) for line in capsys.readouterr().out.splitlines()} <= {0, 1, 2, 3}
    assert main([*generate, "generate.temperature=0"]) == 2
    assert "generate.temperature: without an effect, the model translates" in capsys.readouterr().err
    assert main(evaluate) == 0
    fit = [pair for pair in pairs if 1 + max(len(text.encode()) for text in pair.values()) <= 64]
    assert 10 < len(fit) < 20  # the others are left out
    assert f"({len(fit)} rows): loss" in capsys.readouterr().out


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("a few words of text\n" * 400)
    run = ["model=gpt", "data=local", f"data.path={tmp_path / 'text.txt'}", *NAMED, f"data.cache={tmp_path / 'c'}"]
    assert main(["train", *run, f"run.root={tmp_path}", "run.name=g", "train.steps=1"]) == 0
    assert main(["evaluate", f"evaluate.checkpoint={tmp_path / 'g'}", "evaluate.beams=2"]) == 2
    assert "evaluate.beams=2: the model does not translate" in capsys.readouterr().err
    assert main(["generate", f"generate.checkpoint={tmp_path / 'g'}", "generate.beams=2"]) == 2
    assert "generate.beams: without an effect, the model continues" in capsys.readouterr().err
    assert main(["train", *run, f"run.root={tmp_path}", "run.name=h", "data.translation_field=x"]) == 2
    assert "data.translation_field=x, model.name=gpt" in capsys.readouterr().err


def test_two_ranks_translate_a_part_each(tmp_path: Path) -> None:
    """Caught: references of another order than the translations; a rank without a pair. FSDP2 is refused."""
    pytest.importorskip("sacrebleu", reason="the extra [eval] is not installed")
    run = [*run_of_pairs(tmp_path, train=texts(200, seed=200), val=texts(3, seed=3)), "train.steps=12"]
    refused = forked("train", [*run, "parallel=fsdp"], 2)
    assert refused.returncode
    assert "eval.beams" in refused.stderr
    train([*run, "parallel=ddp"], 2)
    out = tmp_path / "b.json"
    assert (
        main(["evaluate", f"evaluate.checkpoint={tmp_path / 'runs' / 'r'}", "evaluate.beams=2", f"evaluate.out={out}"])
        == 0
    )
    of_one, of_two = json.loads(out.read_text()), records(tmp_path / "runs" / "r", "eval")[12]
    assert {name: of_two[name] for name in TRANSLATED} == {name: of_one[name] for name in TRANSLATED}


def test_scores_of_moses_tokens() -> None:
    """Caught: marks of subword-nmt in what is scored; sacrebleu's BLEU of texts with Moses' spaces and escapes; marks
    that are taken from another tokenizer's text."""
    pytest.importorskip("sacremoses", reason="the extra [eval] is not installed")
    from sacrebleu.metrics import BLEU

    words = WordsTokenizer(count_words(["a"], 300), "here")
    assert whole_words("un@@ rel@@ ated @-@ a@@", words) == "unrelated @-@ a"  # its end was cut
    assert whole_words("un@@ x", BytesTokenizer()) == "un@@ x"
    found, references = ["I don &apos;t know , really ."], ["I don &apos;t know , do I ?"]
    plain = (["I don't know, really."], [["I don't know, do I?"]])
    result = scores(found, references, moses="en")
    assert result["sacrebleu"] == pytest.approx(BLEU().corpus_score(*plain).score)
    assert result["bleu"] == BLEU(tokenize="none").corpus_score(found, [references]).score
    assert result["sacrebleu"] != pytest.approx(scores(found, references)["sacrebleu"])


def test_a_model_translates_in_evaluation_mode() -> None:
    """Norms over the batch would take the statistics of the texts that are translated together, and dropout would want
    seeds."""
    keys = {"norm": "batch", "n_layers": 1, "d_model": 16, "n_heads": 2, "d_mlp": 24, "vocab_size": 257, "context": 32}
    keys |= {"psi_warmup_steps": 0, "group_scaling": 0}
    config = ComposedEncoderDecoderConfig(**keys, translates=True, residual_dropout=0.5, n_encoder_layers=1)
    model = build_model(config).double().train()
    assert isinstance(model, EncoderDecoder)
    alone = [translations(model.train(), BytesTokenizer(), [text], 2, 1.0)[0] for text in ("ab", "cd", "e")]
    together = translations(model.train(), BytesTokenizer(), ["ab", "cd", "e"], 2, 1.0)
    assert [one.text for one in together] == [one.text for one in alone]
    assert [one.score for one in together] == pytest.approx([one.score for one in alone])
