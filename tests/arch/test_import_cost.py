"""What an import may drag in: `import tandem` neither torch nor the extension, the deciders no
torch, the command line none before it is needed."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "tandem._native._core")


LIGHT = {
    "tandem": HEAVY,
    "tandem.core.wire": HEAVY,
    "tandem.rpc": HEAVY,
    "tandem.placement": HEAVY,
    "tandem.engine.scheduling.scheduler": HEAVY,
    "tandem.server.config": HEAVY,
    "tandem.cli.main": HEAVY,
    "tandem.bench.harness": HEAVY,
    "tandem.transfer": HEAVY,
    "tandem.transfer.config": HEAVY,
    "tandem.store": HEAVY,
    "tandem.store.master.state.index": HEAVY,
    "tandem.sim": HEAVY,
    # The last one: it asks the native probe for cores.
    "tandem.engine.cluster.client": HEAVY[:2],
}


def test_imports_are_light():
    """One process imports one after the other: what one drags in is seen behind it."""
    code = (
        f"import importlib, sys\nfor module, forbidden in {LIGHT!r}.items():\n"
        "    importlib.import_module(module)\n"
        "    loaded = [m for m in forbidden if m in sys.modules]\n"
        "    assert not loaded, (module, loaded)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_the_list_of_commands_imports_none():
    """`tandem --help` is to cost hardly more than the parser's own program."""
    code = (
        "import sys; sys.argv = ['tandem', '--help']\n"
        "from tandem.cli.main import COMMANDS, main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "loaded = {e.path.partition(':')[0] for e in COMMANDS.values()} & sys.modules.keys()\n"
        "loaded |= {'msgspec', 'yaml', 'numpy', 'importlib.metadata'} & sys.modules.keys()\n"
        "print(loaded, file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "serve" in result.stdout
    assert result.stderr.strip() == "set()"


def test_a_wrong_name_is_told_before_torch_is_imported():
    """Each command in a child of one process that has imported what the commands have in common."""
    code = (
        "import os, sys\n"
        "from tandem.cli.main import main\n"
        "for command in ('plan', 'serve', 'chat'):\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        sys.argv = ['tandem', command, '/nowhere']\n"
        "        try: main()\n"
        "        except SystemExit as end: status = end.code\n"
        "        sys.stderr.flush()\n"
        f"        os._exit(9 if set({HEAVY!r}) & sys.modules.keys() else status)\n"
        "    print(command, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.splitlines() == ["plan 1", "serve 1", "chat 1"], result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 3
    assert all("no folder or GGUF file '/nowhere'" in line for line in lines), lines
