"""Files and batches by OpenAI's client: what is answered, what fails, and what a restart keeps.

Method: real servers over the fake engine.
"""

import concurrent.futures
import contextlib
import io
import json
import os
import subprocess

import openai
import pytest
import requests
from fake_engine import FakeEngine, make_info
from serving import WAIT_S, LiveServers, wait_until
from vocabularies import make_byte_level_tokenizer

from tandem.core.errors import CapacityError, ConflictError, NotFoundError
from tandem.core.wire import NO_SLO
from tandem.server.batches.store import BatchStore, KeptBatch, Upload
from tandem.server.protocol.batches import Batch, BatchError, BatchErrors

CHAT = "/v1/chat/completions"
OVER = {"completed", "failed", "cancelled", "expired"}


def make_line(number, url=CHAT, **body):
    content = {"messages": [{"role": "user", "content": f"hello {number}"}], "max_tokens": 3}
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": content | body}


@pytest.fixture
def engine():
    return FakeEngine(info=make_info(320))


@pytest.fixture
def servers():
    with LiveServers(make_byte_level_tokenizer()) as servers:
        yield servers


@pytest.fixture
def connect():
    """Connect clients to servers; their connections are closed at the end."""
    with contextlib.ExitStack() as stack:

        def connect(live, key="none"):
            client = Client(live, key)
            stack.enter_context(client.api)
            return client

        yield connect


class Client:
    """OpenAI's client and what tests do with it."""

    def __init__(self, live, key="none"):
        self.api = openai.OpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0)

    def begin(self, lines, **options):
        text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
        file = self.api.files.create(file=("in.jsonl", io.BytesIO(text.encode())), purpose="batch")
        options = {"endpoint": CHAT, "completion_window": "24h"} | options
        return self.api.batches.create(input_file_id=file.id, **options)

    def end(self, batch):
        wait_until(lambda: self.api.batches.retrieve(batch.id).status in OVER)
        return self.api.batches.retrieve(batch.id)

    def read(self, file_id):
        return [json.loads(line) for line in self.api.files.content(file_id).text.splitlines()]


def test_a_batch_is_answered(servers, engine, connect):
    live = servers.start(engine, slo=("ttft_ms=0.001",))
    client = connect(live)
    lines = [make_line(number) for number in range(40)]
    lines[7]["body"]["max_tokens"] = -1
    lines[9]["body"]["priority"] = -5
    batch = client.begin(lines, metadata={"job": "nightly"})
    assert batch.status in ("validating", "in_progress")
    batch = client.end(batch)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (40, 39, 1)
    assert batch.metadata == {"job": "nightly"}
    answers = {each["custom_id"]: each for each in client.read(batch.output_file_id)}
    assert set(answers) == {f"r{n}" for n in range(40)} - {"r7"}
    body = answers["r3"]["response"]["body"]
    assert answers["r3"]["response"]["status_code"] == 200
    assert body["usage"]["completion_tokens"] == 3
    [refused] = client.read(batch.error_file_id)
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("r7", 400)
    assert refused["response"]["body"]["error"]["param"] == "max_tokens"
    # Nobody's request is served after those of a batch, whatever their bodies say.
    assert {request.priority for request in engine.requests} == {2**31 - 1}
    assert {request.client for request in engine.requests} == {"batches"}
    assert [each.id for each in client.api.batches.list()] == [batch.id]
    # Nobody waits for them: they have no objectives, and no part in how these are kept.
    assert {request.slo for request in engine.requests} == {NO_SLO}
    assert "outcome=" not in live.get("/metrics").text


def test_a_full_queue_is_asked_again(servers, engine, connect):
    engine.max_running = 1
    client = connect(servers.start(engine, batch_width=2))
    batch = client.end(client.begin([make_line(n) for n in range(4)]))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (4, 0)


def test_embeddings_and_completions(servers, engine, connect):
    client = connect(servers.start(engine))
    for url, body in (("/v1/embeddings", {"input": "a"}), ("/v1/completions", {"prompt": "a"})):
        line = {"custom_id": "x", "method": "POST", "url": url, "body": body}
        batch = client.end(client.begin([line], endpoint=url))
        assert batch.request_counts.completed == 1, client.read(batch.error_file_id)


