"""States that tests save."""

from __future__ import annotations

import copy
import itertools
import warnings

import torch

import tidegate


def filled(
    value: float, num_tensors: int = 4, num_bytes: int = 1 << 16, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Tensors of fp32 that all hold one value."""
    return {f"t{i}": torch.full((num_bytes // 4,), value, device=device) for i in range(num_tensors)}


def random_state(num_bytes: int, device: torch.device | str = "cpu") -> dict[str, object]:
    """A training state in small: bf16 weights, fp32 master and moments, a step, some odds and ends."""
    numel = num_bytes // 14
    master = torch.randn(numel, device=device).mul_(0.02)
    moment = torch.randn(numel, device=device).mul_(1e-4)
    return {
        "model": {"w": master.to(torch.bfloat16), "b": torch.zeros(3, 5, device=device)},
        "optimizer": {"state": {0: {"master": master, "exp_avg": moment}}, "lr": 1e-3},
        "exp_avg_sq": torch.rand(numel, device=device).mul_(1e-8),
        "rng": torch.get_rng_state(),
        "step": 7,
        "names": ["a", ("b", None, True)],
    }


_ODD_BITS = {
    torch.float16: [0x7C01, 0xFE37, 0x8000, 0x0001, 0x83FF, 0x7C00],
    torch.bfloat16: [0x7F81, 0xFFC5, 0x8000, 0x0001, 0x807F, 0xFF80],
    torch.float32: [0x7F800001, 0xFFC12345, 0x80000000, 0x00000001, 0x807FFFFF, 0x7F800000],
}
"""By dtype: a signalling and a quiet NaN with payloads, -0.0, the least and the largest denormal, infinity."""


def odd_values(dtype: torch.dtype, numel: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """NaN payloads, -0.0, denormals and infinities in turn, in a tensor of a half precision or of fp32."""
    carrier = torch.int32 if dtype.itemsize == 4 else torch.int16
    size = 8 * dtype.itemsize
    signed = [bits - (1 << size if bits >> (size - 1) else 0) for bits in _ODD_BITS[dtype]]
    bits = torch.tensor(signed, dtype=carrier).repeat(-(-numel // len(signed)))[:numel]
    return bits.to(device).view(dtype)


class SmallTraining:
    """A real training loop in small: bf16 layers of odd shapes, fp32 masters under AdamW, buffers with odd values.

    No step waits for the device. Weights and buffers are changed in place at any time; masters and moments by
    `optimizer.step()` only.

    Args:
        device: Where it trains.
        fused: Whether AdamW is the fused one, whose step counters lie on the device.
        width: Of the widest layer; 1021 makes a state of about 8 MB.
    """

    def __init__(self, device: torch.device, *, fused: bool, width: int = 1021) -> None:
        sizes = (37, width, width // 2 | 1, 3)
        self._sizes = sizes
        self.weights = [torch.empty(a, b, dtype=torch.bfloat16, device=device) for b, a in itertools.pairwise(sizes)]
        self.masters = [torch.nn.Parameter(torch.randn(w.shape, device=device).mul_(0.05)) for w in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-3, fused=fused)
        self.buffers = {str(dtype): odd_values(dtype, 4099, device) for dtype in _ODD_BITS}
        self.mean = torch.zeros(sizes[0], device=device)
        self.num_seen = torch.zeros((), dtype=torch.int64, device=device)
        self._cast()

    @property
    def state(self) -> dict[str, object]:
        """What a checkpoint of it holds; the tensors are its own."""
        return {
            "weights": self.weights,
            "masters": self.masters,
            "optimizer": self.optimizer.state_dict(),
            "buffers": self.buffers,
            "mean": self.mean,
            "num_seen": self.num_seen,
            "tied": self.weights[0],
        }

    def step(self) -> None:
        """Forward, backward, one step of AdamW, and an in-place change of every weight and buffer."""
        x = torch.randn(16, self._sizes[0], device=self.mean.device)
        inputs = [weight.detach().requires_grad_() for weight in self.weights]
        y = x.bfloat16()
        for weight in inputs:
            y = torch.tanh(y @ weight.T)
        gradients = torch.autograd.grad(y.float().square().mean(), inputs)
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient.float()
        self.optimizer.step()
        self._cast()
        self.mean.lerp_(x.mean(0), 0.1)
        self.change_buffers()

    def change_buffers(self) -> None:
        """Change what the optimizer does not own but the weights: it may change at any time."""
        self.num_seen.add_(16)
        for buffer in self.buffers.values():
            bits = buffer.view(torch.int32 if buffer.itemsize == 4 else torch.int16)
            bits.add_(1 << 3)  # other payloads and denormals at every step

    def _cast(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)


def reference(state: object) -> object:
    """A deep copy, ties and views included, made by torch alone and in the order of the current stream."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf", category=UserWarning)
        return copy.deepcopy(state)


def save_while_training(engine: tidegate.CheckpointEngine, training: SmallTraining, num_steps: int) -> list[object]:
    """Save after each of some steps, while the next one runs; return what the states were."""
    expected = []
    engine.attach(training.optimizer)
    for step in range(num_steps):
        training.step()
        expected.append(reference(training.state))
        engine.save_async(training.state, step=step)
    engine.wait()
    return expected
