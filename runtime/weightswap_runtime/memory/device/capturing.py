"""Guards that keep our work out of an application's CUDA graph, whose replays may come at any time."""

from __future__ import annotations

from weightswap_runtime.errors import DeviceError, Unsupported

from . import Device, Stream


def check_not_capturing(device: Device, stream: Stream) -> None:
    """Raise DeviceError if a stream is being captured: a mark in it, and work that waits for the mark, would be too."""
    if device.is_capturing(stream):
        raise DeviceError(
            f"{device.name}: a stream in which calls were made is being captured in a CUDA graph of the application; "
            "our copies would become a part of it. Wait for the end of the capture, or capture in another stream."
        )


def check_call(device: Device, what: str = "a call") -> None:
    """Raise Unsupported if `what` would be captured in a CUDA graph of the application."""
    if device.is_capturing_here():
        raise Unsupported(
            f"{what} within a capture of the application: replays of its graph would not be in order with swaps. Load "
            "with cuda_graphs=..., which captures calls by itself."
        )
