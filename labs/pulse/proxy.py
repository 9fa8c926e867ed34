"""A TCP proxy in user space that adds delay and loss, and that can break off what runs through it.

It needs no rights and works anywhere. It sees a stream and no packets, so loss is a model of what TCP makes of it: a
lost segment holds up everything behind it for one retransmission time-out, and no byte is ever missing. A narrow link
needs :mod:`labs.shaped_link`. As a fault injector it cuts connections off in the middle, or refuses them.
"""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import dataclass
from types import TracebackType

SEGMENT = 1460
"""Payload bytes of a full TCP segment on Ethernet."""


@dataclass(frozen=True)
class Path:
    """What happens to bytes on their way.

    Attributes:
        delay_s: one way, in each direction; a round trip takes twice as long.
        loss: chance that a segment is lost and sent again, from 0 to below 1.
        timeout_s: how long a lost segment holds up what follows.
        cut_after: bytes towards the client after which a connection is reset, one number for each connection in order
            of their start; connections beyond the last are not cut.
    """

    delay_s: float = 0.0
    loss: float = 0.0
    timeout_s: float = 0.2
    cut_after: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.delay_s < 0 or not 0 <= self.loss < 1 or self.timeout_s < 0 or min(self.cut_after, default=0) < 0:
            raise ValueError(f"times and bytes must be at least 0 and loss from 0 to below 1, not {self}")


class Proxy:
    """Forwards connections to another port of this machine while its context is open.

    Args:
        port: where connections go to.
        path: what happens on the way; a new value takes effect with the next connection.
        host: where ``port`` is.
        bind: address to listen at.
        seed: of the losses.

    Attributes:
        port: to connect to instead, once the context is open.
        connections: accepted so far.
        sent: bytes delivered to clients so far.
        lost: segments that were lost so far.
    """

    def __init__(
        self, port: int, path: Path | None = None, *, host: str = "127.0.0.1", bind: str = "127.0.0.1", seed: int = 0
    ) -> None:
        self._target, self.path, self._bind = (host, port), path or Path(), bind
        self.port = self.connections = self.sent = self.lost = 0
        self._random, self._open = random.Random(seed), True
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        start = asyncio.start_server(self._serve, self._bind, 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(10)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def down(self) -> None:
        """Reset all connections, and each new one at once, until :meth:`up`."""
        self._open = False
        self._loop.call_soon_threadsafe(self._reset)

    def up(self) -> None:
        """Forward again."""
        self._open = True

    def _reset(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _stop(self) -> None:
        self._server.close()
        self._reset()
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path, number = self.path, self.connections
        self.connections += 1
        if not self._open:
            writer.transport.abort()
            return
        cut = path.cut_after[number] if number < len(path.cut_after) else None
        self._writers.add(writer)
        try:
            there = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(there[1])
        try:
            await asyncio.gather(
                self._forward(reader, there[1], path, None), self._forward(there[0], writer, path, cut, back=True)
            )
        except (OSError, asyncio.CancelledError):
            return  # one side is gone, or the proxy ends: both are closed below
        finally:
            for end in (writer, there[1]):
                self._writers.discard(end)
                end.close()

    async def _forward(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, path: Path, cut: int | None, back: bool = False
    ) -> None:
        """Carry one direction: reading never waits for what is still on its way, up to 64 pieces."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)
        deliver = asyncio.create_task(self._deliver(queue, sink, cut, back))
        due, clock = 0.0, self._loop.time
        try:
            while True:
                data = await source.read(1 << 16)
                lost = (
                    sum(self._random.random() < path.loss for _ in range(-(-len(data) // SEGMENT))) if path.loss else 0
                )
                self.lost += lost
                due = max(due, clock() + path.delay_s) + lost * path.timeout_s
                put = asyncio.create_task(queue.put((due, data)))
                await asyncio.wait({put, deliver}, return_when=asyncio.FIRST_COMPLETED)
                if not data or deliver.done():
                    put.cancel()
                    break
            await deliver
        finally:
            deliver.cancel()

    async def _deliver(
        self, queue: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter, cut: int | None, back: bool
    ) -> None:
        while True:
            due, data = await queue.get()
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            if not data:
                if sink.can_write_eof() and not sink.is_closing():
                    sink.write_eof()
                return
            if cut is not None:
                data, cut = data[:cut], cut - len(data[:cut])
            sink.write(data)
            await sink.drain()
            self.sent += len(data) * back
            if cut == 0:
                sink.transport.abort()
                raise ConnectionResetError("cut, as was asked for")
