"""The LoRA adapters of an instance: loaded into the model, known to the engine, freed when unused.

The engine counts the live requests of each adapter, and the model holds the weights; this module
keeps the two consistent. Adapter files are read without holding the lock, because reading is slow
and steps of the model must not wait for it.
"""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tandem.core.adapter import AdapterInfo, AdapterSource
from tandem.core.errors import NotFoundError, TandemError
from tandem.core.spec import KvIdentity
from tandem.engine.engine import Engine
from tandem.models.adapters import ModelAdapters

__all__ = ["AdapterTable"]

logger = logging.getLogger(__name__)


class AdapterTable:
    """The LoRA adapters of one engine. Methods may be called on any thread.

    Args:
        model: holds the weights; owned.
        engine: the engine; not owned.
        identity: identity of the model's KV without adapter.
        folder: folder from which adapters may be loaded while serving; None: anywhere.
    """

    def __init__(
        self, model: ModelAdapters, engine: Engine, identity: KvIdentity, folder: Path | None
    ) -> None:
        self._model = model
        self._engine = engine
        self._identity = identity
        self._folder = folder
        self._lock = threading.Lock()
        """Lock of this table of an instance's adapters; a thread that needs the engine's lock too
        takes this one first.
        """
        engine.on_adapter_unused = self._free

    def load_first(
        self, sources: Sequence[AdapterSource]
    ) -> tuple[list[AdapterInfo], dict[str, str]]:
        """Load an instance's first adapters, before its first step; return the loaded ones, and
        errors by name of the others.
        """
        loaded: list[AdapterInfo] = []
        failures: dict[str, str] = {}
        for source in sources:
            try:
                info = self.load(source)
                self._model.place(info.digest)
                loaded.append(info)
            except TandemError as error:
                logger.exception("event=adapter_refused name=%r", source.name)
                failures[source.name] = error.what
        return loaded, failures

    def load(self, source: AdapterSource, *, is_confined: bool = False) -> AdapterInfo:
        """Load an adapter, unless it is loaded already.

        Args:
            source: name and location of the adapter.
            is_confined: if True, it must lie in ``folder``.

        Raises: errors of ``ModelAdapters.read`` and ``install``.
        """
        within = self._folder if is_confined else None
        files = self._model.read(Path(source.folder), digest=source.digest, within=within)
        identity = msgspec.structs.replace(self._identity, adapter=files.digest)
        with self._lock:
            loaded = self._model.install(files)
            self._engine.add_adapter(files.digest, identity.digest)
        logger.info("event=adapter_loaded name=%r digest=%s", source.name, files.digest)
        return AdapterInfo(
            name=source.name,
            folder=source.folder,
            digest=files.digest,
            system_fingerprint=identity.system_fingerprint,
            rank=loaded.rank,
            num_modules=loaded.num_modules,
            size_bytes=loaded.size_bytes,
        )

    def unload(self, digest: str) -> None:
        """Refuse further requests for the adapter with this digest, and free it when the last one
        has ended.

        Raises: NotFoundError (no adapter with this digest is loaded).
        """
        if not self._engine.remove_adapter(digest):
            raise NotFoundError("engine.unload_adapter", f"no adapter {digest[:12]} is loaded")
        logger.info("event=adapter_unloaded digest=%s", digest)
        self._free(digest)

    def _free(self, digest: str) -> None:
        with self._lock:
            # Uninstall the adapter only if the engine forgets it: it may have been loaded again
            # meanwhile.
            if self._engine.forget_adapter(digest):
                self._model.uninstall(digest)
