"""Derives the inputs of the paper's cases; nothing here knows of the planner. `python derive.py` writes the folders.

Sources, by the mark beside each number:
  [paper]    RLinf, arXiv 2509.15965: workloads, batch, lengths, cluster sizes, what was found best
  [sheet]    the vendor's data sheet
  [config]   the model's public configuration
  [measured] by this project on a CPU: the simulator's steps per core second
  [assumed]  ours; the table of flips in the README says how much depends on it

Stage seconds on n devices for x items (a item is a prompt with its group of samples, or an environment):

  generate   the longest response decodes L steps, each reading the weights once per replica; every live sequence reads
             its cache and computes; lengths are lognormal with mean m, cut at L:
             T = int_0^L [ W / (t B) + b(l) ((p + l) k / (t B) + 2 A / (t F)) ] dl,   b(l) = x g t / n * P(length > l)
             of more sequences than its cache holds an engine works on as many as fit, one in for one out, until the
             rest fit together: m / s (W / (t B) + s ((p + a) k / (t B) + 2 A / (t F))) for each, s (p + a) the cache,
             a the mean position of those that are live then, int l P(length > l) dl / m
  forward    2 A tokens / (n F);   train  8 A tokens / (n F) (recomputed activations), plus a step's fixed seconds
"""

import math
import pathlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Seconds = Callable[[float, int], float]
HOME = pathlib.Path(__file__).parent
FLOPS, BANDWIDTH, MEMORY = 989e12, 3.35e12, 80e9  # [sheet] H100 SXM, dense bf16
LINK = 25e9  # [assumed] bytes/s a device to host memory: half of PCIe 5.0 x16
MFU_TRAIN, MFU_FORWARD, MFU_DECODE, BANDWIDTH_USE = 0.35, 0.45, 0.3, 0.5  # [assumed] shares of the ceilings reached
STEP_S = 3.0  # [assumed] fixed seconds of a training phase: optimiser, all-gathers, host work
ENGINE_MEMORY = 0.75  # [assumed] share of a device that the generation engine takes for weights and cache
LEFT_BEHIND = 2e9  # [assumed] bytes on a device after offload: context, communicators


