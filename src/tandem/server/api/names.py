"""The names under which clients may ask for the model.

Scripts name a model by the argument of ``serve``, by the last part of that, or not at all. There is
one model here, so every name that clearly means it is accepted; others are refused.
"""

import re
from dataclasses import dataclass
from pathlib import Path, PurePath

from tandem.core.errors import ConfigError, ConflictError

__all__ = ["ModelNames", "find_names"]


_ADAPTER_NAME = re.compile(r"[\w.:/@+-]{1,256}")


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names under which clients may ask for the model.

    Attributes:
        served: names listed by ``/v1/models``; the first is reported if a client names none.
        aliases: further names that are accepted, but not listed.
        root: folder of the model, reported to clients that load its tokenizer from there.
    """

    served: tuple[str, ...]
    aliases: frozenset[str]
    root: str

    @property
    def first(self) -> str:
        """The name that is reported by default."""
        return self.served[0]

    def find(self, name: str) -> str | None:
        """Return the name to report for the name that a client asked for; None if it is not the
        model's.
        """
        if name in self.served:
            return name
        trimmed = name.rstrip("/")
        is_ours = trimmed in self.aliases and (trimmed != "" or name == "")
        return self.first if is_ours else None

    def check_adapter_name(self, name: str) -> None:
        """Check that a name for an adapter is a word and does not mean the model itself.

        Raises: ConfigError (it is not a word of allowed characters); ConflictError (it names the
            model).
        """
        where, field = "server.name_adapter", "lora_name"
        if _ADAPTER_NAME.fullmatch(name) is None:
            what = f"{name[:100]!r} is no name: use up to 256 letters, digits and ._:/@+-"
            raise ConfigError(where, what, field=field)
        if self.find(name) is not None:
            raise ConflictError(where, f"{name!r} is the model itself: choose another", field=field)


def find_names(model: str, served: tuple[str, ...], folder: Path | None) -> ModelNames:
    """Return the names of a model.

    Args:
        model: the user's name for it: a folder or a hub id.
        served: names that the user chose; empty: the last part of ``model``.
        folder: folder of its files; None if there is none.
    """
    given = model.rstrip("/")
    aliases = {"", "default", given, PurePath(given).name}
    base = PurePath(given).name
    if folder is not None and Path(given).exists():
        # The resolved folder gives a better name than the given path if that is "." or a link.
        base = base or folder.resolve().name
        aliases |= {str(folder.absolute()), str(folder.resolve()), folder.resolve().name}
    elif folder is not None:
        aliases.add(str(folder.absolute()))
    root = str(folder.absolute()) if folder is not None else model
    return ModelNames(served or (base,), frozenset(aliases), root)
