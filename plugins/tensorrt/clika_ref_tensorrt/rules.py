"""What TensorRT asks of an ONNX file with integers in it, rule by rule; each names the node and what to do.

Sources: NVIDIA's guides to explicit quantization and quantization schemes (TensorRT 11), its ONNX operator support and
the headers of its builder; the placement that ModelOpt and the tensorflow-quantization toolkit emit.
"""

from __future__ import annotations

import onnx

from clika_ref.violations import Violation
from clika_ref_tensorrt import file_rules, number_rules, placement_rules, unweighted_rules
from clika_ref_tensorrt.onnx_file import OnnxFile
from clika_ref_tensorrt.rule_book import RULES, RULES_OF_FILES

DECLARING = (file_rules, number_rules, placement_rules, unweighted_rules)
"""The modules whose import declares the rules."""


def violations(model: onnx.ModelProto, *, has_weights_alone: bool = False) -> list[Violation]:
    """Return every place where a file breaks a rule, rule by rule.

    Args:
        model: what is in the file; its weights need not be read.
        has_weights_alone: whether weights of 8 bits may be multiplied with floats, as TensorRT-LLM does.
    """
    file = OnnxFile(model, has_weights_alone=has_weights_alone)
    checks = [(name, check, file) for name, check in RULES_OF_FILES.items()]
    checks += [(name, check, graph) for name, check in RULES.items() for graph in (file, *file.within)]
    return [
        Violation(name, (node.name or node.output[0]) if node is not None else "", message)
        for name, check, graph in checks
        for node, message in check(graph)
    ]
