"""Goal: an instance of a family that our operators run imports what serves it, and nothing more:
imports are most of a start.

Method: a process imports as an instance does, describes models of several families, and answers a
prompt with the demo model; then it tells what it has imported.
"""

import json
import subprocess
import sys
from pathlib import Path

from tandem.models.loading.hub import DEMO_FOLDER

TESTS = Path(__file__).parents[1]

HEAVY = (
    "pandas",
    "pyarrow",
    "scipy",
    "sklearn",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
)
"""What transformers and torch import for training, compilers and clusters; seconds of CPU time."""

PACKAGES = {
    "PIL",
    "anyio",
    "cython_runtime",
    "dill",
    "filelock",
    "h11",
    "httpcore2",
    "httpx2",
    "huggingface_hub",
    "idna",
    "jinja2",
    "markupsafe",
    "msgspec",
    "numpy",
    "packaging",
    "psutil",
    "regex",
    "safetensors",
    "sentencepiece",
    "sniffio",
    "tokenizers",
    "torch",
    "torchgen",
    "tqdm",
    "transformers",
    "truststore",
    "typing_extensions",
    "yaml",
    "zmq",
}
"""Installed packages that a served model may import. A new one costs each start: it belongs here
only if serving cannot do without it.
"""

FAMILIES = ("llama", "phi3", "gemma3_text", "glm4")

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
from tandem.engine.process.libraries import import_libraries
import_libraries()
from chat_engine import ChatEngine
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from tandem.models.deferred_imports import computing_shapes
from tandem.models.loading.skeleton import build_skeleton
from tandem.models.planning.describe import Describer
from tandem.models.planning.layers import list_layers

(answer,) = ChatEngine(sys.argv[2]).ask([1, 2, 3])
alone = [name for name in sys.modules if name.startswith("transformers.models.")]
with computing_shapes():
    for name in sys.argv[3:]:
        list_layers(Describer(build_skeleton(CONFIG_MAPPING[name]())))
print(json.dumps([len(answer), alone, [*sys.modules]]))
"""


def test_a_served_model_imports_no_more_than_it_needs():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(TESTS), str(DEMO_FOLDER), *FAMILIES],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    num_tokens, alone, modules = json.loads(done.stdout)
    assert num_tokens
    assert not set(HEAVY) & set(modules), "imported, though a served model uses none of it"
    families = {name.split(".")[2] for name in alone}
    assert families == {"auto", "qwen3_moe"}, "modelling code of other families is imported"
    packages = {name.partition(".")[0] for name in modules}
    ours = {"__main__", "tandem", "chat_engine", *sys.stdlib_module_names}
    installed = {name for name in packages - ours if not name.startswith("_")}
    assert installed <= PACKAGES, f"new: {sorted(installed - PACKAGES)}"
