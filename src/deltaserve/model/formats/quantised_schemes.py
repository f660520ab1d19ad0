"""How a quantised folder stores its weights: which tensors make one, of which types and shapes. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from deltaserve.core.errors import ConfigError
from deltaserve.model.fields import Fields
from deltaserve.model.formats.block_forms import WHOLE_LEN
from deltaserve.model.source import TensorHeader

_MAX_BLOCK = 2**16
_SCALE_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One weight of the model."""

    header: TensorHeader
    """Header of the weight as it is once read."""
    parts: tuple[TensorHeader, ...]
    """What it is made from, in the order its scheme says; a plain one from itself."""


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """`quant_method` fp8: float8, and a factor for each block, in `..._scale_inv`. Parts: values, factors."""

    rows: int
    cols: int

    def weight(self, header: TensorHeader, files: Mapping[str, TensorHeader]) -> StoredWeight | None:
        """The weight that a tensor of the files is the first part of; None: it is another part."""
        stem = header.name.removesuffix("_scale_inv")
        if stem != header.name and stem in files and files[stem].dtype == "F8_E4M3":
            return None
        if header.dtype != "F8_E4M3":
            return StoredWeight(header, (header,))
        rows, cols = _matrix(header)
        scale = _part(header, f"{header.name}_scale_inv", files, (-(-rows // self.rows), -(-cols // self.cols)))
        return StoredWeight(replace(header, dtype="F32"), (header, scale))

    def name_of(self, stored: str) -> str:
        """Name of the weight whose first part is stored under that name."""
        return stored

    def kind(self, weight: StoredWeight) -> str | None:
        """A key of STORED_FORMS, where products can take it as it is stored."""
        return None


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """compressed-tensors: int8 or float8 with a factor per row, or one for all, in `..._scale`. Parts: both."""

    dtype: str
    """Type of the values, in the words of safetensors."""

    def kind(self, weight: StoredWeight) -> str | None:
        is_coded = len(weight.parts) > 1 and self.dtype == "I8" and weight.header.shape[1] % WHOLE_LEN == 0
        return "I8" if is_coded else None

    def weight(self, header: TensorHeader, files: Mapping[str, TensorHeader]) -> StoredWeight | None:
        stem = header.name.removesuffix("_scale")
        if stem != header.name and stem in files and files[stem].dtype == self.dtype:
            return None
        if header.dtype != self.dtype:
            return StoredWeight(header, (header,))
        rows, _ = _matrix(header)
        scale = _part(header, f"{header.name}_scale", files, (rows, 1), (1,), ())
        return StoredWeight(replace(header, dtype="F32"), (header, scale))

    def name_of(self, stored: str) -> str:
        return stored


@dataclass(frozen=True, slots=True)
class PackedInts:
    """compressed-tensors: whole numbers side by side in the int32 of `..._packed`, the first in the lowest bits.

    Parts: words, and a factor for each run of columns of a row, in `..._scale`.
    """

    bits: int
    run_len: int | None
    """Columns of a factor; None: all of a row."""

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    def kind(self, weight: StoredWeight) -> str | None:
        is_coded = len(weight.parts) > 1 and (self.run_len or weight.header.shape[1]) % WHOLE_LEN == 0
        return f"I{self.bits}" if is_coded else None

    def weight(self, header: TensorHeader, files: Mapping[str, TensorHeader]) -> StoredWeight | None:
        for suffix in ("_scale", "_shape"):
            stem = header.name.removesuffix(suffix)
            if stem != header.name and f"{stem}_packed" in files:
                return None
        stem = header.name.removesuffix("_packed")
        if stem == header.name:
            return StoredWeight(header, (header,))
        rows, words = _matrix(header)
        cols = words * self.per_word
        run_len = self.run_len or cols
        if header.dtype != "I32" or cols % run_len:
            raise ConfigError(
                f"{header.file}: {header.name[:80]}: {header.dtype} of {cols} columns in runs of {run_len}"
            )
        scale = _part(header, f"{stem}_scale", files, (rows, cols // run_len))
        return StoredWeight(replace(header, name=stem, dtype="F32", shape=(rows, cols)), (header, scale))

    def name_of(self, stored: str) -> str:
        return stored.removesuffix("_packed")


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """`quant_method` mxfp4: experts [E, out, in] as runs of 32 numbers of 4 bits, two in a byte, the first in the low
    bits, in `..._blocks` [E, out, in / 32, 16]; and a power of two for each run in `..._scales` [E, out, in / 32].

    Parts: blocks, scales. The weight is what unquantised files hold: [E, in, out], bfloat16, which has all its values.
    """

    def weight(self, header: TensorHeader, files: Mapping[str, TensorHeader]) -> StoredWeight | None:
        stem = header.name.removesuffix("_scales")
        if stem != header.name and f"{stem}_blocks" in files:
            return None
        stem = header.name.removesuffix("_blocks")
        if stem == header.name:
            return StoredWeight(header, (header,))
        shown = f"{header.file}: {header.name[:80]}"
        if header.dtype != "U8" or len(header.shape) != 4 or header.shape[3] * 2 != MXFP4_RUN:
            raise ConfigError(
                f"{shown} is {header.dtype} {list(header.shape)}, expected U8 [.., .., .., {MXFP4_RUN // 2}]"
            )
        scales = files.get(f"{stem}_scales")
        if scales is None:
            raise ConfigError(f"{shown} is quantised, and {stem[-70:]}_scales is missing")
        if scales.dtype != "U8" or scales.shape != header.shape[:3]:
            found = f"{scales.dtype} {list(scales.shape)}"
            raise ConfigError(f"{scales.file}: {scales.name[:80]} is {found}, expected U8 {list(header.shape[:3])}")
        count, rows, runs = header.shape[:3]
        whole = replace(header, name=stem, dtype="BF16", shape=(count, runs * MXFP4_RUN, rows))
        return StoredWeight(whole, (header, scales))

    def name_of(self, stored: str) -> str:
        return stored.removesuffix("_blocks")

    def kind(self, weight: StoredWeight) -> str | None:
        return None


MXFP4_RUN = 32
"""Numbers that share one scale."""
WeightScheme = Fp8Blocks | ScaledRows | PackedInts | Mxfp4Experts


def weight_scheme(config: Fields) -> WeightScheme | None:
    """Scheme of a folder's config.json; None: nothing is quantised. Raises ConfigError naming what is not supported."""
    if not config.has("quantization_config"):
        return None
    fields = config.table("quantization_config")
    if not fields.has("quant_method"):
        algorithm = fields.text("quant_algo", "not named")
        raise ConfigError(f"{fields.where}: quant_method is missing (quant_algo: {algorithm[:40]}): not supported")
    match fields.text("quant_method"):
        case "fp8":
            return _fp8_blocks(fields)
        case "compressed-tensors":
            return _compressed(fields)
        case "mxfp4":
            return Mxfp4Experts()
        case method:
            raise ConfigError(f"{fields.where}: weights quantised as {method[:40]!r} are not supported")


def refuse_modelopt(quantisation: Fields) -> None:
    """`quantisation`: of hf_quant_config.json, beside a config.json that says nothing of it."""
    fields = quantisation.table("quantization")
    if fields.has("quant_algo"):
        algorithm = fields.text("quant_algo")[:40]
        raise ConfigError(f"{quantisation.where}: weights quantised as {algorithm} of modelopt are not supported")


def _fp8_blocks(fields: Fields) -> Fp8Blocks:
    if fields.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise fields.error("fmt", "e4m3")
    if fields.text("activation_scheme", "dynamic") != "dynamic":
        raise fields.error("activation_scheme", "dynamic")
    sizes = fields.integers("weight_block_size")
    if len(sizes) != 2 or not all(1 <= size <= _MAX_BLOCK for size in sizes):
        raise fields.error("weight_block_size", "rows and columns of a block")
    return Fp8Blocks(*sizes)


def _compressed(fields: Fields) -> ScaledRows | PackedInts:
    groups = fields.table("config_groups").values
    if len(groups) != 1:
        raise fields.error("config_groups", "one group")
    group = fields.table("config_groups").table(next(iter(groups)))
    form, weights = group.text("format", fields.text("format", "unknown")), group.table("weights")
    bits, strategy = weights.integer("num_bits", 1, 64), weights.text("strategy")
    found = f"{weights.text('type')}{bits} by {strategy}"
    if not weights.flag("symmetric", True):
        raise weights.error("symmetric", "true")
    if weights.values.get("actorder") not in (None, False, "static", "weight"):
        raise weights.error("actorder", "none")
    if fields.table("sparsity_config").text("format", "dense") != "dense":
        raise fields.table("sparsity_config").error("format", "dense")
    match form, found:
        case "int-quantized", "int8 by channel" | "int8 by tensor":
            return ScaledRows("I8")
        case "float-quantized", "float8 by channel" | "float8 by tensor":
            return ScaledRows("F8_E4M3")
        case "pack-quantized", "int4 by channel" | "int8 by channel":
            return PackedInts(bits, None)
        case "pack-quantized", "int4 by group" | "int8 by group":
            return PackedInts(bits, weights.integer("group_size", 1, _MAX_BLOCK))
    raise ConfigError(f"{fields.where}: weights in {form[:40]!r}, {found[:60]}, are not supported")


def stored_weights(headers: Sequence[TensorHeader], scheme: WeightScheme) -> Iterator[StoredWeight]:
    """The weights that the tensors of all files make, in their order. Raises ConfigError naming file and tensor."""
    files = {header.name: header for header in headers}
    for header in headers:
        weight = scheme.weight(header, files)
        if weight is not None:
            yield weight


def _matrix(header: TensorHeader) -> tuple[int, int]:
    if len(header.shape) != 2:
        raise ConfigError(f"{header.file}: {header.name[:80]} is quantised, and no matrix: {list(header.shape)}")
    return header.shape[0], header.shape[1]


def _part(of: TensorHeader, name: str, files: Mapping[str, TensorHeader], *shapes: tuple[int, ...]) -> TensorHeader:
    """The factors of a quantised tensor, of one of the shapes."""
    part = files.get(name)
    if part is None:
        raise ConfigError(f"{of.file}: {of.name[:80]} is quantised, and {name[-80:]} is missing")
    shown = f"{part.file}: {name[:80]}"
    if part.dtype not in _SCALE_DTYPES:
        raise ConfigError(f"{shown} has dtype {part.dtype}, expected one of {', '.join(_SCALE_DTYPES)}")
    if part.shape not in shapes:
        raise ConfigError(f"{shown} has shape {list(part.shape)}, expected {list(shapes[0])}")
    return part
