"""Text generation: each request has its own context, pinned to the weights it began with, and a time limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weightswap_runtime import TokenStream
from weightswap_runtime.errors import Unsupported
from weightswap_runtime.model.served import choice_of, holds_calls
from weightswap_server.errors import BadRequest, NotReady, TookTooLong, UnknownModel
from weightswap_server.protocol import (
    Answered,
    ErrorDocument,
    GenerateParameters,
    GenerateRequest,
    GenerateResponse,
    read_variants,
    write_variants,
)

from .service import Service, result_of

END = object()
_LATER = object()  # the generation has not begun, as a commit holds new calls
_PAUSE = 0.005  # seconds until it is tried again


class OpenGeneration:
    """The generation for one request, piece by piece, in the model's thread."""

    def __init__(self, service: Service, name: str, version: str, request: GenerateRequest, traceparent: str) -> None:
        """Raises UnknownModel, NotReady, BadRequest, Overloaded, and Unsupported for a model that does not generate."""
        served = service.find_ready(name, version)
        if not served.generates:
            raise Unsupported(f"{name} does not generate; its artifact has no key-value caches")
        if (request.text_input is None) == (request.input_ids is None):
            raise BadRequest("expected either text_input or input_ids")
        self._parameters = request.parameters or GenerateParameters()
        self._variants = read_variants(self._parameters.variant)
        service.open_stream()
        self.request = request
        self.name = name
        self._version = version
        self.answered = Answered(0, "")
        self._service, self._served = service, served
        self._stream: TokenStream | None = None
        self._traceparent = traceparent
        self._began = time.monotonic()
        self._closed = False

    @property
    def seconds_left(self) -> float:
        """Seconds until the time limit."""
        return max(0.0, self._began + self._service.settings.stream_timeout - time.monotonic())

    def _try_next(self) -> Future[Any]:
        """Return a future of the next piece, of END or of _LATER.

        Raises NotReady; the future, what `Model.generate` raises, and UnknownModel if another generation than the
        requested one is served by then.
        """
        return self._served.thread.do(self._next)

    def timed_out(self) -> TookTooLong:
        return TookTooLong(f"the generation took longer than {self._service.settings.stream_timeout:g} s")

    async def pieces(self) -> AsyncIterator[Any]:
        """Yield each piece. Raises TookTooLong."""
        while True:
            try:
                async with asyncio.timeout(self.seconds_left):
                    while (piece := await asyncio.wrap_future(self._try_next())) is _LATER:
                        await asyncio.sleep(_PAUSE)
            except TimeoutError as error:
                raise self.timed_out() from error
            if piece is END:
                return
            yield piece

    def next_here(self, is_wanted: Callable[[], bool]) -> Any:
        """Return the next piece, or END; blocks the calling thread. Raises TookTooLong, and as `result_of`."""
        try:
            while (piece := result_of(self._try_next(), self.seconds_left, is_wanted)) is _LATER:
                time.sleep(_PAUSE)
        except TimeoutError as error:
            raise self.timed_out() from error
        if piece is END and not self.seconds_left:
            raise self.timed_out()
        return piece

    def document(self, pieces: list[Any]) -> GenerateResponse:
        """Return the response with some pieces."""
        answer = GenerateResponse(self.name, str(self.answered.generation), self.answered, id=self.request.id or "")
        if self.request.text_input is None:
            answer.output_ids = pieces
        else:
            answer.text_output = "".join(pieces)
        return answer

    def close(self) -> None:
        """End the generation, and free the context, after the current step has ended. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._service.close_stream()
        try:
            self._served.thread.do(self._close)
        except NotReady:  # the thread has ended
            self._close()

    def _next(self) -> Any:
        if self._closed:
            return END
        if self._stream is None:
            # the pins of all streams are this thread's, so that the gate would let it pass, and a commit that waits for
            # streams would wait for each new one, too
            if holds_calls(self._served.model):
                return _LATER
            parameters = self._parameters
            prompt = self.request.text_input if self.request.input_ids is None else self.request.input_ids
            model = self._served.model
            choice = choice_of(model, self._variants) if self._variants else None
            self._stream = model.generate(
                prompt,
                variants=choice,
                max_new_tokens=parameters.max_tokens,
                temperature=parameters.temperature,
                top_k=parameters.top_k,
                top_p=parameters.top_p,
                repetition_penalty=parameters.repetition_penalty,
                stop=parameters.stop,
                seed=parameters.seed,
                stream=True,
            )
            if self._version not in ("", str(self._stream.generation)):  # it was served when the request came
                raise UnknownModel(f"{self.name} version {self._version}: only {self._stream.generation} is served")
            variant = write_variants(choice.ids) if choice is not None else ""
            self.answered = Answered(self._stream.generation or 0, self._stream.weights_id or "", variant)
        piece = next(self._stream, END)
        if piece is END:
            self._service.generated(self.name, self.answered, time.monotonic() - self._began, self._traceparent)
        return piece

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()


async def whole(generation: OpenGeneration) -> GenerateResponse:
    """Run a generation to its end, and return its response."""
    try:
        return generation.document([piece async for piece in generation.pieces()])
    finally:
        generation.close()


async def event_stream(service: Service, generation: OpenGeneration) -> Response:
    """Return the generation as server-sent events, each a GenerateResponse. Raises the errors of the first piece."""
    try:
        pieces = generation.pieces()
        first = await anext(pieces, END)
    except BaseException:
        generation.close()
        raise
    return _EventStream(service, generation, first, pieces)


class _EventStream(Response):
    media_type = "text/event-stream"

    def __init__(self, service: Service, generation: OpenGeneration, first: Any, pieces: AsyncIterator[Any]) -> None:
        super().__init__(headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._service, self._generation, self._first, self._pieces = service, generation, first, pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        disconnected = asyncio.ensure_future(_disconnected(receive))
        error: Exception | None = None
        try:
            async with asyncio.timeout(self._generation.seconds_left):  # bounds a client that does not read, too
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._send_pieces(send, disconnected)
        except TimeoutError:
            error = self._generation.timed_out()
        except Exception as raised:
            error = raised
        finally:
            self._generation.close()
            disconnected.cancel()
        if error is not None:
            failure = self._service.refused(self._generation.name, error)
            await send(_event(ErrorDocument(failure.text)))
        await send({"type": "http.response.body", "body": b""})

    async def _send_pieces(self, send: Send, disconnected: asyncio.Future[None]) -> None:
        piece = self._first
        while piece is not END and not disconnected.done():
            await send(_event(self._generation.document([piece])))
            piece = await anext(self._pieces, END)


def _event(document: Any) -> dict[str, Any]:
    body = b"data: " + msgspec.json.encode(document) + b"\n\n"
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
