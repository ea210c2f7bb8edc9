"""Text in and text out: prompt files, token ids with exactly one BOS, and text that streams while tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not (yet) a character
_CONTEXT_TOKENS = range(4, 16)  # how much of the prompt is decoded with the first token
_PENDING_TOKENS = 8  # a character takes at most 4 tokens: more that do not decode are bytes that never will


class TextStream:
    """Turns token ids into text as they arrive, in time linear in their number.

    A piece is released when it is certain: whole characters only, and nothing that may turn out to be the beginning of a
    stop string. Text from a stop string on is dropped; the stop string that ends first counts. Special tokens are not shown.

    context: ids before the first pushed one (the prompt). A SentencePiece token knows only from its left neighbour whether
        its leading space is part of the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids = self._tail(context)
        self._prefix = 0  # the window that is decoded again starts here ...
        self._read = len(self._ids)  # ... and its text is known up to here
        self._held = ""  # whole characters that may begin a stop string
        self._released: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._released)

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is now safe to print, often empty."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        known, whole = self._window()
        if whole.endswith(REPLACEMENT) and len(self._ids) - self._read < _PENDING_TOKENS:
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return self._release(whole[len(known) :], final=False)

    def finish(self) -> str:
        """Return what was held back; bytes of an unfinished character come out as U+FFFD, as `decode` writes them."""
        if self.stopped:
            return ""
        known, whole = self._window()
        self._prefix = self._read = len(self._ids)
        return self._release(whole[len(known) :], final=True)

    def _window(self) -> tuple[str, str]:
        return self._decode(self._ids[self._prefix : self._read]), self._decode(self._ids[self._prefix :])

    def _release(self, new: str, *, final: bool) -> str:
        text = self._held + new
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stop if stop in text]
        if ends:
            self.stopped = True
            text, self._held = text[: min(ends)[1]], ""
        else:
            keep = len(text) if final else len(text) - self._possible_stop(text)
            text, self._held = text[:keep], text[keep:]
        self._released.append(text)
        return text

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stop)), 0)

    def _tail(self, context: Sequence[int]) -> list[int]:
        """The last ids of the prompt, cut where a character begins."""
        for count in _CONTEXT_TOKENS:
            tail = list(context[-count:])
            if not self._decode(tail).startswith(REPLACEMENT):
                return tail
        return []

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def read_prompt_file(path: str, what: str = "prompt file") -> str:
    """The text of a UTF-8 file: without a byte order mark, with CRLF read as LF, and without one final newline.

    Editors end a file with a newline that is not meant as part of the prompt, and a model continues "D: Four" and
    "D: Four\\n" differently: so both files give "D: Four". A file that ends in two newlines keeps one. what: how a refusal
    names the file, for a flag that is not of prompts.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{what} {path!r}: cannot be read ({error.strerror}); give a text file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} {path!r}: not UTF-8 (byte {error.start}); convert it to UTF-8") from None
    text = text.replace("\r\n", "\n").removesuffix("\n")
    if not text:
        raise ValueError(f"{what} {path!r}: is empty; write text into it")
    return text


def encode_prompt(tokenizer: PreTrainedTokenizerBase | None, text: str, chat: bool = False) -> list[int]:
    """Token ids of a prompt, as it is or as the user's turn of the chat template.

    Where the tokenizer adds a BOS to plain text there is exactly one, whether or not template and text bring their own.
    No EOS is added.
    """
    text = _chat_text(tokenizer, [text], answer=True) if chat else text
    ids = _ids(tokenizer, text)
    bos = tokenizer.bos_token_id
    if bos is not None and tokenizer("a").input_ids[:1] == [bos]:
        while ids[:1] == [bos]:
            del ids[0]
        ids.insert(0, bos)
    return ids


def encode_turn(tokenizer: PreTrainedTokenizerBase | None, text: str, chat: bool, last_id: int | None) -> list[int]:
    """Token ids that continue a conversation whose last token in the cache is `last_id`.

    Plain text is appended as it is. With chat, the template's end of the model's turn comes first, without the token that
    the model has already written, then the user's turn.
    """
    if not chat:
        return _ids(tokenizer, text)
    answer = "\u2402"  # stands for what the model said: a symbol that no template contains
    before = _chat_text(tokenizer, ["a", answer], answer=False)
    after = _chat_text(tokenizer, ["a", answer, text], answer=True)
    if not after.startswith(before):
        raise ValueError("chat true: the chat template of this model rewrites earlier turns; use --no-chat")
    ids = _ids(tokenizer, after[before.rindex(answer) + len(answer) :])
    return ids[1:] if ids[:1] == [last_id] else ids


def _chat_text(tokenizer: PreTrainedTokenizerBase | None, turns: list[str], *, answer: bool) -> str:
    """The conversation as the model's template writes it; turns alternate between user and assistant."""
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError("chat true: this model has no chat template; use --no-chat")
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=answer, tokenize=False)


def _ids(tokenizer: PreTrainedTokenizerBase | None, text: str) -> list[int]:
    if tokenizer is None:
        raise ValueError("prompt: this model comes without a tokenizer; put its tokenizer files beside the weights")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if not ids:
        raise ValueError(f"prompt {text!r}: has no tokens; write some text")
    return ids
