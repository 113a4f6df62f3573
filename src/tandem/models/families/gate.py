"""The gate before any weight is read: the conditions that a configuration must meet.

A configuration that needs something that no operator does (another architecture, another
activation, an unknown quantization or RoPE) is refused with the field's name. An accepted one is
described by a ``ModelSpec``; transformers' own config class fills in defaults, so that both agree.
"""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.core.errors import ConfigError, CorruptionError, NotFoundError, UnsupportedError
from tandem.core.spec import DTYPE_BYTES, ModelSpec
from tandem.models.families.refused import UNEVEN, UNEVEN_BY_TYPE, find_refusal
from tandem.models.families.registry import (
    FAMILIES,
    Family,
    classifies,
    find_family,
    take_decoder,
)
from tandem.models.loading.hub import resolve_folder
from tandem.models.planning.quantization import (
    MODELOPT_FILE,
    Quantization,
    read_quantization,
    take_modelopt,
)
from tandem.models.sources.foreign import refuse_foreign_files
from tandem.models.tokenizing.settings import find_end_id

__all__ = [
    "LAYER_TYPES",
    "ROPE_TYPES",
    "Checkpoint",
    "head_dim_of",
    "open_checkpoint",
    "read_json",
]

MAX_JSON_BYTES = 16 << 20
MAX_LAYERS, MAX_SIZE, MAX_EXPERTS = 2048, 1 << 24, 1 << 16
"""Largest plausible numbers of layers, elements of a size, and experts: a configuration beyond them
is broken, and refusing it bounds what we allocate.
"""

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
LAYER_TYPES = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
    "linear_attention",
    "conv",
    "mlp",
    "moe",
)

MODELS_PAGE = "docs/reference/models.md"
"""Page of supported models, generated from the tables in this module."""
SPECIAL_METHODS = ("mxfp4",)
"""Quantization methods that a family must list in its ``expert_formats``."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names under which configurations store the number of routed experts."""
CLOSE_NAME = 0.6
"""Ratio of difflib's comparison from which two model names count as similar: qwen2 and qwen3 are,
bert and llama are not.
"""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose configuration was read and accepted, not yet its weights."""

    folder: Path
    """Folder of the checkpoint, or its GGUF file."""
    config: Any
    """transformers' configuration object."""
    spec: ModelSpec
    """Description from the configuration alone; ``tandem.models.planning.roles`` completes it."""
    quantization: Quantization | None = None
    """Quantization of the weights; None: they are not quantized."""


def open_checkpoint(path_or_id: str | Path) -> Checkpoint:
    """Read and check the configuration of a checkpoint.

    Raises:
        NotFoundError: no such folder or snapshot, or no ``config.json`` in it.
        CorruptionError: a JSON file does not parse.
        ConfigError: a value is missing or out of bounds.
        UnsupportedError: the model is not supported; the text says what and why.
    """
    path = resolve_folder(path_or_id)
    refuse_foreign_files(path)
    folder, raw, ends = _read_config(path)
    raw = take_decoder(raw)
    family = _check_family(raw)
    quantization = _check_quantization(raw, family)
    config = _build_config(raw, family)
    _check_config(config, family, raw)
    is_local = Path(path_or_id).expanduser().exists()
    name = folder.resolve().name.removesuffix(".gguf") if is_local else str(path_or_id)
    spec = _make_spec(name, config, family, ends)
    return Checkpoint(folder, config, spec, quantization)


def _read_config(path: Path) -> tuple[Path, dict[str, Any], list[int]]:
    """Return the weights' place, the configuration, and the ids that end a text by other files.

    A folder's own files have precedence over the metadata of a GGUF file in it.
    """
    config = path / "config.json"
    if path.is_dir() and config.is_file():
        raw: dict[str, Any] = _restore_floats(read_json(config))
        other = path / MODELOPT_FILE
        if other.is_file() and raw.get("quantization_config") is None:
            raw["quantization_config"] = take_modelopt(read_json(other))
        return path, raw, list_ends(path)
    from tandem.models.gguf.config import read_gguf_config
    from tandem.models.sources.gguf_files import find_gguf

    file = find_gguf(path)
    if file is None:
        return path, read_json(config), []
    raw, ends = read_gguf_config(file)
    return file, raw, ends + (list_ends(path) if path.is_dir() else [])


FLOAT_KEY = "__float__"
"""Key by which transformers writes numbers that JSON lacks, such as infinity: an object with only
this key.
"""


