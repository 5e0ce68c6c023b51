"""The control server with real connections, of supervisors and of other programs."""

import json
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace

import pytest

from penstock.cluster.supervision import control_server
from penstock.cluster.supervision.control_protocol import (
    ChannelBroken,
    Ending,
    Failed,
    Message,
    MessageChannel,
    compute_proof,
    connect_to_server,
    read_failure,
)
from penstock.cluster.supervision.control_server import EVERYWHERE, ControlServer, advertise_address
from penstock.errors import RankError, RankFailed

FAILURE = Failed(rank=1, host="b", cause="no water", ending=Ending.FAILED, call=3, detail="at the pump")
STOP = {"kind": "stop", **asdict(FAILURE)}
DISMISS = {"kind": "dismiss"}


@contextmanager
def supervisors(server: ControlServer, *hosts: str) -> Iterator[list[MessageChannel]]:
    address = f"127.0.0.1:{server.port}"
    with server, ExitStack() as stack:
        channels = []
        for rank, host in enumerate(hosts):
            channels.append(connect_to_server(address, server.token, rank=rank, host=host, pid=os.getpid()))
            stack.callback(channels[-1].close)
        settle(server, lambda: len(server.arrived) == len(hosts))
        yield channels


def settle(server: ControlServer, condition: Callable[[], bool], limit: int = 100) -> None:
    for _ in range(limit):
        if condition():
            return
        server.wait_for_news(0.1)
    raise AssertionError("the server never came to it")


def heard(channel: MessageChannel) -> Message:
    (message,) = channel.receive()
    return message


def channel_pair() -> tuple[MessageChannel, MessageChannel]:
    first, second = socket.socketpair()
    return MessageChannel(first), MessageChannel(second)


def test_a_failure_survives_its_line() -> None:
    ours, theirs = channel_pair()
    failure = replace(FAILURE, host="å", cause="two\nlines")
    ours.send("failed", **asdict(failure))
    (message,) = theirs.receive()
    assert read_failure(message) == failure


@pytest.mark.parametrize("line", [b"", b"GET / HTTP/1.1", b"{}", b'{"rank": 1}', b"[1]", b"\xff"])
def test_an_invalid_message_breaks_the_channel(line: bytes) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(line + b"\n")
    with pytest.raises(ChannelBroken, match="Not a message"):
        MessageChannel(ours).receive()


def test_an_invalid_failure_breaks_the_channel() -> None:
    with pytest.raises(ChannelBroken, match="Not a failure"):
        read_failure({"kind": "failed", "rank": 1})


def test_messages_are_put_together_from_any_pieces() -> None:
    ours, theirs = socket.socketpair()
    channel = MessageChannel(ours)
    wait, gone = {"kind": "late", "rank": 1, "awaiting": "x" * 1000}, {"kind": "gone", "rank": 1}
    text = json.dumps(wait).encode() + b"\n" + json.dumps(gone).encode() + b"\n" + b'{"kind"'
    theirs.sendall(text[:100])
    assert channel.receive() == []
    theirs.sendall(text[100:])
    assert channel.receive() == [wait, gone]
    theirs.close()
    with pytest.raises(ChannelBroken, match="closed the connection"):
        channel.receive()
    with pytest.raises(ChannelBroken, match="while sending"):
        channel.send("dismiss")
    channel.close()
    with pytest.raises(ChannelBroken, match="while receiving"):
        channel.receive()


def test_a_line_without_end_is_cut() -> None:
    ours, theirs = socket.socketpair()
    channel = MessageChannel(ours)
    theirs.setblocking(False)  # noqa: FBT003 - the socket module's interface

    def babble() -> None:
        while True:
            try:
                theirs.send(b"x" * 65536)
            except BlockingIOError:
                channel.receive()

    with pytest.raises(ChannelBroken, match="sent a line of more than"):
        babble()
    channel.close()
    theirs.close()


def test_ranks_that_finish_are_dismissed_together() -> None:
    server = ControlServer(ranks=2)
    with supervisors(server, "a", "b") as (first, second):
        first.send("finished", rank=0, exit_code=5)
        settle(server, lambda: server.exit_codes == {0: 5})
        assert not server.is_over
        second.send("finished", rank=1, exit_code=0)
        assert heard(first) == heard(second) == DISMISS
        settle(server, lambda: server.is_over)
    assert server.failure is None
    assert server.exit_codes == {0: 5, 1: 0}


