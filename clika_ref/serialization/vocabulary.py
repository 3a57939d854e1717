"""All names in saved files: keys of documents, prefixes of tensor names, and values from a fixed set.

Writers and readers take every name from here. A rename makes older files unreadable: raise
`clika_ref.serialization.container.FILE_FORMAT` with it. ``tests/serialization/test_stored_vocabulary.py`` pins them.
"""

from __future__ import annotations

from enum import StrEnum


class StoredName(StrEnum):
    """A name in a file; messages show it as a plain string."""

    def __repr__(self) -> str:
        return repr(self.value)


class FileKey(StoredName):
    """Metadata of the file, and the name of the tensor with the document."""

    HEAD = "clika"
    DIGEST = "clika_digest"
    FORMAT = "format"
    DOCUMENT = "clika/document"


class ModuleKey(StoredName):
    """The document of a module: the first six in ``_extra_state`` too, the others in files of ``clika_save``."""

    GRAPH = "graph"
    SIGNATURE = "signature"
    PERSISTENT = "persistent"
    PARAMETERS = "parameters"
    SIZES = "sizes"
    BATCH_NORM = "batch_norm"
    QUANTIZATION = "quantization"
    QUANTIZED_WEIGHTS = "quantized_weights"
    PLUGINS = "plugins"
    TRAINING = "training"
    OPTIONS = "options"
    DEPLOYMENT = "deployment"
    REQUEST = "request"
    CALIBRATION = "calibration"


class PartialKey(StoredName):
    """The pieces of a model: in files of ``PartialClikaModule.clika_save``, and in manifests of exported folders."""

    FORMAT = "format"
    FUNCTION = "function"
    SOURCES = "sources"
    IS_ONE_SPECIAL = "is_one_special"
    LIBRARY_MODULES = "library_modules"
    IS_TRAINING = "is_training"
    BREAKS = "breaks"
    PIECES = "pieces"
    KEY = "key"
    EAGER_REASON = "eager_reason"
    TARGET = "target"
    FILE = "file"
    INPUT_NAMES = "input_names"
    OUTPUT_NAMES = "output_names"
    DIGESTS = "digests"


class RequestKey(StoredName):
    """The user's choices that a plan was decided from."""

    SETTINGS = "settings"
    LAYERS = "layers"
    OPTIONS = "options"


class QuantizationKey(StoredName):
    """The quantization of a module."""

    TARGET = "target"
    PLAN = "plan"
    MODEL = "model"


class PlanKey(StoredName):
    """A plan. The last seven are also the prefixes of its tensors, ``<prefix>.<layer or activation>``."""

    VERSION = "version"
    ACTIVATION_TYPE = "activation_type"
    WEIGHT_TYPE = "weight_type"
    INT32_BIAS = "int32_bias"
    INT32_BIAS_2D_OR_STATIC = "int32_bias_2d_or_static"
    SHARED_QPARAMS = "shared_qparams"
    IS_ALL_OR_NONE_QUANTIZED = "is_all_or_none_quantized"
    LOOKUPS = "lookups"
    QPARAMS = "qparams"
    DYNAMIC = "dynamic"
    ROUNDED_INPUTS = "rounded_inputs"
    FLOATS = "floats"
    SCALE_SOURCES = "scale_sources"
    WEIGHTS = "weights"
    GPTQ = "gptq"
    CORRECTIONS = "corrections"
    SMOOTHING = "smoothing"
    NORMS = "norms"
    PACKED_WEIGHTS = "packed_weights"
    PACKED_GPTQ = "packed_gptq"


class StoredWeightKey(StoredName):
    """A weight in quantized form."""

    LAYER = "layer"
    BITS = "bits"
    SHAPE = "shape"
    STEPS = "steps"


class StoredWeightStep(StoredName):
    """The steps that restore a parameter from its quantized form."""

    MULTIPLY = "multiply"
    LAYOUT = "layout"


class CalibrationKey(StoredName):
    """A calibration; the last two are names of tensors, ``inputs.<batch>.<input>`` for kept inputs."""

    MODEL = "model"
    RANGES = "ranges"
    IS_FULL = "is_full"
    IS_COMPLETE = "is_complete"
    SIZES = "sizes"
    INPUTS = "inputs"
    COUNT_BYTE_PLANES = "count_byte_planes"


class RangesKey(StoredName):
    """A range table; ``counts`` and ``smoothing.<activation>`` are names of tensors."""

    FILE = "clika_ranges"
    VERSION = "version"
    MODEL = "model"
    BATCHES = "batches"
    FIRST = "first"
    SMOOTHING = "smoothing"
    SMOOTHING_PURPOSE = "smoothing_purpose"
    ACTIVATIONS = "activations"
    COUNTS = "counts"


class StatisticsKey(StoredName):
    """The statistics of one activation."""

    LOW = "low"
    HIGH = "high"
    BATCHES = "batches"
    LOWS = "lows"
    HIGHS = "highs"
    EXPONENT = "exponent"
    UNBOUNDED = "unbounded"


class GraphKey(StoredName):
    """A graph."""

    VERSION = "version"
    NAME = "name"
    INPUTS = "inputs"
    CONSTANTS = "constants"
    CONSTANT_TYPES = "constant_types"
    ALIASES = "aliases"
    SYMBOLS = "symbols"
    GUARDS = "guards"
    NODES = "nodes"
    OUTPUTS = "outputs"
    STATE = "state"


class AttributeForm(StoredName):
    """The form of an attribute that JSON lacks, and of an operand that is a value."""

    VALUE = "value"
    FLOAT = "float"
    COMPLEX = "complex"
    TUPLE = "tuple"
    LIST = "list"
    DICT = "dict"
    DTYPE = "dtype"
    DEVICE = "device"
    EXPRESSION = "expr"
    ENUM = "enum"


class ExpressionHead(StoredName):
    """The forms of a size expression that are no function."""

    NUMBER = "number"
    FRACTION = "/"
    BOOL = "bool"
    FLOAT = "float"


class SignatureKey(StoredName):
    """A signature; a default that cannot be serialized is an object with one entry, ``unsaved_default``."""

    PARAMETERS = "parameters"
    ARGUMENTS = "arguments"
    SPECS = "specs"
    LEAVES = "leaves"
    OUTPUT_SPEC = "output_spec"
    OUTPUTS = "outputs"
    AUTOCAST = "autocast"
    UNSAVED_DEFAULT = "unsaved_default"


class LeafKind(StoredName):
    """The kinds of leaves in the arguments of a call."""

    TENSOR = "tensor"
    COMPLEX = "complex"
    NUMBER = "number"
    CONSTANT = "constant"


class TensorPrefix(StoredName):
    """Prefixes of tensors other than weights; qualified names of weights contain no slash."""

    RANGES = "clika/ranges/"
    QUANTIZATION = "clika/quantization/"
    FACTORS = "clika/factors/"


class PartialTensorPrefix(StoredName):
    """Prefixes of tensors in files of ``PartialClikaModule.clika_save``: saved pieces, and weights that none has."""

    PIECES = "clika/pieces/"
    WEIGHTS = "clika/weights/"
