"""A server of OpenAI's API that follows a script, and keeps what it was asked."""

import asyncio
import json
import threading
import time

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

START_S = 30.0


class Script:
    """A server whose answers are texts of one token an event, at fixed times after the request."""

    def __init__(self, *, tokens=5, first_s=0.0, gap_s=0.0, ending="[DONE]", status=200):
        self.tokens, self.first_s, self.gap_s = tokens, first_s, gap_s
        self.ending, self.status = ending, status
        self.bodies, self.running, self.most = [], 0, 0
        self.listed, self.answered = set(), set()
        """Connections, by the ports of their clients."""
        self.has_usage, self.tokens_per_event = True, 2
        routes = [
            Route("/v1/models", self.list_models),
            Route("/v1/completions", self.answer, methods=["POST"]),
            Route("/v1/chat/completions", self.answer, methods=["POST"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="error")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    async def list_models(self, request):
        self.listed.add(request.client.port)
        return JSONResponse({"data": [{"id": "scripted"}]})

    async def answer(self, request):
        self.answered.add(request.client.port)
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return JSONResponse({"error": {"message": "not now"}}, status_code=self.status)

        async def stream():
            self.running += 1
            self.most = max(self.most, self.running)
            begin = time.perf_counter()
            for i in range(self.tokens):
                due = begin + self.first_s + self.gap_s * i
                await asyncio.sleep(max(due - time.perf_counter(), 0))
                part = {"text": f"t{i} "} if "prompt" in body else {"delta": {"content": f"t{i} "}}
                yield f"data: {json.dumps({'choices': [{'index': 0, **part}]})}\n\n"
            if self.has_usage and (body.get("stream_options") or {}).get("include_usage"):
                details = {"cached_tokens": 7}
                usage = {
                    "prompt_tokens": 33,
                    "completion_tokens": self.tokens_per_event * self.tokens,
                }
                usage["prompt_tokens_details"] = details
                yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
            self.running -= 1
            if self.ending:
                yield f"data: {self.ending}\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    def __enter__(self):
        self.thread.start()
        deadline = time.monotonic() + START_S
        while not self.server.started:
            assert time.monotonic() < deadline, "the scripted server did not start"
            time.sleep(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(START_S)