def test_the_first_failure_stops_all_and_stays_the_reason() -> None:
    server = ControlServer(ranks=3)
    with supervisors(server, "a", "b", "c") as channels:
        channels[1].send("failed", **asdict(FAILURE))
        assert [heard(channel) for channel in channels] == [STOP] * 3
        channels[0].send("failed", **asdict(Failed(rank=0, host="a", cause="interrupted by the stop")))
        for rank, channel in enumerate(channels):
            channel.send("gone", rank=rank)
        assert [heard(channel) for channel in channels] == [DISMISS] * 3
    assert server.failure == FAILURE


def test_a_line_that_ends_without_a_word_is_a_dead_rank() -> None:
    server = ControlServer(ranks=2)
    with supervisors(server, "a", "b") as (first, second):
        second.close()
        stop = heard(first)
    failure = read_failure(stop)
    assert (failure.rank, failure.host) == (1, "b")
    assert f"process {os.getpid()}" in failure.cause


def test_a_guard_may_hang_up_once_its_rank_has_finished() -> None:
    server = ControlServer(ranks=2)
    with supervisors(server, "a", "b") as (first, second):
        second.send("finished", rank=1, exit_code=0)
        settle(server, lambda: 1 in server.exit_codes)
        second.close()
        first.send("finished", rank=0, exit_code=0)
        assert heard(first) == DISMISS
    assert server.failure is None


def test_a_reason_from_outside_stops_all() -> None:
    server = ControlServer(ranks=1)
    with supervisors(server, "a") as (only,):
        server.stop(FAILURE)
        assert heard(only) == STOP


def test_a_rank_that_comes_after_the_end_is_stopped_at_once() -> None:
    server = ControlServer(ranks=2)
    with supervisors(server, "a") as (first,):
        first.send("failed", **asdict(FAILURE))
        assert heard(first) == STOP
        late = connect_to_server(f"127.0.0.1:{server.port}", server.token, rank=1, host="b", pid=1)
        assert heard(late) == STOP
        late.close()


def test_a_timeout_blames_who_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "MISSING_RANKS_S", 0.3)
    server = ControlServer(ranks=4)
    with supervisors(server, "a", "b", "c", "d") as channels:
        channels[3].send("late", rank=3, call=7, awaiting="a drink")
        channels[1].send("late", rank=1, call=6, awaiting="an earlier drink")
        channels[0].send(
            "failed", **asdict(Failed(rank=0, host="a", cause="Waited.", ending=Ending.TIMED_OUT, call=7))
        )
        stop = heard(channels[0])
    failure = read_failure(stop)
    assert (failure.rank, failure.host) == (1, "b")
    assert failure.cause == "it did not arrive, nor did rank 2. Rank 0 on a: Waited."


def test_a_timeout_with_everyone_there_blames_who_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "MISSING_RANKS_S", 0.1)
    server = ControlServer(ranks=1)
    failure = Failed(rank=0, host="a", cause="Waited.", ending=Ending.TIMED_OUT, call=1)
    with supervisors(server, "a") as (only,):
        only.send("failed", **asdict(failure))
        assert heard(only) == {"kind": "stop", **asdict(failure)}


def test_a_crowd_of_missing_ranks_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "MISSING_RANKS_S", 0.1)
    server = ControlServer(ranks=30)
    with supervisors(server, "a") as (only,):
        only.send(
            "failed", **asdict(Failed(rank=0, host="a", cause="Waited.", ending=Ending.TIMED_OUT, call=1))
        )
        stop = heard(only)
    failure = read_failure(stop)
    assert "rank 8, rank 9 and 20 more. Rank 0 on a: Waited." in failure.cause
    assert failure.host == "an unknown host"


def test_guards_that_never_get_rid_of_their_ranks_are_not_awaited_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_server, "GRACE_S", 0.1)
    monkeypatch.setattr(control_server, "KILL_S", 0.1)
    server = ControlServer(ranks=1)
    with supervisors(server, "a") as (only,):
        only.send("failed", **asdict(Failed(rank=0, host="a", cause="stuck in the kernel")))
        assert heard(only)["kind"] == "stop"
        assert heard(only) == DISMISS


