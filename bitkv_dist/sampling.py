"""The next token from logits: the rules are transformers' logits processors, set as `model.generate` would set them.

The model's generation_config gives the penalties and constraints, our `GenerateConfig` the temperature, top-k and top-p.
What a generation_config asks for and this decoder does not do (beams, guidance, forced tokens ..) is refused by name.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation import logits_process as rules

from bitkv_dist.config import GenerateConfig

# Settings that change which tokens `model.generate` returns and are not served: name -> values that switch them off.
_UNSERVED = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "guidance_scale": (None, 1),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "encoder_repetition_penalty": (None, 1),
    "encoder_no_repeat_ngram_size": (None, 0),
    "watermarking_config": (None,),
    "token_healing": (None, False),
    "stop_strings": (None, [], ""),
    "max_time": (None,),
}


def refuse_unserved(settings: GenerationConfig) -> None:
    """Raise ValueError if a generation_config asks for something that would silently not happen."""
    for name, off in _UNSERVED.items():
        value = getattr(settings, name, None)
        if value not in off:
            raise ValueError(f"generation_config.{name} {value!r}: not served; remove it from generation_config.json")


def eos_ids(settings: GenerationConfig, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """The ids that end a sequence: those of the generation_config, else the tokenizer's; may be empty."""
    ids = settings.eos_token_id
    if ids is None and tokenizer is not None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


