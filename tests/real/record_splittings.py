"""Write ``recorded_splittings.json``: how llama.cpp splits texts.

``record_splittings.py [FOLDER]``, of the library. For each name that a GGUF file may give its
splitting, a digest of the tokens that llama.cpp makes of the strings with the two vocabularies, and
of a few strings with the first; None: the library does not know the name.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from llama_cpp import Vocabulary, fetch_library
from odd_strings import draw_boundaries
from splittings_beside import NUM_FEW, digest, make_vocabularies, write_vocabulary

from tandem.models.tokenizing.splittings import SPLITTINGS

RECORDED = Path(__file__).with_name("recorded_splittings.json")


def list_names() -> list[str]:
    """Return the names of splittings whose tokens spell bytes."""
    return [name for name, rule in SPLITTINGS.items() if rule.form == "bytes"]


def record_splitting(library: Path, path: Path, name: str) -> dict[str, object] | None:
    """Return what llama.cpp makes of the strings; ``path`` is a file to write."""
    encodings, begins = [], []
    for number in range(len(make_vocabularies())):
        write_vocabulary(path, name, number)
        try:
            peer = Vocabulary(library, path)
        except ValueError:
            return None
        encodings += [peer.tokenize(text) for text in draw_boundaries()]
        begins.append(bool(peer.begin))
        peer.close()
    few = digest(encodings[:NUM_FEW])
    return {"begins": all(begins), "few": few, "tokens": digest(encodings)}


def record_splittings(library: Path) -> dict[str, dict[str, object] | None]:
    """Return what llama.cpp makes of the strings, by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "vocabulary.gguf")
        return {name: record_splitting(library, path, name) for name in list_names()}


if __name__ == "__main__":
    found = record_splittings(Path(sys.argv[1]) if len(sys.argv) > 1 else fetch_library())
    rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(each)}" for name, each in found.items())
    RECORDED.write_text(f"{{\n{rows}\n}}\n")