@dataclass(frozen=True)
class Model:
    """Shape [config] and layouts [assumed]."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    parameters: float
    active: float
    generate_tensor: int
    train_split: int
    experts: int = 0
    active_experts: int = 0
    head_size: int = 128

    @property
    def cache_bytes(self) -> float:
        return 2.0 * self.layers * self.kv_heads * self.head_size * 2


QWEN_1B5 = Model("Qwen2.5-1.5B", 28, 1536, 12, 2, 8960, 151936, 1.54e9, 1.54e9, 1, 1)
QWEN_7B = Model("Qwen2.5-7B", 28, 3584, 28, 4, 18944, 152064, 7.62e9, 7.62e9, 1, 4)
QWEN_14B = Model("Qwen2.5-14B", 48, 5120, 40, 8, 13824, 152064, 14.8e9, 14.8e9, 2, 8)
QWEN_32B = Model("Qwen2.5-32B", 64, 5120, 40, 8, 27648, 152064, 32.8e9, 32.8e9, 4, 8)
QWEN_MOE = Model("Qwen3-30B-A3B", 48, 2048, 32, 4, 768, 151936, 30.5e9, 3.3e9, 4, 8, 128, 8)
OPENVLA = Model("OpenVLA-7B", 32, 4096, 32, 32, 11008, 32064, 7.54e9, 7.54e9, 1, 1)


@dataclass(frozen=True)
class Reasoning:
    """A reasoning workload."""

    name: str
    model: Model
    devices: int  # [paper]
    algorithm: str  # [paper]
    prompts: int  # a step
    group: int
    longest: int
    mean: float
    sigma: float = 0.8  # [assumed] of the lognormal lengths
    prompt_tokens: float = 512.0  # [assumed]


def _grpo(model: Model, devices: int, name: str) -> Reasoning:
    # [assumed] 512 prompts of 16 samples; longest response 28,672 and mean a quarter of it
    return Reasoning(name, model, devices, "grpo", 512, 16, 28672, 7168)


def _ppo(model: Model, devices: int, name: str) -> Reasoning:
    # [assumed] the same samples as GRPO, but each on its own: an item is one sample, and nothing waits for a group
    return Reasoning(name, model, devices, "ppo", 8192, 1, 28672, 7168)


def _moe(devices: int, name: str) -> Reasoning:
    # [paper] batch 1536 and length 20480; [assumed] 16 samples a prompt and a mean of a quarter
    return Reasoning(name, QWEN_MOE, devices, "grpo", 1536, 16, 20480, 5120)


REASONING = [
    _grpo(QWEN_1B5, 64, "grpo-1.5b-64"),
    _grpo(QWEN_7B, 64, "grpo-7b-64"),
    _grpo(QWEN_7B, 256, "grpo-7b-256"),
    _grpo(QWEN_32B, 128, "grpo-32b-128"),
    _ppo(QWEN_1B5, 16, "ppo-1.5b-16"),
    _ppo(QWEN_1B5, 32, "ppo-1.5b-32"),
    _ppo(QWEN_1B5, 64, "ppo-1.5b-64"),
    _ppo(QWEN_7B, 64, "ppo-7b-64"),
    _ppo(QWEN_14B, 64, "ppo-14b-64"),
    _moe(32, "moe-30b-32"),
    _moe(64, "moe-30b-64"),
    _moe(128, "moe-30b-128"),
]


@dataclass(frozen=True)
class Embodied:
    """A simulator and a vision-language-action policy in a loop, and its training."""

    name: str
    devices: int  # [assumed] 32: a size of the paper's range
    environments: int
    rounds: int
    simulator: str
    cores: int


EMBODIED = [
    # [assumed] 128 environments a device, 80 steps an episode; physics and rendering on the device
    Embodied("maniskill-openvla", 32, 4096, 80, "device", 0),
    # [assumed] 64 environments a device, 512 steps in chunks of 8 [config of OFT]; simulated on the hosts' cores
    Embodied("libero-openvla-oft", 32, 2048, 64, "cores", 512),
]


def lengths(work: Reasoning) -> tuple[np.ndarray, np.ndarray]:
    """Token positions [P] and the share of sequences that are longer than each."""
    position = np.linspace(0, work.longest, 2049)[1:]
    location = math.log(work.mean) - work.sigma**2 / 2
    erf = np.vectorize(math.erf)
    longer = 0.5 - 0.5 * erf((np.log(position) - location) / (work.sigma * math.sqrt(2)))
    longer[-1] = 0.0
    return position, longer


def cached_tokens(model: Model) -> float:
    """Tokens that the cache of one engine holds."""
    held = ENGINE_MEMORY * MEMORY - model.parameters * 2 / model.generate_tensor
    return max(held, 1e9) * model.generate_tensor / model.cache_bytes


def generation(work: Reasoning, items: float, devices: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Seconds; and when (fractions of them) which fraction of the items is out: an item is with its last sample."""
    model, (position, longer) = work.model, lengths(work)
    tensor, each = model.generate_tensor, position[1] - position[0]
    sequences, room = items * work.group * tensor / devices, cached_tokens(model)
    together = min(sequences, room / float((longer * (work.prompt_tokens + position)).max()))
    step = model.parameters * 2 / (tensor * BANDWIDTH * BANDWIDTH_USE)
    cache = (work.prompt_tokens + position) * model.cache_bytes / (tensor * BANDWIDTH * BANDWIDTH_USE)
    compute = 2 * model.active / (tensor * FLOPS * MFU_DECODE)
    reached = np.cumsum((step + together * longer * (cache + compute)) * each)
    mean = float(longer.sum() * each)
    full = room / (work.prompt_tokens + float((longer * position).sum() * each) / mean)
    busy = step + room * model.cache_bytes / (tensor * BANDWIDTH * BANDWIDTH_USE) + full * compute
    before = (sequences - together) * mean / full * busy
    prefill = items * work.group * work.prompt_tokens * 2 * model.active / (devices * FLOPS * MFU_FORWARD)
    out = 1 - together / sequences * (1 - (1 - longer) ** work.group)
    return float(before + reached[-1] + prefill), (before + reached) / (before + reached[-1]), out


def tokens(work: Reasoning) -> float:
    """Mean tokens of one sequence."""
    position, longer = lengths(work)
    return work.prompt_tokens + float(longer.sum() * (position[1] - position[0]))


def forward(work: Reasoning, items: float, devices: int) -> float:
    return 2 * work.model.active * items * work.group * tokens(work) / (devices * FLOPS * MFU_FORWARD)


def training(work: Reasoning, items: float, devices: int) -> float:
    return STEP_S + 8 * work.model.active * items * work.group * tokens(work) / (devices * FLOPS * MFU_TRAIN)


