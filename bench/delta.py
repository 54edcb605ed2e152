"""How many bytes a day do derived tensors and delta chains leave of the checkpoints of a trained model?

A small transformer is trained on the spot. Its state is saved after the warm-up and 1, 10 and 100 steps later: in full,
without derived tensors, and as differences. A small mixture of experts, in whose optimizer many elements were never
touched, is saved once: in full, and by plain codecs. Everything is loaded again and compared. Needs no GPU, no nvCOMP;
with them a larger model is trained and saved on the GPU, and nvCOMP's ANS is one of the codecs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

import tidegate
from tidegate.codec.availability import unavailable_reason
from tidegate.delta import DeltaPolicy
from tidegate.storage import MemoryStore

from .networks import CONTEXT, DenseLM, MoELM, Size
from .rig import arguments, print_table, say, write_results
from .text import read_text, read_words

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
State = dict[str, list[dict[str, torch.Tensor]]]
"""By component, its tensors in a dict each, whose key says what it is to the optimizer."""

INTERVALS = (1, 10, 100)
MAX_CHAIN = 8
TARGETS = {"full": 1.40, "delta_100": 1.50, "weights_delta_1": 4.5, "moe_gain": 1.10}
"""Ratios on a trained dense state: without deltas, as a delta 100 steps old, and bf16 weights alone 1 step old; and on
the experts' state the bytes of each plain codec over ours."""
DENSE, MOE = (
    Size(512, 8) if DEVICE.type == "cuda" else Size(192, 3),
    Size(192, 3, num_words=1 << 14, num_experts=32, expert_width=64),
)
DENSE_TINY, MOE_TINY = Size(64, 1), Size(64, 1, num_words=1 << 10, num_experts=8, expert_width=64)

_DAY_S = 86_400


def codecs() -> tuple[str, ...]:
    """What the states are saved by: nvCOMP's ANS too where it works. The first call loads nvCOMP."""
    return ("zstd", "rans") if unavailable_reason("ans", DEVICE) else ("zstd", "rans", "ans")


