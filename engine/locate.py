"""Where loaded tensors go: `map_location`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .errors import ConfigError

MapLocation = str | torch.device | Mapping[str, str] | None


class Locator:
    """Answers where a tensor goes that was saved from some device.

    Args:
        map_location: A device for all; or a mapping of saved to new devices, where what it lacks goes to the CPU; None
            is the CPU.

    Raises:
        ConfigError: It is neither, or names a device that this machine lacks.
    """

    def __init__(self, map_location: MapLocation) -> None:
        if map_location is not None and not isinstance(map_location, str | torch.device | Mapping):
            raise ConfigError(
                f"map_location is a {type(map_location).__name__}; give a device, or a mapping of saved to new devices"
            )
        self._map = map_location if isinstance(map_location, Mapping) else {}
        self._all = None if isinstance(map_location, Mapping) else _device(map_location or "cpu")
        self._known: dict[str, torch.device] = {}

    def __call__(self, saved: str) -> torch.device:
        """Return the device, with its index if it is one of CUDA."""
        if self._all is not None:
            return self._all
        if saved not in self._known:
            self._known[saved] = _device(self._map.get(saved, "cpu"))
        return self._known[saved]


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise ConfigError(f"map_location names no device: {exc}") from exc
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(f"map_location asks for {device}, and this machine has {count} CUDA devices")
        return torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
    return device