def test_wrong_input_fails_as_a_whole(servers, engine, connect):
    client = connect(servers.start(engine, max_body_bytes=4096))
    for lines, code, line in (
        ([], "empty_file", None),
        ([make_line(1), "{\n"], "invalid_json_line", 2),
        ([make_line(1), make_line(1)], "duplicate_custom_id", 2),
        ([make_line(1, url="/v1/embeddings")], "invalid_url", 1),
        ([make_line(1, stream=True)], "invalid_request", 1),
        ([make_line("x" * 5000)], "line_too_long", 1),
        (
            [f'{{"custom_id": "a", "url": "{CHAT}", "body": {{"a": {"[" * 2000}}}}}\n'],
            "invalid_json_line",
            1,
        ),
    ):
        batch = client.end(client.begin(lines))
        assert batch.status == "failed", code
        assert [(error.code, error.line) for error in batch.errors.data] == [(code, line)]
        assert engine.requests == []
    wide = make_line(1) | {"custom_id": "\U000e0001" * 100}
    text = json.dumps(wide, ensure_ascii=False)
    batch = client.end(client.begin([text + "\n"] * 99))
    assert {error.code for error in batch.errors.data} == {"duplicate_custom_id"}
    assert max(len(error.message) for error in batch.errors.data) <= 300


def test_a_line_that_no_endpoint_takes_fails_alone(servers, engine, connect):
    """Whatever its body holds: the others of its batch are answered."""
    client = connect(servers.start(engine))
    values = ["[" * depth + "]" * depth for depth in (500, 900, 960)]
    values += ["9" * 5000, "1e999", "[" + "{}," * 2**18 + "1]"]
    no_json = ["NaN", "nonsense", '"\\ud800"']
    lines = [make_line(number) for number in range(2)]
    template = '{"custom_id": "%s", "method": "POST", "url": "%s", "body": {"seed": %s}}\n'
    odd = [template % (f"odd{i}", CHAT, value) for i, value in enumerate(values)]
    batch = client.end(client.begin([*lines, *odd]))
    assert batch.status == "completed", batch.errors
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, len(odd))
    statuses = {each["response"]["status_code"] for each in client.read(batch.error_file_id)}
    assert statuses == {400}
    for value in no_json:
        batch = client.end(client.begin([template % ("a", CHAT, value)]))
        assert [error.code for error in batch.errors.data] == ["invalid_json_line"], value


def test_cancel_keeps_what_is_answered(servers, engine, connect):
    client = connect(servers.start(engine, batch_width=2))
    engine.pause_at = 0
    batch = client.begin([make_line(n) for n in range(6)])
    wait_until(lambda: engine.num_held == 2)
    with pytest.raises(openai.ConflictError, match="cancel it first"):
        client.api.files.delete(batch.input_file_id)
    client.api.batches.cancel(batch.id)
    batch = client.end(batch)
    assert batch.status == "cancelled"
    assert batch.request_counts.completed == 0
    wait_until(lambda: engine.num_held == 0)
    assert client.api.files.delete(batch.input_file_id).deleted
    engine.pause_at = None
    assert client.end(client.begin([make_line(1)])).status == "completed"


def test_what_is_late_expires(servers, engine, connect, monkeypatch):
    from tandem.server.batches import worker

    client = connect(servers.start(engine, batch_width=2))
    engine.pause_at = 0
    batch = client.begin([make_line(n) for n in range(5)], completion_window="1m")
    wait_until(lambda: engine.num_held == 2)
    monkeypatch.setattr(worker, "now_s", lambda: batch.expires_at)
    engine.pause_at = None
    batch = client.end(batch)
    assert batch.status == "expired"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 3)
    errors = client.read(batch.error_file_id)
    assert {error["error"]["code"] for error in errors} == {"batch_expired"}