class SmallTraining:
    """bf16 weights, fp32 master and AdamW on DEVICE. The weights are used as fp32, for CPUs that multiply no bf16.

    Args:
        size: Of the model.
    """

    def __init__(self, size: Size) -> None:
        torch.manual_seed(0)
        self._model = (MoELM(size) if size.num_experts else DenseLM(size)).to(DEVICE)
        self._parameters = list(self._model.parameters())
        self._master = [p.detach().clone().requires_grad_() for p in self._parameters]
        self._optimizer = torch.optim.AdamW(self._master, lr=3e-4, betas=(0.9, 0.95))
        self._text = (read_words(size.num_words) if size.num_experts else read_text()).to(DEVICE)
        self.num_parameters = sum(p.numel() for p in self._parameters)

    def step(self) -> float:
        """Do one step; return the loss."""
        starts = torch.randint(len(self._text) - CONTEXT - 1, (2, 1), device=DEVICE)
        windows = self._text[starts + torch.arange(CONTEXT + 1, device=DEVICE)].long()
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._master, strict=True):
                parameter.copy_(master.bfloat16())
        logits = self._model(windows[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        for parameter, master in zip(self._parameters, self._master, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.bfloat16().float()
            parameter.grad = None
        self._optimizer.step()
        return loss.item()

    def state(self) -> State:
        """Return a copy of the state, 14 bytes a parameter."""
        states = [self._optimizer.state[master] for master in self._master]
        return {
            "weights": [{"weight": master.detach().bfloat16()} for master in self._master],
            "master": [{"master": master.detach().clone()} for master in self._master],
            "m": [{"exp_avg": state["exp_avg"].clone()} for state in states],
            "v": [{"exp_avg_sq": state["exp_avg_sq"].clone()} for state in states],
        }


@dataclass(frozen=True, slots=True)
class Saved:
    """What one save came to."""

    raw_bytes: int
    stored_bytes: int
    wall_s: float

    @property
    def ratio(self) -> float:
        """Raw over stored bytes."""
        return self.raw_bytes / self.stored_bytes


def train(size: Size, warm_up: int, intervals: Sequence[int], num_saves: Callable[[int], int]) -> dict[int, State]:
    """Train, and return the state after the warm-up and some times each interval later, by step."""
    training = SmallTraining(size)
    wanted = {warm_up} | {warm_up + interval * i for interval in intervals for i in range(num_saves(interval) + 1)}
    states = {}
    say(f"{training.num_parameters / 1e6:.2f} M parameters, {max(wanted)} steps")
    for step in range(1, max(wanted) + 1):
        loss = training.step()
        if step in wanted:
            states[step] = training.state()
            say(f"step {step}, loss {loss:.3f}")
    return states


def save_all(states: Mapping[int, State], codec: str, *, derive: bool, delta: DeltaPolicy | None) -> list[Saved]:
    """Save states one after the other, and load them again. Raises RuntimeError if one comes back changed."""
    saved = []
    store = MemoryStore()
    with tidegate.CheckpointEngine(store, codec=codec, derive=derive, delta=delta) as engine:
        for step, state in states.items():
            start_s = time.perf_counter()
            engine.save_async(state, step=step)
            report = engine.wait()
            if report is None:
                raise RuntimeError("a save ended without a report")
            saved.append(Saved(report.raw_bytes, report.stored_bytes, time.perf_counter() - start_s))
        for step, state in states.items():
            _check_same(state, engine.load(step), step)
    return saved


def _check_same(state: State, back: object, step: int) -> None:
    for name, items in state.items():
        for before, after in zip(items, back[name], strict=True):  # type: ignore[index]
            for key, tensor in before.items():
                if not torch.equal(tensor.view(torch.uint8), after[key].to(DEVICE).view(torch.uint8)):
                    raise RuntimeError(f"{name} of step {step} came back changed")


def measure(states: Mapping[int, State], codec: str, intervals: Sequence[int]) -> dict[str, object]:
    """Save by one codec in every way."""
    first = min(states)
    parts = {name: {first: {name: items}} for name, items in states[max(states)].items()}
    full = save_all({first: states[max(states)]}, codec, derive=True, delta=None)[0]
    stored = save_all({first: states[max(states)]}, codec, derive=False, delta=None)[0]
    found: dict[str, object] = {
        "full": full.ratio,
        "full_not_derived": stored.ratio,
        "alone": {name: save_all(part, codec, derive=False, delta=None)[0].ratio for name, part in parts.items()},
    }
    day = {}
    for interval in intervals:
        steps = itertools.takewhile(states.__contains__, itertools.count(first, interval))
        chain = {step: states[step] for step in steps}
        _, *fulls = save_all(chain, codec, derive=True, delta=None)
        _, *deltas = save_all(chain, codec, derive=True, delta=DeltaPolicy(MAX_CHAIN))
        delta_bytes = sum(save.stored_bytes for save in deltas) / len(deltas)
        found[f"delta_{interval}"] = full.raw_bytes / delta_bytes
        by_part = {}
        for name in states[first]:
            _, *some = save_all(
                {step: {name: state[name]} for step, state in chain.items()}, codec, derive=False, delta=DeltaPolicy()
            )
            by_part[name] = some[0].raw_bytes * len(some) / sum(save.stored_bytes for save in some)
        found[f"parts_delta_{interval}"] = by_part
        mean_bytes = (full.stored_bytes + MAX_CHAIN * delta_bytes) / (MAX_CHAIN + 1)
        saves_a_day = _DAY_S / interval  # at a step a second
        day[str(interval)] = {
            "raw": full.raw_bytes * saves_a_day,
            "full_not_derived": stored.stored_bytes * saves_a_day,
            "full": full.stored_bytes * saves_a_day,
            "chains": mean_bytes * saves_a_day,
            "chains_of_full": mean_bytes / full.stored_bytes,
            "save_s_of_full": sum(save.wall_s for save in deltas) / sum(save.wall_s for save in fulls),
        }
    found["weights_delta_1"] = found["parts_delta_1"]["weights"]  # type: ignore[index]
    found["bytes_a_day_at_a_step_a_second"] = day
    return found


def measure_experts(state: State) -> dict[str, object]:
    """Save a state with many exact zeros by plain codecs, and by ours."""
    optimizer = [tensor for name in ("m", "v") for items in state[name] for tensor in items.values()]
    num_zeros = sum(int((tensor == 0).sum()) for tensor in optimizer)
    plain = {codec: save_all({1: state}, codec, derive=False, delta=None)[0] for codec in codecs()}
    ours = {codec: save_all({1: state}, codec, derive=True, delta=None)[0] for codec in codecs()}
    stored_bytes = min(saved.stored_bytes for saved in ours.values())
    return {
        "zeros_in_optimizer": num_zeros / sum(tensor.numel() for tensor in optimizer),
        "plain": {codec: saved.ratio for codec, saved in plain.items()},
        "full": {codec: saved.ratio for codec, saved in ours.items()},
        "gain": {codec: saved.stored_bytes / stored_bytes for codec, saved in plain.items()},
        "alone": {
            name: {c: save_all({1: {name: items}}, c, derive=False, delta=None)[0].ratio for c in codecs()}
            for name, items in state.items()
        },
    }


def main() -> None:
    """Train, save in every way, and write the results."""
    args = arguments(__doc__).parse_args()
    torch.set_num_threads(1)  # it is a small model
    warm_up, intervals = (3, (1, 2)) if args.tiny else (250, INTERVALS)
    states = train(DENSE_TINY if args.tiny else DENSE, warm_up, intervals, lambda interval: 3 if interval < 100 else 1)
    results: dict[str, object] = {"targets": TARGETS, "max_chain": MAX_CHAIN}
    rows = []
    for codec in codecs():
        found = measure(states, codec, intervals)
        results[codec] = found
        names = ("full_not_derived", "full", *(f"delta_{interval}" for interval in intervals), "weights_delta_1")
        rows.append((codec, *(found[name] for name in names)))
        say(f"{codec}: every state came back bit for bit")
    print_table(("ratio", *names), rows)
    (experts,) = train(MOE_TINY if args.tiny else MOE, warm_up, (), lambda _: 0).values()
    results["moe"] = moe = measure_experts(experts)
    say(f"experts, {moe['zeros_in_optimizer']:.2f} of the optimizer's elements are zero: {moe}")
    day = results["zstd"]["bytes_a_day_at_a_step_a_second"]  # type: ignore[index]
    print_table(
        ("a save every", "raw GB/day", "full", "chains", "of full"),
        [
            (f"{k} steps", d["raw"] / 1e9, d["full"] / 1e9, d["chains"] / 1e9, d["chains_of_full"])
            for k, d in day.items()
        ],
    )
    name = "delta" if DEVICE.type == "cpu" else "delta-gpu"
    path = write_results(f"{name}-tiny" if args.tiny else name, results, checkpoints=args.folder)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
