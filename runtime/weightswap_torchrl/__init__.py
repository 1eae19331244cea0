"""torchrl's weights, served by weightswap: a `WeightSyncScheme` over `Sender` and `Model.receive`; docs/memory.md."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from weightswap_runtime import Artifact, Event, MissingExtra, Model, Sender, SwapReceipt

try:
    from tensordict import TensorDictBase
    from torchrl.weight_update import WeightStrategy, WeightSyncScheme
except ModuleNotFoundError as error:
    raise MissingExtra("weightswap_torchrl", "torchrl") from error

__all__ = ["WeightswapScheme"]


class WeightswapScheme(WeightSyncScheme):  # type: ignore[misc]  # torchrl is an extra
    """The way of a torchrl model's weights to the processes that serve them.

    In the trainer: `init_on_sender(model=actor)`, or `Collector(weight_sync_schemes={"policy": scheme})`, which does
    that by itself; `connect()` sends what the model has, `send()` each update. Both return when the weights have been
    verified and are served; otherwise they raise the server's reason, and it serves what it did before. Of several
    servers each commits for itself, one after another: those behind the one that refuses are sent nothing.

    The server is `weightswap serve`, or a process of this machine with a `weightswap_runtime.Model`. There
    `init_on_receiver(model_id="policy", model=model)` begins to listen, before the trainer connects, and after
    `connect()` `receive(timeout)` waits for the next commit: it returns the `SwapReceipt` of the latest one since the
    last call, or None. Weights are served whether or not it is called.
    """

    _sender_transports: dict[int, _SendingTransport] | None
    _receiver_transport: _ReceivingTransport | None

    def __init__(
        self,
        to: str | Sequence[str],
        artifact: str | os.PathLike[str] | Artifact,
        *,
        ignore: str | Sequence[str] = (),
        timeout: float | None = 60.0,
        token: str | None = None,
    ) -> None:
        """to: the server's address, `unix:PATH` or that of its admin plane; or one for each server, in the order of
        torchrl's worker indices. artifact, timeout, token: as in `Sender`. ignore: patterns of names that the graph
        does not have, as in `Model.stage`.
        """
        super().__init__()
        self.addresses = (to,) if isinstance(to, str) else tuple(to)
        self.artifact, self.ignore = artifact, ignore
        self.timeout, self.token = timeout, token

    def create_transport(self, *, at: str, model: Model | None = None) -> _SendingTransport | _ReceivingTransport:
        """Return the way to the server at an address; or, in the server, that to its model."""
        if model is not None:
            return _ReceivingTransport(at, model, self.timeout)
        return _SendingTransport(Sender(at, self.artifact, timeout=self.timeout, token=self.token), self.ignore)

    def _init_on_sender_impl(self, model_id: str = "policy", context: Any = None, model: Any = None, **_: Any) -> None:
        self.model_id, self.context, self.model = model_id, context, model
        for index, at in enumerate(self.addresses):
            self._register_worker_sender(worker_idx=index, at=at)

    def _setup_connection_and_weights_on_sender_impl(self, *, worker_idx: Any = None, weights: Any = None) -> None:
        self.send(weights, worker_idx)

    def prepare_weights(self, weights: Any, model_id: str, strategy: WeightStrategy, context: Any = None) -> Any:
        """Return what is sent: names with tensors, or a module, of which only its state dict is sent."""
        if weights is None and (self._model_ref is not None or context is not None):
            weights = self.model
        if weights is None or isinstance(weights, str):  # the latter would be the path of a file
            raise TypeError(
                f"weights={weights!r}: give a module, a TensorDict or a state dict, here or on init_on_sender"
            )
        return _names_joined(weights) if isinstance(weights, TensorDictBase) else weights

    def _init_on_receiver_impl(
        self, model_id: str, context: Any = None, model: Any = None, worker_idx: int | None = None, **_: Any
    ) -> None:
        if not isinstance(model, Model):
            raise TypeError(f"model={model!r:.80}: expected a weightswap_runtime.Model, of weightswap_runtime.load()")
        self.model_id, self.model, self.worker_idx = model_id, model, worker_idx
        self.weights: Any = {}  # torchrl's buffer to receive into; the model has its own
        self._register_transport_receiver(at=self.addresses[worker_idx or 0], model=model)

    def shutdown(self) -> None:
        """Close the senders, or stop listening. A second call does nothing."""
        super().shutdown()
        transports, self._sender_transports = dict(self._sender_transports or {}), None
        for transport in (*transports.values(), self._receiver_transport):
            if transport is not None:
                transport.close()
        self._receiver_transport = None

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return state | {"_sender_transports": None, "_receiver_transport": None}


class _SendingTransport:
    """torchrl's `TransportBackend` from a trainer to one server. The commit is the acknowledgement."""

    def __init__(self, sender: Sender, ignore: str | Sequence[str]) -> None:
        self._sender, self._ignore = sender, ignore

    def send_weights(self, weights: Any) -> None:
        self._sender.send(weights, ignore=self._ignore)

    def receive_weights(self, timeout: float | None = None, **_: Any) -> None:
        raise RuntimeError("this is the sender's side; call receive() where init_on_receiver() was called")

    def close(self) -> None:
        self._sender.close()


class _ReceivingTransport:
    """torchrl's `TransportBackend` in a server."""

    def __init__(self, at: str, model: Model, timeout: float | None) -> None:
        self._model, self._committed = model, threading.Event()
        self._receiver = model.receive(at, timeout=timeout)
        self._unlisten = model.listen(self._notice)

    def _notice(self, event: Event) -> None:
        if event.receipt is not None:
            self._committed.set()

    def setup_connection_and_weights_on_receiver(self, **_: Any) -> None:
        """Do nothing: it listens already, and the first weights come as the later ones do."""

    def send_weights(self, weights: Any) -> None:
        raise RuntimeError("this is the server's side; call send() where init_on_sender() was called")

    def receive_weights(self, timeout: float | None = None, **_: Any) -> SwapReceipt | None:
        if not self._committed.wait(timeout):
            return None
        self._committed.clear()  # before the look: a commit meanwhile is seen now, and told once more
        return self._model.history[-1]

    def close(self) -> None:
        self._receiver.stop()
        self._unlisten()


def _names_joined(weights: TensorDictBase) -> dict[str, Any]:
    """Return a TensorDict's tensors by FQN."""
    items = weights.items(include_nested=True, leaves_only=True)
    return {".".join(key) if isinstance(key, tuple) else key: tensor for key, tensor in items}
