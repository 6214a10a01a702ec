"""TRL's GRPOTrainer on given prompts, run by TRL's own Python: no m2flow is imported here.

Writes a JSON line a step: the step, the time, and the mean reward of its samples.
"""

import json
import re
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

LEADING_NUMBER = re.compile(r"\d+")


def reward(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1 where the completion starts with the answer's digits and no further digit."""
    found = [LEADING_NUMBER.match(text) for text in completions]
    return [float(match is not None and match[0] == right) for match, right in zip(found, answer, strict=True)]


class StepLog(TrainerCallback):
    """The line of a step, when it has ended."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_log(self, args, state, control, logs=None, **_):  # type: ignore[no-untyped-def]
        if logs and "reward" in logs:
            line = {"step": state.global_step, "time": time.time(), "reward": logs["reward"]}
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    # TRL stops and masks at the one end token: a newline ends an answer here, as it does on the other side.
    (newline,) = tokenizer("\n", add_special_tokens=False).input_ids
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(newline)
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    model.generation_config.eos_token_id = newline
    samples, rows = settings["samples_per_step"], settings["rows_per_pass"]
    config = GRPOConfig(
        output_dir=settings["scratch"],
        use_cpu=True,
        bf16=False,
        seed=settings["seed"],
        max_steps=settings["num_steps"],
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=samples // rows,
        steps_per_generation=samples // rows,
        num_generations=settings["samples_per_prompt"],
        max_completion_length=settings["max_new_tokens"],
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        num_iterations=1,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(settings["problems"]),
        processing_class=tokenizer,
        callbacks=[StepLog(Path(settings["log"]))],
    ).train()


if __name__ == "__main__":
    main()
