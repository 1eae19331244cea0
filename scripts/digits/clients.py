"""Clients: threads that send requests to the model at a steady rate."""

from __future__ import annotations

import time
from collections import deque
from threading import Event, Thread

import numpy as np
import torch
from answers import Answer

from weightswap_runtime import Model

MOST_IMAGES = 16


class Clients:
    """`count` client threads. Each sends `rate` requests per second with 1 to 16 random images of `images`."""

    def __init__(self, model: Model, images: torch.Tensor, *, count: int, rate: float) -> None:
        self._model = model
        self._images = images
        self._interval = 1 / rate
        self._stopping = Event()
        self._answers: deque[Answer] = deque()
        self._error: BaseException | None = None
        self._threads = [Thread(target=self._run, args=(seed,), daemon=True) for seed in range(count)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop the threads, and wait for the last answer."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def take(self) -> list[Answer]:
        """Return the answers since the last call. Raises the error of a failed request: no request may fail."""
        if self._error is not None:
            raise RuntimeError(f"a request failed: {self._error!r}") from self._error
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def _run(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            while not self._stopping.is_set():
                answer = self._ask(random)
                self._answers.append(answer)
                self._stopping.wait(max(0.0, answer.started + self._interval - time.monotonic()))
        except BaseException as error:
            self._error = error

    def _ask(self, random: np.random.Generator) -> Answer:
        indices = random.integers(len(self._images), size=random.integers(1, MOST_IMAGES + 1))
        images = self._images[torch.from_numpy(indices)]
        started = time.monotonic()
        with self._model.pin() as session:
            logits = session(images)
            generation, weights_id = session.generation, session.weights_id
        seconds = time.monotonic() - started
        return Answer(started, seconds, generation, weights_id, indices, logits.numpy())
