"""Guards that keep our work out of an application's CUDA graph, whose replays may come at any time."""

from __future__ import annotations

from weightswap_runtime.errors import DeviceError, Unsupported

from . import Device, Stream


def check_not_capturing(device: Device, stream: Stream) -> None:
    """Raise DeviceError if a stream is being captured: a mark in it, and work that waits for the mark, would be too."""
    if device.is_capturing(stream):
        raise DeviceError(
            f"{device.name}: a stream that calls have used is being captured in a CUDA graph of the application; "
            "our copies would become part of it. Wait until the capture ends, or capture on another stream."
        )


def check_call(device: Device, what: str = "a call") -> None:
    """Raise Unsupported if `what` would be captured in a CUDA graph of the application."""
    if device.is_capturing_here():
        raise Unsupported(
            f"{what} during a capture by the application: replays of its graph would not be ordered with swaps. Load "
            "with cuda_graphs=..., which captures calls itself."
        )
