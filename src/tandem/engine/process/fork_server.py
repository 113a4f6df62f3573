"""The process from which instances are forked: it has imported their libraries.

Imports are most of an instance's start. So a server starts this process once, at its own start,
and every instance, the first and each later one, is a fork of it. It has one thread, since a fork
copies no other, and holds no secret and no connection but the control socket, its standard input:
messages of one packet each. A request carries the socket that becomes the instance's standard
input; answers are the child's process id or the reason why there is none, and later the child's
exit status. It ends when the control socket is closed; an instance ends when its own standard input
is. If it dies, its children go on, and the next request starts another.

``ForkServer`` is the side of the process that starts it.
"""

import asyncio
import contextlib
import os
import select
import signal
import socket
import sys
from collections import deque
from typing import NoReturn, Self

import msgspec

from tandem.core.config import child_environment
from tandem.core.errors import PeerLostError
from tandem.engine.process.libraries import import_libraries
from tandem.rpc import make_runtime_dir

__all__ = ["ForkServer", "ForkedProcess", "main"]

MODULE = "tandem.engine.process.fork_server"
MAX_PACKET_BYTES = 4096
CONTROL = 0
"""Descriptor of the control socket in the process, and of a child's settings in the child."""
UNKNOWN_STATUS = 255
"""Exit status of a child whose parent ended before it."""
ANSWER_TIMEOUT_S = 120.0
"""Seconds until a request is answered, imports included, which have taken half a minute on a cold,
busy disk."""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """Answer to a request: the child's process id, or why there is none."""

    pid: int = 0
    problem: str = ""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """News that a child has ended."""

    pid: int
    status: int
    """Exit status, or minus the number of the signal that ended the child."""


_decode = msgspec.json.Decoder(Forked | Ended).decode