def _restore_floats(value: Any) -> Any:
    """Replace transformers' objects for infinities and NaN in a JSON value by these numbers."""
    if isinstance(value, list):
        return [_restore_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {FLOAT_KEY} and value[FLOAT_KEY] in ("Infinity", "-Infinity", "NaN"):
        return float(value[FLOAT_KEY])
    return {key: _restore_floats(item) for key, item in value.items()}


def list_ends(folder: Path) -> list[int]:
    """Return the ids that end a text by the files beside a folder's ``config.json``: those of
    ``generation_config.json``, then the tokenizer's own.

    Raises: CorruptionError or ConfigError (a file does not parse).
    """
    path = folder / "generation_config.json"
    ends = _as_ids(read_json(path).get("eos_token_id")) if path.is_file() else []
    own = find_end_id(folder)
    return ends if own is None else [*ends, own]


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a small file.

    Raises: NotFoundError (no such file); CorruptionError (it is too large, or not a JSON object).
    """
    where = "models.read_config"
    if not path.is_file():
        raise NotFoundError(where, f"{path} does not exist: is this the folder of a checkpoint?")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise CorruptionError(
            where, f"{path} has {path.stat().st_size} bytes, more than {MAX_JSON_BYTES}"
        )
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptionError(where, f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptionError(where, f"{path} holds a {type(value).__name__}, not an object")
    return value


def _refuse(what: str, field: str) -> UnsupportedError:
    text = f"{what}; {MODELS_PAGE} lists what runs"
    return UnsupportedError("models.check_config", text, field=field)


def _refuse_bound(name: str, value: object, most: int) -> ConfigError:
    text = f"{name} is {value!r}: need 1 to {most}"
    return ConfigError("models.check_config", text, field=name)


def _find_nearest(model_type: str, raw: dict[str, Any]) -> Family:
    """Return the supported family most similar to a model: with experts or without, then by
    name.
    """
    inner = raw.get("text_config")
    places = [raw, inner] if isinstance(inner, dict) else [raw]
    counts = [place.get(name) for place in places for name in EXPERT_COUNTS]
    is_moe = any(isinstance(count, int) and count > 1 for count in counts)
    kin = {name: family for name, family in FAMILIES.items() if family.is_moe == is_moe}
    close = difflib.get_close_matches(model_type, kin, n=1, cutoff=CLOSE_NAME)
    # Without a close name, suggest llama or qwen3_moe: most families are variants of one of the
    # two.
    return kin[close[0]] if close else FAMILIES["qwen3_moe" if is_moe else "llama"]


def _check_family(raw: dict[str, Any]) -> Family:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(
            "models.check_config", f"model_type is {model_type!r}: need a name", field="model_type"
        )
    nearest = _find_nearest(model_type, raw)
    hint = f"the nearest supported family is {nearest.model_type} ({nearest.architecture})"
    refusal = find_refusal(raw)
    if refusal is not None:
        raise _refuse(f"{refusal[1]}; {hint}", refusal[0])
    family = find_family(model_type)
    if family is None:
        raise _refuse(f"model_type {model_type!r} is not supported: {hint}", "model_type")
    architectures = raw.get("architectures") or [family.architecture]
    known = [name for name in (family.architecture, family.classifier) if name]
    if len(architectures) != 1 or architectures[0] not in known:
        raise _refuse(
            f"architectures {architectures} of {model_type}: need one of {', '.join(known)}",
            "architectures",
        )
    return family


def _check_quantization(raw: dict[str, Any], family: Family) -> Quantization | None:
    quantization = read_quantization(raw)
    if quantization is None:
        return None
    # mxfp4 is the storage of one family's experts: other families do not use it, and that family
    # stores its experts in no other quantized format.
    is_special = quantization.method in SPECIAL_METHODS
    if (is_special or family.expert_formats) and quantization.method not in family.expert_formats:
        raise _refuse(
            f"a checkpoint of {family.model_type} that is quantized by {quantization.method} is "
            "not read here: use one in bfloat16, float16 or float32",
            "quantization_config",
        )
    return quantization


def _build_config(raw: dict[str, Any], family: Family) -> Any:
    from huggingface_hub.errors import (
        StrictDataclassClassValidationError,
        StrictDataclassFieldValidationError,
    )
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    num_layers = raw.get("num_hidden_layers")
    if isinstance(num_layers, int) and num_layers > MAX_LAYERS:
        # The number of layers is checked before transformers' configuration class makes a list with
        # one entry per layer.
        raise _refuse_bound("num_hidden_layers", num_layers, MAX_LAYERS)
    if raw.get("architectures") == [family.classifier]:
        # A classifier's head does not project to tokens, so it is never tied to the embedding,
        # whatever the file says.
        raw = raw | {"tie_word_embeddings": False}
    scaling = raw.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("type") == "su":
        # The name that Phi-3's first files have for it, which transformers' checks do not know.
        raw = raw | {"rope_scaling": scaling | {"type": "longrope"}}
    try:
        return CONFIG_MAPPING[family.config_type or family.model_type].from_dict(dict(raw))
    except (
        StrictDataclassFieldValidationError,
        StrictDataclassClassValidationError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        text = " ".join(str(error).split())
        raise ConfigError("models.check_config", f"config.json is not valid: {text}") from error


REQUIRED = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "rope_parameters",
)
"""Fields that a decoder's configuration must have."""


def _require_decoder(config: Any, family: Family, raw: dict[str, Any]) -> None:
    # A file may have fields that its configuration class does not define; such fields say nothing
    # about the modules.
    known = {*type(config).__dataclass_fields__, *type(config).attribute_map}
    one = take_layer(config)
    missing = [name for name in REQUIRED if name not in known or getattr(one, name) is None]
    if "intermediate_size" in missing and getattr(config, "moe_intermediate_size", None):
        missing.remove("intermediate_size")  # All its layers have experts.
    if missing and family.model_type not in FAMILIES:
        nearest = _find_nearest(family.model_type, raw)
        raise _refuse(
            f"model_type {family.model_type!r} is not supported, its configuration has no "
            f"{', '.join(missing)}: the nearest supported family is {nearest.model_type} "
            f"({nearest.architecture})",
            "model_type",
        )


def _check_config(config: Any, family: Family, raw: dict[str, Any]) -> None:
    if not _is_even(config):
        # Some configuration classes derive per_layer_config from their own fields, and reading
        # those of layers that differ raises an error.
        raise _refuse(f"{family.model_type}: {UNEVEN}", "per_layer_config")
    _require_decoder(config, family, raw)
    problem = None if family.find_problem is None else family.find_problem(config)
    if problem is not None:
        raise _refuse(problem[1], problem[0])
    _check_bounds(config)
    window = getattr(config, "sliding_window", None)
    layer_types: list[str] = getattr(config, "layer_types", None) or []
    is_used = not layer_types or "sliding_attention" in layer_types
    if is_used and window is not None and (type(window) is not int or not 1 <= window < 1 << 31):
        raise ConfigError(
            "models.check_config",
            f"sliding_window is {window!r}: need a number of tokens",
            field="sliding_window",
        )
    unknown = sorted(set(layer_types) - set(LAYER_TYPES))
    if unknown:
        raise _refuse(f"layer_types {unknown}: known are {', '.join(LAYER_TYPES)}", "layer_types")
    if "sliding_attention" in layer_types and window is None:
        raise ConfigError(
            "models.check_config",
            "layers of sliding_attention, and sliding_window is None",
            field="sliding_window",
        )
    chunk = getattr(config, "attention_chunk_size", None)
    is_chunked = "chunked_attention" in layer_types
    if is_chunked and (type(chunk) is not int or not 1 <= chunk < 1 << 31):
        raise ConfigError(
            "models.check_config",
            f"attention_chunk_size is {chunk!r}: need a number of tokens",
            field="attention_chunk_size",
        )
    _check_rope(config)


def take_layer(config: Any) -> Any:
    """Return a configuration whose fields can be read: itself, or its last layer's if layers
    differ.
    """
    if not getattr(config, "is_heterogeneous", False):
        return config
    return config.per_layer_config[config.num_hidden_layers - 1]


def _is_even(config: Any) -> bool:
    """Return True if layers of the same type have the same values of all configuration fields."""
    if not getattr(config, "is_heterogeneous", False):
        return True
    if not config.per_layer_attributes <= set(UNEVEN_BY_TYPE.get(config.model_type, ())):
        return False
    try:
        for kind in set(config.layer_types):
            config.per_layer_config[kind]
    except ValueError:
        return False
    return True


def _check_rope(config: Any) -> None:
    ropes: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    is_layered = any(isinstance(value, dict) for value in ropes.values())
    for name, rope in ropes.items() if is_layered else [("", ropes)]:
        where = f"rope_parameters.{name}." if name else "rope_parameters."
        if not isinstance(rope, dict):
            # One type of layer has no RoPE, while other layers of the model have.
            field = where.rstrip(".")
            raise _refuse(f"{field} is {rope!r}: layers without rotation do not run", field)
        rope_type = rope.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise _refuse(
                f"rope_type {rope_type!r}: known are {', '.join(ROPE_TYPES)}", f"{where}rope_type"
            )
        share = rope.get("partial_rotary_factor")
        if share is not None and not (isinstance(share, (int, float)) and 0 < share <= 1):
            field = f"{where}partial_rotary_factor"
            raise ConfigError("models.check_config", f"{field} {share!r}: need 0 to 1", field=field)
        if rope_type == "longrope":
            _check_longrope(config, rope, where)


def _check_longrope(config: Any, rope: dict[str, Any], where: str) -> None:
    """Check a LongRoPE's original length and its two lists of factors, of which transformers builds
    modules without looking.

    Raises: ConfigError.
    """
    longest, key = config.max_position_embeddings, "original_max_position_embeddings"
    original = rope.get(key)
    if type(original) is not int or not 2 <= original <= longest:
        field = f"{where}{key}"
        what = f"{field} is {original!r}: need 2 to {longest}, max_position_embeddings"
        raise ConfigError("models.check_config", what, field=field)
    one = take_layer(config)
    size = getattr(one, "qk_rope_head_dim", None) or head_dim_of(one)
    count = int(size * (rope.get("partial_rotary_factor") or 1.0)) // 2
    for key in ("short_factor", "long_factor"):
        given, field = rope.get(key), f"{where}{key}"
        factors: list[object] = given if isinstance(given, list) else []
        is_above = all(isinstance(f, (int, float)) and 0 < f < MAX_SIZE for f in factors)
        if len(factors) != count or not is_above:
            what = f"{field}: need {count} numbers above 0, one for each rotated pair"
            raise ConfigError("models.check_config", what, field=field)


OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def _count_experts(config: Any) -> int | None:
    counts = [getattr(config, name, None) for name in EXPERT_COUNTS]
    return next((count for count in counts if isinstance(count, int)), None)


def _check_bounds(config: Any) -> None:
    layers = list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else []
    for one in layers or [config]:
        _check_layer_bounds(one)


def _check_layer_bounds(config: Any) -> None:
    bounds = {
        "num_hidden_layers": MAX_LAYERS,
        "num_attention_heads": MAX_EXPERTS,
        "num_key_value_heads": MAX_EXPERTS,
        "hidden_size": MAX_SIZE,
        "intermediate_size": MAX_SIZE,
        "vocab_size": MAX_SIZE,
        "max_position_embeddings": 1 << 31,
        "num_experts": MAX_EXPERTS,
        "num_experts_per_tok": MAX_EXPERTS,
        "moe_intermediate_size": MAX_SIZE,
    }
    for name, most in bounds.items():
        value = getattr(config, name, 1)
        if value is None and name in OF_EXPERTS and _count_experts(config) is None:
            continue  # A class with experts on request, which this model does not ask for.
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise _refuse_bound(name, value, most)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if not 2 <= head_dim_of(config) <= MAX_EXPERTS or head_dim_of(config) % 2:
        raise ConfigError(
            "models.check_config",
            f"head_dim {head_dim_of(config)}: need an even one up to {MAX_EXPERTS}",
            field="head_dim",
        )
    if heads % kv_heads:
        raise ConfigError(
            "models.check_config",
            f"{heads} heads over {kv_heads} KV heads: the first must be a multiple of the second",
            field="num_key_value_heads",
        )
    num_experts, top_k = _count_experts(config), getattr(config, "num_experts_per_tok", 1)
    if num_experts and top_k > num_experts:
        raise ConfigError(
            "models.check_config",
            f"{top_k} of {num_experts} experts per token",
            field="num_experts_per_tok",
        )


def head_dim_of(config: Any) -> int:
    """Return the size of a head, computed if the configuration does not state it."""
    stated = getattr(config, "head_dim", None)
    return config.hidden_size // config.num_attention_heads if stated is None else stated


def _as_ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]


