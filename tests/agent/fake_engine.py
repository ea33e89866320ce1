"""An engine that misbehaves on request: `fake_engine.py MODE --listen HOST:PORT --model NAME`.

ok              loads for a moment, then serves
missing-library says what the loader says, 127
bad-flag        says what argparse says, 2
slow            loads for long, and tells that it gets on
silent          prints nothing and never opens its port
repeats         prints the same line for ever and never opens its port
crash           serves, and dies of SIGSEGV when asked for /crash
exit0           serves, and ends orderly when asked for /crash
ignores-term    serves, and does not care for SIGTERM
children        has a child in the session and one outside it, then serves
floods          serves, and fills its log
hangs           serves one request, then /health only
no-canary       healthy, and cannot serve
drains          tells that a request is running, until SIGUSR1
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time

mode = sys.argv[1]
if "--help" in sys.argv:
    sys.exit(0)
arguments = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=False))
host, _, port = arguments["--listen"].rpartition(":")
key = ""
if "--api-key-file" in arguments:
    with open(arguments["--api-key-file"]) as file:
        key = file.read().strip()
counts = {"served": 0, "running": int(mode == "drains")}


def say(text: str) -> None:
    print(text, flush=True)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, body: object) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(200, "")
        elif self.path == "/metrics":
            page = f"vllm:num_requests_running {counts['running']}\nvllm:num_requests_waiting 0\nvllm:generation_tokens_total {counts['served']}\n"
            self.answer(200, page + 'vllm:cache_config_info{block_size="16",num_gpu_blocks="512"} 1\n')
        elif self.path == "/crash":
            if mode == "exit0":
                say("EngineCore encountered a fatal error.")
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSEGV)
        elif self.path == "/v1/models":
            if key and self.headers["authorization"] != f"Bearer {key}":
                return self.answer(401, {"error": "Unauthorized"})
            self.answer(200, {"data": [{"id": arguments["--model"], "max_model_len": 4096}]})
        return None

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if key and self.headers["authorization"] != f"Bearer {key}":
            return self.answer(401, {"error": "Unauthorized"})
        if mode == "no-canary":
            return self.answer(500, {"error": {"message": "CUDA error: no kernel image"}})
        if mode == "hangs" and counts["served"]:
            time.sleep(600)
        counts["served"] += 1
        return self.answer(200, {"choices": [{"text": "x"}], "usage": {"completion_tokens": 1}})

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    if mode == "missing-library":
        say(
            f"{sys.argv[0]}: error while loading shared libraries: libgomp.so.1: cannot open shared object file: No such file"
        )
        sys.exit(127)
    if mode == "bad-flag":
        say("vllm: error: unrecognized arguments: --frobnicate")
        sys.exit(2)
    if mode == "silent":
        time.sleep(600)
    if mode == "repeats":
        for n in range(6000):
            say(f"Waiting for 1 local, 0 remote core engine proc(s) to start. {n}")
            time.sleep(0.1)
    if mode == "ignores-term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "drains":

        def idle(*_: object) -> None:
            counts["running"] = 0

        signal.signal(signal.SIGUSR1, idle)
    if mode == "children":
        inside = subprocess.Popen(["sleep", "600"])
        outside = subprocess.Popen(["sleep", "600"], start_new_session=True)
        say(f"children {inside.pid} {outside.pid}")
    if mode == "slow":
        for phase in ("Initializing a V1 LLM engine", "Starting to load model", "Loading weights took 1 seconds"):
            say(phase)
            time.sleep(0.8)
    if mode == "floods":

        def flood() -> None:
            while True:
                say("x" * 1000)
                time.sleep(0.0005)

        threading.Thread(target=flood, daemon=True).start()
    server = http.server.ThreadingHTTPServer((host, int(port)), Handler)
    say(f"listening on {host}:{port}")
    server.serve_forever()


if __name__ == "__main__":
    main()