class ForkedInput:
    """The writing end of a forked process's standard input; a ``ChildInput``."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def write(self, data: bytes) -> None:
        """Write bytes, buffering those that the process does not read yet."""
        self._writer.write(data)

    def close(self) -> None:
        """End the input. The socket stays, since it tells when the process has ended."""
        if not self._writer.is_closing():
            self._writer.write_eof()


class ForkedProcess:
    """A child of the fork server, as this process sees it.

    Args:
        pid: its process id.
        writer: writes to its standard input; owned.
        reader: reads from the same socket; it ends when the child has ended.
    """

    def __init__(
        self, pid: int, writer: asyncio.StreamWriter, reader: asyncio.StreamReader
    ) -> None:
        self.pid = pid
        self.stdin = ForkedInput(writer)
        self._writer = writer
        self._reader = reader
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def returncode(self) -> int | None:
        """Exit status; None while the process runs."""
        return self._status.result() if self._status.done() else None

    def note_end(self, status: int) -> None:
        """Set the exit status, and close the socket."""
        self._writer.close()
        if not self._status.done():
            self._status.set_result(status)

    async def note_closed_input(self) -> None:
        """Wait until the process has ended, without its parent, and set an unknown status."""
        with contextlib.suppress(OSError):
            while await self._reader.read(MAX_PACKET_BYTES):
                pass
        self.note_end(UNKNOWN_STATUS)

    async def wait(self) -> int:
        """Return the exit status once the process has ended."""
        return await asyncio.shield(self._status)

    def kill(self) -> None:
        """Send SIGKILL. Raises: ProcessLookupError (the process has ended)."""
        if self._status.done():
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """Starts the process, again if it has died, and asks it for children.

    An async context manager, used on one event loop; entering starts the process and does not wait
    for its imports. Its children are to have ended when it is left.
    """

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        """Connection to the process; None if there is no process."""
        self._starting = asyncio.Lock()
        self._answers: deque[asyncio.Future[int]] = deque()
        """Requests that the process has not answered, in their order."""
        self._children: dict[int, ForkedProcess] = {}
        self._early: dict[int, int] = {}
        """Exit statuses of children whose ``fork`` has not returned yet."""
        self._unwanted: set[int] = set()
        """Children whose ``fork`` was cancelled."""
        self._watches: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """Process id; None while there is no process."""
        return None if self._process is None else self._process.pid

    async def __aenter__(self) -> Self:
        # Some libraries fail to import where no folder can be written, with unclear errors.
        make_runtime_dir().rmdir()
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()
        for watch in self._watches:
            watch.cancel()

    async def _end(self) -> None:
        """End the process, which holds nothing, by force: while it imports it would not notice that
        the control socket is closed.
        """
        process, self._process = self._process, None
        self._lose()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _start(self) -> None:
        """Start the process, which then imports its libraries, unless it runs."""
        async with self._starting:
            if self._control is not None:
                return
            await self._end()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                try:
                    self._process = await asyncio.create_subprocess_exec(
                        sys.executable,
                        "-P",  # What lies in the folder from which it is started is no library.
                        "-m",
                        MODULE,
                        stdin=theirs.fileno(),
                        env=child_environment(
                            {
                                # torch's OpenMP threads spin at every barrier by default; beside
                                # any other load on the same cores that turns steps of milliseconds
                                # into seconds (measured: 25 ms to 110 ms and more for 64 decodes on
                                # two busy cores). OpenMP reads this at load, so only here.
                                "OMP_WAIT_POLICY": "PASSIVE",
                                # NumPy's BLAS starts its threads when it is imported.
                                "OPENBLAS_NUM_THREADS": "1",
                            }
                        ),
                        # Ctrl-C in a terminal is for the server, which drains and then ends its
                        # children.
                        start_new_session=True,
                    )
                except BaseException:
                    ours.close()
                    raise
            ours.setblocking(False)
            self._control = ours
            asyncio.get_running_loop().add_reader(ours, self._receive, ours)

    async def fork(self) -> ForkedProcess:
        """Fork an instance's process, which waits for its settings on standard input.

        Raises: PeerLostError (the process died, or cannot fork); OSError (it cannot be started).
        """
        await self._start()
        control = self._control
        assert control is not None
        ours, theirs = socket.socketpair()
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        try:
            with theirs:
                try:
                    socket.send_fds(control, [b"fork"], [theirs.fileno()])
                except OSError as error:
                    self._lose()
                    raise PeerLostError("engine.fork", f"the fork server died: {error}") from error
            self._answers.append(answer)
            try:
                pid = await asyncio.wait_for(asyncio.shield(answer), ANSWER_TIMEOUT_S)
            except TimeoutError:
                self._lose()
                what = f"the fork server did not answer in {ANSWER_TIMEOUT_S:g} s"
                raise PeerLostError("engine.fork", what) from None
        except BaseException:
            # The child, if there is one or will be, ends when it finds its input closed.
            answer.cancel()
            ours.close()
            raise
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        child = ForkedProcess(pid, writer, reader)
        if pid in self._early:
            child.note_end(self._early.pop(pid))
        else:
            if self._control is control:
                self._children[pid] = child
            else:
                self._watch(child)
        return child

    def _receive(self, control: socket.socket) -> None:
        """Take in what the process has sent."""
        while self._control is control:
            try:
                packet = control.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._lose()
                return
            message = _decode(packet)
            if isinstance(message, Forked):
                self._take_answer(message)
            elif (child := self._children.pop(message.pid, None)) is not None:
                child.note_end(message.status)
            elif message.pid in self._unwanted:
                self._unwanted.remove(message.pid)
            else:
                self._early[message.pid] = message.status

    def _take_answer(self, message: Forked) -> None:
        answer = self._answers.popleft()
        if answer.done():
            if message.pid:
                self._unwanted.add(message.pid)
            return
        if message.problem:
            answer.set_exception(PeerLostError("engine.fork", message.problem))
        else:
            answer.set_result(message.pid)

    def _lose(self) -> None:
        """Forget a process that has ended: requests fail, and children are watched from here."""
        control, self._control = self._control, None
        if control is None:
            return
        asyncio.get_running_loop().remove_reader(control)
        control.close()
        while self._answers:
            answer = self._answers.popleft()
            if not answer.done():
                answer.set_exception(PeerLostError("engine.fork", "the fork server died"))
        self._early.clear()
        self._unwanted.clear()
        for child in self._children.values():
            self._watch(child)
        self._children.clear()

    def _watch(self, child: ForkedProcess) -> None:
        task = asyncio.create_task(child.note_closed_input())
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)


# The functions below run in the process.


def main() -> int:
    """Run ``python -m tandem.engine.process.fork_server``; a child returns here as an instance.

    Returns the exit status.
    """
    # Ctrl-C in a terminal sends SIGINT to the whole process group. Ignore it here and in children:
    # the server drains first and then ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_libraries()
    from tandem.engine.process import instance

    _serve()
    return instance.main()


def _serve() -> None:
    """Fork a child for each request, and return in the child; does not return in the parent."""
    # The number of a signal is written to this socket, which wakes the selector below.
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _, __: None)
    control = socket.socket(fileno=CONTROL)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                woken.recv(MAX_PACKET_BYTES)
            _tell_ended(control)
        if control.fileno() in ready and _fork(control):
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            woken.close()
            wake.close()
            control.detach()
            return


def _fork(control: socket.socket) -> bool:
    """Take in a request; return True in the child that it asks for."""
    packet, descriptors, _, _ = socket.recv_fds(control, MAX_PACKET_BYTES, 1)
    if not packet:
        _leave()
    (descriptor,) = descriptors
    try:
        pid = os.fork()
    except OSError as error:
        os.close(descriptor)
        _send(control, Forked(problem=f"no process can be forked: {error}"))
        return False
    if pid:
        os.close(descriptor)
        _send(control, Forked(pid))
        return False
    os.setsid()
    os.dup2(descriptor, CONTROL)
    os.close(descriptor)
    sys.stdin = open(CONTROL, closefd=False)  # noqa: SIM115 - it stays open.
    return True


def _tell_ended(control: socket.socket) -> None:
    """Tell the exit statuses of the children that have ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _send(control, Ended(pid, os.waitstatus_to_exitcode(status)))


def _send(control: socket.socket, message: Forked | Ended) -> None:
    try:
        control.send(msgspec.json.encode(message))
    except OSError:
        _leave()


def _leave() -> NoReturn:
    """End the process: the one that started it is gone, or needs it no more."""
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