def test_a_restart_goes_on(tmp_path, engine, connect):
    tokenizer = make_byte_level_tokenizer()
    lines = [make_line(number) for number in range(10)]
    with LiveServers(tokenizer) as servers:
        live = servers.start(engine, batch_folder=str(tmp_path), batch_width=1)
        client = connect(live)
        engine.step_s = 0.02
        batch = client.begin(lines)
        wait_until(lambda: client.api.batches.retrieve(batch.id).request_counts.completed >= 3)
    batch_file = json.loads((tmp_path / "batches" / f"{batch.id}.json").read_text())["batch"]
    output = tmp_path / "files" / batch_file["output_file_id"]
    num_answered = output.read_bytes().count(b"\n")
    assert 3 <= num_answered < 10
    # The machine went down in the middle of a line.
    with output.open("ab") as file:
        file.write(b'{"custom_id": "r')
    again = FakeEngine(info=make_info(320))
    with LiveServers(tokenizer) as servers:
        client = connect(servers.start(again, batch_folder=str(tmp_path)))
        batch = client.end(batch)
        assert batch.status == "completed"
        assert batch.request_counts.completed == 10
        answers = client.read(batch.output_file_id)
        assert sorted(each["custom_id"] for each in answers) == [f"r{n}" for n in range(10)]
    assert len(again.requests) == 10 - num_answered


