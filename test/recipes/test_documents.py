"""Reads long documents: gives the tokens of the whole text, and reads no more text than needed."""

import codecs
import random
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from recipes.tiny_pretrained import save_tiny
from seqtile.recipes.data import file_tokens, files_of, load_tokenizer, sequences, standard_library, tokens_of


@cache
def real_text() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in standard_library()[:25])


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerBase:
    """A real tokenizer, or one that splits text in another way, trained on real text."""
    if kind == "smollm2":
        return load_tokenizer("smollm2-135m")
    special = ["<unk>", "</s>"]
    if kind == "unigram":  # T5's
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=800, special_tokens=special, unk_token="<unk>")
    elif kind == "words":  # BERT's
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=800, special_tokens=special)
    else:  # Gemma's: lines are not split into words before pairs are merged
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Replace("▁", " ")
        trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=special, max_token_length=8)
    tokenizer.train_from_iterator(real_text()[:20_000].splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def hard_text() -> str:
    """Real text between difficult parts: long words and spaces, letters of many bytes, and the tokenizers' own
    tokens."""
    parts = ["a" * 3000, " " * 2500, "\n" * 900, "\t x" * 500, "</s><|endoftext|>" * 60]
    parts += ["汉字" * 400, "\U0001f469\u200d\U0001f467 é e\u0301 " * 200]
    parts += ["".join(random.choices("ACGT", k=5000)), "".join(random.choices("\r\n \t.", k=2000)), "1234567" * 300]
    start = random.randrange(len(real_text()) - 200_000)
    parts += [real_text()[start + 5000 * part : start + 5000 * (part + 1)] for part in range(12)]
    random.shuffle(parts)
    return "".join(parts)


@pytest.mark.full("SmolLM2's tokenizer takes 5 s", but=("unigram", "words", "lines"))
@pytest.mark.parametrize("kind", ["smollm2", "unigram", "words", "lines"])
def test_pieces_give_the_tokens_of_the_whole(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind)
    random.seed(torch.initial_seed())
    for text in (real_text()[:150_000], hard_text(), hard_text(), "", "word"):
        piece = random.randint(2500, 9000)
        (tmp_path / "text").write_text(text, encoding="utf-8", newline="")
        with (tmp_path / "text").open(encoding="utf-8", newline="") as opened:
            pieces = list(tokens_of(opened.read, tokenizer, piece=piece, overlap=800))
        assert list(chain(*pieces)) == tokenizer(text, add_special_tokens=False)["input_ids"], f"pieces of {piece}"
        if text == real_text()[:150_000]:
            assert len(pieces) > 150_000 / piece, "it was cut"


def test_a_tokenizer_without_offsets_gets_the_whole_text() -> None:
    class Slow:
        is_fast = False

        def __call__(self, text: str, **_: bool) -> dict[str, list[int]]:
            return {"input_ids": list(map(ord, text))}

    read = iter(["all of it", ""])
    assert list(tokens_of(lambda characters: next(read), Slow())) == [list(map(ord, "all of it"))]


def test_a_file_is_read_no_further_than_needed(tmp_path: Path) -> None:
    """Invalid text far beyond the needed tokens is not read; if it is read, nothing of the file is kept."""
    save_tiny(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    data = tmp_path / "data"
    data.mkdir()
    for name, end in (("a.txt", b"\xff"), ("b.txt", b"\0")):
        (data / name).write_bytes(b"words and " * 20_000 + end)
    (data / "c.txt").write_text("héllo" * 40_000, encoding="utf-8")  # letters of two bytes, also at the ends of blocks
    few = sequences((data,), tokenizer, seq_len=100, count=3)
    assert (few.files, few.skipped) == (1, {}) and few.tokens < 140_000
    many = sequences((data,), tokenizer, seq_len=100, count=2001)
    assert (many.files, len(many.skipped), many.tokens) == (1, 2, 200_001)
    assert many.rows[:2000].flatten().tolist() == tokenizer("héllo" * 40_000)["input_ids"]
    for name, error in (("a.txt", UnicodeDecodeError), ("b.txt", UnicodeError)):
        with pytest.raises(error):
            list(file_tokens(data / name, tokenizer))


def test_documents_are_read_in_order_and_binaries_skipped(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    data = tmp_path / "data"
    (data / "a").mkdir(parents=True)
    (data / "b.txt").write_bytes(codecs.BOM_UTF8 + b"second")
    (data / "a" / "x.md").write_text("first")
    (data / "c.bin").write_bytes(b"\xff\xfe\x00")
    (data / "d.txt").write_bytes(b"zero\x00byte")
    (data / "e.txt").write_bytes(b"")
    assert [file.name for file in files_of((data,))] == ["x.md", "b.txt", "c.bin", "d.txt", "e.txt"]
    assert list(files_of((data / "b.txt",))) == [data / "b.txt"]
    assert sum(path.stat().st_size for path in standard_library()) > 1_000_000, "the default document is long"
    read = sequences((data,), tokenizer, seq_len=4, count=5)
    rows = read.rows
    letters = [tokenizer.convert_ids_to_tokens(row) for row in rows.tolist()]
    assert letters[0] == list("firs") and letters[1] == ["t", "</s>", "s", "e"]
    assert rows.shape == (3, 4) and rows.dtype == torch.int64
    assert str(read).splitlines() == [
        "data: 2 files read, 13 tokens: 3 sequences",
        "data repeats: 5 sequences are needed, so each comes 1.7 times on average",
        f"skipped: {data}/c.bin (not UTF-8 text)",
        f"skipped: {data}/d.txt (not UTF-8 text)",
        f"skipped: {data}/e.txt (empty)",
    ]
    enough = sequences((data,), tokenizer, seq_len=4, count=1)
    assert str(enough) == "data: 1 file read, 5 tokens: 1 sequence"


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that nobody can read")
def test_what_cannot_be_read_is_skipped_and_said(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for number in range(12):
        (tmp_path / f"{number}.txt").write_bytes(b"")
    (tmp_path / "words").write_text("words")
    files = [Path("/proc/self/mem"), *tmp_path.glob("*.txt"), tmp_path / "words"]
    read = sequences(files, tokenizer, seq_len=4, count=1)
    lines = str(read).splitlines()
    assert lines[1] == "skipped: /proc/self/mem (unreadable: Input/output error)" and "/words" not in str(read)
    assert len(lines) == 12 and lines[-1] == "skipped: 3 files more"
    with pytest.raises(ValueError, match="--data holds no UTF-8 text: 1 file skipped, /proc/self/mem"):
        sequences([Path("/proc/self/mem")], tokenizer, seq_len=4, count=1)
