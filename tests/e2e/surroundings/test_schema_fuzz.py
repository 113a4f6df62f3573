"""Bodies made from /openapi.json are answered as it says, by a server with keys and one without.

Method: schemathesis derives them, right ones and wrong ones, the same in every run, and checks each
answer's status, type and schema; ``schema_hooks.py`` has the two answers that it cannot foresee.
It is no requirement of ours: ``pip install schemathesis``, in any environment on the path.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAM = shutil.which("schemathesis")
HOOKS = Path(__file__).parent / "schema_hooks.py"
NUM_EXAMPLES = 100
TIMEOUT_S = 900


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 120)
@pytest.mark.skipif(PROGRAM is None, reason="no schemathesis on the path")
@pytest.mark.parametrize("has_keys", [False, True], ids=["open", "keys"])
def test_answers_are_as_the_document_says(serve_demo, tmp_path, has_keys):
    flags = ["--server.api-key", "k", "--server.admin-api-key", "a"] if has_keys else []
    headers = ["--header", "Authorization: Bearer a"] if has_keys else []
    with serve_demo(*flags, "--model.adapter-folder", str(tmp_path)) as server:
        run = subprocess.run(
            [str(PROGRAM), "run", f"{server.url}/openapi.json", *headers, "--checks", "all",
             "--generation-deterministic", "--max-examples", str(NUM_EXAMPLES), "--no-color"],
            cwd=tmp_path, env={**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS)},
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        report = run.stdout + run.stderr
        assert run.returncode == 0, report
        generated = re.search(r"(\d+) generated", report)
        assert generated is not None, report
        assert int(generated[1]) > 10 * NUM_EXAMPLES, report
        assert server.client.get("/ready").status_code == 200
