"""The rollout worker: prompts in, completions out, by a rollout engine; turns of conversations; held-out problems."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from m2flow.apps.language import LanguageModelConfig
from m2flow.apps.seeding import derived_seed
from m2flow.worker import GroupSpec, Inbox, Item, Worker, stage
from m2flow.worker.engines.memory import keep_freed_pages
from m2flow.worker.engines.rollout import Prompt, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RolloutConfig", "RolloutWorker", "rollout_group"]


@dataclass(frozen=True)
class RolloutConfig:
    """Attributes:
    model: Hugging Face model directory, with its tokenizer.
    samples_per_prompt: completions of each prompt.
    max_new_tokens, temperature: how they are drawn.
    stop: characters that end a completion: the first token whose text has one of them, or the end-of-sequence token.
    seed: the run's; with iteration, place and index it seeds each sample.
    dtype: precision of generation, or "auto".
    deterministic: computes in one thread: the same bits on however many cores.
    """

    model: str
    samples_per_prompt: int
    max_new_tokens: int
    temperature: float = 1.0
    stop: tuple[str, ...] = ("\n",)
    seed: int = 0
    dtype: str = "float32"
    deterministic: bool = False


def rollout_group(config: LanguageModelConfig, weights: Path) -> GroupSpec:
    """The specification of a run's rollout on the model in `weights`."""
    settings = {
        "model": str(weights),
        "samples_per_prompt": config.samples_per_prompt,
        "max_new_tokens": config.sampling.max_new_tokens,
        "temperature": config.sampling.temperature,
        "stop": config.sampling.stop,
        "seed": config.seed,
        "dtype": config.model.rollout_dtype,
        "deterministic": config.deterministic,
    }
    return RolloutWorker.group(settings, name="rollout", devices_per_rank=None)


