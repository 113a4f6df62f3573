"""The gate for models that transformers' own modules run: conditions on folder and
configuration.
"""

from pathlib import Path
from typing import Any

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.core.spec import DTYPE_BYTES, ModelSpec
from tandem.models.families.gate import Checkpoint, list_ends, read_json
from tandem.models.loading.hub import resolve_folder
from tandem.models.sources.foreign import refuse_foreign_files

__all__ = ["find_class", "open_own"]

WHERE = "models.open_own"
LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "n_ctx",
    "context_length",
    "max_target_positions",
    "model_max_length",
)
UNBOUNDED_CONTEXT = 32768
"""Context length in tokens that is assumed for a model class that states none."""


def open_own(path_or_id: str | Path) -> Checkpoint:
    """Read the configuration of a checkpoint that transformers' own modules will run.

    Python code in the folder is never run.

    Raises:
        NotFoundError, CorruptionError: as for ``open_checkpoint``.
        ConfigError: transformers refuses the configuration.
        UnsupportedError: transformers has no class for it that generates text; or weights are
            quantized.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    folder = resolve_folder(path_or_id)
    refuse_foreign_files(folder)
    if not folder.is_dir() or not (folder / "config.json").is_file():
        what = f"{folder} is no folder with config.json and safetensors"
        raise UnsupportedError(WHERE, what)
    raw = read_json(folder / "config.json")
    model_type = raw.get("model_type")
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(model_type))
    listed = raw.get("architectures")
    if known is None and model_type in CONFIG_MAPPING and isinstance(listed, list):
        # The decoder of a model that takes images may have a model_type that transformers maps to
        # no text class; then its class is taken from `architectures`.
        known = next((n for n in listed if n in _list_classes()), None)
    if known is None or not isinstance(model_type, str):
        what = f"transformers has no class that generates text for model_type {model_type!r}"
        raise UnsupportedError(WHERE, what, field="model_type")
    names = [known] if isinstance(known, str) else list(known)
    if not set(listed or names) <= set(names):
        what = f"architectures {listed}: only {', '.join(names)} generates text alone"
        raise UnsupportedError(WHERE, what, field="architectures")
    if raw.get("quantization_config"):
        what = "its weights are in codes, which only operators read"
        raise UnsupportedError(WHERE, what, field="quantization_config")
    try:
        config: Any = CONFIG_MAPPING[model_type].from_pretrained(folder, local_files_only=True)
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise ConfigError(WHERE, f"config.json is not valid: {text}") from error
    is_local = Path(path_or_id).expanduser().exists()
    name = folder.resolve().name if is_local else str(path_or_id)
    spec = _make_spec(name, config, names[0], list_ends(folder))
    return Checkpoint(folder, config, spec)


def find_class(config: Any) -> Any:
    """Return transformers' class that generates text for a configuration of ``open_own``."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if known is None:
        known = next(n for n in config.architectures if n in _list_classes())
    return getattr(transformers, known if isinstance(known, str) else known[0])


def _list_classes() -> set[str]:
    """Return the names of all transformers classes that generate text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names: list[Any] = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()]
    return {name for name in names if isinstance(name, str)}


def _make_spec(name: str, config: Any, architecture: str, ends: list[int]) -> ModelSpec:
    text = config.get_text_config(decoder=True)
    stored = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    hidden = _find(text, ("hidden_size", "d_model", "n_embd", "emb_dim"), 1)
    heads = _find(text, ("num_attention_heads", "decoder_attention_heads", "n_heads"), 1)
    ends = [*_list_ids(getattr(text, "eos_token_id", None)), *ends]
    return ModelSpec(
        name=name,
        model_type=config.model_type,
        architecture=architecture,
        num_layers=_find(text, ("num_hidden_layers", "decoder_layers", "n_layers"), 1),
        num_heads=heads,
        num_kv_heads=_find(text, ("num_key_value_heads",), heads),
        head_dim=_find(text, ("head_dim",), max(hidden // heads, 1)),
        hidden_size=hidden,
        intermediate_size=_find(text, ("intermediate_size", "ffn_dim"), hidden),
        vocab_size=_find(text, ("decoder_vocab_size", "vocab_size"), 1),
        max_position_embeddings=_find(text, LENGTHS, UNBOUNDED_CONTEXT),
        tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        checkpoint_dtype=stored if stored in DTYPE_BYTES else "float32",
        eos_token_ids=tuple(dict.fromkeys(ends)),
        bos_token_id=next(iter(_list_ids(getattr(text, "bos_token_id", None))), None),
        pad_token_id=next(iter(_list_ids(getattr(text, "pad_token_id", None))), None),
    )


def _find(config: Any, names: tuple[str, ...], default: int) -> int:
    """Return the first of the fields that is a positive number; a field that differs by layer is
    skipped.
    """
    for name in names:
        value = _read(config, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return default


def _read(config: Any, name: str) -> object:
    try:
        return getattr(config, name, None)
    except Exception:  # noqa: BLE001 - a field that differs by layer raises when it is read
        return None


def _list_ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