def test_files_are_their_keys_alone_and_bounded(servers, engine, connect):
    live = servers.start(engine, api_key=("one", "two"), batch_bytes=28_000)
    one, two = (connect(live, key).api for key in ("one", "two"))
    file = one.files.create(file=("a.jsonl", io.BytesIO(b"x" * 15_000)), purpose="batch")
    assert (file.bytes, file.filename) == (15_000, "a.jsonl")
    assert [each.id for each in one.files.list()] == [file.id]
    assert [*two.files.list()] == []
    for call in (two.files.retrieve, two.files.delete, two.files.content):
        with pytest.raises(openai.NotFoundError):
            call(file.id)
    with pytest.raises(openai.NotFoundError):
        two.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.InternalServerError, match=r"server\.batch_bytes"):
        one.files.create(file=("b", io.BytesIO(b"x" * 6_000)), purpose="batch")
    with pytest.raises(openai.APIStatusError) as large:
        one.files.create(file=("b", io.BytesIO(b"x" * 200_000)), purpose="batch")
    assert large.value.status_code == 413
    one.files.delete(file.id)
    assert one.files.create(file=("b", io.BytesIO(b"x" * 6_000)), purpose="batch").bytes == 6_000
    wrong = requests.post(
        f"{live.url}/v1/files", data=b"x", headers={"Authorization": "Bearer one"}, timeout=20
    )
    assert wrong.status_code == 400


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 128 KiB; a page is 4 KiB, so that a file takes at least one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small disk needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder):
    """Fill a disk; return the file to remove again."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as out, contextlib.suppress(OSError):
        while out.write(b"x" * 512):
            pass
    return filler


def test_a_full_disk_is_told_and_costs_nothing_else(small_disk, engine, connect):
    """Neither an upload nor a batch that finds no room leaves anything; later ones are served."""
    with LiveServers(make_byte_level_tokenizer()) as servers:
        live = servers.start(engine, batch_folder=str(small_disk))
        client = connect(live)
        filler = fill(small_disk)
        before = sorted(path.name for path in small_disk.rglob("*"))
        for size in (10, 100_000):
            with pytest.raises(openai.InternalServerError, match="the disk is full") as refused:
                client.api.files.create(file=("b", io.BytesIO(b"x" * size)), purpose="batch")
            assert refused.value.status_code == 503
        assert [*client.api.files.list()] == []
        assert sorted(path.name for path in small_disk.rglob("*")) == before
        filler.unlink()
        # The input is kept, the batch finds no room for what is known of it.
        text = json.dumps(make_line(1)) + "\n"
        file = client.api.files.create(file=("a", io.BytesIO(text.encode())), purpose="batch")
        filler = fill(small_disk)
        options = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        with pytest.raises(openai.InternalServerError, match="the disk is full"):
            client.api.batches.create(**options)
        assert [*client.api.batches.list()] == []
        filler.unlink()
        assert client.end(client.api.batches.create(**options)).status == "completed"


def test_a_batch_whose_answers_fill_the_disk_fails_by_name(small_disk, engine, connect):
    """Whole lines stay, the rest fails as ``storage_full``; the worker goes on, a restart too."""
    lines = [make_line(number, max_tokens=60, logprobs=True) for number in range(30)]
    with LiveServers(make_byte_level_tokenizer()) as servers:
        live = servers.start(engine, batch_folder=str(small_disk), batch_width=1)
        client = connect(live)
        batch = client.end(client.begin(lines))
        assert batch.status == "failed"
        assert [error.code for error in batch.errors.data] == ["storage_full"]
        answers = client.read(batch.output_file_id)
        assert [each["custom_id"] for each in answers] == [f"r{n}" for n in range(len(answers))]
        assert 0 < batch.request_counts.completed == len(answers) < 30
        output = small_disk / "files" / batch.output_file_id
        assert client.api.files.retrieve(output.name).bytes == output.stat().st_size
        client.api.files.delete(batch.output_file_id)
        assert client.end(client.begin([make_line(1)])).status == "completed"
    with LiveServers(make_byte_level_tokenizer()) as servers:
        client = connect(servers.start(engine, batch_folder=str(small_disk)))
        assert client.end(client.begin([make_line(2)])).status == "completed"
        # Its end found no room, so that it was begun again; its answers are gone.
        again = client.api.batches.retrieve(batch.id)
        assert again.status == "failed"
        assert again.errors.data[0].code in ("storage_full", "file_deleted")


def test_what_a_crash_left_of_an_upload_is_removed(tmp_path):
    """A content without a description, and a draft that did not replace one."""
    store = BatchStore(tmp_path, 10_000)
    kept = store.add_file("ann", "a", "batch", io.BytesIO(b"abc"), 0)
    (tmp_path / "files" / "file-lost").write_bytes(b"x" * 100)
    (tmp_path / "files" / "file-lost.new").write_bytes(b"{")
    again = BatchStore(tmp_path, 10_000)
    assert [file.id for file in again.list_files("ann")] == [kept.id]
    names = {path.name for path in (tmp_path / "files").iterdir()}
    assert names == {kept.id, f"{kept.id}.json"}


def test_all_that_clients_make_the_server_keep_counts(tmp_path):
    """Records and uploads in progress too; what has ended is deleted by its owner or its age."""
    store = BatchStore(tmp_path, 50_000)

    def measure_disk():
        return sum(each.stat().st_blocks * 512 for each in tmp_path.rglob("*") if each.is_file())

    def make_batch(number, **more):
        metadata = {f"{i}": "x" * 500 for i in range(16)}
        times = {"created_at": number, "expires_at": 0} | more
        batch = Batch(id=f"b{number}", endpoint=CHAT, input_file_id="i", completion_window="1m",
                      metadata=metadata, **times)  # fmt: skip
        return KeptBatch("ann", batch)

    def add_batch(number, **times):
        store.put_batch(make_batch(number, **times))

    for number in range(4):
        add_batch(number, status="completed", completed_at=number)
    with pytest.raises(CapacityError, match="50000 bytes"):
        add_batch(4)
    with Upload(store) as room:
        room.add(500)
        with pytest.raises(CapacityError):
            room.add(4000)
    store.delete_batch("ann", "b3")
    with Upload(store) as room:
        for _ in range(6):
            room.add(1000)
        file = store.add_file("ann", "a", "batch", io.BytesIO(b"x" * 4096), 2, room)
    assert measure_disk() <= store._num_bytes <= 50_000
    with pytest.raises(CapacityError):
        add_batch(5)
    store.delete_old(2)
    assert [each.batch.id for each in store.list_batches()] == ["b2"]
    store.delete_old(3)
    assert store.list_batches() == []
    assert store.list_files("ann") == []
    assert file.bytes == 4096
    assert store._num_bytes == measure_disk() == 0
    add_batch(6)
    with pytest.raises(ConflictError, match="cancel it first"):
        store.delete_batch("ann", "b6")
    with pytest.raises(NotFoundError):
        store.delete_batch("bob", "b6")
    assert BatchStore(tmp_path, 50_000)._num_bytes == store._num_bytes
    # A known batch ends though there is no room; what its errors cite counts.
    add_batch(7)
    files = []
    with pytest.raises(CapacityError):
        while True:
            files.append(store.add_file("ann", "a", "batch", None, 6))
    ended = make_batch(7, status="failed", failed_at=8)
    ended.batch.errors = BatchErrors(data=[BatchError(code="x", message="m" * 300)])
    store.put_batch(ended)
    ended.batch.errors.data *= 99
    with pytest.raises(CapacityError):
        store.put_batch(ended)
    # Small outputs take a block, and lines fill it.
    for each in files:
        store.delete_file("ann", each.id)
    before = store._num_bytes
    output = store.add_file("ann", "a", "batch_output", None, 6)
    for _ in range(9):
        store.append(output.id, b"x" * 999 + b"\n")
    assert measure_disk() <= store._num_bytes
    with (tmp_path / "files" / output.id).open("ab") as content:
        content.write(b"y" * 100)
    store.repair(output.id)
    assert store.find_file("ann", output.id).bytes == 9000
    assert len([*store.read_lines(output.id)]) == 9
    store.delete_file("ann", output.id)
    assert store._num_bytes == before


def test_the_loop_does_not_wait_for_the_store(servers, engine, connect):
    """The store writes to a disk under its lock, which may take seconds."""
    live = servers.start(engine)
    client = connect(live)
    batch = client.end(client.begin([make_line(1)]))
    file, context = batch.output_file_id, live.app.state.context
    store, tasks = context.batches.store, live.running._server.server_state.tasks
    form = {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch"}}
    new = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    asked = [
        *(("GET", f"/v1/files/{file}", {}), ("GET", f"/v1/files/{file}/content", {})),
        *(("GET", "/v1/files", {}), ("POST", "/v1/files", form), ("GET", "/v1/batches", {})),
        *(("GET", f"/v1/batches/{batch.id}", {}), ("POST", f"/v1/batches/{batch.id}/cancel", {})),
        *(("POST", "/v1/batches", {"json": new}), ("DELETE", f"/v1/batches/{batch.id}", {})),
    ]
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        with store._lock:
            replies = [
                pool.submit(requests.request, method, live.url + path, timeout=WAIT_S, **options)
                for method, path, options in asked
            ]
            wait_until(lambda: len(tasks) == len(asked))
            assert live.get("/live").status_code == 200
            assert not any(reply.done() for reply in replies)
        for reply in replies:
            assert reply.result(WAIT_S).status_code < 500, reply.result().text
    assert store.find_path(file).exists()


def test_a_page_begins_after_an_id_that_there_is(servers, engine, connect):
    client = connect(servers.start(engine))
    batches = [client.end(client.begin([make_line(n)])) for n in range(3)]
    ids = [each.id for each in client.api.batches.list()]
    assert sorted(ids) == sorted(each.id for each in batches)
    assert [each.id for each in client.api.batches.list(limit=2, after=ids[0])] == ids[1:]
    files = client.api.files.list(limit=2)
    assert (len(files.data), files.has_more) == (2, True)
    for listing in (client.api.batches.list, client.api.files.list):
        with pytest.raises(openai.NotFoundError, match="unknown"):
            listing(after="unknown")
    live_url = str(client.api.base_url)
    assert requests.delete(f"{live_url}batches/{ids[0]}", timeout=20).json()["deleted"]
    assert [each.id for each in client.api.batches.list()] == ids[1:]
    with pytest.raises(openai.BadRequestError, match="metadata"):
        client.begin([make_line(1)], metadata={"a": "x" * 600})


def test_a_form_is_in_utf8_and_a_page_has_a_number(servers, monkeypatch):
    """Codecs such as punycode take time in the square of the length, on the event loop."""
    live = servers.start()
    body = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch-\xff\r\n--b--\r\n'
    for length in (900, 200_000):
        kind = "multipart/form-data; boundary=b" + ";" * length
        reply = live.post("/v1/files", data=body, headers={"Content-Type": kind})
        # The parser takes the square of the length for some: none so long is given to it.
        is_long = "characters" in reply.json()["error"]["message"]
        assert (reply.status_code, is_long) == (400, length > 1000)
    for charset in ("punycode", "idna", "utf-7", "x" * 500, "zlib_codec"):
        kind = f"multipart/form-data; boundary=b; charset={charset}"
        reply = live.post("/v1/files", data=body, headers={"Content-Type": kind})
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == "charset"
    for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data"):
        reply = live.post("/v1/files", data=body, headers={"Content-Type": kind})
        assert reply.status_code == 400, reply.text
    for limit in ("9" * 5000, "0", "-1", "101", "\u0661" * 4000, ""):
        reply = live.get("/v1/batches", params={"limit": limit})
        assert reply.json()["error"]["param"] == "limit"
