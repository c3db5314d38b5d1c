"""The endpoint over HTTP. Each client has an answer or a refusal, whatever the others do."""

import asyncio
import hmac
import json
import logging
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from megatron.data.tokenizer import Tokenizer

from .answer import Answer
from .limits import Limits, Refusal, of_this_machine
from .question import Question, Reader
from .service import News, Service, Text

Reload = Callable[[str], Any]
FULL = Refusal(503, "there are too many connections: try again later", None, "overloaded")
FAILED = Refusal(500, "the endpoint has failed. Its log has the reason")
LOG = logging.getLogger("deepy.serve")
# Bytes that are no HTTP are answered. A page of the log for each would let any client fill it.
LOG.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))


class Endpoint:
    """Handlers of the paths.

    Args:
        key: clients must send it as a bearer token. None is no key.
        reload: loads weights of a folder that a client names, and returns an engine. It raises `Refusal`.
    """

    def __init__(
        self,
        service: Service,
        reader: Reader,
        tokenizer: Tokenizer,
        limits: Limits,
        *,
        key: str | None = None,
        reload: Reload | None = None,
    ) -> None:
        self.service, self.reader, self.tokenizer, self.limits = service, reader, tokenizer, limits
        self.key, self.reload, self.texts, self.reloading = key, reload, 0, asyncio.Lock()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=self.limits.body, middlewares=[self._answered])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._one_model)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        if self.reload is not None:
            app.router.add_post("/update_weights_from_disk", self._update)
        return app

    @web.middleware
    async def _answered(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Errors in OpenAI's form."""
        try:
            self._authorize(request)
            return await handler(request)
        except Refusal as error:
            refusal = error
        except web.HTTPException as error:
            refusal = Refusal(error.status, f"{request.method} {request.path[:100]}: {error.reason}")
        except (ConnectionError, TimeoutError) as error:  # the client has gone, or does not read
            if request.transport is not None:
                request.transport.abort()
            raise web.HTTPRequestTimeout from error
        except Exception:  # a mistake of the program ends this request only
            traceback.print_exc(file=sys.stderr)
            refusal = FAILED
        headers = {"Retry-After": "1"} if refusal.status in (429, 503) else {}
        return web.json_response(refusal.body, status=refusal.status, headers=headers)

    def _authorize(self, request: web.Request) -> None:
        if self.key is None:
            # A page of a browser can let its own name lead to this machine. The name stays in the header.
            if not _leads_here(request.headers.get("Host", "localhost")):
                raise Refusal(403, "the header Host must be localhost or its address, or start the endpoint with --key")
            return
        if request.path == "/health":
            return
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {self.key}".encode()):
            raise Refusal(401, "the request must have the endpoint's key as bearer token", None, "invalid_api_key")

    async def _health(self, _: web.Request) -> web.StreamResponse:
        well = self.service.thread.is_alive() and self.service.failures < 3
        state = {"status": "ok" if well else "failing", **self.service.counts}
        return web.json_response(state, status=200 if well else 503)

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "owned_by": "deepy", "max_model_len": self.limits.longest}

    async def _models(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [self._model(name) for name in self.reader.names]})

    async def _one_model(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self.reader.names:
            raise Refusal(404, f"there is no model {name[:100]!r}", "model", "model_not_found")
        return web.json_response(self._model(name))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self.reader.completion)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self.reader.chat)

    async def _update(self, request: web.Request) -> web.StreamResponse:
        """SGLang's way to change weights."""
        assert self.reload is not None
        try:
            folder = json.loads(await self._body(request))["model_path"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Refusal(400, "the body must be a JSON object with model_path", "model_path") from error
        async with self.reloading:
            engine, done = await asyncio.to_thread(self.reload, str(folder)), asyncio.Event()
            self.service.replace(engine, done.set)
            await done.wait()
        return web.json_response({"success": True, "message": "the weights were read"})

    async def _body(self, request: web.Request) -> bytes:
        if request.content_type != "application/json":
            raise Refusal(415, f"the content type must be application/json, not {request.content_type[:100]!r}")
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise Refusal(415, "the body must not be compressed")
        try:
            async with asyncio.timeout(self.limits.patience):
                return await request.read()
        except web.RequestPayloadError as error:
            raise Refusal(400, "the body must be as its headers say") from error
        except TimeoutError as error:
            raise Refusal(408, f"the request has not come within {self.limits.patience:g} seconds") from error

    async def _answer(self, request: web.Request, read: Callable[[bytes], Question]) -> web.StreamResponse:
        question = await asyncio.to_thread(read, await self._body(request))
        async with self._asked(question) as news:
            answer = Answer(question, self.tokenizer, self.reader.names[0])
            if question.stream:
                return await self._stream(request, answer, news)
            found: list[list[News]] = [[] for _ in question.requests]
            try:
                async with asyncio.timeout(self.limits.seconds):
                    async for each in news:
                        if each.failure is not None:
                            raise Refusal(500, each.failure)
                        found[each.number].append(each)
            except TimeoutError as error:
                raise self._late() from error
        content = await asyncio.to_thread(lambda: json.dumps(answer.whole(found)).encode())
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = len(content)
        await response.prepare(request)
        await self._within(response.write(content))
        await self._within(response.write_eof())
        return response

    @asynccontextmanager
    async def _asked(self, question: Question) -> AsyncIterator[AsyncIterator[News]]:
        """The news of a question's texts. Unfinished texts are cancelled at the end of the context."""
        count, news = len(question.requests), asyncio.Queue[News]()
        if self.texts + count > self.limits.queue:
            rule = f"{self.texts} texts are unfinished, and the endpoint takes {self.limits.queue}: try again later"
            raise Refusal(429, rule, None, "rate_limit_exceeded")
        texts = [Text(each, number, news.put_nowait) for number, each in enumerate(question.requests)]
        self.texts += count

        async def found() -> AsyncIterator[News]:
            left = count
            while left:
                each = await news.get()
                left -= each.last
                yield each

        try:
            for each in texts:
                self.service.submit(each)
            yield found()
        finally:
            self.texts -= count
            for each in texts:
                self.service.cancel(each)

    async def _stream(self, request: web.Request, answer: Answer, news: AsyncIterator[News]) -> web.StreamResponse:
        """Server-sent events."""
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)

        async def send(value: Any) -> None:
            text = value if isinstance(value, str) else json.dumps(value)
            await self._within(response.write(f"data: {text}\n\n".encode()))

        try:
            async with asyncio.timeout(self.limits.seconds) as limit:
                async for each in news:
                    if each.failure is not None:
                        raise Refusal(500, each.failure)
                    if (piece := answer.piece(each)) is not None:
                        await send(piece)
            if answer.question.usage:
                await send(answer.last())
        except Refusal as error:
            await send(error.body)
        except TimeoutError:
            if not limit.expired():
                raise
            await send(self._late().body)
        except ConnectionError:
            raise
        except Exception:  # the head has been sent, so the error is an event
            traceback.print_exc(file=sys.stderr)
            await send(FAILED.body)
        await send("[DONE]")
        await self._within(response.write_eof())
        return response

    async def _within(self, sent: Awaitable[None]) -> None:
        """Wait until a client has read enough.

        Raises:
            TimeoutError: it does not.
        """
        async with asyncio.timeout(self.limits.patience):
            await sent

    def _late(self) -> Refusal:
        return Refusal(504, f"the answer takes more than {self.limits.seconds:g} seconds", None, "timeout")


def _leads_here(host: str) -> bool:
    try:
        return of_this_machine(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


class _Full(asyncio.Protocol):
    """A connection more than there may be."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        body = json.dumps(FULL.body).encode()
        head = f"HTTP/1.1 {FULL.status} Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
        transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        transport.close()


@asynccontextmanager
async def listening(endpoint: Endpoint, host: str, port: int) -> AsyncIterator[int]:
    """The endpoint at an address. The number is its port.

    Raises:
        OSError: the address cannot be used.
    """
    runner = web.AppRunner(
        endpoint.application(),
        handler_cancellation=True,
        access_log=None,
        logger=LOG,
        auto_decompress=False,
        keepalive_timeout=endpoint.limits.patience,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    server = runner.server
    assert server is not None

    def connected() -> asyncio.Protocol:
        return server() if len(server.connections) < endpoint.limits.connections else _Full()

    try:
        listener = await asyncio.get_running_loop().create_server(connected, host, port, backlog=1024)
        try:
            yield listener.sockets[0].getsockname()[1]
        finally:
            listener.close()
    finally:
        with suppress(asyncio.CancelledError):
            await runner.cleanup()
