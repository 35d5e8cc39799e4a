"""Text files become sequences."""

import codecs
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from recipes.tiny_pretrained import save_tiny
from seqtile.recipes.dataset import files_of, sequences, standard_library


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
    rows, said = sequences(list(files_of((data,))), tokenizer, seq_len=4)
    letters = [tokenizer.convert_ids_to_tokens(row) for row in rows.tolist()]
    assert letters[0] == list("firs") and letters[1] == ["t", "</s>", "s", "e"]
    assert rows.shape == (3, 4) and rows.dtype == np.int64
    assert said == [
        "data: 2 files read, 13 tokens: 3 sequences",
        f"skipped: {data}/c.bin (not UTF-8 text)",
        f"skipped: {data}/d.txt (not UTF-8 text)",
        f"skipped: {data}/e.txt (empty)",
    ]


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that nobody can read")
def test_what_cannot_be_read_is_skipped_and_said(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for number in range(12):
        (tmp_path / f"{number}.txt").write_bytes(b"")
    (tmp_path / "words").write_text("words")
    files = [Path("/proc/self/mem"), *tmp_path.glob("*.txt"), tmp_path / "words"]
    lines = sequences(files, tokenizer, seq_len=4)[1]
    assert lines[1] == "skipped: /proc/self/mem (unreadable: Input/output error)" and "/words" not in str(lines)
    assert len(lines) == 12 and lines[-1] == "skipped: 3 files more"
    with pytest.raises(ValueError, match="--data holds no UTF-8 text: 1 file skipped, /proc/self/mem"):
        sequences([Path("/proc/self/mem")], tokenizer, seq_len=4)
