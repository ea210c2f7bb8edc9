"""Prompts in, text out: CASES.md C43, characters split over tokens, stop strings split over tokens."""

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from bitkv_dist.text import TextStream, encode_prompt, encode_turn, read_prompt_file

CHAT = (
    "{% for m in messages %}<u>{{ m['role'] }}: {{ m['content'] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<u>assistant: {% endif %}"
)


def byte_level(add_bos: bool = False, chat: str | None = None, words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per byte, as the worst case of byte-level BPE; words: further tokens, which no text is encoded to."""
    vocabulary = dict.fromkeys((*sorted(pre_tokenizers.ByteLevel.alphabet()), *words))
    tokenizer = Tokenizer(models.BPE(vocab={letters: i for i, letters in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<e>", "<u>"])
    if add_bos:
        bos = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[bos])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<e>")
    wrapped.chat_template = chat
    return wrapped


def sentence_piece() -> PreTrainedTokenizerFast:
    """Words with a leading space mark, and bytes for everything else, decoded as Llama 2 does."""
    words = ["<s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁Hello", "▁world", "▁is", "▁Paris", "▁a", "s", ",", "!", "▁The", "H", "i"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


BYTES = byte_level()
PIECES = sentence_piece()


def stream(tokenizer, ids, stop=(), context=()):
    """(pieces as released, the TextStream)."""
    text = TextStream(tokenizer, stop, context)
    pieces = [text.push(token) for token in ids]
    return [*pieces, text.finish()], text


def ids_of(text: str) -> list[int]:
    return BYTES(text, add_special_tokens=False).input_ids


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_any_text_arrives_whole_and_never_broken(sample):
    pieces, text = stream(BYTES, ids_of(sample))
    assert "".join(pieces) == text.text == sample
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in sample


def test_emoji_and_cjk_come_out_with_their_last_byte():
    pieces, _ = stream(BYTES, ids_of("a😀b日"))
    assert pieces == ["a", "", "", "", "😀", "b", "", "", "日", ""]


def test_an_unfinished_character_ends_as_decode_writes_it():
    ids = ids_of("a😀")[:-1]
    pieces, text = stream(BYTES, ids)
    assert pieces == ["a", "", "", "", "\ufffd"] and text.text == BYTES.decode(ids)


def test_bytes_that_never_become_text_do_not_hold_the_stream_for_ever():
    bad = ids_of("日")[1]  # a continuation byte on its own
    pieces, text = stream(BYTES, [bad] * 100 + ids_of("ok"))
    assert "".join(pieces).endswith("ok") and len(text.text) == 102
    assert max(len(piece) for piece in pieces) < 16


def test_special_tokens_are_not_shown():
    pieces, _ = stream(BYTES, [*ids_of("hi"), BYTES.eos_token_id])
    assert "".join(pieces) == "hi"


def test_sentence_piece_spaces():
    ids = PIECES.convert_tokens_to_ids(["▁Hello", "▁world", "s", ",", "▁", "▁a", "!"])
    pieces, _ = stream(PIECES, ids)
    assert pieces == ["Hello", " world", "s", ",", " ", " a", "!", ""]


def test_a_continuation_keeps_the_space_before_its_first_word():
    prompt = PIECES.convert_tokens_to_ids(["<s>", "▁The", "▁a", "▁is"])
    pieces, _ = stream(PIECES, PIECES.convert_tokens_to_ids(["▁Paris", "!"]), context=prompt)
    assert pieces == [" Paris", "!", ""]


def test_byte_fallback_characters():
    fallback = [f"<0x{byte:02X}>" for byte in "😀日".encode()]
    ids = PIECES.convert_tokens_to_ids(["▁a", *fallback, "▁is"])
    pieces, _ = stream(PIECES, ids)
    assert pieces == ["a", "", "", "", "😀", "", "", "日", " is", ""]
    long_prompt = ids[1:] * 4  # more than the context that is kept, and all of it bytes
    for context, rest in ((ids[:1], ids[1:]), (ids[:5], ids[5:]), (long_prompt + ids[1:5], ids[5:])):
        pieces, _ = stream(PIECES, rest, context=context)
        assert "".join(pieces) == "😀日 is"[-len("".join(pieces)) :] and pieces[-3:] == ["日", " is", ""]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_stop_strings_over_token_borders(size):
    """Tokens of so many characters."""
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((letters, _),) = bytewise.pre_tokenize_str("one\ntwo ST STOP three")
    words = [letters[start : start + size] for start in range(0, len(letters), size)]
    tokenizer = byte_level(words=words)
    text, ids = TextStream(tokenizer, stop=("\n\n", "STOP")), tokenizer.convert_tokens_to_ids(words)
    seen = [text.push(token) for token in ids]
    assert text.stopped and text.text == "".join(seen) == "one\ntwo ST "
    assert text.push(ids[0]) == text.finish() == ""


def test_what_may_begin_a_stop_string_is_held_back_and_released():
    pieces, text = stream(BYTES, ids_of("abcabd"), stop=("abcabx",))
    assert pieces == ["", "", "", "", "", "abcabd", ""] and not text.stopped
    pieces, _ = stream(BYTES, ids_of("xabcab"), stop=("abcabx",))
    assert pieces == ["x", "", "", "", "", "", "abcab"]


def test_the_stop_string_that_ends_first_counts():
    _, text = stream(BYTES, ids_of("xabcd"), stop=("abcd", "bc"))
    assert text.text == "xa"


def test_a_stop_string_may_be_completed_by_finish():
    ids = ids_of("ab😀")[:-1]
    _, text = stream(BYTES, ids, stop=("\ufffd",))
    assert text.stopped and text.text == "ab"


def test_streaming_is_linear_in_the_number_of_tokens():
    def seconds(count: int) -> float:
        text = TextStream(BYTES, stop=("never",))
        start = time.process_time()
        for token in ids_of("word ") * (count // 5):
            text.push(token)
        return time.process_time() - start

    seconds(500)
    assert seconds(8000) < 16 * max(seconds(1000), 1e-3)  # 8 when linear, 64 when everything is decoded each time


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"D: Four", "D: Four"),
        (b"D: Four\n", "D: Four"),
        (b"D: Four\n\n", "D: Four\n"),
        (b"D: Four\r\n", "D: Four"),
        (b"a\r\nb\r\n", "a\nb"),
        (b"a\rb", "a\rb"),
        (b"\xef\xbb\xbfD: Four\n", "D: Four"),
        (b" \n", " "),
        (b"x" * 1_000_000, "x" * 1_000_000),
    ],
)
def test_prompt_files(tmp_path, content, text):
    path = tmp_path / 'it\'s & "x".txt'
    path.write_bytes(content)
    assert read_prompt_file(str(path)) == text


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"ab\xff", "not UTF-8 (byte 2)"),
        (None, "No such file"),
    ],
)
def test_prompt_files_refused(tmp_path, content, part):
    path = tmp_path / "prompt.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_prompt_file(str(path))
    assert part in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_is_no_prompt_file(tmp_path):
    with pytest.raises(ValueError, match="Is a directory"):
        read_prompt_file(str(tmp_path))


@pytest.mark.parametrize("template", [CHAT, "<s>" + CHAT])
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("text", ["hi", "<s>hi", "<s><s>hi"])
def test_exactly_one_bos(template, chat, text):
    tokenizer = byte_level(add_bos=True, chat=template)
    ids = encode_prompt(tokenizer, text if not chat else "hi", chat)
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.eos_token_id != ids[-1]


@pytest.mark.parametrize("template", [CHAT, "<s>" + CHAT])
def test_no_bos_where_the_tokenizer_adds_none(template):
    tokenizer = byte_level(add_bos=False, chat=template)
    assert tokenizer.bos_token_id not in encode_prompt(tokenizer, "hi")
    expected = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(encode_prompt(tokenizer, "hi", chat=True)) == expected


def test_a_tokenizer_that_adds_eos_does_not_end_the_prompt():
    tokenizer = byte_level()
    eos = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("$A <e>", special_tokens=[("<e>", eos)])
    assert encode_prompt(tokenizer, "hi") == ids_of("hi")


def test_turns_continue_the_template():
    tokenizer = byte_level(add_bos=True, chat="<s>" + CHAT)
    first = encode_prompt(tokenizer, "hi", chat=True)
    said = ids_of("hello")
    messages = [("user", "hi"), ("assistant", "hello"), ("user", "bye")]
    whole = [{"role": role, "content": content} for role, content in messages]
    rendered = tokenizer.apply_chat_template(whole, add_generation_prompt=True, tokenize=False)
    expected = tokenizer(rendered, add_special_tokens=False).input_ids
    ended = [*said, tokenizer.eos_token_id]
    assert first + ended + encode_turn(tokenizer, "bye", True, ended[-1]) == expected
    assert first + said + encode_turn(tokenizer, "bye", True, said[-1]) == expected
    assert encode_turn(tokenizer, "bye", False, None) == ids_of("bye")


def test_prompts_that_cannot_be_encoded():
    for tokenizer, text, chat, part in (
        (None, "hi", False, "without a tokenizer"),
        (byte_level(), "hi", True, "--no-chat"),
        (None, "hi", True, "--no-chat"),
        (byte_level(), "", False, "no tokens"),
        (byte_level(add_bos=True), "", False, "no tokens"),
    ):
        with pytest.raises(ValueError, match=part):
            encode_prompt(tokenizer, text, chat)


def test_a_million_characters_on_one_line():
    assert len(encode_prompt(byte_level(add_bos=True), "x" * 1_000_000)) == 1_000_001