def _make_spec(name: str, config: Any, family: Family, ends: list[int]) -> ModelSpec:
    stored = str(config.dtype or "float32").removeprefix("torch.")
    if stored not in DTYPE_BYTES:
        raise _refuse(f"dtype {stored!r}: known are {', '.join(DTYPE_BYTES)}", "dtype")
    eos = dict.fromkeys(_as_ids(config.eos_token_id) + ends)
    return ModelSpec(
        name=name,
        model_type=family.model_type,
        architecture=family.classifier if classifies(config) else family.architecture,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=take_layer(config).num_key_value_heads,
        head_dim=head_dim_of(take_layer(config)),
        hidden_size=config.hidden_size,
        intermediate_size=_find_intermediate(config),
        vocab_size=config.vocab_size,
        num_labels=config.num_labels if classifies(config) else 0,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        rope_type=_name_rope(getattr(config, "rope_parameters", None) or {}),
        checkpoint_dtype=stored,
        eos_token_ids=tuple(eos),
        bos_token_id=config.bos_token_id,
        pad_token_id=config.pad_token_id,
    )


def _find_intermediate(config: Any) -> int:
    """Return the width of a dense MLP; for a model without one, of its shared or routed experts."""
    names = ("intermediate_size", "shared_expert_intermediate_size", "moe_intermediate_size")
    return next(size for name in names if (size := getattr(config, name, None)))


def _name_rope(ropes: dict[str, Any]) -> str:
    """Return the type of a model's RoPE; if there are several, all distinct ones."""
    places = [value for value in ropes.values() if isinstance(value, dict)] or [ropes]
    return " and ".join(dict.fromkeys(place.get("rope_type", "default") for place in places))