def sampled(stage: str, seconds: Seconds, items: int, devices: int, split: int) -> list[str]:
    lines = []
    for count in sorted({max(devices // part // split * split, split) for part in (64, 8, 2, 1)}):
        for part in (items, items // 4, items // 16, items // 64):
            value = seconds(part, count)
            lines.append(f"  - {{stage: {stage}, devices: {count}, items: {part}, seconds: {value:.5g}}}")
    return lines


def model_lines(stage: str, model: Model, phase: str, work: Reasoning, flight: float) -> list[str]:
    shape = (
        f"{{layers: {model.layers}, hidden: {model.hidden}, heads: {model.heads}, kv_heads: {model.kv_heads}, "
        f"intermediate: {model.intermediate}, vocabulary: {model.vocabulary}, experts: {model.experts}, "
        f"active_experts: {model.active_experts}, head_size: {model.head_size}}}"
    )
    return [
        f"  - stage: {stage}",
        f"    transformer: {shape}",
        f"    phase: {phase}",
        f"    prompt_tokens: {work.prompt_tokens:.5g}",
        f"    new_tokens: {tokens(work) - work.prompt_tokens:.5g}",
        f"    tokens_in_flight: {flight:.5g}",
        f"    sequences: {work.group}",
        "    weight_bytes: 2",
    ]


def write_reasoning(work: Reasoning) -> None:
    home, model, ppo = HOME / work.name, work.model, work.algorithm == "ppo"
    home.mkdir(exist_ok=True)
    trained = ["actor", "critic"] if ppo else ["actor"]
    stages = [("rollout.generate", "rollout"), ("inference.forward", "inference")]
    stages += [(f"{t}.train", t) for t in trained]
    lines = [
        f"# {model.name}, {work.algorithm.upper()}, {work.devices} H100: by ../derive.py, which has the sources",
        f"name: {work.name}",
        f"source_items: {work.prompts}",
        "stages:",
        "  - {name: prompts, kind: source}",
    ]
    lines += [f"  - {{name: {s}, kind: work, group: {g}, expansion: 1}}" for s, g in stages]
    lines += [f"  - {{name: publish, kind: publish, group: actor, to: rollout, after: [{trained[0]}.train]}}"]
    lines += ["streams:", "  - [prompts, rollout.generate]", "  - [rollout.generate, inference.forward]"]
    lines += [f"  - [inference.forward, {t}.train]" for t in trained]
    lines += ["groups:"]
    for group in ("rollout", "inference", *trained):
        split = model.generate_tensor if group == "rollout" else model.train_split
        lines.append(
            f"  - {{name: {group}, device_kind: cuda, devices_per_rank: {split}, can_offload: true, "
            f"in_step: {str(group in trained).lower()}}}"
        )
    (home / "workflow.yaml").write_text("\n".join(lines) + "\n")
    write_reasoning_profile(work, trained)
    write_cluster(home, work.devices, 0)


def write_reasoning_profile(work: Reasoning, trained: list[str]) -> None:
    model, passes = work.model, 3 if work.algorithm == "ppo" else 1  # PPO: reference, values and old logprobs
    _, reached, out = generation(work, work.prompts, work.devices)
    flight = cached_tokens(model)
    lines = [
        "# seconds, bytes and curve by the formulas of ../derive.py",
        f"model: {model.name}",
        "hardware: h100-sxm",
        'version: "1"',
        "transfer_latency_s: 0.05  # assumed: a chunk through host memory",
        "samples:",
    ]
    lines += sampled("rollout.generate", lambda x, n: generation(work, x, n)[0], work.prompts, work.devices,
                     model.generate_tensor)  # fmt: skip
    lines += sampled("inference.forward", lambda x, n: passes * forward(work, x, n), work.prompts, work.devices,
                     model.train_split)  # fmt: skip
    for group in trained:
        lines += sampled(f"{group}.train", lambda x, n: training(work, x, n), work.prompts, work.devices,
                         model.train_split)  # fmt: skip
    knots = [int(k) for k in np.linspace(0, len(reached) - 1, 33)]
    lines += ["curves:", "  - stage: rollout.generate"]
    lines.append(f"    time_fraction: [{', '.join(f'{reached[k]:.4f}' for k in knots)}]")
    lines.append(f"    item_fraction: [{', '.join(f'{out[k]:.4f}' for k in knots)}]")
    lines += ["models:"]
    lines += model_lines("rollout.generate", model, "generate", work, flight)
    lines += model_lines("inference.forward", model, "forward", work, 32768)
    for group in trained:
        lines += model_lines(f"{group}.train", model, "train", work, 32768)
    lines += ["switches:"]
    weights = model.parameters * 2
    moved = {"rollout": weights / model.generate_tensor, "inference": passes * weights / model.train_split}
    for group in ("rollout", "inference", *trained):
        held = moved.get(group, 18 * model.parameters / work.devices)
        seconds = max(held / LINK, 0.5)
        lines.append(
            f"  - {{group: {group}, onload_s: {seconds:.4g}, offload_s: {seconds:.4g}, "
            f"offloaded_bytes: {LEFT_BEHIND:.3g}}}"
        )
    sync = 2 * weights / (model.generate_tensor * LINK) + 1.0  # assumed: gathered, copied and loaded over the link
    lines += ["syncs:", f"  - {{source: actor, target: rollout, seconds: {sync:.4g}}}"]
    (HOME / work.name / "profile.yaml").write_text("\n".join(lines) + "\n")


def write_embodied(work: Embodied) -> None:
    home = HOME / work.name
    home.mkdir(exist_ok=True)
    kind = "cuda" if work.simulator == "device" else "cpu"
    lines = [
        f"# {work.name}, {work.devices} H100: derived by ../derive.py, which has the sources",
        f"name: {work.name}",
        f"source_items: {work.environments}",
        "stages:",
        "  - {name: episodes, kind: source}",
        "  - {name: policy.act, kind: work, group: policy, expansion: 1}",
        "  - {name: simulator.step, kind: work, group: simulator, expansion: 1}",
        "  - {name: advantages, kind: barrier, expansion: 1}",
        "  - {name: actor.train, kind: work, group: actor, expansion: 1}",
        "  - {name: publish, kind: publish, group: actor, to: policy, after: [actor.train]}",
        "streams:",
        "  - [episodes, policy.act]",
        "  - [policy.act, simulator.step]",
        f"  - {{producer: simulator.step, consumer: policy.act, feedback: true, rounds: {work.rounds}}}",
        "  - [simulator.step, advantages]",
        "  - [advantages, actor.train]",
        "groups:",
        "  - {name: policy, device_kind: cuda, can_offload: true}",
        f"  - {{name: simulator, device_kind: {kind}, can_offload: true}}",
        "  - {name: actor, device_kind: cuda, can_offload: true, in_step: true}",
    ]
    (home / "workflow.yaml").write_text("\n".join(lines) + "\n")
    write_embodied_profile(work)
    write_cluster(home, work.devices, work.cores)


def write_embodied_profile(work: Embodied) -> None:
    model, oft = OPENVLA, work.simulator == "cores"
    prompt = 300.0  # [config] 256 patches of the image and the instruction
    decoded = 0 if oft else 7  # [config] OpenVLA decodes seven action tokens; OFT answers a chunk in one pass
    read = model.parameters * 2 / (BANDWIDTH * BANDWIDTH_USE)

    def act(x: float, n: int) -> float:
        return (1 + decoded) * read + x / n * (prompt + decoded) * 2 * model.active / (FLOPS * MFU_FORWARD)

    def step(x: float, n: int) -> float:
        if oft:  # [measured] 18.5 steps a core second with one camera; a chunk of 8 steps
            return 8 * x / n / 18.5
        # [assumed] a step of all environments of a device has a floor of 0.3 s, and 3 ms an environment to render
        return 0.3 + 0.003 * x / n

    def train(x: float, n: int) -> float:
        return STEP_S + 8 * model.active * x * work.rounds * (prompt + 56 * oft + decoded) / (n * FLOPS * MFU_TRAIN)

    lines = [
        "# by the formulas of ../derive.py",
        f"model: {model.name}",
        "hardware: h100-sxm",
        'version: "1"',
        "samples:",
    ]
    lines += sampled("policy.act", act, work.environments, work.devices, 1)
    lines += sampled("simulator.step", step, work.environments, work.cores or work.devices, 1)
    lines += sampled("actor.train", train, work.environments, work.devices, 1)
    weights, state = model.parameters * 2, 18 * model.parameters / work.devices
    held = {"policy": weights + 10e9, "actor": state + 40e9}  # [assumed] cache and activations beside the weights
    if not oft:
        held["simulator"] = 30e9  # [assumed] scenes, textures and frames of 128 environments
    lines += ["switches:"]
    for group, size in held.items():
        seconds = {"policy": weights, "actor": state, "simulator": 30e9}[group] / LINK
        lines.append(
            f"  - {{group: {group}, onload_s: {seconds:.4g}, offload_s: {seconds:.4g}, resident_bytes: {size:.4g}, "
            f"offloaded_bytes: {LEFT_BEHIND:.3g}}}"
        )
    lines += ["syncs:", f"  - {{source: actor, target: policy, seconds: {2 * weights / LINK + 1:.4g}}}"]
    (HOME / work.name / "profile.yaml").write_text("\n".join(lines) + "\n")


def write_cluster(home: pathlib.Path, devices: int, cores: int) -> None:
    count = max(devices // 8, 1)
    lines = [
        "nodes:",
        f"  - {{name: node, count: {count}, cores: {cores // count}, devices: [{{hardware: h100-sxm, count: 8}}]}}",
    ]
    (home / "cluster.yaml").write_text("\n".join(lines) + "\n")


def main() -> None:
    for reasoning in REASONING:
        write_reasoning(reasoning)
    for embodied in EMBODIED:
        write_embodied(embodied)


if __name__ == "__main__":
    main()