def test_a_connection_without_proof_is_refused_without_effect() -> None:
    server = ControlServer(ranks=1)
    with supervisors(server, "a") as (only,):
        for token in ("wrong", server.token):
            with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stranger:
                channel = MessageChannel(stranger)
                (challenge,) = channel.receive()
                assert challenge["kind"] == "challenge"
                # With the right token a second rank 0 is a stranger all the same.
                proof = compute_proof(token, challenge["nonce"], 0)
                channel.send("hello", rank=0, host="x", pid=1, nonce="", proof=proof)
                with pytest.raises(ChannelBroken):
                    channel.receive()
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as scanner:
            scanner.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as eager:
            eager.sendall(b'{"kind": "finished", "rank": 0, "exit_code": 0}\n')
            assert MessageChannel(eager).receive()[0]["kind"] == "challenge"
        only.send("dismiss")
        only.send("finished", rank=0, exit_code=0)
        assert heard(only) == DISMISS
    assert server.failure is None


HELLO = {"kind": "hello", "rank": 0, "host": "x", "pid": 1, "nonce": "b", "proof": "a"}


@pytest.mark.parametrize(
    "sent",
    [
        json.dumps(HELLO | {"proof": 1}).encode(),
        json.dumps(HELLO | {"proof": "é"}, ensure_ascii=False).encode(),
        json.dumps(HELLO | {"proof": "\ud800"}).encode(),
        json.dumps(HELLO | {"rank": 10**4000}).encode(),
        json.dumps(HELLO).replace("0", "9" * 5000).encode(),
        b"[" * 60_000,
        b'{"kind":' * 4000,
        b"x" * 10_000,
    ],
)
def test_what_a_stranger_sends_neither_ends_nor_fills_the_server(sent: bytes) -> None:
    server = ControlServer(ranks=1)
    with supervisors(server, "a") as (only,):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stranger:
            stranger.sendall(sent + b"\n")
            with suppress(ConnectionResetError):
                while stranger.recv(4096):  # the challenge, then the end
                    pass
        only.send("finished", rank=0, exit_code=0)
        assert heard(only) == DISMISS


def test_connections_without_proof_are_few_and_end_soon(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control_server, "MORE_UNPROVED", 3)
    monkeypatch.setattr(control_server, "UNPROVED_S", 0.3)
    server = ControlServer(ranks=1)
    with supervisors(server, "a") as (only,), ExitStack() as stack:
        address = ("127.0.0.1", server.port)
        strangers = [stack.enter_context(socket.create_connection(address, timeout=5)) for _ in range(10)]
        for stranger in strangers:
            while stranger.recv(4096):
                pass
        only.send("finished", rank=0, exit_code=0)
        assert heard(only) == DISMISS
    assert len(caplog.records) == 1


def test_a_supervisor_without_a_server_names_the_addresses_that_it_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(RankError, match="Rank 3 cannot reach") as caught:
        connect_to_server(f"127.0.0.1,127.0.0.2:{port}", "token", rank=3, host="here", pid=1)
    assert "127.0.0.2: " in caught.value.what
    assert str(port) in caught.value.fix


def test_a_supervisor_that_reaches_another_server_accepts_no_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b'{"kind": "dismiss"}\n')

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RankError, match="Expected a challenge"):
            connect_to_server(f"127.0.0.1:{port}", "token", rank=0, host="here", pid=1)
        thread.join(timeout=10)


def test_a_server_that_does_not_know_the_token_ends_no_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            channel = MessageChannel(server.accept()[0])
            channel.send("challenge", nonce="chosen")
            (hello,) = channel.receive()
            # What it has seen is all that it can send back.
            channel.send("welcome", proof=hello["proof"])
            channel.send("stop", **asdict(FAILURE))
            channel.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RankError, match="did not prove"):
            connect_to_server(f"127.0.0.1:{port}", "token", rank=0, host="here", pid=1)
        thread.join(timeout=10)


def test_a_server_for_many_machines_is_reached_by_its_advertised_address() -> None:
    server = ControlServer(ranks=1, bind=EVERYWHERE)
    with server:
        address = advertise_address(server.port)
        assert address.endswith(f",127.0.0.1:{server.port}")
        channel = connect_to_server(address, server.token, rank=0, host="a", pid=1)
        settle(server, lambda: server.arrived == {0})
        channel.send("finished", rank=0, exit_code=0)
        assert heard(channel) == DISMISS
        channel.close()


def test_more_ranks_than_open_files_raise_the_soft_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        server = ControlServer(ranks=300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(556, hard)
        server.close_copy()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_failure_becomes_an_error_that_names_the_rank() -> None:
    error = FAILURE.error()
    assert isinstance(error, RankFailed)
    assert str(error) == "Rank 1 on b failed: no water"
    assert error.__notes__ == ["at the pump"]
