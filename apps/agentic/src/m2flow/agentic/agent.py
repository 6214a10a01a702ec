"""The agent: it opens conversations, reads the model's turns, and writes what tools said into them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from m2flow.agentic.conversation import counted, opened, said, told
from m2flow.agentic.dialogue import answer_of, call_of, preamble, question_line, result_line, spoken_lines
from m2flow.agentic.expressions import ExpressionTask
from m2flow.apps.seeding import derived_seed
from m2flow.worker import Item, Worker, stage

__all__ = ["AgentConfig", "AgentWorker"]


@dataclass(frozen=True)
class AgentConfig:
    """Attributes:
    model: Hugging Face model directory, for its tokenizer.
    samples_per_prompt: conversations about each problem.
    max_turns: turns that the model has; a call in the last one ends the conversation without an answer.
    seed: the run's; with iteration, place and index it seeds each conversation.
    with_examples: each conversation carries its problem's worked example, as `worked_example` reads it.
    """

    model: str
    samples_per_prompt: int
    max_turns: int
    seed: int
    with_examples: bool = False


class AgentWorker(Worker):
    """Its config is an `AgentConfig` as a dict. It keeps nothing of a conversation: items carry all of it."""

    on_death: ClassVar[Literal["retry", "drop", "stop"]] = "retry"
    preload: ClassVar[tuple[str, ...]] = ("m2flow.apps.tokenizer",)

    def setup(self) -> None:
        """Loads the tokenizer: a second."""
        from m2flow.apps.tokenizer import load_tokenizer  # noqa: PLC0415

        self._config = config = AgentConfig(**self.config)
        self._tokenizer = load_tokenizer(config.model)
        self._task = ExpressionTask(config.seed)
        self._preamble_ids = self._ids(preamble(self._task.examples))

    @stage
    def open(self, items: list[Item]) -> Iterator[Item]:
        """The conversations about each problem, as children by "prompt"; reads its `prompt`."""
        for item in items:
            place = (item.iteration, *item.seq)
            yield from self._open(item, self._config.samples_per_prompt, derived_seed(self._config.seed, *place))

    def begin(self, problems: Sequence[Mapping[str, Any]], num_samples: int, seed: int) -> list[Item]:
        """`num_samples` conversations about each of these problems' fields, outside the flow."""
        items = [Item((place,), 0, fields) for place, fields in enumerate(problems)]
        return [one for item in items for one in self._open(item, num_samples, derived_seed(seed, item.seq[0]))]

    @stage
    def read(self, items: list[Item]) -> list[Item]:
        """Each conversation with the model's turn in it, and what follows: `tool` and `argument`, or an end.

        `tool` is "" where the conversation has ended; then it has `reward` (1.0 for the right answer), `completion`
        (all that was said, as text) and `finish_reason` ("stop" for an answer, else "length").
        """
        return [self._read(item) for item in items]

    @stage
    def write(self, items: list[Item]) -> list[Item]:
        """Each conversation with the line that tells the model its tool's `result`."""
        return [told(item, self._ids(result_line(item.fields["result"]))) for item in items]

    def _open(self, problem: Item, size: int, seed: int) -> Iterator[Item]:
        prompt_ids = [*self._preamble_ids, *self._ids(question_line(problem.fields["prompt"]))]
        example = self._worked(problem) if self._config.with_examples else {}
        for number in range(size):
            conversation = opened(problem, number, size, prompt_ids=prompt_ids, seed=derived_seed(seed, number))
            yield conversation.with_fields(**example)

    def _worked(self, problem: Item) -> dict[str, Any]:
        """The tokens of a problem's worked example, and which of them are the model's to say."""
        parts = [
            (self._ids(text), own) for text, own in spoken_lines(self._task.worked(*problem.fields["data"]["numbers"]))
        ]
        return {
            "example_ids": np.array([token for ids, _ in parts for token in ids], dtype=np.int32),
            "example_mask": np.array([own for ids, own in parts for _ in ids], dtype=np.bool_),
        }

    def _read(self, item: Item) -> Item:
        turn = self._text(item.fields["turn_ids"])
        item = said(item)
        call = call_of(turn)
        if call is not None and item.fields["turn"] < self._config.max_turns:
            return counted(item, "tool/calls").with_fields(tool=call.tool, argument=call.argument)
        answer = answer_of(turn)
        if answer is not None:
            item = counted(item, "agent/answers")
        return item.with_fields(
            tool="",
            reward=float(answer == item.fields["answer"]),
            completion=self._text(item.fields["completion_ids"]),
            finish_reason="length" if answer is None else "stop",
        )

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _text(self, token_ids: Any) -> str:
        return str(self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))