class RolloutWorker(Worker):
    """Its config is a `RolloutConfig` as a dict. A sample depends on seed, place and weights, not on the plan."""

    on_death: ClassVar[Literal["retry", "drop", "stop"]] = "retry"
    preload: ClassVar[tuple[str, ...]] = (
        "m2flow.apps.tokenizer",
        "m2flow.worker.engines.rollout.torch_engine",
    )

    def setup(self) -> None:
        """Loads model and tokenizer: seconds."""
        from m2flow.apps.tokenizer import load_tokenizer  # noqa: PLC0415
        from m2flow.worker.engines.rollout.torch_engine import (  # noqa: PLC0415
            TorchRolloutConfig,
            TorchRolloutEngine,
        )

        keep_freed_pages()
        self._config = config = RolloutConfig(**self.config)
        if config.deterministic:
            self.context.compute_in_one_thread()
        self._tokenizer = load_tokenizer(config.model)
        self._engine = TorchRolloutEngine(TorchRolloutConfig(config.model, dtype=config.dtype))
        self._stop_token_ids = self._stop_tokens()

    @stage
    def generate(self, items: list[Item]) -> Iterator[Item]:
        """The samples of each prompt, as children by "prompt", a prompt's together as soon as its last one ends.

        Reads `prompt` (text) and `chat`; adds `prompt_ids` and `completion_ids` (int32), `completion` (text),
        `finish_reason`, and for each token `logprobs` (float32) and `token_versions` (int32), those of the policy that
        drew it: weights that come meanwhile are taken between two tokens.
        """
        config, size = self._config, self._config.samples_per_prompt
        prompts = [Prompt(self._prompt_ids(item.fields), self._seeds(item)) for item in items]
        safe_point = self.context.safe_point
        for index, completions in self._engine.generate(
            prompts, self._params(config.temperature), safe_point=safe_point
        ):
            prompt_ids = np.array(prompts[index].token_ids, dtype=np.int32)
            for number, completion in enumerate(completions):
                yield items[index].child(
                    number,
                    size,
                    "prompt",
                    prompt_ids=prompt_ids,
                    completion_ids=completion.token_ids,
                    logprobs=completion.logprobs,
                    completion=self._text(completion.token_ids),
                    token_versions=completion.token_versions,
                    finish_reason=completion.finish_reason,
                )

    @stage
    def speak(self, inbox: Inbox) -> Iterator[Item]:
        """Each conversation with the model's next turn, as soon as it ends; others come in while it goes on.

        Reads `prompt_ids` and `completion_ids` (int32: what was said so far), `seed` and `turn`, a number that counts
        the conversation's turns; adds `turn_ids` (int32), `turn_logprobs` (float32), `turn_versions` (int32) and
        `turn_end` ("stop" or "length"). Weights that come meanwhile are taken between two tokens.
        """
        yield from self._speak(inbox.take, self._config.temperature, self.context.safe_point)

    def turns(self, items: list[Item], temperature: float) -> list[Item]:
        """What `speak` gives at a temperature, for conversations outside the flow, in their order."""
        left = deque(items)
        spoken = self._speak(lambda most: [left.popleft() for _ in range(min(most, len(left)))], temperature)
        return sorted(spoken, key=lambda item: item.seq)

    def answer(
        self, problems: list[dict[str, Any]], num_samples: int, temperature: float, seed: int
    ) -> list[list[str]]:
        """`num_samples` completions of each of this rank's problems (rank r has r, r + world_size ...), as text."""
        mine = problems[self.context.rank :: self.context.world_size]
        prompts = [
            Prompt(self._prompt_ids(fields), [derived_seed(seed, fields["prompt"], n) for n in range(num_samples)])
            for fields in mine
        ]
        answers: dict[int, list[str]] = {
            index: [self._text(completion.token_ids) for completion in completions]
            for index, completions in self._engine.generate(prompts, self._params(temperature))
        }
        return [answers[index] for index in range(len(mine))]

    def load_weights(self, weights: "Mapping[str, Tensor]", version: int) -> None:
        """Takes published weights; what is generated from now on has them."""
        self._engine.load_weights(weights, version)

    def resident_bytes(self) -> int:
        """The bytes of the model."""
        return self._engine.resident_bytes()

    def _speak(
        self, take: Callable[[int], list[Item]], temperature: float, safe_point: Callable[[], None] | None = None
    ) -> Iterator[Item]:
        items: list[Item] = []

        def more(room: int) -> list[Prompt]:
            taken = take(room)
            items.extend(taken)
            return [_said_so_far(item) for item in taken]

        for index, (turn,) in self._engine.generate([], self._params(temperature), more=more, safe_point=safe_point):
            yield items[index].with_fields(
                turn_ids=turn.token_ids,
                turn_logprobs=turn.logprobs,
                turn_versions=turn.token_versions,
                turn_end=turn.finish_reason,
            )

    def _params(self, temperature: float) -> SamplingParams:
        return SamplingParams(self._config.max_new_tokens, temperature, stop_token_ids=self._stop_token_ids)

    def _seeds(self, item: Item) -> list[int]:
        place = (item.iteration, *item.seq)
        return [derived_seed(self._config.seed, "sample", *place, n) for n in range(self._config.samples_per_prompt)]

    def _prompt_ids(self, fields: Mapping[str, Any]) -> list[int]:
        if fields.get("chat"):
            message = [{"role": "user", "content": fields["prompt"]}]
            text = self._tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            return list(self._tokenizer(text, add_special_tokens=False).input_ids)
        return list(self._tokenizer(fields["prompt"]).input_ids)

    def _text(self, token_ids: np.ndarray[Any, np.dtype[np.int32]]) -> str:
        return str(self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def _stop_tokens(self) -> tuple[int, ...]:
        if long := [text for text in self._config.stop if len(text) != 1]:
            raise ValueError(f"stop: got {long[0]!r}, want single characters: a token has one or has it not")
        ends = set(self._config.stop)
        texts = self._tokenizer.batch_decode([[token] for token in range(len(self._tokenizer))])
        found = [token for token, text in enumerate(texts) if not ends.isdisjoint(text)]
        if not found and ends:
            raise ValueError(f"stop: no token of this model has one of {sorted(ends)!r}: choose other characters")
        return (int(self._tokenizer.eos_token_id), *found)


def _said_so_far(item: Item) -> Prompt:
    fields = item.fields
    token_ids = [*fields["prompt_ids"].tolist(), *fields["completion_ids"].tolist()]
    return Prompt(token_ids, [derived_seed(fields["seed"], "turn", fields["turn"])])
