"""The tokens of a long text, piece by piece: those that the whole text would give, in memory for a piece."""

from collections.abc import Callable, Iterator

from transformers import PreTrainedTokenizerBase

PIECE = 2**16  # characters
OVERLAP = 2**12

Token = tuple[int, int, int]
"""Its id, and where in the text it starts and ends."""


def tokens_of(
    read: Callable[[int], str], tokenizer: PreTrainedTokenizerBase, piece: int = PIECE, overlap: int = OVERLAP
) -> Iterator[list[int]]:
    """Token ids of the text that `read(characters)` goes through, some at a time; at most two pieces more are read.

    What a tokenizer makes of a place depends on the text around it, so pieces overlap. A piece and the next are joined
    in the middle of what they share if they have the same tokens in the middle half of it; else the piece is made
    longer, in the end as long as the text. A tokenizer that does not tell where its tokens are gets the whole text.
    """
    if not tokenizer.is_fast:
        yield tokenizer(read(-1), add_special_tokens=False, verbose=False)["input_ids"]
        return
    start = joined = 0  # of the piece, and of its tokens that were not given out yet, in the text
    text = read(piece)
    tokens = tokens_at(start, text, tokenizer)
    step = piece - overlap
    while more := read(step):
        next_start = start + len(text) - overlap
        next_text = text[-overlap:] + more
        next_tokens = tokens_at(next_start, next_text, tokenizer)
        middle = range(next_start + overlap // 4, next_start + 3 * overlap // 4)
        if within(middle, tokens) == within(middle, next_tokens) != []:
            end = next_start + overlap // 2
            yield [token for token, begin, _ in tokens if joined <= begin < end]
            start, joined, text, tokens, step = next_start, end, next_text, next_tokens, piece - overlap
        else:
            text += more
            tokens, step = tokens_at(start, text, tokenizer), len(text)
    yield [token for token, begin, _ in tokens if begin >= joined]


def tokens_at(start: int, text: str, tokenizer: PreTrainedTokenizerBase) -> list[Token]:
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    pairs = zip(found["input_ids"], found["offset_mapping"], strict=True)
    return [(token, start + begin, start + end) for token, (begin, end) in pairs]


def within(places: range, tokens: list[Token]) -> list[Token]:
    return [token for token in tokens if token[1] in places]