class Sampler:
    """Picks tokens for the sequences of one generation. A row's first pick sees its prompt as history.

    settings: the model's generation_config; eos: ids that end a sequence; device: where the logits are.
    The draw for sequence i depends on (sampling_seed, i) and on its own logits alone, not on the rest of the batch.
    """

    def __init__(self, settings: GenerationConfig, generate: GenerateConfig, eos: Sequence[int], device: torch.device) -> None:
        refuse_unserved(settings)
        self._settings = settings
        self._greedy = generate.temperature == 0
        self._eos = torch.tensor(list(eos), device=device, dtype=torch.int64) if eos else None
        self._device = device
        self._drawn_seed = generate.sampling_seed is None
        self._seed = secrets.randbits(64) if self._drawn_seed else generate.sampling_seed
        self._warpers = rules.LogitsProcessorList() if self._greedy else _warpers(settings, generate)
        self._rows: dict[int, _Row] = {}

    @property
    def seed(self) -> int:
        return self._seed

    def progress(self, index: int, tokens: int) -> tuple[int, int]:
        """(tokens before the answer in progress, numbers drawn so far) of a sequence of `tokens` tokens."""
        row = self._rows.get(index)
        if row is None:
            return tokens, 0
        return tokens if row.processors is None else row.prompt_tokens, row.draws

    def resume(self, seed: int, rows: Sequence[tuple[int, int]]) -> None:
        """Go on where another sampler was, rows: its `progress` of each sequence. A sampling_seed of this run wins."""
        if self._drawn_seed:
            self._seed = seed
        for index, (prompt_tokens, draws) in enumerate(rows):
            row = self._rows[index] = self._row(index, prompt_tokens)
            for _ in range(draws):
                row.draw()

    def begin_turn(self) -> None:
        """What is counted from the end of the prompt is counted anew; the random streams go on."""
        for row in self._rows.values():
            row.processors = None

    def pick(self, logits: Tensor, histories: Sequence[list[int]], rows: Sequence[int]) -> list[int]:
        """The next token of each sequence.

        logits: fp32 [b, vocab]; histories: b lists of all ids so far, prompt included; rows: b indices of sequences.
        Raises RuntimeError, naming the sequence, when a row of logits has no defined choice.
        """
        _check_finite(logits, rows)
        return [self._pick(logits[i : i + 1], histories[i], row) for i, row in enumerate(rows)]

    def _pick(self, logits: Tensor, history: list[int], index: int) -> int:
        row = self._rows.get(index)
        if row is None:
            row = self._rows[index] = self._row(index, len(history))
        if row.processors is None:
            row.processors, row.prompt_tokens = self._processors(len(history)), len(history)
        if row.processors:
            logits = row.processors(row.ids(history), logits)
        if self._greedy:
            return int(logits.argmax(dim=-1))
        scores = self._warpers(None, logits)  # warpers read scores only
        return _choose(scores[0], row.draw(), index)

    def _row(self, index: int, prompt_tokens: int) -> _Row:
        return _Row(self._processors(prompt_tokens), prompt_tokens, _generator(self._seed, index), self._device)

    def _processors(self, prompt_tokens: int) -> rules.LogitsProcessorList:
        """What `GenerationMixin` applies to every decoding mode, in its order."""
        s, eos, device = self._settings, self._eos, self._device
        chosen = rules.LogitsProcessorList()
        if s.sequence_bias is not None:
            chosen.append(rules.SequenceBiasLogitsProcessor(sequence_bias=s.sequence_bias))
        if s.repetition_penalty not in (None, 1):
            chosen.append(rules.RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
        if s.no_repeat_ngram_size:
            chosen.append(rules.NoRepeatNGramLogitsProcessor(s.no_repeat_ngram_size))
        if s.bad_words_ids is not None:
            chosen.append(rules.NoBadWordsLogitsProcessor(s.bad_words_ids, eos))
        if s.min_length and eos is not None:
            chosen.append(rules.MinLengthLogitsProcessor(s.min_length, eos, device=device))
        if s.min_new_tokens and eos is not None:
            chosen.append(rules.MinNewTokensLengthLogitsProcessor(prompt_tokens, s.min_new_tokens, eos, device=device))
        if s.remove_invalid_values:
            chosen.append(rules.InfNanRemoveLogitsProcessor())
        if s.exponential_decay_length_penalty is not None and eos is not None:
            chosen.append(rules.ExponentialDecayLengthPenalty(s.exponential_decay_length_penalty, eos, prompt_tokens))
        if s.suppress_tokens is not None:
            chosen.append(rules.SuppressTokensLogitsProcessor(s.suppress_tokens, device=device))
        if s.begin_suppress_tokens is not None:
            chosen.append(rules.SuppressTokensAtBeginLogitsProcessor(s.begin_suppress_tokens, prompt_tokens, device=device))
        return chosen


class _Row:
    """What one sequence keeps between picks: its processors, its random stream, and its ids on the device."""

    def __init__(self, processors: rules.LogitsProcessorList | None, prompt_tokens: int, generator: torch.Generator,
                 device: torch.device) -> None:
        self.processors, self.prompt_tokens = processors, prompt_tokens
        self._generator, self.draws = generator, 0
        self._buffer = torch.empty(0, dtype=torch.int64, device=device)
        self._filled = 0

    def draw(self) -> Tensor:
        """The next uniform number of the stream, fp64 []."""
        self.draws += 1
        return torch.rand((), generator=self._generator, dtype=torch.float64)

    def ids(self, history: list[int]) -> Tensor:
        """The history as int64 [1, n]; only its new end is copied."""
        if len(history) > self._buffer.numel():
            self._buffer = torch.empty(2 * len(history), dtype=torch.int64, device=self._buffer.device)
            self._filled = 0
        new = history[self._filled :]
        self._buffer[self._filled : len(history)] = torch.tensor(new, dtype=torch.int64)
        self._filled = len(history)
        return self._buffer[None, : self._filled]


def _warpers(settings: GenerationConfig, generate: GenerateConfig) -> rules.LogitsProcessorList:
    """What `GenerationMixin` applies when it samples, in its order."""
    chosen = rules.LogitsProcessorList()
    if generate.temperature != 1:
        chosen.append(rules.TemperatureLogitsWarper(generate.temperature))
    if settings.top_h is not None:
        chosen.append(rules.TopHLogitsWarper(settings.top_h))
    if generate.top_k:
        chosen.append(rules.TopKLogitsWarper(generate.top_k))
    if generate.top_p < 1:
        chosen.append(rules.TopPLogitsWarper(generate.top_p))
    if settings.min_p is not None:
        chosen.append(rules.MinPLogitsWarper(settings.min_p))
    if settings.typical_p is not None and settings.typical_p < 1:
        chosen.append(rules.TypicalLogitsWarper(settings.typical_p))
    if settings.epsilon_cutoff:
        chosen.append(rules.EpsilonLogitsWarper(settings.epsilon_cutoff))
    if settings.eta_cutoff:
        chosen.append(rules.EtaLogitsWarper(settings.eta_cutoff))
    return chosen


def _generator(seed: int, index: int) -> torch.Generator:
    state = int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(state)  # on the CPU, so that a GPU run draws the same numbers


def _choose(scores: Tensor, uniform: Tensor, index: int) -> int:
    """Inverse transform sampling in fp64: one uniform number per token, whatever the vocabulary or device.

    scores: [vocab], -inf = excluded. uniform: fp64 [].
    """
    cumulative = torch.softmax(scores.cpu().double(), dim=-1).cumsum(dim=-1)
    total = cumulative[-1]
    if not total.isfinite():
        raise RuntimeError(f"sequence {index}: no token has a finite score")
    point = uniform * total
    return min(int(torch.searchsorted(cumulative, point, right=True)), int(torch.searchsorted(cumulative, total)))


def _check_finite(logits: Tensor, rows: Sequence[int]) -> None:
    best = logits.amax(dim=-1)  # NaN if any is NaN
    for value, row in zip(best.tolist(), rows, strict=True):
        if not np.isfinite(value):
            raise RuntimeError(f"sequence {row}: logits are not finite (largest is {value})")
